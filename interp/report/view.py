"""What the report needs to know of one analyzer; the rest of it is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from interp.report.browser import Browser
from interp.report.words import number
from interp.results import Result


@dataclass(frozen=True)
class Digest:
    """A small ready-made table of strings, drawn from a summary or a large table.

    Attributes:
        title: what it shows, with the unit.
        head: column headings.
        rows: cells; the first of a row is its label.
        note: one line below it.
        terminal: whether it is worth its lines in a terminal too.
        page: False where the page shows the same in another way.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    terminal: bool = True
    page: bool = True


@dataclass(frozen=True)
class Grid:
    """A table with a number for every pair of tokens of a text.

    Attributes:
        table: its name.
        noun: what has one number per pair.
        by: columns that name it.
        asks: columns of the position and the token that asks.
        asked: columns of the position and the token that is asked.
        values: columns of the numbers, the one to show first first.
    """

    table: str
    noun: str
    by: tuple[str, ...]
    asks: tuple[str, str]
    asked: tuple[str, str]
    values: tuple[str, ...]


def _nothing(result: Result) -> list[Any]:
    return []


def _nothing_together(names: Sequence[str], results: Sequence[Result]) -> list[Digest]:
    return []


@dataclass(frozen=True)
class View:
    """How one analyzer's results are told.

    Attributes:
        question: what was asked, one sentence.
        findings: result -> sentences with numbers, most important first.
        limits: result -> sentences: what the numbers are, and what they are not.
        digests: result -> small tables.
        rank: table -> candidates (column, by magnitude) by which the most informative rows come
            first; the first candidate that the table has is used.
        narrow: table -> function (rows) -> [(heading, cells)], for 80 columns.
        quiet: tables that a digest already tells in a terminal.
        browser: a table on the page whose rows open to examples, in place of those two tables.
        grid: a table of pairs of tokens, to show as token strips.
        compare: result -> (quantity, value with its interval), to set runs side by side.
        together: (names, results) -> small tables of what several results say only together.
    """

    question: str = ""
    findings: Callable[[Result], list[str]] = _nothing
    limits: Callable[[Result], list[str]] = _nothing
    digests: Callable[[Result], list[Digest]] = _nothing
    rank: Mapping[str, tuple[tuple[str, bool], ...]] = field(default_factory=dict)
    narrow: Mapping[str, Callable[[pd.DataFrame], list[tuple[str, list[str]]]]] = field(
        default_factory=dict
    )
    quiet: frozenset[str] = frozenset()
    browser: Browser | None = None
    grid: Grid | None = None
    compare: Callable[[Result], list[tuple[str, str]]] = _nothing
    together: Callable[[Sequence[str], Sequence[Result]], list[Digest]] = _nothing_together


def has(table: pd.DataFrame, column: str) -> bool:
    """Whether the column is there and holds anything."""
    return column in table.columns and bool(table[column].notna().any())


def ranked(view: View, name: str, table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The table with its most informative rows first, and that order in words."""
    for column, magnitude in view.rank.get(name, ()):
        if has(table, column):
            key = (lambda values: values.abs()) if magnitude else None
            words = f"largest {column}{' in magnitude' if magnitude else ''} first"
            # Rows without the number come last.
            return table.sort_values(by=column, ascending=False, kind="stable", key=key), words
    return table, "in the order measured"


def first_number(*values: Any) -> float | None:
    """The first of these that is a finite number."""
    return next((found for value in values if (found := number(value)) is not None), None)

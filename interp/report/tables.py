"""Results in a terminal: 80 columns, most informative rows first, then what they say in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from interp.report.view import Digest, View, ranked
from interp.report.views import view_of
from interp.report.words import (
    DASH,
    INTERRUPTED,
    count,
    interruption,
    isolated,
    model_name,
    other_notices,
    plain,
    sample,
    visible,
)
from interp.results import Column, Result

_STYLES = {"material": "bold red", "undecided": "dim"}
_GAP = 2  # between columns
_CELL = 24  # characters of foreign text in one cell


def print_result(
    result: Result, rows: int = 20, console: Console | None = None, notices: bool = True
) -> None:
    """Print a result.

    Args:
        result: what to print.
        rows: rows per table; the whole of it is in the run's parquet files. 0: no tables.
        console: where to; stdout by default. Colour only on a terminal, and not under NO_COLOR.
        notices: False where they have been shown already.
    """
    out = console or Console(highlight=False)
    view = view_of(result)
    title = " | ".join(
        part for part in (result.analyzer, isolated(model_name(result)), sample(result)) if part
    )
    say(out, title, style="bold")
    if stopped := interruption(result):
        told = stopped.replace(INTERRUPTED, INTERRUPTED.upper(), 1)
        say(out, isolated(visible(told, 1000)), style="bold yellow")
    digests = view.digests(result)
    for name, table in result.tables.items():
        if rows > 0 and not (digests and name in view.quiet):
            _print_table(out, result, view, name, table, rows)
    for digest in digests:
        if digest.terminal:
            _print_digest(out, digest)
    for finding in view.findings(result):
        bullet(out, finding)
    others = other_notices(result)
    if notices and others:
        say(out, "Notices", style="bold yellow")
        for notice in others:
            bullet(out, isolated(visible(notice, 1000)))


def _encodable(out: Console, text: str) -> str:
    # Under LC_ALL=C and on old Windows consoles a character that cannot be written would end the
    # program.
    encoding = out.encoding or "utf-8"
    if not encoding.lower().startswith("utf"):
        text = text.replace(DASH, "-")
    return text.encode(encoding, "backslashreplace").decode(encoding)


def encoded(out: Console, text: str, style: str = "") -> Text:
    """Plain text as this console can write it."""
    return Text(_encodable(out, text), style=style)  # Text, since a str would be read as markup


def say(out: Console, text: str, style: str = "") -> None:
    """One paragraph."""
    out.print(encoded(out, text, style), soft_wrap=False)


def bullet(out: Console, text: str) -> None:
    """One entry of a list."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(overflow="fold")
    grid.add_row("-", encoded(out, text))
    out.print(grid)


def _print_table(
    out: Console, result: Result, view: View, name: str, table: pd.DataFrame, rows: int
) -> None:
    if table.empty:
        say(out, f"{name}: no rows.")
        return
    table, order = ranked(view, name, table)
    shown = table.head(rows)
    columns = (
        view.narrow[name](shown) if name in view.narrow else _columns(shown, result.columns[name])
    )
    fitting = _fit(columns, out.width)
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading, cells in fitting:
        numeric = all(cell[:1] in "+-0123456789[" + DASH for cell in cells)
        grid.add_column(
            encoded(out, heading, "bold"), justify="right" if numeric else "left", no_wrap=True
        )
    for i in range(len(shown)):
        cells = [column[1][i] for column in fitting]
        grid.add_row(*(encoded(out, cell, _STYLES.get(cell, "")) for cell in cells))
    out.print(Padding(grid, (1, 0, 0, 0)))
    note = f"{count(len(shown))} of {count(len(table))} rows of {name}, {order}"
    hidden = len(table.columns) - len(fitting)
    more = ["head 3.1 is layer 3, head 1"] if fitting[0][0] == "head" else []
    more += [f"--rows {len(table)} shows all"] if len(shown) < len(table) else []
    more += [f"all {len(table.columns)} columns are in {name}.parquet"] if hidden > 0 else []
    say(out, "; ".join([note, *more]) + ".\n", style="dim")


def _columns(table: pd.DataFrame, described: dict[str, Column]) -> list[tuple[str, list[str]]]:
    return [
        (f"{name}\n({described[name].unit})", [cell(value) for value in table[name]])
        for name in table.columns
    ]


def cell(value: Any) -> str:
    """One value of any table, for a narrow column."""
    value = plain(value)
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if isinstance(value, int) else _short(value)


def _short(value: Any) -> str:
    shown = visible(str(value)[: _CELL + 1])  # cut first: a token may be as long as a document
    if cell_len(shown) > _CELL:
        shown = set_cell_size(shown, _CELL - 2) + ".."
    return isolated(shown)


def _fit(columns: Sequence[tuple[str, list[str]]], width: int) -> list[tuple[str, list[str]]]:
    """As many of the columns, from the first, as fit side by side."""
    fitting: list[tuple[str, list[str]]] = []
    used = 0
    for heading, cells in columns:
        used += max(cell_len(line) for line in [*heading.split("\n"), *cells]) + _GAP
        if fitting and used - _GAP > width:
            break
        fitting.append((heading, cells))
    return fitting


def _print_digest(out: Console, digest: Digest) -> None:
    say(out, digest.title, style="bold")
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for i, heading in enumerate(digest.head):
        grid.add_column(
            encoded(out, heading, "bold"), justify="right" if i else "left", overflow="fold"
        )
    for row in digest.rows:
        grid.add_row(*(encoded(out, item) for item in row))
    out.print(grid)
    if digest.note:
        say(out, digest.note, style="dim")
    out.print()

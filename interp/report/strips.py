"""Token strips: a text whose tokens are coloured by a number, which a hover or the Tab key shows.

The colour is a tint over whatever the surroundings are, and the letters keep the surroundings' own
colour: a strip is readable in a light and in a dark notebook without knowing which it is in. Zero
has no tint. At most `TINT` of a colour is laid on, which leaves a contrast above 4.5 either way.
"""

from __future__ import annotations

import difflib
import html
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import pandas as pd

from interp.errors import InterpError, UsageError
from interp.report.browser import AFTER, BEFORE, Browser, largest_first, token_length
from interp.report.spec import BLUE, RED
from interp.report.view import Grid
from interp.report.views import view_of
from interp.report.words import plain, visible
from interp.results import Result

TINT = 0.6
ROWS = 10
TOKENS = 600  # of one strip
_LONG = 200  # characters of one token


@dataclass(frozen=True)
class Strip:
    """One text.

    tokens: in order; text between tokens is one too.
    values: a number per token, None where there is none to show.
    label: what the text is, shown before it.
    marked: the token that it is about.
    """

    tokens: tuple[str, ...]
    values: tuple[float | None, ...]
    label: str = ""
    marked: int | None = None


@dataclass(frozen=True, repr=False)
class TokenStrips:
    """Texts that share one scale; a notebook shows them.

    Attributes:
        strips: the texts.
        unit: of the values.
        title: plain text above them.
        note: plain text below them.
        limit: the absolute value that has the full colour; larger ones have it too.
    """

    strips: tuple[Strip, ...]
    unit: str
    title: str = ""
    note: str = ""
    limit: float = 0.0

    def __len__(self) -> int:
        return len(self.strips)

    def __repr__(self) -> str:
        title = f"{visible(self.title, 80)}, " if self.title else ""
        n = sum(v is not None for strip in self.strips for v in strip.values)
        return f"TokenStrips({title}{len(self)} texts, {n} tokens with a number, {self.unit})"

    def _repr_html_(self) -> str:
        """The strips as one piece of HTML that needs no script."""
        css = resources.files("interp.report").joinpath("strip.css").read_text(encoding="utf-8")
        rows = "".join(self._row(strip) for strip in self.strips)
        title = f"<p><b>{_text(self.title)}</b></p>" if self.title else ""
        note = f'<p class="key">{_text(self.note)}</p>' if self.note else ""
        return (
            f'<div class="interp-strips"><style>{css}</style>{title}{self._key()}{rows}{note}</div>'
        )

    def _key(self) -> str:
        """The scale: its ends and its zero, coloured as they are."""
        ends = [-self.limit, 0.0, self.limit] if self._signed else [0.0, self.limit]
        samples = " ".join(
            f'<span class="token" style="{self._style(end)}">&nbsp;{self._number(end)}&nbsp;</span>'
            for end in (ends if self.limit else [0.0])
        )
        return (
            f'<p class="key">{samples} {_text(self.unit)}; hover over a token, or move to it with '
            "the Tab key, for its number</p>"
        )

    @property
    def _signed(self) -> bool:
        return any(v is not None and v < 0 for strip in self.strips for v in strip.values)

    def _number(self, value: float) -> str:
        return f"{value:+.4g}" if self._signed and value else f"{value:.4g}"

    def _style(self, value: float) -> str:
        share = min(1.0, abs(value) / self.limit) if self.limit else 0.0
        red, green, blue = (int((RED if value > 0 else BLUE)[i : i + 2], 16) for i in (1, 3, 5))
        return f"background-color:rgba({red},{green},{blue},{TINT * share:.3f})"

    def _row(self, strip: Strip) -> str:
        shown = min(len(strip.tokens), TOKENS)
        parts = [self._token(strip, i) for i in range(shown)]
        if shown < len(strip.tokens):
            parts.append(f" ... ({len(strip.tokens) - shown:,} more tokens)")
        # <bdi> keeps a token's letters from reordering its neighbours, and hides its direction from
        # dir="auto"; so the text's own is found here.
        direction = _direction(strip.tokens[:shown])
        label = f"<p class='key'>{_text(strip.label)}</p>" if strip.label else ""
        return f'{label}<p class="row" dir="{direction}">{"".join(parts)}</p>'

    def _token(self, strip: Strip, i: int) -> str:
        token, value = visible(strip.tokens[i], _LONG), strip.values[i]
        mark = " marked" if i == strip.marked else ""
        letters = f"<bdi>{html.escape(token)}</bdi>"
        if value is None:
            return f'<span class="{mark[1:]}">{letters}</span>' if mark else letters
        number = html.escape(f"{self._number(value)} {visible(self.unit, 60)}")
        said = html.escape(f"{token}: ") + number
        return (
            f'<span class="token{mark}" style="{self._style(value)}" tabindex="0" role="img" '
            f'title="{number}" aria-label="{said}" data-number="{number}">{letters}</span>'
        )


def token_strip(
    tokens: Iterable[Any],
    values: Iterable[Any],
    *,
    unit: str,
    title: str = "",
    limit: float | None = None,
) -> TokenStrips:
    """Tokens coloured by a value: red above zero, blue below, none at zero.

    Args:
        tokens: the texts of the tokens, in order; their own spaces belong to them.
        values: one number per token; None or NaN: no colour and no number.
        unit: of the values, such as "nats per token".
        title: plain text above the strip.
        limit: the absolute value that has the full colour. Default: the largest one; give it to
            compare strips with one another.

    Returns:
        An object that a notebook shows.

    Raises:
        UsageError: as many values as tokens are needed, each a number; and a limit above 0.
    """
    names = [str(token) for token in tokens]
    numbers = [_value(value) for value in values]
    if len(names) != len(numbers):
        raise UsageError(
            f"a strip needs one value per token: there are {len(names)} tokens and "
            f"{len(numbers)} values."
        )
    if limit is not None and not (limit > 0 and math.isfinite(limit)):
        raise UsageError(f"limit must be above 0; it is {limit!r}.")
    return _together([Strip(tuple(names), tuple(numbers))], unit, title, limit=limit)


def strips_of(
    result: Result,
    name: str | None = None,
    rows: int = ROWS,
    value: str | None = None,
    limit: float | None = None,
    **where: Any,
) -> TokenStrips:
    """A result's texts, their tokens coloured; see `Result.tokens`."""
    sources = _sources(result)
    if name is None and sources:
        name = next(iter(sources))
    if name not in sources:
        have = f"it has them in {', '.join(sources)}" if sources else "it stored no tokens"
        raise InterpError(f"this {result.analyzer} result has no tokens in {name!r}: {have}.")
    if rows < 1:
        raise UsageError(f"rows must be 1 or more; it is {rows!r}.")
    source, table = sources[name], result.tables[name]
    column = _column(value, source.values(table))
    for key, wanted in where.items():
        if key not in table.columns:
            close = difflib.get_close_matches(key, [str(c) for c in table.columns], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"the table {name} has no column {key!r}.{hint}")
        table = table.loc[table[key] == wanted, :]
    if not len(table):
        told = ", ".join(f"{key} {wanted!r}" for key, wanted in where.items())
        raise InterpError(f"the table {name} has no rows{f' of {told}' if told else ''}.")
    table, title = source.one(result, table)
    strips = source.strips(table, column)
    more = f"{rows} of {len(strips)}; rows={len(strips)} shows all." if len(strips) > rows else ""
    unit = result.columns[name][column].unit
    unit = column if unit == column else f"{column} ({unit})"
    return _together(strips[:rows], unit, title, more, limit)


def token_tables(result: Result) -> list[str]:
    """Names of the tables whose tokens can be shown."""
    return list(_sources(result))


# Where tokens are stored --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Examples:
    """A browser's examples: each row is one text."""

    browser: Browser

    def values(self, table: pd.DataFrame) -> list[str]:
        return [column for column, _ in self.browser.measured if column in table]

    def one(self, result: Result, table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
        """The examples of the first of what the browser lists, among those that are left."""
        by, listed = list(self.browser.by), result.tables[self.browser.table]
        keys = [column for column in self.browser.first if column in listed]
        first = listed.merge(table[by].drop_duplicates(), on=by, how="inner")
        if len(first) and keys:
            first = largest_first(first, keys)
        return _one(table, first if len(first) else table, by, self.browser.noun)

    def strips(self, table: pd.DataFrame, column: str) -> list[Strip]:
        names = ["rank", "document"]
        group = self.browser.group[0] if self.browser.group else None
        if group is not None and group in table and len(set(table[group])) > 1:
            names.insert(0, group)
        return [self._strip(row, column, names) for row in table.to_dict("records")]

    def _strip(self, row: dict[Any, Any], column: str, names: list[str]) -> Strip:
        before, token, after = (str(row[name]) for name in self.browser.text)
        end, text = len(before), before + after[:AFTER]
        begin = end - token_length(before, token)
        spans = {(begin, end): _value(row[column])}
        if self.browser.shade is not None and all(name in row for name in self.browser.shade):
            for a, b, value in zip(*(row[name] for name in self.browser.shade), strict=True):
                spans.setdefault((int(a), int(b)), _value(value))
        start = at = max(0, begin - BEFORE)
        parts: list[tuple[str, float | None]] = [("\u2026", None)] if start else []
        marked = None
        for (a, b), value in sorted(spans.items(), key=lambda span: span[0]):
            a, b = max(a, at), min(b, len(text))
            if a >= b:  # a part of a character, or beyond what is shown
                continue
            if at < a:
                parts.append((text[at:a], None))
            if b == end:
                marked = len(parts)
            parts.append((text[a:b], value))
            at = b
        parts.append((text[at:], None))
        known = [(name, plain(row.get(name))) for name in names]
        label = ", ".join(f"{name} {value}" for name, value in known if value is not None)
        tokens, values = zip(*parts, strict=True)
        return Strip(tokens, values, label, marked)


@dataclass(frozen=True)
class _Pairs:
    """A value for every pair of tokens of a text: one strip for each token that asks."""

    grid: Grid

    def values(self, table: pd.DataFrame) -> list[str]:
        return [column for column in self.grid.values if column in table]

    def one(self, result: Result, table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
        """The pairs of the first of what the table has."""
        return _one(table, table, list(self.grid.by), self.grid.noun)

    def strips(self, table: pd.DataFrame, column: str) -> list[Strip]:
        (asks, asks_token), (asked, asked_token) = self.grid.asks, self.grid.asked
        out = []
        for position, own in table.groupby(asks, sort=True):
            own = own.sort_values(asked)
            same = [i for i, at in enumerate(own[asked]) if at == position]
            out.append(
                Strip(
                    tuple(map(str, own[asked_token])),
                    tuple(_value(v) for v in own[column]),
                    f"asked by {visible(own[asks_token].iloc[0], _LONG)!r}, position {position}",
                    same[0] if same else None,
                )
            )
        return out


def _sources(result: Result) -> dict[str, _Examples | _Pairs]:
    """Table -> how its tokens are read."""
    view = view_of(result)
    found: dict[str, _Examples | _Pairs] = {}
    if view.browser is not None and view.browser.available(result):
        found[view.browser.examples] = _Examples(view.browser)
    if view.grid is not None and len(result.tables.get(view.grid.table, ())):
        found[view.grid.table] = _Pairs(view.grid)
    return found


def _one(
    table: pd.DataFrame, first: pd.DataFrame, by: list[str], noun: str
) -> tuple[pd.DataFrame, str]:
    """The rows of `table` that are of the first row of `first`, and their name."""
    chosen = [plain(first.iloc[0][column]) for column in by]
    for column, value in zip(by, chosen, strict=True):
        table = table.loc[table[column] == value, :]
    return table, f"{noun} {'.'.join(map(str, chosen))}"


def _column(value: str | None, known: list[str]) -> str:
    if value is None:
        return known[0]
    if value not in known:
        raise UsageError(f"tokens can be coloured by {' or '.join(known)}, not {value!r}.")
    return value


def _together(
    strips: Sequence[Strip], unit: str, title: str = "", note: str = "", limit: float | None = None
) -> TokenStrips:
    if limit is None:
        sizes = (abs(v) for strip in strips for v in strip.values if v is not None)
        limit = max((size for size in sizes if math.isfinite(size)), default=0.0)
    return TokenStrips(tuple(strips), unit, title, note, limit)


def _value(value: Any) -> float | None:
    """A number as a float; None for what was not measured."""
    value = plain(value)
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a token's value must be a number; there is {value!r}.") from error


def _text(text: str) -> str:
    return f"<bdi>{html.escape(visible(text, 10 * _LONG))}</bdi>"


def _direction(tokens: Iterable[str]) -> str:
    """That of the first letter that has one."""
    for char in "".join(tokens):
        kind = unicodedata.bidirectional(char)
        if kind in ("L", "R", "AL"):
            return "ltr" if kind == "L" else "rtl"
    return "ltr"

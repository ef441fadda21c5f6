"""A table of thousands of rows that open to their examples: what the page embeds for it.

Everything is written once: tokens into a list of strings, and texts that begin alike, as the
prefixes of one document do, as one text with places in it. What does not fit is left out, examples
before rows, and the note says so.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from interp.report.words import count, plain, visible
from interp.results import Column, Result

BYTES = 8_000_000  # of one page's data; plotly.js is 4.5 MB more
ROWS = 4000
BEFORE, AFTER = 200, 100  # characters of an example around its token
_TOKEN = 200  # characters of a token in a list
_EXAMPLES = (50, 25, 10, 5, 2)  # per row and group: the first of these that fits


@dataclass(frozen=True)
class Browser:
    """What to browse; columns that the result lacks are left out.

    Attributes:
        title: heading.
        noun: what one row is.
        table: the table of the rows.
        by: columns that name a row, joined by a dot; `examples` has them too.
        shown: (column, heading) of the numbers in the row itself; the others show when it opens.
        tokens: (column, heading) of lists of tokens, or of one text, shown when it opens.
        first: columns by which rows come, largest first; they decide which stay where not all fit.
        examples: the table of the examples, best first.
        text: its columns of the text up to and with the token, the token, and the text after.
        where: (column, heading) that depend on the text's place alone.
        measured: (column, heading) of the numbers of an example.
        group: (column, value -> heading) that divides a row's examples; None: undivided.
        shade: columns of an example with lists: where stretches of its text begin and end, in
            characters, and what was measured there; they are shaded by it. None: no shading.
        silent: said where a row has no example; empty: nothing is.
    """

    title: str
    noun: str
    table: str
    by: tuple[str, ...]
    shown: tuple[tuple[str, str], ...]
    tokens: tuple[tuple[str, str], ...]
    first: tuple[str, ...]
    examples: str
    text: tuple[str, str, str]
    where: tuple[tuple[str, str], ...]
    measured: tuple[tuple[str, str], ...]
    group: tuple[str, tuple[tuple[Any, str], ...]] | None = None
    shade: tuple[str, str, str] | None = None
    silent: str = ""

    def available(self, result: Result) -> bool:
        """Whether there is anything to browse."""
        tables = [result.tables.get(name) for name in (self.table, self.examples)]
        return all(table is not None and len(table) > 0 for table in tables)


@dataclass(frozen=True)
class Packed:
    """JSON in which no string can close a script element, and what it leaves out, in words."""

    text: str
    note: str


def script_json(value: Any) -> str:
    """JSON for a script element: `<`, `>` and `&` as escapes."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def pack(browser: Browser, result: Result, limit: int = BYTES) -> Packed:
    """As many rows, with as many examples each, as fit into `limit` characters.

    Args:
        browser: what to browse.
        result: has both of its tables.
        limit: characters of JSON.
    """
    rows = _ranked(browser, result.tables[browser.table])
    chosen = _some(browser, rows, ROWS)
    examples = _of(browser, chosen, result.tables[browser.examples])
    most = max(_sizes(browser, examples), default=0)
    numbers = [most, *(n for n in _EXAMPLES if n < most)]
    while True:
        text, n = "", most
        for n in numbers:
            text = script_json(_data(browser, result, chosen, _head(browser, examples, n)))
            if len(text) <= limit:
                break
        fewer = _some(browser, rows, int(0.9 * len(chosen) * limit / len(text)))
        if len(text) <= limit or len(fewer) == len(chosen):
            return Packed(text, _note(browser, rows, chosen, n, most))
        # Fewest examples, and still too large: fewer rows.
        chosen, examples, numbers = fewer, _of(browser, fewer, examples), numbers[-1:]


def _note(browser: Browser, rows: pd.DataFrame, chosen: pd.DataFrame, n: int, most: int) -> str:
    noun = browser.noun
    parts = []
    if len(chosen) < len(rows):
        each = f", as many of each {browser.by[0]}," if len(set(rows[browser.by[0]])) > 1 else ""
        parts.append(
            f"{count(len(chosen))} of {count(len(rows))} {noun}s{each} are here: the first by "
            f"{_order(browser, rows)}. So they are the most extreme, not typical, and searching "
            "covers no others."
        )
    else:
        parts.append(f"All {count(len(rows))} {noun}s, by {_order(browser, rows)}.")
    if n < most:
        parts.append(f"Of each one's up to {most} {browser.examples} the first {n} are here.")
    parts.append(
        f"A text is cut to {BEFORE} characters before its token and {AFTER} after. Everything is "
        f"in {browser.table}.parquet and {browser.examples}.parquet."
    )
    return " ".join(parts)


def _order(browser: Browser, rows: pd.DataFrame) -> str:
    return ", then ".join(c for c in browser.first if c in rows) or "as measured"


# Which --------------------------------------------------------------------------------------------


def largest_first(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Rows by the first of these columns, equal ones by the next; what is missing comes last."""
    numbers = table[list(columns)].astype("Float64").to_numpy(dtype=float, na_value=-np.inf)
    return table.iloc[np.lexsort(-numbers.T[::-1]), :]


def _ranked(browser: Browser, table: pd.DataFrame) -> pd.DataFrame:
    keys = [column for column in browser.first if column in table]
    return largest_first(table, keys) if keys else table


def _some(browser: Browser, rows: pd.DataFrame, most: int) -> pd.DataFrame:
    """The first rows, equally many of each value of the first column of `by`."""
    if len(rows) <= most:
        return rows
    groups = rows.groupby(browser.by[0], sort=False)
    return rows.loc[groups.cumcount() < max(1, most // groups.ngroups), :]


def _of(browser: Browser, rows: pd.DataFrame, examples: pd.DataFrame) -> pd.DataFrame:
    """Examples of these rows, with the row's number in `_row`."""
    by = list(browser.by)
    number = pd.DataFrame({**{c: rows[c].to_numpy() for c in by}, "_row": range(len(rows))})
    merged = examples.drop(columns="_row", errors="ignore").merge(number, on=by, how="inner")
    return merged.sort_values(by="_row", kind="stable")


def _keys(browser: Browser, examples: pd.DataFrame) -> list[str]:
    return (
        ["_row", browser.group[0]] if browser.group and browser.group[0] in examples else ["_row"]
    )


def _sizes(browser: Browser, examples: pd.DataFrame) -> list[int]:
    return [len(own) for own in examples.groupby(_keys(browser, examples)).indices.values()]


def _head(browser: Browser, examples: pd.DataFrame, n: int) -> pd.DataFrame:
    if not len(examples):
        return examples
    return examples.loc[examples.groupby(_keys(browser, examples), sort=False).cumcount() < n, :]


# As JSON ------------------------------------------------------------------------------------------


class _Strings:
    """Strings by number, each once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._number: dict[str, int] = {}

    def of(self, value: Any) -> int | None:
        value = plain(value)
        if value is None:
            return None
        if value not in self._number:
            self._number[value] = len(self.all)
            self.all.append(visible(value, _TOKEN))
        return self._number[value]


def _tokens(row: Any, strings: _Strings) -> list[int | None]:
    if isinstance(row, str):
        return [strings.of(row)]
    # Missing where an interruption left a layer without.
    return [strings.of(token) for token in row] if isinstance(row, Sequence | np.ndarray) else []


def _number(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, float):
        return float(f"{value:.5g}") if np.isfinite(value) else None
    return value


def _column(name: str, heading: str | None, meaning: Column, values: Any) -> dict[str, Any]:
    known = {"name": visible(name), "heading": heading, "unit": visible(meaning.unit)}
    return known | {"meaning": visible(meaning.description), "values": values}


def _data(
    browser: Browser, result: Result, rows: pd.DataFrame, examples: pd.DataFrame
) -> dict[str, Any]:
    strings, described = _Strings(), result.columns[browser.table]
    shown = dict(browser.shown)
    names = [c for c in shown if c in rows] + [
        c for c in rows if c not in shown and c not in browser.by
    ]
    columns = [
        _column(c, shown.get(c), described[c], [_number(v) for v in rows[c]])
        for c in names
        if pd.api.types.is_numeric_dtype(rows[c]) and bool(rows[c].notna().any())  # bool too
    ]
    tokens = [
        {"heading": heading, "values": [_tokens(row, strings) for row in rows[c]]}
        for c, heading in browser.tokens
        if c in rows
    ]
    data: dict[str, Any] = {
        "noun": browser.noun,
        "silent": browser.silent,
        "by": [[_label(v) for v in rows[c]] for c in browser.by],
        "columns": columns,
        "tokens": tokens,
    }
    data |= _examples(browser, result, rows, examples, strings)
    return data | {"strings": strings.all}


def _label(value: Any) -> Any:
    value = plain(value)
    return visible(value, _TOKEN) if isinstance(value, str) else value


def _examples(
    browser: Browser,
    result: Result,
    rows: pd.DataFrame,
    examples: pd.DataFrame,
    strings: _Strings,
) -> dict[str, Any]:
    before, token, after = browser.text
    described = result.columns[browser.examples]
    where = [(c, h) for c, h in browser.where if c in examples]
    # A place is where an example stands: many keys have the same ones.
    parts = dict.fromkeys([before, token, after, *(c for c, _ in where)])
    codes = np.stack([pd.factorize(examples[c])[0] for c in parts], axis=1)
    _, first, place = np.unique(codes, axis=0, return_index=True, return_inverse=True)
    places = examples.iloc[first]
    parts_of = [places[c].astype(object).tolist() for c in (before, token, after)]
    out: dict[str, Any] = {
        **_texts(parts_of),
        "token": [strings.of(v) for v in places[token]],
        "where": [
            _column(c, h, described[c], _where(places[c], strings))
            | {"string": not pd.api.types.is_numeric_dtype(places[c])}
            for c, h in where
        ],
        "place": place.ravel().tolist(),
        "start": np.searchsorted(examples["_row"], range(len(rows) + 1)).tolist(),
        "measured": [
            _column(c, h, described[c], [_number(v) for v in examples[c]])
            for c, h in browser.measured
            if c in examples
        ],
        "groups": [browser.examples],
        "group": [],
        "shade": [],
    }
    if browser.shade is not None and all(column in examples for column in browser.shade):
        columns = [examples[column].tolist() for column in browser.shade]
        out["shade"] = _shades(parts_of, place.ravel().tolist(), out["from"], columns)
    if browser.group is not None and browser.group[0] in examples:
        values = dict(browser.group[1])
        out["groups"] = list(values.values())
        number = {value: i for i, value in enumerate(values)}
        out["group"] = [number[v] for v in examples[browser.group[0]]]
    return out


def _where(values: pd.Series, strings: _Strings) -> list[Any]:
    if pd.api.types.is_numeric_dtype(values):
        return [_number(v) for v in values]
    return [strings.of(v) for v in values]


def _texts(parts: list[list[str]]) -> dict[str, Any]:
    """Texts, each the longest of those that begin alike, and places in them.

    Args:
        parts: the text up to and with the token, the token, the text after; one of each per place.

    Returns:
        "texts", "whole" (whether one begins where its document's does), and per place "text",
        "from", "mark", "end" and "to": what is shown is from - to, the token mark - end; counted
        as JavaScript does, in UTF-16 units.
    """
    spans = []
    for before, token, after in zip(*parts, strict=True):
        end = len(before)
        start = end - token_length(before, token)
        spans.append(
            (before + after, max(0, start - BEFORE), start, end, end + min(len(after), AFTER))
        )
    kept, home = _longest([text for text, *_ in spans])
    texts: list[str] = []
    whole: list[int] = []
    at = np.zeros((len(spans), 5), dtype=np.int64)
    for k, members in enumerate(_members(home, len(kept))):
        members.sort(key=lambda i: spans[i][1])
        offsets = _offsets(kept[k])
        i = 0
        while i < len(members):  # of a long text only the stretches that are shown
            low, high, j = spans[members[i]][1], spans[members[i]][4], i
            while j < len(members) and spans[members[j]][1] <= high:
                high = max(high, spans[members[j]][4])
                j += 1
            for m in members[i:j]:
                at[m] = [len(texts), *(offsets[p] - offsets[low] for p in spans[m][1:])]
            texts.append(visible(kept[k][low:high]))
            whole.append(int(low == 0))
            i = j
    names = ("text", "from", "mark", "end", "to")
    return {"texts": texts, "whole": whole} | {n: at[:, i].tolist() for i, n in enumerate(names)}


def _shades(
    parts: list[list[str]], place: list[int], starts: list[int], columns: list[list[Any]]
) -> list[list[float]]:
    """Per example [begin, end, value, begin, ...] of its shaded stretches, as places are counted.

    Args:
        parts: as `_texts` has them, per place.
        place: each example's.
        starts: per place, where in its text what is shown begins.
        columns: per example the stretches' begins, ends and values.
    """
    known: dict[int, tuple[int, np.ndarray]] = {}
    out = []
    for p, *stretches in zip(place, *columns, strict=True):
        if p not in known:
            before, token, after = (part[p] for part in parts)
            low = max(0, len(before) - token_length(before, token) - BEFORE)
            known[p] = low, starts[p] + _offsets((before + after[:AFTER])[low:])
        low, at = known[p]
        flat: list[float] = []
        for begin, end, value in zip(*stretches, strict=True):
            inside = [min(max(int(n) - low, 0), len(at) - 1) for n in (begin, end)]
            if inside[0] < inside[1]:
                flat += [*(int(at[n]) for n in inside), float(f"{value:.3g}")]
        out.append(flat)
    return out


def token_length(before: str, token: str) -> int:
    """How many of the last characters are the token; a piece of a character is that character."""
    for shown in (token, token.lstrip(" ")):
        if shown and before.endswith(shown):
            return len(shown)
    return min(1, len(before))


def _offsets(text: str) -> np.ndarray:
    """[character + 1] where each begins in what is shown, in UTF-16 units."""
    sizes = [_size(char) for char in text]
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


@functools.cache
def _size(char: str) -> int:
    return len(visible(char).encode("utf-16-le")) // 2


def _longest(texts: list[str]) -> tuple[list[str], list[int]]:
    """Those that no other one begins with, and for each text which one begins with it."""
    kept: list[str] = []
    number: dict[str, int] = {}
    # In order, all that begin with a text follow it directly.
    for text in sorted(set(texts), reverse=True):
        if not (kept and kept[-1].startswith(text)):
            kept.append(text)
        number[text] = len(kept) - 1
    return kept, [number[text] for text in texts]


def _members(home: list[int], n: int) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in range(n)]
    for i, k in enumerate(home):
        out[k].append(i)
    return out

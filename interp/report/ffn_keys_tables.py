"""Tables of an `ffn-keys` run for 80 columns, and what is drawn from its large ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from interp.report.browser import largest_first, token_length
from interp.report.view import Digest, has
from interp.report.words import DASH, count, interval, isolated, number, percent, plain, visible
from interp.results import Result

STORIES = 3  # keys that are told with their triggers
EXAMPLES = 3  # triggers of each, where all keys were measured
BINS = 10
_BEFORE, _AFTER = 36, 14  # characters around the token
_TOKEN = 12  # characters of a token in a row of them


def key_label(row: Any) -> str:
    """27.123 is layer 27, key 123; of a row that has both."""
    return f"{int(row['layer'])}.{int(row['key'])}"


def listed(tokens: Any, most: int) -> str:
    """The first tokens of a list, each in quotes."""
    if not isinstance(tokens, list | tuple) and not hasattr(tokens, "__len__"):
        return DASH
    cut = [str(t) if len(str(t)) <= _TOKEN + 2 else f"{str(t)[:_TOKEN]}.." for t in tokens]
    return " ".join(f'"{isolated(visible(t))}"' for t in cut[:most])


def raised(row: Mapping[Any, Any], most: int) -> str:
    """What a key raises at a position: with a negative coefficient what its value lowers."""
    end = "top" if (number(row.get("coefficient")) or 0.0) >= 0 else "bottom"
    return listed(row.get(f"value_{end}_tokens"), most)


def marked(prefix: Any, token: Any, following: Any) -> str:
    """The end of a prefix with its token in double brackets, and the beginning of what follows."""
    before, token = str(plain(prefix) or ""), str(plain(token) or "")
    start = len(before) - token_length(before, token)
    shown = visible(before[start:], 24)
    left = before[max(0, start - _BEFORE) : start]
    cut = ".." if start > _BEFORE else ""
    right = str(plain(following) or "")[:_AFTER]
    return isolated(f"{cut}{visible(left)}[[{shown}]]{visible(right)}")


# Narrow tables ------------------------------------------------------------------------------------

Columns = list[tuple[str, list[str]]]


def _column(table: pd.DataFrame, name: str, form: Callable[[Any], str]) -> list[str]:
    return [form(value) for value in table[name]]


def _short(value: Any) -> str:
    found = number(value)
    return DASH if found is None else f"{found:.3g}"


def _flag(value: Any) -> str:
    value = plain(value)
    return DASH if value is None else "yes" if value else "no"


def _signed(value: Any) -> str:
    found = number(value)
    if found == 0:
        return "0"
    return DASH if found is None else f"{found:+.3f}" if abs(found) >= 0.0005 else f"{found:+.0e}"


def change(value: Any) -> str:
    """A relative change in percent."""
    found = number(value)
    return DASH if found is None else f"{100 * found:+.0f}%"


def _keys(table: pd.DataFrame) -> Columns:
    suffix = "_folded" if has(table, "agreement_folded") else ""
    out: Columns = [("key", [key_label(row) for row in table.to_dict("records")])]
    for name, heading, form in (
        (f"agreement{suffix}", "agrees", _flag),
        (f"next_token_rank{suffix}", "rank of\nnext\ntoken", count),
        ("same_last_token", "same\nlast\ntoken", percent),
        ("same_last_token_null", "by\nchance", percent),
    ):
        if has(table, name):
            out.append((heading, _column(table, name, form)))
    name = f"value_top_tokens{suffix}"
    if name in table:
        out.append(("value raises", [listed(tokens, 2) for tokens in table[name]]))
    for name, heading in (
        ("coefficient_max", "largest\ncoeff."),
        ("coefficient_min", "smallest\ncoeff."),
    ):
        if has(table, name):
            out.append((heading, _column(table, name, _short)))
    return out


def _layers(table: pd.DataFrame) -> Columns:
    suffix = "_folded" if has(table, "agreement_rate_folded") else ""
    out: Columns = [("layer", _column(table, "layer", count))]
    if has(table, f"agreement_count{suffix}"):
        keys = table["agreement_keys"].astype(float)
        out.append(("keys\nthat\nagree", _column(table, f"agreement_count{suffix}", count)))
        for name, heading in (
            ("null", "by\nshuffle"),
            ("null_99", "its\n99th\npct."),
            ("unigram_99", "99th,\nby fre-\nquency"),
        ):
            column = f"agreement_{name}{suffix}"
            if has(table, column):
                form = (lambda v: f"{v:.1f}") if name == "null" else count
                expected = table[column].astype(float) * keys
                out.append((heading, [DASH if v != v else form(v) for v in expected]))
    for name, heading, form in (
        ("same_last_token", "same\nlast\ntoken", percent),
        ("same_last_token_null", "by\nchance", percent),
        ("earlier_gap", "earlier\ntext\n(cosine)", _signed),
        ("active_share_90", "active\nkeys\n(90%)", percent),
        ("zero_agreement", "zero\nagree-\nment", percent),
        ("unchanged", "top\nun-\nchanged", percent),
    ):
        if has(table, name):
            out.append((heading, _column(table, name, form)))
    return out


def _mutation(table: pd.DataFrame) -> Columns:
    out: Columns = [("layer", _column(table, "layer", count))]
    if len(set(table["sign"])) > 1:
        out.append(("triggers", ["largest" if s > 0 else "negative" for s in table["sign"]]))
    out.append(
        (
            "dropped\ntoken",
            ["(unrelated text)" if d == "all" else visible(d, 20) for d in table["dropped"]],
        )
    )
    out.append(("change", _column(table, "change", change)))
    ends = [
        interval(low, high, change) or DASH
        for low, high in zip(table["change_low"], table["change_high"], strict=True)
    ]
    out.append(("95%\ninterval", ends))
    for name, heading, form in (
        ("change_median", "median", change),
        ("flipped", "sign\nflips\n(keys)", percent),
        ("keys", "keys", count),
        ("triggers", "triggers", count),
    ):
        if has(table, name) and heading not in dict(out):
            out.append((heading, _column(table, name, form)))
    return out


def _prompt_keys(table: pd.DataFrame) -> Columns:
    out: Columns = [("key", [key_label(row) for row in table.to_dict("records")])]
    for name, heading in (
        ("contribution", "adds\ndirectly\n(logits)"),
        ("ablated_logit", "removed:\nlogit\nchanges"),
        ("ablated_log_prob", "log-\nprob.\n(nats)"),
        ("coefficient", "coeff."),
    ):
        if has(table, name):
            form = _short if name == "coefficient" else _signed
            out.append((heading, _column(table, name, form)))
    out.append(("raises here", [raised(row, 2) for row in table.to_dict("records")]))
    return out


def _prompt_layers(table: pd.DataFrame) -> Columns:
    out: Columns = [("layer", _column(table, "layer", count))]
    for name, heading in (
        ("ffn", "FFN adds\n(logits)"),
        ("raised", "keys that\nraise\n(logits)"),
        ("lowered", "keys that\nlower\n(logits)"),
        ("bias", "bias\n(logits)"),
        ("error", "rounding\n(logits)"),
    ):
        out.append((heading, _column(table, name, _signed)))
    return out


narrow: Mapping[str, Callable[[pd.DataFrame], Columns]] = {
    "keys": _keys,
    "ffn_layers": _layers,
    "mutation": _mutation,
    "prompt_keys": _prompt_keys,
    "prompt_layers": _prompt_layers,
}


# Digests ------------------------------------------------------------------------------------------


def digests(result: Result) -> list[Digest]:
    """Keys with their triggers, for the terminal, and histograms of chosen keys."""
    if not {"keys", "triggers"} <= set(result.tables):
        return []
    chosen = _chosen(result)
    return [digest for row in chosen for digest in _story(result, row)]


def _chosen(result: Result) -> list[dict[Any, Any]]:
    """The keys asked for; else those that agree and those with the clearest last token."""
    keys = result.tables["keys"]
    if result.config.get("key"):
        return keys.head(STORIES).to_dict("records")
    suffix = "_folded" if has(keys, "agreement_folded") else ""
    names = [
        n for n in (f"agreement{suffix}", "same_last_token", "coefficient_max") if has(keys, n)
    ]
    return largest_first(keys, names).head(STORIES).to_dict("records") if names else []


def _story(result: Result, row: Mapping[Any, Any]) -> Iterable[Digest]:
    table = result.tables["triggers"]
    own = table.loc[(table["layer"] == row["layer"]) & (table["key"] == row["key"]), :]
    asked = bool(result.config.get("key"))
    signs = (1, -1) if asked else (1,)
    parts = [own.loc[own["sign"] == sign, :] for sign in signs]
    rows = [
        (marked(t["prefix"], t["token"], t["following"]), _short(t["coefficient"]))
        for part in parts
        for t in (part if asked else part.head(EXAMPLES)).to_dict("records")
    ]
    suffix = "_folded" if "value_top_tokens_folded" in row else ""
    said = [
        f"value {word} {listed(row[name], 5)}"
        for word, name in (
            ("raises", f"value_top_tokens{suffix}"),
            ("lowers", f"value_bottom_tokens{suffix}"),
        )
        if name in row
    ]
    note = "; ".join(said)
    if not asked:
        note += ". One of the most conspicuous keys, not a typical one."
    if rows:
        yield Digest(
            title=f"Key {key_label(row)}: triggers, the token in [[ ]]",
            head=("text", "coefficient"),
            rows=tuple(rows),
            note=note,
            page=False,
        )
    if asked and "histogram" in result.tables:
        yield from _histogram(result, row)


def _part(n: int, total: int) -> str:
    if n == 0 or n == total:
        return "0%" if n == 0 else "100%"
    share = 100 * n / total
    return "<0.1%" if share < 0.1 else ">99.9%" if share > 99.9 else f"{share:.1f}%"


def _histogram(result: Result, row: Mapping[Any, Any]) -> Iterable[Digest]:
    table = result.tables["histogram"]
    own = table.loc[(table["layer"] == row["layer"]) & (table["key"] == row["key"]), :]
    if own.empty:
        return
    # A few equal bins instead of many.
    step = max(1, -(-len(own) // BINS))
    rows = []
    total = int(own["positions"].sum())
    for first in range(0, len(own), step):
        part = own.iloc[first : first + step]
        n = int(part["positions"].sum())
        bar = "#" * (len(str(n)) if n else 0)
        ends = f"{part['low'].iloc[0]:9.3g} to {part['high'].iloc[-1]:9.3g}"
        rows.append((f"{ends}  {bar}", count(n), _part(n, total)))
    yield Digest(
        title=f"Key {key_label(row)}: coefficients at all positions",
        head=("coefficient (# per power of ten)", "positions", "share"),
        rows=tuple(rows),
        page=False,
    )

"""How a `qkv` run is told: findings in words, what they do not show, the small tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from interp.report.view import Digest, View
from interp.report.words import (
    NATS,
    count,
    interval,
    mapping,
    number,
    percent,
    signed,
    unsigned,
    visible,
)
from interp.results import Result

TARGETS = {"q": "queries", "k": "keys", "v": "values", "o": "the attention's output"}
PRODUCTS = {"qk": "W_Q W_K^T", "ov": "W_V W_O"}
SHARED = {"q": "Q", "k": "K", "v": "V", "kv": "K and V"}
METHODS = {
    "least_squares": "least squares",
    "average": "aligned and averaged",
    "random_groups": "least squares, random groups (control)",
}
AGREE = 0.8
"""Share of layers that must agree before a ranking is called one."""


def effect(found: Mapping[str, Any]) -> str:
    """A loss change with its interval."""
    ends = interval(found.get("ci_low"), found.get("ci_high"))
    return f"{signed(found.get('loss_delta'))} {ends}".strip()


def _each(found: Mapping[str, Any], names: Mapping[str, str]) -> str:
    return ", ".join(f"{names[k]} {effect(mapping(v))}" for k, v in found.items() if k in names)


# Findings -----------------------------------------------------------------------------------------


def findings(result: Result) -> list[str]:
    """Plain sentences, most important first; what was not measured is left out."""
    parts = (
        _mean(result),
        *_ranking(result),
        _noise(result),
        _sharing(result),
        _rank(result),
        *_overlap(result),
    )
    return [part for part in parts if part]


def _mean(result: Result) -> str | None:
    found = mapping(result.summary.get("mean"))
    if not found:
        return None
    return (
        f"Replaced by its mean in all layers at once, at a loss of "
        f"{unsigned(result.summary.get('baseline_loss'))} {NATS} before: {_each(found, TARGETS)} "
        f"({NATS}, 95% intervals over {count(result.summary.get('documents'))} documents)."
    )


def _ranking(result: Result) -> list[str]:
    out = []
    for name, value in mapping(result.summary.get("ranking")).items():
        found = mapping(value)
        first, second = (part.upper() for part in str(name).split(" over "))
        layers, share = number(found.get("layers")), number(found.get("share"))
        if not layers or share is None:
            continue
        more = round(share * layers)
        side = 1 if more >= AGREE * layers else -1 if layers - more >= AGREE * layers else 0
        if side == 0:
            verdict = "the layers do not agree: no ranking"
        elif _side(found) != side:
            verdict = "the layers agree, but all of them at once do not bear it out: no ranking"
        else:
            above, below = (first, second) if side > 0 else (second, first)
            verdict = f"{above} is worth more than {below} in this sense, in this model"
        gap = number(found.get("difference"))
        together = ""
        if gap is not None:
            ends = interval(found.get("ci_low"), found.get("ci_high"))
            together = f"; in all layers at once the difference is {signed(gap)} {ends}"
        out.append(
            f"{first} against {second}, one layer at a time: the mean in place of {first} costs "
            f"more in {count(more)} of {count(layers)} layers ({count(found.get('surely_larger'))} "
            f"with q < 0.05; less with q < 0.05 in {count(found.get('surely_smaller'))})"
            f"{together}. With {percent(AGREE)} of layers as the bar: {verdict}."
        )
    return out


def _side(found: Mapping[str, Any]) -> int:
    """On which side of 0 an interval lies; 0 where it holds 0 or is not known."""
    low, high = number(found.get("ci_low")), number(found.get("ci_high"))
    if low is None or high is None:
        return 0
    return 1 if low > 0 else -1 if high < 0 else 0


def _noise(result: Result) -> str | None:
    found = mapping(result.summary.get("noise"))
    sizes = list(mapping(next(iter(found.values()), {})))
    if not sizes:
        return None
    size = sizes[-1]
    at = {name: mapping(levels).get(size) for name, levels in found.items()}
    return (
        f"Noise as large as {size} times what each varies by, in all layers: {_each(at, TARGETS)}."
    )


def _sharing(result: Result) -> str | None:
    found = mapping(result.summary.get("sharing"))
    one = {name: mapping(mapping(found.get(name)).get("1")) for name in SHARED}
    one = {name: value for name, value in one.items() if value}
    if not one:
        return None
    heads, kv = (count(result.model.get(f"n_{name}")) for name in ("heads", "kv_heads"))
    text = (
        f"One for all heads of a layer, best fit, in all layers, without retraining: "
        f"{_each(one, SHARED)} (from {heads} query heads and {kv} KV heads)."
    )
    if {"q", "k", "v"} <= one.keys():
        q = one["q"]
        sides = {n: _apart(one[n], q) for n in ("k", "v")}
        words = {-1: "costs less than", 0: "cannot be told from", 1: "costs more than"}
        told = [f"sharing {SHARED[n]} alone {words[side]} sharing Q" for n, side in sides.items()]
        text += f" By these intervals {'; '.join(told)}."
    return text


def _apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> int:
    """-1 where a's interval lies wholly below b's, 1 above, 0 where they overlap."""
    ends = [number(x.get(name)) for x in (a, b) for name in ("ci_low", "ci_high")]
    if any(end is None for end in ends):
        return 0
    low_a, high_a, low_b, high_b = (end for end in ends if end is not None)
    return -1 if high_a < low_b else 1 if low_a > high_b else 0


def _rank(result: Result) -> str | None:
    found = mapping(result.summary.get("rank"))
    if not found:
        return None
    parts = []
    for name, levels in found.items():
        told = ", ".join(
            f"{_share(level)} of d_head {effect(mapping(value))}"
            for level, value in mapping(levels).items()
        )
        parts.append(f"{PRODUCTS.get(name, name)} left with {told}")
    return f"Cut to a lower rank in all layers: {'; '.join(parts)} {NATS}."


def _share(level: Any) -> str:
    """A share of d_head; 12.5% is a rank of its own, and not 12%."""
    return f"{100 * float(level):.3g}%"


def _overlap(result: Result) -> list[str]:
    found = mapping(result.summary.get("overlap"))
    out = []
    for weighted in ("", ", weighted"):
        parts = []
        for pair in ("qk", "qv", "kv"):
            one = mapping(found.get(f"{pair}{weighted}"))
            if not one:
                continue
            parts.append(
                f"{pair[0].upper()} and {pair[1].upper()} {unsigned(one.get('median'), 1)} (random "
                f"{unsigned(one.get('null_mean'), 1)}; {count(one.get('above'))} of "
                f"{count(one.get('heads'))} heads above the middle 95% of random planes, "
                f"{count(one.get('below'))} below)"
            )
        if parts:
            how = (
                "Weighted by how much the input varies along them"
                if weighted
                else f"Directions read, of {count(result.model.get('d_head'))}, that two of a "
                "head's matrices share (projection kernel, median over heads)"
            )
            out.append(f"{how}: {'; '.join(parts)}.")
    return out


def limits(result: Result) -> list[str]:
    """What the numbers are, and what they are not."""
    out = [
        "A loss change tells what this trained model does without a thing. A model trained without "
        "it, as those with shared keys and values are, may do without it easily.",
        "Changes are made at included positions: the first position, on which many heads rest, "
        "keeps its query, key and value.",
        "Means, noise and ranks are three senses of worth; they need not agree, and a ranking by "
        "one of them is a ranking in that sense only. Two model families should agree as well.",
        "All changes are the same in every basis of a head: replacing q by q G and k by k G^-T "
        "changes none of these numbers.",
    ]
    if result.summary.get("fitted_elsewhere") is False:
        out.append(
            "Means and moments come from the very documents that are judged: costs are too low."
        )
    kv, heads = number(result.model.get("n_kv_heads")), number(result.model.get("n_heads"))
    if kv and heads and kv < heads:
        out.append(
            "Keys and values are shared by groups of query heads already: sharing them further "
            "starts from fewer than sharing queries does."
        )
    return out


# Tables -------------------------------------------------------------------------------------------


def words(row: Any) -> str:
    """What a row of `interventions` did."""
    kind, target, level = row.kind, str(row.target), number(row.level)
    if kind == "mean":
        return f"mean in place of {TARGETS.get(target, target)}"
    if kind == "noise":
        return f"noise of size {level:g} on {TARGETS.get(target, target)}"
    if kind == "rank":
        return f"{PRODUCTS.get(target, target)} cut to {_share(level)} of d_head"
    method = METHODS.get(row.method, visible(row.method, 24))
    groups = f"{count(level)} group{'' if level == 1 else 's'}"
    return f"{SHARED.get(target, target)} shared in {groups}, {method}"


def everywhere(result: Result) -> Any:
    """Rows of changes in all layers at once."""
    table: Any = result.tables.get("interventions", pd.DataFrame())
    return table[table["layer"].isna()] if len(table) else table


def digests(result: Result) -> list[Digest]:
    """Changes in all layers at once."""
    table = everywhere(result)
    if not len(table):
        return []
    rows = tuple((words(row), effect(row._asdict())) for row in table.itertuples(index=False))
    return [
        Digest(
            f"Loss change with all layers changed, {NATS} (95% interval)",
            ("change", "loss change"),
            rows,
        )
    ]


def narrow(table: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Columns for 80 characters: changes."""
    rows: Any = list(table.itertuples(index=False))
    return [
        ("change", [words(row) for row in rows]),
        ("layer", [count(row.layer) if number(row.layer) is not None else "all" for row in rows]),
        (f"loss change\n({NATS})", [effect(row._asdict()) for row in rows]),
    ]


def narrow_comparisons(table: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Columns for 80 characters: V against K against Q."""
    rows: Any = list(table.itertuples(index=False))
    return [
        ("means in\nplace of", [f"{row.first} - {row.second}".upper() for row in rows]),
        ("layer", [count(row.layer) if number(row.layer) is not None else "all" for row in rows]),
        (
            f"difference\n({NATS})",
            [f"{signed(r.difference)} {interval(r.ci_low, r.ci_high)}".strip() for r in rows],
        ),
    ]


def compare(result: Result) -> list[tuple[str, str]]:
    """What runs are compared by."""
    out = []
    for target, found in mapping(result.summary.get("mean")).items():
        words = f"mean in place of {TARGETS.get(target, target)} ({NATS})"
        out.append((words, effect(mapping(found))))
    for name, value in mapping(result.summary.get("ranking")).items():
        found = mapping(value)
        layers, share = number(found.get("layers")), number(found.get("share"))
        if layers and share is not None:
            first, second = (part.upper() for part in str(name).split(" over "))
            value = f"{count(round(share * layers))} of {count(layers)}"
            out.append((f"layers where {first} costs more than {second}", value))
    for target, levels in mapping(result.summary.get("sharing")).items():
        one = mapping(mapping(levels).get("1"))
        if one:
            words = f"{SHARED.get(target, target)} shared by all heads of a layer ({NATS})"
            out.append((words, effect(one)))
    return out


VIEW = View(
    question="What are Q, K, V and O each worth, and can heads share them?",
    findings=findings,
    limits=limits,
    digests=digests,
    rank={
        "interventions": (("loss_delta", True),),
        "comparisons": (("difference", True),),
        "overlap": (("kernel", False),),
    },
    narrow={"interventions": narrow, "comparisons": narrow_comparisons},
    quiet=frozenset({"interventions", "overlap"}),
    compare=compare,
)

"""How a `superposition` run is told: findings in words, what they do not show, and small tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from interp.report import superposition_meaning
from interp.report.browser import Browser
from interp.report.ffn_keys_tables import listed
from interp.report.view import Digest, View, has
from interp.report.words import DASH, NATS, count, interval, number, percent, signed, unsigned
from interp.results import Result

NAMES = {
    "sae": "SAE",
    "random dictionary": "random dictionary, trained encoder",
    "null model": "SAE of a model with permuted weights",
    "pca": "PCA, the first components",
    "pca per position": "PCA, each position's largest",
    "neurons": "MLP neurons, the largest",
    "random error": "random error as long as the SAE's",
    "mean": "training mean",
    "zero": "zero",
}


def name_of(dictionary: Any) -> str:
    """A row of the table baselines, as it is called in words."""
    text = str(dictionary)
    return NAMES.get(text, text.replace("sae", "SAE"))


def rows_of(result: Result) -> dict[str, dict[str, Any]]:
    """dictionary -> its row of the table baselines."""
    table = result.tables.get("baselines")
    if table is None:
        return {}
    return {str(row["dictionary"]): dict(row) for row in table.to_dict("records")}


def with_ends(row: Mapping[str, Any], name: str, form: Callable[[Any], str]) -> str:
    """ "value [low, high]"."""
    if number(row.get(name)) is None:
        return DASH
    ends = interval(row.get(f"{name}_low"), row.get(f"{name}_high"), form)
    return f"{form(row[name])} {ends}".rstrip()


def share(value: Any) -> str:
    """A fraction, with three decimals."""
    found = number(value)
    return DASH if found is None else f"{found:.3f}"


def _one(value: Any) -> str:
    found = number(value)
    return DASH if found is None else f"{found:.3g}"


def costs(result: Result, kind: str) -> bool:
    """Whether removing the layer (kind: zero or mean) costs loss, by its interval."""
    return (number(result.summary.get(f"{kind}_delta_low")) or 0.0) > 0


# Findings -----------------------------------------------------------------------------------------


def findings(result: Result) -> list[str]:
    """Plain sentences, most important first; what was not measured is left out."""
    parts = (
        _loss(result),
        _recovered(result),
        _error(result),
        _variance(result),
        _against(result),
        _widths(result),
        _dead(result),
        _shape(result),
    )
    return [part for part in parts if part] + superposition_meaning.findings(result)


def _loss(result: Result) -> str | None:
    s = result.summary
    if number(s.get("loss_delta")) is None:
        return None
    n = count(s.get("loss_documents"))
    low, high = number(s.get("loss_delta_low")), number(s.get("loss_delta_high"))
    verdict = ""
    if low is not None and high is not None and low <= 0 <= high:
        verdict = ", not told from 0"
    return (
        f"With the SAE's reconstruction in the place of layer {count(s.get('layer'))}'s MLP output "
        f"the loss changes by {with_ends(s, 'loss_delta', signed)} nats per token{verdict}, from "
        f"{unsigned(s.get('loss_clean'))} (KL {with_ends(s, 'kl', unsigned)}; 95% intervals over "
        f"{n} documents). With zero in its place it changes by "
        f"{with_ends(s, 'zero_delta', signed)}, with its mean by "
        f"{with_ends(s, 'mean_delta', signed)}."
    )


def _recovered(result: Result) -> str | None:
    s = result.summary
    told = []
    for kind in ("zero", "mean"):
        if number(s.get(f"loss_recovered_{kind}")) is None:
            continue
        if costs(result, kind):
            told.append(f"{with_ends(s, f'loss_recovered_{kind}', share)} of what {kind} costs")
        else:
            told.append(
                f"no share of what {kind} costs can be told: that cost is not told from 0 here"
            )
    return f"Loss recovered: {'; '.join(told)}." if told else None


def _error(result: Result) -> str | None:
    s = result.summary
    low, high = number(s.get("error_excess_low")), number(s.get("error_excess_high"))
    if number(s.get("error_excess")) is None:
        return None
    row = rows_of(result).get("random error", {})
    verdict = "not told from"
    if low is not None and high is not None and not low <= 0 <= high:
        verdict = "more than" if low > 0 else "less than"
    return (
        "An error as long at every position, in a random direction, costs "
        f"{with_ends(s, 'error_delta', signed)} nats (KL {with_ends(row, 'kl', unsigned)}): "
        f"{verdict} the SAE's own, a difference of {with_ends(s, 'error_excess', signed)}."
    )


def _variance(result: Result) -> str | None:
    s = result.summary
    if number(s.get("fvu")) is None:
        return None
    return (
        f"{with_ends(s, 'l0', _one)} of {count(s.get('features'))} features active per position "
        f"leave {with_ends(s, 'fvu', share)} of the variance unexplained (FVU; explained variance "
        f"{share(s.get('explained_variance'))}), over {count(s.get('tokens'))} included positions "
        f"of {count(s.get('documents'))} documents."
    )


def _against(result: Result) -> str | None:
    rows = rows_of(result)
    own = rows.get("sae")
    if own is None:
        return None
    told = []
    for name in ("pca", "pca per position", "neurons", "random dictionary", "null model"):
        row = rows.get(name)
        if row is None or number(row.get("fvu")) is None:
            continue
        apart = (number(own.get("fvu_high")) or 1.0) < (number(row.get("fvu_low")) or 0.0)
        worse = (number(own.get("fvu_low")) or 0.0) > (number(row.get("fvu_high")) or 1.0)
        word = " (worse)" if apart else " (better)" if worse else " (not told apart)"
        told.append(f"{name_of(name)} {share(row['fvu'])}{word}")
    if not told:
        return None
    k = count(result.summary.get("components"))
    null = " The last is judged on its own model." if "null model" in rows else ""
    return (
        f"FVU of others, PCA and neurons with {k} components, by the intervals better or worse "
        f"than the SAE's: {'; '.join(told)}.{null}"
    )


def _widths(result: Result) -> str | None:
    rows = [row for name, row in rows_of(result).items() if is_width(name)]
    if len(rows) < 2:
        return None
    told = [
        f"{count(row['components'])} features: FVU {share(row['fvu'])}, loss "
        f"{signed(row.get('loss_delta'))}"
        for row in sorted(rows, key=lambda row: row["components"])
    ]
    return f"By width: {'; '.join(told)}."


def is_width(name: str) -> bool:
    """Whether a dictionary is one of the SAEs that differ in width."""
    return name == "sae" or name.startswith("sae width")


def _dead(result: Result) -> str | None:
    s = result.summary
    if number(s.get("dead_fraction")) is None:
        return None
    n = f"of the {count(s.get('dead_tokens'))} judged positions"
    text = f"Every feature fires at one {n} or more"
    if number(s["dead_fraction"]):
        text = f"{percent(s['dead_fraction'])} of the features fire at none {n}"
    if number(s.get("dead_fraction_training")) is not None:
        text += (
            f"; {percent(s['dead_fraction_training'])} at none of the last "
            f"{count(s.get('dead_tokens_training'))} positions of training"
        )
    return text + ". Rarer features need more positions to be told from dead ones."


def _shape(result: Result) -> str | None:
    s = result.summary
    if number(s.get("shrinkage")) is None:
        return None
    return (
        f"Reconstructions point the right way to a cosine of {with_ends(s, 'cosine', share)} and "
        f"have {share(s['shrinkage'])} of the length that fits best (1: no shrinkage)."
    )


def limits(result: Result) -> list[str]:
    """What the numbers are, and what they are not."""
    return [
        "A small FVU says that the variance is kept, not that what the model needs is; the loss "
        "says that, and only as far as the model needs this layer at all.",
        "An SAE finds features wherever it is trained, also on random data: one is worth believing "
        "where it beats the null models and comes back from another seed.",
        "Contexts are the few positions with the largest activation; most of a feature's work is "
        "at smaller ones. What a decoder row promotes directly is not what later layers make of "
        "it.",
        "All numbers are of included positions: no special tokens, and not the first position of a "
        "window, whose activation can be a hundred times longer than all others.",
        *superposition_meaning.limits(result),
    ]


# Tables -------------------------------------------------------------------------------------------


_SHORT = {
    "null model": "SAE, null model",
    "random dictionary": "random, trained",
    "pca": "PCA, first",
    "pca per position": "PCA, largest",
    "neurons": "neurons",
    "random error": "random error",
    "mean": "mean",
}


def digests(result: Result) -> list[Digest]:
    """The dictionaries side by side: short for a terminal, with more on the page."""
    rows = rows_of(result)
    if not rows:
        return []
    title = "The SAE and what it is compared with"
    loss = "Loss: spliced minus clean, nats per token, paired by document. "
    recovered = "Recovered: of what zero or the mean in its place costs, where that is above 0."
    names = "random, trained: fixed random decoder. PCA, largest: each position's own components. "
    short = [_cells(result, row, _SHORT.get(n, name_of(n)), False) for n, row in rows.items()]
    whole = [_cells(result, row, name_of(n), True) for n, row in rows.items()]
    return [
        Digest(title, tuple(short[0]), _body(short), loss + names + recovered, page=False),
        Digest(title, tuple(whole[0]), _body(whole), loss + recovered, terminal=False),
        *superposition_meaning.digests(result),
    ]


def _body(rows: list[dict[str, str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row.values()) for row in rows)


def _cells(result: Result, row: Mapping[str, Any], name: str, whole: bool) -> dict[str, str]:
    """heading -> cell."""
    cells = {"dictionary": name, "L0": _one(row.get("l0")), "FVU": share(row.get("fvu"))}
    if whole:
        ends = interval(row.get("fvu_low"), row.get("fvu_high"), share)
        cells |= {"FVU, 95% interval": ends, "dead": percent(row.get("dead_fraction"))}
    if "loss_delta" not in row:
        return cells
    cells |= {
        "loss": signed(row.get("loss_delta")),
        "95% interval": interval(row.get("loss_delta_low"), row.get("loss_delta_high")),
        "KL": unsigned(row.get("kl")),
    }
    for kind in ("zero", "mean"):
        known = costs(result, kind)
        recovered = share(row.get(f"loss_recovered_{kind}")) if known else DASH
        cells[f"recovered, {kind}" if whole else f"rec.\n{kind}"] = recovered
    return cells


def _features(table: pd.DataFrame) -> list[tuple[str, list[str]]]:
    out = [("feature", [count(v) for v in table["feature"]])]
    out.append(("density", [unsigned(v, 5) for v in table["density"]]))
    out.append(("largest", [_one(v) for v in table["max_activation"]]))
    for name, heading in (("top_tokens", "most active at"), ("promoted_tokens", "promotes")):
        out.append((heading, [listed(tokens, 3) for tokens in table[name]]))
    if has(table, "nearest_neuron_cosine"):
        out.append(("cosine,\nneuron", [_one(v) for v in table["nearest_neuron_cosine"]]))
    return out


def compare(result: Result) -> list[tuple[str, str]]:
    """What runs are compared by."""
    found = result.summary
    out = [(name, count(found.get(name))) for name in ("layer", "features", "train_tokens")]
    for name, words, form in (
        ("loss_delta", f"loss change with the reconstruction in place ({NATS})", signed),
        ("fvu", "share of variance unexplained", unsigned),
        ("l0", "features active per position", unsigned),
    ):
        if number(found.get(name)) is not None:
            ends = interval(found.get(f"{name}_low"), found.get(f"{name}_high"), form)
            out.append((words, f"{form(found[name])} {ends}".strip()))
    if number(found.get("dead_fraction")) is not None:
        value = f"{percent(found['dead_fraction'])} in {count(found.get('dead_tokens'))} positions"
        out.append(("dead features", value))
    return out


VIEW = View(
    question="Which features does a sparse autoencoder find in an MLP's output, and how good is "
    "it?",
    findings=findings,
    limits=limits,
    digests=digests,
    rank={"features": (("max_activation", False),)},
    narrow={"features": _features},
    compare=compare,
    quiet=frozenset({"baselines", "contexts", "density", "training"})
    | superposition_meaning.TABLES,
    browser=Browser(
        title="Browse the features",
        noun="feature",
        table="features",
        by=("feature",),
        shown=(
            ("density", "density"),
            ("max_activation", "largest"),
            ("value_kurtosis", "kurtosis of logits"),
            ("nearest_neuron", "nearest neuron"),
            ("nearest_neuron_cosine", "cosine"),
        ),
        tokens=(
            ("top_tokens", "most active at"),
            ("promoted_tokens", "promotes"),
            ("suppressed_tokens", "suppresses"),
            ("concept", "best label"),
        ),
        first=("max_activation",),
        examples="contexts",
        text=("prefix", "token", "following"),
        where=(
            ("next_token", "next token"),
            ("document", "document"),
            ("window", "window"),
            ("position", "position"),
        ),
        measured=(("activation", "activation"),),
        shade=("active_from", "active_to", "active_value"),
        silent="It fires at none of the judged positions: there is no context to show.",
    ),
)

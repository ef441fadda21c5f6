"""How an `asymmetry` run is told: findings in words, what they do not show, the small tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from interp.report.view import Digest, Grid, View, has
from interp.report.words import (
    DASH,
    NATS,
    count,
    head_label,
    interval,
    mapping,
    number,
    signed,
    unsigned,
    visible,
)
from interp.results import Result

CLAIM = (0.3, 0.5)
HEADLINE = "content_centred"
KINDS = {
    "content_centred": "row and column means removed, contents only",
    "centred": "row and column means removed",
    "content": "contents only (both at rotary offset 0)",
    "real": "scores as they are",
}
VARIANTS = {
    "swap_kept": "contents exchanged, first column kept",
    "permuted": "control: exchanged half from permuted tokens",
    "half_kept": "control: scores halved, first column kept",
    "amplified": "control: antisymmetric part doubled",
    "literal_kept": "(S + S^T)/2, first column kept",
    "swap": "contents exchanged everywhere",
    "literal": "(S + S^T)/2 everywhere",
    "half": "control: scores halved everywhere",
}
TEXTS = {"natural": "text", "repeated": "repeated random tokens"}


def ratio(value: Any, digits: int = 2) -> str:
    """A number between -1 and 1."""
    found = number(value)
    if found is None:
        return DASH
    text = f"{found:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def claim(result: Result, kind: str) -> Mapping[str, Any]:
    """The quartiles over heads of one kind of score correlation."""
    return mapping(mapping(result.summary.get("claim")).get(kind))


def change(result: Result, text: str, variant: str) -> Mapping[str, Any]:
    """The loss change with all heads changed."""
    return mapping(mapping(mapping(result.summary.get("symmetrise")).get(text)).get(variant))


def rotary(result: Result) -> bool:
    """Whether the model has rotary embedding."""
    return bool(number(result.model.get("rotary_fraction")))


def over_training(result: Result) -> bool:
    """Whether this is several checkpoints."""
    return "checkpoints" in result.summary


# Findings -----------------------------------------------------------------------------------------


def findings(result: Result) -> list[str]:
    """Plain sentences, most important first; what was not measured is left out."""
    if over_training(result):
        return _training(result)
    parts: Iterable[str | None] = (
        _claim_sentence(result),
        _claim_raw(result),
        _weights(result),
        _layers(result),
        _null(result),
        _on_data(result),
        _controls(result),
        *_together(result),
        *_single(result),
        _eigenvalues(result),
        _offsets(result),
    )
    return [part for part in parts if part]


def _quartiles(found: Mapping[str, Any]) -> str:
    return (
        f"median {ratio(found.get('median'))}, middle half {ratio(found.get('q25'))} to "
        + ratio(found.get("q75"))
    )


def _ends(found: Mapping[str, Any], name: str) -> str:
    ends = interval(found.get(f"{name}_low"), found.get(f"{name}_high"), ratio)
    return f"{ratio(found.get(name))} {ends}".strip()


def _claim_sentence(result: Result) -> str | None:
    found = claim(result, HEADLINE)
    if not found:
        return None
    n = count(result.summary.get("documents"))
    says = "lies" if found.get("iqr_within") else "does not lie"
    only = "; contents only" if rotary(result) else ""
    inside, below, above = (count(found.get(f"heads_{w}")) for w in ("within", "below", "above"))
    return (
        "Claim tested: S_ij and S_ji correlate at only 0.3 to 0.5. In what is specific to a pair "
        f"of tokens (row and column means removed{only}), the median over "
        f"{count(found.get('heads'))} heads is {_ends(found, 'median')} and the middle half "
        f"reaches from {_ends(found, 'q25')} to {_ends(found, 'q75')} (95% intervals over {n} "
        f"documents): it {says} within 0.3 to 0.5. {inside} heads are inside, {below} below, "
        f"{above} above; they range from {ratio(found.get('min'))} to "
        f"{ratio(found.get('max'))}, so no one number "
        "stands for the model."
    )


def _claim_raw(result: Result) -> str | None:
    found = claim(result, "real")
    if not found:
        return None
    says = "within" if found.get("iqr_within") else "not within"
    text = (
        f"Taken as they are, the scores correlate at median {_ends(found, 'median')}, middle half "
        f"{ratio(found.get('q25'))} to {ratio(found.get('q75'))}: {says} 0.3 to 0.5. These include "
        "row constants, which softmax ignores and the model does not determine"
    )
    if result.summary.get("biases"):
        text += ", and what the biases of queries and keys add"
    return text + "."


def _weights(result: Result) -> str | None:
    found = mapping(result.summary.get("symmetry"))
    if number(found.get("median")) is None:
        return None
    text = (
        f"In the weights, A = W_Q W_K^T of {count(result.summary.get('heads'))} heads has symmetry "
        f"{_quartiles(found)}, from {ratio(found.get('min'))} to {ratio(found.get('max'))} (1: "
        "symmetric, 0: unrelated to its transpose, -1: antisymmetric)"
    )
    folded = mapping(result.summary.get("symmetry_folded"))
    if folded:
        text += f"; with the norm folded in, {_quartiles(folded)}"
    return text + "."


def _layers(result: Result) -> str | None:
    found = mapping(result.summary.get("layer_symmetry"))
    if number(found.get("median")) is None:
        return None
    return f"Of whole layers (sum over heads), symmetry has {_quartiles(found)}."


def _null(result: Result) -> str | None:
    null, outside = mapping(result.summary.get("null")), result.summary.get("outside_null")
    if not isinstance(outside, Mapping):
        return None
    gaussian = mapping(mapping(result.summary.get("gaussian")).get("symmetry"))
    return (
        f"Re-paired heads (queries of one, keys of another; {count(null.get('pairs'))} pairs) "
        f"have median {ratio(null.get('median'), 3)}, 95% of them between "
        f"{ratio(null.get('low'), 3)} and {ratio(null.get('high'), 3)}: "
        f"{count(outside.get('above'))} of {count(result.summary.get('heads'))} heads lie above "
        f"(more symmetric), {count(outside.get('below'))} below; 2.5% on either side would be by "
        f"chance. Gaussian matrices of this shape: {ratio(gaussian.get('mean'), 4)} (sd "
        f"{ratio(gaussian.get('sd'), 4)})."
    )


def _on_data(result: Result) -> str | None:
    found = mapping(result.summary.get("rank_correlation"))
    if number(found.get("symmetry_data")) is None:
        return None
    return (
        "Rank correlation over heads with the headline score correlation: "
        f"{ratio(found.get('symmetry'))} for the raw weights' symmetry, "
        f"{ratio(found.get('symmetry_data'))} once A is weighted by the covariance of what it "
        "meets (symmetry_data). Raw weights count directions that never occur."
    )


def _controls(result: Result) -> str | None:
    summary = result.summary
    same, other = number(summary.get("control_same")), mapping(summary.get("control_repaired"))
    if same is None:
        return None
    text = (
        f"Controls: keys set to queries correlate at {ratio(same, 4)} (the smallest of all heads "
        "and documents)"
    )
    if other:
        text += (
            f"; re-paired heads at median {ratio(other.get('median'))} (95% between "
            f"{ratio(other.get('low'))} and {ratio(other.get('high'))}), which "
            f"{count(summary.get('above_repaired'))} heads exceed"
        )
    free = mapping(summary.get("offsets_removed"))
    if number(free.get("content_offsets_removed")) is not None:
        text += (
            "; with the mean of each offset removed too, the headline median is "
            f"{ratio(free.get('content_offsets_removed'))}"
        )
    return text + "."


def _nats(found: Mapping[str, Any]) -> str:
    ends = interval(found.get("low"), found.get("high"), _three)
    return f"{_three(found.get('mean'))} {ends}".strip()


def _three(value: Any) -> str:
    found = number(value)
    return DASH if found is None else f"{found:+.3f}" if abs(found) >= 0.0005 else signed(found)


def _together(result: Result) -> list[str]:
    out = []
    for text, words in TEXTS.items():
        swap = change(result, text, "swap_kept")
        if not swap:
            continue
        gap = change(result, text, "swap_kept - permuted")
        low, high = number(gap.get("low")), number(gap.get("high"))
        if low is None or high is None:
            verdict = "one document gives no interval, so this says nothing yet"
        elif low > 0:
            verdict = "symmetrising costs more than noise in the same place"
        elif high < 0:
            verdict = (
                "symmetrising costs less than noise in the same place, so the loss is not the "
                "price of symmetry itself"
            )
        else:
            verdict = "it cannot be told from noise in the same place"
        base = unsigned(mapping(result.summary.get("baseline_loss")).get(text))
        out.append(
            f"All heads symmetrised at once, on {words} (loss {base} {NATS} before): contents "
            f"exchanged with the first-position column kept {_nats(swap)}; the same with permuted "
            f"tokens {_nats(change(result, text, 'permuted'))}; difference {_nats(gap)}: "
            f"{verdict}. "
            f"Halved scores alone: {_nats(change(result, text, 'half_kept'))}; literally "
            f"(S + S^T)/2, first column included: {_nats(change(result, text, 'literal'))}, which "
            "also breaks the attention that rests on the first position."
        )
    return out


def _single(result: Result) -> list[str]:
    out = []
    table = result.tables.get("asymmetry", pd.DataFrame())
    for text, words in TEXTS.items():
        found = mapping(mapping(result.summary.get("single_heads")).get(text))
        if number(found.get("worse_than_control")) is None:
            continue
        told = (
            f"One head at a time on {words} ({count(found.get('documents'))} documents): for "
            f"{count(found.get('worse_than_control'))} heads symmetrising raises the loss more "
            f"than its control does, for {count(found.get('better_than_control'))} less (q < 0.05)"
        )
        column = "loss_delta_excess" + ("" if text == "natural" else "_repeated")
        if has(table, column):
            top = table.nlargest(3, column)
            named = ", ".join(
                f"{head_label(layer, head)} ({signed(value)})"
                for layer, head, value in zip(top["layer"], top["head"], top[column], strict=True)
            )
            told += f"; largest excess over the control: {named} {NATS}"
        out.append(told + ".")
    return out


def _eigenvalues(result: Result) -> str | None:
    share = number(result.summary.get("positive_real"))
    if share is None:
        return None
    rank = mapping(mapping(result.summary.get("gaussian")).get("antisymmetric_rank"))
    return (
        f"In the median head {ratio(share)} of A's nonzero eigenvalues have a positive real part "
        "(0.5 for unrelated matrices; more: tokens ask for their like), and its antisymmetric part "
        f"has effective rank {unsigned(result.summary.get('antisymmetric_rank'), 0)} "
        f"(Gaussian matrices: {unsigned(rank.get('mean'), 0)})."
    )


def _offsets(result: Result) -> str | None:
    found = mapping(result.summary.get("offsets"))
    if len(found) < 2:
        return None
    last = max(found, key=lambda key: number(key) or 0)
    return (
        f"A alone is the form at rotary offset 0; at offset {count(last)} the median symmetry is "
        f"{ratio(found.get(last))}, against {ratio(found.get('0'))} at 0."
    )


def _training(result: Result) -> list[str]:
    found = mapping(result.summary.get("checkpoints"))
    named = [(name, mapping(values)) for name, values in found.items()]
    if not named:
        return []
    first, last = named[0], named[-1]
    top = max(named, key=lambda item: number(item[1].get("layer_symmetry")) or -1.0)
    return [
        f"Over {len(named)} checkpoints, median symmetry of whole layers goes from "
        f"{ratio(first[1].get('layer_symmetry'), 3)} ({visible(first[0], 40)}) to "
        f"{ratio(last[1].get('layer_symmetry'), 3)} ({visible(last[0], 40)}), and is largest at "
        f"{visible(top[0], 40)} ({ratio(top[1].get('layer_symmetry'), 3)}).",
        f"Of single heads the median goes from {ratio(first[1].get('symmetry'), 3)} to "
        f"{ratio(last[1].get('symmetry'), 3)}; re-paired heads end at "
        f"{ratio(last[1].get('null'), 3)}.",
    ]


# What the numbers are not -------------------------------------------------------------------------


def limits(result: Result) -> list[str]:
    """What the numbers are, and what they are not."""
    out = [
        "A symmetric score is not symmetric attention: the causal mask and the softmax come after "
        "it, and a token never asks a later one. S_ji for i > j is what the model's weights would "
        "give; the model does not use it.",
        "symmetry weighs all directions of the residual stream alike, also those that text never "
        "takes. A head can look unrelated to its transpose in the weights and ask symmetrically on "
        "text, and the other way round.",
        "A is made of raw weights without biases. "
        + (
            "Here queries or keys have biases: they are in all scores and score correlations; "
            "centring removes what they add to whole rows and columns, which is all they add where "
            "contents alone are taken."
            if result.summary.get("biases")
            else "Here neither queries nor keys have biases."
        ),
    ]
    if rotary(result):
        out.append(
            "This model turns queries and keys by their positions: A is the form for query and key "
            "at the same position. 'Contents only' correlations leave the turning out; the others "
            "have it in, so that S_ij and S_ji then differ by the direction of the offset too."
        )
    if result.summary.get("claim"):
        out.append(
            "Row means are removed because softmax ignores them, so that the model does not "
            "determine them; column means because they say how much a token draws from everyone, "
            "which is real, but not a matter between two tokens. They are the means of the "
            "included cells of each document, the diagonal counted. Correlations are per document, "
            "then averaged; intervals treat documents as the unit and heads as given. The "
            "quartiles' intervals are jackknife t intervals."
        )
    if "symmetrise" in result.tables:
        out.append(
            "When contents are exchanged, queries and keys move with their biases and are turned "
            "for the position they come to; the first position's column and special tokens stay. "
            "The control takes the exchanged half from permuted tokens of the same document, which "
            "may be later ones: it is noise, not a model."
        )
        out.append(
            "A loss change says what the trained model relies on, not whether a model trained with "
            "symmetric scores would do worse."
        )
    out.append(
        "Numbers are of this model, and those on text of texts like this sample and this length."
    )
    return out


# Small tables -------------------------------------------------------------------------------------


def digests(result: Result) -> list[Digest]:
    """Correlations by kind, the loss changes with all heads changed, and the checkpoints."""
    made = (
        _claim_digest(result),
        _symmetrise_digest(result),
        _weights_digest(result),
        _training_digest(result),
    )
    return [digest for digest in made if digest]


def _claim_digest(result: Result) -> Digest | None:
    rows = []
    for kind, words in KINDS.items():
        found = claim(result, kind)
        if not found or (kind.startswith("content") and not rotary(result) and kind != HEADLINE):
            continue
        if kind == "centred" and not rotary(result):
            continue
        rows.append(
            (
                words if rotary(result) else words.removesuffix(", contents only"),
                _ends(found, "median"),
                f"{ratio(found.get('q25'))} to {ratio(found.get('q75'))}",
                "yes" if found.get("iqr_within") else "no",
                f"{count(found.get('heads_within'))} of {count(found.get('heads'))}",
            )
        )
    if not rows:
        return None
    return Digest(
        title="Correlation of S_ij with S_ji over heads (Pearson r, mean over documents)",
        head=("scores", "median [95%]", "middle half", "in 0.3-0.5", "heads in it"),
        rows=tuple(rows),
        note="In 0.3-0.5: whether the middle half (interquartile range) of the heads lies within.",
    )


def _weights_digest(result: Result) -> Digest | None:
    if over_training(result):
        return None
    rows = []
    for key, words in (
        ("symmetry", "heads"),
        ("null", "re-paired heads"),
        ("symmetry_folded", "heads, folded"),
        ("null_folded", "re-paired, folded"),
        ("layer_symmetry", "whole layers"),
    ):
        found = mapping(result.summary.get(key))
        if number(found.get("median")) is not None:
            ends = (("q25", "q75"), ("low", "high"), ("min", "max"))
            spans = (f"{ratio(found.get(a), 3)} to {ratio(found.get(b), 3)}" for a, b in ends)
            rows.append((words, ratio(found.get("median"), 3), *spans))
    return Digest(
        title="Symmetry of A = W_Q W_K^T",
        head=("of", "median", "middle half", "middle 95%", "all"),
        rows=tuple(rows),
        note="Folded: the norm before W_Q and W_K multiplied into them."
        if result.summary.get("symmetry_folded")
        else "",
    )


def _symmetrise_digest(result: Result) -> Digest | None:
    texts = [text for text in TEXTS if change(result, text, "swap_kept")]
    if not texts:
        return None
    rows = [
        (words, *(_nats(change(result, text, variant)) or DASH for text in texts))
        for variant, words in VARIANTS.items()
    ]
    return Digest(
        title=f"All heads changed at once: loss change, {NATS} [95%]",
        head=("scores become", *(TEXTS[text] for text in texts)),
        rows=tuple(rows),
        note="Only the first row against its controls says something of symmetry.",
    )


def _training_digest(result: Result) -> Digest | None:
    found = mapping(result.summary.get("checkpoints"))
    if not found:
        return None
    rows = tuple(
        (
            visible(name, 40),
            *(ratio(mapping(values).get(key), 3) for key in ("layer_symmetry", "symmetry", "null")),
        )
        for name, values in found.items()
    )
    return Digest(
        title="Median symmetry per checkpoint",
        head=("checkpoint", "whole layers", "heads", "re-paired heads"),
        rows=rows,
    )


def narrow(table: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Columns for 80 characters."""

    def column(name: str, form: Any) -> list[str]:
        return [form(value) for value in table[name]]

    def pair(low: str, high: str, form: Any) -> list[str]:
        return [interval(*ends, form) or DASH for ends in zip(table[low], table[high], strict=True)]

    labels = [head_label(*at) for at in zip(table["layer"], table["head"], strict=True)]
    out = [("head", labels)]
    if "checkpoint" in table.columns:
        out.append(("checkpoint", column("checkpoint", lambda value: visible(value, 16))))
    if has(table, "loss_delta_excess"):  # the rows are in its order
        out.append(("loss change\nover control", column("loss_delta_excess", signed)))
        out.append(("q", column("excess_q", lambda value: unsigned(value, 3))))
    out.append(("sym-\nmetry", column("symmetry", ratio)))
    if has(table, "null_percentile"):
        out.append(("null\nper-\ncentile", column("null_percentile", lambda v: unsigned(v, 1))))
    if has(table, "symmetry_folded"):
        out.append(("norm\nfolded", column("symmetry_folded", ratio)))
    if has(table, "symmetry_data"):
        out.append(("on\ndata", column("symmetry_data", ratio)))
    name = "score_correlation_content_centred"
    if has(table, name):
        out.append(("score\ncorr.", column(name, ratio)))
        out.append(("95%\ninterval", pair(f"{name}_low", f"{name}_high", ratio)))
        out.append(("not\ncentred", column("score_correlation", ratio)))
    if not has(table, name):
        if has(table, "positive_real"):
            out.append(("eigen-\nvalues\n> 0", column("positive_real", ratio)))
        out.append(("direct-\nionality", column("directionality", ratio)))
        if has(table, "stable_rank"):
            out.append(("stable\nrank", column("stable_rank", lambda value: unsigned(value, 1))))
    return out


def narrow_layers(table: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Columns for 80 characters, of whole layers."""

    def middle(prefix: str) -> list[str]:
        ends = zip(table[f"{prefix}_q25"], table[f"{prefix}_q75"], strict=True)
        return [f"{ratio(low)} to {ratio(high)}" for low, high in ends]

    out = [("layer", [count(value) for value in table["layer"]])]
    if "checkpoint" in table.columns:
        out.insert(0, ("checkpoint", [visible(v, 16) for v in table["checkpoint"]]))
    for heading, name in (
        ("whole layer\nsymmetry", "symmetry"),
        ("direct-\nionality", "directionality"),
    ):
        out.append((heading, [ratio(value) for value in table[name]]))
    out.append(("heads'\nmedian", [ratio(value) for value in table["head_median"]]))
    out.append(("heads'\nmiddle half", middle("head")))
    if has(table, "correlation_median"):
        out.append(("score corr.\nmedian", [ratio(value) for value in table["correlation_median"]]))
        out.append(("score corr.\nmiddle half", middle("correlation")))
    return out


def compare(result: Result) -> list[tuple[str, str]]:
    """What runs are compared by."""
    out = []
    for kind, words in KINDS.items():
        found = claim(result, kind)
        if found:
            value = f"{_ends(found, 'median')}, {ratio(found.get('q25'))} to "
            value += f"{ratio(found.get('q75'))}"
            out.append((f"score correlation: {words} (median over heads, middle half)", value))
    for name, words in (("symmetry", "heads"), ("layer_symmetry", "whole layers")):
        found = mapping(result.summary.get(name))
        if number(found.get("median")) is not None:
            out.append((f"symmetry of A, {words}", _quartiles(found)))
    null = mapping(result.summary.get("null"))
    if number(null.get("low")) is not None:
        value = f"{ratio(null.get('low'), 3)} to {ratio(null.get('high'), 3)}"
        out.append(("symmetry of re-paired heads (null), middle 95%", value))
    return out


VIEW = View(
    question="Does i asking j differ from j asking i, and does the model need the difference?",
    findings=findings,
    limits=limits,
    digests=digests,
    rank={
        "asymmetry": (
            ("loss_delta_excess", True),
            ("score_correlation_content_centred", False),
            ("symmetry", True),
        ),
    },
    narrow={"asymmetry": narrow, "asymmetry_layers": narrow_layers},
    quiet=frozenset({"offsets", "examples", "symmetrise"}),
    grid=Grid(
        table="examples",
        noun="head",
        by=("layer", "head"),
        asks=("query", "query_token"),
        asked=("key", "key_token"),
        values=("content", "score"),
    ),
    compare=compare,
)

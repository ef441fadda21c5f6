"""How a checkpoint with heads cut out is told: what it costs in loss, and what it saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interp.report.view import Digest
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

_PART = {
    "held_out": "documents that had no say in the choice",
    "sample": "documents of the sample",
    "curve": "documents that also chose the heads, so a little too low",
}
_SIZES = {
    "parameters": "parameters",
    "weights_per_token": "weights that a decoded token is multiplied with",
    "cache_bytes_per_token": "KV cache, bytes per token",
}


def export_of(result: Result) -> Mapping[str, Any]:
    """The summary's entry; empty where nothing was cut out."""
    found = result.summary.get("export")
    return found if isinstance(found, Mapping) else {}


def findings(result: Result) -> list[str]:
    """What was cut out and what the loss says; whether it is faster."""
    export = export_of(result)
    if number(export.get("loss_delta")) is None:
        return []
    heads = export.get("heads")
    cut = count(len(heads)) if isinstance(heads, list) else "Some"
    ends = interval(export.get("ci_low"), export.get("ci_high"))
    kept = ", their mean output kept as a bias" if export.get("compensated") else ""
    loads = visible(export.get("loader"), 40)
    which = _PART.get(str(export.get("documents_part")), "documents")
    out = [
        f"{cut} heads are cut out of the checkpoint in {visible(export.get('folder'), 200)}{kept}: "
        f"the loss goes from {unsigned(export.get('loss_before'))} to "
        f"{unsigned(export.get('loss_after'))}, {signed(export['loss_delta'])} {ends} {NATS}, "
        f"over {count(export.get('documents'))} {which}. It loads with "
        f"{loads}; its logits are the masked model's to {_gap(export.get('logit_gap'))} of the "
        "largest."
    ]
    saved = [
        f"{1 - after / before:.1%} of the {words.replace(', bytes per token', ' of a token')}"
        for key, words in _SIZES.items()
        if (before := number(export.get(f"{key}_original")))
        and (after := number(export.get(key))) is not None
    ]
    speed = _speed_words(result)
    if saved:
        out.append(f"Gone are {', '.join(saved)}.{f' {speed}' if speed else ''}")
    return out


def _gap(value: Any) -> str:
    found = number(value)
    return f"{found:.0e}" if found else "the last bit"


def _speed_words(result: Result) -> str:
    table = result.tables.get("speed")
    if table is None or table.empty:
        return ""
    told = []
    for word in ("faster", "slower", "no difference"):
        rows = table[table["verdict"] == word]
        where = [
            f"{visible(phase, 10)} at batch {count(batch)} ({unsigned(ratio, 2)} times)"
            for phase, batch, ratio in zip(
                *(rows[name] for name in ("phase", "batch", "speedup")), strict=True
            )
        ]
        if where:
            label = "no difference beyond the spread" if word == "no difference" else word
            told.append(f"{label}: {', '.join(where)}")
    return f"Measured speed, {'; '.join(told)}."


def digests(result: Result) -> list[Digest]:
    """Sizes, and speed."""
    export = export_of(result)
    rows = []
    for key, words in _SIZES.items():
        before, after = number(export.get(f"{key}_original")), number(export.get(key))
        if before and after is not None:
            rows.append((words, count(before), count(after), f"{after / before:.3f}"))
    made = []
    if rows:
        made.append(
            Digest(
                title="The checkpoint without these heads",
                head=("", "before", "after", "ratio"),
                rows=tuple(rows),
            )
        )
    table = result.tables.get("speed")
    if table is not None and not table.empty:
        made.append(_speed_digest(table, mapping(export.get("speedup_by_weights"))))
    return made


def _speed_digest(table: Any, by_weights: Mapping[str, Any]) -> Digest:
    ideal = ", ".join(f"{unsigned(v, 2)} times in {visible(p, 10)}" for p, v in by_weights.items())
    return Digest(
        title="Speed (tokens per second)",
        head=("phase", "batch", "before", "after", "speed-up [quartiles]", "verdict"),
        rows=tuple(
            (
                visible(row.phase, 10),
                count(row.batch),
                count(round(row.original)),
                count(round(row.pruned)),
                f"{unsigned(row.speedup, 2)} [{unsigned(row.speedup_q1, 2)}, "
                f"{unsigned(row.speedup_q3, 2)}]",
                visible(row.verdict, 20),
            )
            for row in table.itertuples()
        ),
        note=f"Both models timed in turn, {count(table['rounds'].min())} or more rounds, prompts "
        f"of {count(table['prompt'].max())} tokens; median and quartiles over rounds. Faster or "
        "slower: the 95% interval of the mean ratio is."
        + (f" By the weights alone that a token meets it could be {ideal}." if ideal else ""),
    )


def limits(result: Result) -> list[str]:
    """What cutting heads out does not say."""
    if not export_of(result):
        return []
    share = percent(len(export_of(result).get("heads") or []) / (_heads(result) or 1))
    return [
        f"{share} of the heads is not that share of the work: the MLP and the unembedding stay. "
        "The speed is this machine's, in this dtype, with transformers' own forward pass.",
        "Nothing was trained after the heads were cut out; training on would recover part of the "
        "loss.",
    ]


def _heads(result: Result) -> float | None:
    return number(result.summary.get("heads"))

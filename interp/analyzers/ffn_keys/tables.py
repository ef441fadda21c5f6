"""The ffn-keys result: tables with units, and the summary."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from interp import stats
from interp.analyzers.ffn_keys import answers, columns, kinds, kinds_columns, reading
from interp.analyzers.ffn_keys.values import BASES, Agreement, Spoken
from interp.results import Result, of_run

if TYPE_CHECKING:
    from interp.analyzers.ffn_keys import Run

SUFFIX = dict(zip(BASES, ("", "_folded"), strict=True))


def assemble(run: Run) -> Result:
    """Everything a run has measured, as a Result."""
    layers = [layer for layer in run.layers if run.found[layer].documents]
    tables = {
        "keys": pd.concat([_keys(run, layer) for layer in layers], ignore_index=True),
        "triggers": _triggers(run),
        "ffn_layers": _layers(run, layers),
    }
    known = {
        "keys": columns.KEYS | kinds_columns.KEYS,
        "triggers": columns.TRIGGERS,
        "ffn_layers": columns.LAYERS | kinds_columns.LAYERS,
        "mutation": kinds_columns.MUTATION,
        "histogram": kinds_columns.HISTOGRAM,
        "prompt_keys": kinds_columns.PROMPT_KEYS,
        "prompt_layers": kinds_columns.PROMPT_LAYERS,
    }
    if (mutated := kinds.mutation_table(run.kinds)) is not None:
        tables["mutation"] = mutated
    if run.collected:
        parts = [run.collected[layer].histogram(layer) for layer in layers]
        tables["histogram"] = pd.concat(parts, ignore_index=True)
    summary = _summary(run, layers) | kinds.summary(run.kinds, layers, run.config.seed)
    if run.asked is not None:
        tables |= answers.prompt_tables(run.model, run.asked)
        summary["prompt"] = answers.prompt_summary(run.model, run.asked)
    of_summary = columns.SUMMARY | kinds_columns.SUMMARY
    return of_run(run, "ffn-keys", tables, known, summary, of_summary)


# One row per key ----------------------------------------------------------------------------------


def _keys(run: Run, layer: int) -> pd.DataFrame:
    found = run.found[layer]
    table: dict[str, Any] = {
        "layer": layer,
        "key": run.keys,
        "coefficient_mean": found.mean().numpy(),
        "coefficient_max": _extreme(run, layer, 1),
    }
    if -1 in run.signs:
        table["coefficient_min"] = _extreme(run, layer, -1)
    active = found.active()
    table["active_fraction"] = np.nan if active is None else active.numpy()
    table["value_norm"] = run.value_norms(layer)
    for basis, suffix in SUFFIX.items():
        if (layer, basis) in run.spoken:
            table |= _spoken(run, layer, run.spoken[layer, basis], suffix)
    return pd.DataFrame(table | kinds.key_columns(run.kinds, layer, run.signs))


def _extreme(run: Run, layer: int, sign: int) -> np.ndarray:
    return sign * run.top[layer, sign].values.amax(1).double().numpy() + 0.0


def _spoken(run: Run, layer: int, spoken: Spoken, suffix: str) -> dict[str, Any]:
    assert run.reader is not None
    out: dict[str, Any] = {}
    for end, ids in (("top", spoken.top), ("bottom", spoken.bottom)):
        out[f"value_{end}_ids{suffix}"] = ids.tolist()
        out[f"value_{end}_tokens{suffix}"] = run.reader.labels(ids).tolist()
    out[f"value_max_prob{suffix}"] = spoken.max_prob
    out[f"value_kurtosis{suffix}"] = spoken.kurtosis
    ends = ((1, "", spoken.top, spoken.rank), (-1, "_negative", spoken.bottom, spoken.rank_down))
    for sign, name, ids, rank in ends:
        if sign in run.signs:
            following = run.reader.next_of_first(run.top[layer, sign])
            agrees = pd.array((ids[:, 0] == following).tolist(), dtype="boolean")
            agrees[following < 0] = pd.NA
            out[f"agreement{name}{suffix}"] = agrees
            out[f"next_token_rank{name}{suffix}"] = pd.array(rank, dtype="Float64").astype("Int64")
    return out


# One row per trigger ------------------------------------------------------------------------------


def _triggers(run: Run) -> pd.DataFrame:
    assert run.reader is not None
    flat = reading.flat(run.top, run.keys)
    place = flat.pop("place")
    read = run.reader.read(flat["document"], place)
    window, position = np.divmod(place, run.text.context)
    following = pd.array(read.following_token, dtype="Int64")
    following[read.following_token < 0] = pd.NA
    table = pd.DataFrame(flat)
    if window.any():
        table["window"] = window
    return table.assign(
        position=position,
        token_id=read.token,
        token=run.reader.labels(read.token),
        next_token_id=following,
        next_token=run.reader.labels(read.following_token),
        # Few places serve many keys: their text is held, and saved, once.
        prefix=pd.Categorical(read.prefix),
        following=pd.Categorical(read.following),
    )


# One row per layer --------------------------------------------------------------------------------


def _layers(run: Run, layers: list[int]) -> pd.DataFrame:
    table: dict[str, Any] = {
        "layer": layers,
        "keys": len(run.keys),
        "documents": [run.found[layer].documents for layer in layers],
        "positions": [run.found[layer].positions for layer in layers],
        "active_fraction_median": [_median(run.found[layer].active()) for layer in layers],
    }
    for basis, suffix in SUFFIX.items():
        if not any((layer, basis) in run.spoken for layer in layers):
            continue
        found = [run.agreed.get((layer, basis), Agreement()) for layer in layers]
        spoken = [run.spoken.get((layer, basis)) for layer in layers]
        table["agreement_keys"] = [one.keys for one in found]
        table[f"agreement_count{suffix}"] = [one.count for one in found]
        for name in ("rate", "low", "high", "null", "null_99", "p"):
            table[f"agreement_{name}{suffix}"] = [getattr(one, name) for one in found]
        table[f"agreement_q{suffix}"] = _adjusted([one.p for one in found])
        table[f"agreement_unigram{suffix}"] = [one.unigram for one in found]
        table[f"agreement_unigram_99{suffix}"] = [one.unigram_99 for one in found]
        ranks = [_median(one and one.rank) for one in spoken]
        table[f"next_token_rank_median{suffix}"] = ranks
        table[f"value_kurtosis_median{suffix}"] = [_median(one and one.kurtosis) for one in spoken]
    more = pd.DataFrame([kinds.layer_columns(run.kinds, layer, run.signs) for layer in layers])
    return pd.concat([pd.DataFrame(table), more], axis=1)


def _median(values: Any) -> float:
    known = np.asarray([] if values is None else values, dtype=float)
    known = known[~np.isnan(known)]
    return float(np.median(known)) if len(known) else np.nan


def _adjusted(p: list[float]) -> np.ndarray:
    values = np.array(p, dtype=float)
    known = ~np.isnan(values)
    if known.any():
        values[known] = stats.benjamini_hochberg(values[known])
    return values


def _summary(run: Run, layers: list[int]) -> dict[str, Any]:
    agreed: dict[str, dict[str, Any]] = {}
    for (layer, basis), one in run.agreed.items():
        agreed.setdefault(str(layer), {})[basis] = dataclasses.asdict(one)
    return {
        "layers": layers,
        "keys": len(run.keys) * len(layers),
        "documents": min(run.found[layer].documents for layer in layers),
        "positions": min(run.found[layer].positions for layer in layers),
        "triggers_per_key": min(run.config.top, *(run.found[i].documents for i in layers)),
        "reconstruction_error": run.error,
        "agreement": agreed,
    }

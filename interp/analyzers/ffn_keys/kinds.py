"""What kind of pattern the keys of a run answer to, and how they mix: parts of a run, as tables.

The measurements are in `patterns` (last tokens), `earlier` (text before), `mutation` (a token
dropped) and `mixture` (many keys at once); here they are run on what a run has found, and become
columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from interp import pieces, stats
from interp.analyzers.ffn_keys import mixture, mutation, trend
from interp.analyzers.ffn_keys.earlier import Earlier, EarlierText
from interp.analyzers.ffn_keys.lens import Lens
from interp.analyzers.ffn_keys.mixture import Mixture
from interp.analyzers.ffn_keys.mutation import Asked, Mutated
from interp.analyzers.ffn_keys.patterns import KINDS, Null, Positions, Surface, Surfaces
from interp.analyzers.ffn_keys.values import Vocabulary
from interp.progress import track
from interp.text import Text

if TYPE_CHECKING:
    from interp.analyzers.ffn_keys import Run

NAMES = {"token": "same_last_token", "bigram": "same_last_bigram", "shape": "same_last_shape"}
ENDS = {1: "", -1: "_negative"}
FEW = 4
"""Layers up to which more documents and positions are looked at, where that is left to us."""
DOCUMENTS, POSITIONS = (200, 64), (1000, 256)
"""Of the mutation test and the mixture, for few layers and for many."""


@dataclass
class Kinds:
    """What has been measured so far, by (layer, sign) or layer.

    nulls: sign -> kind -> null of as many positions as most keys have triggers.
    """

    surface: dict[tuple[int, int], dict[str, Surface]] = field(default_factory=dict)
    nulls: dict[tuple[int, int], dict[str, Null]] = field(default_factory=dict)
    earlier: dict[tuple[int, int], Earlier] = field(default_factory=dict)
    mutated: dict[tuple[int, int], Mutated] = field(default_factory=dict)
    unrelated: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    mixed: dict[int, Mixture] = field(default_factory=dict)
    sampled_documents: int = 0


def names_of(text: Text, at: Positions) -> dict[int, str]:
    """id -> its text, for every id of the text; a part of a character is U+FFFD."""
    tokenizer = text.pool.encoder.tokenizer
    out: dict[int, str] = {}
    for i in np.unique(at.ids).tolist():
        plain = tokenizer.decode([i], clean_up_tokenization_spaces=False)
        out[i] = pieces.UNKNOWN if pieces.UNKNOWN in plain else pieces.label(tokenizer, i)
    return out


def measure(run: Run, out: Kinds) -> None:
    """Everything, cheapest first; `out` holds what there is when it is interrupted."""
    config, seed = run.config, run.config.seed
    at = Positions.of(run.text)
    names = names_of(run.text, at)
    places = {name: at.triggers(run.text, top) for name, top in run.top.items()}
    surfaces, text = Surfaces(at, names, seed), EarlierText(at, names, seed)
    bar = track(len(places), "what triggers share", config.progress)
    for name, one in places.items():
        out.surface[name] = surfaces.measure(one)
        counts = (one >= 0).sum(1)
        out.nulls[name] = surfaces.null(int(np.bincount(counts).argmax()) or 1)
        out.earlier[name] = text.measure(one)
        bar.update(1)
    bar.close()
    few = len(run.layers) <= FEW
    n_documents, n_positions = (
        pair[0 if few else 1] if chosen == "auto" else int(chosen)
        for chosen, pair in (
            (config.sample_documents, DOCUMENTS),
            (config.mixture_positions, POSITIONS),
        )
    )
    documents = at.sample_documents(n_documents, seed)
    out.sampled_documents = len(documents)
    if config.mutation_keys:
        _mutate(run, out, at, places, documents)
    if n_positions and len(run.keys) == run.model.cfg.d_mlp:
        vocabulary = Vocabulary(run.model)
        basis = vocabulary.bases[-1]
        tops = {
            layer: (run.spoken[layer, basis].top[:, 0], run.spoken[layer, basis].bottom[:, 0])
            for layer in run.layers
        }
        out.mixed = mixture.measure(
            run.model,
            at,
            mixture.sample(at, documents, n_positions, seed),
            tops,
            Lens(run.model, vocabulary),
            progress=config.progress,
        )


def _mutate(
    run: Run,
    out: Kinds,
    at: Positions,
    places: dict[tuple[int, int], np.ndarray],
    documents: np.ndarray,
) -> None:
    asked: dict[tuple[int, int], Asked] = {}
    for layer, sign in places:
        # The same keys for both signs; only triggers in the documents that are run.
        mine = mutation.sample_keys(
            np.arange(len(run.keys)), run.config.mutation_keys, run.config.seed, layer
        )
        own = places[layer, sign][mine]
        inside = (own >= 0) & np.isin(at.document[own], documents)
        keys = np.asarray(run.keys)[mine]
        asked[layer, sign] = Asked(layer, keys, np.where(inside, own, -1))
        out.unrelated[layer, sign] = run.found[layer].mean().numpy()[mine]
    found = mutation.measure(
        run.model, at, asked, seed=run.config.seed, progress=run.config.progress
    )
    out.mutated = found


# Columns ------------------------------------------------------------------------------------------


def key_columns(kinds: Kinds, layer: int, signs: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Columns of the keys table, for one layer."""
    table: dict[str, Any] = {}
    for sign in signs:
        if (layer, sign) not in kinds.earlier:
            continue
        end = ENDS[sign]
        for kind in KINDS:
            one = kinds.surface[layer, sign][kind]
            table[f"{NAMES[kind]}{end}"] = one.share
            table[f"{NAMES[kind]}{end}_null"] = one.null
            table[f"{NAMES[kind]}{end}_beyond"] = _known(one.beyond99, one.share)
        before = kinds.earlier[layer, sign]
        table[f"earlier_similarity{end}"] = before.similarity
        table[f"earlier_similarity{end}_null"] = before.null
        gap = before.similarity - before.null
        table[f"earlier_similarity{end}_beyond"] = _known(before.beyond, gap)
    return table


def _known(flags: np.ndarray, values: np.ndarray) -> Any:
    out = pd.array(flags.tolist(), dtype="boolean")
    out[np.isnan(values)] = pd.NA
    return out


def layer_columns(kinds: Kinds, layer: int, signs: tuple[int, ...]) -> dict[str, float]:
    """One row's part of the ffn_layers table."""
    row: dict[str, float] = {}
    for sign in signs:
        if (layer, sign) not in kinds.earlier:
            continue
        end = ENDS[sign]
        for kind in KINDS:
            row |= _surface_row(kinds, layer, sign, kind)
        before = kinds.earlier[layer, sign]
        gap = before.similarity - before.null
        row[f"earlier_similarity{end}"] = _mean(before.similarity)
        row[f"earlier_similarity{end}_null"] = _mean(before.null)
        row |= _interval(f"earlier_gap{end}", gap[~np.isnan(gap)])
        row[f"earlier_gap_median{end}"] = _median(gap)
        row[f"earlier_similarity{end}_beyond"] = _mean(np.where(np.isnan(gap), gap, before.beyond))
        row[f"earlier_same_token{end}"] = before.same_token
    if layer in kinds.mixed:
        row |= _mixture_row(kinds.mixed[layer], kinds)
    return row


def _surface_row(kinds: Kinds, layer: int, sign: int, kind: str) -> dict[str, float]:
    one, null = kinds.surface[layer, sign][kind], kinds.nulls[layer, sign][kind]
    name, known = NAMES[kind] + ENDS[sign], ~np.isnan(one.share)
    return {
        name: _mean(one.share),
        f"{name}_null": null.mean,
        f"{name}_null_95": null.q95,
        f"{name}_null_99": null.q99,
        f"{name}_beyond_95": float(one.beyond95[known].mean()) if known.any() else np.nan,
        f"{name}_beyond_99": float(one.beyond99[known].mean()) if known.any() else np.nan,
        f"{name}_chance_99": one.by_chance[1],
    }


def _mixture_row(mixed: Mixture, kinds: Kinds) -> dict[str, float]:
    width = mixed.n_keys
    row: dict[str, float] = {
        "sampled_positions": len(mixed.document),
        "sampled_documents": len(np.unique(mixed.document)),
    }
    parts = {
        "active_share_90": mixed.active90 / width,
        "active_share_99": mixed.active99 / width,
        "zero_agreement": ~mixed.agrees,
        "zero_agreement_null": ~mixed.agrees_null,
        "unchanged": mixed.moved == mixture.UNCHANGED,
        "refined": mixed.moved == mixture.REFINED,
        "overridden": mixed.moved == mixture.OVERRIDDEN,
        "output_confirms": mixed.same,
    }
    for name, values in parts.items():
        row |= _interval(name, _by_document(values, mixed.document))
    return row


def _by_document(values: np.ndarray, document: np.ndarray) -> np.ndarray:
    """[document] means, the unit of every interval."""
    _, back = np.unique(document, return_inverse=True)
    return np.bincount(back, values.astype(float)) / np.bincount(back)


def _interval(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {name: np.nan, f"{name}_low": np.nan, f"{name}_high": np.nan}
    found = stats.mean_interval(values)
    ends = {f"{name}_low": float(found.low), f"{name}_high": float(found.high)}
    return {name: float(found.mean), **ends}


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else np.nan


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else np.nan


def mutation_table(kinds: Kinds) -> pd.DataFrame | None:
    """One row per layer, sign and dropped token; None where nothing was mutated."""
    rows: list[dict[str, Any]] = []
    for (layer, sign), one in kinds.mutated.items():
        before = one.coefficient["none"]
        count = np.isfinite(before).sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            unrelated = kinds.unrelated[layer, sign] * count / np.nansum(before, axis=1) - 1
        changes = {dropped: one.change(dropped) for dropped in mutation.DROPPED}
        for dropped, change in {**changes, "all": unrelated}.items():
            known = change[np.isfinite(change)]
            if not len(known):
                continue
            q25, median, q75 = np.quantile(known, [0.25, 0.5, 0.75])
            rows.append(
                {
                    "layer": layer,
                    "sign": sign,
                    "dropped": dropped,
                    "keys": len(known),
                    "triggers": int(count.sum()),
                    **_interval("change", known),
                    "change_median": median,
                    "change_q25": q25,
                    "change_q75": q75,
                    "flipped": float((known < -1).mean()),
                }
            )
    return pd.DataFrame(rows) if rows else None


def summary(kinds: Kinds, layers: list[int], seed: int) -> dict[str, Any]:
    """Whether surface falls and semantics rises with depth, and headline shares."""
    measured = [layer for layer in layers if (layer, 1) in kinds.earlier]
    series: dict[str, list[np.ndarray]] = {}
    for layer in measured:
        for kind in KINDS:
            one = kinds.surface[layer, 1][kind]
            series.setdefault(NAMES[kind], []).append(one.share - one.null)
        before = kinds.earlier[layer, 1]
        series.setdefault("earlier_gap", []).append(before.similarity - before.null)
        if (layer, 1) in kinds.mutated:
            for dropped in mutation.DROPPED:
                change = kinds.mutated[layer, 1].change(dropped)
                series.setdefault(f"dropped_{dropped}", []).append(change)
    return {"depth": trend.of(measured, series, seed)}

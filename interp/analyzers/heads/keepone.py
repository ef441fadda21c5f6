"""How much of a layer's attention one head can carry: all others of the layer removed.

Which head is best is tested for every head of the layer, on some documents; what the layer loses
with that one left is then told of others, because the best of many flatters itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from interp import stats
from interp.analyzers.heads.standins import Removal
from interp.interventions import by_layer
from interp.results import Column

if TYPE_CHECKING:
    from interp.analyzers.heads import _Run

NATS = "nats per token"
FLIPS = 500
"""Draws of the null model of the Gini coefficient."""

COLUMNS = {
    "layer": Column("index", "Layer, counted from 0."),
    "heads": Column("heads", "Query heads of the layer."),
    "best_head": Column("index", "The head whose keeping alone cost least where it was chosen."),
    "loss_delta": Column(
        NATS,
        "Loss with all heads of the layer but best_head removed (zero) minus baseline, paired by "
        "document, on documents that had no say in which head is best.",
    ),
    "ci_low": Column(NATS, "Lower end of loss_delta's 95% paired t interval over documents."),
    "ci_high": Column(NATS, "Upper end of loss_delta's 95% paired t interval over documents."),
    "verdict": Column(
        "word",
        "material: interval wholly beyond 0.01 nats; negligible: wholly within; else undecided.",
    ),
    "loss_delta_chosen": Column(NATS, "The same where best_head was chosen: too low."),
    "loss_delta_average": Column(
        NATS, "Mean over all heads of the layer of what keeping that one alone costs."
    ),
    "loss_delta_none": Column(NATS, "Loss with no head of the layer left, minus baseline."),
    "none_low": Column(NATS, "Lower end of loss_delta_none's 95% paired t interval."),
    "none_high": Column(NATS, "Upper end of loss_delta_none's 95% paired t interval."),
}


@dataclass
class KeepOne:
    """What was measured, for layers of two heads or more.

    layers, heads: the layers, and each one's heads.
    choosing: per layer [document, head] loss change with that head alone left, nats per token.
    best: per layer, the place in `heads` of the one that cost least.
    judged, none: [document, layer] loss change with the best one left, and with none, on others.
    """

    layers: list[int]
    heads: list[list[int]]
    choosing: list[np.ndarray]
    best: list[int]
    judged: np.ndarray
    none: np.ndarray


def measure(run: _Run) -> KeepOne | None:
    """Every head of every layer kept alone; None where no layer has two heads."""
    layers = {layer: hs for layer, hs in by_layer(run.all_heads).items() if len(hs) > 1}
    if not layers:
        run.notices.append("--keep-one: no layer has two heads to choose from.")
        return None
    alone = [(layer, h) for layer, hs in layers.items() for h in hs]

    def others(layer: int, kept: int | None) -> Removal:
        return Removal(tuple((layer, h) for h in layers[layer] if h != kept))

    rows = run.text.subset(run.choosing.tolist())
    found = run._sweep(rows, [others(*head) for head in alone], "each head alone").delta
    ends = np.cumsum([len(hs) for hs in layers.values()])[:-1]
    choosing = np.split(found, ends, axis=1)
    best = [int(delta.mean(0).argmin()) for delta in choosing]
    kept = [others(layer, hs[i]) for (layer, hs), i in zip(layers.items(), best, strict=True)]
    none = [others(layer, None) for layer in layers]
    judged = run._sweep(run.judge, [*kept, *none], "the best of each layer").delta
    n = len(layers)
    return KeepOne(
        list(layers), list(layers.values()), choosing, best, judged[:, :n], judged[:, n:]
    )


def table(made: KeepOne) -> pd.DataFrame:
    """One row per layer."""
    kept, none = stats.paired_t(made.judged), stats.paired_t(made.none)
    chosen = [delta.mean(0) for delta in made.choosing]
    return pd.DataFrame(
        {
            "layer": made.layers,
            "heads": [len(hs) for hs in made.heads],
            "best_head": [hs[i] for hs, i in zip(made.heads, made.best, strict=True)],
            "loss_delta": kept.mean,
            "ci_low": kept.low,
            "ci_high": kept.high,
            "verdict": stats.verdict(kept.low, kept.high),
            "loss_delta_chosen": [c[i] for c, i in zip(chosen, made.best, strict=True)],
            "loss_delta_average": [float(c.mean()) for c in chosen],
            "loss_delta_none": none.mean,
            "none_low": none.low,
            "none_high": none.high,
        }
    )


def summary(made: KeepOne, run: _Run) -> dict[str, Any]:
    """Counts, and how unevenly the loss is spread over layers."""
    rows = table(made)
    words = rows["verdict"].to_numpy(dtype=str)
    largest, smallest = (
        rows.iloc[int(i)] for i in (rows["loss_delta"].argmax(), rows["loss_delta"].argmin())
    )
    lower = (words == "material") & (rows["loss_delta"].to_numpy() < 0)
    return {
        "verdicts": {w: int((words == w).sum()) for w in ("material", "negligible", "undecided")},
        "material_improve": int(lower.sum()),
        "unevenness": unevenness(made.judged, run.config.seed),
        "largest": {"layer": int(largest["layer"]), "loss_delta": float(largest["loss_delta"])},
        "smallest": {"layer": int(smallest["layer"]), "loss_delta": float(smallest["loss_delta"])},
        "documents": len(made.judged),
        "documents_chosen": len(made.choosing[0]),
        "chosen_on_the_same": run.judge is run.text,
    }


def unevenness(delta: np.ndarray, seed: int) -> dict[str, float]:
    """Gini coefficient of |mean loss change| over parts, against parts that all cost the same.

    Args:
        delta: [document, part] loss changes.
        seed: of the null model: every part has the mean of all, and the documents' deviations
            from their part's own mean come in with random signs (one per document, so that parts
            stay as correlated as they are).

    Returns:
        gini, and null_median and null_high (97.5th percentile) of the null model.
    """
    mean = delta.mean(0)
    rng = np.random.default_rng([seed, 2])
    signs = rng.choice([-1.0, 1.0], size=(FLIPS, len(delta)))
    noise = signs @ (delta - mean) / len(delta)
    null = np.array([stats.gini(np.abs(mean.mean() + row)) for row in noise])
    return {
        "gini": stats.gini(np.abs(mean)),
        "null_median": float(np.nanmedian(null)),
        "null_high": float(np.nanquantile(null, 0.975)),
    }

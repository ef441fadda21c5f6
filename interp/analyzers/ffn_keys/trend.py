"""Whether something rises or falls with depth: Spearman's rho over layers, keys resampled.

What a trend does not show: that training made it. In a model with random weights too the last token
counts for less the deeper the layer, since every block mixes others into the stream; compare with
such a model. Layers are no sample: the interval says how well the means are known, not how other
models would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from interp import stats

LEAST = 4
"""Layers below which three ranks or fewer say nothing of a trend."""
RESAMPLES = 1000


def of(
    layers: Sequence[int],
    series: Mapping[str, Sequence[np.ndarray]],
    seed: int,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Trends of layer means.

    Args:
        layers: ascending.
        series: name -> per layer the values of its keys, nan where unknown.
        seed: of the resampling.
        resamples: of the keys within each layer.

    Returns:
        "layers", and per name "rho" of the layers' means with the layer, its 95% percentile
        interval "low" and "high" over resampled keys, and "trend": rises, falls (interval wholly on
        one side of 0) or undecided. With fewer than 4 layers "not_measurable" instead.
    """
    out: dict[str, Any] = {"layers": len(layers)}
    if len(layers) < LEAST:
        out["not_measurable"] = (
            f"{len(layers)} layers were measured; a trend over depth needs at least {LEAST} "
            "(--layer all)."
        )
        return out
    rng = np.random.default_rng([seed, 7])
    for name, values in series.items():
        known = [v[np.isfinite(v)] for v in values]
        if len(known) < len(layers) or not all(map(len, known)):
            continue
        means = np.array([v.mean() for v in known])
        draws = np.stack(
            [v[rng.integers(len(v), size=(resamples, len(v)))].mean(1) for v in known], axis=1
        )
        rho = stats.spearman(np.array(layers), means)
        rhos = stats.spearman_rows(np.asarray(layers, dtype=float)[None], draws)
        resampled = np.nan_to_num(rhos)  # level layers have no trend
        low, high = np.quantile(resampled, [0.025, 0.975])
        verdict = "rises" if low > 0 else "falls" if high < 0 else "undecided"
        out[name] = {"rho": rho, "low": float(low), "high": float(high), "trend": verdict}
    return out

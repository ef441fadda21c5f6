"""Whether two runs of `interp heads` on different text find the same heads important.

Michel, Levy and Neubig (2019, section 4.3) plot every head's loss change on one corpus against the
one on another. Here: the same for each measure that both runs have, with the correlation that would
be there if heads mattered by their layer alone (values shuffled within each layer).

What the numbers do not show: documents that both samples have are in both, and make them agree.
Noise of few documents lowers a correlation, however stable heads are. Only what two halves of one
text reach (`rank_correlation` of --roles) says how high it could be.

Torch-free.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from interp import stats
from interp.errors import InterpError
from interp.results import Column, Result

MEASURES = ("importance", "importance_norm", "loss_delta", "loss_delta_mean", "kl")
ABLATED = ("loss_delta", "kl")
KEYS = ["layer", "head"]
COLUMNS = {
    "measure": Column("word", "Column of the heads tables that is correlated."),
    "heads": Column("heads", "Heads that have it in both runs."),
    "spearman": Column("Spearman rho", "Over heads, of the two runs' values."),
    "spearman_low": Column("Spearman rho", "Lower end of its 95% percentile bootstrap over heads."),
    "spearman_high": Column("Spearman rho", "Upper end of it."),
    "null": Column(
        "Spearman rho", "Mean with the second run's values shuffled within layers: layers alone."
    ),
    "null_high": Column("Spearman rho", "97.5th percentile of it."),
    "pearson": Column("Pearson r", "Over heads, of the values themselves."),
}
_SAME_MODEL = ("name", "source", "revision", "n_layers", "n_heads", "d_model", "vocab_size")
_HASH = "weights_sha256"  # there, where a run's progress was saved: from the command line always


def head_agreement(
    first: Result, second: Result, *, draws: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Correlation over heads of two runs of one model.

    Args:
        first: a result of `interp.heads`.
        second: another one, of the same model and other text.
        draws: of the bootstrap and of the null.
        seed: of both.

    Returns:
        One row per measure that both have (`COLUMNS` says what the columns mean); nan where a
        measure is the same for all heads.

    Raises:
        InterpError: not two runs of heads, or of different models, or with fewer than 3 heads in
            common.

    Source: Michel, Levy and Neubig (2019), arXiv:1905.10650.
    """
    for one in (first, second):
        if one.analyzer != "heads":
            raise InterpError(
                f"head_agreement compares two heads results; one is of {one.analyzer}."
            )
    differing = [k for k in _SAME_MODEL if first.model.get(k) != second.model.get(k)]
    hashed = [one.model.get(_HASH) for one in (first, second)]
    rounded = first.model.get("dtype") != second.model.get("dtype")  # the same weights, other bits
    if all(hashed) and hashed[0] != hashed[1] and not rounded:
        differing.append("weights (by their sha256)")
    if differing:
        raise InterpError(
            "head_agreement compares the heads of one model on two texts; the runs' models differ "
            f"in {', '.join(differing)}."
        )
    # Losses without a head compare only where the same thing stood in for it.
    alike = first.config.get("ablation") == second.config.get("ablation")
    both = first.tables["heads"].merge(
        second.tables["heads"], on=KEYS, suffixes=("_1", "_2"), validate="one_to_one"
    )
    rng = np.random.default_rng(seed)
    rows = []
    for measure in MEASURES:
        pair = [f"{measure}_1", f"{measure}_2"]
        if not set(pair) <= set(both.columns) or (measure in ABLATED and not alike):
            continue
        x, y = (both[name].to_numpy(dtype=np.float64) for name in pair)
        there = np.isfinite(x) & np.isfinite(y)
        if there.sum() < 3:
            continue
        layers = both["layer"].to_numpy()[there]
        found = _of(x[there], y[there], layers, draws, rng)
        rows.append({"measure": measure, "heads": int(there.sum()), **found})
    if not rows:
        raise InterpError("The two runs have no measure of three or more heads in common.")
    return pd.DataFrame(rows)


def _of(
    x: np.ndarray, y: np.ndarray, layers: np.ndarray, draws: int, rng: np.random.Generator
) -> dict[str, float]:
    n = len(x)
    chosen = rng.integers(0, n, (draws, n))
    again = stats.spearman_rows(x[chosen], y[chosen])
    # By layer, then at random within it: row i of the table gets another row of its own layer.
    shuffled = np.empty((draws, n), dtype=np.int64)
    by_layer = np.argsort(layers, kind="stable")
    shuffled[:, by_layer] = np.stack([np.lexsort((rng.random(n), layers)) for _ in range(draws)])
    null = stats.spearman_rows(x[None], y[shuffled])
    low, high = _quantiles(again, [0.025, 0.975])
    spread = x.std() > 0 and y.std() > 0
    return {
        "spearman": stats.spearman(x, y),
        "spearman_low": low,
        "spearman_high": high,
        "null": float(null.mean()) if np.isfinite(null).any() else np.nan,
        "null_high": _quantiles(null, [0.975])[0],
        "pearson": float(np.corrcoef(x, y)[0, 1]) if spread else np.nan,
    }


def _quantiles(values: np.ndarray, at: list[float]) -> list[float]:
    known = values[np.isfinite(values)]
    return np.quantile(known, at).tolist() if len(known) else [np.nan] * len(at)

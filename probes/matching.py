"""Which features come back when an SAE is trained again with another seed.

The live decoder directions of two SAEs are matched by cosine, and so are as many random directions
with a covariance that the caller names: what does not come back is not a feature of the model, and
what would come back among random directions is no evidence that it is one.

Cosines are signed: an SAE's activations are not negative, so a feature and its opposite differ.

What the numbers do not show: that a feature that comes back is used by the model, or means one
thing. Two SAEs of one architecture on the same data share their biases too; an SAE trained on the
permuted model (--null-model), matched with itself in the same way, shows how much of the match
these explain. Two seeds are one pair, so there is no interval over seeds here.

Source: one-to-one matching as in "Position: Mechanistic Interpretability Should Prioritize Feature
Consistency in SAEs" (arXiv:2505.20254), there of absolute cosines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from interp.errors import InterpError
from interp.results import Column
from probes.directions import Gaussian, nearest, unit

RETURNS = 0.7  # cosine from which a feature counts as come back
PERCENTILE = 99  # and of the null's cosines
MOST = 5_000  # features, for optimal assignment

MATCHES = {
    "feature": Column("index", "Live feature of the first SAE, counted from 0."),
    "matched_feature": Column(
        "index", "Feature of the second SAE that it is matched with, one to one; -1 where none."
    ),
    "matched_cosine": Column("cosine", "Of the two decoder directions; missing where none."),
    "nearest_feature": Column("index", "Feature of the second SAE with the largest cosine."),
    "nearest_cosine": Column("cosine", "With that feature."),
    "returns": Column(
        "true or false",
        f"matched_cosine above {RETURNS} and above the null's {PERCENTILE}th percentile.",
    ),
}

SUMMARY = {
    "method": Column(
        "name",
        "assignment: one to one with the largest sum of cosines; mutual: pairs that are each "
        f"other's nearest (from {MOST:,} live features on either side).",
    ),
    "n_first": Column("features", "Live features of the first SAE."),
    "n_second": Column("features", "Live features of the second SAE."),
    "matched": Column("features", "Pairs."),
    "mean_cosine": Column("cosine", "Mean over pairs."),
    "median_cosine": Column("cosine", "Median over pairs."),
    "null_mean_cosine": Column("cosine", "Mean over pairs of random directions, all draws."),
    "null_cosine": Column("cosine", f"Percentile {PERCENTILE} over pairs of random directions."),
    "returning_first": Column(
        "share of features",
        f"Of the first SAE's live features, those matched above {RETURNS} and above null_cosine.",
    ),
    "returning_second": Column("share of features", "The same of the second SAE's."),
    "null_returning_first": Column(
        "share of features", f"Of the first set of random directions, matched above {RETURNS}."
    ),
    "nearest_mean_first": Column(
        "cosine", "Mean over the first SAE's features of the largest cosine with the second's."
    ),
    "nearest_mean_second": Column("cosine", "The same the other way round."),
    "null_nearest_mean": Column("cosine", "nearest_mean_first of random directions, all draws."),
    "draws": Column("pairs of sets", "Of random directions."),
}


@dataclass(frozen=True)
class Match:
    """What `match` found.

    Attributes:
        summary: plain numbers; SUMMARY says what they are.
        features: a row per live feature of the first SAE (MATCHES).
        null: cosines of all matched pairs of random directions.
    """

    summary: dict[str, Any]
    features: pd.DataFrame
    null: np.ndarray


def match(
    first: Float[Tensor, "feature d_model"],
    second: Float[Tensor, "other d_model"],
    covariance: Float[Tensor, "d_model d_model"],
    live_first: Bool[Tensor, " feature"] | None = None,
    live_second: Bool[Tensor, " other"] | None = None,
    *,
    draws: int = 3,
    seed: int = 0,
    most: int = MOST,
) -> Match:
    """Match two decoders one to one.

    Args:
        first: decoder directions, of any lengths.
        second: those of the other SAE.
        covariance: of the null's directions: the activations' about their mean, or (a stricter
            null) that of the decoders' unit directions about zero.
        live_first: which features fired on the judged text; None: all.
        live_second: the same of the other SAE.
        draws: pairs of sets of random directions, of the same numbers.
        seed: of the draws.
        most: live features on either side up to which the assignment is optimal.

    Raises:
        InterpError: no live feature, shapes that do not fit, or not a covariance.
    """
    a, b = unit(first, live_first), unit(second, live_second)
    b = b.to(a.device)
    if a.shape[1] != b.shape[1] or covariance.shape != (a.shape[1], a.shape[1]):
        raise InterpError(
            f"The decoders have d_model {a.shape[1]} and {b.shape[1]} and the covariance is "
            f"{tuple(covariance.shape)}; expected one d_model."
        )
    if draws < 1:
        raise InterpError(f"draws must be at least 1, got {draws}.")
    optimal = max(len(a), len(b)) <= most
    pair = _assigned if optimal else _mutual
    gaussian = Gaussian.of(covariance.to(a.device))
    null_matched, null_nearest = [], []
    for i in range(draws):
        x, y = gaussian.draw(len(a), seed, 2 * i), gaussian.draw(len(b), seed, 2 * i + 1)
        rows, columns = pair(x, y)
        null_matched.append((x[rows] * y[columns]).sum(-1).cpu().numpy())
        null_nearest.append(float(nearest(x, y, signed=True)[0].mean()))
    null = np.concatenate(null_matched)
    limit = float(np.percentile(null, PERCENTILE)) if len(null) else float("nan")

    rows, columns = pair(a, b)
    cosines = (a[rows] * b[columns]).sum(-1).cpu().numpy()
    rows, columns = rows.cpu().numpy(), columns.cpu().numpy()
    near, at = (x.cpu().numpy() for x in nearest(a, b, signed=True))
    near_second = nearest(b, a, signed=True)[0]
    ids_first, ids_second = _ids(first, live_first), _ids(second, live_second)
    matched, cosine = np.full(len(a), -1), np.full(len(a), np.nan)
    matched[rows], cosine[rows] = ids_second[columns], cosines
    returns = (cosine > RETURNS) & ~(cosine <= limit)
    table = pd.DataFrame(
        {
            "feature": ids_first,
            "matched_feature": matched,
            "matched_cosine": cosine,
            "nearest_feature": ids_second[at],
            "nearest_cosine": near,
            "returns": returns,
        }
    )
    summary = {
        "method": "assignment" if optimal else "mutual",
        "n_first": len(a),
        "n_second": len(b),
        "matched": len(cosines),
        "mean_cosine": float(cosines.mean()) if len(cosines) else None,
        "median_cosine": float(np.median(cosines)) if len(cosines) else None,
        "null_mean_cosine": float(null.mean()) if len(null) else None,
        "null_cosine": limit,
        "returning_first": float(returns.sum() / len(a)),
        "returning_second": float(returns.sum() / len(b)),
        "null_returning_first": float((null > RETURNS).sum() / (draws * len(a))),
        "nearest_mean_first": float(near.mean()),
        "nearest_mean_second": float(near_second.mean()),
        "null_nearest_mean": float(np.mean(null_nearest)),
        "draws": draws,
    }
    return Match(summary, table, null)


def decoder_covariance(
    W_dec: Float[Tensor, "feature d_model"], live: Bool[Tensor, " feature"] | None = None
) -> Float64[Tensor, "d_model d_model"]:
    """Second moment about zero of the live unit directions: the stricter null's covariance."""
    W = unit(W_dec, live)
    return W.T @ W / len(W)


def _ids(directions: Tensor, live: Tensor | None) -> np.ndarray:
    if live is None:
        return np.arange(len(directions))
    return torch.nonzero(live)[:, 0].cpu().numpy()


def _assigned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs, one to one, with the largest sum of cosines; all of the smaller side."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment((a @ b.T).cpu().numpy(), maximize=True)
    return torch.from_numpy(rows).to(a.device), torch.from_numpy(columns).to(a.device)


def _mutual(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs that are each other's nearest by signed cosine."""
    there, back = nearest(a, b, signed=True)[1], nearest(b, a, signed=True)[1]
    rows = torch.arange(len(a), device=a.device)
    kept = back[there] == rows
    return rows[kept], there[kept]

"""How the directions of an SAE share the space: dimensionality, interference, nearest neurons.

Feature dimensionality of direction i (Elhage et al. 2022, "Toy Models of Superposition"):

    D_i = |W_i|^2 / sum_j (W_i_hat . W_j)^2

the share of a dimension that it has to itself: 1 if it is orthogonal to all others, 1/2 in an
antipodal pair, 2/5 in a pentagon in a plane. Its interference is sum_{j != i} (W_i_hat . W_j)^2.
Over unit directions D_i = 1 / (1 + interference), and the D_i sum to at most d_model.

Both are taken over *live* directions (that fired on the judged text) of length 1, and beside those
of as many random directions with the activations' covariance (`Gaussian`).

What the numbers cannot show. More live directions than d_model is what the width of the dictionary
asks for; a dictionary fitted to noise has them too. n random directions have interference about
(n - 1) / (effective dimension), so that D_i falls as the dictionary grows, whatever the model does.
Only the difference to the null is about the model, and it is about the directions that this SAE
found, not about "the" features. A low interference compared with the null says that the directions
avoid each other more than the activations' subspace alone explains: needed for superposition, not
proof of it. Nothing here says which directions are active together, which is when interference
costs anything.
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
from interp.scores import wide
from interp.stats import percentile_of
from probes.directions import Gaussian, nearest, spectrum, unit

QUANTILES = (1, 5, 25, 50, 75, 95, 99)
STATISTICS = ("dimensionality", "interference", "feature_cosine", "neuron_cosine")

FEATURES = {
    "feature": Column("index", "Feature of the SAE, counted from 0; live ones only."),
    "dimensionality": Column(
        "dimensions", "D_i over live unit directions: 1 has a dimension to itself, 1/2 shares one."
    ),
    "interference": Column("sum of squared cosines", "With all other live directions: 1/D_i - 1."),
    "interference_percentile": Column(
        "percent", "Of the interference among random directions with the activations' covariance."
    ),
    "nearest_feature": Column("index", "The live feature with the largest |cosine|."),
    "feature_cosine": Column("cosine", "With that feature."),
    "feature_cosine_percentile": Column("percent", "Of its magnitude among random directions."),
    "nearest_neuron": Column("index", "The neuron whose value vector has the largest |cosine|."),
    "neuron_cosine": Column("cosine", "With that neuron's value vector (row of W_out)."),
    "neuron_cosine_percentile": Column("percent", "Of its magnitude among random directions."),
}

DISTRIBUTIONS = {
    "statistic": Column("name", "What is distributed; cosines by magnitude."),
    "directions": Column(
        "name", "The SAE's live features, or random ones with the activations' covariance."
    ),
    "n": Column("directions", "How many, over all draws."),
    "draws": Column("sets of directions", "How many sets they are of."),
    "mean": Column("the statistic's", "Mean over all."),
    **{f"p{q}": Column("the statistic's", f"Percentile {q} over all.") for q in QUANTILES},
    "median_low": Column("the statistic's", "Smallest median of a set."),
    "median_high": Column("the statistic's", "Largest median of a set."),
}


@dataclass(frozen=True)
class EffectiveDimension:
    """How many dimensions a covariance's variance is spread over.

    participation_ratio: (sum of eigenvalues)^2 / sum of their squares.
    entropy: exp of the entropy of the eigenvalues' shares of the variance. Never smaller than the
        participation ratio: it gives small eigenvalues more weight.
    rank: eigenvalues above 1e-10 of the largest.
    """

    participation_ratio: float
    entropy: float
    rank: int


def effective_dimension(covariance: Float[Tensor, "d_model d_model"]) -> EffectiveDimension:
    """Effective dimensions of a covariance about the mean; between 1 and d_model.

    Source: Roy and Vetterli (2007) for the entropy, there of singular values; here it is taken of
    the covariance's eigenvalues, which are shares of variance.

    Raises:
        InterpError: not a covariance, see `directions.spectrum`.
    """
    values, _ = spectrum(covariance)
    shares = values / values.sum()
    some = shares[shares > 0]
    return EffectiveDimension(
        participation_ratio=float(1 / shares.square().sum()),
        entropy=float((-(some * some.log()).sum()).exp()),
        rank=int((values > 1e-10 * values[-1]).sum()),
    )


def dimensionality(
    directions: Float[Tensor, "*batch direction d_model"],
) -> Float64[Tensor, "*batch direction"]:
    """D_i of each direction, in dimensions; 0 for a direction that is zero.

    The sum over j goes through the [d_model, d_model] Gram matrix: no direction-by-direction
    matrix is made.
    """
    exact, overlaps = _overlaps(directions)
    squares = exact.square().sum(-1)
    return torch.where(overlaps > 0, squares.square() / overlaps, 0.0)


def interference(
    directions: Float[Tensor, "*batch direction d_model"],
) -> Float64[Tensor, "*batch direction"]:
    """sum_{j != i} (W_i_hat . W_j)^2, in squared units of W; 0 for a direction that is zero."""
    exact, overlaps = _overlaps(directions)
    squares = exact.square().sum(-1)
    return torch.where(squares > 0, (overlaps / squares - squares).clamp(min=0), 0.0)


def _overlaps(directions: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, and sum_j (W_i . W_j)^2."""
    exact = wide(directions.detach())
    return exact, ((exact @ (exact.mT @ exact)) * exact).sum(-1)


@dataclass(frozen=True)
class Geometry:
    """What `measure` found.

    Attributes:
        summary: plain numbers; SUMMARY says what they are.
        features: a row per live feature (FEATURES).
        distributions: percentiles of each statistic, of the features and of the null.
    """

    summary: dict[str, Any]
    features: pd.DataFrame
    distributions: pd.DataFrame


SUMMARY = {
    "d_model": Column("dimensions", "Of the activations."),
    "n_features": Column("features", "Width of the SAE."),
    "n_live": Column("features", "That fired on the judged text."),
    "participation_ratio": Column(
        "dimensions", "Effective dimension of the activations' covariance (participation ratio)."
    ),
    "entropy_dimension": Column(
        "dimensions", "The same by the entropy of the covariance's eigenvalues."
    ),
    "live_per_dimension": Column("features per dimension", "n_live / d_model."),
    "live_per_effective_dimension": Column(
        "features per dimension", "n_live / participation_ratio."
    ),
    "dimensions_used": Column("dimensions", "Sum of D_i over live features; at most d_model."),
    "dimensions_used_null": Column("dimensions", "The same of random directions, mean over draws."),
    "beyond_null": Column(
        "share of features",
        "Whose |cosine| with the nearest neuron is above the null's 99th percentile; 0.01 by "
        "chance.",
    ),
}


def measure(
    W_dec: Float[Tensor, "feature d_model"],
    live: Bool[Tensor, " feature"],
    covariance: Float[Tensor, "d_model d_model"],
    W_out: Float[Tensor, "neuron d_model"] | None = None,
    *,
    draws: int = 5,
    seed: int = 0,
) -> Geometry:
    """Place an SAE's live directions beside random ones with the activations' covariance.

    Args:
        W_dec: the decoder, a direction a row, of any lengths.
        live: which features fired on the judged text.
        covariance: of the activations about their mean, over the judged text's included positions.
        W_out: the neurons' value vectors, where the activations are an MLP's output.
        draws: sets of random directions, each as many as are live.
        seed: of the draws.

    Raises:
        InterpError: no live feature, shapes that do not fit, or not a covariance.
    """
    W = unit(W_dec, live)
    d_model = W.shape[1]
    if covariance.shape != (d_model, d_model):
        raise InterpError(
            f"The covariance is {tuple(covariance.shape)}; the decoder has d_model {d_model}."
        )
    if draws < 1:
        raise InterpError(f"draws must be at least 1, got {draws}.")
    neurons, rows = _neurons(W_out, W)
    own, at_feature, at_neuron = _statistics(W, neurons)
    gaussian = Gaussian.of(covariance.to(W.device))
    null = [_statistics(gaussian.draw(len(W), seed, i), neurons)[0] for i in range(draws)]

    kept = torch.nonzero(live)[:, 0].cpu().numpy()
    table: dict[str, Any] = {
        "feature": kept,
        "dimensionality": own["dimensionality"],
        "interference": own["interference"],
        "interference_percentile": _percentile(own, null, "interference"),
        "nearest_feature": np.where(at_feature >= 0, kept[at_feature], -1),
        "feature_cosine": own["feature_cosine"],
        "feature_cosine_percentile": _percentile(own, null, "feature_cosine"),
    }
    if at_neuron is not None:
        table |= {
            "nearest_neuron": rows[at_neuron],
            "neuron_cosine": own["neuron_cosine"],
            "neuron_cosine_percentile": _percentile(own, null, "neuron_cosine"),
        }
    effective = effective_dimension(covariance)
    summary: dict[str, Any] = {
        "d_model": d_model,
        "n_features": len(W_dec),
        "n_live": len(W),
        "participation_ratio": effective.participation_ratio,
        "entropy_dimension": effective.entropy,
        "live_per_dimension": len(W) / d_model,
        "live_per_effective_dimension": len(W) / effective.participation_ratio,
        "dimensions_used": float(own["dimensionality"].sum()),
        "dimensions_used_null": float(np.mean([one["dimensionality"].sum() for one in null])),
    }
    if neurons is not None:
        beyond = np.abs(own["neuron_cosine"]) > np.percentile(_pooled(null, "neuron_cosine"), 99)
        summary["beyond_null"] = float(beyond.mean())
    return Geometry(summary, pd.DataFrame(table), _distributions(own, null))


def _neurons(W_out: Tensor | None, W: Tensor) -> tuple[Tensor | None, np.ndarray]:
    """Value vectors that are not zero at length 1, and which neurons' they are."""
    if W_out is None:
        return None, np.arange(0)
    if W_out.ndim != 2 or W_out.shape[1] != W.shape[1]:
        raise InterpError(
            f"The value vectors are {tuple(W_out.shape)}; the decoder has d_model {W.shape[1]}."
        )
    some = W_out.norm(dim=-1) > 0
    return unit(W_out, some).to(W.device), torch.nonzero(some)[:, 0].cpu().numpy()


def _statistics(
    W: Tensor, neurons: Tensor | None
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray | None]:
    """STATISTICS of unit directions [direction], their nearest direction and nearest neuron."""
    cosine, at_feature = nearest(W)
    found = {
        "dimensionality": dimensionality(W),
        "interference": interference(W),
        "feature_cosine": cosine,
    }
    at_neuron = None
    if neurons is not None:
        found["neuron_cosine"], at_neuron = nearest(W, neurons)
    return (
        {name: value.cpu().numpy() for name, value in found.items()},
        at_feature.cpu().numpy(),
        None if at_neuron is None else at_neuron.cpu().numpy(),
    )


def _pooled(null: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
    return np.concatenate([np.abs(one[name]) for one in null])


def _percentile(own: dict[str, np.ndarray], null: list[dict[str, np.ndarray]], name: str) -> Any:
    if np.isnan(own[name]).any():  # a single feature has no other
        return np.full(len(own[name]), np.nan)
    return percentile_of(np.abs(own[name]), _pooled(null, name))


def _distributions(own: dict[str, np.ndarray], null: list[dict[str, np.ndarray]]) -> pd.DataFrame:
    rows = []
    for name in STATISTICS:
        for directions, sets in (("features", [own]), ("random", null)):
            if name not in own:
                continue
            values = [np.abs(one[name]) for one in sets]
            whole = np.concatenate(values)
            medians = [float(np.median(v)) for v in values]
            rows.append(
                {
                    "statistic": name,
                    "directions": directions,
                    "n": len(whole),
                    "draws": len(sets),
                    "mean": float(whole.mean()),
                    **{f"p{q}": float(np.percentile(whole, q)) for q in QUANTILES},
                    "median_low": min(medians),
                    "median_high": max(medians),
                }
            )
    return pd.DataFrame(rows)

"""By how many features of an SAE the activation of each neuron is explained.

Definition. On half of the documents, features are added to a linear regression of the neuron's
activation on the features' activations, one at a time, each time the one that correlates most with
what is left (orthogonal matching pursuit), up to `most`. On the other half each chosen feature i
gets its share of the variance,

    c_i = beta_i Cov(f_i, a) / Var(a),    sum_i c_i = Cov(a_hat, a) / Var(a),

and the effective number of features is (sum_i c_i)^2 / sum_i c_i^2: 1 for a neuron that follows one
feature, k for one that follows k independent features equally. Features that were chosen by chance
have shares around 0 there, and count little. `features_90` is another answer to the same question:
the fewest features (in the order of their choice) that reach 90% of the largest held-out R^2.

Null. The neurons at unit variance, turned by a random rotation of neuron space: as many directions
that see the same activations. Where neurons need no fewer features than rotated ones, the neuron
basis is nothing special to this SAE's features. (Unit variance first, since a neuron's scale is
arbitrary: it can be moved into its value vector.)

What the numbers do not show: the features are those of one SAE, of one width; a wider one splits
them and so raises the number, a bad one leaves most of a neuron unexplained (see r2: a number for
a neuron with r2 of 0.1 is about a tenth of it). Explained is linear and correlational: a feature
of the MLP's output is made of neurons, so that a neuron with a large value vector is explained by
the features it helps to make. Features that fire together share the variance in the order of their
choice.

Source: orthogonal matching pursuit (Pati et al. 1993); shares of variance beta_i Cov(f_i, a) as in
Pratt (1987); the effective number is their inverse participation ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Float64, Int64
from scipy import sparse

from interp.errors import InterpError
from interp.results import Column
from interp.stats import percentile_of

FIRES = 10  # tokens on which a feature must fire in the half that chooses
SCREEN = 128  # features with the largest correlation, among which the pursuit chooses
EXPLAINED = 0.05  # held-out R^2 from which a neuron counts as explained
ENOUGH = 0.9  # of the largest held-out R^2

NEURONS = {
    "neuron": Column("index", "Neuron of the MLP, counted from 0; those that vary in both halves."),
    "r2": Column(
        "share of variance",
        "Largest held-out R^2 over the numbers of features; below 0 where features only mislead.",
    ),
    "effective_features": Column(
        "features",
        "Inverse participation ratio of the held-out shares of variance; missing where r2 is not "
        f"above {EXPLAINED}.",
    ),
    "features_90": Column(
        "features",
        f"Fewest that reach {ENOUGH:.0%} of r2; missing where r2 is not above {EXPLAINED}.",
    ),
    "top_feature": Column("index", "The feature with the largest held-out share; -1 where none."),
    "top_share": Column("share of variance", "Its share, beta Cov(f, a) / Var(a)."),
    "effective_percentile": Column("percent", "Of effective_features among rotated neurons."),
}

SUMMARY = {
    "neurons": Column("neurons", "That vary in both halves."),
    "explained": Column("neurons", f"With held-out r2 above {EXPLAINED}."),
    "median_r2": Column("share of variance", "Median over neurons."),
    "median_effective": Column("features", "Median of effective_features, explained neurons."),
    "median_features_90": Column("features", "Median of features_90, explained neurons."),
    "single_share": Column(
        "share of explained neurons", "With effective_features below 1.5: about one feature."
    ),
    "null_directions": Column("directions", "Rotated neurons, over all draws."),
    "null_explained": Column("directions", f"Of them with held-out r2 above {EXPLAINED}."),
    "null_median_r2": Column("share of variance", "Median over rotated neurons."),
    "null_median_effective": Column("features", "The same of explained rotated neurons."),
    "null_median_features_90": Column("features", "The same of explained rotated neurons."),
    "null_single_share": Column("share of explained directions", "The same of rotated neurons."),
    "candidates": Column("features", f"That fired on at least {FIRES} choosing tokens."),
    "most": Column("features", "Largest number that can be found for a neuron."),
    "tokens": Column("tokens", "Of the half that is scored."),
}


@dataclass(frozen=True)
class Polysemantic:
    """What `measure` found.

    Attributes:
        summary: plain numbers; SUMMARY says what they are. No interval: neurons are all there are,
            and the spread over documents is not measured.
        neurons: a row per neuron (NEURONS).
        null: [direction] effective_features of explained rotated neurons.
    """

    summary: dict[str, Any]
    neurons: pd.DataFrame
    null: Float64[np.ndarray, " direction"]


@dataclass(frozen=True)
class _Half:
    """Features and the columns to explain on half of the documents, with their moments."""

    features: Any  # scipy sparse [token, candidate]
    mean: np.ndarray  # [candidate]
    cross: np.ndarray  # [candidate, column] Cov(f, a)
    variance: np.ndarray  # [column]

    @classmethod
    def of(cls, features: Any, columns: np.ndarray) -> _Half:
        n = features.shape[0]
        centred = columns - columns.mean(0)
        mean = np.asarray(features.sum(axis=0)).ravel() / n
        # The columns are centred, so that the features need not be.
        cross = np.asarray(features.T @ centred) / n
        return cls(sparse.csc_array(features), mean, cross, np.square(centred).mean(0))

    def gram(self, chosen: np.ndarray) -> np.ndarray:
        """Covariance of a few of the features."""
        some = self.features[:, chosen]
        return (some.T @ some).toarray() / some.shape[0] - np.outer(
            self.mean[chosen], self.mean[chosen]
        )

    def turned(self, rotation: np.ndarray, covariance: np.ndarray) -> _Half:
        """The same of directions [column, direction] in the space of the columns."""
        variance = ((rotation.T @ covariance) * rotation.T).sum(1)
        return _Half(self.features, self.mean, self.cross @ rotation, variance)


def measure(
    features: Any,
    neurons: Float[np.ndarray, "token neuron"],
    first_half: Bool[np.ndarray, " token"],
    *,
    most: int = 32,
    draws: int = 1,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> Polysemantic:
    """Explain each neuron by features, and as many rotated neurons.

    Args:
        features: [token, feature] activations of the SAE at included positions, a scipy sparse
            array or a numpy one.
        neurons: activations of the neurons at the same tokens (in gated models act(gate) * up).
        first_half: whether a token's document is of the half that chooses; see `concepts.halves`.
        most: features a neuron, at most.
        draws: rotations.
        seed: of the rotations.
        tick: called once for each neuron and each rotated one.

    Raises:
        InterpError: numbers of tokens that differ, no neuron that varies, no feature that fires
            often enough, or values that are not finite.
    """
    known: Any = sparse.csr_array(features)
    if not known.shape[0] == neurons.shape[0] == len(first_half):
        raise InterpError(
            f"{known.shape[0]} tokens of features, {neurons.shape[0]} of neurons and "
            f"{len(first_half)} of halves; expected the same tokens."
        )
    if not np.isfinite(known.data).all() or not np.isfinite(neurons).all():
        raise InterpError("An activation is not finite.")
    if most < 1 or draws < 1:
        raise InterpError(f"most and draws must be at least 1, got {most} and {draws}.")
    known.eliminate_zeros()
    fires = np.bincount(known[first_half].indices, minlength=known.shape[1])
    candidates = np.flatnonzero(fires >= FIRES)
    if not len(candidates):
        raise InterpError(
            f"No feature fires on {FIRES} tokens of the choosing half: give more documents."
        )
    halves = [neurons[which].astype(np.float64) for which in (first_half, ~first_half)]
    vary = np.flatnonzero(np.all([half.std(0) > 0 for half in halves], axis=0))
    if not len(vary):
        raise InterpError("No neuron varies in both halves of the documents.")
    scale = halves[0][:, vary].std(0)
    columns = [half[:, vary] / scale for half in halves]
    train, test = (
        _Half.of(known[which][:, candidates], x)
        for which, x in zip((first_half, ~first_half), columns, strict=True)
    )
    own = _explained(train, test, most, tick)
    covariances = [np.cov(x.T, bias=True).reshape(len(vary), len(vary)) for x in columns]
    null = []
    for i in range(draws):
        rng = np.random.default_rng([seed, 13, i])
        rotation = np.linalg.qr(rng.normal(size=(len(vary), len(vary))))[0]
        turned = (h.turned(rotation, c) for h, c in zip((train, test), covariances, strict=True))
        choosing, scored = turned
        null.append(_explained(choosing, scored, most, tick))
    rotated = pd.concat(null, ignore_index=True)
    table = own.assign(
        neuron=vary, top_feature=np.where(own["top"] >= 0, candidates[own["top"]], -1)
    )
    effective = table["effective_features"].to_numpy()
    spread = rotated["effective_features"].dropna().to_numpy()
    percentile = np.full(len(effective), np.nan)
    some = ~np.isnan(effective)
    percentile[some] = percentile_of(effective[some], spread)
    table["effective_percentile"] = percentile
    summary: dict[str, Any] = {"neurons": len(vary), **_summary(own)}
    summary |= {"null_directions": len(rotated)}
    summary |= {f"null_{name}": value for name, value in _summary(rotated).items()}
    summary |= {"candidates": len(candidates), "most": most, "tokens": int((~first_half).sum())}
    return Polysemantic(summary, table.reindex(columns=list(NEURONS)), spread)


def _summary(table: pd.DataFrame) -> dict[str, Any]:
    effective = table["effective_features"].dropna().to_numpy()
    enough = table["features_90"].dropna().to_numpy()
    any_ = len(effective) > 0
    return {
        "explained": len(effective),
        "median_r2": float(np.median(table["r2"].to_numpy())),
        "median_effective": float(np.median(effective)) if any_ else None,
        "median_features_90": float(np.median(enough)) if any_ else None,
        "single_share": float((effective < 1.5).mean()) if any_ else None,
    }


def _explained(train: _Half, test: _Half, most: int, tick: Callable[[], object]) -> pd.DataFrame:
    """r2, effective_features, features_90, top (a candidate) and top_share of every column."""
    deviation = np.sqrt(np.maximum(train.features.power(2).mean(axis=0) - train.mean**2, 0))
    correlation = np.abs(train.cross) / np.where(deviation > 0, deviation, np.inf)[:, None]
    size = min(SCREEN, len(correlation))
    rows = []
    for i in range(train.cross.shape[1]):
        screened = np.argpartition(-correlation[:, i], size - 1)[:size]
        gram = train.gram(screened)
        order, betas = pursue(gram, train.cross[screened, i], most)
        rows.append(_held_out(test, i, screened[order], betas))
        tick()
    return pd.DataFrame(rows)


def _held_out(test: _Half, i: int, chosen: np.ndarray, betas: np.ndarray) -> dict[str, Any]:
    """Shares and R^2 on the other half of the features chosen for column i.

    Args:
        test: the half.
        i: the column.
        chosen: [step] candidates in the order of their choice.
        betas: [step, step] the regression after each choice, 0 for those not chosen yet.
    """
    cross, variance = test.cross[chosen, i], test.variance[i]
    gram = test.gram(chosen)
    missed = variance - 2 * betas @ cross + np.einsum("si,ij,sj->s", betas, gram, betas)
    r2 = 1 - missed / variance
    best = float(r2.max(initial=-np.inf)) if len(r2) else 0.0
    row: dict[str, Any] = {"r2": best, "effective_features": np.nan, "features_90": np.nan}
    row |= {"top": -1, "top_share": np.nan}
    if best > EXPLAINED:
        shares = betas[-1] * cross / variance
        row["effective_features"] = float(shares.sum() ** 2 / np.square(shares).sum())
        row["features_90"] = int(np.argmax(r2 >= ENOUGH * best)) + 1
        row["top"], row["top_share"] = int(chosen[shares.argmax()]), float(shares.max())
    return row


def pursue(
    gram: Float64[np.ndarray, "feature feature"], cross: Float64[np.ndarray, " feature"], most: int
) -> tuple[Int64[np.ndarray, " step"], Float64[np.ndarray, "step step"]]:
    """Orthogonal matching pursuit on second moments.

    Args:
        gram: covariance of the features.
        cross: their covariances with what is to be explained.
        most: features, at most.

    Returns:
        order: features in the order of their choice; fewer than `most` where the rest explains
            nothing more.
        betas: the regression after each choice, a row each, 0 for features not chosen yet.
    """
    variance = np.diag(gram).copy()
    usable = variance > 1e-12 * variance.max(initial=0)
    scale = np.sqrt(np.where(usable, variance, np.inf))
    order: list[int] = []
    solutions: list[np.ndarray] = []
    left = cross.copy()
    for _ in range(min(most, len(cross))):
        strength = np.abs(left) / scale
        strength[order] = 0
        new = int(strength.argmax())
        if strength[new] <= 1e-9 * np.abs(cross / scale).max():
            break
        known = gram[order, new]
        own = variance[new] - known @ np.linalg.solve(gram[np.ix_(order, order)], known)
        if own <= 1e-9 * variance[new]:  # it repeats the chosen ones
            scale[new] = np.inf
            continue
        order.append(new)
        beta = np.linalg.solve(gram[np.ix_(order, order)], cross[order])
        solutions.append(beta)
        left = cross - gram[:, order] @ beta
    betas = np.zeros((len(order), len(order)))
    for i, beta in enumerate(solutions):
        betas[i, : i + 1] = beta
    return np.array(order, dtype=np.int64), betas

"""Intervals, tests and small statistics over documents. Numpy and scipy, float64, no torch.

A document is the unit of every interval and test: reduce its tokens to one number first. Tokens of
one document resemble each other, so that intervals over tokens are far too narrow.

Student t intervals assume means that are roughly normal. With few and strongly skewed documents
they cover less than they say (tests/test_stats.py measures how much); `bootstrap_t` follows the
skew, at the price of wider intervals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from interp.errors import InterpError

__all__ = [
    "MATERIAL",
    "Interval",
    "PairedT",
    "benjamini_hochberg",
    "bootstrap_t",
    "first_crossing",
    "gini",
    "mean_interval",
    "paired_t",
    "percentile_of",
    "positive_interval",
    "spearman",
    "verdict",
]


MATERIAL = 0.01
"""Nats per token: the smallest effect that matters, unless a caller says otherwise."""
# ArrayLike holds plain numbers for a static checker only, as a complex.
Numbers: TypeAlias = ArrayLike | float | int


@dataclass(frozen=True, eq=False)
class Interval:
    """An estimate and its confidence interval, float64 arrays (0-d for one number).

    `mean` is the mean, or whatever statistic was asked for. `low` and `high` are nan where there
    are too few documents for an interval.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, eq=False)
class PairedT(Interval):
    """An interval of a mean difference with the two-sided p-value of its being zero."""

    p: np.ndarray


def mean_interval(x: Numbers, confidence: float = 0.95, axis: int = 0) -> Interval:
    """Mean over documents with its Student t interval.

    Args:
        x: values, in any unit; the interval has the same.
        confidence: probability of covering the mean of the documents' population, between 0 and 1.
        axis: the document axis of x, which the result lacks.

    Returns:
        The interval; nan ends for a single document, zero width where all documents are equal.

    Raises:
        InterpError: no document, a value that is not finite, or a confidence outside (0, 1).
    """
    values = _documents(x, axis)
    mean, error = _mean_and_error(values)
    return _t_interval(mean, error, len(values), confidence)


def positive_interval(x: Numbers, confidence: float = 0.95, axis: int = 0) -> Interval:
    """Mean over documents of what cannot be negative, with its Student t interval on a log scale.

    The ends are mean * exp(-h) and mean * exp(h), h being half of the width of `mean_interval` over
    the mean (the delta method): nearly that interval where it is narrow, and never below 0 where it
    is wide. Mean absolute slopes and KL divergences are such values.

    Args:
        x: values of at least 0, in any unit; the interval has the same.
        confidence: probability of covering the mean of the documents' population, between 0 and 1.
        axis: the document axis of x, which the result lacks.

    Returns:
        The interval; nan ends for a single document, zero width where all documents are equal.
        Where a value is below 0 after all (rounding of what is 0), that of `mean_interval`.

    Raises:
        InterpError: no document, a value that is not finite, or a confidence outside (0, 1).
    """
    plain = mean_interval(x, confidence, axis)
    fits = (_documents(x, axis).min(0) >= 0) & (plain.mean > 0)
    half = (plain.high - plain.mean) / np.where(fits, plain.mean, 1.0)
    with np.errstate(over="ignore"):  # where `fits` is not
        low, high = (plain.mean * np.exp(sign * half) for sign in (-1, 1))
    return Interval(plain.mean, np.where(fits, low, plain.low), np.where(fits, high, plain.high))


def paired_t(differences: Numbers, axis: int = 0, confidence: float = 0.95) -> PairedT:
    """Mean difference, its t interval, and the two-sided p-value of a paired t test.

    Args:
        differences: changed minus baseline of the same document, e.g. `[document, head]` in nats
            per token; each head is a test of its own.
        axis: the document axis of differences, which the result lacks.
        confidence: of the interval, between 0 and 1.

    Returns:
        mean, low, high, p. All differences zero: p = 1. All equal and not zero: p = 0. A single
        document: p and the interval are nan.

    Raises:
        InterpError: no document, a value that is not finite, or a confidence outside (0, 1).
    """
    values = _documents(differences, axis)
    mean, error = _mean_and_error(values)
    interval = _t_interval(mean, error, len(values), confidence)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(mean) / error
    t = np.where((error == 0) & (mean == 0), 0.0, t)
    p = np.asarray(2 * stats.t.sf(t, max(len(values) - 1, 1)))
    return PairedT(interval.mean, interval.low, interval.high, p)


def benjamini_hochberg(p: Numbers) -> NDArray[np.float64]:
    """Q-values: calling q < 0.05 keeps the expected share of false discoveries within 5%.

    Args:
        p: p-values of any shape, all of one family. nan is no test: it stays nan, uncounted.

    Returns:
        q-values in the shape of p.

    Raises:
        InterpError: a p-value outside [0, 1].

    Source: Benjamini and Hochberg (1995), for independent or positively dependent tests.
    """
    values = np.asarray(p, dtype=np.float64)
    tests = values[~np.isnan(values)]
    if ((tests < 0) | (tests > 1)).any():
        raise InterpError("benjamini_hochberg got a p-value outside [0, 1].")
    order = np.argsort(tests)
    scaled = tests[order] * len(tests) / np.arange(1, len(tests) + 1)
    q = np.empty_like(tests)
    q[order] = np.minimum.accumulate(scaled[::-1])[::-1]  # never smaller than a smaller p's
    result = np.full_like(values, np.nan)
    result[~np.isnan(values)] = q
    return result


def verdict(low: Numbers, high: Numbers, threshold: float = MATERIAL) -> np.ndarray:
    """What an interval says about an effect's size: "material", "negligible" or "undecided".

    Args:
        low: lower ends of the intervals, in the unit of the threshold.
        high: their upper ends, in the same shape.
        threshold: smallest effect that matters (nats per token by default).

    Returns:
        An array of the ends' shape. material: wholly beyond the threshold on either side, low >
        threshold or high < -threshold. negligible: wholly within, -threshold <= low and high <=
        threshold. undecided: all others, and those with an end that is nan.

    Raises:
        InterpError: a low end above its high end, differing shapes, or a threshold that is not
            positive.
    """
    lower, upper = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
    if lower.shape != upper.shape or (lower > upper).any():
        raise InterpError(
            f"verdict got ends of shapes {lower.shape} and {upper.shape}; expected one shape, and "
            "no low end above its high end."
        )
    if not (0 < threshold < np.inf):
        raise InterpError(f"verdict got threshold {threshold}; expected a positive number.")
    known = ~(np.isnan(lower) | np.isnan(upper))
    material = known & ((lower > threshold) | (upper < -threshold))
    negligible = known & (lower >= -threshold) & (upper <= threshold)
    return np.where(material, "material", np.where(negligible, "negligible", "undecided"))


def spearman(x: Numbers, y: Numbers) -> float:
    """Spearman's rank correlation, ties sharing their mean rank.

    Args:
        x: one number per thing, in any shape, which is flattened.
        y: another one per thing, in the same shape.

    Returns:
        rho in [-1, 1]; nan where either is constant or has fewer than two numbers.

    Raises:
        InterpError: differing shapes or a value that is not finite.
    """
    first, second = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if first.shape != second.shape:
        raise InterpError(f"spearman got shapes {first.shape} and {second.shape}; expected one.")
    _check_finite(first)
    _check_finite(second)
    if first.size < 2:
        return float("nan")
    a, b = (stats.rankdata(v) - (v.size + 1) / 2 for v in (first.ravel(), second.ravel()))
    scale = np.sqrt((a @ a) * (b @ b))  # ranks are halves of integers: constant gives exactly 0
    return float(np.clip(a @ b / scale, -1, 1)) if scale > 0 else float("nan")


def spearman_rows(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[row] rho of each row of [row, thing] with that of the other; nan where a row is constant.

    One of the two may have a single row, which stands beside every row of the other.
    """
    a, b = (stats.rankdata(v, axis=1) - (v.shape[1] + 1) / 2 for v in (x, y))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))


def bootstrap_t(
    x: Numbers,
    statistic: Callable[..., np.ndarray] = np.mean,
    *,
    axis: int = 0,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Studentised bootstrap interval of a statistic over documents.

    Documents are resampled whole, the same ones for all the other axes. The mean's standard error
    is the usual one; other statistics use the jackknife, which takes documents * resamples
    evaluations and suits smooth statistics (ratios and means, not medians).

    Args:
        x: values with the documents along `axis`.
        statistic: called as statistic(array, axis=i); must remove axis i and keep the others.
        axis: the document axis of x, which the result lacks.
        confidence: between 0 and 1.
        resamples: bootstrap samples, at least 100.
        seed: of the resampling. Same seed, same interval.

    Returns:
        The interval, `mean` being the statistic itself. nan ends for a single document; zero width
        where leaving out a document changes nothing; infinite ends where too many resamples hold no
        variation, that is, where there are too few distinct documents to say.

    Raises:
        InterpError: no document, a value that is not finite, too few resamples, a bad confidence.

    Source: Efron and Tibshirani (1993), chapter 12.5.
    """
    values = _documents(x, axis)
    if resamples < 100:
        raise InterpError(f"bootstrap_t got {resamples} resamples; expected at least 100.")
    _check_confidence(confidence)
    estimate, error = (np.asarray(part[0]) for part in _estimates(values[None], statistic))
    if len(values) < 2:
        return Interval(estimate, np.full_like(estimate, np.nan), np.full_like(estimate, np.nan))
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    pieces = []
    step = max(1, 4_000_000 // values.size)  # at most 32 MB at a time
    for start in range(0, resamples, step):
        estimates, errors = _estimates(values[draws[start : start + step]], statistic)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = (estimates - estimate) / errors
        pieces.append(np.where((errors == 0) & (estimates == estimate), 0.0, t))
    t = np.concatenate(pieces)
    # Order statistics, outward: interpolating between infinite ones would give nan.
    tail = (1 - confidence) / 2
    low_t = np.quantile(t, tail, axis=0, method="lower")
    high_t = np.quantile(t, 1 - tail, axis=0, method="higher")
    with np.errstate(invalid="ignore"):  # 0 * inf, taken care of by the where
        low = np.where(error == 0, estimate, estimate - high_t * error)
        high = np.where(error == 0, estimate, estimate - low_t * error)
    return Interval(estimate, low, high)


def first_crossing(counts: Numbers, values: Numbers, limit: float) -> int:
    """How many heads can be removed before the curve first exceeds a limit.

    Args:
        counts: numbers of heads removed, strictly increasing from 0.
        values: the curve at each of them, e.g. the loss change in nats.
        limit: the largest value allowed, in the values' unit; equal to it is allowed.

    Returns:
        The last of `counts` before the first value above the limit, even where the curve falls
        again later. `counts[-1]` where none is above, 0 where the first is.
        Between two counts the curve is unknown: refine it there first for an answer to the head.

    Raises:
        InterpError: counts that do not rise from 0, another number of values, or a nan.
    """
    steps, curve = np.asarray(counts), np.asarray(values, dtype=np.float64)
    if steps.ndim != 1 or curve.shape != steps.shape or steps.size == 0:
        raise InterpError(
            f"first_crossing got counts and values of shapes {steps.shape} and {curve.shape}; "
            "expected one value for each count."
        )
    if steps[0] != 0 or (np.diff(steps) <= 0).any():
        raise InterpError("first_crossing got counts that do not rise strictly from 0.")
    if np.isnan(curve).any() or np.isnan(limit):
        raise InterpError("first_crossing got a curve or limit that is nan; expected numbers.")
    above = np.flatnonzero(curve > limit)
    return int(steps[max(above[0] - 1, 0)] if above.size else steps[-1])


def gini(x: Numbers) -> float:
    """Gini coefficient: 0 where all are equal, (n - 1)/n where one of n has everything.

    Args:
        x: numbers of at least 0, flattened; the unit does not matter.

    Returns:
        The coefficient (not corrected for small n); nan where all are 0.

    Raises:
        InterpError: no number, a negative one, or one that is not finite.
    """
    values = np.sort(np.asarray(x, dtype=np.float64), axis=None)
    _check_finite(values)
    if values.size == 0 or values[0] < 0:
        raise InterpError("gini got no number, or a negative one; expected numbers of at least 0.")
    if values[-1] == 0:
        return float("nan")
    shares = values / values[-1]  # so that sums cannot overflow
    weights = 2 * np.arange(1, shares.size + 1) - shares.size - 1
    return float(max(0.0, weights @ shares / (shares.size * shares.sum())))


def percentile_of(value: Numbers, null: Numbers) -> NDArray[np.float64]:
    """Where values lie among those of a null model, in percent.

    Args:
        value: numbers of any shape.
        null: the null model's numbers, flattened, in the same unit.

    Returns:
        100 * (share of the null below the value + half the share equal to it), in the shape of
        value: 0 below all of the null, 50 where all are equal. nan where the null is empty.

    Raises:
        InterpError: a number that is not finite.
    """
    values = np.asarray(value, dtype=np.float64)
    ordered = np.sort(np.asarray(null, dtype=np.float64), axis=None)
    _check_finite(values)
    _check_finite(ordered)
    if ordered.size == 0:
        return np.full_like(values, np.nan)
    below = np.searchsorted(ordered, values, side="left")
    up_to = np.searchsorted(ordered, values, side="right")
    return np.asarray(50.0 * (below + up_to) / ordered.size)


def _documents(x: Numbers, axis: int) -> NDArray[np.float64]:
    """The values as float64, the document axis first; checks that they exist and are finite."""
    values = np.asarray(x, dtype=np.float64)
    if not -values.ndim <= axis < values.ndim:
        raise InterpError(f"An array of shape {values.shape} has no document axis {axis}.")
    values = np.moveaxis(values, axis, 0)
    if len(values) == 0:
        raise InterpError("There is no document; expected at least one.")
    _check_finite(values)
    return values


def _check_finite(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise InterpError("A statistic got a value that is not finite; expected finite numbers.")


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InterpError(f"Got confidence {confidence}; expected one between 0 and 1, e.g. 0.95.")


def _mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the first axis and its standard error; the error is nan for one document.

    Deviations from the first document first: equal values then give their own mean and error 0.
    """
    n = len(values)
    centred = values - values[0]
    shift = centred.mean(axis=0)
    squares = np.square(centred - shift).sum(axis=0)
    error = np.sqrt(squares / (n - 1) / n) if n > 1 else np.full_like(squares, np.nan)
    return np.asarray(values[0] + shift), np.asarray(error)


def _t_interval(mean: np.ndarray, error: np.ndarray, n: int, confidence: float) -> Interval:
    _check_confidence(confidence)
    half = np.asarray(stats.t.ppf((1 + confidence) / 2, n - 1) * error if n > 1 else error)
    return Interval(mean, np.asarray(mean - half), np.asarray(mean + half))


def _estimates(
    samples: np.ndarray, statistic: Callable[..., np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The statistic of samples `[sample, document, ...]` and its error, both `[sample, ...]`.

    The error is known but for a factor that depends on the number of documents alone.
    """
    if statistic is np.mean:
        return _mean_and_error(np.moveaxis(samples, 1, 0))
    n = samples.shape[1]
    estimate = np.asarray(statistic(samples, axis=1), dtype=np.float64)
    if n < 2:
        return estimate, np.full_like(estimate, np.nan)
    left_out = np.stack([statistic(np.delete(samples, i, axis=1), axis=1) for i in range(n)])
    # The jackknife's standard error is n - 1 times this; a constant factor studentises away.
    return estimate, _mean_and_error(left_out)[1]

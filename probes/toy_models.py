"""The toy model of superposition: more features than dimensions, made to order.

    h = W x,  x' = ReLU(W^T h + b),  loss = sum_i I_i (x_i - x'_i)^2

with n features x_i in m dimensions; each x_i is 0 with probability S (the sparsity) and uniform in
[0, 1] otherwise. What a trained W does is known, so that this is ground truth for the same numbers
on real models: dense features (S = 0) are given dimensions of their own, most important first, and
the rest is dropped, as in PCA; sparse ones share dimensions, first as antipodal pairs (D = 1/2),
later as pentagons in a plane (2/5) and finer figures. D* = m / |W|_F^2 is about m / features
represented.

What it does not show: that a Transformer does this. Inputs here are independent, non-negative and
of one distribution, and nothing is computed from them.

Source: Elhage et al. (2022), "Toy Models of Superposition".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from interp.errors import UsageError
from interp.progress import track
from interp.results import Result, described
from probes.calibration import calibrate
from probes.geometry import dimensionality
from probes.toy_checks import checks, most_pairs
from probes.toy_columns import COLUMNS, SUMMARY, TOY

INVERSE_DENSITIES = np.logspace(0, 1.5, 12)  # of the sweep, 1 / (1 - S)
DENSITIES = (1.0, 0.3, 0.1, 0.03, 0.01)  # of the features of unequal importance
SHAPES = ((2, 0.05), (3, 0.05), (4, 0.05), (5, 0.05), (3, 0.7))  # features in a plane, 1 - S
PHASE_DENSITIES = np.logspace(0, -2, 8)
PHASE_IMPORTANCES = np.logspace(-1, 1, 9)
REPLICATES = 3  # of shapes, the one with the lowest loss counts
SIGNS = ((1.0, -1.0), (1.0, -1.0), (1.0, 1.0))  # of the starts of the phases: most keep them
BATCH, PHASE_BATCH, LEARNING_RATE = 512, 256, 1e-2
EVALUATED = 20_000  # inputs of the reported loss
REPRESENTED = 0.5  # |W_i|^2 from which a feature counts as represented
OPPOSITE = -0.95  # cosine from which two features are an antipodal pair


@dataclass(frozen=True)
class Trained:
    """A batch of trained toy models.

    Attributes:
        W: [instance, m, n].
        b: [instance, n].
        loss: [instance] importance-weighted squared error per input, on fresh inputs.
    """

    W: Float[Tensor, "instance m n"]
    b: Float[Tensor, "instance n"]
    loss: Float[Tensor, " instance"]

    @property
    def squares(self) -> Float[Tensor, "instance n"]:
        """|W_i|^2 of each feature."""
        return self.W.square().sum(1)

    @property
    def dimensionality(self) -> Float[Tensor, "instance n"]:
        """D_i of each feature."""
        return dimensionality(self.W.mT)


def fit(
    density: Float[Tensor, "instance n"],
    importance: Float[Tensor, "instance n"],
    m: int,
    *,
    steps: int,
    seed: int,
    batch: int = BATCH,
    signs: Float[Tensor, "instance n"] | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Trained:
    """Train many toy models at once, each on its own inputs.

    Args:
        density: 1 - S of each feature; 0 for one that an instance does not have.
        importance: I of each feature.
        m: dimensions.
        steps: of Adam, whose rate falls linearly over the second half.
        seed: of the weights and the inputs.
        batch: inputs a step.
        signs: of the starting weights; None: at random.
        tick: called after each step.
    """
    generator = torch.Generator().manual_seed(seed)
    instances, n = density.shape
    p, weight = density[:, None], importance[:, None]
    start = torch.randn(instances, m, n, generator=generator) / (2 * m**0.5) * (p > 0)
    W = (start if signs is None else start.abs() * signs[:, None]).requires_grad_()
    b = torch.zeros(instances, 1, n, requires_grad=True)
    adam = torch.optim.Adam([W, b], lr=LEARNING_RATE)
    rate = torch.optim.lr_scheduler.LambdaLR(adam, lambda i: min(1.0, 2 * (steps - i) / steps))

    def errors(inputs: int) -> Tensor:
        uniform = torch.rand(instances, inputs, n, generator=generator)
        x = torch.where(uniform < p, uniform / p.clamp(min=1e-9), 0.0)
        out = torch.baddbmm(b, x @ W.mT, W).relu()
        return (weight * (x - out).square()).sum((1, 2)) / inputs

    for _ in range(steps):
        adam.zero_grad()
        errors(batch).sum().backward()
        adam.step()
        rate.step()
        tick()
    with torch.no_grad():
        loss = torch.stack([errors(batch) for _ in range(-(-EVALUATED // batch))]).mean(0)
    return Trained(W.detach(), b.detach()[:, 0], loss)


def antipodal_pairs(W: Float[Tensor, "m n"]) -> int:
    """Pairs of represented features that point opposite ways and are each other's only such one."""
    kept = W[:, W.square().sum(0) > REPRESENTED]
    unit = kept / kept.norm(dim=0)
    opposite = unit.T @ unit < OPPOSITE
    alone = opposite.sum(1) == 1
    return int((opposite & alone[:, None] & alone[None]).sum()) // 2


def superposition_boundary(density: Any) -> Any:
    """Relative importance from which two features in one dimension are stored as a pair.

    Of the two, dropping the less important one costs r (p/3 - p^2/4), its variance, p being the
    density; storing both at opposite ends costs (1 + r) p^2/6, paid when both are active. They
    are equal at r = p / (2 - 5p/2). inf where dropping is always cheaper. Weights are taken to be
    of length 1 and the pair's biases 0; training can find a slightly better pair.
    """
    p = np.asarray(density, dtype=float)
    with np.errstate(divide="ignore"):
        return np.where(p < 0.8, p / (2 - 2.5 * p), np.inf)


def toy(
    *,
    features: int = 40,
    dimensions: int = 8,
    steps: int = 1200,
    calibrations: int = 3,
    seed: int = 0,
    progress: bool = True,
) -> Result:
    """Train the toy model of superposition over a sweep of sparsities and compare with theory.

    Four experiments: a sweep of sparsities with equally important features; features of falling
    importance, dense to sparse; two to five features in a plane; and two features in one dimension
    over density and importance (the phase change). Beside them the calibration of the instrument
    that `superposition` reads a real model with: SAEs trained on planted features.

    Args:
        features: of the sweep, n.
        dimensions: of the sweep, m; at least 2, and fewer than half of the features.
        steps: of training, each of 512 inputs an instance (256 for the phases).
        calibrations: SAEs to train on planted features (some 10 s each); 0: none.
        seed: of weights and inputs. Same seed, same numbers on CPU.
        progress: show a bar.

    Returns:
        A Result with the tables sweep, features, shapes, phase and checks, and the calibration in
        its summary. Interrupted during the calibration it has none, and `complete` is False.

    Raises:
        UsageError: sizes that show nothing.
    """
    if not 2 <= dimensions < features / 2:
        raise UsageError(
            f"{features} features in {dimensions} dimensions: give at least 2 dimensions, and more "
            "than twice as many features, so that pairs cannot hold them all."
        )
    if steps < 10:
        raise UsageError(f"steps must be at least 10, got {steps}.")
    if calibrations < 0:
        raise UsageError(f"calibrations must be 0 or more, got {calibrations}.")
    start = time.monotonic()
    bar = track(4 * steps, "toy models", progress)

    def run(density: Tensor, importance: Tensor, m: int, which: int, **options: Any) -> Trained:
        own = {"steps": steps, "seed": 4 * seed + which, "tick": lambda: bar.update(1)}
        return fit(density, importance, m, **own, **options)

    try:
        sweep, sweep_features = _sweep(run, features, dimensions)
        unequal, drop_loss = _unequal(run)
        shapes = _shapes(run)
        phase = _phase(run)
    finally:
        bar.close()
    calibrated: dict[str, Any] = {}
    complete = True
    try:
        if calibrations:
            found = calibrate(seeds=calibrations, seed=seed, progress=progress)
            calibrated = {f"calibration_{k}": v for k, v in found.describe().items()}
    except KeyboardInterrupt:
        complete = False
    pairs = most_pairs(sweep)
    tables = {
        "checks": checks(sweep, unequal, drop_loss, shapes, phase, dimensions),
        "sweep": sweep,
        "features": pd.concat([sweep_features, unequal], ignore_index=True),
        "shapes": shapes,
        "phase": phase,
    }
    return Result(
        analyzer="superposition-toy",
        config={
            "features": features,
            "dimensions": dimensions,
            "steps": steps,
            "calibrations": calibrations,
            "seed": seed,
        },
        model={"name": "toy model of superposition"},
        data={},
        summary={
            "checks": len(tables["checks"]),
            "checks_agree": int(tables["checks"]["agrees"].to_numpy().sum()),
            "dense_d_star": float(sweep["d_star"].iloc[0]),
            "pairs_d_star": pairs["d_star"],
            "pairs_density": pairs["density"],
            "most_represented": int(sweep["represented"].to_numpy().max()),
            **calibrated,
        },
        tables=tables,
        columns={name: described(table, COLUMNS[name]) for name, table in tables.items()},
        summary_columns={k: v for k, v in SUMMARY.items() if calibrated or k in TOY},
        notices=[] if complete else ["Interrupted before the calibration was done."],
        seed=seed,
        seconds=time.monotonic() - start,
        complete=complete,
    )


# Experiments --------------------------------------------------------------------------------------

Run = Callable[..., Trained]


def _feature_rows(
    found: Trained, i: int, about: dict[str, Any], importance: Tensor
) -> pd.DataFrame:
    squares, D = found.squares[i], found.dimensionality[i]
    return pd.DataFrame(
        {
            **about,
            "feature": np.arange(len(squares)),
            "importance": importance.numpy().astype(float),
            "square": squares.numpy().astype(float),
            "dimensionality": D.numpy(),
            "represented": (squares > REPRESENTED).numpy(),
        }
    )


def _sweep(run: Run, n: int, m: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    density = torch.tensor(1 / INVERSE_DENSITIES, dtype=torch.float32)
    ones = torch.ones(len(density), n)
    found = run(density[:, None] * ones, ones, m, 0)
    rows, parts = [], []
    for i, inverse in enumerate(INVERSE_DENSITIES):
        p = 1 / float(inverse)
        part = _feature_rows(found, i, {"experiment": "sweep", "density": p}, ones[i])
        D = part.loc[part["represented"], "dimensionality"].to_numpy()
        total = float(found.squares[i].double().sum())
        rows.append(
            {
                "density": p,
                "inverse_density": float(inverse),
                "loss": float(found.loss[i]),
                "frobenius_squared": total,
                "d_star": m / total,
                "represented": len(D),
                "antipodal_pairs": antipodal_pairs(found.W[i]),
                "dimensionality_sum": float(part["dimensionality"].to_numpy().sum()),
                **{
                    f"dimensionality_p{q}": float(np.percentile(D, q)) if len(D) else float("nan")
                    for q in (5, 50, 95)
                },
            }
        )
        parts.append(part)
    return pd.DataFrame(rows), pd.concat(parts, ignore_index=True)


def _unequal(run: Run, n: int = 20, m: int = 5) -> tuple[pd.DataFrame, tuple[float, float]]:
    """Features of falling importance; with the dense loss found and the one of dropping all but m.

    A dropped dense feature is answered by its mean and costs its variance, 1/12.
    """
    importance = 0.8 ** torch.arange(n)
    density = torch.tensor(DENSITIES)[:, None].expand(-1, n)
    found = run(density, importance.expand(len(DENSITIES), -1), m, 1)
    parts = [
        _feature_rows(found, i, {"experiment": "importance", "density": p}, importance)
        for i, p in enumerate(DENSITIES)
    ]
    return pd.concat(parts, ignore_index=True), (
        float(found.loss[0]),
        float(importance[m:].sum()) / 12,
    )


def _shapes(run: Run) -> pd.DataFrame:
    cases = [case for case in SHAPES for _ in range(REPLICATES)]
    most = max(n for n, _ in SHAPES)
    has = torch.tensor([[float(j < n) for j in range(most)] for n, _ in cases])
    density = has * torch.tensor([p for _, p in cases])[:, None]
    found = run(density, has, 2, 2)
    loss = found.loss.reshape(len(SHAPES), REPLICATES)
    rows = []
    for i, (n, p) in enumerate(cases):
        case, replicate = divmod(i, REPLICATES)
        for j in range(n):
            rows.append(
                {
                    "features": n,
                    "density": p,
                    "replicate": replicate,
                    "best": int(loss[case].argmin()) == replicate,
                    "loss": float(found.loss[i]),
                    "feature": j,
                    "x": float(found.W[i, 0, j]),
                    "y": float(found.W[i, 1, j]),
                    "dimensionality": float(found.dimensionality[i, j]),
                }
            )
    return pd.DataFrame(rows)


def _phase(run: Run) -> pd.DataFrame:
    grid = [(float(p), float(r)) for p in PHASE_DENSITIES for r in PHASE_IMPORTANCES]
    cells = torch.tensor(grid).repeat_interleave(len(SIGNS), 0)
    importance = torch.stack([torch.ones(len(cells)), cells[:, 1]], dim=1)
    signs = torch.tensor(SIGNS).repeat(len(grid), 1)
    density = cells[:, :1].expand(-1, 2)
    found = run(density, importance, 1, 3, signs=signs, batch=PHASE_BATCH)
    loss = found.loss.reshape(len(grid), len(SIGNS))
    rows = []
    for i, (p, r) in enumerate(grid):
        best = i * len(SIGNS) + int(loss[i].argmin())
        first, second = (float(s) for s in found.squares[best])
        smaller = min(r, 1 / r)  # of the two importances, the other set to 1
        boundary = float(superposition_boundary(p))
        rows.append(
            {
                "density": p,
                "relative_importance": r,
                "square_first": first,
                "square_second": second,
                "state": _state(first, second),
                "loss": float(found.loss[best]),
                "boundary": boundary,
                "predicted": "both" if smaller > boundary else "first" if r < 1 else "second",
                "near_boundary": bool(boundary / 2 < smaller < boundary * 2)
                or bool(r == 1.0 and boundary >= 1)
                or bool(np.isinf(boundary) and 0.5 < r < 2),
            }
        )
    return pd.DataFrame(rows)


def _state(first: float, second: float) -> str:
    names = {(True, True): "both", (True, False): "first", (False, True): "second"}
    return names.get((first > REPRESENTED, second > REPRESENTED), "neither")

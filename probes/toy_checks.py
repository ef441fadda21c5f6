"""The toy model of superposition beside what theory says of it.

Dense features are stored alone, the most important ones first, and the others cost their variance;
sparser ones lie in antipodal pairs, and in a plane in the figures of Elhage et al. (2022). The
difference that counts as agreement is stated with each comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd


def most_pairs(sweep: pd.DataFrame) -> dict[str, float]:
    """The sweep's row with the most antipodal pairs, of several the densest."""
    at = int(sweep["antipodal_pairs"].to_numpy().argmax())
    return {str(name): float(sweep[name].to_numpy()[at]) for name in sweep.columns}


def checks(
    sweep: pd.DataFrame,
    unequal: pd.DataFrame,
    drop_loss: tuple[float, float],
    shapes: pd.DataFrame,
    phase: pd.DataFrame,
    m: int,
) -> pd.DataFrame:
    """What theory says, what was found, and whether they agree within what is stated.

    Args:
        sweep: equally important features, densest first.
        unequal: features of falling importance.
        drop_loss: their loss where dense, found and by theory.
        shapes: features in a plane.
        phase: two features in one dimension.
        m: dimensions of the sweep.
    """
    rows: list[dict[str, Any]] = []

    def check(what: str, expected: float, found: float, within: float) -> None:
        agrees = abs(found - expected) <= within
        row = {"check": what, "expected": expected, "found": found, "within": within}
        rows.append(row | {"agrees": bool(agrees)})

    check(
        "dense: D* (no more stored than dimensions, as PCA)",
        1.0,
        float(sweep["d_star"].to_numpy()[0]),
        0.1,
    )
    dense = unequal[unequal["density"] == 1.0]
    kept = np.argsort(-np.asarray(dense["square"]))[:5]
    check("dense, unequal importance: most important 5 of 20 kept", 5.0, int((kept < 5).sum()), 0)
    D = dense.loc[dense["feature"] < 5, "dimensionality"].to_numpy()
    check("dense, unequal importance: mean D of those 5 (orthogonal)", 1.0, float(D.mean()), 0.05)
    found, expected = drop_loss
    check(
        "dense, unequal importance: loss (the dropped features' variance)",
        expected,
        found,
        0.05 * expected,
    )
    pairs = most_pairs(sweep)
    check("sparser: antipodal pairs (one a dimension)", m, pairs["antipodal_pairs"], 0)
    check("sparser: D* at that density", 0.5, pairs["d_star"], 0.03)
    check("sparser: median D at that density", 0.5, pairs["dimensionality_p50"], 0.02)
    worst = float(sweep["dimensionality_sum"].to_numpy().min())
    check("all densities: smallest sum of D_i (all dimensions are used)", m, worst, 0.02 * m)
    best = shapes[shapes["best"]]
    for n, p, what, smallest, largest in (
        (2, 0.05, "2 in a plane, orthogonal", 1.0, 1.0),
        (3, 0.05, "3 in a plane, a pair and one alone", 0.5, 1.0),
        (4, 0.05, "4 in a plane, two pairs", 0.5, 0.5),
        (5, 0.05, "5 in a plane, a pentagon", 0.4, 0.4),
    ):
        D = best.loc[(best["features"] == n) & (best["density"] == p), "dimensionality"].to_numpy()
        check(f"{what}: smallest D", smallest, float(D.min()), 0.02)
        check(f"{what}: largest D", largest, float(D.max()), 0.02)
    far = phase[~phase["near_boundary"]]
    same = np.asarray(far["state"]) == np.asarray(far["predicted"])
    check("phases, away from the boundary: share as predicted", 1.0, float(same.mean()), 0.05)
    return pd.DataFrame(rows)

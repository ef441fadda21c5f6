"""What every column and summary key of a toy run means."""

from __future__ import annotations

from interp.results import Column
from probes import calibration

_DENSITY = Column("probability", "That a feature is active: 1 - sparsity.")
_LOSS = Column(
    "squared error per input", "Weighted by importance, summed over features, on fresh inputs."
)
_D = Column("dimensions", "D_i, the share of a dimension that the feature has.")

COLUMNS = {
    "checks": {
        "check": Column("words", "What is compared."),
        "expected": Column("the check's", "By theory."),
        "found": Column("the check's", "In the trained models."),
        "within": Column("the check's", "Largest difference that counts as agreement."),
        "agrees": Column("true or false", "Whether they differ by no more."),
    },
    "sweep": {
        "density": _DENSITY,
        "inverse_density": Column("1 / probability", "1 / (1 - sparsity)."),
        "loss": _LOSS,
        "frobenius_squared": Column("|W|_F^2", "About the number of features represented."),
        "d_star": Column("dimensions per feature", "D* = m / |W|_F^2."),
        "represented": Column("features", "With |W_i|^2 above 0.5."),
        "antipodal_pairs": Column(
            "pairs", "Represented features at cosine below -0.95, each other's only such one."
        ),
        "dimensionality_sum": Column("dimensions", "Sum of D_i over all features; at most m."),
        **{
            f"dimensionality_p{q}": Column(
                "dimensions", f"Percentile {q} of D_i over represented features."
            )
            for q in (5, 50, 95)
        },
    },
    "features": {
        "experiment": Column("name", "sweep: equal importance; importance: falling importance."),
        "density": _DENSITY,
        "feature": Column("index", "Most important first."),
        "importance": Column("weight", "I_i in the loss."),
        "square": Column("|W_i|^2", "1 for a feature that is stored whole and alone."),
        "dimensionality": _D,
        "represented": Column("true or false", "|W_i|^2 above 0.5."),
    },
    "shapes": {
        "features": Column("features", "How many share the plane."),
        "density": _DENSITY,
        "replicate": Column("index", "Trained from other weights."),
        "best": Column("true or false", "Whether it has the lowest loss of its replicates."),
        "loss": _LOSS,
        "feature": Column("index", "Of the features in the plane."),
        "x": Column("weight", "First coordinate of W_i."),
        "y": Column("weight", "Second coordinate of W_i."),
        "dimensionality": _D,
    },
    "phase": {
        "density": _DENSITY,
        "relative_importance": Column("ratio", "Of the second feature to the first."),
        "square_first": Column("|W_i|^2", "Of the first feature."),
        "square_second": Column("|W_i|^2", "Of the second feature."),
        "state": Column("name", "Which of the two are represented in the one dimension."),
        "loss": _LOSS,
        "boundary": Column(
            "ratio", "Relative importance of the lesser feature from which storing both is cheaper."
        ),
        "predicted": Column("name", "The state by that boundary."),
        "near_boundary": Column("true or false", "Within a factor of 2 of it."),
    },
}

TOY = {
    "checks": Column("comparisons", "With theory."),
    "checks_agree": Column("comparisons", "That agree within what is stated."),
    "dense_d_star": Column("dimensions per feature", "D* at density 1."),
    "pairs_d_star": Column("dimensions per feature", "D* where there are most antipodal pairs."),
    "pairs_density": Column("probability", "The density where there are most antipodal pairs."),
    "most_represented": Column("features", "Most that a density of the sweep represents."),
}

SUMMARY = TOY | {f"calibration_{key}": column for key, column in calibration.COLUMNS.items()}

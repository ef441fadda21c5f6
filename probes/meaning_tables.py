"""Geometry, matches, concepts and neurons as tables and summary keys with units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from interp.results import Column
from probes import concept_scores, geometry, matching, polysemantic
from probes.concept_scores import ConceptScores
from probes.fitting import SAE
from probes.meaning import Meaning

_TAKEN = {  # column of the table features -> of the geometry
    "dimensionality": "dimensionality",
    "interference": "interference",
    "interference_percentile": "interference_percentile",
    "nearest_feature": "nearest_feature",
    "nearest_feature_cosine": "feature_cosine",
    "nearest_feature_percentile": "feature_cosine_percentile",
    "nearest_neuron_percentile": "neuron_cosine_percentile",
}
FEATURES = {
    **{new: geometry.FEATURES[old] for new, old in _TAKEN.items()},
    "concept": Column(
        "name", "Label that it tells best on half of the documents; missing where it never fires."
    ),
    "concept_sign": concept_scores.DIRECTIONS["sign"],
    "concept_auroc": Column(
        "AUROC", "Of that label on the other half: 0.5 by chance, 1 tells it without error."
    ),
    "multi_concept": concept_scores.DIRECTIONS["multi_concept"],
    "matched_cosine": Column(
        "cosine", "With its match of the other seed's SAE, mean over seeds; missing where none."
    ),
    "returns": Column(
        "true or false", "In every other seed's SAE, by the rule of the table matches."
    ),
}

MATCHES = {"seed": Column("name", "Which other SAE."), **matching.MATCHES}
COLUMNS: Mapping[str, dict[str, Column]] = {
    "geometry": geometry.DISTRIBUTIONS,
    "matches": MATCHES,
    "concept_scores": concept_scores.DICTIONARIES,
    "concept_margins": concept_scores.MARGINS,
    "concepts": concept_scores.CONCEPTS,
    "neurons": polysemantic.NEURONS,
}
TOLD = (  # of the SAE's row of the table concept_scores
    *(f"{name}{end}" for name in concept_scores.MEANS for end in ("", "_low", "_high")),
    *("monosemantic_share", "multi_concept_share", "concepts_told", "concepts_told_all"),
    "candidates",
)
_MARGIN = ("", "_low", "_high")
SUMMARY = {
    **{key: column for key, column in geometry.SUMMARY.items() if key != "beyond_null"},
    "neuron_cosine_beyond_null": geometry.SUMMARY["beyond_null"],
    "dimensionality_median": Column("dimensions", "Median of D_i over live features."),
    "dimensionality_null": Column(
        "dimensions", "Median of D_i over random directions with the activations' covariance."
    ),
    "dimensionality_null_low": Column("dimensions", "Smallest median of a set of them."),
    "dimensionality_null_high": Column("dimensions", "Largest median of a set of them."),
    "dimensionality_even": Column(
        "dimensions",
        "1 / (1 + (n_live - 1) / d_model): D_i of as many directions drawn evenly over all "
        "dimensions, as a decoder starts out.",
    ),
    "match_seeds": Column("SAEs", "Of other seeds that the SAE is matched with."),
    **{
        f"match_{key}": Column(column.unit, f"{column.description} Mean over other seeds.")
        for key, column in matching.SUMMARY.items()
        if key != "method"
    },
    "match_method": matching.SUMMARY["method"],
    **{f"sae_{key}": concept_scores.DICTIONARIES[key] for key in TOLD},
    "concepts": concept_scores.DICTIONARIES["concepts"],
    "concept_tokens": concept_scores.DICTIONARIES["tokens"],
    "concept_documents": concept_scores.DICTIONARIES["documents"],
    "concept_best_other": Column(
        "name", "The other dictionary with the largest held-out concept_auroc_all."
    ),
    **{
        f"concept_margin{end}": Column("AUROC", text)
        for end, text in zip(
            _MARGIN,
            (
                "concept_auroc_all of the SAE minus that of concept_best_other.",
                "Lower end of its 95% interval over documents, paired.",
                "Upper end.",
            ),
            strict=True,
        )
    },
    **{
        key if key == "neurons" else f"neurons_{key}": column
        for key, column in polysemantic.SUMMARY.items()
    },
}


def with_meaning(features: pd.DataFrame, meaning: Meaning) -> pd.DataFrame:
    """The table features, with what is known of each; missing for features that never fire."""
    if meaning.geometry is not None:
        own = meaning.geometry.features.set_index("feature")
        taken = {new: own[old] for new, old in _TAKEN.items() if old in own}
        table = pd.DataFrame(taken).astype({"nearest_feature": "Int64"})
        features = features.join(table, on="feature")
    if meaning.scores is not None:
        every = meaning.scores.every
        own = every.loc[every["dictionary"] == SAE].set_index("direction")
        taken = {
            "concept": own["concept"],
            "concept_sign": own["sign"].astype("Int64"),
            "concept_auroc": own["auroc"],
            "multi_concept": own["multi_concept"].astype("boolean"),
        }
        features = features.join(pd.DataFrame(taken), on="feature")
    if meaning.matches:
        found = [one.features.set_index("feature") for one in meaning.matches.values()]
        cosines = pd.concat([one["matched_cosine"] for one in found], axis=1)
        returns = pd.concat([one["returns"] for one in found], axis=1)
        taken = {
            "matched_cosine": cosines.mean(axis=1),
            "returns": returns.all(axis=1).astype("boolean"),
        }
        features = features.join(pd.DataFrame(taken), on="feature")
    return features


def tables(meaning: Meaning) -> dict[str, pd.DataFrame]:
    """The tables of what was measured."""
    out: dict[str, pd.DataFrame] = {}
    if meaning.geometry is not None:
        out["geometry"] = meaning.geometry.distributions
    if meaning.matches:
        parts = [one.features.assign(seed=name) for name, one in meaning.matches.items()]
        out["matches"] = pd.concat(parts, ignore_index=True).reindex(columns=list(MATCHES))
    if meaning.scores is not None:
        out["concept_scores"] = meaning.scores.dictionaries
        if SAE in meaning.scores.influences and len(meaning.scores.influences) > 1:
            out["concept_margins"] = meaning.scores.margins(SAE)
        out["concepts"] = meaning.scores.concepts
    if meaning.neurons is not None:
        out["neurons"] = meaning.neurons.neurons
    return out


def summary(meaning: Meaning) -> dict[str, Any]:
    """The numbers of what was measured."""
    out: dict[str, Any] = {}
    if meaning.geometry is not None:
        out |= meaning.geometry.summary
        if "beyond_null" in out:
            out["neuron_cosine_beyond_null"] = out.pop("beyond_null")
        spread = meaning.geometry.distributions.set_index(["statistic", "directions"])
        own, null = (spread.loc[("dimensionality", d)] for d in ("features", "random"))
        out |= {"dimensionality_median": own["p50"], "dimensionality_null": null["p50"]}
        out |= {f"dimensionality_null_{end}": null[f"median_{end}"] for end in ("low", "high")}
        out["dimensionality_even"] = 1 / (1 + (out["n_live"] - 1) / out["d_model"])
    if meaning.matches:
        found = [one.summary for one in meaning.matches.values()]
        out |= {"match_seeds": len(found), "match_method": found[0]["method"]}
        for key in found[0]:
            values = [one[key] for one in found if one[key] is not None]
            if key != "method" and values:
                out[f"match_{key}"] = float(np.mean(values))
    if meaning.scores is not None:
        out |= _concepts(meaning.scores)
    if meaning.neurons is not None:
        for key, value in meaning.neurons.summary.items():
            out[key if key == "neurons" else f"neurons_{key}"] = value
    return out


def _concepts(scores: ConceptScores) -> dict[str, Any]:
    table = scores.dictionaries.set_index("dictionary")
    if SAE not in table.index:
        return {}
    row = table.loc[SAE]
    out = {f"sae_{key}": row[key] for key in TOLD}
    out |= {"concepts": row["concepts"], "concept_tokens": row["tokens"]}
    out["concept_documents"] = row["documents"]
    others = table.drop(index=SAE)["concept_auroc_all"]
    if len(others):
        best = str(others.astype(float).idxmax())
        margin = scores.margins(SAE).set_index("against").loc[best]
        out["concept_best_other"] = best
        out |= {f"concept_margin{end}": margin[f"concept_auroc_all{end}"] for end in _MARGIN}
    return out

"""How a `superposition` run tells what its features share, tell, explain, and whether they return.

The null comes with every number, in the same sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interp.report.view import Digest
from interp.report.words import DASH, count, interval, number, percent, unsigned
from interp.results import Result

NAMES = {
    "sae": "SAE features",
    "random dictionary": "random dictionary, trained encoder",
    "null model": "SAE features of a model with permuted weights",
    "neurons": "MLP neurons",
    "pca": "PCA directions",
    "random directions": "random directions",
}
_SHORT = NAMES | {
    "random dictionary": "random, trained",
    "null model": "SAE, null model",
}
TABLES = frozenset(
    {"geometry", "matches", "concept_scores", "concept_margins", "concepts", "neurons"}
)
STATISTICS = {
    "dimensionality": "D_i, dimensions a feature has",
    "interference": "interference, sum of squared cosines",
    "feature_cosine": "|cosine| with the nearest feature",
    "neuron_cosine": "|cosine| with the nearest neuron",
}


def name_of(dictionary: Any) -> str:
    """A row of the table concept_scores, as it is called in words."""
    return NAMES.get(str(dictionary), str(dictionary))


def share(value: Any) -> str:
    """A cosine, an AUROC or a fraction, with three decimals."""
    found = number(value)
    return DASH if found is None else f"{found:.3f}"


def _difference(value: Any) -> str:
    found = number(value)
    return DASH if found is None else f"{found:+.3f}"


def _few(value: Any) -> str:
    found = number(value)
    return DASH if found is None else f"{found:.3g}"


def _rows(result: Result, table: str) -> list[dict[str, Any]]:
    found = result.tables.get(table)
    if found is None:
        return []
    return [{str(key): value for key, value in row.items()} for row in found.to_dict("records")]


# Findings -----------------------------------------------------------------------------------------


def findings(result: Result) -> list[str]:
    """Plain sentences; what was not measured is left out."""
    parts = (
        _concepts(result),
        _directions(result),
        _matches(result.summary),
        _crowding(result.summary),
        _geometry(result.summary),
        _near_neurons(result.summary),
        _neurons(result.summary),
    )
    return [part for part in parts if part]


def _concepts(result: Result) -> str | None:
    rows = {str(row["dictionary"]): row for row in _rows(result, "concept_scores")}
    own = rows.get("sae")
    if own is None:
        return None
    margins = {str(row["against"]): row for row in _rows(result, "concept_margins")}
    told = []
    for name, margin in margins.items():
        low, high = (number(margin.get(f"concept_auroc_all_{end}")) for end in ("low", "high"))
        word = "not told apart"
        if low is not None and high is not None and not low <= 0 <= high:
            word = "worse" if low > 0 else "better"
        told.append(
            f"{name_of(name)} {share(rows[name]['concept_auroc_all'])} "
            f"({count(rows[name]['available'])}; {word})"
        )
    ends = interval(own.get("concept_auroc_all_low"), own.get("concept_auroc_all_high"), share)
    value = f"{share(own['concept_auroc_all'])} {ends}".rstrip()
    return (
        f"Concepts: each of {count(own['concepts'])} mechanical labels (words, shapes, topics) is "
        "told by its best single direction, chosen on half of the documents, to a mean AUROC of "
        f"{value} by the SAE's features "
        f"({count(own['available'])} to choose from) on the other half (n = "
        f"{count(own['tokens'])} tokens of {count(own['documents'])} documents; 0.5 is chance). "
        f"Others, by paired intervals against the SAE: {'; '.join(told)}."
    )


def _directions(result: Result) -> str | None:
    rows = {str(row["dictionary"]): row for row in _rows(result, "concept_scores")}
    own = rows.get("sae")
    if own is None:
        return None
    others = [row for name, row in rows.items() if name != "sae"]
    equal = "; ".join(f"{name_of(r['dictionary'])} {share(r['concept_auroc'])}" for r in others)
    each = "; ".join(f"{name_of(r['dictionary'])} {share(r['auroc'])}" for r in others)
    return (
        f"With equally many candidates of each ({count(own['candidates'])} at random) it is "
        f"{share(own['concept_auroc'])} for the SAE, which loses the features that are left out; "
        f"{equal}. Asked the other way round, an average feature tells its own best label to "
        f"{share(own['auroc'])} ({percent(own['monosemantic_share'])} above 0.9; two labels that "
        f"share no token: {percent(own['multi_concept_share'])}); {each}."
    )


def _matches(s: Mapping[str, Any]) -> str | None:
    if number(s.get("match_returning_first")) is None:
        return None
    seeds = number(s.get("match_seeds")) or 1
    others = "another seed's SAE" if seeds == 1 else f"{count(seeds)} other seeds' SAEs (mean)"
    return (
        f"{percent(s['match_returning_first'])} of {count(s['match_n_first'])} live features come "
        f"back in {others}: one to one at a cosine above 0.7 and above the 99th percentile of "
        f"random directions ({share(s.get('match_null_cosine'))}; of these "
        f"{percent(s['match_null_returning_first'])} pass 0.7). Mean matched cosine "
        f"{share(s.get('match_mean_cosine'))}, random directions "
        f"{share(s.get('match_null_mean_cosine'))}. What does not come back says more of the "
        "training than of the model."
    )


def _crowding(s: Mapping[str, Any]) -> str | None:
    if number(s.get("n_live")) is None:
        return None
    return (
        f"{count(s['n_live'])} live features lie in {count(s['d_model'])} dimensions "
        f"({_few(s['live_per_dimension'])} a dimension), of which the activations' variance fills "
        f"{_few(s['participation_ratio'])} (participation ratio; {_few(s['entropy_dimension'])} by "
        f"entropy): {_few(s['live_per_effective_dimension'])} features for each of these. How many "
        "there are, the width of the SAE decides; it is no count of the model's features."
    )


def _geometry(s: Mapping[str, Any]) -> str | None:
    own, null = number(s.get("dimensionality_median")), number(s.get("dimensionality_null"))
    low, high = (number(s.get(f"dimensionality_null_{end}")) for end in ("low", "high"))
    if own is None or null is None or low is None or high is None:
        return None
    verdict = "within what these have"
    if own > high:
        verdict = "features avoid each other more than the activations' spread alone explains"
    elif own < low:
        verdict = "features crowd together more than the activations' spread alone explains"
    return (
        f"A feature has {unsigned(own, 4)} of a dimension to itself (median D_i), as many random "
        f"directions with the activations' covariance {unsigned(null, 4)} (medians of the draws "
        f"{unsigned(low, 4)} to {unsigned(high, 4)}): {verdict}. Directions spread evenly over all "
        "dimensions, as a decoder is before training, have "
        f"{unsigned(s.get('dimensionality_even'))}: only what differs from that too was learned."
    )


def _near_neurons(s: Mapping[str, Any]) -> str | None:
    if number(s.get("neuron_cosine_beyond_null")) is None:
        return None
    return (
        f"{percent(s['neuron_cosine_beyond_null'])} of the features are nearer to a single "
        "neuron's value vector than 99% of these random directions are (1% by chance)."
    )


def _neurons(s: Mapping[str, Any]) -> str | None:
    own, null = (number(s.get(f"neurons_{which}median_effective")) for which in ("", "null_"))
    if own is None:
        return None
    beside = DASH if null is None else _few(null)
    return (
        f"Neurons: the activation of one is explained by {_few(own)} features (median effective "
        f"number, over the {count(s['neurons_explained'])} of {count(s['neurons'])} neurons of "
        f"which features explain more than 5% held out; median R^2 of all "
        f"{_few(s['neurons_median_r2'])}), that of randomly rotated neurons by {beside} (median "
        f"R^2 {_few(s.get('neurons_null_median_r2'))}). {percent(s.get('neurons_single_share'))} "
        f"follow about one feature, of rotated ones {percent(s.get('neurons_null_single_share'))}."
    )


def limits(result: Result) -> list[str]:
    """What these numbers are, and what they are not."""
    out = []
    if "geometry" in result.tables:
        out.append(
            "Many directions at small angles are needed for superposition and are no proof of it: "
            "a dictionary fitted to noise has them too. Only the difference to random directions "
            "is about the model, and about the directions that this SAE found."
        )
    if "concept_scores" in result.tables:
        out.append(
            "Concepts are mechanical labels: a feature that tells none of them may have a meaning "
            "that is not among them. More directions have more to choose from, so compare with as "
            "many random ones; AUROC rewards firing on all tokens of a label, so that a feature "
            "that fires on half of them and nowhere else has 0.75."
        )
    if "neurons" in result.tables:
        out.append(
            "By how many features a neuron is explained depends on the SAE: a wider one splits "
            "features and raises it, a poor one leaves most of a neuron unexplained (see R^2)."
        )
    return out


# Tables -------------------------------------------------------------------------------------------


def digests(result: Result) -> list[Digest]:
    """Concept scores by dictionary, and the geometry beside its null."""
    return [*_scores(result), *_spread(result)]


def _scores(result: Result) -> list[Digest]:
    rows = _rows(result, "concept_scores")
    if not rows:
        return []
    head = ("directions of", "how\nmany", "AUROC\nof all", "95%\ninterval", "equal", "told", "each")
    cells = tuple(
        (
            _SHORT.get(str(row["dictionary"]), str(row["dictionary"])),
            count(row["available"]),
            share(row["concept_auroc_all"]),
            interval(row["concept_auroc_all_low"], row["concept_auroc_all_high"], share),
            share(row["concept_auroc"]),
            f"{count(row['concepts_told_all'])}/{count(row['concepts'])}",
            share(row["auroc"]),
        )
        for row in rows
    )
    note = (
        "Mean held-out AUROC over labels, each told by its best direction: of all, and of "
        f"{count(rows[0]['candidates'])} of each (equal). told: labels above 0.9. each: mean over "
        "directions, each for its best label."
    )
    title = "How well single directions tell labels"
    whole = tuple(heading.replace("\n", " ") for heading in head)
    return [
        Digest(title, head, cells, note, page=False),
        Digest(title, whole, cells, note, terminal=False),
    ]


def _spread(result: Result) -> list[Digest]:
    rows = _rows(result, "geometry")
    if not rows:
        return []
    head = ("", "directions", "n", "5%", "median", "95%")
    cells = tuple(
        (
            STATISTICS.get(str(row["statistic"]), str(row["statistic"])),
            str(row["directions"]),
            count(row["n"]),
            *(_few(row[f"p{q}"]) for q in (5, 50, 95)),
        )
        for row in rows
    )
    note = (
        "features: live decoder directions at length 1. random: as many with the activations' "
        f"covariance, {count(max(row['draws'] for row in rows))} draws."
    )
    return [Digest("How features share the space", head, cells, note, terminal=False)]

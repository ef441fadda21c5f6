"""How well single directions tell concepts: features, neurons, random and PCA directions alike.

For each direction of a dictionary its best concept is chosen by AUROC on half of the documents and
scored on the other half; and for each concept its best direction, among equally many candidates of
each dictionary. Chosen and scored on the same tokens, the best of many is far above 0.5 for pure
noise; that number is reported too (`auroc_chosen`), as a warning and nothing else.

The score of a dictionary's average direction (`auroc`) says how often its directions are about
something in the bank. The score of the average concept says how well the dictionary as a whole
covers the bank, asking all dictionaries the same questions. It is given twice, since neither is
fair to all: with all directions (`concept_auroc_all`), where a larger dictionary has more to choose
from, so that random directions in the same number belong beside it; and with equally many
candidates (`concept_auroc`), where a large sparse dictionary loses most of its features, and with
them their concepts, while a small dense one keeps its whole span.

What the scores cannot show. AUROC rewards firing on all tokens of a concept: a feature that fires
on half of them and nowhere else has 0.75. Both signs of a direction are tried on the first half,
for every dictionary. A direction is `monosemantic` here when it tells *some* concept of the bank
nearly perfectly (held-out AUROC above 0.9); it may answer to more. `multi_concept` asks for that
within the bank: two concepts that share no token, both told nearly perfectly on both halves.

Source: best AUROC per neuron and concept as in "Finding Neurons in a Haystack" (Gurnee et al.
2023); the intervals are of clustered ROC curves (Obuchowski 1997), documents being the clusters,
with the chosen pairs as given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64
from scipy import sparse, stats

from interp.errors import InterpError
from interp.results import Column
from probes.auroc import auroc, influence
from probes.concepts import Concepts

HIGH = 0.9
_AUROC = "AUROC"

DICTIONARIES = {
    "dictionary": Column("name", "Set of directions."),
    "available": Column("directions", "That vary on the choosing documents."),
    "candidates": Column("directions", "Drawn from them, equally many of each dictionary."),
    "auroc": Column(
        _AUROC, "Mean over directions, on the held-out documents, each for its chosen concept."
    ),
    "auroc_low": Column(_AUROC, "Lower end of its 95% interval over documents."),
    "auroc_high": Column(_AUROC, "Upper end."),
    "auroc_chosen": Column(_AUROC, "The same on the documents that chose: inflated by the choice."),
    "concept_auroc": Column(
        _AUROC, "Mean over concepts, held out, each by its chosen direction of the candidates."
    ),
    "concept_auroc_low": Column(_AUROC, "Lower end of its 95% interval over documents."),
    "concept_auroc_high": Column(_AUROC, "Upper end."),
    "concept_auroc_chosen": Column(
        _AUROC, "The same on the documents that chose: inflated by the choice."
    ),
    "concept_auroc_all": Column(
        _AUROC, "Mean over concepts, held out, each by its chosen direction of all available ones."
    ),
    "concept_auroc_all_low": Column(_AUROC, "Lower end of its 95% interval over documents."),
    "concept_auroc_all_high": Column(_AUROC, "Upper end."),
    "concept_auroc_all_chosen": Column(
        _AUROC, "The same on the documents that chose: inflated by the choice."
    ),
    "monosemantic": Column("directions", f"Of the candidates, with held-out AUROC above {HIGH}."),
    "monosemantic_share": Column("share of directions", "monosemantic / candidates."),
    "multi_concept_share": Column(
        "share of directions",
        f"That tell two concepts without a common token, above {HIGH} on both halves.",
    ),
    "concepts_told": Column(
        "concepts", f"Told above {HIGH}, held out, by their chosen direction of the candidates."
    ),
    "concepts_told_all": Column("concepts", "The same of all available directions."),
    "concepts": Column("concepts", "In the bank."),
    "tokens": Column("tokens", "Included positions of the held-out documents."),
    "documents": Column("documents", "Held out."),
}

DIRECTIONS = {
    "dictionary": DICTIONARIES["dictionary"],
    "direction": Column("index", "Column of the dictionary, counted from 0."),
    "concept": Column("name", "Chosen on the first half of the documents."),
    "sign": Column("1 or -1", "-1: small activations tell the concept."),
    "auroc_chosen": Column(_AUROC, "On the documents that chose."),
    "auroc": Column(_AUROC, "On the held-out documents."),
    "multi_concept": Column(
        "true or false",
        f"Whether it tells two concepts without a common token, above {HIGH} on both halves.",
    ),
}

CONCEPTS = {
    "dictionary": DICTIONARIES["dictionary"],
    "concept": Column("name", "Label of the bank."),
    "kind": Column("name", "Of the label."),
    "positives": Column("tokens", "With the label, in the held-out documents."),
    "direction": Column("index", "Chosen on the first half, of all available ones."),
    "sign": DIRECTIONS["sign"],
    "auroc_chosen": DIRECTIONS["auroc_chosen"],
    "auroc": DIRECTIONS["auroc"],
    "auroc_equal": Column(_AUROC, "Held out, of the direction chosen among the candidates."),
}

MARGINS = {
    "dictionary": DICTIONARIES["dictionary"],
    "against": Column("name", "The dictionary it is compared with."),
    "auroc": Column(_AUROC, "Difference of the mean over directions, held out."),
    "auroc_low": Column(_AUROC, "Lower end of its 95% interval over documents, paired."),
    "auroc_high": Column(_AUROC, "Upper end."),
    "concept_auroc": Column(_AUROC, "Difference of the mean over concepts, held out."),
    "concept_auroc_low": Column(_AUROC, "Lower end of its 95% interval over documents, paired."),
    "concept_auroc_high": Column(_AUROC, "Upper end."),
    "concept_auroc_all": Column(_AUROC, "The same with all available directions."),
    "concept_auroc_all_low": Column(
        _AUROC, "Lower end of its 95% interval over documents, paired."
    ),
    "concept_auroc_all_high": Column(_AUROC, "Upper end."),
}

MEANS = ("auroc", "concept_auroc", "concept_auroc_all")


@dataclass(frozen=True)
class ConceptScores:
    """What `score` found.

    Attributes:
        dictionaries: a row per dictionary (DICTIONARIES).
        directions: a row per candidate direction (DIRECTIONS).
        every: a row per available direction (DIRECTIONS).
        concepts: a row per dictionary and concept (CONCEPTS).
        influences: dictionary -> [document, 3] what each held-out document adds to the error of
            auroc, concept_auroc and concept_auroc_all.
    """

    dictionaries: pd.DataFrame
    directions: pd.DataFrame
    every: pd.DataFrame
    concepts: pd.DataFrame
    influences: dict[str, Float64[np.ndarray, "document 3"]]

    def margins(self, name: str) -> pd.DataFrame:
        """How much better one dictionary is than each other (MARGINS), paired by document.

        Raises:
            InterpError: no dictionary of that name.
        """
        if name not in self.influences:
            raise InterpError(
                f"There is no dictionary {name!r}; there are {', '.join(self.influences)}."
            )
        table = self.dictionaries.set_index("dictionary")
        means = {row: table.loc[row, list(MEANS)] for row in self.influences}
        rows = []
        for other in self.influences:
            if other == name:
                continue
            row: dict[str, Any] = {"dictionary": name, "against": other}
            apart = self.influences[name] - self.influences[other]
            for i, column in enumerate(MEANS):
                difference = float(means[name][column] - means[other][column])
                half = _half_width(apart[:, i])
                row |= {
                    column: difference,
                    f"{column}_low": difference - half,
                    f"{column}_high": difference + half,
                }
            rows.append(row)
        return pd.DataFrame(rows, columns=list(MARGINS))


def score(
    dictionaries: Mapping[str, Any],
    concepts: Concepts,
    *,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> ConceptScores:
    """Score dictionaries on a bank of concepts.

    Args:
        dictionaries: name -> activations [token, direction] at the tokens of `concepts`, a numpy
            array or a scipy sparse one (worth it where most are zero).
        concepts: the bank.
        seed: of the draw of candidates, where dictionaries differ in their number.
        tick: called after each dictionary.

    Raises:
        InterpError: no dictionary, one of another number of tokens, with an activation that is not
            finite, or in which nothing varies.
    """
    first = concepts.first_half
    if not dictionaries:
        raise InterpError("There is no dictionary to score.")
    rows = {
        name: sparse.csr_array(x) if sparse.issparse(x) else x for name, x in dictionaries.items()
    }
    varying = {name: _varying(name, x, first) for name, x in rows.items()}
    n = min(len(kept) for kept in varying.values())
    parts: list[tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, dict[str, Any]]] = []
    influences = {}
    for i, (name, x) in enumerate(rows.items()):
        rng = np.random.default_rng([seed, 12, i])
        available = varying[name]
        drawn = np.sort(rng.choice(len(available), n, replace=False))
        whole = _Scored.of(x[:, available], concepts)
        equal = whole.taken(drawn)
        every = whole.directions(name, available)
        table = every.iloc[drawn]
        by_equal = equal.concepts(name, available[drawn])
        by_concept = whole.concepts(name, available).assign(auroc_equal=by_equal["auroc"])
        parted = (equal.influence(1), equal.influence(0), whole.influence(0))
        influences[name] = np.stack(parted, axis=1)
        row: dict[str, Any] = {"dictionary": name, "available": len(available), "candidates": n}
        for j, (column, part) in enumerate(zip(MEANS, (table, by_equal, by_concept), strict=True)):
            mean, half = float(part["auroc"].to_numpy().mean()), _half_width(influences[name][:, j])
            row |= {
                column: mean,
                f"{column}_low": max(0.0, mean - half),
                f"{column}_high": min(1.0, mean + half),
                f"{column}_chosen": float(part["auroc_chosen"].to_numpy().mean()),
            }
        told = table["auroc"].to_numpy() > HIGH
        row |= {
            "monosemantic": int(told.sum()),
            "monosemantic_share": float(told.mean()),
            "multi_concept_share": float(table["multi_concept"].to_numpy().mean()),
            "concepts_told": int((by_equal["auroc"].to_numpy() > HIGH).sum()),
            "concepts_told_all": int((by_concept["auroc"].to_numpy() > HIGH).sum()),
            "concepts": len(concepts.names),
            "tokens": int((~first).sum()),
            "documents": len(influences[name]),
        }
        parts.append((table, every, by_concept, row))
        tick()
    return ConceptScores(
        dictionaries=pd.DataFrame([row for *_, row in parts], columns=list(DICTIONARIES)),
        directions=pd.concat([table for table, *_ in parts], ignore_index=True),
        every=pd.concat([table for _, table, *_ in parts], ignore_index=True),
        concepts=pd.concat([table for _, _, table, _ in parts], ignore_index=True),
        influences=influences,
    )


def _varying(name: str, activations: Any, first: np.ndarray) -> np.ndarray:
    """Columns that are not constant on the first half."""
    if activations.ndim != 2 or activations.shape[0] != len(first):
        raise InterpError(
            f"The activations of {name} are {activations.shape}; the bank labels {len(first)} "
            "tokens: give [token, direction] at the same tokens."
        )
    values = activations.data if sparse.issparse(activations) else activations
    if not np.isfinite(values).all():
        raise InterpError(f"An activation of {name} is not finite.")
    half = activations[first]
    low, high = half.min(axis=0), half.max(axis=0)
    if sparse.issparse(half):
        low, high = low.toarray(), high.toarray()
    found = np.flatnonzero(np.ravel(high > low))
    if not len(found):
        raise InterpError(f"No direction of {name} varies on the documents that choose concepts.")
    return found


@dataclass(frozen=True)
class _Scored:
    """AUROCs of some directions on both halves, [direction, concept]."""

    held_out: Any  # activations [token, direction] of the second half, by columns if sparse
    bank: Concepts
    chosen: np.ndarray
    held: np.ndarray

    @classmethod
    def of(cls, activations: Any, bank: Concepts) -> _Scored:
        first = bank.first_half
        held_out = activations[~first]
        if sparse.issparse(held_out):
            held_out = sparse.csc_array(held_out)
        return cls(
            held_out,
            bank,
            chosen=auroc(activations[first], bank.labels[first]),
            held=auroc(held_out, bank.labels[~first]),
        )

    def taken(self, rows: np.ndarray) -> _Scored:
        """Some of the directions."""
        return _Scored(self.held_out[:, rows], self.bank, self.chosen[rows], self.held[rows])

    def _pairs(self, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Direction, concept and sign of the best pairs: per direction (axis 1) or concept (0)."""
        best = np.abs(self.chosen - 0.5).argmax(axis)
        along = np.arange(len(best))
        direction, concept = (along, best) if axis == 1 else (best, along)
        return direction, concept, np.where(self.chosen[direction, concept] < 0.5, -1, 1)

    def _areas(self, axis: int) -> dict[str, np.ndarray]:
        direction, concept, sign = self._pairs(axis)
        return {
            "sign": sign,
            "auroc_chosen": _signed(self.chosen[direction, concept], sign),
            "auroc": _signed(self.held[direction, concept], sign),
        }

    def directions(self, name: str, columns: np.ndarray) -> pd.DataFrame:
        _, concept, sign = self._pairs(1)
        told = (_signed(self.chosen, sign[:, None]) > HIGH) & (
            _signed(self.held, sign[:, None]) > HIGH
        )
        together = self.bank.labels.T.astype(np.float32) @ self.bank.labels.astype(np.float32)
        apart = (together == 0).astype(np.float32)
        return pd.DataFrame(
            {
                "dictionary": name,
                "direction": columns,
                "concept": [self.bank.names[i] for i in concept],
                **self._areas(1),
                "multi_concept": ((told.astype(np.float32) @ apart > 0) & told).any(1),
            }
        )

    def concepts(self, name: str, columns: np.ndarray) -> pd.DataFrame:
        direction, _, _ = self._pairs(0)
        return pd.DataFrame(
            {
                "dictionary": name,
                "concept": self.bank.names,
                "kind": self.bank.kinds,
                "positives": self.bank.labels[~self.bank.first_half].sum(0),
                "direction": columns[direction],
                **self._areas(0),
            }
        )

    def influence(self, axis: int) -> np.ndarray:
        """[document] what each adds to the error of the mean over directions (1), concepts (0)."""
        held = ~self.bank.first_half
        labels = self.bank.labels[held]
        _, row = np.unique(self.bank.document[held], return_inverse=True)
        total = np.zeros(len(row))
        pairs = self._pairs(axis)
        for direction, concept, sign in zip(*pairs, strict=True):
            x = self.held_out[:, [direction]]
            x = (x.toarray() if sparse.issparse(x) else x)[:, 0]
            total += sign * influence(x, labels[:, concept])
        return np.bincount(row, total / len(pairs[0]))


def _signed(areas: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return np.where(sign < 0, 1 - areas, areas)


def _half_width(by_document: np.ndarray) -> float:
    """Half of a 95% t interval from what each document adds to the error; nan for one document."""
    n = len(by_document)
    if n < 2:
        return float("nan")
    return float(stats.t.ppf(0.975, n - 1) * np.sqrt(n / (n - 1) * np.square(by_document).sum()))

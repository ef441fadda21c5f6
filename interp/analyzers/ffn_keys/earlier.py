"""The text before a key's triggers: whether it is about the same things.

The mean cosine between the TF-IDF vectors of the text before the triggers of a key. Positions with
the same last token have similar texts before them, and long texts resemble each other more than
short ones, so it stands against other positions with the same token (else one as frequent) after
about as much text.

What the number does not show: that the key reads topics. Other positions of the same token differ
from the triggers in whatever else makes the key fire, of which topic may be a by-product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse

from interp.analyzers.ffn_keys.patterns import Positions

LOCAL = 4
"""Tokens at the end of a prefix that are no earlier text: the trigger and the 3 before it, so that
a fixed phrase does not count as a common topic."""
CONTEXT_DRAWS = 19
"""By chance a key is above all of them once in 20."""
ROUNDS = 4
"""Attempts to match a token, and then as many to match its frequency."""
POOL = 50_000
CHUNK = 4096  # places whose terms are written out at once


@dataclass(frozen=True)
class Earlier:
    """Similarity of the text before a layer's triggers.

    similarity: [key] mean cosine over pairs of triggers; nan with fewer than two that have any.
    null: [key] the same of matched positions, mean over draws.
    beyond: [key] above every draw's similarity (by chance about 1 in draws + 1).
    same_token: share of matched positions with the trigger's own token.
    """

    similarity: np.ndarray
    null: np.ndarray
    beyond: np.ndarray
    same_token: float


class EarlierText:
    """TF-IDF vectors of what stands before a position, and positions that match a trigger.

    Terms are the tokens' texts, lower case, without the space before them; those without a letter
    or digit, and special tokens, are none. The vector of a place is made of all of its window up to
    `LOCAL` tokens before its end, without the place's own term (1 + log tf, times idf over the
    text's documents, l2 norm).
    """

    def __init__(self, at: Positions, names: dict[int, str], seed: int) -> None:
        from sklearn.feature_extraction.text import TfidfTransformer

        self.at = at
        unique, inverse = np.unique(at.ids, return_inverse=True)
        words = [names[int(token)].strip().lower() for token in unique]
        real = [any(c.isalnum() for c in word) for word in words]
        numbers = {
            w: i for i, w in enumerate(sorted({w for w, r in zip(words, real, strict=True) if r}))
        }
        by_id = np.array([numbers.get(word, -1) for word in words])
        self.term = by_id[inverse]
        special = ~at.included
        special[at.windows] &= at.bos  # without BOS the first token is no position, but a word
        self.term[special] = -1
        self.n_terms = max(1, len(numbers))
        used = self.term >= 0
        size = (int(at.document.max()) + 1, self.n_terms)
        counts = _count(at.document[used], self.term[used], size)
        self.tfidf: Any = TfidfTransformer(sublinear_tf=True).fit(counts)
        rng = np.random.default_rng([seed, 1])
        pool = at.candidates
        if len(pool) > POOL:
            pool = np.sort(rng.choice(pool, POOL, replace=False))
        self.pool = pool
        _, first, count = np.unique(at.ids, return_inverse=True, return_counts=True)
        length = np.log2(np.arange(len(at.ids)) - at.start + 1).astype(np.int64)
        # Two ways to match, the better one first: how much text, and the token or how common it is.
        self.groups = [
            _Groups(pool, at.ids * 64 + length),
            _Groups(pool, np.log2(count[first]).astype(np.int64) * 64 + length),
        ]
        self.seed = seed

    def vectors(self, places: np.ndarray) -> sparse.csr_matrix:
        """[place, term] TF-IDF of the text before each place."""
        parts = [
            self._vectors(places[start : start + CHUNK])
            for start in range(0, max(1, len(places)), CHUNK)
        ]
        return sparse.csr_matrix(sparse.vstack(parts)) if len(parts) > 1 else parts[0]

    def _vectors(self, places: np.ndarray) -> sparse.csr_matrix:
        first, last = self.at.start[places], np.maximum(places - LOCAL + 1, self.at.start[places])
        lengths = last - first
        row = np.repeat(np.arange(len(places)), lengths)
        ahead = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        term = self.term[np.repeat(first, lengths) + ahead]
        use = (term >= 0) & (term != np.repeat(self.term[places], lengths))
        counts = _count(row[use], term[use], (len(places), self.n_terms))
        return self.tfidf.transform(counts) if counts.nnz else counts

    def measure(self, places: np.ndarray, draws: int = CONTEXT_DRAWS) -> Earlier:
        """Compare a layer's triggers `places` [key, rank] (-1: none) with matched positions."""
        rng = np.random.default_rng([self.seed, 2])
        own = _similarity(places, *self._rows(places))
        null, above, same, total = [], np.ones(len(places), dtype=bool), 0, 0
        pool = self._pool_rows
        for _ in range(draws):
            match = self.matched(places, rng)
            null.append(_similarity(match, *pool))
            above &= ~(own <= null[-1])
            same += int(((match >= 0) & (self.at.ids[match] == self.at.ids[places])).sum())
            total += int((match >= 0).sum())
        with np.errstate(invalid="ignore"):
            seen = np.isfinite(null)
            mean = np.where(seen, null, 0).sum(0) / np.where(seen.any(0), seen.sum(0), np.nan)
        known = np.isfinite(own) & np.isfinite(mean)
        return Earlier(own, mean, above & known, same / total if total else float("nan"))

    def matched(self, places: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """[key, rank] for each trigger another place of the same token after as much text.

        Where a token has no other such place: one of a token as frequent. No place is a trigger of
        the same key, and those of one key lie in different documents, as its triggers do (two
        places of one document have the same text before them); -1 where none was found.
        """
        match = np.full_like(places, -1)
        for turn in range(2 * ROUNDS):
            rows = np.flatnonzero(((places >= 0) & (match < 0)).any(1))
            if not len(rows):
                break
            own, found = places[rows], match[rows]
            free = (own >= 0) & (found < 0)
            found[free] = self.groups[turn // ROUNDS].draw(own[free], rng)
            taken = (found[:, :, None] == own[:, None, :]).any(2)
            found[taken] = -1
            found[_repeats(np.where(found >= 0, self.at.document[found], -1))] = -1
            match[rows] = found
        return match

    @cached_property
    def _pool_rows(self) -> tuple[np.ndarray, sparse.csr_matrix]:
        return self._rows(self.pool[None])

    def _rows(self, places: np.ndarray) -> tuple[np.ndarray, sparse.csr_matrix]:
        """[token] the row of each place (0 for others), and the rows."""
        unique = np.unique(places[places >= 0])
        row = np.zeros(len(self.at.ids), dtype=np.int64)
        row[unique] = np.arange(len(unique))
        return row, self.vectors(unique)


class _Groups:
    """Places of a pool by a label, to draw from."""

    def __init__(self, pool: np.ndarray, label: np.ndarray) -> None:
        order = np.argsort(label[pool], kind="stable")
        self.places, self.label = pool[order], label
        self.values, self.first, self.count = np.unique(
            label[self.places], return_index=True, return_counts=True
        )

    def draw(self, places: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """For each place one of the pool with its label; -1 where there is none."""
        at = np.minimum(np.searchsorted(self.values, self.label[places]), len(self.values) - 1)
        chosen = self.first[at] + (rng.random(len(places)) * self.count[at]).astype(np.int64)
        return np.where(self.values[at] == self.label[places], self.places[chosen], -1)


def _count(row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> sparse.csr_matrix:
    """How often each (row, column) occurs."""
    return sparse.csr_matrix((np.ones(len(row)), (row, column)), shape=shape)


def _repeats(values: np.ndarray) -> np.ndarray:
    """[key, rank] whether an entry of at least 0 occurs earlier in its row."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    again = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(
        again, order[:, 1:], (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0), axis=1
    )
    return again


def _similarity(places: np.ndarray, row: np.ndarray, vectors: sparse.csr_matrix) -> np.ndarray:
    """[key] mean cosine over the pairs of places that have any text before them; nan without."""
    some = np.diff(vectors.indptr) > 0  # a vector of no term has no direction
    use = (places >= 0) & some[row[places]] if len(some) else np.zeros(places.shape, dtype=bool)
    key = np.nonzero(use)[0]
    sums: Any = _count(key, row[places[use]], (len(places), len(some))) @ vectors
    n = use.sum(1)
    square = np.asarray(sums.multiply(sums).sum(1)).ravel()
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(n > 1, (square - n) / (n * (n - 1)), np.nan)

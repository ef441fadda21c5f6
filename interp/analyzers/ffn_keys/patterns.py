"""What the triggers of a key have in common in their last tokens.

The share of a key's triggers that agree in their token, in its bigram or in its shape. The most
common label of random positions has a share above 0 too ("the" is everywhere), so each share
stands against the same share among as many random included positions of other documents; one such
draw says little, so the null is a distribution.

What the numbers do not show: that the key *detects* its token. Any direction that carries the
token's identity, as the stream does in early layers, has triggers that share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from interp.analyzers.ffn_keys.triggers import Top
from interp.text import Text

KINDS = ("token", "bigram", "shape")
DRAWS = 2000


@dataclass(frozen=True)
class Positions:
    """Every token of a text in one row, numbered from 0; a place is such a number, -1 none.

    ids: [token] its id.
    document: [token] its document's place in the Text.
    start: [token] the place of its window's first token.
    included: [token] whether it is an included position.
    bos: whether each window's first token is a BOS.
    """

    ids: np.ndarray
    document: np.ndarray
    start: np.ndarray
    included: np.ndarray
    bos: bool

    @cached_property
    def windows(self) -> np.ndarray:
        """[window] places of the first tokens, in the order of the text."""
        return np.flatnonzero(self.start == np.arange(len(self.start)))

    @cached_property
    def candidates(self) -> np.ndarray:
        """Places of the included positions."""
        return np.flatnonzero(self.included)

    def sample_documents(self, n: int, seed: int) -> np.ndarray:
        """Up to n documents with an included position, ascending; a seeded sample."""
        some = np.unique(self.document[self.candidates])
        rng = np.random.default_rng([seed, 6])
        return np.sort(rng.choice(some, min(n, len(some)), replace=False))

    def triggers(self, text: Text, top: Top) -> np.ndarray:
        """[key, rank] the places of triggers; -1 where there is none, or its coefficient is 0.

        `top` is of either sign, its values of that sign's size: a document in which a key never
        has the sign holds no trigger of it.
        """
        index = np.array([d.index for d in text.documents])
        order = np.argsort(index)
        row = order[np.searchsorted(index[order], top.documents.numpy()).clip(max=len(index) - 1)]
        first = np.searchsorted(self.document, np.arange(len(index)))  # windows are full but last
        real = (top.documents.numpy() >= 0) & (top.values.numpy() > 0)
        return np.where(real, first[row] + top.places.numpy(), -1)

    @classmethod
    def of(cls, text: Text) -> Positions:
        """The positions of a text, as `Text.batches` numbers and includes them."""
        windows = [(i, w) for i, d in enumerate(text.documents) for w in d.windows]
        lengths = np.array([len(w) for _, w in windows])
        starts = np.concatenate([[0], lengths.cumsum()[:-1]])
        ids = np.concatenate([np.asarray(w, dtype=np.int64) for _, w in windows])
        included = ~np.isin(ids, sorted(text.special_ids))
        included[starts] = False
        document = np.repeat([i for i, _ in windows], lengths)
        return cls(ids, document, np.repeat(starts, lengths), included, text.bos)


# Surface ------------------------------------------------------------------------------------------


def word_shape(token: str) -> str:
    """A token's shape: case and digits, runs collapsed: " Paris" is "_Xx", "1998" is "d".

    A leading space is "_", caseless letters are "c", a piece of a character is "?", anything else
    stands for itself.
    """
    out: list[str] = []
    for i, c in enumerate(token):
        if c.isspace():
            kind = "_" if i == 0 and c == " " else " " if c == " " else "n"
        elif c.isdigit():
            kind = "d"
        elif c.isalpha():
            kind = "X" if c.isupper() else "x" if c.islower() else "c"
        else:
            kind = "?" if c == "\ufffd" else c
        if not out or out[-1] != kind:
            out.append(kind)
    return "".join(out)


def labels(at: Positions, names: dict[int, str]) -> dict[str, np.ndarray]:
    """kind (KINDS) -> [token] an integer that is the same for the same token, bigram or shape.

    Args:
        at: the text's positions.
        names: id -> its text, for every id of the text.
    """
    before = np.concatenate([[0], at.ids[:-1]])  # of a window's first token: never included
    shapes = {token: word_shape(name) for token, name in names.items()}
    numbers = {shape: i for i, shape in enumerate(sorted(set(shapes.values())))}
    unique, inverse = np.unique(at.ids, return_inverse=True)
    by_id = np.array([numbers[shapes[int(token)]] for token in unique])
    width = int(at.ids.max()) + 1
    return {"token": at.ids, "bigram": before * width + at.ids, "shape": by_id[inverse]}


def modal_share(label: np.ndarray, places: np.ndarray) -> np.ndarray:
    """[key] share of the most common label among each key's places.

    Args:
        label: [token] integers of at least 0.
        places: [key, rank], -1 where there is none.

    Returns:
        Shares in (0, 1]; nan for a key with fewer than two places: one agrees with itself.
    """
    found = np.where(places >= 0, label[places], -1 - np.arange(places.shape[1]))
    found.sort(axis=1)
    run = np.ones(found.shape, dtype=np.int64)
    for i in range(1, found.shape[1]):
        run[:, i] += np.where(found[:, i] == found[:, i - 1], run[:, i - 1], 0)
    n = (places >= 0).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(n > 1, run.max(1, initial=0) / n, np.nan)


@dataclass(frozen=True)
class Null:
    """Modal shares of sets of random positions: mean, percentiles, and how often it beats them."""

    mean: float
    q95: float
    q99: float
    beyond95: float
    beyond99: float

    @classmethod
    def of(cls, shares: np.ndarray) -> Null:
        """From the shares of many random sets."""
        # The next value above, where the percentile falls between two: shares come in steps of 1/n.
        q95, q99 = (float(np.quantile(shares, q, method="higher")) for q in (0.95, 0.99))
        beyond = [float((shares > q).mean()) for q in (q95, q99)]
        return cls(float(shares.mean()), q95, q99, *beyond)


def random_sets(at: Positions, n: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """[draws, n] places: n documents drawn without replacement, an included position of each."""
    places = at.candidates
    documents, first, count = np.unique(at.document[places], return_index=True, return_counts=True)
    n = min(n, len(documents))
    chosen = np.stack([rng.choice(len(documents), n, replace=False) for _ in range(draws)])
    within = (rng.random(chosen.shape) * count[chosen]).astype(np.int64)
    return places[first[chosen] + within]


@dataclass(frozen=True)
class Surface:
    """One kind of agreement in one layer.

    share: [key], nan where a key has fewer than two triggers.
    null: [key] mean share of as many random positions.
    beyond95, beyond99: [key] whether the share is above that percentile of theirs.
    by_chance: how often random sets are above the 95th and 99th (not 5% and 1%: shares have steps).
    """

    share: np.ndarray
    null: np.ndarray
    beyond95: np.ndarray
    beyond99: np.ndarray
    by_chance: tuple[float, float]


class Surfaces:
    """Shares of a text's triggers; its nulls are drawn once for every number of triggers."""

    def __init__(self, at: Positions, names: dict[int, str], seed: int, draws: int = DRAWS) -> None:
        self.at, self.seed, self.draws = at, seed, draws
        self.labels = labels(at, names)
        self._nulls: dict[int, dict[str, Null]] = {}

    def null(self, n: int) -> dict[str, Null]:
        """kind -> null of n positions."""
        if n not in self._nulls:
            rng = np.random.default_rng([self.seed, n])
            sets = random_sets(self.at, n, self.draws, rng)
            shares = {kind: modal_share(self.labels[kind], sets) for kind in KINDS}
            self._nulls[n] = {kind: Null.of(share) for kind, share in shares.items()}
        return self._nulls[n]

    def measure(self, places: np.ndarray) -> dict[str, Surface]:
        """kind -> what one layer's triggers `places` [key, rank] (-1: none) have in common."""
        counts = (places >= 0).sum(1)
        out: dict[str, Surface] = {}
        for kind in KINDS:
            share = modal_share(self.labels[kind], places)
            of_key = np.full((5, len(places)), np.nan)
            for n in np.unique(counts[counts > 1]):
                null = self.null(int(n))[kind]
                found = (null.mean, null.q95, null.q99, null.beyond95, null.beyond99)
                of_key[:, counts == n] = np.array(found)[:, None]
            some = counts > 1
            chance = of_key[3:, some].mean(1) if some.any() else np.full(2, np.nan)
            beyond = (share > of_key[1], share > of_key[2])
            out[kind] = Surface(share, of_key[0], *beyond, (float(chance[0]), float(chance[1])))
        return out

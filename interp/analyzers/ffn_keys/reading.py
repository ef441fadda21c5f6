"""Triggers as text: the token, the prefix that ends with it, the next token, and what follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interp import pieces
from interp.analyzers.ffn_keys.triggers import NONE, Top
from interp.text import Text

AFTER = 12
"""Tokens shown after a trigger."""
CHUNK = 64


@dataclass(frozen=True)
class Read:
    """What is read at some places, each array in their order.

    token, following_token: ids; the latter -1 at the end of a document.
    prefix: the document's text from the window's start up to and with the token.
    following: the text of up to AFTER tokens after it.
    """

    token: np.ndarray
    following_token: np.ndarray
    prefix: np.ndarray
    following: np.ndarray


class Reader:
    """Reads triggers off the documents that they are in; each document is cut once.

    Args:
        text: where the triggers were found.
        tops: all triggers that will be read.
    """

    def __init__(self, text: Text, tops: Iterable[Top]) -> None:
        self.text, self.encoder = text, text.pool.encoder
        self.body = self.encoder.context - text.bos  # tokens of a window that are text
        wanted: set[int] = set()
        for top in tops:
            wanted |= set(top.documents.unique().tolist())
        documents = [d for d in text.documents if d.index in wanted]
        self.pieces: dict[int, pieces.Pieces] = {}
        for start in range(0, len(documents), CHUNK):
            some = documents[start : start + CHUNK]
            most = max(sum(len(w) for w in d.windows) for d in some) + AFTER
            cut = pieces.cut(self.encoder, some, most)
            self.pieces |= {d.index: p.packed() for d, p in zip(some, cut, strict=True)}
        self._labels: dict[int, str] = {}

    def index(self, places: np.ndarray) -> np.ndarray:
        """Which of its document's tokens (BOS not counted) a trigger at a place is."""
        window, position = np.divmod(places, self.encoder.context)
        return window * self.body + position - self.text.bos

    def next_of_first(self, top: Top) -> np.ndarray:
        """[key] id of the token after each key's first trigger; -1 where there is none."""
        at = self.index(top.places[:, 0].numpy())
        return np.array(
            [
                self._next(self.pieces[d].ids, i) if d != NONE else NONE
                for d, i in zip(top.documents[:, 0].tolist(), at.tolist(), strict=True)
            ]
        )

    @staticmethod
    def _next(ids: Sequence[int], i: int) -> int:
        return ids[i + 1] if i + 1 < len(ids) else NONE

    def read(self, documents: np.ndarray, places: np.ndarray) -> Read:
        """Everything at [place]; a place that comes often is read once, its strings shared."""
        both = np.stack([documents, places], 1)
        unique, back = np.unique(both, axis=0, return_inverse=True)
        token, following_token = (np.empty(len(unique), dtype=np.int64) for _ in range(2))
        prefix, following = (np.empty(len(unique), dtype=object) for _ in range(2))
        at = self.index(unique[:, 1])
        for n, (document, i) in enumerate(zip(unique[:, 0].tolist(), at.tolist(), strict=True)):
            cut = self.pieces[document]
            token[n], following_token[n] = cut.ids[i], self._next(cut.ids, i)
            prefix[n] = cut.upto(i // self.body * self.body, i)
            following[n] = cut.after(i, AFTER)
        back = back.ravel()
        return Read(token[back], following_token[back], prefix[back], following[back])

    def labels(self, ids: np.ndarray) -> np.ndarray:
        """Each id's label; None for -1."""
        unique, back = np.unique(ids, return_inverse=True)
        for token_id in unique.tolist():
            if token_id >= 0 and token_id not in self._labels:
                self._labels[token_id] = pieces.label(self.encoder.tokenizer, token_id)
        named = np.array([self._labels.get(i) for i in unique.tolist()], dtype=object)
        return named[back].reshape(ids.shape)


def next_frequency(text: Text, size: int) -> np.ndarray:
    """[vocab] how often each token follows an included position in a window, summing to 1."""
    special = np.array(sorted(text.special_ids))
    counts = np.zeros(size)
    for document in text.documents:
        for window in document.windows:
            ids = np.asarray(window)
            included = ~np.isin(ids[1:-1], special)
            counts += np.bincount(ids[2:][included], minlength=size)
    return counts / max(counts.sum(), 1)


def flat(tops: Mapping[tuple[int, int], Top], keys: list[int]) -> dict[str, Any]:
    """Triggers of all layers and signs in one row each: layer, sign, key, rank, coefficient, ..."""
    parts: dict[str, list[np.ndarray]] = {}
    for (layer, sign), top in tops.items():
        real = top.documents.numpy() != NONE
        key, rank = np.nonzero(real)
        columns = {
            "layer": np.full(len(key), layer),
            "key": np.asarray(keys)[key],
            "sign": np.full(len(key), sign),
            "rank": rank + 1,
            "coefficient": sign * top.values.numpy()[real].astype(np.float64) + 0.0,
            "document": top.documents.numpy()[real],
            "place": top.places.numpy()[real],
        }
        for name, values in columns.items():
            parts.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in parts.items()}

"""Which documents are drawn: a seeded order over the distinct, non-blank rows of a source.

The order is walked until enough usable documents are found, so the sample is a uniform one, without
replacement, of the usable documents, and only what is walked over is tokenised. Torch-free.
"""

import functools
import random
import re
from dataclasses import dataclass

from interp.encoding import Document, Encoder
from interp.sources import Source

CHUNK = 64
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Pool:
    """A source's distinct, non-blank documents in one seeded random order."""

    source: str
    column: str | None
    candidates: list[tuple[int, str]]
    seed: int
    blank: int
    duplicates: int
    notices: list[str]
    encoder: Encoder

    @functools.cached_property
    def order(self) -> list[int]:
        """A permutation of the candidates, the same on every machine.

        Sorted by draws of `Random.random`, the one method whose sequence Python promises to keep.
        """
        draw = random.Random(self.seed).random
        keys = [draw() for _ in self.candidates]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def take(self, start: int, wanted: int) -> tuple[list[Document], int, int]:
        """Walk the permutation from `start` until `wanted` usable documents are found.

        Returns:
            The documents in source order, where to walk on, and how many proved unusable.
        """
        found: list[Document] = []
        place, unusable = start, 0
        while len(found) < wanted and place < len(self.order):
            # Never more at once than are still wanted, so that `place` stops right behind the last.
            upto = min(place + min(wanted - len(found), CHUNK), len(self.order))
            chunk = [self.candidates[i] for i in self.order[place:upto]]
            rows = self.encoder.encode([text for _, text in chunk])
            cut = [self.encoder.document(*c, ids) for c, ids in zip(chunk, rows, strict=True)]
            usable = [document for document in cut if document is not None]
            unusable += len(cut) - len(usable)
            found += usable
            place = upto
        return sorted(found, key=lambda document: document.index), place, unusable


def make_pool(source: Source, encoder: Encoder, seed: int) -> Pool:
    """Drop what is blank and what repeats an earlier row exactly, and count both."""
    notices = list(source.notices)
    seen: set[str] = set()
    candidates: list[tuple[int, str]] = []
    blank = repaired = 0
    for index, row in enumerate(source.rows):
        if row is None or not row.strip():
            blank += 1
            continue
        # JSON can write half a pair, which is no character: no tokenizer takes it.
        text = SURROGATE.sub("\ufffd", row)
        repaired += text != row
        if text not in seen:
            seen.add(text)
            candidates.append((index, text))
    if repaired:
        notices.append(
            f"{source.name}: half surrogate pairs in {repaired} document(s) became U+FFFD"
        )
    duplicates = len(source.rows) - blank - len(candidates)
    return Pool(source.name, source.column, candidates, seed, blank, duplicates, notices, encoder)

"""Loss changes by class of the token that is predicted: what an average over all tokens hides.

A head that only predicts repetitions, say, may matter much where something repeats and nowhere
else. Classes are told from the window alone: whether the predicted token, and its pair with the
token before, have occurred in it before, and at which position it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from interp import stats
from interp.interventions import Head
from interp.results import Column
from interp.splice import Scores
from interp.text import TokenBatch

NATS = "nats per token"
FEWEST = 2
"""Documents with a class, below which nothing is told of it."""
CLASSES = {
    "first seen": "the predicted token is in the window for the first time",
    "repeated": "it was there before, but never after the same token",
    "repeated bigram": "it was there before, after the same token",
    "position 1-15": "it stands at position 1 to 15, BOS counted",
    "position 16-63": "at position 16 to 63",
    "position 64 on": "at position 64 or later",
}
COLUMNS = {
    "layer": Column("index", "Layer, counted from 0."),
    "head": Column("index", "Query head within the layer, counted from 0."),
    "token_class": Column(
        "word", "; ".join(f"{name}: {words}" for name, words in CLASSES.items()) + "."
    ),
    "documents": Column("documents", "Documents with such a token."),
    "loss_delta": Column(
        NATS,
        "Mean over those documents of the loss on their tokens of this class with the head "
        "ablated (--ablation), minus the same without.",
    ),
    "ci_low": Column(NATS, "Lower end of loss_delta's 95% paired t interval over documents."),
    "ci_high": Column(NATS, "Upper end of loss_delta's 95% paired t interval over documents."),
    "q_value": Column(
        "probability", "Paired t test, after Benjamini-Hochberg over the heads of the class."
    ),
    "verdict": Column(
        "word",
        "material: interval wholly beyond 0.01 nats; negligible: wholly within; else undecided.",
    ),
}


def masks(batch: TokenBatch) -> Bool[Tensor, "class batch pos"]:
    """Which positions predict a token of each class, in the order of CLASSES."""
    tokens, targets, predicted = batch.tokens, batch.targets, batch.predicted
    length = tokens.shape[1]
    # [query, earlier]: the token at `earlier` is before or at the query, so before the target.
    past = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    seen = ((tokens[:, None, :] == targets[:, :, None]) & past).any(-1)
    pair = (tokens[:, None, :] == tokens[:, :, None]) & past.tril(-1)
    bigram = (pair & (targets[:, None, :] == targets[:, :, None])).any(-1)
    at = (torch.arange(length, device=tokens.device) + 1)[None].expand_as(tokens)
    found = [
        ~seen,
        seen & ~bigram,
        bigram,
        at < 16,
        (at >= 16) & (at < 64),
        at >= 64,
    ]
    return torch.stack(found) & predicted


class ByClass:
    """Losses of a sweep by class of token.

    counts: [class, document] predicted tokens.
    clean: [class, document], sums: [class, document, removal] cross-entropy, in nats.
    """

    def __init__(self, documents: int, removals: int) -> None:
        self.counts = np.zeros((len(CLASSES), documents))
        self.clean = np.zeros((len(CLASSES), documents))
        self.sums = np.zeros((len(CLASSES), documents, removals))
        # Of the batch at work: each row's document, each predicted token's row and classes.
        self._rows: np.ndarray = np.empty(0, dtype=int)
        self._row = self._member = torch.empty(0)

    def start(self, batch: TokenBatch, clean: Scores) -> None:
        """A new batch, and its losses with nothing removed."""
        index = batch.predicted.flatten().nonzero()[:, 0]
        self._row = index // batch.tokens.shape[1]
        self._member = masks(batch).flatten(1)[:, index]
        self._rows = batch.rows.cpu().numpy()
        np.add.at(self.counts.T, self._rows, self._summed(torch.ones(len(index))).T)
        np.add.at(self.clean.T, self._rows, self.of(clean).T)

    def add(self, removal: int, sums: np.ndarray) -> None:
        """The same batch's losses with a removal: what `of` gives."""
        np.add.at(self.sums[:, :, removal].T, self._rows, sums.T)

    def of(self, scores: Scores) -> np.ndarray:
        """[class, row] sums of the batch's losses, in nats."""
        assert scores.nll is not None
        return self._summed(scores.nll)

    def _summed(self, values: Tensor) -> np.ndarray:
        """[class, row] sums of a value per predicted token."""
        each = values.cpu().double() * self._member.cpu()
        sums = torch.zeros(len(CLASSES), len(self._rows), dtype=torch.float64)
        return sums.index_add(1, self._row.cpu(), each).numpy()

    def documents(self, i: int) -> np.ndarray:
        """[document] bool: those with a token of class i."""
        return self.counts[i] > 0

    def delta(self, i: int) -> np.ndarray:
        """[document with such a token, removal] loss change in nats per token of class i."""
        has = self.documents(i)
        return (self.sums[i][has] - self.clean[i][has, None]) / self.counts[i][has, None]


def table(made: ByClass, heads: Sequence[Head]) -> pd.DataFrame:
    """One row per class and head; classes that fewer than FEWEST documents have are left out."""
    parts = []
    for i, name in enumerate(CLASSES):
        delta = made.delta(i)
        if len(delta) < FEWEST:
            continue
        test = stats.paired_t(delta)
        parts.append(
            pd.DataFrame(
                {
                    "layer": [layer for layer, _ in heads],
                    "head": [head for _, head in heads],
                    "token_class": name,
                    "documents": len(delta),
                    "loss_delta": test.mean,
                    "ci_low": test.low,
                    "ci_high": test.high,
                    "q_value": stats.benjamini_hochberg(test.p),
                    "verdict": stats.verdict(test.low, test.high),
                }
            )
        )
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(COLUMNS))


def summary(rows: pd.DataFrame, heads: pd.DataFrame, made: ByClass) -> dict[str, Any]:
    """Per class: tokens, documents, mean loss, material heads, and those that an average hides."""
    average = {
        (layer, head): verdict
        for layer, head, verdict in zip(
            *(heads[c] for c in ("layer", "head", "verdict")), strict=True
        )
    }
    out = {}
    for i, name in enumerate(CLASSES):
        has, mine = made.documents(i), rows[rows["token_class"] == name]
        if not len(mine):
            continue
        material = mine[mine["verdict"] == "material"]
        hidden = [
            [int(layer), int(head)]
            for layer, head in zip(material["layer"], material["head"], strict=True)
            if average[layer, head] == "negligible"
        ]
        out[name] = {
            "tokens": int(made.counts[i].sum()),
            "documents": int(has.sum()),
            "loss": float((made.clean[i][has] / made.counts[i][has]).mean()),
            "material": len(material),
            "hidden": hidden,
        }
    return out

"""Batches of any rows of tokens: mutated prefixes, documents cut short, copies of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from interp.journal import Stage
from interp.model import Model
from interp.progress import BATCH_TOKENS
from interp.text import PAD, TokenBatch


def rows_of(runs: Sequence[np.ndarray]) -> TokenBatch:
    """A batch of these token ids, one row each, padded on the right; no position is special."""
    lengths = torch.tensor([len(r) for r in runs])
    tokens = torch.full((len(runs), int(lengths.max())), PAD, dtype=torch.long)
    for row, run in zip(tokens, runs, strict=True):
        row[: len(run)] = torch.from_numpy(np.asarray(run, dtype=np.int64))
    mask = torch.arange(tokens.shape[1])[None, :] < lengths[:, None]
    number = torch.arange(len(runs))
    return TokenBatch(tokens, mask, mask, number, torch.zeros_like(number))


def batches_of(
    stage: Stage, lengths: Sequence[int], model: Model, tokens: int | None = None
) -> list[np.ndarray]:
    """As `by_length`, with batches of the stage's size."""
    longest = max(lengths, default=1)
    wanted = tokens or BATCH_TOKENS.get(model.device.type, 2048)
    size = stage.size(max(wanted, longest), longest * len(lengths), longest, "tokens")
    return by_length(lengths, model, size)


def by_length(lengths: Sequence[int], model: Model, tokens: int | None = None) -> list[np.ndarray]:
    """Indices of rows of similar length together, longest first.

    Args:
        lengths: of the rows.
        model: whose device says how many tokens make a batch.
        tokens: that number, padding included, where it is to be another.
    """
    size = tokens or BATCH_TOKENS.get(model.device.type, 2048)
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    out: list[np.ndarray] = []
    i = 0
    while i < len(order):
        rows = max(1, size // lengths[order[i]])
        out.append(order[i : i + rows])
        i += rows
    return out

"""What stands in for a head that is taken out: nothing, a constant, another document's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from interp import hooks, interventions, splice
from interp.analyzers.heads.importance import Gradients, included_sums
from interp.errors import InterpError
from interp.interventions import Head
from interp.model import Model
from interp.text import Text, TokenBatch

Mode = Literal["zero", "bias", "mean", "resample"]


@dataclass(frozen=True)
class Removal:
    """Heads taken out together, and what stands in for them.

    zero: nothing, at every position (as deleting their rows of W_O).
    bias: their mean output, at every position (as deleting them and adding a bias).
    mean: their mean over the included positions of other documents, at included positions.
    resample: their output on another document, at included positions.
    """

    heads: tuple[Head, ...]
    mode: Mode = "zero"


class StandIns:
    """Turns a removal into edits for one batch."""

    def __init__(
        self,
        model: Model,
        clean: splice.Clean,
        means: Gradients | None,
        donors: Donors | None,
    ) -> None:
        self.model, self.clean, self.means, self.donors = model, clean, means, donors
        self._others: torch.Tensor | None = None
        self._resampled: list[torch.Tensor] | None = None
        self._bias: torch.Tensor | None = None

    def edits(self, removal: Removal) -> dict[int, splice.Edit]:
        """Layer -> edit of z that makes the removal on this batch."""
        if removal.mode == "zero":
            return interventions.removals(removal.heads)
        included = self.clean.batch.included
        if removal.mode == "bias":
            assert self.means is not None
            if self._bias is None:
                self._bias = self.means.z_mean.float().to(self.model.device)
            return interventions.removals(removal.heads, self._bias)
        values = self._mean_of_others() if removal.mode == "mean" else self._from_donors()
        return {
            layer: interventions.replaced(heads, values[layer][:, :, heads], included)
            for layer, heads in interventions.by_layer(removal.heads).items()
        }

    def _mean_of_others(self) -> torch.Tensor:
        """[layer, batch, 1, head, d_head]: each row's mean leaves its own document out."""
        if self._others is None:
            assert self.means is not None
            rows = self.clean.batch.rows.tolist()
            own = torch.stack(
                [included_sums(z, self.clean.batch.included) for z in self.clean.z], 1
            )
            for i, row in enumerate(rows):
                own[i] = self.means.z_own.get(row, own[i])
            left = self.means.included.sum() - self.means.included[rows]
            count = torch.as_tensor(np.maximum(left, 1))[:, None, None, None]
            mean = (self.means.z_sum - own) / count
            self._others = mean.float().to(self.model.device).transpose(0, 1)[:, :, None]
        return self._others

    def _from_donors(self) -> list[torch.Tensor]:
        """Per layer [batch, pos, head, d_head]: z of each row's donor, position by position."""
        if self._resampled is None:
            assert self.donors is not None
            self._resampled = self.donors.z(self.clean.batch)
        return self._resampled


class Donors:
    """For each document another one whose head outputs stand in, by document and seed alone.

    The donor is the first one of a seeded order, drawn for the document, that is at least as long
    (the longest one where none is). The t-th included position takes the donor's t-th, counted
    round where the donor is shorter.
    """

    def __init__(self, model: Model, text: Text, seed: int) -> None:
        self.model, self.text = model, text
        lengths = np.array([sum(map(len, d.windows)) for d in text.documents])
        self.of: list[int] = []
        for i, document in enumerate(text.documents):
            others = [j for j, d in enumerate(text.documents) if d.index != document.index]
            if not others:
                raise InterpError("Resampling needs a second document to take outputs from.")
            rng = np.random.default_rng([seed, document.index])
            order = sorted(others, key=lambda j: text.documents[j].index)
            order = [order[k] for k in rng.permutation(len(order))]
            longer = [j for j in order if lengths[j] >= lengths[i]]
            self.of.append(longer[0] if longer else max(order, key=lambda j: lengths[j]))

    def z(self, batch: TokenBatch) -> list[torch.Tensor]:
        """Donor z for every row of a batch, per layer [batch, pos, head, d_head]."""
        rows = batch.rows.tolist()
        places = []  # a document's n-th window takes its donor's n-th, counted round
        for row, nth in zip(rows, batch.window.tolist(), strict=True):
            donor = self.of[row]
            places.append((donor, nth % len(self.text.documents[donor].windows)))
        donors = self.text.batch_of(places, self.model.device)
        kept: list[Any] = [None] * self.model.cfg.n_layers

        def keep(layer: int) -> hooks.Hook:
            def hook(z: torch.Tensor) -> None:
                kept[layer] = z

            return hook

        with hooks.attached(self.model, [("z", i, keep(i)) for i in range(len(kept))]):
            splice.forward_scores(self.model, donors)
        source = self._positions(batch, donors)
        row = torch.arange(len(rows), device=source.device)[:, None]
        return [z[row, source] for z in kept]

    @staticmethod
    def _positions(batch: TokenBatch, donors: TokenBatch) -> torch.Tensor:
        """[batch, pos]: the donor position that each included position takes its z from."""
        length = batch.tokens.shape[1]
        source = torch.zeros(len(batch.rows), length, dtype=torch.long)
        for i in range(len(batch.rows)):
            to = batch.included[i].nonzero()[:, 0].cpu()
            at = donors.included[i].nonzero()[:, 0].cpu()
            if len(to) and len(at):
                source[i, to] = at[torch.arange(len(to)) % len(at)]
        return source.to(batch.tokens.device)

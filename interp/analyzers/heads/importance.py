"""Importance of every head from one forward and one backward pass per batch, per document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from interp import hooks, interventions, journal, splice
from interp.interventions import Head
from interp.model import Model
from interp.progress import track
from interp.scores import wide
from interp.text import Text, TokenBatch

BatchSize = int | Literal["auto"]


@dataclass
class Gradients:
    """One forward and one backward pass per batch.

    loss: [document] mean cross-entropy in nats per predicted token.
    xi: [document, layer, head] dL/dxi at xi = 1, xi scaling the head's z; nats.
    token: [document, layer, head] mean over included positions of |z . dL/dz|; nats.
    z_sum: [layer, head, d_head] sum of z over all included positions.
    z_own: the same sum of one document, for documents of several windows.
    included: included positions per document.
    """

    loss: np.ndarray
    xi: np.ndarray
    token: np.ndarray
    z_sum: torch.Tensor
    z_own: dict[int, torch.Tensor]
    included: np.ndarray

    @property
    def z_mean(self) -> torch.Tensor:
        """[layer, head, d_head] mean of z over all included positions, float64."""
        return self.z_sum / max(1, self.included.sum())


def predicted_counts(text: Text) -> np.ndarray:
    """Predicted tokens of each document."""
    return np.array([sum(len(w) - 1 for w in d.windows) for d in text.documents], dtype=np.float64)


def gradients(
    model: Model,
    text: Text,
    batch_size: BatchSize,
    *,
    removed: Sequence[Head] = (),
    progress: bool = False,
    what: str = "importance",
) -> Gradients:
    """Importance of every head, with some heads already removed.

    Works with frozen parameters and inside `torch.no_grad()`: only activations get gradients.
    """
    cfg, n_docs = model.cfg, len(text)
    shape = (n_docs, cfg.n_layers, cfg.n_heads)
    loss, xi, token = np.zeros(n_docs), np.zeros(shape), np.zeros(shape)
    counts, included = predicted_counts(text), np.zeros(n_docs)
    z_sum = torch.zeros(cfg.n_layers, cfg.n_heads, cfg.d_head, dtype=torch.float64)
    several = {i for i, d in enumerate(text.documents) if len(d.windows) > 1}
    z_own = {i: torch.zeros_like(z_sum) for i in several}
    edits = interventions.removals(removed)
    stage = journal.stage(what)
    sums = {"loss": loss, "xi": xi, "token": token, "included": included}
    sums |= {"z_sum": z_sum, "z_own": z_own}
    bar = track(n_docs, what, progress)
    for batch in stage.fold(stage.batches(model, text, batch_size, graph=True), sums):
        rows = batch.rows.cpu().numpy()
        z, g = _backward(model, batch, edits, counts[rows])
        np.add.at(loss, rows, z.loss / counts[rows])
        np.add.at(xi, rows, g.sum(1))
        inside = batch.included.cpu().numpy()
        np.add.at(token, rows, (np.abs(g) * inside[:, :, None, None]).sum(1))
        np.add.at(included, rows, inside.sum(1))
        z_sum += z.sums.sum(0)
        for row, own in zip(rows.tolist(), z.sums, strict=True):
            if row in several:
                z_own[row] += own
        bar.update(len(set(rows.tolist())))
    bar.close()
    token /= np.maximum(included, 1)[:, None, None]
    return Gradients(loss, xi, token, z_sum, z_own, included)


@dataclass
class _Forward:
    loss: np.ndarray  # [batch] sums
    sums: torch.Tensor  # [batch, layer, head, d_head] of z over included positions, on the CPU


def _backward(
    model: Model, batch: TokenBatch, edits: dict[int, splice.Edit], counts: np.ndarray
) -> tuple[_Forward, np.ndarray]:
    """z sums and z . dL/dz per position [batch, pos, layer, head] of one batch."""
    n = model.cfg.n_layers
    grads: list[Any] = [None] * n
    sums: list[Any] = [None] * n
    leaf: list[torch.Tensor] = []

    def watch(layer: int) -> hooks.Hook:
        def hook(z: torch.Tensor) -> torch.Tensor:
            sums[layer] = included_sums(z.detach(), batch.included)
            if layer in edits:
                z = edits[layer](z)
            if not z.requires_grad:  # the first layer: the graph starts here
                z = z.detach().requires_grad_()
                leaf.append(z)
            value = z.detach()

            def keep(grad: torch.Tensor) -> None:
                grads[layer] = (value * grad).sum(-1)

            z.register_hook(keep)
            return z

        return hook

    with torch.enable_grad(), hooks.attached(model, [("z", i, watch(i)) for i in range(n)]):
        scores = splice.forward_scores(model, batch)
        # Each document's own mean loss; they do not see each other, so one backward serves all.
        weight = torch.as_tensor(1 / counts).to(scores.loss)
        (scores.loss * weight).sum().backward(inputs=leaf)
    splice.check_finite(scores.loss.detach(), "loss")
    per_position = torch.stack(grads, 2).cpu().double()
    splice.check_finite(per_position, "gradient")
    forward = _Forward(scores.loss.detach().cpu().numpy(), torch.stack(sums, 1))
    return forward, per_position.numpy()


def included_sums(z: torch.Tensor, included: torch.Tensor) -> torch.Tensor:
    """[batch, head, d_head] float64 on the CPU: z summed over included positions."""
    kept = torch.where(included[:, :, None, None], z, 0)
    return wide(kept).sum(1).cpu()

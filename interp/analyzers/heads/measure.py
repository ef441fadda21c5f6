"""What the heads analyzer measures: gradients in one pass, and losses with heads changed.

Everything is kept per document, the unit of every interval: float64 [document, ...].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from interp import hooks, interventions, splice
from interp.interventions import Head
from interp.model import Model
from interp.progress import batch_rows, batches, track
from interp.text import Text, TokenBatch

# Removals whose sums stay on the device before they are read: reading one waits for the device.
FLUSH = {"cuda": 64}

Mode = Literal["zero", "bias", "mean", "resample"]
BatchSize = int | Literal["auto"]


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
    bar = track(n_docs, what, progress)
    for batch in batches(model, text, batch_size, graph=True):
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
    wide = kept.cpu() if z.device.type == "mps" else kept
    return wide.double().sum(1).cpu()


@dataclass
class Sweep:
    """Losses of many removals on the same documents; nan where interrupted before it was measured.

    clean: [document] nats per predicted token, nothing removed.
    loss: [document, removal] the same, with each removal.
    kl: [document, removal] KL(clean || removed), nats per predicted token; None unless asked.
    """

    clean: np.ndarray
    loss: np.ndarray
    kl: np.ndarray | None

    @property
    def delta(self) -> np.ndarray:
        """[document, removal] loss change, nats per token."""
        return self.loss - self.clean[:, None]


def sweep(
    model: Model,
    text: Text,
    removals: Sequence[Removal],
    batch_size: BatchSize,
    *,
    means: Gradients | None = None,
    kl: bool = False,
    seed: int = 0,
    progress: bool = False,
    what: str = "removals",
    into: Sweep | None = None,
) -> Sweep:
    """Measure removals, each batch's clean prefix computed once and shared by all of them.

    Args:
        model: what to measure.
        text: on which documents.
        removals: any number of them.
        batch_size: rows per forward pass.
        means: z statistics of `text` (for mode mean) or of any text (for mode bias).
        kl: also KL(clean || removed), from the same forward pass.
        seed: of the resampling donors, which depend on the document and the seed alone.
        progress: show a bar.
        what: the bar's name.
        into: filled in place, so that an interrupted caller keeps what was measured.
    """
    n_docs = len(text)
    out = into or empty_sweep(n_docs, len(removals), kl)
    rows_per_batch = batch_rows(model, text, batch_size)
    donors = Donors(model, text, seed) if any(r.mode == "resample" for r in removals) else None
    from_start = not splice.usable(model, text)
    bar = track(len(removals) * n_docs, what, progress)
    loss = _ByDocument(text, out.loss)
    diverged = _ByDocument(text, out.kl) if out.kl is not None else None
    base = _ByDocument(text, out.clean[:, None])
    for batch in text.batches(rows_per_batch, model.device):
        rows = batch.rows.cpu().numpy()
        clean = splice.run_clean(model, batch, kl=kl)
        splice.check_finite(clean.scores.loss, "loss")
        base.add(0, rows, clean.scores.loss)
        source = _Source(model, text, clean, means, donors)
        waiting: list[splice.Scores] = []
        first = 0

        def flush() -> None:
            nonlocal first
            for i, scores in enumerate(waiting, first):
                splice.check_finite(scores.loss, f"loss without {_named(removals[i])}")
                finished = loss.add(i, rows, scores.loss)
                if diverged is not None:
                    kl_sums = torch.zeros_like(scores.loss) if scores.kl is None else scores.kl
                    diverged.add(i, rows, kl_sums)
                bar.update(finished)
            first += len(waiting)
            waiting.clear()

        try:
            for removal in removals:
                edits = source.edits(removal)
                waiting.append(splice.run_edited(model, clean, edits, from_start=from_start))
                if len(waiting) >= FLUSH.get(model.device.type, 1):
                    flush()
        finally:  # an interruption keeps what is measured
            flush()
    bar.close()
    return out


class _ByDocument:
    """Sums rows into their documents; a document is written out when all its windows are in."""

    def __init__(self, text: Text, out: np.ndarray) -> None:
        self.out = out  # [document, column]
        self.sums = np.zeros(out.shape)
        self.missing = np.repeat([[len(d.windows)] for d in text.documents], out.shape[1], axis=1)
        self.counts = predicted_counts(text)

    def add(self, column: int, rows: np.ndarray, sums: torch.Tensor) -> int:
        """Add rows' sums over tokens; returns how many documents that completed."""
        np.add.at(self.sums[:, column], rows, sums.cpu().numpy())
        np.subtract.at(self.missing[:, column], rows, 1)
        done = np.unique(rows)
        done = done[self.missing[done, column] == 0]
        self.out[done, column] = self.sums[done, column] / self.counts[done]
        return len(done)


class Growing:
    """Losses as units of heads go one after another, each run starting where the last one changed.

    A text that fits one batch keeps that batch's clean run and each order's last run, so that the
    next unit costs only the layers from its own on; otherwise that holds within one call.
    """

    def __init__(
        self,
        model: Model,
        text: Text,
        batch_size: BatchSize,
        means: Gradients | None,
        progress: bool = False,
    ) -> None:
        self.model, self.text, self.means, self.progress = model, text, means, progress
        self.rows = batch_rows(model, text, batch_size)
        self.single = sum(len(d.windows) for d in text.documents) <= self.rows
        self.ahead = 1 if self.single else 8
        self._clean: splice.Clean | None = None
        self._last: dict[int, tuple[int, splice.Clean]] = {}
        self._bar: Any = None

    def forget(self) -> None:
        """Drop the kept runs of the orders measured so far, and close their bar."""
        self._last.clear()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def measure(self, order: Any, counts: Sequence[int]) -> dict[int, np.ndarray]:
        """units removed -> [document] loss change in nats per token.

        Args:
            order: a `curve.Order`; `counts` of its units are removed.
            counts: ascending.
        """
        if self._bar is None:
            self._bar = track(None, f"where {order.name} crosses", self.progress)
        out = empty_sweep(len(self.text), len(counts), kl=False)
        usable = splice.usable(self.model, self.text)
        loss, base = _ByDocument(self.text, out.loss), _ByDocument(self.text, out.clean[:, None])
        for batch in self.text.batches(self.rows, self.model.device):
            rows = batch.rows.cpu().numpy()
            clean = self._clean or splice.run_clean(self.model, batch)
            if self.single:
                self._clean = clean
            base.add(0, rows, clean.scores.loss)
            source = _Source(self.model, self.text, clean, self.means, None)
            last = self._last.get(id(order)) if self.single else None
            for i, n in enumerate(counts):
                edits = source.edits(order.removal(n))
                if usable:
                    last = (n, self._grown(clean, last, order, n, edits))
                    sums = last[1].scores.loss
                else:
                    sums = splice.run_edited(self.model, clean, edits, from_start=True).loss
                splice.check_finite(sums, f"loss without {_named(order.removal(n))}")
                loss.add(i, rows, sums)
                self._bar.update(1)
            if self.single and last is not None:
                self._last[id(order)] = last
        return {n: out.delta[:, i] for i, n in enumerate(counts)}

    def _grown(
        self,
        clean: splice.Clean,
        last: tuple[int, splice.Clean] | None,
        order: Any,
        n: int,
        edits: dict[int, splice.Edit],
    ) -> splice.Clean:
        if last is None or not last[0] < n:
            return splice.extend(self.model, clean, edits)
        first = min(layer for unit in order.units[last[0] : n] for layer, _ in unit)
        return splice.extend(
            self.model, last[1], {layer: edit for layer, edit in edits.items() if layer >= first}
        )


def empty_sweep(documents: int, removals: int, kl: bool) -> Sweep:
    """A sweep with nothing measured yet."""
    nan = np.full((documents, removals), math.nan)
    return Sweep(np.full(documents, math.nan), nan, nan.copy() if kl else None)


def _named(removal: Removal) -> str:
    if not removal.heads:
        return "any head"
    layer, head = removal.heads[0]
    more = f" and {len(removal.heads) - 1} more" if len(removal.heads) > 1 else ""
    return f"head {layer}.{head}{more}"


class _Source:
    """Turns a removal into edits for one batch."""

    def __init__(
        self,
        model: Model,
        text: Text,
        clean: splice.Clean,
        means: Gradients | None,
        donors: Donors | None,
    ) -> None:
        self.clean, self.means, self.donors = clean, means, donors
        self.model, self.text = model, text
        self._others: torch.Tensor | None = None
        self._resampled: list[torch.Tensor] | None = None
        self._bias: torch.Tensor | None = None

    def edits(self, removal: Removal) -> dict[int, splice.Edit]:
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
            others = [j for j in range(len(text)) if j != i]
            if not others:
                self.of.append(i)
                continue
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


def time_of(
    model: Model, text: Text, removals: Sequence[Removal], batch_size: BatchSize, kl: bool
) -> float:
    """Expected seconds of a sweep, from the first batch at the first and the last layer."""
    import time

    batch = next(iter(text.batches(batch_rows(model, text, batch_size), model.device)))
    clean = splice.run_clean(model, batch, kl=kl)
    clock: Callable[[], float] = time.perf_counter
    seconds = []
    for layer in (0, model.cfg.n_layers - 1):
        edits = interventions.removals([(layer, 0)])
        splice.run_edited(model, clean, edits)
        began = clock()
        float(splice.run_edited(model, clean, edits).loss[0])
        seconds.append(clock() - began)
    first, last = seconds
    depth = max(1, model.cfg.n_layers - 1)
    per_batch = sum(
        first + (last - first) * min(layer for layer, _ in r.heads) / depth for r in removals
    )
    rows = sum(len(d.windows) for d in text.documents)
    return per_batch * rows / len(batch.rows)

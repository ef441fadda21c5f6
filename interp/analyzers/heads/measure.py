"""Losses with heads taken out: many removals on the same documents, or one after another.

Everything is kept per document, the unit of every interval: float64 [document, ...].
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from interp import interventions, journal, splice
from interp.analyzers.heads.importance import BatchSize, Gradients, predicted_counts
from interp.analyzers.heads.standins import Donors, Removal, StandIns
from interp.analyzers.heads.tokenclasses import ByClass
from interp.model import Model
from interp.progress import track
from interp.text import Text

# Removals whose sums stay on the device before they are read: reading one waits for the device.
FLUSH = {"cuda": 64}


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
    classes: ByClass | None = None,
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
        classes: filled with the losses by class of token.
    """
    n_docs = len(text)
    out = into or empty_sweep(n_docs, len(removals), kl)
    stage = journal.stage(what)
    donors = Donors(model, text, seed) if any(r.mode == "resample" for r in removals) else None
    from_start = not splice.usable(model, text)
    bar = track(len(removals) * n_docs, what, progress)
    loss = _ByDocument(text, out.loss)
    diverged = _ByDocument(text, out.kl) if out.kl is not None else None
    base = _ByDocument(text, out.clean[:, None])
    for batch in stage.batches(model, text, batch_size):
        rows = batch.rows.cpu().numpy()
        clean = splice.run_clean(model, batch, kl=kl)
        splice.check_finite(clean.scores.loss, "loss")
        base.add(0, rows, clean.scores.loss)
        if classes is not None:
            classes.start(batch, clean.scores)
        source = StandIns(model, clean, means, donors)

        def run(i: int, clean: splice.Clean = clean, source: StandIns = source) -> journal.Values:
            edits = source.edits(removals[i])
            scores = splice.run_edited(model, clean, edits, from_start=from_start)
            by_class = None if classes is None else classes.of(scores)
            return {"loss": scores.loss, "kl": scores.kl, "classes": by_class}

        ahead = FLUSH.get(model.device.type, 1)
        for i, found in enumerate(stage.each(len(removals), run, ahead)):
            sums = torch.from_numpy(found["loss"])
            splice.check_finite(sums, f"loss without {_named(removals[i])}")
            finished = loss.add(i, rows, sums)
            if classes is not None:
                classes.add(i, found["classes"])
            if diverged is not None:  # nothing removed, nothing diverges
                kls = found.get("kl")
                diverged.add(i, rows, sums * 0 if kls is None else torch.from_numpy(kls))
            bar.update(finished)
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
        self.stage = journal.stage("where orders cross")
        self.rows = self.stage.rows(model, text, batch_size)
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
        for batch in self.stage.through(self.text.batches(self.rows, self.model.device)):
            rows = batch.rows.cpu().numpy()
            clean = self._clean or splice.run_clean(self.model, batch)
            if self.single:
                self._clean = clean
            base.add(0, rows, clean.scores.loss)
            source = StandIns(self.model, clean, self.means, None)
            if not self.single:
                self._last.clear()

            def run(i: int, clean: splice.Clean = clean, source: StandIns = source) -> Any:
                n = counts[i]
                edits = source.edits(order.removal(n))
                if not usable:
                    scores = splice.run_edited(self.model, clean, edits, from_start=True)
                    return {"loss": scores.loss}
                grown = self._grown(clean, self._last.get(id(order)), order, n, edits)
                self._last[id(order)] = n, grown
                return {"loss": grown.scores.loss}

            for i, found in enumerate(self.stage.each(len(counts), run)):
                sums = torch.from_numpy(found["loss"])
                splice.check_finite(sums, f"loss without {_named(order.removal(counts[i]))}")
                loss.add(i, rows, sums)
                self._bar.update(1)
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


def time_of(
    model: Model, text: Text, removals: Sequence[Removal], batch_size: BatchSize, kl: bool
) -> float:
    """Expected seconds of a sweep, from the first batch at the first and the last layer."""
    seconds = []
    with journal.stage("timing") as stage:
        batch = next(text.batches(stage.rows(model, text, batch_size), model.device))
        clean = splice.run_clean(model, batch, kl=kl)
        for layer in (0, model.cfg.n_layers - 1):
            edits = interventions.removals([(layer, 0)])
            splice.run_edited(model, clean, edits)
            began = time.perf_counter()
            float(splice.run_edited(model, clean, edits).loss[0])
            seconds.append(time.perf_counter() - began)
    first, last = seconds
    depth = max(1, model.cfg.n_layers - 1)
    per_batch = sum(
        first + (last - first) * min(layer for layer, _ in r.heads) / depth for r in removals
    )
    rows = sum(len(d.windows) for d in text.documents)
    return per_batch * rows / len(batch.rows)

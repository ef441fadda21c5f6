"""Losses of documents under each intervention, at all layers at once and one layer at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from interp import hooks, journal, splice
from interp.analyzers.qkv.edits import Change, Intervention, Maker
from interp.model import Model
from interp.progress import track
from interp.splice import Clean, Scores
from interp.text import Text, TokenBatch

Key = tuple[Intervention | None, int | None]
"""What was done (None: nothing), and at which layer (None: at all of them)."""


class Losses:
    """Mean loss of each document under each key, nats per predicted token, document order."""

    def __init__(self, text: Text) -> None:
        self.tokens = np.zeros(len(text))
        self.windows = np.array([len(d.windows) for d in text.documents])
        self._sums: dict[Key, np.ndarray] = {}
        self._seen: dict[Key, np.ndarray] = {}

    def add(self, key: Key, batch: TokenBatch, scores: Scores) -> None:
        """Take in the summed losses of a batch's rows."""
        splice.check_finite(scores.loss, f"loss ({_words(key)})")
        rows = batch.rows.cpu().numpy()
        for into, values in (
            (self._sums, scores.loss.cpu().numpy()),
            (self._seen, np.ones(len(rows))),
        ):
            np.add.at(into.setdefault(key, np.zeros(len(self.windows))), rows, values)
        if key == (None, None):
            np.add.at(self.tokens, rows, batch.predicted.sum(1).cpu().numpy())

    def done(self) -> list[Key]:
        """What was done, for at least one whole document."""
        return [key for key in self._sums if key[0] is not None and self.whole(key).any()]

    def whole(self, key: Key) -> np.ndarray:
        """[document] whether all of its windows were measured, with and without."""
        clean = self._seen.get((None, None), np.zeros(len(self.windows)))
        return (self._seen[key] == self.windows) & (clean == self.windows) & (self.tokens > 0)

    def of(self, key: Key, where: np.ndarray) -> np.ndarray:
        """[document] of those documents."""
        return self._sums[key][where] / self.tokens[where]


def _words(key: Key) -> str:
    what, layer = key
    if what is None:
        return "nothing changed"
    return f"{what.kind} of {what.target}, {'all layers' if layer is None else f'layer {layer}'}"


def measure(
    model: Model,
    text: Text,
    maker: Maker,
    together: list[Intervention],
    each: list[Intervention],
    batch_size: int | Literal["auto"],
    losses: Losses,
    *,
    progress: bool = False,
    announce: Callable[[int], None] | None = None,
) -> None:
    """Fill `losses`, so that an interrupted caller keeps what is whole.

    Args:
        model: what to measure.
        text: whose losses.
        maker: of the interventions.
        together: made at all layers at once.
        each: made at one layer at a time.
        batch_size: rows per forward pass.
        losses: filled in place.
        progress: show a bar.
        announce: told the number of forward passes over the text.
    """
    layers = range(model.cfg.n_layers)
    stage = journal.stage("interventions")
    size = stage.rows(model, text, batch_size)

    def saved(run: Callable[[], Scores]) -> Scores:
        found = stage.once(lambda: {"loss": run().loss})
        return Scores(torch.from_numpy(found["loss"]), None)

    from_start = not splice.usable(model, text)
    if announce is not None:
        announce(1 + len(together) + len(each) * len(layers))
    bar = track(
        len(text) * (1 + len(together) + len(each) * len(layers)), "interventions", progress
    )
    try:
        for batch in stage.through(text.batches(size, model.device)):
            found = saved(functools.partial(splice.forward_scores, model, batch))
            losses.add((None, None), batch, found)
            bar.update(_documents(batch))
        for what in together:
            made = [(i, site, change) for i in layers for site, change in maker.changes(what, i)]
            for batch in stage.through(text.batches(size, model.device)):
                found = saved(functools.partial(_together, model, batch, made))
                losses.add((what, None), batch, found)
                bar.update(_documents(batch))
        for batch in stage.through(text.batches(size, model.device)) if each else ():
            clean = splice.run_clean(model, batch)
            for what in each:
                for layer in layers:
                    one = functools.partial(_one, model, clean, maker, what, layer, from_start)
                    losses.add((what, layer), batch, saved(one))
                    bar.update(_documents(batch))
    finally:
        bar.close()


def _together(model: Model, batch: TokenBatch, made: Sequence[tuple[int, str, Change]]) -> Scores:
    with hooks.attached(model, _edits(made, batch)):
        return splice.forward_scores(model, batch)


def _one(
    model: Model, clean: Clean, maker: Maker, what: Intervention, layer: int, from_start: bool
) -> Scores:
    made = [(layer, site, change) for site, change in maker.changes(what, layer)]
    edits = _edits(made, clean.batch)
    return splice.run_hooked(model, clean, edits, from_start=from_start)


def _edits(
    made: Iterable[tuple[int, str, Change]], batch: TokenBatch
) -> list[tuple[str, int, hooks.Hook]]:
    def hook(change: Change) -> hooks.Hook:
        def at_included(x: Tensor) -> Tensor:
            where = batch.included.view(*batch.included.shape, *[1] * (x.ndim - 2))
            return torch.where(where, change(x, batch), x)

        return at_included

    return [(site, layer, hook(change)) for layer, site, change in made]


def _documents(batch: TokenBatch) -> int:
    return len(set(batch.rows.tolist()))

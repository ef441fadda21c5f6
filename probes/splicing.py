"""The model's loss with something else in the place of an MLP's output.

At included positions of a document the output x is replaced (everywhere else it stays), and the
model runs on: cross-entropy and KL(clean || spliced), in nats per predicted token, by document.
Blocks before the layer are run once per batch; that a run which replaces x by itself gives the
clean loss is checked on two windows first, and where it does not, every run starts from the start.

What the numbers do not show: a layer that the model hardly needs costs little when it is removed,
so that any reconstruction of it looks harmless. Compare with what removal costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp import hooks, journal, splice
from interp.model import Model
from interp.progress import track
from interp.text import Text, TokenBatch
from probes.activations import SITE, expect_finite

CLEAN = "clean"

Replace = Callable[
    [Float[Tensor, "token d_model"], Float[Tensor, "token d_mlp"] | None, TokenBatch],
    Float[Tensor, "token d_model"],
]
"""(x, neurons, batch) at the batch's included positions -> what stands in; must not write to x."""


@dataclass
class Losses:
    """Sums over predicted tokens, by document of the text.

    nll, kl: condition -> [document] nats; "clean" is the model as it is, and has no KL.
    tokens: [document] predicted tokens of it.
    documents: [document] whether all of it was run.
    """

    tokens: np.ndarray
    documents: np.ndarray
    nll: dict[str, np.ndarray] = field(default_factory=dict)
    kl: dict[str, np.ndarray] = field(default_factory=dict)

    def loss(self, name: str) -> np.ndarray:
        """[document] mean loss of each document that was run, in nats per token."""
        return self.nll[name][self.documents] / self.tokens[self.documents]

    def divergence(self, name: str) -> np.ndarray:
        """[document] mean KL from the clean distributions, in nats per token."""
        return self.kl[name][self.documents] / self.tokens[self.documents]


def splice_in(
    model: Model,
    layer: int,
    text: Text,
    replacements: Mapping[str, Replace],
    batch_size: int | Literal["auto"] = "auto",
    *,
    neurons: bool = False,
    into: Losses | None = None,
    progress: bool = False,
) -> Losses:
    """The losses of a text as it is and with each replacement.

    Args:
        model: inside `model.measuring()`.
        layer: whose MLP output is replaced.
        text: what to run.
        replacements: condition -> what to put there.
        batch_size: rows per forward pass.
        neurons: whether replacements need what enters W_out.
        into: where to write; what an interruption leaves is there.
        progress: whether a bar is shown: rows, once for each condition, clean among them.

    Raises:
        InterpError: a replacement or a loss that is not finite.
    """
    losses = into or empty(text)
    names = [CLEAN, *replacements]
    losses.nll |= {name: np.zeros(len(text)) for name in names}
    losses.kl |= {name: np.zeros(len(text)) for name in replacements}
    left = np.array([len(d.windows) for d in text.documents])  # windows of each document
    first: list[bool] = []  # whether runs may start from the middle, once it was tried
    stage = journal.stage("splicing")
    batches = stage.batches(model, text, batch_size)
    with track(int(left.sum()) * len(names), "splicing", progress) as bar:
        for batch in stage.fold(batches, {"losses": losses, "left": left, "first": first}):
            rows = batch.rows.cpu().numpy()
            clean = _Clean(model, layer, batch, neurons)
            if not first:
                first.append(_usable(model, layer, text))
            _add(losses.nll[CLEAN], rows, clean.scores.loss)
            bar.update(len(rows))
            for name, replace in replacements.items():
                x_hat = replace(clean.x, clean.neurons, batch)
                expect_finite(x_hat)
                found = clean.run(x_hat, first[0])
                assert found.kl is not None
                splice.check_finite(found.loss, "loss")
                _add(losses.nll[name], rows, found.loss)
                _add(losses.kl[name], rows, found.kl)
                bar.update(len(rows))
            _add(losses.tokens, rows, batch.predicted.sum(1))
            np.subtract.at(left, rows, 1)
            losses.documents[left == 0] = True
    return losses


def _usable(model: Model, layer: int, text: Text) -> bool:
    """Whether a run from the middle that changes nothing gives the clean losses of two windows."""
    few = text.batch_of([(i, 0) for i in range(min(2, len(text)))], model.device)
    clean = _Clean(model, layer, few, neurons=False)
    gap = clean.run(clean.x, True).loss - clean.scores.loss
    return float(gap.abs().max()) <= splice.SELF_CHECK_NATS


def empty(text: Text) -> Losses:
    """Nothing measured yet."""
    return Losses(np.zeros(len(text)), np.zeros(len(text), dtype=bool))


def _add(sums: np.ndarray, rows: np.ndarray, values: Tensor) -> None:
    np.add.at(sums, rows, values.cpu().double().numpy())


class _Clean:
    """A batch as it is: activations at included positions, losses, and where to start again."""

    def __init__(self, model: Model, layer: int, batch: TokenBatch, neurons: bool) -> None:
        self.model, self.layer, self.batch = model, layer, batch
        self.included = batch.included
        found: dict[str, Tensor] = {}

        def keep(name: str) -> hooks.Hook:
            def hook(tensor: Tensor) -> None:
                found[name] = tensor[self.included]

            return hook

        names = (SITE, "mlp_post") if neurons else (SITE,)
        reader = splice.Reader(model, batch, keep_reference=True)
        with (
            splice.remembered(model, layer) as self.kept,
            hooks.attached(model, [(name, layer, keep(name)) for name in names]),
        ):
            self.scores = splice.forward_scores(model, batch, reader)
        splice.check_finite(self.scores.loss, "loss")
        self.reference = reader.make_reference()
        self.x = found[SITE].float()
        self.neurons = found["mlp_post"].float() if neurons else None

    def run(self, x_hat: Tensor, from_middle: bool) -> splice.Scores:
        """The scores with x_hat [token, d_model] at the included positions."""

        def put(tensor: Tensor) -> Tensor:
            new = tensor.clone()
            new[self.included] = x_hat.to(tensor)
            return new

        reader = splice.Reader(self.model, self.batch, reference=self.reference)
        kept = self.kept if from_middle else []
        with (
            splice.starting_at(self.model, self.layer, kept),
            hooks.attached(self.model, [(SITE, self.layer, put)]),
        ):
            return splice.forward_scores(self.model, self.batch, reader)


# What to put there --------------------------------------------------------------------------------


def constant(value: Tensor) -> Replace:
    """The same [d_model] everywhere: zero, or a mean."""
    return lambda x, neurons, batch: value.to(x).expand_as(x)


def reconstructed(dictionary: Any) -> Replace:
    """What a `baselines.Dictionary` makes of x."""
    return lambda x, neurons, batch: dictionary(x, neurons)[0]


def noisy(dictionary: Any, text: Text, seed: int) -> Replace:
    """x plus an error as long as the dictionary's own at each position, in a random direction.

    The directions depend on the seed and the place in the source, not on the batch.
    """

    def replace(x: Tensor, neurons: Tensor | None, batch: TokenBatch) -> Tensor:
        length = (dictionary(x, neurons)[0] - x).norm(dim=1, keepdim=True)
        parts = []
        counts = batch.included.sum(1).tolist()
        places = zip(batch.rows.tolist(), batch.window.tolist(), counts, strict=True)
        for row, window, count in places:
            index = text.documents[row].index
            rng = np.random.default_rng([seed, index, window])
            parts.append(rng.standard_normal((count, x.shape[1])))
        direction = torch.from_numpy(np.concatenate(parts)).to(x)
        return x + length * direction / direction.norm(dim=1, keepdim=True)

    return replace

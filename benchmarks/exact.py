"""Removing every head one at a time: interp, the loop of a TransformerLens user, and the floor.

* peer: `run_with_hooks` with one hook per head, on the same batches with the same mask, then the
  fast cross-entropy on flattened logits (and KL from the same log-probabilities). The model is as
  it was loaded: what interp changes while it measures (`Model.measuring`) is not the peer's.
* floor: nothing but what must run after a head of layer l has changed: W_O of block l, its MLP (not
  that of a parallel block), the bridge's blocks after it called directly, the final norm, the
  unembedding of the predicted positions by F.linear in cache-sized chunks, cross-entropy.

One head of every few layers is timed, since all heads of a layer cost the same and a layer's cost
is linear in the layers after it: the mean over these layers (whose mean depth is that of all) times
the number of heads, plus one clean run per batch, is the time over all heads. At each of them the
three run one after another, in turning order. interp is its own sweep; only its clean run is handed
to it ready made, and timed by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 (its usual name)

from benchmarks.common import (
    GPT2,
    PYTHIA,
    SMOLLM2,
    ZERO,
    Options,
    Row,
    Time,
    full_text,
    measured,
    random_model,
    smollm2,
    timed,
)
from interp import splice
from interp.analyzers.heads import measure
from interp.model import Model
from interp.text import Text, TokenBatch

FLOOR = 1.15
APART = 5, 3
"""Layers from one that is timed to the next, in models of 24 layers or more and of fewer."""


@dataclass
class Case:
    name: str
    model: str
    context: int
    kl: bool
    reps: int
    at_least: float | None


CASES = [
    Case(f"{SMOLLM2}, 128 tokens", SMOLLM2, 128, False, 2, 1.5),
    Case(f"{SMOLLM2}, 128 tokens, with KL", SMOLLM2, 128, True, 2, 1.5),
    Case(f"{SMOLLM2}, 512 tokens", SMOLLM2, 512, False, 1, None),
    Case(f"{GPT2}, 128 tokens", GPT2, 128, False, 2, 1.4),
    Case(f"{GPT2}, 128 tokens, with KL", GPT2, 128, True, 2, 1.4),
    Case(f"{GPT2}, 512 tokens", GPT2, 512, False, 1, None),
    Case(f"{PYTHIA}, 128 tokens", PYTHIA, 128, False, 2, None),
]

Scored = tuple[np.ndarray, np.ndarray | None]
"""[document] loss and KL, nats per token."""


def run(options: Options) -> list[Row]:
    rows: list[Row] = []
    wanted = [case for case in CASES if options.wants(case.name)]
    for name in dict.fromkeys(case.model for case in wanted):
        with ExitStack() as stack:
            if name == SMOLLM2:
                model = smollm2(options.device)
            else:
                model = stack.enter_context(random_model(name, options.device))
            for case in wanted:
                if case.model == name:
                    rows += compare(model, case, options)
    return rows


def compare(model: Model, case: Case, options: Options) -> list[Row]:
    """interp against the peer and against the floor."""
    size = max(1, options.batch_tokens // case.context)
    ways = Ways(model, full_text(model, size, case.context), size, case.kl)
    # Page in code and weights; let interp check that the model can be run from the middle.
    for name, way in ways.all.items():
        with ways.setting(name):
            way(model.cfg.n_layers - 1)
    runs = [ways.repetition() for _ in range(options.reps or case.reps)]
    peer = [r.over_all("peer") for r in runs]
    mine = [r.over_all("interp") for r in runs]
    floor = [r.over_all("floor") for r in runs]
    heads = model.cfg.n_layers * model.cfg.n_heads
    note = (
        f"{case.name}: batches of {size}; over all {heads} heads of one batch interp takes "
        f"{min(t.wall for t in mine):.0f} s. "
        f"Removing these heads changes the loss by at least {ways.effect(runs[0]):.0e} nats."
    )
    gaps = {way: max(r.gap(way) for r in runs) for way in ("peer", "floor")}
    return [
        Row(
            case.name,
            "peer / interp",
            [p.wall / m.wall for p, m in zip(peer, mine, strict=True)],
            [p.cpu / m.cpu for p, m in zip(peer, mine, strict=True)],
            at_least=case.at_least,
            gap=gaps["peer"],
            notes=[note],
        ),
        Row(
            case.name,
            "interp / floor",
            [m.wall / f.wall for m, f in zip(mine, floor, strict=True)],
            [m.cpu / f.cpu for m, f in zip(mine, floor, strict=True)],
            at_most=FLOOR,
            gap=gaps["floor"],
        ),
    ]


@dataclass
class Repetition:
    """One head of every few layers, three ways at each."""

    heads: int  # of the model
    clean: Time
    times: dict[str, list[Time]]
    scores: dict[str, list[Scored]]

    def over_all(self, way: str) -> Time:
        """Seconds over all heads of the batch, its clean run included."""
        mine = self.times[way]
        return sum(mine, ZERO) * (self.heads / len(mine)) + self.clean

    def gap(self, way: str) -> float:
        """Largest difference of a document's loss or KL from interp's."""
        return max_difference(self.scores["interp"], self.scores[way])


def max_difference(some: list[Scored], others: list[Scored]) -> float:
    """Over layers, documents, loss and KL."""
    gaps = [
        np.abs(a - b).max()
        for one, other in zip(some, others, strict=True)
        for a, b in zip(one, other, strict=True)
        if a is not None and b is not None
    ]
    return float(np.max(gaps))


class Ways:
    """One batch, and the three ways to remove a head on it."""

    def __init__(self, model: Model, text: Text, size: int, kl: bool) -> None:
        self.model, self.text, self.size, self.kl = model, text, size, kl
        (self.batch,) = text.batches(size, model.device)
        with model.measuring(fused=True):
            self.clean = splice.run_clean(model, self.batch, kl=kl)
            self.calls = block_calls(model, self.batch)
        self.all = {"interp": self.interp, "peer": self.peer, "floor": self.floor}
        self.predicted = self.batch.predicted.flatten().nonzero()[:, 0]

    def repetition(self) -> Repetition:
        device = self.model.device
        once = partial(splice.run_clean, self.model, self.batch, kl=self.kl)
        _, clean = measured(self.model, once)
        ways = self.all
        times: dict[str, list[Time]] = {name: [] for name in ways}
        scores: dict[str, list[Scored]] = {name: [] for name in ways}
        cfg = self.model.cfg
        apart = APART[cfg.n_layers < 24]
        for turn, layer in enumerate(range(apart // 2, cfg.n_layers, apart)):
            order = list(ways.items())[turn % 3 :] + list(ways.items())[: turn % 3]
            for name, way in order:
                with self.setting(name):
                    scored, time = timed(lambda way=way, layer=layer: way(layer), device)
                times[name].append(time)
                scores[name].append(scored)
        return Repetition(cfg.n_layers * cfg.n_heads, clean, times, scores)

    def setting(self, way: str) -> AbstractContextManager[Any]:
        """What the caller of each way has around its loop; entered outside the clock."""
        return torch.no_grad() if way == "peer" else self.model.measuring(fused=True)

    def effect(self, run: Repetition) -> float:
        """Smallest loss change of a removal (the mean of its absolute value over documents)."""
        counts = self.batch.predicted.sum(1).cpu().numpy()
        clean = self.clean.scores.loss.cpu().numpy() / counts
        return min(float(np.abs(loss - clean).mean()) for loss, _ in run.scores["interp"])

    def head(self, layer: int) -> int:
        """The head that stands for its layer."""
        return layer % self.model.cfg.n_heads

    def interp(self, layer: int) -> Scored:
        removal = measure.Removal(((layer, self.head(layer)),), "zero")
        with mock.patch.object(splice, "run_clean", return_value=self.clean):
            found = measure.sweep(self.model, self.text, [removal], self.size, kl=self.kl)
        return found.loss[:, 0], None if found.kl is None else found.kl[:, 0]

    def peer(self, layer: int) -> Scored:
        def zero_head(z: torch.Tensor, hook: Any) -> torch.Tensor:
            z = z.clone()
            z[:, :, self.head(layer)] = 0
            return z

        batch = self.batch
        logits = self.model.bridge.run_with_hooks(
            batch.tokens,
            fwd_hooks=[(f"blocks.{layer}.attn.hook_z", zero_head)],
            attention_mask=batch.attention_mask,
            use_cache=False,
        ).flatten(0, 1)
        targets = torch.where(batch.predicted, batch.targets, -100).flatten()
        if not self.kl:
            loss = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
            return self.per_document(loss), None
        logp = F.log_softmax(logits, dim=-1)
        loss = F.nll_loss(logp, targets, reduction="none", ignore_index=-100)
        return self.per_document(loss), self.per_document(self.divergence(logp[self.predicted]))

    def floor(self, layer: int) -> Scored:
        bridge = self.model.bridge
        block = bridge.blocks[layer]
        z = self.clean.z[layer].clone()
        z[:, :, self.head(layer)] = 0
        stream = self.calls[layer][0][0] + block.attn.o(z.flatten(2))
        mlp = self.clean.mlp  # of a parallel block it reads what the attention has not changed
        stream = stream + (block.mlp(block.ln2(stream)) if mlp is None else mlp[layer])
        for later in range(layer + 1, self.model.cfg.n_layers):
            args, kwargs = self.calls[later]
            out = bridge.blocks[later](stream, *args[1:], **kwargs)
            stream = out[0] if isinstance(out, tuple) else out
        hidden = bridge.ln_final(stream).flatten(0, 1)[self.predicted]
        weight = bridge.unembed.original_component.weight
        targets = self.batch.targets.flatten()[self.predicted]
        chunk = max(16, splice.CHUNK_BYTES.get(weight.device.type, 2**26) // (4 * len(weight)))
        loss, kl = [], []
        for start in range(0, len(hidden), chunk):
            at = slice(start, start + chunk)
            logits = F.linear(hidden[at], weight)
            if not self.kl:
                loss.append(F.cross_entropy(logits, targets[at], reduction="none"))
                continue
            logp = F.log_softmax(logits, dim=-1)
            loss.append(F.nll_loss(logp, targets[at], reduction="none"))
            kl.append(self.divergence(logp, at))
        every = self.per_document(torch.cat(loss))
        return every, self.per_document(torch.cat(kl)) if kl else None

    def divergence(self, logp: torch.Tensor, at: slice = slice(None)) -> torch.Tensor:
        """KL(clean || this) at predicted positions."""
        reference = self.clean.reference
        assert reference is not None
        # Not einsum, which adds up one after another: 3e-4 nats off over 49,152 words.
        cross = (reference.probabilities[at] * logp).sum(-1)
        return reference.negative_entropy[at] - cross

    def per_document(self, values: torch.Tensor) -> np.ndarray:
        """Means over the predicted tokens of each row; values at all or at predicted positions."""
        if len(values) == len(self.predicted):
            every = values.new_zeros(self.batch.tokens.numel())
            every[self.predicted] = values
            values = every
        sums = values.view_as(self.batch.tokens).double().sum(1)
        return (sums / self.batch.predicted.sum(1)).cpu().numpy()


def block_calls(model: Model, batch: TokenBatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What each block is called with in a clean run."""
    calls: list[Any] = [None] * model.cfg.n_layers
    with ExitStack() as stack:
        for i, block in enumerate(model.bridge.blocks):
            stack.enter_context(_watched(block, calls, i))
        model.forward(batch)
    return calls


@contextmanager
def _watched(block: torch.nn.Module, calls: list[Any], i: int) -> Iterator[None]:
    def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[i] = (args, dict(kwargs))

    handle = block.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()

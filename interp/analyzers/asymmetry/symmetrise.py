"""What symmetric attention costs: scores made symmetric, and controls, as loss changes.

Contents are exchanged at the same offset: S'_ij = (q_i R_(i-j) k_j + q_j R_(i-j) k_i) / 2, before
the mask and the softmax; q and k carry their biases with them. Only cells of two included positions
change in the variants called kept: the column of the first position, on which most heads rest, is
what it was. Since averaging also makes scores smaller and noisier, no variant means anything
without the controls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from interp import interventions, journal, scores, splice
from interp.encoding import Document
from interp.errors import InterpError
from interp.model import Model
from interp.progress import track
from interp.scores import Attention, Form
from interp.text import Text, TokenBatch

VARIANTS = {
    "swap_kept": "contents exchanged at the same offset, first-position column untouched",
    "permuted": "as swap_kept, the exchanged half from permuted tokens (control)",
    "half_kept": "scores halved, first-position column untouched (control)",
    "amplified": "(3 S - S exchanged) / 2, first-position column untouched (control)",
    "swap": "contents exchanged at the same offset, everywhere",
    "literal_kept": "(S + S^T) / 2, first-position column untouched",
    "literal": "(S + S^T) / 2, everywhere",
    "half": "scores halved, everywhere (control)",
}
PER_HEAD = ("swap_kept", "permuted")
REPEATED = 50
"""Random tokens that are then repeated, at most (as in the induction-head literature)."""


@dataclass
class Effects:
    """Losses of a text's documents, nats per predicted token; nan where not measured.

    clean: [document].
    together: variant -> [document], all heads changed at once.
    single: variant of PER_HEAD -> [document, layer, head], one head changed.
    finished: [document] whether all of it was measured.
    """

    clean: np.ndarray
    together: dict[str, np.ndarray]
    single: dict[str, np.ndarray]
    finished: np.ndarray


def halved(a: Attention, form: Form, variant: str, kept: Tensor, source: Tensor) -> Tensor:
    """A layer's scores [batch, head, pos, pos] under a variant.

    Args:
        a: the layer's attention, as it is in this run.
        form: of the layer.
        variant: one of VARIANTS.
        kept: [batch, 1, pos, pos], cells that the kept variants may change.
        source: [batch, pos], the permutation of the control.
    """
    s = a.scores
    if variant in ("half", "half_kept"):
        other = torch.zeros_like(s)
    elif variant in ("literal", "literal_kept"):
        other = s.transpose(-1, -2)
    else:
        other = form.swapped(a, source if variant == "permuted" else None).to(s.dtype)
    new = (3 * s - other) / 2 if variant == "amplified" else (s + other) / 2
    if variant in ("swap", "literal", "half"):
        return new
    if variant == "permuted":  # an exchange leaves a token's score for itself: so does its control
        kept = kept & ~torch.eye(s.shape[-1], dtype=torch.bool, device=s.device)
    return torch.where(kept, new, s)


def permutation(batch: TokenBatch, text: Text, seed: int) -> Tensor:
    """[batch, pos]: included positions permuted among themselves, by document and seed alone."""
    place = torch.arange(batch.tokens.shape[1]).repeat(len(batch.rows), 1)
    for i, (row, nth) in enumerate(zip(batch.rows.tolist(), batch.window.tolist(), strict=True)):
        at = batch.included[i].nonzero()[:, 0].cpu()
        rng = np.random.default_rng([seed, text.documents[row].index, nth])
        place[i, at] = at[torch.as_tensor(rng.permutation(len(at)))]
    return place.to(batch.tokens.device)


# Repeated random tokens ---------------------------------------------------------------------------


class RepeatedBatch(TokenBatch):
    """A batch of documents that say everything twice; only what can be copied is predicted."""

    @property
    def predicted(self) -> Any:
        """The second copy, without its first token, which nothing announces."""
        half = (int(self.mask.sum(1).max()) - 1) // 2
        ahead = super().predicted.clone()
        ahead[:, : half + 1] = False
        return ahead


@dataclass(frozen=True, repr=False)
class RepeatedText(Text):
    """Random tokens, then the same again, one document per document of the text it replaces."""

    def batch_of(self, places: Any, device: Any = "cpu") -> TokenBatch:
        """As `Text.batch_of`, scored on the second copy only."""
        made = super().batch_of(places, device)
        return RepeatedBatch(**{f.name: getattr(made, f.name) for f in fields(TokenBatch)})


def repeated(text: Text, seed: int) -> RepeatedText:
    """As many documents as the text has, BOS as it has it, each of random tokens said twice.

    Raises:
        InterpError: the context is too short to say anything twice.
    """
    encoder = text.pool.encoder
    start = [] if text.bos_id is None else [text.bos_id]
    length = min(REPEATED, (text.context - 1) // 2)
    if length < 2:
        raise InterpError("Repeated random tokens need a context of at least 5 tokens.")
    # Without BOS a random token stands first: it is not an included position either.
    allowed = np.setdiff1d(np.arange(encoder.vocab_size), sorted(text.special_ids))
    documents = []
    for i in range(len(text)):
        rng = np.random.default_rng([seed, 1, i])
        half = rng.choice(allowed, size=length).tolist()
        first = start or [int(rng.choice(allowed))]
        documents.append(Document(index=i, text="", windows=[first + half + half]))
    given = {f.name: getattr(text, f.name) for f in fields(Text)}
    return RepeatedText(**given | {"documents": documents, "part": "repeated"})


# Measuring ----------------------------------------------------------------------------------------


def empty(model: Model, text: Text) -> Effects:
    """Nothing measured yet."""
    n, cfg = len(text), model.cfg
    shape = (n, cfg.n_layers, cfg.n_heads)
    return Effects(
        clean=np.full(n, math.nan),
        together={v: np.full(n, math.nan) for v in VARIANTS},
        single={v: np.full(shape, math.nan) for v in PER_HEAD},
        finished=np.zeros(n, dtype=bool),
    )


def measure(
    model: Model,
    text: Text,
    forms: list[Form],
    batch_size: int | Literal["auto"],
    *,
    seed: int,
    progress: bool = False,
    what: str = "symmetrised",
    into: Effects | None = None,
    announce: Callable[[float], None] | None = None,
) -> Effects:
    """All variants with all heads changed, and PER_HEAD with one head changed at a time.

    Args:
        model: what to measure.
        text: natural, or `repeated`.
        forms: from `scores.form`, all bilinear.
        batch_size: rows per forward pass.
        seed: of the permutations.
        progress: show a bar.
        what: the bar's name.
        into: filled in place, so that an interrupted caller keeps whole documents.
        announce: told the expected seconds once the first batch's first runs are through.
    """
    out = into or empty(model, text)
    every = model.cfg.heads()
    from_start = not splice.usable(model, text)
    total = _Sums(text)
    bar = track(len(text) * (len(VARIANTS) + len(PER_HEAD) * len(every)), what, progress)
    rotary = any(f.rotary for f in forms)
    stage = journal.stage(what)
    plan = [(variant, layer, head) for variant in PER_HEAD for layer, head in every]
    variants = list(VARIANTS)
    try:
        for batch in stage.batches(model, text, batch_size):
            began = time.perf_counter()
            one = _OneBatch(model, text, batch, forms, seed)
            total.add("clean", batch, one.clean.scores.loss)

            def together(i: int, one: _OneBatch = one) -> journal.Values:
                same = not rotary and variants[i].startswith("literal")  # is the swap then
                name = variants[i].replace("literal", "swap") if same else variants[i]
                return {"loss": one.together(name)}

            def single(i: int, one: _OneBatch = one) -> journal.Values:
                return {"loss": one.single(*plan[i], from_start)}

            for variant, found in zip(variants, stage.each(len(variants), together), strict=True):
                total.add(variant, batch, torch.from_numpy(found["loss"]))
                bar.update(len(set(batch.rows.tolist())))
            if announce is not None:
                each = (time.perf_counter() - began) / (len(VARIANTS) + 1)
                rows = sum(len(d.windows) for d in text.documents) / len(batch.rows)
                # A run from the middle takes half of one from the start, on average.
                announce(rows * each * (len(VARIANTS) + 1 + len(PER_HEAD) * len(every) * 0.6))
                announce = None
            for key, found in zip(plan, stage.each(len(plan), single), strict=True):
                total.add(key, batch, torch.from_numpy(found["loss"]))
                bar.update(len(set(batch.rows.tolist())))
            total.close(batch)
    finally:
        bar.close()
        total.write(out)
    return out


class _OneBatch:
    """A batch's clean run, with what each head's output becomes under each variant."""

    def __init__(
        self, model: Model, text: Text, batch: TokenBatch, forms: list[Form], seed: int
    ) -> None:
        self.model, self.batch, self.forms = model, batch, forms
        self.kept = (batch.included[:, :, None] & batch.included[:, None, :])[:, None]
        self.source = permutation(batch, text, seed)
        self.z: dict[str, list[Any]] = {v: [None] * model.cfg.n_layers for v in PER_HEAD}
        self._own: list[Any] = [None] * model.cfg.n_layers
        layers = dict.fromkeys(range(model.cfg.n_layers), self._keep)
        with scores.attending(model, layers):
            self.clean = splice.run_clean(model, batch)
        splice.check_finite(self.clean.scores.loss, "loss")
        self._check()

    def _keep(self, a: Attention) -> None:
        for variant in PER_HEAD:
            self.z[variant][a.layer] = _output(a, self._scores(a, variant))
        self._own[a.layer] = _output(a, a.scores)

    def _scores(self, a: Attention, variant: str) -> Tensor:
        return halved(a, self.forms[a.layer], variant, self.kept, self.source)

    def _check(self) -> None:
        """Unchanged scores must give the head outputs that the model gave."""
        real = self.batch.mask
        for layer, (mine, own) in enumerate(zip(self.clean.z, self._own, strict=True)):
            gap = float((mine - own)[real].abs().max() / mine[real].abs().max().clamp(min=1e-12))
            if not gap <= scores.tolerance(self.model):
                raise InterpError(
                    f"Attention of layer {layer} of {self.model.name} is not softmax(S + mask) v "
                    f"(off by {gap:.1e}): a symmetrised head's output cannot be worked out."
                )
        self._own = []

    def together(self, variant: str) -> Tensor:
        """[batch] summed loss with all heads of all layers changed."""
        use = dict.fromkeys(range(self.model.cfg.n_layers), lambda a: self._scores(a, variant))
        with scores.attending(self.model, use):
            loss = splice.forward_scores(self.model, self.batch).loss
        splice.check_finite(loss, f"loss ({variant}, all heads)")
        return loss

    def single(self, variant: str, layer: int, head: int, from_start: bool) -> Tensor:
        """[batch] summed loss with one head changed."""
        value = self.z[variant][layer][:, :, [head]]
        edits = {layer: interventions.replaced([head], value)}
        loss = splice.run_edited(self.model, self.clean, edits, from_start=from_start).loss
        splice.check_finite(loss, f"loss ({variant}, head {layer}.{head})")
        return loss


def _output(a: Attention, s: Tensor) -> Tensor:
    """z [batch, pos, head, d_head] of scores before the mask."""
    pattern = torch.softmax((s + a.mask).float(), -1).to(a.v.dtype)
    return (pattern @ a.v).transpose(1, 2)


class _Sums:
    """Summed losses of each document, divided by its predicted tokens at the end."""

    def __init__(self, text: Text) -> None:
        self.n = len(text)
        self.sums: dict[Any, np.ndarray] = {}
        self.tokens = np.zeros(self.n)
        self.missing = np.array([len(d.windows) for d in text.documents])

    def add(self, key: Any, batch: TokenBatch, loss: Tensor) -> None:
        into = self.sums.setdefault(key, np.zeros(self.n))
        np.add.at(into, batch.rows.cpu().numpy(), loss.cpu().numpy())

    def close(self, batch: TokenBatch) -> None:
        """Everything of this batch is measured."""
        rows = batch.rows.cpu().numpy()
        np.add.at(self.tokens, rows, batch.predicted.sum(1).cpu().numpy())
        np.subtract.at(self.missing, rows, 1)

    def write(self, out: Effects) -> None:
        done = (self.missing == 0) & (self.tokens > 0)
        out.finished[:] = done
        for key, values in self.sums.items():
            mean = values[done] / self.tokens[done]
            if key == "clean":
                out.clean[done] = mean
            elif isinstance(key, tuple):
                variant, layer, head = key
                out.single[variant][done, layer, head] = mean
            else:
                out.together[key][done] = mean

"""Score correlations and the data-weighted symmetry, streamed over a text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from interp import journal, scores, splice
from interp.analyzers.asymmetry import pairs
from interp.model import Model
from interp.progress import track
from interp.scores import Attention, Form
from interp.text import Text

KINDS = ("real", "centred", "content", "content_centred")
"""Scores as they are; row and column means removed; query and key at offset 0; both."""
CONTROLS = ("offsets_removed", "content_offsets_removed", "same", "repaired")
"""Offset means removed too (real and content); keys := queries; keys of another KV head."""
ELEMENTS = {"cpu": 2**18, "cuda": 2**26}
"""Entries of score matrices worked on at once in float64."""
LONG = 5
"""Positions per d_head from which a product is not written out: n^2 entries against n d_head."""


@dataclass
class OnText:
    """What the scores on a text say.

    r: kind (KINDS, and CONTROLS where asked) -> [document, layer, head] Pearson r; nan where a
        document has too few pairs, or a head's scores do not vary.
    symmetry_data: [layer, head] symmetry of A weighted by the covariance of the inputs.
    finished: [document] all of its windows were measured.
    """

    r: dict[str, np.ndarray]
    symmetry_data: np.ndarray
    finished: np.ndarray


def measure(
    model: Model,
    text: Text,
    forms: list[Form],
    batch_size: int | Literal["auto"],
    *,
    controls: bool = True,
    progress: bool = False,
) -> OnText:
    """One forward pass over the text; no score matrix outlives its layer."""
    cfg = model.cfg
    kinds = KINDS + (CONTROLS if controls else ())
    shape = (len(text), cfg.n_layers, cfg.n_heads)
    out = OnText(
        r={kind: np.full(shape, math.nan) for kind in kinds},
        symmetry_data=np.full(shape[1:], math.nan),
        finished=np.zeros(len(text), dtype=bool),
    )
    spread = [_Spread() for _ in range(cfg.n_layers)]
    rows = _Rows(text, out, kinds)
    bar = track(len(text), "scores on text", progress)
    try:
        stage = journal.stage("scores on text")
        state = {"spread": spread, "rows": rows}
        for batch in stage.fold(stage.batches(model, text, batch_size), state):
            found: dict[int, Tensor] = {}

            def look(a: Attention, included: Any = batch.included, found: Any = found) -> None:
                spread[a.layer].add(a, included, cfg.n_heads // cfg.n_kv_heads)
                found[a.layer] = of_layer(a, forms[a.layer], included, kinds, _step(model))

            with scores.attending(model, dict.fromkeys(range(cfg.n_layers), look)):
                scores.run(model, batch)
            every = torch.stack([found[layer] for layer in range(cfg.n_layers)], 1)
            # Of the scores themselves: a kind that is not defined (one KV head has no other keys to
            # be re-paired with) is nan for all heads.
            splice.check_finite(every[:, :, kinds.index("real")], "attention score")
            bar.update(rows.add(batch.rows.tolist(), every))
    finally:  # also what an interruption leaves is worth having
        bar.close()
        for layer, one in enumerate(spread):
            if one.count:
                out.symmetry_data[layer] = one.symmetry().numpy()
    return out


def _step(model: Model) -> int:
    return ELEMENTS.get(model.device.type, ELEMENTS["cpu"])


def of_layer(
    a: Attention, form: Form, included: Tensor, kinds: tuple[str, ...], elements: int
) -> Tensor:
    """[batch, kind, head, 6] moments of one layer's scores, on the CPU; nan where not defined.

    Only the included positions are looked at: rows with the same ones are taken together, so that
    no padding is worked on. (Rows of a power of two would also share cache lines.)
    """
    n, heads = a.scores.shape[:2]
    out = torch.full((n, len(kinds), heads, pairs.N_MOMENTS), math.nan, dtype=torch.float64)
    least = LONG * a.q.shape[-1]
    turned = _turned(a, form) if int(included.sum(1).max()) >= least else None
    groups: dict[tuple[bool, ...], list[int]] = {}
    for row, mask in enumerate(included.tolist()):
        groups.setdefault(tuple(mask), []).append(row)
    for mask, rows in groups.items():
        at = torch.tensor(mask).nonzero()[:, 0]
        if len(at) < 2:
            out[rows] = 0.0  # no pairs
            continue
        long = turned is not None and len(at) >= least
        step = max(1, elements // (len(at) * (pairs.BLOCK if long else len(at))))
        blocks = []
        for start in range(0, len(rows) * heads, step):
            block = range(start, min(start + step, len(rows) * heads))
            row = torch.tensor([rows[i // heads] for i in block])
            head = torch.tensor([i % heads for i in block])
            part = _Block(a, form, turned if long else None, row, head, at)
            blocks.append(part.sums("same" in kinds))
        found = {name: pairs.joined([b[name] for b in blocks]) for name in blocks[0]}
        for i, kind in enumerate(kinds):
            name, centred = _MADE_OF[kind]
            if name in found:
                m = pairs.moments(found[name], centred).cpu()
                out[rows, i] = m.reshape(len(rows), heads, pairs.N_MOMENTS)
    return out


def _turned(a: Attention, form: Form) -> tuple[Tensor, Tensor] | None:
    """Rotated queries, scaled, and keys whose product the scores are; None where they are not.

    Looked at again here, by the last query's scores: a soft cap, say, shows in large ones only.
    """
    if not form.bilinear:
        return None
    q, k = form.turned(a)
    q = q * form.scale
    seen = a.scores[:, :, -1:]
    gap = (q[:, :, -1:] @ k.transpose(-1, -2) - seen).abs().max()
    rounding = scores.TOLERANCE.get(a.scores.dtype, scores.TOLERANCE_HALF)
    return (q, k) if bool(gap <= rounding * seen.abs().max()) else None


# kind -> (what `_Block.sums` calls the matrices, whether row and column means go)
_MADE_OF = {
    "real": ("scores", False),
    "centred": ("scores", True),
    "content": ("content", False),
    "content_centred": ("content", True),
    "offsets_removed": ("offsets", False),
    "content_offsets_removed": ("content_offsets", False),
    "same": ("same", True),
    "repaired": ("repaired", True),
}


class _Block:
    """Scores of some rows' heads at the n included positions, in float64."""

    def __init__(
        self,
        a: Attention,
        form: Form,
        turned: tuple[Tensor, Tensor] | None,
        row: Tensor,
        head: Tensor,
        at: Tensor,
    ) -> None:
        self.a, self.form, self.turned = a, form, turned
        self.row, self.head, self.at = row, head, at
        first, last = int(at[0]), int(at[-1])
        self.cut: Any = slice(first, last + 1) if last - first + 1 == len(at) else at

    def _scores(self) -> Tensor:
        """[block, n, n] as the model has them."""
        if len(self.row) > 1:
            chosen = self.a.scores[self.row, self.head]
        else:  # one matrix: no copy
            chosen = self.a.scores[int(self.row), int(self.head)][None]
        return scores.wide(chosen[:, self.cut][:, :, self.cut])

    def _part(self, x: Tensor, head: Tensor | None = None) -> Tensor:
        """[block, n, d_head] queries or keys, in float32 at least."""
        part = x[self.row, self.head if head is None else head][:, self.cut]
        return part.float() if part.dtype.itemsize < 4 else part

    def _product(self, q: Tensor, k: Tensor) -> Tensor:
        """[block, n, n] q . k, made as precisely as the model makes its scores, then float64."""
        return scores.wide(q @ k.transpose(-1, -2))

    def _of_product(self, q: Tensor, k: Tensor) -> pairs.Sums:
        if q.shape[-2] >= LONG * q.shape[-1]:
            return pairs.sums_of_product(scores.wide(q), scores.wide(k))
        return pairs.sums(self._product(q, k))

    def sums(self, controls: bool) -> dict[str, pairs.Sums]:
        """What the moments of each kind of matrix are made of; a kind that is not defined lacks."""
        if self.turned is None:
            out = {"scores": pairs.sums(self._scores())}
        else:
            out = {"scores": self._of_product(*map(self._part, self.turned))}
        q, k = self._part(self.a.q), self._part(self.a.k)
        if self.form.bilinear:
            own = not self.form.rotary
            out["content"] = out["scores"] if own else self._of_product(q * self.form.scale, k)
        return out | (self._controls(q, k) if controls else {})

    def _controls(self, q: Tensor, k: Tensor) -> dict[str, pairs.Sums]:
        s = self._scores()
        at = self.at.to(s.device)
        out = {"offsets": pairs.sums(pairs.without_offsets(pairs.centred(s), at))}
        if not self.form.bilinear:
            return out
        content = self._product(q * self.form.scale, k) if self.form.rotary else s
        free = pairs.without_offsets(pairs.centred(content), at)
        out |= {"content_offsets": pairs.sums(free), "same": self._of_product(q, q)}
        if self.a.k_heads > 1:  # the next KV head's keys
            heads = self.a.q.shape[1]
            other = self._part(self.a.k, (self.head + heads // self.a.k_heads) % heads)
            out["repaired"] = self._of_product(q, other)
        return out


@dataclass
class _Spread:
    """Second moments of q and k over included positions: what tr(A S A S) is made of.

    With S the covariance of the attention's input x, W_K^T S W_Q is the covariance of k with q:
    d_head^2 numbers per head stand for the d_model^2 of S, and biases drop out.
    """

    count: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, a: Attention, included: Tensor, group: int) -> None:
        inside = included.to(scores.wide(a.q[:1, :1, :1]).device)
        q = scores.wide(a.q).transpose(1, 2)[inside].transpose(0, 1)  # [head, item, d_head]
        k = scores.wide(a.k[:, ::group]).transpose(1, 2)[inside].transpose(0, 1)
        turned = k.transpose(1, 2)
        new = {"q": q.sum(1), "k": k.sum(1), "qq": q.transpose(1, 2) @ q, "kk": turned @ k}
        new["kq"] = turned.repeat_interleave(group, 0) @ q
        self.count += q.shape[1]
        self.sums = {name: self.sums.get(name, 0) + part.cpu() for name, part in new.items()}

    def symmetry(self) -> Tensor:
        """[head] tr(A S A S) / tr(A S A^T S), S the covariance of the input; nan where it is 0."""
        s, n = self.sums, self.count
        group = len(s["q"]) // len(s["k"])
        mean_q, mean_k = s["q"] / n, s["k"] / n

        def less(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return total / n - a[:, :, None] * b[:, None, :]

        qq, kk = less(s["qq"], mean_q, mean_q), less(s["kk"], mean_k, mean_k)
        kk, mean_k = (x.repeat_interleave(group, 0) for x in (kk, mean_k))
        kq = less(s["kq"], mean_k, mean_q)
        both = (kq * kq.transpose(1, 2)).sum((1, 2))
        return both / (qq * kk).sum((1, 2))


class _Rows:
    """Adds up the windows of each document, and correlates when all of them are in."""

    def __init__(self, text: Text, out: OnText, kinds: tuple[str, ...]) -> None:
        self.out, self.kinds = out, kinds
        self.missing = [len(d.windows) for d in text.documents]
        self.sums: dict[int, Tensor] = {}

    def add(self, rows: list[int], found: Tensor) -> int:
        """found: [row, layer, kind, head, 6]; returns how many documents that completed."""
        done = 0
        for row, one in zip(rows, found, strict=True):
            self.sums[row] = self.sums[row] + one if row in self.sums else one
            self.missing[row] -= 1
            if self.missing[row]:
                continue
            r = pairs.correlation(self.sums.pop(row)).numpy()
            for i, kind in enumerate(self.kinds):
                self.out.r[kind][row] = r[:, i]
            self.out.finished[row] = True
            done += 1
        return done

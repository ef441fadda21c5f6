"""Score correlations and the data-weighted symmetry, streamed over a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from interp import scores, splice
from interp.analyzers.asymmetry import pairs
from interp.model import Model
from interp.progress import batches, track
from interp.scores import Attention, Form
from interp.text import Text

KINDS = ("real", "centred", "content", "content_centred")
"""Scores as they are; row and column means removed; query and key at offset 0; both."""
CONTROLS = ("offsets_removed", "content_offsets_removed", "same", "repaired")
"""Offset means removed too (of real, of content scores); keys := queries; keys of another KV head."""
ELEMENTS = {"cpu": 2**18, "cuda": 2**26}
"""Entries of score matrices worked on at once in float64."""


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
        for batch in batches(model, text, batch_size):
            found: dict[int, Tensor] = {}

            def look(a: Attention, included: Any = batch.included, found: Any = found) -> None:
                spread[a.layer].add(a, included, cfg.n_heads // cfg.n_kv_heads)
                found[a.layer] = of_layer(a, forms[a.layer], included, kinds, _step(model))

            with scores.attending(model, dict.fromkeys(range(cfg.n_layers), look)):
                scores.run(model, batch)
            every = torch.stack([found[layer] for layer in range(cfg.n_layers)], 1)
            splice.check_finite(every, "attention score")
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
    """[batch, kind, head, 6] moments of one layer's scores, on the CPU; nan where not defined."""
    n, heads, length, _ = a.scores.shape
    step = max(1, elements // (heads * length * length))
    made: list[Tensor] = []
    for start in range(0, n, step):
        part = _rows_of(a, slice(start, start + step))
        inside = included[start : start + step]
        made.append(torch.stack(_moments(part, form, inside, kinds), 1).cpu())
    return torch.cat(made)


def _rows_of(a: Attention, at: slice) -> Attention:
    def cut(x: Tensor) -> Tensor:
        x = x[at] if x.shape[0] > 1 else x
        return x.cpu() if x.device.type == "mps" else x  # which has no float64

    rotary = None if a.rotary is None else (cut(a.rotary[0]), cut(a.rotary[1]))
    parts = {name: cut(getattr(a, name)) for name in ("scores", "mask", "q", "k", "v", "x")}
    return Attention(layer=a.layer, rotary=rotary, k_heads=a.k_heads, **parts)


def _moments(a: Attention, form: Form, included: Tensor, kinds: tuple[str, ...]) -> list[Tensor]:
    included = included.to(a.scores.device)
    unknown = torch.full((*a.scores.shape[:2], pairs.N_MOMENTS), math.nan, device=included.device)

    def of(s: Tensor) -> Tensor:
        return pairs.moments(s, included)

    centred = pairs.centred(a.scores, included)
    out = {"real": of(a.scores), "centred": of(centred)}
    content: Tensor | None = a.scores
    content_centred = centred
    if not form.bilinear:
        content = None
    elif form.rotary:
        content = form.content(a)
        content_centred = pairs.centred(content, included)
    out["content"] = out["real"] if content is a.scores else unknown
    out["content_centred"] = out["centred"] if content is a.scores else unknown
    if content is not None and content is not a.scores:
        out |= {"content": of(content), "content_centred": of(content_centred)}
    if "same" in kinds:
        out["offsets_removed"] = of(pairs.without_offsets(centred, included))
        out |= dict.fromkeys(("content_offsets_removed", "same", "repaired"), unknown)
        if content is not None:
            same = pairs.without_offsets(content_centred, included)
            out["content_offsets_removed"] = of(same)
            out["same"] = of(pairs.centred(a.q @ a.q.transpose(-1, -2), included))
    if "same" in kinds and content is not None and a.k_heads > 1:
        group = a.q.shape[1] // a.k_heads
        other = a.k.roll(-group, dims=1)  # the next KV head's keys
        out["repaired"] = of(pairs.centred(a.q @ other.transpose(-1, -2), included))
    return [out[kind].double() for kind in kinds]


@dataclass
class _Spread:
    """Second moments of q and k over included positions: what tr(A S A S) is made of.

    With S the covariance of the attention's input x, W_K^T S W_Q is the covariance of k with q:
    d_head^2 numbers per head stand for the d_model^2 of S, and biases drop out.
    """

    count: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, a: Attention, included: Tensor, group: int) -> None:
        wide: Callable[[Tensor], Tensor] = lambda x: (x.cpu() if x.device.type == "mps" else x).double()
        inside = included.to(wide(a.q[:1, :1, :1]).device)
        q = wide(a.q).transpose(1, 2)[inside].transpose(0, 1)  # [head, item, d_head]
        k = wide(a.k[:, ::group]).transpose(1, 2)[inside].transpose(0, 1)
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

"""Symmetry of A = W_Q W_K^T from d_head x d_head Gram matrices, in float64; A is never made.

With M = W_K^T W_Q, <A, A^T> = tr(A A) = tr(M M) and |A|_F^2 = tr(W_Q^T W_Q W_K^T W_K): what takes
d_model^2 numbers per head when A is written out takes d_head^2. All functions take a leading batch
of heads and tell nothing of scale: A and -A differ only in `positive_real`, A and cA in nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from interp import scores
from interp.model import Model
from interp.scores import Form

SHIFTS = 8
"""Re-pairings per layer, at most: each gives every query head another KV head's keys."""
GAUSSIAN = 64
"""Gaussian pairs of matrices behind the second null."""
ZERO = 1e-6
"""What counts as zero, relative to the largest: float32 weights hold no more."""
CHUNK = 2**17
"""Elements of a stack of matrices [head, d_model, d_head] worked on at once."""


@dataclass
class Grams:
    """W_Q^T W_Q, W_K^T W_K and W_K^T W_Q of each head, each [head, d_head, d_head]."""

    qq: Tensor
    kk: Tensor
    kq: Tensor


def grams(w_q: Tensor, w_k: Tensor) -> Grams:
    """From W_Q and W_K [head, d_model, d_head], in their dtype."""
    q, k = w_q.transpose(-1, -2), w_k.transpose(-1, -2)
    return Grams(q @ w_q, k @ w_k, k @ w_q)


def inner(g: Grams) -> tuple[Tensor, Tensor]:
    """<A, A^T> and |A|_F^2 of each head."""
    return (g.kq * g.kq.transpose(-1, -2)).sum((-1, -2)), (g.qq * g.kk).sum((-1, -2))


def symmetry(g: Grams) -> Tensor:
    """<A, A^T> / |A|_F^2 in [-1, 1]: 1 symmetric, 0 unrelated to its transpose, -1 antisymmetric.

    It is the correlation (about zero) of A_ij with A_ji over all entries; nan where A is zero.
    """
    both, square = inner(g)
    return both / square


def stable_rank(g: Grams) -> Tensor:
    """|A|_F^2 / |A|_2^2 in [1, d_head]: how many directions carry A."""
    # Squared singular values of A: eigenvalues of qq^(1/2) kk qq^(1/2).
    values, vectors = torch.linalg.eigh(g.qq)
    root = vectors * values.clamp(min=0).sqrt()[..., None, :]
    top = torch.linalg.eigvalsh(root.transpose(-1, -2) @ g.kk @ root)[..., -1]
    return inner(g)[1] / top


def positive_real(g: Grams) -> Tensor:
    """Share of A's nonzero eigenvalues whose real part is positive.

    1 for a positive semidefinite A (keys equal to queries): a token then asks for its like. 0 for
    keys opposite to queries. About 1/2 for unrelated matrices. Zero parts count as not positive.
    """
    values = torch.linalg.eigvals(g.kq)
    largest = values.abs().amax(-1, keepdim=True)
    nonzero = values.abs() > ZERO * largest
    positive = nonzero & (values.real > ZERO * largest)
    return positive.sum(-1).double() / nonzero.sum(-1)


def antisymmetric_rank(g: Grams) -> Tensor:
    """Effective rank (sum s^2)^2 / sum s^4 of (A - A^T) / 2, s its singular values: 2 to 2 d_head.

    0 where A is symmetric. Singular values of an antisymmetric matrix come in pairs.
    """
    # A - A^T = U J U^T with U = [W_Q, W_K], J = [[0, I], [-I, 0]]; its powers have the traces of
    # powers of J U^T U.
    top = torch.cat([g.kq, g.kk], -1)
    bottom = torch.cat([-g.qq, -g.kq.transpose(-1, -2)], -1)
    square = torch.cat([top, bottom], -2)
    square = square @ square
    second = -torch.diagonal(square, dim1=-2, dim2=-1).sum(-1)  # sum of (2s)^2
    fourth = (square * square.transpose(-1, -2)).sum((-1, -2))
    rank = second.square() / fourth
    return torch.where(second > ZERO * inner(g)[1], rank, torch.zeros_like(rank))


def directionality(w_q: Tensor, w_k: Tensor, g: Grams) -> Tensor:
    """(E_col - E_row) / (E_col + E_row) in [-1, 1], E the excess of norms above mean + 2 sd.

    Columns of A are directions of the token that is attended to, rows of the one that attends:
    positive where few directions of the former stand out more. 0 where none stand out.

    Source: Saponati et al. (2025), "The underlying structures of self-attention".
    """
    # Squared norms of A's rows are the diagonal of W_Q kk W_Q^T, of its columns of W_K qq W_K^T.
    rows = ((w_q @ g.kk) * w_q).sum(-1)
    columns = ((w_k @ g.qq) * w_k).sum(-1)
    return direction(rows.clamp(min=0).sqrt(), columns.clamp(min=0).sqrt())


def direction(rows: Tensor, columns: Tensor) -> Tensor:
    """Directionality from norms of rows and of columns, each [..., d_model]."""
    row, column = _excess(rows), _excess(columns)
    total = row + column
    return torch.where(total > 0, (column - row) / total, torch.zeros_like(total))


def _excess(norms: Tensor) -> Tensor:
    limit = norms.mean(-1, keepdim=True) + 2 * norms.std(-1, keepdim=True)
    return (norms - limit).clamp(min=0).sum(-1)


def symmetry_at(g: Grams, turn: Tensor) -> Tensor:
    """Symmetry of A_D = W_Q R W_K^T, R the rotation [d_head, d_head] of an offset D = i - j.

    It asks whether the score at this offset survives an exchange of the two tokens' contents.
    """
    both = ((turn @ g.kq) * (turn @ g.kq).transpose(-1, -2)).sum((-1, -2))
    return both / ((turn @ g.kk @ turn.T) * g.qq).sum((-1, -2))


def symmetry_reversed(g: Grams, turn: Tensor) -> Tensor:
    """<A_D, (A_-D)^T> / (|A_D| |A_-D|): whether i asks j as j asks i, D apart the other way."""
    both = ((turn @ g.kq) * (turn.T @ g.kq).transpose(-1, -2)).sum((-1, -2))
    there = ((turn @ g.kk @ turn.T) * g.qq).sum((-1, -2))
    back = ((turn.T @ g.kk @ turn) * g.qq).sum((-1, -2))
    return both / (there * back).sqrt()


# A model's heads ----------------------------------------------------------------------------------

METRICS = ("symmetry", "directionality", "stable_rank", "positive_real", "antisymmetric_rank")


@dataclass
class Basis:
    """The weight metrics in one basis (raw, or with the norm folded in).

    heads: metric -> [layer, head].
    layers: symmetry and directionality of the whole layer's A (sum over heads) -> [layer].
    null: [pair] symmetry of re-paired heads, all layers together.
    """

    heads: dict[str, np.ndarray]
    layers: dict[str, np.ndarray]
    null: np.ndarray


@dataclass
class Weights:
    """Everything that the weights alone say.

    raw, folded: the metrics; folded is None where a layer has no norm before its attention.
    offsets: [offset] distances of the two curves; empty without rotary embedding.
    by_offset, by_offset_reversed: [layer, head, offset].
    gaussian: metric -> [sample] of Gaussian matrices of the same shape.
    """

    raw: Basis
    folded: Basis | None
    offsets: list[int] = field(default_factory=list)
    by_offset: np.ndarray | None = None
    by_offset_reversed: np.ndarray | None = None
    gaussian: dict[str, np.ndarray] = field(default_factory=dict)


def measure(
    model: Model, forms: list[Form], seed: int, metrics: tuple[str, ...] = METRICS
) -> Weights:
    """All weight metrics of a model, layer by layer."""
    cfg = model.cfg
    offsets = []
    if all(f.rotary and f.angles is not None for f in forms):
        offsets = [0, *(2**i for i in range(11) if 2**i < cfg.n_ctx)]
    shape = (cfg.n_layers, cfg.n_heads, len(offsets))
    curves = [np.full(shape, np.nan), np.full(shape, np.nan)]
    bases, removed = [], set(cfg.removed)
    for folded in (False, True):
        if folded and not all(f.prenorm for f in forms):
            continue
        heads = {name: np.full((cfg.n_layers, cfg.n_heads), np.nan) for name in metrics}
        whole = {name: np.full(cfg.n_layers, np.nan) for name in METRICS[:2]}
        null: list[np.ndarray] = []
        for layer in range(cfg.n_layers):
            fold = scores.norm_gain(model, layer) if folded else None
            if folded and fold is None:
                break
            w_q, w_k = scores.weights(model, layer)
            found = Layer(w_q, w_k, fold)
            there = np.array([(layer, h) not in removed for h in range(cfg.n_heads)])
            for name, values in found.metrics(metrics).items():
                heads[name][layer] = np.where(there, values.cpu().numpy(), np.nan)
            rng = np.random.default_rng([seed, layer])
            pairs = found.repaired(rng).cpu().numpy()
            null.append(pairs[np.isfinite(pairs)])  # without Q or K of heads that were cut out
            whole["symmetry"][layer], whole["directionality"][layer] = found.whole()
            if offsets and not folded:
                for i, offset in enumerate(offsets):
                    turn = forms[layer].turn(offset, cfg.d_head).to(found.grams.qq.device)
                    curves[0][layer, :, i] = symmetry_at(found.grams, turn).cpu().numpy()
                    curves[1][layer, :, i] = symmetry_reversed(found.grams, turn).cpu().numpy()
        else:
            bases.append(Basis(heads, whole, np.concatenate(null)))
    return Weights(
        raw=bases[0],
        folded=bases[1] if len(bases) > 1 else None,
        offsets=offsets,
        by_offset=curves[0] if offsets else None,
        by_offset_reversed=curves[1] if offsets else None,
        gaussian=gaussian(cfg.d_model, cfg.d_head, seed),
    )


class Layer:
    """One layer's heads: never more of them in float64 at a time than CHUNK says."""

    def __init__(self, w_q: Tensor, w_k: Tensor, fold: tuple[Tensor, bool] | None = None) -> None:
        self.w_q, self.w_k, self.fold = w_q, w_k, fold
        self.group = len(w_q) // len(w_k)
        self.direction: list[Tensor] = []
        parts = []
        for heads in self._chunks():
            q, k = self._q(heads), self._k([h // self.group for h in heads])
            g = grams(q, k)
            self.direction.append(directionality(q, k, g))
            parts.append(g)
        self.grams = Grams(*(torch.cat([getattr(g, n) for g in parts]) for n in ("qq", "kk", "kq")))

    def _chunks(self) -> Iterator[list[int]]:
        size = max(1, CHUNK // (self.w_q.shape[1] * self.w_q.shape[2]))
        for start in range(0, len(self.w_q), size):
            yield list(range(start, min(start + size, len(self.w_q))))

    def _q(self, heads: list[int]) -> Tensor:
        return scores.effective(self.w_q[heads], self.fold)

    def _k(self, heads: list[int]) -> Tensor:
        return scores.effective(self.w_k[heads], self.fold)

    def metrics(self, names: tuple[str, ...] = METRICS) -> dict[str, Tensor]:
        """metric -> [head]."""
        made = {"symmetry": symmetry, "stable_rank": stable_rank, "positive_real": positive_real}
        made |= {"antisymmetric_rank": antisymmetric_rank}
        out = {name: made[name](self.grams) for name in names if name in made}
        if "directionality" in names:
            out["directionality"] = torch.cat(self.direction)
        return out

    def repaired(self, rng: np.random.Generator) -> Tensor:
        """[pair] symmetry of Q of every head with K of another KV head; empty where there is one.

        Whole rounds: in each, every query head takes the keys of the KV head `shift` further on.
        """
        n_kv = len(self.w_k)
        shifts = rng.permutation(np.arange(1, n_kv))[:SHIFTS]
        out = [torch.empty(0, dtype=torch.float64)]
        for heads in self._chunks() if len(shifts) else ():
            q = self._q(heads)
            for shift in shifts.tolist():
                other = [(h // self.group + shift) % n_kv for h in heads]
                kq = self._k(other).transpose(-1, -2) @ q
                kk = self.grams.kk[[h * self.group for h in other]]
                out.append(symmetry(Grams(self.grams.qq[heads], kk, kq)).cpu())
        return torch.cat(out)

    def whole(self) -> tuple[float, float]:
        """Symmetry and directionality of the sum of A over heads."""
        n_kv, d_model, d_head = self.w_k.shape
        if n_kv * d_head < d_model:  # the sum has a rank below d_model: Gram matrices again
            q = torch.cat([self._summed(g) for g in range(n_kv)], -1)
            k = torch.cat([self._k([g])[0] for g in range(n_kv)], -1)
            g = grams(q[None], k[None])
            return float(symmetry(g)), float(directionality(q[None], k[None], g))
        a = torch.zeros(d_model, d_model, dtype=torch.float64, device=self.grams.qq.device)
        for g in range(n_kv):
            a.addmm_(self._summed(g), self._k([g])[0].T)
        square = a.square()
        rows, columns = square.sum(1).sqrt(), square.sum(0).sqrt()
        both = torch.einsum("ij,ji->", a, a)
        return float(both / square.sum()), float(direction(rows, columns))

    def _summed(self, kv_head: int) -> Tensor:
        """[d_model, d_head] sum of W_Q over the query heads of a KV head."""
        own = range(kv_head * self.group, (kv_head + 1) * self.group)
        return torch.stack([self._q([h])[0] for h in own]).sum(0)


def gaussian(d_model: int, d_head: int, seed: int) -> dict[str, np.ndarray]:
    """metric -> [sample] of Gaussian W_Q and W_K of this shape, independent of each other."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, list[float]] = {}
    for _ in range(GAUSSIAN):
        w_q, w_k = torch.randn(2, 1, d_model, d_head, dtype=torch.float64, generator=generator)
        g = grams(w_q, w_k)
        for name, values in (
            ("symmetry", symmetry(g)),
            ("stable_rank", stable_rank(g)),
            ("positive_real", positive_real(g)),
            ("antisymmetric_rank", antisymmetric_rank(g)),
        ):
            out.setdefault(name, []).append(float(values))
    return {name: np.array(values) for name, values in out.items()}

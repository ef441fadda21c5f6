"""Linear maps that leave a head, or several, with less: rank truncation, and sharing.

Pure functions of second moments, in float64. A map acts on rows: x -> x T. All of them commute with
the gauge group, the changes of basis that no output can tell: q -> q G with k -> k G^-T, v -> v G
with W_O -> G^-1 W_O. G is any invertible matrix, but under rotary embedding, for queries and keys,
it must commute with the rotation: one complex number per frequency plane (`Plane` pairs), and any
invertible matrix among the dimensions that are not rotated. So a map is put together of `Parts`:
planes, each a complex number per head, and one block of ordinary dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

Matrix = Float64[Tensor, "d d"]
EPSILON = 1e-10
"""Directions of less than this share of the largest variance are taken to be empty."""


@dataclass(frozen=True)
class Parts:
    """Which dimensions of a head a change of basis may mix.

    planes: (i, j) pairs of dimensions that one complex number x_i + 1j x_j stands for.
    rest: dimensions that may be mixed freely.
    """

    planes: tuple[tuple[int, int], ...]
    rest: tuple[int, ...]

    @classmethod
    def free(cls, d_head: int) -> Parts:
        """Without rotation."""
        return cls((), tuple(range(d_head)))

    @classmethod
    def rotary(cls, d_head: int, rotated: int, adjacent: bool) -> Parts:
        """With the first `rotated` dimensions in planes: (0, 1), ... or (i, i + rotated / 2)."""
        half = rotated // 2
        planes = [(2 * i, 2 * i + 1) if adjacent else (i, i + half) for i in range(half)]
        return cls(tuple(planes), tuple(range(rotated, d_head)))

    def mean_over_rotations(self, moment: Tensor) -> Tensor:
        """[..., d, d] E[x^T x] of x turned by every angle, planes independently."""
        if not self.planes:
            return moment
        out = torch.zeros_like(moment)
        for i, j in self.planes:
            size = (moment[..., i, i] + moment[..., j, j]) / 2
            out[..., i, i] = out[..., j, j] = size
        rest = torch.tensor(self.rest, dtype=torch.long)
        out[..., rest[:, None], rest] = moment[..., rest[:, None], rest]
        return out


def roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric root of a positive semidefinite [..., d, d], and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    kept = values > EPSILON * values[..., -1:].clamp(min=0)
    root = torch.where(kept, values, 0).sqrt()
    inverse = torch.where(kept, root, 1).reciprocal() * kept
    return (
        (vectors * root[..., None, :]) @ vectors.mT,
        (vectors * inverse[..., None, :]) @ vectors.mT,
    )


def truncation(moment: Tensor, metric: Tensor, rank: int) -> Tensor:
    """[..., d, d] the map of `rank` that changes what is read of x the least.

    Args:
        moment: [..., d, d] E[x^T x].
        metric: [..., d, d] E of what x is multiplied with, squared: E[k^T k] for queries, W_O W_O^T
            for values, so that the error is E[(x - x T) metric (x - x T)^T].
        rank: from 0 to d.

    Source: the best approximation of a product under both moments is the truncated singular value
    decomposition between their roots (Eckart and Young 1936).
    """
    root, inverse = roots(moment)
    _, vectors = torch.linalg.eigh(root @ metric @ root)  # ascending
    kept = vectors[..., vectors.shape[-1] - rank :]
    return inverse @ kept @ kept.mT @ root


def shared(
    moment: Float64[Tensor, "head d head2 d2"],
    metric: Float64[Tensor, "head d d2"],
    groups: Sequence[Sequence[int]],
    parts: Parts,
    method: str,
) -> Float64[Tensor, "head d head2 d2"]:
    """The map after which the heads of a group hold one vector, each in a basis of its own.

    Args:
        moment: E[x_h^T x_g] of all pairs of heads.
        metric: per head, as in `truncation`; only least_squares looks at it.
        groups: a partition of the heads.
        parts: what a change of basis may mix.
        method: least_squares, the one vector that serves all heads of the group best; or average,
            the mean of the heads after each is brought into the basis of the group's first by least
            squares, and brought back likewise.
    """
    solve = {"least_squares": _best, "average": _average}[method]
    out = torch.zeros_like(moment)
    for group in groups:
        g = torch.tensor(list(group))
        own, weight = moment[g][:, :, g], metric[g]
        if parts.rest:
            r = torch.tensor(parts.rest)
            block = own[:, r][:, :, :, r]
            found = solve(block.to(torch.complex128), weight[:, r][:, :, r].to(torch.complex128))
            _put(out, g, r, found.real)
        for i, j in parts.planes:
            a, b = (own[:, [x]][:, :, :, [x]] for x in (i, j))
            ab, ba = own[:, [i]][:, :, :, [j]], own[:, [j]][:, :, :, [i]]
            # E[conj(c) c'] of c = x_i + 1j x_j
            block = torch.complex(a + b, ab - ba)
            size = (weight[:, i, i] + weight[:, j, j])[:, None, None].to(torch.complex128)
            found = solve(block, size)
            _put(out, g, torch.tensor([i]), found.real)
            _put(out, g, torch.tensor([j]), found.real)
            # (x_i + 1j x_j)(u + 1j v): x_i gives x_j' its v, x_j gives x_i' minus its v.
            _put(out, g, torch.tensor([i]), found.imag, torch.tensor([j]))
            _put(out, g, torch.tensor([j]), -found.imag, torch.tensor([i]))
    return out


def _put(
    out: Tensor, g: Tensor, rows: Tensor, value: Tensor, columns: Tensor | None = None
) -> None:
    """Write [group, row, group, column] into a map's cells."""
    c = rows if columns is None else columns
    out[g[:, None, None, None], rows[:, None, None], g[:, None], c] = value


def _best(moment: Tensor, metric: Tensor) -> Tensor:
    """Rank d of the group's g d dimensions, in the metric: [g, d, g, d] complex."""
    n, d = metric.shape[:2]
    weight = torch.zeros(n, d, n, d, dtype=moment.dtype)
    back = weight.clone()
    for h in range(n):
        weight[h, :, h], back[h, :, h] = roots(metric[h])
    flat, unflat = weight.reshape(n * d, -1), back.reshape(n * d, -1)
    _, vectors = torch.linalg.eigh(flat.mH @ moment.reshape(n * d, -1) @ flat)
    kept = vectors[:, n * d - d :]
    return (flat @ kept @ kept.mH @ unflat).reshape(n, d, n, d)


def _average(moment: Tensor, _metric: Tensor) -> Tensor:
    """Aligned to the first head by least squares, averaged, and brought back: [g, d, g, d]."""
    n, d = moment.shape[:2]
    aligned = torch.stack([_fit(moment[h, :, h], moment[h, :, 0]) for h in range(n)]) / n
    flat = aligned.reshape(n * d, d)  # x (as one row of g d) -> the average
    full = moment.reshape(n * d, n * d)
    own = flat.mH @ full @ flat
    back = _fit(own, flat.mH @ full)  # the average -> every head
    return (flat @ back).reshape(n, d, n, d)


def _fit(square: Tensor, cross: Tensor) -> Tensor:
    """Least squares from E[x^H x] and E[x^H y]: y ~ x B."""
    return torch.linalg.pinv(square, rtol=EPSILON, hermitian=True) @ cross


def consecutive(n_heads: int, n_groups: int) -> list[list[int]]:
    """Heads in their order, in groups of equal size."""
    size = n_heads // n_groups
    return [list(range(start, start + size)) for start in range(0, n_heads, size)]

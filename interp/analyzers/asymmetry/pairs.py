"""Does i ask j as j asks i? Pearson correlation of S_ij with S_ji over pairs i > j.

Pure functions of score matrices [..., n, n] (query first, no causal mask) of the n included
positions of one document, in float64. A correlation is kept as six sums (`moments`), so that the
windows of a document add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

N_MOMENTS = 6
BLOCK = 64
"""Positions of `sums_of_product` taken together: about d_head makes the least work."""
FEWEST = 3
"""Pairs of a document below which there is no correlation (two always give 1 or -1)."""


@dataclass
class Sums:
    """All that both correlations of a score matrix need, read off it in a few passes.

    row, column: [..., n] sums over the whole row and column.
    row_low, column_low: [..., n] over the part below the diagonal.
    diagonal: [..., n].
    square, square_low, cross: [...] sums of S_ij^2 (all, below) and of S_ij S_ji (all).
    """

    row: Tensor
    column: Tensor
    row_low: Tensor
    column_low: Tensor
    diagonal: Tensor
    square: Tensor
    square_low: Tensor
    cross: Tensor


def sums(s: Tensor) -> Sums:
    """Of score matrices [..., n, n] in float64."""
    low = s.tril(-1)
    return Sums(
        row=s.sum(-1),
        column=s.sum(-2),
        row_low=low.sum(-1),
        column_low=low.sum(-2),
        diagonal=s.diagonal(dim1=-2, dim2=-1),
        square=_squares(s),
        square_low=_squares(low),
        cross=(s * s.transpose(-1, -2)).sum((-1, -2)),
    )


def sums_of_product(q: Tensor, k: Tensor) -> Sums:
    """The same of S = q k^T, without S: q and k are [..., n, d] in float64.

    The part below the diagonal is that within blocks of positions, and that between a block's
    queries and the keys of the blocks before it, of which sums over positions are enough.
    """
    n = q.shape[-2]
    # [..., block, position, d], zeros at the end
    q_of, k_of = (
        functional.pad(x, (0, 0, 0, -n % BLOCK)).unflatten(-2, (-1, BLOCK)) for x in (q, k)
    )
    within = (q_of @ k_of.transpose(-1, -2)).tril_(-1)
    q_sum, k_sum = q_of.sum(-2), k_of.sum(-2)
    all_q, all_k = q_sum.sum(-2), k_sum.sum(-2)
    before, after = k_sum.cumsum(-2) - k_sum, all_q[..., None, :] - q_sum.cumsum(-2)
    row_low = (q_of @ before[..., None])[..., 0] + within.sum(-1)
    column_low = (k_of @ after[..., None])[..., 0] + within.sum(-2)
    # The sum of squares of q k^T over two sets of positions is tr(q^T q k^T k).
    grams_q, grams_k = (x.transpose(-1, -2) @ x for x in (q_of, k_of))
    squares = grams_q.flatten(-2) @ grams_k.flatten(-2).transpose(-1, -2)  # [..., block, block]
    products = k.transpose(-1, -2) @ q
    return Sums(
        row=(q @ all_k[..., None])[..., 0],
        column=(k @ all_q[..., None])[..., 0],
        row_low=row_low.flatten(-2)[..., :n],
        column_low=column_low.flatten(-2)[..., :n],
        diagonal=_dot(q, k),
        square=squares.sum((-1, -2)),
        square_low=_squares(within, 3) + squares.tril(-1).sum((-1, -2)),
        cross=(products * products.transpose(-1, -2)).sum((-1, -2)),
    )


def _squares(x: Tensor, axes: int = 2) -> Tensor:
    """[...] sums of squares over the last axes (a product of a long row with itself is slower)."""
    return torch.linalg.vector_norm(x.flatten(-axes), dim=-1).square()


def joined(parts: Sequence[Sums]) -> Sums:
    """Of several blocks of matrices, one after another."""
    return Sums(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Sums)))


def moments(t: Sums, centred: bool = False) -> Tensor:
    """[..., 6]: pairs, and sums of x, y, x^2, y^2, xy over i > j, with x = S_ij and y = S_ji.

    With centred, of S_ij - a_i - b_j instead: the mean of each row and of each column taken away
    (see `centred`), worked out from the same sums.
    """
    n = t.row.shape[-1]
    row_up, column_up = t.row - t.row_low - t.diagonal, t.column - t.column_low - t.diagonal
    own = t.diagonal.square().sum(-1)
    x, y = t.row_low.sum(-1), row_up.sum(-1)
    xx, yy, xy = t.square_low, t.square - t.square_low - own, (t.cross - own) / 2
    if centred:
        b = t.column / n
        a = t.row / n - b.mean(-1, keepdim=True)
        before = torch.arange(n, dtype=a.dtype, device=a.device)  # of a position: how many j < i
        after = n - 1 - before
        x = x - _dot(a, before) - _dot(b, after)
        y = y - _dot(a, after) - _dot(b, before)
        xx = xx - 2 * _dot(a, t.row_low) - 2 * _dot(b, t.column_low)
        xx = xx + _dot(a * a, before) + _dot(b * b, after) + 2 * _below(a, b)
        yy = yy - 2 * _dot(a, row_up) - 2 * _dot(b, column_up)
        yy = yy + _dot(a * a, after) + _dot(b * b, before) + 2 * _below(b, a)
        xy = xy - _dot(a, t.column_low + column_up) - _dot(b, t.row_low + row_up)
        xy = xy + _below(a, a) + _below(b, b) + (n - 1) * _dot(a, b)
    count = torch.full_like(x, n * (n - 1) / 2)
    return torch.stack([count, x, y, xx, yy, xy], -1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("...i,...i->...", a, b.expand_as(a))


def _below(u: Tensor, v: Tensor) -> Tensor:
    """Sum of u_i v_j over i > j."""
    return _dot(u, v.cumsum(-1) - v)


def correlation(m: Tensor) -> Tensor:
    """Pearson r [...] from moments [..., 6]; nan with fewer than 3 pairs or without variation."""
    n, x, y, xx, yy, xy = m.unbind(-1)
    var_x, var_y = n * xx - x * x, n * yy - y * y
    flat = (var_x <= 1e-12 * n * xx) | (var_y <= 1e-12 * n * yy) | (n < FEWEST)
    r = (n * xy - x * y) / (var_x.clamp(min=0) * var_y.clamp(min=0)).sqrt()
    return torch.where(flat, torch.full_like(r, torch.nan), r.clamp(-1, 1))


def centred(s: Tensor) -> Tensor:
    """[..., n, n] less the mean of each row and of each column, the diagonal counted in both.

    What is left does not change when a constant is added to a row (which softmax ignores, so that
    the model does not determine it) or to a column (how much a token is attended to by all).
    """
    rows, columns = s.mean(-1, keepdim=True), s.mean(-2, keepdim=True)
    return s - rows - columns + rows.mean(-2, keepdim=True)


def without_offsets(s: Tensor, at: Tensor) -> Tensor:
    """[..., n, n] less the mean of each offset i - j, earlier and later apart.

    Args:
        s: score matrices.
        at: [n] positions in the document.
    """
    size = int(at[-1] - at[0]) + 1
    place = at[:, None] - at[None, :] + size - 1
    count = torch.bincount(place.flatten(), minlength=2 * size - 1).to(s)
    if size == len(at):
        total = _by_offset(s)
    else:  # special tokens in between
        total = torch.zeros(*s.shape[:-2], 2 * size - 1, dtype=s.dtype, device=s.device)
        total.index_add_(-1, place.flatten(), s.flatten(-2))
    return s - (total / count.clamp(min=1))[..., place]


def _by_offset(s: Tensor) -> Tensor:
    """[..., 2 n - 1] sums of [..., n, n] over cells of equal i - j, from 1 - n up."""
    n = s.shape[-1]

    def folded(x: Tensor) -> Tensor:
        # Cell i, j lies at i n + j = i (n + 1) + (j - i): laid out in rows of n + 1, j - i of the
        # upper part is the column, and so is j - i + n + 1 of the lower part.
        flat = x.flatten(-2)
        rows = flat[..., :-1].unflatten(-1, (n - 1, n + 1)).sum(-2)
        rows[..., 0] += flat[..., -1]
        return rows

    low = folded(s.tril(-1))
    up = folded(s) - low
    return torch.cat([up[..., :n].flip(-1), low[..., 2:].flip(-1)], -1)

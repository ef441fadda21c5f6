"""Does i ask j as j asks i? Pearson correlation of S_ij with S_ji over pairs i > j.

Pure functions of score matrices [..., pos, pos] (query first, no causal mask) and of which
positions are included [..., pos]; float64 sums, so that rows and batches add up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

N_MOMENTS = 6
FEWEST = 3
"""Pairs of a document below which there is no correlation (two always give 1 or -1)."""


def moments(scores: Tensor, included: Tensor) -> Tensor:
    """[..., 6] float64: pairs, and sums of x, y, x^2, y^2, xy, x = S_ij and y = S_ji over i > j.

    Args:
        scores: [..., head, pos, pos]; anything finite outside the included positions.
        included: [..., pos] bool.
    """
    wide = scores.double().flatten(-2)
    turned = scores.double().transpose(-1, -2).flatten(-2)
    pairs = (included[..., :, None] & included[..., None, :]).tril(-1)
    low = pairs.double()
    both = torch.stack([low, low.transpose(-1, -2)], -1).flatten(-3, -2)  # [..., pos * pos, 2]
    first = wide @ both
    second = wide.square() @ both
    cross = ((wide * turned) @ both[..., :1])[..., 0]
    count = low.sum((-1, -2))[..., None].expand(cross.shape)
    return torch.stack(
        [count, first[..., 0], first[..., 1], second[..., 0], second[..., 1], cross], -1
    )


def correlation(m: Tensor) -> Tensor:
    """Pearson r [...] from moments [..., 6]; nan with fewer than 3 pairs or without variation."""
    n, x, y, xx, yy, xy = m.unbind(-1)
    var_x, var_y = n * xx - x * x, n * yy - y * y
    flat = (var_x <= 1e-12 * n * xx) | (var_y <= 1e-12 * n * yy) | (n < FEWEST)
    r = (n * xy - x * y) / (var_x.clamp(min=0) * var_y.clamp(min=0)).sqrt()
    return torch.where(flat, torch.full_like(r, torch.nan), r.clamp(-1, 1))


def centred(scores: Tensor, included: Tensor) -> Tensor:
    """Row and column means removed, over all included-by-included cells, the diagonal among them.

    What is left does not change when a constant is added to a row (which softmax ignores, so that
    the model does not determine it) or to a column (how much a token is attended to by all).
    """
    inside = (included[..., :, None] & included[..., None, :])[..., None, :, :]
    n = included.sum(-1).clamp(min=1)[..., None, None, None].double()
    s = torch.where(inside, scores.double(), 0.0)
    rows, columns = s.sum(-1, keepdim=True) / n, s.sum(-2, keepdim=True) / n
    return torch.where(inside, s - rows - columns + rows.sum(-2, keepdim=True) / n, 0.0)


def without_offsets(scores: Tensor, included: Tensor) -> Tensor:
    """The mean over included cells of each offset i - j removed as well, before and after apart."""
    inside = (included[..., :, None] & included[..., None, :])[..., None, :, :]
    s, size = torch.where(inside, scores.double(), 0.0), scores.shape[-1]
    means = _by_offset(s) / _by_offset(inside.double()).clamp(min=1)
    place = torch.arange(size, device=s.device)
    place = place[:, None] - place[None, :] + size - 1
    return torch.where(inside, s - means[..., place], 0.0)


def _by_offset(cells: Tensor) -> Tensor:
    """[..., 2 pos - 1] sums of [..., pos, pos] over cells of equal i - j, from 1 - pos up."""
    size = cells.shape[-1]
    # Columns turned round and padded to 2 pos, then laid out in rows of 2 pos - 1: each row slides
    # one further, and what had equal i - j stands in one column.
    flat = F.pad(cells.flip(-1), (0, size)).flatten(-2)[..., : size * (2 * size - 1)]
    return flat.unflatten(-1, (size, 2 * size - 1)).sum(-2)

"""Do W_Q, W_K and W_V of a head read the same directions? Projection kernels, with their nulls.

The projection kernel of two planes with orthonormal bases U and V is |U^T V|_F^2, the sum of the
squared cosines of their principal angles: from 0 (orthogonal) to d_head (the same). Two planes that
are random overlap too: d_head^2 / d_model on average. Weighted, a direction counts by how much the
attention's input varies along it: the planes are those of C^(1/2) W, with C the input's covariance,
and so are the random ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from interp import scores, stats
from interp.analyzers.qkv.fit import Layer
from interp.analyzers.qkv.maps import roots
from interp.model import Model

PAIRS = (("q", "k"), ("q", "v"), ("k", "v"))
DRAWS = 200
"""Pairs of random planes behind each null."""


@dataclass
class Overlap:
    """Of one layer, for one pair of matrices, weighted or not.

    kernel: [head] of each query head's own pair.
    others: its mean over pairs of heads that do not share a KV head; nan where there are none.
    null: [draw] of random planes.
    percentile: [head] of the kernel among them.
    """

    layer: int
    pair: tuple[str, str]
    weighted: bool
    kernel: np.ndarray
    others: float
    null: np.ndarray
    percentile: np.ndarray


def measure(model: Model, layers: list[Layer], seed: int) -> list[Overlap]:
    """Of all layers."""
    out = []
    for i, one in enumerate(layers):
        root = roots(one.covariance("attn_in"))[0]
        for weighted in (False, True):
            out += _of_layer(model, i, root if weighted else None, seed)
    return out


def _of_layer(model: Model, layer: int, root: Tensor | None, seed: int) -> list[Overlap]:
    w_q, w_k = scores.weights(model, layer)
    found = {"q": w_q, "k": w_k, "v": scores.value_weights(model, layer)}
    group = model.cfg.n_heads // model.cfg.n_kv_heads
    planes = {}
    for name, weight in found.items():
        weight = scores.wide(weight).cpu()
        planes[name] = basis(weight if root is None else root @ weight)
        if name != "q":
            planes[name] = planes[name].repeat_interleave(group, 0)
    rng = torch.Generator().manual_seed(seed + layer)
    null = random_kernels(model.cfg.d_model, model.cfg.d_head, root, rng)
    kv = np.arange(model.cfg.n_heads) // group
    apart = kv[:, None] != kv
    out = []
    for pair in PAIRS:
        every = kernels(planes[pair[0]], planes[pair[1]])
        own = np.diagonal(every).copy()
        others = float(every[apart].mean()) if apart.any() else float("nan")
        percentile = stats.percentile_of(own, null)
        out.append(Overlap(layer, pair, root is not None, own, others, null, percentile))
    return out


def basis(weight: Float64[Tensor, "head d_model d_head"]) -> Float64[Tensor, "head d_model d_head"]:
    """Orthonormal columns that span the same planes."""
    return torch.linalg.qr(weight).Q


def kernels(
    first: Float64[Tensor, "head d_model d_head"], second: Float64[Tensor, "head d_model d_head"]
) -> np.ndarray:
    """[head, head] projection kernels of all pairs of planes."""
    n, _, d = first.shape
    columns = [x.permute(1, 0, 2).flatten(1) for x in (first, second)]
    product = (columns[0].T @ columns[1]).view(n, d, n, -1)
    return product.square().sum((1, 3)).numpy()


def random_kernels(
    d_model: int, d_head: int, root: Tensor | None, rng: torch.Generator
) -> np.ndarray:
    """[draw] of random planes: uniformly distributed, or C^(1/2) times such."""
    out = []
    for _ in range(DRAWS):
        drawn = torch.randn(2, d_model, d_head, dtype=torch.float64, generator=rng)
        planes = basis(drawn if root is None else root @ drawn)
        out.append(float((planes[0].T @ planes[1]).square().sum()))
    return np.array(out)

"""The interventions: what each does to q, k, v (before rotation), z or the attention's output.

Every one changes included positions only, so that the first position, on which many heads rest,
stays what it was. All of them commute with the gauge group (see `maps`): they say something of the
function, not of the basis that its weights happen to be in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from interp import scores
from interp.analyzers.qkv import maps
from interp.analyzers.qkv.fit import HEADED, Layer
from interp.model import Model
from interp.scores import Form
from interp.text import Text, TokenBatch

NOISE = (0.5, 1.0)
"""Standard deviations of the noise, in those of what it is added to."""
RANKS = (0.75, 0.5, 0.25, 0.125)
METHODS = ("least_squares", "average", "random_groups")
RANDOM = "random_groups"
"""Least squares with the heads dealt to groups of the same sizes at random: the control."""

Change = Callable[[Tensor, TokenBatch], Tensor]
"""(the site's tensor, the batch) -> its replacement; what it gives elsewhere is not used."""


@dataclass(frozen=True)
class Intervention:
    """One thing to do to a layer, or to all of them.

    kind: mean, noise, rank or share.
    target: q, k, v, o (the attention's output), qk and ov (the products), or kv (both shared).
    level: noise: its relative size; rank: share of d_head that is left; share: groups of heads.
    method: one of METHODS where heads are shared.
    """

    kind: str
    target: str
    level: float = float("nan")
    method: str = ""


def plan(model: Model, bilinear: bool) -> list[Intervention]:
    """All interventions. Without scores that are q . k, only what needs no gauge of them."""
    out = [Intervention("mean", target) for target in ("q", "k", "v", "o")]
    out += [Intervention("noise", target, size) for size in NOISE for target in HEADED]
    products = ("qk", "ov") if bilinear else ("ov",)
    out += [Intervention("rank", target, share) for share in RANKS for target in products]
    for target in ("k", "v", "kv", "q") if bilinear else ("v",):
        n = model.cfg.n_heads if target == "q" else model.cfg.n_kv_heads
        for groups in (g for g in range(n - 1, 0, -1) if n % g == 0):
            methods = METHODS if groups > 1 else METHODS[:-1]
            out += [Intervention("share", target, groups, method) for method in methods]
    return out


class Maker:
    """Makes the interventions of a model, from what was fitted on its text."""

    def __init__(
        self, model: Model, text: Text, forms: list[Form], layers: list[Layer], seed: int
    ) -> None:
        self.model, self.text, self.forms, self.layers, self.seed = model, text, forms, layers, seed
        self.group = model.cfg.n_heads // model.cfg.n_kv_heads

    def changes(self, what: Intervention, layer: int) -> Iterator[tuple[str, Change]]:
        """(site, change) of one layer."""
        if what.kind == "mean":
            site = {"o": "attn_out"}.get(what.target, what.target)
            mean = self.layers[layer].mean(site)
            yield site, lambda x, _: mean.to(x).view(x.shape[2:]).expand_as(x)
        elif what.kind == "noise":
            yield what.target, self._noise(what.target, what.level, layer)
        elif what.kind == "rank":
            site, linear = self._truncated(what.target, what.level, layer)
            yield site, lambda x, _: torch.einsum("bphd,hde->bphe", x, linear.to(x))
        else:
            for site in what.target:
                yield site, self._shared(site, int(what.level), what.method, layer)

    def _noise(self, site: str, size: float, layer: int) -> Change:
        """Gaussian noise with the values' covariance: a random mixture of a sample of them."""
        sample = self.layers[layer].sample(site)
        mixing = size * sample / (len(sample) - 1) ** 0.5

        def change(x: Tensor, batch: TokenBatch) -> Tensor:
            drawn = torch.zeros(*x.shape[:2], len(mixing))
            which = HEADED.index(site)
            for i, (row, window) in enumerate(
                zip(batch.rows.tolist(), batch.window.tolist(), strict=True)
            ):
                document = self.text.documents[row].index
                rng = np.random.default_rng([self.seed, which, layer, document, window])
                length = int(batch.mask[i].sum())
                one = rng.standard_normal((length, len(mixing)), dtype=np.float32)
                drawn[i, :length] = torch.from_numpy(one)
            return x + (drawn @ mixing).to(x).view(x.shape)

        return change

    def _heads(self, site: str, layer: int) -> Float64[Tensor, "head d head2 d2"]:
        """E[x^T x] of all pairs of heads."""
        d = self.model.cfg.d_head
        moment = self.layers[layer].moment(site)
        n = len(moment) // d
        return moment.view(n, d, n, d)

    def _own(self, site: str, layer: int) -> Float64[Tensor, "head d d2"]:
        """E[x^T x] of each head; for every query head, that of its KV head."""
        found = self._heads(site, layer).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        return found if site == "q" else found.repeat_interleave(self.group, 0)

    def _outputs(self, layer: int) -> Float64[Tensor, "head d d2"]:
        """W_O W_O^T of each query head."""
        each = scores.output_weights(self.model, layer)
        return each @ each.mT

    def parts(self, layer: int) -> maps.Parts:
        """What a change of basis of queries and keys may mix."""
        d, form = self.model.cfg.d_head, self.forms[layer]
        if not form.rotary:
            return maps.Parts.free(d)
        assert form.angles is not None
        return maps.Parts.rotary(d, 2 * len(form.angles), form.adjacent)

    def _truncated(
        self, target: str, share: float, layer: int
    ) -> tuple[str, Float64[Tensor, "head d d2"]]:
        """Of W_V W_O: a map of z. Of W_Q W_K^T: a map of q, so that the form has this rank at every
        offset; keys count as they are at offset 0 without rotation, else averaged over rotations.
        """
        rank = max(1, round(share * self.model.cfg.d_head))
        if target == "ov":
            return "z", maps.truncation(self._own("v", layer), self._outputs(layer), rank)
        keys = self.parts(layer).mean_over_rotations(self._own("k", layer))
        return "q", maps.truncation(self._own("q", layer), keys, rank)

    def _shared(self, site: str, n_groups: int, method: str, layer: int) -> Change:
        moment = self._heads(site, layer)
        parts = maps.Parts.free(self.model.cfg.d_head) if site == "v" else self.parts(layer)
        readers = {"q": "k", "k": "q"}
        metric = self._outputs(layer) if site == "v" else self._own(readers[site], layer)
        if site != "q":  # all query heads that read a KV head
            metric = metric.unflatten(0, (-1, self.group)).sum(1)
        order = list(range(len(moment)))
        if method == RANDOM:
            rng = np.random.default_rng([self.seed, n_groups, layer])
            order = rng.permutation(order).tolist()
        groups = [[order[i] for i in g] for g in maps.consecutive(len(order), n_groups)]
        how = "average" if method == "average" else "least_squares"
        linear = maps.shared(moment, metric, groups, parts, how).flatten(0, 1).flatten(1)
        return lambda x, _: (x.flatten(2) @ linear.to(x)).view(x.shape)

"""What the interventions are made of: means, second moments and a sample, from one pass over text.

All of included positions, before rotation, biases included. The documents are others than those
that the losses are of, wherever the source has more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from interp import hooks, journal, scores
from interp.model import Model
from interp.progress import track
from interp.reducers import Reservoir
from interp.text import Text

HEADED = ("q", "k", "v")
"""Sites [batch, pos, head, d_head]; those of k and v have the KV heads."""
SAMPLE = 512
"""Positions whose queries, keys and values noise is mixed of."""


@dataclass
class Layer:
    """Of one layer.

    sums: site -> sum of the values.
    seconds: site -> sum of x^T x over all dimensions of the site.
    samples: site -> a random sample of the values.
    """

    count: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    seconds: dict[str, Tensor] = field(default_factory=dict)
    samples: dict[str, Reservoir] = field(default_factory=dict)

    def add(self, site: str, values: Float[Tensor, "item ..."]) -> None:
        """Take in values of a site."""
        exact = scores.wide(values.flatten(1))
        self.sums[site] = self.sums.get(site, 0) + exact.sum(0).cpu()
        if site != "attn_out":
            self.seconds[site] = self.seconds.get(site, 0) + (exact.T @ exact).cpu()

    def mean(self, site: str) -> Float64[Tensor, " feature"]:
        """[head * d_head], or [d_model] of attn_out."""
        return self.sums[site] / self.count

    def moment(self, site: str) -> Float64[Tensor, "feature feature2"]:
        """E[x^T x], not centred: what a score or an output is made of includes the mean."""
        return self.seconds[site] / self.count

    def covariance(self, site: str) -> Float64[Tensor, "feature feature2"]:
        """The same about the mean."""
        mean = self.mean(site)
        return self.moment(site) - mean[:, None] * mean

    def sample(self, site: str) -> Float[Tensor, "item feature"]:
        """[item, head * d_head] less their mean; the same items for every site."""
        values = self.samples[site].compute().values
        return values - values.mean(0)


def fit(
    model: Model,
    text: Text,
    batch_size: int | Literal["auto"],
    *,
    seed: int,
    progress: bool = False,
) -> list[Layer]:
    """One forward pass over the text, up to the unembedding.

    Memory: (head * d_head)^2 float64 per layer for each of q, k, v, and d_model^2 for the input.
    """
    cfg = model.cfg
    widths = {
        site: cfg.d_head * (cfg.n_heads if site == "q" else cfg.n_kv_heads) for site in HEADED
    }
    layers = [
        Layer(samples={s: Reservoir(SAMPLE, (widths[s],), seed=seed) for s in HEADED})
        for _ in range(cfg.n_layers)
    ]
    bar = track(len(text), "means and moments", progress)
    stage = journal.stage("means and moments")
    for batch in stage.fold(stage.batches(model, text, batch_size), {"layers": layers}):
        at = batch.included
        ids = batch.rows[:, None].expand_as(at)
        places = torch.arange(at.shape[1], device=at.device) + batch.window[:, None] * text.context

        def see(layer: int, site: str, at: Tensor = at, where: Any = (ids, places)) -> hooks.Hook:
            def hook(tensor: Tensor) -> None:
                layers[layer].add(site, tensor[at])
                if site in HEADED:
                    kept = layers[layer].samples[site]
                    kept.update(tensor.flatten(2).float(), where[0], where[1], at)

            return hook

        sites = (*HEADED, "attn_in", "attn_out")
        watch = [(site, i, see(i, site)) for i in range(cfg.n_layers) for site in sites]
        with hooks.attached(model, watch):
            scores.run(model, batch)
        for layer in layers:
            layer.count += int(at.sum())
        bar.update(len(set(batch.rows.tolist())))
    bar.close()
    return layers

"""What the model would say of a stream, and what of that is linear in the stream.

`Lens.logits` applies the final norm and the unembedding, biases included (the logit lens).
`Lens.frozen` holds the one number fixed that makes the final norm no linear map: what it divides
by. `values.Vocabulary` folds the rest of the norm into the unembedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from interp import scores
from interp.analyzers.ffn_keys.values import Vocabulary
from interp.errors import InterpError
from interp.model import Model


@dataclass(frozen=True)
class Frozen:
    """The final norm at one stream, its scale held fixed: x -> gain * (centred) x / scale + shift.

    scale: what the (centred) stream is divided by there.
    shift: [d_model] what the norm adds whatever the stream is (LayerNorm's bias).
    """

    scale: float
    shift: Float64[Tensor, " d_model"]


class Lens:
    """The end of a model: final norm and unembedding."""

    def __init__(self, model: Model, vocabulary: Vocabulary | None = None) -> None:
        self.model = model
        self.vocabulary = vocabulary or Vocabulary(model)

    def logits(self, stream: Float[Tensor, "item d_model"]) -> Float[Tensor, "item vocab"]:
        """What the model would say if this stream were its last."""
        bridge = self.model.bridge
        normed = bridge.ln_final(stream[None].to(self.model.dtype))
        return bridge.unembed(normed)[0, :, : self.vocabulary.size]

    def own(self, vectors: Float[Tensor, "item d_model"]) -> Float[Tensor, "item vocab"]:
        """What vectors add to the logits, but for the norm's scale and all biases."""
        vocabulary = self.vocabulary
        return vocabulary.directions(vectors, vocabulary.bases[-1]) @ vocabulary.weight.T

    def folded(self, rows: Float64[Tensor, "row d_model"]) -> Float64[Tensor, "row d_model"]:
        """Rows of the unembedding with the norm's gain (and centring) folded in."""
        return scores.effective(rows.T, self._fold()).T

    def row(self, token: int) -> tuple[Float64[Tensor, " d_model"], float]:
        """A token's raw row of the unembedding, and its bias there."""
        bias = getattr(self.model.bridge.unembed.original_component, "bias", None)
        row = scores.wide(self.vocabulary.weight[token])
        return row, 0.0 if bias is None else float(bias[token])

    def mean_row(self) -> Float64[Tensor, " d_model"]:
        """The mean of all tokens' raw rows."""
        weight = self.vocabulary.weight
        if weight.device.type == "mps":  # which has no float64
            weight = weight.cpu()
        return weight.mean(0, dtype=torch.float64)

    def frozen(self, stream: Float[Tensor, " d_model"]) -> Frozen:
        """The final norm's scale and shift at a stream, measured on the norm itself.

        Raises:
            InterpError: there is no such norm, or it is not gain * (centred) x / scale + shift.
        """
        gain, centres = self._fold()
        norm: Any = self.model.bridge.ln_final
        plus, minus = (scores.wide(norm(sign * stream[None, None])[0, 0]) for sign in (1, -1))
        shift, turned = (plus + minus) / 2, (plus - minus) / 2
        x = scores.wide(stream)
        x = (x - x.mean() if centres else x) * gain.to(x.device)
        scale = float(x @ x / (x @ turned))
        gap = float((x / scale - turned).norm() / turned.norm())
        if not gap <= scores.tolerance(self.model):
            raise InterpError(
                f"The final norm of {self.model.name} is not a gain divided by one scale per "
                f"position (off by {gap:.1e}, relative): logits cannot be taken apart."
            )
        return Frozen(scale, shift)

    def _fold(self) -> tuple[Tensor, bool]:
        if self.vocabulary.fold is None:
            raise InterpError(
                f"{self.model.name} ({self.model.cfg.family}) does not end in a LayerNorm or "
                "RMSNorm: its logits cannot be taken apart."
            )
        return self.vocabulary.fold

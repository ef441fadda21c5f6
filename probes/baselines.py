"""What an SAE is compared with: other ways to write an activation as a sum of a few directions.

Each is a function of a batch of positions. All get the mean for nothing, as an SAE has its bias:
x_hat = mean + the sum of its components. `pca` takes the same first directions everywhere,
`pca_topk` the largest of all d_model for each position; `neurons` is the MLP's own basis, each
neuron's deviation from its mean times its value vector, the largest contributions first, which with
all neurons gives x itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from interp.analyzers.ffn_keys.coefficients import Memory
from interp.model import Model
from interp.scores import wide


@dataclass(frozen=True)
class Calibration:
    """What is measured once, on the first positions of the training text.

    mean: [d_model] of the activations.
    scale: sqrt(d_model) / mean norm.
    directions: [direction, d_model] eigenvectors of the covariance, the largest variance first.
    variances: [direction] variance along each.
    neurons: [d_mlp] mean activation of each neuron; None for a model without them.
    tokens: positions behind it.
    """

    mean: Float64[Tensor, " d_model"]
    scale: float
    directions: Float64[Tensor, "direction d_model"]
    variances: Float64[Tensor, " direction"]
    neurons: Float64[Tensor, " d_mlp"] | None
    tokens: int

    @property
    def covariance(self) -> Float64[Tensor, "d_model d_model"]:
        """Of the activations about their mean, in squared residual units."""
        return (self.directions.T * self.variances) @ self.directions


class Moments:
    """Sums over activations, in as many batches as one likes, for a `Calibration`."""

    def __init__(self) -> None:
        self.tokens, self.length = 0, 0.0
        self.origin: Tensor | None = None  # near the mean, so that squares do not cancel
        self.total: Any = 0.0
        self.squares: Any = 0.0
        self.neurons: Any = None

    def see(
        self, x: Float[Tensor, "token d_model"], neurons: Float[Tensor, "token d_mlp"] | None
    ) -> None:
        """Take the activations at some positions in, and the neurons' there."""
        exact = wide(x).cpu()
        self.length += float(exact.norm(dim=1).sum())
        if self.origin is None:
            self.origin = exact.mean(0)
        exact = exact - self.origin
        self.tokens += len(exact)
        self.total = self.total + exact.sum(0)
        self.squares = self.squares + exact.T @ exact
        if neurons is not None:
            own = wide(neurons).cpu().sum(0)
            self.neurons = own if self.neurons is None else self.neurons + own

    def compute(self) -> Calibration:
        """The numbers; something must have been seen."""
        assert self.origin is not None
        n = self.tokens
        shift = self.total / n
        variances, vectors = torch.linalg.eigh(self.squares / n - torch.outer(shift, shift))
        return Calibration(
            mean=self.origin + shift,
            scale=len(shift) ** 0.5 * n / self.length if self.length else 1.0,
            directions=vectors.T.flip(0).contiguous(),
            variances=variances.flip(0).clamp(min=0),
            neurons=None if self.neurons is None else self.neurons / n,
            tokens=n,
        )


class Dictionary(Protocol):
    """Reconstructs positions, and says of how many components each."""

    def __call__(
        self, x: Float[Tensor, "token d_model"], neurons: Float[Tensor, "token d_mlp"] | None
    ) -> tuple[Float[Tensor, "token d_model"], Float[Tensor, " token"]]:
        """x and the neurons there -> x_hat and the number of active components."""
        ...


class Sae:
    """An SAE as it is: SAELens' encode and decode."""

    def __init__(self, sae: Any) -> None:
        self.sae = sae

    def __call__(self, x: Tensor, neurons: Tensor | None) -> tuple[Tensor, Tensor]:
        """See Dictionary."""
        acts = self.sae.encode(x)
        return self.sae.decode(acts).to(x), (acts > 0).sum(-1).to(x)


class Pca:
    """The first k principal directions; with `each`, of all of them each position's largest k."""

    def __init__(self, calibration: Calibration, k: int, each: bool = False) -> None:
        directions = calibration.directions if each else calibration.directions[:k]
        self.mean, self.directions = calibration.mean, directions
        self.k, self.each = min(k, len(directions)), each

    def __call__(self, x: Tensor, neurons: Tensor | None) -> tuple[Tensor, Tensor]:
        """See Dictionary."""
        mean, directions = self.mean.to(x), self.directions.to(x)
        codes = (x - mean) @ directions.T
        if self.each:
            codes = _largest(codes, codes.abs(), self.k)
        return mean + codes @ directions, torch.full_like(x[:, 0], self.k)


class Neurons:
    """The MLP's own neurons, the k that move its output furthest from its mean."""

    def __init__(self, calibration: Calibration, memory: Memory, k: int) -> None:
        assert calibration.neurons is not None
        self.means, self.values = calibration.neurons, memory.values.float()
        self.output = memory.output(calibration.neurons.to(self.values))
        self.k = min(k, len(self.values))

    def __call__(self, x: Tensor, neurons: Tensor | None) -> tuple[Tensor, Tensor]:
        """See Dictionary."""
        assert neurons is not None
        codes = neurons - self.means.to(neurons)
        codes = _largest(codes, codes.abs() * self.values.norm(dim=1), self.k)
        return self.output.to(x) + codes @ self.values, torch.full_like(x[:, 0], self.k)


def _largest(codes: Tensor, size: Tensor, k: int) -> Tensor:
    """[token, component] codes, all but each position's k of the largest size set to 0."""
    index = size.topk(k, dim=1).indices
    return torch.zeros_like(codes).scatter_(1, index, codes.gather(1, index))


@contextlib.contextmanager
def permuted(model: Model, seed: int) -> Iterator[None]:
    """Permute the entries of every weight matrix of a model for the duration of the block.

    Every entry stays, and so does each matrix's distribution of entries; what the model has learned
    about where they go is gone. Norms' gains and biases, which are no matrices, stay. The model's
    weights are back afterwards, bit for bit, also after an exception.

    Args:
        model: any model.
        seed: of the permutations.
    """
    draw = torch.Generator().manual_seed(seed)
    seen: dict[int, Any] = {}
    for module in (model.bridge.original_model, model.bridge):  # NeoX: the bridge has q, k, v apart
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                seen.setdefault(id(parameter), parameter)
    before = [(parameter, parameter.data) for parameter in seen.values()]
    try:
        for parameter, data in before:
            order = torch.randperm(data.numel(), generator=draw).to(data.device)
            parameter.data = data.flatten()[order].view(data.shape)
        yield
    finally:
        for parameter, data in before:
            parameter.data = data

"""Sets of directions, and the null model they are compared with.

Cosines of directions mean little alone: in activations whose variance lies in a few dimensions,
directions drawn at random already have large ones. The null is therefore not isotropic: it is drawn
from a Gaussian with the activations' own covariance. It knows which subspace the activations fill,
and nothing of how.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from interp.errors import InterpError
from interp.scores import wide

CHUNK = 2**25  # cosines held at once
OFFSET = 2**40  # of the seeds of draws: never that of something else seeded with 0, 1, ...
TOLERANCE = 1e-6  # of a covariance's symmetry and smallest eigenvalue, relative


def unit(
    directions: Float[Tensor, "direction d_model"], live: Bool[Tensor, " direction"] | None = None
) -> Float64[Tensor, "live d_model"]:
    """The live directions at length 1, in float64.

    Args:
        directions: a direction a row, such as an SAE's W_dec, of any lengths.
        live: which of them count; None: all.

    Raises:
        InterpError: no live direction, one that is zero or not finite, or a mask of another length.
    """
    if directions.ndim != 2:
        raise InterpError(
            f"Directions must be [direction, d_model]; their shape is {tuple(directions.shape)}."
        )
    if live is not None:
        if live.dtype != torch.bool or live.shape != directions.shape[:1]:
            raise InterpError(
                f"The mask of live directions is {live.dtype} of shape {tuple(live.shape)}; "
                f"expected one boolean for each of the {len(directions)} directions."
            )
        directions = directions[live.to(directions.device)]
    if not len(directions):
        raise InterpError("There is no live direction: nothing fired, so there is none to compare.")
    exact = wide(directions.detach())
    norms = exact.norm(dim=-1, keepdim=True)
    if not bool(torch.isfinite(norms).all()) or bool((norms == 0).any()):
        raise InterpError("A live direction is zero or not finite, and so has no cosine.")
    return exact / norms


@dataclass(frozen=True)
class Gaussian:
    """Unit directions like activations: N(0, covariance), each scaled to length 1.

    Attributes:
        root: [eigenvector, d_model] eigenvectors times the roots of their eigenvalues.
    """

    root: Float64[Tensor, "eigenvector d_model"]

    @classmethod
    def of(cls, covariance: Float[Tensor, "d_model d_model"]) -> Gaussian:
        """From a covariance about the mean, in squared units of the activations.

        Raises:
            InterpError: see `spectrum`.
        """
        values, vectors = spectrum(covariance)
        return cls((vectors * values.sqrt()).T)

    def draw(self, n: int, seed: int, which: int = 0) -> Float64[Tensor, "direction d_model"]:
        """Draw n directions; the same ones on every device.

        Args:
            n: how many.
            seed: of the measurement.
            which: the number of the draw, so that several differ.
        """
        generator = torch.Generator().manual_seed(OFFSET + 1_000_003 * seed + which)
        normal = torch.randn(n, len(self.root), generator=generator, dtype=torch.float64)
        drawn = normal.to(self.root.device) @ self.root
        return drawn / drawn.norm(dim=-1, keepdim=True)


def spectrum(
    covariance: Float[Tensor, "d_model d_model"],
) -> tuple[Float64[Tensor, " eigenvector"], Float64[Tensor, "d_model eigenvector"]]:
    """Eigenvalues (clipped at 0) and eigenvectors (columns) of a covariance, in float64.

    Raises:
        InterpError: not square, not finite, not symmetric, with a negative eigenvalue, or all zero.
    """
    exact = wide(covariance.detach())
    if exact.ndim != 2 or exact.shape[0] != exact.shape[1]:
        raise InterpError(
            f"A covariance must be [d_model, d_model]; its shape is {tuple(exact.shape)}."
        )
    size = float(exact.abs().max())
    if not size < float("inf") or size == 0:
        raise InterpError("The activations' covariance is zero or not finite; expected variation.")
    if float((exact - exact.T).abs().max()) > TOLERANCE * size:
        raise InterpError("The matrix given as a covariance is not symmetric.")
    values, vectors = torch.linalg.eigh((exact + exact.T) / 2)
    if float(values[0]) < -TOLERANCE * float(values[-1]) - 1e-12 * size:
        raise InterpError("The matrix given as a covariance has a negative eigenvalue.")
    return values.clamp(min=0), vectors


def nearest(
    first: Float64[Tensor, "direction d_model"],
    second: Float64[Tensor, "other d_model"] | None = None,
    *,
    signed: bool = False,
) -> tuple[Float64[Tensor, " direction"], Int64[Tensor, " direction"]]:
    """The closest of other unit directions: its cosine, and which it is.

    The search runs in float32 and in chunks; the cosine returned is computed in float64.

    Args:
        first: unit directions.
        second: unit directions; None: the others of `first` (itself left out).
        signed: closest is the largest cosine; else the largest in magnitude (with its sign).

    Returns:
        cosine: [direction], nan where there is no other.
        index: [direction] into `second`, -1 where there is none.
    """
    other = first if second is None else second
    if len(other) < (2 if second is None else 1):
        return torch.full((len(first),), float("nan")).to(first), first.new_full(
            (len(first),), -1, dtype=torch.int64
        )
    narrow, narrow_other = first.float(), other.float()
    found = []
    step = max(1, CHUNK // len(other))
    for start in range(0, len(first), step):
        cosines = narrow[start : start + step] @ narrow_other.T
        if second is None:
            rows = torch.arange(len(cosines), device=cosines.device)
            cosines[rows, start + rows] = float("-inf") if signed else 0.0
        found.append((cosines if signed else cosines.abs()).argmax(dim=1))
    index = torch.cat(found)
    return (first * other[index]).sum(-1), index

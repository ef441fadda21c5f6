"""How good a reconstruction is, over all positions at once, whatever the batches.

FVU = sum |x - x_hat|^2 / sum |x - mean(x)|^2, the mean and both sums over all positions judged.
Averages of per-batch or per-position ratios, which are often reported under the same name, are not
this number. Sums are float64; intervals are over documents.

What the numbers do not show. A small FVU says that the variance is kept, not that what matters to
the model is: the spliced loss says that. Neither says that a single feature means anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from interp import stats
from interp.errors import InterpError
from interp.scores import wide

NAN = float("nan")


@dataclass(frozen=True)
class Estimate:
    """A number with the ends of its 95% interval over documents; nan where there is none."""

    value: float = NAN
    low: float = NAN
    high: float = NAN


def ratio(over: np.ndarray, under: np.ndarray) -> Estimate:
    """sum(over) / sum(under) over documents, with its 95% interval.

    The interval is Student's t on the linearised ratio (over - R * under) / mean(under): documents
    may be of any length.

    Args:
        over: [document] numerators.
        under: [document] denominators.

    Returns:
        nan where the denominators sum to 0; nan ends for a single document.

    Source: Cochran (1977), Sampling Techniques, chapter 6.
    """
    over, under = np.asarray(over, dtype=np.float64), np.asarray(under, dtype=np.float64)
    if not len(over) or under.sum() == 0:
        return Estimate()
    value = float(over.sum() / under.sum())
    found = stats.mean_interval((over - value * under) / under.mean())
    return Estimate(value, float(value + found.low), float(value + found.high))


def mean(values: np.ndarray) -> Estimate:
    """Mean over documents with its 95% t interval."""
    found = stats.mean_interval(values)
    return Estimate(float(found.mean), float(found.low), float(found.high))


@dataclass(frozen=True)
class Quality:
    """A reconstruction judged on activations.

    tokens: positions judged; documents: that have any.
    l0: mean number of active components per position.
    fvu: fraction of variance unexplained; 1 - fvu is the explained variance.
    cosine: mean over positions of cos(x, x_hat).
    shrinkage: sum |x_hat - m|^2 / sum (x - m)(x_hat - m), m the mean of x: what x_hat would have to
        be divided by to fit best; below 1 it is too short, 1 is right.
    """

    tokens: int
    documents: int
    l0: Estimate
    fvu: Estimate
    cosine: Estimate
    shrinkage: float


class Judge:
    """Sums over positions, kept by document, from which `Quality` is computed.

    Args:
        documents: of the text.
        d_model: length of x.
    """

    def __init__(self, documents: int, d_model: int) -> None:
        self.error, self.active, self.cosine = (torch.zeros(documents).double() for _ in range(3))
        self.square, self.count = (torch.zeros(documents).double() for _ in range(2))
        self.total = torch.zeros(documents, d_model, dtype=torch.float64)
        self.origin: Tensor | None = None  # near the mean, so that squares do not cancel
        self.hat = torch.zeros(d_model, dtype=torch.float64)
        self.hat_square = self.cross = 0.0

    def see(
        self,
        x: Float[Tensor, "token d_model"],
        x_hat: Float[Tensor, "token d_model"],
        active: Float[Tensor, " token"],
        document: Int64[Tensor, " token"],
    ) -> None:
        """Take positions in: what is, what is made of it, of how many components, and where.

        Raises:
            InterpError: a reconstruction that is not finite.
        """
        if not len(x):
            return
        x, hat = wide(x).cpu(), wide(x_hat).cpu()
        if not bool(torch.isfinite(hat).all()):
            raise InterpError(
                "A reconstruction is not finite: the SAE's weights are damaged, or do not belong "
                "to this model."
            )
        if self.origin is None:
            self.origin = x.mean(0)
        document = document.cpu()
        lengths = x.norm(dim=1) * hat.norm(dim=1)
        cosine = torch.where(lengths > 0, (x * hat).sum(1) / lengths.clamp(min=1e-300), 0.0)
        x, hat = x - self.origin, hat - self.origin
        for sums, values in (
            (self.error, (x - hat).square().sum(1)),
            (self.active, active.double().cpu()),
            (self.cosine, cosine),
            (self.square, x.square().sum(1)),
            (self.count, torch.ones(len(x)).double()),
            (self.total, x),
        ):
            sums.index_add_(0, document, values)
        self.hat += hat.sum(0)
        self.hat_square += float(hat.square().sum())
        self.cross += float((x * hat).sum())

    def compute(self) -> Quality:
        """The numbers; all nan where nothing was seen."""
        seen = self.count > 0
        n = float(self.count.sum())
        if n == 0:
            return Quality(0, 0, Estimate(), Estimate(), Estimate(), NAN)
        m = self.total.sum(0) / n  # the mean, from the origin
        # sum |x - m|^2 of each document, and the sums about m that shrinkage takes.
        spread = (self.square - 2 * self.total @ m + self.count * (m @ m)).clamp(min=0)
        over, under, count = (t[seen].numpy() for t in (self.error, spread, self.count))
        hat_square = self.hat_square - 2 * float(self.hat @ m) + n * float(m @ m)
        cross = self.cross - float(self.total.sum(0) @ m) - float(self.hat @ m) + n * float(m @ m)
        return Quality(
            tokens=int(n),
            documents=int(seen.sum()),
            l0=ratio(self.active[seen].numpy(), count),
            fvu=ratio(over, under),
            cosine=ratio(self.cosine[seen].numpy(), count),
            shrinkage=hat_square / cross if abs(cross) > 1e-12 * max(hat_square, 1e-300) else NAN,
        )

"""Streaming reducers: what stays of a stream of activations that does not fit in memory.

All share one interface. `update(values, ..., mask)` takes values `[..., *feature_shape]`: the
leading dimensions are items (batch, position), the trailing ones are features. `mask` is boolean,
has exactly the shape of the leading dimensions, and True keeps an item. Values that the mask leaves
out are never looked at: padding may hold anything. A kept value that is not finite raises
InterpError.

`merge(other)` adds what another reducer of the same kind and settings has seen, and leaves `other`
as it was. Any split of a stream into batches and shards, merged in any order, gives the same
result: bit for bit for TopK, Histogram, Reservoir and PerDocument; to about 1e-12, relative to the
size of the values, for Mean and MeanVar, whose sums are float64.

Items are named by document and position, so that results do not depend on the order of arrival:
`0 <= document < 2**31` and `0 <= position < 2**32`, each pair at most once in a stream.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from interp.errors import InterpError

__all__ = ["Histogram", "Mean", "MeanVar", "PerDocument", "Reservoir", "TopK"]


class Moments(NamedTuple):
    """Mean and variance `[*feature_shape]` of n_items items, in the unit and its square."""

    mean: Float64[Tensor, "..."]
    variance: Float64[Tensor, "..."]
    n_items: int


class Counts(NamedTuple):
    """Counts `[*feature_shape, bins]` between edges; below and above them `[*feature_shape]`."""

    counts: Int64[Tensor, "... bins"]
    below: Int64[Tensor, "..."]
    above: Int64[Tensor, "..."]
    edges: Float64[Tensor, "edges"]


class Top(NamedTuple):
    """Largest values `[min(k, count), *feature_shape]`, largest first, and their items."""

    values: Float64[Tensor, "rank ..."]
    documents: Int64[Tensor, "rank ..."]
    positions: Int64[Tensor, "rank ..."]


class Sample(NamedTuple):
    """Values `[min(size, count), *feature_shape]` in document order, and their items."""

    values: Float[Tensor, "item ..."]
    documents: Int64[Tensor, "item"]
    positions: Int64[Tensor, "item"]


class Rows(NamedTuple):
    """Values `[document, *feature_shape]` in ascending order of `documents`."""

    values: Float64[Tensor, "document ..."]
    documents: Int64[Tensor, "document"]


class _Reducer:
    """What all reducers share: the checks, the mask, and which reducers can merge."""

    def __init__(self, feature_shape: Sequence[int], *settings: object) -> None:
        self.feature_shape = tuple(feature_shape)
        self.count = 0  # items kept by the mask
        self._settings = (self.feature_shape, *settings)

    def _items(self, values: Tensor, mask: Tensor | None, *ids: Tensor) -> tuple[Tensor, ...]:
        """The kept values `[n, *feature_shape]`, then the kept ids, each `[n]`."""
        name, n_lead = type(self).__name__, values.ndim - len(self.feature_shape)
        if n_lead < 0 or tuple(values.shape[n_lead:]) != self.feature_shape:
            raise InterpError(
                f"{name} got values of shape {tuple(values.shape)}; expected [..., *feature_shape] "
                f"with feature_shape {self.feature_shape}."
            )
        lead = values.shape[:n_lead]
        if mask is not None and (mask.dtype != torch.bool or mask.shape != lead):
            raise InterpError(
                f"{name} got a {mask.dtype} mask of shape {tuple(mask.shape)}; expected a boolean "
                f"mask of shape {tuple(lead)}, the values' leading dimensions."
            )
        if values.is_complex():
            raise InterpError(f"{name} got complex values; expected real ones.")
        values = values.detach()
        if values.device.type == "mps":  # which has no float64
            values = values.cpu()
        if not values.is_floating_point():
            values = values.double()
        keep = None if mask is None else mask.reshape(-1).to(values.device)
        flat = values.reshape(prod(lead), *self.feature_shape)
        kept = [flat if keep is None else flat[keep]]
        for ident in ids:
            if ident.shape != lead or ident.is_floating_point() or ident.dtype == torch.bool:
                raise InterpError(
                    f"{name} got {ident.dtype} ids of shape {tuple(ident.shape)}; expected "
                    f"integers of shape {tuple(lead)}, one for each item."
                )
            one = ident.reshape(-1).to(values.device, torch.int64)
            kept.append(one if keep is None else one[keep])
        if not torch.isfinite(kept[0]).all():
            raise InterpError(
                f"{name} got a value that is not finite at an included position; expected finite "
                "values. Try --dtype float32, or look for the document that causes it."
            )
        return tuple(kept)

    def merge(self, other: "_Reducer") -> None:
        """Add what `other` has seen. Raises InterpError unless it has this kind and settings."""
        if type(other) is not type(self) or other._settings != self._settings or other is self:
            raise InterpError(
                f"{type(self).__name__}{self._settings} cannot merge "
                f"{type(other).__name__}{getattr(other, '_settings', '')}; expected another "
                "reducer of the same kind, feature shape and settings."
            )
        if other.count:
            self._absorb(other)

    def _absorb(self, other: Any) -> None:
        """Add what `other`, a reducer like this one that has seen something, has seen."""
        raise NotImplementedError

    def _check_seen(self) -> None:
        if self.count == 0:
            raise InterpError(f"{type(self).__name__} has seen no item; expected at least one.")


class MeanVar(_Reducer):
    """Mean and variance of every feature, in one pass without cancellation.

    Variance is never negative, and exactly 0 for a feature that is constant.

    Args:
        feature_shape: trailing shape of the values.
        ddof: the variance's divisor is `count - ddof`: 0 describes these items, 1 estimates the
            variance of what they were sampled from.

    Source: Chan, Golub and LeVeque (1983), the pairwise update.
    """

    def __init__(self, feature_shape: Sequence[int] = (), *, ddof: int) -> None:
        if ddof < 0:
            raise InterpError(f"MeanVar got ddof {ddof}; expected 0 or more.")
        super().__init__(feature_shape, ddof)
        self.ddof = ddof
        self._mean = self._squares = torch.zeros(self.feature_shape, dtype=torch.float64)

    def update(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Add the items of `values` `[..., *feature_shape]` that `mask` `[...]` keeps."""
        (kept,) = self._items(values, mask)
        if len(kept):
            first = kept[0].double()  # as origin it makes the mean of a constant exact
            centred = kept.double() - first
            shift = centred.mean(0)
            self._add(len(kept), first + shift, (centred - shift).square().sum(0))

    def _absorb(self, other: Any) -> None:
        self._add(other.count, other._mean, other._squares)

    def compute(self) -> Moments:
        """Give the moments, variance nan where `count <= ddof`. InterpError where none was kept."""
        self._check_seen()
        divisor = self.count - self.ddof
        variance = self._squares / divisor if divisor > 0 else self._squares * float("nan")
        return Moments(self._mean.clone(), variance, self.count)

    def _add(self, count: int, mean: Tensor, squares: Tensor) -> None:
        total, delta = self.count + count, mean - self._mean.to(mean.device)
        self._squares = (
            self._squares.to(mean.device) + squares + delta.square() * (self.count * count / total)
        )
        # The first batch is taken as it is: 0 + (mean - 0) * 1 would be too, but says less.
        self._mean = (
            mean if self.count == 0 else self._mean.to(mean.device) + delta * (count / total)
        )
        self.count = total


class Mean(_Reducer):
    """Mean of every feature over the items, in the values' unit."""

    def __init__(self, feature_shape: Sequence[int] = ()) -> None:
        super().__init__(feature_shape)
        self._sum = torch.zeros(self.feature_shape, dtype=torch.float64)

    def update(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Add the items of `values` `[..., *feature_shape]` that `mask` `[...]` keeps."""
        (kept,) = self._items(values, mask)
        self._sum = self._sum.to(kept.device) + kept.sum(0, dtype=torch.float64)
        self.count += len(kept)

    def _absorb(self, other: Any) -> None:
        self._sum = self._sum + other._sum.to(self._sum.device)
        self.count += other.count

    def compute(self) -> Float64[Tensor, "..."]:
        """The mean `[*feature_shape]`. Raises InterpError where no item was kept."""
        self._check_seen()
        return self._sum / self.count


class Histogram(_Reducer):
    """Counts of every feature between fixed edges, and of what falls outside them.

    Bin i holds `edges[i] <= value < edges[i + 1]`; the last holds its upper edge too, as numpy's.

    Args:
        edges: at least two finite, strictly increasing numbers, in the values' unit.
        feature_shape: trailing shape of the values.
    """

    def __init__(self, edges: Sequence[float | int], feature_shape: Sequence[int] = ()) -> None:
        self._edges = torch.tensor([float(edge) for edge in edges], dtype=torch.float64)
        finite = bool(torch.isfinite(self._edges).all())
        if len(self._edges) < 2 or not finite or (self._edges.diff() <= 0).any():
            raise InterpError(
                "Histogram got edges that are not at least two finite, strictly increasing numbers."
            )
        super().__init__(feature_shape, tuple(self._edges.tolist()))
        # Columns: below, the bins, above.
        self._counts = torch.zeros(
            prod(self.feature_shape), len(self._edges) + 1, dtype=torch.int64
        )

    def update(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Count the items of `values` `[..., *feature_shape]` that `mask` `[...]` keeps."""
        (kept,) = self._items(values, mask)
        n_features, n_cells = self._counts.shape
        edges = self._edges.to(kept.device)
        exact = kept.reshape(len(kept), n_features).double()  # as the edges are
        cell = torch.bucketize(exact, edges, right=True) - (exact == edges[-1]).long()
        cell += torch.arange(n_features, device=kept.device) * n_cells
        new = torch.bincount(cell.reshape(-1), minlength=n_features * n_cells)
        self._counts = self._counts.to(kept.device) + new.reshape(n_features, n_cells)
        self.count += len(kept)

    def _absorb(self, other: Any) -> None:
        self._counts = self._counts + other._counts.to(self._counts.device)
        self.count += other.count

    def compute(self) -> Counts:
        """The counts; all zero where no item was kept."""
        counts = self._counts.reshape(*self.feature_shape, -1)
        return Counts(
            counts[..., 1:-1].clone(),
            counts[..., 0].clone(),
            counts[..., -1].clone(),
            self._edges.clone(),
        )


class TopK(_Reducer):
    """The k largest values of every feature, and the items they come from.

    Equal values are ranked by document, then position, smaller first (-0.0 equals 0.0), so that the
    result does not depend on the order of arrival. An item that arrives twice raises InterpError
    where the reducer can see it, that is, while its first arrival is still among the k largest.

    Args:
        k: how many, at least 1.
        feature_shape: trailing shape of the values; each feature has its own ranking.
    """

    def __init__(self, k: int, feature_shape: Sequence[int] = ()) -> None:
        if k < 1:
            raise InterpError(f"TopK got k = {k}; expected at least 1.")
        super().__init__(feature_shape, k)
        self.k = k
        self._values = torch.zeros(0, prod(self.feature_shape), dtype=torch.float64)
        self._keys = torch.zeros(0, prod(self.feature_shape), dtype=torch.int64)

    def update(
        self, values: Tensor, documents: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> None:
        """Rank the items of `values` `[..., *feature_shape]`; ids and mask are `[...]`."""
        kept, documents, positions = self._items(values, mask, documents, positions)
        if not len(kept):
            return
        keys, order = _keys(documents, positions).sort()
        rows = kept.reshape(len(kept), -1)[order] + 0.0  # -0.0 becomes 0.0
        columns = rows.T.contiguous()
        k = min(self.k, len(kept))
        best = columns.topk(k, dim=1)
        chosen = best.indices
        # topk takes any of several equal values. Where the k-th has an equal outside, sort instead:
        # stable, and the items are in the order of their keys.
        tied = (columns >= best.values[:, -1:]).sum(1) > k
        if tied.any():
            chosen[tied] = columns[tied].sort(dim=1, descending=True, stable=True).indices[:, :k]
        self._add(columns.gather(1, chosen).T.double(), keys[chosen.T], len(kept))

    def _absorb(self, other: Any) -> None:
        self._add(other._values, other._keys, other.count)

    def compute(self) -> Top:
        """The largest values and their items; no rows where no item was kept."""
        shape = (len(self._values), *self.feature_shape)
        keys = self._keys.reshape(shape)
        return Top(self._values.reshape(shape).clone(), keys >> 32, keys & 0xFFFFFFFF)

    def _add(self, values: Tensor, keys: Tensor, count: int) -> None:
        values = torch.cat([self._values.to(values.device), values])
        keys, order = torch.cat([self._keys.to(keys.device), keys]).sort(dim=0)
        _check_once(keys)
        values, by_value = values.gather(0, order).sort(dim=0, descending=True, stable=True)
        self._values, self._keys = values[: self.k], keys.gather(0, by_value)[: self.k]
        self.count += count


class Reservoir(_Reducer):
    """A uniform random sample of items without replacement.

    Which items are sampled depends on the items' ids and the seed only: every id has a random rank,
    and the smallest ranks stay. An item that arrives again while it is in the sample raises
    InterpError.

    Args:
        size: how many items to keep, at least 1.
        seed: any integer from 0 to 2**64 - 1.
        feature_shape: trailing shape of the values; kept in the values' own dtype.

    Source: Vigna's SplitMix64 as the hash.
    """

    def __init__(self, size: int, feature_shape: Sequence[int] = (), *, seed: int) -> None:
        if size < 1 or not 0 <= seed < 2**64:
            raise InterpError(
                f"Reservoir got size {size} and seed {seed}; expected a size of at least 1 and a "
                "seed from 0 to 2**64 - 1."
            )
        super().__init__(feature_shape, size, seed)
        self.size = size
        self.seed = seed
        self._values = torch.zeros(0, *self.feature_shape)  # takes on the first batch's dtype
        self._keys = torch.zeros(0, dtype=torch.int64)

    def update(
        self, values: Tensor, documents: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> None:
        """Sample from the items of `values` `[..., *feature_shape]`; ids and mask are `[...]`."""
        kept, documents, positions = self._items(values, mask, documents, positions)
        self._add(kept, _keys(documents, positions).cpu(), len(kept))

    def _absorb(self, other: Any) -> None:
        self._add(other._values, other._keys, other.count)

    def compute(self) -> Sample:
        """The sample in document order. Raises InterpError where no item was kept."""
        self._check_seen()
        keys, order = self._keys.sort()
        return Sample(self._values[order.to(self._values.device)], keys >> 32, keys & 0xFFFFFFFF)

    def _add(self, values: Tensor, keys: Tensor, count: int) -> None:
        if count == 0:
            return
        if self.count and self._values.dtype != values.dtype:
            raise InterpError(
                f"Reservoir got {values.dtype} after {self._values.dtype}; expected one dtype."
            )
        both = torch.cat([self._keys, keys])
        # Ranks first, then ids, so that even equal ranks have one order.
        order = torch.from_numpy(np.lexsort((both.numpy(), _hash(both.numpy(), self.seed))))
        _check_once(both[order])
        order = order[: self.size]
        joined = torch.cat([self._values.to(values), values])  # .to changes an empty dtype only
        self._values, self._keys = joined[order.to(values.device)], both[order]
        self.count += count


class PerDocument(_Reducer):
    """One float64 row per document: the unit of every interval, so every one of them is kept."""

    def __init__(self, feature_shape: Sequence[int] = ()) -> None:
        super().__init__(feature_shape)
        self._rows: dict[int, Tensor] = {}

    def update(self, values: Tensor, documents: Tensor, mask: Tensor | None = None) -> None:
        """Keep `values` `[..., *feature_shape]` of `documents` `[...]`, each seen only once."""
        kept, documents = self._items(values, mask, documents)
        _keys(documents, torch.zeros_like(documents))
        rows = dict(zip(documents.tolist(), kept.double().cpu().clone(), strict=True))
        self._add(rows, len(kept))

    def _absorb(self, other: Any) -> None:
        self._add(other._rows, other.count)

    def compute(self) -> Rows:
        """All rows by ascending document. Raises InterpError where no document was kept."""
        self._check_seen()
        documents = sorted(self._rows)
        return Rows(torch.stack([self._rows[d] for d in documents]), torch.tensor(documents))

    def _add(self, rows: dict[int, Tensor], count: int) -> None:
        twice = self._rows.keys() & rows.keys()
        if twice or len(rows) != count:
            raise InterpError(
                f"PerDocument got a document twice ({min(twice, default='within one batch')}); "
                "expected each once. Merge the windows of a document before."
            )
        self._rows |= rows
        self.count += count


def _keys(documents: Tensor, positions: Tensor) -> Int64[Tensor, "item"]:
    """One integer per item, ordered by document, then position."""
    if ((documents < 0) | (documents >= 2**31) | (positions < 0) | (positions >= 2**32)).any():
        raise InterpError(
            "A reducer got an id out of range; expected 0 <= document < 2**31 and "
            "0 <= position < 2**32."
        )
    return (documents << 32) | positions


def _check_once(keys: Tensor) -> None:
    """Raise where equal keys follow each other along the first dimension."""
    twice = keys[1:][keys[1:] == keys[:-1]]
    if len(twice):
        raise InterpError(
            f"A reducer got document {int(twice[0] >> 32)}, position {int(twice[0] & 0xFFFFFFFF)} "
            "twice; expected every item once. Was a batch counted twice on resuming?"
        )


def _hash(keys: np.ndarray, seed: int) -> np.ndarray:
    """SplitMix64 of each key; the seed is hashed first, so that near seeds are unrelated."""

    def mix(z: np.ndarray) -> np.ndarray:  # uint64 arrays wrap around, as they should here
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    return mix(keys.astype(np.uint64) ^ mix(np.array([seed], dtype=np.uint64)))

"""The documents in which each key's coefficient is largest, found in one pass.

A document counts once per key, at the position of its largest coefficient (the first of equal
ones). Of equal documents the earlier one ranks first. Documents that begin alike are equal; what
rounding makes of that (NEAR) does not count, so that triggers depend neither on the batch size nor
on the order in which shards are merged. What is kept is `k` documents per key and a few sums, and
nothing that grows with the text.

What a trigger does not show: that the key is about what its largest coefficients have in common. A
key may be as active, a little less, in quite different places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from interp import scores
from interp.errors import InterpError
from interp.text import Text, TokenBatch

NONE = -1
NEAR = 1e-5
"""Difference of successive values, relative to the key's largest, up to which they are equal."""


class Top(NamedTuple):
    """Per key the documents with the largest values, largest first; all [key, rank].

    values: -inf where there are fewer documents than ranks.
    documents: place in the source; -1 where there is none.
    places: window * context + position of the value (the position, without windows).
    """

    values: Float[Tensor, "key rank"]
    documents: Int64[Tensor, "key rank"]
    places: Int64[Tensor, "key rank"]


class TopDocuments:
    """The k documents with the largest value of every key, one place in each.

    Args:
        k: how many.
        n_keys: each has its own ranking.
    """

    def __init__(self, k: int, n_keys: int) -> None:
        self.k, self.n_keys = k, n_keys
        self._values = torch.zeros(n_keys, 0)
        self._names = torch.zeros(n_keys, 0, dtype=torch.int64)  # document << 32 | place

    def add(
        self,
        values: Float[Tensor, "document key"],
        documents: Int64[Tensor, " document"],
        places: Int64[Tensor, "document key"],
    ) -> None:
        """Documents that were not added before, each once."""
        self._take(values.T, ((documents[:, None] << 32) | places).T)

    def merge(self, other: TopDocuments) -> None:
        """Add what another one, of other documents, has seen.

        Raises:
            InterpError: it is of another shape, or has seen one of the same documents.
        """
        if (other.k, other.n_keys) != (self.k, self.n_keys) or other is self:
            raise InterpError(
                f"Triggers of {self.n_keys} keys ({self.k} documents each) cannot be merged with "
                f"those of {other.n_keys} keys ({other.k} each)."
            )
        self._take(other._values, other._names)

    def _take(self, values: Tensor, names: Tensor) -> None:
        values = torch.cat([self._values.to(values), values], 1)
        names = torch.cat([self._names.to(names.device), names], 1)
        if values.shape[1] > self.k:
            chosen = _largest(values, names, self.k)
            values, names = values.gather(1, chosen), names.gather(1, chosen)
        self._values, self._names = values, names

    def compute(self) -> Top:
        """The documents of every key, ranked."""
        pad = torch.nn.functional.pad
        names, order = self._names.sort(dim=1)
        documents = names >> 32
        if bool((documents.diff(dim=1) == 0).any()):
            raise InterpError("Triggers got a document twice. Was a batch counted twice?")
        values, by_value = self._values.gather(1, order).sort(dim=1, descending=True, stable=True)
        apart = values[:, :-1] - values[:, 1:] > _near(values)
        group = pad(apart.long().cumsum(1), (1, 0))
        names, order = names.gather(1, by_value).sort(dim=1)
        by_group = group.gather(1, order).sort(dim=1, stable=True).indices
        names = names.gather(1, by_group)
        values = values.gather(1, order.gather(1, by_group))
        short = self.k - values.shape[1]
        return Top(
            pad(values, (0, short), value=float("-inf")).cpu(),
            pad(names >> 32, (0, short), value=NONE).cpu(),
            pad(names & 0xFFFFFFFF, (0, short), value=NONE).cpu(),
        )


def _near(values: Tensor) -> Tensor:
    """[key, 1] what difference of a key's values is none."""
    size = values.abs()
    return NEAR * torch.where(size.isinf(), 0, size).amax(1, keepdim=True)


def _largest(values: Tensor, names: Tensor, k: int) -> Tensor:
    """[key, k] which of [key, n] are the largest; of equal ones those with the smaller names."""
    best = values.topk(k, dim=1, sorted=False)
    chosen = best.indices
    least, near = best.values.amin(1, keepdim=True), _near(values)
    # topk takes any of several equal values: where the k-th has an equal outside, choose by name.
    tied = (values >= least - near).sum(1) > k
    if bool(tied.any()):
        some, least, near = values[tied], least[tied], near[tied]
        kind = (some <= least + near).long() + (some < least - near)  # above, equal, below
        order = names[tied].argsort(dim=1)
        by_kind = kind.gather(1, order).sort(dim=1, stable=True).indices[:, :k]
        chosen[tied] = order.gather(1, by_kind)
    return chosen


class LayerTriggers:
    """What one layer's coefficients leave behind: triggers of either sign, and sums.

    Args:
        text: whose batches will be seen.
        n_keys: keys of the layer.
        k: documents per key.
        signs: 1 for the largest coefficients, -1 for the most negative ones.
        keys: which of the layer's keys; None: all `n_keys` of them.
    """

    def __init__(
        self,
        text: Text,
        n_keys: int,
        k: int,
        signs: Sequence[int] = (1,),
        keys: Sequence[int] | None = None,
    ) -> None:
        self.index = torch.tensor([d.index for d in text.documents])
        self.context = text.context
        self.windows = any(len(d.windows) > 1 for d in text.documents)
        self.signs = tuple(signs)
        self.keys = None if keys is None else torch.tensor(list(keys))
        self.top = {sign: TopDocuments(k, n_keys) for sign in self.signs}
        self._open: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # a document not yet whole
        self.total = torch.zeros(n_keys, dtype=torch.float64)
        self.positive = torch.zeros(n_keys, dtype=torch.float64)
        self.positions = 0
        self.pre_positions = 0
        self.documents = 0  # that have been begun
        self._last = NONE

    def see(self, coefficients: Float[Tensor, "batch pos key"], batch: TokenBatch) -> None:
        """Take a batch's coefficients in.

        Raises:
            InterpError: one of an included position is not finite.
        """
        coefficients = self._own(coefficients)
        out = _shut_out(batch, coefficients)
        documents = self.index.to(batch.rows.device)[batch.rows]
        for sign in self.signs:
            found = (coefficients * sign if sign < 0 else coefficients) + out
            values, places = found.max(1)  # the first of equal ones
            if not bool(torch.isfinite(values).all()):
                values, places = _careful(coefficients * sign, batch)
            places = places + (batch.window * self.context)[:, None]
            values, documents_, places = self._whole(sign, values, documents, places)
            self.top[sign].add(values, documents_, places)
        self.total = self.total + _sum(coefficients, batch)
        self.positions += int(batch.included.sum())
        new = documents.unique_consecutive()
        self.documents += len(new) - (int(new[0]) == self._last)
        self._last = int(new[-1])

    def _own(self, values: Tensor) -> Tensor:
        values = values if self.keys is None else values[..., self.keys.to(values.device)]
        return values.float() if values.dtype.itemsize < 4 else values

    def see_pre(self, pre: Float[Tensor, "batch pos key"], batch: TokenBatch) -> None:
        """Take a batch's pre-activations in: how often they are positive."""
        self.positive = self.positive + _sum(self._own(pre).clamp(min=0).sign_(), batch)
        self.pre_positions += int(batch.included.sum())

    def _whole(
        self, sign: int, values: Tensor, documents: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of one document joined; the last one waits, for its windows may go on."""
        if not self.windows:
            return values, documents, places
        if sign in self._open:
            before = self._open.pop(sign)
            values, documents, places = (
                torch.cat(both) for both in zip(before, (values, documents, places), strict=True)
            )
        ids, counts = documents.unique_consecutive(return_counts=True)
        best, where = [], []
        for rows, own in zip(
            values.split(counts.tolist()), places.split(counts.tolist()), strict=True
        ):
            most, at = rows.max(0)
            best.append(most)
            where.append(own.gather(0, at[None])[0])
        values, places = torch.stack(best), torch.stack(where)
        self._open[sign] = (values[-1:], ids[-1:], places[-1:])
        return values[:-1], ids[:-1], places[:-1]

    def finish(self) -> None:
        """After the last batch."""
        for sign, (values, documents, places) in self._open.items():
            self.top[sign].add(values, documents, places)
        self._open = {}

    def merge(self, other: LayerTriggers) -> None:
        """Add what another one, of other documents of the same source, has seen; both finished."""
        if self.signs != other.signs or self.context != other.context:
            raise InterpError("Triggers of another sign or context cannot be merged.")
        for sign, top in self.top.items():
            top.merge(other.top[sign])
        self.total = self.total + other.total.to(self.total.device)
        self.positive = self.positive + other.positive.to(self.positive.device)
        self.positions += other.positions
        self.documents += other.documents
        self.pre_positions += other.pre_positions

    def mean(self) -> Float64[Tensor, " key"]:
        """Mean coefficient over the included positions."""
        return self.total.cpu() / max(self.positions, 1)

    def active(self) -> Float64[Tensor, " key"] | None:
        """Share of the included positions with a positive pre-activation; None if not seen."""
        return self.positive.cpu() / self.pre_positions if self.pre_positions else None


def _shut_out(batch: TokenBatch, like: Tensor) -> Tensor:
    """[batch, pos, 1]: 0 at included positions, -inf elsewhere."""
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(batch.included, zero, float("-inf"))[..., None]


def _careful(values: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """As adding -inf and taking the maximum, whatever the other positions hold.

    A row without any included position (a window of special tokens) stays at -inf.
    """
    if not bool(torch.isfinite(values[batch.included]).all()):
        raise InterpError(
            "The model gave a coefficient that is not finite at an included position. Check its "
            "weights, or use --dtype float32."
        )
    return values.masked_fill(~batch.included[..., None], float("-inf")).max(1)


def _sum(values: Float[Tensor, "batch pos key"], batch: TokenBatch) -> Float64[Tensor, " key"]:
    """Over included positions: within a document in the values' dtype, then in float64."""
    rows = torch.bmm(batch.included[:, None].to(values), values)[:, 0]
    if not bool(torch.isfinite(rows).all()):  # what is left out may hold anything
        rows = values.masked_fill(~batch.included[..., None], 0).sum(1)
    return scores.wide(rows).sum(0)

"""The pruning curve: in which order heads go, at which steps it is measured, where it crosses.

An order is a list of units; a unit is the heads that go together (one query head, or a KV head
with the query heads that read it).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from interp import stats
from interp.analyzers.heads.measure import Growing, Sweep
from interp.analyzers.heads.standins import Mode, Removal
from interp.interventions import Head

LIMITS = (0.01, 0.05)
"""nats per token: the loss changes up to which pruning counts as free and as cheap."""
RANDOM_SEEDS = 5
RANDOM_FRACTIONS = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
Unit = tuple[Head, ...]


def units(n_layers: int, n_heads: int, group: int, absent: Collection[Head] = ()) -> list[Unit]:
    """All units, in layer and head order: `group` query heads each, less those that are absent.

    A unit of which nothing is left is an empty tuple, so that places stay.
    """
    return [
        tuple((layer, h) for h in range(first, first + group) if (layer, h) not in absent)
        for layer in range(n_layers)
        for first in range(0, n_heads, group)
    ]


def importance_of_units(xi: np.ndarray, group: int) -> np.ndarray:
    """[layer, unit] mean over documents of |dL/dxi|, xi scaling all heads of a unit at once.

    Args:
        xi: [document, layer, head] signed gradients; one xi for several heads has their sum.
        group: query heads per unit.
    """
    docs, layers, heads = xi.shape
    return np.abs(xi.reshape(docs, layers, heads // group, group).sum(-1)).mean(0)


def normalised(importance: np.ndarray) -> np.ndarray:
    """[layer, head] each layer divided by its l2 norm; a layer of zeros stays zero."""
    norm = np.linalg.norm(importance, axis=1, keepdims=True)
    return importance / np.where(norm > 0, norm, 1)


def ascending(scores: np.ndarray, all_units: Sequence[Unit]) -> list[Unit]:
    """Units that are there by ascending score [layer, unit]; ties by layer, then head."""
    order = np.argsort(scores.reshape(-1), kind="stable")
    return [all_units[i] for i in order if all_units[i]]


def step_counts(n_units: int, step: float) -> list[int]:
    """Units removed at each step of `step` of them, from 0 to all."""
    counts = {0, n_units}
    k = 1
    while k * step < 1 - 1e-9:
        counts.add(round(k * step * n_units))
        k += 1
    return sorted(counts)


def random_counts(n_units: int) -> list[int]:
    """Units removed at each step of a random order."""
    return sorted({round(f * n_units) for f in RANDOM_FRACTIONS})


@dataclass
class Order:
    """One order of removal and what was measured of it.

    points: units removed -> [document] loss change in nats per token.
    members: the random orders that this one is the mean of; their points are averaged.
    """

    name: str
    seed: int | None
    units: list[Unit]
    counts: list[int]
    mode: Mode = "zero"
    points: dict[int, np.ndarray] = field(default_factory=dict)
    members: list[Order] = field(default_factory=list)

    def removal(self, count: int) -> Removal:
        """The first `count` units, together."""
        return Removal(tuple(h for unit in self.units[:count] for h in unit), self.mode)

    def heads_removed(self, count: int) -> int:
        """Query heads among the first `count` units."""
        return sum(len(unit) for unit in self.units[:count])

    def curves(self) -> dict[str, dict[int, float]]:
        """units removed -> mean, and the two ends of its 95% interval."""
        ends = {n: stats.paired_t(d) for n, d in self.points.items()}
        return {
            "mean": {n: float(t.mean) for n, t in ends.items()},
            "low": {n: float(t.low) for n, t in ends.items()},
            "high": {n: float(t.high) for n, t in ends.items()},
        }

    def take(self, n: int) -> None:
        """Let the mean of the members' points stand for this order."""
        if self.members and all(n in member.points for member in self.members):
            self.points[n] = np.mean([member.points[n] for member in self.members], axis=0)

    def wanted(self, ahead: int, limits: Sequence[float] = LIMITS) -> list[int]:
        """Counts to be measured before every crossing is known to the unit, `ahead` at once."""
        found: set[int] = set()
        for curve in self.curves().values():
            for limit in limits:
                step = self._crossed(curve, limit)
                if step is None:
                    continue
                before, last = step
                for n in range(before + 1, last):
                    if n not in curve:
                        found.update(range(n, min(n + ahead, last)))
                        break
                    if curve[n] > limit:
                        break
        return sorted(n for n in found if n not in self.points)

    def prunable(self, curve: dict[int, float], limit: float) -> float:
        """Share of heads that go before the curve first exceeds the limit (interface.md)."""
        return self.heads_removed(self.before(curve, limit)) / self.heads_removed(len(self.units))

    def before(self, curve: dict[int, float], limit: float) -> int:
        """Units that go before the curve first exceeds the limit."""
        step = self._crossed(curve, limit)
        measured = [n for n in self.counts if n in curve]
        if step is None:
            return measured[-1]
        before, last = step
        inside = [n for n in sorted(curve) if before <= n <= last]
        # From 0, so that the reader of the counts sees the whole first part of the curve.
        return stats.first_crossing(
            [n for n in measured if n < before] + inside,
            [min(curve[n], limit) for n in measured if n < before] + [curve[n] for n in inside],
            limit,
        )

    def _crossed(self, curve: dict[int, float], limit: float) -> tuple[int, int] | None:
        """The first step (from, to) whose end exceeds the limit, or None."""
        measured = [n for n in self.counts if n in curve]
        for before, last in pairwise(measured):
            if curve[last] > limit:
                return before, last
        return None


Measure = Callable[[list[Removal], str], Sweep]
"""removals, what to call it -> their losses on the curve's documents."""


def measure_steps(orders: Sequence[Order], measure: Measure) -> None:
    """All orders at all their steps, equal sets of heads measured once."""
    single = [member for order in orders for member in (order.members or [order])]
    todo = [(order, n) for order in single for n in order.counts]
    distinct: dict[tuple[frozenset[Head], Mode], Removal] = {}
    keys = []
    for order, n in todo:
        removal = order.removal(n)
        key = (frozenset(removal.heads), removal.mode if removal.heads else "zero")
        distinct.setdefault(key, removal)
        keys.append(key)
    found = measure(list(distinct.values()), "pruning curve")
    place = {key: i for i, key in enumerate(distinct)}
    for (order, n), key in zip(todo, keys, strict=True):
        delta = found.delta[:, place[key]]
        if not np.isnan(delta).any():
            order.points[n] = delta
    for order in orders:
        for n in order.counts:
            order.take(n)


def refine(order: Order, growing: Growing, limits: Sequence[float] = LIMITS) -> None:
    """Measure head by head inside the steps that cross a limit, until every crossing is known."""
    while counts := order.wanted(growing.ahead, limits):
        for member in order.members or [order]:
            for n, delta in growing.measure(member, counts).items():
                member.points[n] = delta
        for n in counts:
            order.take(n)
    growing.forget()

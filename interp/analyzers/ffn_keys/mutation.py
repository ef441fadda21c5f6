"""What a key's coefficient loses when its triggers lose a token (Geva et al. 2021, section 3).

The first, the last or a random token between them is dropped from the prefix that ends at a
trigger, and the coefficient is read at the new end. Attention is causal, so one run of a document
without its first token answers for all of its triggers, the clean run has the answer for every
dropped last token, and a few random tokens per document are enough: each trigger's is uniform over
its own prefix, but triggers of one document share them where they can.

The change of a key is the sum of its coefficients after over the sum before, minus 1: no
denominator is small, since the sum before is of the key's largest coefficients. In gated models a
coefficient can change its sign, and the change falls below -1.

What the number does not show: triggers are the largest of many, so any change lowers them. Compare
the three with each other, and with `all`: the key's mean coefficient over the text, which is what a
prefix gives that has nothing to do with the trigger. Geva et al. have a ReLU, whose coefficients
never change their sign, and drop tokens of whole prefixes without a BOS: their figures (about -0.7
in the first layer to -0.2 in the last for the last token) are no reference for other kinds of FFN.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from interp import journal
from interp.analyzers.ffn_keys import coefficients
from interp.analyzers.ffn_keys.patterns import Positions
from interp.analyzers.ffn_keys.prefixes import batches_of, rows_of
from interp.model import Model
from interp.progress import track

Name = TypeVar("Name", bound=Hashable)

DROPPED = ("first", "random", "last")
READ = ("none", *DROPPED)


@dataclass(frozen=True)
class Asked:
    """Keys of one layer and their triggers: keys [key], places [key, rank] (-1: none)."""

    layer: int
    keys: np.ndarray
    places: np.ndarray


@dataclass(frozen=True)
class Mutated:
    """Coefficients of one layer's triggers, before and after.

    keys: [key] which ones.
    coefficient: (READ) -> [key, rank]; nan where there is no trigger, or one with too short a
        prefix to be mutated: fewer than 3 tokens, or no included position before its last one.
    """

    keys: np.ndarray
    coefficient: dict[str, np.ndarray]

    def change(self, dropped: str) -> np.ndarray:
        """[key] sum of coefficients after / before - 1; nan for a key without a usable trigger."""
        before, after = (np.nansum(self.coefficient[k], axis=1) for k in ("none", dropped))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(before != 0, after / before - 1, np.nan)


def sample_keys(keys: np.ndarray, n: int, seed: int, layer: int) -> np.ndarray:
    """Up to n of the keys, ascending; another seeded sample for every layer."""
    rng = np.random.default_rng([seed, 3, layer])
    return np.sort(rng.choice(keys, min(n, len(keys)), replace=False))


@dataclass
class Plan:
    """Which prefixes to run, and where each place's coefficients are read.

    runs: token ids of each.
    places: [place] those that can be mutated, ascending.
    run, position: [READ, place] where the coefficient is read.
    """

    runs: list[np.ndarray]
    places: np.ndarray
    run: np.ndarray
    position: np.ndarray


def plan(at: Positions, places: np.ndarray, seed: int) -> Plan:
    """The runs that answer for all places at once.

    Which token a place loses at random depends on the seed, its document and its position alone, so
    that no other trigger has a say in it.
    """
    places = np.unique(places[places >= 0])
    first = at.start[places] + at.bos  # of the text; a BOS is no part of it
    places = places[(places - first >= 2) & at.included[places - 1]]
    runs: list[np.ndarray] = []
    run = np.zeros((len(READ), len(places)), dtype=np.int64)
    starts, begins = np.unique(at.start[places], return_index=True)
    ends = [*begins, len(places)][1:]  # none where no place can be mutated
    for start, begin, end in zip(starts, begins, ends, strict=True):
        own = places[begin:end]
        first, last = int(start) + at.bos, int(own[-1])
        whole = at.ids[start : last + 1]
        run[READ.index("none"), begin:end] = run[READ.index("last"), begin:end] = len(runs)
        run[READ.index("first"), begin:end] = len(runs) + 1
        runs += [whole, np.delete(whole, first - start)]
        # A reservoir of one: the n-th token after the first takes the place of the one before with
        # probability 1 / n, so that at every place each token between is as likely as the others.
        nth = np.arange(1, last - first)
        taken = np.random.default_rng([seed, 4, int(start)]).random(len(nth)) * nth < 1
        kept = np.maximum.accumulate(np.where(taken, nth, 0))
        dropped = -1
        for i, place in enumerate(own, begin):
            if (wanted := first + int(kept[place - first - 2])) != dropped:
                dropped = wanted
                runs.append(np.delete(whole, dropped - start))
            run[READ.index("random"), i] = len(runs) - 1
    # The end of a prefix that lost a token is one position earlier; so is the last but one token.
    position = np.tile(places - at.start[places] - 1, (len(READ), 1))
    position[READ.index("none")] += 1
    # No token after the last one that is read needs to run.
    needed = np.zeros(len(runs), dtype=np.int64)
    np.maximum.at(needed, run, position + 1)
    return Plan([r[:n] for r, n in zip(runs, needed, strict=True)], places, run, position)


def measure(
    model: Model,
    at: Positions,
    asked: Mapping[Name, Asked],
    *,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = False,
) -> dict[Name, Mutated]:
    """Mutate all triggers asked for, of whatever layers, in one pass over the prefixes.

    Args:
        model: inside `model.measuring()`.
        at: the positions of the text that the triggers come from.
        asked: name -> keys and triggers, such as (layer, sign).
        seed: of the random tokens.
        batch_tokens: tokens per forward pass; None: as fits the device.
        progress: a bar on stderr.
    """
    out = {
        name: {kind: np.full(one.places.shape, np.nan) for kind in READ}
        for name, one in asked.items()
    }
    every = np.concatenate(
        [np.empty(0, dtype=np.int64), *(a.places.ravel() for a in asked.values())]
    )
    made = plan(at, every, seed)
    reads = {name: _Reads.of(one, made) for name, one in asked.items()}
    bar = track(len(made.runs), "mutated prefixes", progress)
    try:
        stage = journal.stage("mutated prefixes")
        batches = batches_of(stage, [len(r) for r in made.runs], model, batch_tokens)
        for chosen in stage.fold(batches, {"out": out}):
            slot = np.full(len(made.runs), -1)
            slot[chosen] = np.arange(len(chosen))
            _read(model, [made.runs[i] for i in chosen], asked, reads, slot, out)
            bar.update(len(chosen))
    finally:
        bar.close()
    return {name: Mutated(asked[name].keys, found) for name, found in out.items()}


@dataclass(frozen=True)
class _Reads:
    """Flat: kind, run and position to read, the key, and where it goes in [key, rank]."""

    kind: np.ndarray
    run: np.ndarray
    position: np.ndarray
    key: np.ndarray
    into: np.ndarray

    @classmethod
    def of(cls, asked: Asked, made: Plan) -> _Reads:
        into = np.flatnonzero(np.isin(asked.places, made.places))
        place = np.searchsorted(made.places, asked.places.ravel()[into])
        kinds = len(READ)
        key = np.repeat(asked.keys, asked.places.shape[1])[into]
        return cls(
            np.repeat(np.arange(kinds), len(into)),
            made.run[:, place].ravel(),
            made.position[:, place].ravel(),
            np.tile(key, kinds),
            np.tile(into, kinds),
        )


def _read(
    model: Model,
    runs: list[np.ndarray],
    asked: Mapping[Name, Asked],
    reads: Mapping[Name, _Reads],
    slot: np.ndarray,
    out: dict[Name, dict[str, np.ndarray]],
) -> None:
    """Run one batch and put what it answers into `out`."""
    wanted: dict[int, list[tuple[Name, np.ndarray]]] = {}
    for name, one in reads.items():
        here = np.flatnonzero(slot[one.run] >= 0)
        if len(here):
            wanted.setdefault(asked[name].layer, []).append((name, here))

    def look(layer: int) -> coefficients.Use:
        def hook(tensor: torch.Tensor) -> None:
            for name, here in wanted[layer]:
                one = reads[name]
                index = (slot[one.run[here]], one.position[here], one.key[here])
                found = tensor[tuple(torch.from_numpy(i).to(tensor.device) for i in index)]
                values = found.float().cpu().numpy()
                for k, kind in enumerate(READ):
                    mine = one.kind[here] == k
                    out[name][kind].ravel()[one.into[here][mine]] = values[mine]

        return hook

    batch = rows_of(runs).to(model.device)
    coefficients.run(model, batch, {layer: look(layer) for layer in sorted(wanted)})

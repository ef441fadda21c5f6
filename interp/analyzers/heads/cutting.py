"""Which heads to cut out of the checkpoint, what that costs in loss, and what it saves."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from interp import stats
from interp.analyzers.heads import curve, export, speed
from interp.analyzers.heads.card import write_card
from interp.analyzers.heads.standins import Mode, Removal
from interp.config import head_list
from interp.interventions import Head
from interp.results import partial_of
from interp.text import Text

if TYPE_CHECKING:
    from interp.analyzers.heads import _Run

log = logging.getLogger("interp")


@dataclass
class Choice:
    """Heads to cut out, and by which order of the curve (None: named by the user)."""

    heads: tuple[Head, ...]
    order: curve.Order | None
    orders: int = 0
    """Orders that this one was chosen from."""


@dataclass
class Cut:
    """A checkpoint that was written, and what is known of it.

    before, after: [document] nats per predicted token.
    sizes: parameters, weights_per_token (decoding) and cache_bytes_per_token, each (original,
        pruned).
    by_weights: phase -> how many times faster it could be by the weights alone.
    """

    choice: Choice
    compensated: bool
    written: export.Written
    part: str
    before: np.ndarray
    after: np.ndarray
    sizes: dict[str, tuple[int, int]]
    by_weights: dict[str, float]
    timings: list[speed.Timing]
    layers: int

    def summary(self) -> dict[str, Any]:
        """The result's entry `export`."""
        change, pruning = stats.paired_t(self.after - self.before), self.written.pruning
        pairs = {
            f"{name}{end}": value
            for name, both in self.sizes.items()
            for end, value in zip(("_original", ""), both, strict=True)
        }
        return {
            "folder": str(self.written.folder),
            "loader": "transformers" if pruning.plain else "interp.load_pruned",
            "heads": [list(head) for head in self.choice.heads],
            "order": self.choice.order.name if self.choice.order is not None else None,
            "compensated": self.compensated,
            "heads_left": [len(pruning.kept(i)) for i in range(self.layers)],
            "kv_heads_left": [len(pruning.kept_kv(i)) for i in range(self.layers)],
            "loss_before": float(self.before.mean()),
            "loss_after": float(self.after.mean()),
            "loss_delta": float(change.mean),
            "ci_low": float(change.low),
            "ci_high": float(change.high),
            "documents": len(self.before),
            "documents_part": self.part,
            "logit_gap": self.written.logit_gap,
            "speedup_by_weights": self.by_weights,
            **pairs,
        }


def cut_out(run: _Run, overwrite: bool, command: str | None) -> Cut | None:
    """Choose, judge, write, time. None (with a notice) where no head may go."""
    model, config = run.model, run.config
    assert run.gradients is not None
    target = export.folder(config, overwrite)
    choice = _choose(run)
    if not choice.heads:
        run.notices.append(
            f"Nothing was exported to {target}: the first {config.unit} of every order already "
            f"costs more than {config.max_loss:g} nats."
            if config.max_loss is not None
            else f"Nothing was exported to {target}: {config.fraction:g} of the heads is none."
        )
        return None
    mode: Mode = "bias" if config.compensate else "zero"
    text, part = _judges(run, choice)
    found = run._sweep(text, [Removal(choice.heads, mode)], "the heads to cut out")
    means = run.gradients.z_mean if config.compensate else None
    with export.written(model, run.text, choice.heads, means, target) as (written, small):
        original = export.load(model, model.folder)
        made = Cut(
            choice,
            config.compensate,
            written,
            part,
            found.clean,
            found.loss[:, 0],
            sizes=_sizes(original, small, model.cfg.vocab_size),
            by_weights=speed.by_weights(original, small, model.cfg.n_ctx),
            timings=[],
            layers=model.cfg.n_layers,
        )
        try:
            speed.measure(
                original,
                small,
                model.cfg.vocab_size,
                model.cfg.n_ctx,
                progress=config.progress,
                into=made.timings,
            )
        except KeyboardInterrupt:  # the checkpoint is there: it is kept
            run.complete = False
            run.notices.append("Interrupted while speed was measured: the checkpoint is whole.")
        del original
        partial = partial_of(target)
        write_card(partial / export.CARD, run, made, command)
    run.notices += _told(made, run.complete)
    log.info("The checkpoint without %d heads is in %s.", len(choice.heads), target)
    return made


def _choose(run: _Run) -> Choice:
    config = run.config
    if config.heads is not None:
        return Choice(tuple(sorted(set(head_list(config.heads)))), None)
    mode = "bias" if config.compensate else "zero"
    orders = [o for o in run.orders if o.mode == mode and o.name != "random"]

    def count(order: curve.Order) -> int:
        if config.fraction is not None:
            return round(config.fraction * len(order.units))
        assert config.max_loss is not None
        return order.before(order.curves()["mean"], config.max_loss)

    # The most heads, and of as many those that cost least.
    best = max(orders, key=lambda o: (o.heads_removed(count(o)), -float(o.points[count(o)].mean())))
    return Choice(best.removal(count(best)).heads, best, len(orders))


def _judges(run: _Run, choice: Choice) -> tuple[Text, str]:
    """Documents that the loss before and after is told of: none that had a say in the choice."""
    if choice.order is None:
        return run.text, "sample"
    fresh = run.judge.further(len(run.judge))
    if fresh is not None and len(fresh) >= max(2, len(run.judge) // 2):
        return fresh, "held_out"
    run.notices.append(
        "There are no further documents: the loss of the exported checkpoint is told of those that "
        "chose its heads, and is a little too low."
    )
    return run.judge, "curve"


def _sizes(original: Any, small: Any, vocabulary: int) -> dict[str, tuple[int, int]]:
    both = (original, small)
    a, b = (speed.cache_bytes_per_token(m, vocabulary) for m in both)
    return {
        "parameters": (speed.parameters(original), speed.parameters(small)),
        "weights_per_token": (
            int(speed.weights_per_token(original)),
            int(speed.weights_per_token(small)),
        ),
        "cache_bytes_per_token": (a, b),
    }


def _told(made: Cut, complete: bool) -> list[str]:
    """How the checkpoint loads, and where it is not faster, why."""
    pruning, where = made.written.pruning, made.written.folder
    out = [
        f"{where} loads in plain transformers: every layer keeps as many heads as the others."
        if pruning.plain
        else f"{where} loads with interp.load_pruned(folder), not by transformers alone: its "
        "config has no word for "
        + ("uneven layers." if len(set(_left(made))) > 1 else "fewer heads in this family.")
    ]
    rows = [t.row() for t in made.timings]
    if len(rows) < speed.SETTINGS and complete:
        out.append(
            f"Speed is measured at {len(rows)} of {speed.SETTINGS} settings: one round of the "
            f"others takes longer than {speed.SECONDS / speed.SETTINGS:g} s on this machine."
        )
    slow = [f"{r['phase']} at batch {r['batch']}" for r in rows if r["verdict"] != "faster"]
    if slow:
        ideal = " and ".join(f"{made.by_weights[p]:.2f} times in {p}" for p in speed.PHASES)
        out.append(
            f"Not measurably faster in {', '.join(slow)}. By the weights alone that a token meets "
            f"it could be {ideal} (the attention itself, which grows with the context, saves "
            "more); what a layer and a call cost whatever their size stays, and less than the "
            "spread of the rounds is not told apart."
        )
    return out


def _left(made: Cut) -> list[int]:
    return [len(made.written.pruning.kept(i)) for i in range(made.layers)]

"""How sensitive is the model to removing attention heads?

In the style of Michel, Levy and Neubig (2019), "Are Sixteen Heads Really Better than One?":

* importance of head h: mean over documents of |dL/dxi_h| at xi_h = 1, where xi_h scales the head's
  z (its output before W_O) and L is the document's mean cross-entropy in nats. importance_norm
  divides by the layer's l2 norm; importance_token averages |z . dL/dz| over tokens instead, as the
  paper's code does.
* exact: the loss with the head removed minus the loss without, paired by document, and
  KL(clean || removed) of the next-token distributions.
* the pruning curve: heads removed together, least important first.
* keep_one: what a layer loses with its best head alone; roles: where heads look, and with exact
  for which kinds of token they matter; export: a checkpoint that really lacks the heads.

What the numbers do not show. Importance is a slope: it ranks sensitivity (it follows KL), not the
sign or size of the loss change. A head that can be removed alone may matter once others are gone
(see `interaction`). Removing a head is not the same as saying what it does. Numbers are of this
text and this context length.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import numpy as np

from interp import hooks, journal, results
from interp.analyzers.heads import (
    circuits,
    curve,
    cutting,
    export,
    importance,
    keepone,
    measure,
    roles,
    tables,
    tokenclasses,
)
from interp.analyzers.heads.measure import Sweep
from interp.analyzers.heads.standins import Mode, Removal
from interp.config import HeadsConfig, with_options
from interp.errors import InterpError
from interp.model import Model
from interp.results import Result
from interp.text import Text, expect_model, expect_text

log = logging.getLogger("interp")
HELD_OUT_HEADS = 5
"""Heads at each end of the exact ranking that are measured again on other documents."""


def heads(
    model: Model,
    text: Text,
    config: HeadsConfig | None = None,
    /,
    *,
    overwrite: bool = False,
    command: str | None = None,
    out: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Result:
    """Measure head importance, exact removal effects and the pruning curve; cut heads out.

    Args:
        model: from `load_model`.
        text: from `load_text`, tokenised for the same model.
        config: all options at once, or
        **options: fields of `HeadsConfig` by name (`prune=True, exact=True, ...`).
        overwrite: with export, replace a checkpoint that was exported there before.
        command: with export, the command line that the model card shows.
        out: the run's folder; progress is saved in `<out>.partial`. None: nowhere.

    Returns:
        A Result with table `heads` (one row per query head) and, with prune, `prune` and `refine`,
        with keep_one `keep_one`, with exact and roles `token_classes`, with export `speed`.
        Interrupted with Ctrl-C it holds what was measured so far and `complete` is False.

    Raises:
        InterpError: an unknown option, a model without per-head attention outputs, a non-finite
            loss, or heads that cannot be cut out.

    Source: Michel et al. (2019), arXiv:1905.10650.
    """
    config = with_options(HeadsConfig, config, options)
    expect_model(model)
    expect_text(text)
    hooks.require(model, "z", "attn_out", *(["pattern"] if config.roles else []))
    if config.exact and config.ablation != "zero" and len(text) < 2:
        raise InterpError(
            f"--ablation {config.ablation} takes what stands in for a head from other documents, "
            "and there is one only. Give more documents, or use --ablation zero."
        )
    if config.export is not None:
        export.refuse_early(model, config, overwrite)

    def work(run: _Run) -> None:
        run.measure()
        if config.export is not None:
            run.cut_out(overwrite, command)

    return journal.measured(
        "heads",
        lambda: _Run(model, text, config),
        lambda run: run.gradients is not None,
        out=out,
        work=work,
    ).result()


def _without_effect(model: Model, config: HeadsConfig) -> list[str]:
    """What was asked for and changes nothing, or not everything."""
    out = []
    pruned = config.prune or config.rescore
    if config.ablation != "zero" and not config.exact:
        out.append(
            f"--ablation {config.ablation} is for --exact, which was not asked for: it changes "
            "nothing here (the curve sets heads to zero; its compensated order keeps their mean)."
        )
    if config.unit == "kv" and model.cfg.n_kv_heads == model.cfg.n_heads:
        out.append("Every query head has its own KV head here: --unit kv is as --unit head.")
    elif config.unit == "kv" and not pruned:
        out.append("--unit kv is for --prune, which was not asked for: it changes nothing here.")
    elif config.unit == "kv" and config.exact:
        out.append("--exact removes single query heads; --unit kv holds for the pruning curve.")
    if config.step != HeadsConfig.step and not pruned:
        out.append("--step is for --prune, which was not asked for: it changes nothing here.")
    return out


class _Run:
    """One run's plan and state: what is measured, on which documents, in which order."""

    def __init__(self, model: Model, text: Text, config: HeadsConfig) -> None:
        self.model, self.text, self.config = model, text, config
        self.began = time.perf_counter()
        self.started = results.now()
        self.notices = [*model.notices, *text.notices, *_without_effect(model, config)]
        self.complete = True
        self.gradients: importance.Gradients | None = None
        self.exact: Sweep | None = None
        self.exact_mean: Sweep | None = None
        self.classes: tokenclasses.ByClass | None = None
        self.orders: list[curve.Order] = []
        self.baseline: np.ndarray | None = None  # [document] of the curve's text
        self.interaction: list[dict[str, Any]] = []
        self.held_out: dict[str, list[dict[str, Any]]] = {}
        self.group = model.cfg.n_heads // model.cfg.n_kv_heads if config.unit == "kv" else 1
        cfg = model.cfg
        # With gaps where heads were cut out of the checkpoint: aligned with scores [layer, unit].
        self.units = curve.units(cfg.n_layers, cfg.n_heads, self.group, set(cfg.removed))
        self.all_heads = cfg.heads()
        self.roles: roles.Roles | None = None
        self.circuits: circuits.Circuits | None = None
        # Made first, so that a context too short for them is told before anything is measured.
        self.sequences = roles.repeated(model, text, config.seed) if config.roles else None
        self.keep_one: keepone.KeepOne | None = None
        self.cut: cutting.Cut | None = None
        self._choose_documents()
        self.notices += hooks.foreign_notices(model)

    def _choose_documents(self) -> None:
        """Where an order is chosen by measuring, its curve comes from other documents."""
        self.judge = self.text  # documents of the curve and of held-out estimates
        self.choosing = np.arange(len(self.text))  # rows of self.text that choose
        if not (self.config.exact or self.config.rescore or self.config.keep_one):
            return
        held_out = self.text.further(len(self.text))
        if held_out is not None and len(held_out) >= max(2, len(self.text) // 2):
            self.judge = held_out
            self.notices += [n for n in held_out.notices if n not in self.notices]
            return
        if len(self.text) < 2:
            self.notices.append(
                "There is one document only: orders are chosen and judged on the same one."
            )
            return
        self.choosing = np.arange(0, len(self.text), 2)
        self.judge = self.text.subset(list(range(1, len(self.text), 2)))
        self.notices.append(
            f"The source has {f'only {len(held_out)}' if held_out else 'no'} further documents: "
            f"{len(self.choosing)} of the {len(self.text)} choose the orders, "
            f"the other {len(self.judge)} give the curve."
        )

    def measure(self) -> None:
        """All that was asked, cheapest first, so that an interruption loses least."""
        config, model = self.config, self.model
        self.gradients = importance.gradients(
            model, self.text, config.batch_size, progress=config.progress
        )
        if config.roles:
            self.roles = roles.measure(self)
            try:
                self.circuits = circuits.measure(model, config.seed)
            except InterpError as error:
                self.notices.append(f"No copying and no composition of heads: {error}")
        if config.exact:
            self._measure_exact()
        if config.keep_one:
            self.keep_one = keepone.measure(self)
        if config.prune or config.rescore:
            self._measure_curve()

    def _sweep(
        self,
        text: Text,
        removals: list[Removal],
        what: str,
        *,
        kl: bool = False,
        into: Sweep | None = None,
        means: importance.Gradients | None = None,
        classes: tokenclasses.ByClass | None = None,
    ) -> Sweep:
        """Removals under this run's options; z statistics are the sample's unless given."""
        config = self.config
        return measure.sweep(
            self.model,
            text,
            removals,
            config.batch_size,
            means=means or self.gradients,
            kl=kl,
            seed=config.seed,
            progress=config.progress,
            what=what,
            into=into,
            classes=classes,
        )

    def _measure_exact(self) -> None:
        config = self.config
        modes: list[Mode] = [config.ablation]
        if config.ablation != "mean" and len(self.text) > 1:
            modes.append("mean")
        plans = {mode: [Removal((head,), mode) for head in self.all_heads] for mode in modes}
        seconds = sum(
            measure.time_of(self.model, self.text, plan, config.batch_size, kl=i == 0)
            for i, plan in enumerate(plans.values())
        )
        log.info(
            "Removing %d heads one at a time (%s) on %d documents: about %s.",
            len(self.all_heads),
            " and ".join(modes),
            len(self.text),
            _duration(seconds),
        )
        n = len(self.text)
        self.exact = measure.empty_sweep(n, len(self.all_heads), kl=True)
        if config.roles:
            self.classes = tokenclasses.ByClass(n, len(self.all_heads))
        self._sweep(
            self.text,
            plans[config.ablation],
            f"{config.ablation} ablation",
            kl=True,
            into=self.exact,
            classes=self.classes,
        )
        self.exact_mean = self.exact
        if n < 2:
            self.exact_mean = None  # there is no other document to take a mean of
        elif config.ablation != "mean":
            self.exact_mean = measure.empty_sweep(n, len(self.all_heads), kl=False)
            self._sweep(self.text, plans["mean"], "mean ablation", into=self.exact_mean)
        self._re_estimate()

    def _re_estimate(self) -> None:
        """The heads at both ends of the ranking, on documents that did not put them there."""
        assert self.exact is not None
        chosen_on = self.exact.delta[self.choosing].mean(0)
        rank = np.argsort(-chosen_on, kind="stable")
        count = min(HELD_OUT_HEADS, len(rank) // 2)
        ends = {"top": rank[:count], "bottom": rank[::-1][:count]}
        if self.judge is self.text or len(self.judge) < 2 or not count:
            return
        removals = [
            Removal((self.all_heads[i],), self.config.ablation) for e in ends.values() for i in e
        ]
        means = None
        if self.config.ablation != "zero":  # what stands in comes from the judging documents too
            means = importance.gradients(
                self.model,
                self.judge,
                self.config.batch_size,
                progress=self.config.progress,
                what="means",
            )
        again = self._sweep(self.judge, removals, "held-out heads", means=means)
        estimate = tables.paired(again.delta)
        for i, (end, j) in enumerate((e, j) for e, rows in ends.items() for j in rows):
            layer, head = self.all_heads[j]
            entry = {
                "layer": layer,
                "head": head,
                "loss_delta_chosen": chosen_on[j],
                "documents_chosen": len(self.choosing),
                "loss_delta": estimate.mean[i],
                "ci_low": estimate.low[i],
                "ci_high": estimate.high[i],
                "documents": len(self.judge),
            }
            self.held_out.setdefault(end, []).append(entry)

    def _measure_curve(self) -> None:
        assert self.gradients is not None
        config, n = self.config, sum(map(bool, self.units))
        raw = curve.importance_of_units(self.gradients.xi, self.group)
        by_norm = curve.ascending(curve.normalised(raw), self.units)
        counts = curve.step_counts(n, config.step)
        if config.fraction is not None:
            counts = sorted({*counts, round(config.fraction * n)})
        self.orders = [
            curve.Order("importance", None, by_norm, counts),
            curve.Order("raw", None, curve.ascending(raw, self.units), counts),
            curve.Order("compensated", None, by_norm, counts, mode="bias"),
        ]
        if self.exact is not None:
            own = self._own_of_units(self.exact.delta[self.choosing].mean(0))
            self.orders.append(curve.Order("exact", None, curve.ascending(own, self.units), counts))
        if config.rescore:
            self.orders.append(self._rescored(counts))
        seeds = [np.random.default_rng([config.seed, i]) for i in range(curve.RANDOM_SEEDS)]
        there = [unit for unit in self.units if unit]
        shuffled = [[there[j] for j in rng.permutation(n)] for rng in seeds]
        some = curve.random_counts(n)
        members = [curve.Order("random", i, us, some) for i, us in enumerate(shuffled)]
        self.orders.append(curve.Order("random", None, there, some, members=members))

        def on_judge(removals: list[Removal], what: str) -> Sweep:
            found = measure.empty_sweep(len(self.judge), len(removals), kl=False)
            try:
                self._sweep(self.judge, removals, what, into=found)
            except KeyboardInterrupt:  # the steps measured so far are kept first
                self.complete = False
            if not np.isnan(found.clean).any():
                self.baseline = found.clean
            return found

        curve.measure_steps(self.orders, on_judge)
        if not self.complete:
            raise KeyboardInterrupt
        growing = measure.Growing(
            self.model, self.judge, config.batch_size, self.gradients, config.progress
        )
        limits = [*curve.LIMITS, *([config.max_loss] if config.max_loss is not None else [])]
        for order in self.orders:
            curve.refine(order, growing, limits if order.name != "random" else curve.LIMITS)
        if self.exact is not None:
            self._measure_interaction(self.orders[0])

    def _own_of_units(self, own: np.ndarray) -> np.ndarray:
        """[unit] sums of what every head [head] does alone."""
        place = {head: i for i, head in enumerate(self.all_heads)}
        return np.array([sum(own[place[head]] for head in unit) for unit in self.units])

    def _rescored(self, counts: list[int]) -> curve.Order:
        """Importance estimated again, on the choosing documents, after every step."""
        gone: list[curve.Unit] = []
        rows = self.text.subset(self.choosing.tolist())
        for i, count in enumerate(counts[1:]):
            found = importance.gradients(
                self.model,
                rows,
                self.config.batch_size,
                removed=[h for unit in gone for h in unit],
                progress=self.config.progress,
                what=f"re-estimating {i + 1}/{len(counts) - 1}",
            )
            scores = curve.normalised(curve.importance_of_units(found.xi, self.group))
            taken = set(gone)
            left = [u for u in curve.ascending(scores, self.units) if u not in taken]
            gone += left[: count - len(gone)]
        return curve.Order("rescore", None, gone, counts)

    def _measure_interaction(self, order: curve.Order) -> None:
        """Joint loss change at each step minus the sum of its heads' own, on the same documents."""
        assert self.exact is not None
        place = {head: i for i, head in enumerate(self.all_heads)}
        counts = order.counts[1:]
        joint = self._sweep(self.text, [order.removal(c) for c in counts], "interaction").delta
        if self.config.ablation != "zero":
            self.notices.append(
                "interaction compares joint removal (zero) with single effects under "
                f"{self.config.ablation} ablation."
            )
        for i, count in enumerate(counts):
            own = self.exact.delta[:, [place[h] for h in order.removal(count).heads]].sum(1)
            gap = tables.paired(joint[:, i] - own)
            self.interaction.append(
                {
                    "n_pruned": order.heads_removed(count),
                    "joint": joint[:, i].mean(),
                    "sum_of_own": own.mean(),
                    "interaction": gap.mean,
                    "ci_low": gap.low,
                    "ci_high": gap.high,
                }
            )

    def cut_out(self, overwrite: bool, command: str | None) -> None:
        """Write the checkpoint; where that fails, what was measured is not lost."""
        try:
            self.cut = cutting.cut_out(self, overwrite, command)
        except (InterpError, RuntimeError) as error:  # the latter: out of memory, above all
            self.notices.append(f"No checkpoint was written: {error}")

    def result(self) -> Result:
        """Tables, summary and provenance."""
        return tables.assemble(self)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

"""The heads result: tables with units, and the summary. Arithmetic on per-document numbers only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from interp import stats
from interp.analyzers.heads import circuits, curve, keepone, roles, speed, tokenclasses
from interp.analyzers.heads.importance import predicted_counts
from interp.analyzers.heads.measure import Sweep
from interp.results import Column, Result, of_run

if TYPE_CHECKING:
    from interp.analyzers.heads import _Run

NATS = "nats per token"
ALPHA = 0.05
COARSE_STEP = 0.1
"""Share of heads per step above which the curve can cross a limit and come back unseen."""

HEADS_COLUMNS = {
    "layer": Column("index", "Layer, counted from 0."),
    "head": Column("index", "Query head within the layer, counted from 0."),
    "kv_head": Column("index", "KV head that this query head reads."),
    "importance": Column(
        NATS, "Mean over documents of |dL/dxi| at xi = 1, xi scaling the head's z (Michel 2019)."
    ),
    "importance_low": Column(
        NATS, "Lower end of importance's 95% t interval over documents, on a log scale."
    ),
    "importance_high": Column(
        NATS, "Upper end of importance's 95% t interval over documents, on a log scale."
    ),
    "importance_norm": Column("share of layer norm", "importance divided by its layer's l2 norm."),
    "importance_token": Column(
        NATS, "Mean over documents of the mean over included positions of |z . dL/dz|."
    ),
    "loss_delta": Column(
        NATS, "Loss with the head ablated (--ablation) minus baseline, paired by document."
    ),
    "ci_low": Column(NATS, "Lower end of loss_delta's 95% paired t interval over documents."),
    "ci_high": Column(NATS, "Upper end of loss_delta's 95% paired t interval over documents."),
    "p_value": Column("probability", "Two-sided paired t test of loss_delta = 0."),
    "q_value": Column("probability", "p_value after Benjamini-Hochberg over all heads."),
    "significant": Column("true or false", "q_value < 0.05; grows with the number of documents."),
    "verdict": Column(
        "word",
        "material: interval wholly beyond 0.01 nats; negligible: wholly within; else undecided.",
    ),
    "kl": Column(NATS, "KL(clean || ablated) of next-token distributions, mean over documents."),
    "kl_low": Column(NATS, "Lower end of kl's 95% t interval over documents, on a log scale."),
    "kl_high": Column(NATS, "Upper end of kl's 95% t interval over documents, on a log scale."),
    "loss_delta_mean": Column(
        NATS, "As loss_delta, with z replaced by its mean over other documents' included positions."
    ),
    "mean_low": Column(NATS, "Lower end of loss_delta_mean's 95% paired t interval."),
    "mean_high": Column(NATS, "Upper end of loss_delta_mean's 95% paired t interval."),
}
EXACT_COLUMNS = list(HEADS_COLUMNS)[list(HEADS_COLUMNS).index("loss_delta") :]
PRUNE_COLUMNS = {
    "order": Column(
        "word",
        "importance (by importance_norm), raw (by importance), compensated (as importance, each "
        "removed head's mean output kept as a bias), random, exact (by loss_delta), rescore.",
    ),
    "seed": Column("index", "Number of the random order; missing for the others."),
    "step": Column("index", "Step of this order, counted from 0 (nothing removed)."),
    "n_pruned": Column("heads", "Query heads removed."),
    "fraction": Column("share of heads", "n_pruned over all query heads."),
    "loss": Column(NATS, "Mean over documents of the loss with these heads removed."),
    "loss_delta": Column(NATS, "loss minus baseline, paired by document."),
    "ci_low": Column(NATS, "Lower end of loss_delta's 95% paired t interval over documents."),
    "ci_high": Column(NATS, "Upper end of loss_delta's 95% paired t interval over documents."),
}
SUMMARY_COLUMNS = {
    "baseline_loss": Column(NATS, "Mean over the curve's documents, nothing removed."),
    "baseline_low": Column(NATS, "Lower end of its 95% t interval."),
    "baseline_high": Column(NATS, "Upper end of its 95% t interval."),
    "baseline_loss_token_weighted": Column(NATS, "The same, every token counting once."),
    "baseline_documents": Column("documents", "Documents behind baseline_loss."),
    "baseline_part": Column(
        "word", "sample: the heads table's documents; held_out or subset: others, to judge orders."
    ),
    "scored_loss": Column(NATS, "Baseline of the documents that the heads table is measured on."),
    "heads": Column("heads", "Query heads of the model."),
    "documents": Column(
        "documents",
        "Documents behind the heads table: with --exact those that every head was removed on "
        "before the run ended or was interrupted, else those behind importance.",
    ),
    "scored_documents": Column("documents", "Documents behind importance and scored_loss."),
    "mean_documents": Column("documents", "Documents behind loss_delta_mean."),
    "pruned_order": Column(
        "[layer, head]", "Heads by ascending importance_norm: the order removed."
    ),
    "prunable": Column(
        "share of heads",
        "Heads removed before the loss change first exceeds 0.01 / 0.05 nats; for random, of the "
        "mean over its orders. Looked for head by head inside the first step whose end exceeds the "
        "limit. A crossing there and back inside an earlier step is not seen and makes the share "
        "too large: the likelier the wider the steps (--step; random takes 0.2 from 0.2 on).",
    ),
    "prunable_low": Column("share of heads", "The same by the interval's upper end: conservative."),
    "prunable_high": Column("share of heads", "The same by the interval's lower end: optimistic."),
    "best_order": Column("word", "Order with the largest prunable share, per limit."),
    "verdicts": Column("heads", "Heads by verdict on loss_delta."),
    "significant": Column("heads", "Heads with q < 0.05; grows with the number of documents."),
    "significant_improve": Column("heads", "Significant ones whose removal lowers the loss."),
    "significant_hurt": Column("heads", "Significant ones whose removal raises the loss."),
    "material_improve": Column("heads", "Material ones whose removal lowers the loss."),
    "material_zero_and_mean": Column("heads", "Heads material under both kinds of ablation."),
    "rank_correlation": Column("Spearman rho", "Over heads."),
    "held_out": Column(NATS, "Heads at the ends of the ranking, measured on other documents."),
    "token_classes": Column(
        "mixed",
        "Per class of predicted token: its tokens, documents and mean loss (nats per token), the "
        "heads that are material there, and which of them are negligible on average.",
    ),
    "roles": Column(
        "mixed",
        "Heads by role, with their mean importance and loss change (nats per token); scores of an "
        "untrained model; Spearman's rho of importance, loss change and KL over heads, between "
        "text and repeated random tokens and between halves of the text.",
    ),
    "circuits": Column(
        "mixed",
        "Weights alone: heads whose copying lies outside the middle 95% of re-paired heads, and "
        "pairs of heads whose composition exceeds 99.9% of re-paired circuits, with the number "
        "that chance would give.",
    ),
    "keep_one": Column(
        "mixed",
        "Layers by verdict with only their best head left; Gini coefficient of the loss change "
        "over layers, beside that of layers that all cost the same (null); documents behind both.",
    ),
    "export": Column(
        "mixed",
        "The written checkpoint: heads cut out, loss before and after (nats per token, paired by "
        "document), parameters, bytes of the KV cache per token, largest relative difference of "
        "its logits from the masked model's.",
    ),
    "interaction": Column(
        NATS, "Joint loss change at each step minus the sum of its heads' own, same documents."
    ),
}


def paired(differences: np.ndarray) -> stats.PairedT:
    """Mean, interval and p-value over the document axis (0)."""
    return stats.paired_t(differences, axis=0)


def assemble(run: _Run) -> Result:
    """Everything a run has measured, as a Result."""
    assert run.gradients is not None
    tables = {"heads": _heads_table(run)}
    columns = {"heads": HEADS_COLUMNS | roles.COLUMNS | circuits.COLUMNS}
    measured = [order for order in run.orders if order.points]
    if measured:
        assert run.baseline is not None
        tables["prune"] = _prune_table(measured, run.baseline, coarse=True)
        columns["prune"] = PRUNE_COLUMNS
        refined = _prune_table(measured, run.baseline, coarse=False)
        if len(refined):
            tables["refine"] = refined
            columns["refine"] = PRUNE_COLUMNS
    summary = _summary(run, tables["heads"], measured)
    if run.classes is not None and run.complete:
        tables["token_classes"] = tokenclasses.table(run.classes, run.all_heads)
        columns["token_classes"] = tokenclasses.COLUMNS
        summary["token_classes"] = tokenclasses.summary(
            tables["token_classes"], tables["heads"], run.classes
        )
    if run.roles is not None:
        summary["roles"] = roles.summary(run, run.roles, tables["heads"])
    if run.circuits is not None:
        gone = set(run.model.cfg.removed)
        summary["circuits"] = circuits.summary(run.circuits, gone, run.model.cfg.d_model)
        tables["composition"] = circuits.pairs(run.circuits, gone)
        columns["composition"] = circuits.PAIRS
    if run.keep_one is not None:
        summary["keep_one"] = keepone.summary(run.keep_one, run)
        tables["keep_one"] = keepone.table(run.keep_one)
        columns["keep_one"] = keepone.COLUMNS
    if run.cut is not None:
        summary["export"] = run.cut.summary()
        tables["speed"] = speed.table(run.cut.timings)
        columns["speed"] = speed.SPEED_COLUMNS
    notices = [*run.notices, *_notices(run, summary)]
    return of_run(run, "heads", tables, columns, summary, SUMMARY_COLUMNS, notices=notices)


def _notices(run: _Run, summary: dict[str, Any]) -> list[str]:
    """What a reader must know of these numbers in particular."""
    found = []
    if summary["documents"] < len(run.text):
        found.append(
            f"--exact was interrupted: loss_delta and what follows from it are of the "
            f"{summary['documents']} documents, of {len(run.text)}, that were finished."
        )
    if "prunable" in summary and run.config.step > COARSE_STEP:
        found.append(
            f"--step {run.config.step:g} is coarse: prunable can be too large, because a crossing "
            f"there and back inside a step is not seen. Use --step {COARSE_STEP} or less."
        )
    return found


def _heads_table(run: _Run) -> pd.DataFrame:
    assert run.gradients is not None
    importance = stats.positive_interval(np.abs(run.gradients.xi), axis=0)
    layers, heads = np.indices(importance.mean.shape)
    table = pd.DataFrame(
        {
            "layer": layers.ravel(),
            "head": heads.ravel(),
            "kv_head": [run.model.kv_head(int(h)) for h in heads.ravel()],
            "importance": importance.mean.ravel(),
            "importance_low": importance.low.ravel(),
            "importance_high": importance.high.ravel(),
            "importance_norm": curve.normalised(importance.mean).ravel(),
            "importance_token": run.gradients.token.mean(0).ravel(),
        }
    )
    n_heads = run.model.cfg.n_heads
    table = table.loc[[layer * n_heads + head for layer, head in run.all_heads]]
    if run.exact is not None:
        table = table.assign(**_exact_columns(run))
    if run.roles is not None:
        at = table["layer"].to_numpy(), table["head"].to_numpy()
        table = table.assign(**{name: v[at] for name, v in roles.columns(run.roles).items()})
    if run.circuits is not None:
        at = table["layer"].to_numpy(), table["head"].to_numpy()
        found = circuits.columns(run.circuits)
        table = table.assign(**{name: v[at] for name, v in found.items()})
    return table


def _finished(per_document: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns to report of an array [document, head] that may have been interrupted."""
    done = ~np.isnan(per_document)
    whole = np.all(done, axis=1)
    if whole.any() and not done.all():  # some batches are through: all heads on their documents
        return whole, np.full(per_document.shape[1], True)
    return np.full(len(per_document), True), np.all(done, axis=0)


def _documents(per_document: np.ndarray) -> int:
    """How many documents the reported columns of such an array rest on."""
    rows, columns = _finished(per_document)
    return int(rows.sum()) if columns.any() else 0


def _exact_values(exact: Sweep) -> np.ndarray:
    """[document, head] finite where both the loss and the KL are measured."""
    assert exact.kl is not None
    return exact.delta + exact.kl


def _exact_columns(run: _Run) -> dict[str, Any]:
    assert run.exact is not None
    assert run.exact.kl is not None
    n = run.exact.loss.shape[1]
    rows, columns = _finished(_exact_values(run.exact))
    out: dict[str, Any] = {name: np.full(n, np.nan) for name in EXACT_COLUMNS}
    significant = pd.array([pd.NA] * n, dtype="boolean")  # missing where not measured
    out["verdict"] = np.full(n, "not measured", dtype=object)
    if columns.any():
        delta = paired(run.exact.delta[rows][:, columns])
        kl = stats.positive_interval(run.exact.kl[rows][:, columns], axis=0)
        q = stats.benjamini_hochberg(delta.p)
        parts = {
            "loss_delta": delta.mean,
            "ci_low": delta.low,
            "ci_high": delta.high,
            "p_value": delta.p,
            "q_value": q,
            "verdict": stats.verdict(delta.low, delta.high),
            "kl": kl.mean,
            "kl_low": kl.low,
            "kl_high": kl.high,
        }
        for name, values in parts.items():
            out[name][columns] = values
        significant[columns] = q < ALPHA
    out["significant"] = significant.to_numpy(dtype=bool) if columns.all() else significant
    if run.exact_mean is not None:
        rows, columns = _finished(run.exact_mean.delta)
        if columns.any():
            mean = paired(run.exact_mean.delta[rows][:, columns])
            for name, values in (
                ("loss_delta_mean", mean.mean),
                ("mean_low", mean.low),
                ("mean_high", mean.high),
            ):
                out[name][columns] = values
    return out


def _prune_table(orders: list[curve.Order], baseline: np.ndarray, coarse: bool) -> pd.DataFrame:
    rows = []
    for order in (single for group in orders for single in (group.members or [group])):
        total = order.heads_removed(len(order.units))
        for n, delta in sorted(order.points.items()):
            if (n in order.counts) != coarse:
                continue
            change = paired(delta)
            removed = order.heads_removed(n)
            rows.append(
                {
                    "order": order.name,
                    "seed": order.seed,
                    "step": order.counts.index(n) if coarse else _step_of(order, n),
                    "n_pruned": removed,
                    "fraction": removed / total,
                    # At 0 this is the baseline itself, to the last bit.
                    "loss": float((baseline + delta).mean()) if n else float(baseline.mean()),
                    "loss_delta": float(change.mean),
                    "ci_low": float(change.low),
                    "ci_high": float(change.high),
                }
            )
    table = pd.DataFrame(rows, columns=list(PRUNE_COLUMNS))
    return table.assign(seed=table["seed"].astype("Int64"))


def _step_of(order: curve.Order, n: int) -> int:
    return sum(count < n for count in order.counts)


def _summary(run: _Run, heads: pd.DataFrame, orders: list[curve.Order]) -> dict[str, Any]:
    assert run.gradients is not None
    scored = run.gradients.loss
    base = run.baseline if run.baseline is not None else scored
    text = run.judge if run.baseline is not None else run.text
    counts = predicted_counts(text)
    ends = stats.mean_interval(base)
    order = heads.sort_values("importance_norm", kind="stable")[["layer", "head"]]
    if orders:
        pruned = [list(h) for unit in orders[0].units for h in unit]
    else:
        pruned = order.to_numpy().tolist()
    summary: dict[str, Any] = {
        "baseline_loss": float(base.mean()),
        "baseline_low": float(ends.low),
        "baseline_high": float(ends.high),
        "baseline_loss_token_weighted": float((base * counts).sum() / counts.sum()),
        "baseline_documents": len(base),
        "baseline_part": "sample" if text is run.text else text.part,
        "scored_loss": float(scored.mean()),
        "heads": len(heads),
        "documents": len(run.text) if run.exact is None else _documents(_exact_values(run.exact)),
        "scored_documents": len(scored),
        "pruned_order": pruned,
    }
    if orders:
        summary |= _prunable(orders)
    if run.exact is not None:
        summary |= _exact_summary(run, heads)
    if run.exact_mean is not None:
        summary["mean_documents"] = _documents(run.exact_mean.delta)
    return summary


def _prunable(orders: list[curve.Order]) -> dict[str, Any]:
    # The curve at the interval's upper end crosses first: it gives the low fraction.
    ends = {"prunable": "mean", "prunable_low": "high", "prunable_high": "low"}
    out: dict[str, Any] = {key: {} for key in ends}
    for order in orders:
        curves = order.curves()
        for key, end in ends.items():
            # Not known while an interrupted run lacks a step or leaves a crossing unrefined.
            known = all(n in order.points for n in order.counts) and not order.wanted(1)
            known &= not any(np.isnan(v) for v in curves[end].values())
            out[key][order.name] = {
                str(limit): order.prunable(curves[end], limit) if known else None
                for limit in curve.LIMITS
            }
    out["best_order"] = {}
    for limit in map(str, curve.LIMITS):
        shares = {name: limits[limit] for name, limits in out["prunable"].items()}
        found = {n: s for n, s in shares.items() if n != "random" and s is not None}
        if found:
            out["best_order"][limit] = max(found, key=lambda name: found[name])
    return out


def _exact_summary(run: _Run, heads: pd.DataFrame) -> dict[str, Any]:
    known = heads.query("verdict != 'not measured'")
    word = known["verdict"].to_numpy(dtype=str)
    delta, kl, norm, importance = (
        known[name].to_numpy(dtype=float)
        for name in ("loss_delta", "kl", "importance_norm", "importance")
    )
    significant, material = known["significant"].to_numpy(dtype=bool), word == "material"
    low, high = (known[name].to_numpy(dtype=float) for name in ("mean_low", "mean_high"))
    both = material & (stats.verdict(low, high) == "material")
    out = {
        "verdicts": {
            name: int((word == name).sum()) for name in ("material", "negligible", "undecided")
        }
        | ({"not measured": len(heads) - len(known)} if len(known) < len(heads) else {}),
        "significant": int(significant.sum()),
        "significant_improve": int((significant & (delta < 0)).sum()),
        "significant_hurt": int((significant & (delta > 0)).sum()),
        "material_improve": int((material & (delta < 0)).sum()),
        **({"material_zero_and_mean": int(both.sum())} if np.isfinite(low).any() else {}),
        "rank_correlation": {
            "importance_norm~loss_delta": stats.spearman(norm, delta),
            "importance_norm~|loss_delta|": stats.spearman(norm, np.abs(delta)),
            "importance_norm~kl": stats.spearman(norm, kl),
            "importance~loss_delta": stats.spearman(importance, delta),
            "importance~kl": stats.spearman(importance, kl),
        },
        "held_out": run.held_out,
    }
    if run.interaction:
        out["interaction"] = run.interaction
    return out

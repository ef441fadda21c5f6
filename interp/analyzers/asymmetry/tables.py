"""The asymmetry result: tables with units, and the summary. Arithmetic on measured numbers only."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from interp import stats
from interp.analyzers.asymmetry import columns
from interp.analyzers.asymmetry.ontext import CONTROLS, KINDS, OnText
from interp.analyzers.asymmetry.symmetrise import PER_HEAD, VARIANTS, Effects
from interp.analyzers.asymmetry.weights import Basis
from interp.results import Result, described, of_run

if TYPE_CHECKING:
    from interp.analyzers.asymmetry import Run
    from interp.config import AsymmetryConfig

ALPHA = 0.05
CLAIM = (0.3, 0.5)
"""The withdrawn claim: correlations of S_ij and S_ji are only 0.3 to 0.5."""
TAIL = (2.5, 97.5)
HEADLINE = "content_centred"
_SUFFIXES = {"natural": "", "repeated": "_repeated"}


def correlations(on_text: OnText) -> dict[str, stats.Interval]:
    """kind -> mean over documents [layer, head] of r, and its t interval.

    A document that says nothing of a head (nan) is left out of that head's mean.
    """
    out = {}
    for kind, r in on_text.r.items():
        rows = r[on_text.finished]
        rows = rows[~np.isnan(rows).all((1, 2))]
        flat = rows.reshape(len(rows), r.shape[1] * r.shape[2])  # of no rows at all, too
        parts = np.full((3, flat.shape[1]), np.nan)
        whole = ~np.isnan(flat).any(0) if len(flat) else np.zeros(flat.shape[1], dtype=bool)
        if whole.any():
            found = stats.mean_interval(flat[:, whole])
            parts[:, whole] = found.mean, found.low, found.high
        for i in np.flatnonzero(~whole):
            known = flat[~np.isnan(flat[:, i]), i]
            if len(known):
                found = stats.mean_interval(known)
                parts[:, i] = found.mean, found.low, found.high
        out[kind] = stats.Interval(*(part.reshape(r.shape[1:]) for part in parts))
    return out


def assemble(run: Run) -> Result:
    """Everything a run has measured, as a Result."""
    assert run.weights is not None
    made = {
        "asymmetry": (_heads_table(run), columns.HEADS),
        "asymmetry_layers": (_layers_table(run), columns.LAYERS),
    }
    if run.weights.offsets:
        made["offsets"] = (_offsets_table(run), columns.OFFSETS)
    if run.effects:
        made["symmetrise"] = (_symmetrise_table(run.effects), columns.SYMMETRISE)
    if run.examples is not None:
        made["examples"] = (_examples_table(run), columns.EXAMPLES)
    summary = _summary(run, made["asymmetry"][0])
    return of_run(
        run,
        "asymmetry",
        {name: table for name, (table, _) in made.items()},
        {name: known for name, (_, known) in made.items()},
        summary,
        columns.SUMMARY,
    )


# Tables -------------------------------------------------------------------------------------------


def _heads_table(run: Run) -> pd.DataFrame:
    assert run.weights is not None
    raw, folded = run.weights.raw, run.weights.folded
    layers, heads = np.indices(raw.heads["symmetry"].shape)
    out: dict[str, Any] = {
        "layer": layers,
        "head": heads,
        "kv_head": np.vectorize(run.model.kv_head)(heads),
        "asymmetry": (1 - raw.heads["symmetry"]) / 2,
    }
    for basis, suffix in ((raw, ""), (folded, "_folded")):
        if basis is not None:
            out |= {f"{name}{suffix}": values for name, values in basis.heads.items()}
            symmetry = basis.heads["symmetry"]
            known = np.isfinite(symmetry)
            percentile = np.full(symmetry.shape, np.nan)
            null = basis.null[np.isfinite(basis.null)]
            percentile[known] = stats.percentile_of(symmetry[known], null)
            out[f"null_percentile{suffix}"] = percentile
    if run.on_text is not None:
        out |= _correlation_columns(run.on_text)
    for name, effects in run.effects.items():
        if effects.finished.any():
            out |= _effect_columns(effects, _SUFFIXES[name])
    table: Any = pd.DataFrame({name: np.asarray(values).ravel() for name, values in out.items()})
    table = table[_there(run, table)]
    return table[[name for name in columns.ORDER if name in table.columns]]


def _there(run: Run, table: pd.DataFrame) -> np.ndarray:
    """[row] whether a row's head is in the model; those cut out of the checkpoint have no row."""
    gone = set(run.model.cfg.removed)
    return np.array([at not in gone for at in zip(table["layer"], table["head"], strict=True)])


def _correlation_columns(on_text: OnText) -> dict[str, np.ndarray]:
    out = {"symmetry_data": on_text.symmetry_data}
    found = correlations(on_text)
    for kind, interval in found.items():
        if kind == "same":
            continue
        name = "score_correlation" + ("" if kind == "real" else f"_{kind}")
        parts = {"": interval.mean, "_low": interval.low, "_high": interval.high}
        out |= {f"{name}{end}": values for end, values in parts.items()}
    if "repaired" in found:
        null, mine = found["repaired"].mean, found[HEADLINE].mean
        known = np.isfinite(mine)
        percentile = np.full(mine.shape, np.nan)
        percentile[known] = stats.percentile_of(mine[known], null[np.isfinite(null)])
        out["score_null_percentile"] = percentile
    return out


def _effect_columns(effects: Effects, suffix: str) -> dict[str, np.ndarray]:
    done = effects.finished
    clean = effects.clean[done][:, None, None]
    one, control = (effects.single[variant][done] - clean for variant in PER_HEAD)
    out: dict[str, np.ndarray] = {}
    there = np.isfinite(one).all(0)  # heads that were cut out of the checkpoint have nothing
    for name, values in (("symmetrised", one), ("control", control), ("excess", one - control)):
        test = stats.paired_t(values[:, there])
        found = {
            f"loss_delta_{name}{suffix}": test.mean,
            f"{name}{suffix}_low": test.low,
            f"{name}{suffix}_high": test.high,
        }
        if name != "control":
            found[f"{name}{suffix}_q"] = stats.benjamini_hochberg(test.p)
        for column, numbers in found.items():
            out[column] = np.full(there.shape, np.nan)
            out[column][there] = numbers
    return out


def _layers_table(run: Run) -> pd.DataFrame:
    assert run.weights is not None
    raw, folded = run.weights.raw, run.weights.folded
    whole = raw.layers["symmetry"]
    out: dict[str, Any] = {
        "layer": np.arange(len(whole)),
        "symmetry": whole,
        "asymmetry": (1 - whole) / 2,
        "directionality": raw.layers["directionality"],
    }
    if folded is not None:
        out |= {f"{name}_folded": values for name, values in folded.layers.items()}
    sources = {"head": raw.heads["symmetry"]}
    if run.on_text is not None:
        sources["correlation"] = correlations(run.on_text)[HEADLINE].mean
    for name, values in sources.items():
        for end, percent in (("median", 50), ("q25", 25), ("q75", 75)):
            out[f"{name}_{end}"] = [_percentile(row, percent) for row in values]
    return pd.DataFrame(out)


def _offsets_table(run: Run) -> pd.DataFrame:
    assert run.weights is not None
    assert run.weights.by_offset is not None
    assert run.weights.by_offset_reversed is not None
    layers, heads, at = np.indices(run.weights.by_offset.shape)
    table: Any = pd.DataFrame(
        {
            "layer": layers.ravel(),
            "head": heads.ravel(),
            "offset": np.array(run.weights.offsets)[at.ravel()],
            "symmetry": run.weights.by_offset.ravel(),
            "symmetry_reversed": run.weights.by_offset_reversed.ravel(),
        }
    )
    return table[_there(run, table)]


def _symmetrise_table(effects: dict[str, Effects]) -> pd.DataFrame:
    rows = []
    for name, found in effects.items():
        done = found.finished
        if not done.any():
            continue
        for variant, meaning in VARIANTS.items():
            test = stats.paired_t(found.together[variant][done] - found.clean[done])
            rows.append(
                {
                    "text": name,
                    "variant": variant,
                    "loss_delta": float(test.mean),
                    "ci_low": float(test.low),
                    "ci_high": float(test.high),
                    "p_value": float(test.p),
                    "documents": int(done.sum()),
                    "meaning": meaning,
                }
            )
    table = pd.DataFrame(rows, columns=[name for name in columns.SYMMETRISE if name != "q_value"])
    table.insert(6, "q_value", stats.benjamini_hochberg(table["p_value"].astype(float)))
    return table


def _examples_table(run: Run) -> pd.DataFrame:
    made = run.examples
    assert made is not None
    rows = []
    for i, (end, layer, head) in enumerate(made.heads):
        for a, query in enumerate(made.positions):
            for b, key in enumerate(made.positions):
                row = (end, layer, head, query, key, made.tokens[a], made.tokens[b])
                rows.append((*row, made.real[i, a, b], made.content[i, a, b]))
    return pd.DataFrame(rows, columns=list(columns.EXAMPLES))


# Summary ------------------------------------------------------------------------------------------


def _percentile(values: np.ndarray, percent: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.percentile(known, percent)) if len(known) else float("nan")


def _quantiles(values: np.ndarray) -> dict[str, float]:
    flat = np.asarray(values).ravel()
    points = {"min": 0, "low": TAIL[0], "q25": 25, "median": 50, "q75": 75, "high": TAIL[1]}
    return {name: _percentile(flat, p) for name, p in (points | {"max": 100}).items()}


def _summary(run: Run, heads: Any) -> dict[str, Any]:
    assert run.weights is not None
    found = run.weights
    summary: dict[str, Any] = {
        "heads": len(heads),
        "kv_heads": run.model.cfg.n_kv_heads,
        "symmetry": _quantiles(found.raw.heads["symmetry"]),
        "layer_symmetry": _quantiles(found.raw.layers["symmetry"]),
        "null": _null(found.raw),
        "gaussian": {
            name: {"mean": values.mean(), "sd": values.std(ddof=1)}
            for name, values in found.gaussian.items()
        },
        "positive_real": _percentile(found.raw.heads["positive_real"], 50),
        "antisymmetric_rank": _percentile(found.raw.heads["antisymmetric_rank"], 50),
        "biases": run.biases,
    }
    if heads["null_percentile"].notna().any():
        summary["outside_null"] = {
            "below": int((heads["null_percentile"] < TAIL[0]).sum()),
            "above": int((heads["null_percentile"] > TAIL[1]).sum()),
        }
    if found.folded is not None:
        summary["symmetry_folded"] = _quantiles(found.folded.heads["symmetry"])
        summary["null_folded"] = _null(found.folded)
    if found.offsets:
        assert found.by_offset is not None
        at = {str(o): found.by_offset[:, :, i] for i, o in enumerate(found.offsets)}
        summary["offsets"] = {name: _percentile(values, 50) for name, values in at.items()}
    if run.on_text is not None and run.on_text.finished.any():
        summary |= _text_summary(run.on_text, heads)
    if any(effects.finished.any() for effects in run.effects.values()):
        summary |= _effect_summary(run, heads)
    return summary


def _null(basis: Basis) -> dict[str, float]:
    return _quantiles(basis.null) | {"pairs": len(basis.null)}


def _text_summary(on_text: OnText, heads: Any) -> dict[str, Any]:
    short = np.isnan(on_text.r["real"]).all((1, 2)) & on_text.finished
    found = correlations(on_text)
    out: dict[str, Any] = {
        "documents": int((on_text.finished & ~short).sum()),
        "documents_too_short": int(short.sum()),
        "claim": {kind: _claim(on_text, kind, found[kind].mean) for kind in KINDS},
    }
    headline = heads["score_correlation_content_centred"]
    known = headline.notna()
    out["rank_correlation"] = {
        name: stats.spearman(heads.loc[known, name], headline[known])
        for name in ("symmetry", "symmetry_folded", "symmetry_data")
        if name in heads.columns and heads.loc[known, name].notna().all()
    }
    if CONTROLS[0] in found:
        out["offsets_removed"] = {
            kind: _percentile(found[kind].mean.ravel(), 50) for kind in CONTROLS[:2]
        }
        out["control_same"] = _percentile(on_text.r["same"].ravel(), 0)
        if np.isfinite(found["repaired"].mean).any():
            out["control_repaired"] = _quantiles(found["repaired"].mean)
            out["above_repaired"] = int((heads["score_null_percentile"] > TAIL[1]).sum())
    return out


def _claim(on_text: OnText, kind: str, mean: np.ndarray) -> dict[str, Any] | None:
    """The withdrawn claim, of one kind of correlation."""
    flat = mean[np.isfinite(mean)]
    if not len(flat):
        return None
    r = on_text.r[kind][on_text.finished]
    r = r[~np.isnan(r).all((1, 2))].reshape(-1, mean.size)[:, np.isfinite(mean).ravel()]
    low, high = CLAIM
    q25, median, q75 = np.percentile(flat, [25, 50, 75])
    ends = jackknife(r, lambda x: np.percentile(np.nanmean(x, 0), [25, 50, 75]))
    out: dict[str, Any] = {"median": median, "q25": q25, "q75": q75}
    for i, name in enumerate(("q25", "median", "q75")):
        out[f"{name}_low"], out[f"{name}_high"] = ends[0][i], ends[1][i]
    out["min"], out["max"] = flat.min(), flat.max()
    out["iqr_within"] = bool(q25 >= low and q75 <= high)
    out["heads_within"] = int(((flat >= low) & (flat <= high)).sum())
    out["heads_below"] = int((flat < low).sum())
    out["heads_above"] = int((flat > high).sum())
    out["heads_negative"] = int((flat < 0).sum())
    out["heads"] = len(flat)
    return out


def jackknife(documents: np.ndarray, statistic: Any) -> tuple[np.ndarray, np.ndarray]:
    """95% interval of a statistic over documents: its value +- t times the jackknife's error.

    Args:
        documents: [document, ...].
        statistic: array of some documents -> [value].

    Returns:
        The two ends; nan with a single document.

    Source: Efron and Tibshirani (1993), chapter 11.
    """
    n, value = len(documents), np.asarray(statistic(documents))
    if n < 2:
        return np.full_like(value, np.nan), np.full_like(value, np.nan)
    without = np.stack([statistic(np.delete(documents, i, axis=0)) for i in range(n)])
    error = np.sqrt((n - 1) / n * np.square(without - without.mean(0)).sum(0))
    half = scipy_stats.t.ppf(0.975, n - 1) * error
    return value - half, value + half


def _effect_summary(run: Run, heads: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"baseline_loss": {}, "symmetrise": {}, "single_heads": {}}
    for name, effects in run.effects.items():
        done = effects.finished
        if not done.any():
            continue
        out["baseline_loss"][name] = effects.clean[done].mean()
        changes: dict[str, Any] = {}
        for variant, loss in effects.together.items():
            test = stats.paired_t(loss[done] - effects.clean[done])
            changes[variant] = {"mean": test.mean, "low": test.low, "high": test.high}
        excess = effects.together["swap_kept"] - effects.together["permuted"]
        test = stats.paired_t(excess[done])
        changes["swap_kept - permuted"] = {"mean": test.mean, "low": test.low, "high": test.high}
        out["symmetrise"][name] = changes
        suffix = _SUFFIXES[name]
        q, delta = heads[f"excess{suffix}_q"], heads[f"loss_delta_excess{suffix}"]
        out["single_heads"][name] = {
            "worse_than_control": int(((q < ALPHA) & (delta > 0)).sum()),
            "better_than_control": int(((q < ALPHA) & (delta < 0)).sum()),
            "documents": int(done.sum()),
        }
    return out


def combine(made: list[tuple[str, Result]], config: AsymmetryConfig) -> Result:
    """Several checkpoints' results as one, with a checkpoint column in both tables."""
    last = made[-1][1]
    tables: dict[str, Any] = {}
    for name, known in (("asymmetry", columns.HEADS), ("asymmetry_layers", columns.LAYERS)):
        parts = []
        for checkpoint, result in made:
            table = result.tables[name].copy()
            table.insert(0, "checkpoint", checkpoint)
            parts.append(table)
        tables[name] = pd.concat(parts, ignore_index=True)
        tables[name] = tables[name][[c for c in known if c in tables[name].columns]]
    tables["asymmetry"] = tables["asymmetry"][
        [c for c in columns.ORDER if c in tables["asymmetry"].columns]
    ]
    summary = {
        "heads": last.summary["heads"],
        "checkpoints": {
            name: {
                "symmetry": result.summary["symmetry"]["median"],
                "layer_symmetry": result.summary["layer_symmetry"]["median"],
                "null": result.summary["null"]["median"],
            }
            for name, result in made
        },
    }
    known = {"asymmetry": columns.HEADS, "asymmetry_layers": columns.LAYERS}
    notices = list(dict.fromkeys(n for _, result in made for n in result.notices))
    return Result(
        analyzer="asymmetry",
        config=dataclasses.asdict(config),
        model=last.model,
        data={},
        summary=summary,
        summary_columns={k: v for k, v in columns.SUMMARY.items() if k in summary},
        tables=tables,
        columns={name: described(table, known[name]) for name, table in tables.items()},
        notices=[*notices, f"Model facts are of the last of {len(made)} checkpoints."],
        seed=config.seed,
        started=made[0][1].started,
        seconds=sum(result.seconds for _, result in made),
        complete=all(result.complete for _, result in made),
    )

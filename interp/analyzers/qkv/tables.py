"""The qkv result: tables with units, and the summary. Arithmetic on measured numbers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from interp import stats
from interp.analyzers.qkv import columns
from interp.analyzers.qkv.edits import Intervention
from interp.results import Result, of_run

if TYPE_CHECKING:
    from interp.analyzers.qkv import Run

PAIRS = (("v", "k"), ("v", "q"), ("k", "q"))
ALPHA = 0.05


def assemble(run: Run) -> Result:
    """Everything a run has measured, as a Result."""
    made = {"interventions": (_interventions(run), columns.INTERVENTIONS)}
    comparisons = _comparisons(run)
    if len(comparisons):
        made["comparisons"] = (comparisons, columns.COMPARISONS)
    if run.overlaps:
        made["overlap"] = (_overlap(run), columns.OVERLAP)
    summary = _summary(run, {name: table for name, (table, _) in made.items()})
    return of_run(
        run,
        "qkv",
        {name: table for name, (table, _) in made.items()},
        {name: known for name, (_, known) in made.items()},
        summary,
        columns.SUMMARY,
    )


def _interventions(run: Run) -> pd.DataFrame:
    rows, p = [], []
    for what, layer in run.losses.done():
        assert what is not None
        whole = run.losses.whole((what, layer))
        delta = run.losses.of((what, layer), whole) - run.losses.of((None, None), whole)
        test = stats.paired_t(delta)
        p.append(float(test.p))
        rows.append(
            dataclasses.asdict(what)
            | {
                "layer": layer,
                "loss_delta": float(test.mean),
                "ci_low": float(test.low),
                "ci_high": float(test.high),
                "p_value": float(test.p),
                "documents": int(whole.sum()),
            }
        )
    table = pd.DataFrame(rows, columns=[c for c in columns.INTERVENTIONS if c != "q_value"])
    table.insert(len(table.columns) - 1, "q_value", stats.benjamini_hochberg(p))
    return table.astype({"layer": "Int64"})


def _comparisons(run: Run) -> pd.DataFrame:
    layers = [None, *range(run.model.cfg.n_layers)]
    known = set(run.losses.done())
    rows, p = [], []
    for layer in layers:
        for first, second in PAIRS:
            keys = [(Intervention("mean", name), layer) for name in (first, second)]
            if not all(key in known for key in keys):
                continue
            whole = run.losses.whole(keys[0]) & run.losses.whole(keys[1])
            if not whole.any():
                continue
            test = stats.paired_t(run.losses.of(keys[0], whole) - run.losses.of(keys[1], whole))
            p.append(float(test.p))
            rows.append(
                {
                    "layer": layer,
                    "first": first,
                    "second": second,
                    "difference": float(test.mean),
                    "ci_low": float(test.low),
                    "ci_high": float(test.high),
                    "p_value": float(test.p),
                }
            )
    table = pd.DataFrame(rows, columns=[c for c in columns.COMPARISONS if c != "q_value"])
    table["q_value"] = stats.benjamini_hochberg(p)
    return table.astype({"layer": "Int64"})


def _overlap(run: Run) -> pd.DataFrame:
    parts, gone = [], set(run.model.cfg.removed)
    for one in run.overlaps:
        heads = np.array([h for h in range(len(one.kernel)) if (one.layer, h) not in gone], int)
        low, high = np.percentile(one.null, (2.5, 97.5))
        parts.append(
            pd.DataFrame(
                {
                    "layer": one.layer,
                    "head": heads,
                    "kv_head": [run.model.kv_head(int(h)) for h in heads],
                    "pair": "".join(one.pair),
                    "weighted": one.weighted,
                    "kernel": one.kernel[heads],
                    "null_mean": one.null.mean(),
                    "null_low": low,
                    "null_high": high,
                    "percentile": one.percentile[heads],
                    "others_mean": one.others,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def _effect(row: Any) -> dict[str, float]:
    return {"loss_delta": row.loss_delta, "ci_low": row.ci_low, "ci_high": row.ci_high}


def _summary(run: Run, tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    clean = run.losses.whole((None, None))
    made: Any = tables["interventions"]
    everywhere = made[made["layer"].isna()]
    out: dict[str, Any] = {
        "baseline_loss": float(run.losses.of((None, None), clean).mean()),
        "documents": int(clean.sum()),
        "fit_documents": len(run.fitted_on),
        "fit_positions": run.layers[0].count,
        "fitted_elsewhere": run.fitted_elsewhere,
    }
    means = everywhere[everywhere["kind"] == "mean"]
    if len(means):
        out["mean"] = {row.target: _effect(row) for row in means.itertuples()}
    if "comparisons" in tables:
        out["ranking"] = _ranking(tables["comparisons"])
    for kind, name in (("share", "sharing"), ("rank", "rank"), ("noise", "noise")):
        rows = everywhere[everywhere["kind"] == kind]
        if kind == "share":
            rows = rows[rows["method"] == "least_squares"]
        for row in rows.itertuples():
            level = f"{row.level:g}"
            out.setdefault(name, {}).setdefault(row.target, {})[level] = _effect(row)
    if "overlap" in tables:
        out["overlap"] = _overlaps(tables["overlap"])
    return out


def _ranking(table: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for (first, second), rows in table.groupby(["first", "second"], sort=False):
        each, together = rows[rows["layer"].notna()], rows[rows["layer"].isna()]
        found: dict[str, Any] = {"layers": len(each)}
        if len(each):
            larger = each["difference"] > 0
            surely = each["q_value"] < ALPHA
            found |= {
                "share": float(larger.mean()),
                "surely_larger": int((larger & surely).sum()),
                "surely_smaller": int((~larger & surely).sum()),
            }
        if len(together):
            row = together.iloc[0]
            found |= {name: float(row[name]) for name in ("difference", "ci_low", "ci_high")}
        out[f"{first} over {second}"] = found
    return out


def _overlaps(table: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for (pair, weighted), rows in table.groupby(["pair", "weighted"], sort=False):
        out[f"{pair}, weighted" if weighted else str(pair)] = {
            "heads": len(rows),
            "median": float(rows["kernel"].median()),
            "null_mean": float(rows["null_mean"].mean()),
            "above": int((rows["percentile"] > 97.5).sum()),
            "below": int((rows["percentile"] < 2.5).sum()),
            "others_mean": float(rows["others_mean"].mean()),
        }
    return out

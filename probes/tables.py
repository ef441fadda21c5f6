"""The superposition result: tables with units, and the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from interp import stats
from interp.results import Column, Result, of_run
from probes import columns, meaning_tables, reading
from probes import run as running
from probes.judging import Estimate, Quality, mean, ratio
from probes.splicing import CLEAN

if TYPE_CHECKING:
    from probes.run import Run

EDGES = [0.0, *np.logspace(-6, 0, 25)]


def assemble(run: Run) -> Result:
    """Everything a run has measured, as a Result."""
    tables: dict[str, pd.DataFrame] = {}
    if run.quality:
        tables["baselines"] = _baselines(run)
        found = _contexts(run)
        tables["features"] = meaning_tables.with_meaning(_features(run, found), run.meaning)
        tables["contexts"] = found
        tables["density"] = _density(run)
    if len(log := _training(run)):
        tables["training"] = log
    tables |= meaning_tables.tables(run.meaning)
    known: dict[str, dict[str, Column]] = {
        "baselines": columns.BASELINES,
        "features": columns.FEATURES | meaning_tables.FEATURES,
        "contexts": columns.CONTEXTS,
        "density": columns.DENSITY,
        "training": columns.TRAINING,
        **meaning_tables.COLUMNS,
    }
    summary = _summary(run) | meaning_tables.summary(run.meaning)
    units = columns.SUMMARY | meaning_tables.SUMMARY
    return of_run(run, "superposition", tables, known, summary, units, files={**run.files})


def _ends(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


# One row per dictionary ---------------------------------------------------------------------------


def _baselines(run: Run) -> pd.DataFrame:
    names = sorted(run.quality, key=_place)
    if run.losses is not None and running.ERROR in run.losses.nll:
        names.insert(names.index(running.MEAN), running.ERROR)
    return pd.DataFrame([_row(run, name) for name in names])


_ORDER = (
    running.SAE,
    "sae width",
    "sae seed",
    running.NULL,
    running.RANDOM,
    "pca",
    "neurons",
    running.ERROR,
    running.MEAN,
    running.ZERO,
)


def _place(name: str) -> int:
    if name in _ORDER:
        return _ORDER.index(name)
    return next(i for i, start in enumerate(_ORDER) if i and name.startswith(start))


def _row(run: Run, name: str) -> dict[str, Any]:
    # The random error is made of the SAE's: as many components, the same unexplained variance.
    quality = run.quality[running.SAE if name == running.ERROR else name]
    fired, one = run.fired.get(name), run.trained.get(name)
    row: dict[str, Any] = {"dictionary": name, "components": _components(run, name)}
    row |= {"tokens": quality.tokens}
    if name == running.ERROR:
        row |= _ends("fvu", quality.fvu) | {"explained_variance": 1 - quality.fvu.value}
    else:
        row |= _quality(quality)
    row |= _losses(run, name)
    row["dead_fraction"] = np.nan if fired is None else fired.dead_fraction
    training = None if one is None else one.dead_training
    row["dead_training"] = np.nan if training is None else training
    return {key: row[key] for key in columns.BASELINES if key in row}


def _components(run: Run, name: str) -> Any:
    if name in run.trained:
        return run.trained[name].sae.cfg.d_sae
    sizes = {"pca per position": run.model.cfg.d_model, "neurons": run.model.cfg.d_mlp}
    return run.components if name == "pca" else sizes.get(name, pd.NA)


def _quality(quality: Quality) -> dict[str, float]:
    return {
        **_ends("l0", quality.l0),
        **_ends("fvu", quality.fvu),
        "explained_variance": 1 - quality.fvu.value,
        **_ends("cosine", quality.cosine),
        "shrinkage": quality.shrinkage,
    }


def _losses(run: Run, name: str) -> dict[str, Any]:
    losses = run.losses
    if losses is None or name not in losses.nll or not losses.documents.any():
        return {}
    clean, own = losses.loss(CLEAN), losses.loss(name)
    row: dict[str, Any] = {
        "loss": float(own.mean()),
        **_delta("loss_delta", own - clean),
        **_ends("kl", mean(losses.divergence(name))),
        "loss_documents": len(own),
    }
    for to in (running.ZERO, running.MEAN):
        without = losses.loss(to)
        row |= _ends(f"loss_recovered_{to}", ratio(without - own, without - clean))
    return row


def _delta(name: str, differences: np.ndarray) -> dict[str, float]:
    found = stats.paired_t(differences)
    return _ends(name, Estimate(float(found.mean), float(found.low), float(found.high)))


# Features -----------------------------------------------------------------------------------------


def _contexts(run: Run) -> pd.DataFrame:
    top = run.fired[running.SAE].top
    around = run.around or reading.Around(run.text, top)
    return reading.contexts(run.text, top, around)


def _features(run: Run, found: pd.DataFrame) -> pd.DataFrame:
    fired = run.fired[running.SAE]
    table = reading.features(run.model, run.layer, run.sae, fired, found)
    if run.has_neurons:
        which, cosine = reading.nearest_neurons(run.sae.W_dec.detach(), run.memory.values)
        table = table.assign(nearest_neuron=which, nearest_neuron_cosine=cosine)
    return table


def _density(run: Run) -> pd.DataFrame:
    parts = []
    for name, fired in run.fired.items():
        values = fired.density
        silent = int((values == 0).sum())
        counts = np.histogram(values[values > 0], bins=EDGES[1:])[0]
        low, high = [0.0, *EDGES[1:-1]], [0.0, *EDGES[2:]]
        parts.append(
            pd.DataFrame(
                {"dictionary": name, "low": low, "high": high, "features": [silent, *counts]}
            )
        )
    return pd.concat(parts, ignore_index=True)


def _training(run: Run) -> pd.DataFrame:
    parts = [
        pd.DataFrame({"dictionary": name, **vars(one.log)})
        for name, one in run.trained.items()
        if one.log is not None
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


# Summary ------------------------------------------------------------------------------------------


def _summary(run: Run) -> dict[str, Any]:
    one = run.trained[running.SAE]
    plan = one.plan
    out: dict[str, Any] = {
        "layer": run.layer,
        "architecture": run.sae.cfg.architecture() if plan is None else plan.arch,
        "features": run.sae.cfg.d_sae,
        "train_tokens": one.tokens,
        "documents": len(run.text),
        "scale": None if run.calibration is None else run.calibration.scale,
        "dead_fraction_training": one.dead_training,
        "dead_tokens_training": None if plan is None else plan.dead_steps * plan.batch,
    }
    if running.SAE not in run.quality:
        return out
    quality, fired = run.quality[running.SAE], run.fired[running.SAE]
    out |= {"tokens": quality.tokens, "components": run.components, **_quality(quality)}
    out |= {"dead_fraction": fired.dead_fraction, "dead_tokens": fired.positions}
    losses = run.losses
    if losses is None or not losses.documents.any():
        return out
    row = _losses(run, running.SAE)
    clean = losses.loss(CLEAN)
    out |= {
        "loss_clean": float(clean.mean()),
        "loss_spliced": row.pop("loss"),
        "loss_zero": float(losses.loss(running.ZERO).mean()),
        "loss_mean": float(losses.loss(running.MEAN).mean()),
        "loss_error": float(losses.loss(running.ERROR).mean()),
        **row,
        **_delta("error_delta", losses.loss(running.ERROR) - clean),
        **_delta("error_excess", losses.loss(running.ERROR) - losses.loss(running.SAE)),
        **_delta("zero_delta", losses.loss(running.ZERO) - clean),
        **_delta("mean_delta", losses.loss(running.MEAN) - clean),
    }
    return out

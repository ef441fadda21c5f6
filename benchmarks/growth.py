"""How time and memory grow: slopes on log axes over documents, context, layers and heads.

A slope of 1 is proportional, 2 is quadratic. A small random GPT-2 and each main job, which runs in
a process of its own; memory is the peak over what the process held before (Linux alone can tell;
elsewhere there are no rows of memory), and grows until a batch is full. Removing every head costs
(layers * heads) passes of about half of the layers: quadratic in layers. Heads split one width:
their number changes the passes and not the size of one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.common import Options, Row, forget_peak, random_documents, save_gpt2, status
from interp.memory import give_back

BASE = {"documents": 16, "context": 64, "layers": 4, "heads": 4}
SIZES = {
    "documents": (16, 48, 144),
    "context": (32, 96, 288),
    "layers": (2, 4, 8),
    "heads": (2, 4, 8),
}
JOBS = ("importance", "exact", "ffn-keys", "asymmetry")
WITHOUT_TEXT = ("asymmetry",)
WIDTH, VOCABULARY = 128, 2048
REPS = 2


def run(options: Options) -> list[Row]:
    rows: list[Row] = []
    for job in JOBS:
        over = {
            name: sizes
            for name, sizes in SIZES.items()
            if options.wants(case_of(job, name))
            and not (job in WITHOUT_TEXT and name in ("documents", "context"))
        }
        if over:
            rows += of_job(job, over, options)
    return rows


def case_of(job: str, over: str) -> str:
    return f"{job}, over {over}"


def of_job(job: str, over: dict[str, tuple[int, ...]], options: Options) -> list[Row]:
    """Slopes of one job over some sizes."""
    asked = json.dumps([job, over, options.reps or REPS, options.device])
    command = [sys.executable, "-m", "benchmarks.growth", asked]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{job} failed: {done.stderr[-800:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return [row for n, s in over.items() for row in series(case_of(job, n), s, found[n])]


def series(case: str, sizes: tuple[int, ...], found: dict[str, Any]) -> list[Row]:
    """Slopes over one size."""
    seconds = np.array(found["seconds"])  # [rep, size]
    each = ", ".join(f"{s:.2f} s at {n}" for n, s in zip(sizes, seconds.min(0), strict=True))
    note = f"{case}: {each}"
    rows = [Row(case, "slope of log seconds", [slope(sizes, row) for row in seconds])]
    if found["megabytes"]:
        peak = np.array(found["megabytes"]).max(0)
        each = ", ".join(f"{m:.0f} MB" for m in peak)
        note += f"; {each}"
        if (peak > 1).all():
            rows.append(Row(case, "slope of log peak MB", [slope(sizes, peak)]))
    rows[0].notes = [note + "."]
    return rows


def slope(sizes: tuple[int, ...], values: np.ndarray) -> float:
    """Of a least-squares line on log axes."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


# In its own process -------------------------------------------------------------------------------


def child(job: str, over: dict[str, list[int]], reps: int, device: str) -> dict[str, Any]:
    return {name: measured(job, name, sizes, reps, device) for name, sizes in over.items()}


def measured(job: str, over: str, sizes: list[int], reps: int, device: str) -> dict[str, Any]:
    calls = [prepared(job, {**BASE, over: size}, device) for size in sizes]
    seconds: list[list[float]] = []
    megabytes: list[list[float]] = []
    for call in calls:  # page in
        call()
    for _ in range(reps):
        row, peaks = [], []
        for call in calls:
            give_back()
            before = forget_peak()
            began = time.perf_counter()
            call()
            row.append(time.perf_counter() - began)
            if before is not None:
                peaks.append(max(0.0, status("VmHWM") - before))
        seconds.append(row)
        if peaks:
            megabytes.append(peaks)
    return {"seconds": seconds, "megabytes": megabytes}


def prepared(job: str, size: dict[str, int], device: str) -> Any:
    """A call without arguments that does the job once."""
    import interp
    from interp.analyzers.ffn_keys import coefficients
    from interp.analyzers.ffn_keys.triggers import LayerTriggers
    from interp.analyzers.heads import importance, measure

    with TemporaryDirectory() as temporary:
        folder = save_gpt2(
            Path(temporary) / "small",
            n_layer=size["layers"],
            n_head=size["heads"],
            n_embd=WIDTH,
            vocab_size=VOCABULARY,
            n_positions=max(SIZES["context"]),
        )
        model = interp.load_model(folder, device=device)
    if job == "asymmetry":
        return lambda: interp.asymmetry(model, progress=False)
    made = random_documents(size["documents"], size["context"], VOCABULARY)
    text = interp.load_text(made, model, documents=size["documents"], context=size["context"])
    every = list(range(size["layers"]))

    def gradients() -> None:
        with model.measuring(fused=True):
            importance.gradients(model, text, "auto")

    def exact() -> None:
        removals = [measure.Removal((head,), "zero") for head in model.cfg.heads()]
        with model.measuring(fused=True):
            measure.sweep(model, text, removals, "auto")

    def keys() -> None:
        found = {layer: LayerTriggers(text, model.cfg.d_mlp, 25) for layer in every}
        with model.measuring(fused=True):
            coefficients.stream(
                model, text, {layer: one.see for layer, one in found.items()}, "auto"
            )

    return {"importance": gradients, "exact": exact, "ffn-keys": keys}[job]


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    print(json.dumps(child(*json.loads(sys.argv[1]))))

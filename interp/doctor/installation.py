"""Checks of the installation itself: what `interp doctor` does without a model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from interp import assets, checkpoint, hub, names
from interp.config import DoctorOptions
from interp.doctor import examination, outcome, specimens
from interp.doctor.outcome import Check, Measured, NotApplicableError, Outcome, Report
from interp.errors import InterpError
from interp.model import pick_device
from interp.results import environment

SUBJECT = "installation"
PACKAGE = "interp"
ROUNDING = 1e-5
LEAST_FREE = 2**30  # bytes; the embedded model takes 0.7 GB in the cache


def packages(_: DoctorOptions) -> Measured:
    """Every package that interp requires is installed, in a version that it works with."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        meta = importlib.metadata.metadata(PACKAGE)
        required = [Requirement(r) for r in importlib.metadata.requires(PACKAGE) or []]
    except importlib.metadata.PackageNotFoundError:
        raise NotApplicableError(
            "interp runs from a folder, not as an installed package: its requirements are not known"
        ) from None
    wrong, python = [], platform.python_version()
    if not SpecifierSet(meta["Requires-Python"] or "").contains(python, prereleases=True):
        wrong.append(f"Python {python}, {meta['Requires-Python']} is needed")
    needed = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    for requirement in needed:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed, {requirement} is needed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version}, {requirement} is needed")
    note = wrong[0] if wrong else f"{len(needed)} packages, Python {python}"
    return Measured(len(wrong), note=note)


def torch_works(_: DoctorOptions) -> Measured:
    """A matrix product, a softmax and a gradient on the CPU are those of numpy."""
    return Measured(_torch_gap(torch.device("cpu")), ROUNDING, f"torch {torch.__version__}")


def devices(options: DoctorOptions) -> Measured:
    """The same on the device that --device means."""
    device = pick_device(options.device)
    if device.type == "cpu":
        why = "only the CPU is here" if options.device == "auto" else "--device cpu was asked for"
        raise NotApplicableError(why)
    return Measured(_torch_gap(device), ROUNDING, _named(device))


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _torch_gap(device: torch.device) -> float:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 64, 64)) / 8
    x = torch.tensor(a, dtype=torch.float32, device=device, requires_grad=True)
    made = torch.softmax(x @ torch.tensor(b, dtype=torch.float32, device=device), -1)
    (made * made).sum().backward()
    raised = np.exp(a @ b)
    p = raised / raised.sum(-1, keepdims=True)
    slope = p * (2 * p - (2 * p * p).sum(-1, keepdims=True)) @ b.T
    assert x.grad is not None
    pairs = (made.detach(), p), (x.grad, slope)
    return max(
        float(np.abs(seen.cpu().double().numpy() - e).max() / np.abs(e).max()) for seen, e in pairs
    )


def cache_folder(_: DoctorOptions) -> Measured:
    """interp's cache can be written to and has room."""
    import shutil

    folder = assets.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise InterpError(
            f"{folder} cannot be written to ({error.strerror or error}): set INTERP_CACHE to a "
            "folder that can."
        ) from error
    if free < LEAST_FREE:
        raise InterpError(
            f"{folder} has {free / 1e9:.1f} GB left, {LEAST_FREE / 1e9:.1f} are needed"
        )
    return Measured(0, note=f"{folder}, {free / 1e9:.0f} GB free")


def plotly_js(_: DoctorOptions) -> Measured:
    """The library that report pages embed is there."""
    import plotly
    import plotly.offline

    source = plotly.offline.get_plotlyjs()
    if "Plotly" not in source or len(source) < 100_000:
        raise InterpError("plotly's own plotly.js is missing: install plotly again.")
    return Measured(0, note=f"plotly {plotly.__version__}, {len(source) / 1e6:.1f} MB")


def embedded(_: DoctorOptions) -> Measured:
    """The embedded model and text, where they were fetched, have the sha256 that they should."""
    states = {entry["name"]: entry["state"] for entry in assets.status()}
    bad = [name for name, state in states.items() if state == "corrupt"]
    here = [name for name, state in states.items() if state == "present"]
    if not bad and not here:
        raise NotApplicableError("nothing is fetched yet (interp assets fetch)")
    if bad:
        return Measured(len(bad), note=f"{', '.join(bad)} damaged: interp assets fetch")
    absent = [name for name in states if name not in here]
    note = f"{', '.join(here)} as known" + (f"; {', '.join(absent)} not fetched" if absent else "")
    return Measured(0, note=note)


def hub_answers(options: DoctorOptions) -> Measured:
    """A model hub answers; without one, models are read from folders and the cache."""
    if options.offline:
        raise NotApplicableError("--offline was given")
    if hub.switched_off():
        raise NotApplicableError("HF_HUB_OFFLINE is set")
    started = time.perf_counter()
    if not hub.reachable():
        raise NotApplicableError(
            f"no hub answers within {hub.PROBE_SECONDS:g} s: only local and embedded models"
        )
    return Measured(time.perf_counter() - started, hub.PROBE_SECONDS, hub.endpoint())


CHECKS = (
    Check("packages", "count", "all packages in versions that work", packages),
    Check("torch", "relative", "torch computes what numpy does", torch_works),
    Check("device", "relative", "the device computes what numpy does", devices),
    Check("cache folder", "count", "the cache folder can be written to", cache_folder),
    Check("plotly.js", "count", "report pages can be made", plotly_js),
    Check("embedded assets", "count", "fetched assets have the right sha256", embedded),
    Check("hub", "seconds", "a model hub answers", hub_answers),
)


def examine_installation(options: DoctorOptions, say: examination.Say | None = None) -> Report:
    """All checks of the installation, and all model checks on tiny models of three families."""
    started = time.perf_counter()
    rows = [outcome.judged(SUBJECT, check, options) for check in CHECKS]
    with tempfile.TemporaryDirectory(prefix="interp-doctor-") as folder:
        for name in specimens.SPECIMENS:
            rows += _of_specimen(name, Path(folder) / name.split(",")[0], options, say)
    return Report(tuple(rows), None, environment(), time.perf_counter() - started)


def _of_specimen(
    name: str, folder: Path, options: DoctorOptions, say: examination.Say | None
) -> Iterator[Outcome]:
    subject = f"tiny {name}"
    try:
        with checkpoint.quiet():
            specimens.make(name, folder)
        found = names.Found(subject, folder, source="made by interp doctor")
        device = pick_device(options.device)
        yield from examination.of_found(found, device, options, lambda _: None, say)[0]
    except Exception as error:
        yield outcome.failed(subject, examination.LOADING, error)

"""Examine a model: all checks, in the order in which a fault shows first.

Static facts come first, then the steps of a block one after another, each from the model's own
inputs, then what analyzers read beside them, then whole runs. So the first failed check is the one
to look at; what fails after it may follow from it.

What passing does not show: that the checkpoint is a good model, or the right one; and nothing of
texts much longer than the examination's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from interp.config import DoctorOptions
from interp.doctor import block, gguf_file, outcome, reading, runs, tokens, wiring
from interp.doctor.case import Case
from interp.doctor.outcome import Check, Measured, Outcome, Report
from interp.errors import CheckError, InterpError
from interp.model import DTYPES, Model, load_found, pick_device
from interp.names import resolve
from interp.results import environment
from interp.text import expect_model

CHECKS: tuple[Check, ...] = (
    *wiring.CHECKS,
    gguf_file.CHECK,
    *tokens.CHECKS,
    *block.CHECKS,
    *reading.CHECKS,
    wiring.RAW,
    *runs.CHECKS,
    wiring.GPU,
)
LOADING = Check("loading", "count", "the checkpoint is whole and is read", lambda _: Measured(0))

Say = Callable[[str], None]


def examine(model: Model) -> Report:
    """Check that a loaded model computes, and shows, what interp takes it to.

    Args:
        model: from `load_model`. It is read and left as it was; a hook that is on it is reported.

    Returns:
        The report: `.passed`, `.failures()`, `.outcomes` (one per check, in order), `.to_json()`.

    Raises:
        UsageError: it is no such model.
    """
    expect_model(model)
    started = time.perf_counter()
    found = outcomes(model, model.name)
    return Report(tuple(found), model.describe(), environment(), time.perf_counter() - started)


def outcomes(model: Model, subject: str, say: Say | None = None) -> list[Outcome]:
    """All model checks of a loaded model; `say` gets a line before each."""
    found = []
    case = Case(model)
    with case.examined():
        for i, check in enumerate(CHECKS):
            if say is not None:
                say(f"{subject}: {check.name} ({i + 1} of {len(CHECKS)})")
            found.append(outcome.judged(subject, check, case))
    return found


def examine_named(options: DoctorOptions, notify: Say, say: Say | None = None) -> Report:
    """Load a model and examine it; what loading refuses is a failed check.

    Args:
        options: which model, and where.
        notify: gets the notices of loading.
        say: gets a line before each check.

    Raises:
        InterpError: there is no such model or device: nothing to examine.
    """
    started = time.perf_counter()
    device = pick_device(options.device)
    named = resolve(
        options.model,
        revision=options.revision,
        offline=options.offline,
        allow_pickle=options.allow_pickle,
        trust_remote_code=options.trust_remote_code,
    )
    rows, model = of_found(named, device, options, notify, say)
    return Report(
        tuple(rows),
        None if model is None else model.describe(),
        environment(),
        time.perf_counter() - started,
    )


def of_found(
    named: Any, device: Any, options: DoctorOptions, notify: Say, say: Say | None
) -> tuple[list[Outcome], Model | None]:
    """The outcomes of a model that was found, and the model if it loads at all."""
    refusals: list[CheckError] = []
    try:
        model = load_found(
            named,
            device,
            DTYPES[options.dtype],
            allow_pickle=options.allow_pickle,
            trust_remote_code=options.trust_remote_code,
            refuse=refusals.append,
        )
    except InterpError as error:
        return _not_loaded(named.name, refusals, error), None
    for notice in model.notices:
        notify(notice)
    loading = outcome.judged(named.name, LOADING, None)
    rows = [loading, *outcomes(model, named.name, say)]
    return outcome.refused(rows, [(e.check, str(e)) for e in refusals]), model


def _not_loaded(subject: str, refusals: list[CheckError], error: InterpError) -> list[Outcome]:
    """Why it did not load, named by the first check that it failed; nothing else can be checked."""
    why = [(e.check, str(e)) for e in refusals] or [(LOADING.name, str(error))]

    def nothing(_: Any) -> Measured:
        raise outcome.NotApplicableError("the model did not load")

    rows = [
        outcome.judged(subject, Check(c.name, c.unit, c.meaning, nothing), None)
        for c in (LOADING, *CHECKS)
    ]
    return outcome.refused(rows, why)

"""What a check says, and how checks are run. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Verdict = Literal["PASS", "FAIL", "not applicable"]


class NotApplicableError(Exception):
    """A check that has nothing to look at here; the message says why."""


@dataclass(frozen=True)
class Measured:
    """What a check measured.

    error: the largest error, in the check's unit; nan never passes.
    tolerance: the largest error that passes.
    note: where the error was largest, or what was looked at.
    """

    error: float
    tolerance: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Check:
    """One named check.

    name: what users and scripts know it by.
    unit: of error and tolerance: "relative" (to the size of what is compared) or "count".
    meaning: what passing says, in a clause.
    run: measures; raises NotApplicableError where there is nothing to measure.
    """

    name: str
    unit: str
    meaning: str
    run: Callable[[Any], Measured]


@dataclass(frozen=True)
class Outcome:
    """One row of the table."""

    subject: str
    check: str
    verdict: Verdict
    error: float | None
    tolerance: float | None
    unit: str
    note: str
    meaning: str


def judged(subject: str, check: Check, case: Any) -> Outcome:
    """Run one check. What it raises is a FAIL with the message, never a traceback."""

    def row(verdict: Verdict, measured: Measured | None, note: str) -> Outcome:
        error = None if measured is None else measured.error
        tolerance = None if measured is None else measured.tolerance
        return Outcome(
            subject, check.name, verdict, error, tolerance, check.unit, note, check.meaning
        )

    try:
        measured = check.run(case)
    except NotApplicableError as reason:
        return row("not applicable", None, str(reason))
    except Exception as error:
        return failed(subject, check, error)
    passed = measured.error <= measured.tolerance
    return row("PASS" if passed else "FAIL", measured, measured.note)


def failed(subject: str, check: Check, error: BaseException) -> Outcome:
    """The row of a check that raised."""
    return Outcome(subject, check.name, "FAIL", None, None, check.unit, told(error), check.meaning)


def told(error: BaseException) -> str:
    """An error in one line; its kind only where it is not one that interp words itself."""
    from interp.errors import InterpError

    lines = str(error).strip().splitlines() or [""]
    text = lines[0][:300]
    if isinstance(error, InterpError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def refused(outcomes: Sequence[Outcome], refusals: Iterable[tuple[str, str]]) -> list[Outcome]:
    """The outcomes, with what loading refused as a failure of the check that it concerns.

    Args:
        outcomes: of one subject.
        refusals: (name of the check, what was said).
    """
    said: dict[str, str] = {}
    for name, message in refusals:
        said.setdefault(name, message)
    return [
        replace(o, verdict="FAIL", note=said[o.check])
        if o.check in said and o.verdict != "FAIL"
        else o
        for o in outcomes
    ]


@dataclass(frozen=True)
class Report:
    """All outcomes of one examination.

    model: what `Model.describe` says; None where no model was named or it did not load.
    environment: versions.
    """

    outcomes: tuple[Outcome, ...]
    model: dict[str, Any] | None
    environment: dict[str, str | None]
    seconds: float

    @property
    def passed(self) -> bool:
        """No check failed."""
        return not self.failures()

    def failures(self) -> list[Outcome]:
        """The failed checks, in the order of the table: the first is the one to look at."""
        return [o for o in self.outcomes if o.verdict == "FAIL"]

    def to_json(self) -> dict[str, Any]:
        """One JSON object; an error that is not a finite number is null."""
        return {
            "schema_version": 1,
            "command": "doctor",
            "passed": self.passed,
            "checks": [_plain(asdict(o)) for o in self.outcomes],
            "model": self.model,
            "environment": self.environment,
            "seconds": round(self.seconds, 3),
        }


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


class Largest:
    """The largest of several errors and where it was."""

    def __init__(self) -> None:
        self.error = 0.0
        self.where = ""
        self.count = 0

    def add(self, error: float, where: str) -> None:
        """An error of not-a-number is larger than any other."""
        error = math.inf if math.isnan(error) else float(error)
        if error > self.error or not self.count:
            self.error, self.where = error, where
        self.count += 1

    def measured(self, tolerance: float, nothing: str) -> Measured:
        """The result; not applicable, with the reason `nothing`, where nothing was compared."""
        if not self.count:
            raise NotApplicableError(nothing)
        return Measured(self.error, tolerance, self.where)

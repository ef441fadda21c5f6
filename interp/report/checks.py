"""The table of `interp doctor` in a terminal: 80 columns, notes of what did not pass below it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from interp.doctor.outcome import Outcome, Report
from interp.report.tables import bullet, encoded, say
from interp.report.words import DASH, count, isolated, visible

_STYLES = {"FAIL": "bold red", "not applicable": "dim"}


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the outcomes of every subject, then what did not pass and why.

    Subjects beyond the first are told in one line where nothing failed.

    Args:
        report: what was found.
        console: where to; stdout by default. Colour only on a terminal, and not under NO_COLOR.
    """
    out = console or Console(highlight=False)
    subjects = [(s, list(rows)) for s, rows in groupby(report.outcomes, lambda o: o.subject)]
    for i, (subject, rows) in enumerate(subjects):
        failed = any(o.verdict == "FAIL" for o in rows)
        if i and not failed:
            say(out, f"{isolated(visible(subject))}: {_counted(rows)}.")
            continue
        say(out, isolated(visible(subject)), style="bold")
        _table(out, rows)
        for verdict in ("FAIL", "not applicable"):
            for o in rows:
                if o.verdict == verdict:
                    bullet(out, f"{o.check}: {verdict}. {isolated(visible(o.note, 400))}")
        out.print()
    say(out, f"{_counted(report.outcomes)}.", style="bold")
    failures = report.failures()
    if failures:
        first = failures[0]
        say(
            out,
            f"Look first at: {first.check} ({isolated(visible(first.subject))}). "
            "What fails after it may follow from it.",
        )


def _counted(rows: Sequence[Outcome]) -> str:
    by = {v: sum(o.verdict == v for o in rows) for v in ("PASS", "FAIL", "not applicable")}
    return (
        f"{count(len(rows))} checks: {by['PASS']} passed, {by['FAIL']} failed, "
        f"{by['not applicable']} not applicable"
    )


def _table(out: Console, rows: Sequence[Outcome]) -> None:
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading, side in (
        ("check", "left"),
        ("error", "right"),
        ("tolerance", "right"),
        ("unit", "left"),
        ("", "left"),
    ):
        grid.add_column(encoded(out, heading, "bold"), justify=side, no_wrap=True)  # type: ignore[arg-type]
    for o in rows:
        unit = o.unit if o.error is not None else ""
        cells = (o.check, number(o.error), number(o.tolerance), unit, o.verdict)
        style = _STYLES.get(o.verdict, "")
        grid.add_row(*(encoded(out, cell, style) for cell in cells))
    out.print(Padding(grid, (1, 0, 1, 0)))


def number(value: float | None) -> str:
    """A count as it is, any other number to two digits."""
    if value is None:
        return DASH
    if value == int(value) if abs(value) < 1e15 else False:
        return str(int(value))
    return f"{value:.1e}"

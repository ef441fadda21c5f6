"""Results as plain Markdown, to paste into an issue or a note: words and small tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from interp.errors import InterpError
from interp.report.compare import comparisons, names
from interp.report.view import Digest
from interp.report.views import view_of
from interp.report.words import interruption, isolated, other_notices, sample, visible
from interp.results import Result

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$@&])")
_LONG = 1000


def render(results: Sequence[Result]) -> str:
    """Markdown of results, one section each.

    Raises:
        InterpError: there is nothing to render.
    """
    if not results:
        raise InterpError("a report needs at least one result.")
    parts = [_digest(digest, 2) for digest in comparisons(results)]
    for name, result in zip(names(results), results, strict=True):
        parts.append(_section(name, result))
    return "\n\n".join(parts) + "\n"


def _text(value: Any) -> str:
    """Foreign text as Markdown shows it verbatim, on one line."""
    return _SPECIAL.sub(r"\\\1", isolated(visible(value, _LONG)))


def _section(name: str, result: Result) -> str:
    view = view_of(result)
    parts = [f"## {_text(name)}"]
    if view.question:
        parts.append(f"*{_text(view.question)}*")
    parts.append(_text(sample(result)))
    stopped = interruption(result)
    notices = [*([stopped] if stopped else []), *(f"Notice: {n}" for n in other_notices(result))]
    parts.append(_list(notices))
    parts.append(_list(view.findings(result)))
    parts += [_digest(digest, 3) for digest in view.digests(result)]
    if limits := view.limits(result):
        parts.append("### What these numbers are, and are not\n\n" + _list(limits))
    if result.command:
        fence = "`" * (max(map(len, re.findall("`+", result.command)), default=2) + 1)
        fence = max(fence, "```", key=len)
        parts.append(f"{fence}sh\n{visible(result.command, _LONG)}\n{fence}")
    seconds, versions = (
        f"{result.seconds:.0f} s",
        ", ".join(f"{name} {version}" for name, version in result.environment.items() if version),
    )
    parts.append(_text(f"Started {result.started}, {seconds}, seed {result.seed}; {versions}."))
    return "\n\n".join(part for part in parts if part)


def _list(sentences: Any) -> str:
    return "\n".join(f"- {_text(sentence)}" for sentence in sentences)


def _digest(digest: Digest, level: int) -> str:
    lines = [
        f"{'#' * level} {_text(digest.title)}",
        "",
        _row(digest.head),
        f"| --- |{' ---: |' * (len(digest.head) - 1)}",
        *(_row(row) for row in digest.rows),
    ]
    if digest.note:
        lines += ["", _text(digest.note)]
    return "\n".join(lines)


def _row(cells: Any) -> str:
    return f"| {' | '.join(_text(cell) for cell in cells)} |"

"""Several runs of one analyzer side by side."""

from __future__ import annotations

from collections.abc import Sequence

from interp.report.view import Digest
from interp.report.views import view_of
from interp.report.words import DASH, model_name, visible
from interp.results import Result

MOST = 8
"""Runs side by side in one table; further ones have their own sections."""
_SAME = ("source", "sha256", "documents", "context", "bos", "windows")
"""Of the data: what must be equal for a difference to be between the models."""


def names(results: Sequence[Result]) -> list[str]:
    """A name of each result, no two alike."""
    plain = [f"{visible(result.analyzer)}: {model_name(result)}" for result in results]
    sources = [visible(result.data.get("source") or "", 30) for result in results]
    for name in {name for name in plain if plain.count(name) > 1}:
        own = [i for i, one in enumerate(plain) if one == name]
        if len({sources[i] for i in own}) > 1:  # one model on different data: say which
            for i in own:
                plain[i] = f"{name} on {sources[i]}" if sources[i] else name
    seen: dict[str, int] = {}
    out = []
    for name in plain:
        seen[name] = seen.get(name, 0) + 1
        out.append(f"{name} ({seen[name]})" if plain.count(name) > 1 else name)
    return out


def comparisons(results: Sequence[Result]) -> list[Digest]:
    """One table per analyzer that several runs are of."""
    named = names(results)
    out = []
    for analyzer in dict.fromkeys(result.analyzer for result in results):
        runs = [i for i, result in enumerate(results) if result.analyzer == analyzer]
        shown = runs[:MOST]
        values = [dict(view_of(results[i]).compare(results[i])) for i in shown]
        quantities = list(dict.fromkeys(q for value in values for q in value))
        if len(runs) < 2 or not quantities:
            continue
        rows = tuple((q, *(value.get(q, DASH) for value in values)) for q in quantities)
        head = tuple(named[i].removeprefix(f"{visible(analyzer)}: ") for i in shown)
        some = [results[i] for i in shown]
        notes = [_differences(some)]
        if len(runs) > MOST:
            notes.append(f"{len(runs) - MOST} further runs are not in this table.")
        out.append(
            Digest(
                f"{visible(analyzer)}: {len(runs)} runs side by side, 95% intervals in brackets",
                ("quantity", *head),
                rows,
                " ".join(notes),
            )
        )
        out += view_of(some[0]).together(head, some)
    return out


def _differences(results: Sequence[Result]) -> str:
    """What but the model differs between runs, and so may explain a difference."""
    data = [
        key
        for key in _SAME
        if any(result.data.get(key) != results[0].data.get(key) for result in results)
    ]
    options = sorted(
        key
        for key in set().union(*(result.config for result in results))
        if any(result.config.get(key) != results[0].config.get(key) for result in results)
    )
    differing = [*data, *options] + (["complete"] if any(not r.complete for r in results) else [])
    if not differing:
        return "Data and options are the same."
    told = ["the documents" if key == "sha256" else visible(key, 40) for key in differing]
    models = {str(result.model.get("name")) for result in results}
    first = "Not only the models differ: so do" if len(models) > 1 else "What differs:"
    return f"{first} {', '.join(told)}. Compare with care."

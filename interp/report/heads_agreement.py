"""Runs of heads on different text: whether they find the same heads important."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from interp.agreement import head_agreement
from interp.errors import InterpError
from interp.report.view import Digest
from interp.report.words import DASH, count, interval, mapping, number, visible
from interp.results import Result

MOST_PAIRS = 3


def together(names: Sequence[str], results: Sequence[Result]) -> list[Digest]:
    """One table per pair of runs of one model on different text, the first few pairs."""
    out = []
    for (a, first), (b, second) in itertools.combinations(zip(names, results, strict=True), 2):
        if len(out) == MOST_PAIRS or first.data.get("sha256") == second.data.get("sha256"):
            continue
        try:
            table = head_agreement(first, second)
        except InterpError:  # of two models, or without a measure in common
            continue
        rows = tuple(_row(row) for row in table.to_dict("records"))
        sources = [visible(one.data.get("source"), 40) for one in (first, second)]
        texts = " and ".join(sources)
        what = "another sample" if sources[0] == sources[1] else "other text"
        out.append(
            Digest(
                f"The same heads on {what}? {a} and {b}: correlation over heads",
                (
                    "measure",
                    "heads",
                    "Spearman rho, 95% bootstrap over heads",
                    "rho by layers alone, up to its 97.5th percentile",
                    "Pearson r",
                ),
                rows,
                f"On {texts}; documents that are in both count in both. By layers alone: one run's "
                "values shuffled within layers. Noise of few documents lowers rho, however stable "
                f"heads are{_ceiling(first, second)}",
            )
        )
    return out


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    ends = interval(row["spearman_low"], row["spearman_high"], _rho)
    return (
        visible(row["measure"], 40),
        count(row["heads"]),
        f"{_rho(row['spearman'])} {ends}",
        f"{_rho(row['null'])}, up to {_rho(row['null_high'])}",
        _rho(row["pearson"]),
    )


def _rho(value: Any) -> str:
    found = number(value)
    return DASH if found is None else f"{found:+.2f}"


def _ceiling(first: Result, second: Result) -> str:
    """What halves of one text reach, where a run has measured that."""
    found = []
    for result in (first, second):
        ranks = mapping(mapping(result.summary.get("roles")).get("rank_correlation"))
        found += [
            f"{visible(name.split(':')[0], 40)} {_rho(value)}"
            for name, value in ranks.items()
            if name.endswith("even~odd documents") and number(value) is not None
        ]
    if not found:
        return "; --roles tells what two halves of one text reach."
    return f": two halves of one text reach {', '.join(found)}."

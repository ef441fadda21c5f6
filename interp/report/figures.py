"""The figures of every analyzer, by name, and how to draw one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import plotly.graph_objects as go

from interp.errors import InterpError
from interp.report import (
    asymmetry_figures,
    ffn_keys_figures,
    heads_figures,
    qkv_figures,
    superposition_figures,
    toy_figures,
)
from interp.report.spec import FigureSpec
from interp.results import Result

FIGURES: Mapping[str, Mapping[str, FigureSpec]] = {
    "heads": heads_figures.FIGURES,
    "asymmetry": asymmetry_figures.FIGURES,
    "ffn-keys": ffn_keys_figures.FIGURES,
    "qkv": qkv_figures.FIGURES,
    "superposition-toy": toy_figures.FIGURES,
    "superposition": superposition_figures.FIGURES,
}


def figure_names(result: Result) -> list[str]:
    """Names of the figures that this result has the numbers for, in the order of the page."""
    specs = FIGURES.get(result.analyzer, {})
    return [name for name, spec in specs.items() if spec.available(result)]


def figure(result: Result, name: str) -> go.Figure:
    """Draw one figure.

    Raises:
        InterpError: no such figure, or its numbers were not measured.
    """
    specs = FIGURES.get(result.analyzer, {})
    available = figure_names(result)
    if name in available:
        return specs[name](result)
    have = f"it has {', '.join(available)}" if available else "it has none"
    if name in specs:
        spec = specs[name]
        raise InterpError(
            f"this {result.analyzer} run has no figure {name!r}: it did not measure "
            f"{', '.join(spec.columns)} of the table {spec.table}; {have}."
        )
    close = difflib.get_close_matches(str(name), available, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise InterpError(f"a {result.analyzer} result has no figure {name!r}; {have}.{hint}")

"""Tables for the terminal, figures and the page: all that is made of a measured `Result`.

Importing this package imports neither rich nor plotly; each function brings what it needs. An
analyzer is told to the report in two places: `views.VIEWS` (words and small tables) and
`figures.FIGURES`. Without them its tables are shown as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from interp.results import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from rich.console import Console

    from interp.report.strips import TokenStrips

__all__ = [
    "display",
    "figure",
    "figure_names",
    "markdown",
    "notebook_html",
    "print_result",
    "render",
    "token_strip",
    "tokens",
]


def figure(result: Result, name: str) -> go.Figure:
    """Draw one figure of `figure_names(result)`; an unknown one is an InterpError."""
    from interp.report import figures

    return figures.figure(result, name)


def figure_names(result: Result) -> list[str]:
    """Names of the figures that this result has the numbers for."""
    from interp.report import figures

    return figures.figure_names(result)


def print_result(
    result: Result, rows: int = 20, console: Console | None = None, notices: bool = True
) -> None:
    """Print tables and findings, to stdout unless a console is given; see `tables`."""
    from interp.report import tables

    tables.print_result(result, rows, console, notices)


def token_strip(
    tokens: Iterable[Any],
    values: Iterable[Any],
    *,
    unit: str,
    title: str = "",
    limit: float | None = None,
) -> TokenStrips:
    """Any tokens coloured by any numbers, for a notebook; see `strips.token_strip`."""
    from interp.report import strips

    return strips.token_strip(tokens, values, unit=unit, title=title, limit=limit)


def tokens(result: Result, name: str | None = None, **options: Any) -> TokenStrips:
    """A result's own texts, their tokens coloured; see `Result.tokens`."""
    from interp.report import strips

    return strips.strips_of(result, name, **options)


def render(results: Sequence[Result]) -> str:
    """One self-contained HTML page; see `page`."""
    from interp.report import page

    return page.render(results)


def markdown(results: Sequence[Result]) -> str:
    """The same as plain Markdown, without figures; see `md`."""
    from interp.report import md

    return md.render(results)


def notebook_html(result: Result) -> str:
    """Table and figures as one piece of HTML with plotly.js in it, for `_repr_html_`."""
    from interp.report import page

    return page.fragment(result, figures=True)


def display(result: Result) -> None:
    """Show a result in a notebook: the table as HTML, each figure through plotly's own renderer."""
    from IPython import display as ipython  # type: ignore[import-not-found]

    from interp.report import page
    from interp.report.spec import CONFIG

    ipython.display(ipython.HTML(page.fragment(result, figures=False)))
    for name in figure_names(result):
        figure(result, name).show(config=CONFIG)

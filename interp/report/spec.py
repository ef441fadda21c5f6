"""What a figure is to the rest of the report, and what all figures share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from interp.report.view import has
from interp.report.words import in_figure
from interp.results import Result

# Okabe and Ito's colours, told apart with any colour vision, and readable on white and on black.
BLUE, RED, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
SKY, GREY = "#56B4E9", "#8A8A8A"

# plotly.js 4 offers to upload a figure to plotly's cloud unless told not to; nothing here leaves
# the machine.
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "sendChartToCloud"],
}


@dataclass(frozen=True)
class FigureSpec:
    """One figure and the columns that it cannot be drawn without.

    Attributes:
        draw: result -> plotly Figure.
        table: the table that it shows.
        columns: columns of that table that must hold at least one number.
    """

    draw: Callable[[Result], go.Figure]
    table: str
    columns: tuple[str, ...]

    def __call__(self, result: Result) -> go.Figure:
        """Draw it."""
        return self.draw(result)

    def available(self, result: Result) -> bool:
        """Whether the result has the numbers."""
        table = result.tables.get(self.table)
        return table is not None and all(has(table, column) for column in self.columns)


def bars(values: Any, low: Any, high: Any, **style: Any) -> dict[str, Any]:
    """Error bars from values to the two ends of their intervals."""
    ends = {"array": high - values, "arrayminus": values - low}
    return {"type": "data", "symmetric": False, **ends, **style}


def grid_axes(figure: go.Figure, layers: int, heads: int) -> None:
    """Axes of a layer-by-head map: layer 0 on top, every tick labelled while there is room."""
    step = {"tickmode": "linear", "dtick": 1}
    figure.update_xaxes(
        title="head", showgrid=False, zeroline=False, **(step if heads <= 20 else {})
    )
    figure.update_yaxes(
        title="layer",
        showgrid=False,
        zeroline=False,
        range=[layers - 0.5, -0.5],
        **(step if layers <= 32 else {}),
    )


def layer_axis(figure: go.Figure, layers: Any, title: str = "layer", labels: int = 40) -> None:
    """An x axis of layers: room for what stands beside the ends, and every layer named where they
    are fewer than `labels`.
    """
    last = float(max(layers))
    figure.update_xaxes(
        title=title,
        showgrid=False,
        zeroline=False,
        range=[-0.7, last + 0.7],
        **({"tickmode": "linear", "dtick": 1} if last < labels else {}),
    )


def finish(figure: go.Figure, title: str, subtitle: str, height: int) -> go.Figure:
    """Title, sample and margins. `title` and `subtitle` are plain text and are escaped here.

    The plain text is kept in `layout.meta`: the page sets it as HTML, where it wraps on a phone.
    """
    figure.update_layout(
        template="plotly_white",
        title={
            "text": in_figure(title, 200),
            "subtitle": {"text": in_figure(subtitle, 400)},
            "x": 0.01,
            "xanchor": "left",
        },
        meta={"title": title, "subtitle": subtitle},
        height=height,
        # Titles of panels are annotations, and stand above the axes as the subtitle does.
        margin={"l": 60, "r": 20, "t": 120 if figure.layout.annotations else 90, "b": 60},
        font={"family": "system-ui, sans-serif", "size": 13},
        hoverlabel={"align": "left", "bgcolor": "#ffffff", "font": {"color": "#111111"}},
    )
    return figure

"""Figures of a `qkv` run: layers, ranks, sharing, noise, and the overlap of planes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from interp.report import spec
from interp.report.qkv import METHODS, PRODUCTS, SHARED, TARGETS, effect, everywhere, words
from interp.report.words import NATS, documents, model_name, unsigned
from interp.results import Result

_COLOURS = {
    "q": spec.BLUE,
    "k": spec.RED,
    "v": spec.GREEN,
    "o": spec.GREY,
    "kv": spec.PURPLE,
    "qk": spec.BLUE,
    "ov": spec.GREEN,
}
_SYMBOLS = {"q": "circle", "k": "square", "v": "diamond", "o": "x", "kv": "star"}
_DASHES = {"least_squares": "solid", "average": "dash", "random_groups": "dot"}
_LEGEND = {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0}


def _subtitle(result: Result, *parts: str) -> str:
    every = (model_name(result), documents(result), *parts, "bars: 95% intervals over documents")
    return "; ".join(part for part in every if part)


def _bars(table: Any) -> dict[str, Any]:
    ends = table["ci_low"], table["ci_high"]
    return spec.bars(table["loss_delta"], *ends, thickness=1, width=3)


BESIDE = 0.1
"""Layers between what stands side by side at one of them."""


def _line(table: Any, x: Any, name: str, target: str, **line: Any) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=table["loss_delta"],
        error_y=_bars(table),
        mode="lines+markers",
        name=name,
        line={"color": _COLOURS[target], **line},
        marker={"symbol": _SYMBOLS.get(target, "circle"), "size": 8},
        hovertext=[f"{words(r)}<br>{effect(r._asdict())} {NATS}" for r in table.itertuples()],
        hoverinfo="text",
    )


def _zero(figure: go.Figure) -> None:
    figure.add_hline(0, line_width=1, line_color=spec.GREY)


def _layers(result: Result) -> go.Figure:
    table: Any = result.tables["interventions"]
    table = table[table["layer"].notna() & (table["kind"] == "mean")]
    figure = go.Figure()
    for i, (target, name) in enumerate(TARGETS.items()):
        rows = table[table["target"] == target]
        if len(rows):  # beside each other, so that no bar hides another
            beside = BESIDE * (i - (len(TARGETS) - 1) / 2)
            figure.add_trace(_line(rows, rows["layer"].astype(float) + beside, name, target))
    _zero(figure)
    spec.layer_axis(figure, table["layer"], "layer changed (one at a time)")
    figure.update_yaxes(title=f"loss change ({NATS})")
    figure.update_layout(legend=_LEGEND)
    title = "What each costs, layer by layer, when its mean takes its place"
    return spec.finish(figure, title, _subtitle(result), 480)


def _together(result: Result) -> go.Figure:
    table = everywhere(result)
    table = table[table["kind"].isin(("mean", "noise"))].iloc[::-1]
    figure = go.Figure(
        go.Scatter(
            x=table["loss_delta"],
            y=[words(row) for row in table.itertuples()],
            error_x=_bars(table),
            mode="markers",
            marker={"size": 9, "color": [_COLOURS[t] for t in table["target"]]},
            hovertext=[f"{words(r)}<br>{effect(r._asdict())} {NATS}" for r in table.itertuples()],
            hoverinfo="text",
        )
    )
    figure.add_vline(0, line_width=1, line_color=spec.GREY)
    figure.update_xaxes(title=f"loss change ({NATS})")
    figure.update_yaxes(automargin=True)
    title = "Means and noise, in all layers at once"
    return spec.finish(figure, title, _subtitle(result), 200 + 28 * len(table))


def _rank(result: Result) -> go.Figure:
    table = everywhere(result)
    table = table[table["kind"] == "rank"]
    figure = go.Figure()
    for target, name in PRODUCTS.items():
        rows = table[table["target"] == target]
        if len(rows):
            figure.add_trace(_line(rows, 100 * rows["level"], name, target))
    _zero(figure)
    figure.update_xaxes(
        title="rank left (% of d_head)", autorange="reversed", tickvals=sorted(100 * table["level"])
    )
    figure.update_yaxes(title=f"loss change ({NATS})")
    figure.update_layout(legend=_LEGEND)
    title = "The products of a head cut to a lower rank, in all layers at once"
    return spec.finish(figure, title, _subtitle(result), 440)


def _sharing(result: Result) -> go.Figure:
    table = everywhere(result)
    table = table[table["kind"] == "share"]
    figure = go.Figure()
    for target, name in SHARED.items():
        for method, how in METHODS.items():
            rows = table[(table["target"] == target) & (table["method"] == method)]
            if len(rows):
                line = _line(rows, rows["level"], f"{name}, {how}", target, dash=_DASHES[method])
                figure.add_trace(line)
    _zero(figure)
    most = int(table["level"].max())
    figure.update_xaxes(
        title="groups of heads that have one of their own",
        range=[most + 0.5, 0.5],
        **({"tickmode": "linear", "dtick": 1} if most <= 20 else {}),
    )
    figure.update_yaxes(title=f"loss change ({NATS})")
    figure.update_layout(legend=_LEGEND)
    heads = f"{result.model.get('n_heads')} query heads, {result.model.get('n_kv_heads')} KV heads"
    title = "Q, K or V shared by groups of heads, without retraining"
    return spec.finish(figure, title, _subtitle(result, heads), 520)


def _overlap(result: Result) -> go.Figure:
    table: Any = result.tables["overlap"]
    figure = make_subplots(
        rows=1,
        cols=2,
        subplot_titles=("every direction alike", "weighted by the input"),
        horizontal_spacing=0.12,
    )
    names = {"qk": "Q and K", "qv": "Q and V", "kv": "K and V"}
    colours = {"qk": spec.BLUE, "qv": spec.GREEN, "kv": spec.RED}
    for column, weighted in enumerate((False, True), 1):
        part = table[table["weighted"] == weighted]
        for pair, name in names.items():
            rows = part[part["pair"] == pair]
            figure.add_trace(
                go.Scatter(
                    x=rows["layer"],
                    y=rows["kernel"],
                    mode="markers",
                    name=name,
                    legendgroup=pair,
                    showlegend=column == 1,
                    marker={"size": 5, "color": colours[pair], "opacity": 0.7},
                    hovertext=[
                        f"{name}, head {r.layer}.{r.head}: {unsigned(r.kernel, 2)}"
                        f"<br>percentile {r.percentile:.1f} of random planes"
                        for r in rows.itertuples()
                    ],
                    hoverinfo="text",
                ),
                row=1,
                col=column,
            )
        null = part.groupby("layer")["null_mean"].first()
        figure.add_trace(
            go.Scatter(
                x=null.index,
                y=null,
                mode="lines",
                name="random planes (mean)",
                legendgroup="null",
                showlegend=column == 1,
                line={"color": spec.GREY, "dash": "dash"},
            ),
            row=1,
            col=column,
        )
    spec.layer_axis(figure, table["layer"], labels=16)
    figure.update_yaxes(title="directions shared (projection kernel)", rangemode="tozero", col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    figure.update_layout(legend=_LEGEND)
    most = f"at most {result.model.get('d_head')}, the width of a head"
    title = "Do a head's W_Q, W_K and W_V read the same directions?"
    parts = (model_name(result), f"one point per head; {most}")
    return spec.finish(figure, title, "; ".join(parts), 480)


@dataclass(frozen=True)
class _Kind(spec.FigureSpec):
    """A figure of one kind of change, in all layers at once or in each."""

    kind: str = ""
    each: bool = False

    def available(self, result: Result) -> bool:
        """Whether such changes were made."""
        if not super().available(result):
            return False
        table: Any = result.tables["interventions"]
        here = table["kind"] == self.kind
        return bool((here & (table["layer"].notna() == self.each)).any())


def _of(draw: Callable[[Result], go.Figure], kind: str, each: bool = False) -> _Kind:
    return _Kind(draw, "interventions", ("loss_delta",), kind, each)


FIGURES = {
    "layers": _of(_layers, "mean", each=True),
    "together": _of(_together, "mean"),
    "sharing": _of(_sharing, "share"),
    "rank": _of(_rank, "rank"),
    "overlap": spec.FigureSpec(_overlap, "overlap", ("layer", "kernel", "null_mean")),
}

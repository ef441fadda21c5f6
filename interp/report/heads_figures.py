"""Figures of a `heads` run: layer-by-head maps, and the loss while heads are removed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from interp.report import spec
from interp.report.heads import (
    LIMITS,
    MATERIAL,
    ablation,
    best_order,
    head_label,
    order_label,
    prunable,
    total_heads,
)
from interp.report.heads_roles import ROLES
from interp.report.view import has
from interp.report.words import (
    NATS,
    documents,
    in_figure,
    interval,
    model_name,
    number,
    percent,
    probability,
    signed,
    unsigned,
)
from interp.results import Result

# ColorBrewer RdBu, blue where removing the head helps: told apart with any colour vision; the
# middle is zero.
_BLUE_RED = [
    "#053061",
    "#2166ac",
    "#4393c3",
    "#92c5de",
    "#d1e5f0",
    "#f7f7f7",
    "#fddbc7",
    "#f4a582",
    "#d6604d",
    "#b2182b",
    "#67001f",
]
_CIVIDIS = [
    "#00224e",
    "#123570",
    "#3b496c",
    "#575d6d",
    "#707173",
    "#8a8678",
    "#a59c74",
    "#c3b369",
    "#e1cc55",
    "#fee838",
]


def _scale(colours: list[str], diverging: bool, root: bool) -> list[list[Any]]:
    """Colour stops on [0, 1]. With `root` they crowd around zero, so that one strong head leaves
    the others visible; the values and the colour bar stay linear.
    """
    at = np.linspace(-1 if diverging else 0, 1, len(colours))
    at = np.sign(at) * at**2 if root else at
    at = (at + 1) / 2 if diverging else at
    return [[float(position), colour] for position, colour in zip(at, colours, strict=True)]


_DIVERGING = _scale(_BLUE_RED, True, True)
_SEQUENTIAL = _scale(_CIVIDIS, False, False)
_SEQUENTIAL_ROOT = _scale(_CIVIDIS, False, True)


def _shape(result: Result, table: pd.DataFrame) -> tuple[int, int]:
    # The table wins where it knows of more than the model: no cell may fall outside the map.
    layers, heads = (
        max(int(number(result.model.get(known)) or 0), int(table[column].to_numpy().max()) + 1)
        for known, column in (("n_layers", "layer"), ("n_heads", "head"))
    )
    return layers, heads


def _hover(row: Any, n: str) -> str:
    """Everything that is known of one head; numbers only, but for the verdict, which is escaped."""

    def value(name: str) -> float | None:
        return number(getattr(row, name, None))

    layer, head = int(row.layer), int(row.head)
    kv = value("kv_head")
    lines = [
        f"<b>head {head_label(layer, head)}</b> (layer {layer}, head {head}"
        + (f", KV head {int(kv)})" if kv is not None and int(kv) != head else ")")
    ]
    for name in ("importance_norm", "importance", "importance_token"):
        if value(name) is not None:
            lines.append(f"{name} {unsigned(value(name))}")
    if value("loss_delta") is not None:
        ends = interval(value("ci_low"), value("ci_high"))
        lines.append(f"loss change {signed(value('loss_delta'))} {ends} {NATS}")
    if value("p_value") is not None:
        lines.append(f"p {probability(value('p_value'))}, q {probability(value('q_value'))}")
    verdict = getattr(row, "verdict", None)
    if isinstance(verdict, str):
        lines.append(f"verdict: {in_figure(verdict, 20)}")
    if value("loss_delta_mean") is not None:
        ends = interval(value("mean_low"), value("mean_high"))
        lines.append(f"mean-ablated: {signed(value('loss_delta_mean'))} {ends} {NATS}")
    if value("kl") is not None:
        ends = interval(value("kl_low"), value("kl_high"), unsigned)
        lines.append(f"KL {unsigned(value('kl'))} {ends} {NATS}")
    looks = [
        f"{words} {value(name):.2f}"
        for name, words in ROLES.items()
        if name != "other" and value(name) is not None
    ]
    if looks:
        lines.append(f"attention by role: {', '.join(looks)}")
    return "<br>".join(lines + ([f"n = {n}"] if n else []))


def _material(table: pd.DataFrame, low: str, high: str) -> pd.DataFrame | None:
    if low not in table.columns or high not in table.columns:
        return None
    return table.loc[(table[low] > MATERIAL) | (table[high] < -MATERIAL), :]


def head_map(
    result: Result,
    column: str,
    title: str,
    unit: str,
    *,
    diverging: bool = False,
    root: bool = False,
    ends: tuple[str, str] | None = None,
    note: str = "",
    upper: float | None = None,
) -> go.Figure:
    """One cell per head: x is the head, y the layer; layer 0 at the top.

    Colours end at the largest value, or at `upper`.
    """
    table = result.tables["heads"]
    layers, heads = _shape(result, table)
    values = np.full((layers, heads), np.nan)
    hover = np.full((layers, heads), "not measured", dtype=object)
    cut = [tuple(head) for head in result.model.get("removed") or []]
    for head in cut:
        hover[head] = f"head {head_label(*head)} was cut out of the checkpoint"
    n = documents(result)
    for row in table.itertuples(index=False):
        here = int(row.layer), int(row.head)  # type: ignore[arg-type]
        values[here] = getattr(row, column)
        hover[here] = _hover(row, n)
    top = upper or float(np.nanmax(np.abs(values))) or MATERIAL
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=list(range(heads)),
            y=list(range(layers)),
            zmin=-top if diverging else 0.0,
            zmax=top,
            zmid=0.0 if diverging else None,
            colorscale=_DIVERGING if diverging else _SEQUENTIAL_ROOT if root else _SEQUENTIAL,
            hovertext=hover,
            hoverinfo="text",
            hoverongaps=False,
            xgap=1,
            ygap=1,
            colorbar={"title": {"text": unit, "side": "right"}, "thickness": 14},
        )
    )
    marked = _material(table, *ends) if ends else None
    parts = [model_name(result), n]
    measured = int(np.isfinite(values).sum())
    if measured < values.size - len(cut):
        why = "" if result.complete else "interrupted: "
        parts.append(f"{why}{measured} of {values.size - len(cut)} heads measured")
    if cut:
        parts.append(f"blank: {len(cut)} heads cut out of the checkpoint")
    if marked is not None and len(marked):
        figure.add_scatter(
            x=marked["head"],
            y=marked["layer"],
            mode="markers",
            marker={"size": 6, "color": "#111111", "line": {"width": 1, "color": "#ffffff"}},
            hoverinfo="skip",
            showlegend=False,
        )
    if ends is not None:
        parts.append(
            f"dots: {0 if marked is None else len(marked)} heads whose 95% interval lies wholly "
            f"beyond \u00b1{MATERIAL}"
        )
    parts.append(note)
    spec.grid_axes(figure, layers, heads)
    figure.update_xaxes(range=[-0.5, heads - 0.5])
    return spec.finish(
        figure,
        title,
        "; ".join(part for part in parts if part),
        min(900, 190 + max(130, 24 * layers)),
    )


def _importance(result: Result) -> go.Figure:
    return head_map(
        result,
        "importance_norm",
        "Sensitivity of the loss to each head (importance_norm)",
        "share of layer norm",
        note="ranks sensitivity, not the sign of the loss change",
    )


def _raw_importance(result: Result) -> go.Figure:
    return head_map(
        result,
        "importance",
        "Sensitivity of the loss to each head, layers compared (importance)",
        NATS,
        root=True,
        note="not normalised within layers; ranks sensitivity, not the sign of the loss change",
    )


def _loss_delta(result: Result) -> go.Figure:
    return head_map(
        result,
        "loss_delta",
        f"Loss change when one head is removed ({ablation(result)} ablation)",
        NATS,
        diverging=True,
        root=True,
        ends=("ci_low", "ci_high"),
        note="red: loss rises, blue: falls",
    )


def _loss_delta_mean(result: Result) -> go.Figure:
    return head_map(
        result,
        "loss_delta_mean",
        "Loss change when one head gives its mean output (mean ablation)",
        NATS,
        diverging=True,
        root=True,
        ends=("mean_low", "mean_high"),
        note="red: loss rises, blue: falls",
    )


def _kl(result: Result) -> go.Figure:
    return head_map(
        result,
        "kl",
        f"How far the predictions move when one head is removed (KL, {ablation(result)} ablation)",
        NATS,
        root=True,
    )


# The curve ----------------------------------------------------------------------------------------

_STYLES = {
    "importance": (spec.BLUE, "solid", "circle"),
    "raw": (spec.ORANGE, "dash", "square"),
    "random": (spec.GREY, "dot", "x"),
    "exact": (spec.RED, "solid", "diamond"),
    "compensated": (spec.GREEN, "dashdot", "triangle-up"),
    "rescore": (spec.PURPLE, "longdash", "triangle-down"),
}
_OTHER = (spec.SKY, "solid", "pentagon")
ZOOM = 0.2  # nats per token; the height of the second figure


def _curve_orders(table: pd.DataFrame) -> list[str]:
    found = [str(order) for order in table["order"].unique()]
    return [order for order in _STYLES if order in found] + [o for o in found if o not in _STYLES]


def _points(result: Result, refined: bool) -> pd.DataFrame:
    """Rows of the curve; refined: with those measured head by head around the limits."""
    table, more = result.tables["prune"], result.tables.get("refine")
    if not refined or more is None or more.empty:
        return table
    return pd.concat([table, more.reindex(columns=table.columns)], ignore_index=True)


def _rows(table: pd.DataFrame, order: str) -> pd.DataFrame:
    return table.loc[table["order"] == order, :].sort_values(by="n_pruned", kind="stable")


def _curve_hover(rows: pd.DataFrame, label: str, total: int) -> list[str]:
    low = rows["ci_low"] if "ci_low" in rows else [None] * len(rows)
    high = rows["ci_high"] if "ci_high" in rows else [None] * len(rows)
    return [
        f"<b>{label}</b><br>{int(n)} of {total} heads removed ({percent(fraction)})<br>"
        f"loss change {signed(change)} {interval(lo, hi)} {NATS}"
        for n, fraction, change, lo, hi in zip(
            rows["n_pruned"], rows["fraction"], rows["loss_delta"], low, high, strict=True
        )
    ]


def _add_curve(figure: go.Figure, table: pd.DataFrame, order: str, total: int) -> None:
    colour, dash, symbol = _STYLES.get(order, _OTHER)
    label = in_figure(order_label(order))
    rows = _rows(table, order)
    if has(rows, "ci_low") and has(rows, "ci_high"):
        band = rows.dropna(subset=["ci_low", "ci_high"])
        x = 100 * band["fraction"]
        figure.add_scatter(
            x=[*x, *x[::-1]],
            y=[*band["ci_high"], *band["ci_low"][::-1]],
            fill="toself",
            fillcolor=colour,
            opacity=0.14,
            mode="lines",
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=order,
        )
    figure.add_scatter(
        x=100 * rows["fraction"],
        y=rows["loss_delta"],
        name=label,
        legendgroup=order,
        mode="lines+markers",
        line={"color": colour, "dash": dash, "width": 2},
        marker={"color": colour, "symbol": symbol, "size": 7},
        hovertext=_curve_hover(rows, label, total),
        hoverinfo="text",
    )


def _add_random(figure: go.Figure, table: pd.DataFrame, total: int) -> None:
    """Each seed thin, their mean thick; the mean only where every seed was measured."""
    colour, dash, symbol = _STYLES["random"]
    rows = _rows(table, "random")
    seeds = list(rows.groupby("seed", sort=True)) if has(rows, "seed") else [(None, rows)]
    for seed, part in seeds:
        name = "random order" if seed is None else f"random order, seed {number(seed):.0f}"
        figure.add_scatter(
            x=100 * part["fraction"],
            y=part["loss_delta"],
            mode="lines+markers",
            line={"color": colour, "width": 1},
            marker={"size": 4},
            opacity=0.55,
            hovertext=_curve_hover(part, name, total),
            hoverinfo="text",
            showlegend=False,
            legendgroup="random",
        )
    grouped = rows.groupby("n_pruned", sort=True)
    mean = grouped.agg(
        fraction=("fraction", "first"), change=("loss_delta", "mean"), n=("loss_delta", "count")
    )
    mean = mean[mean["n"] == len(seeds)]
    figure.add_scatter(
        x=100 * mean["fraction"],
        y=mean["change"],
        name=f"random, mean of {len(seeds)} orders" if len(seeds) > 1 else "random",
        legendgroup="random",
        mode="lines+markers",
        line={"color": colour, "dash": dash, "width": 3},
        marker={"color": colour, "symbol": symbol, "size": 8},
        hovertext=[
            f"<b>random, mean of {len(seeds)} orders</b><br>{int(str(n))} of {total} heads removed "
            f"({percent(row['fraction'])})<br>loss change {signed(row['change'])} {NATS}"
            for n, row in mean.iterrows()
        ],
        hoverinfo="text",
    )


def _add_limits(figure: go.Figure, result: Result, zoom: bool) -> None:
    for limit in LIMITS:
        height = float(limit)
        if zoom or limit == LIMITS[0]:  # at full height the two lines are one
            figure.add_hline(y=height, line={"color": spec.GREY, "dash": "dash", "width": 1})
            figure.add_annotation(  # on the right, where the curves have left the line
                xref="paper",
                x=1,
                y=height,
                text=f"{limit} nats",
                showarrow=False,
                xanchor="right",
                yanchor="bottom",
            )
        best = best_order(result, limit)
        found = prunable(result, best, limit) if best else None
        if best is None or found is None:
            continue
        text = f"{percent(found[0])} {in_figure(order_label(best))}, within {limit} nats"
        at = _rows(_points(result, refined=True), best)
        at = at.loc[(at["fraction"] - found[0]).abs() < 1e-9, "loss_delta"]
        figure.add_scatter(
            x=[100 * found[0]],
            y=[float(at.iloc[0]) if len(at) else height],
            mode="markers",
            marker={
                "symbol": "star" if limit == LIMITS[0] else "star-diamond",
                "size": 14,
                "color": _STYLES.get(best, _OTHER)[0],
                "line": {"width": 1, "color": "#ffffff"},
            },
            hovertext=[text],
            hoverinfo="text",
            name=f"{limit} nats: {percent(found[0])} of heads",
        )


def _prune(result: Result, zoom: bool) -> go.Figure:
    table = _points(result, refined=zoom)
    total = total_heads(result) or int(table["n_pruned"].to_numpy().max())
    figure = go.Figure()
    for order in _curve_orders(table):
        if order == "random":
            _add_random(figure, table, total)
        else:
            _add_curve(figure, table, order, total)
    _add_limits(figure, result, zoom)
    figure.update_xaxes(title="heads removed (%)", range=[-1, 101], zeroline=False)
    figure.update_yaxes(title=f"loss change ({NATS})")
    parts = [
        model_name(result),
        documents(result),
        "bands: 95% interval, paired by document",
        "stars: what the best order removes within a limit",
        *(["measured head by head where a curve first exceeds a limit"] if zoom else []),
    ]
    title = "Loss while heads are removed together"
    if zoom:
        low = table["loss_delta"].min()
        inside = table[table["loss_delta"] <= ZOOM]
        figure.update_yaxes(range=[min(-0.02, 1.2 * max(low, -ZOOM)), ZOOM])
        figure.update_xaxes(range=[-1, min(101.0, 100 * inside["fraction"].max() + 6)])
        title += ": the first 0.2 nats"
    if not result.complete:
        parts.append("interrupted")
    figure.update_layout(legend={"orientation": "h", "y": -0.18, "yanchor": "top", "x": 0})
    spec.finish(figure, title, "; ".join(part for part in parts if part), 560)
    return figure


_CURVE = ("order", "n_pruned", "fraction", "loss_delta")
FIGURES = {
    "heads": spec.FigureSpec(_importance, "heads", ("layer", "head", "importance_norm")),
    "importance": spec.FigureSpec(_raw_importance, "heads", ("layer", "head", "importance")),
    "loss_delta": spec.FigureSpec(_loss_delta, "heads", ("layer", "head", "loss_delta")),
    "loss_delta_mean": spec.FigureSpec(
        _loss_delta_mean, "heads", ("layer", "head", "loss_delta_mean")
    ),
    "kl": spec.FigureSpec(_kl, "heads", ("layer", "head", "kl")),
    "prune": spec.FigureSpec(partial(_prune, zoom=False), "prune", _CURVE),
    "prune_low": spec.FigureSpec(partial(_prune, zoom=True), "prune", _CURVE),
}

"""Figures of a run of the toy model of superposition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from interp.report import spec
from interp.report.words import count, unsigned
from interp.results import Result

PLATEAUS = {"1": 1.0, "2/3": 2 / 3, "1/2": 1 / 2, "2/5": 2 / 5}
STATES = ("neither", "first", "second", "both")
_COLOURS = (spec.GREY, spec.SKY, spec.GREEN, spec.ORANGE)
_LEGEND = {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0}


def _steps(result: Result) -> str:
    return f"{count(result.config.get('steps'))} steps, seed {count(result.seed)}"


def _plateaus(result: Result) -> go.Figure:
    sweep = result.tables["sweep"]
    features = result.tables["features"]
    shown = features[(features["experiment"] == "sweep") & features["represented"]]
    figure = go.Figure()
    figure.add_scatter(
        x=1 / shown["density"],
        y=shown["dimensionality"],
        mode="markers",
        name="D of each represented feature",
        marker={"color": spec.SKY, "size": 6, "opacity": 0.5},
        hovertemplate="1/(1 - S) %{x:.3g}<br>D %{y:.3f}<extra></extra>",
    )
    figure.add_scatter(
        x=sweep["inverse_density"],
        y=sweep["d_star"],
        mode="lines+markers",
        name="D* = m/|W|<sub>F</sub><sup>2</sup>",
        line={"color": spec.RED, "width": 2},
        customdata=sweep[["represented", "antipodal_pairs"]],
        hovertemplate=(
            "1/(1 - S) %{x:.3g}<br>D* %{y:.3f}<br>%{customdata[0]} features represented<br>"
            "%{customdata[1]} antipodal pairs<extra></extra>"
        ),
    )
    for name, at in PLATEAUS.items():
        figure.add_hline(
            y=at,
            line={"color": spec.GREY, "width": 1, "dash": "dot"},
            annotation={"text": name, "font": {"size": 11}},
            annotation_position="right",
        )
    figure.update_xaxes(title="1/(1 - S), S the sparsity", type="log")
    figure.update_yaxes(title="dimensions per feature", range=[0, 1.1])
    figure.update_layout(legend=_LEGEND)
    n, m = (count(result.config.get(key)) for key in ("features", "dimensions"))
    return spec.finish(
        figure,
        "Dimensions per feature, from dense to sparse",
        f"{n} equally important features in {m} dimensions; {_steps(result)}; dotted: alone (1), "
        "triangle (2/3), antipodal pair (1/2), pentagon (2/5)",
        480,
    )


def _importance(result: Result) -> go.Figure:
    features = result.tables["features"]
    shown = features[features["experiment"] == "importance"]
    grid = shown.pivot(index="density", columns="feature", values="square").sort_index(
        ascending=False
    )
    figure = go.Figure(
        go.Heatmap(
            z=grid.to_numpy(),
            x=list(grid.columns),
            y=[unsigned(p, 2) for p in grid.index],
            zmin=0,
            colorscale="Cividis",
            xgap=1,
            ygap=1,
            colorbar={"title": {"text": "|W<sub>i</sub>|<sup>2</sup>"}, "thickness": 14},
            hovertemplate="density %{y}<br>feature %{x}<br>|W|^2 %{z:.3f}<extra></extra>",
        )
    )
    figure.update_xaxes(title="feature, most important first", dtick=1)
    figure.update_yaxes(title="density 1 - S", type="category", autorange="reversed")
    return spec.finish(
        figure,
        "Which features are stored when importance falls",
        f"20 features of importance 0.8^i in 5 dimensions; {_steps(result)}",
        340,
    )


def _shapes(result: Result) -> go.Figure:
    shapes = result.tables["shapes"]
    best = shapes[shapes["best"]]
    cases: list[Any] = list(best.groupby(["features", "density"], sort=False))
    titles = [f"{n} features, density {p:g}" for (n, p), _ in cases]
    figure = make_subplots(rows=1, cols=len(cases), subplot_titles=titles)
    for i, (_, case) in enumerate(cases):
        for x, y, D in zip(case["x"], case["y"], case["dimensionality"], strict=True):
            figure.add_scatter(
                x=[0, x],
                y=[0, y],
                mode="lines+markers",
                marker={"color": spec.BLUE, "size": [0, 8]},
                line={"color": spec.BLUE, "width": 2},
                hovertext=f"D {D:.3f}",
                hoverinfo="text",
                showlegend=False,
                row=1,
                col=i + 1,
            )
        figure.update_xaxes(range=[-1.5, 1.5], showticklabels=False, row=1, col=i + 1)
        figure.update_yaxes(
            range=[-1.5, 1.5],
            showticklabels=False,
            scaleanchor="x" if i == 0 else f"x{i + 1}",
            row=1,
            col=i + 1,
        )
    figure.update_annotations(font={"size": 11})
    return spec.finish(
        figure,
        "How features share a plane",
        f"columns W_i in two dimensions, the best of 3 runs each; {_steps(result)}",
        340,
    )


def _phase(result: Result) -> go.Figure:
    phase = result.tables["phase"]
    codes = phase.assign(code=[STATES.index(state) for state in phase["state"]])
    grid = codes.pivot(index="relative_importance", columns="density", values="code")
    names = phase.pivot(index="relative_importance", columns="density", values="state")
    stops = np.repeat(np.arange(len(STATES) + 1) / len(STATES), 2)[1:-1]
    colours = [c for colour in _COLOURS for c in (colour, colour)]
    figure = go.Figure(
        go.Heatmap(
            z=grid.to_numpy(),
            x=np.log10(1 / grid.columns.to_numpy()),
            y=np.log10(grid.index.to_numpy()),
            customdata=names.to_numpy(),
            zmin=-0.5,
            zmax=len(STATES) - 0.5,
            colorscale=[[float(a), b] for a, b in zip(stops, colours, strict=True)],
            colorbar={
                "tickvals": list(range(len(STATES))),
                "ticktext": list(STATES),
                "title": {"text": "stored"},
                "thickness": 14,
            },
            hovertemplate="%{customdata}<extra></extra>",
            xgap=1,
            ygap=1,
        )
    )
    line: Any = phase.drop_duplicates("density")
    line = line[np.isfinite(line["boundary"]) & (line["boundary"] <= 1)]
    for sign in (1, -1):
        figure.add_scatter(
            x=np.log10(1 / line["density"]),
            y=sign * np.log10(line["boundary"]),
            mode="lines",
            line={"color": "#111111", "width": 2},
            hoverinfo="skip",
            showlegend=False,
        )
    figure.update_xaxes(
        title="1/(1 - S)", tickvals=[0, 1, 2], ticktext=["1", "10", "100"], showgrid=False
    )
    figure.update_yaxes(
        title="importance of the second feature",
        tickvals=[-1, 0, 1],
        ticktext=["0.1", "1", "10"],
        range=[-1.15, 1.15],
        showgrid=False,
    )
    return spec.finish(
        figure,
        "Two features in one dimension: one of them, or both",
        f"importance relative to the first; best of 3 starts; {_steps(result)}; line: where "
        "storing both becomes cheaper, by theory",
        420,
    )


FIGURES: Mapping[str, spec.FigureSpec] = {
    "plateaus": spec.FigureSpec(_plateaus, "sweep", ("d_star",)),
    "importance": spec.FigureSpec(_importance, "features", ("square",)),
    "shapes": spec.FigureSpec(_shapes, "shapes", ("x", "y")),
    "phase": spec.FigureSpec(_phase, "phase", ("density",)),
}

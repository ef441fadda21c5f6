"""Figures of what a run's features share and tell: geometry beside its null, concepts."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from interp.report import spec
from interp.report.superposition_meaning import STATISTICS, name_of
from interp.report.words import count, model_name
from interp.results import Result

_LEGEND = {"orientation": "h", "y": -0.28, "yanchor": "top", "x": 0}
_DIRECTIONS = {"random": ("random directions", spec.GREY), "features": ("features", spec.BLUE)}


def _subtitle(result: Result, *parts: str) -> str:
    known = [model_name(result), f"layer {count(result.summary.get('layer'))}", *parts]
    return "; ".join(known)


def _concepts(result: Result) -> go.Figure:
    table = result.tables["concept_scores"]
    names = [name_of(name) for name in table["dictionary"]]
    candidates = count(table["candidates"].to_numpy()[0])
    figure = go.Figure()
    for column, label, symbol, colour in (
        ("concept_auroc_all", "of all directions", "circle", spec.BLUE),
        ("concept_auroc", f"of {candidates} directions each", "circle-open", spec.ORANGE),
    ):
        x = table[column].astype(float).to_numpy()
        low, high = (table[f"{column}_{end}"].astype(float).to_numpy() for end in ("low", "high"))
        figure.add_scatter(
            x=x,
            y=names,
            error_x=spec.bars(x, low, high),
            mode="markers",
            name=label,
            marker={"size": 10, "color": colour, "symbol": symbol},
            hovertext=[
                f"<b>{name}</b> ({count(n)} directions)<br>{label}: {value:.3f} [{a:.3f}, {b:.3f}]"
                for name, n, value, a, b in zip(
                    names, table["available"], x, low, high, strict=True
                )
            ],
            hoverinfo="text",
        )
    figure.add_vline(x=0.5, line={"color": spec.GREY, "width": 1, "dash": "dot"})
    figure.update_xaxes(title="held-out AUROC, mean over labels (0.5: chance)")
    figure.update_yaxes(autorange="reversed", type="category", automargin=True)
    figure.update_layout(legend=_LEGEND)
    first = table.iloc[0]
    return spec.finish(
        figure,
        "How well the best single direction tells a label",
        _subtitle(
            result,
            f"{count(first['concepts'])} mechanical labels",
            f"chosen on half of the documents, scored on {count(first['tokens'])} tokens of the "
            f"other {count(first['documents'])}",
            "95% intervals over documents",
        ),
        200 + 36 * len(table),
    )


def _geometry(result: Result) -> go.Figure:
    table = result.tables["geometry"].set_index(["statistic", "directions"])
    shown = [name for name in STATISTICS if (name, "features") in table.index]
    figure = make_subplots(
        rows=len(shown),
        cols=1,
        vertical_spacing=0.14,
        subplot_titles=[STATISTICS[name] for name in shown],
    )
    for i, name in enumerate(shown):
        for directions, (label, colour) in _DIRECTIONS.items():
            row = table.loc[(name, directions)]
            for ends, width in ((("p1", "p99"), 2), (("p25", "p75"), 8)):
                figure.add_scatter(
                    x=[float(row[end]) for end in ends],
                    y=[label] * 2,
                    mode="lines",
                    line={"color": colour, "width": width},
                    hoverinfo="skip",
                    showlegend=False,
                    row=i + 1,
                    col=1,
                )
            figure.add_scatter(
                x=[float(row["p50"])],
                y=[label],
                mode="markers",
                marker={"color": "#ffffff", "size": 9, "line": {"color": colour, "width": 3}},
                hovertext=f"<b>{label}</b> (n = {count(row['n'])})<br>median {row['p50']:.4g}<br>"
                f"half of them {row['p25']:.4g} to {row['p75']:.4g}<br>98% {row['p1']:.4g} to "
                f"{row['p99']:.4g}",
                hoverinfo="text",
                showlegend=False,
                row=i + 1,
                col=1,
            )
        both = table.loc[[(name, directions) for directions in _DIRECTIONS], ["p1", "p99"]]
        low, high = float(both["p1"].min()), float(both["p99"].max())
        pad = 0.03 * (high - low)
        figure.update_xaxes(zeroline=False, range=[low - pad, high + pad], row=i + 1, col=1)
    figure.update_yaxes(type="category", automargin=True)
    figure.update_annotations(font={"size": 12}, x=0, xanchor="left")
    draws = count(table["draws"].to_numpy().max())
    return spec.finish(
        figure,
        "How features share the space",
        _subtitle(
            result,
            f"{count(result.summary.get('n_live'))} live decoder directions, and {draws} times as "
            "many random ones with the activations' covariance",
            "dot: median, thick: half of them, thin: 98%",
        ),
        150 + 105 * len(shown),
    )


FIGURES: Mapping[str, spec.FigureSpec] = {
    "concepts": spec.FigureSpec(_concepts, "concept_scores", ("concept_auroc_all",)),
    "geometry": spec.FigureSpec(_geometry, "geometry", ("p50",)),
}

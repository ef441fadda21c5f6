"""Figures of a `superposition` run: dictionaries side by side, densities, widths, training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from interp.report import spec, superposition_meaning_figures
from interp.report.superposition import is_width, name_of
from interp.report.words import count, model_name
from interp.results import Result

_LEGEND = {"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0}
_COLOURS = (spec.BLUE, spec.ORANGE, spec.GREEN, spec.PURPLE, spec.RED, spec.SKY)


def _subtitle(result: Result, *parts: str) -> str:
    known = [model_name(result), f"layer {count(result.summary.get('layer'))}", *parts]
    if not result.complete:
        known.append("interrupted")
    return "; ".join(part for part in known if part)


def _dots(
    result: Result, table: pd.DataFrame, column: str, axis: str, title: str, subtitle: str
) -> go.Figure:
    """One dot per dictionary, with its interval; the SAE on top."""
    table = table.loc[table[column].notna(), :]
    names = [name_of(name) for name in table["dictionary"]]
    x = table[column].astype(float).to_numpy()
    low, high = (table[f"{column}_{end}"].astype(float).to_numpy() for end in ("low", "high"))
    figure = go.Figure()
    figure.add_scatter(
        x=x,
        y=names,
        error_x=spec.bars(x, low, high, thickness=1.5, width=4),
        mode="markers",
        marker={
            "size": 10,
            "color": [
                spec.BLUE if str(d).startswith("sae") else spec.GREY for d in table["dictionary"]
            ],
        },
        hovertext=[
            f"<b>{name}</b><br>{value:.4g} [{a:.4g}, {b:.4g}]"
            for name, value, a, b in zip(names, x, low, high, strict=True)
        ],
        hoverinfo="text",
        showlegend=False,
    )
    figure.update_xaxes(title=axis, zeroline=True)
    figure.update_yaxes(autorange="reversed", type="category", automargin=True)
    return spec.finish(figure, title, _subtitle(result, subtitle), 150 + 30 * len(table))


def _loss(result: Result) -> go.Figure:
    table = result.tables["baselines"]
    n = count(result.summary.get("loss_documents"))
    return _dots(
        result,
        table,
        "loss_delta",
        "loss above the clean model's, nats per token",
        "What it costs the model to get a reconstruction instead",
        f"{n} documents, 95% intervals over documents",
    )


def _fvu(result: Result) -> go.Figure:
    table = result.tables["baselines"]
    table = table.loc[~table["dictionary"].isin(["zero", "random error"]), :]
    n = count(result.summary.get("tokens"))
    return _dots(
        result,
        table,
        "fvu",
        "fraction of variance unexplained",
        "How much of the variance is missing",
        f"{n} positions of {count(result.summary.get('documents'))} documents, 95% intervals over "
        "documents",
    )


def _density(result: Result) -> go.Figure:
    table = result.tables["density"]
    figure = go.Figure()
    silent = []
    for (name, part), colour in zip(
        table.groupby("dictionary", sort=False), _COLOURS * 5, strict=False
    ):
        never = int(part.loc[part["high"] == 0, "features"].sum())
        own = part.loc[part["high"] > 0, :]
        silent.append(f"{count(never)} of {name_of(name)}")
        middle = np.sqrt(own["low"] * own["high"])
        hover = [
            f"<b>{name_of(name)}</b><br>density {low:.2g} to {high:.2g}<br>{n:,} features"
            for low, high, n in zip(own["low"], own["high"], own["features"], strict=True)
        ]
        if name == "sae":
            # Bars on a logarithmic axis need their width in the axis' own unit.
            figure.add_bar(
                x=middle,
                y=own["features"],
                width=own["high"] - own["low"],
                name=name_of(name),
                marker={"color": colour, "line": {"width": 0}},
                hovertext=hover,
                hoverinfo="text",
            )
        else:
            figure.add_scatter(
                x=middle,
                y=own["features"],
                mode="lines",
                line={"shape": "hvh", "color": colour, "width": 2},
                name=name_of(name),
                hovertext=hover,
                hoverinfo="text",
            )
    n = float(result.summary.get("tokens") or 1)
    figure.update_xaxes(
        title="density (share of positions)",
        type="log",
        range=[np.log10(0.5 / n), 0],
        dtick=1,
        exponentformat="power",
    )
    figure.update_yaxes(title="features", rangemode="tozero")
    figure.update_layout(legend=_LEGEND, bargap=0)
    return spec.finish(
        figure,
        "How often features fire",
        _subtitle(
            result,
            f"{count(n)} positions",
            f"features that never fire (not drawn): {', '.join(silent)}",
        ),
        430,
    )


def _frontier(result: Result) -> go.Figure:
    table = result.tables["baselines"]
    table = table.loc[[is_width(str(name)) for name in table["dictionary"]], :]
    table = table.sort_values(by="components")
    shown = [
        (column, axis)
        for column, axis in (
            ("fvu", "fraction of variance<br>unexplained"),
            ("loss_delta", "loss above clean,<br>nats per token"),
        )
        if table[column].notna().any()
    ]
    figure = make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=0.08)
    x = table["components"].astype(float)
    for i, (column, axis) in enumerate(shown):
        y, low, high = (table[f"{column}{end}"].astype(float) for end in ("", "_low", "_high"))
        figure.add_scatter(
            x=x,
            y=y,
            error_y=spec.bars(y, low, high),
            mode="lines+markers",
            line={"color": spec.BLUE},
            marker={"size": 9},
            hovertext=[
                f"<b>{count(n)} features</b><br>L0 {l0:.3g}<br>{v:.4g}"
                for n, l0, v in zip(x, table["l0"].astype(float), y, strict=True)
            ],
            hoverinfo="text",
            showlegend=False,
            row=i + 1,
            col=1,
        )
        figure.update_yaxes(title=axis, row=i + 1, col=1)
    figure.update_xaxes(
        type="log", tickmode="array", tickvals=list(x), ticktext=[count(v) for v in x]
    )
    figure.update_xaxes(title="features", row=len(shown), col=1)
    return spec.finish(
        figure,
        "What more features buy",
        _subtitle(
            result,
            f"trained on {count(result.summary.get('train_tokens'))} positions each",
            "95% intervals over documents",
        ),
        160 + 220 * len(shown),
    )


def _training(result: Result) -> go.Figure:
    table = result.tables["training"]
    panels = (
        ("fvu", "FVU of the batch"),
        ("l0", "features active"),
        ("dead", "share dead"),
    )
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.06)
    groups = zip(table.groupby("dictionary", sort=False), _COLOURS * 5, strict=False)
    for (name, part), colour in groups:
        for i, (column, _) in enumerate(panels):
            figure.add_scatter(
                x=part["tokens"],
                y=part[column],
                mode="lines",
                name=name_of(name),
                legendgroup=str(name),
                showlegend=i == 0,
                line={"color": colour, "width": 1.5},
                hovertemplate="%{x:,} positions: %{y:.4g}",
                row=i + 1,
                col=1,
            )
    for i, (_, axis) in enumerate(panels):
        figure.update_yaxes(title=axis, rangemode="tozero", row=i + 1, col=1)
    figure.update_xaxes(title="positions trained on", row=len(panels), col=1)
    figure.update_layout(legend=_LEGEND | {"y": -0.12})
    return spec.finish(
        figure,
        "Training",
        _subtitle(result, "on the training text; dead: without firing in its last part"),
        620,
    )


class _Frontier(spec.FigureSpec):
    """Needs SAEs of several widths."""

    def available(self, result: Result) -> bool:
        table = result.tables.get(self.table)
        return table is not None and sum(is_width(str(n)) for n in table["dictionary"]) > 1


FIGURES: dict[str, Any] = {
    "loss": spec.FigureSpec(_loss, "baselines", ("loss_delta",)),
    "fvu": spec.FigureSpec(_fvu, "baselines", ("fvu",)),
    "frontier": _Frontier(_frontier, "baselines", ("fvu",)),
    "density": spec.FigureSpec(_density, "density", ("features",)),
    "training": spec.FigureSpec(_training, "training", ("fvu",)),
    **superposition_meaning_figures.FIGURES,
}

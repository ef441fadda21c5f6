"""Figures of an `asymmetry` run: maps, strips, scatters, example score matrices, interventions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from interp.report import spec
from interp.report.asymmetry import (
    CLAIM,
    KINDS,
    TEXTS,
    VARIANTS,
    change,
    claim,
    head_label,
    mapping,
    over_training,
    ratio,
    rotary,
)
from interp.report.view import has
from interp.report.words import (
    NATS,
    documents,
    in_figure,
    interval,
    model_name,
    number,
    probability,
    signed,
)
from interp.results import Result

# ColorBrewer PuOr, told apart with any colour vision; the middle is zero.
_PURPLE_ORANGE = [
    "#2d004b",
    "#542788",
    "#8073ac",
    "#b2abd2",
    "#d8daeb",
    "#f7f7f7",
    "#fee0b6",
    "#fdb863",
    "#e08214",
    "#b35806",
    "#7f3b08",
]
_SCALE = [[i / 10, colour] for i, colour in enumerate(_PURPLE_ORANGE)]
HEADLINE = "score_correlation_content_centred"


def _heads(result: Result) -> Any:
    """One row per head: of the last checkpoint, where there are several."""
    table: Any = result.tables["asymmetry"]
    if "checkpoint" in table.columns:
        table = table[table["checkpoint"] == table["checkpoint"].iloc[-1]]
    return table


def _subtitle(result: Result, *parts: str, text: bool = False) -> str:
    """The model, with `text` the sample, and more."""
    named = model_name(result)
    if over_training(result):
        named = f"last checkpoint: {result.tables['asymmetry']['checkpoint'].iloc[-1]}"
    sample = documents(result) if text else ""
    return "; ".join(part for part in (named, sample, *parts) if part)


def _null(result: Result) -> tuple[float, float] | None:
    """The middle 95% of re-paired heads."""
    found = mapping(result.summary.get("null"))
    low, high = number(found.get("low")), number(found.get("high"))
    return None if low is None or high is None else (low, high)


def _hover(row: Any) -> str:
    def value(name: str) -> float | None:
        return number(getattr(row, name, None))

    layer, head = int(row.layer), int(row.head)
    lines = [f"<b>head {head_label(layer, head)}</b> (layer {layer}, head {head})"]
    kv = value("kv_head")
    if kv is not None and int(kv) != head:
        lines[0] = lines[0][:-1] + f", KV head {int(kv)})"
    at = value("null_percentile")
    lines.append(
        f"symmetry {ratio(row.symmetry, 3)}"
        + (f", percentile {at:.1f} of re-paired heads" if at is not None else "")
    )
    if value("symmetry_folded") is not None:
        lines.append(f"norm folded in {ratio(value('symmetry_folded'), 3)}")
    if value("symmetry_data") is not None:
        lines.append(f"weighted by its inputs {ratio(value('symmetry_data'), 3)}")
    if value(HEADLINE) is not None:
        ends = interval(value(f"{HEADLINE}_low"), value(f"{HEADLINE}_high"), ratio)
        lines.append(f"score correlation {ratio(value(HEADLINE), 3)} {ends}")
    if value("loss_delta_excess") is not None:
        ends = interval(value("excess_low"), value("excess_high"))
        lines.append(f"loss change over control {signed(value('loss_delta_excess'))} {ends} {NATS}")
        lines.append(f"q {probability(value('excess_q'))}")
    return "<br>".join(lines)


def _map(result: Result) -> go.Figure:
    table = _heads(result)
    layers, heads = int(table["layer"].max()) + 1, int(table["head"].max()) + 1
    values = np.full((layers, heads), np.nan)
    hover = np.full((layers, heads), "", dtype=object)
    for row in table.itertuples(index=False):
        here = int(row.layer), int(row.head)  # type: ignore[arg-type]
        values[here], hover[here] = row.symmetry, _hover(row)
    top = max(0.05, float(np.nanmax(np.abs(values))))
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=list(range(heads)),
            y=list(range(layers)),
            zmin=-top,
            zmax=top,
            colorscale=_SCALE,
            hovertext=hover,
            hoverinfo="text",
            xgap=1,
            ygap=1,
            colorbar={"title": {"text": "symmetry", "side": "right"}, "thickness": 14},
        )
    )
    parts = []
    if has(table, "null_percentile") and (null := _null(result)):
        outside = table[(table["null_percentile"] < 2.5) | (table["null_percentile"] > 97.5)]
        figure.add_scatter(
            x=outside["head"],
            y=outside["layer"],
            mode="markers",
            marker={"size": 5, "color": "#111111", "line": {"width": 1, "color": "#ffffff"}},
            hoverinfo="skip",
            showlegend=False,
        )
        parts.append(
            f"dots: {len(outside)} of {len(table)} heads outside the middle 95% of re-paired heads "
            f"({ratio(null[0], 3)} to {ratio(null[1], 3)}), where 5% would be by chance"
        )
    spec.grid_axes(figure, layers, heads)
    return spec.finish(
        figure,
        "Symmetry of A = W_Q W_K^T, per head",
        _subtitle(result, *parts),
        min(900, 190 + max(130, 22 * layers)),
    )


def _strip(result: Result) -> go.Figure:
    table = _heads(result).sort_values(["layer", "symmetry"], kind="stable")
    figure = go.Figure()
    null = _null(result)
    if null:
        figure.add_hrect(*null, fillcolor=spec.GREY, opacity=0.35, line_width=0)
    sizes = table.groupby("layer")["head"].transform("size")
    rank = table.groupby("layer").cumcount()
    offset = np.where(sizes > 1, (rank / np.maximum(sizes - 1, 1) - 0.5) * 0.7, 0.0)
    figure.add_scatter(
        x=table["layer"] + offset,
        y=table["symmetry"],
        mode="markers",
        marker={"size": 6, "color": spec.BLUE, "opacity": 0.8},
        hovertext=[_hover(row) for row in table.itertuples(index=False)],
        hoverinfo="text",
        name="head",
    )
    layers = result.tables["asymmetry_layers"]
    if "checkpoint" in layers.columns:
        layers = layers[layers["checkpoint"] == layers["checkpoint"].iloc[-1]]
    figure.add_scatter(
        x=layers["layer"],
        y=layers["symmetry"],
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 22, "color": spec.RED, "line": {"width": 3}},
        hovertext=[
            f"layer {i}: {ratio(v, 3)}"
            for i, v in zip(layers["layer"], layers["symmetry"], strict=True)
        ],
        hoverinfo="text",
        name="whole layer (sum over heads)",
    )
    figure.add_hline(0, line_width=1, line_color=spec.GREY)
    spec.layer_axis(figure, layers["layer"], "layer (its heads sorted)")
    figure.update_yaxes(title="symmetry of A")
    figure.update_layout(legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0})
    parts = ["grey band: middle 95% of re-paired heads"] if null else []
    return spec.finish(
        figure, "Symmetry of A by layer, heads sorted", _subtitle(result, *parts), 480
    )


def _claim(result: Result) -> go.Figure:
    table = _heads(result)
    figure = go.Figure()
    figure.add_vrect(*CLAIM, fillcolor=spec.ORANGE, opacity=0.25, line_width=0)
    colours = (spec.BLUE, spec.SKY, spec.GREEN, spec.GREY)
    names = {kind: "score_correlation" + ("" if kind == "real" else f"_{kind}") for kind in KINDS}
    kinds = [
        k
        for k in KINDS
        if has(table, names[k]) and (rotary(result) or "content_" in k or k == "real")
    ]
    labels = {
        k: KINDS[k] if rotary(result) else KINDS[k].removesuffix(", contents only") for k in kinds
    }
    for kind, colour in zip(kinds, colours, strict=False):
        figure.add_box(
            x=table[names[kind]],
            name=labels[kind].replace(", ", ",<br>").replace(" (", "<br>("),
            marker={"color": colour, "size": 4},
            boxpoints="all",
            jitter=0.6,
            pointpos=0,
            line={"width": 2},
            fillcolor="rgba(0,0,0,0)",
            hovertext=[_hover(row) for row in table.itertuples(index=False)],
            hoverinfo="text",
            showlegend=False,
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(
        title="Pearson r of S_ij and S_ji, mean over documents", range=[-1.02, 1.02]
    )
    found = claim(result, "content_centred")
    verdict = "within" if found.get("iqr_within") else "not within"
    return spec.finish(
        figure,
        f"The claim of 0.3 to 0.5: the middle half of the heads is {verdict} it (first row)",
        _subtitle(
            result, "a point is a head; boxes: quartiles over heads; orange: 0.3 to 0.5", text=True
        ),
        160 + 95 * len(kinds),
    )


def _scatter(result: Result) -> go.Figure:
    table = _heads(result)
    figure = go.Figure()
    hover = [_hover(row) for row in table.itertuples(index=False)]
    rho = mapping(result.summary.get("rank_correlation"))
    low, high = table[f"{HEADLINE}_low"], table[f"{HEADLINE}_high"]
    for name, label, colour, symbol in (
        ("symmetry", "raw weights", spec.BLUE, "circle"),
        ("symmetry_data", "weighted by the inputs' covariance", spec.RED, "diamond-open"),
    ):
        error = spec.bars(table[HEADLINE], low, high, width=0, thickness=1)
        figure.add_scatter(
            x=table[name],
            y=table[HEADLINE],
            mode="markers",
            marker={"size": 6, "color": colour, "symbol": symbol},
            error_y=error if name == "symmetry" else None,
            hovertext=hover,
            hoverinfo="text",
            name=f"{label} (rank correlation {ratio(rho.get(name))})",
        )
    figure.add_scatter(
        x=[-1, 1],
        y=[-1, 1],
        mode="lines",
        line={"color": spec.GREY, "dash": "dot", "width": 1},
        hoverinfo="skip",
        showlegend=False,
    )
    values = pd.concat([table["symmetry"], table["symmetry_data"]])
    figure.update_xaxes(
        title="symmetry of A", range=[min(-0.1, values.min()) - 0.05, values.max() + 0.05]
    )
    figure.update_yaxes(
        title="score correlation (centred, contents)",
        range=_with_ends(table[HEADLINE], low, high),
    )
    figure.update_layout(legend={"orientation": "h", "y": -0.18, "yanchor": "top", "x": 0})
    return spec.finish(
        figure,
        "Weights against scores: A as it is, and A weighted by what the head meets",
        _subtitle(result, "bars: 95% interval over documents; dotted: equality", text=True),
        560,
    )


def _with_ends(values: Any, low: Any, high: Any) -> list[float]:
    """A range for correlations with their intervals, of which there may be none."""
    every = np.concatenate([np.asarray(part, dtype=float) for part in (values, low, high)])
    least, most = float(np.nanmin(every)), float(np.nanmax(every))
    return [max(-1.02, min(-0.1, least) - 0.05), min(1.02, most + 0.05)]


def _offsets(result: Result) -> go.Figure:
    table: Any = result.tables["offsets"]
    figure = go.Figure()
    for name, label, colour, dash in (
        ("symmetry", "contents exchanged, offset kept", spec.BLUE, "solid"),
        ("symmetry_reversed", "i asks j against j asks i (offset turned round)", spec.RED, "dash"),
    ):
        quartiles = table.groupby("offset")[name].quantile([0.25, 0.5, 0.75]).unstack()
        x = [str(offset) for offset in quartiles.index]
        figure.add_scatter(
            x=[*x, *x[::-1]],
            y=[*quartiles[0.75], *quartiles[0.25][::-1]],
            fill="toself",
            mode="none",
            fillcolor=colour,
            opacity=0.15,
            hoverinfo="skip",
            showlegend=False,
        )
        figure.add_scatter(
            x=x,
            y=quartiles[0.5],
            mode="lines+markers",
            line={"color": colour, "dash": dash},
            name=label,
            hovertemplate="offset %{x}: median %{y:.3f}<extra></extra>",
        )
    figure.update_xaxes(title="offset i - j (tokens)", type="category")
    figure.update_yaxes(title="symmetry")
    figure.update_layout(legend={"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0})
    return spec.finish(
        figure,
        "Symmetry by distance: W_Q R W_K^T, R the rotation of the offset",
        _subtitle(result, "lines: median over heads; bands: middle half"),
        440,
    )


def _examples(result: Result) -> go.Figure:
    table: Any = result.tables["examples"]
    heads = list(dict.fromkeys(zip(table["end"], table["layer"], table["head"], strict=True)))
    columns = max(sum(end == which for end, _, _ in heads) for which in ("most", "least"))
    measured = _heads(result).set_index(["layer", "head"])
    by = HEADLINE if HEADLINE in measured.columns else "symmetry"
    titles = []
    for end, layer, head in heads:
        value = ratio(measured.loc[(layer, head), by])
        titles.append(f"head {head_label(layer, head)} ({end} symmetric, {value})")
    figure = make_subplots(
        rows=2, cols=columns, subplot_titles=titles, vertical_spacing=0.2, horizontal_spacing=0.09
    )
    first = table[(table["layer"] == heads[0][1]) & (table["head"] == heads[0][2])]
    at = sorted(first["key"].unique())
    named = dict(zip(first["key"], first["key_token"], strict=False))
    ticks = [in_figure(repr(named[p].strip())[1:-1] or " ", 12) for p in at]
    for i, (_, layer, head) in enumerate(heads):
        mine = table[(table["layer"] == layer) & (table["head"] == head)]
        values = mine.pivot(index="query", columns="key", values="content").to_numpy()
        real = mine.pivot(index="query", columns="key", values="score").to_numpy()
        top = float(np.abs(values).max()) or 1.0
        hover = [
            [
                f"query {ticks[a]}, key {ticks[b]}<br>centred {values[a, b]:.2f}, other way round "
                f"{values[b, a]:.2f}<br>score as it is {real[a, b]:.2f}"
                for b in range(len(at))
            ]
            for a in range(len(at))
        ]
        row, column = i // columns + 1, i % columns + 1
        figure.add_trace(
            go.Heatmap(
                z=values,
                zmin=-top,
                zmax=top,
                colorscale=_SCALE,
                showscale=False,
                hovertext=hover,
                hoverinfo="text",
            ),
            row=row,
            col=column,
        )
        labels = {"tickmode": "array", "tickvals": list(range(len(at))), "ticktext": ticks}
        figure.update_xaxes(
            row=row, col=column, tickangle=-60, showgrid=False, zeroline=False, **labels
        )
        figure.update_yaxes(
            row=row, col=column, autorange="reversed", showgrid=False, zeroline=False, **labels
        )
    # Room above for plotly's buttons, which would cover the titles.
    figure.for_each_yaxis(lambda axis: axis.update(domain=[0.95 * end for end in axis.domain]))
    figure.for_each_annotation(lambda note: note.update(y=0.95 * note.y))
    figure.update_annotations(font_size=13)
    figure.update_layout(font={"size": 11})
    words = (
        "contents only, row and column means removed"
        if rotary(result)
        else "row and column means removed"
    )
    return spec.finish(
        figure,
        "Scores of one sentence: rows ask, columns are asked; symmetric heads mirror",
        _subtitle(
            result, f"{words}; both triangles, no causal mask; each map has its own colour range"
        ),
        800,
    )


def _symmetrise(result: Result) -> go.Figure:
    figure = go.Figure()
    variants = [v for v in VARIANTS if change(result, "natural", v)]
    for text, colour in (("natural", spec.BLUE), ("repeated", spec.ORANGE)):
        found = [change(result, text, variant) for variant in variants]
        if not any(found):
            continue
        mean = [number(f.get("mean")) for f in found]
        spread = [
            [
                (number(f.get("high")) or m or 0) - (m or 0),
                (m or 0) - (number(f.get("low")) or m or 0),
            ]
            for f, m in zip(found, mean, strict=True)
        ]
        figure.add_bar(
            y=[VARIANTS[v].replace(", ", ",<br>").replace(": ", ":<br>") for v in variants],
            x=mean,
            orientation="h",
            marker={"color": colour},
            error_x={
                "type": "data",
                "array": [up for up, _ in spread],
                "arrayminus": [down for _, down in spread],
                "thickness": 1.5,
            },
            name=TEXTS[text],
            hovertext=[
                f"{VARIANTS[v]}<br>{TEXTS[text]}: {signed(f.get('mean'))} "
                f"{interval(f.get('low'), f.get('high'))} {NATS}"
                for v, f in zip(variants, found, strict=True)
            ],
            hoverinfo="text",
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title=f"loss change ({NATS})")
    figure.update_layout(
        barmode="group", legend={"orientation": "h", "y": -0.12, "yanchor": "top", "x": 0}
    )
    return spec.finish(
        figure,
        "What symmetric scores cost, all heads at once, and what the controls cost",
        _subtitle(result, "bars: 95% interval, paired by document", text=True),
        640,
    )


def _single(result: Result) -> go.Figure:
    table = _heads(result)
    figure = go.Figure()
    top = low = 0.0
    for text, suffix, colour in (
        ("natural", "", spec.BLUE),
        ("repeated", "_repeated", spec.ORANGE),
    ):
        name = f"loss_delta_symmetrised{suffix}"
        if not has(table, name):
            continue
        control = table[f"loss_delta_control{suffix}"]
        sure = table[f"excess{suffix}_q"] < 0.05
        for mask, symbol, word in (
            (~sure, "circle-open", "not told apart"),
            (sure, "circle", "q < 0.05"),
        ):
            rows = table[mask]
            figure.add_scatter(
                x=rows[f"loss_delta_control{suffix}"],
                y=rows[name],
                mode="markers",
                marker={"size": 7, "color": colour, "symbol": symbol},
                name=f"{TEXTS[text]}, {word} ({len(rows)})",
                hovertext=[
                    f"<b>head {head_label(a, b)}</b><br>symmetrised {signed(s)}, control "
                    f"{signed(c)} {NATS}<br>q {probability(q)}"
                    for a, b, s, c, q in zip(
                        rows["layer"],
                        rows["head"],
                        rows[name],
                        rows[f"loss_delta_control{suffix}"],
                        rows[f"excess{suffix}_q"],
                        strict=True,
                    )
                ],
                hoverinfo="text",
            )
        top = max(top, table[name].max(), control.max())
        low = min(low, table[name].min(), control.min())
    figure.add_scatter(
        x=[low, top],
        y=[low, top],
        mode="lines",
        line={"color": spec.GREY, "dash": "dot"},
        hoverinfo="skip",
        showlegend=False,
    )
    figure.update_xaxes(title=f"loss change, permuted control ({NATS})")
    figure.update_yaxes(title=f"loss change, contents exchanged ({NATS})")
    figure.update_layout(legend={"orientation": "h", "y": -0.16, "yanchor": "top", "x": 0})
    return spec.finish(
        figure,
        "One head symmetrised at a time, against its control",
        _subtitle(result, "above the dotted line: worse than noise in the same place", text=True),
        560,
    )


def _training(result: Result) -> go.Figure:
    table: Any = result.tables["asymmetry_layers"]
    names = list(dict.fromkeys(table["checkpoint"]))
    shown = [in_figure(name, 24) for name in names]
    layers = sorted(table["layer"].unique())
    figure = go.Figure()
    for i, layer in enumerate(layers):
        rows = table[table["layer"] == layer].set_index("checkpoint").loc[names]
        share = i / max(1, len(layers) - 1)
        figure.add_scatter(
            x=shown,
            y=rows["symmetry"],
            mode="lines+markers",
            line={"color": f"hsl({230 - 200 * share:.0f}, 65%, 45%)", "width": 1.5},
            name=f"layer {int(layer)}",
            hovertemplate=f"layer {int(layer)}, %{{x}}: %{{y:.3f}}<extra></extra>",
        )
    median = table.groupby("checkpoint")["symmetry"].median().loc[names]
    figure.add_scatter(
        x=shown, y=median, mode="lines", line={"color": "#111111", "width": 3}, name="median"
    )
    figure.update_xaxes(title="checkpoint", type="category")
    figure.update_yaxes(title="symmetry of the whole layer's A")
    return spec.finish(
        figure,
        "Symmetry per layer over training",
        f"{len(names)} checkpoints; blue: first layers, red: last; black: median over layers",
        520,
    )


class _Several(spec.FigureSpec):
    """A figure of several checkpoints only."""

    def available(self, result: Result) -> bool:
        """Whether there are checkpoints."""
        return over_training(result) and super().available(result)


FIGURES = {
    "training": _Several(_training, "asymmetry_layers", ("checkpoint", "layer", "symmetry")),
    "claim": spec.FigureSpec(_claim, "asymmetry", (HEADLINE,)),
    "symmetry": spec.FigureSpec(_map, "asymmetry", ("layer", "head", "symmetry")),
    "strip": spec.FigureSpec(_strip, "asymmetry", ("layer", "head", "symmetry")),
    "scatter": spec.FigureSpec(_scatter, "asymmetry", ("symmetry", "symmetry_data", HEADLINE)),
    "symmetrise": spec.FigureSpec(_symmetrise, "symmetrise", ("variant", "loss_delta")),
    "single": spec.FigureSpec(_single, "asymmetry", ("loss_delta_symmetrised",)),
    "examples": spec.FigureSpec(_examples, "examples", ("layer", "head", "content")),
    "offsets": spec.FigureSpec(_offsets, "offsets", ("offset", "symmetry")),
}

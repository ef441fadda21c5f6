"""Figures of an `ffn-keys` run: dots with intervals by layer, histograms, a prompt's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from interp import stats
from interp.report import spec
from interp.report.ffn_keys import BASES, basis
from interp.report.ffn_keys_tables import key_label, raised
from interp.report.view import has
from interp.report.words import count, documents, in_figure, model_name, number, visible
from interp.results import Result

PANELS = 8  # histograms in one figure
_LEGEND = {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0}
_NULL = "rgba(138,138,138,0.35)"


def _subtitle(result: Result, *parts: str) -> str:
    known = [model_name(result), documents(result), *parts]
    if not result.complete:
        known.append("interrupted")
    return "; ".join(part for part in known if part)


def _names(layers: Any) -> list[str]:
    return [count(layer) for layer in layers]


def _at(table: pd.DataFrame, offset: float = 0.0) -> np.ndarray:
    # Layers stand side by side, also those that are not neighbours.
    return np.arange(len(table)) + offset


def _axes(figure: go.Figure, table: pd.DataFrame, y: str, row: int | None = None) -> None:
    where: dict[str, Any] = {} if row is None else {"row": row, "col": 1}
    figure.update_xaxes(
        title="layer",
        tickmode="array",
        tickvals=_at(table),
        ticktext=_names(table["layer"]),
        range=[-0.6, len(table) - 0.4],
        showgrid=False,
        zeroline=False,
        **where,
    )
    figure.update_yaxes(title=y, rangemode="tozero", zeroline=True, ticksuffix="%", **where)


def _height(table: pd.DataFrame, panels: int = 1) -> int:
    return (230 if len(set(table["layer"])) <= 3 else 300) * panels + 140


def _dots(
    figure: go.Figure,
    table: pd.DataFrame,
    column: str,
    name: str,
    style: tuple[str, str],
    *,
    ends: tuple[Sequence[float], Sequence[float]] | None = None,
    where: dict[str, Any] | None = None,
    n: str = "",
    offset: float = 0.0,
) -> None:
    """Percentages as dots; with their interval where there is one."""
    y = 100 * table[column].astype(float)
    if ends is None and has(table, f"{column}_low"):
        ends = (list(table[f"{column}_low"]), list(table[f"{column}_high"]))
    bars, told = None, [""] * len(y)
    if ends is not None:
        low, high = (100 * np.asarray(end, dtype=float) for end in ends)
        bars = spec.bars(y, low, high, thickness=1.5, width=4)
        told = [f" [{a:.3g}%, {b:.3g}%]" for a, b in zip(low, high, strict=True)]
    figure.add_scatter(
        x=_at(table, offset),
        y=y,
        error_y=bars,
        mode="markers",
        name=name,
        marker={"color": style[0], "symbol": style[1], "size": 9},
        hovertext=[
            f"<b>layer {count(layer)}</b><br>{name}: {value:.3g}%{ends_}{'<br>' + n if n else ''}"
            for layer, value, ends_ in zip(table["layer"], y, told, strict=True)
        ],
        hoverinfo="text",
        **(where or {}),
    )


def _null_bars(
    figure: go.Figure,
    table: pd.DataFrame,
    column: str,
    name: str,
    where: dict[str, Any] | None = None,
) -> None:
    """Grey bars from 0: what chance reaches."""
    y = 100 * table[column].astype(float)
    figure.add_bar(
        x=_at(table),
        y=y,
        name=name,
        marker={"color": _NULL, "line": {"color": spec.GREY, "width": 1}},
        width=0.7,
        hovertext=[
            f"<b>layer {count(layer)}</b><br>{name}: {value:.3g}%"
            for layer, value in zip(table["layer"], y, strict=True)
        ],
        hoverinfo="text",
        **(where or {}),
    )


def _ticks(
    figure: go.Figure,
    table: pd.DataFrame,
    column: str,
    name: str,
    colour: str,
    where: dict[str, Any] | None = None,
) -> None:
    """Short level lines: a height to compare with."""
    figure.add_scatter(
        x=_at(table),
        y=100 * table[column].astype(float),
        mode="markers",
        name=name,
        marker={"symbol": "line-ew", "size": 18, "line": {"width": 2, "color": colour}},
        customdata=_names(table["layer"]),
        hovertemplate=f"layer %{{customdata}}<br>{name}: %{{y:.3g}}%<extra></extra>",
        **(where or {}),
    )


def _agreement(result: Result) -> go.Figure:
    table = result.tables["ffn_layers"]
    suffix = basis(table) or ""
    keys = count(table["agreement_keys"].max())
    figure = go.Figure()
    _null_bars(
        figure, table, f"agreement_null_99{suffix}", "shuffled keys, up to the 99th percentile"
    )
    if has(table, f"agreement_unigram_99{suffix}"):
        _ticks(
            figure,
            table,
            f"agreement_unigram_99{suffix}",
            "tokens by frequency, 99th percentile",
            spec.RED,
        )
    ends = (list(table[f"agreement_low{suffix}"]), list(table[f"agreement_high{suffix}"]))
    _dots(
        figure,
        table,
        f"agreement_rate{suffix}",
        "measured, 95% interval over keys",
        (spec.BLUE, "circle"),
        ends=ends,
        n=f"n = {keys} keys",
    )
    _axes(figure, table, "keys that agree")
    figure.update_layout(legend=_LEGEND)
    return spec.finish(
        figure,
        "Keys whose value's top token is the one that follows their first trigger",
        _subtitle(
            result,
            f"{keys} keys per layer",
            f"values read with {BASES[suffix]}" if suffix else "values read raw",
        ),
        _height(table),
    )


_SURFACE = (
    ("same_last_token", "same last token", (spec.BLUE, "circle")),
    ("same_last_bigram", "same last bigram", (spec.ORANGE, "square")),
    ("same_last_shape", "same word shape", (spec.GREEN, "diamond")),
)


def _last_token(result: Result) -> go.Figure:
    table = result.tables["ffn_layers"]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    top, bottom = {"row": 1, "col": 1}, {"row": 2, "col": 1}
    _null_bars(figure, table, "same_last_token_null", "random positions, mean share", top)
    _dots(
        figure,
        table,
        "same_last_token",
        "triggers, mean share and 95% interval over keys",
        (spec.BLUE, "circle"),
        ends=_over_keys(result, "same_last_token"),
        where=top,
    )
    if has(table, "same_last_token_chance_99"):
        for (column, name, style), offset in zip(_SURFACE, (-0.2, 0.0, 0.2), strict=True):
            if has(table, f"{column}_beyond_99"):
                _dots(
                    figure,
                    table,
                    f"{column}_beyond_99",
                    f"{name}: keys beyond chance",
                    style,
                    where=bottom,
                    offset=offset,
                )
        _ticks(
            figure,
            table,
            "same_last_token_chance_99",
            "by chance (last token)",
            spec.GREY,
            bottom,
        )
    _axes(figure, table, "triggers with the<br>same last token", row=1)
    _axes(figure, table, "keys beyond the 99th<br>percentile of chance", row=2)
    figure.update_xaxes(title=None, row=1, col=1)
    figure.update_layout(legend=_LEGEND | {"y": -0.13})
    n = count(result.summary.get("triggers_per_key"))
    return spec.finish(
        figure,
        "What the triggers of a key share on their surface",
        _subtitle(result, f"{n} triggers per key", "above: mean over keys; below: share of keys"),
        _height(table, 2),
    )


def _over_keys(result: Result, column: str) -> tuple[list[float], list[float]] | None:
    """95% t intervals over a layer's keys, from the keys table."""
    keys = result.tables.get("keys")
    if keys is None or not has(keys, column):
        return None
    low, high = [], []
    for layer in result.tables["ffn_layers"]["layer"]:
        values = keys.loc[keys["layer"] == layer, column].astype(float).dropna().to_numpy()
        found = stats.mean_interval(values) if len(values) > 1 else None
        low.append(float("nan") if found is None else float(found.low))
        high.append(float("nan") if found is None else float(found.high))
    return low, high


_DROPPED = (
    ("first", "first token dropped", (spec.ORANGE, "square")),
    ("random", "random token dropped", (spec.GREEN, "diamond")),
    ("last", "last token dropped", (spec.BLUE, "circle")),
    ("all", "unrelated text instead", (spec.GREY, "x")),
)


def _mutation(result: Result) -> go.Figure:
    table = result.tables["mutation"]
    table = table.loc[table["sign"] == 1, :]
    layers = table[["layer"]].drop_duplicates().sort_values(by="layer", ignore_index=True)
    figure = go.Figure()
    for (dropped, name, style), offset in zip(_DROPPED, (-0.24, -0.08, 0.08, 0.24), strict=True):
        own = table.loc[table["dropped"] == dropped, :].set_index("layer").reindex(layers["layer"])
        if has(own, "change"):
            _dots(figure, own.reset_index(), "change", name, style, offset=offset)
    _axes(figure, layers, "change of the coefficient")
    figure.update_layout(legend=_LEGEND)
    keys = count(table["keys"].max())
    return spec.finish(
        figure,
        "What a trigger's coefficient loses with one token of its prefix",
        _subtitle(
            result, f"up to {keys} sampled keys per layer", "mean and 95% interval over keys"
        ),
        _height(layers),
    )


def _mixture(result: Result) -> go.Figure:
    table = result.tables["ffn_layers"]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    top, bottom = {"row": 1, "col": 1}, {"row": 2, "col": 1}
    for column, name, style in (
        ("active_share_90", "all but 10% of the output's squared norm", (spec.BLUE, "circle")),
        ("active_share_99", "all but 1%", (spec.ORANGE, "square")),
    ):
        if has(table, column):
            _dots(figure, table, column, name, style, where=top)
    for column, name, style, offset in (
        ("zero_agreement", "zero agreement", (spec.PURPLE, "diamond"), -0.12),
        ("zero_agreement_null", "with another position's output", (spec.GREY, "x"), 0.12),
    ):
        if has(table, column):
            _dots(figure, table, column, name, style, where=bottom, offset=offset)
    _axes(figure, table, "keys it takes", row=1)
    _axes(figure, table, "positions where no key<br>has the output's top token", row=2)
    figure.update_xaxes(title=None, row=1, col=1)
    figure.update_layout(legend=_LEGEND | {"y": -0.13})
    return spec.finish(
        figure,
        "How many keys make one output, and whether one of them says the same",
        _subtitle(result, _positions(table), "mean and 95% interval over documents"),
        _height(table, 2),
    )


def _positions(table: pd.DataFrame) -> str:
    if not has(table, "sampled_positions"):
        return ""
    return f"{count(table['sampled_positions'].max())} sampled positions per layer"


def _prediction(result: Result) -> go.Figure:
    table = result.tables["ffn_layers"]
    figure = go.Figure()
    for column, name, style, offset in (
        ("unchanged", "unchanged", (spec.BLUE, "circle"), -0.2),
        ("refined", "refined: a token top of neither alone", (spec.ORANGE, "square"), 0.0),
        ("overridden", "overridden by the output's own top", (spec.GREEN, "diamond"), 0.2),
    ):
        if has(table, column):
            _dots(figure, table, column, name, style, offset=offset)
    _axes(figure, table, "positions")
    figure.update_yaxes(range=[-2, 102])
    figure.update_layout(legend=_LEGEND)
    return spec.finish(
        figure,
        "What the FFN does to the residual stream's top token",
        _subtitle(result, _positions(table), "mean and 95% interval over documents"),
        _height(table),
    )


# One key ------------------------------------------------------------------------------------------


def _histogram(result: Result) -> go.Figure:
    table = result.tables["histogram"]
    groups = list(table.groupby(["layer", "key"], sort=False))
    shown = groups[:PANELS]
    figure = make_subplots(rows=len(shown), cols=1)
    for i, (_, part) in enumerate(shown):
        where: dict[str, Any] = {"row": i + 1, "col": 1}
        label = key_label(part.iloc[0])
        figure.add_bar(
            x=(part["low"] + part["high"]) / 2,
            y=part["positions"],
            width=part["high"] - part["low"],
            marker={"color": spec.BLUE, "line": {"width": 0}},
            hovertext=[
                f"<b>key {label}</b><br>coefficient {low:.3g} to {high:.3g}<br>{n:,} positions"
                for low, high, n in zip(part["low"], part["high"], part["positions"], strict=True)
            ],
            hoverinfo="text",
            showlegend=False,
            **where,
        )
        for edge in _edges(result, part.iloc[0]):
            figure.add_vline(x=edge, line={"color": spec.RED, "dash": "dash", "width": 1}, **where)
        figure.update_xaxes(title=f"coefficient of key {label}", zeroline=False, **where)
        figure.update_yaxes(
            title="positions (log)", type="log", dtick=1, range=_log_range(part), **where
        )
    figure.update_layout(bargap=0)
    left = f"first {PANELS} of {len(groups)} keys" if len(groups) > PANELS else ""
    title = (
        f"Coefficients of key {key_label(shown[0][1].iloc[0])} at all positions"
        if len(shown) == 1
        else "Coefficients at all positions"
    )
    note = "dashed: where the listed triggers begin" if "triggers" in result.tables else ""
    return spec.finish(figure, title, _subtitle(result, left, note), 130 + 260 * len(shown))


def _log_range(part: pd.DataFrame) -> list[float]:
    """From below one position, so that one is seen."""
    return [np.log10(0.7), np.log10(2.0 * max(1, *part["positions"]))]


def _edges(result: Result, row: Any) -> list[float]:
    triggers = result.tables.get("triggers")
    if triggers is None:
        return []
    own = triggers.loc[(triggers["layer"] == row["layer"]) & (triggers["key"] == row["key"]), :]
    out = []
    for sign, end in ((1, "min"), (-1, "max")):
        values = own.loc[own["sign"] == sign, "coefficient"]
        if len(values):
            out.append(float(getattr(values, end)()))
    return out


# A prompt -----------------------------------------------------------------------------------------


def _asked(result: Result) -> str:
    found = result.summary.get("prompt") or {}
    target = f'"{visible(found.get("target"), 30)}"'
    return f'{target} after "{visible(result.config.get("prompt") or "", 60)}"'


def _prompt_keys(result: Result) -> go.Figure:
    table = result.tables["prompt_keys"].sort_values(by="rank", kind="stable")
    records = table.to_dict("records")
    names = [f"{key_label(row)}" for row in records]
    hover = [
        f"<b>key {key_label(row)}</b>, coefficient {row['coefficient']:.3g}<br>"
        f"adds directly {row['contribution']:+.3g} logits<br>"
        f"removed: {_number(row.get('ablated_logit'))} logits, "
        f"{_number(row.get('ablated_log_prob'))} nats<br>"
        f"raises here {in_figure(raised(row, 5), 120)}"
        for row in records
    ]
    figure = go.Figure()
    figure.add_bar(
        y=names,
        x=table["contribution"],
        orientation="h",
        name="adds directly",
        marker={"color": spec.BLUE},
        hovertext=hover,
        hoverinfo="text",
    )
    figure.add_scatter(
        y=names,
        x=-table["ablated_logit"],
        mode="markers",
        name="logit lost when it is removed",
        marker={
            "color": spec.ORANGE,
            "symbol": "diamond",
            "size": 10,
            "line": {"width": 1, "color": "#ffffff"},
        },
        hovertext=hover,
        hoverinfo="text",
    )
    figure.update_yaxes(title="key (layer.key)", type="category", autorange="reversed", dtick=1)
    figure.update_xaxes(title="logits", zeroline=True)
    figure.update_layout(legend=_LEGEND | {"y": -0.12})
    return spec.finish(
        figure,
        f"The keys that move the logit of {_asked(result)} most",
        "; ".join(
            [
                model_name(result),
                "at the prompt's last position",
                f"the {len(table)} largest of all layers",
                "one prompt, no interval",
            ]
        ),
        190 + 22 * len(table),
    )


def _number(value: Any) -> str:
    found = number(value)
    return "not measured" if found is None else f"{found:+.3g}"


def _prompt_layers(result: Result) -> go.Figure:
    table = result.tables["prompt_layers"]
    figure = go.Figure()
    x = _names(table["layer"])
    for column, name, colour in (
        ("raised", "keys that raise it, summed", "rgba(213,94,0,0.45)"),
        ("lowered", "keys that lower it, summed", "rgba(86,180,233,0.45)"),
    ):
        figure.add_bar(
            x=x,
            y=table[column],
            name=name,
            marker={"color": colour},
            hovertemplate=f"layer %{{x}}<br>{name}: %{{y:.3g}} logits<extra></extra>",
        )
    figure.add_scatter(
        x=x,
        y=table["ffn"],
        mode="markers",
        name="the FFN in all",
        marker={
            "color": spec.BLUE,
            "symbol": "circle",
            "size": 9,
            "line": {"width": 1, "color": "#ffffff"},
        },
        hovertemplate="layer %{x}<br>FFN: %{y:.3g} logits<extra></extra>",
    )
    figure.update_layout(barmode="relative", legend=_LEGEND)
    figure.update_xaxes(title="layer", type="category", showgrid=False)
    figure.update_yaxes(title="logits", zeroline=True)
    return spec.finish(
        figure,
        f"What each layer's FFN adds to the logit of {_asked(result)}",
        "; ".join([model_name(result), "at the prompt's last position", "one prompt, no interval"]),
        470,
    )


def _spec(draw: Any, table: str, *columns: str) -> spec.FigureSpec:
    return spec.FigureSpec(draw, table, columns)


class _Rates(spec.FigureSpec):
    """Rates over a layer's keys: not over the few that were asked for by number."""

    def available(self, result: Result) -> bool:
        return not result.config.get("key") and super().available(result)


class _Agreement(_Rates):
    """Needs the numbers of either basis."""

    def available(self, result: Result) -> bool:
        table = result.tables.get(self.table)
        known = table is not None and basis(table) is not None
        return known and not result.config.get("key")


FIGURES = {
    "prompt_keys": _spec(_prompt_keys, "prompt_keys", "contribution", "ablated_logit"),
    "prompt_layers": _spec(_prompt_layers, "prompt_layers", "ffn", "raised", "lowered"),
    "histogram": _spec(_histogram, "histogram", "positions"),
    "agreement": _Agreement(_agreement, "ffn_layers", ("agreement_rate",)),
    "last_token": _Rates(_last_token, "ffn_layers", ("same_last_token", "same_last_token_null")),
    "mutation": _spec(_mutation, "mutation", "change"),
    "mixture": _spec(_mixture, "ffn_layers", "active_share_90"),
    "prediction": _spec(_prediction, "ffn_layers", "unchanged"),
}

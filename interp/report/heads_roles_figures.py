"""Figures of keep-one and of the heads' roles."""

from __future__ import annotations

from functools import partial

import plotly.graph_objects as go

from interp.report import spec
from interp.report.heads_figures import head_map
from interp.report.words import MATERIAL, NATS, interval, model_name, number, signed
from interp.results import Result

_TITLES = {
    "induction": "Attention to the token after the same token's earlier occurrence (induction)",
    "previous_token": "Attention to the previous token",
    "duplicate_token": "Attention to the same token's earlier occurrence",
    "first_token": "Attention to the first position",
}


def _role(result: Result, name: str) -> go.Figure:
    roles = result.summary.get("roles")
    found = roles if isinstance(roles, dict) else {}
    null = number(((found.get("untrained") or {}).get(name) or {}).get("max"))
    note = f"{found.get('sequences')} sequences of random tokens said twice, second copy"
    if null is not None:
        note += f"; no head of an untrained model exceeds {null:.2f}"
    return head_map(result, name, _TITLES[name], "share of attention", note=note, upper=1.0)


def _keep_one(result: Result) -> go.Figure:
    """One row of dots per layer: the best head alone, with its interval, and any head alone."""
    table = result.tables["keep_one"]
    figure = go.Figure()
    figure.add_scatter(
        x=table["layer"],
        y=table["loss_delta_average"],
        name="any one head (mean over heads)",
        mode="markers",
        marker={"color": spec.GREY, "symbol": "x", "size": 8},
        hovertext=[
            f"layer {int(layer)}, any one head: {signed(value)} {NATS}"
            for layer, value in zip(table["layer"], table["loss_delta_average"], strict=True)
        ],
        hoverinfo="text",
    )
    figure.add_scatter(
        x=table["layer"],
        y=table["loss_delta"],
        name="the best head, judged on other documents",
        mode="markers",
        marker={"color": spec.BLUE, "size": 9},
        error_y=spec.bars(
            table["loss_delta"],
            *(table[end].fillna(table["loss_delta"]) for end in ("ci_low", "ci_high")),
            thickness=1.2,
        ),
        hovertext=[
            f"<b>layer {int(layer)}</b>, only head {int(layer)}.{int(best)} left<br>"
            f"loss change {signed(value)} {interval(low, high)} {NATS}"
            for layer, best, value, low, high in zip(
                *(table[c] for c in ("layer", "best_head", "loss_delta", "ci_low", "ci_high")),
                strict=True,
            )
        ],
        hoverinfo="text",
    )
    figure.add_hrect(y0=-MATERIAL, y1=MATERIAL, fillcolor=spec.GREY, opacity=0.15, line_width=0)
    spec.layer_axis(figure, table["layer"])
    figure.update_yaxes(title=NATS)
    figure.update_layout(legend={"orientation": "h", "y": -0.25})
    keep = result.summary.get("keep_one")
    n = number((keep if isinstance(keep, dict) else {}).get("documents"))
    return spec.finish(
        figure,
        "Loss change when all heads of a layer but one are removed",
        f"{model_name(result)}; bars: 95% interval over {n:.0f} documents; grey band: "
        f"\u00b1{MATERIAL}"
        if n
        else model_name(result),
        420,
    )


FIGURES = {
    **{
        name: spec.FigureSpec(partial(_role, name=name), "heads", ("layer", "head", name))
        for name in _TITLES
    },
    "keep_one": spec.FigureSpec(_keep_one, "keep_one", ("layer", "loss_delta")),
}

"""The report on made-up results: nothing here needs a model."""

from __future__ import annotations

import base64
import html.parser
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.cells import cell_len
from rich.console import Console

from interp import report
from interp.errors import InterpError
from interp.report import heads as heads_view
from interp.report import words
from interp.results import Column, Result

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
HOSTILE = [
    "</script><script>window.broken = 1</script>",
    '" onmouseover="window.broken = 2',
    "<b>bold</b><img src=http://example.invalid/x onerror='window.broken = 3'>",
    "<!-- <script>",
    "\u202e desrever \u200b zero \u00ad soft",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 12",
    "[red]markup[/red] \x1b[31mansi",
    "]]> %{z} $x$ {{ }} &amp; &#60;i&#62;",
    "\U0001f468\u200d\U0001f469 \ufffd \ud800",
    "x" * 10_000,
]
_TEXT = {
    "layer": ("index", "Layer, from 0."),
    "head": ("index", "Query head, from 0."),
    "kv_head": ("index", "KV head of the query head."),
    "importance": ("nats per unit scale", "Mean over documents of |dL/dxi|."),
    "importance_norm": ("share of the layer's norm", "importance over the layer's l2 norm."),
    "importance_token": ("nats per token", "Mean over tokens of |z . dL/dz|."),
    "p_value": ("probability", "Paired t over documents."),
    "q_value": ("probability", "Benjamini-Hochberg over all heads."),
    "significant": ("yes or no", "q < 0.05."),
    "verdict": ("category", "material, negligible or undecided."),
    "order": ("category", "Order of removal."),
    "seed": ("index", "Seed of a random order."),
    "step": ("index", "Pruning step."),
    "n_pruned": ("heads", "Heads removed."),
    "fraction": ("share of heads", "n_pruned over all heads."),
}


def described(table: pd.DataFrame) -> dict[str, Column]:
    return {
        name: Column(*_TEXT.get(name, ("nats per token", f"{name}."))) for name in table.columns
    }


def fake_heads(
    layers: int = 12,
    heads: int = 12,
    *,
    exact: bool = True,
    prune: bool = True,
    name: str = "gpt2",
    notices: list[str] | None = None,
    **more: Any,
) -> Result:
    """A made-up heads run: a few strong heads in early layers, most near zero."""
    rng = np.random.default_rng(0)
    n = layers * heads
    layer, head = np.divmod(np.arange(n), heads)
    strength = rng.gamma(0.4, 1.0, n) * np.exp(-layer / 4)
    importance = 0.02 * strength + 0.0005
    norm = np.sqrt(np.bincount(layer, importance**2))[layer]
    table = pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            "kv_head": head,
            "importance": importance,
            "importance_norm": importance / norm,
            "importance_token": importance * 1.5,
        }
    )
    summary: dict[str, Any] = {
        "heads": n,
        "baseline_loss": 3.9123,
        "baseline_low": 3.7011,
        "baseline_high": 4.1235,
        "baseline_loss_token_weighted": 3.8871,
    }
    if exact:
        change = 0.06 * strength * rng.choice([1, 1, 1, -0.3], n) + rng.normal(0, 0.002, n)
        half = 0.004 + 0.15 * np.abs(change)
        low, high = change - half, change + half
        verdict = np.where(
            (low > 0.01) | (high < -0.01),
            "material",
            np.where((low > -0.01) & (high < 0.01), "negligible", "undecided"),
        )
        p = np.exp(-np.abs(change) / half * 3)
        table = table.assign(
            loss_delta=change,
            ci_low=low,
            ci_high=high,
            p_value=p,
            q_value=np.minimum(1, p * 1.4),
            significant=p * 1.4 < 0.05,
            verdict=verdict,
            kl=np.abs(change) * 0.8 + 1e-5,
            kl_low=np.abs(change) * 0.7,
            kl_high=np.abs(change) * 0.9 + 2e-5,
            loss_delta_mean=change * 0.6,
            mean_low=low * 0.6,
            mean_high=high * 0.6,
        )
        significant = table["significant"].to_numpy()
        held = [
            {
                "layer": 0,
                "head": 1,
                "chosen_on": 32,
                "loss_delta_chosen": 0.2112,
                "loss_delta": 0.1834,
            }
            | {"ci_low": 0.1312, "ci_high": 0.2356}
        ]
        summary |= {
            "verdicts": {
                v: int((verdict == v).sum()) for v in ("material", "negligible", "undecided")
            },
            "significant": int(significant.sum()),
            "significant_improve": int((significant & (change < 0)).sum()),
            "significant_hurt": int((significant & (change > 0)).sum()),
            "material_zero_and_mean": 9,
            "rank_correlation": {
                "importance_norm~loss_delta": 0.3111,
                "importance_norm~kl": 0.7412,
            },
            "held_out": {
                "top": held,
                "bottom": [held[0] | {"layer": 1, "head": 2, "loss_delta": -0.0112}],
            },
        }
    tables = {"heads": table}
    if prune:
        curve, summary_prune = _fake_curve(n, rng, exact)
        tables["prune"] = curve
        summary |= summary_prune | {
            "pruned_order": [[int(a), int(b)] for a, b in zip(layer, head, strict=True)]
        }
        summary["interaction"] = [
            {
                "step": k,
                "n_pruned": n * k // 10,
                "joint": 0.05 * k * k,
                "sum_of_own": 0.02 * k,
                "interaction": 0.05 * k * k - 0.02 * k,
            }
            for k in range(1, 10)
        ]
    values: dict[str, Any] = {
        "analyzer": "heads",
        "config": {"ablation": "zero", "exact": exact, "prune": prune, "step": 0.1},
        "model": {
            "name": name,
            "source": name,
            "revision": None,
            "family": "gpt2",
            "n_layers": layers,
            "n_heads": heads,
        },
        "data": {
            "source": "news",
            "documents": 32,
            "tokens": 2048,
            "predicted_tokens": 2016,
            "context": 64,
        },
        "summary": summary,
        "tables": tables,
        "columns": {key: described(value) for key, value in tables.items()},
        "notices": notices or [],
        "seconds": 123.4,
        "command": "interp heads --prune --exact",
    }
    return Result(**(values | more))


def _fake_curve(
    n: int, rng: np.random.Generator, exact: bool
) -> tuple[pd.DataFrame, dict[str, Any]]:
    steep = {"importance": 1.0, "raw": 1.5, "compensated": 0.6} | ({"exact": 0.5} if exact else {})
    rows = []
    for order, factor in steep.items():
        for step in range(11):
            x = round(step * n / 10) / n
            change = factor * (np.exp(5.5 * x**1.7) - 1) * 0.03
            half = 0.003 * (step > 0) + 0.15 * change
            rows.append(
                [order, np.nan, step, round(x * n), x, change, change - half, change + half]
            )
    for seed in range(5):
        shift = rng.lognormal(1.0, 0.5)
        for step in (1, 2, 4, 6, 8):
            x = round(step * n / 10) / n
            change = shift * (np.exp(5.5 * x**1.3) - 1) * 0.04
            rows.append(["random", seed, step, round(x * n), x, change, 0.8 * change, 1.2 * change])
    names = ["order", "seed", "step", "n_pruned", "fraction", "loss_delta", "ci_low", "ci_high"]
    table = pd.DataFrame(rows, columns=names)
    table.insert(5, "loss", table["loss_delta"] + 3.9123)
    table["seed"] = table["seed"].astype("Int64")
    prunable = {}
    for order in steep:
        mine = table[table["order"] == order]
        prunable[order] = {
            limit: float(np.interp(float(limit), mine["loss_delta"], mine["fraction"]))
            for limit in ("0.01", "0.05")
        }
    prunable["random"] = {"0.01": 0.03, "0.05": 0.06}
    summary = {
        "prunable": prunable,
        "prunable_low": {o: {k: 0.85 * v for k, v in d.items()} for o, d in prunable.items()},
        "prunable_high": {o: {k: 1.1 * v for k, v in d.items()} for o, d in prunable.items()},
        "best_order": dict.fromkeys(("0.01", "0.05"), "exact" if exact else "compensated"),
    }
    return table, summary


def text_of(result: Result, rows: int = 20, notices: bool = True, **console: Any) -> str:
    out = io.StringIO()
    report.print_result(
        result, rows, Console(file=out, width=80, highlight=False, **console), notices
    )
    return out.getvalue()


def figure_of(result: Result, name: str) -> Any:
    return report.figure(result, name)


def rows_of(table: pd.DataFrame) -> Any:
    return table.itertuples()


# Figures ------------------------------------------------------------------------------------------


def test_a_maps_cells_are_the_tables_values_and_layers_run_down():
    result = fake_heads(3, 5, prune=False)
    table = result.tables["heads"]
    result.tables["heads"] = table.sample(frac=1, random_state=1)  # rows in any order
    for name, column in [
        ("heads", "importance_norm"),
        ("loss_delta", "loss_delta"),
        ("loss_delta_mean", "loss_delta_mean"),
        ("kl", "kl"),
    ]:
        figure = figure_of(result, name)
        cells = figure.data[0]
        assert np.shape(cells.z) == (3, 5)
        assert list(cells.x) == [0, 1, 2, 3, 4]
        assert list(cells.y) == [0, 1, 2]
        for row in rows_of(table):
            assert cells.z[row.layer][row.head] == getattr(row, column)
            assert f"layer {row.layer}, head {row.head}" in cells.hovertext[row.layer][row.head]
        assert figure.layout.xaxis.title.text == "head"
        assert figure.layout.yaxis.title.text == "layer"
        assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]
        assert "32 documents" in figure.layout.title.subtitle.text


@pytest.mark.parametrize("sign", [1, -1])
def test_a_diverging_scale_is_symmetric_with_its_neutral_colour_at_zero(sign):
    result = fake_heads(3, 5, prune=False)
    result.tables["heads"]["loss_delta"] = sign * np.linspace(-0.1, 0.7, 15)
    cells = figure_of(result, "loss_delta").data[0]
    assert cells.zmid == 0
    assert cells.zmin == -0.7
    assert cells.zmax == 0.7
    stops = dict(cells.colorscale)
    assert stops[0.5] == "#f7f7f7"
    assert np.allclose(sorted(stops), 1 - np.array(sorted(stops))[::-1])
    assert figure_of(result, "kl").data[0].zmin == 0


def test_dots_mark_material_heads_and_nothing_else():
    result = fake_heads(4, 6, prune=False)
    table = result.tables["heads"]
    dots = figure_of(result, "loss_delta").data[1]
    material = table[table["verdict"] == "material"]
    assert 0 < len(material) < 24
    assert set(zip(dots.y, dots.x, strict=True)) == set(
        zip(material["layer"], material["head"], strict=True)
    )


def test_a_hover_has_every_number_of_its_head():
    result = fake_heads(3, 5, prune=False)
    row = result.tables["heads"].iloc[7]
    hover = figure_of(result, "heads").data[0].hovertext[1][2]
    for part in (
        words.signed(row["loss_delta"]),
        words.interval(row["ci_low"], row["ci_high"]),
        words.probability(row["q_value"]),
        row["verdict"],
        words.unsigned(row["kl"]),
        words.signed(row["loss_delta_mean"]),
        "n = 32 documents",
        "nats per token",
    ):
        assert part in hover


def test_a_head_that_was_not_measured_leaves_a_gap():
    result = fake_heads(3, 5, prune=False, complete=False)
    result.tables["heads"] = result.tables["heads"].iloc[:9]
    figure = figure_of(result, "loss_delta")
    assert np.isnan(figure.data[0].z[2][4])
    assert figure.data[0].hovertext[2][4] == "not measured"
    assert "interrupted: 9 of 15 heads measured" in figure.layout.title.subtitle.text


def test_the_curve_is_the_table():
    result = fake_heads()
    table = result.tables["prune"]
    for name in ("prune", "prune_low"):
        figure = figure_of(result, name)
        drawn = {trace.name: trace for trace in figure.data if trace.name}
        for order in ("importance", "raw", "exact", "compensated"):
            rows = table[table["order"] == order]
            trace = drawn[heads_view.order_label(order)]
            assert np.array_equal(trace.x, 100 * rows["fraction"])
            assert np.array_equal(trace.y, rows["loss_delta"])
        random = table[table["order"] == "random"]
        mean = drawn["random, mean of 5 orders"]
        assert np.allclose(
            mean.y, [part["loss_delta"].mean() for _, part in random.groupby("n_pruned")]
        )
        band = next(t for t in figure.data if t.fill == "toself" and t.legendgroup == "exact")
        exact = table[table["order"] == "exact"]
        assert np.array_equal(band.y, [*exact["ci_high"], *exact["ci_low"][::-1]])
        star = drawn["0.05 nats: 45% of heads"]
        assert star.x[0] == pytest.approx(100 * result.summary["prunable"]["exact"]["0.05"])
        assert star.y[0] == 0.05
        assert figure.layout.xaxis.title.text == "heads removed (%)"
        assert figure.layout.yaxis.title.text == "loss change (nats per token)"


def test_the_zoomed_curve_shows_what_was_measured_head_by_head():
    result = fake_heads(exact=False)
    table = result.tables["prune"]
    step = table[table["order"] == "raw"].iloc[1]
    between = step.copy()
    between["n_pruned"], between["fraction"] = 1, 1 / 30
    between["loss_delta"], between["ci_low"], between["ci_high"] = 0.0123, 0.01, 0.02
    result.tables["refine"] = pd.DataFrame([between])
    traces = {
        name: next(
            t for t in figure_of(result, name).data if t.name == heads_view.order_label("raw")
        )
        for name in ("prune", "prune_low")
    }
    assert 0.0123 in list(traces["prune_low"].y)
    assert 0.0123 not in list(traces["prune"].y)
    assert list(traces["prune_low"].x) == sorted(traces["prune_low"].x)


def test_a_difference_is_told_from_adding_up_only_beyond_its_interval():
    for low, high, told in (
        (0.1, 0.3, "do not add up"),
        (-0.1, 0.3, "do not tell it from adding up"),
        (-0.3, -0.1, "do not add up"),
    ):
        result = fake_heads()
        for step in result.summary["interaction"]:
            step.update(ci_low=low, ci_high=high)
        sentences = heads_view.findings(result)
        assert sum(told in s for s in sentences) == 1
        assert sum("add up" in s or "adding up" in s for s in sentences) == 1


def test_a_mean_over_random_orders_needs_all_of_them():
    result = fake_heads(exact=False)
    table = result.tables["prune"]
    lost = (table["order"] == "random") & (table["seed"] == 4) & (table["step"] == 8)
    result.tables["prune"] = table.loc[~lost, :]
    mean = next(t for t in figure_of(result, "prune").data if t.name == "random, mean of 5 orders")
    assert len(mean.x) == 4


def test_figures_follow_what_was_measured():
    assert fake_heads(exact=False, prune=False).figures == ["heads", "importance"]
    maps = ["heads", "importance", "loss_delta", "loss_delta_mean", "kl"]
    assert fake_heads(prune=False).figures == maps
    assert fake_heads(exact=False).figures == ["heads", "importance", "prune", "prune_low"]
    with pytest.raises(InterpError, match="did not measure"):
        fake_heads(exact=False).figure("kl")
    with pytest.raises(InterpError, match="Did you mean 'prune'"):
        fake_heads().figure("prunes")


def test_figure_text_is_escaped_for_plotly():
    result = fake_heads(3, 5, name="<b>x</b><br>&lt; \u202e</script>")
    result.tables["heads"]["verdict"] = "<i>material</i>"
    for name in result.figures:
        text = figure_of(result, name).to_json()
        shown = json.loads(text)
        assert (
            "&lt;b&gt;x&lt;/b&gt;&lt;br&gt;&amp;lt; \\u202e"
            in shown["layout"]["title"]["subtitle"]["text"]
        )
        assert "<i>" not in text.replace("\\u003c", "<")


# Words --------------------------------------------------------------------------------------------


def test_findings_name_the_best_order_and_its_careful_end():
    first = heads_view.findings(fake_heads())[0]
    assert "45% of the heads (65 of 144)" in first
    assert "0.05 nats per token" in first
    assert "38% to 50%" in first
    assert "best of 5 orders, by loss_delta (exact)" in first
    assert "by importance_norm: 35%" in first


def test_findings_keep_size_and_significance_apart():
    result = fake_heads()
    verdicts = result.summary["verdicts"]
    said = " ".join(heads_view.findings(result))
    assert f"{verdicts['material']} of 144 heads are material" in said
    assert f"{verdicts['negligible']} negligible" in said
    assert f"{verdicts['undecided']} undecided" in said
    assert "That count grows with the number of documents" in said
    assert "+0.74 with KL, +0.31 with the signed loss change" in said
    assert "+0.1834 [+0.1312, +0.2356] on held-out documents" in said


def test_what_was_not_measured_is_not_told():
    result = fake_heads(exact=False, prune=False)
    said = " ".join(heads_view.findings(result) + heads_view.limits(result))
    for word in ("removed together", "material", "significan", "held-out", "mean-ablated"):
        assert word not in said
    assert heads_view.digests(result) == []
    result.summary.clear()
    assert len(heads_view.findings(result)) == 1
    assert heads_view.findings(
        fake_heads(summary={"prunable": None, "verdicts": {}, "held_out": []})
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0123, "+0.0123"),
        (-0.5, "-0.5000"),
        (0.0, "0"),
        (3e-6, "+3e-06"),
        (None, "\u2013"),
        (float("nan"), "\u2013"),
    ],
)
def test_a_small_change_is_not_shown_as_zero(value, shown):
    assert words.signed(value) == shown


def test_percentages_do_not_round_to_all_or_nothing():
    assert words.percent(0.999) == "99.9%"
    assert words.percent(0.001) == "0.1%"
    assert words.percent(1.0) == "100%"
    assert words.percent(0.0) == "0%"
    assert words.percent(0.345) == "34%"


# Terminal -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exact", "prune"), [(True, True), (False, True), (True, False), (False, False)]
)
def test_the_terminal_table_fits_80_columns(exact, prune):
    shown = text_of(fake_heads(exact=exact, prune=prune, notices=["A notice. " * 30]))
    assert max(cell_len(line) for line in shown.splitlines()) <= 80
    assert "..." not in shown.replace("more than ...", "")
    assert "\u2026" not in shown
    assert "\x1b" not in shown


def test_the_terminal_shows_the_most_informative_rows_first():
    result = fake_heads()
    table = result.tables["heads"]
    shown = text_of(result, rows=3)
    best = table.loc[np.argsort(-np.abs(table["loss_delta"].to_numpy()))[:3]]
    lines = [line for line in shown.splitlines() if re.match(r"\s*\d+\.\d+ ", line)]
    assert [line.split()[0] for line in lines] == [f"{r.layer}.{r.head}" for r in rows_of(best)]
    assert words.signed(best.iloc[0]["loss_delta"]) in lines[0]
    assert best.iloc[0]["verdict"] in lines[0]
    assert "3 of 144 rows" in shown
    assert "(nats/token)" in shown
    assert "by loss_delta (exact)" in shown
    assert "* 45% [38%, 50%]" in shown
    assert not [
        line for line in text_of(result, rows=0).splitlines() if re.match(r"\s*\d+\.\d+ ", line)
    ]


def test_colour_only_where_it_is_wanted(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;31m" in text_of(fake_heads(), force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in text_of(fake_heads(), force_terminal=True)


def test_hostile_text_is_text_in_the_terminal():
    shown = text_of(fake_heads(name=HOSTILE[6], notices=HOSTILE, complete=False))
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "\u200b" not in shown
    assert "[red]markup[/red] \\x1b[31mansi" in shown
    assert "9,000 more characters" in " ".join(shown.split())
    assert "INTERRUPTED" in shown
    assert "Notices" not in text_of(fake_heads(notices=["x"]), notices=False)


def test_a_terminal_without_unicode_gets_ascii():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    result = fake_heads(notices=["caf\u00e9 \u4e2d"])
    result.tables["heads"].loc[:, "kl"] = np.nan
    result.tables["heads"].loc[3, "kl"] = 0.1
    report.print_result(result, 5, Console(file=file, width=80))
    file.flush()
    assert b"caf\\xe9 \\u4e2d" in raw.getvalue()


def test_an_analyzer_without_a_view_is_shown_by_its_tables():
    table = pd.DataFrame(
        {
            "token": pd.Series(HOSTILE, dtype=object),
            "score": np.arange(10.0),
            "flag": [True, False] * 5,
        }
    )
    result = fake_heads(
        analyzer="other", tables={"tokens": table}, columns={"tokens": described(table)}
    )
    shown = text_of(result, rows=10)
    assert "token" in shown
    assert "(nats per token)" in shown
    assert "yes" in shown
    assert "\x1b" not in shown
    assert max(cell_len(line) for line in shown.splitlines()) <= 80
    assert result.figures == []
    assert "Plotly.newPlot(" in report.render([result])


# The page -----------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Every tag with its attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.figures: list[dict[str, Any]] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""
        if dict(attrs).get("class") == "figure":
            self._inside = "figure"

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "figure":
            self.figures.append(json.loads(data))
        elif not self._inside:
            self.text += data


def hostile_result() -> Result:
    result = fake_heads(
        3, 5, name=HOSTILE[0], notices=HOSTILE, command="interp heads --data '<x>&'"
    )
    tokens = pd.DataFrame(
        {
            "token": pd.Series(HOSTILE, dtype=object),
            "score": [0.5, None, 2.0, 10.0, -1.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        }
    )
    result.tables["tokens"] = tokens
    result.columns["tokens"] = {
        "token": Column("<b>text</b>", HOSTILE[1]),
        "score": Column("nats", "x"),
    }
    result.tables["heads"].loc[0, "verdict"] = HOSTILE[2]
    result.summary["<b>"] = HOSTILE
    result.config[HOSTILE[1]] = HOSTILE[0]
    return result


def test_hostile_text_is_text_on_the_page():
    result = hostile_result()
    page = Page(report.render([result, fake_heads(3, 5)]))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 14 + 2  # a figure each, plotly.js, page.js
    assert not {"img", "b", "i", "iframe", "object"} & set(tags)
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert not any(
            (value or "").startswith(("http:", "https:", "//")) for value in attributes.values()
        )
    for text in HOSTILE[:9]:
        assert words.visible(text) in page.text
    assert "\u202e" not in page.text
    assert "\u200b" not in page.text
    assert "(9,700 more characters)" in page.text
    assert "interp heads --data '<x>&'" in page.text
    policies = [
        a["content"]
        for t, a in page.tags
        if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies
    assert policies[0] is not None
    assert "default-src 'none'" in policies[0]
    assert not any(
        char in text
        for text in re.findall(r'data-for="[^"]*">(.*?)</script>', report.render([result]))
        for char in "<>&"
    )


def test_figures_of_the_page_carry_the_tables_values():
    result = fake_heads(3, 5)
    drawn = Page(report.render([result])).figures
    assert len(drawn) == 7
    packed = drawn[2]["data"][0]["z"]
    z = np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"]).reshape(3, 5)
    for row in rows_of(result.tables["heads"]):
        assert z[row.layer][row.head] == row.loss_delta
    assert all(figure["config"]["showSendToCloud"] is False for figure in drawn)


def test_a_long_table_says_what_it_leaves_out():
    table = pd.DataFrame({"key": np.arange(2000)})
    result = fake_heads(analyzer="keys", tables={"keys": table}, columns={"keys": described(table)})
    text = report.render([result])
    assert text.count("<tr>") < 1600
    assert "1,500 of 2,000 rows" in text
    assert "keys.parquet" in text


def headings(page: Page, part: str) -> list[tuple[str, str]]:
    """(id, number) of a part's numbered headings, in the page's order."""
    out = []
    for (tag, attributes), (link, to) in itertools.pairwise(page.tags):
        anchor = attributes.get("id") or ""
        if tag == "h3" and re.fullmatch(rf"{part}-\d+", anchor):
            assert (link, to["href"]) == ("a", f"#{anchor}")  # the number, to copy
            out.append((anchor, anchor.removeprefix(f"{part}-")))
    return out


def linked(page: Page) -> set[str]:
    return {(a.get("href") or "")[1:] for tag, a in page.tags if tag == "a"}


def ids(page: Page) -> list[str]:
    return [str(a["id"]) for _, a in page.tags if a.get("id")]


def test_sections_and_figures_are_numbered_and_in_the_contents():
    page = Page(report.render([fake_heads(3, 5)]))
    found = headings(page, "r0")
    assert [number for _, number in found] == [str(n + 1) for n in range(len(found))]
    assert sum(tag == "h3" for tag, _ in page.tags) == len(found)  # no heading is left out
    lines = [line for line in page.text.splitlines() if line.startswith("1 Findings2 ")]
    assert len(lines) == 1  # the contents, which the headings follow
    assert lines[0].endswith(f"{len(found)} Where this comes from")
    assert len(ids(page)) == len(set(ids(page)))
    assert {anchor for anchor, _ in found} <= linked(page) <= set(ids(page))
    names = re.findall(r"Figure (\d+)\. ", page.text)
    assert names == [str(n + 1) for n in range(7)]


def test_numbers_of_several_results_begin_with_the_results():
    runs = [fake_heads(3, 5), fake_heads(3, 5, name="other"), fake_heads(3, 5, prune=False)]
    page = Page(report.render(runs))
    assert len(ids(page)) == len(set(ids(page)))
    assert linked(page) <= set(ids(page))
    for place, result in enumerate(runs):
        own = headings(page, f"r{place}")
        assert len(own) > 4
        assert f"{place + 1}.1 Findings{place + 1}.2 " in page.text
        assert f"{place + 1}.{len(own)} Where this comes from" in page.text
        assert len(re.findall(rf"Figure {place + 1}\.\d+\. ", page.text)) == len(result.figures)
    assert len(headings(page, "headlines")) == 1
    assert "H1 heads: 3 runs side by side" in page.text
    # Two runs of one model are told apart by their headings too.
    assert "1 heads: gpt2 (1)" in page.text
    assert "3 heads: gpt2 (2)" in page.text


def test_interruption_is_said_once():
    for own in ([], ["Interrupted: only what was measured until then is here."]):
        result = fake_heads(3, 5, complete=False, notices=["A lamp.", *own])
        for text in (Page(report.render([result])).text, report.markdown([result])):
            assert text.count("Interrupted") == 1
            assert text.count("A lamp.") == 1
        shown = text_of(result)
        assert shown.lower().count("interrupted") == 1
        assert "INTERRUPTED: only what was measured until then is here." in shown
    whole = fake_heads(3, 5, notices=["Interrupted was the first run, not this one."])
    assert "INTERRUPTED" not in text_of(whole)
    assert "Interrupted was the first run" in text_of(whole)


def test_the_loss_by_tokens_is_told_where_it_is_another():
    told = [s for s in heads_view.findings(fake_heads()) if "intact model" in s]
    assert told[0].endswith("; 3.8871 with every token, not every document, counting once.")
    equal = fake_heads()
    equal.summary["baseline_loss_token_weighted"] = 3.91231
    told = [s for s in heads_view.findings(equal) if "intact model" in s]
    assert told[0].endswith("over 32 documents, 2,016 predicted tokens.")


def test_a_page_tells_provenance_interruption_and_columns():
    result = fake_heads(3, 5, complete=False, seed=77, notices=["first notice"])
    text = Page(report.render([result])).text
    for part in (
        "interrupted",
        "77",
        "news",
        "interp heads --prune --exact",
        "first notice",
        "Benjamini-Hochberg",
    ):
        assert part in text
    assert "not the sign of the loss change" in text
    with pytest.raises(InterpError, match="at least one"):
        report.render([])


def test_a_notebook_shows_table_and_figures():
    result = fake_heads(3, 5, name="<b>m</b>")
    shown = result._repr_html_()
    assert "<table" in shown
    assert "&lt;b&gt;m&lt;/b&gt;" in shown
    assert "<b>m</b>" not in shown
    assert shown.count("Plotly.newPlot(") >= 6
    assert shown.count("plotly.js v") == 1


def test_a_notebook_draws_figures_the_way_its_user_chose(monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []
    stub = types.ModuleType("IPython")
    stub.__dict__["display"] = types.SimpleNamespace(HTML=str, display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", stub)
    monkeypatch.setattr(
        "plotly.graph_objects.Figure.show",
        lambda self, config: shown.append(self.layout.meta["title"]) if config else None,
    )
    fake_heads(3, 5, prune=False)._ipython_display_()
    assert len(shown) == 6
    assert "<table" in shown[0]
    assert "plotly.js v" not in shown[0]
    assert shown[1].startswith("Sensitivity")
    assert "mean ablation" in shown[4]


PROBE = """
<script>
window.seen = {errors: [], blocked: []};
window.addEventListener("error", function (e) { seen.errors.push(String(e.message)); });
window.addEventListener("unhandledrejection", function (e) {
  seen.errors.push(String(e.reason));
});
document.addEventListener("securitypolicyviolation", function (e) {
  seen.blocked.push(e.violatedDirective + " " + e.blockedURI);
});
["error", "warn"].forEach(function (kind) {
  console[kind] = function () { seen.errors.push([].join.call(arguments, " ")); };
});
</script>
"""
CHECK = """
<script>
window.addEventListener("load", function () { setTimeout(function () {
  seen.requests = performance.getEntriesByType("resource").map(function (e) { return e.name; })
    .filter(function (n) { return n.indexOf("data:") !== 0; });
  seen.plots = document.querySelectorAll(".chart").length;
  seen.drawn = Array.from(document.querySelectorAll(".chart")).filter(function (p) {
    var mark = p.querySelector(".heatmaplayer image, .scatterlayer .trace path");
    return mark && p.clientHeight > 100;
  }).length;
  seen.broken = window.broken === undefined ? null : window.broken;
  seen.cloud = document.querySelectorAll('[data-title^="Share"]').length;
  Plotly.Fx.hover("r0-loss_delta", {xval: 0, yval: 0}, "xy");
  seen.hover = document.querySelector("#r0-loss_delta .hoverlayer").textContent;
  var table = Array.from(document.querySelectorAll("table.sortable")).pop();
  function column(i) {
    return Array.from(table.tBodies[0].rows).filter(function (r) { return !r.hidden; })
      .map(function (r) { return r.cells[i].textContent; });
  }
  var button = table.querySelectorAll("thead button")[1];
  button.focus();
  seen.focused = document.activeElement === button;
  button.click(); seen.down = column(1); button.click(); seen.up = column(1);
  seen.sorted = button.parentNode.getAttribute("aria-sort");
  var input = table.parentNode.previousElementSibling.querySelector("input");
  input.value = "ONMOUSEOVER";
  input.dispatchEvent(new Event("input"));
  seen.found = column(0);
  seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.body.innerHTML = "";
  document.body.appendChild(document.createElement("pre")).textContent = JSON.stringify(seen);
}, 1500); });
</script>
"""


def in_browser(text: str, folder: Path, width: int) -> dict[str, Any]:
    """What a page's own check has left of it in a browser of that width: JSON in a <pre>."""
    assert CHROMIUM is not None
    (folder / "page.html").write_text(text, encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--virtual-time-budget=20000",
        "--dump-dom",
    ]
    command = [
        CHROMIUM,
        *options,
        f"--window-size={width},900",
        f"--user-data-dir={folder / 'profile'}",
    ]
    done = subprocess.run(
        [*command, (folder / "page.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    found = re.search(r"<pre>(.*?)</pre>", done.stdout, re.S)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


# A window is never narrower than 500 pixels, a frame may be.
NARROW = """
<script>
window.addEventListener("load", function () { setTimeout(function () {
  var page = document.querySelector("iframe").contentDocument;
  var seen = {wide: page.documentElement.scrollWidth - page.documentElement.clientWidth};
  seen.charts = page.querySelectorAll(".chart").length;
  seen.beyond = Array.from(page.querySelectorAll("figure, .scroll, .boxes, nav, aside"))
    .filter(function (e) { return e.getBoundingClientRect().right > 400; }).length;
  seen.figures = Array.from(page.querySelectorAll(".chart .main-svg"))
    .filter(function (e) { return e.getBoundingClientRect().width > 400; }).length;
  document.body.innerHTML = "";
  document.body.appendChild(document.createElement("pre")).textContent = JSON.stringify(seen);
}, 2500); });
</script>
"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_on_a_narrow_screen(tmp_path: Path):
    page = html.escape(report.render([hostile_result(), fake_heads(12, 12)]))
    frame = f'<iframe srcdoc="{page}" style="width:400px;height:800px;border:0"></iframe>'
    seen = in_browser(f"<!doctype html><body>{frame}{NARROW}</body>", tmp_path, 1000)
    assert seen["charts"] == 14
    assert seen["wide"] <= 0
    assert seen["beyond"] == seen["figures"] == 0


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_in_a_browser(tmp_path: Path, width: int):
    text = report.render([hostile_result()])
    text = text.replace("<head>", "<head>" + PROBE, 1).replace("</body>", CHECK + "</body>")
    seen = in_browser(text, tmp_path, width)
    assert seen["errors"] == []
    assert seen["blocked"] == []
    assert seen["requests"] == []
    assert seen["plots"] == seen["drawn"] == 7
    assert seen["broken"] is None
    assert seen["cloud"] == 0
    assert "head 0.0" in seen["hover"]
    assert "<b>bold</b><img" in seen["hover"]
    assert seen["focused"]
    assert seen["sorted"] == "ascending"
    numbers = ["10", "7", "6", "5", "4", "3", "2", "0.5", "-1"]
    assert seen["down"] == [*numbers, "\u2013"]
    assert seen["up"] == [*numbers[::-1], "\u2013"]
    assert seen["found"] == [words.visible(HOSTILE[1])]
    assert seen["wide"] <= 0  # tables scroll inside their frames, the page never sideways

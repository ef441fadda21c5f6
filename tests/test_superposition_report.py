"""How a superposition run is told: words, digest, shaded contexts, features that never fire."""

import json
import re

import pandas as pd
import pytest
from rich.console import Console

from interp.report import browser, compare, figure, figure_names, print_result, render
from interp.report.superposition import VIEW, findings
from interp.results import Column, Result
from probes import columns


def summary(**changes):
    out = {
        "layer": 6,
        "features": 4608,
        "l0": 31.5,
        "l0_low": 31.0,
        "l0_high": 32.0,
        "fvu": 0.3,
        "fvu_low": 0.28,
        "fvu_high": 0.32,
        "explained_variance": 0.7,
        "cosine": 0.8,
        "cosine_low": 0.79,
        "cosine_high": 0.81,
        "shrinkage": 0.95,
        "tokens": 5000,
        "documents": 100,
        "loss_documents": 32,
        "components": 32,
        "loss_clean": 3.2,
        "loss_spliced": 3.25,
        "loss_delta": 0.05,
        "loss_delta_low": 0.04,
        "loss_delta_high": 0.06,
        "kl": 0.05,
        "kl_low": 0.04,
        "kl_high": 0.06,
        "zero_delta": 0.2,
        "zero_delta_low": 0.1,
        "zero_delta_high": 0.3,
        "mean_delta": 0.01,
        "mean_delta_low": -0.01,
        "mean_delta_high": 0.03,
        "error_delta": 0.02,
        "error_delta_low": 0.01,
        "error_delta_high": 0.03,
        "error_excess": -0.03,
        "error_excess_low": -0.04,
        "error_excess_high": -0.02,
        "loss_recovered_zero": 0.75,
        "loss_recovered_zero_low": 0.6,
        "loss_recovered_zero_high": 0.9,
        "loss_recovered_mean": -4.0,
        "loss_recovered_mean_low": -40.0,
        "loss_recovered_mean_high": 32.0,
        "dead_fraction": 0.25,
        "dead_tokens": 5000,
        "dead_fraction_training": 0.1,
        "dead_tokens_training": 20_000,
        "train_tokens": 200_000,
    }
    return out | changes


def row(name, fvu, delta=None, components=4608):
    out = {"dictionary": name, "components": components, "l0": 32.0, "fvu": fvu}
    out |= {"fvu_low": fvu - 0.02, "fvu_high": fvu + 0.02, "tokens": 5000, "dead_fraction": 0.25}
    if delta is not None:
        out |= {"loss_delta": delta, "loss_delta_low": delta - 0.01}
        out |= {"loss_delta_high": delta + 0.01, "kl": 0.05}
    return out


CONTEXTS = pd.DataFrame(
    {
        "feature": [0, 0, 2],
        "rank": [1, 2, 1],
        "activation": [3.0, 1.5, 2.0],
        "document": [4, 7, 4],
        "position": [3, 2, 3],
        "token_id": [5, 6, 5],
        "token": [" cat", "\U0001f642", " cat"],
        "next_token_id": [9, 9, 9],
        "next_token": [" sat", "!", " sat"],
        "prefix": ["The big cat", "So\n\U0001f642", "The big cat"],
        "following": [" sat down", "!", " sat down"],
        "active_from": [[3, 7], [3], [7]],
        "active_to": [[7, 11], [4], [11]],
        "active_value": [[1.0, 3.0], [1.5], [2.0]],
    }
)


@pytest.fixture
def result():
    features = pd.DataFrame(
        {
            "feature": [0, 1, 2],
            "density": [0.1, 0.0, 0.01],
            "fires": [True, False, True],
            "mean_activation": [1.0, float("nan"), 2.0],
            "max_activation": [3.0, float("nan"), 2.0],
            "top_tokens": [[" cat"], [], [" cat"]],
            "promoted_tokens": [[" dog"], ["<b>"], ["x"]],
            "suppressed_tokens": [["y"], ["z"], ["</script>"]],
        }
    )
    baselines = pd.DataFrame(
        [
            row("sae", 0.3, 0.05),
            row("sae width 16", 0.25, 0.04, 9216),
            row("null model", 0.31),
            row("pca", 0.6, 0.15),
            row("zero", 1.2, 0.2),
        ]
    )
    density = pd.DataFrame(
        {
            "dictionary": ["sae"] * 3,
            "low": [0.0, 1e-3, 1e-2],
            "high": [0.0, 1e-2, 1e-1],
            "features": [1, 1, 1],
        }
    )
    training = pd.DataFrame(
        {"dictionary": "sae", "tokens": [100, 200], "loss": [3.0, 2.0], "l0": [32.0, 32.0],
         "fvu": [0.5, 0.4], "dead": [0.0, 0.1]}
    )  # fmt: skip
    tables = {
        "baselines": baselines,
        "features": features,
        "contexts": CONTEXTS,
        "density": density,
        "training": training,
    }
    known = {name: getattr(columns, name.upper()) for name in tables}
    return Result(
        analyzer="superposition",
        config={},
        model={"name": "tiny"},
        data={"source": "news", "documents": 100, "predicted_tokens": 5000, "context": 128},
        summary=summary(),
        tables=tables,
        columns={name: {c: known[name][c] for c in t} for name, t in tables.items()},
        summary_columns={"fvu": Column("fraction", "x")},
    )


def test_findings(result):
    told = findings(result)
    assert "changes by +0.0500 [+0.0400, +0.0600] nats per token, from 3.2000" in told[0]
    assert "32 documents" in told[0]
    assert "0.750 [0.600, 0.900] of what zero costs" in told[1]
    assert "no share of what mean costs" in told[1]
    assert "-4" not in told[1]
    assert "less than the SAE's own" in told[2]
    assert "31.5 [31, 32] of 4,608 features" in told[3]
    assert "0.300 [0.280, 0.320]" in told[3]
    assert "PCA, the first components 0.600 (worse);" in told[4]
    assert "permuted weights 0.310 (not told apart)" in told[4]
    assert "4,608 features: FVU 0.300" in told[5]
    assert "25% of the features fire at none of the 5,000 judged positions" in told[6]
    assert "10% at none of the last 20,000 positions of training" in told[6]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(-0.04, 0.01, "not told from the SAE's own"), (0.01, 0.02, "more than the SAE's own")],
)
def test_error_is_compared_by_its_interval(result, low, high, words):
    result.summary |= {"error_excess_low": low, "error_excess_high": high}
    assert words in findings(result)[2]


def test_interrupted_before_judging(result):
    result.summary = {"layer": 6, "features": 4608, "train_tokens": 100}
    result.tables = {"training": result.tables["training"]}
    result.complete = False
    assert findings(result) == []
    assert figure_names(result) == ["training"]
    assert "interrupted" in render([result])


def test_terminal_fits_80_columns(result):
    console = Console(width=80, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    print_result(result, rows=3, console=console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"SAE +32 +0\.300 +\+0\.0500 +\[\+0\.0400, \+0\.0600\] +0\.0500", text)


def test_figures(result):
    assert figure_names(result) == ["loss", "fvu", "frontier", "density", "training"]
    for name in figure_names(result):
        assert figure(result, name).to_json()
    drawn = figure(result, "density")
    assert "never fire (not drawn): 1 of SAE" in drawn.layout.meta["subtitle"]
    assert list(drawn.data[0].y) == [1, 1]
    loss = figure(result, "loss").data[0]
    assert list(loss.y) == ["SAE", "SAE width 16", "PCA, the first components", "zero"]
    assert list(loss.x) == [0.05, 0.04, 0.15, 0.2]
    result.tables["baselines"] = result.tables["baselines"].iloc[[0]]
    assert "frontier" not in figure_names(result)


def test_shaded_stretches_are_the_tokens(result):
    data = json.loads(browser.pack(VIEW.browser, result).text)
    assert data["silent"].startswith("It fires at none")
    shown = []
    for example, place in enumerate(data["place"]):
        text = data["texts"][data["text"][place]]
        units = text.encode("utf-16-le")  # as JavaScript counts
        stretches = data["shade"][example]
        shown.append(
            [
                (units[2 * a : 2 * b].decode("utf-16-le"), value)
                for a, b, value in zip(*[iter(stretches)] * 3, strict=True)
            ]
        )
    # Feature 1 never fires: it is the last row and has no example.
    assert data["start"] == [0, 2, 3, 3]
    assert shown == [
        [(" big", 1.0), (" cat", 3.0)],
        [("\U0001f642", 1.5)],
        [(" cat", 2.0)],
    ]


def test_page_escapes_and_holds_the_browser(result):
    page = render([result])
    assert "Browse the features" in page
    assert page.count("</script>") == page.count("<script")
    assert "<b>" not in page.split("<main>")[1].split("<script")[0]


def test_runs_side_by_side(result):
    (table,) = compare.comparisons([result, result])
    values = {row[0]: row[1] for row in table.rows}
    own = result.summary
    assert values["features"] == f"{own['features']:,}"
    (shown,) = (v for q, v in values.items() if q.startswith("loss change"))
    assert shown.startswith(f"{own['loss_delta']:+.4f} [{own['loss_delta_low']:+.4f}")

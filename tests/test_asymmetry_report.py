"""How an asymmetry run is told: true words, 80 columns, all figures, foreign text harmless."""

import dataclasses
import io
import re

import numpy as np
import pytest
from rich.console import Console

import interp
from interp.report import print_result, render
from interp.report.asymmetry import VIEW
from interp.text import load_text
from tests import tiny

PER_DOCUMENT = 4


@pytest.fixture(scope="module")
def full(load, corpus):
    """Everything measured, of a model with rotary embedding and shared keys."""
    model, _ = load("llama")
    text = load_text(corpus, model, documents=PER_DOCUMENT, context=24)
    return interp.asymmetry(model, text, activations=True, symmetrise=True, progress=False)


@pytest.fixture(scope="module")
def bare(load):
    """Weights alone, of a model without rotary embedding."""
    return interp.asymmetry(load("gpt2")[0], progress=False)


def printed(result, width=80):
    out = io.StringIO()
    print_result(result, rows=5, console=Console(file=out, width=width, highlight=False))
    return out.getvalue()


def test_every_figure_is_drawn(full, bare):
    assert set(full.figures) == {
        *("claim", "symmetry", "strip", "scatter", "symmetrise", "single", "examples", "offsets"),
    }
    assert set(bare.figures) == {"symmetry", "strip", "examples"}
    for result in (full, bare):
        for name in result.figures:
            figure = result.figure(name)
            assert figure.data and figure.layout.meta["title"]


def test_the_maps_hold_the_tables_numbers(full):
    table = full.tables["asymmetry"].set_index(["layer", "head"])
    cells = full.figure("symmetry").data[0].z
    for (layer, head), row in table.iterrows():
        assert cells[layer][head] == row["symmetry"]
    examples = full.tables["examples"]
    drawn = [trace for trace in full.figure("examples").data if trace.type == "heatmap"]
    assert len(drawn) == 6
    first = examples[
        (examples["layer"] == examples["layer"][0]) & (examples["head"] == examples["head"][0])
    ]
    n = int(np.sqrt(len(first)))
    np.testing.assert_allclose(drawn[0].z, first["content"].to_numpy().reshape(n, n))


def test_it_fits_80_columns_and_says_what_was_measured(full, bare):
    for result in (full, bare):
        assert max(map(len, printed(result).splitlines())) <= 80
    words = " ".join(printed(full).split())
    assert "Claim tested" in words and "All heads symmetrised at once, on text" in words
    assert "repeated random tokens" in words and "whole layers (sum over heads)" in words
    words = " ".join(printed(bare).split())
    assert "Claim tested" not in words and "symmetrised" not in words
    assert not re.search(r"\bnan\b|None", printed(full) + printed(bare))


@pytest.mark.parametrize("within", [True, False])
def test_the_verdict_on_the_claim_is_that_of_the_summary(full, within):
    claim = dict(full.summary["claim"]["content_centred"], iqr_within=within)
    claims = full.summary["claim"] | {"content_centred": claim}
    result = dataclasses.replace(full, summary=full.summary | {"claim": claims})
    first = VIEW.findings(result)[0]
    assert ("it lies within 0.3 to 0.5" in first) == within
    assert ("does not lie within" in first) != within
    assert f"{claim['median']:.2f}" in first


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.1, 0.3, "costs more than noise"),
        (-0.3, -0.1, "costs less than noise"),
        (-0.1, 0.1, "cannot be told from noise"),
        (None, None, "no interval"),
    ],
)
def test_the_control_decides_what_symmetrising_costs(full, low, high, words):
    changes = full.summary["symmetrise"]["natural"]
    gap = {"mean": 0.0, "low": low, "high": high}
    summary = full.summary | {"symmetrise": {"natural": changes | {"swap_kept - permuted": gap}}}
    told = [f for f in VIEW.findings(dataclasses.replace(full, summary=summary)) if "at once" in f]
    assert len(told) == 1 and words in told[0]


def test_the_page_escapes_what_a_tokenizer_may_say(full):
    evil = "<script>alert(1)</script>"
    table = full.tables["examples"].copy()
    table["key_token"] = evil
    result = dataclasses.replace(full, tables=full.tables | {"examples": table})
    page = render([result])
    assert evil not in page and "What these numbers are, and are not" in page


def test_checkpoints_are_told_in_order(tmp_path):
    from interp.model import load_model

    folders = [tiny.make_checkpoint("gpt2", tmp_path / f"step{i}", seed=i) for i in (0, 1, 2)]
    result = interp.asymmetry((load_model(f, device="cpu") for f in folders), progress=False)
    figure = result.figure("training")
    assert list(figure.data[0].x) == ["step0", "step1", "step2"]
    assert len(figure.data) == tiny.N_LAYERS + 1
    assert "Over 3 checkpoints" in VIEW.findings(result)[0]
    assert max(map(len, printed(result).splitlines())) <= 80

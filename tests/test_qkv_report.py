"""How a qkv run is told: true words, 80 columns, all figures."""

import copy
import dataclasses
import io
from collections import namedtuple

import pytest
from rich.console import Console

import interp
from interp.report import print_result, qkv, render
from interp.text import load_text


@pytest.fixture(scope="module")
def full(load, corpus):
    """Everything measured, of a model with rotary embedding and shared keys."""
    model, _ = load("llama")
    text = load_text(corpus, model, documents=4, context=24)
    return interp.qkv(model, text, each="all", fit_documents=8, progress=False)


def told(result, **changes):
    summary = copy.deepcopy(result.summary) | changes
    return " ".join(qkv.findings(dataclasses.replace(result, summary=summary)))


def test_every_figure_is_drawn(full):
    assert set(full.figures) == {"layers", "together", "sharing", "rank", "overlap"}
    for name in full.figures:
        figure = full.figure(name)
        assert figure.data and figure.layout.meta["title"]
    table = full.tables["interventions"]
    each = table[table["layer"].notna() & (table["kind"] == "mean") & (table["target"] == "v")]
    (line,) = (t for t in full.figure("layers").data if t.name == "values")
    assert list(line.y) == list(each["loss_delta"])
    only = dataclasses.replace(
        full, tables={**full.tables, "interventions": table[table["kind"] == "noise"]}
    )
    assert set(only.figures) == {"overlap"}


def test_it_fits_80_columns_and_is_a_page(full):
    out = io.StringIO()
    print_result(full, rows=5, console=Console(file=out, width=80, highlight=False))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    words = " ".join(out.getvalue().split())
    assert "V against K" in words and "One for all heads of a layer" in words
    assert "W_Q W_K^T cut to 50% of d_head" in words
    page = render([full])
    for name in full.figures:
        assert full.figure(name).layout.meta["title"] in page.replace("&#x27;", "'")


@pytest.mark.parametrize(
    ("share", "low", "words"),
    [
        (0.9, 0.4, "in 9 of 10 layers (4 with q < 0.05; less with q < 0.05 in 0)"),
        (0.8, 0.4, "V is worth more than K"),
        (0.2, -0.6, "K is worth more than V"),
        (0.2, 0.4, "all of them at once do not bear it out"),
        (0.8, -0.05, "all of them at once do not bear it out"),
        (0.5, 0.4, "the layers do not agree"),
    ],
)
def test_a_ranking_needs_four_fifths_of_the_layers_and_all_of_them(full, share, low, words):
    found = {"layers": 10, "share": share, "surely_larger": 4, "surely_smaller": 0}
    found |= {"difference": low + 0.1, "ci_low": low, "ci_high": low + 0.2}
    said = told(full, ranking={"v over k": found})
    assert words in said
    assert f"{low + 0.1:+.4f} [{low:+.4f}, {low + 0.2:+.4f}]" in said


def test_sharing_is_compared_by_intervals(full):
    def one(low, high):
        return {"1": {"loss_delta": (low + high) / 2, "ci_low": low, "ci_high": high}}

    said = told(full, sharing={"q": one(1, 2), "k": one(0.1, 0.2), "v": one(3, 4)})
    assert "K alone costs less than sharing Q; sharing V alone costs more than sharing Q" in said
    said = told(full, sharing={"q": one(1, 2), "k": one(0.5, 1.5), "v": one(0.1, 0.9)})
    assert "K alone cannot be told from sharing Q; sharing V alone costs less than" in said


def test_limits_say_where_moments_are_from(full):
    assert not any("very documents" in line for line in qkv.limits(full))
    same = dataclasses.replace(full, summary={**full.summary, "fitted_elsewhere": False})
    assert any("very documents" in line for line in qkv.limits(same))


def test_a_rank_is_not_rounded_to_another():
    row = namedtuple("Row", "kind target level method")("rank", "qk", 0.125, None)
    assert qkv.words(row) == "W_Q W_K^T cut to 12.5% of d_head"

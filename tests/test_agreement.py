"""Two heads runs of one model on different text: correlations, their null, and the page."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import scipy.stats

import interp
from interp.errors import InterpError
from interp.model import load_model
from interp.report import compare
from interp.text import load_text
from tests import tiny
from tests.faults import changed as changed_weight
from tests.faults import set_first


@pytest.fixture(scope="module")
def runs(load):
    model, _ = load("gpt2")
    made = []
    for documents in (tiny.corpus(24)[:10], tiny.corpus(24)[12:]):
        text = load_text(documents, model, documents=4, context=24)
        made.append(interp.heads(model, text, exact=True, progress=False))
    return made


def changed(run, **columns):
    table = run.tables["heads"].assign(**columns)
    return dataclasses.replace(run, tables={**run.tables, "heads": table})


def test_correlations_are_scipys(runs):
    table = interp.head_agreement(*runs, draws=50).set_index("measure")
    assert set(table.index) >= {"importance", "loss_delta", "kl"}
    for name in ("importance", "loss_delta", "kl"):
        x, y = (run.tables["heads"][name] for run in runs)
        assert table.loc[name, "spearman"] == pytest.approx(scipy.stats.spearmanr(x, y)[0])
        assert table.loc[name, "pearson"] == pytest.approx(scipy.stats.pearsonr(x, y)[0])
        assert table.loc[name, "heads"] == len(x)
        row = table.loc[name]
        assert row["spearman_low"] <= row["spearman"] <= row["spearman_high"]


def test_rows_are_matched_by_head_not_by_their_order(runs):
    shuffled = runs[1].tables["heads"].sample(frac=1, random_state=3)
    other = dataclasses.replace(runs[1], tables={**runs[1].tables, "heads": shuffled})
    pd.testing.assert_frame_equal(
        interp.head_agreement(*runs, draws=20), interp.head_agreement(runs[0], other, draws=20)
    )


def of_layers(run, layers, heads, values):
    """A run whose table has these importances [layer, head]."""
    layer, head = np.divmod(np.arange(layers * heads), heads)
    table = pd.DataFrame({"layer": layer, "head": head, "importance": np.ravel(values)})
    return dataclasses.replace(
        run, tables={"heads": table}, columns={"heads": {c: run.columns["heads"][c] for c in table}}
    )


def test_the_null_has_what_layers_alone_give(runs):
    rng = np.random.default_rng(0)
    level = np.arange(8.0)[:, None]
    # All agreement comes from the layers: the null must give as much of it.
    a, b = (of_layers(runs[0], 8, 6, level + rng.random((8, 6))) for _ in range(2))
    row = interp.head_agreement(a, b, draws=400).iloc[0]
    assert row.spearman > 0.9 and abs(row.spearman - row.null) < 0.02
    assert row.spearman <= row.null_high + 0.005
    # None comes from the layers: the null is about 0, the agreement far beyond it.
    own = rng.random((8, 6))
    a, b = (of_layers(runs[0], 8, 6, own + 0.1 * rng.random((8, 6))) for _ in range(2))
    row = interp.head_agreement(a, b, draws=400).iloc[0]
    assert row.spearman > 0.9 and row.null < 0.3 and row.null_high < 0.5 < row.spearman_low


def test_the_interval_covers_a_known_correlation(runs):
    rng = np.random.default_rng(1)
    truth = 6 / np.pi * np.arcsin(0.6 / 2)  # Spearman's of a bivariate normal with r = 0.6
    hits = 0
    for _ in range(60):
        x = rng.standard_normal(96)
        y = 0.6 * x + 0.8 * rng.standard_normal(96)
        a, b = (of_layers(runs[0], 1, 96, v) for v in (x, y))
        row = interp.head_agreement(a, b, draws=200).iloc[0]
        hits += row.spearman_low <= truth <= row.spearman_high
    assert 51 <= hits <= 60  # 57 expected


def test_what_cannot_be_compared_is_refused(runs, load):
    other_model = dataclasses.replace(runs[1], model={**runs[1].model, "revision": "step1000"})
    with pytest.raises(InterpError, match="differ in revision"):
        interp.head_agreement(runs[0], other_model)
    asymmetry = interp.asymmetry(load("gpt2")[0], progress=False)
    with pytest.raises(InterpError, match="one is of asymmetry"):
        interp.head_agreement(runs[0], asymmetry)
    bare = dataclasses.replace(
        runs[1],
        tables={"heads": runs[1].tables["heads"][["layer", "head"]]},
        columns={"heads": {c: runs[1].columns["heads"][c] for c in ("layer", "head")}},
    )
    with pytest.raises(InterpError, match="no measure"):
        interp.head_agreement(runs[0], bare)


def test_models_are_told_apart_by_their_weights(runs, checkpoint, tmp_path):
    """Of one name and source, as a folder that was trained on."""

    def measured(folder, change=None):
        model = load_model(checkpoint("gpt2"), device="cpu")
        if change is not None:
            changed_weight(next(model.bridge.original_model.parameters()), change)
        text = load_text(tiny.corpus(24)[:10], model, documents=4, context=24)
        return interp.heads(model, text, progress=False, out=tmp_path / folder)

    first, again = measured("a"), measured("b")
    assert len(first.model["weights_sha256"]) == 64
    assert len(interp.head_agreement(first, again, draws=20)) == 2
    other = measured("c", set_first(0.5))
    with pytest.raises(InterpError, match="differ in weights"):
        interp.head_agreement(first, other)
    # Another dtype has other bits; a run that kept nothing has no hash.
    coarse = dataclasses.replace(other, model={**other.model, "dtype": "bfloat16"})
    interp.head_agreement(first, coarse, draws=20)
    assert "weights_sha256" not in runs[0].model
    interp.head_agreement(runs[0], other, draws=20)


def test_a_measure_that_is_the_same_everywhere_has_no_correlation(runs):
    table = interp.head_agreement(runs[0], changed(runs[1], kl=0.5), draws=20).set_index("measure")
    assert np.isnan(table.loc["kl", ["spearman", "pearson", "null", "spearman_low"]].tolist()).all()
    assert np.isfinite(table.loc["loss_delta", "spearman"])


def test_the_page_shows_it_for_other_text_of_one_model_only(runs, load):
    side, table = compare.comparisons(runs)
    assert "side by side" in side.title and "The same heads on other text?" in table.title
    rows = {row[0]: row for row in table.rows}
    rho = interp.head_agreement(*runs).set_index("measure").loc["loss_delta", "spearman"]
    assert rows["loss_delta"][2].replace("\u2212", "-").startswith(f"{rho:+.2f}"[:4])
    assert len(compare.comparisons([runs[0], runs[0]])) == 1  # the same text
    other = load("llama")[0]
    text = load_text(tiny.corpus(8), other, documents=4, context=24)
    of_another = interp.heads(other, text, progress=False)
    assert len(compare.comparisons([runs[0], of_another])) == 1

"""--keep-one: which head a layer can do with, judged on other documents; unevenness over layers."""

import numpy as np
import pytest

import interp
from interp.analyzers.heads import keepone, speed
from interp.text import load_text
from tests import oracle, tiny


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_best_head_is_chosen_and_judged_as_the_oracle_does(load, family):
    model, plain = load(family)
    many = tiny.corpus(14)
    text = load_text(many, model, documents=6, context=64)
    result = interp.heads(model, text, keep_one=True, progress=False)
    table = result.tables["keep_one"]
    n = oracle.n_heads(plain)
    assert table["layer"].tolist() == [0, 1, 2] and (table["heads"] == n).all()
    chose = [d.windows[0] for d in text.documents]
    judge = [d.windows[0] for d in text.held_out(6).documents]
    clean, fresh = oracle.document_losses(plain, chose), oracle.document_losses(plain, judge)
    for row in table.itertuples():
        alone = [
            (
                oracle.ablated_losses(plain, chose, [(row.layer, h) for h in range(n) if h != kept])
                - clean
            )
            for kept in range(n)
        ]
        means = np.array([delta.mean() for delta in alone])
        assert row.best_head == means.argmin()
        assert row.loss_delta_chosen == pytest.approx(means.min(), abs=1e-5)
        assert row.loss_delta_average == pytest.approx(means.mean(), abs=1e-5)
        others = [(row.layer, h) for h in range(n) if h != row.best_head]
        delta = oracle.ablated_losses(plain, judge, others) - fresh
        assert row.loss_delta == pytest.approx(delta.mean(), abs=1e-5)
        half = 2.570582 * delta.std(ddof=1) / np.sqrt(6)  # t(5), 97.5%
        assert row.ci_high - row.ci_low == pytest.approx(2 * half, abs=1e-5)
        none = oracle.ablated_losses(plain, judge, [(row.layer, h) for h in range(n)]) - fresh
        assert row.loss_delta_none == pytest.approx(none.mean(), abs=1e-5)
    found = result.summary["keep_one"]
    assert (found["documents"], found["documents_chosen"]) == (6, 6)
    assert not found["chosen_on_the_same"]
    assert sum(found["verdicts"].values()) == 3
    absolute = np.sort(table["loss_delta"].abs())
    gini = (-2 * absolute[0] + 2 * absolute[2]) / (3 * absolute.sum())
    assert found["unevenness"]["gini"] == pytest.approx(gini)


def test_a_planted_head_is_the_one_to_keep(plant):
    model, text, case = plant("induction")
    result = interp.heads(model, text, keep_one=True, progress=False)
    best = dict(zip(*(result.tables["keep_one"][c] for c in ("layer", "best_head")), strict=True))
    assert [(layer, best[layer]) for layer in (0, 1)] == sorted(case["heads"].values())


def test_unevenness_of_one_part_and_of_equal_parts():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, (40, 8))
    one = noise + np.array([1.0] + [0.0] * 7)
    found = keepone.unevenness(one, 0)
    assert found["gini"] > 0.8 > found["null_high"]
    equal = keepone.unevenness(noise + 0.5, 0)
    assert equal["gini"] <= equal["null_high"] < 0.02
    # No part does anything: noise alone has a Gini of about sqrt(2) - 1, and the null says so.
    nothing = keepone.unevenness(noise, 0)
    assert abs(nothing["null_median"] - (2**0.5 - 1)) < 0.15
    assert nothing["gini"] <= nothing["null_high"]


def test_layers_with_a_single_head_are_left_out(load, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    model, _ = load("gpt2")
    text = load_text(tiny.corpus(8), model, documents=4, context=64)
    interp.heads(model, text, export=tmp_path / "p", heads="0.0,0.1,0.2,2.0", progress=False)
    small = interp.load_model(tmp_path / "p", device="cpu")
    text = load_text(tiny.corpus(8), small, documents=4, context=64)
    table = interp.heads(small, text, keep_one=True, progress=False).tables["keep_one"]
    assert table["layer"].tolist() == [1, 2] and table["heads"].tolist() == [4, 3]
    assert table["best_head"].iloc[1] != 0

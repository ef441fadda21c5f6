"""The qkv analyzer against plain transformers, planted sharing, and changes of basis."""

import numpy as np
import pandas as pd
import pytest
import torch

import interp
from interp import scores
from interp.analyzers.qkv import edits, fit, measure
from interp.errors import UsageError
from interp.text import load_text
from tests import asymmetry_oracle as asym
from tests import oracle, qkv_oracle, tiny
from tests.loading import saved

FAMILIES = ("gpt2", "neox", "llama")
OPTIONS = {"fit_documents": 8, "progress": False}


def ids(text):
    return [d.windows[0] for d in text.documents]


@pytest.fixture(scope="module")
def measured(load):
    """family -> (result, text, plain model)."""
    made = {}

    def get(family):
        if family not in made:
            model, plain = load(family)
            text = load_text(tiny.corpus(16), model, documents=6, context=32)
            result = interp.qkv(model, text, each="all", batch_size=4, **OPTIONS)
            made[family] = (result, text, plain)
        return made[family]

    return get


def row(result, kind, target, layer=None, **more):
    table = result.tables["interventions"]
    here = table["layer"].isna() if layer is None else table["layer"] == layer
    here &= (table["kind"] == kind) & (table["target"] == target)
    for name, value in more.items():
        here &= table[name] == value
    (found,) = (r for _, r in table[here.fillna(False)].iterrows())
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("target", ["q", "k", "v", "o"])
def test_means_of_other_documents_cost_what_they_cost_in_plain_transformers(
    measured, family, target
):
    result, text, plain = measured(family)
    fitted = ids(text.held_out(8))
    assert result.summary["fit_positions"] == sum(
        oracle.included(d, text.special_ids).sum() for d in fitted
    )
    documents = ids(text)
    clean = oracle.document_losses(plain, documents)
    layers = range(oracle.n_layers(plain))
    means = [qkv_oracle.seen(plain, fitted, target, i, text.special_ids).mean(0) for i in layers]

    def cost(chosen):
        changes = [
            (i, target, lambda x, i=i: np.broadcast_to(means[i], x.shape).copy()) for i in chosen
        ]
        return qkv_oracle.losses(plain, documents, changes, text.special_ids) - clean

    for layer, chosen in ((None, layers), (1, [1])):
        expected, found = cost(chosen), row(result, "mean", target, layer)
        assert found.loss_delta == pytest.approx(expected.mean(), abs=2e-5)
        half = (found.ci_high - found.ci_low) / 2
        assert half == pytest.approx(2.5705818 * expected.std(ddof=1) / 6**0.5, rel=1e-3, abs=1e-5)
        assert abs(found.loss_delta) > 1e-4  # or nothing would be tested


@pytest.mark.parametrize("family", FAMILIES)
def test_cut_to_a_lower_rank_as_plain_transformers_and_numpy_do_it(measured, family):
    """W_V W_O: z projected. W_Q W_K^T: without rotation, its best approximation on the text."""
    result, text, plain = measured(family)
    fitted, documents = ids(text.held_out(8)), ids(text)
    clean = oracle.document_losses(plain, documents)
    heads, kv = oracle.n_heads(plain), asym.n_kv(plain)
    rank = max(1, round(oracle.d_head(plain) / 2))
    changes = []
    for layer in range(oracle.n_layers(plain)):
        seen = {s: qkv_oracle.seen(plain, fitted, s, layer, text.special_ids) for s in "qk"}
        maps = []
        for head in range(heads):
            q, k = seen["q"][:, head], seen["k"][:, head // (heads // kv)]
            # The best rank-r product from its singular vectors, expressed as a map of q.
            right = np.linalg.svd(q @ k.T, full_matrices=False)[0][:, :rank]
            maps.append(np.linalg.lstsq(q, right @ (right.T @ q), rcond=None)[0])
        each = np.stack(maps)
        changes.append((layer, "q", lambda x, each=each: np.einsum("nhd,hde->nhe", x, each)))
    expected = (qkv_oracle.losses(plain, documents, changes, text.special_ids) - clean).mean()
    found = row(result, "rank", "qk", level=0.5).loss_delta
    if family == "gpt2":
        assert found == pytest.approx(expected, abs=5e-5)
        assert abs(found) > 1e-4
    else:  # at offset 0 alone it is another cut
        assert abs(found - expected) > 1e-5
    assert any("averaged over rotations" in n for n in result.notices) == (family != "gpt2")


@pytest.mark.parametrize("family", ["gpt2", "neox", "neox-serial", "llama"])
def test_what_leaves_everything_changes_nothing(load, family):
    """Full rank, one group per head, and noise of size 0."""
    model, _ = load(family)
    text = load_text(tiny.corpus(12), model, documents=4, context=24)
    with model.measuring():
        layers = fit.fit(model, text.held_out(6), 3, seed=0)
        maker = edits.Maker(model, text, scores.form(model), layers, 0)
        kv = model.cfg.n_kv_heads
        nothing = [edits.Intervention("rank", t, 1.0) for t in ("qk", "ov")]
        nothing += [edits.Intervention("noise", t, 0.0) for t in "qkv"]
        for method in edits.METHODS:
            nothing += [edits.Intervention("share", t, kv, method) for t in ("k", "v", "kv")]
            nothing.append(edits.Intervention("share", "q", model.cfg.n_heads, method))
        losses = measure.Losses(text)
        measure.measure(model, text, maker, nothing, nothing, 3, losses)
    assert len(losses.done()) == len(nothing) * (1 + model.cfg.n_layers)
    whole = losses.whole((None, None))
    assert whole.all()
    for key in losses.done():
        np.testing.assert_allclose(
            losses.of(key, whole), losses.of((None, None), whole), atol=3e-5, err_msg=str(key)
        )


@pytest.mark.parametrize("planted", ["k", "q", "v"])
def test_what_is_the_same_in_all_heads_is_shared_for_nothing(tmp_path, planted):
    """In each head's own basis: W_h = W G_h."""
    rng = np.random.default_rng(0)

    def edit(model):
        for layer in range(oracle.n_layers(model)):
            d, heads = oracle.d_head(model), oracle.n_heads(model)
            w_q, w_k = asym.weights(model, layer, 0)
            b_q, b_k = asym.biases(model, layer, 0)
            for head in range(heads):
                change = rng.normal(size=(d, d)) / d**0.5 + np.eye(d)
                if planted == "k":
                    asym.write(model, layer, head, w_k=w_k @ change, bias_k=b_k @ change)
                elif planted == "q":
                    asym.write(model, layer, head, w_q=w_q @ change, bias_q=b_q @ change)
                else:
                    w_v, b_v, _ = qkv_oracle.value_views(model, layer)
                    turned = torch.tensor(change, dtype=w_v.dtype)
                    if head:
                        w_v[head], b_v[head] = turned.T @ w_v[0], b_v[0] @ turned

    model, _ = saved("gpt2", tmp_path, edit)
    text = load_text(tiny.corpus(24), model, documents=6, context=48)
    result = interp.qkv(model, text, each="none", fit_documents=16, progress=False)
    one = {"level": 1.0}
    for method in ("least_squares", "average"):
        assert abs(row(result, "share", planted, method=method, **one).loss_delta) < 2e-5
        for other in {"q", "k", "v"} - {planted}:
            assert abs(row(result, "share", other, method=method, **one).loss_delta) > 1e-3


def test_a_change_of_basis_changes_no_result(tmp_path, load):
    """q -> q G, k -> k G^-T, v -> v H, W_O -> H^-1 W_O in every head: the same function."""
    rng = np.random.default_rng(1)

    def edit(model):
        for layer in range(oracle.n_layers(model)):
            d = oracle.d_head(model)
            w_v, b_v, w_o = qkv_oracle.value_views(model, layer)
            for head in range(oracle.n_heads(model)):
                change = rng.normal(size=(d, d)) / d**0.5 + np.eye(d)
                inverse = np.linalg.inv(change).T
                (w_q, w_k), (b_q, b_k) = (
                    asym.weights(model, layer, head),
                    asym.biases(model, layer, head),
                )
                asym.write(
                    model, layer, head, w_q @ change, w_k @ inverse, b_q @ change, b_k @ inverse
                )
                turned = torch.tensor(rng.normal(size=(d, d)) / d**0.5 + np.eye(d))
                w_v[head] = (turned.T @ w_v[head].double()).to(w_v)
                b_v[head] = (b_v[head].double() @ turned).to(b_v)
                w_o[head] = (turned.inverse() @ w_o[head].double()).to(w_o)

    model, _ = load("gpt2")
    moved, _ = saved("gpt2", tmp_path, edit)
    tables = []
    for one in (model, moved):
        text = load_text(tiny.corpus(16), one, documents=5, context=32)
        tables.append(interp.qkv(one, text, each="none", **OPTIONS).tables)
    first, second = (t["interventions"] for t in tables)
    assert first["loss_delta"].abs().max() > 0.01
    pd.testing.assert_frame_equal(
        first.drop(columns=["p_value", "q_value"]),
        second.drop(columns=["p_value", "q_value"]),
        atol=1e-4,
        rtol=1e-3,
    )
    pd.testing.assert_frame_equal(tables[0]["overlap"], tables[1]["overlap"], atol=1e-4, rtol=1e-3)


def test_noise_has_the_size_and_covariance_that_are_said(load):
    model, _ = load("gpt2")
    text = load_text(tiny.corpus(16), model, documents=6, context=48)
    with model.measuring():
        layers = fit.fit(model, text.held_out(8), 4, seed=0)
    maker = edits.Maker(model, text, scores.form(model), layers, 3)
    batch = text.batch_of([(i, 0) for i in range(6)])
    cfg = model.cfg
    x = torch.zeros(*batch.tokens.shape, cfg.n_heads, cfg.d_head)
    drawn, site = [], ""
    for seed in range(30):
        maker.seed = seed
        ((site, change),) = maker.changes(edits.Intervention("noise", "k", 0.5), 1)
        drawn.append(change(x, batch)[batch.mask].flatten(1))
    noise = torch.cat(drawn).double()
    assert site == "k"
    expected = 0.25 * layers[1].covariance("k")
    found = noise.T @ noise / len(noise)
    assert float((found - expected).norm() / expected.norm()) < 0.15
    assert float(found.trace() / expected.trace()) == pytest.approx(1, abs=0.05)


def test_any_batch_size_gives_the_same_and_so_does_a_run_from_the_start(load, monkeypatch):
    model, _ = load("llama")
    text = load_text(tiny.corpus(12), model, documents=5, context=24)
    made = []
    for size, splices in ((1, True), (5, True), (2, False)):
        monkeypatch.setattr(model, "splices", splices)
        result = interp.qkv(model, text, each="all", batch_size=size, **OPTIONS)
        made.append(result.tables["interventions"].drop(columns=["p_value", "q_value"]))
    for other in made[1:]:
        pd.testing.assert_frame_equal(made[0], other, atol=3e-5, rtol=0)


def test_ranking_and_summary_follow_from_the_tables(measured):
    result, text, _ = measured("neox")
    table = result.tables["comparisons"]
    assert set(zip(table["first"], table["second"], strict=True)) == {
        ("v", "k"),
        ("v", "q"),
        ("k", "q"),
    }
    for _, one in table.iterrows():
        layer = None if pd.isna(one.layer) else one.layer
        v, k = (row(result, "mean", name, layer).loss_delta for name in (one["first"], one.second))
        assert one.difference == pytest.approx(v - k, abs=1e-9)
    layers = table[table["layer"].notna() & (table["first"] == "v") & (table["second"] == "k")]
    found = result.summary["ranking"]["v over k"]
    assert found["layers"] == tiny.N_LAYERS
    assert found["share"] == pytest.approx((layers["difference"] > 0).mean())
    assert result.summary["documents"] == len(text)
    assert result.summary["fitted_elsewhere"] is True


def test_without_further_documents_it_says_so(load):
    model, _ = load("llama")
    text = load_text(tiny.corpus(5), model, documents=5, context=24)
    result = interp.qkv(model, text, each="none", **OPTIONS)
    assert result.summary["fitted_elsewhere"] is False
    assert any("no further documents" in notice for notice in result.notices)


def test_interrupted_runs_keep_what_was_measured(load, monkeypatch):
    model, _ = load("llama")
    text = load_text(tiny.corpus(16), model, documents=5, context=24)
    made = []
    changes = edits.Maker.changes

    def some(self, what, layer):
        made.append(what)
        if len(made) > 5 * model.cfg.n_layers:
            raise KeyboardInterrupt
        return changes(self, what, layer)

    monkeypatch.setattr(edits.Maker, "changes", some)
    result = interp.qkv(model, text, **OPTIONS)
    assert not result.complete
    assert len(result.tables["interventions"]) == 5
    assert "overlap" not in result.tables


def test_wrong_options_are_told(load):
    model, _ = load("llama")
    text = load_text(tiny.corpus(8), model, documents=4, context=24)
    with pytest.raises(UsageError, match="fit-documents"):
        interp.qkv(model, text, fit_documents=0)

"""The asymmetry analyzer's weights and scores against numpy, planted heads and invariances."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import interp
from interp import scores
from interp.analyzers.asymmetry import ontext, pairs, tables
from interp.errors import InterpError, UsageError
from interp.model import load_model
from interp.text import load_text
from tests import asymmetry_oracle as asym
from tests import oracle, tiny
from tests.loading import saved
from tests.test_model import other

FAMILIES = ("gpt2", "neox", "llama")


def grid(result, column, table="asymmetry"):
    frame = result.tables[table]
    shape = (frame["layer"].max() + 1, frame["head"].max() + 1)
    out = np.full(shape, np.nan)
    out[frame["layer"], frame["head"]] = frame[column].astype(float)
    return out


@pytest.fixture(scope="session")
def measured(load, corpus):
    """family -> (result with activations, interp text, plain model, token ids)."""
    made = {}

    def get(family):
        if family not in made:
            model, plain = load(family)
            text = load_text(corpus, model, documents=8, context=64)
            result = interp.asymmetry(model, text, activations=True, progress=False, batch_size=3)
            made[family] = (result, text, plain, [d.windows[0] for d in text.documents])
        return made[family]

    return get


# Weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_weight_metrics_are_those_of_a_written_out(load, family):
    model, plain = load(family)
    result = interp.asymmetry(model, progress=False)
    table = result.tables["asymmetry"].set_index(["layer", "head"])
    assert list(table.index) == oracle.heads_of(plain)
    for layer, head in oracle.heads_of(plain):
        row = table.loc[(layer, head)]
        w_q, w_k = asym.weights(plain, layer, head)
        for name, value in asym.metrics(w_q @ w_k.T).items():
            assert row[name] == pytest.approx(value, abs=1e-9), name
        folded = asym.fold(plain, layer, w_q) @ asym.fold(plain, layer, w_k).T
        for name, value in asym.metrics(folded).items():
            if name != "asymmetry":
                assert row[f"{name}_folded"] == pytest.approx(value, abs=1e-9), name
        assert row["kv_head"] == head // (oracle.n_heads(plain) // asym.n_kv(plain))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_layer_is_the_sum_over_its_heads(load, family):
    model, plain = load(family)
    table = interp.asymmetry(model, progress=False).tables["asymmetry_layers"]
    for layer in range(oracle.n_layers(plain)):
        parts = [asym.weights(plain, layer, h) for h in range(oracle.n_heads(plain))]
        a = sum(q @ k.T for q, k in parts)
        for name in ("symmetry", "asymmetry", "directionality"):
            assert table[name][layer] == pytest.approx(asym.metrics(a)[name], abs=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_null_pairs_every_head_with_another_kv_heads_keys(load, family):
    model, plain = load(family)
    result = interp.asymmetry(model, progress=False)
    heads, n_kv = oracle.n_heads(plain), asym.n_kv(plain)
    group = heads // n_kv
    null = []
    for layer, head in oracle.heads_of(plain):
        w_q, _ = asym.weights(plain, layer, head)
        for kv in range(n_kv):
            if kv != head // group:
                _, w_k = asym.weights(plain, layer, kv * group)
                null.append(asym.symmetry(w_q @ w_k.T))
    assert result.summary["null"]["pairs"] == len(null)  # few enough that all are taken
    for row in result.tables["asymmetry"].itertuples():
        below = 100 * np.mean(np.array(null) < row.symmetry)
        assert row.null_percentile == pytest.approx(below, abs=1e-6)
    gaussian = result.summary["gaussian"]["symmetry"]
    d = plain.config.hidden_size
    assert gaussian["mean"] == pytest.approx(1 / d, abs=4 * gaussian["sd"] / 8)
    assert gaussian["sd"] == pytest.approx(np.sqrt(2) / d, rel=0.4)


def test_one_kv_head_leaves_no_null(tmp_path):
    model, _ = saved("llama", tmp_path, num_key_value_heads=1)
    result = interp.asymmetry(model, progress=False)
    assert result.tables["asymmetry"]["null_percentile"].isna().all()
    assert result.summary["null"]["pairs"] == 0 and "outside_null" not in result.summary


def test_one_kv_head_on_text_lacks_only_the_re_paired_control(tmp_path):
    model, _ = saved("llama", tmp_path, num_key_value_heads=1)
    text = load_text(tiny.corpus(6), model, documents=6, context=32)
    result = interp.asymmetry(model, text, activations=True, progress=False)
    table = result.tables["asymmetry"]
    assert table["score_correlation_content_centred"].notna().all()
    assert table["score_correlation_repaired"].isna().all()
    assert table["score_null_percentile"].isna().all()


PLANTS = {
    "same": (lambda q, j: q, 1.0, 1.0),
    "opposite": (lambda q, j: -q, 1.0, 0.0),
    "antisymmetric": (lambda q, j: q @ j, -1.0, 0.0),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", PLANTS)
def test_a_planted_head_is_read_back_and_no_other(tmp_path, family, kind):
    """Catches fused projections cut across heads, Conv1D the wrong way round, tiled KV heads."""
    make, expected, positive = PLANTS[kind]
    at = (1, 2)  # llama: KV head 0 of 2, where tiling would say head 2 reads KV head 0 too ...
    if family == "llama":
        at = (1, 4)  # ... so head 4, which reads KV head 1 and by tiling would read KV head 0

    def edit(plain):
        w_q, _ = asym.weights(plain, *at)
        j = np.random.default_rng(0).normal(size=(w_q.shape[1],) * 2)
        # W_Q (J W_Q^T) with J antisymmetric: so is A.
        asym.write(plain, *at, w_k=make(w_q, (j - j.T).T))

    model, _ = saved(family, tmp_path, edit)
    result = interp.asymmetry(model, progress=False)
    found = grid(result, "symmetry")
    assert found[at] == pytest.approx(expected, abs=1e-6)
    others = np.ones_like(found, dtype=bool)
    others[at] = False
    d = model.cfg.d_model
    assert np.abs(found[others] - 1 / d).max() < 6 * np.sqrt(2) / d  # independent: 1/d within 6 sd
    assert grid(result, "positive_real")[at] == positive
    if kind != "antisymmetric":
        assert grid(result, "antisymmetric_rank")[at] == 0
    if expected == 1:
        assert grid(result, "null_percentile")[at] == 100


@pytest.mark.parametrize("family", FAMILIES)
def test_offsets_are_those_of_transformers_own_rotation(load, family):
    model, plain = load(family)
    result = interp.asymmetry(model, progress=False)
    if family == "gpt2":
        assert "offsets" not in result.tables
        return
    table = result.tables["offsets"].set_index(["layer", "head", "offset"])
    eye = np.eye(oracle.d_head(plain))
    for layer, head, offset in [(0, 1, 0), (0, 1, 1), (1, 3, 4), (2, 0, 32)]:
        w_q, w_k = asym.weights(plain, layer, head)

        def form(i, j, w_q=w_q, w_k=w_k):
            return w_q @ asym.rotary(plain, eye, i) @ asym.rotary(plain, eye, j).T @ w_k.T

        ahead, back = form(offset + 7, 7), form(7, offset + 7)
        row = table.loc[(layer, head, offset)]
        assert row["symmetry"] == pytest.approx(asym.symmetry(ahead), abs=1e-5)
        both = (ahead * back.T).sum() / np.linalg.norm(ahead) / np.linalg.norm(back)
        assert row["symmetry_reversed"] == pytest.approx(both, abs=1e-5)


def rotation(d, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0]


def planes(d, rotated, seed=0):
    """Rotates within the frequency planes (i, i + rotated / 2) only; the rest is left alone."""
    angles = np.random.default_rng(seed).uniform(0, 6, rotated // 2)
    out = np.eye(d)
    for i, angle in enumerate(angles):
        j = i + rotated // 2
        out[i, i] = out[j, j] = np.cos(angle)
        out[i, j], out[j, i] = np.sin(angle), -np.sin(angle)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_rotating_queries_and_keys_together_changes_no_weight_metric(tmp_path, load, family):
    model, plain = load(family)
    d = oracle.d_head(plain)

    def edited(turn):
        def edit(other):
            for layer in range(oracle.n_layers(other)):
                n_kv = asym.n_kv(other)
                group = oracle.n_heads(other) // n_kv
                for head in range(oracle.n_heads(other)):
                    w_q, w_k = asym.weights(other, layer, head)
                    b_q, b_k = asym.biases(other, layer, head)
                    first = head % group == 0  # a shared W_K is turned once
                    asym.write(other, layer, head, w_q @ turn, w_k @ turn if first else None)
                    asym.write(other, layer, head, bias_q=b_q @ turn, bias_k=b_k @ turn)

        return edit

    document = list(range(5, 30))
    before = oracle.logits(plain, document)
    table = interp.asymmetry(model, progress=False).tables["asymmetry"]
    turned, plain_turned = saved(family, tmp_path / "any", edited(rotation(d)))
    again = interp.asymmetry(turned, progress=False).tables["asymmetry"]
    pd.testing.assert_frame_equal(table, again, atol=1e-5, rtol=1e-5)
    moved = (oracle.logits(plain_turned, document) - before).abs().max()
    if family == "gpt2":
        assert moved < 1e-3
        return
    assert moved > 0.1  # rotary embedding: A at other offsets is another matrix
    width = {"neox": d // 4, "llama": d}[family]
    _, plain_planes = saved(family, tmp_path / "planes", edited(planes(d, width)))
    assert (oracle.logits(plain_planes, document) - before).abs().max() < 1e-3


# Scores on text -----------------------------------------------------------------------------------


def expected_correlations(plain, ids, special, layer, head):
    """kind -> [document] by numpy."""
    out = {}
    group = oracle.n_heads(plain) // asym.n_kv(plain)
    for document in ids:
        x = asym.attention_input(plain, document)[layer]
        q, k = asym.queries_and_keys(plain, x, layer, head)
        inside = oracle.included(document, special)
        real, content = asym.scores(plain, q, k), q @ k.T
        _, other = asym.queries_and_keys(plain, x, layer, (head + group) % oracle.n_heads(plain))
        made = {
            "": real,
            "_centred": asym.centred(real, inside),
            "_content": real if plain.config.model_type == "gpt2" else content,
            "_content_centred": asym.centred(content, inside),
            "_offsets_removed": asym.without_offsets(asym.centred(real, inside), inside),
            "_content_offsets_removed": asym.without_offsets(asym.centred(content, inside), inside),
            "_repaired": asym.centred(q @ other.T, inside),
        }
        for kind, s in made.items():
            out.setdefault(kind, []).append(asym.correlation(s, inside))
    return {kind: np.array(values) for kind, values in out.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_score_correlations_are_plain_transformers_and_numpy(measured, family):
    result, text, plain, ids = measured(family)
    table = result.tables["asymmetry"].set_index(["layer", "head"])
    for layer, head in [(0, 0), (1, 2), (2, oracle.n_heads(plain) - 1)]:
        found = expected_correlations(plain, ids, text.special_ids, layer, head)
        for kind, r in found.items():
            r = r[~np.isnan(r)]
            name = f"score_correlation{kind}"
            row = table.loc[(layer, head)]
            assert row[name] == pytest.approx(r.mean(), abs=2e-5), name
            half = {8: 2.364624, 7: 2.446912}[len(r)] * r.std(ddof=1) / np.sqrt(len(r))
            assert row[f"{name}_high"] - row[name] == pytest.approx(half, abs=1e-4), name
    assert result.summary["control_same"] == pytest.approx(1, abs=1e-6)
    assert result.summary["documents"] + result.summary["documents_too_short"] == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_symmetry_on_data_weighs_a_by_the_covariance_of_its_input(measured, family):
    result, text, plain, ids = measured(family)
    inputs = [asym.attention_input(plain, document) for document in ids]
    masks = [oracle.included(document, text.special_ids) for document in ids]
    found = grid(result, "symmetry_data")
    for layer in range(oracle.n_layers(plain)):
        x = np.concatenate([one[layer][mask] for one, mask in zip(inputs, masks, strict=True)])
        s = np.cov(x.T)
        for head in range(oracle.n_heads(plain)):
            w_q, w_k = asym.weights(plain, layer, head)
            a = w_q @ w_k.T
            value = np.trace(a @ s @ a @ s) / np.trace(a @ s @ a.T @ s)
            assert found[layer, head] == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("size", [1, 8])
def test_no_number_depends_on_the_batch(measured, load, size):
    result, text, _, _ = measured("llama")
    model, _ = load("llama")
    again = interp.asymmetry(model, text, activations=True, progress=False, batch_size=size)
    for name in ("asymmetry", "asymmetry_layers"):
        pd.testing.assert_frame_equal(
            again.tables[name], result.tables[name], rtol=0, atol=1e-5, check_dtype=False
        )


def test_without_controls_the_rest_is_the_same(measured, load):
    result, text, _, _ = measured("neox")
    model, _ = load("neox")
    less = interp.asymmetry(model, text, activations=True, controls=False, progress=False)
    table = less.tables["asymmetry"]
    assert "score_correlation_repaired" not in table and "control_same" not in less.summary
    pd.testing.assert_frame_equal(
        table, result.tables["asymmetry"][list(table.columns)], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_long_documents_give_what_written_out_scores_give(measured, load, family, monkeypatch):
    text, (model, _) = measured(family)[1], load(family)
    found = []
    for positions_per_d_head in (0, 10**9):
        monkeypatch.setattr(ontext, "LONG", positions_per_d_head)
        with model.measuring():
            found.append(ontext.measure(model, text, scores.form(model), 3).r)
    for kind, expected in found[1].items():
        np.testing.assert_allclose(found[0][kind], expected, atol=2e-6, err_msg=kind)


def test_scores_that_are_no_product_here_are_taken_as_they_are(load, monkeypatch):
    """As where a soft cap shows in large scores only, and not on the probe."""
    model, _ = load("llama")
    form = scores.form(model)[0]
    seen = []

    def look(a):
        a.scores = 5 * (a.scores / 5).tanh()
        every = torch.ones(a.scores.shape[0], a.scores.shape[2], dtype=torch.bool)
        seen.append((a.scores, ontext.of_layer(a, form, every, ("real",), 2**16)[0, 0, 0]))

    monkeypatch.setattr(ontext, "LONG", 0)
    tokens = torch.arange(3, 19)[None]
    batch = SimpleNamespace(tokens=tokens, attention_mask=torch.ones_like(tokens))
    with model.measuring(), scores.attending(model, {0: look}):
        scores.run(model, batch)
    s = seen[0][0][0, 0].double().numpy()
    lower = np.tril_indices(len(s), -1)
    assert float(seen[0][1][3]) == pytest.approx((s[lower] ** 2).sum(), rel=1e-9)


def test_normalised_queries_have_no_content_to_correlate(tmp_path, corpus):
    """Qwen3's scores are no scale * q . k in any layer; they correlate all the same."""
    model = load_model(other("Qwen3", tmp_path / "Qwen3"), device="cpu")
    text = load_text(corpus, model, documents=8, context=32)
    result = interp.asymmetry(model, text, activations=True, progress=False)
    table = result.tables["asymmetry"]
    assert table["score_correlation_centred"].notna().all()
    assert table["score_correlation_content_centred"].isna().all()
    assert any("normalised" in notice for notice in result.notices)


def test_windows_of_a_document_are_pooled(load):
    model, plain = load("gpt2")
    text = load_text(tiny.corpus(4), model, documents=4, context=16, windows=True)
    assert max(len(d.windows) for d in text.documents) > 2
    result = interp.asymmetry(model, text, activations=True, progress=False, batch_size=2)
    expected = []
    for document in text.documents:
        xs, ys = [], []
        for window in document.windows:
            x = asym.attention_input(plain, window)[1]
            s = asym.scores(plain, *asym.queries_and_keys(plain, x, 1, 3))
            at = np.flatnonzero(oracle.included(window, text.special_ids))
            xs += [s[i, j] for i in at for j in at if i > j]
            ys += [s[j, i] for i in at for j in at if i > j]
        if len(xs) > 2:
            expected.append(np.corrcoef(xs, ys)[0, 1])
    assert grid(result, "score_correlation")[1, 3] == pytest.approx(np.mean(expected), abs=1e-5)


@given(st.integers(2, 12), st.integers(0, 10_000))
def test_pair_moments_are_a_loop_over_pairs(n, seed):
    rng = np.random.default_rng(seed)
    s = rng.normal(size=(n, n)) * 3 + 2
    inside = np.ones(n, dtype=bool)
    total = pairs.sums(torch.tensor(s)[None])
    for centre in (False, True):
        made = asym.centred(s, inside) if centre else s
        x = np.array([made[i, j] for i in range(n) for j in range(i)])
        y = np.array([made[j, i] for i in range(n) for j in range(i)])
        expected = [len(x), x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()]
        np.testing.assert_allclose(pairs.moments(total, centre)[0], expected, atol=1e-9)
    free = pairs.without_offsets(torch.tensor(s), torch.arange(n)).numpy()
    np.testing.assert_allclose(free, asym.without_offsets(s, inside), atol=1e-12)
    at = np.flatnonzero(rng.random(2 * n) < 0.5)[:n]
    if len(at) > 1:  # special tokens in between
        some = s[: len(at), : len(at)]
        wide = np.zeros((at[-1] + 1,) * 2)
        wide[np.ix_(at, at)] = some
        mask = np.isin(np.arange(len(wide)), at)
        expected = asym.without_offsets(wide, mask)[np.ix_(at, at)]
        found = pairs.without_offsets(torch.tensor(some), torch.tensor(at)).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("n", [2, 4, 5, 11, pairs.BLOCK, pairs.BLOCK + 1, 3 * pairs.BLOCK - 7])
def test_sums_without_the_scores_are_those_of_the_scores(n):
    rng = np.random.default_rng(n)
    q, k = rng.normal(size=(2, 3, n, 8)) + 2
    s = q @ k.transpose(0, 2, 1)
    low = np.tril(s, -1)
    found = pairs.sums_of_product(torch.tensor(q), torch.tensor(k))
    expected = {
        "row": s.sum(2),
        "column": s.sum(1),
        "row_low": low.sum(2),
        "column_low": low.sum(1),
        "diagonal": np.diagonal(s, axis1=1, axis2=2),
        "square": (s**2).sum((1, 2)),
        "square_low": (low**2).sum((1, 2)),
        "cross": (s * s.transpose(0, 2, 1)).sum((1, 2)),
    }
    for name, value in expected.items():
        made = getattr(found, name)
        np.testing.assert_allclose(made, value, rtol=1e-11, atol=1e-10, err_msg=name)


@given(st.integers(0, 1000), st.floats(-50, 50))
def test_row_and_column_constants_move_no_centred_correlation(seed, size):
    rng = np.random.default_rng(seed)
    s = torch.tensor(rng.normal(size=(1, 9, 9)))
    moved = s + size * torch.tensor(rng.normal(size=(1, 9, 1)))
    moved = moved + size * torch.tensor(rng.normal(size=(1, 1, 9)))
    r = [pairs.correlation(pairs.moments(pairs.sums(x), centred=True)) for x in (s, moved)]
    assert float((r[0] - r[1]).abs()) < 1e-7


def test_too_few_pairs_and_no_variation_give_no_correlation():
    s = torch.tensor(np.random.default_rng(0).normal(size=(1, 2, 2)))
    assert pairs.correlation(pairs.moments(pairs.sums(s))).isnan()
    flat = torch.full((1, 5, 5), 3.7, dtype=torch.float64)
    assert pairs.correlation(pairs.moments(pairs.sums(flat))).isnan()


def test_a_key_bias_is_in_the_scores_and_not_in_the_centred_ones(tmp_path, load, corpus):
    """The model's own biases are used: a large key-side one changes raw correlations only."""
    plain_model, _ = load("gpt2")
    text = load_text(corpus, plain_model, documents=8, context=64)

    def edit(plain):
        asym.write(plain, 0, 1, bias_k=np.full(oracle.d_head(plain), 5.0))

    model, _ = saved("gpt2", tmp_path, edit)
    before, after = (
        interp.asymmetry(m, text, activations=True, progress=False).tables["asymmetry"].iloc[1]
        for m in (plain_model, model)
    )
    assert before["symmetry"] == after["symmetry"]
    assert abs(before["score_correlation"] - after["score_correlation"]) > 0.02
    for kind in ("centred", "content_centred"):
        name = f"score_correlation_{kind}"
        assert after[name] == pytest.approx(before[name], abs=1e-4)


# Hooks, inputs, summary ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_reading_scores_leaves_the_model_as_it_was(load, family):
    model, plain = load(family)
    tokens = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    seen = {}

    def run():
        with torch.no_grad():
            return model.bridge(tokens, attention_mask=mask, use_cache=False)

    before = run()
    with scores.attending(model, {1: lambda a: seen.update(a=a)}):
        assert torch.allclose(run()[mask.bool()], before[mask.bool()], atol=1e-5)
    assert not model.bridge.blocks[1].attn._forward_pre_hooks
    assert torch.equal(run(), before)
    a = seen["a"]
    x = asym.attention_input(plain, tokens[0].tolist())[1]
    head = oracle.n_heads(plain) - 1
    q, k = asym.queries_and_keys(plain, x, 1, head)
    np.testing.assert_allclose(a.scores[0, head], asym.scores(plain, q, k), atol=1e-4)
    form = scores.form(model)[1]
    np.testing.assert_allclose(form.content(a)[0, head], q @ k.T / np.sqrt(q.shape[1]), atol=1e-4)
    np.testing.assert_allclose(form.swapped(a)[0, head], asym.exchanged(plain, q, k), atol=1e-4)
    source = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    moved = form.swapped(a, source.repeat(2, 1))[0, head]
    np.testing.assert_allclose(moved, asym.exchanged(plain, q[source], k[source]), atol=1e-4)


def test_scores_that_are_replaced_are_the_models(load):
    model, _ = load("neox")
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad(), scores.attending(model, {0: lambda a: torch.zeros_like(a.scores)}):
        seen = []
        point = model.hook_point("blocks.0.attn.hook_pattern")
        point.add_hook(lambda tensor, hook: seen.append(tensor))
        try:
            model.bridge(tokens, use_cache=False)
        finally:
            point.remove_hooks("fwd")
    expected = torch.tril(torch.ones(12, 12)) / torch.arange(1, 13)[:, None]
    assert torch.allclose(seen[0][0, 0], expected, atol=1e-6)  # uniform over the past


def test_what_is_asked_wrongly_is_said(load):
    model, _ = load("gpt2")
    with pytest.raises(UsageError, match="need a text"):
        interp.asymmetry(model, activations=True)
    with pytest.raises(UsageError, match="did you mean 'activations'"):
        interp.asymmetry(model, activation=True)
    with pytest.raises(UsageError, match="by their weights"):
        interp.asymmetry([model], symmetrise=True)
    with pytest.raises(UsageError, match="no checkpoint"):
        interp.asymmetry([])


def test_weights_that_do_not_make_the_queries_are_refused(checkpoint):
    model = load_model(checkpoint("gpt2"), device="cpu")
    linear = model.bridge.blocks[1].attn.q.original_component
    original = linear.forward
    linear.forward = lambda x: original(x) * 1.5
    try:
        with pytest.raises(InterpError, match=r"q of layer 1 .* is not x W"):
            interp.asymmetry(model, progress=False)
    finally:
        del linear.forward


def test_the_summary_answers_the_withdrawn_claim(measured):
    result, _, _, _ = measured("gpt2")
    for kind, suffix in {"real": "", "content_centred": "_content_centred"}.items():
        r = result.tables["asymmetry"][f"score_correlation{suffix}"]
        claim = result.summary["claim"][kind]
        q25, median, q75 = np.percentile(r, [25, 50, 75])
        assert (claim["q25"], claim["median"], claim["q75"]) == pytest.approx((q25, median, q75))
        assert claim["iqr_within"] == (q25 >= 0.3 and q75 <= 0.5)
        assert claim["heads_within"] == ((r >= 0.3) & (r <= 0.5)).sum()
        assert claim["median_low"] < claim["median"] < claim["median_high"]
    assert result.summary["biases"] is True


def test_the_jackknife_is_the_t_interval_for_a_mean():
    x = np.random.default_rng(0).normal(size=(12, 3))
    low, high = tables.jackknife(x, lambda rows: rows.mean(0))
    half = 2.200985 * x.std(0, ddof=1) / np.sqrt(12)
    np.testing.assert_allclose(low, x.mean(0) - half, rtol=1e-6)
    np.testing.assert_allclose(high, x.mean(0) + half, rtol=1e-6)


def test_the_example_shows_the_scores_of_its_sentence(measured, load):
    result, _, plain, _ = measured("neox")
    model, _ = load("neox")
    table = result.tables["examples"]
    r = grid(result, "score_correlation_content_centred")
    order = sorted(np.ndindex(*r.shape), key=lambda at: -r[at])
    heads = list(dict.fromkeys(zip(table["layer"], table["head"], strict=True)))
    assert heads == [*order[:3], *order[-3:]]
    from interp.analyzers.asymmetry.example import SENTENCE

    ids = model.tokenizer(SENTENCE, add_special_tokens=False)["input_ids"]
    layer, head = heads[0]
    q, k = asym.queries_and_keys(plain, asym.attention_input(plain, ids)[layer], layer, head)
    real, inside = asym.scores(plain, q, k), np.arange(len(ids)) > 0
    content = asym.centred(q @ k.T / np.sqrt(q.shape[1]), inside)
    mine = table[(table["layer"] == layer) & (table["head"] == head)]
    for row in mine.iloc[::17].itertuples():
        assert row.score == pytest.approx(real[row.query, row.key], abs=1e-3)
        assert row.content == pytest.approx(content[row.query, row.key], abs=1e-3)
        assert row.query_token == model.tokenizer.decode([ids[row.query]])


def test_it_is_saved_and_loaded(measured, tmp_path):
    result, _, _, _ = measured("llama")
    folder = result.save(tmp_path / "run")
    again = interp.load_result(folder)
    assert again.summary == result.summary
    for name, table in result.tables.items():
        pd.testing.assert_frame_equal(again.tables[name], table, check_dtype=False)


# Over training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
def test_checkpoints_are_one_table_and_one_model_at_a_time(tmp_path, named):
    import gc
    import weakref

    folders = [tiny.make_checkpoint("neox", tmp_path / f"step{i}", seed=i) for i in range(3)]
    alive = []

    def loaded():
        for folder in folders:
            gc.collect()
            assert not any(ref() is not None for ref in alive)  # the one before is gone
            model = load_model(folder, device="cpu")
            alive.append(weakref.ref(model))
            yield (f"name {len(alive)}", model) if named else model
            del model

    result = interp.asymmetry(loaded(), progress=False)
    names = list(dict.fromkeys(result.tables["asymmetry"]["checkpoint"]))
    assert names == (["name 1", "name 2", "name 3"] if named else ["step0", "step1", "step2"])
    for name, folder in zip(names, folders, strict=True):
        one = interp.asymmetry(load_model(folder, device="cpu"), progress=False)
        for table in ("asymmetry", "asymmetry_layers"):
            mine = result.tables[table]
            mine = (
                mine[mine["checkpoint"] == name].drop(columns="checkpoint").reset_index(drop=True)
            )
            pd.testing.assert_frame_equal(mine, one.tables[table])


def test_the_command_line_reads_text_only_where_it_is_asked(
    checkpoint, tmp_path, capsys, monkeypatch
):
    from interp.cli import run

    monkeypatch.chdir(tmp_path)  # a long path is cut in what is told
    missing = "nothing.txt"
    given = ["asymmetry", "--model", str(checkpoint("llama")), "--no-progress", "--data", missing]
    assert run([*given, "--out", str(tmp_path / "weights")]) == 0
    assert interp.load_result(tmp_path / "weights").data == {}
    assert run([*given, "--activations", "--out", str(tmp_path / "text")]) == 1
    assert "nothing.txt" in capsys.readouterr().err


def test_the_command_line_takes_several_checkpoints(tmp_path):
    from interp.cli import run

    folders = [tiny.make_checkpoint("gpt2", tmp_path / f"step{i}", seed=i) for i in (0, 1)]
    given = [word for folder in folders for word in ("--model", str(folder))]
    assert run(["asymmetry", *given, "--out", str(tmp_path / "run")]) == 0
    result = interp.load_result(tmp_path / "run")
    assert list(result.summary["checkpoints"]) == ["step0", "step1"]
    assert result.command is not None and result.command.count("--model") == 2
    assert "training" in result.figures
    result.figure("training")
    assert run(["asymmetry", *given, "--activations", "--out", str(tmp_path / "more")]) == 2


# Published ----------------------------------------------------------------------------------------

PUBLISHED = [0.5992, 0.5629, 0.5247, 0.5475, 0.5852, 0.6673, 0.5775, 0.6175, 0.5739, 0.5700]
PUBLISHED += [0.5674, 0.5757]
PUBLISHED_DIRECTION = [0.0329, 0.1910, 0.5313, 0.4364, 0.5617, 0.5981, 0.6290, 0.6308, 0.6768]
PUBLISHED_DIRECTION += [0.6641, 0.7216, 0.4393]


@pytest.mark.hub
def test_gpt2_small_is_as_published():
    """Saponati et al. (2025), attention-geometry, commit 9b7528b: r = (1 + s) / 2 per layer."""
    try:
        model = load_model("gpt2", device="cpu")
    except InterpError as error:
        pytest.skip(str(error))
    table = interp.asymmetry(model, progress=False).tables["asymmetry_layers"]
    np.testing.assert_allclose((1 + table["symmetry"]) / 2, PUBLISHED, atol=5e-4)
    np.testing.assert_allclose(table["directionality"], PUBLISHED_DIRECTION, atol=5e-3)

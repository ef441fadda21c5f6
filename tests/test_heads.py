"""The heads analyzer against plain transformers, planted models, and itself in other batches."""

import numpy as np
import pandas as pd
import pytest
import torch

import interp
from interp.analyzers.heads import curve
from interp.errors import InterpError
from interp.report import heads as heads_view
from interp.text import load_text
from tests import oracle, tiny

FAMILIES = tiny.FAMILIES


def run(model, text, **options):
    return interp.heads(model, text, progress=False, **options)


def grid(result, column):
    table = result.tables["heads"]
    shape = (table["layer"].max() + 1, table["head"].max() + 1)
    out = np.full(shape, np.nan)
    out[table["layer"], table["head"]] = table[column].astype(float)
    return out


@pytest.fixture(scope="session")
def exact(load, corpus):
    """family -> (result of everything, interp text, oracle, ids)."""
    made = {}

    def get(family):
        if family not in made:
            model, plain = load(family)
            text = load_text(corpus, model, documents=8, context=64)
            result = run(model, text, exact=True, prune=True, batch_size=3)
            made[family] = (result, text, plain, [d.windows[0] for d in text.documents])
        return made[family]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_importance_is_a_finite_difference(exact, family):
    result, _, plain, ids = exact(family)
    expected = oracle.importances_fd(oracle.double(plain), ids)
    np.testing.assert_allclose(grid(result, "importance"), expected, rtol=1e-3, atol=1e-5)
    norm = grid(result, "importance_norm")
    np.testing.assert_allclose((norm**2).sum(1), 1, rtol=1e-9)
    np.testing.assert_allclose(
        norm, expected / np.linalg.norm(expected, axis=1)[:, None], rtol=1e-3
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_effects_are_the_oracles(exact, family):
    result, text, plain, ids = exact(family)
    clean = oracle.document_losses(plain, ids)
    assert result.summary["scored_loss"] == pytest.approx(clean.mean(), abs=1e-5)
    table = result.tables["heads"].set_index(["layer", "head"])
    assert len(table) == plain.config.num_hidden_layers * plain.config.num_attention_heads
    for layer, head in table.index:
        edited = oracle.edited(plain, [(layer, head)])
        delta = oracle.document_losses(edited, ids) - clean
        row = table.loc[(layer, head)]
        assert row["loss_delta"] == pytest.approx(delta.mean(), abs=1e-5)
        half = 2.364624 * delta.std(ddof=1) / np.sqrt(8)  # t(7), 97.5%
        assert row["ci_high"] - row["ci_low"] == pytest.approx(2 * half, abs=1e-5)
        assert row["kl"] == pytest.approx(oracle.kl(plain, edited, ids).mean(), abs=1e-5)
        others = oracle.mean_ablated_losses(plain, ids, layer, head, special_ids=text.special_ids)
        assert row["loss_delta_mean"] == pytest.approx((others - clean).mean(), abs=1e-5)
    low, high = table["ci_low"], table["ci_high"]
    material = (low > 0.01) | (high < -0.01)
    assert ((table["verdict"] == "material") == material).all()
    assert result.summary["verdicts"]["material"] == material.sum()
    assert (table["significant"] == (table["q_value"] < 0.05)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_curve_is_the_oracles(exact, family):
    result, text, plain, ids = exact(family)
    chosen = ids[1::2]  # no further documents: the odd ones judge
    clean = oracle.document_losses(plain, chosen)
    prune = result.tables["prune"]
    assert result.summary["baseline_loss"] == pytest.approx(clean.mean(), abs=1e-5)
    start = prune[prune["step"] == 0]
    assert (start["loss"] == result.summary["baseline_loss"]).all()  # to the last bit
    assert (start["loss_delta"] == 0).all() and (start["n_pruned"] == 0).all()
    pruned = [tuple(h) for h in result.summary["pruned_order"]]
    assert sorted(pruned) == oracle.heads_of(plain)
    norm = grid(result, "importance_norm")
    assert (np.diff([norm[h] for h in pruned]) >= 0).all()
    means = oracle.head_means(plain, ids, text.special_ids)
    for order, bias in (("importance", None), ("compensated", means)):
        rows = prune[prune["order"] == order]
        assert rows["n_pruned"].max() == len(pruned) and rows["fraction"].max() == 1
        for _, row in rows.iloc[[2, 5, -1]].iterrows():
            edited = oracle.edited(plain, pruned[: row["n_pruned"]], bias)
            delta = oracle.document_losses(edited, chosen) - clean
            assert row["loss_delta"] == pytest.approx(delta.mean(), abs=1e-5)
            assert row["loss"] == pytest.approx(clean.mean() + delta.mean(), abs=1e-5)
            half = 3.182446 * delta.std(ddof=1) / 2  # t(3), 97.5%, four documents
            assert row["ci_low"] == pytest.approx(delta.mean() - half, abs=1e-5)
            assert row["ci_high"] == pytest.approx(delta.mean() + half, abs=1e-5)


def test_the_exact_order_comes_from_documents_that_the_curve_does_not_use(exact, load, corpus):
    result, _, plain, ids = exact("gpt2")
    choosing = ids[0::2]
    clean = oracle.document_losses(plain, choosing)
    heads = oracle.heads_of(plain)
    own = {h: (oracle.ablated_losses(plain, choosing, *h) - clean).mean() for h in heads}
    order = sorted(own, key=own.get)
    judged = ids[1::2]
    before = oracle.document_losses(plain, judged)
    rows = result.tables["prune"].query("order == 'exact'")
    row = rows.iloc[4]
    after = oracle.document_losses(oracle.edited(plain, order[: row["n_pruned"]]), judged)
    assert row["loss_delta"] == pytest.approx((after - before).mean(), abs=1e-5)
    top = result.summary["held_out"]["top"][0]
    assert (top["layer"], top["head"]) == order[-1]
    assert top["loss_delta_chosen"] == pytest.approx(own[order[-1]], abs=1e-5)
    bottom = result.summary["held_out"]["bottom"][0]
    assert (bottom["layer"], bottom["head"]) == order[0]
    again = oracle.ablated_losses(plain, judged, *order[-1]) - before
    assert top["loss_delta"] == pytest.approx(again.mean(), abs=1e-5)
    assert any("4 of the 8 choose the orders" in n for n in result.notices)


def test_held_out_documents_are_taken_where_there_are_any(load):
    model, plain = load("gpt2")
    text = load_text(tiny.corpus(20), model, documents=6, context=64)
    held = text.held_out(6)
    result = run(model, text, exact=True, prune=True)
    ids = [d.windows[0] for d in held.documents]
    expected = oracle.document_losses(plain, ids).mean()
    assert result.summary["baseline_loss"] == pytest.approx(expected, abs=1e-5)
    assert result.summary["baseline_part"] == "held_out"
    told = " ".join(heads_view.VIEW.findings(result))
    assert "over the 6 documents of the curve" in told
    mine = [d.windows[0] for d in text.documents]
    assert result.summary["scored_loss"] == pytest.approx(
        oracle.document_losses(plain, mine).mean(), abs=1e-5
    )
    joint = result.summary["interaction"]  # paired on the scored documents
    pruned = [tuple(h) for h in result.summary["pruned_order"]]
    clean = oracle.document_losses(plain, mine)
    step = joint[3]
    heads = pruned[: step["n_pruned"]]
    both = (oracle.document_losses(oracle.edited(plain, heads), mine) - clean).mean()
    single = sum((oracle.ablated_losses(plain, mine, *h) - clean).mean() for h in heads)
    assert step["interaction"] == pytest.approx(both - single, abs=1e-4)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_no_number_depends_on_the_batch(exact, load, size):
    result, text, _, _ = exact("llama")
    model, _ = load("llama")
    again = run(model, text, exact=True, prune=True, batch_size=size)
    for name in ("heads", "prune"):
        pd.testing.assert_frame_equal(
            again.tables[name], result.tables[name], rtol=0, atol=1e-5, check_dtype=False
        )


def test_windows_of_one_document_are_one_unit(load):
    model, plain = load("neox")
    text = load_text(tiny.corpus(6), model, documents=6, context=16, windows=True)
    assert max(len(d.windows) for d in text.documents) > 2
    result = run(model, text, exact=True, batch_size=2)  # windows of a document in several batches
    losses, xi = [], []
    for document in text.documents:
        tokens = np.concatenate([oracle.token_losses(plain, w) for w in document.windows])
        losses.append(tokens.mean())
        weights = [len(w) - 1 for w in document.windows]
        slopes = oracle.gradients_fd(oracle.double(plain), document.windows, 1, 2)
        xi.append(abs(np.average(slopes, weights=weights)))
    assert result.summary["scored_loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert grid(result, "importance")[1, 2] == pytest.approx(np.mean(xi), rel=1e-3)
    # mean ablation leaves out all windows of the own document
    head, values = (1, 2), []
    special = text.special_ids
    included = [[oracle.included(w, special) for w in d.windows] for d in text.documents]
    z = [[oracle.z(plain, w) for w in d.windows] for d in text.documents]
    for i, document in enumerate(text.documents):
        others = [
            z[j][w][:, included[j][w]]
            for j, other in enumerate(text.documents)
            if j != i
            for w in range(len(other.windows))
        ]
        values.append(np.concatenate(others, axis=1).mean(1))
        assert len(document.windows) == len(z[i])
    deltas = []
    for i, document in enumerate(text.documents):
        windows = document.windows
        changed = oracle.replaced_losses(
            plain, windows, [head], [values[i]] * len(windows), special_ids=special
        )
        weights = [len(w) - 1 for w in windows]
        deltas.append(np.average(changed, weights=weights) - losses[i])
    assert grid(result, "loss_delta_mean")[head] == pytest.approx(np.mean(deltas), abs=1e-5)
    whole = run(model, text, exact=True, batch_size=64)
    pd.testing.assert_frame_equal(whole.tables["heads"], result.tables["heads"], rtol=0, atol=1e-5)


def test_resampling_donors_depend_on_document_and_seed_only(load, corpus):
    model, plain = load("llama")
    text = load_text(corpus, model, documents=8, context=64)
    one = run(model, text, exact=True, ablation="resample", batch_size=1).tables["heads"]
    many = run(model, text, exact=True, ablation="resample", batch_size=8).tables["heads"]
    pd.testing.assert_frame_equal(one, many, rtol=0, atol=1e-5)
    other = run(model, text, exact=True, ablation="resample", seed=1).tables["heads"]
    assert (one["loss_delta"] - other["loss_delta"]).abs().max() > 1e-3
    from interp.analyzers.heads.standins import Donors

    donors = Donors(model, text, 0)
    assert all(donor != i for i, donor in enumerate(donors.of))
    lengths = [len(d.windows[0]) for d in text.documents]
    assert all(
        lengths[donor] >= lengths[i] or lengths[i] == max(lengths)
        for i, donor in enumerate(donors.of)
    )
    places = [5, 2, 7, 0, 1, 6, 4, 3]  # the same documents elsewhere have the same donors
    moved = Donors(model, text.subset(places), 0)
    assert [places[donor] for donor in moved.of] == [donors.of[place] for place in places]
    ids = [d.windows[0] for d in text.documents]
    clean = oracle.document_losses(plain, ids)
    head = (1, 4)
    values = []
    for i, doc in enumerate(ids):
        source = oracle.z(plain, ids[donors.of[i]])
        at = np.flatnonzero(oracle.included(ids[donors.of[i]], text.special_ids))
        mine = np.flatnonzero(oracle.included(doc, text.special_ids))
        value = np.zeros((source.shape[0], len(doc), *source.shape[2:]))
        for t, position in enumerate(mine):
            value[:, position] = source[:, at[t % len(at)]]
        values.append(value)
    losses = oracle.replaced_losses(plain, ids, [head], values, special_ids=text.special_ids)
    row = one[(one["layer"] == 1) & (one["head"] == 4)].iloc[0]
    assert row["loss_delta"] == pytest.approx((losses - clean).mean(), abs=1e-5)


def test_a_document_that_is_there_twice_is_no_donor_of_itself(load, corpus):
    from interp.analyzers.heads.standins import Donors

    model, _ = load("gpt2")
    text = load_text(corpus, model, documents=4, context=32)
    places = [2, 2, 0, 2, 0, 1]
    for seed in range(4):
        donors = Donors(model, text.subset(places), seed).of
        assert all(places[donor] != place for place, donor in zip(places, donors, strict=True))
    with pytest.raises(InterpError, match="a second document"):
        Donors(model, text.subset([3, 3]), 0)


def test_a_windows_donor_is_the_same_window_of_the_donor(load):
    from interp.analyzers.heads.standins import Donors

    model, plain = load("gpt2")
    text = load_text(tiny.corpus(6), model, documents=6, context=16, windows=True)
    donors = Donors(model, text, 0)
    with model.measuring():
        batch = next(iter(text.batches(64)))
        z = donors.z(batch)[1]
    several = 0
    for i, (row, nth) in enumerate(zip(batch.rows.tolist(), batch.window.tolist(), strict=True)):
        donor = text.documents[donors.of[row]]
        window = donor.windows[nth % len(donor.windows)]
        several += nth % len(donor.windows) > 0
        at = np.flatnonzero(oracle.included(window, text.special_ids))
        mine = batch.included[i].nonzero()[:, 0].tolist()
        expected = oracle.z(plain, window)[1][[at[t % len(at)] for t in range(len(mine))]]
        np.testing.assert_allclose(z[i, mine].numpy(), expected, atol=1e-4)
    assert several > 2


def test_random_orders_differ_by_seed_and_only_by_seed(load, corpus):
    model, _ = load("gpt2")
    text = load_text(corpus, model, documents=8, context=64)

    def losses(seed):
        table = run(model, text, prune=True, step=1.0, seed=seed).tables["prune"]
        table = table.query("order == 'random' and 0 < n_pruned < 12")
        return table.pivot(index="seed", columns="n_pruned", values="loss_delta").to_numpy()

    first, again, other = losses(0), losses(0), losses(1)
    assert first.shape[0] == 5 and len(np.unique(first.round(6), axis=0)) == 5
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other, atol=1e-4)


def test_importance_token_is_the_mean_over_included_positions(load, corpus):
    model, plain = load("gpt2")
    text = load_text(corpus, model, documents=3, context=64)
    result = run(model, text)
    big = oracle.double(plain)
    expected = np.zeros((3, 4))
    for document in text.documents:
        expected += _token_importance(big, document.windows[0]) / len(text)
    np.testing.assert_allclose(grid(result, "importance_token"), expected, rtol=1e-4, atol=1e-8)


def _token_importance(plain, ids):
    """[layer, head] mean over positions after the first of |z . dL/dz|, by plain autograd."""
    kept = []
    handles = []
    for layer in range(oracle.n_layers(plain)):

        def keep(_module, args):
            z = args[0].detach().clone().requires_grad_() if not args[0].requires_grad else args[0]
            z.retain_grad()
            kept.append(z)
            return (z,)

        handles.append(oracle.projection(plain, layer).register_forward_pre_hook(keep))
    with torch.enable_grad():
        logits = plain(torch.tensor([ids])).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).backward()
    for handle in handles:
        handle.remove()
    out = []
    for z in kept:
        per_head = (z * z.grad)[0].detach().reshape(len(ids), oracle.n_heads(plain), -1).sum(-1)
        out.append(per_head[1:].abs().mean(0).numpy())
    return np.array(out)


# ------------------------------------------------------------------------------- planted models


def test_induction_and_previous_token_heads_come_out_on_top(plant):
    model, text, case = plant("induction")
    planted_heads = {case["heads"]["previous_token"], case["heads"]["induction"]}
    result = run(model, text, exact=True, prune=True)
    table = result.tables["heads"]
    for column in ("importance", "loss_delta", "kl", "loss_delta_mean"):
        top = table.nlargest(2, column)
        assert set(zip(top["layer"], top["head"], strict=True)) == planted_heads, column
    assert {tuple(h) for h in result.summary["pruned_order"][-2:]} == planted_heads
    material = table[table["verdict"] == "material"]
    assert set(zip(material["layer"], material["head"], strict=True)) == planted_heads
    np.testing.assert_allclose(grid(result, "loss_delta"), case["facts"]["loss_delta"], atol=1e-5)
    np.testing.assert_allclose(grid(result, "kl"), case["facts"]["kl"], atol=1e-5)
    assert result.summary["prunable"]["importance"]["0.05"] == pytest.approx(6 / 8)


def test_two_redundant_heads_cost_nothing_alone_and_much_together(plant):
    model, text, case = plant("redundant")
    result = run(model, text, exact=True, prune=True)
    delta = grid(result, "loss_delta")
    heads = list(case["heads"].values())
    assert all(abs(delta[h]) < 0.002 for h in heads)
    last = result.summary["interaction"][-1]
    assert last["joint"] > 0.5 and last["interaction"] > 0.5
    assert case["facts"]["joint_delta"] > 0.5


def test_a_head_with_constant_output_matters_to_zero_but_not_to_mean_ablation(plant):
    model, text, case = plant("constant")
    (head,) = case["heads"].values()
    result = run(model, text, exact=True, prune=True)
    assert grid(result, "loss_delta")[head] > 0.5
    assert abs(grid(result, "loss_delta_mean")[head]) < 1e-6
    assert result.summary["verdicts"]["material"] >= 1
    assert result.summary["material_zero_and_mean"] == 0


def test_a_harmful_head_is_material_with_a_negative_change(plant):
    model, text, case = plant("harmful")
    result = run(model, text, exact=True)
    table = result.tables["heads"].set_index(["layer", "head"])
    row = table.loc[case["heads"]["harmful"]]
    assert row["loss_delta"] < -0.05 and row["verdict"] == "material" and row["significant"]
    assert result.summary["material_improve"] == 1
    found = table[table["significant"]]["loss_delta"]
    assert (found < 0).any() and (found > 0).any()
    assert result.summary["significant_improve"] == (found < 0).sum()
    assert result.summary["significant_hurt"] == (found > 0).sum()


def test_every_document_counts_once_however_long(plant):
    model, text, case = plant("lengths")
    facts = case["facts"]
    result = run(model, text, exact=True)
    (head,) = case["heads"].values()
    assert result.summary["scored_loss"] == pytest.approx(facts["loss_doc"], abs=1e-5)
    assert result.summary["baseline_loss_token_weighted"] == pytest.approx(
        facts["loss_token"], abs=1e-5
    )
    assert grid(result, "loss_delta")[head] == pytest.approx(facts["delta_doc"], abs=1e-5)
    assert grid(result, "importance")[head] == pytest.approx(facts["importance_doc"], rel=1e-3)


# ------------------------------------------------------------------------------- options and state


def test_kv_units_remove_whole_groups(load, corpus):
    model, plain = load("llama")
    text = load_text(corpus, model, documents=8, context=64)
    result = run(model, text, prune=True, unit="kv")
    order = [tuple(h) for h in result.summary["pruned_order"]]
    groups = [order[i : i + 3] for i in range(0, 18, 3)]
    assert all(len({(layer, h // 3) for layer, h in group}) == 1 for group in groups)
    assert set(result.tables["prune"]["n_pruned"] % 3) == {0}
    # One xi for a whole group: the finite difference moves its three heads together.
    big, ids = oracle.double(plain), [d.windows[0] for d in text.documents]
    expected = {}
    for layer in range(3):
        for group in range(2):
            signed = sum(oracle.gradients_fd(big, ids, layer, 3 * group + i) for i in range(3))
            expected[layer, group] = np.abs(signed).mean()
    norms = {k: v / np.hypot(expected[k[0], 0], expected[k[0], 1]) for k, v in expected.items()}
    assert [(g[0][0], g[0][1] // 3) for g in groups] == sorted(norms, key=norms.get)


def test_rescoring_estimates_again_without_the_heads_already_gone(load, corpus):
    model, plain = load("gpt2")
    text = load_text(corpus, model, documents=8, context=64)
    result = run(model, text, rescore=True, step=0.25)
    rows = result.tables["prune"].query("order == 'rescore'")
    assert rows["n_pruned"].tolist() == [0, 3, 6, 9, 12]
    choosing = [d.windows[0] for d in text.documents][0::2]
    gone = []
    for count in (3, 6):
        importance = oracle.importances_fd(oracle.double(oracle.edited(plain, gone)), choosing)
        # a layer's norm is over the heads that are left: those gone have no gradient
        scores = importance / np.linalg.norm(importance, axis=1, keepdims=True)
        left = [h for h in oracle.heads_of(plain) if h not in gone]
        gone += sorted(left, key=lambda h: scores[h])[: count - len(gone)]
    judged = [d.windows[0] for d in text.documents][1::2]
    clean = oracle.document_losses(plain, judged)
    after = oracle.document_losses(oracle.edited(plain, gone), judged)
    assert rows.iloc[2]["loss_delta"] == pytest.approx((after - clean).mean(), abs=1e-5)


def test_works_frozen_without_grad_and_leaves_everything_as_it_was(checkpoint, corpus):
    model = interp.load_model(checkpoint("gpt2"), device="cpu")
    text = load_text(corpus, model, documents=4, context=64)
    module = model.bridge.original_model
    usual = run(model, text).tables["heads"]
    parameters = list(module.parameters())
    for i, parameter in enumerate(parameters):
        parameter.requires_grad_(i % 2 == 0)
    module.train()
    training = [m.training for m in model.bridge.modules()]
    with torch.no_grad():
        frozen = run(model, text).tables["heads"]
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        inferred = run(model, text, exact=True).tables["heads"][usual.columns]
        assert torch.is_inference_mode_enabled()
    pd.testing.assert_frame_equal(frozen, usual)
    pd.testing.assert_frame_equal(inferred, usual)
    assert torch.is_grad_enabled()
    assert [p.requires_grad for p in parameters] == [i % 2 == 0 for i in range(len(parameters))]
    assert [m.training for m in model.bridge.modules()] == training
    assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("stage", ["exact", "prune"])
def test_an_interruption_keeps_what_was_measured(load, corpus, monkeypatch, stage):
    from interp import splice

    model, _ = load("gpt2")
    text = load_text(corpus, model, documents=8, context=64)
    complete = run(model, text, exact=True, prune=True, batch_size=2)
    calls = {"n": 0}
    real = splice.run_edited

    def interrupted(*args, **kwargs):
        calls["n"] += 1
        if calls["n"] == (40 if stage == "exact" else 160):
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(splice, "run_edited", interrupted)
    result = run(model, text, exact=True, prune=True, batch_size=2)
    assert not result.complete and any("Interrupted" in n for n in result.notices)
    np.testing.assert_allclose(grid(result, "importance"), grid(complete, "importance"), atol=1e-9)
    assert not np.isnan(grid(result, "loss_delta")).all()
    assert not [m for m in model.bridge.modules() if "forward" in m.__dict__]
    if stage == "prune":
        np.testing.assert_allclose(
            grid(result, "loss_delta"), grid(complete, "loss_delta"), atol=1e-6
        )


def test_unknown_options_and_models_without_heads(load, corpus):
    model, _ = load("gpt2")
    text = load_text(corpus, model, documents=4, context=64)
    with pytest.raises(InterpError, match="did you mean 'prune'"):
        run(model, text, prun=True)
    with pytest.raises(InterpError, match="step must be above 0"):
        run(model, text, step=0.0)


def test_a_single_document_gives_numbers_but_no_interval(load, corpus):
    model, _ = load("gpt2")
    text = load_text(corpus[:1], model, documents=1, context=64)
    result = run(model, text, exact=True, prune=True)
    table = result.tables["heads"]
    assert table["ci_low"].isna().all() and (table["verdict"] == "undecided").all()
    assert not table["significant"].any()
    assert result.summary["prunable_low"]["importance"]["0.01"] is None
    assert result.summary["prunable"]["importance"]["0.01"] is not None


# ------------------------------------------------------------------------------- pure functions


def test_step_counts():
    assert curve.step_counts(270, 0.1) == [27 * i for i in range(11)]
    assert curve.step_counts(8, 0.3) == [0, 2, 5, 7, 8]
    assert curve.step_counts(3, 1.0) == [0, 3]
    assert curve.random_counts(10) == [0, 1, 2, 4, 6, 8, 10]


def order_with(values, counts):
    units = [((0, i),) for i in range(20)]
    made = curve.Order("importance", None, units, counts)
    for n, value in values.items():
        made.points[n] = np.array([value, value])
    return made


def test_prunable_counts_heads_before_the_first_crossing():
    # crosses 0.05 between 5 and 10 removed, dips below again later: only the first crossing counts
    made = order_with({0: 0, 5: 0.005, 10: 0.08, 15: 0.02, 20: 0.9}, [0, 5, 10, 15, 20])
    assert made.wanted(ahead=2) == [6, 7]
    for n, value in {6: 0.02, 7: 0.04, 8: 0.06}.items():
        made.points[n] = np.array([value, value])
    curves = made.curves()
    assert made.wanted(ahead=1) == []
    assert made.prunable(curves["mean"], 0.05) == 7 / 20
    assert made.prunable(curves["mean"], 0.01) == 5 / 20


def test_prunable_where_the_curve_never_or_at_once_crosses():
    never = order_with({0: 0, 10: 0.001, 20: -0.2}, [0, 10, 20])
    assert never.wanted(1) == [] and never.prunable(never.curves()["mean"], 0.01) == 1
    once = order_with({0: 0, 10: 0.5, 20: 0.6, 1: 0.2}, [0, 10, 20])
    assert once.wanted(3) == [] and once.prunable(once.curves()["mean"], 0.05) == 0


def test_prunable_at_the_intervals_ends():
    from interp.analyzers.heads.tables import _prunable

    # Four documents, interval of half width t(3) * sd / 2 = 0.012; the mean rises 0.005 a head.
    spread = 0.012 * np.sqrt(3) / 3.182446 * np.array([-1, -1, 1, 1])
    made = order_with({0: 0.0}, [0, 10, 20])
    for n in range(1, 21):
        made.points[n] = 0.005 * n + spread
    found = _prunable([made])
    assert found["prunable"]["importance"]["0.05"] == 10 / 20
    assert found["prunable_low"]["importance"]["0.05"] == 7 / 20  # 8 heads: 0.04 + 0.012
    assert found["prunable_high"]["importance"]["0.05"] == 12 / 20  # 13 heads: 0.065 - 0.012
    assert found["prunable"]["importance"]["0.01"] == 2 / 20
    assert found["prunable_low"]["importance"]["0.01"] == 0


def test_the_curve_is_refined_for_the_intervals_ends_too():
    # Mean and careful end cross 0.05 within the first step, the optimistic end in the second.
    spread = 0.012 * np.sqrt(3) / 3.182446 * np.array([-1, -1, 1, 1])
    made = order_with({0: 0.0}, [0, 10, 20])
    made.points[10] = 0.055 + spread
    made.points[20] = 0.2 + spread
    assert made.wanted(ahead=1) == [1, 11]


def test_units_and_their_importance():
    assert curve.units(2, 4, 2) == [
        ((0, 0), (0, 1)),
        ((0, 2), (0, 3)),
        ((1, 0), (1, 1)),
        ((1, 2), (1, 3)),
    ]
    xi = np.array([[[1.0, -1.0, 2.0, 3.0]], [[-4.0, 1.0, 0.0, -1.0]]])
    np.testing.assert_allclose(curve.importance_of_units(xi, 1), [[2.5, 1.0, 1.0, 2.0]])
    np.testing.assert_allclose(curve.importance_of_units(xi, 2), [[1.5, 3.0]])
    np.testing.assert_allclose(
        curve.normalised(np.array([[3.0, 4.0], [0.0, 0.0]])), [[0.6, 0.8], [0, 0]]
    )


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
@pytest.mark.parametrize("size", [3, 8])
def test_growing_one_unit_at_a_time_is_measuring_anew(load, corpus, family, size):
    """In one batch and in several, in steps of one and of several units, forth and back."""
    from interp.analyzers.heads import measure

    model, plain = load(family)
    text = load_text(corpus, model, documents=8, context=64)
    ids = [d.windows[0] for d in text.documents]
    clean = oracle.document_losses(plain, ids)
    units = [((2, 1),), ((0, 3),), ((1, 0),), ((0, 0),), ((2, 2),), ((1, 2),), ((0, 1),)]
    order = curve.Order("importance", None, units, [0, 7])
    with model.measuring():
        growing = measure.Growing(model, text, size, None)
        assert growing.single == (size == 8)
        found = {}
        other = curve.Order("raw", None, units[::-1], [0, 7])
        for counts in ([1], [2, 3], [6], [4, 5, 7]):
            found |= growing.measure(order, counts)
            growing.measure(other, [counts[0] // 2 + 1])  # another order's runs are its own
    for n, delta in found.items():
        edited = oracle.edited(plain, list(order.removal(n).heads))
        expected = oracle.document_losses(edited, ids) - clean
        np.testing.assert_allclose(delta, expected, atol=1e-5, err_msg=str(n))


def test_too_few_further_documents_are_no_judge(load):
    model, _ = load("gpt2")
    text = load_text(tiny.corpus(9), model, documents=8, context=64)  # one is left
    result = run(model, text, exact=True, prune=True)
    assert result.summary["baseline_documents"] == 4
    assert any("only 1 further documents: 4 of the 8 choose" in n for n in result.notices)


def test_one_document_has_no_other_to_stand_in(load, corpus):
    model, _ = load("gpt2")
    text = load_text(corpus[:1], model, documents=1, context=64)
    with pytest.raises(InterpError, match="from other documents"):
        run(model, text, exact=True, ablation="mean")
    table = run(model, text, exact=True).tables["heads"]
    assert table["loss_delta_mean"].isna().all() and table["loss_delta"].notna().all()

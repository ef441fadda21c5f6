"""Runs from the middle against plain transformers, and against themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interp import hooks, interventions, splice
from interp.errors import InterpError
from interp.text import load_text
from tests import oracle, tiny

FAMILIES = tiny.FAMILIES


@pytest.fixture(params=FAMILIES)
def case(request, load, corpus):
    model, plain = load(request.param)
    text = load_text(corpus, model, documents=8, context=64)
    return model, plain, text, [d.windows[0] for d in text.documents]


def one_batch(model, text):
    return next(iter(text.batches(len(text), model.device)))


def per_document(scores, text):
    counts = np.array([len(d.windows[0]) - 1 for d in text.documents])
    return scores.numpy() / counts


def test_clean_losses_are_plain_transformers(case):
    model, plain, text, ids = case
    with model.measuring(fused=True):
        clean = splice.run_clean(model, one_batch(model, text))
    expected = oracle.document_losses(plain, ids)
    np.testing.assert_allclose(per_document(clean.scores.loss, text), expected, atol=1e-5)


def test_removing_a_head_is_editing_the_weights(case):
    model, plain, text, ids = case
    with model.measuring(fused=True):
        clean = splice.run_clean(model, one_batch(model, text), kl=True)
        for layer, head in [(0, 1), (1, 0), (model.cfg.n_layers - 1, model.cfg.n_heads - 1)]:
            scores = splice.run_edited(model, clean, interventions.removals([(layer, head)]))
            edited = oracle.edited(plain, [(layer, head)])
            expected = oracle.document_losses(edited, ids)
            np.testing.assert_allclose(per_document(scores.loss, text), expected, atol=1e-5)
            kl = oracle.kl(plain, edited, ids)
            np.testing.assert_allclose(per_document(scores.kl, text), kl, atol=1e-5)


def test_removing_many_heads_and_keeping_a_bias(case):
    model, plain, text, ids = case
    heads = [(0, 0), (0, 2), (1, 1), (2, 3), (2, 0)]
    means = torch.as_tensor(oracle.head_means(plain, ids, text.special_ids)).float()
    with model.measuring(fused=True):
        clean = splice.run_clean(model, one_batch(model, text))
        for bias in (None, means):
            scores = splice.run_edited(model, clean, interventions.removals(heads, bias))
            edited = oracle.edited(plain, heads, None if bias is None else bias.double().numpy())
            expected = oracle.document_losses(edited, ids)
            np.testing.assert_allclose(per_document(scores.loss, text), expected, atol=1e-5)


def test_removing_every_head_of_a_layer_and_of_the_model(case):
    model, plain, text, ids = case
    layers = [[1], range(model.cfg.n_layers)]
    with model.measuring(fused=True):
        clean = splice.run_clean(model, one_batch(model, text))
        for some in layers:
            heads = [(layer, h) for layer in some for h in range(model.cfg.n_heads)]
            scores = splice.run_edited(model, clean, interventions.removals(heads))
            expected = oracle.document_losses(oracle.edited(plain, heads), ids)
            np.testing.assert_allclose(per_document(scores.loss, text), expected, atol=1e-5)


def test_from_the_middle_is_from_the_start(case):
    model, _, text, _ = case
    with model.measuring(fused=True):
        clean = splice.run_clean(model, one_batch(model, text), kl=True)
        assert splice.usable(model, text)
        edits = interventions.removals([(1, 0), (2, 1)])
        middle = splice.run_edited(model, clean, edits)
        start = splice.run_edited(model, clean, edits, from_start=True)
    assert torch.allclose(middle.loss, start.loss, atol=1e-5)
    assert torch.allclose(middle.kl, start.kl, atol=1e-5)


def test_extending_a_run_is_running_anew(case):
    model, _, text, _ = case
    order = [(2, 1), (0, 3), (1, 0), (1, 2), (0, 0)]
    with model.measuring(fused=True):
        run = clean = splice.run_clean(model, one_batch(model, text))
        for n in range(1, len(order) + 1):
            edits = interventions.removals(order[:n])
            layer = order[n - 1][0]
            run = splice.extend(model, run, {k: e for k, e in edits.items() if k >= layer})
            anew = splice.run_edited(model, clean, edits)
            assert torch.allclose(run.scores.loss, anew.loss, atol=1e-5), order[:n]


def test_an_edit_that_changes_nothing_changes_nothing(case):
    model, _, text, _ = case
    with model.measuring(fused=True):
        clean = splice.run_clean(model, one_batch(model, text), kl=True)
        scores = splice.run_edited(model, clean, {1: lambda z: z.clone()})
    assert torch.allclose(scores.loss, clean.scores.loss, atol=1e-5)
    assert float(scores.kl.abs().max()) < 1e-4  # over up to 59 tokens


def test_nothing_stays_behind(case):
    model, plain, text, ids = case
    block = model.bridge.blocks[1]
    before = {id(m): dict(m.__dict__) for m in model.bridge.modules()}
    with model.measuring(fused=True):
        clean = splice.run_clean(model, one_batch(model, text))
        splice.run_edited(model, clean, interventions.removals([(1, 0)]))

        def broken(z):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            splice.run_edited(model, clean, {1: broken})
    for module in model.bridge.modules():
        assert "forward" not in set(module.__dict__) - set(before[id(module)])
    assert not hooks.foreign_hooks(model)
    assert not block._forward_hooks and not block.attn._forward_hooks
    with model.measuring(fused=True):
        again = splice.run_clean(model, one_batch(model, text))
    np.testing.assert_allclose(
        per_document(again.scores.loss, text), oracle.document_losses(plain, ids), atol=1e-5
    )


@given(data=st.data())
def test_a_document_scores_the_same_in_any_company(load, corpus, data):
    family = data.draw(st.sampled_from(FAMILIES))
    model, plain = load(family)
    text = load_text(corpus, model, documents=8, context=64)
    places = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    size = data.draw(st.integers(1, 6))
    some = text.subset(places)
    head = (data.draw(st.integers(0, 2)), data.draw(st.integers(0, model.cfg.n_heads - 1)))
    losses, kls = [], []
    with model.measuring(fused=True):
        for batch in some.batches(size, model.device):
            clean = splice.run_clean(model, batch, kl=True)
            scores = splice.run_edited(model, clean, interventions.removals([head]))
            losses.append(scores.loss)
            kls.append(scores.kl)
    for place, loss, kl in zip(places, torch.cat(losses), torch.cat(kls), strict=True):
        expected, divergence = _alone(family, plain, text, place, head)
        assert abs(float(loss) / (len(text.documents[place].windows[0]) - 1) - expected) < 1e-5
        assert abs(float(kl) / (len(text.documents[place].windows[0]) - 1) - divergence) < 1e-5


_ALONE = {}


def _alone(family, plain, text, place, head):
    """One document by plain transformers, without batch or padding."""
    key = (family, head)
    if key not in _ALONE:
        edited = oracle.edited(plain, [head])
        ids = [d.windows[0] for d in text.documents]
        _ALONE[key] = (oracle.document_losses(edited, ids), oracle.kl(plain, edited, ids))
    losses, kls = _ALONE[key]
    return losses[place], kls[place]


def test_ablate_is_the_same_for_a_notebook(load, corpus):
    model, plain = load("llama")
    text = load_text(corpus, model, documents=8, context=64)
    batch = one_batch(model, text)
    with model.measuring(fused=True), interventions.ablate(model, [(0, 4), (2, 2)]):
        scores = splice.forward_scores(model, batch)
    expected = oracle.document_losses(
        oracle.edited(plain, [(0, 4), (2, 2)]), [d.windows[0] for d in text.documents]
    )
    np.testing.assert_allclose(per_document(scores.loss, text), expected, atol=1e-5)
    with pytest.raises(InterpError, match=r"Head 3\.0 does not exist"):
        interventions.ablate(model, [(3, 0)]).__enter__()


def test_a_hook_of_the_callers_stays_and_acts(load, corpus):
    model, _ = load("gpt2")
    text = load_text(corpus, model, documents=4, context=64)
    calls = []
    point = model.hook_point("blocks.1.attn.hook_z")
    point.add_hook(lambda tensor, hook: calls.append(tensor.shape))
    try:
        with model.measuring(fused=True):
            splice.run_clean(model, one_batch(model, text))
        assert len(calls) == 1 and len(point.fwd_hooks) == 1
        assert hooks.foreign_hooks(model)
    finally:
        point.remove_hooks("fwd")


def test_a_non_finite_weight_stops_the_run(checkpoint, corpus, tmp_path):
    from interp.model import load_model

    model = load_model(checkpoint("gpt2"), device="cpu")
    text = load_text(corpus, model, documents=4, context=64)
    with torch.no_grad():
        model.bridge.blocks[0].attn.o.original_component.weight[0, 0] = float("nan")
    from interp.analyzers.heads import heads

    with pytest.raises(InterpError, match="non-finite"):
        heads(model, text, progress=False)


def test_kl_keeps_its_precision_over_a_large_vocabulary():
    torch.manual_seed(0)
    clean = torch.randn(64, 49152) * 2.5
    changed = (clean + torch.randn(64, 49152) * 0.02).log_softmax(-1)
    logp = clean.log_softmax(-1)
    p = logp.exp()
    kl = splice.expected(p, logp) - splice.expected(p, changed)
    exact = (logp.double().exp() * (logp.double() - changed.double())).sum(-1)
    assert abs(float((kl - exact).mean())) < 5e-7
    assert float((kl - exact).abs().max()) < 5e-6

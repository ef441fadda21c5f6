"""Spliced losses against plain transformers, and what goes through a site against the oracle."""

import numpy as np
import pytest
import torch

from interp import hooks
from interp.text import load_text
from probes import baselines, splicing
from probes.activations import Stream, Windows, judged
from tests import oracle, tiny

LAYER = 1
FAMILIES = ["gpt2", "neox", "llama"]


def mlp_of(plain, layer):
    base = getattr(plain, "transformer", None) or getattr(plain, "gpt_neox", None) or plain.model
    return (getattr(base, "h", None) or base.layers)[layer].mlp


def plain_losses(plain, documents, special, change):
    """Mean loss of each document with the MLP's output changed at included positions."""
    out = []
    for document in documents:
        keep = torch.from_numpy(oracle.included(document, special))

        def hook(_module, _args, output, keep=keep):
            new = output.clone()
            new[0, keep] = change(output[0, keep])
            return new

        handle = mlp_of(plain, LAYER).register_forward_hook(hook)
        try:
            out.append(float(np.mean(oracle.token_losses(plain, document))))
        finally:
            handle.remove()
    return np.array(out)


@pytest.fixture(params=FAMILIES)
def case(request, load):
    model, plain = load(request.param)
    text = load_text(tiny.corpus(6), model, documents=6, context=40)
    documents = [d.windows[0] for d in text.documents]
    return model, plain, text, documents, text.special_ids


CHANGES = {
    "same": lambda x: x,
    "zero": lambda x: 0 * x,
    "twice": lambda x: 2 * x,
    "turned": lambda x: x.roll(1, dims=-1) + 0.3,
}


def test_losses_are_those_of_plain_transformers(case):
    model, plain, text, documents, special = case
    replacements = {name: (lambda x, neurons, batch, f=f: f(x)) for name, f in CHANGES.items()}
    with model.measuring():
        found = splicing.splice_in(model, LAYER, text, replacements, 4)
    for name, change in CHANGES.items():
        expected = plain_losses(plain, documents, special, change)
        assert found.loss(name) == pytest.approx(expected, abs=2e-5), name
    assert np.abs(found.loss("same") - found.loss("clean")).max() < 1e-6
    assert np.abs(found.divergence("same")).max() < 1e-6
    assert np.abs(found.loss("turned") - found.loss("clean")).max() > 1e-3
    assert (found.divergence("turned") > 1e-4).any()


def test_batch_size_changes_nothing(case):
    model, _, text, _, _ = case
    noisy = splicing.noisy(lambda x, a: (0.5 * x, x[:, 0]), text, 3)
    with model.measuring():
        one, all_ = (
            splicing.splice_in(model, LAYER, text, {"noise": noisy}, size) for size in (1, 6)
        )
    assert one.loss("noise") == pytest.approx(all_.loss("noise"), abs=1e-5)
    assert one.divergence("noise") == pytest.approx(all_.divergence("noise"), abs=1e-5)


def test_windows_of_a_document_are_one_unit(load):
    model, plain = load("gpt2")
    text = load_text(tiny.corpus(5), model, documents=5, context=16, windows=True)
    assert max(len(d.windows) for d in text.documents) > 1
    with model.measuring():
        found = splicing.splice_in(
            model, LAYER, text, {"zero": splicing.constant(torch.zeros(40))}, 2
        )
    for i, document in enumerate(text.documents):
        sums = [
            plain_losses(plain, [w], text.special_ids, CHANGES["zero"])[0] * (len(w) - 1)
            for w in document.windows
        ]
        n = sum(len(w) - 1 for w in document.windows)
        assert found.loss("zero")[i] == pytest.approx(sum(sums) / n, abs=2e-5)


def test_random_error_is_as_long_and_elsewhere(load):
    model, _ = load("gpt2")
    text = load_text(tiny.corpus(4), model, documents=4, context=40)
    shorter = lambda x, a: (0.8 * x, x[:, 0])  # noqa: E731
    batch = text.batch_of([(0, 0), (1, 0)])
    x = torch.randn(int(batch.included.sum()), 40)
    found = splicing.noisy(shorter, text, 0)(x, None, batch) - x
    assert torch.allclose(found.norm(dim=1), 0.2 * x.norm(dim=1), rtol=1e-4)
    assert float((found * x).sum(1).div(found.norm(dim=1) * x.norm(dim=1)).mean().abs()) < 0.1
    again = splicing.noisy(shorter, text, 1)(x, None, batch) - x
    assert not torch.allclose(found, again)


# The stream ---------------------------------------------------------------------------------------


def oracle_activations(plain, window, special):
    kept = []
    handle = mlp_of(plain, LAYER).register_forward_hook(lambda m, a, out: kept.append(out[0]))
    try:
        oracle.logits(plain, window)
    finally:
        handle.remove()
    return kept[0][torch.from_numpy(oracle.included(window, special))].detach()


def test_stream_is_the_models_own_whatever_is_asked(case):
    model, plain, text, _, special = case
    text = text.subset([0, 1])  # what follows is drawn from the documents behind the sample
    text = load_text(tiny.corpus(40), model, documents=3, context=20)
    windows = Windows.of(text, 200)
    judged_ids = {d.index for d in text.documents}
    assert not judged_ids & {d.index for d in text.rest()}
    stream = Stream(model, LAYER, windows, 16, 3)
    stream.block_tokens = 48
    assert stream.tokens == 192
    assert stream.blocks == 4
    expected = torch.cat([oracle_activations(plain, w.tolist(), special) for w in windows.ids])
    with model.measuring():
        for rows in (3, 1, 8):  # windows at once
            blocks = [stream.block(b, rows) for b in (0, 1, 2, 3)]
            assert torch.allclose(torch.cat(blocks), expected[:192], atol=2e-4)
            assert torch.equal(stream.block(2, rows), blocks[2])
            assert torch.allclose(torch.cat(blocks), stream.read(0, 192, 3), atol=1e-5)


def test_judged_positions(case):
    model, plain, text, documents, special = case
    with model.measuring():
        parts = list(judged(model, LAYER, text, text.batches(4), neurons=True))
    x = torch.cat([p.x for p in parts])
    assert torch.allclose(
        x, torch.cat([oracle_activations(plain, d, special) for d in documents]), atol=2e-4
    )
    ids = torch.cat([p.token_id for p in parts]).tolist()
    flat = [t for d in documents for t in np.asarray(d)[oracle.included(d, special)].tolist()]
    assert ids == flat
    at = torch.cat([p.document for p in parts]), torch.cat([p.position for p in parts])
    assert [documents[d][p] for d, p in zip(*(a.tolist() for a in at), strict=True)] == ids
    assert parts[0].neurons.shape == (len(parts[0].x), model.cfg.d_mlp)


def test_a_first_position_a_hundred_times_longer_moves_nothing(case):
    model, _, text, _, _ = case

    def longer(tensor):
        new = tensor.clone()
        new[:, 0] *= 100
        return new

    with model.measuring():
        before = torch.cat([p.x for p in judged(model, LAYER, text, text.batches(4))])
        with hooks.attached(model, [("mlp_out", LAYER, longer)]):
            after = torch.cat([p.x for p in judged(model, LAYER, text, text.batches(4))])
    assert torch.equal(before, after)


# The null model -----------------------------------------------------------------------------------


def test_permuted_weights_keep_entries_and_come_back(case):
    model, _, text, _, _ = case
    weights = dict(model.bridge.original_model.named_parameters())
    before = {name: w.detach().clone() for name, w in weights.items()}
    with model.measuring():
        x = torch.cat([p.x for p in judged(model, LAYER, text, text.batches(4))])

    def fail():
        with model.measuring(), baselines.permuted(model, 1):
            for name, weight in weights.items():
                if weight.ndim < 2:
                    assert torch.equal(weight, before[name])
                    continue
                assert not torch.equal(weight, before[name]), name
                assert torch.equal(weight.flatten().sort()[0], before[name].flatten().sort()[0])
            null = torch.cat([p.x for p in judged(model, LAYER, text, text.batches(4))])
            assert not torch.allclose(null, x, atol=0.1)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert all(torch.equal(w, before[name]) for name, w in weights.items())
    with model.measuring():
        assert torch.equal(torch.cat([p.x for p in judged(model, LAYER, text, text.batches(4))]), x)

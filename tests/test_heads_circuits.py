"""Copying and composition of heads against written-out matrices, and planted ones."""

import numpy as np
import pytest
import torch

import interp
from interp.analyzers.heads import circuits
from interp.model import load_model
from interp.report import heads_roles
from interp.text import load_text
from tests import asymmetry_oracle as asym
from tests import oracle, qkv_oracle, tiny

FAMILIES = ("gpt2", "neox", "llama")


def w_v(plain, layer, head):
    """[d_model, d_head] of a query head, float64."""
    attn, kind, d = asym._layer(plain, layer), plain.config.model_type, oracle.d_head(plain)
    heads = oracle.n_heads(plain)
    if kind == "gpt2":
        view = attn.c_attn.weight.data.T.view(3, heads, d, -1)[2]
    elif kind == "gpt_neox":
        view = attn.query_key_value.weight.data.view(heads, 3, d, -1)[:, 2]
    else:
        view = attn.v_proj.weight.data.view(asym.n_kv(plain), d, -1)
    return view[head // (heads // len(view))].double().numpy().T


def written_out(plain, layer, head):
    """(OV, QK) [d_model, d_model], norm folded in on what reads."""
    w_q, w_k = asym.weights(plain, layer, head)
    w_o = oracle._w_o(plain, layer)[oracle._slice(plain, head)].double().numpy()
    q, k, v = (asym.fold(plain, layer, w) for w in (w_q, w_k, w_v(plain, layer, head)))
    return v @ w_o, q @ k.T


def unembedding(plain):
    """[d_model, vocab] with the final norm folded in."""
    kind, d = plain.config.model_type, plain.config.hidden_size
    w = plain.get_output_embeddings().weight.data.double().numpy().T
    centring = np.eye(d) - 1 / d
    if kind == "llama":
        return np.diag(plain.model.norm.weight.data.double().numpy()) @ w
    norm = plain.transformer.ln_f if kind == "gpt2" else plain.gpt_neox.final_layer_norm
    return centring @ np.diag(norm.weight.data.double().numpy()) @ w


@pytest.mark.parametrize("family", FAMILIES)
def test_copying_is_that_of_the_whole_map_of_tokens_to_logits(load, family):
    model, plain = load(family)
    found = circuits.measure(model, 0).copying
    real = model.cfg.vocab_size
    embed = plain.get_input_embeddings().weight.data.double().numpy()[:real]
    for layer, head in oracle.heads_of(plain)[::3]:
        ov, _ = written_out(plain, layer, head)
        values = np.linalg.eigvals(embed @ ov @ unembedding(plain)[:, :real])
        expected = values.real.sum() / np.abs(values).sum()
        assert found[layer, head] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_composition_is_that_of_written_out_matrices(load, family):
    model, plain = load(family)
    found = circuits.measure(model, 0).composition

    def ratio(a, b):
        return np.linalg.norm(a @ b) / np.linalg.norm(a) / np.linalg.norm(b)

    heads = oracle.heads_of(plain)
    for i, one in enumerate(heads):
        for two in heads[i % 2 :: 2]:
            if two[0] <= one[0]:
                assert all(np.isnan(found[kind][*one, *two]) for kind in "qkv")
                continue
            ov, (later_ov, qk) = written_out(plain, *one)[0], written_out(plain, *two)
            for kind, reads in (("q", qk), ("k", qk.T), ("v", later_ov)):
                assert found[kind][*one, *two] == pytest.approx(ratio(ov, reads), rel=1e-6)


def test_planted_heads_that_copy_and_one_that_reads_another(tmp_path):
    """0.1 copies, 1.2 lowers what it sees; the queries of 2.0 read what 0.3 writes."""
    rng = np.random.default_rng(0)
    model = tiny.make_model("gpt2").requires_grad_(False)
    for layer, head, sign in ((0, 1, 1), (1, 2, -1)):
        value, _, out = qkv_oracle.value_views(model, layer)
        d, width = value.shape[1:]
        embed = model.get_input_embeddings().weight.double().numpy()
        # What is written -> what is read; centring leaves it without full rank.
        through = unembedding(model) @ embed @ asym.fold(model, layer, np.eye(width))
        basis = np.linalg.qr(through @ rng.normal(size=(width, d)))[0].T
        value[head] = torch.tensor(np.linalg.pinv(through) @ basis.T).T.to(value) * 1e3
        out[head] = sign * torch.tensor(basis).to(out)
        again = basis @ through @ value[head].double().numpy().T
        assert np.allclose(again, again[0, 0] * np.eye(d), atol=0.05 * abs(again[0, 0]))
    _, _, writes = qkv_oracle.value_views(model, 0)
    undone = np.linalg.pinv(asym.fold(model, 2, np.eye(writes.shape[2])))
    asym.write(model, 2, 0, w_q=undone @ writes[3].double().numpy().T)
    model.save_pretrained(tmp_path)
    tiny.make_tokenizer("gpt2").save_pretrained(tmp_path)
    made = circuits.measure(load_model(tmp_path, device="cpu"), 0)
    assert made.copying[0, 1] == pytest.approx(1, abs=0.02)
    assert made.copying[1, 2] == pytest.approx(-1, abs=0.02)
    table = circuits.pairs(made, set())
    first = table[table["kind"] == "q"].iloc[0]
    assert (first.layer, first["head"], first.later_layer, first.later_head) == (0, 3, 2, 0)
    assert first.percentile == 100
    assert not len(circuits.pairs(made, {(2, 0)}).query("later_layer == 2 and later_head == 0"))


def test_unrelated_gaussian_matrices_compose_as_their_shape_says():
    torch.manual_seed(0)
    layers = [
        circuits._Layer(
            *torch.randn(3, 6, 64, 8, dtype=torch.float64),
            torch.randn(6, 8, 64, dtype=torch.float64),
        )
        for _ in range(3)
    ]
    apart = [(a, b) for a in range(6) for b in range(6) if a != b]
    found, null = (
        circuits._compositions(layers),
        circuits._null(layers, apart, np.random.default_rng(0)),
    )
    for kind in "qkv":
        known = found[kind][~np.isnan(found[kind])]
        assert len(known) == 3 * 36
        assert np.sqrt((known**2).mean()) == pytest.approx(64**-0.5, rel=0.05)
        assert np.median(null[kind]) == pytest.approx(np.median(known), rel=0.05)


def test_it_comes_with_the_roles_and_is_told(load):
    model, _ = load("neox")
    text = load_text(tiny.corpus(6), model, documents=4, context=24)
    result = interp.heads(model, text, roles=True, progress=False)
    table, found = result.tables["heads"], result.summary["circuits"]
    assert table["ov_copying"].between(-1, 1).all()
    high = found["copying"]["null_high"]
    assert found["copying"]["above"] == (table["ov_copying"] > high).sum()
    words = " ".join(heads_roles.findings(result))
    assert "copy" in words and "re-paired circuits: queries" in words
    assert set(result.tables["composition"]["kind"]) == {"q", "k", "v"}

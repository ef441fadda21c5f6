"""Symmetrised scores against plain transformers with another attention, and what must hold."""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

import interp
from interp import scores
from interp.analyzers.asymmetry import symmetrise
from interp.errors import InterpError
from interp.text import load_text
from tests import asymmetry_oracle as asym
from tests import oracle, tiny
from tests.test_asymmetry import FAMILIES, saved

N = 5


@pytest.fixture(scope="session")
def effects(load, corpus):
    """family -> (Effects of a natural text, text, interp model, plain model, ids)."""
    made = {}

    def get(family):
        if family not in made:
            model, plain = load(family)
            text = load_text(corpus, model, documents=N, context=24)
            made[family] = (measure(model, text), text, model, plain)
        return made[family]

    return get


def measure(model, text, batch_size=3):
    with model.measuring():
        forms = scores.form(model)
        return symmetrise.measure(model, text, forms, batch_size, seed=0)


def ids_of(text):
    return [d.windows[0] for d in text.documents]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_symmetrised_head_is_the_oracles(effects, family):
    found, text, _, plain = effects(family)
    ids = ids_of(text)
    np.testing.assert_allclose(found.clean, oracle.document_losses(plain, ids), atol=1e-5)
    places = symmetrise.permutation(text.batch_of([(i, 0) for i in range(N)]), text, 0)
    for variant in symmetrise.PER_HEAD:
        layer, head = (0, 1) if variant == "permuted" else (2, oracle.n_heads(plain) - 1)
        values = []
        for document, place in zip(ids, places, strict=True):
            x = asym.attention_input(plain, document)[layer]
            q, k = asym.queries_and_keys(plain, x, layer, head)
            s = asym.scores(plain, q, k)
            inside = oracle.included(document, text.special_ids)
            changed = np.outer(inside, inside)  # the first position's row and column stay
            source = np.arange(len(document))
            if variant == "permuted":  # a token's score for itself stays too
                changed &= ~np.eye(len(document), dtype=bool)
                source = place[: len(document)].numpy()
            other = asym.exchanged(plain, q[source], k[source])
            s = np.where(changed, (s + other) / 2, s)
            value = oracle.z(plain, document)
            value[layer, :, head] = asym.softmax_output(s, value_vectors(plain, x, layer, head))
            values.append(value)
        expected = oracle.replaced_losses(
            plain, ids, [(layer, head)], values, special_ids=text.special_ids
        )
        mine = found.single[variant][:, layer, head]
        np.testing.assert_allclose(mine, expected, atol=2e-5)
        assert np.abs(mine - found.clean).max() > 1e-3  # it does something


def value_vectors(plain, x, layer, head):
    """v [pos, d_head] of a query head, from the checkpoint's own layout."""
    kind, heads, width = plain.config.model_type, oracle.n_heads(plain), oracle.d_head(plain)
    attn = asym._layer(plain, layer)
    if kind == "gpt2":
        w = attn.c_attn.weight.data.T.view(3, heads, width, -1)[2, head]
        b = attn.c_attn.bias.data.view(3, heads, width)[2, head]
    elif kind == "gpt_neox":
        w = attn.query_key_value.weight.data.view(heads, 3, width, -1)[head, 2]
        b = attn.query_key_value.bias.data.view(heads, 3, width)[head, 2]
    else:
        kv = head // (heads // asym.n_kv(plain))
        w, b = attn.v_proj.weight.data.view(-1, width, plain.config.hidden_size)[kv], torch.zeros(1)
    return x @ w.double().numpy().T + b.double().numpy()


def changed_attention(change):
    """An attention for transformers whose scores go through `change(s, rows)` before the mask."""

    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        s = change(query @ key.transpose(-1, -2) * scale)
        n = s.shape[-1]
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        return (torch.softmax(s, -1) @ value).transpose(1, 2), None

    return attention


CHANGES = {
    "literal": lambda s: (s + s.mT) / 2,
    "literal_kept": lambda s: kept(s, (s + s.mT) / 2),
    "half": lambda s: s / 2,
    "half_kept": lambda s: kept(s, s / 2),
}


def kept(s, new):
    new = new.clone()
    new[..., 0, :], new[..., :, 0] = s[..., 0, :], s[..., :, 0]
    return new


@pytest.mark.parametrize("family", FAMILIES)
def test_all_heads_at_once_are_plain_transformers_with_another_attention(effects, family):
    found, text, _, plain = effects(family)
    own = plain.config._attn_implementation
    changes = dict(CHANGES)
    if family == "gpt2":  # without rotation the exchange is the transpose
        changes |= {"swap": CHANGES["literal"], "swap_kept": CHANGES["literal_kept"]}
        changes["amplified"] = lambda s: kept(s, (3 * s - s.mT) / 2)
    try:
        for variant, change in changes.items():
            AttentionInterface.register("changed", changed_attention(change))
            plain.set_attn_implementation("changed")
            expected = oracle.document_losses(plain, ids_of(text))
            np.testing.assert_allclose(found.together[variant], expected, atol=3e-5)
    finally:
        plain.set_attn_implementation(own)


@pytest.mark.parametrize("family", ["neox", "llama"])
def test_with_rotation_the_exchange_is_not_the_transpose(effects, family):
    found, _, _, _ = effects(family)
    assert np.abs(found.together["swap"] - found.together["literal"]).max() > 1e-3


def same_keys(plain, half=False):
    """K = Q in every head; with half, one half of each rotary plane is zero in both."""
    heads, group = oracle.n_heads(plain), oracle.n_heads(plain) // asym.n_kv(plain)
    width = oracle.d_head(plain)
    rotated = {"gpt2": 0, "gpt_neox": width // 4, "llama": width}[plain.config.model_type]
    for layer in range(oracle.n_layers(plain)):
        for head in range(heads):
            first = head // group * group  # all query heads of a group are the first one
            w_q, b_q = (
                asym.weights(plain, layer, first)[0].copy(),
                asym.biases(plain, layer, first)[0],
            )
            b_q = b_q.copy()
            if half:
                w_q[:, rotated // 2 : rotated] = 0
                b_q[rotated // 2 : rotated] = 0
            asym.write(plain, layer, head, w_q, w_q, b_q, b_q)


@pytest.mark.parametrize("family", FAMILIES)
def test_symmetrising_what_is_symmetric_changes_nothing(tmp_path, corpus, family):
    model, _ = saved(family, tmp_path / "same", same_keys)
    text = load_text(corpus, model, documents=N, context=24)
    found = measure(model, text)
    for variant in ("literal", "literal_kept"):
        np.testing.assert_allclose(found.together[variant], found.clean, atol=2e-5)
    # At the same offset i asks j's plane by an angle, and j asks i's by the opposite one: with
    # rotation K = Q alone is not enough.
    swap = np.abs(found.together["swap"] - found.clean).max()
    single = np.abs(found.single["swap_kept"] - found.clean[:, None, None]).max()
    assert (swap < 2e-5 and single < 2e-5) if family == "gpt2" else swap > 1e-3
    if family != "gpt2":
        model, _ = saved(family, tmp_path / "half", lambda plain: same_keys(plain, half=True))
        found = measure(model, text)
        for variant in ("swap", "swap_kept", "amplified"):
            np.testing.assert_allclose(found.together[variant], found.clean, atol=2e-5)
        single = found.single["swap_kept"] - found.clean[:, None, None]
        assert np.abs(single).max() < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_no_loss_depends_on_the_batch(effects, family):
    found, text, model, _ = effects(family)
    again = measure(model, text, batch_size=1)
    np.testing.assert_allclose(again.clean, found.clean, atol=1e-5)
    for variant, loss in found.together.items():
        np.testing.assert_allclose(again.together[variant], loss, atol=2e-5, err_msg=variant)
    for variant, loss in found.single.items():
        np.testing.assert_allclose(again.single[variant], loss, atol=2e-5, err_msg=variant)


def test_the_controls_permutation_moves_included_positions_only(effects):
    _, text, model, _ = effects("llama")
    batch = text.batch_of([(i, 0) for i in range(N)])
    place = symmetrise.permutation(batch, text, 0)
    for row, inside in zip(place, batch.included, strict=True):
        at = inside.nonzero()[:, 0]
        assert sorted(row[at].tolist()) == at.tolist()
        assert (row[~inside] == torch.arange(len(row))[~inside]).all()
    assert (place != torch.arange(place.shape[1])).any()
    assert torch.equal(place, symmetrise.permutation(batch, text, 0))
    assert not torch.equal(place, symmetrise.permutation(batch, text, 1))
    alone = symmetrise.permutation(text.batch_of([(3, 0)]), text, 0)
    assert torch.equal(alone[0], place[3][: alone.shape[1]])
    assert model.cfg.family == "llama"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_repeated_tokens_are_scored_where_they_can_be_copied(load, corpus, family):
    model, plain = load(family)
    text = symmetrise.repeated(load_text(corpus, model, documents=N, context=24), 0)
    ids = ids_of(text)
    assert len(ids) == N and len({tuple(d) for d in ids}) == N
    for document in ids:
        half = (len(document) - 1) // 2
        assert document[1 : half + 1] == document[half + 1 :] and half == 11
        assert not set(document[1:]) & text.special_ids
        assert family != "llama" or document[0] == text.bos_id
    expected = [oracle.token_losses(plain, d)[len(d) // 2 + 1 :].mean() for d in ids]
    assert len(oracle.token_losses(plain, ids[0])[len(ids[0]) // 2 + 1 :]) == 10
    found = measure(model, text)
    np.testing.assert_allclose(found.clean, expected, atol=1e-5)
    with pytest.raises(InterpError, match="at least 5"):
        symmetrise.repeated(load_text(corpus, model, documents=2, context=4), 0)


def test_the_result_pairs_by_document(effects):
    found, text, model, _ = effects("gpt2")
    result = interp.asymmetry(model, text, symmetrise=True, progress=False, batch_size=3)
    row = result.tables["asymmetry"].set_index(["layer", "head"]).loc[(1, 2)]
    delta = found.single["swap_kept"][:, 1, 2] - found.clean
    control = found.single["permuted"][:, 1, 2] - found.clean
    half = 2.776445 * (delta - control).std(ddof=1) / np.sqrt(N)
    assert row["loss_delta_symmetrised"] == pytest.approx(delta.mean(), abs=1e-5)
    assert row["loss_delta_control"] == pytest.approx(control.mean(), abs=1e-5)
    assert row["loss_delta_excess"] == pytest.approx((delta - control).mean(), abs=1e-5)
    assert row["excess_high"] - row["excess_low"] == pytest.approx(2 * half, abs=1e-5)
    table = result.tables["symmetrise"]
    assert set(table["text"]) == {"natural", "repeated"} and (table["documents"] == N).all()
    natural = table[table["text"] == "natural"].set_index("variant")["loss_delta"]
    for variant, loss in found.together.items():
        assert natural[variant] == pytest.approx((loss - found.clean).mean(), abs=1e-5)
    assert result.summary["baseline_loss"]["natural"] == pytest.approx(found.clean.mean(), abs=1e-5)
    # q-values are Benjamini-Hochberg over all heads: never below their p, the largest equal to it.
    from scipy import stats as scipy_stats

    excess = (found.single["swap_kept"] - found.single["permuted"]).reshape(N, -1)
    p = scipy_stats.ttest_1samp(excess, 0).pvalue
    expected = scipy_stats.false_discovery_control(p)
    np.testing.assert_allclose(
        result.tables["asymmetry"]["excess_q"], expected, rtol=2e-2, atol=1e-4
    )


def test_induction_suffers_where_its_heads_are_symmetrised(plant):
    """The planted induction head asks for what came after its own token: no symmetric relation."""
    model, text, case = plant("induction")
    text = text.subset(list(range(6)))
    found = measure(model, text)
    layer, head = case["heads"]["induction"]
    delta = (found.single["swap_kept"] - found.clean[:, None, None]).mean(0)
    assert delta[layer, head] > 0.05
    assert np.unravel_index(delta.argmax(), delta.shape) in set(case["heads"].values())


def test_interruption_keeps_whole_documents(load, corpus, monkeypatch):
    model, _ = load("gpt2")
    text = load_text(corpus, model, documents=N, context=24)
    calls = []
    real = symmetrise._OneBatch.single

    def stops(self, *args):
        calls.append(args)
        if len(calls) > 40:  # 12 heads, 2 variants: in the second batch of 2
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(symmetrise._OneBatch, "single", stops)
    result = interp.asymmetry(model, text, symmetrise=True, progress=False, batch_size=2)
    assert not result.complete and any("Interrupted" in n for n in result.notices)
    table = result.tables["symmetrise"]
    assert (table["documents"] == 2).all() and set(table["text"]) == {"natural"}
    assert not result.tables["asymmetry"]["loss_delta_symmetrised"].isna().any()


def test_tiny_models_of_all_families_can_be_symmetrised(load, corpus):
    for family in tiny.FAMILIES:
        model, _ = load(family)
        with model.measuring():
            assert all(form.bilinear and form.prenorm for form in scores.form(model)), family

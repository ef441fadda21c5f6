"""interp ffn-keys against planted memories, and against plain transformers with numpy."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import interp
from interp import cli, hooks, pieces
from interp.analyzers.ffn_keys import coefficients, values
from interp.analyzers.ffn_keys.triggers import LayerTriggers, TopDocuments
from interp.errors import InterpError, UsageError
from interp.model import load_model
from interp.text import load_text
from tests import ffn_oracle, oracle, tiny

FAMILIES = ("gpt2", "neox", "neox-serial", "llama")
N = 24


@pytest.fixture(scope="module")
def texts(load):
    """family -> (model, plain model, text of N documents)."""
    made = {}

    def get(family):
        if family not in made:
            model, plain = load(family)
            made[family] = (model, plain, load_text(tiny.corpus(N), model, documents=N))
        return made[family]

    return get


def run(model, text, **options):
    quick = {"mutation_keys": 0, "mixture_positions": 0, "progress": False}
    return interp.ffn_keys(model, text, **(quick | options))


def windows(text):
    return [d.windows[0] for d in text.documents]


# Planted memories ---------------------------------------------------------------------------------

VOCAB = 32
PAIRS = {i: (1 + i, 20 + i) for i in range(10)}  # key -> (its token, what its value promotes)
KEY_OF_SPECIAL = 10
OVERRIDES = {
    "gpt2": {"vocab_size": VOCAB, "tie_word_embeddings": False},
    "neox": {"vocab_size": 40},  # of which 8 are padding
    "llama": {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0},
}


def plant_memory(family, folder, layer):
    """Attention writes nothing; key i answers to one token and promotes another."""
    model = tiny.make_model(family, **OVERRIDES[family])
    d = model.get_input_embeddings().weight.shape[1]
    zero = ("wpe", "c_proj", "dense.", "o_proj", "dense_4h", "down_proj", "c_fc", "dense_h_to_4h")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.fill_(0 if name.endswith("bias") else 1)
            elif any(part in name for part in (*zero, "up_proj", "gate_proj")):
                parameter.zero_()
        for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
            embedding.weight.zero_()
            embedding.weight[:VOCAB, :VOCAB] = torch.eye(VOCAB)
        # Were padding looked at, it would be every value's top token.
        model.get_output_embeddings().weight[VOCAB:] = 5.0
        part = ffn_oracle.mlp(model, layer)
        key_of, value_of = torch.zeros(96, d), torch.zeros(96, d)
        for key, (token, target) in PAIRS.items():
            key_of[key, token] = 2 + 0.1 * key
            value_of[key, target] = 1.0
        key_of[KEY_OF_SPECIAL, 0] = 9.0  # <|endoftext|>
        key_of[KEY_OF_SPECIAL, 5] = 1.0
        value_of[KEY_OF_SPECIAL, 30] = 1.0
        if family == "gpt2":
            n = part.c_proj.weight.shape[0]
            part.c_fc.weight.copy_(key_of[:n].T)
            part.c_proj.weight.copy_(value_of[:n])
        elif family == "neox":
            part.dense_h_to_4h.weight.copy_(key_of)
            part.dense_4h_to_h.weight.copy_(value_of.T)
        else:
            n = part.up_proj.weight.shape[0]
            part.gate_proj.weight.copy_(key_of[:n])
            part.up_proj.weight.copy_(key_of[:n])
            part.down_proj.weight.copy_(value_of[:n].T)
    model.save_pretrained(folder)
    tiny.make_word_tokenizer(VOCAB).save_pretrained(folder)
    return folder


def planted_documents():
    """Each of the ten tokens in three documents, followed by its target there."""
    rng = np.random.default_rng(0)
    documents, where = [], {}
    for round_ in range(3):
        for start in range(0, 10, 2):
            document = [31, *rng.integers(11, 20, 2 + round_).tolist()]
            for key in (start, start + 1):
                token, target = PAIRS[key]
                where.setdefault(key, set()).add((len(documents), len(document)))
                document += [token, target, *rng.integers(11, 20, 2).tolist()]
            documents.append(document)
    return documents, where


@pytest.mark.parametrize("family", list(OVERRIDES))
def test_planted_memories_come_out_exactly(family, tmp_path):
    model = load_model(plant_memory(family, tmp_path / family, layer=1), device="cpu")
    documents, where = planted_documents()
    # Words that the tokenizer does not know become <|endoftext|>, in the middle of a document.
    texts = [tiny.words(d) + (" unknown w5 w24" if i == 0 else "") for i, d in enumerate(documents)]
    text = load_text(texts, model, documents=len(texts))
    result = run(model, text, layer=(1,), top=3)
    keys, triggers = result.tables["keys"], result.tables["triggers"]
    for key, (token, target) in PAIRS.items():
        own = triggers[triggers.key == key]
        if key != 4:  # whose token w5 also stands behind the unknown word
            assert set(zip(own.document, own.position, strict=True)) == where[key]
        assert (own.token_id == token).all() and (own.token == f"w{token}").all()
        assert own.coefficient.min() > 1
        row = keys[keys.key == key].iloc[0]
        for suffix in ("", "_folded"):
            assert row[f"value_top_ids{suffix}"][0] == target
            assert row[f"value_top_tokens{suffix}"][0] == f"w{target}"
            assert row[f"agreement{suffix}"] and row[f"next_token_rank{suffix}"] == 1
    assert keys["value_top_ids"].map(max).max() < VOCAB
    assert keys["value_bottom_ids_folded"].map(max).max() < VOCAB
    special = triggers[triggers.key == KEY_OF_SPECIAL]
    assert 0 not in set(triggers.token_id)
    assert (special.token_id == 5).all() and special.iloc[0].coefficient > 0
    agreed = result.summary["agreement"]["1"]["raw"]
    assert agreed["count"] >= 10 and agreed["p"] < 0.01


@pytest.mark.parametrize("family", list(OVERRIDES))
def test_planted_agreement_is_all_of_the_planted_keys(family, tmp_path):
    model = load_model(plant_memory(family, tmp_path / family, layer=2), device="cpu")
    texts = [tiny.words(d) for d in planted_documents()[0]]
    text = load_text(texts, model, documents=len(texts))
    result = run(model, text, layer=(2,), key=tuple(PAIRS))
    layer = result.tables["ffn_layers"].iloc[0]
    assert (layer.agreement_count, layer.agreement_keys, layer.agreement_rate) == (10, 10, 1.0)
    # Ten different pairs: a shuffle keeps one of them on average.
    assert layer.agreement_null == pytest.approx(0.1, abs=0.01)
    assert layer.agreement_high == 1.0 and layer.agreement_low == pytest.approx(0.025**0.1)


# Against plain transformers -----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_triggers_are_the_oracles(family, texts):
    model, plain, text = texts(family)
    result = run(model, text, layer=("all",), sign="both", top=6)
    triggers, keys = result.tables["triggers"], result.tables["keys"]
    special = text.special_ids
    for layer in range(tiny.N_LAYERS):
        for sign in (1, -1):
            values_, places = ffn_oracle.triggers(plain, layer, windows(text), special, sign)
            mine = triggers[(triggers.layer == layer) & (triggers.sign == sign)]
            order = np.argsort(-sign * values_, axis=0, kind="stable")
            n_keys = values_.shape[1]
            top = order[:6].T  # [key, rank]
            column = np.arange(n_keys)[:, None]
            documents = mine.document.to_numpy().reshape(n_keys, 6)
            position = mine.position.to_numpy().reshape(n_keys, 6)
            got = mine.coefficient.to_numpy().reshape(n_keys, 6)
            np.testing.assert_allclose(got, values_[top, column], rtol=1e-4, atol=1e-5)
            # Ranks of values that float32 cannot tell apart may differ.
            ranked = np.sort(sign * values_, axis=0)[::-1]
            clear = (np.abs(np.diff(ranked, axis=0)) > 1e-4)[:6].T
            sure = clear & np.c_[np.ones(n_keys, bool), clear[:, :-1]]
            if family == "neox" and layer == 0:
                # The MLP reads the token alone: documents with the same token are equal, and in
                # their own order.
                order = np.argsort(-sign * values_.round(4), axis=0, kind="stable")
                assert sign < 0 or (documents == order[:6].T).mean() > 0.99
            else:  # GELU's smallest value is -0.17, which most documents come close to
                assert sure.mean() > 0.9 or (sign < 0 and family != "llama")
            assert (documents == top)[sure].all()
            # A second position may hold almost the same value.
            assert (position == places[top, column])[sure].mean() > 0.995
        every = np.concatenate(
            [
                ffn_oracle.coefficients(plain, layer, w)[oracle.included(w, special)]
                for w in windows(text)
            ]
        )
        pre = np.concatenate(
            [ffn_oracle.pre(plain, layer, w)[oracle.included(w, special)] for w in windows(text)]
        )
        own = keys[keys.layer == layer]
        np.testing.assert_allclose(own.coefficient_mean, every.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(own.coefficient_max, every.max(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(own.coefficient_min, every.min(0), rtol=1e-4, atol=1e-5)
        assert np.abs(own.active_fraction - (pre > 0).mean(0)).max() < 2 / len(pre)
        assert set(result.tables["ffn_layers"].positions) == {len(every)}


@pytest.mark.parametrize("family", FAMILIES)
def test_coefficients_times_values_are_the_ffns_output(family, texts):
    model, plain, text = texts(family)
    with model.measuring():
        assert coefficients.check(model, text, range(tiny.N_LAYERS)) < 1e-5
    for layer in range(tiny.N_LAYERS):
        memory = coefficients.memory(model, layer)
        x = ffn_oracle.mlp_input(plain, layer, windows(text)[0])
        with torch.no_grad():
            expected = ffn_oracle.mlp(plain, layer)(torch.tensor(x[None]).float())[0]
        made = memory.output(torch.tensor(ffn_oracle.of_input(plain, layer, x)))
        assert float((made - expected).abs().max() / expected.abs().max()) < 1e-4
        assert (memory.bias is None) == (family == "llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_read_off_the_unembedding(family, texts):
    model, plain, text = texts(family)
    keys = run(model, text, layer=(1,)).tables["keys"]
    v = ffn_oracle.weights(plain, 1)["out"]
    U = plain.get_output_embeddings().weight.detach().double().numpy()
    norms = {"gpt2": "transformer.ln_f", "llama": "model.norm"}
    norm = plain.get_submodule(norms.get(family, "gpt_neox.final_layer_norm"))
    centred = v if family == "llama" else v - v.mean(1, keepdims=True)
    folded = centred * norm.weight.detach().double().numpy()
    for suffix, directions in (("", v), ("_folded", folded)):
        full = directions @ U.T
        logits = full[:, : tiny.REAL_VOCAB]
        order = np.argsort(-logits, axis=1)
        assert np.stack(keys[f"value_top_ids{suffix}"]).tolist() == order[:, :10].tolist()
        bottom = order[:, ::-1][:, :10]
        assert np.stack(keys[f"value_bottom_ids{suffix}"]).tolist() == bottom.tolist()
        p = np.exp(logits - logits.max(1, keepdims=True))
        np.testing.assert_allclose(
            keys[f"value_max_prob{suffix}"], (p / p.sum(1, keepdims=True)).max(1), rtol=1e-4
        )
        kurtosis = pd.DataFrame(logits.T).kurt().to_numpy()  # with a correction for small samples
        np.testing.assert_allclose(keys[f"value_kurtosis{suffix}"], kurtosis, atol=0.15)
        if family == "neox":  # padding would have been among the largest
            assert (np.argsort(-full, axis=1)[:, :10] >= tiny.REAL_VOCAB).any()
        first = run(model, text, layer=(1,), top=1).tables["triggers"].next_token_id
        for i, token in enumerate(first):
            rank = keys[f"next_token_rank{suffix}"][i]
            if pd.isna(token):
                assert pd.isna(rank) and pd.isna(keys[f"agreement{suffix}"][i])
            else:
                assert rank == 1 + (logits[i] > logits[i, token]).sum()
                assert keys[f"agreement{suffix}"][i] == (order[i, 0] == token)
    np.testing.assert_allclose(keys.value_norm, np.linalg.norm(v, axis=1), rtol=1e-5)


# Properties ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_the_batch_size_changes_nothing(family, texts):
    model, _, text = texts(family)
    # top: fewer than the documents that share a token, which the first layer of a parallel model
    # cannot tell apart.
    sizes = (1, 5, N)
    found = [run(model, text, layer=(0, 2), top=4, batch_size=b).tables["triggers"] for b in sizes]
    for other in found[1:]:
        pd.testing.assert_frame_equal(
            found[0].drop(columns="coefficient"), other.drop(columns="coefficient")
        )
        np.testing.assert_allclose(found[0].coefficient, other.coefficient, rtol=1e-4, atol=1e-5)


def seen(model, text, layer, **options):
    one = LayerTriggers(text, model.cfg.d_mlp, 4, (1, -1))
    with model.measuring():
        coefficients.stream(model, text, {layer: one.see}, 1, pre={layer: one.see_pre}, **options)
    one.finish()
    return one


def test_merged_shards_are_one_pass(texts):
    model, _, text = texts("neox")
    whole = seen(model, text, 1)
    for split in (
        [list(range(7)), list(range(7, N))],
        [list(range(1, N, 2)), list(range(0, N, 2))],
    ):
        first, second = (seen(model, text.subset(part), 1) for part in split)
        first.merge(second)
        for sign in (1, -1):
            for a, b in zip(first.top[sign].compute(), whole.top[sign].compute(), strict=True):
                assert torch.equal(a, b)
        torch.testing.assert_close(first.mean(), whole.mean(), rtol=1e-12, atol=1e-15)
        assert torch.equal(first.active(), whole.active())
        assert (first.documents, first.positions) == (whole.documents, whole.positions)
    first = seen(model, text.subset([0, 1]), 1)
    first.merge(seen(model, text.subset([1]), 1))
    with pytest.raises(InterpError, match="twice"):
        first.top[1].compute()


def test_the_first_position_changes_nothing(texts):
    model, _, text = texts("llama")
    before = run(model, text, layer=(1,)).tables

    def enlarge(tensor):
        tensor = tensor.clone()
        tensor[:, 0] *= 100
        return tensor

    with hooks.attached(model, [("mlp_post", 1, enlarge)]):
        # The check of the sum is made on real positions, the first among them: it still holds.
        after = run(model, text, layer=(1,)).tables
    for name in ("keys", "triggers"):
        pd.testing.assert_frame_equal(before[name], after[name])


def test_a_document_counts_once_over_its_windows(load):
    model, plain = load("llama")
    text = load_text(tiny.corpus(N), model, documents=N, context=9, windows=True)
    assert max(len(d.windows) for d in text.documents) > 3
    result = run(model, text, layer=(1,), top=N, batch_size=4)
    best = np.empty((N, model.cfg.d_mlp))
    where = {}
    for i, document in enumerate(text.documents):
        per_window = [
            ffn_oracle.triggers(plain, 1, [w], text.special_ids) for w in document.windows
        ]
        stacked = np.concatenate([v for v, _ in per_window])
        best[i] = stacked.max(0)
        where[i] = stacked.argmax(0), np.concatenate([p for _, p in per_window])
    triggers = result.tables["triggers"]
    assert not triggers.duplicated(["key", "document"]).any() and len(triggers) == N * best.shape[1]
    got = triggers.pivot(index="document", columns="key", values="coefficient").to_numpy()
    np.testing.assert_allclose(got, best, rtol=1e-4, atol=1e-5)
    window = triggers.pivot(index="document", columns="key", values="window").to_numpy()
    position = triggers.pivot(index="document", columns="key", values="position").to_numpy()
    expected = np.stack([where[i][0] for i in range(N)])
    assert (window == expected).mean() > 0.995
    places = np.stack([where[i][1][where[i][0], np.arange(best.shape[1])] for i in range(N)])
    assert (position == places).mean() > 0.995
    for row in triggers.sample(60, random_state=0).itertuples():
        document = text.documents[row.document]
        assert document.windows[row.window][row.position] == row.token_id
        assert row.prefix + row.following in document.text
    assert result.tables["ffn_layers"].documents[0] == N


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 9),
    st.randoms(),
)
def test_top_documents_of_equal_values_are_the_earlier_ones(column, k, size, random):
    numbers = list(range(len(column)))
    random.shuffle(numbers)
    parts = [TopDocuments(k, 1) for _ in range(2)]
    for i in range(0, len(numbers), size):
        some = torch.tensor(numbers[i : i + size])
        picked = torch.tensor(column, dtype=torch.float32)[some][:, None]
        parts[i % 2].add(picked, some, 7 * some[:, None])
    parts[0].merge(parts[1])
    top = parts[0].compute()
    expected = sorted(range(len(column)), key=lambda n: (-column[n], n))[:k]
    assert top.documents[0, : len(expected)].tolist() == expected
    assert top.places[0, : len(expected)].tolist() == [7 * n for n in expected]
    assert (top.documents[0, len(expected) :] == -1).all()


def test_equal_coefficients_of_a_document_are_ranked_by_position(load):
    model, _ = load("gpt2")
    text = load_text(tiny.corpus(4), model, documents=4)
    one = LayerTriggers(text, 2, 4)
    batch = text.batch_of([(i, 0) for i in range(4)])
    values_ = torch.zeros(*batch.tokens.shape, 2)
    values_[:, 0] = 9  # never an included position
    values_[2, 2, 1] = 3
    values_ = values_.masked_fill(~batch.mask[..., None], float("nan"))
    one.see(values_, batch)
    top = one.top[1].compute()
    assert top.places.tolist() == [[1, 1, 1, 1], [2, 1, 1, 1]]
    assert top.documents.tolist() == [[0, 1, 2, 3], [2, 0, 1, 3]]
    assert one.mean().tolist() == [0, 3 / int(batch.included.sum())]
    values_[1, 1, 0] = float("nan")
    with pytest.raises(InterpError, match="not finite"):
        one.see(values_, batch)


def test_the_model_stops_after_the_last_layer_asked(texts):
    model, _, text = texts("neox")
    ran = []
    blocks = model.bridge.blocks
    handles = [
        b.register_forward_pre_hook(lambda *_, i=i: ran.append(i)) for i, b in enumerate(blocks)
    ]
    batch = text.batch_of([(0, 0)])
    with model.measuring():
        whole = model.forward(batch)
        ran.clear()
        coefficients.coefficients(model, batch, [0, 1])
        for handle in handles:
            handle.remove()
        assert ran == [0, 1]
        assert torch.equal(model.forward(batch), whole)
    assert hooks.foreign_hooks(model) == []


# Agreement ----------------------------------------------------------------------------------------


def test_agreement_against_hand_computed_chance():
    top = np.array([3, 3, 3, 4, 5, 6])
    following = np.array([3, 4, 3, 4, 9, -1])
    frequency = np.zeros(10)
    frequency[[3, 4]] = 0.5, 0.1
    found = values.agreement(top, following, frequency, np.random.default_rng(0))
    assert (found.keys, found.count, found.rate) == (5, 3, 0.6)
    # 3 tops and 2 followers are token 3, 1 and 2 are token 4: (3 * 2 + 1 * 2) / 5 pairs.
    assert found.null == pytest.approx(8 / 25, abs=0.01)
    assert found.unigram == pytest.approx((3 * 0.5 + 0.1) / 5)
    # A shuffle reaches 3 of 5 exactly where both 3s meet a 3 and a 4 meets the 4.
    assert found.p == pytest.approx(0.2, abs=0.02)
    assert found.null_99 == 0.6


def test_agreement_without_any_next_token():
    found = values.agreement(
        np.array([1]), np.array([-1]), np.ones(3) / 3, np.random.default_rng(0)
    )
    assert found.keys == 0 and np.isnan(found.rate)


# Text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prefixes_join_to_the_exact_text(family, load):
    model, _ = load(family)
    texts = [
        "  the river\n\n\U0001f98a\U0001f98a gleams, na\u00efvely \u6f22\u5b57 of it.",
        "caf\u00e9\u0301 \u2014 a  <|endoftext|> the </s> \u0928\u092e\u0938\u094d\u0924\u0947",
        *tiny.corpus(4),
    ]
    text = load_text(texts, model, documents=6)
    result = run(model, text, layer=(0, 1, 2), top=6)
    triggers = result.tables["triggers"]
    by_index = {d.index: d for d in text.documents}
    assert len(triggers) == 3 * 6 * model.cfg.d_mlp
    for row in triggers.drop_duplicates(["document", "position"]).itertuples():
        document = by_index[row.document]
        ids = document.windows[0]
        assert document.text.startswith(row.prefix + row.following)
        assert ids[row.position] == row.token_id
        if row.position + 1 < len(ids):
            assert ids[row.position + 1] == row.next_token_id
        elif not document.truncated:
            assert row.next_token_id is pd.NA and row.prefix == document.text
        shown = model.tokenizer.decode([row.token_id])
        assert row.prefix.endswith(shown) or "\ufffd" in shown


@pytest.mark.parametrize("fast", [True, False])
def test_pieces_of_an_emoji(fast, load):
    model, _ = load("llama")
    text = load_text(["a \U0001f98a it", "so it is"], model, documents=2)
    encoder = text.pool.encoder
    if not fast:  # a tokenizer that does not say which characters its tokens cover
        encoder = dataclasses.replace(encoder, tokenizer=_Slow(encoder.tokenizer))
    cut = pieces.cut(encoder, text.documents)[0]
    fox = [
        i for i in range(len(cut.ids)) if pieces.label(encoder.tokenizer, cut.ids[i])[:2] == "\\x"
    ]
    labels = [pieces.label(encoder.tokenizer, cut.ids[i]) for i in fox]
    assert labels == ["\\xf0", "\\x9f", "\\xa6", "\\x8a"]
    assert cut.text == "a \U0001f98a it"
    assert cut.upto(0, fox[-1]) == "a \U0001f98a" and cut.after(fox[-1], 9) == " it"
    for i in range(len(cut.ids)):
        assert cut.upto(0, i) + cut.after(i, 99) == cut.text
    if fast:
        assert cut.upto(0, fox[0]) == "a \U0001f98a"


class _Slow:
    is_fast = False

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *args, **kwargs):
        return self.tokenizer(*args, **kwargs)


# Whole runs ---------------------------------------------------------------------------------------


def test_a_result_is_described_saved_and_read_back(texts, tmp_path):
    model, _, text = texts("gpt2")
    result = run(model, text, top=30)
    assert result.summary["layers"] == [0, 1, 2]  # a tenth, half and nine tenths of three layers
    assert result.summary["triggers_per_key"] == N
    assert any("--top 30 asks for more" in n for n in result.notices)
    assert any(f"{N} documents: triggers" in n for n in result.notices)
    assert result.complete and result.summary["reconstruction_error"] < 1e-5
    folder = result.save(tmp_path / "run")
    read = interp.load_result(folder)
    for name, table in result.tables.items():
        assert read.tables[name].astype(str).equals(table.astype(str))
        assert all(c.description and c.unit for c in read.columns[name].values())


def test_some_keys_only(texts):
    model, _, text = texts("llama")
    whole = run(model, text, layer=(2,), sign="both").tables
    some = run(model, text, layer=(2,), key=(7, 3), sign="both").tables
    for name in ("keys", "triggers"):
        expected = whole[name][whole[name].key.isin([3, 7])].reset_index(drop=True)
        drawn = [c for c in expected if "_null" in c or "beyond" in c]  # for these keys anew
        pd.testing.assert_frame_equal(
            some[name].drop(columns=drawn), expected.drop(columns=drawn), check_categorical=False
        )


def test_documents_that_are_there_twice_count_once(texts):
    model, _, text = texts("gpt2")
    twice = text.subset([*range(N), 0, 3, 3])
    result = run(model, twice, layer=(1,))
    assert any("3 documents are in the text more than once" in n for n in result.notices)
    expected = run(model, text, layer=(1,)).tables["triggers"]
    pd.testing.assert_frame_equal(result.tables["triggers"], expected)


def test_interrupted_runs_keep_what_was_measured(texts, monkeypatch):
    model, _, text = texts("gpt2")
    calls = []
    real = LayerTriggers.see

    def see(self, tensor, batch):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        real(self, tensor, batch)

    monkeypatch.setattr(LayerTriggers, "see", see)
    result = run(model, text, layer=(0, 1), batch_size=4)
    assert not result.complete and result.summary["documents"] == 8
    assert result.tables["ffn_layers"].documents.tolist() == [8, 8]
    expected = run(model, text.subset(range(8)), layer=(0, 1), batch_size=4).tables["triggers"]
    pd.testing.assert_frame_equal(result.tables["triggers"], expected)
    assert hooks.foreign_hooks(model) == []
    calls.clear()
    calls.extend([1] * 4)
    with pytest.raises(KeyboardInterrupt):
        run(model, text, layer=(0, 1), batch_size=4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layer": (3,)}, "layers 0 to 2"),
        ({"layer": (-1,)}, "0 or more"),
        ({"layer": (1, 1)}, "once"),
        ({"layer": ("all", 1)}, "every layer: leave out"),
        ({"layer": 1}, "tuple"),
        ({"key": (56,)}, "keys 0 to 55"),
        ({"top": 0}, "1 or more"),
        ({"sign": "negative"}, "positive or both"),
        ({"layers": (1,)}, "did you mean 'layer'"),
    ],
)
def test_bad_input_is_told(options, said, texts):
    model, _, text = texts("gpt2")
    with pytest.raises(UsageError, match=said):
        run(model, text, **options)


def test_a_model_without_a_dense_ffn_is_refused(texts):
    model, _, text = texts("gpt2")
    experts = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, d_mlp=0))
    with pytest.raises(InterpError, match="mixture of experts"):
        run(experts, text)


def test_a_sum_that_is_not_the_output_is_refused(texts):
    model, _, text = texts("neox")
    with (
        hooks.attached(model, [("mlp_out", 1, lambda x: 1.01 * x)]),
        pytest.raises(InterpError, match="not the FFN's output"),
    ):
        run(model, text, layer=(0, 1))


def test_the_command(checkpoint, tmp_path, capsys):
    data = tmp_path / "words.txt"
    data.write_text("\n\n".join(tiny.corpus(12)))
    folder = tmp_path / "run"
    command = ["ffn-keys", "--model", str(checkpoint("llama")), "--data", str(data)]
    command += ["--layer", "0", "--layer", "2", "--key", "5", "--top", "3", "--sign", "both"]
    assert cli.run([*command, "--out", str(folder), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["summary"]["layers"] == [0, 2]
    assert "12 usable documents, of 1000 asked for" in err
    triggers = interp.load_result(folder).tables["triggers"]
    assert len(triggers) == 2 * 2 * 3 and set(triggers.key) == {5}
    assert cli.run([*command[:5], "--layer", "9", "--out", str(tmp_path / "other")]) == 2
    assert "layers 0 to 2" in capsys.readouterr().err


@pytest.mark.embedded
def test_the_embedded_models_early_keys_share_tokens_and_late_ones_agree_beyond_chance():
    model = interp.load_model()
    text = load_text("news", model, documents=120, context=48)
    keys = tuple(range(0, 1536, 2))
    # The other questions are asked of few positions: they are not looked at here.
    options = {"mutation_keys": 0, "mixture_positions": 4, "sample_documents": 4}
    result = run(model, text, layer=(2, 27), key=keys, **options)
    early, late = (row for _, row in result.tables["ffn_layers"].iterrows())
    assert early.same_last_token > early.same_last_token_null_99
    assert early.same_last_token_beyond_99 > 10 * early.same_last_token_chance_99
    assert late.agreement_keys > 700
    for suffix in ("", "_folded"):
        assert late[f"agreement_rate{suffix}"] > late[f"agreement_null_99{suffix}"]
    assert result.summary["reconstruction_error"] < 1e-4

"""The fixtures keep their own promises, measured by plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from tests import oracle, planted, tiny

LOG_VOCAB = np.log(planted.VOCAB)


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(request.param, tmp_path_factory.mktemp("tiny") / request.param)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> PreTrainedModel:
    return oracle.load(checkpoint)


@pytest.fixture(scope="module")
def documents(checkpoint: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return [tokenizer(text).input_ids for text in tiny.corpus(6)]


def special_ids(checkpoint: Path) -> set[int]:
    return set(AutoTokenizer.from_pretrained(checkpoint).all_special_ids)


# --- tiny checkpoints --------------------------------------------------------------------------


def test_architecture(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    family = checkpoint.name
    assert config.num_hidden_layers == tiny.N_LAYERS
    if family == "gpt2":
        assert (config.n_head, config.n_embd, config.vocab_size) == (4, 40, tiny.REAL_VOCAB)
        assert config.tie_word_embeddings
    elif family.startswith("neox"):
        assert (config.num_attention_heads, config.hidden_size) == (5, 80)
        assert config.vocab_size == tiny.PADDED_VOCAB
        assert config.rope_parameters["partial_rotary_factor"] == 0.25
        assert config.use_parallel_residual == (family == "neox")
    else:
        assert (config.num_attention_heads, config.num_key_value_heads) == (6, 2)
        assert config.num_attention_heads * config.head_dim != config.hidden_size
        assert config.tie_word_embeddings == (family == "llama-tied")


def test_no_two_sizes_are_equal(model: PreTrainedModel) -> None:
    sizes = [
        oracle.n_layers(model),
        oracle.n_heads(model),
        oracle.d_head(model),
        model.config.hidden_size,
        model.config.vocab_size,
    ]
    assert len(set(sizes)) == len(sizes)


def test_tokenizer(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = 'A pebble — "naïve" 7\n of it.'
    ids = tokenizer(text).input_ids
    assert len(tokenizer) == tiny.REAL_VOCAB
    assert max(ids) < tiny.REAL_VOCAB
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    if checkpoint.name in tiny.BOS_FAMILIES:
        assert tokenizer.convert_tokens_to_ids(["<unk>", "<s>", "</s>"]) == [0, 1, 2]
        assert ids[0] == tokenizer.bos_token_id == 1
        assert ids.count(1) == 1
    else:
        assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
        assert 0 not in ids


def test_weights_leave_no_term_out(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name or ".ln_" in name:
            centre = 0.0 if name.endswith("bias") else 1.0
            assert (parameter - centre).std() > 0.1, name
        elif name.endswith("bias"):
            assert parameter.std() > 0.1, name


def test_losses_and_attention_are_not_uniform(
    model: PreTrainedModel, documents: list[list[int]]
) -> None:
    losses = oracle.document_losses(model, documents)
    assert losses.mean() > np.log(model.config.vocab_size) + 0.5
    assert losses.std() > 0.1
    pattern = oracle.patterns(model, max(documents, key=len))[:, :, -1]
    entropy = -(pattern * np.log(pattern + 1e-30)).sum(-1)
    assert entropy.max() < np.log(pattern.shape[-1]) - 0.8


def test_seed_decides_the_weights(checkpoint: Path) -> None:
    state = torch.get_rng_state()
    first, again, other = (tiny.make_model(checkpoint.name, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    saved = oracle.load(checkpoint).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in first.state_dict().items())


def test_overrides() -> None:
    model = tiny.make_model("llama", num_hidden_layers=2, num_key_value_heads=1)
    assert oracle.n_layers(model) == 2
    assert model.config.num_key_value_heads == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_corpus(seed: int) -> None:
    texts = tiny.corpus(40, seed)
    assert len(set(texts)) == 40
    assert texts == tiny.corpus(40, seed)
    for family in ("gpt2", "llama"):
        tokenizer = tiny.make_tokenizer(family)
        lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
        assert (min(lengths), max(lengths)) == (3, 60)


# --- the oracle against itself and against transformers ------------------------------------------


def test_losses_are_those_of_transformers(
    model: PreTrainedModel, documents: list[list[int]]
) -> None:
    ours = oracle.document_losses(model, documents)
    batches = [torch.tensor([document]) for document in documents]
    theirs = [model(ids, labels=ids).loss.item() for ids in batches]
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
    np.testing.assert_allclose(
        oracle.document_losses(oracle.double(model), documents), ours, atol=1e-5
    )
    tokens = np.array([len(document) - 1 for document in documents])
    np.testing.assert_allclose(
        oracle.token_weighted_loss(model, documents), np.average(ours, weights=tokens)
    )


def test_included_positions() -> None:
    assert oracle.included([5, 6, 0, 7], {0}).tolist() == [False, True, False, True]
    assert oracle.included([1, 6], {0, 1}).tolist() == [False, True]


def test_editing_weights_is_replacing_z(model: PreTrainedModel, documents: list[list[int]]) -> None:
    exact = oracle.double(model)
    before = oracle.document_losses(exact, documents)
    for layer, head in oracle.heads_of(exact):
        edited = oracle.ablated_losses(exact, documents, layer, head)
        assert np.abs(edited - before).max() > 0.003
        hooked = []
        for document in documents:

            def zero(x: torch.Tensor, head: int = head) -> torch.Tensor:
                x = x.clone()
                x.view(*x.shape[:2], oracle.n_heads(exact), -1)[:, :, head] = 0
                return x

            with oracle._z_hook(exact, layer, zero):
                hooked.append(oracle.token_losses(exact, document).mean())
        np.testing.assert_allclose(edited, hooked, atol=1e-10)
    np.testing.assert_array_equal(oracle.document_losses(exact, documents), before)


def test_mean_output_as_a_bias(model: PreTrainedModel, documents: list[list[int]]) -> None:
    exact = oracle.double(model)
    means = oracle.head_means(exact, documents)
    heads = [(0, 1), (2, 3)]
    with_bias = oracle.ablated_with_bias(exact, documents, heads, means=means)
    assert np.abs(with_bias - oracle.ablated_losses(exact, documents, heads)).max() > 1e-3
    # The bias is there at every position, the first one too.
    for document, expected in zip(documents, with_bias, strict=True):

        def mean(x: torch.Tensor, layer: int, head: int) -> torch.Tensor:
            x = x.clone()
            z = x.view(*x.shape[:2], oracle.n_heads(exact), -1)
            z[:, :, head] = torch.from_numpy(means[layer, head])
            return x

        with (
            oracle._z_hook(exact, 0, lambda x: mean(x, 0, 1)),
            oracle._z_hook(exact, 2, lambda x: mean(x, 2, 3)),
        ):
            loss = oracle.token_losses(exact, document).mean()
        np.testing.assert_allclose(loss, expected, atol=1e-10)


def test_means_leave_their_own_document_out(
    checkpoint: Path, model: PreTrainedModel, documents: list[list[int]]
) -> None:
    special = special_ids(checkpoint)
    others = oracle.means_of_others(model, documents, special)
    for i in range(len(documents)):
        rest = documents[:i] + documents[i + 1 :]
        np.testing.assert_allclose(others[i], oracle.head_means(model, rest, special), atol=1e-12)
    rows = [oracle.z(model, d)[:, oracle.included(d, special)] for d in documents]
    np.testing.assert_allclose(
        oracle.head_means(model, documents, special), np.concatenate(rows, axis=1).mean(axis=1)
    )


def test_mean_ablation_touches_included_positions_only(
    checkpoint: Path, model: PreTrainedModel, documents: list[list[int]]
) -> None:
    special = special_ids(checkpoint)
    document = documents[0]
    layer = oracle.n_layers(model) - 1
    own = oracle.z(model, document)
    value = oracle.means_of_others(model, documents, special)[0]
    with oracle.replaced(model, document, [(layer, 2)], value, special):
        changed = oracle.z(model, document)
        loss = oracle.token_losses(model, document).mean()
    # A pre-hook that is registered first runs first: z() sees what `replaced` handed on.
    mask = oracle.included(document, special)
    np.testing.assert_allclose(changed[layer, mask, 2], value[layer, 2][None].repeat(mask.sum(), 0))
    np.testing.assert_array_equal(changed[layer, ~mask], own[layer, ~mask])
    np.testing.assert_array_equal(changed[:layer], own[:layer])
    losses = oracle.mean_ablated_losses(model, documents, layer, 2, special)
    assert losses[0] == loss
    with oracle.replaced(model, document, [(layer, 2)], own, special):
        np.testing.assert_array_equal(oracle.z(model, document), own)


def test_kl(model: PreTrainedModel, documents: list[list[int]]) -> None:
    assert (oracle.kl(model, model, documents) == 0).all()
    without = oracle.edited(model, [(0, 0)])
    values = oracle.kl(model, without, documents)
    assert (values > 0).all()
    clean, other = (torch.log_softmax(oracle.logits(m, documents[0]), -1) for m in (model, without))
    by_torch = torch.nn.functional.kl_div(other[:-1], clean[:-1], reduction="sum", log_target=True)
    np.testing.assert_allclose(values[0], by_torch.item() / (len(documents[0]) - 1))


def test_importance(model: PreTrainedModel, documents: list[list[int]]) -> None:
    exact = oracle.double(model)
    sample = documents[:3]
    fine = oracle.gradients_fd(exact, sample, 1, 2)
    coarse = oracle.gradients_fd(exact, sample, 1, 2, eps=1e-3)
    np.testing.assert_allclose(fine, coarse, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(fine, oracle.gradients_fd(model, sample, 1, 2), atol=1e-12)
    assert oracle.importance_fd(exact, sample, 1, 2) == np.abs(fine).mean()
    everything = oracle.importances_fd(model, sample)
    assert everything[1, 2] == np.abs(fine).mean()
    assert everything.shape == (oracle.n_layers(model), oracle.n_heads(model))
    np.testing.assert_allclose((oracle.normalised(everything) ** 2).sum(axis=1), 1)
    # |sum| <= sum of |.|: importance is at most the positions times importance_token.
    for document in sample:
        bound = oracle.importances_token(model, [document]) * len(document)
        assert (bound >= oracle.importances_fd(model, [document]) - 1e-6).all()


# --- planted models ----------------------------------------------------------------------------


def make(name: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return planted.MAKERS[name](tmp_path_factory.mktemp("planted") / name)


@pytest.fixture(scope="module")
def induction(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make("induction", tmp_path_factory)


@pytest.fixture(scope="module")
def redundant(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make("redundant", tmp_path_factory)


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make("constant", tmp_path_factory)


@pytest.fixture(scope="module")
def harmful(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make("harmful", tmp_path_factory)


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make("lengths", tmp_path_factory)


def others(values: np.ndarray, made: dict[str, Any]) -> np.ndarray:
    """The values [layer, head] of the heads that were not planted."""
    mask = np.ones(values.shape, dtype=bool)
    for head in made["heads"].values():
        mask[head] = False
    return values[mask]


@pytest.mark.parametrize("name", planted.MAKERS)
def test_words_are_ids(name: str, request: pytest.FixtureRequest) -> None:
    made = request.getfixturevalue(name)
    tokenizer = AutoTokenizer.from_pretrained(made["folder"])
    assert [tokenizer(text).input_ids for text in made["texts"]] == made["documents"]
    assert len(tokenizer) == planted.VOCAB
    assert tokenizer.all_special_ids == [0]
    assert all(0 not in document for document in made["documents"])
    assert (made["folder"] / "model.safetensors").stat().st_size < 1e6


def test_induction_losses(induction: dict[str, Any]) -> None:
    facts = induction["facts"]
    assert abs(facts["first_half"] - LOG_VOCAB) < 0.05
    assert facts["second_half"] < 0.3
    assert min(facts["second_half_without"]) > LOG_VOCAB - 0.1


def test_induction_attention(induction: dict[str, Any]) -> None:
    model = oracle.load(induction["folder"])
    for document in induction["documents"][:4]:
        pattern = oracle.patterns(model, document)
        half = len(document) // 2
        previous = pattern[induction["heads"]["previous_token"]]
        assert min(previous[i, i - 1] for i in range(1, len(document))) > 0.9
        found = pattern[induction["heads"]["induction"]]
        after = [found[i, i - half + 1] for i in range(half + 1, len(document))]
        assert min(after) > 0.7
        # Where nothing matches, it rests on the first position.
        assert min(found[i, 0] for i in range(half)) > 0.7


def test_induction_heads_come_out_on_top(induction: dict[str, Any]) -> None:
    facts = induction["facts"]
    importances = oracle.importances_fd(
        oracle.load(induction["folder"]), induction["documents"][:6]
    )
    for values, smallest in (
        (facts["loss_delta"], 1.0),
        (facts["loss_delta_mean"], 1.0),
        (facts["kl"], 0.8),
        (importances, 0.15),
        (oracle.normalised(importances), 0.99),
    ):
        assert min(values[head] for head in induction["heads"].values()) > smallest
        assert np.abs(others(values, induction)).max() < 0.03 * smallest
    rest = [
        head
        for head in oracle.heads_of(oracle.load(induction["folder"]))
        if head not in induction["heads"].values()
    ]
    model = oracle.load(induction["folder"])
    alone = oracle.ablated_losses(model, induction["documents"], rest)
    assert abs((alone - facts["loss"]).mean()) < 0.02


def test_redundant(redundant: dict[str, Any]) -> None:
    facts = redundant["facts"]
    assert np.abs(facts["loss_delta"]).max() < 0.002
    assert np.abs(facts["loss_delta_mean"]).max() < 0.002
    assert facts["joint_delta"] > 3
    importances = oracle.importances_fd(oracle.load(redundant["folder"]), redundant["documents"])
    assert importances.max() < 1e-4


def test_constant(constant: dict[str, Any]) -> None:
    head = constant["heads"]["constant"]
    z = oracle.z(oracle.load(constant["folder"]), constant["documents"][0])[head[0], :, head[1]]
    np.testing.assert_allclose(z, z[:1].repeat(len(z), axis=0), atol=1e-6)
    facts = constant["facts"]
    assert facts["loss_delta"][head] > 1
    assert abs(facts["loss_delta_mean"][head]) < 1e-6
    assert np.abs(others(facts["loss_delta_mean"], constant)).max() > 1e-4
    model = oracle.load(constant["folder"])
    means = oracle.head_means(model, constant["documents"])
    with_bias = oracle.ablated_with_bias(model, constant["documents"], *head, means=means)
    np.testing.assert_allclose(with_bias, facts["loss"], atol=2e-6)


def test_harmful(harmful: dict[str, Any]) -> None:
    facts = harmful["facts"]
    head = harmful["heads"]["harmful"]
    assert facts["loss_delta"][head] < -0.4
    assert facts["loss_delta_mean"][head] < -0.4
    assert facts["loss_delta"][harmful["heads"]["helpful"]] > 3
    assert np.abs(others(facts["loss_delta"], harmful)).max() < 0.01
    model = oracle.load(harmful["folder"])
    without = oracle.ablated_losses(model, harmful["documents"], *head)
    assert (without - facts["loss"]).max() < -0.05


def test_lengths(lengths: dict[str, Any]) -> None:
    assert {len(document) for document in lengths["documents"]} == {3, 60}
    facts = lengths["facts"]
    assert facts["loss_doc"] > facts["loss_token"] + 2
    assert facts["delta_doc"] < -0.2
    assert facts["delta_token"] > 2
    right = facts["importance_doc"]
    assert right > 2 * facts["importance_token_weighted"]
    assert right > 5 * facts["importance_pooled"]
    assert right > 1.1 * facts["importance_abs_of_mean"]

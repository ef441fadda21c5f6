"""Who says a token after a prompt: sums, ablations and planted keys, by plain transformers."""

import copy

import numpy as np
import pytest
import torch

import interp
from interp.analyzers.ffn_keys import lookup
from interp.analyzers.ffn_keys.lens import Lens
from interp.errors import InterpError, UsageError
from interp.model import load_model
from tests import ffn_plain, oracle, tiny

FAMILIES = ("gpt2", "neox", "neox-serial", "llama", "llama-tied")
PROMPT = "the lamp of the river"


@pytest.fixture(scope="module")
def case(load):
    made = {}

    def get(family):
        if family not in made:
            model, plain = load(family)
            asked = lookup.question(model, PROMPT, " a")
            with model.measuring():
                answer = lookup.decompose(model, asked, Lens(model))
            made[family] = model, plain, asked, answer
        return made[family]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_sum_to_the_logit_of_plain_transformers(case, family):
    model, plain, asked, answer = case(family)
    _, y, post, logits = ffn_plain.run(plain, asked.tokens)
    target = asked.target
    assert answer.logit == pytest.approx(float(logits[-1, target]), abs=1e-4)
    parts = answer.contribution.sum() + answer.bias.sum() + answer.rest
    assert parts == pytest.approx(float(logits[-1, target]), abs=1e-4)
    order = logits[-1, : model.cfg.vocab_size]
    assert answer.rank == 1 + int((order > order[target]).sum())
    log_p = torch.log_softmax(order.double(), 0)[target]
    assert answer.log_prob == pytest.approx(float(log_p), abs=1e-4)
    # Each layer's, with the scale of the final norm frozen: what is linear in the stream.
    x = post[-1][-1].double()
    row = ffn_plain.unembed(plain).weight[target].double()
    gain = ffn_plain.final_norm(plain).weight.double()
    if plain.config.model_type == "llama":
        scale, centre = (x.square().mean() + plain.config.rms_norm_eps).sqrt(), 0
    else:
        scale, centre = (x.var(unbiased=False) + 1e-5).sqrt(), 1
    assert answer.scale == pytest.approx(float(scale), rel=1e-5)
    for layer in range(oracle.n_layers(plain)):
        own = y[layer][-1].double()
        direct = float(((own - centre * own.mean()) / scale * gain) @ row)
        assert answer.ffn[layer] == pytest.approx(direct, abs=1e-5)
        assert abs(answer.error[layer]) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_contributions_are_coefficient_times_value(case, family):
    model, plain, asked, answer = case(family)
    c, *_ = ffn_plain.run(plain, asked.tokens)
    layer, key = 1, 7
    value = ffn_plain.values(plain, layer)[key]
    if plain.config.model_type != "llama":
        value = value - value.mean()
    weight = ffn_plain.unembed(plain).weight.double().numpy()[: model.cfg.vocab_size]
    gain = ffn_plain.final_norm(plain).weight.double().numpy()
    adds = float(c[layer][-1, key]) * (weight @ (gain * value)) / answer.scale
    assert answer.contribution[layer, key] == pytest.approx(adds[asked.target], abs=1e-5)
    assert answer.centred[layer, key] == pytest.approx(adds[asked.target] - adds.mean(), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_ablation_is_that_of_plain_transformers(case, family, monkeypatch):
    model, plain, asked, answer = case(family)
    keys = answer.largest(5)
    size = model.cfg.vocab_size
    monkeypatch.setattr(lookup, "LOGIT_BYTES", 3 * 4 * model.cfg.vocab_rows * len(asked.tokens))
    with model.measuring():
        found = lookup.ablate(model, asked, keys)  # three batches
    clean = ffn_plain.run(plain, asked.tokens)[3][-1, :size].double()
    for i, (layer, key) in enumerate(keys):
        zeroed = [(layer, len(asked.tokens) - 1, key)]
        other = ffn_plain.run(plain, asked.tokens, zeroed)[3][-1, :size].double()
        assert found.logit[i] == pytest.approx(float((other - clean)[asked.target]), abs=1e-4)
        said = torch.log_softmax(other, 0) - torch.log_softmax(clean, 0)
        assert found.log_prob[i] == pytest.approx(float(said[asked.target]), abs=1e-4)


def test_largest_are_the_largest(case):
    *_, answer = case("llama")
    keys = answer.largest(10)
    size = np.abs(answer.contribution)
    assert [size[k] for k in keys] == sorted(size.ravel(), reverse=True)[:10]
    assert len(answer.largest(10**6)) == size.size


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_a_planted_key_comes_first_and_its_removal_unsays_it(load, family, tmp_path):
    """A value along the target's direction, in the last layer, is found; removing it undoes it."""
    _, plain = load(family)
    plain = copy.deepcopy(plain)
    layer, key = oracle.n_layers(plain) - 1, 13
    tokenizer = tiny.make_tokenizer(family)
    target = tokenizer(" a", add_special_tokens=False)["input_ids"][0]
    ids = lookup.question(load(family)[0], PROMPT, " a").tokens
    c = float(ffn_plain.run(plain, ids)[0][layer][-1, key])
    gain = ffn_plain.final_norm(plain).weight.detach()
    direction = gain * ffn_plain.unembed(plain).weight[target].detach()
    weight = ffn_plain.down(plain, layer).weight.data
    row = weight[key] if family == "gpt2" else weight[:, key]
    row.copy_(60 / c * direction / direction.norm())
    plain.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = interp.ffn_keys(load_model(tmp_path, device="cpu"), prompt=PROMPT, target=" a")
    first = result.tables["prompt_keys"].iloc[0]
    assert (first["layer"], first["key"]) == (layer, key)
    assert first["contribution"] > 1
    # Above: the bottom tokens where the coefficient is negative.
    end = "top" if c > 0 else "bottom"
    assert first[f"value_{end}_tokens"][0] == " a"
    assert result.summary["prompt"]["says"] == " a" and result.summary["prompt"]["rank"] == 1
    assert first["ablated_log_prob"] < -1


def test_tables_sum_and_save(load, tmp_path):
    model, _ = load("gpt2")
    result = interp.ffn_keys(model, prompt=PROMPT, target=" a", top=6)
    keys, layers = result.tables["prompt_keys"], result.tables["prompt_layers"]
    assert len(keys) == 6 and keys["rank"].tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(layers["keys"] + layers["bias"], layers["ffn"], atol=1e-5)
    np.testing.assert_allclose(layers["raised"] + layers["lowered"], layers["keys"], atol=1e-9)
    said = result.summary["prompt"]
    assert said["ffn"] + said["rest"] == pytest.approx(said["logit"], abs=1e-4)
    again = interp.load_result(result.save(tmp_path / "run"))
    assert again.tables["prompt_keys"].equals(keys)


# Questions


def test_bos_is_the_models_own(load):
    assert lookup.question(load("llama")[0], PROMPT, " a").tokens[0] == 1
    assert lookup.question(load("llama")[0], PROMPT, " a", bos=False).tokens[0] != 1
    assert lookup.question(load("gpt2")[0], PROMPT, " a").tokens[0] != 0


def test_of_several_tokens_the_first_is_taken_and_it_is_said(load):
    model, _ = load("gpt2")
    ids = model.tokenizer(" zebra")["input_ids"]
    assert len(ids) > 1
    asked = lookup.question(model, PROMPT, " zebra")
    assert asked.target == ids[0]
    assert any(f"{len(ids)} tokens" in notice for notice in asked.notices)


def test_a_missing_space_is_hinted_at(load):
    model, _ = load("gpt2")
    (notice,) = lookup.question(model, PROMPT, "a").notices
    assert "no leading space" in notice and '" a"' in notice
    assert lookup.question(model, PROMPT, " a").notices == []
    assert lookup.question(model, PROMPT, ".").notices == []


@pytest.mark.parametrize(("prompt", "target"), [("", " a"), ("the", "")])
def test_empty_questions_are_refused(load, prompt, target):
    with pytest.raises(UsageError, match="some text"):
        lookup.question(load("gpt2")[0], prompt, target)


def test_a_prompt_beyond_the_context_is_refused(load):
    with pytest.raises(InterpError, match=f"takes {tiny.CONTEXT}"):
        lookup.question(load("gpt2")[0], "the " * 80, " a")


@pytest.mark.parametrize("options", [{"prompt": "the"}, {"target": " a"}])
def test_prompt_and_target_come_together(load, options):
    with pytest.raises(UsageError, match="target"):
        interp.ffn_keys(load("gpt2")[0], **options)


def test_without_a_prompt_a_text_is_needed(load):
    with pytest.raises(UsageError, match="needs a text"):
        interp.ffn_keys(load("gpt2")[0], layer=(1,))

"""What load_model states, and what it refuses."""

import json
import shutil
import socket

import numpy as np
import pytest
import torch
import transformers

from interp import hooks, interventions, splice
from interp.errors import InterpError
from interp.model import load_model
from interp.text import load_text
from tests import oracle, tiny
from tests.loading import logits_of, put_weights, refused, weights_of

FACTS = {
    "gpt2": {
        "family": "gpt2",
        "n_heads": 4,
        "n_kv_heads": 4,
        "d_model": 40,
        "d_head": 10,
        "d_mlp": 56,
        "gated": False,
        "parallel": False,
        "rotary_fraction": 0.0,
        "norm": "LN",
        "tied": True,
        "vocab_rows": 300,
    },
    "neox": {
        "family": "gpt_neox",
        "n_heads": 5,
        "n_kv_heads": 5,
        "d_model": 80,
        "d_head": 16,
        "d_mlp": 96,
        "gated": False,
        "parallel": True,
        "rotary_fraction": 0.25,
        "norm": "LN",
        "tied": False,
        "vocab_rows": 384,
    },
    "llama": {
        "family": "llama",
        "n_heads": 6,
        "n_kv_heads": 2,
        "d_model": 60,
        "d_head": 8,
        "d_mlp": 88,
        "gated": True,
        "parallel": False,
        "rotary_fraction": 1.0,
        "norm": "RMS",
        "tied": False,
        "vocab_rows": 300,
    },
}
FACTS["neox-serial"] = FACTS["neox"] | {"parallel": False}
FACTS["llama-tied"] = FACTS["llama"] | {"tied": True}


@pytest.fixture
def copy(checkpoint, tmp_path):
    """family -> a checkpoint folder of one's own, to damage."""

    def make(family="gpt2", name="model"):
        return shutil.copytree(checkpoint(family), tmp_path / name)

    return make


# What a model is


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_facts(load, family):
    model, _ = load(family)
    facts = FACTS[family] | {"n_layers": 3, "vocab_size": 300, "n_ctx": 64, "removed": ()}
    assert vars(model.cfg) == facts
    described = model.describe()
    assert {key: described[key] for key in facts} == facts
    assert described["dtype"] == "float32"
    assert described["device"] == "cpu"
    assert described["name"] == family
    assert described["revision"] is None


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_are_plain_transformers(load, family):
    model, plain = load(family)
    ids = list(range(5, 45))
    gap = (logits_of(model, ids).double() - oracle.logits(plain, ids)).abs().max()
    assert gap < 1e-4
    assert model.logits_are_unembedded


def test_query_heads_read_their_kv_head(load):
    assert [load("llama")[0].kv_head(h) for h in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [load("gpt2")[0].kv_head(h) for h in range(4)] == [0, 1, 2, 3]


def test_weights_are_raw(load):
    model, plain = load("gpt2")
    ours = list(model.bridge.original_model.parameters())
    for weight in plain.parameters():
        assert any(p.shape == weight.shape and torch.equal(p, weight) for p in ours)


def test_the_tokenizer_is_the_checkpoints_own(load, checkpoint):
    for family, starts in (("gpt2", []), ("llama", [1])):
        model, _ = load(family)
        own = transformers.AutoTokenizer.from_pretrained(checkpoint(family))
        assert model.tokenizer("the lamp").input_ids == own("the lamp").input_ids
        assert own("the lamp").input_ids[: len(starts)] == starts
        assert model.tokenizer.pad_token_id == own.pad_token_id


def test_folders_by_any_spelling(checkpoint, tmp_path, monkeypatch):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "my tiny model")
    link = tmp_path / "link"
    link.symlink_to(folder, target_is_directory=True)
    spellings = {folder: "my tiny model", f"{folder}/": "my tiny model", link: "link"}
    for spelling, name in spellings.items():
        model = load_model(spelling, device="cpu")
        assert model.name == name
        assert model.source == str(spelling).rstrip("/")
    monkeypatch.chdir(folder)
    assert load_model(".", device="cpu").name == "my tiny model"


def test_every_network_call_is_noticed(no_network):
    """The fixture itself: without it the next test would prove nothing."""
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("127.0.0.1", 9))
    socket.socket.connect.__closure__[0].cell_contents.clear()


def test_a_local_model_needs_no_network(checkpoint, no_network):
    load_model(checkpoint("neox"), device="cpu")


def test_loading_says_nothing(checkpoint, capfd):
    """No progress bar, warning or log line, for a library user who has switched nothing off."""
    folder = checkpoint("llama")
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err  # what would be there otherwise
    load_model(folder, device="cpu")
    assert capfd.readouterr() == ("", "")


def test_progress_bars_and_logs_are_as_before(checkpoint):
    from transformers.utils import logging

    logging.enable_progress_bar()
    logging.set_verbosity_info()
    try:
        load_model(checkpoint("gpt2"), device="cpu")
        assert logging.is_progress_bar_enabled()
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity_warning()


# The layout of checkpoints as they lie on the hub


def test_a_gpt2_checkpoint_as_the_hub_has_it(copy, load):
    """No `transformer.` prefix, no unembedding, causal masks stored beside the weights."""
    folder = copy("gpt2")
    weights = weights_of(folder)
    old = {k.removeprefix("transformer."): v for k, v in weights.items() if "lm_head" not in k}
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(3)}
    put_weights(folder, old)
    model = load_model(folder, device="cpu")
    assert model.notices == []
    assert torch.equal(logits_of(model, [3, 4, 5]), logits_of(load("gpt2")[0], [3, 4, 5]))


def test_a_pythia_checkpoint_as_the_hub_has_it(copy, load):
    """Half precision, old names in the config, buffers beside the weights."""
    folder = copy("neox")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {k: v.half() for k, v in weights_of(folder).items()}
    for i in range(3):
        at = f"gpt_neox.layers.{i}.attention."
        weights[at + "bias"] = torch.ones(1, 1, 64, 64).tril()
        weights[at + "masked_bias"] = torch.tensor(-1e9)
        weights[at + "rotary_emb.inv_freq"] = torch.ones(2)
    put_weights(folder, weights)
    model = load_model(folder, device="cpu")
    assert model.notices == []
    assert model.dtype == torch.float32
    assert model.cfg == load("neox")[0].cfg
    plain = oracle.load(folder)
    assert (
        logits_of(model, [3, 4, 5]).double() - oracle.logits(plain, [3, 4, 5])
    ).abs().max() < 1e-4


# Other families that the bridge supports

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 88,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# name -> (class, config fields, facts that a guess would miss)
OTHERS = {
    "Qwen2": ({}, {"n_kv_heads": 2, "d_mlp": 88, "gated": True}),
    "Qwen3": ({"hidden_size": 60}, {"d_head": 8, "d_model": 60}),
    "Mistral": ({"sliding_window": 8}, {"n_kv_heads": 2}),
    "Gemma2": (
        {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "sliding_window": 8},
        {"tied": True, "gated": True},
    ),
    "Granite": ({"logits_scaling": 3.0, "residual_multiplier": 0.5}, {"gated": True}),
    "OPT": (
        {"ffn_dim": 88, "word_embed_proj_dim": 48, "pad_token_id": 1},
        {"d_mlp": 88, "n_kv_heads": 6, "rotary_fraction": 0.0, "gated": False},
    ),
    "GPTJ": (
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 6,
            "n_inner": 88,
            "n_positions": 64,
            "rotary_dim": 4,
        },
        {"parallel": True, "rotary_fraction": 0.5, "n_kv_heads": 6},
    ),
    "Phi": (
        {"partial_rotary_factor": 0.5, "num_key_value_heads": 6},
        {"parallel": True, "rotary_fraction": 0.5},
    ),
    "Falcon": ({"ffn_hidden_size": 88}, {"d_mlp": 88, "n_kv_heads": 1, "parallel": True}),
    "Bloom": ({"n_layer": 3, "n_head": 6}, {"d_mlp": 192, "n_kv_heads": 6}),
    "StableLm": ({"partial_rotary_factor": 0.5}, {"rotary_fraction": 0.5, "norm": "LN"}),
    "Mixtral": ({"num_local_experts": 4}, {"d_mlp": 0}),
}


def other(family, folder):
    """A tiny checkpoint of one of OTHERS, with weights that leave no term negligible."""
    fields = {"OPT": SHAPE, "GPTJ": {"vocab_size": 300}, "Bloom": {"vocab_size": 300}}.get(
        family, SHAPE
    )
    fields = dict(fields)
    if family == "Falcon":
        del fields["head_dim"]
    config = getattr(transformers, f"{family}Config")(**(fields | OTHERS[family][0]))
    if family == "Bloom":
        config.hidden_size = 48
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                draw = torch.randn(parameter.shape)
                wide = 1.3 / parameter.shape[-1] ** 0.5
                parameter.copy_(parameter + 0.25 * draw if parameter.ndim == 1 else wide * draw)
    model.eval().save_pretrained(folder)
    tiny.make_tokenizer("gpt2").save_pretrained(folder)
    return folder


def output_projection(plain, layer):
    """The one linear map of a layer's attention that writes to the residual stream."""
    (blocks,) = [
        m
        for m in plain.modules()
        if isinstance(m, torch.nn.ModuleList) and len(m) == plain.config.num_hidden_layers
    ]
    (found,) = [
        m
        for n, m in blocks[layer].named_modules()
        if n.rsplit(".")[-1] in ("o_proj", "out_proj", "dense") and "att" in n
    ]
    return found


@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family, tmp_path):
    """They load, state their facts, and their losses and head removals are plain transformers'."""
    folder = other(family, tmp_path / family)
    model = load_model(folder, device="cpu")
    facts = {"n_layers": 3, "n_heads": 6, "d_head": 8, "vocab_size": 300} | OTHERS[family][1]
    assert {key: getattr(model.cfg, key) for key in facts} == facts
    assert model.logits_are_unembedded == (family not in ("Gemma2", "Granite"))
    text = load_text(tiny.corpus(6), model, documents=6, context=40)
    ids = [d.windows[0] for d in text.documents]
    counts = np.array([len(d) - 1 for d in ids])
    plain = oracle.load(folder)
    batch = next(iter(text.batches(6)))
    with model.measuring(fused=True):
        clean = splice.run_clean(model, batch)
        expected = oracle.document_losses(plain, ids)
        np.testing.assert_allclose(clean.scores.loss.numpy() / counts, expected, atol=1e-5)
        from_start = not splice.usable(model, text)
        assert from_start == (family == "Bloom")
        for layer, head in ((0, 1), (1, 0), (2, 5)):

            def remove(_module, args, at=slice(8 * head, 8 * head + 8)):
                z = args[0].clone()
                z[..., at] = 0
                return (z, *args[1:])

            edits = interventions.removals([(layer, head)])
            scores = splice.run_edited(model, clean, edits, from_start=from_start)
            handle = output_projection(plain, layer).register_forward_pre_hook(remove)
            removed = oracle.document_losses(plain, ids)
            handle.remove()
            assert np.abs(removed - expected).max() > 0.02
            np.testing.assert_allclose(scores.loss.numpy() / counts, removed, atol=1e-5)


def test_a_model_without_attention(tmp_path):
    config = transformers.MambaConfig(
        vocab_size=300, hidden_size=48, num_hidden_layers=2, state_size=8, bos_token_id=0
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    tiny.make_tokenizer("gpt2").save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu")
    assert (model.cfg.n_heads, model.cfg.n_kv_heads, model.cfg.d_mlp) == (0, 0, 0)
    with pytest.raises(InterpError, match=r"mamba.* has no 'z' in layer 0"):
        hooks.require(model, "z")
    from interp.analyzers.heads import heads

    text = load_text(tiny.corpus(2), model, documents=2, context=16)
    with pytest.raises(InterpError, match="has no 'z'"):
        heads(model, text)


def test_attention_that_the_bridge_does_not_show_per_head(tmp_path):
    """DeepSeek's heads come out of the bridge as twice as many of half the width."""
    fields = {k: v for k, v in SHAPE.items() if k not in ("head_dim", "num_key_value_heads")}
    config = transformers.DeepseekV3Config(
        **fields | {"num_hidden_layers": 1, "first_k_dense_replace": 1, "num_key_value_heads": 6},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    refused("shows the attention output", "6 heads", folder=tmp_path)


def test_layers_with_different_heads(tmp_path):
    config = transformers.Gemma4TextConfig(
        **SHAPE, global_head_dim=16, vocab_size_per_layer_input=300, hidden_size_per_layer_input=4
    )
    transformers.Gemma4ForCausalLM(config).save_pretrained(tmp_path)
    refused("differ in their attention heads", folder=tmp_path)


def test_an_encoder(tmp_path):
    config = transformers.BertConfig(**SHAPE)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "enc")
    refused("'enc' (bert)", "encoder-only", folder=tmp_path / "enc")


def test_an_encoder_decoder(tmp_path):
    config = transformers.T5Config(vocab_size=300, d_model=16, num_layers=1, num_heads=2, d_ff=8)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    refused("'t5' (t5)", "encoder-decoder", folder=tmp_path / "t5")


def test_an_architecture_that_the_bridge_does_not_support(tmp_path):
    config = transformers.BioGptConfig(**SHAPE)
    transformers.BioGptForCausalLM(config).save_pretrained(tmp_path / "bio")
    refused("BioGptForCausalLM", "'bio'", "does not support", folder=tmp_path / "bio")


def test_a_model_that_the_bridge_gets_wrong(checkpoint, monkeypatch):
    """Whatever the bridge returns, it is compared with plain transformers first."""
    from transformer_lens.model_bridge import TransformerBridge

    forward = TransformerBridge.forward
    monkeypatch.setattr(
        TransformerBridge, "forward", lambda *args, **more: forward(*args, **more) * 1.001
    )
    refused("differ from plain transformers", folder=checkpoint("gpt2"))


def test_a_bridge_that_cannot_run(checkpoint, monkeypatch):
    from transformer_lens.model_bridge import TransformerBridge

    def fail(*_args, **_more):
        raise AttributeError("no embed_positions")

    monkeypatch.setattr(TransformerBridge, "forward", fail)
    refused("cannot run 'gpt2'", "no embed_positions", folder=checkpoint("gpt2"))


def test_code_in_a_checkpoint_is_neither_run_nor_asked_about(copy):
    folder = copy("gpt2")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('was run')")
    refused("'model' (mine) needs Python code", "never runs", folder=folder)


# Damage


def test_missing_config(copy, tmp_path):
    folder = copy()
    (folder / "config.json").unlink()
    refused("no config.json", folder=folder)
    (folder / "x.gguf").write_text("")
    refused("Name the file in it", "x.gguf", folder=folder)


def test_damaged_config(copy):
    folder = copy()
    (folder / "config.json").write_text('{"model_type": "gpt2"')
    refused("config of 'model'", folder=folder)


def test_missing_weights(copy):
    folder = copy()
    (folder / "model.safetensors").unlink()
    refused("no weights", folder=folder)


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_weights(copy, keep):
    folder = copy()
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    refused("model.safetensors", "damaged", folder=folder)


def test_shards(checkpoint, tmp_path, load):
    plain = load("llama")[1]
    folder = tmp_path / "sharded"
    plain.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = load_model(folder, device="cpu")
    assert torch.equal(logits_of(model, [3, 4]), logits_of(load("llama")[0], [3, 4]))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    refused(shard.name, "misses", folder=folder)
    (folder / "model.safetensors.index.json").write_text("{")
    refused("index.json", "damaged", folder=folder)
    (folder / "model.safetensors.index.json").unlink()
    refused("index.json", "missing", folder=folder)


def test_a_weight_that_is_missing_is_not_made_up(copy):
    folder = copy("llama")
    weights = weights_of(folder)
    for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        left = {k: v for k, v in weights.items() if k != name}
        put_weights(folder, left)
        refused(name, "incomplete", folder=folder)


def test_a_weight_of_another_shape(copy):
    folder = copy("llama")
    weights = weights_of(folder)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(80, 60)
    put_weights(folder, weights)
    refused("'model'", folder=folder)


def test_tensors_that_nothing_reads_are_told(copy):
    folder = copy("llama")
    weights = weights_of(folder)
    weights["model.layers.3.mlp.up_proj.weight"] = torch.zeros(88, 60)
    put_weights(folder, weights)
    (notice,) = load_model(folder, device="cpu").notices
    assert (
        "1 tensors that its architecture does not use (model.layers.3.mlp.up_proj.weight)" in notice
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite(copy, bad):
    folder = copy("gpt2")
    weights = weights_of(folder)
    weights["transformer.h.2.mlp.c_proj.weight"][3, 7] = bad
    put_weights(folder, weights)
    refused("not finite", folder=folder)


def test_pickles_are_read_only_when_asked(copy, load):
    folder = copy("gpt2")
    torch.save(weights_of(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused("pickle", "allow_pickle=True", folder=folder)
    model = load_model(folder, device="cpu", allow_pickle=True)
    assert torch.equal(logits_of(model, [3, 4]), logits_of(load("gpt2")[0], [3, 4]))


@pytest.mark.parametrize("left", ["", "tokenizer_config.json"])
def test_no_tokenizer(copy, left):
    """transformers would make one that knows a single token."""
    folder = copy("gpt2")
    for file in folder.glob("token*"):
        if file.name != left:
            file.unlink()
    model = load_model(folder, device="cpu")
    assert model.tokenizer is None
    assert len(model.notices) == 1
    assert "tokenizer" in model.notices[0]
    assert model.cfg.vocab_size == 300
    with pytest.raises(InterpError, match="tokenizer"):
        load_text(["a lamp and a river"], model)


# Devices, types, and leaving things as they were


def test_devices(checkpoint):
    wrong = {"cuda:99": "sees . CUDA", "tpu": "Unknown device", "cpu:x": "Unknown device"}
    if not torch.cuda.is_available():
        wrong["cuda"] = "sees 0 CUDA"
    if not torch.backends.mps.is_available():
        wrong["mps"] = "not here"
    for device, words in wrong.items():
        with pytest.raises(InterpError, match=words):
            load_model(checkpoint("gpt2"), device=device)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(load, checkpoint, dtype):
    model = load_model(checkpoint("llama"), device="cpu", dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert {p.dtype for p in model.bridge.original_model.parameters()} == {model.dtype}
    assert model.describe()["dtype"] == dtype
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("llama"), dtype=model.dtype
    )
    with torch.no_grad():
        expected = plain(torch.tensor([[3, 4, 5]])).logits[0]
    ours = logits_of(model, [3, 4, 5])
    assert ours.dtype == model.dtype
    assert (ours - expected).abs().max() < 0.05 * expected.abs().max()


def test_unknown_dtype(checkpoint):
    refused("'int8'", "float32, bfloat16, float16", folder=checkpoint("gpt2"), dtype="int8")


def state(model):
    module = model.bridge.original_model
    return (
        [m.training for m in module.modules()],
        [p.requires_grad for p in module.parameters()],
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        hooks.foreign_hooks(model),
    )


@pytest.mark.parametrize("raised", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_measuring_leaves_everything_as_it_was(checkpoint, mode, raised):
    model = load_model(checkpoint("gpt2"), device="cpu")
    assert not any(m.training for m in model.bridge.original_model.modules())
    module = model.bridge.original_model
    next(module.parameters()).requires_grad_(False)
    for i, part in enumerate(module.modules()):
        part.training = bool(i % 3)
    model.hook_point("blocks.0.attn.hook_z").add_hook(lambda tensor, hook: None)
    with mode():
        before = state(model)
        try:
            with model.measuring():
                assert not torch.is_grad_enabled()
                assert not torch.is_inference_mode_enabled()
                assert not any(m.training for m in model.bridge.modules())
                assert not any(p.requires_grad for p in module.parameters())
                with torch.enable_grad():
                    x = torch.ones(1, requires_grad=True)
                    (x * 2).backward()
                    assert x.grad == 2
                if raised:
                    raise raised
        except (ValueError, KeyboardInterrupt):
            assert raised
        assert state(model) == before


def test_loaded_within_inference_mode(checkpoint):
    with torch.inference_mode():
        model = load_model(checkpoint("gpt2"), device="cpu")
    assert not any(p.is_inference() for p in model.bridge.original_model.parameters())
    from interp.analyzers.heads import heads

    text = load_text(tiny.corpus(2), model, documents=2, context=16)
    assert len(heads(model, text, progress=False).tables["heads"]) == 12


def test_faster_activations_are_the_same_functions():
    from transformers.activations import ACT2FN

    from interp.kernels import SAME_FUNCTION

    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-6, 60.0, -60.0])])
    written_out = ACT2FN["gelu_new"]
    fast = SAME_FUNCTION[type(written_out).__name__]
    assert torch.allclose(fast(x), written_out(x), atol=2e-6, rtol=1e-6)


def test_measuring_uses_them_and_puts_the_old_ones_back(load):
    model, _ = load("gpt2")
    act = [m for m in model.bridge.modules() if type(m).__name__ == "NewGELUActivation"]
    assert act
    with model.measuring():
        assert all("forward" in m.__dict__ for m in act)
    assert not any("forward" in m.__dict__ for m in act)

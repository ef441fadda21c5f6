"""What load_model states, and what it refuses."""

import json
import shutil
import socket

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from interp import hooks, hub, interventions, names, splice
from interp.errors import InterpError
from interp.model import load_model
from interp.text import load_text
from tests import oracle, tiny

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
def no_network(monkeypatch):
    """Any attempt to connect fails the test."""
    attempts = []

    def refuse(self, address):
        attempts.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    yield
    assert not attempts


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of interp's own."""
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def copy(checkpoint, tmp_path):
    """family -> a checkpoint folder of one's own, to damage."""

    def make(family="gpt2", name="model"):
        return shutil.copytree(checkpoint(family), tmp_path / name)

    return make


def weights_of(folder):
    """A copy of a checkpoint's weights: loaded ones are mapped from the file."""
    return {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}


def put_weights(folder, weights):
    (folder / "model.safetensors").unlink()  # never write into a file that may be mapped
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def logits_of(model, ids):
    with model.measuring():
        return model.bridge(torch.tensor([ids]), use_cache=False)[0]


def refused(*words, folder, **options):
    """load_model fails with one short message that holds these words."""
    with pytest.raises(InterpError) as caught:
        load_model(folder, device="cpu", **options)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    return message


# What a model is


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_facts(load, family):
    model, _ = load(family)
    facts = FACTS[family] | {"n_layers": 3, "vocab_size": 300, "n_ctx": 64}
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
    assert (logits_of(model, [3, 4, 5]).double() - oracle.logits(plain, [3, 4, 5])).abs().max() < 1e-4


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
        {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 88, "n_positions": 64, "rotary_dim": 4},
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
    fields = {"OPT": SHAPE, "GPTJ": {"vocab_size": 300}, "Bloom": {"vocab_size": 300}}.get(family, SHAPE)
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
    with model.measuring():
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
    refused("config of 'model'", folder=folder)


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
    assert "1 tensors that its architecture does not use (model.layers.3.mlp.up_proj.weight)" in notice


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


# Names


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gtp2", "'gpt2'"),
        ("pythia70m", "'pythia-70m'"),
        ("smollm2-135", "'smollm2-135m'"),
        ("no such thing at all", "Short names: smollm2-135m, gpt2"),
    ],
)
def test_unknown_name(name, hint, no_network):
    assert hint in refused(f"There is no model {name!r}", folder=name)


def test_a_folder_nearby_is_suggested(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    message = refused(folder=str(tmp_path / "chekpoint"))
    assert f"Did you mean '{tmp_path / 'checkpoint'}'" in message


@pytest.mark.parametrize("name", ["", "  ", "x" * 5000, "~nobody_of_that_name/model", "a\0b"])
def test_names_that_cannot_be(name):
    refused(folder=name)


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "model.bin").write_text("x")
    refused("no .gguf file", folder=tmp_path / "model.bin")


def test_revisions_belong_to_hub_models(checkpoint):
    refused("has no revisions", "step1000", folder=checkpoint("gpt2"), revision="step1000")
    refused("has no revisions", folder="smollm2-135m", revision="main")
    refused("has no revisions", folder=None, revision="main")


def in_hub_cache(cache, repo, source, commit, *refs):
    """Put a checkpoint folder into a hub cache, as huggingface_hub lays it out."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    shutil.copytree(source, folder / "snapshots" / commit)
    for ref in refs:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return folder / "snapshots" / commit


@pytest.fixture
def pythia(hub_cache, checkpoint, tmp_path):
    """pythia-70m at two revisions in the hub cache; returns the commits."""
    other_weights = tiny.make_checkpoint("neox", tmp_path / "early", seed=5)
    in_hub_cache(hub_cache, "EleutherAI/pythia-70m", checkpoint("neox"), "a" * 40, "main")
    in_hub_cache(hub_cache, "EleutherAI/pythia-70m", other_weights, "b" * 40, "step1000")
    return "a" * 40, "b" * 40


def test_revisions(pythia, load, no_network):
    main = load_model("pythia-70m", device="cpu")
    early = load_model("pythia-70m", revision="step1000", device="cpu")
    assert (main.revision, early.revision) == pythia
    assert main.source == early.source == "EleutherAI/pythia-70m"
    assert main.name == "pythia-70m"
    assert early.describe()["revision"] == "b" * 40
    expected = logits_of(load("neox")[0], [3, 4])
    assert torch.equal(logits_of(main, [3, 4]), expected)
    assert not torch.allclose(logits_of(early, [3, 4]), expected)
    by_commit = load_model("EleutherAI/pythia-70m", revision="b" * 40, device="cpu")
    assert torch.equal(logits_of(by_commit, [3, 4]), logits_of(early, [3, 4]))


def test_a_revision_that_is_not_there(pythia, no_network):
    message = refused("'step7'", "HF_HUB_OFFLINE", folder="pythia-70m", revision="step7")
    assert "main, step1000" in message


def test_offline_never_asks(pythia, monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: pytest.fail("asked the hub"))
    load_model("pythia-70m", device="cpu", offline=True)
    refused("--offline", folder="pythia-160m", offline=True)
    refused("--offline", folder="pythia-70m", revision="step2", offline=True)


def test_a_download_that_was_cut_short_is_not_used(pythia, hub_cache):
    folder = hub_cache / "models--EleutherAI--pythia-70m/snapshots" / pythia[0]
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    refused("not in the local cache", folder="pythia-70m")


def test_pickles_in_the_hub_cache(pythia, hub_cache):
    folder = hub_cache / "models--EleutherAI--pythia-70m/snapshots" / pythia[0]
    torch.save(weights_of(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused("pickle", "--allow-pickle", folder="pythia-70m")
    load_model("pythia-70m", device="cpu", allow_pickle=True)


def test_gpt2_under_its_owners_name(hub_cache, checkpoint):
    in_hub_cache(hub_cache, "openai-community/gpt2", checkpoint("gpt2"), "c" * 40, "main")
    assert load_model("gpt2", device="cpu").source == "openai-community/gpt2"


# Asking the hub


@pytest.fixture
def fresh_hub(monkeypatch):
    """Nothing asked yet, and asking allowed."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked = hub.reachable
    asked.cache_clear()
    yield
    asked.cache_clear()


def test_a_silent_network_costs_a_moment_once(fresh_hub, monkeypatch):
    import time
    import urllib.request

    asked = []

    def hang(*_args, **_more):
        asked.append(1)
        time.sleep(2)

    monkeypatch.setattr(urllib.request, "urlopen", hang)
    began = time.monotonic()
    assert not hub.reachable(timeout=0.2)
    assert not hub.reachable(timeout=0.2)
    assert time.monotonic() - began < 5
    assert len(asked) == 1


@pytest.mark.parametrize(("status", "answers"), [(200, True), (404, True), (503, False), (407, False)])
def test_what_counts_as_an_answer(fresh_hub, monkeypatch, status, answers):
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(hub, "endpoint", lambda: f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        assert hub.reachable() == answers
    finally:
        server.shutdown()
        server.server_close()


def test_an_error_of_the_hub_is_one_line(fresh_hub, hub_cache, monkeypatch):
    from huggingface_hub import HfApi, errors

    monkeypatch.setattr(hub, "reachable", lambda: True)

    def info(error):
        def call(*_args, **_more):
            raise error

        monkeypatch.setattr(HfApi, "model_info", call)

    response = __import__("types").SimpleNamespace(headers={}, request=None, status_code=404)
    info(errors.RevisionNotFoundError("404\nmore", response=response))
    refused("has no revision 'step9'", folder="pythia-70m", revision="step9")
    info(errors.RepositoryNotFoundError("404\nmore", response=response))
    refused("no folder 'some/model'", "knows no model", folder="some/model")
    info(errors.GatedRepoError("403\nmore", response=response))
    refused("gated", "hf auth login", folder="some/model")
    info(OSError("first\nsecond"))
    refused("first", folder="some/model")


@pytest.mark.hub
def test_a_revision_from_the_hub():
    if not hub.reachable():
        pytest.skip("no model hub answers here (HF_HUB_OFFLINE is set in the tests)")
    with pytest.raises(InterpError, match="no revision 'step999999'"):
        load_model("pythia-14m", revision="step999999")


# The model that is taken when none is named


@pytest.fixture
def embedded(monkeypatch, checkpoint):
    """The embedded model's place taken by a tiny one."""
    folder = checkpoint("llama")
    monkeypatch.setattr(names.assets, "fetch", lambda name, offline=False: folder)
    return folder


def test_default_is_gpt2_where_it_is_cached(hub_cache, checkpoint, embedded, no_network):
    in_hub_cache(hub_cache, "gpt2", checkpoint("gpt2"), "d" * 40, "main")
    found = names.resolve(None)
    assert (found.name, found.source, found.revision) == ("gpt2", "gpt2", "d" * 40)
    assert found.notices == []
    assert names.resolve(None, offline=True).name == "gpt2"


def test_default_is_the_embedded_model_without_a_hub(hub_cache, embedded, no_network):
    found = names.resolve(None)
    assert found.name == "smollm2-135m"
    assert (found.bos_token_id, found.bos_default) == (0, True)
    (notice,) = found.notices
    assert "no model hub answered" in notice
    assert "embedded smollm2-135m (instruct-tuned, 4-bit weights dequantised)" in notice
    (notice,) = names.resolve(None, offline=True).notices
    assert "--offline" in notice


def test_default_is_fetched_where_the_hub_answers(hub_cache, checkpoint, embedded, monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(hub, "snapshot", lambda repo: (checkpoint("gpt2"), "e" * 40))
    assert names.resolve(None).name == "gpt2"


def test_default_when_the_hub_answers_but_does_not_deliver(hub_cache, embedded, monkeypatch):
    def fail(repo):
        raise InterpError("Fetching 'gpt2' failed: 401.")

    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(hub, "snapshot", fail)
    found = names.resolve(None)
    assert found.name == "smollm2-135m"
    assert "Fetching 'gpt2' failed: 401" in found.notices[0]


def test_default_ignores_a_gpt2_that_it_could_not_load(hub_cache, checkpoint, embedded):
    folder = in_hub_cache(hub_cache, "gpt2", checkpoint("gpt2"), "d" * 40, "main")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert names.resolve(None).name == "smollm2-135m"


def test_a_named_model_is_never_replaced(hub_cache, embedded):
    refused("'gpt2' is not in the local cache", folder="gpt2")


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
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=model.dtype)
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


# GGUF


def write_gguf(path, quantised=None, tokenizer=True, bias=False, **extra):
    """A tiny Llama as llama.cpp's converter writes it; returns the plain model of what it holds."""
    with torch.random.fork_rng(devices=[]):
        model = tiny.make_model(
            "llama",
            seed=3,
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            rms_norm_eps=1e-5,
        )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(3)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(300)
    if tokenizer:
        own = tiny.make_tokenizer("gpt2")
        by_id = sorted(own.get_vocab(), key=own.get_vocab().get)
        merges = json.loads(own.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(extra.pop("pre", "gpt-2"))
        writer.add_token_list(by_id)
        writer.add_token_types([3 if t == tiny.END else 1 for t in by_id])
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_add_bos_token(False)
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for i in range(3):
        names |= {f"model.layers.{i}.{a}.weight": f"blk.{i}.{b}.weight" for a, b in parts.items()}
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
            value = weight.numpy().copy()
            if heads:  # llama.cpp rotates neighbours, transformers halves
                value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
            if quantised is not None and value.ndim == 2:
                packed = gguf.quants.quantize(value, quantised)
                writer.add_tensor(names[name], packed, raw_dtype=quantised)
                value = gguf.quants.dequantize(packed, quantised)
            else:
                writer.add_tensor(names[name], value)
            if heads:
                value = value.reshape(heads, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
            weight.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    if bias:
        writer.add_tensor("blk.0.attn_q.bias", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("kind", [None, "Q8_0", "Q4_1"])
def test_gguf(tmp_path, cache, kind, no_network):
    path = tmp_path / "my tiny.gguf"
    plain = write_gguf(path, kind and gguf.GGMLQuantizationType[kind])
    model = load_model(path, device="cpu")
    assert (model.name, model.source, model.dtype) == ("my tiny", str(path), torch.float32)
    assert (model.cfg.n_heads, model.cfg.n_kv_heads, model.cfg.d_mlp) == (4, 2, 96)
    assert model.notices == []
    ids = model.tokenizer("the river and a lamp").input_ids
    assert ids == tiny.make_tokenizer("gpt2")("the river and a lamp").input_ids
    ids = list(range(7, 47))
    gap = (logits_of(model, ids).double() - oracle.logits(plain, ids)).abs().max()
    assert gap < 1e-4
    if kind:
        whole = write_gguf(tmp_path / "other.gguf")
        assert (oracle.logits(whole, ids) - oracle.logits(plain, ids)).abs().max() > 1e-2


def test_gguf_is_converted_once_per_content(tmp_path, cache, monkeypatch, caplog):
    path = tmp_path / "a.gguf"
    write_gguf(path)
    first = load_model(path, device="cpu")
    shutil.copy(path, tmp_path / "b.GGUF")
    from interp import checkpoint as module

    convert = module._convert
    monkeypatch.setattr(module, "_convert", lambda *_args: pytest.fail("converted again"))
    second = load_model(tmp_path / "b.GGUF", device="cpu")
    assert second.name == "b"
    assert torch.equal(logits_of(first, [3, 4]), logits_of(second, [3, 4]))
    (folder,) = (cache / "models").iterdir()
    monkeypatch.setattr(module, "_convert", convert)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"cut short")
    third = load_model(path, device="cpu")
    assert torch.equal(logits_of(first, [3, 4]), logits_of(third, [3, 4]))
    assert len(list((cache / "models").iterdir())) == 1


def test_gguf_damage(tmp_path, cache):
    path = tmp_path / "a.gguf"
    write_gguf(path)
    data = path.read_bytes()
    for keep in (0, 3, 20, 3000, len(data) // 2, len(data) - 64):
        path.write_bytes(data[:keep])
        refused("a.gguf", folder=path)
    path.write_text("just some text")
    refused("not a GGUF file", folder=path)
    noise = bytearray(data)
    noise[4:64] = b"\xff" * 60
    path.write_bytes(noise)
    refused("a.gguf", folder=path)
    assert not (cache / "models").exists() or not list((cache / "models").iterdir())


def test_gguf_with_tensors_that_would_be_dropped(tmp_path, cache):
    write_gguf(tmp_path / "a.gguf", bias=True)
    refused("blk.0.attn_q.bias", folder=tmp_path / "a.gguf")


def test_gguf_with_scaled_positions(tmp_path, cache):
    write_gguf(tmp_path / "a.gguf", llama__rope__scaling__type="yarn")
    refused("rotary", "llama.rope.scaling.type", folder=tmp_path / "a.gguf")


def test_gguf_without_a_tokenizer(tmp_path, cache):
    write_gguf(tmp_path / "a.gguf", tokenizer=False)
    model = load_model(tmp_path / "a.gguf", device="cpu")
    assert model.tokenizer is None
    assert any("tokenizer" in notice for notice in model.notices)


def test_gguf_with_a_tokenizer_that_is_a_guess(tmp_path, cache):
    write_gguf(tmp_path / "a.gguf", pre="tekken")
    for _ in range(2):  # from the cache too
        (notice,) = load_model(tmp_path / "a.gguf", device="cpu").notices
        assert "tekken" in notice

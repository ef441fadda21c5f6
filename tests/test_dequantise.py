"""GGUF files: the right weights, once, or a refusal."""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch

from interp import dequantise
from interp.model import load_model
from tests import oracle, tiny
from tests.loading import logits_of, refused


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
                value = (
                    value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
                )
            if quantised is not None and value.ndim == 2:
                packed = gguf.quants.quantize(value, quantised)
                writer.add_tensor(names[name], packed, raw_dtype=quantised)
                value = gguf.quants.dequantize(packed, quantised)
            else:
                writer.add_tensor(names[name], value)
            if heads:
                value = (
                    value.reshape(heads, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
                )
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
    convert = dequantise._convert
    monkeypatch.setattr(dequantise, "_convert", lambda *_args: pytest.fail("converted again"))
    second = load_model(tmp_path / "b.GGUF", device="cpu")
    assert second.name == "b"
    assert torch.equal(logits_of(first, [3, 4]), logits_of(second, [3, 4]))
    (folder,) = (cache / "models").iterdir()
    monkeypatch.setattr(dequantise, "_convert", convert)
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
    write_gguf(tmp_path / "a.gguf", pre="poro-chat")
    for _ in range(2):  # from the cache too
        (notice,) = load_model(tmp_path / "a.gguf", device="cpu").notices
        assert "poro-chat" in notice

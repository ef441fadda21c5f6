"""The tensors of a GGUF file against the checkpoint that was made of it.

transformers dequantises the file once and interp loads that copy, as plain transformers does; here
the file is read again by the gguf package alone. Llama's files hold the rows of W_Q and W_K in
another order (planes of the rotation side by side), which is undone here in its own words.
"""

from __future__ import annotations

import re

import numpy as np

from interp.doctor.case import Case
from interp.doctor.outcome import Check, Largest, Measured, NotApplicableError

ARCHITECTURE = "llama"
# A tensor of the file -> the checkpoint's, both without ".weight"; N is the layer.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.N.attn_norm": "model.layers.N.input_layernorm",
    "blk.N.ffn_norm": "model.layers.N.post_attention_layernorm",
    "blk.N.attn_q": "model.layers.N.self_attn.q_proj",
    "blk.N.attn_k": "model.layers.N.self_attn.k_proj",
    "blk.N.attn_v": "model.layers.N.self_attn.v_proj",
    "blk.N.attn_output": "model.layers.N.self_attn.o_proj",
    "blk.N.ffn_gate": "model.layers.N.mlp.gate_proj",
    "blk.N.ffn_up": "model.layers.N.mlp.up_proj",
    "blk.N.ffn_down": "model.layers.N.mlp.down_proj",
}


def gguf_tensors(case: Case) -> Measured:
    """Every tensor of the file, dequantised, is the checkpoint's tensor of that meaning."""
    path = case.model.gguf
    if path is None:
        raise NotApplicableError("the checkpoint is no GGUF file")
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    kind = str(reader.fields["general.architecture"].contents())
    if kind != ARCHITECTURE:
        raise NotApplicableError(f"the tensors of {kind} files are not known here")
    made, worst = case.arithmetic, Largest()
    heads = {"attn_q": made.n_heads, "attn_k": made.n_kv_heads}
    weights = case.plain.state_dict()
    for tensor in reader.tensors:
        name = str(tensor.name)
        target = _target(name)
        if target not in weights:
            worst.add(float("inf"), f"{name}: the checkpoint has no such tensor")
            continue
        values = dequantize(tensor.data, tensor.tensor_type)
        part = name.removesuffix(".weight").split(".")[-1]
        if part in heads:
            values = _rows_in_order(values, heads[part])
        own = weights[target].detach().cpu().float().numpy()
        if values.shape != own.shape:
            worst.add(float("inf"), f"{name}: {values.shape}, the checkpoint has {own.shape}")
            continue
        error = float(np.abs(values - own).max()) / max(float(np.abs(own).max()), 1e-12)
        worst.add(error, f"{name}, of {len(reader.tensors)} tensors")
    return worst.measured(case.tolerance, "the file holds no tensors")


def _target(name: str) -> str | None:
    layer = re.search(r"blk\.(\d+)\.", name)
    number = layer[1] if layer else ""
    stem = re.sub(r"blk\.\d+\.", "blk.N.", name.removesuffix(".weight"))
    found = NAMES.get(stem)
    return None if found is None else f"{found.replace('N', number)}.weight"


def _rows_in_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """W [out, in] whose rows alternate between a plane's two axes, with the first axes first."""
    apart = weight.reshape(heads, -1, 2, weight.shape[1])
    return apart.swapaxes(1, 2).reshape(weight.shape)


CHECK = Check(
    "GGUF tensors", "relative", "the checkpoint is what the GGUF file holds", gguf_tensors
)

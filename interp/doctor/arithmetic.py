"""The forward pass written out in float64 numpy, from a checkpoint's own tensors and config.json.

The oracle of `interp doctor`: it shares nothing with TransformerBridge, with transformers' modules
or with interp's reading of weights but the names under which tensors lie in a file. One document at
a time, no padding, no mask but the causal one. A family is a row of FAMILIES; what a config asks
for and this does not do is said by `unsupported`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import erf

Array = np.ndarray


@dataclass(frozen=True)
class Family:
    """Where a family keeps its tensors.

    Names of a layer are below `layers` + its number. qkv: the names of q, k and v, or the one of a
    fused projection, whose outputs are ordered by `fused`: "part head" (all queries, all keys, all
    values) or "head part" (a head's query, key and value together).
    in_out: projections are stored [in, out] instead of [out, in].
    """

    layers: str
    embedding: str
    unembedding: tuple[str, ...]  # names over the years
    final: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    o: str
    up: str
    down: str
    gate: str = ""
    positions: str = ""
    fused: str = ""
    in_out: bool = False
    rms: bool = False


_LLAMA = Family(
    layers="model.layers.",
    embedding="model.embed_tokens.weight",
    unembedding=("lm_head.weight",),
    final="model.norm",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.o_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    gate="mlp.gate_proj",
    rms=True,
)
FAMILIES = {
    "gpt2": Family(
        layers="transformer.h.",
        embedding="transformer.wte.weight",
        positions="transformer.wpe.weight",
        unembedding=("lm_head.weight",),
        final="transformer.ln_f",
        norms=("ln_1", "ln_2"),
        qkv=("attn.c_attn",),
        fused="part head",
        o="attn.c_proj",
        up="mlp.c_fc",
        down="mlp.c_proj",
        in_out=True,
    ),
    "gpt_neox": Family(
        layers="gpt_neox.layers.",
        embedding="gpt_neox.embed_in.weight",
        unembedding=("lm_head.weight", "embed_out.weight"),
        final="gpt_neox.final_layer_norm",
        norms=("input_layernorm", "post_attention_layernorm"),
        qkv=("attention.query_key_value",),
        fused="head part",
        o="attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
}


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
# Spellings of one thing in config.json, over families and over the years.
_NAMES = {
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "head_width": ("head_dim",),
    "eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "activation": ("activation_function", "hidden_act"),
    "theta": ("rope_theta", "rotary_emb_base"),
    "rotated": ("partial_rotary_factor", "rotary_pct"),
    "parallel": ("use_parallel_residual",),
}
_ROPE = ("rope_parameters", "rope_scaling")


def _llama3(frequency: Array, rope: Mapping[str, Any]) -> Array:
    """Slow planes are slowed by `factor`, fast ones kept, those between blended."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = float(rope["original_max_position_embeddings"]) * frequency / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequency * (kept + (1 - kept) / float(rope["factor"]))


_SCALED: Mapping[str, Callable[[Array, Mapping[str, Any]], Array]] = {
    "default": lambda frequency, _: frequency,
    "linear": lambda frequency, rope: frequency / float(rope["factor"]),
    "llama3": _llama3,
}


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of rotary positions beyond their base: {} if nothing."""
    found = [config[n] for n in _ROPE if isinstance(config.get(n), Mapping)]
    return found[0] if found else {}


def _rope_type(config: Mapping[str, Any]) -> str:
    rope = _rope(config)
    return str(rope.get("rope_type", rope.get("type", "default")))


def stated(config: Mapping[str, Any], what: str, default: Any) -> Any:
    """What config.json says of something, under any of its spellings."""
    places = [config, *(config[n] for n in _ROPE if isinstance(config.get(n), Mapping))]
    for place in places:
        for name in _NAMES[what]:
            if place.get(name) is not None:
                return place[name]
    return default


def unsupported(config: Mapping[str, Any], length: int) -> str | None:
    """Why the arithmetic of this config is not written out here; None where it is."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        return f"the arithmetic of {kind} is not written out here ({', '.join(FAMILIES)} are)"
    if _rope_type(config) not in _SCALED:
        return f"scaled rotary positions ({_rope_type(config)}) are not written out here"
    activation = stated(config, "activation", "gelu")
    if activation not in ACTIVATIONS:
        return f"the activation {activation} is not written out here"
    if config.get("use_sliding_window", True) and 0 < (config.get("sliding_window") or 0) < length:
        return "a sliding window shorter than the texts is not written out here"
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(name):
            return f"{name} is not written out here"
    return None


class Arithmetic:
    """A checkpoint's forward pass, step by step.

    Positions of all documents lie one after another, [pos, ...]; `documents` cuts them apart where
    they must not see each other.

    Args:
        config: the checkpoint's config.json.
        tensors: its tensors, as any mapping of name -> what numpy can read as float64.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        self.family = FAMILIES[config["model_type"]]
        self.tensors = tensors
        self.n_layers = int(stated(config, "layers", 0))
        self.n_heads = int(stated(config, "heads", 0))
        self.n_kv_heads = int(stated(config, "kv_heads", self.n_heads))
        width = int(stated(config, "width", 0))
        self.d_head = int(stated(config, "head_width", width // self.n_heads))
        self.eps = float(stated(config, "eps", 1e-6 if self.family.rms else 1e-5))
        self.activation = ACTIVATIONS[stated(config, "activation", "gelu")]
        self.parallel = config["model_type"] == "gpt_neox" and bool(
            stated(config, "parallel", True)
        )
        rotary = not self.family.positions
        share = float(stated(config, "rotated", 0.25 if self.family.fused else 1.0))
        self.rotated = int(self.d_head * share) if rotary else 0
        half = self.rotated // 2
        theta = float(stated(config, "theta", 10_000.0))
        plain = theta ** (-np.arange(half) * 2 / max(1, self.rotated))
        self.frequency = _SCALED[_rope_type(config)](plain, _rope(config))  # radians per position
        self.tied = bool(config.get("tie_word_embeddings", bool(self.family.positions)))
        scaled = config.get("scale_attn_weights", True)
        self.scale = self.d_head**-0.5 if scaled else 1.0

    # Tensors ------------------------------------------------------------------------------------

    def tensor(self, name: str) -> Array | None:
        """A tensor in float64, or None where the checkpoint has none of that name."""
        found = self.tensors.get(name)
        if found is None:
            return None
        array = found.detach().cpu().double().numpy() if hasattr(found, "detach") else found
        return np.asarray(array, dtype=np.float64)

    def _needed(self, name: str) -> Array:
        found = self.tensor(name)
        if found is None:
            raise KeyError(f"the checkpoint has no tensor {name!r}")
        return found

    def name(self, layer: int, part: str) -> str:
        """The full name of a layer's part."""
        return f"{self.family.layers}{layer}.{part}"

    @functools.lru_cache(maxsize=8)  # noqa: B019 (an instance lives for one examination)
    def projection(self, layer: int, part: str) -> tuple[Array, Array]:
        """Weight [in, out] and bias [out] (zeros where there is none) of a projection."""
        weight = self._needed(self.name(layer, part) + ".weight")
        weight = weight if self.family.in_out else weight.T
        bias = self.tensor(self.name(layer, part) + ".bias")
        return weight, np.zeros(weight.shape[1]) if bias is None else bias

    def _apply(self, layer: int, part: str, x: Array) -> Array:
        weight, bias = self.projection(layer, part)
        return x @ weight + bias

    # Steps --------------------------------------------------------------------------------------

    def embedded(self, documents: Sequence[Sequence[int]]) -> Array:
        """[pos, d_model] what enters layer 0."""
        ids = np.concatenate([np.asarray(d) for d in documents])
        out = self._needed(self.family.embedding)[ids]
        if self.family.positions:
            places = np.concatenate([np.arange(len(d)) for d in documents])
            out = out + self._needed(self.family.positions)[places]
        return out

    def norm(self, name: str, x: Array) -> Array:
        """The norm of that full name, of x [..., d_model]."""
        size = np.sqrt(np.square(self._centred(x)).mean(-1, keepdims=True) + self.eps)
        x = self.unscaled(name, x) / size
        bias = self.tensor(name + ".bias")
        return x if bias is None else x + bias

    def unscaled(self, name: str, x: Array) -> Array:
        """What is linear in the norm of that full name: all but its division and its bias."""
        return self._centred(x) * self._needed(name + ".weight")

    def _centred(self, x: Array) -> Array:
        return x if self.family.rms else x - x.mean(-1, keepdims=True)

    def block_norm(self, layer: int, which: int, x: Array) -> Array:
        """The norm before the attention (0) or before the FFN (1)."""
        return self.norm(self.name(layer, self.family.norms[which]), x)

    def qkv(self, layer: int, x: Array) -> tuple[Array, Array, Array]:
        """Queries [pos, head, d_head], keys and values [pos, kv_head, d_head], not rotated."""
        return self._by_head([self._apply(layer, part, x) for part in self.family.qkv])

    def qkv_weights(self, layer: int) -> tuple[Array, Array, Array]:
        """W_Q [head, d_model, d_head], W_K and W_V [kv_head, d_model, d_head], raw."""
        whole = self._by_head([self.projection(layer, part)[0] for part in self.family.qkv])
        q, k, v = (part.swapaxes(0, 1) for part in whole)
        return q, k, v

    def _by_head(self, parts: Sequence[Array]) -> tuple[Array, Array, Array]:
        """[row, head, d_head] of q, k and v, from [row, out] of the family's projections."""
        n, d = self.n_heads, self.d_head
        if not self.family.fused:
            q, k, v = (part.reshape(len(part), -1, d) for part in parts)
        elif self.family.fused == "part head":
            q, k, v = np.moveaxis(parts[0].reshape(-1, 3, n, d), 1, 0)
        else:
            q, k, v = np.moveaxis(parts[0].reshape(-1, n, 3, d), 2, 0)
        return q, k, v

    def turned(self, x: Array) -> Array:
        """x [pos, head, d_head] of one document, its first `rotated` dimensions rotated."""
        if not self.rotated:
            return x
        half = self.rotated // 2
        angle = np.arange(len(x))[:, None, None] * self.frequency
        a, b, rest = x[..., :half], x[..., half : self.rotated], x[..., self.rotated :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def turn(self, offset: int) -> Array:
        """R [d_head, d_head] of an offset i - j: the score of i and j is scale * q_i R k_j."""
        axes = np.broadcast_to(np.eye(self.d_head), (offset + 1, self.d_head, self.d_head))
        return self.turned(axes)[offset]

    def kv_head(self, head: int) -> int:
        """The KV head that a query head reads: consecutive query heads share one."""
        return head * self.n_kv_heads // self.n_heads

    def scores(self, q: Array, k: Array) -> Array:
        """[head, query, key] of one document, before any mask, of all pairs of positions."""
        shared = [self.kv_head(h) for h in range(self.n_heads)]
        q, k = self.turned(q).swapaxes(0, 1), self.turned(k).swapaxes(0, 1)[shared]
        return self.scale * q @ k.swapaxes(1, 2)

    @staticmethod
    def pattern(scores: Array) -> Array:
        """[head, query, key] attention of one document: softmax over keys up to the query."""
        future = np.triu(np.ones(scores.shape[1:], dtype=bool), 1)
        masked = np.where(future, -np.inf, scores)
        raised = np.exp(masked - masked.max(-1, keepdims=True))
        return raised / raised.sum(-1, keepdims=True)

    def attended(self, pattern: Array, v: Array) -> Array:
        """z [pos, head, d_head] of one document."""
        shared = [self.kv_head(h) for h in range(self.n_heads)]
        return (pattern @ v.swapaxes(0, 1)[shared]).swapaxes(0, 1)

    def contributions(self, layer: int, z: Array) -> Array:
        """[pos, head, d_model] what each head adds to the attention's output."""
        weight, _ = self.projection(layer, self.family.o)
        return np.einsum("phd,hdm->phm", z, weight.reshape(self.n_heads, self.d_head, -1))

    def _attention(self, layer: int, z: Array) -> Array:
        return self._apply(layer, self.family.o, z.reshape(len(z), -1))

    def output_bias(self, layer: int) -> Array:
        """[d_model] what the attention's output has besides its heads."""
        return self.projection(layer, self.family.o)[1]

    def ffn_pre(self, layer: int, x: Array) -> Array:
        """[pos, key] what the activation is applied to."""
        return self._apply(layer, self.family.gate or self.family.up, x)

    def coefficients(self, layer: int, x: Array) -> Array:
        """[pos, key] act(pre), or act(gate) * up, of the FFN's input."""
        active = self.activation(self.ffn_pre(layer, x))
        return active * self._apply(layer, self.family.up, x) if self.family.gate else active

    def ffn_output(self, layer: int, coefficients: Array) -> Array:
        """[pos, d_model] sum over keys of coefficient times value, plus bias."""
        return self._apply(layer, self.family.down, coefficients)

    def unembedding(self) -> Array:
        """W_U [vocab, d_model], rows of padding included."""
        tied = (self.family.embedding,) if self.tied else ()
        names = [n for n in (*self.family.unembedding, *tied) if n in self.tensors]
        return self._needed((names or self.family.unembedding)[0])

    def unembedded(self, x: Array) -> Array:
        """[pos, vocab] logits of the final residual stream."""
        return self.norm(self.family.final, x) @ self.unembedding().T

    def logits(
        self,
        documents: Sequence[Sequence[int]],
        scaled: Sequence[tuple[int, int, float]] | None = None,
    ) -> list[Array]:
        """[pos, vocab] per document: all steps, one after another.

        Args:
            documents: token ids.
            scaled: per document (layer, head, factor on that head's z).
        """
        x = self.embedded(documents)
        lengths = [len(d) for d in documents]
        cuts = np.cumsum(lengths)[:-1]
        for layer in range(self.n_layers):
            q, k, v = self.qkv(layer, self.block_norm(layer, 0, x))
            parts = zip(*(np.split(part, cuts) for part in (q, k, v)), strict=True)
            z = np.concatenate(
                [self.attended(self.pattern(self.scores(*qk)), v) for *qk, v in parts]
            )
            for rows, (at, head, factor) in zip(_rows(lengths), scaled or (), strict=False):
                if at == layer:
                    z[rows, head] *= factor
            attention = self._attention(layer, z)
            middle = x if self.parallel else x + attention
            keys = self.coefficients(layer, self.block_norm(layer, 1, middle))
            x = x + attention + self.ffn_output(layer, keys)
        return np.split(self.unembedded(x), cuts)


def _rows(lengths: Sequence[int]) -> list[slice]:
    ends = np.cumsum(lengths).tolist()
    return [slice(end - n, end) for n, end in zip(lengths, ends, strict=True)]

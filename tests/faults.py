"""Faults to plant in a loaded model, each as it has been seen in the field, and in interp itself.

`plant(fault, model, patch)` makes one; `patch` is pytest's monkeypatch, which takes back what is
planted in code. Models that were planted in are not used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from interp import encoding, hooks, interventions, kernels, scores, splice, text
from interp.analyzers.heads.standins import Donors
from interp.model import Model
from tests import tiny

ALL = ("gpt2", "neox", "llama")
GPT2, NEOX, LLAMA = (("gpt2",), ("neox",), ("llama",))
LAYER = 1


@dataclass(frozen=True)
class Fault:
    """A fault, the families that can have it, and the check that names it.

    first: no check before `check` fails. Where not, the fault shows in an earlier one as well.
    only: no other check fails at all.
    note: words of the outcome's note.
    """

    check: str
    families: tuple[str, ...]
    plant: Callable[[Model, Any], object]
    first: bool = True
    note: str = ""
    only: bool = False


def force(thing: Any, name: str, value: Any) -> None:
    """Set an attribute of a bridge component itself, not of the module that it wraps."""
    object.__setattr__(thing, name, value)


def block(model: Model) -> Any:
    return model.bridge.blocks[LAYER]


def own(part: Any) -> Any:
    return part.original_component


def loud(point: HookPoint, factor: float = 1.01) -> None:
    """Let what passes a point be multiplied, with no hook to be seen."""

    class Loud(HookPoint):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    point.__class__ = Loud


def wrapped(thing: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Change what a method of one component returns."""
    before = getattr(thing, name)
    force(thing, name, lambda *args, **kwargs: change(before(*args, **kwargs)))


def changed(parameter: nn.Parameter, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a weight without writing to the file that it may be mapped from."""
    parameter.data = change(parameter.data.clone())


def rolled(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 0)


def set_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        x.view(-1)[0] = value
        return x

    return change


def tiled(x: torch.Tensor, times: int) -> torch.Tensor:
    """KV heads 0, 1, 0, 1, 0, 1 where 0, 0, 0, 1, 1, 1 is meant."""
    return x.repeat(1, times, 1, 1)


# Attention ------------------------------------------------------------------------------------


def tile(model: Model, patch: Any) -> None:
    patch.setattr("transformers.models.llama.modeling_llama.repeat_kv", tiled)


def neighbour_keys(model: Model, patch: Any) -> None:
    attn = block(model).attn
    before = attn._reshape_qkv_to_heads

    def reshape(*args: Any, **kwargs: Any) -> Any:
        q, k, v, *rest = before(*args, **kwargs)
        return (q, k.roll(1, 1), v.roll(1, 1), *rest)

    force(attn, "_reshape_qkv_to_heads", reshape)


def no_scale(model: Model, patch: Any) -> None:
    attn = block(model).attn
    if model.cfg.family == "llama":
        own(attn).scaling = 1.0
        return
    before, factor = attn._apply_reconstruct_attention_mask, math.sqrt(model.cfg.d_head)

    def masked(attn_scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return before(attn_scores=attn_scores * factor, **kwargs)

    force(attn, "_apply_reconstruct_attention_mask", masked)


def rotary_base(model: Model, patch: Any) -> None:
    rotary = own(model.bridge.rotary_emb)
    rotary.inv_freq = rotary.inv_freq**0.9


def mask_off(model: Model, patch: Any) -> None:
    def masked(attn_scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return attn_scores

    force(block(model).attn, "_apply_reconstruct_attention_mask", masked)


def another_scale(model: Model, patch: Any) -> None:
    made = kernels._as_fused

    @contextlib.contextmanager
    def other(original: Any, projection: Any, o: Any) -> Any:
        before = original.scaling
        original.scaling = before * 1.01
        with made(original, projection, o):
            yield
        original.scaling = before

    patch.setattr(kernels, "_as_fused", other)


def scaled_z(model: Model, patch: Any) -> None:
    name = "_pre_output_projection" if model.cfg.family == "llama" else "_reshape_attn_output"
    wrapped(block(model).attn, name, lambda z: z * 0.9)


def head_order(model: Model, patch: Any) -> None:
    """W_O's rows of two heads exchanged."""
    weight, d = own(block(model).attn.o).weight, model.cfg.d_head
    axis = 0 if model.cfg.family == "gpt2" else 1

    def swap(x: torch.Tensor) -> torch.Tensor:
        a, b, rest = x.split([d, d, x.shape[axis] - 2 * d], dim=axis)
        return torch.cat([b, a, rest], axis)

    changed(weight, swap)


def no_bias(*path: str) -> Callable[[Model, Any], None]:
    def plant(model: Model, patch: Any) -> None:
        part = block(model)
        for name in path:
            part = getattr(part, name)
        changed(own(part).bias, torch.zeros_like)

    return plant


# FFN, norms, stream -----------------------------------------------------------------------------


def gate_and_up(model: Model, patch: Any) -> None:
    mlp = block(model).mlp
    gate, up = own(mlp.gate).weight, own(getattr(mlp, "in")).weight
    gate.data, up.data = up.data, gate.data


def other_activation(model: Model, patch: Any) -> None:
    mlp = own(block(model).mlp)
    name = next(n for n in ("act_fn", "act") if hasattr(mlp, n))
    setattr(mlp, name, nn.ReLU())


def folded(model: Model, patch: Any) -> None:
    model.bridge.process_weights(fold_ln=True, center_writing_weights=True)


def unread_fused(model: Model, patch: Any) -> None:
    """The fused projection, of which the bridge computes with copies."""
    changed(own(block(model).attn.qkv).weight, lambda x: 2 * x)


def eps(model: Model, patch: Any) -> None:
    norm = own(block(model).ln2)
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    setattr(norm, name, 10 * getattr(norm, name))
    block(model).ln2.config.eps *= 10  # which the bridge computes GPT-2's norms with


def other_embedding(model: Model, patch: Any) -> None:
    weight = own(model.bridge.embed).weight
    own(model.bridge.embed).weight = nn.Parameter(rolled(weight.data))


def other_unembedding(model: Model, patch: Any) -> None:
    weight = own(model.bridge.unembed).weight
    own(model.bridge.unembed).weight = nn.Parameter(rolled(weight.data))


# Hooks ------------------------------------------------------------------------------------------


def kept_hooks(model: Model, patch: Any) -> None:
    @contextlib.contextmanager
    def attached(model: Any, sites: Any) -> Any:
        for name, layer, function in sites:
            point = hooks.site(model, name, layer)
            point.add_hook(lambda tensor, hook, function=function: function(tensor))
        yield

    patch.setattr(hooks, "attached", attached)


def kept_after_errors(model: Model, patch: Any) -> None:
    before, entered = hooks.attached, []

    @contextlib.contextmanager
    def attached(model: Any, sites: Any) -> Any:
        manager = before(model, sites)
        entered.append(manager)  # or the garbage collector would end it
        manager.__enter__()
        yield
        manager.__exit__(None, None, None)

    patch.setattr(hooks, "attached", attached)


def writing_capture(model: Model, patch: Any) -> None:
    before = hooks.attached

    def attached(model: Any, sites: Any) -> Any:
        def writing(function: Any) -> Any:
            def hook(x: torch.Tensor) -> Any:
                given = function(x)
                return x * (1 + 1e-6) if given is None else given

            return hook

        return before(model, [(n, i, writing(f)) for n, i, f in sites])

    patch.setattr(hooks, "attached", attached)


def silent_site(name: str) -> Callable[[Model, Any], None]:
    def plant(model: Model, patch: Any) -> None:
        patch.setitem(hooks.SITES, "q", (name, hooks.SITES["q"][1]))

    return plant


def twice(model: Model, patch: Any) -> None:
    """The FFN runs twice: its sites fire twice."""
    wrapped_mlp = own(block(model).mlp)
    before = wrapped_mlp.forward
    kind = type(wrapped_mlp)
    run = {"forward": lambda _self, x: (before(x), before(x))[1]}
    wrapped_mlp.__class__ = type(kind.__name__, (kind,), run)


# What interp makes of it --------------------------------------------------------------------------


def in_place_of(module: Any, name: str, change: Callable[[Any], Any]) -> Callable[..., None]:
    """A function of interp whose result is changed."""

    def plant(model: Model, patch: Any) -> None:
        before = getattr(module, name)
        patch.setattr(module, name, lambda *args, **kwargs: change(before(*args, **kwargs)))

    return plant


def forward(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Model, Any], None]:
    def plant(model: Model, patch: Any) -> None:
        before = Model.forward
        patch.setattr(Model, "forward", lambda self, batch: change(before(self, batch)))

    return plant


def only_unwatched(model: Model, patch: Any) -> None:
    """Other logits where no hook looks."""
    before = Model.forward

    def run(self: Model, batch: Any) -> torch.Tensor:
        return before(self, batch) * (1.0 if hooks.foreign_hooks(self) else 1.01)

    patch.setattr(Model, "forward", run)


def facts(**fields: Any) -> Callable[[Model, Any], None]:
    def plant(model: Model, patch: Any) -> None:
        model.cfg = dataclasses.replace(model.cfg, **fields)

    return plant


def other_tokenizer(model: Model, patch: Any) -> None:
    model.tokenizer = tiny.make_tokenizer("gpt2" if model.cfg.family == "llama" else "llama")


def special_strings(model: Model, patch: Any) -> None:
    def tokenised(tokenizer: Any, texts: list[str], **options: Any) -> Any:
        return tokenizer(texts, return_attention_mask=False, verbose=False, **options)

    patch.setattr(encoding, "tokenised", tokenised)


def wrong_bos(model: Model, patch: Any) -> None:
    if model.cfg.family == "llama":  # forgotten
        patch.setattr(encoding, "find_bos", lambda *_: None)
    else:  # one that plain tokenizer(text) does not put there
        patch.setattr(encoding, "find_bos", lambda *_: 0)


def twice_bos(model: Model, patch: Any) -> None:
    before = encoding._plain
    patch.setattr(encoding, "_plain", lambda *a: [[1, *row] for row in before(*a)])


def shifted_targets(model: Model, patch: Any) -> None:
    patch.setattr(text.TokenBatch, "targets", property(lambda self: self.tokens.roll(-2, dims=-1)))


def neighbour_removed(model: Model, patch: Any) -> None:
    n = model.cfg.n_heads
    patch.setattr(
        interventions,
        "removed",
        lambda heads: interventions.replaced([(h + 1) % n for h in heads], 0.0),
    )


def replaced_anywhere(model: Model, patch: Any) -> None:
    before = interventions.replaced
    patch.setattr(interventions, "replaced", lambda heads, value, where=None: before(heads, value))


def stale_prefix(model: Model, patch: Any) -> None:
    before = splice.starting_at

    def starting_at(model: Any, layer: int, kept: list[Any]) -> Any:
        return before(model, layer, [_louder(one) for one in kept])

    patch.setattr(splice, "starting_at", starting_at)


def _louder(output: Any) -> Any:
    return (output[0] * 1.01, *output[1:]) if isinstance(output, tuple) else output * 1.01


def first_included(model: Model, patch: Any) -> None:
    before = text.padded

    def padded(*args: Any) -> Any:
        made = before(*args)
        made.included[:, 0] = True
        return made

    patch.setattr(text, "padded", padded)


def first_counted(model: Model, patch: Any) -> None:
    from interp.analyzers.heads import importance

    before = importance.included_sums
    patch.setattr(importance, "included_sums", lambda z, included: before(z, included | True))


def sdpa_without_scale(model: Model, patch: Any) -> None:
    """Plain transformers itself is wrong."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **(kwargs | {"scaling": 1.0}))

    patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attention)


def one_token_more(model: Model, patch: Any) -> None:
    from interp.analyzers.heads import importance

    before = importance.predicted_counts
    patch.setattr(importance, "predicted_counts", lambda text: before(text) + 1)


# What analyzers read ------------------------------------------------------------------------------


def other_fact(name: str) -> Callable[[Model, Any], None]:
    """A fact that is stated wrongly."""

    def plant(model: Model, patch: Any) -> None:
        value = getattr(model.cfg, name)
        other = {bool: lambda: not value, int: lambda: value - 1, float: lambda: 0.5 * (1 - value)}
        words = {"LN": "RMS", "RMS": "LN"}
        wrong = words[value] if isinstance(value, str) else other[type(value)]()
        model.cfg = dataclasses.replace(model.cfg, **{name: wrong})

    return plant


def heads_read_apart(name: str) -> Callable[[Model, Any], None]:
    """Weights of each head that `interp.scores` hands out as the next head's."""

    def plant(model: Model, patch: Any) -> None:
        before = getattr(scores, name)

        def read(*args: Any) -> Any:
            found = before(*args)
            return (found[0], rolled(found[1])) if isinstance(found, tuple) else rolled(found)

        patch.setattr(scores, name, read)

    return plant


def folding(name: str, change: Callable[[Any], Any]) -> Callable[..., None]:
    """A norm's (gain, whether it centres), read wrongly."""
    return in_place_of(scores, name, lambda found: change(*found))


def angles_off(model: Model, patch: Any) -> None:
    in_place_of(scores, "_angles", lambda found: (1.01 * found[0], found[1]))(model, patch)


def scale_off(model: Model, patch: Any) -> None:
    def off(found: Any) -> Any:
        return None if found is None else dataclasses.replace(found, scale=1.01 * found.scale)

    in_place_of(scores, "_form_of", off)(model, patch)


def own_donor(model: Model, patch: Any) -> None:
    before = Donors.__init__

    def made(self: Donors, *args: Any) -> None:
        before(self, *args)
        self.of = list(range(len(self.of)))

    patch.setattr(Donors, "__init__", made)


def donor_by_place(model: Model, patch: Any) -> None:
    """The next document of the text, whatever the seed says."""
    before = Donors.__init__

    def made(self: Donors, *args: Any) -> None:
        before(self, *args)
        self.of = [(i + 1) % len(self.of) for i in range(len(self.of))]

    patch.setattr(Donors, "__init__", made)


def donor_by_batch(model: Model, patch: Any) -> None:
    """The next document of the batch."""
    before = Donors.z

    def z(self: Donors, batch: Any) -> Any:
        own, rows = self.of, batch.rows.tolist()
        self.of = {row: rows[(i + 1) % len(rows)] for i, row in enumerate(rows)}  # type: ignore[assignment]
        try:
            return before(self, batch)
        finally:
            self.of = own

    patch.setattr(Donors, "z", z)


def donor_positions(model: Model, patch: Any) -> None:
    before = Donors._positions
    patch.setattr(Donors, "_positions", staticmethod(lambda *a: before(*a).roll(1, 1)))


FAULTS: dict[str, Fault] = {
    # those that the field's issue trackers are full of
    "KV heads tiled, not interleaved": Fault("KV mapping", LLAMA, tile),
    "keys and values of the next head": Fault("KV mapping", GPT2 + NEOX, neighbour_keys),
    "gate and up exchanged": Fault("FFN coefficients", LLAMA, gate_and_up),
    "attention scale dropped": Fault(
        "attention scores", ALL, no_scale, note="the scale is another"
    ),
    "wrong rotary base": Fault(
        "attention scores", NEOX + LLAMA, rotary_base, note="the rotation is another"
    ),
    "a NaN weight": Fault(
        "finite weights",
        ALL,
        lambda m, _: changed(own(block(m).mlp.out).weight, set_first(math.nan)),
        note="in the loaded model alone, first",
    ),
    "a hook left over": Fault(
        "leftover hooks",
        ALL,
        lambda m, _: m.hook_point("blocks.1.attn.hook_z").add_hook(lambda z, hook: None),
        note="blocks.1.",
    ),
    "a torch hook left over": Fault(
        "leftover hooks",
        ALL,
        lambda m, _: block(m).mlp.register_forward_hook(lambda *_: None),
        note="blocks.1.mlp",
    ),
    "a replaced forward left over": Fault(
        "leftover hooks",
        ALL,
        lambda m, _: force(block(m), "forward", block(m).forward),
        note="a replaced forward of blocks.1",
    ),
    "eps of a norm": Fault("norms", ALL, eps, note="small input"),
    "query bias dropped": Fault("queries, keys, values", GPT2 + NEOX, no_bias("attn", "q")),
    "value bias dropped": Fault(
        "queries, keys, values", GPT2 + NEOX, no_bias("attn", "v"), note="v of layer 1"
    ),
    "output bias dropped": Fault("head contributions", GPT2 + NEOX, no_bias("attn", "o")),
    "FFN bias dropped": Fault("FFN output", GPT2 + NEOX, no_bias("mlp", "out")),
    "positions shifted": Fault(
        "embedding", GPT2, lambda m, _: changed(own(m.bridge.pos_embed).weight, rolled)
    ),
    "embedding of the next id": Fault("embedding", ALL, other_embedding),
    "attention mask off": Fault("attention pattern", ALL, mask_off, note="to later positions"),
    "z scaled": Fault("head outputs", ALL, scaled_z),
    "rows of W_O exchanged": Fault("head contributions", ALL, head_order),
    "another activation": Fault("FFN coefficients", ALL, other_activation),
    "a value changed": Fault(
        "FFN output", ALL, lambda m, _: changed(own(block(m).mlp.out).weight, set_first(9.0))
    ),
    "the stream scaled": Fault("residual stream", ALL, lambda m, _: loud(block(m).hook_resid_post)),
    "unembedding of the next id": Fault("unembedding", ALL, other_unembedding),
    "weights that overflow": Fault(
        "finite activations",
        ALL,
        lambda m, _: changed(own(block(m).attn.o).weight, lambda w: w * 3e38),
    ),
    "one weight in 16 bit": Fault(
        "dtype and device",
        ALL,
        lambda m, _: changed(own(block(m).mlp.out).weight, lambda w: w.bfloat16()),
    ),
    "weights folded and centred": Fault("raw weights", ALL, folded, False, "folded"),
    "an edit that nothing reads": Fault("raw weights", GPT2 + NEOX, unread_fused),
    "logits that differ where nobody looks": Fault("logits", ALL, only_unwatched),
    "transformers itself wrong": Fault("written-out arithmetic", ALL, sdpa_without_scale),
    # in interp's own reading
    "a site that never fires": Fault("sites", NEOX, silent_site("attn.hook_rot_q")),
    "a site that is not there": Fault("sites", ALL, silent_site("attn.hook_nothing")),
    "a site that fires twice": Fault("sites", ALL, twice, note="fires 2 times"),
    "another tokenizer": Fault("tokenizer round trip", ALL, other_tokenizer),
    "special strings are special tokens": Fault(
        "tokenizer round trip", ALL, special_strings, note="a literal"
    ),
    "BOS against the tokenizer": Fault("BOS policy", ALL, wrong_bos),
    "padded rows taken for words": Fault("vocabulary", NEOX, facts(vocab_size=384)),
    "kv_head tiled": Fault(
        "KV mapping",
        LLAMA,
        lambda m, patch: patch.setattr(Model, "kv_head", lambda self, h: h % self.cfg.n_kv_heads),
        note="kv_head(1)",
    ),
    "targets shifted": Fault("losses", ALL, shifted_targets),
    "KL of other sums": Fault(
        "losses", ALL, in_place_of(splice, "expected", lambda x: x * 1.01), note="KL"
    ),
    "padding seen": Fault("padding", ALL, forward(lambda x: x + x.mean(1, keepdim=True)), False),
    "rows of a batch mixed": Fault(
        "batching", ALL, forward(lambda x: x + x.mean(0, keepdim=True)), False
    ),
    "capture that writes": Fault("capture", ALL, writing_capture),
    "a fused kernel of another scale": Fault("fused attention", ALL, another_scale, only=True),
    "replaced at every position": Fault("empty interventions", ALL, replaced_anywhere),
    "hooks that stay": Fault("hooks leave", ALL, kept_hooks, False),
    "hooks that stay after an error": Fault("hooks leave", ALL, kept_after_errors),
    "the next head removed": Fault("zeroing a head", ALL, neighbour_removed, False),
    "a stale prefix": Fault("spliced suffix", ALL, stale_prefix, False),
    "the first position included": Fault("included positions", ALL, first_included),
    "the first position counted": Fault("included positions", ALL, first_counted, note="mean z"),
    "W_O of the next head": Fault(
        "head contributions", ALL, heads_read_apart("output_weights"), note="W_O of layer"
    ),
    **{
        f"another {name}": Fault("model facts", ALL, other_fact(name), note=f"{name}: ")
        for name in ("norm", "gated", "parallel", "tied", "n_ctx", "d_mlp", "n_layers", "d_head")
    },
    "another share that is rotated": Fault(
        "model facts", ALL, other_fact("rotary_fraction"), note="rotated dimensions"
    ),
    "a head that is said to be cut out": Fault(
        "model facts", ALL, facts(removed=((0, 1),)), note="removed"
    ),
    "W_V of the next head": Fault(
        "weights as read", ALL, heads_read_apart("value_weights"), note="W_V", only=True
    ),
    "W_K of the next head": Fault("weights as read", ALL, heads_read_apart("weights"), note="W_K"),
    "angles of a rotation": Fault(
        "score form", NEOX + LLAMA, angles_off, note="the rotation of layer", only=True
    ),
    "scale of the form": Fault("score form", ALL, scale_off, note="the scale of layer"),
    "a gain left out": Fault(
        "folded norms",
        ALL,
        folding("norm_gain", lambda gain, centres: (torch.ones_like(gain), centres)),
        note="the norm folded in",
        only=True,
    ),
    "centring left out": Fault(
        "folded norms",
        GPT2 + NEOX,
        folding("norm_gain", lambda gain, _: (gain, False)),
        note="the norm folded in",
        only=True,
    ),
    "gains stored minus one": Fault(
        "folded norms",
        ALL,
        folding("final_norm_gain", lambda gain, centres: (1 + gain, centres)),
        note="values, folded",
        only=True,
    ),
    "a document for itself": Fault(
        "resample donors", ALL, own_donor, note="stands in for itself", only=True
    ),
    "donors by place": Fault(
        "resample donors", ALL, donor_by_place, note="in another order", only=True
    ),
    "donors by batch": Fault("resample donors", ALL, donor_by_batch, only=True),
    "positions of donors": Fault("resample donors", ALL, donor_positions, only=True),
    "slopes of one token more": Fault("gradient importance", ALL, one_token_more),
}

"""What a checkpoint says of heads that were cut out of it, and what shapes allow to cut.

A checkpoint carries one extra entry in its config.json:

    "interp_pruned": {"n_heads": 12, "n_kv_heads": 12, "removed": {"3": [1, 4]}, "loader": "interp"}

Heads are numbered as in the unpruned model, everywhere. Torch-free; `pruned` does the cutting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from interp.errors import InterpError

KEY = "interp_pruned"
Head = tuple[int, int]
"""(layer, query head)"""


@dataclass(frozen=True)
class Projection:
    """Where an attention projection keeps its heads.

    name: of the module in the attention.
    kv: it has one block per KV head, else one per query head.
    out: heads lie along its output (q, k, v), else along its input (o).
    parts: stacks of all heads, one after another (3 in GPT-2's fused q, k, v).
    width: d_heads of one head within a stack (3 where q, k and v of a head lie together).
    """

    name: str
    kv: bool = False
    out: bool = True
    parts: int = 1
    width: int = 1


@dataclass(frozen=True)
class Layout:
    """How a family names and shapes its attention.

    bias: the config's flag that gives the output projection a bias ("" where it always has one,
        None where it never can).
    plain: transformers can express fewer heads, as many in every layer, by the config alone.
    """

    layers: str
    attention: str
    projections: tuple[Projection, ...]
    bias: str | None
    plain: bool = False

    @property
    def output(self) -> str:
        """Name of the output projection."""
        return next(p.name for p in self.projections if not p.out)


_LLAMA = (
    Projection("q_proj"),
    Projection("k_proj", kv=True),
    Projection("v_proj", kv=True),
    Projection("o_proj", out=False),
)
LAYOUTS = {
    "gpt2": Layout(
        "transformer.h",
        "attn",
        (Projection("c_attn", parts=3), Projection("c_proj", out=False)),
        bias="",
    ),
    "gpt_neox": Layout(
        "gpt_neox.layers",
        "attention",
        (Projection("query_key_value", width=3), Projection("dense", out=False)),
        bias="attention_bias",
    ),
    "llama": Layout("model.layers", "self_attn", _LLAMA, bias="attention_bias", plain=True),
    "mistral": Layout("model.layers", "self_attn", _LLAMA, bias=None, plain=True),
    "qwen2": Layout("model.layers", "self_attn", _LLAMA, bias=None, plain=True),
}


@dataclass(frozen=True)
class Pruning:
    """Which heads of a model are gone.

    n_heads, n_kv_heads: per layer of the unpruned model.
    removed: layer -> its removed query heads, ascending; layers that lost none are left out.
    plain: transformers loads the checkpoint without help.
    text: how text was tokenised where the tokenizer alone does not say it (see `Model`).
    """

    n_heads: int
    n_kv_heads: int
    removed: Mapping[int, tuple[int, ...]]
    plain: bool = False
    text: Mapping[str, Any] = field(default_factory=dict)

    def kept(self, layer: int) -> list[int]:
        """Query heads that are left in a layer."""
        return [h for h in range(self.n_heads) if h not in self.removed.get(layer, ())]

    def kept_kv(self, layer: int) -> list[int]:
        """KV heads that some query head of the layer still reads."""
        group = self.n_heads // self.n_kv_heads
        return sorted({h // group for h in self.kept(layer)})

    def heads(self) -> list[Head]:
        """The removed heads, ascending."""
        return [(layer, h) for layer, hs in sorted(self.removed.items()) for h in hs]

    def to_json(self) -> dict[str, Any]:
        """The config's entry."""
        return {
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "removed": {str(layer): list(hs) for layer, hs in sorted(self.removed.items())},
            "loader": "transformers" if self.plain else "interp",
            **({"text": dict(self.text)} if self.text else {}),
        }


def of_config(config: Any) -> Pruning | None:
    """What a checkpoint's config says was removed; None for a model that nobody pruned.

    Raises:
        InterpError: the entry is damaged.
    """
    raw = getattr(config, KEY, None)
    if raw is None:
        return None
    try:
        found = Pruning(
            n_heads=int(raw["n_heads"]),
            n_kv_heads=int(raw["n_kv_heads"]),
            removed={int(k): tuple(sorted(map(int, v))) for k, v in raw["removed"].items()},
            plain=raw["loader"] == "transformers",
            text=dict(raw.get("text", {})),
        )
        layers = int(config.num_hidden_layers)
        inside = all(
            0 <= layer < layers and all(0 <= h < found.n_heads for h in hs)
            for layer, hs in found.removed.items()
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InterpError(f"The entry {KEY!r} of the config is damaged: {error!r}.") from error
    if not inside or config.model_type not in LAYOUTS:
        raise InterpError(f"The entry {KEY!r} of the config does not fit its model.")
    return found


def plan(config: Any, heads: Iterable[Head], *, compensate: bool = False) -> Pruning:
    """The pruning that removes these heads from a model of this config, if shapes allow it.

    Args:
        config: the transformers config of the unpruned model.
        heads: which to remove.
        compensate: a constant is to stay in place of what they wrote.

    Raises:
        InterpError: what cannot be expressed, why, and what to do instead.
    """
    kind = config.model_type
    layout = LAYOUTS.get(kind)
    if layout is None or getattr(config, "add_cross_attention", False):
        raise InterpError(
            f"Heads of {kind} models cannot be cut out: interp knows the shapes of "
            f"{', '.join(LAYOUTS)}. Leave out --export to measure without removing."
        )
    if compensate and layout.bias is None:
        raise InterpError(
            f"--compensate needs a bias on the attention's output, which {kind} models cannot "
            "have. Leave it out."
        )
    n, n_layers = int(config.num_attention_heads), int(config.num_hidden_layers)
    n_kv = int(getattr(config, "num_key_value_heads", None) or n)
    removed: dict[int, tuple[int, ...]] = {}
    for layer, head in sorted(set(heads)):
        if not (0 <= layer < n_layers and 0 <= head < n):
            raise InterpError(
                f"Head {layer}.{head} does not exist: the model has {n_layers} layers of {n} "
                "heads, counted from 0."
            )
        removed[layer] = (*removed.get(layer, ()), head)
    found = Pruning(n, n_kv, removed)
    for layer in removed:
        counts = _readers(found, layer)
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{count} of KV head {kv}" for kv, count in counts.items())
            raise InterpError(
                f"Layer {layer} would keep {told}: every KV head must be read by as many query "
                "heads of its layer (or by none). Remove whole KV groups (--unit kv), or equally "
                "many query heads of each."
            )
    shapes = {(len(found.kept(i)), len(found.kept_kv(i))) for i in range(n_layers)}
    plain = layout.plain and len(shapes) == 1 and (0, 0) not in shapes
    return Pruning(n, n_kv, removed, plain)


def _readers(pruning: Pruning, layer: int) -> dict[int, int]:
    """KV head -> how many of the kept query heads read it."""
    group = pruning.n_heads // pruning.n_kv_heads
    counts: dict[int, int] = {}
    for head in pruning.kept(layer):
        counts[head // group] = counts.get(head // group, 0) + 1
    return counts

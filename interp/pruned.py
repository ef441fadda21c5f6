"""Attention heads that are really gone: cut them out, load what was cut, put zeros back.

transformers can say "fewer heads, the same number in every layer, of this size" for Llama and its
like, and loads such a checkpoint itself. It has no word for uneven layers, for a layer without
heads, or for GPT-2 and GPT-NeoX with fewer heads than d_model / d_head. Those load through
`load_pruned`: transformers' own class, whose attention modules are narrowed as the checkpoint's
config says before `from_pretrained` fills them. The forward pass stays transformers' own, but for a
layer without heads, which adds its output bias and nothing else.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from interp.errors import InterpError
from interp.pruning import KEY, LAYOUTS, Layout, Projection, Pruning, of_config


def cut(model: Any, pruning: Pruning) -> None:
    """Narrow a transformers model's attention in place; its config then says what is gone."""
    layout = LAYOUTS[model.config.model_type]
    for layer, _, attention in _attentions(model, layout):
        kept, kv = pruning.kept(layer), pruning.kept_kv(layer)
        if len(kept) == pruning.n_heads:
            continue
        if not kept:
            _remove_all(attention, layout)
            continue
        for p in layout.projections:
            index, of = (kv, pruning.n_kv_heads) if p.kv else (kept, pruning.n_heads)
            _narrow(getattr(attention, p.name), p, index, of)
        # What the attention's forward pass reads besides its weights' shapes.
        if hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups = len(kept) // len(kv)
        if hasattr(attention, "split_size"):
            attention.split_size = len(kept) * attention.head_dim
            attention.num_heads = len(kept)
    config = model.config
    if pruning.plain:
        config.head_dim = _attentions_head_dim(model, layout)
        config.num_attention_heads = len(pruning.kept(0))
        config.num_key_value_heads = len(pruning.kept_kv(0))
    setattr(config, KEY, pruning.to_json())


def compensate(model: Any, biases: Mapping[int, Tensor]) -> None:
    """Add a constant to the attention output of some layers of an unpruned model, in place.

    Args:
        model: a transformers model.
        biases: layer -> [d_model], what its removed heads write on average.
    """
    layout = LAYOUTS[model.config.model_type]
    flag = layout.bias
    if flag and not getattr(model.config, flag):
        setattr(model.config, flag, True)
        for _, _, attention in _attentions(model, layout):
            for p in layout.projections:
                module = getattr(attention, p.name)
                module.bias = nn.Parameter(module.weight.new_zeros(module.out_features))
    for layer, _, attention in _attentions(model, layout):
        if layer in biases:
            bias = getattr(attention, layout.output).bias
            with torch.no_grad():
                bias += biases[layer].to(bias)


def expand(model: Any, pruning: Pruning) -> None:
    """Put zeros where a loaded model's heads were cut out, in place: the same function.

    A removed head then has zero queries, keys, values and output, and all layers have one shape,
    which is what the bridge needs.
    """
    config = model.config
    config.num_attention_heads = pruning.n_heads
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = pruning.n_kv_heads
    layout = LAYOUTS[config.model_type]
    for layer, block, narrow in _attentions(model, layout):
        kept, kv = pruning.kept(layer), pruning.kept_kv(layer)
        if len(kept) == pruning.n_heads:
            continue
        like = next(model.parameters())
        full = _with_heads(type(narrow))(config, layer_idx=layer).to(like.device, like.dtype)
        with torch.no_grad():
            for parameter in full.parameters():
                parameter.zero_()
            for p in layout.projections:
                index, of = (kv, pruning.n_kv_heads) if p.kv else (kept, pruning.n_heads)
                source, target = getattr(narrow, p.name, None), getattr(full, p.name)
                if source is not None:
                    _widen(source, target, p, index, of)
        setattr(block, layout.attention, full.train(narrow.training))


def model_class(config: Any) -> Any:
    """What loads a checkpoint of this config: transformers' own class, narrowed where need be."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    pruning = of_config(config)
    if pruning is None or pruning.plain:
        return AutoModelForCausalLM
    return _narrowed(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def load_pruned(folder: str | os.PathLike[str], **options: Any) -> Any:
    """A checkpoint that `interp heads --export` wrote, as a plain transformers model.

    Needed where layers differ in their heads, or the family has no config for fewer; it also takes
    what transformers loads by itself. `generate`, caches, training and `save_pretrained` work as
    for any model of the family.

    Args:
        folder: the export.
        **options: go to transformers' `from_pretrained` (dtype, device_map, attn_implementation).

    Returns:
        An instance of the family's transformers class, in eval mode.

    Raises:
        InterpError: the folder holds no such checkpoint.
    """
    from transformers import AutoConfig

    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        raise InterpError(f"{str(path)!r} holds no config.json, so it is not a checkpoint folder.")
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if of_config(config) is None:
        raise InterpError(
            f"{str(path)!r} is not a checkpoint that interp pruned (its config has no {KEY!r}): "
            "load it with transformers."
        )
    return model_class(config).from_pretrained(
        path, config=config, local_files_only=True, **options
    )


# Modules ------------------------------------------------------------------------------------------


def _attentions(model: Any, layout: Layout) -> Iterator[tuple[int, Any, Any]]:
    """(layer, block, attention) of every layer."""
    for layer, block in enumerate(model.get_submodule(layout.layers)):
        yield layer, block, getattr(block, layout.attention)


def _attentions_head_dim(model: Any, layout: Layout) -> int:
    return next(int(attention.head_dim) for _, _, attention in _attentions(model, layout))


def _axis(module: nn.Module, p: Projection) -> int:
    """The weight's axis along which heads lie: Conv1D has [in, out], Linear [out, in]."""
    return int(p.out) if isinstance(module, _conv1d()) else int(not p.out)


def _conv1d() -> Any:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def _pick(tensor: Tensor, axis: int, p: Projection, index: list[int], of: int) -> Tensor:
    """Only some heads' entries along an axis that holds `of` heads."""
    width = tensor.shape[axis] // (p.parts * of)
    apart = tensor.detach().unflatten(axis, (p.parts, of, width))
    at = torch.tensor(index, device=tensor.device)
    return apart.index_select(axis + 1, at).flatten(axis, axis + 2)


def _narrow(module: Any, p: Projection, index: list[int], of: int) -> None:
    if not isinstance(module, nn.Linear | _conv1d()):
        raise InterpError(
            f"{p.name!r} is a {type(module).__name__}, which holds no plain weights to cut: load "
            "the model without quantisation."
        )
    axis = _axis(module, p)
    module.weight = nn.Parameter(_pick(module.weight, axis, p, index, of).contiguous())
    if p.out and module.bias is not None:
        module.bias = nn.Parameter(_pick(module.bias, 0, p, index, of).contiguous())
    size = module.weight.shape[axis]
    names = ("out_features", "nf") if p.out else ("in_features", "nx")
    setattr(module, names[isinstance(module, _conv1d())], size)


def _widen(source: Any, target: Any, p: Projection, index: list[int], of: int) -> None:
    """Write a narrow projection's heads into a full one of zeros."""
    if source.bias is not None and not p.out:
        target.bias.copy_(source.bias)
    if not index:  # of a layer without heads only that is left
        return
    axis = _axis(target, p)
    pairs = [(source.weight, target.weight, axis)]
    if p.out and source.bias is not None:
        pairs.append((source.bias, target.bias, 0))
    for few, all_heads, at in pairs:
        width = all_heads.shape[at] // (p.parts * of)
        view = all_heads.unflatten(at, (p.parts, of, width))
        places = torch.tensor(index, device=few.device)
        view.index_copy_(at + 1, places, few.unflatten(at, (p.parts, len(index), width)))


class _OutputBias(nn.Module):
    """What is left of an output projection without inputs."""

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("bias", bias)
        # GPT-2's initialisation asks every attention for one; it is in no checkpoint.
        self.register_buffer("weight", torch.empty(0), persistent=False)


def _remove_all(attention: Any, layout: Layout) -> None:
    """Take a layer's attention away but for the bias of its output."""
    for p in layout.projections:
        module = getattr(attention, p.name)
        delattr(attention, p.name)
        if not p.out:
            setattr(attention, p.name, _OutputBias(module.bias))
    attention.output_name = layout.output
    # A subclass, so that transformers still records its output where it records attention's.
    attention.__class__ = _headless(type(attention))


@functools.cache
def _headless(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (_Headless, kind), {})


def _with_heads(kind: type[Any]) -> type[Any]:
    return kind.__bases__[1] if issubclass(kind, _Headless) else kind


class _Headless:
    """The forward pass of an attention without heads."""

    layer_idx: int
    output_name: str

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The output bias at every position, and attention weights of no heads."""
        from transformers import Cache

        batch, length = hidden_states.shape[:2]
        seen = length
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache):
                empty = hidden_states.new_zeros(batch, 0, length, 1)
                _count_empty(value, self.layer_idx)
                seen = value.update(empty, empty, self.layer_idx)[0].shape[-2]
        out, bias = torch.zeros_like(hidden_states), getattr(self, self.output_name).bias
        return out if bias is None else out + bias, hidden_states.new_zeros(batch, 0, length, seen)


def _count_empty(cache: Any, layer: int) -> None:
    """Let a growing cache count the positions of a layer without heads.

    transformers asks layer 0 how many tokens the cache holds, and its growing layer takes keys
    without elements for none. The other kinds (static, sliding) count for themselves.
    """
    from transformers.cache_utils import DynamicLayer

    while len(cache.layers) <= layer:
        cache.layers.append(cache.layer_class_to_replicate())
    if type(cache.layers[layer]) is DynamicLayer:
        cache.layers[layer] = _counting()()


@functools.cache
def _counting() -> Any:
    from transformers.cache_utils import DynamicLayer

    class Counting(DynamicLayer):
        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            self.device, self.dtype = key_states.device, key_states.dtype
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
            self.is_initialized = True

        def get_seq_length(self) -> int:
            return self.keys.shape[-2] if self.keys is not None else 0

    return Counting


@functools.cache
def _narrowed(base: Any) -> Any:
    """The same transformers class, whose new instances are narrowed as their config says."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        base.__init__(self, config, *args, **kwargs)
        pruning = of_config(config)
        assert pruning is not None
        cut(self, pruning)

    # Its own name and module: what the model saves in turn names transformers' class.
    return type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})

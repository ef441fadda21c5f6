"""One kernel of torch in place of what is written out step by step: the same function, faster.

Two things are: activations (GPT-2's) and, where nobody looks inside, attention. TransformerBridge
computes attention in Python, so that scores and pattern can be hooked, and writes both out in every
pass: a quarter of a pass at 512 tokens on a CPU, three tensors [batch, head, pos, pos] on a GPU.
Here transformers' own attention module runs instead, with torch's fused kernel, its output
projection still being the bridge's: z and everything outside the attention are hooked as always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

# Activation classes of transformers that torch has as one kernel; GPT-2's takes longer than a
# matmul when it is written out (0.19 s against 0.12 s for 512 tokens of GPT-2 small's MLP).
SAME_FUNCTION = {
    "NewGELUActivation": partial(nn.functional.gelu, approximate="tanh"),
}
# Where torch's fused attention is what it says; on mps it has been wrong in several releases.
FUSED_ON = ("cpu", "cuda")
# Ways of the bridge to compute something else, set by whoever wants it.
OTHER_WAYS = ("use_attn_result", "use_split_qkv_input", "use_attn_in")

# Where torch keeps the hooks of a module.
TORCH_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run another forward for the duration of the block.

    Written to the instance's dict, because plain attribute assignment on a bridge component is
    passed on to the module that it wraps, and would stay there.
    """
    before = module.__dict__.get("forward")
    object.__setattr__(module, "forward", forward)
    try:
        yield
    finally:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            object.__setattr__(module, "forward", before)


@contextlib.contextmanager
def fast_activations(module: nn.Module) -> Iterator[None]:
    """Activations that transformers writes out run as torch's kernel of the same function."""
    with contextlib.ExitStack() as stack:
        for part in module.modules():
            kernel = SAME_FUNCTION.get(type(part).__name__)
            if kernel is not None:
                stack.enter_context(replaced_forward(part, kernel))
        yield


def can_fuse(hf_model: nn.Module, device: torch.device) -> bool:
    """Whether transformers says that its own attention of this model can be fused.

    A class says no where the fused kernel would leave something out (a cap on the scores, a sink).
    One that came with a checkpoint may inherit a yes that is not its own.
    """
    own = type(hf_model).__module__.startswith("transformers.models.")
    return own and device.type in FUSED_ON and bool(getattr(hf_model, "_supports_sdpa", False))


def child(module: nn.Module | None, name: str) -> Any:
    """The part of a module that has this name, or None."""
    return dict(module.named_children()).get(name) if module is not None else None


def as_built(bridge: Any) -> list[Any]:
    """What each layer's attention is made of, for `fused_attention` to tell when it is another.

    None for a layer that has none, or one that cannot be fused.
    """
    every = [child(block, "attn") for block in bridge.blocks]
    return [_made_of(attn) if _fusible(attn) else None for attn in every]


def _fusible(attn: Any) -> bool:
    original = getattr(attn, "original_component", None)
    if original is None or _projection(attn) is None:
        return False
    return hasattr(getattr(original, "config", None), "_attn_implementation")


def _made_of(attn: Any) -> Any:
    """Modules, their classes' and their own methods, and settings of transformers' module."""
    named = dict(attn.named_modules())
    own = {
        (name, key): getattr(value, "__func__", value)  # a copy's methods are bound to the copy
        for name, part in named.items()
        for key, value in vars(part).items()
        if callable(value) and not isinstance(value, nn.Module)
    }
    settings = {
        key: value
        for key, value in vars(attn.original_component).items()
        if isinstance(value, int | float | str) and key != "training"
    }
    parts = {name: (part, type(part).forward) for name, part in named.items()}
    return parts, own, settings, len(attn._forward_hooks)


@contextlib.contextmanager
def fused_attention(bridge: Any, built: list[Any]) -> Iterator[None]:
    """Attention runs fused, layer by layer, wherever nothing inside it is looked at.

    Looked at is q, k, v, rotations, scores and pattern: what has a hook of anyone's when the layer
    runs is written out by the bridge as always. So is a layer that is set to one of OTHER_WAYS, one
    with weights that are not those of transformers' module, and one that is not what it was when
    the model was loaded: with another module in it, another forward, or a hook on itself.

    Within the block, weights may be changed (by anything but writing to `.data` in place), and
    hooks come and go; the attention is not to be taken apart or copied.

    Args:
        bridge: the bridged model.
        built: what `as_built` said of it when it was loaded.
    """
    with contextlib.ExitStack() as stack:
        for block, before in zip(bridge.blocks, built, strict=False):
            attn = child(block, "attn")
            if before is not None and attn is not None and _made_of(attn) == before:
                stack.enter_context(replaced_forward(attn, _fused(attn)))
        yield


def _projection(attn: Any) -> str | None:
    """What transformers' module calls its output projection, W_O."""
    o = attn._modules.get("o")
    if o is None:
        return None
    parts = attn.original_component._modules.items()
    return next((name for name, part in parts if part in (o, o.original_component)), None)


def _same_weights(attn: Any, original: nn.Module) -> bool:
    """Whether the bridge's q, k and v hold what transformers' module holds.

    Where that has them in one matrix, the bridge computes with copies, which may have been edited.
    """
    own = {id(p) for p in original.parameters()}
    copies = {name: p for name, p in attn.named_parameters() if id(p) not in own}
    if not copies or not hasattr(attn, "split_qkv_matrix"):
        return not copies
    with torch.device("meta"):  # which draws no random numbers for weights that are replaced
        parts = zip("qkv", attn.split_qkv_matrix(original), strict=True)
    fresh = {
        f"{part}._original_component.{name}": parameter
        for part, linear in parts
        for name, parameter in linear.named_parameters()
    }
    return copies.keys() <= fresh.keys() and all(
        not fresh[name].is_meta and torch.equal(copy, fresh[name]) for name, copy in copies.items()
    )


def _fused(attn: Any) -> Callable[..., Any]:
    """The forward of an attention: transformers' own, fused; the bridge's where it is looked at."""
    original, projection = attn.original_component, _projection(attn)
    written_out = type(attn).forward.__get__(attn)
    seen_by_both = {attn, attn.hook_in, attn.hook_out, *attn.o.modules()}
    inside = [part for part in attn.modules() if part not in seen_by_both]
    places = [(part._parameters, name) for part in attn.modules() for name in part._parameters]
    compared: tuple[Any, bool] = ((), False)

    def same_weights() -> bool:
        """Compared once, and again when a parameter is another one or was written to."""
        nonlocal compared
        now = [_state(parameters[name]) for parameters, name in places]
        if now != compared[0]:
            compared = now, _same_weights(attn, original)
        return compared[1]

    def forward(*args: Any, **kwargs: Any) -> Any:
        hooked = any(getattr(part, kind) for part in inside for kind in TORCH_HOOKS)
        if hooked or _another_way(attn) or not same_weights():
            return written_out(*args, **kwargs)
        if args:
            args = (attn.hook_in(args[0]), *args[1:])
        else:
            kwargs["hidden_states"] = attn.hook_in(kwargs["hidden_states"])
        with _as_fused(original, projection, attn.o):
            out = original(*args, **kwargs)
        return (attn.hook_out(out[0]), *out[1:])

    return forward


def _another_way(attn: Any) -> bool:
    return attn.compatibility_mode or any(getattr(attn.config, way, False) for way in OTHER_WAYS)


def _state(parameter: nn.Parameter | None) -> tuple[int, int, int] | None:
    """Which parameter it is, where it lies, and how often it was written to."""
    if parameter is None:
        return None
    writes = 0 if parameter.is_inference() else parameter._version
    return id(parameter), parameter.data_ptr(), writes


@contextlib.contextmanager
def _as_fused(original: Any, projection: str | None, o: nn.Module) -> Iterator[None]:
    """Let transformers' module run the fused kernel and the bridge's own W_O, which shows z."""
    config, parts = original.config, original._modules
    before = config._attn_implementation, parts[projection]
    config._attn_implementation, parts[projection] = "sdpa", o
    try:
        yield
    finally:
        config._attn_implementation, parts[projection] = before

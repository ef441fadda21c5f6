"""What a bridged model really does, measured on a few tokens before any number is believed.

The bridge's config is filled in from guesses for some architectures (the MLP's width of OPT, the
KV heads of BERT), and splicing depends on things that no config states: that the logits are plain
transformers' logits, that an edit of z reaches the attention's output through W_O, and whether the
MLP reads the attention of its own block. Two forward passes of a few tokens say all of it, and a
third whether attention can be fused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interp import kernels
from interp.errors import CheckError, InterpError
from interp.kernels import child

LENGTH = 12
TOLERANCE = {torch.float32: 1e-4}  # relative to the largest logit
COARSE = 2e-2  # the same for 16-bit weights


Refuse = Callable[[CheckError], None]
"""What is done with a model that fails a check: raise, or take note and go on."""


def refuse(error: CheckError) -> None:
    """No number comes of a model that fails a check."""
    raise error


@dataclass(frozen=True)
class Measured:
    """What the probe saw. None: this model has no such thing, or it could not be told."""

    n_heads: int | None
    d_head: int | None
    n_kv_heads: int | None
    d_mlp: int | None
    gated: bool | None
    parallel: bool | None
    logits_are_unembedded: bool
    fuses: bool  # fused attention gives the same logits and every head's z


@dataclass
class _Seen:
    """Tensors of one pass, by layer."""

    z: dict[int, torch.Tensor] = field(default_factory=dict)
    k: dict[int, torch.Tensor] = field(default_factory=dict)
    attn_out: dict[int, torch.Tensor] = field(default_factory=dict)
    mlp_in: dict[int, torch.Tensor] = field(default_factory=dict)
    mlp_hidden: dict[int, int] = field(default_factory=dict)  # width
    unembedded: torch.Tensor | None = None


def tokens(rows: int, n_ctx: int | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [2, pos]: a full row and one that is padded on the right."""
    length = min(LENGTH, n_ctx or LENGTH)
    ids = torch.arange(2 * length, device=device).reshape(2, length) * 7919 % min(rows, 10_007)
    mask = torch.ones_like(ids)
    mask[1, max(1, length - 4) :] = 0
    return ids * mask, mask


def plain_logits(
    hf_model: Any, ids: torch.Tensor, mask: torch.Tensor, name: str, refuse: Refuse = refuse
) -> torch.Tensor:
    """Logits of plain transformers.

    Raises:
        InterpError: the model cannot run, or (through `refuse`) gives something not finite.
    """
    try:
        with torch.no_grad():
            logits = hf_model(ids, attention_mask=mask, use_cache=False).logits.float()
    except Exception as error:
        raise InterpError(f"{name!r} does not run: {_first_line(error)}") from error
    if not bool(torch.isfinite(logits[mask.bool()]).all()):
        message = (
            f"{name!r} gives logits that are not finite: its weights hold NaN or infinity, or "
            "overflow in this dtype (try --dtype float32)."
        )
        refuse(CheckError(message, "finite activations"))
    return logits


def measure(
    bridge: Any,
    plain: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor,
    name: str,
    refuse: Refuse = refuse,
    built: list[Any] | None = None,
) -> Measured:
    """Run the bridge twice, or three times, and compare.

    Args:
        bridge: the bridged model.
        plain: [2, pos, vocab], from `plain_logits`.
        ids: [2, pos], from `tokens`.
        mask: [2, pos], from `tokens`.
        name: what the messages call the model.
        refuse: what is done where the bridge's logits are others than plain transformers', or an
            edit of z does not count.
        built: from `kernels.as_built`, where attention may be fused.

    Raises:
        InterpError: the bridge does not show the attention output per head as it is, or what
            `refuse` raises.
    """
    dtype = next(bridge.original_model.parameters()).dtype
    seen, logits = _run(bridge, ids, mask, name)
    real = mask.bool()
    gap = float((logits - plain)[real].abs().max() / plain[real].abs().max().clamp(min=1))
    tolerance = TOLERANCE.get(dtype, COARSE)
    if not gap <= tolerance:
        message = (
            f"The bridge's logits for {name!r} differ from plain transformers' by {gap:.1e} "
            f"(relative; allowed {tolerance:g}): its numbers could not be trusted."
        )
        refuse(CheckError(message, "logits"))
    shape = _one_shape(bridge, seen, name)
    widths = set(seen.mlp_hidden.values())
    mlp = next((b.mlp for b in bridge.blocks if child(b, "mlp") is not None), None)
    return Measured(
        n_heads=shape and shape[0],
        d_head=shape and shape[1],
        n_kv_heads=next((k.shape[2] for k in seen.k.values() if k.ndim == 4), None),
        d_mlp=widths.pop()
        if len(widths) == 1 and len(seen.mlp_hidden) == len(bridge.blocks)
        else None,
        gated=child(mlp, "gate") is not None if widths or seen.mlp_hidden else None,
        parallel=_is_parallel(bridge, seen, ids, mask, name, refuse),
        logits_are_unembedded=seen.unembedded is not None
        and torch.equal(seen.unembedded.float(), logits),
        fuses=built is not None
        and _same_fused(bridge, built, seen, (plain, logits), ids, mask, tolerance),
    )


def _same_fused(
    bridge: Any,
    built: list[Any],
    seen: _Seen,
    expected: Sequence[torch.Tensor],
    ids: torch.Tensor,
    mask: torch.Tensor,
    tolerance: float,
) -> bool:
    """Whether fused attention gives the expected logits, and every z that was seen."""
    z: dict[int, torch.Tensor] = {}
    try:
        with (
            kernels.fused_attention(bridge, built),
            contextlib.ExitStack() as stack,
            torch.no_grad(),
        ):
            for i in seen.z:  # and no other site: what is hooked inside is written out
                _at_point(stack, bridge, i, "hook_z", _into(z, i))
            logits = bridge(ids, attention_mask=mask, use_cache=False)
    except Exception:  # whatever it is, the bridge's own way is there
        return False
    if z.keys() != seen.z.keys():
        return False
    real = mask.bool()
    pairs = [*((logits, other) for other in expected), *((z[i], seen.z[i]) for i in z)]
    pairs = [(a[real].float(), b[real].float()) for a, b in pairs]
    return all(float((a - b).abs().max()) <= tolerance * float(b.abs().max()) for a, b in pairs)


def _one_shape(bridge: Any, seen: _Seen, name: str) -> tuple[int, int] | None:
    """(heads, d_head) of z, the same in every layer that has attention; None without attention."""
    with_attention = [i for i, b in enumerate(bridge.blocks) if child(b, "attn") is not None]
    if not with_attention:
        return None
    shapes = {tuple(seen.z[i].shape[2:]) if i in seen.z else None for i in with_attention}
    expected = int(bridge.cfg.n_heads)
    if len(shapes) > 1:
        raise InterpError(
            f"The layers of {name!r} differ in their attention heads "
            f"({', '.join(sorted(map(str, shapes)))}); interp needs the same in all."
        )
    shape = shapes.pop()
    if shape is None or len(shape) != 2 or shape[0] != expected:
        what = "not at all" if shape is None else f"in the shape {list(shape)}"
        raise InterpError(
            f"The bridge shows the attention output of {name!r} {what}, where {expected} heads "
            "side by side are needed: its heads cannot be told apart."
        )
    return shape


def _is_parallel(
    bridge: Any, seen: _Seen, ids: torch.Tensor, mask: torch.Tensor, name: str, refuse: Refuse
) -> bool | None:
    """Whether the MLP is blind to the attention of its own block; checks on the way that z counts.

    Refuses where an edit of z does not change the attention's output by W_O times the edit.
    """
    layer = next(iter(seen.z), None)
    if layer is None or layer not in seen.attn_out:
        return None
    edited, _ = _run(bridge, ids, mask, name, edit=(layer, lambda z: z + 1))
    z, out = seen.z[layer], bridge.blocks[layer].attn.o
    with torch.no_grad():
        expected = out((z + 1).flatten(2)).float() - out(z.flatten(2)).float()
    moved = edited.attn_out[layer].float() - seen.attn_out[layer].float()
    scale = torch.maximum(expected.abs().max(), moved.abs().max())
    if not float((moved - expected).abs().max()) <= 5e-2 * float(scale):
        message = (
            f"In {name!r} a change of a head's output z does not change the attention's output by "
            "W_O times it: something else acts inside, and removing heads would not be measured."
        )
        refuse(CheckError(message, "head contributions"))
    if not bool(scale > 0) or layer not in seen.mlp_in:
        return None
    return torch.equal(edited.mlp_in[layer], seen.mlp_in[layer])


def _run(
    bridge: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    name: str,
    edit: tuple[int, Callable[[torch.Tensor], torch.Tensor]] | None = None,
) -> tuple[_Seen, torch.Tensor]:
    seen = _Seen()
    try:
        with _watched(bridge, seen, edit), torch.no_grad():
            logits = bridge(ids, attention_mask=mask, use_cache=False).float()
    except Exception as error:
        raise InterpError(
            f"TransformerBridge cannot run {name!r} ({type(bridge.original_model).__name__}): "
            f"{_first_line(error)}"
        ) from error
    return seen, logits


@contextlib.contextmanager
def _watched(bridge: Any, seen: _Seen, edit: tuple[int, Any] | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:

        def on_output(module: Any, hook: Callable[[Any], Any]) -> None:
            if module is not None:
                handle = module.register_forward_hook(lambda _m, _i, output: hook(output))
                stack.callback(handle.remove)

        def on_input(module: Any, hook: Callable[[Any], None]) -> None:
            if module is not None:
                handle = module.register_forward_pre_hook(
                    lambda _m, args, kwargs: hook(args[0] if args else next(iter(kwargs.values()))),
                    with_kwargs=True,
                )
                stack.callback(handle.remove)

        def keep_z(i: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
            def hook(z: torch.Tensor) -> torch.Tensor | None:
                seen.z[i] = z
                return edit[1](z) if edit is not None and edit[0] == i else None

            return hook

        for i, block in enumerate(bridge.blocks):
            attn, mlp = child(block, "attn"), child(block, "mlp")
            if attn is not None:
                _at_point(stack, bridge, i, "hook_z", keep_z(i))
                _at_point(stack, bridge, i, "hook_k", _into(seen.k, i))
                on_output(attn, _into(seen.attn_out, i))
            # Some families' MLP is no module of its own: the first and last projection are.
            on_input(child(mlp, "in") or mlp, _into(seen.mlp_in, i))
            on_input(child(mlp, "out"), _width_into(seen.mlp_hidden, i))

        def keep_unembedded(out: torch.Tensor) -> None:
            seen.unembedded = out

        on_output(bridge.unembed, keep_unembedded)
        yield


def _at_point(
    stack: contextlib.ExitStack, bridge: Any, i: int, name: str, hook: Callable[[Any], Any]
) -> None:
    # Only hooks attached in TransformerLens' own way see heads as an axis of their own.
    point = bridge.get_hook_point(f"blocks.{i}.attn.{name}")
    if point is not None:
        point.add_hook(lambda tensor, hook, function=hook: function(tensor))
        stack.callback(_remove, point, point.fwd_hooks[-1])


def _into(store: dict[int, torch.Tensor], layer: int) -> Callable[[Any], None]:
    def hook(value: Any) -> None:
        store[layer] = value[0] if isinstance(value, tuple) else value

    return hook


def _width_into(store: dict[int, int], layer: int) -> Callable[[Any], None]:
    def hook(value: Any) -> None:
        store[layer] = int(value.shape[-1])

    return hook


def _remove(point: Any, handle: Any) -> None:
    handle.hook.remove()
    point.fwd_hooks = [h for h in point.fwd_hooks if h is not handle]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__

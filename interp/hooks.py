"""The names of the sites, and capture: nothing else in interp knows a hook name.

A site is a place in every block, named as TransformerLens names it. Hooks are attached one by one
and removed one by one, so that hooks which the caller has put on the model stay as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from interp.errors import InterpError
from interp.kernels import TORCH_HOOKS
from interp.model import Model

# site -> (name on a block, shape of what the hook sees)
SITES = {
    "resid_pre": ("hook_resid_pre", "[batch, pos, d_model]"),
    "resid_mid": ("hook_resid_mid", "[batch, pos, d_model]"),
    "resid_post": ("hook_resid_post", "[batch, pos, d_model]"),
    "attn_in": ("ln1.hook_out", "[batch, pos, d_model]"),
    "q": ("attn.hook_q", "[batch, pos, head, d_head]"),
    "k": ("attn.hook_k", "[batch, pos, kv_head, d_head]"),
    "v": ("attn.hook_v", "[batch, pos, kv_head, d_head]"),
    "scores": ("attn.hook_attn_scores", "[batch, head, pos, pos]"),  # the mask added: see scores.py
    "pattern": ("attn.hook_pattern", "[batch, head, pos, pos]"),
    "z": ("attn.hook_z", "[batch, pos, head, d_head]"),
    "attn_out": ("attn.hook_out", "[batch, pos, d_model]"),
    "mlp_in": ("ln2.hook_out", "[batch, pos, d_model]"),
    "mlp_pre": ("mlp.hook_pre", "[batch, pos, d_mlp]"),  # of the gate, in gated models
    "mlp_post": ("mlp.hook_post", "[batch, pos, d_mlp]"),
    "mlp_out": ("hook_mlp_out", "[batch, pos, d_model]"),
}
BLOCK = "blocks.{layer}."

Hook = Callable[[torch.Tensor], torch.Tensor | None]


def site(model: Model, name: str, layer: int) -> Any:
    """The HookPoint of a site.

    Raises:
        InterpError: the model has no such site; names the model and what is missing.
    """
    if name not in SITES:
        raise InterpError(f"Unknown site {name!r}. Sites: {', '.join(SITES)}.")
    if not 0 <= layer < model.cfg.n_layers:
        raise InterpError(
            f"Layer {layer} does not exist: {model.name} has layers 0 to {model.cfg.n_layers - 1}."
        )
    point = model.hook_point(BLOCK.format(layer=layer) + SITES[name][0])
    if point is None:
        raise InterpError(
            f"{model.name} ({model.cfg.family}) has no {name!r} in layer {layer} "
            f"(the bridge offers no {SITES[name][0]} there), which this analysis needs."
        )
    return point


def require(model: Model, *names: str) -> None:
    """Refuse a model that lacks one of these sites in some layer."""
    for name in names:
        for layer in range(model.cfg.n_layers):
            site(model, name, layer)


@contextlib.contextmanager
def attached(model: Model, hooks: Iterable[tuple[str, int, Hook]]) -> Iterator[None]:
    """Attach hooks `(site, layer, function)` for the duration of the block.

    A function sees the site's tensor (SITES has the shapes) and returns a replacement, or None to
    leave it. Only these hooks are removed afterwards, also after an exception.
    """
    added: list[tuple[Any, Any]] = []
    try:
        for name, layer, function in hooks:
            point = site(model, name, layer)
            point.add_hook(lambda tensor, hook, function=function: function(tensor))
            added.append((point, point.fwd_hooks[-1]))
        yield
    finally:
        for point, handle in added:
            handle.hook.remove()
            point.fwd_hooks = [h for h in point.fwd_hooks if h is not handle]


class _DoneError(Exception):
    """Ends a forward pass after the last site."""


def run_through(model: Model, batch: Any, sites: Sequence[tuple[str, int, Hook]]) -> None:
    """Run a batch with hooks `(site, layer, function)`; ends after the one that is listed last."""
    name, layer, last = sites[-1]

    def final(tensor: torch.Tensor) -> None:
        last(tensor)
        raise _DoneError

    with (
        attached(model, [*sites[:-1], (name, layer, final)]),
        contextlib.suppress(_DoneError),
    ):
        model.forward(batch)


def foreign_hooks(model: Model) -> list[str]:
    """Names of hook points that carry hooks which interp did not attach."""
    return sorted(n for n, p in model.bridge.hook_dict.items() if p.fwd_hooks or p.bwd_hooks)


# Modules whose own hooks on themselves are part of how they work.
_LIBRARIES = ("transformer_lens.", "transformers.", "torch.", "accelerate.")
_HOOK_POINT = "transformer_lens.hook_points"


def left_on(model: Model) -> list[str]:
    """Everything attached to the model that is not part of it, one entry each, sorted.

    Hooks at hook points, plain torch hooks on any module, and forward methods that were replaced
    on an instance; also where the bookkeeping of the hook point has forgotten a hook.
    """
    found = []
    for full, module in model.bridge.named_modules():
        name = full.replace("._original_component", "")
        for kind in TORCH_HOOKS:
            for function in getattr(module, kind).values():
                source = str(getattr(function, "__module__", ""))
                if source == _HOOK_POINT or not f"{source}.".startswith(_LIBRARIES):
                    found.append(f"a hook on {name}")
        if "forward" in module.__dict__:
            found.append(f"a replaced forward of {name}")
    return sorted(found)


def foreign_notices(model: Model) -> list[str]:
    """The notice that such hooks are at work; none without any."""
    mine = foreign_hooks(model)
    if not mine:
        return []
    return [f"{len(mine)} hook points carry hooks of yours ({mine[0]}, ...): they were active."]

"""Changes to attention heads, as functions of z: removal, replacement by a constant or by data.

Each edit clones what it is given. `splice.run_edited` applies edits to a batch from the middle of
the model; `ablate` is the same as a context manager, for notebooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp import hooks
from interp.errors import InterpError
from interp.model import Model
from interp.splice import Edit

Head = tuple[int, int]
"""(layer, query head)"""


def by_layer(heads: Iterable[Head]) -> dict[int, list[int]]:
    """Heads grouped by layer, both ascending."""
    grouped: dict[int, list[int]] = {}
    for layer, head in sorted(set(heads)):
        grouped.setdefault(layer, []).append(head)
    return grouped


def replaced(
    heads: Sequence[int],
    value: Tensor | float,
    where: Bool[Tensor, "batch pos"] | None = None,
) -> Edit:
    """z with some heads replaced.

    Args:
        heads: query heads of one layer.
        value: what stands in, broadcast to [batch, pos, len(heads), d_head].
        where: [batch, pos] bool, the positions to change; None is all of them.
    """
    index = list(heads)

    def edit(z: Tensor) -> Tensor:
        new = z.clone()
        if where is None:
            new[:, :, index] = value.to(z) if isinstance(value, Tensor) else value
        else:
            at = where[:, :, None, None]
            new[:, :, index] = torch.where(at, torch.as_tensor(value).to(z), z[:, :, index])
        return new

    return edit


def removed(heads: Sequence[int]) -> Edit:
    """z with some heads zero everywhere: what deleting their rows of W_O does."""
    return replaced(heads, 0.0)


def removals(
    heads: Iterable[Head], means: Float[Tensor, "layer head d_head"] | None = None
) -> dict[int, Edit]:
    """Edits that remove heads, per layer.

    Args:
        heads: which ones.
        means: [layer, head, d_head]; where given, each removed head's output stays as this
            constant, at every position (a bias on the attention output). None: nothing stays.
    """
    return {
        layer: removed(hs) if means is None else replaced(hs, means[layer, hs])
        for layer, hs in by_layer(heads).items()
    }


@contextlib.contextmanager
def ablate(
    model: Model, heads: Iterable[Head], means: Float[Tensor, "layer head d_head"] | None = None
) -> Iterator[None]:
    """Remove heads for the duration of the block (zero, or their mean where `means` is given).

    Raises:
        InterpError: a head that the model does not have.
    """
    heads = list(heads)
    for layer, head in heads:
        if not (0 <= layer < model.cfg.n_layers and 0 <= head < model.cfg.n_heads):
            raise InterpError(
                f"Head {layer}.{head} does not exist: {model.name} has {model.cfg.n_layers} layers "
                f"of {model.cfg.n_heads} heads, counted from 0."
            )
    edits: Mapping[int, Edit] = removals(heads, means)
    with hooks.attached(model, [("z", layer, edit) for layer, edit in edits.items()]):
        yield

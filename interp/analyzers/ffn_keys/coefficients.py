"""An FFN as a key-value memory: output = sum over keys i of coefficient_i * value_i + bias.

The coefficient of key i at a position is act(pre_i), in gated models act(gate_i) * up_i: what
enters W_out there. The value is row i of W_out as [key, d_model]. Everything that knows what an FFN
is, is here; nothing else asks a model for its coefficients. That the sum gives the model's own
output is checked on the text at hand before any number is believed (`check`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from interp import hooks, journal, scores
from interp.errors import InterpError
from interp.model import Model
from interp.progress import track
from interp.text import Text, TokenBatch

CHECK_DOCUMENTS = 2

Use = Callable[[Float[Tensor, "batch pos key"]], None]
"""Takes a layer's coefficients, or pre-activations; must not write to them, or keep them long."""


@dataclass(frozen=True)
class Memory:
    """One layer's values, as the model multiplies them.

    values: [key, d_model], in the model's dtype; a view of its weights.
    bias: [d_model], or None: what the layer adds whatever its coefficients are.
    """

    layer: int
    values: Float[Tensor, "key d_model"]
    bias: Float[Tensor, " d_model"] | None

    def output(self, coefficients: Float[Tensor, "... key"]) -> Float[Tensor, "... d_model"]:
        """The FFN's output of these coefficients, in their dtype."""
        out = coefficients @ self.values.to(coefficients)
        return out if self.bias is None else out + self.bias.to(coefficients)


def require(model: Model) -> None:
    """Refuse a model without one dense FFN of the same width in every layer.

    Raises:
        InterpError: experts, no FFN, or one whose coefficients the bridge does not show.
    """
    if model.cfg.d_mlp == 0:
        raise InterpError(
            f"{model.name} ({model.cfg.family}) has no single FFN of one width in every layer (a "
            "mixture of experts, or none at all), so it has no key-value memory to read. Use a "
            "model with dense FFNs."
        )
    hooks.require(model, "mlp_post", "mlp_out")


def memory(model: Model, layer: int) -> Memory:
    """A layer's values and bias.

    Raises:
        InterpError: the last projection's weights cannot be read as a matrix of that shape.
    """
    module = model.bridge.blocks[layer].mlp.out.original_component
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise InterpError(
            f"The FFN's last projection in layer {layer} of {model.name} is a "
            f"{type(module).__name__}: its values cannot be read as a matrix."
        )
    values = scores.in_out(module)
    if values.shape != (model.cfg.d_mlp, model.cfg.d_model):
        raise InterpError(
            f"The values of layer {layer} of {model.name} are {tuple(values.shape)}; expected "
            f"{model.cfg.d_mlp} keys times d_model {model.cfg.d_model}."
        )
    bias = getattr(module, "bias", None)
    return Memory(layer, values, None if bias is None else bias.detach())


def run(
    model: Model, batch: Any, use: Mapping[int, Use], pre: Mapping[int, Use] | None = None
) -> None:
    """Run a batch up to the last layer asked for; what comes after it is never computed.

    Args:
        model: inside `model.measuring()`.
        batch: a TokenBatch, or anything with `.tokens` and `.attention_mask` [batch, pos].
        use: layer -> function of its coefficients [batch, pos, key], called in order of layers.
        pre: layer (of `use`) -> function of its pre-activations (the gate's, in gated models).
    """
    sites = [("mlp_pre", layer, function) for layer, function in (pre or {}).items()]
    hooks.run_through(
        model, batch, sites + [("mlp_post", layer, use[layer]) for layer in sorted(use)]
    )


def coefficients(
    model: Model, batch: Any, layers: Iterable[int]
) -> dict[int, Float[Tensor, "batch pos key"]]:
    """layer -> its coefficients, all kept: for a few layers, or a small batch."""
    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Use:
        def hook(tensor: Tensor) -> None:
            found[layer] = tensor

        return hook

    run(model, batch, {layer: keep(layer) for layer in layers})
    return found


def stream(
    model: Model,
    text: Text,
    use: Mapping[int, Callable[[Tensor, TokenBatch], None]],
    batch_size: int | Literal["auto"] = "auto",
    *,
    pre: Mapping[int, Callable[[Tensor, TokenBatch], None]] | None = None,
    progress: bool = False,
    what: str = "FFN keys",
    state: Mapping[str, Any] | None = None,
) -> int:
    """One pass over a text for all layers asked, each layer's coefficients seen as they arise.

    Only one layer of one batch is held at a time; the model stops after the last layer.

    Args:
        model: inside `model.measuring()`.
        text: whose included positions are for the functions to respect (`batch.included`).
        use: layer -> function of its coefficients [batch, pos, key] and the batch.
        batch_size: rows per pass.
        pre: the same of pre-activations.
        progress: a bar on stderr.
        what: its name.
        state: what the functions add up; None: it cannot be saved half way.

    Returns:
        Rows that went through.
    """
    bar = track(sum(len(d.windows) for d in text.documents), what, progress)
    rows = 0
    try:
        stage = journal.stage(what)
        made = stage.batches(model, text, batch_size)
        for batch in made if state is None else stage.fold(made, state):
            given = [
                {layer: _with(function, batch) for layer, function in (mapping or {}).items()}
                for mapping in (use, pre)
            ]
            run(model, batch, *given)
            rows += len(batch.tokens)
            bar.update(len(batch.tokens))
    finally:
        bar.close()
    return rows


def _with(function: Callable[[Tensor, TokenBatch], None], batch: TokenBatch) -> Use:
    return lambda tensor: function(tensor, batch)


def check(model: Model, text: Text, layers: Sequence[int]) -> float:
    """Compare the sum over keys with the FFN's own output, on the text's first documents.

    Returns:
        The largest difference at a position, relative to the output's norm there.

    Raises:
        InterpError: it is more than rounding (1e-4, in 16 bit 3e-2), for instance where something
            acts on the output after W_out.
    """
    places = [(i, 0) for i in range(min(CHECK_DOCUMENTS, len(text)))]
    batch = text.batch_of(places, model.device)
    out: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}

    def keep(store: dict[int, Tensor], layer: int) -> hooks.Hook:
        def hook(tensor: Tensor) -> None:
            store[layer] = tensor

        return hook

    sites = [
        (name, i, keep(store, i))
        for i in layers
        for name, store in (("mlp_post", made), ("mlp_out", out))
    ]
    with hooks.attached(model, sites):
        scores.run(model, batch)
    worst = 0.0
    for layer in layers:
        if layer not in made or made[layer].shape != (*batch.tokens.shape, model.cfg.d_mlp):
            raise InterpError(
                f"Layer {layer} of {model.name} does not show the coefficients of its "
                f"{model.cfg.d_mlp} keys at every position."
            )
        summed = memory(model, layer).output(scores.wide(made[layer][batch.mask]))
        own = scores.wide(out[layer][batch.mask])
        gap = (summed - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-12)
        worst = max(worst, float(gap.max()))
        if not worst <= scores.tolerance(model):
            raise InterpError(
                f"In layer {layer} of {model.name} the sum of coefficient times value plus bias is "
                f"not the FFN's output (off by {worst:.1e}, relative): something else acts on it, "
                "so its keys and values would not be what the model computes."
            )
    return worst

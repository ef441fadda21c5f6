"""FFN coefficients by numpy from the input of plain transformers' MLP, one document at a time.

Imports nothing of the package under test. A document is a list of token ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from scipy.special import erf, expit

from tests import oracle


def mlp(model: Any, layer: int) -> Any:
    kind = model.config.model_type
    if kind == "gpt2":
        return model.transformer.h[layer].mlp
    if kind == "gpt_neox":
        return model.gpt_neox.layers[layer].mlp
    return model.model.layers[layer].mlp


def weights(model: Any, layer: int) -> dict[str, np.ndarray]:
    """in, gate: [d_model, key]; out: [key, d_model]; b_in, b_out: biases. What there is of them."""
    part = mlp(model, layer)
    kind = model.config.model_type

    def array(x: torch.Tensor) -> np.ndarray:
        return x.detach().double().numpy()

    if kind == "gpt2":  # Conv1D: [in, out]
        found = {"in": part.c_fc.weight, "out": part.c_proj.weight}
        found |= {"b_in": part.c_fc.bias, "b_out": part.c_proj.bias}
    elif kind == "gpt_neox":
        found = {"in": part.dense_h_to_4h.weight.T, "out": part.dense_4h_to_h.weight.T}
        found |= {"b_in": part.dense_h_to_4h.bias, "b_out": part.dense_4h_to_h.bias}
    else:
        found = {"in": part.up_proj.weight.T, "gate": part.gate_proj.weight.T}
        found |= {"out": part.down_proj.weight.T}
    return {name: array(x) for name, x in found.items()}


def coefficients(model: Any, layer: int, document: Sequence[int]) -> np.ndarray:
    """[pos, key] in float64."""
    return of_input(model, layer, mlp_input(model, layer, document))


def pre(model: Any, layer: int, document: Sequence[int]) -> np.ndarray:
    """[pos, key] what the activation is applied to."""
    w = weights(model, layer)
    x = mlp_input(model, layer, document)
    return x @ w["gate"] if "gate" in w else x @ w["in"] + w["b_in"]


def mlp_input(model: Any, layer: int, document: Sequence[int]) -> np.ndarray:
    """[pos, d_model]"""
    seen: list[torch.Tensor] = []

    def hook(_module: Any, inputs: Any) -> None:
        seen.append(inputs[0])

    handle = mlp(model, layer).register_forward_pre_hook(hook)
    try:
        oracle.logits(model, document)
    finally:
        handle.remove()
    return seen[0][0].double().numpy()


def of_input(model: Any, layer: int, x: np.ndarray) -> np.ndarray:
    w = weights(model, layer)
    kind = model.config.model_type
    if kind == "llama":
        gate = x @ w["gate"]
        return gate * expit(gate) * (x @ w["in"])
    h = x @ w["in"] + w["b_in"]
    if kind == "gpt2":
        return 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return 0.5 * h * (1 + erf(h / np.sqrt(2)))


def triggers(
    model: Any,
    layer: int,
    documents: Sequence[Sequence[int]],
    special: Collection[int] = (),
    sign: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Every document's most extreme coefficient of every key, and where: both [document, key]."""
    values, places = [], []
    for document in documents:
        c = sign * coefficients(model, layer, document)
        c[~oracle.included(document, special)] = -np.inf
        values.append(sign * c.max(0))
        places.append(c.argmax(0))
    return np.stack(values), np.stack(places)

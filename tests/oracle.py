"""Another implementation of what the package measures: plain transformers, one document at a time.

No batches, no padding, no hooks on anything but the attention's output projection, sums in float64.
Slow and plain on purpose, so that it can be read; it imports nothing of the package under test.

Vocabulary: a document is a list of token ids; a head is a pair (layer, head) of a query head; z is
the input of the output projection, cut into heads. Included positions are those that carry neither
a special token nor the document's first token.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

Document = Sequence[int]
Head = tuple[int, int]


def load(folder: Path) -> PreTrainedModel:
    """The checkpoint as plain transformers loads it: float32, evaluation mode, frozen."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def double(model: PreTrainedModel) -> PreTrainedModel:
    """A float64 copy, also where transformers' RMSNorm would round to float32 inside."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = types.MethodType(_rms_norm, module)
    return model


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (x * scale)


# --- the architecture, spelled out once per family -------------------------------------------


def n_layers(model: PreTrainedModel) -> int:
    """Number of layers."""
    return model.config.num_hidden_layers


def n_heads(model: PreTrainedModel) -> int:
    """Number of query heads in a layer."""
    return model.config.num_attention_heads


def projection(model: Any, layer: int) -> Any:
    """The attention's output projection: its input is z of all heads, side by side."""
    kind = model.config.model_type
    if kind == "gpt2":
        return model.transformer.h[layer].attn.c_proj
    if kind == "gpt_neox":
        return model.gpt_neox.layers[layer].attention.dense
    if kind == "llama":
        return model.model.layers[layer].self_attn.o_proj
    raise ValueError(f"no oracle for model type {kind!r}")


def _w_o(model: PreTrainedModel, layer: int) -> Tensor:
    """W_O of all heads, [n_heads * d_head, d_model]: a view, writing to it edits the model."""
    weight = projection(model, layer).weight
    # GPT-2's Conv1D stores [in, out], nn.Linear [out, in].
    return weight.data if model.config.model_type == "gpt2" else weight.data.T


def d_head(model: PreTrainedModel) -> int:
    """Width of a head, read off the weights."""
    return _w_o(model, 0).shape[0] // n_heads(model)


def _slice(model: PreTrainedModel, head: int) -> slice:
    width = d_head(model)
    return slice(head * width, (head + 1) * width)


def heads_of(model: PreTrainedModel) -> list[Head]:
    """All heads, layer by layer."""
    return [(i, h) for i in range(n_layers(model)) for h in range(n_heads(model))]


def included(document: Document, special_ids: Collection[int] = ()) -> np.ndarray:
    """Boolean [pos]: not the first position, not a special token."""
    mask = np.array([token not in special_ids for token in document])
    mask[0] = False
    return mask


# --- losses --------------------------------------------------------------------------------


def logits(model: PreTrainedModel, document: Document) -> Tensor:
    """[pos, vocab] in float64 (computed in the model's dtype)."""
    with torch.no_grad():
        return model(torch.tensor([list(document)])).logits[0].double()


def token_losses(model: PreTrainedModel, document: Document) -> np.ndarray:
    """Cross-entropy [pos - 1] in nats: entry t is of token t + 1, given the tokens up to t."""
    log_p = torch.log_softmax(logits(model, document), dim=-1)
    return np.array([-log_p[t, token].item() for t, token in enumerate(document[1:])])


def document_losses(model: PreTrainedModel, documents: Iterable[Document]) -> np.ndarray:
    """Mean cross-entropy over each document's predicted tokens: float64 [docs], nats per token."""
    return np.array([token_losses(model, document).mean() for document in documents])


def token_weighted_loss(model: PreTrainedModel, documents: Iterable[Document]) -> float:
    """Mean over all predicted tokens of all documents: long documents count more."""
    return float(np.concatenate([token_losses(model, document) for document in documents]).mean())


def kl(clean: PreTrainedModel, other: PreTrainedModel, documents: Iterable[Document]) -> np.ndarray:
    """KL(clean || other) of next-token distributions, mean over predicted tokens: [docs], nats."""
    return np.array([_kl(logits(clean, d), logits(other, d)) for d in documents])


def _kl(clean: Tensor, other: Tensor) -> float:
    log_p, log_q = (torch.log_softmax(x[:-1], dim=-1) for x in (clean, other))
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


# --- removing heads by editing weights -------------------------------------------------------


def edited(
    model: PreTrainedModel, heads: Iterable[Head], means: np.ndarray | None = None
) -> PreTrainedModel:
    """A deep copy in which the heads write nothing, or (with `means`) a constant.

    Args:
        model: The model; left as it is.
        heads: Pairs (layer, head).
        means: z per head [layer, head, d_head] (see head_means). If given, the head's mean output
            is added to the bias of the output projection, which is made where there is none.
    """
    model = copy.deepcopy(model)
    for layer, head in heads:
        w_o = _w_o(model, layer)[_slice(model, head)]
        if means is not None:
            module = projection(model, layer)
            constant = torch.as_tensor(means[layer, head], dtype=torch.float64) @ w_o.double()
            if module.bias is None:
                zero = torch.zeros(w_o.shape[1], dtype=w_o.dtype)
                module.bias = nn.Parameter(zero, requires_grad=False)
            module.bias.data += constant.to(w_o.dtype)
        w_o.zero_()
    return model


def ablated_losses(
    model: PreTrainedModel,
    documents: Iterable[Document],
    layer: int | Sequence[Head],
    head: int | None = None,
) -> np.ndarray:
    """Losses [docs] with head(s) zeroed in the weights, hence at every position.

    Pass either `layer, head`, or a list of pairs in place of `layer`.
    """
    return document_losses(edited(model, _heads(layer, head)), documents)


def ablated_with_bias(
    model: PreTrainedModel,
    documents: Iterable[Document],
    layer: int | Sequence[Head],
    head: int | None = None,
    *,
    means: np.ndarray,
) -> np.ndarray:
    """As ablated_losses, the heads' mean outputs added to the projections' biases."""
    return document_losses(edited(model, _heads(layer, head), means), documents)


def _heads(layer: int | Sequence[Head], head: int | None) -> list[Head]:
    if isinstance(layer, int):
        if head is None:
            raise TypeError("a layer needs a head")
        return [(layer, head)]
    return list(layer)


# --- z: reading it, and replacing it at included positions -----------------------------------


@contextlib.contextmanager
def _z_hook(
    model: PreTrainedModel, layer: int, change: Callable[[Tensor], Tensor | None]
) -> Iterator[None]:
    """Pass z of a layer [1, pos, head * d_head] through `change` (None: leave it)."""

    def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        new = change(inputs[0])
        return None if new is None else (new, *inputs[1:])

    handle = projection(model, layer).register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def z(model: PreTrainedModel, document: Document) -> np.ndarray:
    """Each head's output before W_O: float64 [layer, pos, head, d_head]."""
    seen: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        for layer in range(n_layers(model)):
            # list.append returns None: z is read and left as it is.
            stack.enter_context(_z_hook(model, layer, seen.append))
        logits(model, document)
    flat = torch.stack([x[0] for x in seen]).double()
    return flat.reshape(*flat.shape[:2], n_heads(model), d_head(model)).numpy()


def _sums(
    model: PreTrainedModel, documents: Sequence[Document], special_ids: Collection[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Per document, the sum of z over included positions, and how many there are."""
    masks = [included(document, special_ids) for document in documents]
    sums = [z(model, d)[:, mask].sum(axis=1) for d, mask in zip(documents, masks, strict=True)]
    return np.stack(sums), np.array([mask.sum() for mask in masks])


def head_means(
    model: PreTrainedModel, documents: Sequence[Document], special_ids: Collection[int] = ()
) -> np.ndarray:
    """Mean z over the included positions of all documents together: [layer, head, d_head]."""
    sums, counts = _sums(model, documents, special_ids)
    return sums.sum(axis=0) / counts.sum()


def means_of_others(
    model: PreTrainedModel, documents: Sequence[Document], special_ids: Collection[int] = ()
) -> np.ndarray:
    """The same without the document itself: [docs, layer, head, d_head]."""
    sums, counts = _sums(model, documents, special_ids)
    return np.stack(
        [
            np.delete(sums, i, axis=0).sum(axis=0) / np.delete(counts, i).sum()
            for i in range(len(documents))
        ]
    )


@contextlib.contextmanager
def replaced(
    model: PreTrainedModel,
    document: Document,
    heads: Iterable[Head],
    value: np.ndarray,
    special_ids: Collection[int] = (),
) -> Iterator[PreTrainedModel]:
    """Within: the heads' z is `value` at the included positions of `document`, its own elsewhere.

    Args:
        model: The model; hooks are taken off on leaving.
        document: The one document that may be run within.
        heads: Pairs (layer, head).
        value: [layer, head, d_head], or [layer, pos, head, d_head] with a row for every position.
        special_ids: Tokens whose positions are not included.
    """
    mask = torch.from_numpy(included(document, special_ids))
    with contextlib.ExitStack() as stack:
        for layer, head in heads:
            new = torch.from_numpy(value[layer][..., head, :])

            def change(x: Tensor, head: int = head, new: Tensor = new) -> Tensor:
                x = x.clone()
                rows = new.to(x.dtype).expand(x.shape[1], -1)
                x[0, mask, _slice(model, head)] = rows[mask]
                return x

            stack.enter_context(_z_hook(model, layer, change))
        yield model


def mean_ablated_losses(
    model: PreTrainedModel,
    documents: Sequence[Document],
    layer: int | Sequence[Head],
    head: int | None = None,
    special_ids: Collection[int] = (),
    means: np.ndarray | None = None,
) -> np.ndarray:
    """Losses [docs] with z, at included positions, replaced by the other documents' mean.

    `means` spares the work where means_of_others of the same arguments is at hand.
    """
    if means is None:
        means = means_of_others(model, documents, special_ids)
    return replaced_losses(model, documents, _heads(layer, head), list(means), special_ids)


def replaced_losses(
    model: PreTrainedModel,
    documents: Sequence[Document],
    heads: Sequence[Head],
    values: Sequence[np.ndarray],
    special_ids: Collection[int] = (),
) -> np.ndarray:
    """Losses [docs] with z, at included positions, replaced by values[i] in document i.

    For what is neither zero everywhere nor a mean: resampling, or zero at included positions only.
    values[i] is as in `replaced`.
    """
    losses = []
    for document, value in zip(documents, values, strict=True):
        with replaced(model, document, heads, value, special_ids):
            losses.append(token_losses(model, document).mean())
    return np.array(losses)


# --- importance ------------------------------------------------------------------------------


def gradients_fd(
    model: PreTrainedModel,
    documents: Sequence[Document],
    layer: int,
    head: int,
    eps: float = 1e-4,
) -> np.ndarray:
    """dL_doc/dxi at xi = 1, xi scaling the head's z at every position: [docs], with its sign.

    A central difference in float64; pass `double(model)` to spare a copy per call.
    """
    if next(model.parameters()).dtype != torch.float64:
        model = double(model)

    def losses(xi: float) -> np.ndarray:
        def change(x: Tensor) -> Tensor:
            x = x.clone()
            x[..., _slice(model, head)] *= xi
            return x

        with _z_hook(model, layer, change):
            return document_losses(model, documents)

    return (losses(1 + eps) - losses(1 - eps)) / (2 * eps)


def importance_fd(
    model: PreTrainedModel,
    documents: Sequence[Document],
    layer: int,
    head: int,
    eps: float = 1e-4,
) -> float:
    """importance of one head: mean over documents of |dL_doc/dxi|, by finite difference."""
    return float(np.abs(gradients_fd(model, documents, layer, head, eps)).mean())


def importances_fd(model: PreTrainedModel, documents: Sequence[Document]) -> np.ndarray:
    """importance of every head: [layer, head]."""
    model = double(model)
    values = [importance_fd(model, documents, layer, head) for layer, head in heads_of(model)]
    return np.array(values).reshape(n_layers(model), n_heads(model))


def normalised(importances: np.ndarray) -> np.ndarray:
    """importance_norm: divided by the layer's l2 norm over heads."""
    return importances / np.sqrt((importances**2).sum(axis=1, keepdims=True))


def importances_token(model: PreTrainedModel, documents: Sequence[Document]) -> np.ndarray:
    """importance_token [layer, head]: per document the mean over its tokens of |z . dL_doc/dz|.

    By autograd in float64 (the only use of it here), all of the document's positions counted.
    """
    model = double(model)
    total = np.zeros((n_layers(model), n_heads(model)))
    for document in documents:
        kept: list[Tensor] = []

        def change(x: Tensor, kept: list[Tensor] = kept) -> Tensor:
            # A fresh leaf added on top carries the gradient and changes no number.
            leaf = torch.zeros_like(x, requires_grad=True)
            kept.append(leaf)
            kept.append(x.detach())
            return x + leaf

        with contextlib.ExitStack() as stack:
            for layer in range(n_layers(model)):
                stack.enter_context(_z_hook(model, layer, change))
            out = model(torch.tensor([list(document)])).logits[0]
        log_p = torch.log_softmax(out, dim=-1)
        targets = torch.tensor(list(document[1:]))
        loss = -log_p[torch.arange(len(targets)), targets].mean()
        grads = torch.autograd.grad(loss, kept[::2])
        for layer, (grad, value) in enumerate(zip(grads, kept[1::2], strict=True)):
            product = (grad * value)[0].reshape(len(document), n_heads(model), d_head(model))
            total[layer] += product.sum(-1).abs().mean(0).numpy()
    return total / len(documents)


# --- attention -------------------------------------------------------------------------------


def patterns(model: PreTrainedModel, document: Document) -> np.ndarray:
    """Attention after softmax: [layer, head, query, key]."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(torch.tensor([list(document)]), output_attentions=True)
    return torch.cat(out.attentions).double().numpy()

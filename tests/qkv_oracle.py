"""Queries, keys and values changed in plain transformers, by hooks on its own projections.

Imports nothing of the package under test.
"""

import contextlib

import numpy as np
import torch

from tests import asymmetry_oracle as asym
from tests import oracle


def _module(model, layer, site):
    attn = asym._layer(model, layer)
    if site == "o":
        return oracle.projection(model, layer)
    kind = model.config.model_type
    if kind == "gpt2":
        return attn.c_attn
    return attn.query_key_value if kind == "gpt_neox" else getattr(attn, f"{site}_proj")


def _view(model, output, site):
    """The site's part of a projection's output, [pos, head, d_head] (o: [pos, d_model]); a view."""
    if site == "o":
        return output[0]
    kind, d = model.config.model_type, oracle.d_head(model)
    if kind == "gpt2":
        return output[0].view(len(output[0]), 3, -1, d)[:, "qkv".index(site)]
    if kind == "gpt_neox":
        return output[0].view(len(output[0]), -1, 3, d)[:, :, "qkv".index(site)]
    return output[0].view(len(output[0]), -1, d)


@contextlib.contextmanager
def changed(model, edits):
    """edits: (layer, site, function of [pos, head, d_head] -> the same)."""
    handles = []
    for layer, site, function in edits:

        def hook(_module, _inputs, output, site=site, function=function):
            output = output.clone()
            part = _view(model, output, site)
            part[:] = function(part.clone())
            return output

        handles.append(_module(model, layer, site).register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def seen(model, documents, site, layer, special_ids=()):
    """[item, head, d_head] float64 at included positions of all documents."""
    found = []

    def keep(x):
        found.append(x.double().numpy())
        return x

    with changed(model, [(layer, site, keep)]):
        for document in documents:
            oracle.logits(model, document)
    at = [oracle.included(document, special_ids) for document in documents]
    return np.concatenate([x[mask] for x, mask in zip(found, at, strict=True)])


def losses(model, documents, edits, special_ids=()):
    """[document] with functions of the values at included positions; the rest stays."""
    out = []
    for document in documents:
        at = torch.tensor(oracle.included(document, special_ids))

        def inside(function, at=at):
            def change(x):
                x[at] = torch.as_tensor(function(x[at].double().numpy())).to(x)
                return x

            return change

        with changed(model, [(layer, site, inside(f)) for layer, site, f in edits]):
            out.append(oracle.document_losses(model, [document])[0])
    return np.array(out)


def value_views(model, layer):
    """GPT-2's W_V [head, d_head, d_model], its bias [head, d_head] and W_O [head, d_head, d_model].

    Views: writing to them edits the model.
    """
    attn, d, heads = asym._layer(model, layer), oracle.d_head(model), oracle.n_heads(model)
    weight = attn.c_attn.weight.data.T.view(3, heads, d, -1)
    bias = attn.c_attn.bias.data.view(3, heads, d)
    return weight[2], bias[2], oracle._w_o(model, layer).view(heads, d, -1)

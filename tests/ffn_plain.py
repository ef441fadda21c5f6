"""One FFN after another, by plain transformers, one document at a time.

The input of the last projection is read, and set, by hooks on plain modules; the ends of the models
are called by their own names. Imports nothing of the package under test.
"""

import contextlib

import numpy as np
import torch

from tests import oracle


def down(model, layer):
    """The FFN's last projection: its input are the coefficients."""
    kind = model.config.model_type
    if kind == "gpt2":
        return model.transformer.h[layer].mlp.c_proj
    if kind == "gpt_neox":
        return model.gpt_neox.layers[layer].mlp.dense_4h_to_h
    return model.model.layers[layer].mlp.down_proj


def values(model, layer):
    """[key, d_model] float64."""
    weight = down(model, layer).weight.detach().double()
    return (weight if model.config.model_type == "gpt2" else weight.T).numpy()


def bias(model, layer):
    found = down(model, layer).bias
    return 0.0 if found is None else found.detach().double().numpy()


def _block(model, layer):
    kind = model.config.model_type
    if kind == "gpt2":
        return model.transformer.h[layer]
    return (model.gpt_neox if kind == "gpt_neox" else model.model).layers[layer]


def final_norm(model):
    kind = model.config.model_type
    if kind == "gpt2":
        return model.transformer.ln_f
    return model.gpt_neox.final_layer_norm if kind == "gpt_neox" else model.model.norm


def unembed(model):
    return model.embed_out if hasattr(model, "embed_out") else model.get_output_embeddings()


def say(model, stream):
    """Logits [vocab] of one stream [d_model]."""
    with torch.no_grad():
        return unembed(model)(final_norm(model)(stream[None]))[0]


def run(model, document, zeroed=()):
    """(coefficients, ffn outputs, block outputs) per layer [pos, ...], and logits [pos, vocab].

    zeroed: (layer, position, key) coefficients that are set to 0.
    """
    n = oracle.n_layers(model)
    seen = {kind: [None] * n for kind in ("c", "y", "post")}
    with contextlib.ExitStack() as stack:

        def at(handle):
            stack.callback(handle.remove)

        for layer in range(n):

            def before(_m, args, layer=layer):
                c = args[0].clone()
                for where, position, key in zeroed:
                    if where == layer:
                        c[0, position, key] = 0
                seen["c"][layer] = c[0]
                return (c,)

            def after(_m, _a, out, layer=layer):
                seen["y"][layer] = out[0]

            def block(_m, _a, out, layer=layer):
                seen["post"][layer] = (out[0] if isinstance(out, tuple) else out)[0]

            at(down(model, layer).register_forward_pre_hook(before))
            at(down(model, layer).register_forward_hook(after))
            at(_block(model, layer).register_forward_hook(block))
        with torch.no_grad():
            logits = model(torch.tensor([list(document)])).logits[0]
    return seen["c"], seen["y"], seen["post"], logits


def coefficients(model, document, layer):
    """[pos, key] float64."""
    return run(model, document)[0][layer].double().numpy()


def top_token(direction, model, size):
    """Largest entry of W_U (gain * centred direction) among the first `size` tokens."""
    gain = final_norm(model).weight.detach().double().numpy()
    if model.config.model_type != "llama":
        direction = direction - direction.mean()
    weight = unembed(model).weight.detach().double().numpy()[:size]
    return int(np.argmax(weight @ (gain * direction)))

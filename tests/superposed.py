"""A model with known features in superposition: what an SAE of its MLP output should find.

Every token stands for 3 of 128 unit directions in 64 dimensions (more than fit at right angles),
with strengths of its own; its embedding is their sum, and nothing but the MLP of layer 1 moves it:
mlp_out is that sum again, up to LayerNorm's scale and a bias. The MLP's neurons are a random
rotation of the space, each of them always active (its bias holds GELU in its linear part), so that
no neuron is a feature. There are far more tokens than features of an SAE, so that a dictionary of
tokens does not help.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests import tiny

VOCAB, D_MODEL, D_MLP, FEATURES, ACTIVE = 2400, 64, 96, 128, 3
BIAS = 40.0  # pre-activations are a few units: GELU is linear there


@functools.cache
def directions() -> np.ndarray:
    """[feature, d_model] unit vectors, centred, since LayerNorm takes the mean away."""
    rows = np.random.default_rng(3).standard_normal((FEATURES, D_MODEL))
    rows -= rows.mean(1, keepdims=True)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@functools.cache
def strengths() -> np.ndarray:
    """[token, feature] how much of each feature a token has; three of them are not 0."""
    rng = np.random.default_rng(4)
    out = np.zeros((VOCAB, FEATURES))
    for row in out:
        row[rng.choice(FEATURES, ACTIVE, replace=False)] = rng.uniform(0.7, 1.3, ACTIVE)
    return out


def make(folder: Path) -> Path:
    """Save the model and its tokenizer (words w1, w2, ...)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCAB,
            n_layer=2,
            n_head=2,
            n_embd=D_MODEL,
            n_inner=D_MLP,
            n_positions=tiny.CONTEXT,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
        model = GPT2LMHeadModel(config)
    rng = np.random.default_rng(5)
    up = np.linalg.qr(rng.standard_normal((D_MLP, D_MLP)))[0][:D_MODEL] * 1.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, parameter in model.named_parameters():
            if ".ln_" in name and name.endswith("weight"):
                parameter.fill_(1.0)
        model.transformer.wte.weight.copy_(torch.from_numpy(strengths() @ directions()))
        mlp = model.transformer.h[1].mlp
        mlp.c_fc.weight.copy_(torch.from_numpy(up))  # [d_model, d_mlp], orthonormal rows
        mlp.c_fc.bias.fill_(BIAS)
        mlp.c_proj.weight.copy_(torch.from_numpy(up.T))
        mlp.c_proj.bias.copy_(torch.from_numpy(rng.standard_normal(D_MODEL)))
        model.lm_head.weight.copy_(torch.from_numpy(0.2 * rng.standard_normal((VOCAB, D_MODEL))))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tiny.make_word_tokenizer(VOCAB).save_pretrained(folder)
    return folder


def texts(n: int, length: int = 60) -> list[str]:
    """Documents of random words."""
    rng = np.random.default_rng(6)
    return [tiny.words(rng.integers(1, VOCAB, length).tolist()) for _ in range(n)]

"""Models with known answers: hand-weighted, attention-only, in the GPT-2 architecture.

The residual stream is cut into four subspaces: the token as a one-hot code, the previous token
(which only a head writes), the output (all that the unembedding reads) and the position. A planted
head copies from one subspace to another; every other head is weak and random. One-hot codes have
one norm and one sum, and the position's code has sum 0, so LayerNorm is almost a constant factor.
The MLP's weights are 0.

The words are `w1` ... `w31` (id 0 is `<|endoftext|>`), one per id, so `texts` and `documents` of a
planted model are the same thing. Each `make_*` returns a dict:

    folder      the checkpoint, tokenizer included
    heads       name -> (layer, head) of the planted heads
    documents   lists of token ids
    texts       the same as text
    facts       what the oracle measured, in nats per token; see each function
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests import oracle, tiny

VOCAB = 32
N_LAYERS, N_HEADS, D_HEAD = 2, 4, 32
D_MODEL = N_HEADS * D_HEAD
CONTEXT = 64

TOKEN, PREVIOUS, OUTPUT, POSITION = (slice(i, i + 32) for i in range(0, D_MODEL, 32))
# Size of the position's code; a token's and a head's output are of size about 1.
POSITION_NORM = 1.5
# Turns per position, chosen by search: codes of different positions (up to 63 apart) have a cosine
# of at most 0.24.
_ANGLES = 2 * math.pi * torch.tensor([3, 5, 7, 16, 17, 20, 28, 29]) / 67


def _position_codes(positions: Tensor) -> Tensor:
    """[n, 32]: cosines, sines, and both again with the other sign (so that the sum is 0)."""
    angles = positions[:, None] * _ANGLES
    half = torch.cat([angles.cos(), angles.sin()], dim=1)
    return POSITION_NORM / 4 * torch.cat([half, -half], dim=1)


def _sigma(*amplitudes: float) -> float:
    """LayerNorm's divisor for a token, a position and further one-hot codes of these sizes."""
    square = 1 + POSITION_NORM**2 + sum(a * a for a in amplitudes)
    mean = (1 + sum(amplitudes)) / D_MODEL
    return math.sqrt(square / D_MODEL - mean**2)


def _blank(unembed: float, weak: float, rng: torch.Generator) -> Any:
    """Codes, an unembedding that reads OUTPUT, and weak random heads (outputs of size `weak`)."""
    with torch.random.fork_rng(devices=[]):
        config = GPT2Config(
            vocab_size=VOCAB,
            n_layer=N_LAYERS,
            n_head=N_HEADS,
            n_embd=D_MODEL,
            n_inner=8,
            n_positions=CONTEXT,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
        # Any: transformers' attributes are not typed beyond Module.
        model: Any = GPT2LMHeadModel(config)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=rng) * std

    body = model.transformer
    body.wte.weight.zero_()
    body.wte.weight[:, TOKEN] = torch.eye(VOCAB)
    body.wpe.weight.zero_()
    body.wpe.weight[:, POSITION] = _position_codes(torch.arange(CONTEXT))
    model.lm_head.weight.zero_()
    model.lm_head.weight[:, OUTPUT] = unembed * torch.eye(VOCAB)
    for block in body.h:
        block.mlp.c_fc.weight.zero_()
        block.mlp.c_proj.weight.zero_()
        # LayerNorm makes every entry about 1 in size: so are the entries of q, k and v.
        block.attn.c_attn.weight.copy_(normal(D_MODEL, 3 * D_MODEL, std=D_MODEL**-0.5))
        block.attn.c_attn.bias.copy_(normal(3 * D_MODEL, std=0.1))
        std = 2 * weak / math.sqrt(D_MODEL * D_HEAD)
        block.attn.c_proj.weight.copy_(normal(D_MODEL, D_MODEL, std=std))
        block.attn.c_proj.bias.copy_(normal(D_MODEL, std=weak / math.sqrt(D_MODEL)))
    return model


def _write_head(model: Any, head: oracle.Head, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
    """Set one head: q, k, v [d_model, d_head] and o [d_head, d_model], biases 0."""
    layer, index = head
    attn = model.transformer.h[layer].attn
    own = slice(index * D_HEAD, (index + 1) * D_HEAD)
    for part, weight in enumerate((q, k, v)):
        columns = slice(part * D_MODEL + own.start, part * D_MODEL + own.stop)
        attn.c_attn.weight[:, columns] = weight
        attn.c_attn.bias[columns] = 0
    attn.c_proj.weight[own] = o


def _read(subspace: slice, gain: float = 1.0) -> Tensor:
    """[d_model, d_head] that copies a subspace into the head."""
    weight = torch.zeros(D_MODEL, D_HEAD)
    weight[subspace] = gain * torch.eye(D_HEAD)
    return weight


def _attend_back(offset: int, score: float, sigma: float) -> tuple[Tensor, Tensor]:
    """q, k of a head that attends `offset` positions back, at `score` above most others."""
    turn = torch.zeros(D_HEAD, D_HEAD)
    cosines, sines = torch.arange(8), torch.arange(8, 16)
    # cos(a - b) and sin(a - b) from cos a and sin a; half of the code (no mirror) is enough.
    turn[cosines, cosines] = turn[sines, sines] = torch.cos(offset * _ANGLES)
    turn[sines, cosines] = torch.sin(offset * _ANGLES)
    turn[cosines, sines] = -torch.sin(offset * _ANGLES)
    gain = score * math.sqrt(D_HEAD) * sigma**2 / (POSITION_NORM**2 / 2)
    k = torch.zeros(D_HEAD, D_HEAD)
    k[:16, :16] = torch.eye(16)
    q_full, k_full = torch.zeros(D_MODEL, D_HEAD), torch.zeros(D_MODEL, D_HEAD)
    q_full[POSITION], k_full[POSITION] = gain * turn, k
    return q_full, k_full


def _write(subspace: slice, gain: float, permutation: Sequence[int] | None = None) -> Tensor:
    """[d_head, d_model] that writes the head's code, tokens permuted, into a subspace."""
    codes = torch.eye(D_HEAD)
    if permutation is not None:
        codes = codes[torch.tensor(permutation)]
    weight = torch.zeros(D_HEAD, D_MODEL)
    weight[:, subspace] = gain * codes
    return weight


def _write_successor(
    model: Any,
    head: oracle.Head,
    permutation: Sequence[int],
    amplitude: float = 1.0,
) -> None:
    """A head that attends to its own position and predicts the token's image."""
    sigma = _sigma()
    q, k = _attend_back(0, 8.0, sigma)
    o = _write(OUTPUT, amplitude * sigma, permutation)
    _write_head(model, head, q, k, _read(TOKEN), o)


def _cycle(seed: int) -> list[int]:
    """A permutation of the ids: the words in one cycle, id 0 left alone."""
    order = list(range(1, VOCAB))
    random.Random(seed).shuffle(order)
    image = list(range(VOCAB))
    for a, b in itertools.pairwise([*order, order[0]]):
        image[a] = b
    return image


def _follow(image: Sequence[int], start: int, length: int) -> list[int]:
    """A document in which every token is the image of the one before."""
    document = [start]
    while len(document) < length:
        document.append(image[document[-1]])
    return document


def _followers(image: Sequence[int], n: int, draw: random.Random) -> list[list[int]]:
    """`n` such documents of 8 to 40 tokens."""
    return [_follow(image, draw.randint(1, 31), draw.randint(8, 40)) for _ in range(n)]


def measure(folder: Path, documents: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The oracle's account of a model on some documents.

    Returns:
        loss: [docs]. loss_delta, loss_delta_mean, kl: [layer, head], zero ablation in the weights,
        mean ablation, and the KL of the former, each a mean over documents. All in nats per token.
    """
    model = oracle.load(folder)
    loss = oracle.document_losses(model, documents)
    means = oracle.means_of_others(model, documents)
    facts: dict[str, list[float]] = {"loss_delta": [], "loss_delta_mean": [], "kl": []}
    for layer, head in oracle.heads_of(model):
        without = oracle.edited(model, [(layer, head)])
        mean = oracle.mean_ablated_losses(model, documents, layer, head, means=means)
        facts["loss_delta"].append((oracle.document_losses(without, documents) - loss).mean())
        facts["loss_delta_mean"].append((mean - loss).mean())
        facts["kl"].append(oracle.kl(model, without, documents).mean())
    shape = (oracle.n_layers(model), oracle.n_heads(model))
    return {"loss": loss} | {key: np.reshape(value, shape) for key, value in facts.items()}


def _finish(
    model: Any,
    folder: Path,
    heads: dict[str, oracle.Head],
    documents: list[list[int]],
) -> dict[str, Any]:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tiny.make_word_tokenizer(VOCAB).save_pretrained(folder)
    return {
        "folder": folder,
        "heads": heads,
        "documents": documents,
        "texts": [tiny.words(document) for document in documents],
        "facts": measure(folder, documents),
    }


@torch.no_grad()
def make_induction(folder: Path, n_documents: int = 16, seed: int = 0) -> dict[str, Any]:
    """A previous-token head (0, 2) and an induction head (1, 1), on sequences repeated once.

    Documents are 12 to 24 different words, twice. Position 0 has a code 20 times as large, like the
    first position in trained models: the induction head rests on it where nothing matches, and
    included positions leave it out. Neither head is saturated, so importance (a gradient) sees
    both, as ablation does.

    Extra facts: first_half, second_half: mean loss of the tokens of either (the second without its
    first two: nothing predicts one, and the other follows the first word, whose code is small
    beside its position); second_half_without: the same with either head zeroed, previous-token head
    first.
    """
    previous, induction = (0, 2), (1, 1)
    rng = torch.Generator().manual_seed(seed)
    model = _blank(unembed=5.5 * _sigma(0.7, 1), weak=0.05, rng=rng)
    # As if <|endoftext|> came before: its code is a key for the induction head to rest on.
    model.transformer.wpe.weight[0] *= 20
    model.transformer.wpe.weight[0, PREVIOUS.start] = 20 * POSITION_NORM
    q, k = _attend_back(1, 8.0, _sigma())
    # 0.7: small beside the stream, or what the head adds to LayerNorm's divisor would cancel its
    # effect on attention to first order, and with it its importance.
    amplitude = 0.7
    o = _write(PREVIOUS, amplitude * _sigma())
    _write_head(model, previous, q, k, _read(TOKEN), o)
    sigma = _sigma(amplitude)
    q = _read(TOKEN, 8.0 * math.sqrt(D_HEAD) * sigma**2 / amplitude)
    k = _read(PREVIOUS)
    q[:, 0] = 0
    _write_head(model, induction, q, k, _read(TOKEN), _write(OUTPUT, sigma))
    # Score 6 for position 0 (its key is sqrt(d_model / 2)), 8 for a match, 0 for the rest.
    bias = model.transformer.h[induction[0]].attn.c_attn.bias
    bias[induction[1] * D_HEAD] = 6.0 * math.sqrt(D_HEAD) / math.sqrt(D_MODEL / 2)

    draw = random.Random(seed)
    documents = []
    for _ in range(n_documents):
        half = draw.sample(range(1, VOCAB), draw.randint(12, 24))
        documents.append(half + half)
    made = _finish(model, folder, {"previous_token": previous, "induction": induction}, documents)

    def halves(model: Any) -> tuple[float, float]:
        first, second = [], []
        for document in documents:
            losses = oracle.token_losses(model, document)
            half = len(document) // 2
            first.append(losses[: half - 1].mean())
            second.append(losses[half + 1 :].mean())
        return float(np.mean(first)), float(np.mean(second))

    loaded = oracle.load(folder)
    made["facts"]["first_half"], made["facts"]["second_half"] = halves(loaded)
    made["facts"]["second_half_without"] = [
        halves(oracle.edited(loaded, [head]))[1] for head in (previous, induction)
    ]
    return made


@torch.no_grad()
def make_redundant(folder: Path, n_documents: int = 12, seed: int = 0) -> dict[str, Any]:
    """Two heads, (0, 1) and (1, 2), that each predict the next token alone.

    Documents follow a fixed cycle of the words. Extra facts: joint_delta, the loss change with both
    removed (about log 32); each one's is within 0.002. Both are saturated: importance is near 0.
    """
    heads = {"first": (0, 1), "second": (1, 2)}
    rng = torch.Generator().manual_seed(seed)
    model = _blank(unembed=12.0 * _sigma(1), weak=0.1, rng=rng)
    image = _cycle(seed)
    for head in heads.values():
        _write_successor(model, head, image)
    draw = random.Random(seed)
    documents = [
        _follow(image, draw.randint(1, 31), draw.randint(8, 40)) for _ in range(n_documents)
    ]
    made = _finish(model, folder, heads, documents)
    both = oracle.ablated_losses(oracle.load(folder), documents, list(heads.values()))
    made["facts"]["joint_delta"] = float((both - made["facts"]["loss"]).mean())
    return made


@torch.no_grad()
def make_constant(folder: Path, n_documents: int = 12, seed: int = 0) -> dict[str, Any]:
    """A head (0, 2) whose z is the same at every position of every document (W_V = 0, b_V != 0).

    It raises the logits of eight words, from which the documents are drawn at random: zeroing it
    costs much, replacing it by its mean nothing.
    """
    constant = (0, 2)
    rng = torch.Generator().manual_seed(seed)
    model = _blank(unembed=3.0 * _sigma(math.sqrt(8)), weak=0.1, rng=rng)
    own = slice(constant[1] * D_HEAD, (constant[1] + 1) * D_HEAD)
    attn = model.transformer.h[constant[0]].attn
    values = slice(2 * D_MODEL + own.start, 2 * D_MODEL + own.stop)
    attn.c_attn.weight[:, values] = 0
    attn.c_attn.bias[values] = 0
    attn.c_attn.bias[values][1:9] = 0.8
    attn.c_proj.weight[own] = _write(OUTPUT, 1 / 0.8)
    draw = random.Random(seed)
    documents = [
        [draw.randint(1, 8) for _ in range(draw.randint(8, 40))] for _ in range(n_documents)
    ]
    return _finish(model, folder, {"constant": constant}, documents)


@torch.no_grad()
def make_harmful(folder: Path, n_documents: int = 12, seed: int = 0) -> dict[str, Any]:
    """A head (0, 0) that predicts the next token, and one (1, 3) that predicts a wrong one.

    Removing the wrong one lowers the loss of every document.
    """
    heads = {"helpful": (0, 0), "harmful": (1, 3)}
    rng = torch.Generator().manual_seed(seed)
    model = _blank(unembed=4.0 * _sigma(1, 1), weak=0.1, rng=rng)
    image = _cycle(seed)
    _write_successor(model, heads["helpful"], image)
    # The image of the image is never the next token here: the cycle is longer than two.
    _write_successor(model, heads["harmful"], [image[i] for i in image], amplitude=1.2)
    draw = random.Random(seed)
    documents = [
        _follow(image, draw.randint(1, 31), draw.randint(8, 40)) for _ in range(n_documents)
    ]
    return _finish(model, folder, heads, documents)


@torch.no_grad()
def make_lengths(folder: Path, n_long: int = 6, n_short: int = 18, seed: int = 0) -> dict[str, Any]:
    """A head (0, 1) that helps in documents of 60 tokens and harms in those of 3.

    Long documents follow the head's cycle, short ones never do. By documents the head harms, by
    tokens it helps: any mean over tokens gets even the sign of its loss_delta wrong.

    Extra facts, `doc` a mean over documents and `token` one over predicted tokens: loss_doc,
    loss_token, delta_doc, delta_token (zeroing the head), importance_doc (the right one),
    importance_token_weighted (|dL_doc/dxi| weighted by predicted tokens), importance_pooled
    (|d(loss over all tokens)/dxi|) and importance_abs_of_mean (absolute value taken last).
    """
    head = (0, 1)
    rng = torch.Generator().manual_seed(seed)
    model = _blank(unembed=5.0 * _sigma(1), weak=0.1, rng=rng)
    image = _cycle(seed)
    _write_successor(model, head, image)
    draw = random.Random(seed)
    documents = [_follow(image, draw.randint(1, 31), 60) for _ in range(n_long)]
    while len(documents) < n_long + n_short:
        document = [draw.randint(1, 31) for _ in range(3)]
        if all(image[a] != b for a, b in itertools.pairwise(document)):
            documents.append(document)
    draw.shuffle(documents)
    made = _finish(model, folder, {"head": head}, documents)

    loaded = oracle.load(folder)
    weights = np.array([len(document) - 1 for document in documents])
    loss = made["facts"]["loss"]
    delta = oracle.ablated_losses(loaded, documents, *head) - loss
    slopes = oracle.gradients_fd(loaded, documents, *head)
    made["facts"] |= {
        "loss_doc": float(loss.mean()),
        "loss_token": float(np.average(loss, weights=weights)),
        "delta_doc": float(delta.mean()),
        "delta_token": float(np.average(delta, weights=weights)),
        "importance_doc": float(np.abs(slopes).mean()),
        "importance_token_weighted": float(np.average(np.abs(slopes), weights=weights)),
        "importance_pooled": float(abs(np.average(slopes, weights=weights))),
        "importance_abs_of_mean": float(abs(slopes.mean())),
    }
    return made


MAKERS = {
    "induction": make_induction,
    "redundant": make_redundant,
    "constant": make_constant,
    "harmful": make_harmful,
    "lengths": make_lengths,
}

"""Scores of a short sentence, for the most and the least symmetric heads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from interp import scores
from interp.analyzers.asymmetry import pairs
from interp.encoding import make_encoder
from interp.errors import InterpError
from interp.model import Model
from interp.scores import Attention, Form

SENTENCE = "The old dog chased the cat because it had stolen his bone."
HEADS = 3
"""Heads at each end of the ranking."""


@dataclass
class Examples:
    """Score matrices of one sentence.

    tokens: the included tokens, as text; positions: theirs, BOS counted.
    heads: (which end, layer, head), from most to least symmetric.
    real, content: [head, query, key] scores before the mask; content with row and column means
        removed and, where the form allows, at rotary offset 0.
    """

    tokens: list[str]
    positions: list[int]
    heads: list[tuple[str, int, int]]
    real: np.ndarray
    content: np.ndarray


def measure(model: Model, forms: list[Form], ranking: np.ndarray) -> Examples | None:
    """Run the sentence once; None without a ranked head or a tokenizer that can cut it."""
    if model.tokenizer is None:
        return None
    try:
        context = min(64, model.cfg.n_ctx)
        encoder = make_encoder(model, None, context=context, min_tokens=2, windows=False)
        document = encoder.document(0, SENTENCE, encoder.encode([SENTENCE])[0])
    except InterpError:
        return None
    if document is None:
        return None
    ids = document.windows[0]
    at = [i for i, token in enumerate(ids) if i and token not in encoder.special_ids]
    if len(at) < 2:
        return None
    chosen = _ends(ranking)
    if not chosen:  # the text has shown nothing of any head
        return None
    found: dict[int, tuple[Any, Any]] = {}

    def look(a: Attention) -> None:
        form = forms[a.layer]
        content = form.content(a) if form.bilinear else a.scores
        real, content = (x[0][:, at][:, :, at].cpu().double() for x in (a.scores, content))
        found[a.layer] = (real, pairs.centred(content))

    tokens = torch.tensor([ids], device=model.device)
    with scores.attending(model, {layer: look for _, layer, _ in chosen}):
        scores.run(model, SimpleNamespace(tokens=tokens, attention_mask=torch.ones_like(tokens)))
    both = [np.stack([found[layer][i][head].numpy() for _, layer, head in chosen]) for i in (0, 1)]
    words = [model.tokenizer.decode([ids[i]]) for i in at]
    return Examples(words, at, chosen, both[0], both[1])


def _ends(ranking: np.ndarray) -> list[tuple[str, int, int]]:
    known = [(i, h) for i, h in np.ndindex(*ranking.shape) if np.isfinite(ranking[i, h])]
    order = sorted(known, key=lambda at: -ranking[at])
    n = min(HEADS, len(order) // 2)
    ends = [("most", i, h) for i, h in order[:n]]
    return ends + [("least", i, h) for i, h in order[len(order) - n :]]

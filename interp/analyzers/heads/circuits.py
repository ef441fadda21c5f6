"""What heads copy, and which heads read what others write: from the weights alone.

With rows as vectors, W_V and W_O of a head, and every matrix that reads a norm's output taken with
the norm's gain (and centring) folded in:

* copying: of the map from tokens to logits W_E W_V W_O W_U, whose nonzero eigenvalues are those of
  the d_head x d_head matrix W_O W_U W_E W_V: (sum of real parts) / (sum of magnitudes). 1: raises
  the token that it attends to, -1: lowers it, 0: neither.
* composition of an earlier head's OV = W_V W_O with a later one's: |OV M|_F / (|OV|_F |M|_F) with
  M = W_Q W_K^T (its queries read what OV writes), M = W_K W_Q^T (its keys do), M = W_V W_O (its
  values do). Unrelated Gaussian matrices give about 1 / sqrt(d_model).

The null model of both is re-pairing: W_V of one head with W_O of another of its layer (that does
not share its KV head), and likewise W_Q with W_K. Where percentiles of it are told, they are pooled
over layers.

What it does not show. The direct path alone: what the layers between do is left out, and so is the
size of the norm. Under rotary embedding W_Q W_K^T is the form at offset 0. A head may compose with
another and hardly ever attend.

Source: Elhage et al. (2021), "A Mathematical Framework for Transformer Circuits".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from interp import scores, stats
from interp.errors import InterpError
from interp.model import Model
from interp.results import Column

KINDS = {"q": "queries", "k": "keys", "v": "values"}
MOST = 500
"""Pairs of heads kept per kind, the largest."""
DRAWS = 20_000
"""Re-paired pairs of circuits behind the null of composition."""
ROWS = 4096
"""Tokens of the vocabulary multiplied at once."""
SCORE = "-1 to 1"
RATIO = "ratio of norms"

COLUMNS = {
    "ov_copying": Column(
        SCORE,
        "Copying: sum of real parts over sum of magnitudes of the eigenvalues of W_E W_V W_O W_U, "
        "norms folded in (direct path only).",
    ),
    "ov_copying_percentile": Column("percent", "Of ov_copying among re-paired heads."),
}
PAIRS = {
    "kind": Column(
        "name", "Whose input it is: the later head's q (queries), k (keys), v (values)."
    ),
    "layer": Column("index", "Layer of the earlier head."),
    "head": Column("index", "The earlier head."),
    "later_layer": Column("index", "Layer of the later head."),
    "later_head": Column("index", "The later head."),
    "composition": Column(RATIO, "|OV M|_F / (|OV|_F |M|_F), norms folded in."),
    "percentile": Column("percent", "Of it among re-paired circuits of any two layers."),
}


@dataclass
class Circuits:
    """Of all heads.

    copying: [layer, head]; copying_null: [re-paired head], pooled over layers.
    composition: kind -> [layer, head, later layer, later head]; nan where not later.
    composition_null: kind -> [draw].
    """

    copying: np.ndarray
    copying_null: np.ndarray
    composition: dict[str, np.ndarray]
    composition_null: dict[str, np.ndarray]


@dataclass
class _Layer:
    """One layer's weights in float64, [head, d_model, d_head]; o is [head, d_head, d_model]."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor


def measure(model: Model, seed: int) -> Circuits:
    """Of every head and every pair.

    Raises:
        InterpError: weights that cannot be read as matrices.
    """
    cfg = model.cfg
    group = cfg.n_heads // cfg.n_kv_heads
    layers = [_layer(model, i) for i in range(cfg.n_layers)]
    through = _vocabulary(model)
    apart = [
        (a, b) for a in range(cfg.n_heads) for b in range(cfg.n_heads) if a // group != b // group
    ]
    copying = torch.stack([_copying(one.o, one.v, through) for one in layers])
    null = []
    if apart:
        first, second = (torch.tensor(side) for side in zip(*apart, strict=True))
        null = [_copying(one.o[second], one.v[first], through) for one in layers]
    rng = np.random.default_rng([seed, 5])
    return Circuits(
        copying=copying.numpy(),
        copying_null=torch.cat(null).numpy() if null else np.zeros(0),
        composition=_compositions(layers),
        composition_null=_null(layers, apart, rng),
    )


def _layer(model: Model, layer: int) -> _Layer:
    cfg = model.cfg
    fold = scores.norm_gain(model, layer)
    w_q, w_k = scores.weights(model, layer)
    w_v = scores.value_weights(model, layer)
    q, k, v = (scores.effective(w, fold).cpu() for w in (w_q, w_k, w_v))
    group = cfg.n_heads // cfg.n_kv_heads
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    return _Layer(q, k, v, scores.output_weights(model, layer))


def _vocabulary(model: Model) -> Float64[Tensor, "d_model d_model"]:
    """W_U W_E over the real vocabulary, final norm folded in: [what is written, what is read]."""
    unembedding = getattr(model.bridge.unembed.original_component, "weight", None)
    embedding = model.bridge.original_model.get_input_embeddings().weight
    if unembedding is None or unembedding.shape != embedding.shape:
        raise InterpError(
            f"Embedding and unembedding of {model.name} are not two matrices of one shape: "
            "what its heads copy cannot be told."
        )
    fold = scores.final_norm_gain(model)
    out = torch.zeros(model.cfg.d_model, model.cfg.d_model, dtype=torch.float64)
    for start in range(0, model.cfg.vocab_size, ROWS):
        at = slice(start, min(start + ROWS, model.cfg.vocab_size))
        rows = scores.effective(unembedding[at].detach().T, fold).cpu()
        out += rows @ scores.wide(embedding[at].detach()).cpu()
    return out


def _copying(o: Tensor, v: Tensor, through: Tensor) -> Float64[Tensor, " head"]:
    """[head] of W_O [head, d_head, d_model] and W_V [head, d_model, d_head]."""
    matrices = o @ through @ v
    try:  # numpy's: torch's (MKL) does not converge on some matrices of low rank
        values = torch.from_numpy(np.linalg.eigvals(matrices.numpy()).astype(complex))
    except np.linalg.LinAlgError as error:
        raise InterpError(f"the eigenvalues of a head could not be found ({error}).") from error
    total = values.abs().sum(-1)
    return torch.where(total > 0, values.real.sum(-1) / total, 0.0)


def _norm(left: Tensor, middle: Tensor, right: Tensor) -> Tensor:
    """[...] |A B|_F of A = a1 a2 and B = b1 b2, from a1^T a1, a2 b1 and b2 b2^T."""
    return (left @ middle * (middle @ right)).sum((-1, -2)).clamp(min=0).sqrt()


def _sides(one: _Layer, kind: str) -> tuple[Tensor, Tensor]:
    """What reads, [head, d_model, d_head], and the other factor's Gram [head, d_head, d_head]."""
    reads = {"q": one.q, "k": one.k, "v": one.v}[kind]
    other = {"q": one.k.mT, "k": one.q.mT, "v": one.o}[kind]
    return reads, other @ other.mT


def _compositions(layers: list[_Layer]) -> dict[str, np.ndarray]:
    n, heads = len(layers), len(layers[0].q)
    out = {kind: np.full((n, heads, n, heads), np.nan) for kind in KINDS}
    grams = [one.v.mT @ one.v for one in layers]
    own = [
        _norm(g, torch.eye(g.shape[-1]).to(g), one.o @ one.o.mT)
        for g, one in zip(grams, layers, strict=True)
    ]
    for kind in KINDS:
        for later, two in enumerate(layers):
            reads, other = _sides(two, kind)
            size = _norm(reads.mT @ reads, torch.eye(reads.shape[-1]).to(reads), other)
            for i in range(later):
                for head in range(heads):
                    middle = layers[i].o[head] @ reads  # [later head, d_head, d_head]
                    made = _norm(grams[i][head], middle, other)
                    whole = own[i][head] * size
                    found = torch.where(whole > 0, made / whole, 0.0)
                    out[kind][i, head, later] = found.numpy()
    return out


def _null(
    layers: list[_Layer], apart: list[tuple[int, int]], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Re-paired circuits of random pairs of layers."""
    out: dict[str, np.ndarray] = {}
    n = len(layers)
    for kind in KINDS:
        made: list[np.ndarray] = []
        pairs = [(i, j) for j in range(n) for i in range(j)] if apart else []
        each = -(-DRAWS // max(1, len(pairs)))
        for i, j in pairs:
            one, two = layers[i], layers[j]
            a, b, c, d = (
                torch.tensor(x)
                for pick in (rng.integers(len(apart), size=each) for _ in range(2))
                for x in zip(*(apart[p] for p in pick), strict=True)
            )
            gram = one.v[a].mT @ one.v[a]
            reads, other = _sides(two, kind)
            eye = torch.eye(gram.shape[-1]).to(gram)
            whole = _norm(gram, eye, one.o[b] @ one.o[b].mT)
            whole = whole * _norm(reads[c].mT @ reads[c], eye, other[d])
            found = _norm(gram, one.o[b] @ reads[c], other[d])
            made.append(torch.where(whole > 0, found / whole, 0.0).numpy())
        out[kind] = np.concatenate(made) if made else np.zeros(0)
    return out


# Tables -------------------------------------------------------------------------------------------


def columns(made: Circuits) -> dict[str, np.ndarray]:
    """Column -> [layer, head]."""
    percentile = stats.percentile_of(made.copying, made.copying_null)
    return {"ov_copying": made.copying, "ov_copying_percentile": percentile}


def pairs(made: Circuits, removed: set[tuple[int, int]]) -> pd.DataFrame:
    """The pairs that compose most, of each kind, heads that were cut out left out."""
    parts = []
    for kind, values in made.composition.items():
        places = np.argwhere(~np.isnan(values))
        there = [(i, h) not in removed and (j, g) not in removed for i, h, j, g in places.tolist()]
        places = places[np.array(there, dtype=bool)]
        found = values[tuple(places.T)]
        top = np.argsort(-found, kind="stable")[:MOST]
        parts.append(
            pd.DataFrame(
                {
                    "kind": kind,
                    **{
                        name: places[top, axis]
                        for axis, name in enumerate(("layer", "head", "later_layer", "later_head"))
                    },
                    "composition": found[top],
                    "percentile": stats.percentile_of(found[top], made.composition_null[kind]),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def summary(made: Circuits, removed: set[tuple[int, int]], d_model: int) -> dict[str, Any]:
    """Counts beyond the nulls."""
    there = np.ones(made.copying.shape, dtype=bool)
    for head in removed:
        there[head] = False
    own, null = made.copying[there], made.copying_null
    out: dict[str, Any] = {"copying": {"heads": len(own), "median": float(np.median(own))}}
    if len(null):
        low, high = np.percentile(null, (2.5, 97.5))
        out["copying"] |= {
            "null_low": float(low),
            "null_high": float(high),
            "above": int((own > high).sum()),
            "below": int((own < low).sum()),
        }
    for kind, values in made.composition.items():
        known = values[there][:, there]
        known = known[~np.isnan(known)]
        found: dict[str, Any] = {"pairs": len(known), "gaussian": d_model**-0.5}
        draws = made.composition_null[kind]
        if len(known) and len(draws):
            bar = float(np.percentile(draws, 99.9))
            found |= {
                "median": float(np.median(known)),
                "null_median": float(np.median(draws)),
                "null_999": bar,
                "above": int((known > bar).sum()),
                "by_chance": len(known) / 1000,
            }
        out[kind] = found
    return out

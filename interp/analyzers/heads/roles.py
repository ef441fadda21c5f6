"""What each head attends to: the usual roles, on repeated random tokens and on text.

A sequence is BOS (where the model has it) and random tokens, all different, said twice. Of the
second copy, less its first token (which nothing announces), each score is the mean attention from
position t to

    previous_token    t - 1
    duplicate_token   t - L, the same token in the first copy (L tokens long)
    induction         t - L + 1, the token after the same token in the first copy
    first_token       0

A score describes where a head looks, not what it does with it, nor whether the model needs it.
Every score is held against an untrained model of the same shape.

Source: Elhage et al. (2021), "A Mathematical Framework for Transformer Circuits"; Olsson et al.
(2022), "In-context Learning and Induction Heads".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp import hooks, journal, scores, stats
from interp.analyzers.heads import importance
from interp.encoding import Document
from interp.errors import InterpError
from interp.model import Model, untrained
from interp.progress import track
from interp.results import Column
from interp.scores import wide
from interp.text import Text

if TYPE_CHECKING:
    from interp.analyzers.heads import _Run

SEQUENCES, LENGTH = 50, 50
"""Sequences, and tokens of each copy (fewer where the context or the vocabulary is small)."""
NAMED = ("previous_token", "duplicate_token", "induction", "first_token")
ON_TEXT = ("previous_token", "first_token", "entropy")
ROLE = 0.4
"""Mean attention from which a head is called by a role."""
ATTENTION = "share of attention"

_WHERE = {
    "previous_token": "the previous token (t - 1)",
    "duplicate_token": "the same token's earlier occurrence (t - L)",
    "induction": "the token after the same token's earlier occurrence (t - L + 1)",
    "first_token": "position 0",
}
COLUMNS = {
    **{
        name + end: Column(
            ATTENTION,
            f"{words}mean attention to {where}, on repeated random tokens, second copy only.",
        )
        for name, where in _WHERE.items()
        for end, words in (
            ("", "Mean over sequences of the "),
            ("_low", "Lower end of the 95% t interval, on a log scale, over sequences of the "),
            ("_high", "Upper end of the 95% t interval, on a log scale, over sequences of the "),
        )
    },
    "entropy": Column("nats", "Mean entropy of the attention, on repeated random tokens."),
    "previous_token_text": Column(
        ATTENTION, "Mean over documents of the mean attention to t - 1, from position 2 on."
    ),
    "first_token_text": Column(
        ATTENTION, "Mean over documents of the mean attention to position 0, from position 2 on."
    ),
    "entropy_text": Column("nats", "Mean over documents of the attention's mean entropy."),
    "role": Column(
        "word",
        f"The largest of the four scores where it is at least {ROLE} and above that of every head "
        "of an untrained model of this shape; else other.",
    ),
}


@dataclass
class Roles:
    """Scores of every head, heads that were cut out included (they attend evenly).

    repeated: name -> [sequence, layer, head], of NAMED and entropy.
    text: name -> [document, layer, head], of ON_TEXT.
    untrained: the same as repeated, of an untrained model.
    length: tokens of a copy.
    importance: [layer, head] importance on the repeated tokens, both copies.
    """

    repeated: dict[str, np.ndarray]
    text: dict[str, np.ndarray]
    untrained: dict[str, np.ndarray]
    length: int
    importance: np.ndarray


def measure(run: _Run) -> Roles:
    """Patterns of the model and of an untrained one, and importance on repeated tokens."""
    model, config, sequences = run.model, run.config, run.sequences
    assert sequences is not None
    ids, start = _ids(sequences), int(run.text.bos)
    null = untrained(model, config.seed)
    with null.measuring():
        random = on_repeated(null, ids, start, config.progress)
    del null
    found = importance.gradients(
        model, sequences, config.batch_size, progress=config.progress, what="repeated tokens"
    )
    return Roles(
        repeated=on_repeated(model, ids, start, config.progress),
        text=on_text(model, run.text, config.batch_size),
        untrained=random,
        length=(ids.shape[1] - start) // 2,
        importance=np.abs(found.xi).mean(0),
    )


def repeated(model: Model, text: Text, seed: int) -> Text:
    """SEQUENCES documents of random non-special tokens said twice, BOS as the text has it.

    Raises:
        InterpError: the context or the vocabulary is too small to say anything twice.
    """
    encoder = text.pool.encoder
    start = [] if text.bos_id is None else [text.bos_id]
    allowed = np.setdiff1d(np.arange(encoder.vocab_size), sorted(text.special_ids))
    length = min(LENGTH, (model.cfg.n_ctx - len(start)) // 2, len(allowed))
    if length < 4:  # below, offsets fall together
        raise InterpError(
            f"--roles needs copies of 4 tokens or more; {model.name} has room for {length}."
        )
    documents = []
    for i in range(SEQUENCES):
        rng = np.random.default_rng([seed, 3, i])
        half = rng.choice(allowed, size=length, replace=False).tolist()
        documents.append(Document(index=i, text="", windows=[start + half + half]))
    return dataclasses.replace(text, documents=documents, part="repeated")


def _ids(text: Text) -> Tensor:
    return torch.tensor([d.windows[0] for d in text.documents])


def on_repeated(model: Model, ids: Tensor, start: int, progress: bool) -> dict[str, np.ndarray]:
    """name -> [sequence, layer, head] of NAMED and entropy.

    Args:
        model: whose patterns.
        ids: [sequence, pos], each a copy of L tokens said twice after `start` others.
        start: 1 with BOS, else 0.
        progress: show a bar.
    """
    length = (ids.shape[1] - start) // 2
    queries = torch.arange(start + length + 1, start + 2 * length)
    keys = {
        "previous_token": queries - 1,
        "duplicate_token": queries - length,
        "induction": queries - length + 1,
        "first_token": torch.zeros_like(queries),
    }
    shape = (len(ids), model.cfg.n_layers, model.cfg.n_heads)
    out = {name: np.full(shape, np.nan) for name in (*NAMED, "entropy")}
    stage = journal.stage("roles")
    rows = stage.size(max(1, 1024 // ids.shape[1]), len(ids))
    starts = range(0, len(ids), rows)

    def some(i: int) -> journal.Values:
        tokens = ids[starts[i] : starts[i] + rows].to(model.device)
        found = {name: np.zeros((len(tokens), *shape[1:])) for name in out}
        for layer, pattern in _patterns(model, tokens, torch.ones_like(tokens)):
            p = wide(pattern)[:, :, queries]
            for name, at in keys.items():
                place = at.to(p.device)[None, None, :, None].expand(*p.shape[:3], 1)
                found[name][:, layer] = p.gather(-1, place).mean((-1, -2)).cpu()
            found["entropy"][:, layer] = torch.special.entr(p).sum(-1).mean(-1).cpu()
        return found

    bar = track(len(ids), "roles", progress)
    for first, found in zip(starts, stage.each(len(starts), some), strict=True):
        for name, values in found.items():
            out[name][first : first + rows] = values
        bar.update(len(found["entropy"]))
    bar.close()
    return out


def on_text(model: Model, text: Text, batch_size: Any) -> dict[str, np.ndarray]:
    """name -> [document, layer, head] of ON_TEXT, from included positions 2 and on.

    From position 1 the previous token is the first one.
    """
    shape = (len(text), model.cfg.n_layers, model.cfg.n_heads)
    sums = {name: np.zeros(shape) for name in ON_TEXT}
    counts = np.zeros(len(text))
    stage = journal.stage("roles on text")
    state = {"sums": sums, "counts": counts}
    for batch in stage.fold(stage.batches(model, text, batch_size), state):
        at = batch.included.clone()
        at[:, :2] = False
        rows = batch.rows.cpu().numpy()
        np.add.at(counts, rows, at.sum(1).cpu().numpy())
        for layer, pattern in _patterns(model, batch.tokens, batch.attention_mask):
            p = wide(pattern)
            before = p.diagonal(offset=-1, dim1=-2, dim2=-1)  # [batch, head, pos - 1]
            parts = {
                "previous_token": torch.nn.functional.pad(before, (1, 0)),
                "first_token": p[..., 0],
                "entropy": torch.special.entr(p).sum(-1),
            }
            weight = at[:, None].to(p)
            for name, values in parts.items():
                np.add.at(sums[name][:, layer], rows, (values * weight).sum(-1).cpu().numpy())
    known = counts > 0
    return {name: total[known] / counts[known, None, None] for name, total in sums.items()}


def _patterns(
    model: Model, tokens: Tensor, mask: Tensor
) -> Iterator[tuple[int, Float[Tensor, "batch head query key"]]]:
    """(layer, attention pattern) of every layer, from one forward pass."""
    kept: dict[int, Tensor] = {}

    def keep(layer: int) -> hooks.Hook:
        def hook(pattern: Tensor) -> None:
            kept[layer] = pattern

        return hook

    sites = [("pattern", i, keep(i)) for i in range(model.cfg.n_layers)]
    with hooks.attached(model, sites):
        scores.run(model, SimpleNamespace(tokens=tokens, attention_mask=mask))
    for layer in range(model.cfg.n_layers):
        yield layer, kept.pop(layer)


# Tables -------------------------------------------------------------------------------------------


def columns(made: Roles) -> dict[str, np.ndarray]:
    """Column -> [layer, head]."""
    out: dict[str, np.ndarray] = {}
    for name in NAMED:
        ends = stats.positive_interval(made.repeated[name], axis=0)
        out[name], out[f"{name}_low"], out[f"{name}_high"] = ends.mean, ends.low, ends.high
    out["entropy"] = made.repeated["entropy"].mean(0)
    for name in ON_TEXT:
        out[f"{name}_text"] = made.text[name].mean(0)
    means = np.stack([out[name] for name in NAMED])
    best = means.argmax(0)
    null = np.array([made.untrained[name].mean(0).max() for name in NAMED])
    called = (means.max(0) >= ROLE) & (means.max(0) > null[best])
    out["role"] = np.where(called, np.array(NAMED, dtype=object)[best], "other")
    return out


def summary(run: _Run, made: Roles, table: Any) -> dict[str, Any]:
    """Heads of each role, what an untrained model scores, and ranks of importance compared."""
    assert run.gradients is not None
    null = {name: values.mean(0).ravel() for name, values in made.untrained.items()}
    out: dict[str, Any] = {
        "sequences": len(made.repeated["induction"]),
        "copy_length": made.length,
        "documents": len(made.text["entropy"]),
        "untrained": {
            name: {"median": float(np.median(v)), "max": float(v.max())} for name, v in null.items()
        },
        "by_role": {role: _of_role(run, table, role) for role in (*NAMED, "other")},
        "rank_correlation": _ranks(run, made, table),
    }
    return out


def _of_role(run: _Run, table: Any, role: str) -> dict[str, Any]:
    mine = (table["role"] == role).to_numpy()
    out: dict[str, Any] = {"heads": int(mine.sum())}
    if not mine.any():
        return out
    out["importance"] = float(table.loc[mine, "importance"].mean())
    exact = run.exact
    if exact is not None and not np.isnan(exact.delta).any():
        change = stats.paired_t(exact.delta[:, mine].mean(1))
        out |= {
            "loss_delta": float(change.mean),
            "ci_low": float(change.low),
            "ci_high": float(change.high),
            "loss_delta_magnitude": float(np.abs(exact.delta[:, mine].mean(0)).mean()),
        }
    return out


def _ranks(run: _Run, made: Roles, table: Any) -> dict[str, float]:
    """Spearman's rho over heads: text against repeated tokens, and halves of the text."""
    assert run.gradients is not None
    at = tuple(table[name].to_numpy() for name in ("layer", "head"))
    own = np.abs(run.gradients.xi)
    out = {"importance: text~repeated": stats.spearman(own.mean(0)[at], made.importance[at])}
    if len(own) > 1:
        out["importance: even~odd documents"] = stats.spearman(
            own[::2].mean(0)[at], own[1::2].mean(0)[at]
        )
    exact = run.exact
    if exact is not None and len(exact.delta) > 1 and not np.isnan(exact.delta).any():
        for name, values in (("loss_delta", exact.delta), ("kl", exact.kl)):
            assert values is not None
            out[f"{name}: even~odd documents"] = stats.spearman(
                values[::2].mean(0), values[1::2].mean(0)
            )
    return out

"""Checks of what analyzers read beside activations: weights, gains of norms, scores' form, donors.

A is made of W_Q and W_K as `interp.scores` reads them, copying of W_V and W_O, what a value says of
the final norm's gain; a wrong one of these changes no logit. Here they are compared with the
checkpoint's own tensors, in numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from interp import scores
from interp.analyzers.ffn_keys.values import Vocabulary
from interp.analyzers.heads.standins import Donors
from interp.doctor.block import Pair, compared
from interp.doctor.case import Case, gap, wide
from interp.doctor.outcome import Check, Largest, Measured, NotApplicableError

SEEDS = (0, 1)  # of the donors that are looked at


def weights(case: Case) -> Measured:
    """W_Q, W_K and W_V of every head, as analyzers read them, are the checkpoint's."""
    made, model = case.arithmetic, case.model

    def pairs() -> Iterator[Pair]:
        for i in range(model.cfg.n_layers):
            read = (*scores.weights(model, i), scores.value_weights(model, i))
            for name, seen, expected in zip("QKV", read, made.qkv_weights(i), strict=True):
                yield f"W_{name} of layer {i}", wide(seen), expected

    return compared(case, pairs())


def score_form(case: Case) -> Measured:
    """Scale and rotation of scores, as analyzers have them, are those of the config.

    Rotations in float32 alone: in 16 bit the model rounds its cosines, and they are not used.
    """
    made, model = case.arithmetic, case.model
    if case.forms is None:
        raise NotApplicableError("scores are of no form that is known")
    exact = model.dtype == torch.float32
    longest = max(map(len, case.documents))
    offsets = sorted({0, 1, longest - 1}) if exact else [0]
    worst = Largest()
    for i, form in enumerate(case.forms):
        if not form.bilinear:
            worst.add(np.inf, f"layer {i} is said to make its scores otherwise")
            continue
        worst.add(abs(form.scale / made.scale - 1), f"the scale of layer {i}")
        if form.rotary != bool(made.rotated):
            words = "no rotation" if made.rotated else "a rotation"
            worst.add(np.inf, f"{words} in layer {i}")
            continue
        for offset in offsets if form.angles is not None or not form.rotary else ():
            error = gap(wide(form.turn(offset, made.d_head)), made.turn(offset))
            worst.add(error, f"the rotation of layer {i} by {offset} positions")
        if exact and form.rotary and form.angles is None:
            worst.add(np.inf, f"no angles of the rotation in layer {i}")
    return worst.measured(case.tolerance, "there are no layers")


def folded(case: Case) -> Measured:
    """What a norm's gain, and its centring, make of the matrices that read its output.

    Each row of a folded matrix is relative to its own size: gains differ from one dimension to the
    next.
    """
    made, model = case.arithmetic, case.model
    axes = np.eye(model.cfg.d_model)

    def pairs() -> Iterator[Pair]:
        for i in range(model.cfg.n_layers):
            name, fold = made.name(i, made.family.norms[0]), scores.norm_gain(model, i)
            through = made.unscaled(name, axes)
            for part, raw in zip("QKV", made.qkv_weights(i), strict=True):
                seen = scores.effective(torch.tensor(raw), fold)
                yield f"W_{part} of layer {i}, the norm folded in", wide(seen), through @ raw
        vocabulary, last = Vocabulary(model), model.cfg.n_layers - 1
        unembedding = made.unembedding()[: model.cfg.vocab_size]
        yield "unembedding", wide(vocabulary.weight), unembedding
        if not model.cfg.d_mlp:
            return
        values, _ = made.projection(last, made.family.down)
        for basis in vocabulary.bases:
            seen = wide(vocabulary.directions(torch.tensor(values), basis))
            expected = values if basis == "raw" else made.unscaled(made.family.final, values)
            # [d_model, key]: each dimension is relative to its own size.
            yield f"values, {basis}", seen.T, expected.T
        if len(vocabulary.bases) < 2:
            yield "values, folded: no final norm is seen", np.ones(1), np.zeros(1)

    return compared(case, pairs())


def donors(case: Case) -> Measured:
    """Whose output stands in for a document's (resampling): another's, by document and seed alone.

    Neither the order of the documents nor what else is in a batch plays a part; the t-th included
    position gets what the donor has at its t-th.
    """
    text, model = case.text, case.model
    if ("z", 0) not in case.places or len(text) < 2:
        raise NotApplicableError("the model shows no heads' outputs, or there are no two documents")
    wrong = _donors_wrong(case)
    if wrong is not None:
        return Measured(np.inf, case.tolerance, wrong)
    made, worst = Donors(model, text, SEEDS[0]), Largest()
    whole = made.z(case.batch)
    for row in range(len(text)):
        alone = made.z(text.batch_of([(row, 0)], model.device))
        donor = made.of[row]
        to, source = (_included(case, i) for i in (row, donor))
        if not len(to) or not len(source):
            continue
        source = source[np.arange(len(to)) % len(source)]
        for layer in range(model.cfg.n_layers):
            expected = wide(case.site("z", layer))[donor, source]
            for words, seen in (("together", whole[layer][row]), ("alone", alone[layer][0])):
                where = f"document {row} from {donor}, {words}, layer {layer}"
                worst.add(gap(wide(seen)[to], expected, over=2), where)
    return worst.measured(case.run_tolerance, "no document has an included position")


def _included(case: Case, document: int) -> np.ndarray:
    """Its included positions, ascending."""
    return np.flatnonzero(case.batch.included[document].cpu().numpy())


def _donors_wrong(case: Case) -> str | None:
    """A document that stands in for itself, or a donor that the order of documents changes."""
    text, model = case.text, case.model
    n = len(text)
    backwards = text.subset(range(n - 1, -1, -1))
    for seed in SEEDS:
        chosen = Donors(model, text, seed).of
        again = [n - 1 - i for i in Donors(model, backwards, seed).of[::-1]]
        for i, donor in enumerate(chosen):
            if donor == i:
                return f"document {i} stands in for itself"
            if donor != again[i]:
                return f"document {i} gets another donor where documents come in another order"
    return None


CHECKS = (
    Check("weights as read", "relative", "W_Q, W_K, W_V of heads are the checkpoint's", weights),
    Check("score form", "relative", "scale and rotation of scores are the config's", score_form),
    Check("folded norms", "relative", "gains are folded in as the norms multiply", folded),
    Check("resample donors", "relative", "another document, whatever else is in a batch", donors),
)

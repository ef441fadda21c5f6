"""Checks of whole runs: logits, losses, batches, hooks, interventions, splices, gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp import hooks, interventions, kernels, scores, splice
from interp.analyzers.asymmetry import ontext
from interp.analyzers.ffn_keys import coefficients
from interp.analyzers.ffn_keys.triggers import LayerTriggers
from interp.analyzers.heads import importance
from interp.doctor.case import Case, gap, log_softmax, mean_loss, wide
from interp.doctor.outcome import Check, Largest, Measured, NotApplicableError
from interp.reducers import MeanVar

EXTRA = 5  # padded positions
STEP = 1e-4  # of the finite difference, around a scale of 1, in float64
SLOPE = 1e-3  # what float32 gradients may be off by, of the largest slope
EVERY_SITE = "a copy at every site"
SHORT = 12  # tokens of the document that it is of
LOUD = {torch.float16: 10.0}  # elsewhere 100; scores of 100 times 100 would overflow


def written_out(case: Case) -> Measured:
    """Plain transformers gives what the forward pass written out in numpy gives."""
    if case.model.dtype != torch.float32:
        raise NotApplicableError("16-bit rounding over all layers would hide what it looks for")
    worst = Largest()
    made = case.arithmetic.logits(case.documents)
    for i, (seen, expected) in enumerate(zip(case.plain_logits, made, strict=True)):
        worst.add(gap(seen, expected), f"document {i}")
    return worst.measured(case.tolerance, "no text")


def logits(case: Case) -> Measured:
    """The model's logits, in a padded batch, are plain transformers', one document at a time."""
    worst = Largest()
    for i, expected in enumerate(case.plain_logits):
        worst.add(gap(wide(case.clean[i, : len(expected)]), expected), f"document {i}")
    return worst.measured(case.run_tolerance, "no text")


def losses(case: Case) -> Measured:
    """Losses and KL as interp reads them, against log-probabilities written out."""
    clean, worst = case.prefix, Largest()
    layer, head = case.heads[-1]
    edits = interventions.removals([(layer, head)])
    without = splice.run_edited(case.model, clean, edits, from_start=not case.splices)
    with interventions.ablate(case.model, [(layer, head)]):
        changed = case.model.forward(case.batch)
    for i, (ids, plain) in enumerate(zip(case.documents, case.plain_logits, strict=True)):
        count = len(ids) - 1
        seen = float(clean.scores.loss[i]) / count
        worst.add(abs(seen - mean_loss(plain, ids)), f"loss of document {i}")
        assert without.kl is not None
        log_p, log_q = (log_softmax(x[:-1]) for x in (plain, wide(changed[i, : len(ids)])))
        expected = float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())
        worst.add(abs(float(without.kl[i]) / count - expected), f"KL of document {i}")
    return worst.measured(case.nats, "no text")


def padding(case: Case) -> Measured:
    """Logits do not depend on padding, nor on what the padded positions hold."""
    if max(map(len, case.documents)) + EXTRA > case.model.cfg.n_ctx:
        raise NotApplicableError("the context of this model has no room for padding")
    worst, last = Largest(), case.model.cfg.vocab_size - 1
    for i, ids in enumerate(case.documents):
        (alone,) = case.forward([ids])
        for what in (0, last):
            (seen,) = case.forward([ids], pad=[what] * EXTRA)
            worst.add(gap(wide(seen), wide(alone)), f"document {i}, padded with id {what}")
    return worst.measured(case.run_tolerance, "no text")


def batching(case: Case) -> Measured:
    """Logits do not depend on the other rows of a batch."""
    shortest = min(map(len, case.documents))
    rows, worst = [ids[:shortest] for ids in case.documents], Largest()
    for i, seen in enumerate(case.forward(rows)):
        (alone,) = case.forward([rows[i]])
        worst.add(gap(wide(seen), wide(alone)), f"row {i} of {len(rows)}")
    return worst.measured(case.run_tolerance, "no text")


def capture(case: Case) -> Measured:
    """Reading every site at once changes no bit of the logits."""
    _, seen = case.captured
    gaps = (seen - case.clean)[case.batch.mask].abs()
    return Measured(float(gaps.max()), note=f"{len(case.places)} sites")


def fused(case: Case) -> Measured:
    """Logits, and every head's z, where attention runs as one kernel and where it is written out.

    Losses and their changes are measured with the former wherever no score is read.
    """
    model = case.model
    if not model.cfg.n_heads:
        raise NotApplicableError("this model has no attention")
    if model.attention is None:
        raise NotApplicableError("the attention of this model is always written out")
    z: dict[int, Tensor] = {}
    layers, mask = range(model.cfg.n_layers), case.batch.mask
    keep = [("z", i, functools.partial(z.__setitem__, i)) for i in layers]
    with kernels.fused_attention(model.bridge, model.attention), hooks.attached(model, keep):
        seen = model.forward(case.batch)
    worst = Largest()
    for i in layers:
        worst.add(gap(wide(z[i][mask]), case.real("z", i)), f"z of layer {i}")
    worst.add(gap(wide(seen[mask]), wide(case.clean[mask])), "the logits")
    return worst.measured(case.run_tolerance, "no layers")


def do_nothing(case: Case) -> Measured:
    """Every way of changing activations leaves logits, or losses, where it changes nothing."""
    worst = Largest()
    for name, (seen, expected, _) in _emptied(case).items():
        if name == EVERY_SITE and gap(seen, expected) > case.tolerance:
            name = f"a copy at {_culprit(case)}"
        worst.add(gap(seen, expected), name)
    return worst.measured(case.tolerance, "no sites")


def _culprit(case: Case) -> str:
    """The first site at which a copy moves the logits."""
    mask = case.batch.mask
    for place in case.places:
        with hooks.attached(case.model, [(*place, torch.clone)]):
            seen = case.model.forward(case.batch)
        if gap(wide(seen[mask]), wide(case.clean[mask])) > case.tolerance:
            return f"{place[0]} of layer {place[1]}"
    return "several sites"


Emptied = dict[str, tuple[np.ndarray, np.ndarray, list[str]]]
"""By name: what was run with nothing changed, what it should be, what was then left on the model"""


def _emptied(case: Case) -> Emptied:
    """Everything that can change activations, used so that it changes nothing; run once."""
    if "emptied" not in case.kept:
        case.kept["emptied"] = {
            name: (*run(), hooks.left_on(case.model)) for name, run in _empty(case).items()
        }
    return case.kept["emptied"]


def _empty(case: Case) -> dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]]:
    model, batch, mask = case.model, case.batch, case.batch.mask

    def compared(logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return wide(logits[mask]), wide(case.clean[mask])

    def forward(*edits: tuple[str, int, hooks.Hook]) -> tuple[np.ndarray, np.ndarray]:
        with hooks.attached(model, edits):
            return compared(model.forward(batch))

    copies = [(*place, torch.clone) for place in case.places]
    if not model.cfg.n_heads:
        return {EVERY_SITE: lambda: forward(*copies)}
    layers, heads = range(model.cfg.n_layers), list(range(model.cfg.n_heads))
    nowhere = torch.zeros_like(mask)

    def ablated() -> tuple[np.ndarray, np.ndarray]:
        with interventions.ablate(model, []):
            return compared(model.forward(batch))

    def rewritten() -> tuple[np.ndarray, np.ndarray]:
        with scores.attending(model, dict.fromkeys(layers, lambda a: a.scores.clone())):
            return compared(model.forward(batch))

    def spliced(run: Callable[[int], splice.Scores]) -> tuple[np.ndarray, np.ndarray]:
        each = [run(layer).loss for layer in sorted({0, layers[-1] // 2, layers[-1]})]
        return wide(torch.stack(each)), wide(torch.stack([case.prefix.scores.loss] * len(each)))

    def same(z: Tensor) -> Tensor:
        return z.clone()

    out = {
        EVERY_SITE: lambda: forward(*copies),
        "no head removed": ablated,
        "heads replaced by themselves": lambda: forward(
            *(("z", i, interventions.replaced(heads, case.site("z", i))) for i in layers)
        ),
        "heads replaced at no position": lambda: forward(
            *(("z", i, interventions.replaced(heads, 0.0, nowhere)) for i in layers)
        ),
    }
    if case.forms is not None:
        out["scores rewritten as they are"] = rewritten
    if case.splices:
        clean = case.prefix
        out |= {
            "spliced": lambda: spliced(lambda i: splice.run_edited(model, clean, {i: same})),
            "spliced and kept": lambda: spliced(
                lambda i: splice.extend(model, clean, {i: same}).scores
            ),
            "spliced and hooked": lambda: spliced(
                lambda i: splice.run_hooked(model, clean, [("z", i, same)])
            ),
        }
    return out


class _StopError(Exception):
    """Raised in a hook, as Ctrl-C might be."""


def hooks_leave(case: Case) -> Measured:
    """No hook stays: after every intervention, after gradients, and after an error inside one."""
    model, wrong = case.model, []
    before = hooks.left_on(model)

    def look(name: str, left: list[str]) -> None:
        more = [entry for entry in left if left.count(entry) > before.count(entry)]
        if more:
            wrong.append(f"after {name}: {more[0]}")

    for name, (_, _, left) in _emptied(case).items():
        look(name, left)
    for name, run in _failing(case).items():
        with contextlib.suppress(_StopError):
            run()
        look(name, hooks.left_on(model))
    return Measured(len(wrong), note=wrong[0] if wrong else "")


def _failing(case: Case) -> dict[str, Callable[[], Any]]:
    """Runs that end with an error in a hook."""
    model, last = case.model, case.model.cfg.n_layers - 1

    def stop(_: Any) -> Tensor:
        raise _StopError

    def under(manager: contextlib.AbstractContextManager[None]) -> None:
        with manager:
            model.forward(case.batch)

    out: dict[str, Callable[[], Any]] = {
        "an error in a hook": lambda: under(hooks.attached(model, [("mlp_out", last, stop)]))
    }
    if case.forms is not None:
        attending = scores.attending(model, {last: stop})
        out["an error while scores are read"] = lambda: under(attending)
    if model.cfg.n_heads:
        out["an error in a splice"] = lambda: splice.run_edited(model, case.prefix, {last: stop})
    return out


def zeroing(case: Case) -> Measured:
    """Zeroing a head's z gives the logits of plain transformers with its W_O rows set to zero."""
    ids, worst = case.documents[case.longest], Largest()
    for layer, head in case.heads:
        with case.scaled(layer, head, 0.0):
            expected = case.plain_of(ids, case.whole)
        with interventions.ablate(case.model, [(layer, head)]):
            (seen,) = case.forward([ids])
        worst.add(gap(wide(seen), expected), f"head {layer}.{head}")
    return worst.measured(case.run_tolerance, "no heads")


def spliced(case: Case) -> Measured:
    """A run from the middle, heads removed, gives the losses of plain transformers without them."""
    clean, worst = case.prefix, Largest()
    for layer, head in case.heads:
        edits = interventions.removals([(layer, head)])
        short = splice.run_edited(case.model, clean, edits).loss
        whole = splice.run_edited(case.model, clean, edits, from_start=True).loss
        kept = splice.extend(case.model, clean, edits).scores.loss
        with case.scaled(layer, head, 0.0):
            for i, ids in enumerate(case.documents):
                expected = mean_loss(case.plain_of(ids, case.whole), ids)
                runs = {"spliced": short, "from the start": whole, "kept": kept}
                for name, run in runs.items():
                    error = abs(float(run[i]) / (len(ids) - 1) - expected)
                    worst.add(error, f"head {layer}.{head} removed, {name}, document {i}")
    return worst.measured(case.nats, "no heads")


def included(case: Case) -> Measured:
    """The included positions are what they should be, and a loud first position moves nothing."""
    wrong = _included_wrong(case)
    if wrong is not None:
        return Measured(float("inf"), case.tolerance, wrong)
    before, worst = _statistics(case), Largest()
    last = case.model.cfg.n_layers - 1

    def loud(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] *= LOUD.get(x.dtype, 100.0)
        return x

    for site in ("attn_in", "z", "mlp_post"):
        if (site, last) not in case.places:
            continue
        with hooks.attached(case.model, [(site, last, loud)]):
            for name, value in _statistics(case, site).items():
                worst.add(_moved(value, before[name]), f"{name}, first position of {site}")
    return worst.measured(case.tolerance, "no statistic")


def _moved(seen: np.ndarray, before: np.ndarray) -> float:
    both = ~(np.isnan(seen) & np.isnan(before))
    size = float(np.abs(before[both]).max(initial=0.0)) or 1.0
    return float(np.abs(seen - before)[both].max(initial=0.0)) / size


def _included_wrong(case: Case) -> str | None:
    """Where the mask of a batch is not real, not special, not first; counted by hand."""
    text = case.text
    special = set(case.model.tokenizer.all_special_ids) | {text.bos_id}
    added = getattr(case.model.tokenizer, "added_tokens_decoder", {})
    special |= {i for i, token in added.items() if token.special}
    length = case.batch.tokens.shape[1]
    for row, ids in enumerate(case.documents):
        expected = [p > 0 and token not in special for p, token in enumerate(ids)]
        expected += [False] * (length - len(ids))
        if case.batch.included[row].tolist() != expected:
            return f"the included positions of document {row} are others"
    return None


def _statistics(case: Case, only: str | None = None) -> dict[str, np.ndarray]:
    """What analyzers say of the texts over included positions; of the sites after `only`'s step."""
    model, text, cfg = case.model, case.text, case.model.cfg
    out: dict[str, np.ndarray] = {}
    if only in (None, "z") and cfg.n_heads:
        found = importance.gradients(model, text, len(text))
        out["mean z"] = found.z_mean.numpy()
        out["importance per token"] = found.token
    if only in (None, "attn_in") and case.forms is not None:
        measured = ontext.measure(model, text, case.forms, len(text), controls=False)
        out |= {f"score correlation, {kind}": r for kind, r in measured.r.items()}
        out["symmetry on data"] = measured.symmetry_data
    if only in (None, "mlp_post") and cfg.d_mlp:
        last = cfg.n_layers - 1
        triggers, moments = LayerTriggers(text, cfg.d_mlp, 2), MeanVar((cfg.d_mlp,), ddof=1)

        def see(values: Tensor, batch: Any) -> None:
            triggers.see(values, batch)
            moments.update(values, batch.included)

        coefficients.stream(model, text, {last: see}, len(text))
        triggers.finish()
        out["largest coefficients"] = triggers.top[1].compute().values.numpy()
        out["mean coefficient"] = triggers.mean().numpy()
        out["variance of coefficients"] = moments.compute().variance.numpy()
    return {name: np.where(np.isfinite(value), value, np.nan) for name, value in out.items()}


def gradient(case: Case) -> Measured:
    """Importance is the finite difference of the written-out loss as a head's z is scaled."""
    if case.model.dtype != torch.float32:
        raise NotApplicableError("a finite difference needs float32")
    made, document = case.arithmetic, case.text.documents[case.longest]
    ids = list(document.windows[0][:SHORT])
    short = replace(document, windows=[ids])
    found = importance.gradients(case.model, replace(case.text, documents=[short]), 1).xi[0]
    heads = list(dict.fromkeys([*case.heads, _steepest(found)]))
    around = [(*head, factor) for head in heads for factor in (1 + STEP, 1 - STEP)]
    values = [mean_loss(one, ids) for one in made.logits([ids] * len(around), around)]
    slopes = [(up - down) / (2 * STEP) for up, down in zip(values[::2], values[1::2], strict=True)]
    largest, worst = max(map(abs, slopes)) or 1.0, Largest()
    for head, slope in zip(heads, slopes, strict=True):
        worst.add(abs(float(found[head]) - slope) / largest, f"head {head[0]}.{head[1]}")
    return worst.measured(SLOPE, "no heads")


def _steepest(xi: np.ndarray) -> tuple[int, int]:
    layer, head = np.unravel_index(int(np.abs(xi).argmax()), xi.shape)
    return int(layer), int(head)


CHECKS = (
    Check(
        "written-out arithmetic",
        "relative",
        "plain transformers computes what the weights and config say",
        written_out,
    ),
    Check("logits", "relative", "the model gives plain transformers' logits", logits),
    Check("losses", "nats", "losses and KL are those of the logits", losses),
    Check("padding", "relative", "padding moves no logit", padding),
    Check("batching", "relative", "other rows of a batch move no logit", batching),
    Check("capture", "absolute", "reading all sites moves no logit", capture),
    Check(
        "fused attention",
        "relative",
        "one kernel gives the logits and head outputs of attention written out",
        fused,
    ),
    Check("empty interventions", "relative", "changing nothing moves no logit", do_nothing),
    Check("hooks leave", "count", "no hook stays, also after an error", hooks_leave),
    Check("zeroing a head", "relative", "zeroing z is zeroing its rows of W_O", zeroing),
    Check("spliced suffix", "nats", "a run from the middle is a whole run", spliced),
    Check("included positions", "relative", "a loud first position moves no statistic", included),
    Check("gradient importance", "relative", "importance is a finite difference", gradient),
)

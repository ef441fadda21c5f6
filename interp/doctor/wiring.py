"""Checks of what a loaded model is: weights, devices, hooks, sites."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from interp import hooks, pruning
from interp.doctor.case import Case, gap, wide
from interp.doctor.outcome import Check, Largest, Measured, NotApplicableError

SERIAL_ONLY = "resid_mid"  # the only site that a parallel block has no place for
ROTATED = "rotated dimensions of a head"


def facts(case: Case) -> Measured:
    """What `model.cfg` states is what config.json and the shapes of the checkpoint's tensors say.

    That these in turn are what the model computes, `written-out arithmetic` shows. The vocabulary
    has a check of its own.
    """
    expected, cfg = _facts(case), case.model.cfg
    own = {name: getattr(cfg, name) for name in expected if name != ROTATED}
    own[ROTATED] = int(cfg.d_head * cfg.rotary_fraction)
    wrong = [
        f"{name}: {own[name]} is stated, the checkpoint says {value}"
        for name, value in expected.items()
        if own[name] != value
    ]
    return Measured(len(wrong), note=wrong[0] if wrong else f"{len(expected)} facts")


def _facts(case: Case) -> dict[str, Any]:
    """Fact -> its value by config.json, or by the shape of the tensor that it is about."""
    made, plain = case.arithmetic, case.plain
    family, embedding = made.family, made.tensor(made.family.embedding)
    positions = made.tensor(family.positions) if family.positions else None
    layers = [name for name in made.tensors if name.startswith(family.layers)]
    own, other = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    assert embedding is not None
    return {
        "family": case.config["model_type"],
        "n_layers": len({name.removeprefix(family.layers).split(".")[0] for name in layers}),
        "n_heads": made.n_heads,
        "n_kv_heads": made.n_kv_heads,
        "d_model": embedding.shape[1],
        "d_head": made.projection(0, family.o)[0].shape[0] // made.n_heads,
        "d_mlp": made.projection(0, family.down)[0].shape[0],
        "gated": bool(family.gate),
        "parallel": made.parallel,
        ROTATED: made.rotated,
        "norm": "RMS" if family.rms else "LN",
        "tied": own.data_ptr() == other.data_ptr(),
        "n_ctx": plain.config.max_position_embeddings if positions is None else len(positions),
        "removed": _cut_out(case),
    }


def _cut_out(case: Case) -> tuple[tuple[int, int], ...]:
    """(layer, head) of the heads that write nothing, in a checkpoint that heads were cut out of."""
    if pruning.KEY not in case.config:
        return ()
    made = case.arithmetic
    silent = []
    for layer in range(made.n_layers):
        weight, _ = made.projection(layer, made.family.o)
        each = weight.reshape(made.n_heads, -1)
        silent += [(layer, h) for h in range(made.n_heads) if not each[h].any()]
    return tuple(silent)


def dtype_and_device(case: Case) -> Measured:
    """Weights and logits are of the stated dtype, on the stated device."""
    model = case.model
    stated = f"{_word(model.dtype)} on {model.device.type}"
    wrong = _others(_tensors(case), stated)
    if not wrong:  # a model of two dtypes need not run
        wrong = _others([("the tensor of logits", case.clean)], stated)
    return Measured(len(wrong), note=wrong[0] if wrong else stated)


def _others(tensors: Iterable[tuple[str, Tensor]], stated: str) -> list[str]:
    found = ((name, f"{_word(x.dtype)} on {x.device.type}") for name, x in tensors)
    return [f"{name} is {kind}, {stated} is stated" for name, kind in found if kind != stated]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(case: Case) -> Iterator[tuple[str, Tensor]]:
    """The weights that the bridge computes with, by its own names; the copies it makes included."""
    for name, tensor in case.model.bridge.named_parameters():
        yield _bare(name), tensor


def finite_weights(case: Case) -> Measured:
    """No weight is NaN or infinite, in the checkpoint or in what was loaded from it."""
    for place, tensors in (
        ("the checkpoint", case.plain.named_parameters()),
        ("the loaded model alone", _tensors(case)),
    ):
        count, first = 0, ""
        for name, tensor in tensors:
            bad = ~torch.isfinite(tensor.detach())
            if bool(bad.any()):
                count += int(bad.sum())
                first = first or f"{name}{bad.nonzero()[0].tolist()}"
        if count:
            return Measured(count, note=f"in {place}, first {first}")
    return Measured(0)


def raw_weights(case: Case) -> Measured:
    """The loaded model holds the checkpoint's tensors bit for bit: nothing folded or centred.

    Tensors that the bridge computes with under the checkpoint's names; what it takes apart (fused
    q, k and v) is compared step by step elsewhere.
    """
    own = {_bare(name): x for name, x in case.model.bridge.original_model.state_dict().items()}
    there = {name: x for name, x in case.whole.state_dict().items() if name in own}
    other = [name for name, x in there.items() if not torch.equal(x, own[name])]
    if not there:
        raise NotApplicableError("the bridge holds no tensor under the checkpoint's names")
    note = f"{len(there)} tensors"
    if other:
        note = f"{other[0]} is not the checkpoint's: was the model folded, centred or edited?"
    return Measured(len(other), note=note)


def _bare(name: str) -> str:
    return name.replace("_original_component.", "").replace("original_component.", "")


def leftover_hooks(case: Case) -> Measured:
    """Nothing was attached to the model before it was examined."""
    left = case.left_on
    return Measured(len(left), note=f"first: {left[0]}" if left else "")


def sites_fire_once(case: Case) -> Measured:
    """Every site that is there fires exactly once per forward pass, in its stated shape.

    In families whose arithmetic is written out, all sites are there; elsewhere what needs an
    absent one refuses the model by name.
    """
    cfg = case.model.cfg
    seen, _ = case.captured
    wrong = []
    for (name, layer), tensors in seen.items():
        if len(tensors) != 1:
            wrong.append(f"{name} of layer {layer} fires {len(tensors)} times")
        elif cfg.d_mlp == 0 and name in ("mlp_pre", "mlp_post"):
            continue  # experts: no single FFN whose coefficients they could be
        elif tuple(tensors[0].shape) != _shape(case, name):
            wrong.append(f"{name} of layer {layer} has the shape {list(tensors[0].shape)}")
    everywhere = set(hooks.SITES) - ({SERIAL_ONLY} if cfg.parallel else set())
    places = [(name, layer) for layer in range(cfg.n_layers) for name in sorted(everywhere)]
    absent = [f"{n} of layer {i} is not there" for n, i in places if (n, i) not in seen]
    if case.written_out:
        wrong += absent
    looked = f"{len(seen)} sites in {cfg.n_layers} layers"
    return Measured(len(wrong), note=wrong[0] if wrong else ", ".join([looked, *absent[:1]]))


def _shape(case: Case, name: str) -> tuple[int, ...]:
    cfg = case.model.cfg
    batch, pos = case.batch.tokens.shape
    sizes = {
        "batch": batch,
        "pos": pos,
        "head": cfg.n_heads,
        "kv_head": cfg.n_kv_heads,
        "d_head": cfg.d_head,
        "d_model": cfg.d_model,
        "d_mlp": cfg.d_mlp,
    }
    return tuple(sizes[axis] for axis in hooks.SITES[name][1].strip("[]").split(", "))


def finite_activations(case: Case) -> Measured:
    """Sites, at real positions, and logits are finite."""
    seen, logits = case.captured
    real, worst = case.batch.mask, Largest()
    for (name, layer), tensors in seen.items():
        for tensor in tensors:
            by_position = hooks.SITES[name][1].startswith("[batch, pos")
            kept = tensor[real] if by_position else tensor
            if name == "scores":  # masked ones may be minus infinity
                kept = kept[~kept.isneginf()]
            worst.add(int((~torch.isfinite(kept)).sum()), f"first in {name} of layer {layer}")
    worst.add(int((~torch.isfinite(logits[real])).sum()), "first in the logits")
    return Measured(worst.error, note=worst.where if worst.error else "")


def gpu_as_cpu(case: Case) -> Measured:
    """The model on this GPU gives the logits of plain transformers on the CPU."""
    kind = case.model.device.type
    if kind == "cpu":
        there = torch.cuda.is_available() or torch.backends.mps.is_available()
        why = "the model is on the CPU: --device names another" if there else "there is no GPU here"
        raise NotApplicableError(why)
    return against_cpu(case)


def against_cpu(case: Case) -> Measured:
    """The model's logits and those of plain transformers on the CPU."""
    worst, plain = Largest(), case.plain.to("cpu")
    try:
        for i, ids in enumerate(case.documents):
            expected = case.plain_of(ids)
            worst.add(gap(wide(case.clean[i, : len(ids)]), expected), f"document {i}")
    finally:
        plain.to(case.model.device)
    return worst.measured(case.run_tolerance, "no text")


CHECKS = (
    Check("model facts", "count", "what cfg states is what the checkpoint says", facts),
    Check(
        "dtype and device",
        "count",
        "all weights are of the stated dtype, on the stated device",
        dtype_and_device,
    ),
    Check("finite weights", "count", "no weight is NaN or infinite", finite_weights),
    Check("leftover hooks", "count", "nothing is attached to the model", leftover_hooks),
    Check("sites", "count", "every hook site fires once per forward pass", sites_fire_once),
    Check(
        "finite activations", "count", "all activations and logits are finite", finite_activations
    ),
)
RAW = Check("raw weights", "count", "nothing is folded, centred or edited", raw_weights)
GPU = Check("GPU as CPU", "relative", "the GPU gives the CPU's logits", gpu_as_cpu)

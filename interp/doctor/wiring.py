"""Checks of what a loaded model is: weights, devices, hooks, sites."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from interp import hooks
from interp.doctor.case import Case
from interp.doctor.outcome import Check, Largest, Measured, NotApplicableError

SERIAL_ONLY = "resid_mid"  # the only site that a parallel block has no place for


def dtype_and_device(case: Case) -> Measured:
    """Parameters, buffers of activations' kind and logits are of the stated dtype and device."""
    model, wrong = case.model, []
    for name, tensor in _tensors(case):
        if tensor.device != model.device and tensor.device.type != model.device.type:
            wrong.append(f"{name} is on {tensor.device}, {model.device} is stated")
        elif tensor.dtype != model.dtype:
            wrong.append(f"{name} is {_word(tensor.dtype)}, {_word(model.dtype)} is stated")
    if case.clean.device.type != model.device.type:
        wrong.append(f"logits are on {case.clean.device}")
    if not case.clean.dtype.is_floating_point:
        wrong.append(f"logits are {_word(case.clean.dtype)}")
    stated = f"{_word(model.dtype)} on {model.device}"
    return Measured(len(wrong), note=wrong[0] if wrong else stated)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(case: Case) -> Iterator[tuple[str, Tensor]]:
    """The weights that the bridge computes with, by its own names; the copies it makes included."""
    for name, tensor in case.model.bridge.named_parameters():
        yield name.replace("_original_component.", "").replace("original_component.", ""), tensor


def finite_weights(case: Case) -> Measured:
    """No weight is NaN or infinite, in the loaded model or in the checkpoint."""
    count, first = 0, ""
    places = [*_tensors(case), *case.plain.named_parameters()]
    for name, tensor in places:
        bad = ~torch.isfinite(tensor.detach())
        if bool(bad.any()):
            count += int(bad.sum())
            at = tuple(bad.nonzero()[0].tolist())
            first = first or f"{name}{list(at)}"
    return Measured(count, note=first and f"first in {first}")


def leftover_hooks(case: Case) -> Measured:
    """Nothing was attached to the model before it was examined."""
    left = case.left_on
    return Measured(len(left), note=f"first: {left[0]}" if left else "")


def sites_fire_once(case: Case) -> Measured:
    """Every site is there, has its stated shape and fires exactly once per forward pass."""
    cfg = case.model.cfg
    seen, _ = case.captured
    wrong = []
    for (name, layer), tensors in seen.items():
        if len(tensors) != 1:
            wrong.append(f"{name} of layer {layer} fires {len(tensors)} times")
        elif tuple(tensors[0].shape) != _shape(case, name):
            wrong.append(f"{name} of layer {layer} has the shape {list(tensors[0].shape)}")
    for layer in range(cfg.n_layers):
        absent = {n for n in hooks.SITES if (n, layer) not in seen}
        absent -= {SERIAL_ONLY} if cfg.parallel else set()
        if not cfg.d_mlp:
            absent -= {n for n in absent if n.startswith("mlp")}
        if not cfg.n_heads:
            absent -= {n for n in absent if not n.startswith(("mlp", "resid"))}
        wrong += [f"{n} of layer {layer} is not there" for n in sorted(absent)]
    looked = f"{len(seen)} sites in {cfg.n_layers} layers"
    return Measured(len(wrong), note=wrong[0] if wrong else looked)


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
    from interp.doctor.case import gap, wide

    kind = case.model.device.type
    if kind == "cpu":
        there = torch.cuda.is_available() or torch.backends.mps.is_available()
        why = "the model is on the CPU: --device names another" if there else "there is no GPU here"
        raise NotApplicableError(why)
    worst = Largest()
    plain = case.plain.to("cpu")
    try:
        for i, ids in enumerate(case.documents):
            expected = case.plain_of(ids)
            worst.add(gap(wide(case.clean[i, : len(ids)]), expected), f"document {i}")
    finally:
        plain.to(case.model.device)
    return worst.measured(case.tolerance, "no text")


CHECKS = (
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
GPU = Check("GPU as CPU", "relative", "the GPU gives the CPU's logits", gpu_as_cpu)

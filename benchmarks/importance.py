"""Importance of every head: interp against one forward and one backward pass.

The other side is the careful user's attribution on the same bridge: parameters frozen, one xi per
document and head as a leaf of shape [batch, 1, head, 1] that multiplies hook_z, cross-entropy on
flattened logits, `torch.autograd.grad` with respect to every xi. That is also the floor: nothing
gives these gradients with less than a forward and a backward pass. interp's gradients() gives more
from the same two passes (|z . dL/dz| per token, sums of z).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 (its usual name)

from benchmarks.common import (
    SHAPES,
    SMOLLM2,
    Options,
    Row,
    full_text,
    measured,
    random_model,
    smollm2,
    timed,
)
from interp.analyzers.heads import importance
from interp.model import Model
from interp.text import Text

CONTEXT = 64
AT_MOST = 1.1
REPS = 3


def run(options: Options) -> list[Row]:
    rows: list[Row] = []
    if options.wants(SMOLLM2):
        rows.append(compare(smollm2(options.device), SMOLLM2, options))
    for shape in SHAPES:
        if options.wants(shape):
            with random_model(shape, options.device) as model:
                rows.append(compare(model, shape, options))
    return rows


def compare(model: Model, name: str, options: Options) -> Row:
    """Alternating, two batches each time."""
    size = max(1, options.batch_tokens // CONTEXT)
    text = full_text(model, 2 * size, CONTEXT)
    ratios, cpu, gap = [], [], 0.0
    model.bridge.original_model.requires_grad_(False)
    theirs = attribution(model, text, size)
    measured(model, lambda: importance.gradients(model, text, size))
    for _ in range(options.reps or REPS):
        theirs, two_passes = timed(lambda: attribution(model, text, size), model.device)
        mine, time = measured(model, lambda: importance.gradients(model, text, size))
        ratios.append(time.wall / two_passes.wall)
        cpu.append(time.cpu / two_passes.cpu)
        gap = max(gap, float(np.abs(mine.xi - theirs).max()))
    note = (
        f"{name}: 2 batches of {size} documents of {CONTEXT} tokens; the largest |dL/dxi| is "
        f"{np.abs(theirs).max():.0e} nats."
    )
    return Row(name, "interp / two passes", ratios, cpu, at_most=AT_MOST, gap=gap, notes=[note])


def attribution(model: Model, text: Text, size: int) -> np.ndarray:
    """[document, layer, head] dL/dxi at xi = 1, as a user of TransformerLens writes it."""
    bridge, cfg = model.bridge, model.cfg
    found = []
    for batch in text.batches(size, model.device):
        xi = [
            torch.ones(len(batch.rows), 1, cfg.n_heads, 1, device=model.device, requires_grad=True)
            for _ in range(cfg.n_layers)
        ]

        def scale(z: torch.Tensor, hook: Any, xi: list[torch.Tensor] = xi) -> torch.Tensor:
            return z * xi[int(hook.name.split(".")[1])]

        with torch.enable_grad():
            logits = bridge.run_with_hooks(
                batch.tokens,
                fwd_hooks=[(f"blocks.{layer}.attn.hook_z", scale) for layer in range(cfg.n_layers)],
                attention_mask=batch.attention_mask,
                use_cache=False,
            )
            targets = torch.where(batch.predicted, batch.targets, -100).flatten()
            nll = F.cross_entropy(
                logits.flatten(0, 1), targets, reduction="none", ignore_index=-100
            )
            loss = nll.view_as(batch.tokens).sum(1) / batch.predicted.sum(1)
            grads = torch.autograd.grad(loss.sum(), xi)
        found.append(torch.stack([g[:, 0, :, 0] for g in grads], 1))
    return torch.cat(found).cpu().double().numpy()

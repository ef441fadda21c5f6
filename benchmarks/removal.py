"""Heads that are really gone: the measured speed-up against the one that the weights promise.

Half of the heads of every layer (GPT-2's shape) or a third (SmolLM2: a whole KV group) are cut out
of plain transformers models. The ideal is `speed.by_weights`: a pass takes as long as it has
weights to multiply with. Below it stays what attention itself costs beside its matrices, and what
does not shrink with them; decoding one sequence is bound by memory and by the overhead of many
small kernels.
"""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import GPT2, SMOLLM2, Options, Row, save_gpt2, smollm2
from interp import pruned, pruning
from interp.analyzers.heads import export, speed

CONTEXT = 512


def run(options: Options) -> list[Row]:
    rows: list[Row] = []
    if options.wants(GPT2):
        from transformers import AutoModelForCausalLM

        with TemporaryDirectory() as temporary:
            folder = save_gpt2(Path(temporary) / "gpt2")
            original: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            rows += compare(GPT2, original.to(options.device).eval(), half=6)
    if options.wants(SMOLLM2):
        model = smollm2(options.device)
        rows += compare(SMOLLM2, export.load(model, model.folder).eval(), half=3)
    return rows


def compare(name: str, original: Any, half: int) -> list[Row]:
    """One row per phase and batch size.

    Args:
        name: of the case.
        original: a plain transformers model.
        half: heads to cut out of every layer, the first ones.
    """
    config = original.config
    heads = [(layer, head) for layer in range(config.num_hidden_layers) for head in range(half)]
    small = copy.deepcopy(original)
    pruned.cut(small, pruning.plan(config, heads))
    ideal = speed.by_weights(original, small, CONTEXT)
    gap = apart(original, small, heads)
    timings: list[speed.Timing] = []
    vocabulary = config.vocab_size - 1
    speed.measure(original, small, vocabulary, CONTEXT, progress=False, into=timings)
    sizes = [speed.parameters(m) / 1e6 for m in (original, small)]
    note = (
        f"{name}: {len(heads)} heads cut out, {sizes[0]:.1f}M to {sizes[1]:.1f}M parameters; by "
        f"the weights of one token it could be {ideal['prefill']:.3f} (prefill) and "
        f"{ideal['decode']:.3f} (decode) times faster. The difference is of "
        "logits, against the whole model with the same heads' columns of W_O at zero, over their "
        "largest size."
    )
    rows = []
    for timing in timings:
        case = f"{name}, {timing.phase}, batch {timing.batch}"
        ratio = timing.original / timing.pruned
        rows.append(Row(case, "original / pruned", ratio.tolist(), gap=gap, notes=[note]))
        rows.append(Row(case, "speed-up / ideal", (ratio / ideal[timing.phase]).tolist(), gap=gap))
    return rows


def apart(original: Any, small: Any, heads: list[tuple[int, int]]) -> float:
    """Largest difference of logits from the masked model's."""
    masked = copy.deepcopy(original)
    with torch.no_grad():
        for layer, head in heads:
            if masked.config.model_type == "gpt2":
                width = masked.config.n_embd // masked.config.n_head
                out = masked.transformer.h[layer].attn.c_proj.weight  # [in, out]
                out[head * width : (head + 1) * width] = 0
            else:
                width = masked.config.head_dim
                out = masked.model.layers[layer].self_attn.o_proj.weight  # [out, in]
                out[:, head * width : (head + 1) * width] = 0
        ids = torch.arange(2 * 24, device=original.device).view(2, 24)
        expected, found = masked(ids).logits, small(ids).logits
    return float((found - expected).abs().max() / expected.abs().max())

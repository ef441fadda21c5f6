"""Triggers of all keys against a bare forward pass, and against run_with_cache, cat and topk.

Seconds of the pass that finds triggers over those of a forward pass without it: up to the layer
asked for, or, for all layers, of the whole model. The values are read once, whatever the text
is; their seconds are in the notes. The other way is what one writes with TransformerLens: cache the
layer's hook_post for every batch, concatenate, topk (which ranks positions, not documents).
"""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import (
    SHAPES,
    ZERO,
    Options,
    Row,
    full_text,
    measured,
    peak_of,
    random_documents,
    random_model,
    save_gpt2,
    smollm2,
    timed,
    used,
)
from interp.analyzers.ffn_keys import coefficients
from interp.analyzers.ffn_keys.triggers import LayerTriggers
from interp.analyzers.ffn_keys.values import Vocabulary
from interp.model import Model
from interp.progress import batches
from interp.text import Text

ONE, ALL, GROWTH = 1.1, 1.3, 1.05
TOP = 25
CONTEXT = 64
LAYERS = (0, 6, 27)
GEVA, APART = "a pass per layer", 15
"""Every fifteenth layer is timed, 7 and 22: their mean depth is that of all 30."""
SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_inner": 1024, "vocab_size": 1024}
SHAPE |= {"n_positions": CONTEXT}
COUNTS = (200, 2000)


def run(options: Options) -> list[Row]:
    rows: list[Row] = []
    names = [f"layer {layer}, all keys" for layer in LAYERS]
    asked = [n for n in [*names, "all layers", "TransformerLens", GEVA] if options.wants(n)]
    rows_per_batch = max(1, 2048 // CONTEXT)
    if asked:
        model = smollm2(options.device)
        text = full_text(model, rows_per_batch, CONTEXT)
        for layer, name in zip(LAYERS, names, strict=True):
            if name in asked:
                rows.append(pass_over(name, model, text, [layer], rows_per_batch, options))
        if "all layers" in asked:
            every = list(range(model.cfg.n_layers))
            rows.append(pass_over("all layers", model, text, every, rows_per_batch, options))
        if "TransformerLens" in asked:
            rows.append(against_cache(model, text, rows_per_batch, options))
        if GEVA in asked:
            rows.append(layer_by_layer(model, text, rows_per_batch, options))
    for shape in SHAPES:
        name = f"{shape}, all layers"
        if options.wants(name):
            with random_model(shape, options.device) as model:
                text = full_text(model, rows_per_batch, CONTEXT)
                every = list(range(model.cfg.n_layers))
                rows.append(pass_over(name, model, text, every, rows_per_batch, options))
    if options.wants("memory"):
        rows += memory(options)
    return rows


def find(model: Model, text: Text, layers: list[int], size: int) -> dict[int, LayerTriggers]:
    """interp's pass."""
    found = {layer: LayerTriggers(text, model.cfg.d_mlp, TOP) for layer in layers}
    coefficients.stream(
        model,
        text,
        {layer: one.see for layer, one in found.items()},
        size,
        pre={layer: one.see_pre for layer, one in found.items()},
    )
    return found


def pass_over(
    name: str, model: Model, text: Text, layers: list[int], size: int, options: Options
) -> Row:
    """Seconds over those of a bare pass."""
    whole = len(layers) == model.cfg.n_layers

    def bare() -> None:
        for batch in batches(model, text, size):
            if whole:
                model.forward(batch)
            else:
                model.bridge(
                    batch.tokens,
                    attention_mask=batch.attention_mask,
                    use_cache=False,
                    stop_at_layer=layers[-1] + 1,
                )

    measured(model, lambda: find(model, text, layers, size))
    ratios, cpu, own = [], [], ZERO
    for _ in range(options.reps or 3):
        _, plain = measured(model, bare)
        _, own = measured(model, lambda: find(model, text, layers, size))
        ratios.append(own.wall / plain.wall)
        cpu.append(own.cpu / plain.cpu)
    note = (
        f"{name}: {text.tokens} tokens in batches of {size} documents, "
        f"{text.tokens / own.wall:.0f} tokens per second"
    )
    if layers == [LAYERS[1]]:
        seconds = values_of(model, layers[0])
        note += f"; reading the layer's values takes {seconds:.1f} s more, once"
    most = ALL if whole else ONE
    return Row(name, "interp / bare forward", ratios, cpu, at_most=most, notes=[f"{note}."])


def values_of(model: Model, layer: int) -> float:
    """Seconds that reading all values of a layer takes, whatever the text is."""
    vocabulary = Vocabulary(model)
    memory = coefficients.memory(model, layer)

    def read() -> None:
        for basis in vocabulary.bases:
            vocabulary.read(memory, list(range(model.cfg.d_mlp)), basis)

    return measured(model, read)[1].wall


def theirs(
    model: Model, text: Text, layer: int, size: int, stop: int | None = None
) -> torch.Tensor:
    """[key, rank] largest coefficients, position 0 left out, as one writes it."""
    name = f"blocks.{layer}.mlp.hook_post"
    kept = []
    with torch.no_grad():
        for batch in batches(model, text, size):
            _, cache = model.bridge.run_with_cache(
                batch.tokens, names_filter=name, stop_at_layer=stop
            )
            kept.append(cache[name][:, 1:].flatten(0, 1))
        return torch.cat(kept).topk(TOP, dim=0).values.T


def against_cache(model: Model, text: Text, size: int, options: Options) -> Row:
    """How many times faster, for one layer."""
    layer = LAYERS[1]
    ratios, cpu, gap = [], [], 0.0
    for _ in range(options.reps or 2):
        other, slow = timed(lambda: theirs(model, text, layer, size), model.device)
        found, own = measured(model, lambda: find(model, text, [layer], size))
        mine, other = found[layer].top[1].compute().values[:, 0], other[:, 0].cpu()
        gap = max(gap, float((mine - other).abs().max() / other.abs().max()))
        ratios.append(slow.wall / own.wall)
        cpu.append(slow.cpu / own.cpu)
    note = (
        f"TransformerLens, layer {layer}: run_with_cache runs the whole model, the unembedding "
        "included; interp stops after the layer. The difference is of the largest coefficients, "
        "over the largest of all."
    )
    return Row("TransformerLens, time", "cache / interp", ratios, cpu, gap=gap, notes=[note])


def layer_by_layer(model: Model, text: Text, size: int, options: Options) -> Row:
    """All layers, against a pass for each of them as Geva et al.'s code makes, stopping there."""
    n = model.cfg.n_layers
    layers = list(range(APART // 2, n, APART))
    ratios, cpu = [], []
    for _ in range(options.reps or 1):
        slow = ZERO
        for layer in layers:
            one = functools.partial(theirs, model, text, layer, size, layer + 1)
            slow += timed(one, model.device)[1]
        slow *= n / len(layers)
        _, own = measured(model, lambda: find(model, text, list(range(n)), size))
        ratios.append(slow.wall / own.wall)
        cpu.append(slow.cpu / own.cpu)
    note = (
        f"{GEVA}: run_with_cache up to the layer, cat and topk, once per layer (timed at "
        f"{len(layers)} of {n}), against one pass for all."
    )
    return Row(GEVA, "passes / interp", ratios, cpu, notes=[note])


# Memory -------------------------------------------------------------------------------------------


def memory(options: Options) -> list[Row]:
    """Peaks of fresh processes on a small random model, all layers."""
    few, many, other = [], [], []
    with TemporaryDirectory() as temporary:
        folder = save_gpt2(Path(temporary) / "small", **SHAPE)
        for _ in range(options.reps or 1):
            few.append(peak_of("benchmarks.ffn_keys", "interp", str(folder), str(COUNTS[0])))
            many.append(peak_of("benchmarks.ffn_keys", "interp", str(folder), str(COUNTS[1])))
            other.append(peak_of("benchmarks.ffn_keys", "cache", str(folder), str(COUNTS[1])))
    note = (
        f"memory: {statistics.median(few):.0f} MB with {COUNTS[0]} documents of {CONTEXT} tokens, "
        f"{statistics.median(many):.0f} MB with {COUNTS[1]}; {statistics.median(other):.0f} MB "
        f"with run_with_cache, cat and topk of one layer of {SHAPE['n_inner']} keys."
    )
    growth = [b / a for a, b in zip(few, many, strict=True)]
    saved = [b / a for a, b in zip(many, other, strict=True)]
    ratio = f"{COUNTS[1]} / {COUNTS[0]} documents"
    return [
        Row("memory, all layers", ratio, growth, at_most=GROWTH, notes=[note]),
        Row("memory, TransformerLens", "cache / interp", saved),
    ]


def child(which: str, folder: str, documents: int) -> None:
    """The run itself, in a process of its own."""
    import interp

    made = random_documents(documents, CONTEXT, SHAPE["vocab_size"])
    model = interp.load_model(folder, device="cpu")
    text = interp.load_text(made, model, documents=documents, context=CONTEXT)
    options: dict[str, Any] = {"layer": ("all",), "progress": False}
    if which == "interp":
        interp.ffn_keys(model, text, **options)
    else:
        theirs(model, text, 0, 32)


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(used())

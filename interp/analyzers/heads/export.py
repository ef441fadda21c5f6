"""A checkpoint without some heads: what may be cut, and writing it, checked by its logits."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interp import checkpoint, hub, interventions, pruned
from interp.config import HeadsConfig, head_list
from interp.errors import InterpError
from interp.interventions import Head
from interp.model import Model
from interp.probe import COARSE, TOLERANCE
from interp.pruning import KEY, Pruning, plan
from interp.results import check_folder, move_into_place, partial_of
from interp.text import Text

CARD = "README.md"
GENERATION = "generation_config.json"
PROBE_DOCUMENTS = 4
"""Documents whose logits the written checkpoint must give as the masked model does."""


def refuse_early(model: Model, config: HeadsConfig, overwrite: bool) -> None:
    """Before anything is measured: can this be cut out of this model, and written there?

    Raises:
        InterpError: what is impossible, and what could be done instead.
    """
    assert config.export is not None
    if model.remote_code:
        raise InterpError(
            f"{model.name} runs Python code that came with it ({', '.join(model.remote_code)}): "
            "what a checkpoint without some heads would need is not known."
        )
    folder(config, overwrite)
    named = head_list(config.heads) if config.heads is not None else []
    gone = [head for head in named if head in set(model.cfg.removed)]
    if gone:
        raise InterpError(f"Head {gone[0][0]}.{gone[0][1]} was already cut out of {model.name}.")
    plan(hf_config(model), [*model.cfg.removed, *named], compensate=config.compensate)
    grouped = model.cfg.n_kv_heads < model.cfg.n_heads
    if config.heads is None and grouped and config.unit == "head":
        group = model.cfg.n_heads // model.cfg.n_kv_heads
        raise InterpError(
            f"In {model.name} {group} query heads share a KV head, and every KV head must keep as "
            "many query heads as the others of its layer: heads in the order of a curve do not "
            "come out so. Add --unit kv to remove whole KV groups, or name the heads (--heads)."
        )


def folder(config: HeadsConfig, overwrite: bool) -> Path:
    """Where the checkpoint goes.

    Raises:
        InterpError: something lies there that must not be overwritten.
    """
    assert config.export is not None
    return check_folder(
        config.export,
        overwrite,
        option="--export",
        what="a checkpoint that interp pruned",
        is_ours=_is_export,
    )


def _is_export(path: Path) -> bool:
    try:
        return KEY in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def hf_config(model: Model) -> Any:
    """The transformers config of a model, heads that were cut out earlier counted as there."""
    return model.bridge.original_model.config


@dataclass
class Written:
    """A checkpoint that lies in a folder of its own, whole and checked.

    logit_gap: largest difference of its logits from the masked model's, relative to the largest
        logit (or to 1, where that is smaller).
    """

    folder: Path
    pruning: Pruning
    logit_gap: float


@contextlib.contextmanager
def written(
    model: Model,
    text: Text,
    heads: Sequence[Head],
    means: Tensor | None,
    target: Path,
) -> Iterator[tuple[Written, Any]]:
    """Write a checkpoint without these heads; it takes its place when the block ends well.

    Args:
        model: the measured model.
        text: on a few documents of which logits are compared.
        heads: what to cut out, besides what is gone already.
        means: [layer, head, d_head] mean outputs to keep as a bias; None keeps nothing.
        target: where to.

    Yields:
        What was written (into `<target>.partial`), and it as a plain transformers model.

    Raises:
        InterpError: it cannot be written, or its logits are not the masked model's.
    """
    config = hf_config(model)
    planned = plan(config, [*model.cfg.removed, *heads], compensate=means is not None)
    how = {
        name: getattr(model, name)
        for name in ("bos_token_id", "bos_default")
        if getattr(model, name) is not None
    }
    pruning = dataclasses.replace(planned, text=how)
    partial = partial_of(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write(model, pruning, heads, means, partial)
        small = load(model, partial)
        gap = _logit_gap(model, small, text, heads, means)
        yield Written(target, pruning, gap), small
        move_into_place(partial, target)
    except OSError as error:
        raise InterpError(
            f"The checkpoint cannot be written to {target}: {checkpoint.first_line(error)}."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(model: Model, folder: Path) -> Any:
    """A checkpoint as plain transformers, on the measured model's device and in its dtype."""
    from transformers import AutoConfig

    with checkpoint.quiet():
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        loaded = pruned.model_class(config).from_pretrained(
            folder, config=config, dtype=model.dtype, local_files_only=True
        )
    loaded = loaded.to(model.device)
    # Into memory of its own: mapped from a file, weights lie where the file has them (unaligned,
    # which is slower) and may have to be read again, so that timings would compare files.
    for parameter in loaded.parameters():
        parameter.data = parameter.data.clone()
    return loaded


def _write(
    model: Model, pruning: Pruning, heads: Sequence[Head], means: Tensor | None, folder: Path
) -> None:
    # Pickles were allowed when this model was loaded, or there are none to load.
    pickled = not hub.weight_files(model.folder)
    hf_model, tokenizer, _ = checkpoint.load(model.folder, model.name, "auto", pickled)
    with checkpoint.quiet():
        if means is not None:
            pruned.compensate(hf_model, _biases(model, heads, means))
        pruned.cut(hf_model, pruning)
        hf_model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    if (model.folder / GENERATION).is_file():  # as it was, comments of transformers left out
        shutil.copyfile(model.folder / GENERATION, folder / GENERATION)


def _biases(model: Model, heads: Sequence[Head], means: Tensor) -> dict[int, Tensor]:
    """layer -> [d_model] float64: what the removed heads write on average, through W_O."""
    out = {}
    with torch.no_grad():
        for layer, hs in interventions.by_layer(heads).items():
            w_o = model.bridge.blocks[layer].attn.o
            z = torch.zeros(1, 1, *means.shape[1:], dtype=model.dtype, device=model.device)
            nothing = w_o(z.flatten(2))
            z[0, 0, hs] = means[layer, hs].to(z)
            out[layer] = (w_o(z.flatten(2)) - nothing)[0, 0].double().cpu()
    return out


def _logit_gap(
    model: Model, small: Any, text: Text, heads: Sequence[Head], means: Tensor | None
) -> float:
    """The written model against the masked one, on real tokens of some documents.

    Raises:
        InterpError: they differ by more than rounding.
    """
    places = [(i, 0) for i in range(min(PROBE_DOCUMENTS, len(text)))]
    batch = text.batch_of(places, model.device)
    kept = None if means is None else means.to(model.device, torch.float32)
    with torch.no_grad(), interventions.ablate(model, heads, kept):
        masked = model.forward(batch).float()
    with torch.no_grad():
        own = small(batch.tokens, attention_mask=batch.attention_mask, use_cache=False).logits
    real = batch.attention_mask.bool()
    masked, own = masked[real], own.float()[real]
    gap = float((own - masked).abs().max() / masked.abs().max().clamp(min=1))
    stored = getattr(small.config, "dtype", None) or model.dtype
    rounded = means is not None and stored != torch.float32  # the bias, to the stored precision
    allowed = COARSE if rounded else TOLERANCE.get(model.dtype, COARSE)
    if not gap <= allowed:
        raise InterpError(
            f"The written checkpoint gives other logits than the masked model, by {gap:.1e} "
            f"(relative; allowed {allowed:g}), so it was not kept. Were weights changed after "
            f"loading? The checkpoint is made from {model.folder}."
        )
    return gap

"""Load a decoder through TransformerBridge, raw weights, and state its architecture as data.

The only module that imports transformer_lens. Weights are never folded or centred. A model is
loaded by plain transformers from a local folder (a hub model is first brought into the hub's
cache, a GGUF file dequantised into interp's cache), wrapped by the bridge, and then believed only
after the bridge has given the same logits as plain transformers on a probe.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from interp import assets, hub, names
from interp.errors import InterpError

log = logging.getLogger("interp")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROBE_TOKENS = 8
# Buffers that old checkpoints carry beside their weights and that no current model reads.
HARMLESS_KEYS = ("attn.bias", "masked_bias", "attention.bias", "inv_freq", "position_ids")


@dataclass(frozen=True)
class Facts:
    """What a model is, as numbers. Read from the checkpoint's config and the loaded modules."""

    family: str  # the checkpoint's model_type: gpt2, gpt_neox, llama, ...
    n_layers: int
    n_heads: int  # query heads per layer
    n_kv_heads: int  # key/value heads per layer; query head h reads h // (n_heads // n_kv_heads)
    d_model: int
    d_head: int
    d_mlp: int
    gated: bool  # act(gate) * up, as in SwiGLU
    parallel: bool  # attention and MLP read the same residual; there is no resid_mid
    rotary_fraction: float  # share of d_head that is rotated; 0 without rotary embedding
    norm: str  # LN or RMS
    tied: bool  # unembedding shares the embedding's weights
    vocab_size: int  # ids that the tokenizer can produce; padded rows are not counted
    vocab_rows: int  # rows of the embedding matrix, padding included
    n_ctx: int  # longest context the model takes


@dataclass
class Model:
    """A loaded decoder: facts, bridge and the checkpoint's own tokenizer."""

    cfg: Facts
    bridge: Any  # transformer_lens.model_bridge.TransformerBridge
    tokenizer: Any  # transformers tokenizer, as the checkpoint has it; None if there is none
    name: str
    source: str
    revision: str | None
    device: torch.device
    dtype: torch.dtype
    notices: list[str] = field(default_factory=list)
    bos_token_id: int | None = None  # overrides the tokenizer's, where set
    bos_default: bool | None = None  # overrides what plain tokenizer(text) does, where set
    # Nothing happens to the logits after the unembedding (no soft cap, no scale): measured.
    logits_are_unembedded: bool = True
    # A run from the middle gives the clean losses: measured by splice.usable when first needed.
    splices: bool | None = None

    def describe(self) -> dict[str, Any]:
        """The `model` entry of result.json."""
        facts = asdict(self.cfg)
        return {
            "name": self.name,
            "source": self.source,
            "revision": self.revision,
            **facts,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
        }

    def kv_head(self, head: int) -> int:
        """The key/value head that query head `head` reads."""
        return head // (self.cfg.n_heads // self.cfg.n_kv_heads)

    def hook_point(self, name: str) -> Any:
        """The bridge's HookPoint of that name, or None."""
        return self.bridge.get_hook_point(name)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Eval mode, no gradients to parameters, no autograd; all as before afterwards.

        Holds also after an exception or Ctrl-C. Inside, `torch.enable_grad()` gives gradients
        with respect to activations, even when the caller is in `torch.no_grad()` or
        `torch.inference_mode()`.
        """
        module = self.bridge.original_model
        training = [(m, m.training) for m in {*module.modules(), *self.bridge.modules()}]
        wanted = [(p, p.requires_grad) for p in module.parameters()]
        with torch.inference_mode(False), torch.no_grad():
            try:
                for part, _ in training:
                    part.training = False
                for parameter, _ in wanted:
                    parameter.requires_grad_(False)
                yield
            finally:
                for part, mode in training:
                    part.training = mode
                for parameter, requires in wanted:
                    parameter.requires_grad_(requires)

    def forward(self, batch: Any) -> torch.Tensor:
        """Logits of a TokenBatch (or whatever the unembedding currently hands on).

        Args:
            batch: has `.tokens` and `.attention_mask`, both [batch, pos], on the model's device.
        """
        return self.bridge(batch.tokens, attention_mask=batch.attention_mask, use_cache=False)


def pick_device(device: str) -> torch.device:
    """`auto` is cuda, then mps, then cpu; anything else must be there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InterpError(f"Unknown device {device!r}. Give auto, cpu, cuda, cuda:1 or mps.") from None
    if chosen.type == "cuda" and (
        not torch.cuda.is_available() or (chosen.index or 0) >= torch.cuda.device_count()
    ):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise InterpError(f"Device {device!r} is not here: torch sees {count} CUDA devices.")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise InterpError("Device 'mps' is not here: torch was built without it or finds no GPU.")
    return chosen


def load_model(
    name: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
    offline: bool = False,
    allow_pickle: bool = False,
) -> Model:
    """Load a decoder for measuring.

    Args:
        name: a short name (`gpt2`, `pythia-70m`, `smollm2-135m`), a hub id, a checkpoint folder or
            a .gguf file. None: gpt2 where it is cached or the hub answers within 3 seconds, else
            the embedded smollm2-135m, with a notice.
        revision: branch, tag or commit of a hub model (Pythia: `step1000`).
        device: auto, cpu, cuda, cuda:1 or mps.
        dtype: float32, bfloat16 or float16.
        offline: never ask the hub or the package index.
        allow_pickle: also read `.bin` weights (pickles can run code; off by default).

    Returns:
        The model, in eval mode.

    Raises:
        InterpError: with what is wrong and what to do, for anything that cannot be loaded right.
    """
    if dtype not in DTYPES:
        raise InterpError(f"Unknown dtype {dtype!r}. Give one of {', '.join(DTYPES)}.")
    chosen = pick_device(device)
    found = names.resolve(name, revision=revision, offline=offline, allow_pickle=allow_pickle)
    folder = _dequantised(found.path) if found.path.suffix == ".gguf" else found.path
    config = _decoder_config(folder, found.name)
    _check_weights(folder, found.name, allow_pickle)
    hf_model, notices = _from_pretrained(folder, found.name, config, DTYPES[dtype], allow_pickle)
    hf_model = hf_model.to(chosen)
    tokenizer, more = _tokenizer(folder)
    model = _bridge(hf_model, tokenizer, chosen, found)
    model.notices = [*found.notices, *notices, *more]
    return model


def _bridge(hf_model: Any, tokenizer: Any, device: torch.device, found: names.Found) -> Model:
    """Wrap, state the facts, and compare with plain transformers on a probe."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    config = hf_model.config
    rows = hf_model.get_input_embeddings().weight.shape[0]
    tied = hf_model.get_output_embeddings().weight is hf_model.get_input_embeddings().weight
    probe = torch.arange(PROBE_TOKENS, device=device)[None] * 7919 % min(rows, 10_007)
    mask = torch.ones_like(probe)
    with torch.no_grad():
        plain = hf_model(probe, attention_mask=mask, use_cache=False).logits.float()
    try:
        with _quiet():
            bridge = build_bridge_from_module(
                hf_model,
                type(hf_model).__name__,
                hf_config=copy.deepcopy(config),
                tokenizer=copy.deepcopy(tokenizer),
                device=device,
                model_name=found.name,
            )
    except Exception as error:
        raise InterpError(
            f"TransformerBridge does not support {type(hf_model).__name__} ({found.name!r}): "
            f"{_first_line(error)}"
        ) from error
    facts = _facts(bridge, config, tokenizer, rows, tied)
    model = Model(
        cfg=facts,
        bridge=bridge,
        tokenizer=tokenizer,
        name=found.name,
        source=found.source,
        revision=found.revision,
        device=device,
        dtype=next(hf_model.parameters()).dtype,
        bos_token_id=found.bos_token_id,
        bos_default=found.bos_default,
    )
    unembedded: list[torch.Tensor] = []
    handle = bridge.unembed.register_forward_hook(lambda _m, _i, out: unembedded.append(out))
    try:
        with torch.no_grad():
            bridged = bridge(probe, attention_mask=mask, use_cache=False).float()
    finally:
        handle.remove()
    tolerance = 1e-4 if model.dtype == torch.float32 else 2e-2
    scale = plain.abs().max().clamp(min=1)
    gap = float((bridged - plain).abs().max() / scale)
    if not gap <= tolerance:
        raise InterpError(
            f"The bridge's logits for {found.name!r} differ from plain transformers' by {gap:.1e} "
            f"(relative; allowed {tolerance:g}): its numbers could not be trusted."
        )
    last = unembedded[-1].float() if unembedded else None
    model.logits_are_unembedded = last is not None and torch.equal(last, bridged)
    return model


def _facts(bridge: Any, config: Any, tokenizer: Any, rows: int, tied: bool) -> Facts:
    from transformer_lens.utilities.hf_utils import get_rotary_pct_from_config

    cfg = bridge.cfg
    rotary = getattr(cfg, "positional_embedding_type", None) == "rotary"
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    real = min(max(vocabulary.values()) + 1, rows) if vocabulary else rows
    return Facts(
        family=config.model_type,
        n_layers=int(cfg.n_layers),
        n_heads=int(cfg.n_heads),
        n_kv_heads=int(getattr(cfg, "n_key_value_heads", None) or cfg.n_heads),
        d_model=int(cfg.d_model),
        d_head=int(cfg.d_head),
        d_mlp=int(cfg.d_mlp or 0),
        gated=bool(getattr(cfg, "gated_mlp", False)),
        parallel=bool(getattr(cfg, "parallel_attn_mlp", False)),
        rotary_fraction=float(get_rotary_pct_from_config(config)) if rotary else 0.0,
        norm=str(cfg.normalization_type),
        tied=tied,
        vocab_size=real,
        vocab_rows=rows,
        n_ctx=int(cfg.n_ctx),
    )

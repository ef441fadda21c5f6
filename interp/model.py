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


def _dequantised(path: Path) -> Path:
    """A GGUF file as a safetensors folder in the cache: written once per content, then reused."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise InterpError(f"{path} is not a GGUF file, or it is damaged: fetch it again.")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = assets.cache_dir() / "models" / digest[:24]
    if (folder / "config.json").exists():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("Dequantising %s, once (under a minute) ...", path.name)
    part = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        part.mkdir(parents=True, exist_ok=True)
        # The converter's progress bar ignores every setting; it goes to a string.
        with _quiet(), contextlib.redirect_stderr(io.StringIO()):
            loaded = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            )
            # save_pretrained refuses a model that it believes to be quantised still.
            loaded.hf_quantizer = None
            loaded.is_quantized = False
            if hasattr(loaded.config, "quantization_config"):
                del loaded.config.quantization_config
            loaded.save_pretrained(part)
            AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(part)
        try:
            part.rename(folder)
        except OSError:  # another process was faster with the same content
            if not (folder / "config.json").exists():
                raise
    except Exception as error:
        raise InterpError(f"{path} could not be read as a GGUF model: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _decoder_config(folder: Path, name: str) -> Any:
    """The checkpoint's config, refused by name unless it is a decoder-only language model."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if not (folder / "config.json").exists():
        raise InterpError(
            f"{str(folder)!r} holds no config.json, so it is not a checkpoint folder. "
            "Name the folder that save_pretrained wrote."
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise InterpError(f"The config of {name!r} cannot be read: {_first_line(error)}") from error
    kind = config.model_type
    declared = [a for a in (config.architectures or []) if isinstance(a, str)]
    if getattr(config, "is_encoder_decoder", False):
        raise InterpError(f"{name!r} ({kind}) is an encoder-decoder model; interp measures decoders.")
    decoder = any(a.endswith(("ForCausalLM", "LMHeadModel")) for a in declared)
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if not decoder and encoder:
        raise InterpError(
            f"{name!r} ({kind}) is an encoder-only model: it does not predict next tokens. "
            "interp measures decoders such as gpt2, pythia-160m or smollm2-135m."
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InterpError(f"{name!r} ({kind}) is not a causal language model known to transformers.")
    return config


def _check_weights(folder: Path, name: str, allow_pickle: bool) -> None:
    """Complete, readable safetensors, checked before transformers turns a gap into noise."""
    import json

    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError) as error:
            raise InterpError(f"{str(index)!r} is damaged: fetch the checkpoint again.") from error
        files = [folder / shard for shard in shards]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        if list(folder.glob("*.bin")):
            if allow_pickle:
                return
            raise InterpError(
                f"{name!r} has its weights only as .bin files, which are pickles and can run code. "
                "Convert it to safetensors, or say allow_pickle=True if you trust it."
            )
        raise InterpError(f"{name!r} ({str(folder)!r}) has a config but no weights (*.safetensors).")
    for file in files:
        if not file.exists():
            raise InterpError(f"{name!r} misses the weight file {file.name!r}: fetch it again.")
        try:
            with safe_open(file, "pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise InterpError(
                f"The weight file {str(file)!r} is damaged ({_first_line(error)}): fetch it again."
            ) from error


def _from_pretrained(
    folder: Path, name: str, config: Any, dtype: torch.dtype, allow_pickle: bool
) -> tuple[Any, list[str]]:
    from transformers import AutoModelForCausalLM

    try:
        with _quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
                use_safetensors=None if allow_pickle else True,
            )
    except Exception as error:
        raise InterpError(f"{name!r} cannot be loaded: {_first_line(error)}") from error
    missing = sorted(report.get("missing_keys", ()))
    wrong = [str(k[0]) for k in report.get("mismatched_keys", ())]
    if missing or wrong:
        # transformers would fill these with random numbers and go on.
        listed = ", ".join((missing + wrong)[:3])
        raise InterpError(
            f"{name!r} lacks {len(missing) + len(wrong)} weights that its config asks for ({listed}"
            f"{', ...' if len(missing) + len(wrong) > 3 else ''}): the checkpoint is incomplete."
        )
    unread = [k for k in report.get("unexpected_keys", ()) if not k.endswith(HARMLESS_KEYS)]
    notices = []
    if unread:
        notices.append(
            f"The checkpoint holds {len(unread)} tensors that its architecture does not use "
            f"({', '.join(sorted(unread)[:3])}): check that its config is the right one."
        )
    return model.eval(), notices


def _tokenizer(folder: Path) -> tuple[Any, list[str]]:
    from transformers import AutoTokenizer

    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True), []
    except Exception as error:
        return None, [f"No tokenizer could be loaded from {folder.name!r}: {_first_line(error)}"]


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Library chatter off stderr while loading; interp says itself what matters."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    root = logging.root.manager.disable
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(root)
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__

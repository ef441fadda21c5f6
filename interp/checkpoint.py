"""A checkpoint folder as plain transformers has it, or one clear error.

transformers fills a missing weight with noise, drops a tensor that it does not know and reads
pickles; here each of these is refused before a number comes of it. Nothing is fetched.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from interp import pruned, pruning
from interp.errors import InterpError
from interp.hub import AUTO_MODEL, INDEX, foreign_classes, has_tokenizer, weight_files

ADAPTER = "adapter_config.json"
# Buffers that old checkpoints carry beside their weights and that no current model reads.
HARMLESS_KEYS = ("attn.bias", "masked_bias", "attention.bias", "inv_freq", "position_ids")


def load(
    folder: Path,
    name: str,
    dtype: torch.dtype | Literal["auto"],
    allow_pickle: bool,
    *,
    trust_remote_code: bool = False,
) -> tuple[Any, Any, list[str]]:
    """The model, its tokenizer (None if there is none) and what a reader must know of them.

    Heads that were cut out of the checkpoint are there as zeros (see `pruned`).

    Args:
        folder: the checkpoint.
        name: what the messages call it.
        dtype: of the weights; auto: as they are stored.
        allow_pickle: also read `.bin` weights.
        trust_remote_code: run the Python code that comes with it, where it names any.

    Raises:
        InterpError: no decoder-only language model, or incomplete, damaged or unknown.
    """
    config = _decoder_config(folder, name, trust_remote_code)
    check_weights(folder, name, allow_pickle)
    removed = pruning.of_config(config)
    hf_model, unread = _from_pretrained(
        folder, name, config, dtype, allow_pickle, trust_remote_code
    )
    if removed is not None:
        pruned.expand(hf_model, removed)
        unread.append(_removed_notice(removed))
    tokenizer, missing = _tokenizer(folder, trust_remote_code)
    return hf_model, tokenizer, [*unread, *missing, *_code_notices(folder, trust_remote_code)]


def _code_notices(folder: Path, trusted: bool) -> list[str]:
    """What a reader must know of the Python code that the checkpoint names."""
    named = ", ".join(foreign_classes(folder))
    if not named:
        return []
    if trusted:
        return [
            f"Python code that comes with the checkpoint ran ({named}): what is measured is what "
            "that code computes, and it may do anything else that this user may do."
        ]
    return [
        f"The checkpoint names Python code of its own ({named}), which was not run: transformers' "
        "own classes of that kind are measured."
    ]


def _removed_notice(removed: pruning.Pruning) -> str:
    gone = [f"{layer}.{head}" for layer, head in removed.heads()]
    more = f" and {len(gone) - 12} more" if len(gone) > 12 else ""
    return (
        f"{len(gone)} heads were cut out of this checkpoint ({', '.join(gone[:12])}{more}): they "
        "are absent from every table by head; the others keep their numbers."
    )


def _decoder_config(folder: Path, name: str, trust_remote_code: bool) -> Any:
    """The checkpoint's config, refused by name unless it is a decoder-only language model."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if not (folder / "config.json").exists():
        inside = sorted(p.name for p in folder.glob("*.gguf"))
        raise InterpError(
            f"{str(folder)!r} holds no config.json, so it is not a checkpoint folder. "
            + (
                f"Name the file in it: {str(folder / inside[0])!r}."
                if inside
                else "Name the folder that save_pretrained wrote."
            )
        )
    _refuse_foreign_code(folder, name, trust_remote_code)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except Exception as error:
        raise InterpError(f"The config of {name!r} cannot be read: {first_line(error)}") from error
    kind = config.model_type
    declared = [a for a in (config.architectures or []) if isinstance(a, str)]
    if getattr(config, "is_encoder_decoder", False):
        raise InterpError(
            f"{name!r} ({kind}) is an encoder-decoder model; interp measures decoders such as "
            "gpt2, pythia-160m or smollm2-135m."
        )
    decoder = any(a.endswith(("ForCausalLM", "LMHeadModel")) for a in declared)
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if not decoder and encoder:
        raise InterpError(
            f"{name!r} ({kind}) is an encoder-only model: it does not predict next tokens. "
            "interp measures decoders such as gpt2, pythia-160m or smollm2-135m."
        )
    own = trust_remote_code and AUTO_MODEL in (getattr(config, "auto_map", None) or {})
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not own:
        raise InterpError(
            f"{name!r} ({kind}) is not a causal language model known to transformers."
        )
    return config


def _refuse_foreign_code(folder: Path, name: str, trusted: bool) -> None:
    """What transformers would run, or load from elsewhere, in place of the checkpoint's weights."""
    from transformers import CONFIG_MAPPING

    if (folder / ADAPTER).exists():
        raise InterpError(
            f"{name!r} holds {ADAPTER}, an adapter for another model: merge it into its model "
            "(merge_and_unload of peft) and save that."
        )
    elsewhere = [c for c in foreign_classes(folder) if "--" in c]
    if trusted and elsewhere:
        raise InterpError(
            f"{name!r} needs Python code that lies in another repository ({elsewhere[0]}): it is "
            "not fetched. Save the model together with its code (save_pretrained)."
        )
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # told where it is read
        return
    if isinstance(raw, dict) and raw.get("auto_map") and not trusted:
        kind = raw.get("model_type")
        if kind not in CONFIG_MAPPING:
            raise InterpError(
                f"{name!r} ({kind}) needs Python code that comes with it, which interp never runs "
                "unasked. If you have read it and trust it, say --trust-remote-code "
                "(trust_remote_code=True); or use a model that transformers knows by itself."
            )


def check_weights(folder: Path, name: str, allow_pickle: bool) -> None:
    """Complete, readable safetensors, checked before transformers turns a gap into noise."""
    from safetensors import SafetensorError, safe_open

    try:
        files = weight_files(folder)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise InterpError(
            f"{str(folder / INDEX)!r} is damaged or missing: fetch the checkpoint again."
        ) from error
    if not files:
        if not list(folder.glob("*.bin")):
            raise InterpError(
                f"{name!r} ({str(folder)!r}) has a config but no weights (*.safetensors)."
            )
        if allow_pickle:
            return
        raise InterpError(
            f"{name!r} has its weights only as .bin files, which are pickles and can run code. "
            "Convert it to safetensors, or say --allow-pickle (allow_pickle=True) if you trust it."
        )
    for file in files:
        if not file.exists():
            raise InterpError(f"{name!r} misses the weight file {file.name!r}: fetch it again.")
        try:
            with safe_open(file, "pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise InterpError(
                f"The weight file {str(file)!r} is damaged ({first_line(error)}): fetch it again."
            ) from error


def _from_pretrained(
    folder: Path,
    name: str,
    config: Any,
    dtype: torch.dtype | str,
    allow_pickle: bool,
    trust_remote_code: bool,
) -> tuple[Any, list[str]]:
    try:
        with quiet():
            found: Any = pruned.model_class(config).from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                use_safetensors=None if allow_pickle else True,
            )
    except Exception as error:
        raise InterpError(f"{name!r} cannot be loaded: {first_line(error)}") from error
    model, report = found
    refuse_gaps(name, report)
    unread = [k for k in report.get("unexpected_keys", ()) if not k.endswith(HARMLESS_KEYS)]
    notices = []
    if unread:
        notices.append(
            f"The checkpoint holds {len(unread)} tensors that its architecture does not use "
            f"({', '.join(sorted(unread)[:3])}): check that its config is the right one."
        )
    return model.eval(), notices


def refuse_gaps(name: str, report: Any) -> None:
    """transformers would fill what is missing or of the wrong shape with random numbers."""
    wrong = [str(k[0]) for k in report.get("mismatched_keys", ())]
    lacking = [*sorted(report.get("missing_keys", ())), *wrong]
    if lacking:
        raise InterpError(
            f"{name!r} lacks {_listed(lacking)}, which its config asks for: the checkpoint is "
            "incomplete, or its config is another model's."
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more weights" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _tokenizer(folder: Path, trust_remote_code: bool) -> tuple[Any, list[str]]:
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        return None, [f"There is no tokenizer in {str(folder)!r}."]
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except Exception as error:
        return None, [f"No tokenizer could be loaded from {str(folder)!r}: {first_line(error)}"]
    if not tokenizer.vocab_size:
        return None, [f"The tokenizer in {str(folder)!r} has no vocabulary."]
    return tokenizer, []


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it says nothing."""
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__

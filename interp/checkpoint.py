"""A checkpoint folder or .gguf file as plain transformers has it, or one clear error.

transformers fills a missing weight with noise, drops a tensor that it does not know and reads
pickles; here each of these is refused before a number comes of it. Nothing is fetched.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from interp import assets
from interp.errors import InterpError
from interp.hub import INDEX, has_tokenizer, weight_files

log = logging.getLogger("interp")

# Buffers that old checkpoints carry beside their weights and that no current model reads.
HARMLESS_KEYS = ("attn.bias", "masked_bias", "attention.bias", "inv_freq", "position_ids")
# Pre-tokenisers that transformers rebuilds from a GGUF file as the original tokenizer has them.
KNOWN_PRETOKENISERS = ("default", "gpt-2", "gpt2", "smollm", "olmo")
NOTICES_FILE = "interp.json"


def load(
    path: Path, name: str, dtype: torch.dtype, allow_pickle: bool
) -> tuple[Any, Any, list[str]]:
    """The model, its tokenizer (None if there is none) and what a reader must know of them.

    Args:
        path: a checkpoint folder or a .gguf file.
        name: what the messages call it.
        dtype: of the weights.
        allow_pickle: also read `.bin` weights.

    Raises:
        InterpError: no decoder-only language model, or incomplete, damaged or unknown.
    """
    notices: list[str] = []
    if path.is_file():
        path, notices = dequantised(path)
    config = _decoder_config(path, name)
    check_weights(path, name, allow_pickle)
    hf_model, unread = _from_pretrained(path, name, config, dtype, allow_pickle)
    tokenizer, missing = _tokenizer(path)
    return hf_model, tokenizer, [*notices, *unread, *missing]


def dequantised(path: Path) -> tuple[Path, list[str]]:
    """A GGUF file as a safetensors folder in the cache: written once per content, then reused."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise InterpError(f"{path} is not a GGUF file, or it is damaged: fetch it again.")
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InterpError(f"{path} cannot be read: {error.strerror or error}.") from error
    folder = assets.cache_dir() / "models" / digest[:24]
    if (folder / NOTICES_FILE).exists():
        try:
            check_weights(folder, path.name, False)
            return folder, json.loads((folder / NOTICES_FILE).read_text())["notices"]
        except (InterpError, ValueError, KeyError, TypeError):
            log.info("The dequantised copy in %s is damaged: making it again.", folder)
    log.info("Dequantising %s, once (under a minute) ...", path.name)
    part = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        part.mkdir(parents=True, exist_ok=True)
        notices = _convert(path, part)
        (part / NOTICES_FILE).write_text(json.dumps({"from": path.name, "notices": notices}))
        shutil.rmtree(folder, ignore_errors=True)
        try:
            part.rename(folder)
        except OSError:  # another process was faster with the same content
            if not (folder / NOTICES_FILE).exists():
                raise
    except InterpError:
        raise
    except OSError as error:
        raise InterpError(
            f"{path.name} could not be dequantised into {folder}: {first_line(error)}. "
            "Set INTERP_CACHE to a folder with room that you may write to."
        ) from error
    except Exception as error:
        raise InterpError(
            f"{path} could not be read as a GGUF model ({first_line(error)}): it is damaged, or of "
            "a kind that transformers does not read."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder, notices


def _convert(path: Path, folder: Path) -> list[str]:
    """Dequantise a GGUF file with transformers and save it; refuse whatever that would leave out."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reader = GGUFReader(path)
    ends = [int(t.data_offset) + int(t.n_bytes) for t in reader.tensors]
    if not ends or max(ends) > path.stat().st_size:
        raise InterpError(f"{path} is cut short: fetch it again.")
    fields = {key: field.contents() for key, field in reader.fields.items() if len(field.data) < 9}
    names = {t.name for t in reader.tensors}
    _refuse_scaled_positions(path, fields, names)
    # The converter's progress bar ignores every setting; it goes to a string.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        loaded, report = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        _refuse_gaps(path.name, report)
        _refuse_unread(path, loaded, names)
        # save_pretrained refuses a model that it believes to be quantised still.
        loaded.hf_quantizer = None
        loaded.is_quantized = False
        if hasattr(loaded.config, "quantization_config"):
            del loaded.config.quantization_config
        loaded.save_pretrained(folder)
        pre = str(fields.get("tokenizer.ggml.pre", "default"))
        try:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        except Exception as error:
            return [f"No tokenizer could be made from {path.name}: {first_line(error)}"]
        tokenizer.save_pretrained(folder)
    if pre in KNOWN_PRETOKENISERS:
        return []
    return [
        f"The tokenizer is rebuilt from {path.name} (pre-tokeniser {pre!r}) and may cut text "
        "differently from the original one: losses would then be too high."
    ]


def _refuse_scaled_positions(path: Path, fields: dict[str, Any], names: set[str]) -> None:
    """Scaled rotary positions are dropped by the converter: the logits would be a little off."""
    kind = fields.get("general.architecture")
    scaled = [n for n in names if n.startswith(("rope_freqs", "rope_factors"))]
    scaled += [
        key
        for key, value in fields.items()
        if key.startswith((f"{kind}.rope.scaling.", f"{kind}.rope.scale_linear"))
        and value not in ("none", 1.0, 0.0)
        and kind != "gpt-oss"
    ]
    if scaled:
        raise InterpError(
            f"{path} scales its rotary positions ({scaled[0]}), which transformers ignores when it "
            "reads a GGUF file. Name the original checkpoint instead."
        )


def _refuse_unread(path: Path, loaded: Any, names: set[str]) -> None:
    """Tensors of the file that found no place in the model, attention biases for example."""
    from transformers import modeling_gguf_pytorch_utils as converter

    try:
        kind = loaded.config.model_type
        process = converter.TENSOR_PROCESSORS.get(kind, converter.TensorProcessor)
        known = converter.get_gguf_hf_weights_map(loaded, process(config=loaded.config.to_dict()))
    except Exception:  # an architecture with another way in, which has its own checks
        return
    unread = sorted(names - set(known))
    if unread:
        raise InterpError(
            f"{path} holds {len(unread)} tensors that transformers does not read "
            f"({', '.join(unread[:3])}): name the original checkpoint instead."
        )


def _decoder_config(folder: Path, name: str) -> Any:
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
    try:
        with quiet():
            config = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
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
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InterpError(
            f"{name!r} ({kind}) is not a causal language model known to transformers."
        )
    return config


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
            f"{name!r} has its weights only as .bin files, which are pickles and can run code. Convert "
            "it to safetensors, or say --allow-pickle (allow_pickle=True) if you trust it."
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
    folder: Path, name: str, config: Any, dtype: torch.dtype, allow_pickle: bool
) -> tuple[Any, list[str]]:
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                use_safetensors=None if allow_pickle else True,
            )
    except Exception as error:
        raise InterpError(f"{name!r} cannot be loaded: {first_line(error)}") from error
    _refuse_gaps(name, report)
    unread = [k for k in report.get("unexpected_keys", ()) if not k.endswith(HARMLESS_KEYS)]
    notices = []
    if unread:
        notices.append(
            f"The checkpoint holds {len(unread)} tensors that its architecture does not use "
            f"({', '.join(sorted(unread)[:3])}): check that its config is the right one."
        )
    return model.eval(), notices


def _refuse_gaps(name: str, report: Any) -> None:
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


def _tokenizer(folder: Path) -> tuple[Any, list[str]]:
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        return None, [f"There is no tokenizer in {str(folder)!r}."]
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
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

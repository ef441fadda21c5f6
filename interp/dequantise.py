"""A .gguf file as a checkpoint folder in interp's cache: dequantised once per content.

transformers reads GGUF, but it leaves out what it does not know (attention biases, scaled rotary
positions) and goes on, so that the numbers would be a little off. Here that is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch

from interp import assets, checkpoint, locks
from interp.errors import InterpError

log = logging.getLogger("interp")

# Pre-tokenisers whose plain byte-level form is what the original tokenizer does.
KNOWN_PRETOKENISERS = ("default", "gpt-2", "gpt2", "smollm", "olmo")
NOTICES_FILE = "interp.json"


def folder_of(path: Path) -> tuple[Path, list[str]]:
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
    notices = _notices_of(folder, path.name)
    if notices is not None:
        return folder, notices
    part = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    lock = assets.cache_dir() / "locks" / folder.name
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        # One process makes it; others that want it at the same time wait, and find it made.
        with locks.exclusive(lock, wait=True):
            notices = _notices_of(folder, path.name)
            if notices is None:
                if folder.exists():
                    log.info("The dequantised copy in %s is damaged: making it again.", folder)
                log.info("Dequantising %s, once (under a minute) ...", path.name)
                part.mkdir(parents=True, exist_ok=True)
                notices = _convert(path, part)
                about = json.dumps({"from": path.name, "notices": notices})
                (part / NOTICES_FILE).write_text(about)
                # Without locks another may have been faster, and may be reading it.
                if _notices_of(folder, path.name) is None:
                    shutil.rmtree(folder, ignore_errors=True)
                    part.rename(folder)
    except InterpError:
        raise
    except OSError as error:
        raise InterpError(
            f"{path.name} could not be dequantised into {folder}: {checkpoint.first_line(error)}. "
            "Set INTERP_CACHE to a folder with room that you may write to."
        ) from error
    except Exception as error:
        raise InterpError(
            f"{path} could not be read as a GGUF model ({checkpoint.first_line(error)}): it is "
            "damaged, or of a kind that transformers does not read."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder, notices


def _notices_of(folder: Path, name: str) -> list[str] | None:
    """What there is to say of a dequantised copy; None where there is no whole one."""
    try:
        checkpoint.check_weights(folder, name, False)
        return json.loads((folder / NOTICES_FILE).read_text())["notices"]
    except (InterpError, OSError, ValueError, KeyError, TypeError):
        return None


def _convert(path: Path, folder: Path) -> list[str]:
    """Dequantise with transformers and save; refuse whatever that would leave out."""
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
    with checkpoint.quiet(), contextlib.redirect_stderr(io.StringIO()):
        found: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        loaded, report = found
        checkpoint.refuse_gaps(path.name, report)
        _refuse_unread(path, loaded, names)
        # save_pretrained refuses a model that it believes to be quantised still.
        loaded.hf_quantizer = None
        loaded.is_quantized = False
        if hasattr(loaded.config, "quantization_config"):
            del loaded.config.quantization_config
        loaded.save_pretrained(folder)
        pre = str(fields.get("tokenizer.ggml.pre", "default"))
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            return [f"No tokenizer could be made from {path.name}: {checkpoint.first_line(error)}"]
        tokenizer.save_pretrained(folder)
    if pre in KNOWN_PRETOKENISERS or pre in _pretokenisers():
        return []
    return [
        f"The tokenizer is rebuilt from {path.name} (pre-tokeniser {pre!r}) and may cut text "
        "differently from the original one: losses would then be too high."
    ]


def _pretokenisers() -> Container[str]:
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

        return mapping.GGUF_PRE_TOKENIZER_SPLITS
    except (ImportError, AttributeError):  # a transformers that knows fewer
        return ()


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

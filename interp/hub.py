"""Model hub access: decide once and fast whether there is a hub, then stay with the answer.

A hub call without a network hangs for tens of seconds in retries before it fails, so every
download goes through `reachable` first, and everything that is loaded is loaded from a local
folder. Torch-free.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interp.errors import InterpError

PROBE_SECONDS = 3.0
CONFIG_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]
PICKLE_FILES = ["pytorch_model*.bin"]
# Other formats of the same weights lie in folders of their own (onnx/, original/, ...).
IGNORED_FILES = ["*/*"]
TOKENIZER_FILES = ["tokenizer.json", "*.model", "vocab*", "*.tiktoken"]
INDEX = "model.safetensors.index.json"
CODE_FILES = ["*.py"]
AUTO_MODEL = "AutoModelForCausalLM"
OFFLINE_VALUES = {"1", "ON", "YES", "TRUE"}


def endpoint() -> str:
    """The hub's address, HF_ENDPOINT respected."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def switched_off() -> bool:
    """Whether the user's environment forbids asking the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in OFFLINE_VALUES


@functools.cache
def reachable(timeout: float = PROBE_SECONDS) -> bool:
    """Whether the hub answers within `timeout` seconds; asked once per process."""
    if switched_off():
        return False
    answer: list[bool] = []

    def ask() -> None:
        import urllib.error
        import urllib.request

        try:
            request = urllib.request.Request(endpoint(), method="HEAD")
            with urllib.request.urlopen(request, timeout=timeout):
                answer.append(True)
        except urllib.error.HTTPError as error:
            # An error page is an answer, unless it is a proxy's or says that the hub is down.
            answer.append(error.code < 500 and error.code != 407)
        except Exception:
            answer.append(False)

    # In a thread, because a name lookup ignores the socket's timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(answer and answer[0])


@contextlib.contextmanager
def asked_if_reachable() -> Iterator[None]:
    """Within, libraries that fetch by themselves use the cache alone where no hub answers."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not reachable()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that a checkpoint folder holds, or should hold by its index.

    Raises:
        InterpError: the index leads out of the folder.
        ValueError, KeyError, AttributeError, TypeError: the index is damaged, or missing.
    """
    if (folder / INDEX).exists() and not (folder / "model.safetensors").exists():
        shards = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        for shard in shards:
            if Path(shard).name != shard or shard == ".." or "\\" in shard:
                raise InterpError(
                    f"{str(folder / INDEX)!r} names {shard!r}, which is no file of its own "
                    "folder: it is not read."
                )
        return [folder / shard for shard in sorted(shards)]
    files = sorted(folder.glob("*.safetensors"))
    if any(re.search(r"-\d+-of-\d+$", file.stem) for file in files):
        raise ValueError("shards without an index")
    return files


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint folder holds a vocabulary; without one transformers makes one up."""
    return any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def foreign_classes(folder: Path) -> list[str]:
    """The classes of its own that a checkpoint names for its config, decoder and tokenizer.

    Each as "module.Class", with "owner/name--" before it where the code lies in another repository.
    """
    found: list[str] = []
    kinds = {"config.json": ("AutoConfig", AUTO_MODEL), "tokenizer_config.json": ("AutoTokenizer",)}
    for file, names in kinds.items():
        try:
            raw = json.loads((folder / file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        named: Any = raw.get("auto_map") if isinstance(raw, dict) else None
        if isinstance(named, list):  # of tokenizers, in older files
            named = {"AutoTokenizer": named}
        named = named if isinstance(named, dict) else {}
        for value in map(named.get, names):
            parts = value if isinstance(value, list) else [value]
            found += [part for part in parts if isinstance(part, str)]
    return found


def code_digests(folder: Path) -> dict[str, str]:
    """Python file of a checkpoint -> its sha256; {} where it names no class of its own."""
    if not foreign_classes(folder):
        return {}
    files = sorted(folder.glob("*.py"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _lacks_code(folder: Path) -> bool:
    own = (named.split(".")[0] for named in foreign_classes(folder) if "--" not in named)
    return any(not (folder / f"{module}.py").exists() for module in own)


def cached_snapshot(
    repo: str, revision: str | None = None, *, allow_pickle: bool = False
) -> Path | None:
    """The local folder of a model repository that lies whole in the hub cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(repo, "config.json", revision=revision)
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
        files = weight_files(folder)
    except Exception:  # whatever the reason, it is not there
        return None
    if files and all(file.exists() for file in files):
        return folder
    return folder if not files and allow_pickle and any(folder.glob("*.bin")) else None


def snapshot(
    repo: str,
    revision: str | None = None,
    *,
    offline: bool = False,
    allow_pickle: bool = False,
    code: bool = False,
) -> tuple[Path, str]:
    """A model repository as a local folder, from the cache or else from the hub.

    Args:
        repo: hub id, `owner/name` or a legacy name such as `gpt2`.
        revision: branch, tag (Pythia: `step1000`) or commit; None is the main branch.
        offline: never ask the hub.
        allow_pickle: also take `.bin` weights where there are no safetensors.
        code: also take Python files (nothing here runs them).

    Returns:
        The folder and the commit it is of.

    Raises:
        InterpError: not cached and no hub, no such repository or revision, or no access.
    """
    folder = cached_snapshot(repo, revision, allow_pickle=allow_pickle)
    if folder is not None:
        whole = has_tokenizer(folder) and not (code and _lacks_code(folder))
        if whole or offline or not reachable():
            return folder, folder.name
    wanted = f"{repo!r}" + (f" at revision {revision!r}" if revision else "")
    if offline or not reachable():
        raise InterpError(_absent(repo, revision, wanted, offline, allow_pickle))
    from huggingface_hub import HfApi, errors, snapshot_download

    try:
        found = HfApi().model_info(repo, revision=revision, timeout=30)
        names = [s.rfilename for s in found.siblings or [] if "/" not in s.rfilename]
        patterns = CONFIG_FILES + WEIGHT_FILES
        if not any(name.endswith(".safetensors") for name in names):
            if allow_pickle:
                patterns = CONFIG_FILES + PICKLE_FILES
            elif any(name.endswith(".bin") for name in names):
                raise InterpError(
                    f"{wanted} has its weights only as .bin files, which are pickles and can run "
                    "code. Say --allow-pickle (allow_pickle=True) if you trust it."
                )
        patterns = patterns + CODE_FILES * code
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=IGNORED_FILES,
            )
        )
    except InterpError:
        raise
    except errors.RevisionNotFoundError:
        raise InterpError(
            f"{repo!r} has no revision {revision!r}. Give a branch, a tag or a commit that exists."
        ) from None
    except errors.GatedRepoError:
        raise InterpError(
            f"{repo!r} is gated: accept its licence on the hub and log in with `hf auth login`."
        ) from None
    except errors.RepositoryNotFoundError:
        raise InterpError(
            f"There is no folder {repo!r} here, and the hub knows no model of that name (or it is "
            "private). Check the spelling."
        ) from None
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InterpError(f"Fetching {wanted} failed: {lines[0][:300]}") from error
    return folder, folder.name


def _absent(repo: str, revision: str | None, wanted: str, offline: bool, allow_pickle: bool) -> str:
    if not allow_pickle and cached_snapshot(repo, revision, allow_pickle=True) is not None:
        return (
            f"{wanted} is in the local cache with .bin weights only, which are pickles and can run "
            "code. Say --allow-pickle (allow_pickle=True) if you trust it."
        )
    here = _cached_revisions(repo)
    cached = f" (cached revisions of it: {', '.join(here)})" if here else ""
    if offline:
        why, do = "--offline forbids fetching it", "Run once without --offline, or name"
    elif switched_off():
        why, do = "HF_HUB_OFFLINE forbids fetching it", "Unset that, or name"
    else:
        why = f"the model hub did not answer within {PROBE_SECONDS:g} seconds"
        do = "Name"
    return (
        f"{wanted} is not in the local cache{cached} and {why}. {do} a local folder or .gguf "
        "file, or leave out --model to use the embedded smollm2-135m."
    )


def _cached_revisions(repo: str) -> list[str]:
    from huggingface_hub import constants

    refs = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "refs"
    try:
        return sorted(str(p.relative_to(refs)) for p in refs.rglob("*") if p.is_file())[:5]
    except OSError:
        return []

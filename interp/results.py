"""What a measurement hands back: a typed `Result` with tables, units and provenance.

A saved run is a folder with `result.json` (everything but the bulk, strict JSON), one
`<table>.parquet` per table, `tensors.safetensors` where there are tensors, `report.html`, and in
folders of its own what others have formats for, such as `sae/`. No pickles. The folder is written
as `<folder>.partial` and renamed, so that it is whole or absent.

Nothing here imports torch, plotly or rich: figures and pages live in `interp.report`, which this
module reaches by name only, so that the arrow between the two points one way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import importlib
import importlib.metadata
import json
import math
import os
import platform
import re
import secrets
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from interp.errors import InterpError

SCHEMA_VERSION = 1
REPORT_MODULE = "interp.report"
RESULT_FILE = "result.json"
TENSOR_FILE = "tensors.safetensors"
PAGE_FILE = "report.html"
PROGRESS = "progress"
"""Folder of what an unfinished run can be taken up from (`journal`)."""
PROGRESS_FILES = "*.safetensors"
"""What is saved in it."""

FEW = 8
"""Documents below which a result says what intervals over them are worth."""
ROOM = 2**26
"""Bytes of free disk below which no run is begun."""

_PACKAGES = {
    "interp": "interp",
    "torch": "torch",
    "transformers": "transformers",
    "transformer_lens": "transformer-lens",
    "sae_lens": "sae-lens",
    "numpy": "numpy",
    "scipy": "scipy",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
}
_REQUIRED = [
    "schema_version",
    "analyzer",
    "complete",
    "config",
    "model",
    "data",
    "environment",
    "seed",
    "started",
    "seconds",
    "notices",
    "summary",
    "tables",
]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Column:
    """What one column of a table, or one key of a summary, means.

    Attributes:
        unit: the unit, such as "nats per token", "share of heads" or "index"; never empty.
        description: one sentence, plain text.
    """

    unit: str
    description: str


def environment() -> dict[str, str | None]:
    """Versions of what produced a number; None for a package that is not installed. Imports none of
    them.
    """
    found: dict[str, str | None] = {}
    for key, package in _PACKAGES.items():
        try:
            found[key] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[key] = None
    found["python"] = platform.python_version()
    found["platform"] = platform.platform()
    return found


def now() -> str:
    """The time as runs have it: ISO 8601, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def described(table: pd.DataFrame, known: Mapping[str, Column]) -> dict[str, Column]:
    """The meaning of a table's own columns, in their order."""
    return {str(name): known[str(name)] for name in table.columns}


def few_documents(documents: int) -> list[str]:
    """What to say of numbers that rest on so many documents: nothing, where they are enough."""
    if documents >= FEW:
        return []
    if documents == 1:
        return [f"One document only: no mean over documents has an interval. Take {FEW} or more."]
    freedom = f"{documents - 1} degree{'s' * (documents > 2)} of freedom"
    return [
        f"Only {documents} documents: 95% intervals over them are wide and rough (Student's t, "
        f"{freedom}), and a single document can move a mean. Take {FEW} or more."
    ]


def of_run(
    run: Any,
    analyzer: str,
    tables: Mapping[str, pd.DataFrame],
    columns: Mapping[str, Mapping[str, Column]],
    summary: dict[str, Any],
    units: Mapping[str, Column],
    **more: Any,
) -> Result:
    """A run's Result.

    Args:
        run: has `config`, `model`, `text` (or None), `notices`, `started`, `began` (of
            `time.perf_counter`) and `complete`; `weights_sha256` where its model's were hashed.
        analyzer: the command's name.
        tables: name -> DataFrame.
        columns: table -> what its columns mean, and those that it might have had.
        summary: the headline numbers.
        units: what keys of the summary mean, likewise.
        **more: further fields of Result, or others in place of the run's.
    """
    hashed = getattr(run, "weights_sha256", None)
    fields: dict[str, Any] = {
        "analyzer": analyzer,
        "config": dataclasses.asdict(run.config),
        "model": run.model.describe() | ({"weights_sha256": hashed} if hashed else {}),
        "data": run.text.describe() if run.text is not None else {},
        "summary": summary,
        "summary_columns": {k: v for k, v in units.items() if k in summary},
        "tables": dict(tables),
        "columns": {name: described(table, columns[name]) for name, table in tables.items()},
        "notices": run.notices,
        "seed": run.config.seed,
        "started": run.started,
        "seconds": time.perf_counter() - run.began,
        "complete": run.complete,
    }
    fields |= more
    few = [] if run.text is None else few_documents(len(run.text))
    fields["notices"] = [*fields["notices"], *few]
    return Result(**fields)


@dataclass(kw_only=True, eq=False, repr=False)
class Result:
    """One measurement: what was asked, of which model and text, and what came out.

    `config`, `model`, `data`, `summary` and `environment` hold plain JSON values from the start
    (numpy scalars become Python's, tuples lists, and a number that is not finite None), so that a
    result in memory equals the same result loaded from its folder. Tables get a plain 0..n-1 index.

    Attributes:
        analyzer: the command that made it, such as "heads".
        config: the analyzer's options.
        model: what `Model.describe()` returns.
        data: what `Text.describe()` returns.
        summary: the analyzer's headline numbers.
        tables: name -> DataFrame.
        columns: table -> column -> `Column`; every column of every table must be described.
        tensors: name -> numpy array.
        files: path within the run folder, with forward slashes -> contents, or where they lie (in
            a loaded run: in its folder).
        notices: sentences that a reader must see beside the numbers.
        environment: versions, as `environment()` returns them.
        seed: the seed of everything random.
        started: ISO 8601, UTC.
        seconds: wall-clock duration.
        complete: False when the run was interrupted and covers only part of what was asked.
        command: the command line that reproduces it, if there was one.
        summary_columns: key of the summary -> `Column`.

    Raises:
        InterpError: a table without units, or something that could not be saved.
    """

    analyzer: str
    config: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    summary: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    columns: dict[str, dict[str, Column]]
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    files: dict[str, bytes | Path] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=environment)
    seed: int = 0
    started: str = field(default_factory=now)
    seconds: float = 0.0
    complete: bool = True
    command: str | None = None
    summary_columns: dict[str, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("config", "model", "data", "summary", "environment"):
            setattr(self, name, _plain_dict(getattr(self, name), name))
        self.notices = [str(notice) for notice in self.notices]
        self.seed = int(self.seed)
        self.seconds = float(self.seconds)
        self.complete = bool(self.complete)
        self.tables = {
            name: _checked_table(name, table, self.columns.get(name, {}))
            for name, table in self.tables.items()
        }
        self.tensors = {name: _checked_tensor(name, value) for name, value in self.tensors.items()}
        for name in self.files:
            _check_file(name)
        for key, column in self.summary_columns.items():
            _check_column(f"summary_columns[{key!r}]", column)

    def __repr__(self) -> str:
        tables = ", ".join(f"{name} ({len(table)} rows)" for name, table in self.tables.items())
        state = "" if self.complete else ", incomplete"
        return (
            f"Result({self.analyzer} of {self.model.get('name')}: {tables or 'no tables'}{state})"
        )

    @property
    def figures(self) -> list[str]:
        """Names of the figures that this result has the numbers for."""
        return importlib.import_module(REPORT_MODULE).figure_names(self)

    def figure(self, name: str) -> Any:
        """One figure, as a `plotly.graph_objects.Figure` to show or restyle.

        Raises:
            InterpError: no figure of that name, or the run did not measure what it shows.
        """
        return importlib.import_module(REPORT_MODULE).figure(self, name)

    def tokens(self, name: str | None = None, **options: Any) -> Any:
        """Texts of the run whose tokens are coloured by what was measured at them.

        For `ffn-keys` (table triggers), `superposition` (contexts) and `asymmetry` (examples); of
        one key, feature or head at a time, the page's first where none is named. Red is above zero,
        blue below; a notebook shows the number at a hover, or where the Tab key goes.

            result.tokens("triggers", layer=27, key=831)
            result.tokens("examples", layer=3, head=0, value="score")

        Args:
            name: a table with tokens. Default: the first that the result has.
            **options: columns of that table and the value that a row must have there; and `rows`,
                the most texts to show (10), `value`, the column to colour by, and `limit`, the
                absolute value that has the full colour (default: the largest shown).

        Returns:
            What a notebook shows, an `interp.report.strips.TokenStrips`.

        Raises:
            InterpError: no tokens in that table, or none of that key, feature or head.
        """
        return importlib.import_module(REPORT_MODULE).tokens(self, name, **options)

    def _repr_html_(self) -> str:
        """Table and figures as one self-contained piece of HTML."""
        return importlib.import_module(REPORT_MODULE).notebook_html(self)

    def _ipython_display_(self) -> None:
        """In a notebook, figures go through plotly's own renderers, as the user set them."""
        importlib.import_module(REPORT_MODULE).display(self)

    def to_json(self) -> dict[str, Any]:
        """The contents of result.json: plain JSON values only, null for a number that is not
        finite.
        """
        out = {
            "schema_version": SCHEMA_VERSION,
            "analyzer": self.analyzer,
            "complete": self.complete,
            "config": self.config,
            "model": self.model,
            "data": self.data,
            "environment": self.environment,
            "seed": self.seed,
            "started": self.started,
            "seconds": self.seconds,
            "notices": self.notices,
            "summary": self.summary,
            "tables": {
                name: {
                    "file": f"{name}.parquet",
                    "rows": len(table),
                    "columns": {
                        column: dataclasses.asdict(self.columns[name][column])
                        for column in table.columns
                    },
                }
                for name, table in self.tables.items()
            },
            "tensors": {
                name: {"file": TENSOR_FILE, "shape": value.shape, "dtype": str(value.dtype)}
                for name, value in self.tensors.items()
            },
            "files": {name: {"bytes": _size(value)} for name, value in self.files.items()},
            "command": self.command,
            "summary_columns": {
                key: dataclasses.asdict(column) for key, column in self.summary_columns.items()
            },
        }
        return _plain_dict(out, "result")

    def save(self, folder: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the run folder: whole, or not at all.

        Files that are not this run's own (a checkpoint, say) and already lie in `<folder>.partial`
        move along with it.

        Args:
            folder: the folder to make; missing parents are made too.
            overwrite: replace an earlier run there, once the new one is written.

        Raises:
            InterpError: the folder exists, is not a run's, or cannot be written.
        """
        target = check_folder(folder, overwrite)
        partial = partial_of(target)
        page = self._page()
        text = json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False, indent=1)
        with _whole_or_absent(partial, target):
            (partial / RESULT_FILE).write_text(text + "\n", encoding="utf-8")
            for name, table in self.tables.items():
                _write_table(partial / f"{name}.parquet", name, table)
            if self.tensors:
                _write_tensors(partial / TENSOR_FILE, self.tensors)
            for name, value in self.files.items():
                _write_file(partial / name, value)
            (partial / PAGE_FILE).write_text(page, encoding="utf-8")
            move_into_place(partial, target)
        if self.complete:  # only now: until the tables are there, they can be made again from it
            shutil.rmtree(target / PROGRESS, ignore_errors=True)
        return target

    def _page(self) -> str:
        # A fault in drawing must not cost the hours that the numbers took: say so loudly and keep
        # them.
        try:
            return importlib.import_module(REPORT_MODULE).render([self])
        except Exception as error:
            notice = (
                f"report.html could not be drawn ({type(error).__name__}: {error}); the numbers "
                "are complete in result.json and the parquet files."
            )
            warnings.warn(notice, stacklevel=3)
            self.notices.append(notice)
            return (
                '<!doctype html><meta charset="utf-8"><title>interp</title>'
                "<p>This page could not be drawn. The numbers are in result.json and the parquet "
                "files beside it."
            )


def check_folder(
    folder: str | os.PathLike[str],
    overwrite: bool = False,
    *,
    option: str = "--out",
    what: str = "a saved run",
    is_ours: Callable[[Path], bool] | None = None,
) -> Path:
    """Fail before a long run, not after it: can a run be saved here?

    Args:
        folder: where to.
        overwrite: whether something of ours may be replaced.
        option: which option named the folder, for the messages.
        what: what may be overwritten, for the messages.
        is_ours: whether an existing folder holds that; default: a saved run.

    Returns:
        The folder's path, with `~` expanded.

    Raises:
        InterpError: it exists (with overwrite: holds something that is no run), or cannot be
            written.
    """
    path = Path(folder).expanduser()
    if not path.name or path.name == "..":
        raise InterpError(
            f"{str(folder)!r} cannot name a folder of {option}; give a new name, as runs/first."
        )
    try:
        # Raises for a name that is too long or holds a NUL byte, which exists() would call merely
        # absent.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(partial_of(path))
        if os.path.lexists(path):
            if not overwrite:
                raise InterpError(
                    f"{path} already exists; choose another {option}, or pass --overwrite."
                )
            if path.is_symlink() or not path.is_dir():
                raise InterpError(f"{path} is not a folder, so it is not overwritten.")
            if any(path.iterdir()) and not (is_ours or _is_run)(path):
                raise InterpError(
                    f"{path} holds files that are not {what}, so it is not overwritten; "
                    f"choose another {option}."
                )
        parent = path.absolute().parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise InterpError(f"cannot make {path}: {parent} is a file, not a folder.")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise InterpError(f"cannot make {path}: no permission to write in {parent}.")
        if (free := shutil.disk_usage(parent).free) < ROOM:
            raise InterpError(
                f"cannot make {path}: {free / 1e6:.0f} MB of disk are free there; make room, or "
                f"choose another {option}."
            )
        with tempfile.TemporaryFile(dir=parent) as probe:  # a quota, a read-only file system
            probe.write(bytes(2**16))
    except (OSError, ValueError) as error:
        raise InterpError(f"cannot make {str(folder)!r}: {_reason(error)}.") from error
    return path


def partial_of(folder: Path) -> Path:
    """Where a folder is made before it is renamed, and what an unfinished run leaves."""
    return folder.with_name(folder.name + ".partial")


def has_progress(folder: Path) -> bool:
    """Whether a run has saved something in this folder of its own, to be taken up."""
    return any((folder / PROGRESS).glob(PROGRESS_FILES))


def unfinished(folder: str | os.PathLike[str]) -> Path:
    """Where an unfinished run lies: as `<folder>.partial`, or saved as incomplete in `folder`.

    Raises:
        InterpError: there is none, or the run is complete.
    """
    path = Path(folder).expanduser()
    partial = partial_of(path)
    if not os.path.lexists(path):
        if not partial.is_dir():
            raise InterpError(f"there is no run to take up: neither {path} nor {partial} exists.")
        return partial
    if _read_json(path).get("complete", True):
        raise InterpError(f"{path} holds a complete run: there is nothing to take up.")
    if partial.exists():
        raise InterpError(f"both {path} and {partial} exist; remove the one not to take up.")
    return path


def reopen(folder: str | os.PathLike[str]) -> Path:
    """Make an unfinished run's folder the `<folder>.partial` that it was, to take it up again.

    Returns:
        The folder with the run's progress: `<folder>.partial`.

    Raises:
        InterpError: see `unfinished`.
    """
    path = Path(folder).expanduser()
    partial = partial_of(path)
    if unfinished(path) != partial:
        os.rename(path, partial)
    return partial


def load_result(folder: str | os.PathLike[str]) -> Result:
    """Read a saved run; no model is needed.

    Args:
        folder: the run folder, or its result.json.

    Raises:
        InterpError: missing, damaged, written by a newer version, or no run at all.
    """
    path = Path(folder).expanduser()
    if path.name == RESULT_FILE and path.is_file():
        path = path.parent
    if not path.is_dir():
        unfinished = partial_of(path) if path.name else path
        hint = (
            f"; {unfinished} holds an unfinished run (see --resume)" if unfinished.is_dir() else ""
        )
        what = "is a file, not a run folder" if path.is_file() else "does not exist"
        raise InterpError(f"{path} {what}{hint}.")
    raw = _read_json(path)
    version = raw.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise InterpError(f"{path / RESULT_FILE} has no schema_version, so it is no saved run.")
    if version > SCHEMA_VERSION:
        raise InterpError(
            f"{path} has schema_version {version}; this interp reads up to {SCHEMA_VERSION}. "
            "Upgrade interp to read it."
        )
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise InterpError(f"{path / RESULT_FILE} is damaged: it lacks {', '.join(missing)}.")
    try:
        columns = {
            name: {key: Column(**column) for key, column in entry["columns"].items()}
            for name, entry in raw["tables"].items()
        }
        tables = {
            name: _read_table(path, entry["file"], entry["rows"], list(columns[name]))
            for name, entry in raw["tables"].items()
        }
        return Result(
            analyzer=raw["analyzer"],
            config=raw["config"],
            model=raw["model"],
            data=raw["data"],
            summary=raw["summary"],
            tables=tables,
            columns=columns,
            tensors=_read_tensors(path, raw.get("tensors") or {}),
            files=_found_files(path, raw.get("files") or {}),
            notices=list(raw["notices"]),
            environment=raw["environment"],
            seed=raw["seed"],
            started=raw["started"],
            seconds=raw["seconds"],
            complete=raw["complete"],
            command=raw.get("command"),
            summary_columns={
                key: Column(**column) for key, column in (raw.get("summary_columns") or {}).items()
            },
        )
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise InterpError(
            f"{path / RESULT_FILE} is damaged: an entry does not have the expected form ({error})."
        ) from error


# Checking and plain values ------------------------------------------------------------------------


def _check_column(where: str, column: object) -> None:
    if not isinstance(column, Column) or not column.unit.strip() or not column.description.strip():
        raise InterpError(
            f"{where} needs a Column with a unit and a description, as Column('nats per token', "
            "'Loss of ...')."
        )


def _checked_table(name: str, table: pd.DataFrame, columns: Mapping[str, Column]) -> pd.DataFrame:
    if not _NAME.fullmatch(name):
        raise InterpError(f"{name!r} cannot name a table: letters, digits, _ and - only.")
    if any(label is not None for label in table.index.names):
        table = table.reset_index()
    else:
        table = table.reset_index(drop=True)
    names = list(table.columns)
    if len(set(names)) < len(names) or not all(isinstance(column, str) for column in names):
        raise InterpError(f"table {name}: column names must be distinct strings, not {names}.")
    undocumented = [column for column in names if column not in columns]
    if undocumented:
        raise InterpError(
            f"table {name}: no unit and description for {', '.join(undocumented)}; add a Column "
            "for each."
        )
    for column in names:
        _check_column(f"columns[{name!r}][{column!r}]", columns[column])
    table.attrs = {}
    return table


def _checked_tensor(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InterpError(f"tensor {name!r} is no numpy array: {error}.") from error
    if array.dtype.kind not in "biuf":
        raise InterpError(f"tensor {name!r} has dtype {array.dtype}; only numbers can be saved.")
    return array


def _check_file(name: str) -> None:
    parts = name.split("/")
    if len(parts) < 2 or not all(_FILE.fullmatch(part) for part in parts):
        raise InterpError(f"{name!r} cannot name a file of a run: it must lie in a folder of it.")


def _plain(value: Any, where: str) -> Any:
    """`value` as JSON has it. A number that is not finite becomes None: JSON has no word for it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value, where)
    if isinstance(value, str):
        # A lone surrogate (an undecodable byte of a file name) is not encodable as UTF-8.
        return _SURROGATES.sub("\ufffd", str(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [_plain(item, where) for item in sorted(value)]
    if isinstance(value, os.PathLike):
        return _plain(os.fspath(value), where)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if value is pd.NA:
        return None
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), where)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value), where)
    to_list = getattr(value, "tolist", None)  # a torch tensor, without importing torch
    if callable(to_list):
        return _plain(to_list(), where)
    raise InterpError(f"{where} is a {type(value).__name__}, which JSON cannot hold.")


def _plain_dict(value: Any, where: str) -> dict[str, Any]:
    plain = _plain(value, where)
    if not isinstance(plain, dict):
        raise InterpError(f"{where} must be a dict, not a {type(value).__name__}.")
    return plain


def _key(key: Any) -> str:
    return _SURROGATES.sub("\ufffd", str(key.item() if isinstance(key, np.generic) else key))


# Files --------------------------------------------------------------------------------------------


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)


def _is_run(path: Path) -> bool:
    try:
        return "schema_version" in json.loads((path / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


@contextlib.contextmanager
def _whole_or_absent(partial: Path, target: Path) -> Iterator[None]:
    """Make `partial` for writing; on any failure, Ctrl-C included, take away what was written."""
    from safetensors import SafetensorError

    made = not os.path.lexists(partial)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        _remove_own_files(partial)  # left by an earlier save that was killed
        yield
    except BaseException as error:
        if made:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                _remove_own_files(partial)
        if isinstance(error, OSError | SafetensorError):
            raise InterpError(
                f"cannot save the run to {target}: {_reason(error)}. Nothing was written there; "
                "free space or choose another --out."
            ) from error
        raise


def _remove_own_files(partial: Path) -> None:
    for file in partial.iterdir():
        if file.suffix == ".parquet" or file.name in (RESULT_FILE, TENSOR_FILE, PAGE_FILE):
            file.unlink()


def move_into_place(partial: Path, target: Path) -> None:
    """Rename a finished folder; what lies at the target stays until the new one is there."""
    if not os.path.lexists(target):
        os.rename(partial, target)
        return
    old = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}")
    os.rename(target, old)
    try:
        os.rename(partial, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_table(file: Path, name: str, table: pd.DataFrame) -> None:
    import pyarrow as pa

    clean = table.copy()
    for column in clean.columns:
        if clean[column].dtype == object:
            clean[column] = clean[column].map(
                lambda item: _SURROGATES.sub("\ufffd", item) if isinstance(item, str) else item
            )
    try:
        clean.to_parquet(file, engine="pyarrow", index=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise InterpError(f"table {name} cannot be saved as parquet: {error}") from error


def _read_table(path: Path, file: str, rows: int, columns: list[str]) -> pd.DataFrame:
    import pyarrow as pa

    if Path(file).name != file:
        raise InterpError(f"{path / RESULT_FILE} is damaged: {file!r} is not a file of the run.")
    try:
        table = pd.read_parquet(path / file, engine="pyarrow")
    except FileNotFoundError as error:
        raise InterpError(f"{path} is damaged: {file} is missing.") from error
    except (OSError, pa.ArrowException) as error:
        raise InterpError(f"{path / file} cannot be read: {error}") from error
    if len(table) != rows or list(table.columns) != columns:
        raise InterpError(
            f"{path / file} does not match result.json ({len(table)} rows with "
            f"{list(table.columns)}, {rows} with {columns} expected); the folder was edited or is "
            "damaged."
        )
    for column in table.columns:  # parquet hands lists back as arrays
        if table[column].dtype == object:
            table[column] = table[column].map(
                lambda item: item.tolist() if isinstance(item, np.ndarray) else item
            )
    return table


def _write_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    # save_file writes the buffer as it lies in memory: a transposed view would come back scrambled.
    save_file({name: np.array(value, order="C") for name, value in tensors.items()}, str(file))


def _read_tensors(path: Path, listed: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if not listed:
        return {}
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(str(path / TENSOR_FILE))
    except FileNotFoundError as error:
        raise InterpError(f"{path} is damaged: {TENSOR_FILE} is missing.") from error
    except (OSError, SafetensorError) as error:
        raise InterpError(f"{path / TENSOR_FILE} cannot be read: {error}") from error
    missing = [name for name in listed if name not in found]
    if missing:
        raise InterpError(f"{path / TENSOR_FILE} is damaged: it lacks {', '.join(missing)}.")
    return {name: found[name] for name in listed}


def _size(value: bytes | Path) -> int:
    return len(value) if isinstance(value, bytes) else value.stat().st_size


def _write_file(file: Path, value: bytes | Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, bytes):
        file.write_bytes(value)
    elif not (file.exists() and file.samefile(value)):
        shutil.copyfile(value, file)


def _found_files(path: Path, listed: Mapping[str, Any]) -> dict[str, bytes | Path]:
    """Where a run's further files lie; they may be large, so they are not read."""
    for name, entry in listed.items():
        _check_file(name)
        if not (path / name).is_file() or (path / name).stat().st_size != entry["bytes"]:
            raise InterpError(f"{path} is damaged: {name} is missing or has another size.")
    return {name: path / name for name in listed}


def _read_json(path: Path) -> dict[str, Any]:
    file = path / RESULT_FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except FileNotFoundError as error:
        raise InterpError(f"{path} is not a run folder: it has no {RESULT_FILE}.") from error
    except OSError as error:
        raise InterpError(f"{file} cannot be read: {_reason(error)}.") from error
    except (ValueError, RecursionError) as error:  # bad JSON and bad UTF-8
        raise InterpError(f"{file} is damaged: {error}.") from error
    if not isinstance(raw, dict):
        raise InterpError(f"{file} is damaged: it holds no JSON object.")
    return raw


def _no_constant(token: str) -> Any:
    raise ValueError(f"{token} is not JSON")

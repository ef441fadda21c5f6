"""The options of every analyzer and command, written once.

Each frozen dataclass is the command line's options and the library's keywords at the same time:
`interp heads --step 0.2` and `interp.heads(model, text, step=0.2)` read the same field, with the
same range. Torch-free, so that --help stays fast.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from interp.errors import UsageError

Config = TypeVar("Config")


def _must(ok: bool, option: str, expected: str, value: Any) -> None:
    if not ok:
        raise UsageError(f"--{option} must be {expected}; it is {value!r}.")


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and where it runs."""

    model: str | None = None
    """Short name, hub id, folder or .gguf file. Default: gpt2 if at hand, else the embedded one."""
    revision: str | None = None
    """Branch, tag or commit of a hub model (Pythia: step1000)."""
    device: str = "auto"
    """auto (cuda, then mps, then cpu), cpu, cuda, cuda:1 or mps."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the model's weights and activations; statistics are float64 always."""
    offline: bool = False
    """Never ask a model hub or the package index."""
    allow_pickle: bool = False
    """Also read .bin weights, which are pickles and can run code."""


@dataclass(frozen=True)
class TextOptions:
    """Which text, and how it becomes tokens."""

    data: str = "news"
    """news (embedded), a .txt, .jsonl, .csv or .parquet file, a folder of such, or a hub dataset."""
    text_column: str | None = None
    """Column or field that holds the text. Default: text, or the only one that can be meant."""
    split: str = "train"
    """Split of a hub dataset."""
    documents: int = 32
    """Documents: a seeded sample, the unit of every interval. At least 1."""
    context: int = 64
    """Tokens of a document that are used, BOS included. At least 2."""
    bos: bool | None = None
    """Start each document with BOS, or not. Default: as the model's tokenizer does."""
    min_tokens: int = 2
    """Shorter documents are skipped. At least 1."""
    windows: bool = False
    """Use every window of --context tokens of a document, not just the first."""

    def __post_init__(self) -> None:
        _must(self.documents >= 1, "documents", "1 or more", self.documents)
        _must(self.context >= 2, "context", "2 or more", self.context)
        _must(self.min_tokens >= 1, "min-tokens", "1 or more", self.min_tokens)


@dataclass(frozen=True)
class OutputOptions:
    """Where results go and how they are shown."""

    out: Path | None = None
    """Run folder. Default: runs/<analyzer>-<model>-<timestamp>."""
    overwrite: bool = False
    """Replace an earlier run in --out."""
    rows: int = 10
    """Rows of the printed table. 0 or more."""
    format: Literal["table", "json"] = "table"
    """What stdout carries: a table, or the contents of result.json."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        _must(self.rows >= 0, "rows", "0 or more", self.rows)


@dataclass(frozen=True)
class RunOptions:
    """Options that every analyzer takes."""

    seed: int = 0
    """Seed of everything random: the sample, random orders, resampling donors. 0 or more."""
    batch_size: int | Literal["auto"] = "auto"
    """Documents per forward pass; auto is what fits comfortably. No number depends on it."""
    progress: bool = True
    """Progress bars on stderr."""

    def __post_init__(self) -> None:
        _must(self.seed >= 0, "seed", "0 or more", self.seed)
        ok = self.batch_size == "auto" or (isinstance(self.batch_size, int) and self.batch_size >= 1)
        _must(ok, "batch-size", "1 or more, or auto", self.batch_size)


@dataclass(frozen=True)
class HeadsConfig(RunOptions):
    """How sensitive the model is to removing attention heads."""

    prune: bool = False
    """Remove heads cumulatively, least important first, and draw the loss curve."""
    step: float = 0.1
    """Share of all heads removed per step of the curve. Above 0, at most 1."""
    rescore: bool = False
    """Add an order that re-estimates importance after every step (implies --prune)."""
    unit: Literal["head", "kv"] = "head"
    """What is removed at a time: a query head, or a KV head with all query heads that read it."""
    exact: bool = False
    """Also remove every head one at a time and test the loss change. Slow: the time is told first."""
    ablation: Literal["zero", "mean", "resample"] = "zero"
    """With --exact: put zero, the mean over other documents, or another document in its place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _must(0 < self.step <= 1, "step", "above 0 and at most 1", self.step)
        for option, allowed in (("unit", ("head", "kv")), ("ablation", ("zero", "mean", "resample"))):
            _must(getattr(self, option) in allowed, option, " or ".join(allowed), getattr(self, option))


def with_options(
    kind: type[Config], config: Config | None = None, options: Mapping[str, Any] | None = None
) -> Config:
    """A config with some options replaced; what an analyzer does with its keywords.

    Raises:
        UsageError: an option that does not exist (with the nearest name), or out of range.
    """
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    options = dict(options or {})
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
            raise UsageError(f"Unknown option {name!r}: {hint}")
    if config is None:
        return kind(**options)
    if not isinstance(config, kind):
        raise UsageError(f"config is a {type(config).__name__}; expected a {kind.__name__}.")
    return kind(**{name: getattr(config, name) for name in known} | options)

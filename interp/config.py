"""The options of every analyzer and command, written once.

Each frozen dataclass is the command line's options and the library's keywords at the same time:
`interp heads --step 0.2` and `interp.heads(model, text, step=0.2)` read the same field, with the
same range. Torch-free, so that --help stays fast.
"""

from __future__ import annotations

import difflib
import numbers
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cyclopts import Parameter

from interp.errors import UsageError

Config = TypeVar("Config")
_RUN = Parameter(group="Run")
NO_MATTER = ("progress", "resume", "checkpoint_every")
"""Options that change no number."""


def _must(ok: bool, option: str, expected: str, value: Any) -> None:
    if not ok:
        raise UsageError(f"--{option} must be {expected}; it is {value!r}.")


class _Options:
    """Checks every field against its type: a library call gets the same words as a command line."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            _must(_fits(value, hint), name.replace("_", "-"), _words(hint), value)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if isinstance(value, bool):  # which Python counts among the integers
        return hint is bool
    if hint is Path:
        return isinstance(value, str | Path)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(v, get_args(hint)[0]) for v in value)
    return isinstance(value, {int: numbers.Integral, float: numbers.Real}.get(hint, hint))


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(part) for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a tuple of {_words(get_args(hint)[0])}"
    words = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
    return words.get(hint, "a path")


@dataclass(frozen=True)
class ModelOptions(_Options):
    """Which model, and where it runs."""

    model: str | None = None
    """Short name, hub id, folder or .gguf file. Default: gpt2, or the embedded one."""
    revision: str | None = None
    """Branch, tag or commit of a hub model (Pythia: step1000)."""
    device: str = "auto"
    """auto (cuda, then mps, then cpu), cpu, cuda, cuda:1 or mps."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and activations; statistics are float64."""
    offline: bool = False
    """Never ask a model hub or the package index."""
    allow_pickle: bool = False
    """Also read .bin weights, which are pickles and can run code."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint: only code that you have read."""

    @property
    def label(self) -> str:
        """What tells this model from others of one run: its revision, and what was named."""
        name = Path(self.model or "default").name
        return name if self.revision is None else f"{name} @ {self.revision}"

    def each(self) -> list[ModelOptions]:
        """One set of options per model to load."""
        return [self]

    def named(self, name: str) -> ModelOptions:
        """The same, the model named also where it was the default."""
        return replace(self, model=self.model or name)


@dataclass(frozen=True)
class ModelsOptions(ModelOptions):
    """Which models, one after another, and where they run."""

    model: tuple[str, ...] = ()  # type: ignore[assignment]
    """As for every command; may be given several times (a run's checkpoints)."""
    revision: tuple[str, ...] = ()  # type: ignore[assignment]
    """Branch, tag or commit; may be given several times (--revision step0 ...)."""

    def named(self, name: str) -> ModelOptions:
        """The same, the model named also where it was the default."""
        return replace(self, model=self.model or (name,))

    def each(self) -> list[ModelOptions]:
        """Every model at every revision, in the order given."""
        rest = {f.name: getattr(self, f.name) for f in fields(ModelOptions)[2:]}
        return [
            ModelOptions(model=model, revision=revision, **rest)
            for model in self.model or (None,)
            for revision in self.revision or (None,)
        ]


@dataclass(frozen=True)
class TextOptions(_Options):
    """Which text, and how it becomes tokens."""

    data: str = "news"
    """news, a .txt/.jsonl/.csv/.parquet file or folder, or a hub id."""
    text_column: str | None = None
    """Column that holds the text. Default: text, or the only one possible."""
    split: str = "train"
    """Split of a hub dataset."""
    documents: int = 32
    """Documents in the seeded sample, 1 or more."""
    context: int = 64
    """Tokens used of each document, BOS included, 2 or more."""
    bos: Annotated[bool | None, Parameter(negative="--no-bos")] = None
    """Start documents with BOS, or not. Default: as the tokenizer does."""
    min_tokens: int = 2
    """Skip documents of fewer tokens, 2 or more."""
    windows: bool = False
    """Use all windows of --context tokens of a document, not only the first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _must(self.documents >= 1, "documents", "1 or more", self.documents)
        _must(self.context >= 2, "context", "2 or more", self.context)
        _must(self.min_tokens >= 2, "min-tokens", "2 or more", self.min_tokens)


_FILES = {".txt", ".json", ".html", ".csv", ".parquet", ".md", ".pdf", ".png"}


@dataclass(frozen=True)
class ManyTextOptions(TextOptions):
    """The same, for what needs many documents."""

    documents: int = 1000
    """Documents in the seeded sample, 1 or more. Shares of triggers depend on it."""


@dataclass(frozen=True)
class JudgedTextOptions(TextOptions):
    """The same, for what is judged on these documents and trained on all others."""

    documents: int = 200
    """Documents to judge on, a seeded sample, 1 or more; the others are trained on."""
    context: int = 128
    """Tokens of a window, BOS included, 2 or more."""


@dataclass(frozen=True)
class DoctorOptions(ModelOptions):
    """Which model is examined, and where it runs."""

    model: str | None = None
    """Short name, hub id, folder or .gguf file. Without it the installation is examined."""


@dataclass(frozen=True)
class ShownOptions(_Options):
    """How what was found is shown."""

    format: Literal["table", "json"] = "table"
    """What stdout carries: tables, or one JSON object (of a run the contents of result.json)."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class OutputOptions(ShownOptions):
    """Where results go and how they are shown."""

    out: Path | None = None
    """Run folder. Default: runs/<analyzer>-<model>-<timestamp>."""
    overwrite: bool = False
    """Replace an earlier run in --out, an earlier checkpoint in --export."""
    rows: int = 10
    """Rows of each printed table, 0 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _must(self.rows >= 0, "rows", "0 or more", self.rows)
        suffix = Path(self.out or "").suffix.lower()
        expected = "a folder, for the tables and report.html of the run"
        _must(suffix not in _FILES, "out", expected, str(self.out))


@dataclass(frozen=True)
class RunOptions(_Options):
    """Options that every analyzer takes."""

    seed: Annotated[int, _RUN] = 0
    """Of the sample, random orders and donors, 0 or more."""
    batch_size: Annotated[int | Literal["auto"], _RUN] = "auto"
    """Documents per pass, 1 or more; halved where memory runs out. Changes no number."""
    progress: Annotated[bool, Parameter(group="Run", negative="--no-progress")] = True
    """Progress bars on stderr."""
    checkpoint_every: Annotated[int, _RUN] = 60
    """Seconds between saves of progress, in OUT.partial (4 GB at most), 0 or more."""
    resume: Annotated[bool, _RUN] = False
    """Take up the unfinished run of --out, from where it was last saved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _must(self.seed >= 0, "seed", "0 or more", self.seed)
        _must(self.checkpoint_every >= 0, "checkpoint-every", "0 or more", self.checkpoint_every)
        ok = self.batch_size == "auto" or int(self.batch_size) >= 1
        _must(ok, "batch-size", "1 or more, or auto", self.batch_size)


@dataclass(frozen=True)
class HeadsConfig(RunOptions):
    """How sensitive the model is to removing attention heads."""

    prune: bool = False
    """Remove heads cumulatively, least important first: the loss curve."""
    step: float = 0.1
    """Share of heads per step of the curve, above 0, at most 1; above 0.1 is coarse."""
    rescore: bool = False
    """Add an order with importance estimated again after every step."""
    unit: Literal["head", "kv"] = "head"
    """Remove query heads, or whole KV groups."""
    exact: bool = False
    """Remove every head alone and test the loss change. Slow; says how slow."""
    ablation: Literal["zero", "mean", "resample"] = "zero"
    """With --exact, replace z by zero, others' mean, or another document's."""
    roles: bool = False
    """Add where each head looks (induction, previous token, ...), against chance."""
    keep_one: bool = False
    """For each layer, remove all heads but the best one. Costs what --exact does."""
    export: Path | None = None
    """Folder for a smaller checkpoint; with --fraction, --heads or --max-loss."""
    fraction: float | None = None
    """With --export and --prune, cut out this share of heads, by the best order."""
    heads: str | None = None
    """With --export, cut out these heads, as 3.1,5.0 (layer.head)."""
    max_loss: float | None = None
    """With --export and --prune, cut out heads up to this loss change, in nats."""
    compensate: bool = False
    """With --export, keep the removed heads' mean output as a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _must(0 < self.step <= 1, "step", "above 0 and at most 1", self.step)
        self._check_export()

    def _check_export(self) -> None:
        which = {"fraction": self.fraction, "heads": self.heads, "max-loss": self.max_loss}
        given = [f"--{name}" for name, value in which.items() if value is not None]
        if self.export is None:
            extra = [*given, *(["--compensate"] if self.compensate else [])]
            if extra:
                raise UsageError(
                    f"{extra[0]} says what to cut out of a checkpoint: name its folder with "
                    "--export DIR."
                )
            return
        if len(given) != 1:
            told = " and ".join(given) if given else "none"
            raise UsageError(
                "--export needs exactly one of --fraction, --heads and --max-loss, which say what "
                f"to cut out; there is {told}."
            )
        if self.heads is None and not (self.prune or self.rescore):
            raise UsageError(f"{given[0]} takes heads from the pruning curve: add --prune.")
        suffix = Path(self.export).suffix.lower()
        _must(suffix not in _FILES, "export", "a folder, for a checkpoint", str(self.export))
        if self.fraction is not None:
            _must(0 < self.fraction <= 1, "fraction", "above 0 and at most 1", self.fraction)
        if self.max_loss is not None:
            _must(self.max_loss > 0, "max-loss", "above 0, in nats per token", self.max_loss)
        if self.heads is not None:
            head_list(self.heads)


def head_list(text: str) -> list[tuple[int, int]]:
    """(layer, head) of every head in a list such as "3.1,5.0".

    Raises:
        UsageError: something in it is no head.
    """
    parts = [part.strip() for part in text.split(",")]
    found = [re.fullmatch(r"(\d+)\.(\d+)", part) for part in parts]
    if not all(found):
        wrong = parts[found.index(None)]
        raise UsageError(
            f"--heads must be heads as layer.head, such as 3.1,5.0; {wrong!r} is none."
        )
    return [(int(m[1]), int(m[2])) for m in found if m is not None]


@dataclass(frozen=True)
class AsymmetryConfig(RunOptions):
    """How symmetric the query-key form of every head is."""

    activations: bool = False
    """Also correlate S_ij with S_ji on text."""
    controls: Annotated[bool, Parameter(negative="--no-controls")] = True
    """With --activations, also re-paired heads, K := Q, no offset means."""
    symmetrise: bool = False
    """Also make scores symmetric and test the loss change. Slow; says how slow."""

    @property
    def needs_text(self) -> bool:
        """Whether anything is measured on text; the weights alone need none."""
        return self.activations or self.symmetrise


@dataclass(frozen=True)
class FfnKeysConfig(RunOptions):
    """What the keys of the FFN answer to, and what their values say."""

    layer: tuple[int | Literal["all"], ...] = ()
    """A layer; may be given several times; or all. Default: a tenth, half and nine tenths deep."""
    key: tuple[int, ...] = ()
    """Only this key of the layers; may be given several times. Default: all keys."""
    top: int = 25
    """Documents with the largest coefficient to keep per key, 1 or more."""
    sign: Literal["positive", "both"] = "positive"
    """With both, also the documents with the most negative coefficients."""
    prompt: str | None = None
    """Which keys say --target after this, over all layers. Alone, no text is read."""
    target: str | None = None
    """The token that comes next, with its leading space: " Paris"."""
    mutation_keys: int = 100
    """Keys per layer whose triggers lose a token, 0 or more."""
    mixture_positions: int | Literal["auto"] = "auto"
    """Positions to see keys mix at; auto: 1000, for more than 4 layers 256."""
    sample_documents: int | Literal["auto"] = "auto"
    """Documents that both of these run on; auto: 200, for more than 4 layers 64."""

    @property
    def needs_text(self) -> bool:
        """Whether a text is read: not for a prompt alone."""
        return self.prompt is None or bool(self.layer or self.key)

    def __post_init__(self) -> None:
        super().__post_init__()
        _must(self.top >= 1, "top", "1 or more", self.top)
        both = (self.prompt is None) == (self.target is None)
        _must(both, "target", "given with --prompt, and only then", self.target)
        _must(self.mutation_keys >= 0, "mutation-keys", "0 or more", self.mutation_keys)
        for name, least in (("mixture_positions", 0), ("sample_documents", 1)):
            value = getattr(self, name)
            ok = value == "auto" or int(value) >= least
            _must(ok, name.replace("_", "-"), f"{least} or more, or auto", value)
        for name, values in (("layer", self.layer), ("key", self.key)):
            numbers_ = [v for v in values if v != "all"]
            _must(all(v >= 0 for v in numbers_), name, "0 or more", values)
            _must(len(set(values)) == len(values), name, "given once each", values)
        _must(
            "all" not in self.layer or len(self.layer) == 1, "layer", "numbers or all", self.layer
        )


@dataclass(frozen=True)
class FewTextOptions(TextOptions):
    """The same, for what runs the model many times."""

    documents: int = 16
    """Documents whose losses are compared, 1 or more."""


@dataclass(frozen=True)
class QkvConfig(RunOptions):
    """What Q, K, V and O are each worth."""

    fit_documents: int = 128
    """Further documents that means and moments are of, 1 or more."""
    each: Literal["mean", "all", "none"] = "mean"
    """What is also done to one layer at a time; all is slow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _must(self.fit_documents >= 1, "fit-documents", "1 or more", self.fit_documents)


@dataclass(frozen=True)
class SuperpositionConfig(RunOptions):
    """A sparse autoencoder (SAE) on the MLP's output, trained, judged and read."""

    layer: int | None = None
    """Layer whose MLP output is taken apart. Default: the middle one."""
    width: tuple[int, ...] = ()
    """Features per dimension; may be given several times, the first is read. Default: 8."""
    k: int = 32
    """Features active per position (topk, batchtopk), 1 or more."""
    arch: Literal["topk", "batchtopk", "jumprelu", "standard", "gated"] = "topk"
    """Kind of SAE: topk, batchtopk, jumprelu, standard (L1) or gated."""
    sparsity: float | None = None
    """Weight of the penalty (jumprelu, standard, gated). Default: 1; short runs need more."""
    train_tokens: int = 120_000
    """Positions to train on. A short run by default: real ones need 1e8 or more."""
    train_batch: int = 512
    """Positions per training step, 1 or more."""
    lr: float = 1e-3
    """Adam's learning rate, above 0."""
    seeds: int = 1
    """SAEs of the first width, trained from as many seeds, 1 or more."""
    sae: str | None = None
    """A saved SAE instead of training: a folder, or RELEASE/ID of SAELens' registry."""
    null_model: bool = False
    """Also train on the model with each weight matrix's entries permuted."""
    loss_documents: int = 24
    """Documents (of those judged) to splice reconstructions in for the loss, 0 or more."""
    top: int = 10
    """Contexts to keep per feature, each of another document, 1 or more."""
    activations_cache: Path | None = None
    """Folder to keep activations in, for further runs; the size is stated and capped."""
    concepts: Annotated[bool, Parameter(negative="--no-concepts")] = True
    """Score what features tell (words, shapes, topics), and what neurons are made of."""
    checkpoint_every: Annotated[int, _RUN] = 60
    """Seconds between saves, 0 or more, in OUT.partial: SAEs in training, and 4 GB at most."""
    toy: bool = False
    """The toy model of superposition instead, where the truth is known; needs no model."""
    toy_steps: int = 1200
    """With --toy, training steps, 10 or more."""

    @property
    def needs_model(self) -> bool:
        """Whether a model is read, and a text: not for the toy."""
        return not self.toy

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths to train, in the order given."""
        return self.width or (8,)

    def __post_init__(self) -> None:
        super().__post_init__()
        _must(self.layer is None or self.layer >= 0, "layer", "0 or more", self.layer)
        _must(all(w >= 1 for w in self.width), "width", "1 or more", self.width)
        _must(len(set(self.width)) == len(self.width), "width", "given once each", self.width)
        least = {"k": 1, "train_tokens": 1, "train_batch": 1, "seeds": 1, "top": 1}
        least |= {"toy_steps": 10}
        for name, low in (least | {"loss_documents": 0}).items():
            value = getattr(self, name)
            _must(value >= low, name.replace("_", "-"), f"{low} or more", value)
        _must(0 < self.lr < float("inf"), "lr", "above 0", self.lr)
        ok = self.sparsity is None or 0 <= self.sparsity < float("inf")
        _must(ok, "sparsity", "0 or more", self.sparsity)
        own = {f.name for f in fields(RunOptions)} - {"resume"} | {"toy", "toy_steps"}
        for field in fields(self) if self.toy else ():
            value = getattr(self, field.name)
            ok = field.name in own or value == field.default
            _must(ok, field.name.replace("_", "-"), "left out with --toy", value)


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

"""The options of every analyzer and command, written once.

Each frozen dataclass is the command line's options and the library's keywords at the same time:
`interp heads --step 0.2` and `interp.heads(model, text, step=0.2)` read the same field, with the
same range. Torch-free, so that --help stays fast.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Group, Parameter

from interp.checked import Checked, must, must_each
from interp.errors import UsageError

Config = TypeVar("Config")
HEADINGS = ("Measure", "Text", "Model", "Run", "Output")
"""Of --help, in this order."""


def heading(name: str, note: str = "") -> Group:
    """One heading of --help, with a line of its own below it."""
    return Group(name, help=note, sort_key=HEADINGS.index(name))


_RUN = Parameter(group=heading("Run"))
NO_MATTER = ("progress", "resume", "checkpoint_every")
"""Options that change no number."""


@dataclass(frozen=True)
class ModelOptions(Checked):
    """Which model, and where it runs."""

    model: str | None = None
    """gpt2, pythia-160m, ..., a hub id, folder or .gguf file. Default: gpt2, else smollm2-135m."""
    revision: str | None = None
    """Branch, tag or commit of a hub model (Pythia: step1000)."""
    device: str = "auto"
    """auto (cuda, then mps, then cpu), cpu, cuda, cuda:1 or mps."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of weights and activations; statistics are always float64."""
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
    """Name, hub id, folder or .gguf file; may be repeated. Default: gpt2, else smollm2-135m."""
    revision: tuple[str, ...] = ()  # type: ignore[assignment]
    """Branch, tag or commit of a hub model (Pythia: step1000); may be repeated."""

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
class TextOptions(Checked):
    """Which text, and how it becomes tokens."""

    data: str = "news"
    """news (embedded); a .txt, .jsonl, .csv or .parquet file; a folder of these; or a hub id."""
    text_column: str | None = None
    """Column that holds the text. Default: text, else the only one that can be."""
    split: str = "train"
    """Split of a hub data set."""
    documents: int = 32
    """Documents in the seeded random sample, 1 or more."""
    context: int = 64
    """Tokens read of each document, BOS included, 2 or more."""
    bos: Annotated[bool | None, Parameter(negative="--no-bos")] = None
    """Start documents with BOS, or not. Default: as the tokenizer does."""
    min_tokens: int = 2
    """Skip documents of fewer tokens (BOS not counted), 2 or more."""
    windows: bool = False
    """Read all of a document, in windows of --context tokens, not only the first one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self.documents >= 1, "documents", "1 or more", self.documents)
        must(self.context >= 2, "context", "2 or more", self.context)
        must(self.min_tokens >= 2, "min-tokens", "2 or more", self.min_tokens)


_FILES = {".txt", ".json", ".html", ".csv", ".parquet", ".md", ".pdf", ".png"}


@dataclass(frozen=True)
class ManyTextOptions(TextOptions):
    """The same, for what needs many documents."""

    documents: int = 1000
    """Documents in the seeded random sample, 1 or more. Shares of triggers depend on it."""


@dataclass(frozen=True)
class JudgedTextOptions(TextOptions):
    """The same, for what is judged on these documents and trained on all others."""

    documents: int = 200
    """Documents to judge on, a seeded random sample, 1 or more; all others are trained on."""
    context: int = 128
    """Tokens of a window, BOS included, 2 or more."""


@dataclass(frozen=True)
class DoctorOptions(ModelOptions):
    """Which model is examined, and where it runs."""

    model: str | None = None
    """gpt2, pythia-160m, ..., a hub id, folder or .gguf file. Default: the installation alone."""


@dataclass(frozen=True)
class ShownOptions(Checked):
    """How what was found is shown."""

    format: Literal["table", "json"] = "table"
    """What is printed: tables, or one JSON object (of a run the contents of result.json)."""
    debug: bool = False
    """Show the Python traceback of an error."""


@dataclass(frozen=True)
class OutputOptions(ShownOptions):
    """Where results go and how they are shown."""

    out: Path | None = None
    """Folder for the run. Default: runs/<command>-<model>-<time>."""
    overwrite: bool = False
    """Replace an earlier run in --out."""
    rows: int = 10
    """Rows of each printed table, 0 (no tables) or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self.rows >= 0, "rows", "0 or more", self.rows)
        suffix = Path(self.out or "").suffix.lower()
        expected = "a folder, for the tables and report.html of the run"
        must(suffix not in _FILES, "out", expected, str(self.out))


@dataclass(frozen=True)
class RunOptions(Checked):
    """Options that every analyzer takes."""

    seed: Annotated[int, _RUN] = 0
    """Seed of all that is random, as the sample of documents, 0 or more."""
    batch_size: Annotated[int | Literal["auto"], _RUN] = "auto"
    """Documents per pass, 1 or more; halved where memory runs out. Changes rounding only."""
    progress: Annotated[bool, Parameter(group=heading("Run"), negative="--no-progress")] = True
    """Progress bars on stderr."""
    checkpoint_every: Annotated[int, _RUN] = 60
    """Seconds between saves of progress, in OUT.partial (4 GB at most), 0 or more."""
    resume: Annotated[bool, _RUN] = False
    """Take up the unfinished run of --out, from where it was last saved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self.seed >= 0, "seed", "0 or more", self.seed)
        must(self.checkpoint_every >= 0, "checkpoint-every", "0 or more", self.checkpoint_every)
        ok = self.batch_size == "auto" or int(self.batch_size) >= 1
        must(ok, "batch-size", "1 or more, or auto", self.batch_size)


@dataclass(frozen=True)
class HeadsConfig(RunOptions):
    """How sensitive the model is to removing attention heads."""

    prune: bool = False
    """Remove more and more heads together, least important first: the pruning curve."""
    step: float = 0.1
    """With --prune, share of all heads per step, above 0, at most 1; above 0.1 is coarse."""
    rescore: bool = False
    """Add an order whose importance is estimated again after each step; implies --prune."""
    unit: Literal["head", "kv"] = "head"
    """What the curve and --export remove: query heads one by one, or whole KV groups."""
    exact: bool = False
    """Remove each head alone and test the loss change. Slow: it says how long it takes."""
    ablation: Literal["zero", "mean", "resample"] = "zero"
    """With --exact, a head becomes zero, its mean over other documents, or another document's."""
    roles: bool = False
    """Add where each head looks (previous token, induction, ...), against an untrained model."""
    keep_one: bool = False
    """For each layer, remove all heads but the best one. As slow as --exact."""
    export: Path | None = None
    """Write a checkpoint without some heads (the next three say which); --overwrite replaces."""
    fraction: float | None = None
    """With --export and --prune, cut out this share of heads, by the best order; at most 1."""
    heads: str | None = None
    """With --export, cut out these heads, as 3.1,5.0 (layer.head)."""
    max_loss: float | None = None
    """With --export and --prune, cut out as many heads as raise the loss by this at most (nats)."""
    compensate: bool = False
    """With --export, put the mean output of the heads cut out into a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(0 < self.step <= 1, "step", "above 0 and at most 1", self.step)
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
        must(suffix not in _FILES, "export", "a folder, for a checkpoint", str(self.export))
        if self.fraction is not None:
            must(0 < self.fraction <= 1, "fraction", "above 0 and at most 1", self.fraction)
        if self.max_loss is not None:
            must(self.max_loss > 0, "max-loss", "above 0, in nats per token", self.max_loss)
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
    """Also correlate attention scores on text: token i asking j with j asking i."""
    controls: Annotated[bool, Parameter(negative="--no-controls")] = True
    """With --activations, also controls: re-paired heads, keys set to queries, no offset means."""
    symmetrise: bool = False
    """Also make scores symmetric on text and test the loss change. Slow: it says how long."""

    @property
    def needs_text(self) -> bool:
        """Whether anything is measured on text; the weights alone need none."""
        return self.activations or self.symmetrise


@dataclass(frozen=True)
class FfnKeysConfig(RunOptions):
    """What the keys of the FFN answer to, and what their values say."""

    layer: tuple[int | Literal["all"], ...] = ()
    """A layer, counted from 0, or all; may be repeated. Default: 10%, 50% and 90% of the depth."""
    key: tuple[int, ...] = ()
    """Only this key of each layer, counted from 0; may be repeated. Default: all keys."""
    top: int = 25
    """Triggers per key: documents with its largest coefficients, 1 or more."""
    sign: Literal["positive", "both"] = "positive"
    """Triggers with the largest coefficients only, or both these and the most negative ones."""
    prompt: str | None = None
    """Which keys of all layers raise or lower --target after this text? Alone, no data is read."""
    target: str | None = None
    """With --prompt, the next token to ask for, with its leading space: " Paris"."""
    mutation_keys: int = 100
    """Sampled keys per layer whose triggers are run again with one token dropped, 0 or more."""
    mixture_positions: int | Literal["auto"] = "auto"
    """Positions where keys that make one output are counted. auto: 1000; beyond 4 layers 256."""
    sample_documents: int | Literal["auto"] = "auto"
    """Documents for --mutation-keys and --mixture-positions. auto: 200; beyond 4 layers 64."""

    @property
    def needs_text(self) -> bool:
        """Whether a text is read: not for a prompt alone."""
        return self.prompt is None or bool(self.layer or self.key)

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self.top >= 1, "top", "1 or more", self.top)
        both = (self.prompt is None) == (self.target is None)
        must(both, "target", "given with --prompt, and only then", self.target)
        must(self.mutation_keys >= 0, "mutation-keys", "0 or more", self.mutation_keys)
        for name, least in (("mixture_positions", 0), ("sample_documents", 1)):
            value = getattr(self, name)
            ok = value == "auto" or int(value) >= least
            must(ok, name.replace("_", "-"), f"{least} or more, or auto", value)
        must_each(lambda v: v == "all" or v >= 0, "layer", "0 or more, or all", self.layer)
        must_each(lambda v: v >= 0, "key", "0 or more", self.key)
        if "all" in self.layer and len(self.layer) > 1:
            raise UsageError("--layer all is every layer: leave out the others.")


@dataclass(frozen=True)
class FewTextOptions(TextOptions):
    """The same, for what runs the model many times."""

    documents: int = 16
    """Documents whose losses are compared, a seeded random sample, 1 or more."""


@dataclass(frozen=True)
class QkvConfig(RunOptions):
    """What Q, K, V and O are each worth."""

    fit_documents: int = 128
    """Further documents, beside --documents, to take means and fits from, 1 or more."""
    each: Literal["mean", "all", "none"] = "mean"
    """Which changes are also made one layer at a time: the mean in place, all (slow), none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self.fit_documents >= 1, "fit-documents", "1 or more", self.fit_documents)


@dataclass(frozen=True)
class SuperpositionConfig(RunOptions):
    """A sparse autoencoder (SAE) on the MLP's output, trained, judged and read."""

    layer: int | None = None
    """Layer whose MLP output is taken apart, counted from 0. Default: the middle one."""
    width: tuple[int, ...] = ()
    """SAE features per dimension of the model; may be repeated, the first is read. Default: 8."""
    k: int = 32
    """Features active at one position (topk, batchtopk), 1 or more."""
    arch: Literal["topk", "batchtopk", "jumprelu", "standard", "gated"] = "topk"
    """Kind of SAE: topk, batchtopk, jumprelu, standard (L1) or gated."""
    sparsity: float | None = None
    """Weight of the sparsity penalty (jumprelu, standard, gated). Default: 1; short runs: more."""
    train_tokens: int = 120_000
    """Positions to train on, 1 or more. The default is a demonstration: real SAEs need 1e8."""
    train_batch: int = 512
    """Positions per training step, 1 or more."""
    lr: float = 1e-3
    """Adam's learning rate, above 0."""
    seeds: int = 1
    """Train the SAE (the first width) from so many seeds and compare their features, 1 or more."""
    sae: str | None = None
    """Judge a saved SAE, train none: a folder, or RELEASE/ID of SAELens' registry."""
    null_model: bool = False
    """Also train an SAE on the model with the entries of each weight matrix permuted."""
    loss_documents: int = 24
    """Judged documents to measure the loss on with the SAE's output in place, 0 or more."""
    top: int = 10
    """Contexts to keep per feature, each of another document, 1 or more."""
    activations_cache: Path | None = None
    """Folder to keep activations in, for further runs; it says how large, and has a limit."""
    concepts: Annotated[bool, Parameter(negative="--no-concepts")] = True
    """Score how well features tell words, shapes, topics, and explain neurons by features. Slow."""
    checkpoint_every: Annotated[int, _RUN] = 60
    """Seconds between saves, 0 or more, in OUT.partial: SAEs in training, and 4 GB at most."""
    toy: bool = False
    """The toy model of superposition instead, where the truth is known; reads no model, no text."""
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
        must(self.layer is None or self.layer >= 0, "layer", "0 or more", self.layer)
        must_each(lambda w: w >= 1, "width", "1 or more", self.width)
        least = {"k": 1, "train_tokens": 1, "train_batch": 1, "seeds": 1, "top": 1}
        least |= {"toy_steps": 10}
        for name, low in (least | {"loss_documents": 0}).items():
            value = getattr(self, name)
            must(value >= low, name.replace("_", "-"), f"{low} or more", value)
        must(0 < self.lr < float("inf"), "lr", "above 0", self.lr)
        ok = self.sparsity is None or 0 <= self.sparsity < float("inf")
        must(ok, "sparsity", "0 or more", self.sparsity)
        own = {f.name for f in fields(RunOptions)} - {"resume"} | {"toy", "toy_steps"}
        for field in fields(self) if self.toy else ():
            value = getattr(self, field.name)
            ok = field.name in own or value == field.default
            must(ok, field.name.replace("_", "-"), "left out with --toy", value)


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

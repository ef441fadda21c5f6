"""What the benchmarks share: a row of the table, clocks, models and documents."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from interp.model import Model
    from interp.text import Text

SMOLLM2, GPT2, PYTHIA = "smollm2-135m", "gpt2-small shape", "pythia-160m shape"
"""Names of the models, in the rows of all benchmarks."""
AGREEMENT = 1e-5
"""Nats per token. Where two ways differ by more, their ratio does not count."""


@dataclass
class Options:
    """What every benchmark is given."""

    device: str = "cpu"
    reps: int | None = None
    """Repetitions; None is each benchmark's own choice."""
    cases: Sequence[str] = ()
    """Only cases whose name contains one of these; empty is all."""
    batch_tokens: int = 512
    """Tokens of a batch: short runs. The tool's own default is 2048."""

    def wants(self, case: str) -> bool:
        """Whether a case is asked for."""
        return not self.cases or any(part in case for part in self.cases)


@dataclass
class Row:
    """One ratio: its value in every repetition, what it should be, and whether it counts."""

    case: str
    what: str
    values: Sequence[float]
    """The ratio, once per repetition."""
    cpu: Sequence[float] = ()
    """The same on CPU seconds of all threads: what a busy machine disturbs least."""
    at_least: float | None = None
    at_most: float | None = None
    gap: float | None = None
    """Largest difference of the two ways' results; None where there is nothing to compare."""
    notes: list[str] = field(default_factory=list)
    best: bool = False
    """Take the smallest value instead of the median."""

    @property
    def value(self) -> float:
        """The median over repetitions, or the best."""
        return min(self.values) if self.best else statistics.median(self.values)

    @property
    def counts(self) -> bool:
        """Whether both ways gave the same numbers (a NaN does not)."""
        return self.gap is None or self.gap <= AGREEMENT

    @property
    def target(self) -> str:
        """In words."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return f"<= {self.at_most:g}" if self.at_most is not None else ""

    @property
    def verdict(self) -> str:
        """met, missed, or nothing where there is no target."""
        if not self.counts:
            return "does not count"
        if self.at_least is None and self.at_most is None:
            return ""
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return "met" if low <= self.value <= high else "missed"

    def cells(self) -> list[str]:
        """As a row of the table."""
        digits = 3 if self.at_most is not None else 2
        spread = f"{min(self.values):.{digits}f} to {max(self.values):.{digits}f}"
        gap = "" if self.gap is None else f"{self.gap:.0e}"
        n = str(len(self.values))
        value = f"{self.value:.{digits}f}"
        cpu = f"{statistics.median(self.cpu):.{digits}f}" if self.cpu else ""
        return [self.case, self.what, value, spread, cpu, n, self.target, self.verdict, gap]


HEADER = ["case", "ratio", "value", "min to max", "by CPU s", "n", "target", "", "difference"]


def table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table that reads well as plain text too, notes below it."""
    cells = [HEADER, *[row.cells() for row in rows]]
    width = [max(len(row[i]) for row in cells) for i in range(len(HEADER))]
    lines = [" | ".join(c.ljust(w) for c, w in zip(row, width, strict=True)) for row in cells]
    lines.insert(1, " | ".join("-" * w for w in width))
    notes = list(dict.fromkeys(f"* {note}" for row in rows for note in row.notes))
    return "\n".join([*(f"| {line} |" for line in lines), *([""] if notes else []), *notes])


@dataclass
class Time:
    """Seconds of one call: on the wall, and of all this process's threads on the CPU."""

    wall: float
    cpu: float

    def __add__(self, other: Time) -> Time:
        return Time(self.wall + other.wall, self.cpu + other.cpu)

    def __mul__(self, factor: float) -> Time:
        return Time(self.wall * factor, self.cpu * factor)


ZERO = Time(0.0, 0.0)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, Time]:
    """What the call gives, and how long it took (a GPU's queue is emptied before and after)."""
    _wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    out = call()
    _wait(device)
    return out, Time(time.perf_counter() - wall, time.process_time() - cpu)


def measured(model: Model, call: Callable[[], Any]) -> tuple[Any, Time]:
    """As `timed`, within `model.measuring`, which is entered and left outside the clock.

    What that changes is interp's own: others' ways run on the model as it was loaded.
    """
    with model.measuring(fused=True):
        return timed(call, model.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def smollm2(device: str) -> Model:
    """The embedded real model."""
    import interp

    return interp.load_model(SMOLLM2, device=device)


@contextmanager
def random_model(shape: str, device: str) -> Iterator[Model]:
    """A randomly weighted model of one of `SHAPES`."""
    import interp

    with TemporaryDirectory() as temporary:
        yield interp.load_model(SHAPES[shape](Path(temporary) / "random"), device=device)


def save_gpt2(folder: Path, **overrides: Any) -> Path:
    """A GPT-2 with random weights, the small one's shape unless overridden."""
    from transformers import GPT2Config, GPT2LMHeadModel

    last = overrides.get("vocab_size", GPT2Config().vocab_size) - 1
    return _save(folder, GPT2LMHeadModel, GPT2Config(**overrides), last)


def save_pythia(folder: Path) -> Path:
    """A GPT-NeoX with random weights, Pythia-160M's shape: ids from 50277 on are padding."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=2048,
        vocab_size=50304,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        use_parallel_residual=True,
    )
    return _save(folder, GPTNeoXForCausalLM, config, 50276)


SHAPES = {GPT2: save_gpt2, PYTHIA: save_pythia}


def _save(folder: Path, kind: Any, config: Any, last: int) -> Path:
    """A checkpoint, with a tokenizer whose tokens are the words w0, w1, ... and <|endoftext|>."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    config.bos_token_id = config.eos_token_id = last
    logging.disable_progress_bar()
    end = "<|endoftext|>"
    words = {f"w{i}": i for i in range(last)} | {end: last}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=end))
    # pyright takes this setter for a read-only property
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, unk_token=end)
    fast.save_pretrained(folder)
    return folder


def random_documents(n: int, words: int, vocab: int) -> list[str]:
    """Documents of `words` random words of `save_gpt2`'s tokenizer, all different."""
    import random

    rng = random.Random(0)
    return [" ".join(f"w{rng.randrange(1, vocab - 1)}" for _ in range(words)) for _ in range(n)]


def full_text(model: Model, documents: int, context: int) -> Text:
    """Documents of exactly `context` tokens, so that nobody is slowed by padding.

    The embedded news for a model that was trained on English, random words for a random one.
    """
    import interp

    if model.cfg.family != "llama":
        made = random_documents(documents, context, model.cfg.vocab_size)
    else:
        news = interp.load_text("news", model, documents=40 * documents, context=context)
        words = " ".join(d.text for d in news.documents).split()
        made = [" ".join(words[i * context : (i + 1) * context]) for i in range(documents)]
    least = context - 1  # BOS is not counted
    text = interp.load_text(made, model, documents=documents, context=context, min_tokens=least)
    assert text.tokens == documents * context, "a document is shorter than the context"
    return text


STATUS = Path("/proc/self/status")


def peak_of(module: str, *arguments: str) -> float:
    """Peak resident MB of a fresh process; `module` prints `used()` of itself when it is run."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join([module, *arguments])} failed: {done.stderr[-800:]}")
    return json.loads(done.stdout.splitlines()[-1])["peak"] / 2**20


def status(key: str) -> float:
    """MB that Linux tells of this process under a key, such as VmRSS or VmHWM."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def forget_peak() -> float | None:
    """MB that this process holds, its peak being counted from now on; None where Linux is not."""
    clear = Path("/proc/self/clear_refs")
    if not STATUS.exists():
        return None
    try:
        clear.write_text("5")
    except OSError:
        return None
    return status("VmRSS")


def used() -> str:
    """This process's peak in bytes, for `peak_of`."""
    import resource

    if STATUS.exists():  # getrusage's peak is at least that of the process that started this one
        return json.dumps({"peak": status("VmHWM") * 2**20})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return json.dumps({"peak": peak if sys.platform == "darwin" else peak * 1024})

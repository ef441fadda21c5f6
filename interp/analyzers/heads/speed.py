"""What a checkpoint without some heads saves: parameters, cache, and time, measured in pairs.

Both models are plain transformers models on the same device. Each round times one after the other,
in alternating order, so that what else the machine does falls on both; the ratio of a round is what
the spread is of. Prefill: one pass over the prompt that fills the cache. Decode: one token after
another, from that cache.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from interp import stats
from interp.progress import track
from interp.results import Column

PROMPT, NEW = 128, 16
"""Tokens of the prompt, and tokens decoded after it; half of that where the context is short."""
BATCHES = (1, 16)
PHASES = ("prefill", "decode")
SETTINGS = len(BATCHES) * len(PHASES)
SECONDS = 60.0
"""Spent on all settings together, an equal part on each: more only for the last of FEWEST rounds.
A setting of which one pair takes longer than its part is left out.
"""
FEWEST, MOST = 3, 25
"""Rounds of a setting."""

SPEED_COLUMNS = {
    "phase": Column(
        "word", "prefill: one pass over the prompt; decode: one token after another, cached."
    ),
    "batch": Column("sequences", "Sequences processed together."),
    "prompt": Column("tokens", "Length of the prompt of each sequence."),
    "new_tokens": Column("tokens", "Tokens decoded per sequence; 0 in prefill."),
    "original": Column("tokens per second", "Median over rounds, of all heads."),
    "pruned": Column("tokens per second", "Median over rounds, of the written checkpoint."),
    "speedup": Column(
        "ratio", "Median over rounds of the original's time over the pruned one's, timed in pairs."
    ),
    "speedup_q1": Column("ratio", "First quartile of the ratio over rounds."),
    "speedup_q3": Column("ratio", "Third quartile of the ratio over rounds."),
    "ci_low": Column(
        "ratio", "Lower end of the 95% t interval over rounds of the geometric mean ratio."
    ),
    "ci_high": Column("ratio", "Upper end of that interval."),
    "rounds": Column("rounds", "Pairs of timings, in alternating order."),
    "verdict": Column(
        "word", "faster or slower: that interval lies wholly above or below 1; else no difference."
    ),
}


@dataclass
class Timing:
    """Seconds of both models at one setting, [round] each."""

    phase: str
    batch: int
    prompt: int
    new: int
    original: np.ndarray
    pruned: np.ndarray

    def row(self) -> dict[str, Any]:
        """One row of the table."""
        ratio = self.original / self.pruned
        q1, middle, q3 = np.quantile(ratio, (0.25, 0.5, 0.75))
        mean = stats.paired_t(np.log(ratio))
        low, high = (float(np.exp(end)) for end in (mean.low, mean.high))
        tokens = self.batch * (self.new or self.prompt)
        word = "faster" if low > 1 else "slower" if high < 1 else "no difference"
        return {
            "phase": self.phase,
            "batch": self.batch,
            "prompt": self.prompt,
            "new_tokens": self.new,
            "original": tokens / float(np.median(self.original)),
            "pruned": tokens / float(np.median(self.pruned)),
            "speedup": middle,
            "speedup_q1": q1,
            "speedup_q3": q3,
            "ci_low": low,
            "ci_high": high,
            "rounds": len(self.original),
            "verdict": word,
        }


def parameters(model: Any) -> int:
    """Numbers that a model holds, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def weights_per_token(model: Any, phase: str = "decode", prompt: int = PROMPT) -> float:
    """Weights that one token is multiplied with: all matrices but the embeddings.

    The unembedding is met by every token that is decoded, in prefill by the last of the prompt
    alone: there it counts that share of itself per token.

    Args:
        model: a plain transformers model.
        phase: of PHASES.
        prompt: tokens of the prompt, for prefill.
    """
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    unembedding = model.get_output_embeddings().weight
    apart = {*looked_up, id(unembedding)}
    every = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in apart)
    return every + (unembedding.numel() if phase == "decode" else unembedding.numel() / prompt)


def by_weights(original: Any, pruned: Any, context: int) -> dict[str, float]:
    """Phase -> how many times faster it could be, if a pass took as long as it has weights to read.

    Below that stays what the attention costs beside its matrices and what has one price whatever
    its size.

    Args:
        original: the unpruned model, as plain transformers.
        pruned: the other one.
        context: as for `measure`.
    """
    prompt = prompt_length(context)
    return {
        phase: weights_per_token(original, phase, prompt) / weights_per_token(pruned, phase, prompt)
        for phase in PHASES
    }


def prompt_length(context: int) -> int:
    """Tokens of a prompt, where the models take that context."""
    return min(PROMPT, max(1, context // 2))


def cache_bytes_per_token(model: Any, vocabulary: int) -> int:
    """Bytes that one more token takes in the KV cache: read off a live cache."""
    sizes = []
    for length in (8, 9):  # their difference: whatever is not of a token cancels
        ids = torch.arange(length, device=model.device)[None] % vocabulary
        with torch.inference_mode():
            cache = _cache_of(model(ids, use_cache=True))
        sizes.append(
            sum(
                tensor.numel() * tensor.element_size()
                for layer in cache.layers
                for tensor in (layer.keys, layer.values)
            )
        )
    return sizes[1] - sizes[0]


def measure(
    original: Any,
    pruned: Any,
    vocabulary: int,
    context: int,
    *,
    progress: bool,
    into: list[Timing],
) -> None:
    """Timings of both phases at all batch sizes, as many rounds as the time allows.

    Args:
        original: the unpruned model, as plain transformers.
        pruned: the other one, on the same device and in the same dtype.
        vocabulary: ids below this occur in prompts.
        context: longest context that the models take.
        progress: show a bar.
        into: filled setting by setting, so that an interrupted caller keeps what was timed.
    """
    prompt = prompt_length(context)
    new = min(NEW, max(1, context // 4))
    settings = [(batch, phase) for batch in BATCHES for phase in PHASES]
    bar = track(SETTINGS, "speed", progress)
    for batch, phase in settings:
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(vocabulary, (batch, prompt), generator=generator).to(original.device)
        times: tuple[list[float], list[float]] = ([], [])
        for seconds in _rounds((original, pruned), ids, phase, new, SECONDS / SETTINGS):
            for one, value in zip(times, seconds, strict=True):
                one.append(value)
        if times[0]:
            decoded = new if phase == "decode" else 0
            pair = (np.array(seconds) for seconds in times)
            into.append(Timing(phase, batch, prompt, decoded, *pair))
        bar.update(1)
    bar.close()


def table(timings: list[Timing]) -> pd.DataFrame:
    """One row per setting."""
    return pd.DataFrame([t.row() for t in timings], columns=list(SPEED_COLUMNS))


def _rounds(
    models: tuple[Any, Any], ids: torch.Tensor, phase: str, new: int, budget: float
) -> Iterator[tuple[float, float]]:
    """Seconds of both models, one pair per round; a first pair warms up and is not counted."""
    run = _prefill if phase == "prefill" else _decode
    began = time.perf_counter()
    for i in range(-1, MOST):
        enough = i == 0 or i >= FEWEST  # to stop at: nothing yet, or a spread
        if enough and time.perf_counter() - began > budget:
            return
        order = (0, 1) if i % 2 else (1, 0)
        seconds = [0.0, 0.0]
        for which in order:
            seconds[which] = run(models[which], ids, new)
        if i >= 0:
            yield seconds[0], seconds[1]


def _prefill(model: Any, ids: torch.Tensor, _new: int) -> float:
    with torch.inference_mode():
        return _timed(lambda: model(ids, use_cache=True, logits_to_keep=1), ids.device)


def _decode(model: Any, ids: torch.Tensor, new: int) -> float:
    name = _cache_argument(type(model))
    with torch.inference_mode():
        first = model(ids, use_cache=True, logits_to_keep=1)

        def steps() -> None:
            out = first
            for _ in range(new):
                token = out.logits[:, -1:].argmax(-1)
                out = model(token, use_cache=True, **{name: _cache_of(out)})

        return _timed(steps, ids.device)


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()


def _cache_argument(kind: type[Any]) -> str:
    """How this transformers names a forward pass's cache (`past_key_values` in older ones)."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def _cache_of(output: Any) -> Any:
    cache = getattr(output, "cache", None)
    return cache if cache is not None else output.past_key_values

"""What each value vector says in vocabulary space, and whether its key's trigger goes on like that.

W_U v is what a value adds to the logits per unit of coefficient: raw, and with the final norm
folded in (its gain; for LayerNorm the centring too), which leaves only the norm's division out.
Agreement asks whether the top token of W_U v is the next token of the key's first trigger.

What the numbers do not show. Later layers read the value as well: what it promotes directly need
not be what it does. value_max_prob depends on the value's length, which means nothing alone;
value_kurtosis does not. An agreement of one trigger is one event: the rate of a layer counts, and
only against its nulls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy import stats as scipy_stats
from torch import Tensor

from interp import scores
from interp.analyzers.ffn_keys.coefficients import Memory
from interp.errors import InterpError
from interp.model import Model

TOKENS = 10
"""Top and bottom tokens kept per value."""
CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**29, "mps": 2**26}
"""Logits of one chunk of values: few enough to be read again from cache, enough for matmuls."""
DRAWS = 10_000
BASES = ("raw", "folded")


@dataclass
class Spoken:
    """One layer's values in one basis; ranks and ids [key, token], the rest [key].

    top, bottom: token ids with the largest and the smallest logit, the most extreme first.
    max_prob: largest probability of softmax(W_U v).
    kurtosis: excess kurtosis of W_U v over the vocabulary (0 for a Gaussian); nan if constant.
    rank: of the token asked about, 1 is the top one; NaN where none was asked about.
    rank_down: the same from the bottom, for the token asked about there.
    """

    top: np.ndarray
    bottom: np.ndarray
    max_prob: np.ndarray
    kurtosis: np.ndarray
    rank: np.ndarray
    rank_down: np.ndarray


class Vocabulary:
    """The unembedding, and what stands before it; rows of padding are never looked at."""

    def __init__(self, model: Model) -> None:
        weight = getattr(model.bridge.unembed.original_component, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise InterpError(f"The unembedding of {model.name} cannot be read as a matrix.")
        self.size = model.cfg.vocab_size
        self.weight = weight.detach()[: self.size]
        self.chunk = max(
            1, CHUNK_BYTES.get(model.device.type, 2**25) // (self.size * weight.element_size())
        )
        self.fold = scores.final_norm_gain(model)

    @property
    def bases(self) -> tuple[str, ...]:
        """Those that this model has: without a known final norm there is nothing to fold."""
        return BASES if self.fold is not None else BASES[:1]

    def directions(
        self, values: Float[Tensor, "key d_model"], basis: str
    ) -> Float[Tensor, "key d_model"]:
        """What the unembedding multiplies, in its dtype."""
        if basis == "raw":
            return values.to(self.weight)
        assert self.fold is not None
        gain, centres = self.fold
        exact = scores.wide(values)
        if centres:
            exact = exact - exact.mean(-1, keepdim=True)
        return (exact * gain.to(exact.device)).to(self.weight)

    def logits(
        self, directions: Float[Tensor, "key d_model"]
    ) -> Iterator[tuple[slice, Float[Tensor, "some vocab"]]]:
        """(which keys, W_U v of them), float32 at least, a chunk at a time."""
        for start in range(0, len(directions), self.chunk):
            at = slice(start, start + self.chunk)
            product = directions[at] @ self.weight.T
            yield at, product.float() if product.dtype.itemsize < 4 else product

    def read(
        self,
        memory: Memory,
        keys: list[int],
        basis: str,
        up: np.ndarray | None = None,
        down: np.ndarray | None = None,
    ) -> Spoken:
        """Everything of some keys' values.

        Args:
            memory: a layer's.
            keys: of that layer.
            basis: raw or folded.
            up: [key] token ids whose rank from the top is asked for; -1 for none.
            down: the same from the bottom.
        """
        chosen = memory.values if len(keys) == len(memory.values) else memory.values[keys]
        n = min(TOKENS, self.size)
        none = np.full(len(keys), -1)
        parts: list[tuple[Tensor, ...]] = []
        for at, logits in self.logits(self.directions(chosen, basis)):
            top, bottom = logits.topk(n, dim=1), logits.topk(n, dim=1, largest=False)
            ranks = [
                _rank(logits, torch.as_tensor(none if ids is None else ids)[at], sign)
                for ids, sign in ((up, 1), (down, -1))
            ]
            most = logits.softmax(1).amax(1)
            parts.append((top.indices, bottom.indices, most, _kurtosis(logits), *ranks))
        joined = [torch.cat(part).cpu().double().numpy() for part in zip(*parts, strict=True)]
        return Spoken(joined[0].astype(int), joined[1].astype(int), *joined[2:])


def _rank(logits: Tensor, ids: Tensor, sign: int) -> Tensor:
    """[key] 1 + how many tokens lie beyond this one; nan where the id is -1."""
    out = torch.full((len(logits),), float("nan"), dtype=torch.float32, device=logits.device)
    ids = ids.to(logits.device)
    asked = ids >= 0
    if bool(asked.any()):
        rows = logits[asked] if not bool(asked.all()) else logits
        own = rows.gather(1, ids[asked][:, None])
        beyond = (rows > own) if sign > 0 else (rows < own)
        out[asked] = 1 + beyond.view(torch.uint8).sum(1, dtype=torch.int32).to(out)
    return out


def _kurtosis(logits: Tensor) -> Tensor:
    """[key] excess kurtosis over the vocabulary."""
    centred = logits - logits.mean(1, keepdim=True)
    square = centred.square_()
    second = square.mean(1).double() if square.device.type != "mps" else square.mean(1)
    fourth = square.square_().mean(1).to(second)
    return torch.where(second > 0, fourth / second.square() - 3, torch.nan)


# Agreement ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How many of a layer's keys agree, and by chance.

    keys: with a next token of their first trigger to agree with.
    count, rate, low, high: those that agree; rate with its 95% Clopper-Pearson interval over keys.
    null, null_99, p: mean and 99th percentile of the rate with the triggers' next tokens shuffled
        over the keys, and how often that is at least the rate.
    unigram, unigram_99: the same with next tokens drawn from the text's own frequencies.
    """

    keys: int = 0
    count: int = 0
    rate: float = np.nan
    low: float = np.nan
    high: float = np.nan
    null: float = np.nan
    null_99: float = np.nan
    p: float = np.nan
    unigram: float = np.nan
    unigram_99: float = np.nan


def agreement(
    top: np.ndarray, following: np.ndarray, frequency: np.ndarray, rng: np.random.Generator
) -> Agreement:
    """Agreement of top tokens with next tokens, against both nulls.

    Args:
        top: [key] each value's top token.
        following: [key] the next token of each first trigger, -1 for none.
        frequency: [vocab] how often each token is a next token in the text, summing to 1.
        rng: of the draws.
    """
    known = following >= 0
    top, following = top[known], following[known]
    n = len(top)
    if n == 0:
        return Agreement()
    count = int((top == following).sum())
    # Only tokens that are on both sides can ever agree.
    shared = np.intersect1d(top, following)
    at = np.flatnonzero(np.isin(top, shared))
    drawn = np.empty(DRAWS, dtype=np.int64)
    for i in range(DRAWS):
        drawn[i] = (rng.permutation(following)[at] == top[at]).sum()
    chance = frequency[top]
    unigram = np.sort((rng.random((DRAWS, int((chance > 0).sum()))) < chance[chance > 0]).sum(1))
    low, high = _clopper_pearson(count, n)
    return Agreement(
        keys=n,
        count=count,
        rate=count / n,
        low=low,
        high=high,
        null=float(drawn.mean() / n),
        null_99=float(np.quantile(drawn, 0.99, method="higher") / n),
        p=float((1 + (drawn >= count).sum()) / (DRAWS + 1)),
        unigram=float(chance.mean()),
        unigram_99=float(np.quantile(unigram, 0.99, method="higher") / n),
    )


def _clopper_pearson(count: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low = scipy_stats.beta.ppf(tail, count, n - count + 1) if count else 0.0
    high = scipy_stats.beta.ppf(1 - tail, count + 1, n - count) if count < n else 1.0
    return float(low), float(high)

"""How many keys make up a layer's output, and what the output does to the prediction.

At sampled positions. Active share: keys in descending order of |coefficient| |value|; the smallest
number k such that the first k leave at most 10% (1%) of the squared norm of the sum over keys
unexplained, |sum - sum of the first k|^2 <= 0.1 |sum|^2. The bias is no key and left out of both.
The unexplained part need not fall steadily; k is where it first is small enough.

Zero agreement: the top token of the layer's output (bias included) is the top token of none of the
keys that make up 90%; for a negative coefficient the value's bottom token counts. Its null takes
the output of another sampled position: agreement there is by chance.

Prediction (Geva et al. 2021, section 5): r is the stream after the block without the FFN's output,
r + y with it (in a parallel block r includes the block's attention); top(x) is the token that the
final norm and the unembedding, biases included, put first. Unchanged: top(r + y) = top(r).
Overridden: it differs from top(r) and is the output's own top token. Refined: it is neither, a
token that only both together put first (Geva's composition). The output's own top token is the
largest entry of y times the unembedding with the final norm's gain folded in, without the norm's
and the unembedding's biases: the basis of the values' top tokens.

What the numbers do not show: the lens reads a stream as if later layers did nothing; in early
layers its tokens are not what the model is about to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from interp import hooks, journal
from interp.analyzers.ffn_keys import coefficients
from interp.analyzers.ffn_keys.lens import Lens
from interp.analyzers.ffn_keys.patterns import Positions
from interp.analyzers.ffn_keys.prefixes import batches_of, rows_of
from interp.model import Model
from interp.progress import track

LIMITS = (0.1, 0.01)
UNCHANGED, REFINED, OVERRIDDEN = range(3)
CHUNK = 256
LOGIT_BYTES = 2**25


def active_count(
    c: Float[Tensor, "item key"],
    values: Float[Tensor, "key d_model"],
    limits: Sequence[float] = LIMITS,
) -> tuple[Int64[Tensor, "limit item"], Int64[Tensor, "item key"]]:
    """How many keys, the largest first, leave at most a share of the squared norm unexplained.

    Args:
        c: coefficients.
        values: of the keys.
        limits: shares, descending.

    Returns:
        Per limit the smallest such number, 0 where the output is 0; and the keys in their order
        (equal ones by index).
    """
    counts = torch.zeros(len(limits), len(c), dtype=torch.long, device=c.device)
    order = (c.abs() * values.norm(dim=1)).sort(dim=1, descending=True, stable=True).indices
    ordered = c.gather(1, order)
    left = c @ values
    squared = left.square().sum(1)
    rows = torch.arange(len(c), device=c.device)[squared > 0]
    left, index, size = left[rows], order[rows], ordered[rows]
    for k in range(c.shape[1]):
        left.addcmul_(values[index[:, k]], size[:, k, None], value=-1)
        share = left.square().sum(1) / squared[rows]
        for n, limit in enumerate(limits):
            here = (counts[n, rows] == 0) & (share <= limit)
            counts[n, rows] = torch.where(here, k + 1, counts[n, rows])
        if k % 16 == 15:  # rows that are done need no further keys
            todo = (counts[:, rows] == 0).any(0)
            rows, left, index, size = rows[todo], left[todo], index[todo], size[todo]
            if not len(rows):
                break
    counts[:, rows] = torch.where(counts[:, rows] == 0, c.shape[1], counts[:, rows])
    return counts, order


def sample(at: Positions, documents: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Up to n included positions of some documents, ascending, spread evenly over them.

    Each document gets n // documents of them, random ones one more; positions of one document are
    drawn without replacement.
    """
    rng = np.random.default_rng([seed, 5])
    places = at.candidates
    places = places[np.isin(at.document[places], documents)]
    _, first, count = np.unique(at.document[places], return_index=True, return_counts=True)
    each = np.full(len(first), n // len(first))
    each[rng.choice(len(first), n % len(first), replace=False)] += 1
    chosen = [
        places[f + rng.choice(c, min(e, c), replace=False)]
        for f, c, e in zip(first, count, each, strict=True)
        if e
    ]
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *chosen]))


@dataclass
class Mixture:
    """One layer at the sampled positions, arrays [position] in the order of the text.

    n_keys: of the layer.
    document: its place in the Text.
    active90, active99: keys that leave at most 10% and 1% unexplained.
    agrees: whether one of the keys of 90% has the output's top token; agrees_null: that of the
        output half the sample further on.
    moved: UNCHANGED, REFINED or OVERRIDDEN.
    same: whether top(r) is the output's own top token.
    """

    n_keys: int
    document: np.ndarray
    active90: np.ndarray
    active99: np.ndarray
    agrees: np.ndarray
    agrees_null: np.ndarray
    moved: np.ndarray
    same: np.ndarray


@dataclass
class _Layer:
    """What is kept of a layer while the batches come."""

    counts: np.ndarray  # [limit, position]
    tops: np.ndarray  # [r, r + y, y; position]
    member: np.ndarray  # [position, key / 8] bits: one of the keys of 90%
    negative: np.ndarray  # [position, key / 8] bits: its coefficient is below 0
    seen: dict[str, Tensor] = field(default_factory=dict)


def measure(
    model: Model,
    at: Positions,
    places: np.ndarray,
    tops: Mapping[int, tuple[np.ndarray, np.ndarray]],
    lens: Lens,
    *,
    batch_tokens: int | None = None,
    progress: bool = False,
) -> dict[int, Mixture]:
    """Measure the layers at some places, in one pass over their documents.

    Args:
        model: inside `model.measuring()`.
        at: the text's positions.
        places: [position] ascending.
        tops: layer -> each key's top and bottom token in vocabulary space, [key] ids.
        lens: the model's end.
        batch_tokens: tokens per forward pass; None: as fits the device.
        progress: a bar on stderr.
    """
    keys, n = model.cfg.d_mlp, len(places)
    width = -(-keys // 8)
    layers = {
        layer: _Layer(
            np.zeros((len(LIMITS), n), dtype=np.int64),
            np.zeros((3, n), dtype=np.int64),
            np.zeros((n, width), dtype=np.uint8),
            np.zeros((n, width), dtype=np.uint8),
        )
        for layer in sorted(tops)
    }
    starts, begins = np.unique(at.start[places], return_index=True)
    ends = [*begins[1:], n]
    runs = [at.ids[s : places[e - 1] + 1] for s, e in zip(starts, ends, strict=True)]
    bar = track(n, "mixture", progress)
    try:
        stage = journal.stage("mixture")
        batches = batches_of(stage, [len(r) for r in runs], model, batch_tokens)
        for chosen in stage.fold(batches, {"layers": layers}):
            index = np.concatenate([np.arange(int(begins[i]), int(ends[i])) for i in chosen])
            row = np.concatenate([np.full(ends[i] - begins[i], r) for r, i in enumerate(chosen)])
            where = torch.from_numpy(row), torch.from_numpy(places[index] - at.start[places[index]])
            _batch(model, [runs[i] for i in chosen], where, index, layers, lens)
            bar.update(len(index))
    finally:
        bar.close()
    document = at.document[places]
    return {layer: _finish(one, document, *tops[layer]) for layer, one in layers.items()}


def _batch(
    model: Model,
    runs: list[np.ndarray],
    where: tuple[Tensor, Tensor],
    index: np.ndarray,
    layers: Mapping[int, _Layer],
    lens: Lens,
) -> None:
    """Run documents and take down every layer at their places, as soon as it is through."""
    here = tuple(w.to(model.device) for w in where)

    def keep(layer: int, name: str) -> hooks.Hook:
        def hook(tensor: Tensor) -> None:
            layers[layer].seen[name] = tensor[here].float()

        return hook

    def finish(layer: int) -> hooks.Hook:
        def hook(tensor: Tensor) -> None:
            one = layers[layer]
            stream, seen = tensor[here].float(), one.seen
            values = coefficients.memory(model, layer).values.float()
            for start in range(0, len(index), CHUNK):
                cut = slice(start, start + CHUNK)
                _look(one, index[cut], seen["c"][cut], values)
                _predict(one, index[cut], stream[cut], seen["y"][cut], lens)
            seen.clear()

        return hook

    sites = []
    for layer in layers:
        sites.append(("mlp_post", layer, keep(layer, "c")))
        sites.append(("mlp_out", layer, keep(layer, "y")))
        sites.append(("resid_post", layer, finish(layer)))
    hooks.run_through(model, rows_of(runs).to(model.device), sites)


def _look(one: _Layer, index: np.ndarray, c: Tensor, values: Tensor) -> None:
    counts, order = active_count(c, values)
    one.counts[:, index] = counts.cpu().numpy()
    first = torch.arange(c.shape[1], device=c.device) < counts[0, :, None]
    member = torch.zeros_like(first).scatter(1, order, first)
    one.member[index] = np.packbits(member.cpu().numpy(), axis=1)
    one.negative[index] = np.packbits((c < 0).cpu().numpy(), axis=1)


def _predict(one: _Layer, index: np.ndarray, stream: Tensor, y: Tensor, lens: Lens) -> None:
    """Top tokens of the stream without and with the layer's output, and of the output alone."""
    step = max(1, LOGIT_BYTES // (4 * lens.vocabulary.size))
    for start in range(0, len(index), step):
        cut = slice(start, start + step)
        found = (lens.logits(stream[cut] - y[cut]), lens.logits(stream[cut]), lens.own(y[cut]))
        for i, logits in enumerate(found):
            one.tops[i, index[cut]] = logits.argmax(-1).cpu().numpy()


def _finish(one: _Layer, document: np.ndarray, up: np.ndarray, down: np.ndarray) -> Mixture:
    before, after, own = one.tops
    n = len(document)
    agrees, by_chance = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
    other = np.roll(own, n // 2)
    for i in range(n):
        member = np.unpackbits(one.member[i], count=len(up)).astype(bool)
        negative = np.unpackbits(one.negative[i], count=len(up)).astype(bool)
        said = np.where(negative, down, up)[member]
        agrees[i], by_chance[i] = (said == own[i]).any(), (said == other[i]).any()
    overridden = np.where(after == own, OVERRIDDEN, REFINED)
    moved = np.where(after == before, UNCHANGED, overridden)
    few, most = one.counts
    return Mixture(len(up), document, few, most, agrees, by_chance, moved, before == own)

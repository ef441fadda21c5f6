"""Checks of each step of a block, by itself: from what the model put in, against numpy.

Each takes the model's own input of a step, does the step in float64 with the checkpoint's tensors
(`arithmetic`), and compares with the model's own output. So a fault shows at its own step and not
at all that follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from interp import scores
from interp.analyzers.ffn_keys import coefficients
from interp.doctor.case import Case, gap, gap_by_dimension, wide
from interp.doctor.outcome import Check, Largest, Measured, NotApplicableError

Pair = tuple[str, np.ndarray, np.ndarray]
"""(what it is, as the model has it, as it should be)"""
Table = np.ndarray
"""[head, kv_head] mean cosine between what a head has and what a KV head would give it"""
SMALL = 1e-3  # size of an input at which a norm's eps shows
SAME = 0.999  # cosine from which one head's scores or outputs are made of a KV head


def compared(
    case: Case, pairs: Iterator[Pair], over: int = 1, *, by_dimension: bool = False
) -> Measured:
    """The largest error of all pairs.

    Args:
        case: whose model's rounding is allowed.
        pairs: what is compared.
        over: trailing dimensions that make one vector, which errors are relative to.
        by_dimension: also each dimension by itself, relative to its own size.
    """
    worst = Largest()
    for where, seen, expected in pairs:
        worst.add(gap(seen, expected, over), where)
        if by_dimension:
            _add_by_dimension(worst, where, seen, expected)
    return worst.measured(case.tolerance, "there is nothing to compare")


def _add_by_dimension(
    worst: Largest,
    where: str,
    seen: np.ndarray,
    expected: np.ndarray,
    terms: Sequence[np.ndarray] = (),
) -> None:
    error, dimension = gap_by_dimension(seen, expected, terms)
    worst.add(error, f"{where}, dimension {dimension}")


def _layers(case: Case) -> range:
    return range(case.model.cfg.n_layers)


def _middle(case: Case, layer: int) -> np.ndarray:
    """What the norm before the FFN reads."""
    return case.real("resid_pre" if case.arithmetic.parallel else "resid_mid", layer)


def embedding(case: Case) -> Measured:
    """resid_pre of layer 0 is the embedding plus, where there is one, the position's."""

    def pairs() -> Iterator[Pair]:
        made = case.arithmetic.embedded(case.documents)
        yield "resid_pre of layer 0", case.real("resid_pre", 0), made

    return compared(case, pairs(), by_dimension=True)


def norms(case: Case) -> Measured:
    """Each norm as its weights and eps say, on the model's own inputs and on a very small one."""
    made, bridge = case.arithmetic, case.model.bridge
    small = SMALL * np.sin(np.arange(case.model.cfg.d_model, dtype=np.float64) + 1)

    def of_small(part: torch.nn.Module) -> np.ndarray:
        x = torch.as_tensor(small[None, None], dtype=case.model.dtype, device=case.model.device)
        return wide(part(x)[0])

    def pairs() -> Iterator[Pair]:
        for i in _layers(case):
            sources = ("attn_in", case.real("resid_pre", i)), ("mlp_in", _middle(case, i))
            for which, (site, source) in enumerate(sources):
                yield f"{site} of layer {i}", case.real(site, i), made.block_norm(i, which, source)
            for which, part in enumerate((bridge.blocks[i].ln1, bridge.blocks[i].ln2)):
                expected = made.block_norm(i, which, small[None])
                yield f"norm {which + 1} of layer {i}, small input", of_small(part), expected
        expected = made.norm(made.family.final, small[None])
        yield "final norm, small input", of_small(bridge.ln_final), expected

    return compared(case, pairs())


def qkv(case: Case) -> Measured:
    """q, k and v of every head are x W + b with that head's weights."""

    def pairs() -> Iterator[Pair]:
        for i in _layers(case):
            made = case.arithmetic.qkv(i, case.real("attn_in", i))
            for name, expected in zip("qkv", made, strict=True):
                yield f"{name} of layer {i}", case.real(name, i), expected

    return compared(case, pairs())


def kv_mapping(case: Case) -> Measured:
    """Each query head's scores and output are made of the KV head h // (n_heads / n_kv_heads).

    Found by trying every KV head's keys and values; a head counts as wrong only where another KV
    head clearly explains it and its own does not. Also what `Model.kv_head` and `scores.attending`
    say.
    """
    cfg = case.model.cfg
    own = [h // (cfg.n_heads // cfg.n_kv_heads) for h in range(cfg.n_heads)]
    said = [case.model.kv_head(h) for h in range(cfg.n_heads)]
    wrong = [f"kv_head({h}) says {said[h]}, not {g}" for h, g in enumerate(own) if said[h] != g]
    for i in _layers(case):
        for what, table in _explained(case, i).items():
            for h, g in enumerate(own):
                other = int(table[h].argmax())
                if table[h, other] > SAME > table[h, g]:
                    wrong.append(f"head {i}.{h} reads the {what} of KV head {other}, not {g}")
    wrong += _attending_wrong(case, own)
    note = wrong[0] if wrong else f"{cfg.n_heads} heads on {cfg.n_kv_heads} KV heads"
    return Measured(len(wrong), note=note)


def _explained(case: Case, layer: int) -> dict[str, Table]:
    """How well each KV head's keys explain a head's scores, and its values a head's output."""
    made, cfg = case.arithmetic, case.model.cfg
    tables = {what: np.zeros((cfg.n_heads, cfg.n_kv_heads)) for what in ("keys", "values")}
    parts = (case.apart(case.real(name, layer)) for name in ("q", "k", "v", "z"))
    squares = (case.squares(name, layer) for name in ("scores", "pattern"))
    for q, k, v, z, score, pattern in zip(*parts, *squares, strict=True):
        past = np.tril(np.ones(score.shape[1:], dtype=bool))
        for g in range(cfg.n_kv_heads):
            for_all = np.repeat([g], cfg.n_kv_heads)
            keys, values = made.scores(q, k[:, for_all]), made.attended(pattern, v[:, for_all])
            tables["keys"][:, g] += _cosines(score[:, past], keys[:, past])
            tables["values"][:, g] += _cosines(_flat(z), _flat(values))
    return {what: table / len(case.documents) for what, table in tables.items()}


def _flat(z: np.ndarray) -> np.ndarray:
    return z.swapaxes(0, 1).reshape(z.shape[1], -1)


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[row] cosine of rows; 1 for two rows of zeros, as a head that was cut out has them."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.where(norms > 0, (a * b).sum(1) / np.where(norms > 0, norms, 1), 1.0)


def _attending_wrong(case: Case, own: list[int]) -> list[str]:
    """Keys and values that `interp.scores` hands to other query heads than it should."""
    seen, shown = case.attending
    wrong = []
    for i, attention in seen.items():
        for name, heads in (("k", attention.k), ("v", attention.v)):
            expected = wide(shown[name, i].transpose(1, 2)[:, own])
            if not gap(wide(heads), expected) <= case.tolerance:
                wrong.append(f"{name} of layer {i} is given to other heads by scores.attending")
    return wrong


def attention_scores(case: Case) -> Measured:
    """scale * (q R_i) . (k R_j), from the model's q and k, is the model's score of every pair."""
    made = case.arithmetic
    every, shown = case.attending

    def pairs() -> Iterator[Pair]:
        for i in _layers(case):
            q, k = (case.apart(case.real(name, i)) for name in "qk")
            for d, seen in enumerate(case.squares("scores", i)):
                expected = made.scores(q[d], k[d])
                past = np.tril(np.ones(seen.shape[1:], dtype=bool))
                yield f"layer {i}{_cause(seen, expected)}", seen[:, past], expected[:, past]
                # Of all pairs, as scores.attending gives them before the mask.
                n = seen.shape[1]
                seen = wide(every[i].scores[d, :, :n, :n])
                expected = made.scores(*(wide(shown[name, i][d, :n]) for name in "qk"))
                where = f"layer {i}, before the mask{_cause(seen, expected)}"
                yield where, _rows(seen), _rows(expected)

    return compared(case, pairs())


def _rows(square: np.ndarray) -> np.ndarray:
    return square.reshape(len(square), -1)


def _cause(seen: np.ndarray, expected: np.ndarray) -> str:
    """What the scores of one document suggest about why they are not the expected ones."""
    own = np.diagonal(seen, axis1=1, axis2=2), np.diagonal(expected, axis1=1, axis2=2)
    past = np.tril(np.ones(seen.shape[1:], dtype=bool))
    a, b = seen[:, past], expected[:, past]
    if gap(a, b) <= 1e-3 or not (b**2).sum():
        return ""
    ratio = float((a * b).sum() / (b**2).sum())
    if gap(a, ratio * b) <= 1e-2:
        return f": they are {ratio:.4g} times what d_head^-0.5 gives, the scale is another"
    if gap(*own) <= 1e-3:
        return ": right at offset 0 only, the rotation is another"
    return ""


def attention_pattern(case: Case) -> Measured:
    """The pattern is the softmax of the model's own scores over keys up to the query, no others."""
    made = case.arithmetic

    def pairs() -> Iterator[Pair]:
        for i in _layers(case):
            shown = zip(case.squares("scores", i), case.squares("pattern", i), strict=True)
            for score, pattern in shown:
                future = float((pattern * np.triu(np.ones(pattern.shape[1:]), 1)).sum(-1).max())
                where = f"layer {i}"
                if future > case.tolerance:
                    where += f": a query gives {future:.2g} of its attention to later positions"
                yield where, pattern, made.pattern(score)
            for row, ids in enumerate(case.documents):
                padding = wide(case.site("pattern", i)[row, :, : len(ids), len(ids) :])
                if padding.size:
                    yield f"layer {i}: attention to padding", 1 + padding, np.ones_like(padding)

    return compared(case, pairs(), over=1)


def head_outputs(case: Case) -> Measured:
    """z of a head is its pattern times the values of its KV head."""
    made = case.arithmetic

    def pairs() -> Iterator[Pair]:
        for i in _layers(case):
            shown = zip(
                case.squares("pattern", i),
                case.apart(case.real("v", i)),
                case.apart(case.real("z", i)),
                strict=True,
            )
            for pattern, v, z in shown:
                yield f"z of layer {i}", z, made.attended(pattern, v)

    return compared(case, pairs())


def head_contributions(case: Case) -> Measured:
    """Sum over heads of z W_O, plus bias, is the attention's output; W_O is read as it is."""
    made = case.arithmetic

    def pairs() -> Iterator[Pair]:
        for i in _layers(case):
            each = made.contributions(i, case.real("z", i))
            yield f"layer {i}", case.real("attn_out", i), each.sum(1) + made.output_bias(i)
            weight, _ = made.projection(i, made.family.o)
            read = wide(scores.output_weights(case.model, i))
            yield f"W_O of layer {i}", read, weight.reshape(read.shape)

    return compared(case, pairs(), by_dimension=True)


def _with_ffn(case: Case) -> None:
    if not case.model.cfg.d_mlp:
        raise NotApplicableError("this model has no FFN of one width in every layer")


def ffn_coefficients(case: Case) -> Measured:
    """A key's coefficient is act(pre), in gated models act(gate) * up."""
    _with_ffn(case)
    made = case.arithmetic

    def pairs() -> Iterator[Pair]:
        for i in _layers(case):
            x = case.real("mlp_in", i)
            yield f"pre-activations of layer {i}", case.real("mlp_pre", i), made.ffn_pre(i, x)
            yield f"coefficients of layer {i}", case.real("mlp_post", i), made.coefficients(i, x)

    return compared(case, pairs())


def ffn_output(case: Case) -> Measured:
    """Sum over keys of coefficient times value, plus bias, is the FFN's output."""
    _with_ffn(case)
    made = case.arithmetic

    def pairs() -> Iterator[Pair]:
        for i in _layers(case):
            keys = case.real("mlp_post", i)
            yield f"layer {i}", case.real("mlp_out", i), made.ffn_output(i, keys)
            memory = coefficients.memory(case.model, i)
            weight, _ = made.projection(i, made.family.down)
            yield f"values of layer {i}", wide(memory.values), weight

    return compared(case, pairs(), by_dimension=True)


def residual_stream(case: Case) -> Measured:
    """resid_pre + attn_out + mlp_out = resid_post, and each layer starts where the last ended."""
    made, worst = case.arithmetic, Largest()

    def summed(where: str, seen: np.ndarray, *terms: np.ndarray) -> None:
        expected = np.sum(terms, axis=0)
        worst.add(gap(seen, expected), where)
        _add_by_dimension(worst, where, seen, expected, terms)

    for i in _layers(case):
        stream, attention = case.real("resid_pre", i), case.real("attn_out", i)
        if not made.parallel:
            summed(f"resid_mid of layer {i}", case.real("resid_mid", i), stream, attention)
        parts = (stream, attention, case.real("mlp_out", i))
        summed(f"resid_post of layer {i}", case.real("resid_post", i), *parts)
        if i:
            summed(f"resid_pre of layer {i}", stream, case.real("resid_post", i - 1))
    return worst.measured(case.tolerance, "there are no layers")


def unembedding(case: Case) -> Measured:
    """Logits, padded rows included, are the final norm of the last stream times W_U."""
    last = case.model.cfg.n_layers - 1

    def pairs() -> Iterator[Pair]:
        made = case.arithmetic.unembedded(case.real("resid_post", last))
        yield "logits", wide(case.captured[1][case.batch.mask]), made

    return compared(case, pairs())


def _check(name: str, meaning: str, run: Callable[[Case], Measured], unit: str = "") -> Check:
    return Check(name, unit or "relative", meaning, run)


CHECKS = (
    _check("embedding", "the stream starts as embedding plus position", embedding),
    _check("norms", "each norm is what its weights and eps say", norms),
    _check("queries, keys, values", "q, k and v are x W + b, head by head", qkv),
    _check("KV mapping", "each head reads its own KV head", kv_mapping, "count"),
    _check("attention scores", "scores are scale * q . k, rotated", attention_scores),
    _check("attention pattern", "softmax of the scores, no later position", attention_pattern),
    _check("head outputs", "z is the pattern times the values", head_outputs),
    _check("head contributions", "sum of z W_O plus bias is the output", head_contributions),
    _check("FFN coefficients", "act(pre), or act(gate) * up", ffn_coefficients),
    _check("FFN output", "sum of coefficient times value plus bias", ffn_output),
    _check("residual stream", "resid_pre + attn_out + mlp_out = resid_post", residual_stream),
    _check("unembedding", "logits are W_U of the final norm", unembedding),
)

"""Attention scores before the mask, and what they are made of: weights, biases, rotation.

The score of query i and key j of a head is S_ij = scale * (q_i R_i) . (k_j R_j), with the queries
q = x W_Q + b_Q and keys k = x W_K + b_K of the attention's input x, and R_p the rotation of
position p (the identity without rotary embedding). The bridge shows scores only after the causal
mask was added; here the attention is given a mask of zeros, the scores are read or replaced, and
the mask is added back.

That a model's scores are of this form is not assumed: `form` finds scale and rotation by comparing
with what the model computes on a probe, and says where they are not (normalised queries and keys,
soft-capped scores).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from interp import hooks
from interp.errors import InterpError
from interp.kernels import replaced_forward
from interp.model import Model

PROBE_TOKENS = 12
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
TOLERANCE_HALF = 3e-2


@dataclass
class Attention:
    """One layer's attention at the moment when its scores exist.

    scores: [batch, head, pos, pos] S before the mask, query first.
    mask: [batch or 1, 1, pos, pos] what the model adds to them before the softmax.
    q, k, v: [batch, head, pos, d_head] before rotation, biases included; k and v of each query
        head's own KV head.
    rotary: the model's (cos, sin), each [batch or 1, pos, rotated], or None.
    x: [batch, pos, d_model], the attention's input.
    k_heads: KV heads, of which each serves n_heads / k_heads query heads in a row.
    """

    layer: int
    scores: Tensor
    mask: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    rotary: tuple[Tensor, Tensor] | None
    x: Tensor
    k_heads: int


Use = Callable[[Attention], Tensor | None]
"""Reads a layer's attention; returns new scores before the mask, or None to leave them."""


@contextlib.contextmanager
def attending(model: Model, use: Mapping[int, Use]) -> Iterator[None]:
    """Let functions see, and replace, the scores of some layers for the duration of the block.

    Args:
        model: any model whose attention computes its scores where the bridge can see them.
        use: layer -> function; it must not write to the tensors that it gets.
    """
    hooks.require(model, "q", "k", "v", "scores")
    with contextlib.ExitStack() as stack:
        for layer, function in use.items():
            watch = _Watch(model, layer, function)
            attn = model.bridge.blocks[layer].attn
            handle = attn.register_forward_pre_hook(watch.enter, with_kwargs=True)
            stack.callback(handle.remove)
            sites = [(name, layer, watch.keep(name)) for name in ("q", "k", "v")]
            stack.enter_context(hooks.attached(model, [*sites, ("scores", layer, watch.scores)]))
        yield


class _Watch:
    """The state of one layer between the entry of its attention and its scores."""

    def __init__(self, model: Model, layer: int, function: Use) -> None:
        self.layer, self.function = layer, function
        self.k_heads = model.cfg.n_kv_heads
        self.group = model.cfg.n_heads // model.cfg.n_kv_heads
        self.seen: dict[str, Any] = {}

    def enter(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        mask = _additive(kwargs.get("attention_mask"), x)
        self.seen = {"x": x, "mask": mask, "rotary": kwargs.get("position_embeddings")}
        return args, kwargs | {"attention_mask": torch.zeros_like(mask)}

    def keep(self, name: str) -> hooks.Hook:
        def hook(tensor: Tensor) -> None:
            heads = tensor.transpose(1, 2)
            if name != "q" and self.group > 1:
                heads = heads.repeat_interleave(self.group, dim=1)
            self.seen[name] = heads

        return hook

    def scores(self, scores: Tensor) -> Tensor:
        seen, self.seen = self.seen, {}
        new = self.function(Attention(self.layer, scores, k_heads=self.k_heads, **seen))
        return (scores if new is None else new) + seen["mask"]


def _additive(mask: Any, x: Tensor) -> Tensor:
    """The model's mask as numbers to add, [batch or 1, 1, pos, pos]."""
    length = x.shape[1]
    if mask is None:  # the bridge then masks the future itself
        low = torch.finfo(x.dtype).min
        return torch.full((1, 1, length, length), low, dtype=x.dtype, device=x.device).triu(1)
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-2:] != (length, length):
        raise InterpError(
            "This model's attention takes a mask of an unknown kind "
            f"({tuple(getattr(mask, 'shape', ()))}), so its scores cannot be read before the mask."
        )
    if mask.dtype == torch.bool:
        low = torch.finfo(x.dtype).min
        return torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, low)
    return mask


def run(model: Model, batch: Any) -> None:
    """A forward pass up to the unembedding, whose logits nobody needs here."""
    with replaced_forward(model.bridge.unembed, lambda hidden, **_: hidden[..., :1]):
        model.forward(batch)


# Rotation -----------------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> Tensor:
    """x [..., pos, d_head] with its first dimensions rotated by position, the rest as they are.

    Args:
        x: queries or keys.
        cos: as the model computes them, broadcast to [..., pos, rotated].
        sin: likewise; -sin rotates the other way.
        adjacent: planes are (0, 1), (2, 3), ... instead of (i, i + rotated / 2).
    """
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if adjacent:
        half = width // 2
        cos, sin = (c[..., :half].repeat_interleave(2, dim=-1) for c in (cos, sin))
        other = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        other = torch.cat((-b, a), dim=-1)
    turned = turned * cos + other * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@dataclass
class Form:
    """How one layer's scores come about.

    bilinear: whether they are scale * (q R) . (k R) at all. Where not (normalised queries, soft-
        capped scores), the weights alone do not say what the scores are.
    prenorm: whether the attention's input is what the block's first norm gives.
    scale: what q . k is multiplied by.
    rotary: whether there is a rotation; adjacent: of which planes (see `rotated`).
    angles: [rotated / 2] radians per position and plane, float64; None where the rotation is not
        by an angle proportional to the position.
    strength: factor on rotated dimensions of q and of k (1, but for some long-context models).
    """

    bilinear: bool
    prenorm: bool
    scale: float = 1.0
    rotary: bool = False
    adjacent: bool = False
    angles: Tensor | None = None
    strength: float = 1.0

    def content(self, a: Attention) -> Tensor:
        """[batch, head, pos, pos] scores with query and key both at offset 0."""
        return (a.q @ a.k.transpose(-1, -2)) * self.scale

    def turned(self, a: Attention) -> tuple[Tensor, Tensor]:
        """Queries and keys [batch, head, pos, d_head] rotated as the model does, if it does."""
        if not self.rotary:
            return a.q, a.k
        assert a.rotary is not None
        cos, sin = (c[:, None] for c in a.rotary)
        q, k = (rotated(x, cos, sin, self.adjacent) for x in (a.q, a.k))
        return q, k

    def swapped(self, a: Attention, source: Tensor | None = None) -> Tensor:
        """[batch, head, pos, pos] the scores with the two tokens' contents exchanged.

        Entry i, j is scale * q_j R_(i-j) k_i: what i and j would give if each held the other's
        content, at the same offset. Without rotary embedding this is the transpose of the scores.

        Args:
            a: the layer's attention.
            source: [batch, pos]; the content of position t is taken from source[t] instead.
        """
        q, k = (_taken(x, source) for x in (a.q, a.k))
        if self.rotary:
            assert a.rotary is not None
            cos, sin = (c[:, None] for c in a.rotary)
            # (q_j R_i) . (k_i R_j) = (q_j R_-j) . (k_i R_-i): a product again, turned back.
            q, k = (rotated(x, cos, -sin, self.adjacent) for x in (q, k))
        return ((q @ k.transpose(-1, -2)) * self.scale).transpose(-1, -2)

    def turn(self, offset: float, d_head: int) -> Tensor:
        """[d_head, d_head] float64 R of an offset i - j, so that S_ij = scale * q_i R k_j."""
        eye = torch.eye(d_head, dtype=torch.float64)
        if not self.rotary:
            return eye
        assert self.angles is not None
        angle = torch.cat([self.angles, self.angles]) * offset
        turned = rotated(eye, angle.cos(), angle.sin(), self.adjacent)
        turned[: len(angle)] *= self.strength**2
        return turned


def _taken(x: Tensor, source: Tensor | None) -> Tensor:
    """x [batch, head, pos, d_head] with position t taken from source[batch, t]."""
    if source is None:
        return x
    return x.gather(2, source[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def form(model: Model) -> list[Form]:
    """Each layer's form, found on a probe and checked against the model's own scores there.

    Raises:
        InterpError: queries or keys that are not x W + b with the weights that `weights` reads, or
            what is shown as scores is the pattern.
    """
    n = model.cfg.n_layers
    found: dict[int, Form | None] = {}
    normed: dict[int, Tensor] = {}

    def look(a: Attention) -> None:
        _check_scores(model, a)
        _check_weights(model, a)
        before = normed.get(a.layer)
        found[a.layer] = _form_of(model, a, before is not None and torch.equal(before, a.x))

    def keep(layer: int) -> hooks.Hook:
        def hook(tensor: Tensor) -> None:
            normed[layer] = tensor

        return hook

    try:
        hooks.require(model, "attn_in")
        norms = [("attn_in", layer, keep(layer)) for layer in range(n)]
    except InterpError:
        norms = []

    rows = min(model.cfg.vocab_rows, 10_007)
    length = min(PROBE_TOKENS, model.cfg.n_ctx or PROBE_TOKENS)
    tokens = (torch.arange(length, device=model.device)[None] * 7919 + 11) % rows
    use = dict.fromkeys(range(n), look)
    with model.measuring(), hooks.attached(model, norms), attending(model, use):
        run(model, SimpleNamespace(tokens=tokens, attention_mask=torch.ones_like(tokens)))
    # A layer whose heads were all cut out has zeros for scores, which any form fits.
    known = next((one for one in found.values() if one is not None), Form(True, False))
    return [found[layer] or known for layer in range(n)]


def tolerance(model: Model) -> float:
    """Relative difference that rounding explains, in the model's dtype."""
    return TOLERANCE.get(model.dtype, TOLERANCE_HALF)


def _form_of(model: Model, a: Attention, prenorm: bool) -> Form | None:
    """The form of a layer's scores; None where they are all zero."""
    if not bool(a.scores.any()):
        return None
    candidates: list[tuple[bool, bool]] = [(False, False)]
    if a.rotary is not None:
        candidates = [(True, False), (True, True)]
    wide = [x.double() if x.device.type != "mps" else x for x in (a.scores, a.q, a.k)]
    scores, q, k = wide
    for rotary, adjacent in candidates:
        q_, k_ = q, k
        if rotary:
            assert a.rotary is not None
            cos, sin = (c[:, None].to(q) for c in a.rotary)
            q_, k_ = (rotated(x, cos, sin, adjacent) for x in (q, k))
        raw = q_ @ k_.transpose(-1, -2)
        scale = float((scores * raw).sum() / raw.square().sum())
        if float((scores - scale * raw).abs().max() / scores.abs().max()) <= tolerance(model):
            angles, strength = _angles(a.rotary, adjacent) if rotary else (None, 1.0)
            return Form(True, prenorm, scale, rotary, adjacent, angles, strength)
    return Form(False, prenorm, rotary=a.rotary is not None)


def _angles(rotary: tuple[Tensor, Tensor] | None, adjacent: bool) -> tuple[Tensor | None, float]:
    """Radians per position of each plane, from position 1, checked at all others."""
    assert rotary is not None
    cos, sin = (c[0].detach().cpu().double() for c in rotary)
    half = cos.shape[-1] // 2
    strength = float(cos[0, 0])
    angles = torch.atan2(sin[1, :half], cos[1, :half])
    position = torch.arange(len(cos), dtype=torch.float64)[:, None]
    wrong = (strength * (position * angles).cos() - cos[:, :half]).abs().max()
    wrong = max(
        float(wrong), float((strength * (position * angles).sin() - sin[:, :half]).abs().max())
    )
    return (angles if wrong < 1e-2 else None), strength


# Weights ------------------------------------------------------------------------------------------


def weights(model: Model, layer: int) -> tuple[Tensor, Tensor]:
    """W_Q [head, d_model, d_head] and W_K [kv_head, d_model, d_head] as the model uses them, raw.

    Whatever the family: fused and interleaved projections are those that the bridge has taken
    apart, and `form` compares them with the queries and keys of a real forward pass.
    """
    attn = model.bridge.blocks[layer].attn
    return (
        _heads(model, attn.q, model.cfg.n_heads, "query", layer),
        _heads(model, attn.k, model.cfg.n_kv_heads, "key", layer),
    )


def value_weights(model: Model, layer: int) -> Tensor:
    """W_V [kv_head, d_model, d_head] as the model uses it, raw."""
    attn = model.bridge.blocks[layer].attn
    return _heads(model, attn.v, model.cfg.n_kv_heads, "value", layer)


def output_weights(model: Model, layer: int) -> Tensor:
    """W_O [head, d_head, d_model] as the model uses it, in float64 on the CPU."""
    weight = wide(in_out(model.bridge.blocks[layer].attn.o.original_component)).cpu()
    return weight.view(model.cfg.n_heads, model.cfg.d_head, -1)


def in_out(module: Any) -> Tensor:
    """A projection's weight as [in, out], however it is stored (GPT-2's Conv1D: [in, out])."""
    weight = module.weight.detach()
    return weight if type(module).__name__ == "Conv1D" else weight.T


def has_biases(model: Model) -> bool:
    """Whether any query or key projection has a bias that is not zero."""
    for block in model.bridge.blocks:
        for part in (block.attn.q, block.attn.k):
            bias = getattr(part.original_component, "bias", None)
            if bias is not None and bool(bias.any()):
                return True
    return False


def _heads(model: Model, part: Any, count: int, what: str, layer: int) -> Tensor:
    module = part.original_component
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise InterpError(
            f"The {what} projection of layer {layer} is a {type(module).__name__} of {model.name}: "
            "its weights cannot be read as a matrix."
        )
    out_in = in_out(module).T
    if out_in.shape != (count * model.cfg.d_head, model.cfg.d_model):
        raise InterpError(
            f"The {what} projection of layer {layer} of {model.name} is {tuple(out_in.shape)}; "
            f"expected {count} heads of {model.cfg.d_head} times d_model {model.cfg.d_model}."
        )
    return out_in.reshape(count, model.cfg.d_head, model.cfg.d_model).transpose(1, 2)


def _check_scores(model: Model, a: Attention) -> None:
    """For some families (OPT) the bridge shows the pattern where the scores should be."""
    if bool((a.scores >= 0).all()) and bool(((a.scores.sum(-1) - 1).abs() < 1e-2).all()):
        raise InterpError(
            f"{model.name} ({model.cfg.family}) shows its attention scores only after the softmax, "
            "so they can be neither read nor replaced."
        )


def _check_weights(model: Model, a: Attention) -> None:
    parts: Any = (("q", a.q, 1), ("k", a.k, a.q.shape[1] // model.cfg.n_kv_heads))
    for (name, seen, group), matrix in zip(parts, weights(model, a.layer), strict=True):
        module = getattr(model.bridge.blocks[a.layer].attn, name).original_component
        made = torch.einsum("bpd,hde->bhpe", a.x.to(matrix), matrix)
        if getattr(module, "bias", None) is not None:
            made = made + module.bias.detach().reshape(1, len(matrix), 1, -1)
        made = made.repeat_interleave(group, dim=1)
        gap = float((made - seen).abs().max() / seen.abs().max().clamp(min=1e-12))
        if not gap <= tolerance(model):
            raise InterpError(
                f"{name} of layer {a.layer} of {model.name} is not x W + b with the weights read "
                f"(off by {gap:.1e}, relative): its A = W_Q W_K^T would mean nothing."
            )


def norm_gain(model: Model, layer: int) -> tuple[Tensor, bool] | None:
    """What the norm before the attention multiplies its directions by, and whether it centres.

    Measured on the module itself (some families store the gain minus one).

    Returns:
        The gain [d_model] in float64, and True for LayerNorm; None where there is no such norm.
    """
    return _gain(model, getattr(model.bridge.blocks[layer], "ln1", None))


def final_norm_gain(model: Model) -> tuple[Tensor, bool] | None:
    """The same of the norm before the unembedding."""
    return _gain(model, getattr(model.bridge, "ln_final", None))


def _gain(model: Model, part: Any) -> tuple[Tensor, bool] | None:
    norm: Any = getattr(part, "original_component", None)
    if norm is None or model.cfg.norm not in ("LN", "RMS"):
        return None
    centres = model.cfg.norm == "LN"
    weight = next(norm.parameters(), None)
    dtype = model.dtype if weight is None else weight.dtype
    x = torch.linspace(1, 2, model.cfg.d_model, dtype=torch.float64)
    x[::2] *= -1
    unit = x - x.mean() if centres else x
    unit = unit / unit.square().mean().sqrt()
    with torch.no_grad():
        seen = [norm(sign * x.to(model.device, dtype)[None, None]) for sign in (1, -1)]
    gain = (seen[0] - seen[1])[0, 0].double().cpu() / 2 / unit
    raw = None if weight is None else weight.detach().double().cpu()
    if raw is not None and raw.shape == gain.shape:
        for exact in (raw, 1 + raw):  # without the rounding of the measurement
            if torch.allclose(exact, gain, rtol=1e-2, atol=1e-3):
                return exact, centres
    return gain, centres


def effective(matrix: Tensor, fold: tuple[Tensor, bool] | None) -> Tensor:
    """[..., d_model, d_head] in float64, with gain and centring folded in where `fold` is given."""
    exact = wide(matrix)
    if fold is None:
        return exact
    gain, centres = fold
    exact = exact * gain.to(exact.device)[:, None]
    return exact - exact.mean(-2, keepdim=True) if centres else exact


def wide(x: Tensor) -> Tensor:
    """In float64; off an MPS device, which has none."""
    return (x.cpu() if x.device.type == "mps" else x).double()

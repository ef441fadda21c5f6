"""Which keys of all layers say a given token after a prompt, and whether they matter.

At the prompt's last position the logit of token t is u . x + shift . W_U[t] + b_U[t], with x the
stream at the end, u = (W_U[t], final norm's gain and centring folded in) / scale, and the scale the
final norm's own at this x. With the scale frozen at that value the logit is linear in x, hence a
sum: key i of layer l adds coefficient_i * value_i . u, the biases add theirs, and together they are
exactly what the layer's FFN adds. Nothing is linearised but that one number.

A logit that all tokens share changes no probability: `centred` takes the mean over the vocabulary
off. What a key adds directly is not what its removal costs: later layers read it, others may make
up for it, and the scale changes. So the largest are really removed (coefficient 0 at the last
position) and the model is run on.

What the numbers do not show: what earlier positions contribute. The subject of a fact is mostly
looked up at its own last token and carried by attention (Geva et al. 2023), which counts as
attention here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from interp import hooks, scores
from interp.analyzers.ffn_keys import coefficients
from interp.analyzers.ffn_keys.lens import Lens
from interp.analyzers.ffn_keys.prefixes import rows_of
from interp.encoding import make_encoder
from interp.errors import InterpError, UsageError
from interp.model import Model

LOGIT_BYTES = 2**28


@dataclass(frozen=True)
class Question:
    """A prompt's tokens, BOS included, and the one token whose logit is asked for."""

    tokens: list[int]
    target: int
    notices: list[str] = field(default_factory=list)


def question(model: Model, prompt: str, target: str, bos: bool | None = None) -> Question:
    """Tokenise a prompt and a target.

    Args:
        model: with its tokenizer.
        prompt: any text.
        target: the text that comes next; usually with its leading space. Of several tokens the
            first is taken, and a notice says so.
        bos: as `load_text` takes it.

    Raises:
        UsageError: an empty prompt or target.
        InterpError: a prompt longer than the model's context, or a target that the tokenizer does
            not know.
    """
    if not prompt or not target:
        raise UsageError("--prompt and --target both need some text.")
    limit = model.cfg.n_ctx
    encoder = make_encoder(model, bos, context=limit, min_tokens=2, windows=False)
    start = [] if encoder.bos_id is None else [encoder.bos_id]
    body, alone, joint = encoder.encode([prompt, target, prompt + target])
    tokens = start + body
    if len(tokens) > limit:
        raise InterpError(
            f"The prompt is {len(tokens)} tokens long; {model.name} takes {limit}. Shorten it."
        )
    # The target as it is tokenised behind the prompt; some tokenizers put a space before any text.
    ids = joint[len(body) :] if joint[: len(body)] == body else alone
    decode = model.tokenizer.decode
    notices: list[str] = []
    if not ids or ids[0] in encoder.special_ids:
        raise InterpError(f"The tokenizer of {model.name} has no token for the target {target!r}.")
    if joint[: len(body)] != body:
        notices.append(
            f"Prompt and target are tokenised together otherwise than apart: the model has not "
            f"learned to say {decode(ids[:1])!r} exactly here. Does a space belong to the target?"
        )
    elif target[0].isalnum() and prompt[-1].isalnum():
        spaced = encoder.encode([prompt + " " + target])[0][len(body) :]
        notices.append(
            f"The target {target!r} has no leading space, so it continues the prompt's last word; "
            f'for the next word give --target " {target}" (token {decode(spaced[:1])!r}).'
        )
    if len(ids) > 1:
        notices.append(
            f"The target {target!r} is {len(ids)} tokens ({[decode([i]) for i in ids]}): the logit "
            "is that of the first."
        )
    return Question(tokens, int(ids[0]), notices)


@dataclass(frozen=True)
class Answer:
    """A target's logit taken apart at the prompt's last position, in logits, float64.

    coefficient: [layer, key].
    contribution, centred: [layer, key] what each key adds to the target's logit, and to that
        logit minus the mean over the vocabulary.
    bias, ffn: [layer] what W_out's bias adds, and what the FFN's own output adds.
    rest: embedding, attention and the last biases.
    logit, log_prob, rank: of the target in the clean run (rank 1: the model says it).
    says: the token that the model puts first.
    scale: the final norm's, held fixed.
    gap: |sum of all parts - logit|.
    """

    coefficient: np.ndarray
    contribution: np.ndarray
    centred: np.ndarray
    bias: np.ndarray
    ffn: np.ndarray
    rest: float
    logit: float
    log_prob: float
    rank: int
    says: int
    scale: float
    gap: float

    @property
    def error(self) -> np.ndarray:
        """[layer] sum over keys plus bias, minus the FFN's own."""
        return self.contribution.sum(1) + self.bias - self.ffn

    def largest(self, n: int) -> list[tuple[int, int]]:
        """The n (layer, key) pairs with the largest |contribution|, the largest first."""
        size = np.abs(self.contribution)
        order = np.argsort(-size, axis=None, kind="stable")[:n]
        return [divmod(int(i), size.shape[1]) for i in order]


def decompose(model: Model, asked: Question, lens: Lens) -> Answer:
    """Take the target's logit apart, inside `model.measuring()`.

    Raises:
        InterpError: sums that are not what the model computes, by more than rounding.
    """
    layers = range(model.cfg.n_layers)
    seen: dict[tuple[str, int], Tensor] = {}

    def keep(name: str, layer: int) -> hooks.Hook:
        def hook(tensor: Tensor) -> None:
            seen[name, layer] = tensor[0, -1].detach().clone()

        return hook

    sites = [(name, i, keep(name, i)) for i in layers for name in ("mlp_post", "mlp_out")]
    sites.append(("resid_post", layers[-1], keep("resid_post", layers[-1])))
    batch = rows_of([np.array(asked.tokens)]).to(model.device)
    with hooks.attached(model, sites):
        logits = scores.wide(model.forward(batch)[0, -1, : model.cfg.vocab_size])
    stream = seen["resid_post", layers[-1]]
    frozen = lens.frozen(stream)
    row, bias = lens.row(asked.target)
    u, mean = lens.folded(torch.stack([row, lens.mean_row().to(row)])) / frozen.scale
    coefficient, contribution, centred, of_bias, ffn = [], [], [], [], []
    for layer in layers:
        memory = coefficients.memory(model, layer)
        c, values = scores.wide(seen["mlp_post", layer]), scores.wide(memory.values)
        coefficient.append(c)
        contribution.append(c * (values @ u))
        centred.append(c * (values @ (u - mean)))
        of_bias.append(0.0 if memory.bias is None else float(scores.wide(memory.bias) @ u))
        ffn.append(float(scores.wide(seen["mlp_out", layer]) @ u))
    end = float(frozen.shift @ row) + bias
    logit = float(logits[asked.target])
    out = Answer(
        *(torch.stack(x).cpu().numpy() for x in (coefficient, contribution, centred)),
        bias=np.array(of_bias),
        ffn=np.array(ffn),
        rest=float(scores.wide(stream) @ u) - sum(ffn) + end,
        logit=logit,
        log_prob=float(logits.log_softmax(-1)[asked.target]),
        rank=1 + int((logits > logits[asked.target]).sum()),
        says=int(logits.argmax()),
        scale=frozen.scale,
        gap=abs(float(scores.wide(stream) @ u) + end - logit),
    )
    _check(model, out)
    return out


def _check(model: Model, found: Answer) -> None:
    # Rounding grows with the size of what is summed, which may cancel.
    sizes = np.abs(found.contribution).sum(1) + np.abs(found.bias)
    allowed = 10 * scores.tolerance(model)
    worst = float((np.abs(found.error) / np.maximum(sizes, 1e-6)).max())
    whole = found.gap / max(abs(found.logit), 1.0)
    if not (worst <= allowed and whole <= allowed):
        raise InterpError(
            f"In {model.name} the keys do not add up to what the FFNs add to the logit (off by "
            f"{worst:.1e}), or the parts to the logit (off by {whole:.1e}, both relative): "
            "something acts on the FFN's output, or on the logits, that interp does not see."
        )


@dataclass(frozen=True)
class Ablated:
    """What removing single keys at the last position changes: [key], after minus before.

    logit, log_prob: of the target, in logits and nats.
    """

    logit: np.ndarray
    log_prob: np.ndarray


def ablate(model: Model, asked: Question, keys: list[tuple[int, int]]) -> Ablated:
    """Set one coefficient at the last position to 0 and run the model on, for each (layer, key).

    Each batch holds one unchanged copy of the prompt, which its changes are differences from.
    """
    most = max(2, LOGIT_BYTES // (4 * model.cfg.vocab_rows * len(asked.tokens)))
    logit, log_prob = [], []
    for start in range(0, len(keys), most - 1):
        cut = keys[start : start + most - 1]
        batch = rows_of([np.array(asked.tokens)] * (len(cut) + 1)).to(model.device)
        with hooks.attached(model, _removals(cut)):
            last = scores.wide(model.forward(batch)[:, -1, : model.cfg.vocab_size])
        target = last[:, asked.target]
        said = last.log_softmax(-1)[:, asked.target]
        logit.append(target[1:] - target[0])
        log_prob.append(said[1:] - said[0])
    if not keys:
        return Ablated(np.empty(0), np.empty(0))
    return Ablated(torch.cat(logit).cpu().numpy(), torch.cat(log_prob).cpu().numpy())


def _removals(keys: list[tuple[int, int]]) -> list[tuple[str, int, hooks.Hook]]:
    """Hooks that remove the n-th key in row n + 1."""

    def remove(layer: int) -> hooks.Hook:
        mine = [(n + 1, key) for n, (at, key) in enumerate(keys) if at == layer]

        def hook(tensor: Tensor) -> Tensor:
            changed = tensor.clone()
            for row, key in mine:
                changed[row, -1, key] = 0
            return changed

        return hook

    return [("mlp_post", layer, remove(layer)) for layer in sorted({at for at, _ in keys})]

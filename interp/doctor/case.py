"""One model under examination: what it did on a few texts, and its independent oracles.

Everything is made when a check first asks for it and kept: a failure to make it fails the checks
that need it, and no others.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from interp import checkpoint, hooks, pruned, scores, splice
from interp.doctor import arithmetic
from interp.doctor.outcome import NotApplicableError
from interp.errors import InterpError
from interp.hub import weight_files
from interp.model import Model
from interp.text import Text, TokenBatch, load_text, padded

TEXTS = (
    "The river rose in the night, and by morning the old bridge was gone.",
    "She paid 12 euros for a coffee; he said nothing and looked at the rain outside.",
    "A short one.",
)
CONTEXT = 20
COARSE = 0.1
NATS = 1e-4
MADE_UP = (14, 18, 5)  # lengths of the rows of ids that stand in where no text can be tokenised

Made = TypeVar("Made")


class Once(Generic[Made]):
    """What a case makes when it is first asked for; where that fails, it fails once.

    Whoever asks again gets the same value, or the same error, and nothing is run for it again.
    """

    def __init__(self, make: Callable[[Any], Made]) -> None:
        self.make, self.name = make, make.__name__
        self.__doc__ = make.__doc__

    def __get__(self, case: Any, _owner: Any = None) -> Made:
        if self.name not in case.kept:
            try:
                case.kept[self.name] = self.make(case), None
            except Exception as error:
                case.kept[self.name] = None, error
        made, error = case.kept[self.name]
        if error is not None:
            raise error.with_traceback(None)  # or it would grow, and keep what its frames hold
        return made


class Case:
    """A loaded model, to be examined within `examined()`."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.kept: dict[str, Any] = {}  # what several checks share

    @contextlib.contextmanager
    def examined(self) -> Iterator[None]:
        """Eval mode, no gradients; hooks that were on the model before are told by `left_on`.

        Attention is the bridge's throughout, hooked or not, so that what is hooked can be compared
        bit for bit; what runs fused has a check of its own.
        """
        self.left_on = hooks.left_on(self.model)
        with self.model.measuring():
            yield

    # What the model reads -----------------------------------------------------------------------

    @Once
    def text(self) -> Text:
        """The examination's texts as the model's tokenizer cuts them."""
        if self.model.tokenizer is None:
            raise NotApplicableError("this model has no tokenizer")
        context = min(CONTEXT, self.model.cfg.n_ctx)
        return load_text(list(TEXTS), self.model, documents=len(TEXTS), context=context)

    @Once
    def documents(self) -> list[list[int]]:
        """Token ids per document; made-up ones where no text can be tokenised."""
        try:
            return [list(d.windows[0]) for d in self.text.documents]
        except (NotApplicableError, InterpError):
            rows, most = self.model.cfg.vocab_size, self.model.cfg.n_ctx
            lengths = [min(n, most) for n in MADE_UP]
            return [[(7919 * (i + 3 * n) + 11) % rows for i in range(n)] for n in lengths]

    @Once
    def longest(self) -> int:
        """The document with most tokens."""
        return max(range(len(self.documents)), key=lambda i: len(self.documents[i]))

    @Once
    def batch(self) -> TokenBatch:
        """All documents in one padded batch."""
        rows = torch.arange(len(self.documents))
        try:
            return self.text.batch_of([(i, 0) for i in range(len(rows))], self.model.device)
        except (NotApplicableError, InterpError):
            made = padded(self.documents, (), rows, torch.zeros_like(rows))
            return made.to(self.model.device)

    def forward(self, rows: list[list[int]], pad: list[int] | None = None) -> list[Tensor]:
        """The model's logits [pos, vocab] of rows of one length, each followed by masked `pad`."""
        after = pad or []
        tokens = torch.tensor([[*row, *after] for row in rows], device=self.model.device)
        mask = torch.ones_like(tokens)
        mask[:, tokens.shape[1] - len(after) :] = 0
        out = self.model.forward(SimpleNamespace(tokens=tokens, attention_mask=mask))
        return [one[: len(row)] for one, row in zip(out, rows, strict=True)]

    # What the model did -------------------------------------------------------------------------

    @Once
    def clean(self) -> Tensor:
        """[batch, pos, vocab] the model's logits of the batch, nothing hooked."""
        return self.model.forward(self.batch)

    @Once
    def captured(self) -> tuple[dict[tuple[str, int], list[Tensor]], Tensor]:
        """(site, layer) -> all that the site showed in one pass, and that pass's logits."""
        seen: dict[tuple[str, int], list[Tensor]] = {place: [] for place in self.places}

        def keep(place: tuple[str, int]) -> hooks.Hook:
            return lambda tensor: seen[place].append(tensor.clone())

        with hooks.attached(self.model, [(*place, keep(place)) for place in self.places]):
            logits = self.model.forward(self.batch)
        return seen, logits

    @Once
    def places(self) -> list[tuple[str, int]]:
        """(site, layer) of every site that the model has."""
        found = []
        for layer in range(self.model.cfg.n_layers):
            for name in hooks.SITES:
                with contextlib.suppress(InterpError):
                    hooks.site(self.model, name, layer)
                    found.append((name, layer))
        return found

    def site(self, name: str, layer: int) -> Tensor:
        """What a site showed, as SITES has its shape."""
        seen = self.captured[0].get((name, layer))
        if not seen:
            raise NotApplicableError(f"the model shows no {name!r} in layer {layer}")
        return seen[-1]

    def real(self, name: str, layer: int) -> np.ndarray:
        """[pos, ...] float64: a site at the real positions, document after document."""
        return wide(self.site(name, layer)[self.batch.mask])

    def squares(self, name: str, layer: int) -> list[np.ndarray]:
        """[head, query, key] float64 per document, of scores or patterns at real positions."""
        whole = self.site(name, layer)
        lengths = [len(d) for d in self.documents]
        return [wide(one[:, :n, :n]) for one, n in zip(whole, lengths, strict=True)]

    def apart(self, positions: np.ndarray) -> list[np.ndarray]:
        """An array over real positions, cut into documents."""
        return np.split(positions, np.cumsum([len(d) for d in self.documents])[:-1])

    @Once
    def attending(self) -> tuple[dict[int, scores.Attention], dict[tuple[str, int], Tensor]]:
        """What `interp.scores` hands to analyzers per layer, and q, k, v of the same pass."""
        seen: dict[int, scores.Attention] = {}
        shown: dict[tuple[str, int], Tensor] = {}

        def look(attention: scores.Attention) -> None:
            seen[attention.layer] = attention

        def keep(place: tuple[str, int]) -> hooks.Hook:
            def hook(tensor: Tensor) -> None:
                shown[place] = tensor

            return hook

        layers = range(self.model.cfg.n_layers)
        sites = [(*place, keep(place)) for i in layers for place in (("q", i), ("k", i), ("v", i))]
        attending = scores.attending(self.model, dict.fromkeys(layers, look))
        with hooks.attached(self.model, sites), attending:
            self.model.forward(self.batch)
        return seen, shown

    @Once
    def forms(self) -> list[scores.Form] | None:
        """How the scores come about, as `interp.scores` finds; None where it refuses them.

        In a family that is written out a refusal is a fault, and whatever needs the form says so.
        """
        try:
            return scores.form(self.model)
        except InterpError:
            if self.written_out:
                raise
            return None

    @Once
    def splices(self) -> bool:
        """Whether runs from the middle are used: in every family that is written out.

        Elsewhere a block may do more to its attention's output than the bridge shows (Bloom), which
        `splice.usable` measures; interp then runs such a model from the start.
        """
        return self.written_out or splice.usable(self.model, self.text)

    @Once
    def prefix(self) -> splice.Clean:
        """A clean run of the batch, as runs from the middle reuse it, with KL."""
        return splice.run_clean(self.model, self.batch, kl=True)

    # Oracles ------------------------------------------------------------------------------------

    @Once
    def plain(self) -> Any:
        """The checkpoint loaded once more, by plain transformers alone, with its own attention."""
        from transformers import AutoConfig

        folder = self.model.folder
        trust = bool(self.model.remote_code)  # or the model would not have been loaded
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
        with torch.inference_mode(False), checkpoint.quiet():
            loaded = pruned.model_class(config).from_pretrained(
                folder,
                config=config,
                dtype=self.model.dtype,
                local_files_only=True,
                trust_remote_code=trust,
                use_safetensors=True if weight_files(folder) else None,
            )
        return loaded.eval().requires_grad_(False).to(self.model.device)

    @Once
    def plain_logits(self) -> list[np.ndarray]:
        """[pos, vocab] float64 per document, by plain transformers, one at a time, not padded."""
        return [self.plain_of(ids) for ids in self.documents]

    def plain_of(self, ids: list[int], model: Any = None) -> np.ndarray:
        """[pos, vocab] float64 of one document, by the plain model or another one like it."""
        model = self.plain if model is None else model
        device = next(model.parameters()).device
        with torch.no_grad():
            return wide(model(torch.tensor([ids], device=device), use_cache=False).logits[0])

    @Once
    def whole(self) -> Any:
        """The plain model; where heads were cut out of the checkpoint, with zeros in their place.

        That this is the same function, `written-out arithmetic` and `logits` check: they compare
        with the narrow model.
        """
        if not self.model.cfg.removed:
            return self.plain
        folder, dtype = self.model.folder, self.model.dtype
        with torch.inference_mode(False):
            pickled = not weight_files(folder)
            loaded, _, _ = checkpoint.load(folder, self.model.name, dtype, pickled)
        return loaded.requires_grad_(False).to(self.model.device)

    @Once
    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json as it is written."""
        return json.loads((self.model.folder / "config.json").read_text(encoding="utf-8"))

    @property
    def written_out(self) -> bool:
        """Whether the family is one whose arithmetic is written out."""
        return self.config.get("model_type") in arithmetic.FAMILIES and not self.model.remote_code

    @Once
    def arithmetic(self) -> arithmetic.Arithmetic:
        """The forward pass written out, on the tensors of the plain model."""
        if self.model.remote_code:
            raise NotApplicableError(
                "the arithmetic of the checkpoint's own code is not known here"
            )
        config = self.whole.config.to_dict() if self.model.cfg.removed else self.config
        reason = arithmetic.unsupported(config, max(map(len, self.documents)))
        if reason is not None:
            raise NotApplicableError(reason)
        return arithmetic.Arithmetic(config, self.whole.state_dict())

    @contextlib.contextmanager
    def scaled(self, layer: int, head: int, factor: float) -> Iterator[None]:
        """Within, the whole model's weights of one head's output are multiplied by a factor."""
        made = self.arithmetic
        name = made.name(layer, made.family.o) + ".weight"
        weight = self.whole.get_parameter(name)
        before = weight.data
        own = slice(head * made.d_head, (head + 1) * made.d_head)
        changed = before.clone()
        if made.family.in_out:
            changed[own] *= factor
        else:
            changed[:, own] *= factor
        weight.data = changed
        try:
            yield
        finally:
            weight.data = before

    @Once
    def heads(self) -> list[tuple[int, int]]:
        """Three heads to look at singly: in the first, the middle and the last layer."""
        there = self.model.cfg.heads()
        if not there:
            raise NotApplicableError("this model has no attention heads")
        layers, heads = self.model.cfg.n_layers, self.model.cfg.n_heads
        wanted = {(0, heads - 1), (layers // 2, 0), (layers - 1, heads // 2)}
        return sorted(wanted & set(there)) or there[:1]

    @property
    def tolerance(self) -> float:
        """Relative difference that rounding explains in the model's dtype, over one step."""
        return scores.tolerance(self.model)

    @property
    def run_tolerance(self) -> float:
        """The same over a whole run: in 16 bit, rounding grows from layer to layer."""
        return self.tolerance if self.model.dtype == torch.float32 else COARSE

    @property
    def nats(self) -> float:
        """Nats per token that rounding explains over a whole run."""
        return NATS if self.model.dtype == torch.float32 else COARSE


def wide(x: Tensor) -> np.ndarray:
    """In float64, as numpy."""
    return x.detach().cpu().double().numpy()


def gap(seen: np.ndarray, expected: np.ndarray, over: int = 1) -> float:
    """The largest difference, relative to the size of the vector that it is in.

    Args:
        seen: [..., d].
        expected: the same shape. A vector less than a thousandth of the largest counts as that
            size, so that what cancels to nearly zero is not judged by its rounding.
        over: trailing dimensions that make one vector.

    Raises:
        InterpError: they differ in shape.
    """
    if seen.shape != expected.shape:
        raise InterpError(f"a shape of {seen.shape} where {expected.shape} is expected")
    if not expected.size:
        return 0.0
    axes = tuple(range(-over, 0))
    size = np.abs(expected).max(axes)
    size = np.maximum(size, max(1e-3 * float(size.max()), 1e-12))
    return float((np.abs(seen - expected).max(axes) / size).max())


def gap_by_dimension(
    seen: np.ndarray, expected: np.ndarray, terms: Sequence[np.ndarray] = ()
) -> tuple[float, int]:
    """The largest difference, relative to the size of the dimension that it is in, and which.

    Beside a dimension that is far larger than the others, `gap` does not see these.

    Args:
        seen: [..., d].
        expected: the same shape. The size of a dimension is its largest number; less than a
            thousandth of the median counts as that, as what is nearly nothing is rounding.
        terms: what `expected` is the sum of: its rounding is that of the largest of them.

    Raises:
        InterpError: they differ in shape.
    """
    if seen.shape != expected.shape:
        raise InterpError(f"a shape of {seen.shape} where {expected.shape} is expected")
    if not expected.size:
        return 0.0, 0
    width = expected.shape[-1]
    sizes = [np.abs(x).reshape(-1, width).max(0) for x in (expected, *terms)]
    size = np.max(sizes, axis=0)
    size = np.maximum(size, max(1e-3 * float(np.median(size)), 1e-12))
    errors = np.abs(seen - expected).reshape(-1, width).max(0) / size
    worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
    return float(errors[worst]), worst


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """[pos, vocab] natural log of probabilities."""
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def mean_loss(logits: np.ndarray, ids: list[int]) -> float:
    """Mean cross-entropy of a document's tokens after the first, in nats."""
    log_p = log_softmax(logits)
    return float(-np.mean([log_p[t, token] for t, token in enumerate(ids[1:])]))

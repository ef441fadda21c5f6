"""Run a model from the middle, exactly, and read its loss off without keeping the logits.

Any change to heads is a replacement of z, the per-head attention output before W_O. Blocks before
the first changed layer hand on the output they had in the clean run, the attention of that layer
hands on W_O applied to the replacement, a parallel block's MLP its clean output; then the model
runs as always, with the changes to later layers made at their own z. Zero, mean, resample and
bias-compensated removal are data for this one function (`interventions`), for every family.

The loss is read where the unembedding stands: logits exist only for a chunk of predicted tokens at
a time, so a batch costs no [batch, pos, vocab] tensor but the clean distribution that KL needs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from interp import hooks
from interp.errors import InterpError
from interp.kernels import replaced_forward
from interp.model import Model
from interp.text import Text, TokenBatch

# Logits of one chunk, in bytes: large enough for full matmul speed, small beside the model.
CHUNK_BYTES = {"cpu": 2**27, "cuda": 2**29, "mps": 2**27}
SELF_CHECK_NATS = 1e-4

Edit = Callable[[Float[Tensor, "batch pos head d_head"]], Float[Tensor, "batch pos head d_head"]]
"""z [batch, pos, head, d_head] -> its replacement; must not write to its argument."""


@dataclass
class Scores:
    """What one forward pass says of each row of a batch.

    loss: sum over the row's predicted tokens of the cross-entropy, in nats, float64 [batch].
    kl: sum over the same tokens of KL(clean || this run), in nats; None without a reference.
    nll: the cross-entropy of every predicted token of the batch, row by row, in nats.
    """

    loss: Float64[Tensor, " batch"]
    kl: Float64[Tensor, " batch"] | None
    nll: Float[Tensor, " predicted"] | None = None


@dataclass
class Reference:
    """The clean next-token distributions of a batch, for KL."""

    probabilities: Float[Tensor, "predicted vocab"]
    negative_entropy: Float[Tensor, " predicted"]


class Reader:
    """Takes the place of the unembedding: scores predicted tokens chunk by chunk."""

    def __init__(
        self,
        model: Model,
        batch: TokenBatch,
        reference: Reference | None = None,
        keep_reference: bool = False,
    ) -> None:
        self.model, self.batch, self.reference = model, batch, reference
        self.keep_reference = keep_reference
        self.kept: Reference | None = None
        self.index = batch.predicted.flatten().nonzero()[:, 0]
        self.targets = batch.targets.flatten()[self.index]
        width = model.cfg.vocab_rows * 4
        most = max(16, CHUNK_BYTES.get(model.device.type, 2**27) // width)
        chunks = -(-len(self.index) // most)  # of even size: a short last one multiplies slowly
        self.chunk = -(-len(self.index) // max(1, chunks)) or 1
        self.unembed = _unembed(model)
        self.nll: Tensor | None = None
        self.kl: Tensor | None = None

    def __call__(
        self, hidden: Float[Tensor, "batch pos d_model"], **_: Any
    ) -> Float[Tensor, "batch pos 1"]:
        """[batch, pos, d_model] final normed hidden states; returns a stand-in for the logits."""
        self._score(hidden, self.unembed)
        return hidden[..., :1]

    def from_logits(self, logits: Float[Tensor, "batch pos vocab"]) -> None:
        """[batch, pos, vocab]: for models that change logits after the unembedding."""
        self._score(logits, lambda x: x)

    def _score(self, source: Tensor, to_logits: Callable[[Tensor], Tensor]) -> None:
        flat = source.reshape(-1, source.shape[-1])
        nll, kl = [], []
        for start in range(0, len(self.index), self.chunk):
            at = slice(start, start + self.chunk)
            logits = to_logits(flat[self.index[at]]).float()  # never memory that others read
            here = _in_place(logits)
            logp = torch.log_softmax(logits, -1, out=logits) if here else logits.log_softmax(-1)
            nll.append(-logp.gather(1, self.targets[at, None])[:, 0])
            if self.keep_reference:
                self._keep(at, logp, here)
            elif self.reference is not None:  # writes over logp, as does the line above
                cross = expected(self.reference.probabilities[at], logp, overwrite=here)
                kl.append(self.reference.negative_entropy[at] - cross)
        self.nll = torch.cat(nll)
        self.kl = torch.cat(kl) if kl else None

    def _keep(self, at: slice, logp: Float[Tensor, "token vocab"], here: bool) -> None:
        """Into memory that is there for all chunks: each copy of it would take fresh pages."""
        if self.kept is None:
            n = len(self.index)
            self.kept = Reference(logp.new_empty(n, logp.shape[1]), logp.new_empty(n))
        torch.exp(logp, out=self.kept.probabilities[at])
        self.kept.negative_entropy[at] = expected(self.kept.probabilities[at], logp, overwrite=here)

    def scores(self) -> Scores:
        """Sums over each row's tokens."""
        assert self.nll is not None, "the model never reached its unembedding"
        kl = None if self.kl is None else self._by_row(self.kl)
        return Scores(self._by_row(self.nll), kl, self.nll)

    def _by_row(self, values: Float[Tensor, " predicted"]) -> Float64[Tensor, " batch"]:
        rows = self.index // self.batch.tokens.shape[1]
        if values.device.type == "mps":  # which has no float64
            rows, values = rows.cpu(), values.cpu()
        sums = torch.zeros(len(self.batch.tokens), dtype=torch.float64, device=values.device)
        return sums.index_add(0, rows, values.double())

    def make_reference(self) -> Reference:
        """The distributions of the run just read (with keep_reference)."""
        kept = self.kept
        assert kept is not None, "the model never reached its unembedding"
        self.keep_reference, self.kept = False, None  # later runs of this reader leave it alone
        return kept


def expected(
    probabilities: Float[Tensor, "token vocab"],
    values: Float[Tensor, "token vocab"],
    *,
    overwrite: bool = False,
) -> Float[Tensor, " token"]:
    """Sum over the vocabulary of p times a value, exact enough for a difference of two of them.

    A pairwise sum: einsum adds 50,000 terms one after another, and its rounding alone biased KL by
    3.5e-6 nats (up to 9e-5 for a token). overwrite: the products may take the place of the values.
    """
    return torch.mul(probabilities, values, out=values if overwrite else None).sum(-1)


def _in_place(logits: Tensor) -> bool:
    """Whether logits are turned into log-probabilities where they stand.

    Without it every pass touches 0.8 GB of fresh pages (SmolLM2, 2,000 tokens), and the kernel's
    time for these is a tenth of the pass. CUDA's allocator reuses memory by itself.
    """
    return logits.device.type == "cpu" and not torch.is_grad_enabled()


def _unembed(model: Model) -> Callable[[Tensor], Tensor]:
    linear = model.bridge.unembed.original_component
    if type(linear) is not torch.nn.Linear:
        return linear
    # The bridge gives every unembedding a bias; adding a zero one costs a pass over the logits.
    weight, bias = linear.weight, linear.bias
    if bias is not None and not bool(bias.any()):
        bias = None

    def unembed(x: Float[Tensor, "token d_model"]) -> Float[Tensor, "token vocab"]:
        if weight.dtype != torch.float32 or not _in_place(x):
            return F.linear(x, weight, bias)
        out = model.scratch(len(x), len(weight))
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    return unembed


def forward_scores(model: Model, batch: TokenBatch, reader: Reader | None = None) -> Scores:
    """Run the model as it is now (hooks included) and score every row of the batch."""
    reader = reader or Reader(model, batch)
    unembed = model.bridge.unembed
    hooked = unembed.hook_in.has_hooks() or unembed.hook_out.has_hooks()
    if model.logits_are_unembedded and not hooked:
        with replaced_forward(unembed, reader):
            model.forward(batch)
    else:
        reader.from_logits(model.forward(batch))
    return reader.scores()


@dataclass
class Clean:
    """A run of a batch, with what a run from the middle reuses."""

    batch: TokenBatch
    scores: Scores
    reference: Reference | None
    z: list[Tensor]  # per layer [batch, pos, head, d_head], edits applied
    blocks: list[Any]  # per layer: what the block returned
    attention: list[Any]  # per layer: what the attention returned, tensors but the first dropped
    mlp: list[Any] | None  # per layer: what the MLP returned (parallel blocks only)
    reader: Reader


def run_clean(model: Model, batch: TokenBatch, *, kl: bool = False) -> Clean:
    """Run a batch as it is and keep what `run_edited` needs.

    Memory: (d_model + n_heads * d_head) floats per layer and token (with a parallel block d_model
    more), and with kl the vocabulary once per predicted token.
    """
    n = model.cfg.n_layers
    run = Clean(
        batch=batch,
        scores=Scores(torch.empty(0, dtype=torch.float64), None),
        reference=None,
        z=[torch.empty(0)] * n,
        blocks=[None] * n,
        attention=[None] * n,
        mlp=[None] * n if model.cfg.parallel else None,
        reader=Reader(model, batch, keep_reference=kl),
    )
    with _recorded(model, run):
        run.scores = forward_scores(model, batch, run.reader)
    if kl:
        run.reference = run.reader.make_reference()
    return run


@contextlib.contextmanager
def _recorded(model: Model, run: Clean, first: int = 0) -> Iterator[None]:
    """Fill a run's records from layer `first` on, as its z is once all other hooks are done."""

    def keep_z(layer: int) -> hooks.Hook:
        def keep(tensor: Tensor) -> None:
            run.z[layer] = tensor

        return keep

    def keep(store: list[Any], layer: int, shape: Callable[[Any], Any]) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            store[layer] = shape(output)

        return hook

    layers = range(first, model.cfg.n_layers)
    with contextlib.ExitStack() as stack:
        stack.enter_context(hooks.attached(model, [("z", i, keep_z(i)) for i in layers]))
        for i in layers:
            block = model.bridge.blocks[i]
            wanted = [(block, run.blocks, _same), (block.attn, run.attention, _shell)]
            if run.mlp is not None:
                wanted.append((block.mlp, run.mlp, _same))
            for module, store, shape in wanted:
                handle = module.register_forward_hook(keep(store, i, shape))
                stack.callback(handle.remove)
        yield


def run_edited(
    model: Model, clean: Clean, edits: Mapping[int, Edit], *, from_start: bool = False
) -> Scores:
    """The scores of a batch with z replaced in one or more layers.

    Args:
        model: the model that `clean` was made with.
        clean: the batch's clean run, or an edited one (`extend`) that these edits add to.
        edits: layer -> replacement of z.
        from_start: run every block again instead of reusing the clean prefix (slower; same result).

    Returns:
        Scores, with KL against the clean run where it was kept.
    """
    return _run(model, clean, edits, from_start, None)


def run_hooked(
    model: Model,
    clean: Clean,
    edits: Sequence[tuple[str, int, hooks.Hook]],
    *,
    from_start: bool = False,
) -> Scores:
    """The scores of a batch with hooks at any sites: blocks before the first of them are not run.

    Args:
        model: the model that `clean` was made with.
        clean: the batch's clean run.
        edits: (site, layer, function), as `hooks.attached` takes them.
        from_start: run every block all the same (slower; same result).

    Returns:
        Scores, with KL against the clean run where it was kept.
    """
    if not edits:
        return clean.scores
    reader = copy.copy(clean.reader)
    reader.reference = clean.reference
    first = 0 if from_start else min(layer for _, layer, _ in edits)
    with starting_at(model, first, clean.blocks[:first][-1:]), hooks.attached(model, edits):
        return forward_scores(model, clean.batch, reader)


def extend(model: Model, run: Clean, edits: Mapping[int, Edit]) -> Clean:
    """As `run_edited`, but the edited run is kept, for further edits to start from.

    Edits must hold, for every layer from the first one changed, all that is to be changed there;
    layers before it are as they were in `run`.
    """
    first = min(edits)
    kept = dataclasses.replace(
        run,
        z=list(run.z),
        blocks=list(run.blocks),
        attention=list(run.attention),
        mlp=None if run.mlp is None else list(run.mlp),
    )
    kept.z[first] = edits[first](run.z[first])
    kept.scores = _run(model, run, edits, False, kept)
    return kept


def _run(
    model: Model,
    clean: Clean,
    edits: Mapping[int, Edit],
    from_start: bool,
    record: Clean | None,
) -> Scores:
    if not edits:
        return clean.scores
    reader = copy.copy(clean.reader)
    reader.reference = clean.reference
    first = min(edits)
    hooked = sorted(edits) if from_start else sorted(set(edits) - {first})
    with contextlib.ExitStack() as stack:
        stack.enter_context(hooks.attached(model, [("z", i, edits[i]) for i in hooked]))
        if not from_start:
            stack.enter_context(starting_at(model, first, clean.blocks[:first][-1:]))
            for replacement in _edited(model, clean, first, edits[first]):
                stack.enter_context(replaced_forward(*replacement))
        if record is not None:
            # z of `first` never passes its hook point here (it is known), the later ones do.
            known = record.z[first]
            stack.enter_context(_recorded(model, record, first))
            scores = forward_scores(model, clean.batch, reader)
            record.z[first] = known
            return scores
        return forward_scores(model, clean.batch, reader)


def _edited(
    model: Model, clean: Clean, layer: int, edit: Edit
) -> Iterator[tuple[torch.nn.Module, Callable[..., Any]]]:
    """(module, forward) replacements that give `layer` an edited z, its input being the clean."""
    blocks = model.bridge.blocks

    def attention(*_args: Any, **_kwargs: Any) -> Any:
        z = edit(clean.z[layer])
        out = blocks[layer].attn.o(z.reshape(*z.shape[:2], -1))
        shell = clean.attention[layer]
        return (out, *shell) if isinstance(shell, tuple) else out

    yield blocks[layer].attn, attention
    if clean.mlp is not None:
        yield blocks[layer].mlp, _constant(clean.mlp[layer])


@contextlib.contextmanager
def remembered(model: Model, layer: int) -> Iterator[list[Any]]:
    """Keep what the block before `layer` returns; the list has it after a forward pass."""
    kept: list[Any] = []

    def keep(_module: Any, _args: Any, output: Any) -> None:
        kept[:] = [output]

    if layer == 0:
        yield kept
        return
    handle = model.bridge.blocks[layer - 1].register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


@contextlib.contextmanager
def starting_at(model: Model, layer: int, kept: list[Any]) -> Iterator[None]:
    """Let the blocks before `layer` hand on what `remembered` has kept, instead of running."""
    with contextlib.ExitStack() as stack:
        if kept:
            for block in list(model.bridge.blocks)[:layer]:
                stack.enter_context(replaced_forward(block, _constant(kept[0])))
        yield


def usable(model: Model, text: Text) -> bool:
    """Whether a run from the middle that changes nothing gives the clean losses back.

    Asked once per model, on two documents. Holds for every family that interp is tested on; a
    block that does more to its attention's output than the bridge shows would fail here, and is
    then run from the start.
    """
    if model.splices is None:
        batch = text.batch_of([(i, 0) for i in range(min(2, len(text)))], model.device)
        clean = run_clean(model, batch)
        last = model.cfg.n_layers - 1
        gaps = [
            run_edited(model, clean, {layer: lambda z: z}).loss - clean.scores.loss
            for layer in sorted({0, last // 2, last})
        ]
        model.splices = max(float(gap.abs().max()) for gap in gaps) <= SELF_CHECK_NATS
    return model.splices


def check_finite(values: Tensor, what: str) -> None:
    """Stop with a message on NaN or infinity."""
    if not bool(torch.isfinite(values).all()):
        raise InterpError(
            f"The model gave a non-finite {what}. Check its weights, or use --dtype float32."
        )


def _same(output: Any) -> Any:
    return output


def _shell(output: Any) -> Any:
    """A tuple's rest without its tensors (attention patterns are large), or None for a tensor."""
    if not isinstance(output, tuple):
        return None
    return tuple(None if isinstance(part, Tensor) else part for part in output[1:])


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value

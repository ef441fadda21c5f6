"""Load a decoder through TransformerBridge, raw weights, and state its architecture as data.

The only module that imports transformer_lens. Weights are never folded or centred. A model is
loaded by plain transformers from a local folder (see `checkpoint`; `names` finds it, `dequantise`
makes one of a GGUF file), wrapped by the bridge, and then believed only after the bridge has given
the same logits as plain transformers (see `probe`).
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from interp import checkpoint, dequantise, kernels, names, probe, pruning
from interp.errors import InterpError
from interp.hub import code_digests

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Facts:
    """What a model is, as numbers: measured on the loaded modules wherever they can tell."""

    family: str  # the checkpoint's model_type: gpt2, gpt_neox, llama, ...
    n_layers: int
    n_heads: int  # query heads per layer; 0 in a model without attention
    n_kv_heads: int  # key/value heads per layer; query head h reads h // (n_heads // n_kv_heads)
    d_model: int
    d_head: int
    d_mlp: int  # coefficients of one MLP; 0 where it is not one number (experts, no MLP)
    gated: bool  # act(gate) * up, as in SwiGLU
    parallel: bool  # attention and MLP read the same residual; there is no resid_mid
    rotary_fraction: float  # share of d_head that is rotated, by the config; 0 without rotation
    norm: str  # LN or RMS
    tied: bool  # unembedding shares the embedding's weights
    vocab_size: int  # ids that the tokenizer can produce; padded rows are not counted
    vocab_rows: int  # rows of the embedding matrix, padding included
    n_ctx: int  # longest context the model takes
    # (layer, query head) of those cut out of the checkpoint: zeros here, absent from every table.
    removed: tuple[tuple[int, int], ...] = ()

    def heads(self) -> list[tuple[int, int]]:
        """(layer, query head) of every head that is there, ascending."""
        gone = set(self.removed)
        every = ((i, h) for i in range(self.n_layers) for h in range(self.n_heads))
        return [head for head in every if head not in gone]


@dataclass(repr=False)
class Model:
    """A loaded decoder: facts, bridge and the checkpoint's own tokenizer."""

    cfg: Facts
    bridge: Any  # transformer_lens.model_bridge.TransformerBridge
    tokenizer: Any  # transformers tokenizer, as the checkpoint has it; None if there is none
    name: str
    source: str
    revision: str | None
    folder: Path  # the checkpoint that was loaded (of a GGUF file, its dequantised copy)
    device: torch.device
    dtype: torch.dtype
    notices: list[str] = field(default_factory=list)
    gguf: Path | None = None  # the file that the checkpoint was dequantised from
    # Python files that came with the checkpoint and ran, with their sha256; {} but where asked for.
    remote_code: dict[str, str] = field(default_factory=dict)
    bos_token_id: int | None = None  # overrides the tokenizer's, where set
    bos_default: bool | None = None  # overrides what plain tokenizer(text) does, where set
    # Nothing happens to the logits after the unembedding (no soft cap, no scale): measured.
    logits_are_unembedded: bool = True
    # What attention layers are made of, if fused attention gave the same logits and z: measured
    # when the model was loaded. None: attention is always written out.
    attention: list[Any] | None = field(default=None, repr=False)
    # A run from the middle gives the clean losses: measured by splice.usable when first needed.
    splices: bool | None = None
    _scratch: torch.Tensor | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        cfg = self.cfg
        return (
            f"Model({self.name!r}: {cfg.family}, {cfg.n_layers} layers, {cfg.n_heads} heads, "
            f"{cfg.n_kv_heads} KV heads, d_model {cfg.d_model}, d_mlp {cfg.d_mlp}, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device})"
        )

    def describe(self) -> dict[str, Any]:
        """The `model` entry of result.json."""
        facts = asdict(self.cfg)
        return {
            "name": self.name,
            "source": self.source,
            "revision": self.revision,
            **facts,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            **({"remote_code": dict(self.remote_code)} if self.remote_code else {}),
        }

    def scratch(self, rows: int, columns: int) -> torch.Tensor:
        """Float32 [rows, columns] on the CPU whose contents the next call may overwrite."""
        if self._scratch is None or self._scratch.numel() < rows * columns:
            self._scratch = torch.empty(rows * columns)
        return self._scratch[: rows * columns].view(rows, columns)

    def kv_head(self, head: int) -> int:
        """The key/value head that query head `head` reads."""
        return head // (self.cfg.n_heads // self.cfg.n_kv_heads)

    @property
    def fuses(self) -> bool:
        """Whether attention can be one kernel, where nothing inside it is hooked."""
        return self.attention is not None

    def hook_point(self, name: str) -> Any:
        """The bridge's HookPoint of that name, or None."""
        return self.bridge.get_hook_point(name)

    @contextlib.contextmanager
    def measuring(self, *, fused: bool = False) -> Iterator[None]:
        """Eval mode, no gradients to parameters, no autograd; all as before afterwards.

        Activations that transformers writes out step by step run as torch's kernel of the same
        function (`kernels`; they differ by float32 rounding, about 2e-7).

        Holds also after an exception or Ctrl-C. Inside, `torch.enable_grad()` gives gradients
        with respect to activations, even when the caller is in `torch.no_grad()` or
        `torch.inference_mode()`.

        Args:
            fused: attention runs as one kernel too where nothing inside it is hooked, as in all
                analyses. For code that leaves the model's modules alone: `kernels` says how far.
        """
        module = self.bridge.original_model
        training = [(m, m.training) for m in {*module.modules(), *self.bridge.modules()}]
        wanted = [(p, p.requires_grad) for p in module.parameters()]
        with torch.inference_mode(False), torch.no_grad(), contextlib.ExitStack() as stack:
            try:
                stack.enter_context(kernels.fast_activations(module))
                if fused and self.attention is not None:
                    stack.enter_context(kernels.fused_attention(self.bridge, self.attention))
                for part, _ in training:
                    part.training = False
                for parameter, _ in wanted:
                    parameter.requires_grad_(False)
                yield
            finally:
                self._scratch = None
                for part, mode in training:
                    part.training = mode
                for parameter, requires in wanted:
                    parameter.requires_grad_(requires)

    def forward(self, batch: Any) -> torch.Tensor:
        """Logits of a TokenBatch (or whatever the unembedding currently hands on).

        Args:
            batch: has `.tokens` and `.attention_mask`, both [batch, pos], on the model's device.
        """
        return self.bridge(batch.tokens, attention_mask=batch.attention_mask, use_cache=False)


def pick_device(device: str) -> torch.device:
    """`auto` is cuda, then mps, then cpu; anything else must be there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InterpError(
            f"Unknown device {device!r}. Give auto, cpu, cuda, cuda:1 or mps."
        ) from None
    if chosen.type == "cuda" and (
        not torch.cuda.is_available() or (chosen.index or 0) >= torch.cuda.device_count()
    ):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise InterpError(f"Device {device!r} is not here: torch sees {count} CUDA devices.")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise InterpError("Device 'mps' is not here: torch was built without it or finds no GPU.")
    return chosen


def load_model(
    name: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
    offline: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Model:
    """Load a decoder for measuring.

    Args:
        name: a short name (`gpt2`, `pythia-70m`, `smollm2-135m`), a hub id, a checkpoint folder or
            a .gguf file. None: gpt2 where it is cached or the hub answers within 3 seconds, else
            the embedded smollm2-135m, with a notice.
        revision: branch, tag or commit of a hub model (Pythia: `step1000`).
        device: auto, cpu, cuda, cuda:1 or mps.
        dtype: float32, bfloat16 or float16.
        offline: never ask the hub or the package index.
        allow_pickle: also read `.bin` weights (pickles can run code; off by default).
        trust_remote_code: run Python code that comes with the checkpoint (off by default: it can do
            whatever you can). The bridge must know a class that the model's class is made of.

    Returns:
        The model, in eval mode.

    Raises:
        InterpError: with what is wrong and what to do, for anything that cannot be loaded right.
    """
    if dtype not in DTYPES:
        raise InterpError(f"Unknown dtype {dtype!r}. Give one of {', '.join(DTYPES)}.")
    chosen = pick_device(device)
    trusted: Any = {"allow_pickle": allow_pickle, "trust_remote_code": trust_remote_code}
    found = names.resolve(name, revision=revision, offline=offline, **trusted)
    return load_found(found, chosen, DTYPES[dtype], **trusted)


def load_found(
    found: names.Found,
    device: torch.device,
    dtype: torch.dtype,
    *,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    refuse: probe.Refuse = probe.refuse,
) -> Model:
    """Load what a name was found to mean.

    Args:
        found: from `names.resolve`.
        device: that is there.
        dtype: of weights and activations.
        allow_pickle: also read `.bin` weights.
        trust_remote_code: run Python code that comes with the checkpoint.
        refuse: what is done with a model that fails a check (`interp doctor` looks on; nobody else
            should).

    Raises:
        InterpError: as `load_model`.
    """
    # Weights that are made within torch.inference_mode() could never be measured outside of it.
    with torch.inference_mode(False):
        folder, notices = found.path, found.notices
        if folder.is_file():
            folder, more = dequantise.folder_of(folder)
            notices = [*notices, *more]
        hf_model, tokenizer, more = checkpoint.load(
            folder, found.name, dtype, allow_pickle, trust_remote_code=trust_remote_code
        )
        try:
            hf_model = hf_model.to(device)
        except RuntimeError as error:  # out of memory, above all
            raise InterpError(
                f"{found.name!r} does not fit on {device}: {checkpoint.first_line(error)}"
            ) from error
        model = _bridge(hf_model, tokenizer, device, found, folder, refuse)
        model.gguf = found.path if folder != found.path else None
        model.remote_code = code_digests(folder) if trust_remote_code else {}
    model.notices = [*notices, *more]
    return model


def untrained(model: Model, seed: int) -> Model:
    """A model of the same shape with the weights that training starts from: a null model.

    Args:
        model: whose architecture, tokenizer, device and dtype.
        seed: of the weights; torch's own random state is left as it was.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.bridge.original_model.config)
    if hasattr(config, pruning.KEY):
        delattr(config, pruning.KEY)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]), checkpoint.quiet():
        torch.manual_seed(seed)
        fresh = AutoModelForCausalLM.from_config(
            config,
            dtype=model.dtype,
            attn_implementation="eager",
            trust_remote_code=bool(model.remote_code),
        )
        found = names.Found(
            f"untrained {model.name}",
            model.folder,
            source=model.source,
            bos_token_id=model.bos_token_id,
            bos_default=model.bos_default,
        )
        return _bridge(
            fresh.to(model.device).eval(), model.tokenizer, model.device, found, model.folder
        )


def _bridge(
    hf_model: Any,
    tokenizer: Any,
    device: torch.device,
    found: names.Found,
    folder: Path,
    refuse: probe.Refuse = probe.refuse,
) -> Model:
    """Wrap, compare with plain transformers on a probe, and state the facts."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    config, kind = hf_model.config, _architecture(hf_model)
    embedding = unembedding = None
    with contextlib.suppress(NotImplementedError):  # of a class that transformers does not have
        embedding, unembedding = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()
    if embedding is None or unembedding is None:
        raise InterpError(f"{found.name!r} ({kind}) has no token embedding or no unembedding.")
    rows = embedding.weight.shape[0]
    tied = unembedding.weight is embedding.weight
    ids, mask = probe.tokens(rows, getattr(config, "max_position_embeddings", None), device)
    plain = probe.plain_logits(hf_model, ids, mask, found.name, refuse)
    try:
        with checkpoint.quiet():
            bridge = build_bridge_from_module(
                hf_model,
                kind,
                hf_config=copy.deepcopy(config),
                tokenizer=copy.deepcopy(tokenizer),
                device=device,
                model_name=found.name,
            )
    except Exception as error:
        raise InterpError(
            f"TransformerBridge does not support {kind} ({found.name!r}): "
            f"{checkpoint.first_line(error)}"
        ) from error
    attention = kernels.as_built(bridge) if kernels.can_fuse(hf_model, device) else None
    measured = probe.measure(bridge, plain, ids, mask, found.name, refuse, attention)
    cut = pruning.of_config(config)
    text = cut.text if cut is not None else {}
    return Model(
        cfg=_facts(bridge.cfg, config, tokenizer, measured, rows, tied),
        bridge=bridge.eval(),
        tokenizer=tokenizer,
        name=found.name,
        source=found.source,
        revision=found.revision,
        folder=folder,
        device=device,
        dtype=next(hf_model.parameters()).dtype,
        bos_token_id=text.get("bos_token_id", found.bos_token_id),
        bos_default=text.get("bos_default", found.bos_default),
        logits_are_unembedded=measured.logits_are_unembedded,
        attention=attention if measured.fuses else None,
    )


def _architecture(hf_model: Any) -> str:
    """The class of transformers that the bridge is to take a model for.

    Its own; where that came with the checkpoint, the first one that it is made of and that the
    bridge knows. Whether the bridge then computes what the model does, `probe` measures.
    """
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

    kinds = [kind.__name__ for kind in type(hf_model).__mro__]
    if type(hf_model).__module__.startswith("transformers_modules."):
        return next((kind for kind in kinds if kind in SUPPORTED_ARCHITECTURES), kinds[0])
    return kinds[0]


def _facts(
    cfg: Any, config: Any, tokenizer: Any, measured: probe.Measured, rows: int, tied: bool
) -> Facts:
    heads, d_head = measured.n_heads or 0, measured.d_head or 0
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    real = min(max(vocabulary.values()) + 1, rows) if vocabulary else rows
    parallel, gated = measured.parallel, measured.gated
    cut = pruning.of_config(config)
    return Facts(
        family=config.model_type,
        n_layers=int(cfg.n_layers),
        n_heads=heads,
        n_kv_heads=measured.n_kv_heads or heads,
        d_model=int(cfg.d_model),
        d_head=d_head,
        d_mlp=measured.d_mlp or 0,
        gated=bool(cfg.gated_mlp) if gated is None else gated,
        parallel=bool(getattr(cfg, "parallel_attn_mlp", False)) if parallel is None else parallel,
        rotary_fraction=_rotary_fraction(cfg, config, d_head),
        norm=str(cfg.normalization_type),
        tied=tied,
        vocab_size=real,
        vocab_rows=rows,
        n_ctx=int(cfg.n_ctx),
        removed=tuple(cut.heads()) if cut is not None else (),
    )


def _rotary_fraction(cfg: Any, config: Any, d_head: int) -> float:
    from transformer_lens.utilities.hf_utils import get_rotary_pct_from_config

    if getattr(cfg, "positional_embedding_type", None) != "rotary" or not d_head:
        return 0.0
    width = getattr(config, "rotary_dim", None)  # GPT-J states the width, not the share
    return float(width / d_head if width else get_rotary_pct_from_config(config))

"""Progress bars on stderr, and how many rows go through the model at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from interp.model import Model
    from interp.text import Text, TokenBatch

# Tokens of a batch: enough to keep the device busy, little enough to stay out of its way.
BATCH_TOKENS = {"cpu": 2048, "cuda": 32768, "mps": 8192}
# Bytes that what a batch keeps may take: caches and clean distributions, or a whole backward graph.
KEPT_BYTES = 2**30
GRAPH_BYTES = 2**32
CUDA_SHARE = {False: 0.3, True: 0.6}  # of the memory that is free, without and with a graph


def track(total: int | None, what: str, shown: bool) -> Any:
    """A tqdm bar over `total` units of work (None: unknown); `.update(n)` and `.close()`."""
    from tqdm import tqdm

    return tqdm(
        total=total, desc=what, disable=not shown, mininterval=0.5, delay=1.0, dynamic_ncols=True
    )


def batch_rows(
    model: Model, text: Text, batch_size: int | Literal["auto"], *, graph: bool = False
) -> int:
    """Rows per forward pass: as asked, or what fits the device's budget.

    Args:
        model: what runs.
        text: whose longest row counts.
        batch_size: rows, or auto.
        graph: a backward pass follows, so that every layer's activations stay.
    """
    if batch_size != "auto":
        return batch_size
    cfg, kind = model.cfg, model.device.type
    longest = max(len(w) for d in text.documents for w in d.windows)
    # Floats per token: the vocabulary's distribution, and what each layer leaves behind.
    kept = cfg.vocab_rows + cfg.n_layers * (2 * cfg.d_model + cfg.n_heads * cfg.d_head)
    if graph:
        per_layer = 10 * cfg.d_model + 4 * cfg.d_mlp + 3 * cfg.n_heads * longest
        kept = 2 * cfg.vocab_rows + cfg.n_layers * per_layer
    budget = GRAPH_BYTES if graph else KEPT_BYTES
    if kind == "cuda":
        budget = int(torch.cuda.mem_get_info(model.device)[0] * CUDA_SHARE[graph])
    tokens = min(BATCH_TOKENS.get(kind, 2048), budget // (4 * kept))
    return max(1, tokens // longest)


def batches(
    model: Model, text: Text, batch_size: int | Literal["auto"], *, graph: bool = False
) -> Iterator[TokenBatch]:
    """The text's batches on the model's device."""
    return text.batches(batch_rows(model, text, batch_size, graph=graph), model.device)

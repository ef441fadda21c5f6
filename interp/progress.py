"""Progress bars on stderr, and the size of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from interp.model import Model
    from interp.text import Text

# Tokens of a batch: enough to keep the device busy, little enough to stay out of its way.
BATCH_TOKENS = {"cpu": 2048, "cuda": 32768, "mps": 8192}
# Memory that a batch's caches may take: the clean distributions above all.
BATCH_BYTES = {"cpu": 2**30, "cuda": 2**33, "mps": 2**31}


def track(total: int | None, what: str, shown: bool) -> Any:
    """A tqdm bar over `total` units of work (None: unknown); `.update(n)` and `.close()`."""
    from tqdm import tqdm

    return tqdm(
        total=total, desc=what, disable=not shown, mininterval=0.5, delay=1.0, dynamic_ncols=True
    )


def batch_rows(model: Model, text: Text, batch_size: int | Literal["auto"]) -> int:
    """Rows per forward pass: as asked, or what fits the device's budget."""
    if batch_size != "auto":
        return batch_size
    cfg, kind = model.cfg, model.device.type
    longest = max(len(w) for d in text.documents for w in d.windows)
    kept = cfg.vocab_rows + cfg.n_layers * (2 * cfg.d_model + cfg.n_heads * cfg.d_head)
    tokens = min(BATCH_TOKENS.get(kind, 2048), BATCH_BYTES.get(kind, 2**30) // (4 * kept))
    return max(1, tokens // longest)


def batches(model: Model, text: Text, batch_size: int | Literal["auto"]) -> Iterator[Any]:
    """The text's batches on the model's device."""
    return text.batches(batch_rows(model, text, batch_size), model.device)

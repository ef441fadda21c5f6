"""MLP outputs at included positions, as a stream that is the same each time it is read.

`Windows` is the training text: whole documents cut into windows, in a seeded random order of the
documents. `Stream` numbers their included positions 0, 1, ... and hands out block b, positions
[b * block, (b + 1) * block), whatever was asked for before and however many windows go through the
model at once: a run that was killed takes up at any block. Blocks bound the memory, and are what is
shuffled in. `judged` goes through a text batch by batch, with what a reader wants to know of each
position.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from interp import hooks
from interp.errors import InterpError
from interp.journal import Stage
from interp.model import Model
from interp.progress import BATCH_TOKENS
from interp.text import Text, TokenBatch, padded

SITE = "mlp_out"
BLOCK_TOKENS = 32_768
BLOCK_BYTES = 2**28
CACHE_BYTES = 2**35  # 32 GiB: a cache is refused beyond, and where it would fill the disk
CACHE_SHARE = 0.8  # of the free disk


@dataclass(frozen=True)
class Windows:
    """Windows of tokens to train on, in training order.

    ids: BOS included where the text has it.
    included: [window] how many included positions each has.
    documents: how many documents they are of.
    asked: positions asked for.
    special_ids: ids that are never included positions.
    """

    ids: list[np.ndarray]
    included: np.ndarray
    documents: int
    asked: int
    special_ids: frozenset[int]

    @property
    def tokens(self) -> int:
        """Included positions, at most those asked for."""
        return min(int(self.included.sum()), self.asked)

    @property
    def sha256(self) -> str:
        """Of the tokens and where windows end."""
        digest = hashlib.sha256()
        for window in self.ids:
            digest.update(len(window).to_bytes(4, "big") + window.astype("<i4").tobytes())
        return digest.hexdigest()

    @classmethod
    def of(cls, text: Text, tokens: int) -> Windows:
        """The documents that the text's sample has not, until they have this many positions.

        Raises:
            InterpError: there are none.
        """
        special = np.array(sorted(text.special_ids))
        ids: list[np.ndarray] = []
        included: list[int] = []
        documents = so_far = 0
        for document in text.rest():
            documents += 1
            for window in document.windows:
                ids.append(np.asarray(window, dtype=np.int32))
                included.append(int((~np.isin(ids[-1][1:], special)).sum()))
                so_far += included[-1]
            if so_far >= tokens:
                break
        if not so_far:
            raise InterpError(
                f"No document of {text.source} is left to train on: all are among those judged. "
                "Ask for fewer --documents or give more data."
            )
        return cls(ids, np.array(included), documents, tokens, text.special_ids)


def mlp_out(
    model: Model, layer: int, batch: TokenBatch, neurons: bool = False
) -> tuple[Float[Tensor, "batch pos d_model"], Float[Tensor, "batch pos d_mlp"] | None]:
    """The layer's MLP output and, where asked for, its neurons' activations.

    The model stops there. Neurons are what enters W_out: act(pre), or act(gate) * up.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str) -> hooks.Hook:
        def hook(tensor: Tensor) -> None:
            found[name] = tensor

        return hook

    names = ("mlp_post", SITE) if neurons else (SITE,)
    hooks.run_through(model, batch, [(name, layer, keep(name)) for name in names])
    return found[SITE], found.get("mlp_post")


def expect_finite(x: Tensor) -> None:
    """Stop with a message on NaN or infinity.

    Raises:
        InterpError: see above.
    """
    if not bool(torch.isfinite(x).all()):
        raise InterpError(
            "The MLP's output is not finite at an included position. Check the model's weights, or "
            "use --dtype float32."
        )


@dataclass(frozen=True)
class Piece:
    """Windows [first, last), for one forward pass; which of their included positions are asked for.

    wanted: counted from the first included position of the first window.
    """

    first: int
    last: int
    wanted: slice


class Stream:
    """The MLP outputs of a training text, position by position.

    Args:
        model: inside `model.measuring()` when it is read.
        layer: whose MLP.
        windows: the text.
        multiple: blocks are a multiple of this, so that training batches fit.
        batch_size: windows per forward pass where they fit, or auto.
        cache: where activations are kept and read back; None: nowhere.

    Attributes:
        rows: windows per forward pass where they fit.
    """

    def __init__(
        self,
        model: Model,
        layer: int,
        windows: Windows,
        multiple: int,
        batch_size: int | Literal["auto"] = "auto",
        cache: Cache | None = None,
    ) -> None:
        self.model, self.layer, self.windows, self.cache = model, layer, windows, cache
        self.d_model = model.cfg.d_model
        most = min(BLOCK_TOKENS, BLOCK_BYTES // (4 * self.d_model))
        self.block_tokens = max(1, most // multiple) * multiple
        self.tokens = windows.tokens // multiple * multiple
        self.ends = np.cumsum(windows.included)
        longest = max(map(len, windows.ids))
        budget = BATCH_TOKENS.get(model.device.type, 2048)
        self.rows = max(1, budget // longest) if batch_size == "auto" else batch_size

    @property
    def blocks(self) -> int:
        """How many there are; the last may be shorter."""
        return -(-self.tokens // self.block_tokens)

    def span(self, block: int) -> tuple[int, int]:
        """The positions of a block."""
        start = block * self.block_tokens
        return start, min(start + self.block_tokens, self.tokens)

    def sized(self, stage: Stage) -> int:
        """Windows per forward pass of a stage, which has fewer where the memory ran out."""
        return stage.size(self.rows, len(self.ends))

    def block(
        self, block: int, rows: int, seen: Callable[[int], None] = lambda n: None
    ) -> Float[Tensor, "token d_model"]:
        """Float32 MLP outputs of a block, in the order of the text, on the model's device."""
        return self.read(*self.span(block), rows, seen)

    def read(
        self, start: int, stop: int, rows: int, seen: Callable[[int], None] = lambda n: None
    ) -> Float[Tensor, "token d_model"]:
        """Float32 MLP outputs of positions [start, stop).

        Args:
            start: first position.
            stop: after the last one.
            rows: windows per forward pass.
            seen: called with how many positions are there, as they come.
        """
        if self.cache is not None and (kept := self.cache.read(start, stop)) is not None:
            seen(stop - start)
            return torch.from_numpy(kept).to(self.model.device)
        # Whole from the start: parts that are put together are there twice.
        out = torch.empty(stop - start, self.d_model, device=self.model.device)
        done = 0
        for piece in self.pieces(start, stop, rows):
            x, _ = self.run(piece)
            out[done : done + len(x)] = x
            done += len(x)
            seen(len(x))
        assert done == len(out), "positions are missing"
        if self.cache is not None:
            self.cache.write(start, out.cpu().numpy())
        return out

    def pieces(self, start: int, stop: int, rows: int) -> Iterator[Piece]:
        """What positions [start, stop) are run in, at most `rows` windows at once."""
        window = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            upto = min(window + rows, len(self.ends))
            at = int(self.ends[window - 1]) if window else 0  # first position of this piece
            yield Piece(window, upto, slice(start - at, stop - at))
            start, window = int(self.ends[upto - 1]), upto

    def run(
        self, piece: Piece, neurons: bool = False
    ) -> tuple[Float[Tensor, "token d_model"], Float[Tensor, "token d_mlp"] | None]:
        """A piece's MLP outputs (and neurons), from the model."""
        batch = self._batch(piece.first, piece.last)
        x, a = mlp_out(self.model, self.layer, batch, neurons)
        x = x[batch.included][piece.wanted].float()
        expect_finite(x)
        return x, None if a is None else a[batch.included][piece.wanted].float()

    def _batch(self, first: int, last: int) -> TokenBatch:
        number = torch.arange(first, last)
        ids: list[Any] = [window.tolist() for window in self.windows.ids[first:last]]
        batch = padded(ids, self.windows.special_ids, number, torch.zeros_like(number))
        return batch.to(self.model.device)


@dataclass(frozen=True)
class Tokens:
    """The included positions of one batch of a text, in its order.

    x: their MLP outputs, float32.
    neurons: what enters W_out there, float32; None where not asked for.
    document: the document's place in the Text.
    index: the document's place in the source.
    window, position: which of its windows; which token of that, BOS counted.
    token_id: the token there.
    batch: all of the rows.
    """

    x: Float[Tensor, "token d_model"]
    neurons: Float[Tensor, "token d_mlp"] | None
    document: Int64[Tensor, " token"]
    index: Int64[Tensor, " token"]
    window: Int64[Tensor, " token"]
    position: Int64[Tensor, " token"]
    token_id: Int64[Tensor, " token"]
    batch: TokenBatch


def judged(
    model: Model,
    layer: int,
    text: Text,
    batches: Iterable[TokenBatch],
    neurons: bool = False,
) -> Iterator[Tokens]:
    """A text's included positions, batch by batch; the model stops after the layer.

    Args:
        model: inside `model.measuring()`.
        layer: whose MLP.
        text: what to go through.
        batches: of the text, on the model's device.
        neurons: whether the neurons are wanted too.
    """
    index = torch.tensor([document.index for document in text.documents])
    for batch in batches:
        x, a = mlp_out(model, layer, batch, neurons)
        at = batch.included
        row, position = at.nonzero(as_tuple=True)
        kept = x[at].float()
        expect_finite(kept)
        yield Tokens(
            x=kept,
            neurons=None if a is None else a[at].float(),
            document=batch.rows[row],
            index=index.to(row.device)[batch.rows[row]],
            window=batch.window[row],
            position=position,
            token_id=batch.tokens[at],
            batch=batch,
        )


# On disk ------------------------------------------------------------------------------------------


class Cache:
    """Activations of one stream in a file, memory-mapped; filled from the start, as they come.

    Args:
        folder: where caches lie; made if missing.
        what: all that the activations depend on; another `what` is another file.
        shape: (positions, d_model) of the whole stream.

    Raises:
        InterpError: it would be larger than CACHE_BYTES or most of the free disk, or the folder
            cannot be written.
    """

    def __init__(self, folder: Path, what: dict[str, Any], shape: tuple[int, int]) -> None:
        text = json.dumps(what, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.shape, self.bytes = shape, 4 * shape[0] * shape[1]
        self.file = folder.expanduser() / f"{name}.f32"
        self.state = self.file.with_suffix(".json")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._expect_room()
            self.done = self._done(what)
            if self.done == 0:
                # Another process may have begun to fill it: what is there stays.
                with self.file.open("ab") as file:
                    file.truncate(self.bytes)
                self.what = what
                self._say(0)
        except OSError as error:
            raise InterpError(
                f"--activations-cache {folder} cannot be written: {error.strerror or error}."
            ) from error
        self.what = what
        self.map = np.memmap(self.file, dtype=np.float32, mode="r+", shape=shape)

    def _expect_room(self) -> None:
        have = self.file.stat().st_size if self.file.exists() else 0
        free = shutil.disk_usage(self.file.parent).free
        most = min(CACHE_BYTES, have + int(CACHE_SHARE * free))
        if self.bytes > most:
            raise InterpError(
                f"The activations take {self.bytes / 1e9:.1f} GB, and --activations-cache holds at "
                f"most {most / 1e9:.1f} GB here. Ask for fewer --train-tokens, or leave it out."
            )

    def _done(self, what: dict[str, Any]) -> int:
        try:
            found = json.loads(self.state.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0
        whole = self.file.exists() and self.file.stat().st_size == self.bytes
        return int(found["done"]) if whole and found["what"] == what else 0

    def _say(self, done: int) -> None:
        new = self.state.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps({"what": self.what, "done": done}), encoding="utf-8")
        os.replace(new, self.state)
        self.done = done

    def read(self, start: int, stop: int) -> np.ndarray | None:
        """[token, d_model] a copy of what is kept; None where it is not all there."""
        return np.array(self.map[start:stop]) if stop <= self.done else None

    def write(self, start: int, values: np.ndarray) -> None:
        """Keep values from `start` on; what would leave a gap is not kept."""
        stop = start + len(values)
        if start > self.done or stop <= self.done:
            return
        self.map[start:stop] = values
        self.map.flush()
        self._say(stop)

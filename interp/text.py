"""Documents to tokens: the sample, BOS, context, and the masks that every number depends on.

The document is the unit of every interval, so what makes one is fixed here: which rows are usable,
which are drawn, where they are cut, which positions a statistic may use. Tokens are held as plain
lists and padded only in a batch: what a document becomes never depends on its neighbours.
"""

import functools
import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from interp.encoding import Document, make_encoder
from interp.errors import InterpError, UsageError
from interp.model import Model
from interp.sampling import CHUNK, Pool, make_pool
from interp.sources import Source, read_source

PAD = 0
"""Id at padded positions: a row that every embedding has. Nothing reads what comes of it."""


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded rows of tokens, each a document (or one of its windows)."""

    tokens: Int64[Tensor, "batch pos"]
    """Token ids, 0 where padded."""
    mask: Bool[Tensor, "batch pos"]
    """Real tokens."""
    included: Bool[Tensor, "batch pos"]
    """The included positions: real, not special, not the row's first real position."""
    rows: Int64[Tensor, " batch"]
    """The document's place in the Text, counted from 0. Windows of one document share it."""
    window: Int64[Tensor, " batch"]
    """Which of its document's windows each row is, counted from 0."""

    @property
    def attention_mask(self) -> Int64[Tensor, "batch pos"]:
        """The mask as transformers wants it."""
        return self.mask.long()

    @property
    def position_ids(self) -> Int64[Tensor, "batch pos"]:
        """Positions counted from 0 over real tokens; padding repeats the last one."""
        return (self.mask.long().cumsum(dim=-1) - 1).clamp(min=0)

    @property
    def predicted(self) -> Bool[Tensor, "batch pos"]:
        """True at t where token t + 1 is real: the positions whose logits have a target."""
        ahead = self.mask.roll(-1, dims=-1)
        ahead[:, -1] = False
        return ahead

    @property
    def targets(self) -> Int64[Tensor, "batch pos"]:
        """The next token at each position. Meaningless (but a valid id) where not `predicted`."""
        return self.tokens.roll(-1, dims=-1)

    def to(self, device: str | torch.device) -> "TokenBatch":
        """The same batch on a device."""
        parts = (self.tokens, self.mask, self.included, self.rows, self.window)
        # Pinned, so that nobody waits for the copy.
        if torch.device(device).type == "cuda" and self.tokens.device.type == "cpu":
            return TokenBatch(*(x.pin_memory().to(device, non_blocking=True) for x in parts))
        return TokenBatch(*(x.to(device) for x in parts))


@dataclass(frozen=True, repr=False)
class Text:
    """A sample of tokenised documents, in source order. Made by `load_text`."""

    documents: list[Document]
    skipped: int
    """Blank rows of the source, and those drawn that were too short or had nothing to measure."""
    part: str
    """"sample", "held_out" or "subset"."""
    notices: list[str]
    pool: Pool
    next: int
    """Where in the pool's order the documents that were not drawn start."""

    def __len__(self) -> int:
        return len(self.documents)

    def __repr__(self) -> str:
        return f"Text({self.source!r}: {len(self)} documents, {self.tokens} tokens, {self.part})"

    @property
    def source(self) -> str:
        """The source's name as it was given."""
        return self.pool.source

    @property
    def context(self) -> int:
        """Most tokens of a window, BOS included."""
        return self.pool.encoder.context

    @property
    def bos(self) -> bool:
        """Whether every window starts with BOS."""
        return self.bos_id is not None

    @property
    def bos_id(self) -> int | None:
        """The BOS in use; 0 is a valid one."""
        return self.pool.encoder.bos_id

    @property
    def seed(self) -> int:
        """Of the sample."""
        return self.pool.seed

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are never included positions: the tokenizer's special tokens and the BOS."""
        return self.pool.encoder.special_ids

    @property
    def duplicates(self) -> int:
        """Rows of the source that repeat an earlier one exactly, dropped before the draw."""
        return self.pool.duplicates

    @property
    def truncated(self) -> int:
        """Documents that lost tokens to the context."""
        return sum(document.truncated for document in self.documents)

    @property
    def tokens(self) -> int:
        """Real tokens, BOS included."""
        return sum(len(window) for document in self.documents for window in document.windows)

    @property
    def predicted_tokens(self) -> int:
        """Tokens that the loss is over: all but the first of each window."""
        return sum(len(window) - 1 for document in self.documents for window in document.windows)

    @functools.cached_property
    def sha256(self) -> str:
        """Of the documents' text (before tokenising) and their boundaries."""
        digest = hashlib.sha256()
        for document in self.documents:
            encoded = document.text.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """The "data" entry of result.json."""
        encoder = self.pool.encoder
        return {
            "source": self.source,
            "documents": len(self),
            "tokens": self.tokens,
            "predicted_tokens": self.predicted_tokens,
            "context": self.context,
            "bos": self.bos,
            "bos_id": self.bos_id,
            "truncated_documents": self.truncated,
            "skipped_documents": self.skipped,
            "duplicate_documents": self.duplicates,
            "distinct_documents": len(self.pool.candidates),
            "min_tokens": encoder.min_tokens,
            "windows": encoder.windows,
            "literal_special_tokens": "text",
            "text_column": self.pool.column,
            "part": self.part,
            "seed": self.seed,
            "sha256": self.sha256,
        }

    def batches(self, batch_size: int, device: str | torch.device = "cpu") -> Iterator[TokenBatch]:
        """Batches of at most `batch_size` rows, in document order, padded to their longest row.

        With windows, one document's rows may lie in several batches: sum over `rows` first, then
        take means and absolute values.
        """
        _check("batch_size", batch_size, 1)
        places = [
            (i, j)
            for i, document in enumerate(self.documents)
            for j in range(len(document.windows))
        ]
        cuts = (places[i : i + batch_size] for i in range(0, len(places), batch_size))
        return (self.batch_of(cut, device) for cut in cuts)

    def batch_of(
        self, places: Sequence[tuple[int, int]], device: str | torch.device = "cpu"
    ) -> TokenBatch:
        """One batch of the rows (document, window) asked for, padded to the longest of them."""
        windows = [self.documents[i].windows[j] for i, j in places]
        rows, nth = torch.tensor(list(places), dtype=torch.long).unbind(1)
        return padded(windows, self.special_ids, rows, nth).to(device)

    def held_out(self, n: int) -> "Text":
        """Up to `n` further usable documents: the next ones of the same seeded order.

        Disjoint from this sample and from the sample that this one is a subset or continuation of.

        Raises:
            InterpError: No usable document is left.
        """
        found = self.further(n)
        if found is None:
            raise InterpError(
                f"no usable document of {self.source} is left to hold out: all are in the sample. "
                "Ask for fewer --documents or give more data."
            )
        return found

    def further(self, n: int) -> "Text | None":
        """The same, or None where no usable document is left."""
        _check("n", n, 1)
        documents, place, unusable = self.pool.take(self.next, n)
        if not documents:
            return None
        return _text(self.pool, documents, self.pool.blank + unusable, "held_out", place, n)

    def rest(self) -> Iterator[Document]:
        """The usable documents that `held_out` would draw from, all of their windows of each.

        In the seeded random order, a few at a time in source order, tokenised as they are asked
        for; none where the sample has all of them.
        """
        encoder = replace(self.pool.encoder, windows=True)
        pool = replace(self.pool, encoder=encoder)
        place = self.next
        while place < len(pool.order):
            documents, place, _ = pool.take(place, CHUNK)
            yield from documents

    def distinct(self) -> tuple["Text", list[str]]:
        """The text with every document once (a subset may repeat some), and a notice if it did."""
        first: dict[int, int] = {}
        for place, document in enumerate(self.documents):
            first.setdefault(document.index, place)
        if len(first) == len(self):
            return self, []
        notice = (
            f"{len(self) - len(first)} documents are in the text more than once; each counts once."
        )
        return self.subset(list(first.values())), [notice]

    def subset(self, positions: Sequence[int]) -> "Text":
        """The documents at these 0-based places, in the order given (repeats allowed).

        Raises:
            InterpError: No place given, or one outside the text.
        """
        outside = [i for i in positions if not 0 <= i < len(self)]
        if outside or not len(positions):
            what = f"position {outside[0]}" if outside else "an empty subset"
            raise InterpError(f"{what} of a text of {len(self)}: expected 0 to {len(self) - 1}.")
        return replace(self, documents=[self.documents[i] for i in positions], part="subset")


def padded(
    windows: Sequence[Sequence[int]],
    special_ids: Collection[int],
    rows: Int64[Tensor, " batch"],
    nth: Int64[Tensor, " batch"],
) -> TokenBatch:
    """A batch of windows, padded to the longest of them.

    Args:
        windows: token ids, BOS included.
        special_ids: ids that are never included positions.
        rows: each one's document.
        nth: which of its document's windows each one is.
    """
    length = max(map(len, windows))
    tokens = torch.tensor([[*w, *[PAD] * (length - len(w))] for w in windows], dtype=torch.long)
    lengths = torch.tensor([len(w) for w in windows])
    mask = torch.arange(length)[None, :] < lengths[:, None]
    special = torch.isin(tokens, torch.tensor(sorted(special_ids), dtype=torch.long))
    included = mask & ~special
    included[:, 0] = False
    return TokenBatch(tokens, mask, included, rows, nth)


def expect_model(model: Any) -> None:
    """Refuse, as an analyzer's first argument, what is not a model.

    Raises:
        UsageError: see above.
    """
    if not isinstance(model, Model):
        swapped = " (the text comes second)" if isinstance(model, Text) else ""
        raise UsageError(
            f"The first argument must be a model from load_model; it is {_kind(model)}{swapped}."
        )


def expect_text(text: Any) -> None:
    """Refuse, as an analyzer's second argument, what is not a text.

    Raises:
        UsageError: see above.
    """
    if not isinstance(text, Text):
        hint = f": pass load_text({text!r}, model)" if isinstance(text, str) else ""
        raise UsageError(
            f"The second argument must be a text from load_text; it is {_kind(text)}{hint}."
        )


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def load_text(
    source: str | Path | Sequence[str] | Source = "news",
    model: Any = None,
    *,
    documents: int = 32,
    context: int = 64,
    seed: int = 0,
    text_column: str | None = None,
    split: str = "train",
    bos: bool | None = None,
    min_tokens: int = 2,
    windows: bool = False,
    offline: bool = False,
) -> Text:
    """Draw and tokenise documents for a model.

    The sample is uniform, without replacement, over the usable documents: rows that are not blank,
    that repeat no earlier row exactly, that have `min_tokens` tokens and something to measure. A
    seeded random order of the rows is walked until enough usable ones are found, so only those are
    tokenised; they are kept in source order. All are taken where there are no more than asked.

    Args:
        source: "news", a .txt, .jsonl, .csv or .parquet file, a folder of those, a Hub data set id
            (its first 10,000 rows are drawn from), or the documents themselves as a list; or what
            `interp.sources.read_source` has read, whose options then count for nothing here.
        model: A `Model`, or any object with `.tokenizer`, `.cfg.vocab_size` and `.cfg.n_ctx`. Where
            it has `bos_token_id` or `bos_default` that are not None, they override the tokenizer's.
        documents: How many, at least 1.
        context: Most tokens of a document, or of each window; BOS included, at least 2.
        seed: Of the sample, 0 or more.
        text_column: See `interp.sources.read_source`.
        split: Of a Hub data set.
        bos: Start with BOS; None follows what plain `tokenizer(text)` does.
        min_tokens: Fewest tokens of a document, BOS not counted, so that the same documents are
            used with and without BOS; at least 2.
        windows: Use all of a document's consecutive windows of `context` tokens, not only the
            first. Each starts anew, with BOS if there is one. A last one of one token is dropped.
        offline: Ask nothing of the network.

    Raises:
        InterpError: Bad arguments, an unreadable source, nothing usable, a context longer than the
            model's, or a tokenizer that does not belong to the model.
    """
    if model is None or isinstance(model, str):
        raise UsageError(
            "load_text needs the model whose tokenizer cuts the text: "
            f"load_text(source, load_model({model or 'gpt2'!r}))."
        )
    if getattr(model, "tokenizer", None) is None:
        raise InterpError("load_text needs a model that has a tokenizer, which cuts the text.")
    _check("documents", documents, 1)
    _check("context", context, 2)
    _check("seed", seed, 0)
    _check("min_tokens", min_tokens, 2)
    if model.cfg.n_ctx is not None and context > model.cfg.n_ctx:
        raise InterpError(
            f"context {context} is longer than the {model.cfg.n_ctx} positions of the model: "
            f"use {model.cfg.n_ctx} or fewer."
        )
    encoder = make_encoder(model, bos, context=context, min_tokens=min_tokens, windows=windows)
    read = source
    if not isinstance(read, Source):
        read = read_source(
            read, text_column=text_column, split=split, documents=documents, offline=offline
        )
    pool = make_pool(read, encoder, seed)
    drawn, place, unusable = pool.take(0, documents)
    if not drawn:
        raise InterpError(
            f"{read.name} has no usable document: of {len(read.rows)}, {pool.blank} are blank, "
            f"{pool.duplicates} repeat another and {unusable} have fewer than {min_tokens} tokens "
            "or only special ones."
        )
    wanted = documents
    if not isinstance(source, str | Path | Source):  # a list shorter than the default is no news
        wanted = min(documents, len(read.rows))
        if place < len(pool.candidates):
            pool.notices.append(
                f"{read.name}: a sample of {len(drawn)}; ask for more documents to use them all"
            )
    return _text(pool, drawn, pool.blank + unusable, "sample", place, wanted)


def _text(
    pool: Pool, documents: list[Document], skipped: int, part: str, place: int, wanted: int
) -> Text:
    notices = list(pool.notices)
    if len(documents) < wanted:
        name = "held-out documents" if part == "held_out" else "documents"
        notices.append(f"{pool.source}: {len(documents)} usable {name}, of {wanted} asked for")
    encoder = pool.encoder
    body = [
        token
        for document in documents
        for window in document.windows
        for token in window[0 if encoder.bos_id is None else 1 :]
    ]
    if special := sum(token in encoder.special_ids for token in body):
        notices.append(
            f"{pool.source}: {special} of {len(body)} tokens of the text are special or unknown to "
            "this tokenizer; they are not included positions"
        )
    return Text(documents, skipped, part, notices, pool, place)


def _check(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InterpError(f"{name} must be a whole number of at least {least}, got {value!r}.")

"""Tokens as text: where each of a document's tokens ends in it, and a label for an id.

Byte-level tokenizers cut characters: an emoji can be three tokens, none of which is text. Such a
token ends where its character ends, so that the text up to a token is always exact; its label shows
its bytes, so that the three can be told apart. Torch-free.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from interp.encoding import Document, Encoder, tokenised

UNKNOWN = "\ufffd"  # what decoding gives for a part of a character


@dataclass(frozen=True)
class Pieces:
    """A text cut into tokens.

    text: the document (where the tokenizer cannot say which characters a token covers: what its
        tokens decode to).
    ids: all of its tokens, BOS not among them.
    ends: per token, how much of the text ends with it: text[:ends[i]] is the text up to token i.
    """

    text: str
    ids: Sequence[int]
    ends: Sequence[int]

    def upto(self, first: int, last: int) -> str:
        """The text of tokens first to last, both included; that before the first has ended."""
        return self.text[self.ends[first - 1] if first > 0 else 0 : self.ends[last]]

    def after(self, last: int, count: int) -> str:
        """The text of up to `count` tokens after this one."""
        return self.text[self.ends[last] : self.ends[min(last + count, len(self.ends) - 1)]]

    def packed(self) -> Pieces:
        """The same in a tenth of the memory: numbers side by side instead of Python objects."""
        return Pieces(self.text, array("i", self.ids), array("i", self.ends))


def cut(encoder: Encoder, documents: Iterable[Document], most: int | None = None) -> list[Pieces]:
    """Each document's tokens, as `Document.windows` has them, and what follows.

    Args:
        encoder: of the text.
        documents: of the text.
        most: tokens that are needed of each; None: all.
    """
    texts = [document.text for document in documents]
    ids = encoder.encode(texts)
    ends = _offsets(encoder.tokenizer, texts, ids)
    out = []
    for text, row, own in zip(texts, ids, ends, strict=True):
        if own is None:
            text, own = _decoded(encoder.tokenizer, text, row[:most])
        out.append(Pieces(text, row[:most], own[:most]))
    return out


def _offsets(tokenizer: Any, texts: list[str], ids: list[list[int]]) -> list[list[int] | None]:
    """Ends by the tokenizer's own account; None where it has none that fits."""
    if not getattr(tokenizer, "is_fast", False):
        return [None] * len(texts)
    found = tokenised(tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
    out: list[list[int] | None] = []
    for text, row, own, spans in zip(
        texts, ids, found["input_ids"], found["offset_mapping"], strict=True
    ):
        skip = len(own) - len(row)  # a BOS that it adds whatever it is told
        ends = [end for _, end in spans[skip:]] if skip >= 0 and list(own[skip:]) == row else []
        fits = bool(ends) and ends[-1] <= len(text) and ends == sorted(ends)
        out.append(ends if fits else None)
    return out


def _decoded(tokenizer: Any, text: str, ids: list[int]) -> tuple[str, list[int]]:
    """The text and the ends by decoding longer and longer beginnings."""
    so_far = [_decode(tokenizer, ids[: i + 1]).rstrip(UNKNOWN) for i in range(len(ids))]
    whole = _decode(tokenizer, ids)
    if text.startswith(whole):
        whole = text
    ends = [len(part) if whole.startswith(part) else 0 for part in so_far]
    for i in range(1, len(ends)):
        ends[i] = max(ends[i], ends[i - 1])
    return whole, ends


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


# Labels -------------------------------------------------------------------------------------------


@functools.cache
def _byte_of() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes as (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(rest)}


def label(tokenizer: Any, token_id: int) -> str:
    r"""One token as text: its own characters, a leading space among them.

    Bytes that are no whole character are escaped, as in `\xf0\x9f`.
    """
    raw = tokenizer.convert_ids_to_tokens(token_id)
    shown = _decode(tokenizer, [token_id])
    if raw is None:
        return shown
    if all(c in _byte_of() for c in raw):
        data = bytes(_byte_of()[c] for c in raw)
        if data.decode(errors="replace") == shown:
            return data.decode(errors="backslashreplace")
    if "\u2581" in raw:  # SentencePiece's space, which decoding drops at the start
        return raw.replace("\u2581", " ")
    return raw if UNKNOWN in shown or not shown else shown

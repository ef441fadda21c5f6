"""One text to token ids: BOS, special tokens, cutting into windows.

The tokenizer is the checkpoint's own and is left as it was found. A text is tokenised whole,
without anything the tokenizer would add, and literal special-token strings in it are read as text;
the BOS is then put before each window, so it is never there twice. Torch-free.
"""

from dataclasses import dataclass
from typing import Any

from interp.errors import InterpError

PROBES = ["text", "the", "a", "0"]


@dataclass(frozen=True)
class Document:
    """One document of the sample."""

    index: int
    """0-based place in the source (row, paragraph block or list element)."""
    text: str
    windows: list[list[int]]
    """Its tokens, BOS included, as the model reads them; one window unless `windows` was asked."""
    truncated: bool = False
    """Whether some of its tokens are in no window."""


@dataclass(frozen=True)
class Encoder:
    """Everything that decides how one text becomes windows of token ids."""

    tokenizer: Any
    bos_id: int | None
    """The id that starts every window, or None for no BOS."""
    special_ids: frozenset[int]
    vocab_size: int
    context: int
    min_tokens: int
    windows: bool

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of whole texts, without BOS. Literal special-token strings are read as text.

        Raises:
            InterpError: An id that the model's vocabulary lacks.
        """
        rows = _plain(self.tokenizer, texts)
        largest = max((max(row, default=0) for row in rows), default=0)
        largest = max(largest, self.bos_id or 0)
        if largest >= self.vocab_size:
            raise InterpError(
                f"token id {largest} is outside the model's vocabulary of {self.vocab_size}: "
                "this tokenizer does not belong to this model."
            )
        return rows

    def document(self, index: int, text: str, ids: list[int]) -> Document | None:
        """Cut one text's ids into windows; None where the document is not usable."""
        if len(ids) < self.min_tokens:
            return None
        start = [] if self.bos_id is None else [self.bos_id]
        body = self.context - len(start)
        stop = len(ids) if self.windows else 1
        cuts = [start + ids[i : i + body] for i in range(0, stop, body)]
        if len(cuts[-1]) < 2:  # a single token predicts nothing and is predicted by nothing
            cuts.pop()
        if all(token in self.special_ids for cut in cuts for token in cut[1:]):
            return None
        kept = sum(len(cut) - len(start) for cut in cuts)
        return Document(index, text, cuts, truncated=kept < len(ids))


def make_encoder(
    model: Any, bos: bool | None, *, context: int, min_tokens: int, windows: bool
) -> Encoder:
    """The encoder for a model (see `interp.text.load_text` for the arguments).

    Raises:
        InterpError: BOS was asked for and there is none, or plain `tokenizer(text)` starts with
            several special tokens.
    """
    special = special_ids(model.tokenizer)
    bos_id = find_bos(model, bos, special)
    return Encoder(
        tokenizer=model.tokenizer,
        bos_id=bos_id,
        special_ids=special if bos_id is None else special | {bos_id},
        vocab_size=model.cfg.vocab_size,
        context=context,
        min_tokens=min_tokens,
        windows=windows,
    )


def find_bos(model: Any, wanted: bool | None, special: frozenset[int]) -> int | None:
    """The id to start with, or None: as asked, else as the model says, else as plain calls do."""
    own = model.tokenizer.bos_token_id
    added = _added_before(model.tokenizer, special)
    override = getattr(model, "bos_default", None)
    on = wanted if wanted is not None else override if override is not None else bool(added)
    if not on:
        return None
    chosen = getattr(model, "bos_token_id", None)
    if chosen is not None:
        return int(chosen)
    if len(added) > 1:
        raise InterpError(
            f"the tokenizer starts every text with {len(added)} special tokens ({added}); interp "
            "knows only one, BOS. Use --no-bos."
        )
    if added:
        return added[0]
    if own is None:
        raise InterpError("this model's tokenizer has no BOS token: leave out --bos.")
    return int(own)


def _added_before(tokenizer: Any, special: frozenset[int]) -> list[int]:
    """What plain `tokenizer(text)` puts before the text; EOS that it appends is not of interest."""
    with_added = _ids(tokenizer, PROBES, add_special_tokens=True)
    plain = _plain(tokenizer, PROBES)
    for whole, inner in zip(with_added, plain, strict=True):
        # Told apart from what is added only if it is not itself special (an unknown word may be).
        if inner and special.isdisjoint(inner):
            for i in range(len(whole) - len(inner) + 1):
                if whole[i : i + len(inner)] == inner:
                    return whole[:i]
    whole, inner = with_added[0], plain[0]
    starts = bool(whole) and whole != inner and whole[0] == tokenizer.bos_token_id
    return whole[:1] if starts else []


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Named special tokens and every added token that is flagged as special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    flagged = {token_id for token_id, token in added.items() if token.special}
    return frozenset(flagged | {int(token_id) for token_id in tokenizer.all_special_ids})


def _plain(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of the texts alone."""
    *rows, empty = _ids(tokenizer, [*texts, ""])
    named = tokenizer.bos_token_id
    if named is not None and empty[:1] == [named]:  # it adds BOS whatever it is told
        rows = [row[1:] for row in rows]
    return rows


def _ids(tokenizer: Any, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
    found = tokenised(tokenizer, texts, add_special_tokens=add_special_tokens)
    return [list(row) for row in found["input_ids"]]


def tokenised(tokenizer: Any, texts: list[str], **options: Any) -> Any:
    """What the tokenizer makes of the texts, in which no literal special token is one.

    Args:
        tokenizer: left as it was.
        texts: to cut.
        **options: of the call, as `add_special_tokens` or `return_offsets_mapping`.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    before = getattr(backend, "encode_special_tokens", None)
    try:
        return tokenizer(
            texts,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,  # no warning of texts longer than the model: they are cut later
            **options,
        )
    finally:
        if before is not None:  # it would stay set on the user's own tokenizer
            backend.encode_special_tokens = before

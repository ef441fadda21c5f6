"""Checks of the tokenizer and of what interp makes of it, against the checkpoint's own."""

from __future__ import annotations

from typing import Any

from interp import checkpoint
from interp.doctor.case import TEXTS, Case
from interp.doctor.outcome import Check, Measured, NotApplicableError
from interp.encoding import Encoder


def _fresh(case: Case) -> Any:
    """The checkpoint's tokenizer, loaded once more."""
    from transformers import AutoTokenizer

    if case.model.tokenizer is None:
        raise NotApplicableError("this model has no tokenizer")
    with checkpoint.quiet():
        return AutoTokenizer.from_pretrained(
            case.model.folder,
            local_files_only=True,
            trust_remote_code=bool(case.model.remote_code),
        )


def _encoder(case: Case) -> Encoder:
    return case.text.pool.encoder


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _bare(text: str) -> str:
    """Without white space and case, which some tokenizers change by design."""
    return "".join(text.split()).casefold()


def round_trip(case: Case) -> Measured:
    """Texts come back from their tokens, which are those of the checkpoint's own tokenizer.

    White space and case aside. A literal special-token string in a text is read as text.
    """
    fresh, encoder, wrong = _fresh(case), _encoder(case), []
    for text, ids in zip(TEXTS, encoder.encode(list(TEXTS)), strict=True):
        if ids != _without(fresh, text):
            wrong.append(f"other tokens than the checkpoint's tokenizer gives: {text[:24]!r}")
            continue
        back = fresh.decode(ids, clean_up_tokenization_spaces=False)
        if _bare(back) != _bare(text):
            wrong.append(f"{text[:24]!r} comes back as {back[:24]!r}")
    for token in fresh.all_special_tokens:
        (ids,) = encoder.encode([f"a {token} b"])
        if fresh.convert_tokens_to_ids(token) in ids:
            wrong.append(f"a literal {token!r} in a text becomes the special token")
    note = (
        wrong[0] if wrong else f"{len(TEXTS)} texts, {len(fresh.all_special_tokens)} special tokens"
    )
    return Measured(len(wrong), note=note)


def _without(tokenizer: Any, text: str) -> list[int]:
    """The text's ids without any that is put before or after it."""
    ids, bos = _ids(tokenizer, text, special=False), tokenizer.bos_token_id
    # Some add BOS whatever they are told; an empty text shows it.
    return ids[1:] if bos is not None and _ids(tokenizer, "", special=False)[:1] == [bos] else ids


def bos_policy(case: Case) -> Measured:
    """Documents start with what plain tokenizer(text) puts there, once, or as the model overrides.

    The override is the model's own statement (`bos_token_id`, `bos_default`), which no tokenizer
    can confirm.
    """
    fresh, model, wrong = _fresh(case), case.model, []
    stated = model.bos_default is not None or model.bos_token_id is not None
    note = ""
    for document in case.text.documents:
        bare = _without(fresh, document.text)
        whole = _ids(fresh, document.text, special=True)
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        before = whole[:at]
        on = bool(before) if model.bos_default is None else model.bos_default
        first = model.bos_token_id if model.bos_token_id is not None else None
        if first is None and on:
            first = before[0] if before else fresh.bos_token_id
        expected = [*([first] if on else []), *bare][: case.text.context]
        given = document.windows[0]
        note = f"starts with {first}" if on else "no BOS"
        if given != expected:
            wrong.append(f"a document starts with {given[:2]}, {expected[:2]} is expected")
    note += ", as the model overrides" if stated else ", as plain tokenizer(text)"
    return Measured(len(wrong), note=wrong[0] if wrong else note)


def vocabulary(case: Case) -> Measured:
    """Ids of the tokenizer are rows of the embedding; padded rows are known as such."""
    cfg, wrong = case.model.cfg, []
    rows = case.plain.get_input_embeddings().weight.shape[0]
    if cfg.vocab_rows != rows:
        wrong.append(f"{cfg.vocab_rows} rows are stated, the embedding has {rows}")
    if case.clean.shape[-1] != rows:
        wrong.append(f"{case.clean.shape[-1]} logits for {rows} rows")
    if case.model.tokenizer is None:
        return Measured(len(wrong), note=wrong[0] if wrong else f"{rows} rows, no tokenizer")
    fresh = _fresh(case)
    ids = set(fresh.get_vocab().values())
    real = min(max(ids) + 1, rows)
    if cfg.vocab_size != real:
        wrong.append(f"a vocabulary of {cfg.vocab_size} is stated, the tokenizer has {real} ids")
    produced = {token for ids in case.documents for token in ids}
    outside = sorted(token for token in produced if not 0 <= token < real)
    if outside:
        wrong.append(f"id {outside[0]} is outside the vocabulary of {real}")
    note = f"{real} ids, {rows} rows, {rows - real} of them padding"
    return Measured(len(wrong), note=wrong[0] if wrong else note)


CHECKS = (
    Check("tokenizer round trip", "count", "texts come back from their tokens", round_trip),
    Check("BOS policy", "count", "documents start as plain tokenizer(text) has them", bos_policy),
    Check("vocabulary", "count", "ids are rows, padded rows are known", vocabulary),
)

"""In which ways a run that is to be taken up differs from the one asked for, in plain words.

Values are told where a person can read them. Of what follows from another difference (other text
has other tokens) only the first is told. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MOST = 6
LONG = 80  # characters of a value; a longer one is not told
_DIGEST = re.compile(r"[0-9a-f]{32,}")

# What holds a digest or a list of numbers, by the last part of its name.
_WORDS = {
    "weights": "other weights, another configuration of the model, or other hooks on it",
    "text": "other text",
    "sha256": "other text",
    "token_ids": "other text",
    "source_sha256": "other documents in the data beside those of the sample",
    "next": "other documents to draw further ones from",
    "tokenizer_sha256": "another tokenizer",
    "special_ids": "other special tokens",
}
_OF_TEXT = {
    "source": "--data",
    "documents": "number of documents",
    "context": "--context",
    "windows": "--windows",
    "bos": "BOS",
    "min_tokens": "--min-tokens",
    "text_column": "text column",
}
# Of a part of the whole, what decides the rest of it: where one level differs, what comes behind
# differs with it.
_LEVELS = {
    "model": (("name", "source", "revision", "dtype", "device"), ("weights",)),
    "data": (
        ("source", "text_column", "documents", "context", "windows", "bos", "min_tokens", "seed"),
        ("tokenizer_sha256", "special_ids"),
        ("sha256", "token_ids"),
        ("source_sha256",),
        ("next",),
    ),
}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two runs' identities, as parts of a sentence; empty where nothing does.

    Args:
        before: of the run that is saved; nested mappings, their names joined by dots.
        now: of the one asked for.
    """
    was, own = _flat(before), _flat(now)
    names = [n for n in {**was, **own} if was.get(n) != own.get(n)]
    told = [_words(n, was.get(n), own.get(n)) for n in _deciding(names)]
    return list(dict.fromkeys(told))


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    out: dict[str, Any] = {}
    for key, part in value.items():
        out |= _flat(part, f"{name}.{key}" if name else str(key))
    return out


def _deciding(names: list[str]) -> list[str]:
    """The names without those that differ because others do."""
    out = []
    for part in dict.fromkeys(name.partition(".")[0] for name in names):
        own = [name for name in names if name.partition(".")[0] == part]
        levels = ([f"{part}.{last}" for last in level] for level in _LEVELS.get(part, ()))
        first = ([name for name in own if name in level] for level in levels)
        out += next((found for found in first if found), own)
    return [n for n in out if n != "data.seed" or "options.seed" not in out]


def _words(name: str, before: Any, now: Any) -> str:
    part, _, rest = name.partition(".")
    last = name.rpartition(".")[2]
    was, own = _shown(before), _shown(now)
    readable = was is not None and own is not None
    if part == "versions":
        what = f"version of {rest}" if rest != "platform" else "machine or operating system"
        return f"another {what} ({was} was, {own} is)" if readable else f"another {what}"
    if part == "sae":
        return "another autoencoder where --sae says"
    if last in _WORDS and (part == "data" or not readable):
        return _WORDS[last]
    label = _label(part, rest)
    return f"{label} was {was} and is {own}" if readable else f"another {label}"


def _label(part: str, rest: str) -> str:
    """A name as a sentence has it."""
    if part == "options":
        return f"--{rest.replace('_', '-')}"
    words = rest.replace("_", " ")
    if part == "model" and rest:
        return "model" if rest == "name" else f"model {words}"
    if part == "data" and rest:
        return _OF_TEXT.get(rest, f"text {words}")
    return "command" if part == "analyzer" else f"{part} {words}".strip().replace("_", " ")


def _shown(value: Any) -> str | None:
    """A value as a person reads it; None for one that none can."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        parts = [_shown(item) for item in value]
        text = ", ".join(part for part in parts if part is not None) or "none"
        return None if None in parts or len(text) > LONG else text
    text = str(value)
    return None if _DIGEST.fullmatch(text) or len(text) > LONG else text

"""Options that check themselves. (A module of its own: --help reads the source of every class.)"""

from __future__ import annotations

import numbers
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from interp.errors import UsageError


def must(ok: bool, option: str, expected: str, value: Any) -> None:
    """Raise a UsageError that names the option, unless it is in range."""
    if not ok:
        raise UsageError(f"--{option} must be {expected}; it is {value!r}.")


def must_each(
    ok: Callable[[Any], bool], option: str, expected: str, values: tuple[Any, ...]
) -> None:
    """Of an option that takes several values: all are in range, and none is given twice."""
    for value in values:
        must(ok(value), option, expected, value)
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise UsageError(f"--{option} {twice[0]} is given more than once; give each value once.")


class Checked:
    """Checks every field against its type: a library call gets the same words as a command line."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            option, several = name.replace("_", "-"), get_origin(hint) is tuple
            if several and isinstance(value, tuple):
                part = get_args(hint)[0]
                must_each(lambda one, part=part: _fits(one, part), option, _words(part), value)
            else:
                must(_fits(value, hint), option, _words(hint), value)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if isinstance(value, bool):  # which Python counts among the integers
        return hint is bool
    if hint is Path:
        return isinstance(value, str | Path)
    if get_origin(hint) is tuple:  # its parts are looked at one by one
        return isinstance(value, tuple)
    return isinstance(value, {int: numbers.Integral, float: numbers.Real}.get(hint, hint))


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(part) for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a tuple, each part {_words(get_args(hint)[0])}"
    words = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
    return words.get(hint, "a path")

"""Ctrl-C and SIGTERM while a batch is at work: the batch is finished first. Torch-free.

Whoever handles the signal asks `put_off`; whoever works says `begin` and `end` around what should
not be cut in two, and `check` where it may stop. A second signal is not put off.
"""

from __future__ import annotations

_depth = 0
_asked = 0


def begin() -> None:
    """Something starts that should not be cut in two."""
    global _depth
    _depth += 1


def end() -> None:
    """It is done."""
    global _depth
    _depth = max(0, _depth - 1)


def put_off() -> bool:
    """Called by a signal's handler: whether work will stop by itself soon (else: raise)."""
    global _asked
    _asked += 1
    return _depth > 0 and _asked == 1


def asked() -> bool:
    """Whether to stop at the next occasion."""
    return _asked > 0


def twice() -> bool:
    """Whether to stop without saving anything more."""
    return _asked > 1


def check() -> None:
    """Stop here, if that was asked for."""
    if _asked:
        raise KeyboardInterrupt


def reset() -> None:
    """Nothing is at work, and nobody asked for anything."""
    global _depth, _asked
    _depth = _asked = 0

"""One process at a time: locks that go with the process, however it ends. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


class TakenError(Exception):
    """Another process holds the lock."""


@contextlib.contextmanager
def exclusive(file: Path, *, wait: bool) -> Iterator[None]:
    """Hold a lock; where the system or the file system has none, go on without.

    Args:
        file: the lock's name; made, and left there.
        wait: until it is free.

    Raises:
        TakenError: it is not free, and wait is False.
        OSError: the file cannot be made.
    """
    with file.open("a") as handle:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise TakenError(str(file)) from error
        except (ImportError, OSError):
            pass
        yield

"""Checkpoints of a training: where it stands after a block, and of which run it is."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interp.journal import expect_same, read_json
from probes.training import Job


class Checkpoints:
    """Checkpoints of one training under a folder; the newest whole one counts.

    Args:
        folder: where they lie; None: nowhere.
        what: all that the weights depend on.
        every: seconds that must have passed since the last one for `due`.
    """

    def __init__(self, folder: Path | None, what: Mapping[str, Any], every: float = 0) -> None:
        self.folder, self.what, self.every = folder, what, every
        self.last = time.monotonic()

    def due(self, jobs: list[Job], block: int) -> None:
        """Save, if the last time is long enough ago."""
        if time.monotonic() - self.last >= self.every:
            self.save(jobs, block)
            self.last = time.monotonic()

    def save(self, jobs: list[Job], block: int) -> None:
        """Write where training stands after `block` blocks, then drop the older ones."""
        if self.folder is None:
            return
        new = self.folder / f"{block:06d}.new"
        shutil.rmtree(new, ignore_errors=True)
        for i, job in enumerate(jobs):
            job.save(new / str(i))
        state = {"what": dict(self.what), "block": block, "logs": [vars(job.log) for job in jobs]}
        _write_json(new / "state.json", state)
        done = self.folder / f"{block:06d}"
        shutil.rmtree(done, ignore_errors=True)
        os.replace(new, done)
        for old in self._all():
            if old != done:
                shutil.rmtree(old, ignore_errors=True)

    def load(self, jobs: list[Job]) -> int:
        """Take up the newest one; returns the number of blocks that are done, 0 without any.

        Raises:
            InterpError: it is of a run with other options, text or model.
        """
        for folder in reversed(self._all()):
            state = read_json(folder / "state.json")
            if state is None:
                continue
            expect_same(state["what"], json.loads(json.dumps(dict(self.what))))
            for i, job in enumerate(jobs):
                job.load(folder / str(i), state["logs"][i])
            return int(state["block"])
        return 0

    def _all(self) -> list[Path]:
        if self.folder is None or not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if p.is_dir() and p.name.isdigit())


def _write_json(file: Path, value: Any) -> None:
    with file.open("w", encoding="utf-8") as out:
        json.dump(value, out)
        out.flush()
        os.fsync(out.fileno())

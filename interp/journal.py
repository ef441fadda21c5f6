"""What a run has measured so far, on disk, so that a run that was killed can be taken up.

A run is a sequence of stages, the same each time the same thing is asked. A stage takes batches one
after another (`fold`: what it adds up is saved now and then, whole), or gives one small result
after another (`each`: every one is saved). Training is a `fold` over its steps. A run that is taken
up goes through the same stages in the same order; what was saved is handed over instead of being
measured, bit for bit, so its tables end as those of a run that was never stopped.

Files lie in `<out>.partial/progress`: safetensors and JSON, no pickle, each written under another
name, synced and renamed, with a digest of its contents: a damaged one is as good as none.

Where the device's memory runs out, the stage at work begins again with batches half as large
(`measured`), and what earlier stages have saved is used again; training, which no batch of the
model's has a say in, goes on from where it was saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from interp import hooks, interrupts, locks, results
from interp.config import NO_MATTER
from interp.differences import MOST, differences
from interp.errors import InterpError, UsageError
from interp.model import Model
from interp.progress import batch_rows
from interp.text import Text, TokenBatch

log = logging.getLogger("interp")
Item = TypeVar("Item")
Given = ParamSpec("Given")
Values = Mapping[str, Any]

RUN_FILE, LOCK_FILE = "run.json", "lock"
MOST_BYTES = 4 * 10**9
"""Of a run's progress on disk, as --help says; what would go beyond is measured again."""
TRAINING = "training-"
"""Start of the name of what MOST_BYTES does not count: hours, that nothing brings back."""
HELD_BYTES = 2**26
"""What waits to be written is a copy in memory: not of more than this."""
SHARE = 20
"""Times as long as the last save took, at least, until the next one."""
SIZE = "|size"
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


class Journal:
    """The progress of one run.

    Args:
        folder: where it is saved; None: nowhere.
        every: seconds between saves; 0: after everything that is measured.
    """

    def __init__(self, folder: Path | None = None, every: float = 60) -> None:
        self.folder, self.every = folder, every
        self.notices: list[str] = []
        self.halvings = 0
        self.stage_now: Stage | None = None
        self._names: Counter[str] = Counter()
        self._found: dict[str, dict[str, np.ndarray]] = {}
        self._new: dict[str, dict[str, np.ndarray]] = {}
        self._folds: dict[str, dict[str, Tensor]] = {}  # packed, not yet written
        self._last, self._cost = time.monotonic(), 0.0
        self._bytes: dict[str, int] = {}  # of the files there are
        self._segments = 0
        if folder is not None:
            self._load()

    @property
    def records(self) -> bool:
        """Whether anything is saved."""
        return self.folder is not None

    @property
    def empty(self) -> bool:
        """Whether nothing has been saved, nor waits to be."""
        return not (self._waiting or self._bytes)

    @property
    def _waiting(self) -> bool:
        """Whether there is something to write; the size of batches alone is nothing."""
        return bool(self._folds) or any(not key.endswith(SIZE) for key in self._new)

    def begin(self) -> None:
        """The run starts, for the first time or again: stages count from here."""
        self._names.clear()
        self.stage_now = None

    def stage(self, what: str) -> Stage:
        """The next stage; what several share as a name is numbered."""
        self._names[what] += 1
        n = self._names[what]
        return Stage(self, what if n == 1 else f"{what} {n}")

    def halve(self) -> None:
        """The stage at work ran out of memory: it gets half the batch, as do later ones.

        Raises:
            InterpError: no stage was at work, or its batch cannot be smaller.
        """
        stage = self.stage_now
        if stage is None or stage.least is None or stage.now <= stage.least:
            where = "" if stage is None else f" ({stage.name})"
            raise InterpError(
                f"Out of memory{where}, and no smaller batch would help: use a smaller --context "
                "or --dtype, a smaller model, or --device cpu."
            )
        self.halvings += 1
        self._new.pop(stage.size_key, None)
        self._found.pop(stage.size_key, None)
        self.tell(
            f"Out of memory ({stage.name}): batches of {stage.now} {stage.unit} are halved. "
            "Numbers change by rounding only."
        )

    def tell(self, notice: str) -> None:
        """Say something now and in the result, once."""
        if notice not in self.notices:
            self.notices.append(notice)
            log.info(notice)

    # Records ----------------------------------------------------------------------------------

    def get(self, key: str) -> dict[str, np.ndarray] | None:
        """What was saved under a key."""
        return self._new[key] if key in self._new else self._found.get(key)

    def put(self, key: str, values: dict[str, np.ndarray]) -> None:
        """Save something under a key, at the next occasion."""
        if self.records:
            self._new[key] = values

    def due(self) -> bool:
        """Whether it is time to save."""
        wait = self.every and max(self.every, SHARE * self._cost)
        return self.records and time.monotonic() - self._last >= wait

    def fold_file(self, stage: Stage) -> Path:
        """Where a stage's sums are saved."""
        assert self.folder is not None
        kind, key = "sums-", stage.key("sums")
        if stage.training:  # holds for batches of any size
            kind, key = TRAINING, stage.name
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        return self.folder / f"{kind}{name}.safetensors"

    def keep(self, stage: Stage, done: int, state: Values) -> None:
        """Save what a stage has added up, at the next occasion.

        Raises:
            InterpError: two names of the state hold one tensor.
        """
        _expect_apart(stage.name, state)
        tensors: dict[str, Tensor] = {}
        tree = json.dumps({"done": done, "state": _pack(dict(state), tensors)})
        tensors["tree"] = torch.frombuffer(bytearray(tree.encode()), dtype=torch.uint8)
        name = self.fold_file(stage).name
        if self._fits(name, tensors):  # looked at before anything large is copied
            self._folds[name] = {k: value.to("cpu", copy=True) for k, value in tensors.items()}
            if _bytes(tensors) > HELD_BYTES:
                self.flush()

    def restore(self, stage: Stage, state: Values) -> int:
        """Set a stage's sums to what was saved; returns how many items that covers."""
        if not self.records:
            return 0
        file = self.fold_file(stage)
        tensors = self._folds.get(file.name) or _read(file)
        if tensors is None:
            return 0
        tree = json.loads(bytes(tensors["tree"].numpy()).decode())
        _unpack(tree["state"], dict(state), tensors, shared=True)
        return int(tree["done"])

    def flush(self) -> None:
        """Write what waits. A disk that is full does not stop the run."""
        if self.folder is None or not self._waiting:
            return
        from safetensors import SafetensorError

        began = time.monotonic()
        try:
            for name, tensors in list(self._folds.items()):
                self._write(name, tensors)
                del self._folds[name]
            if self._new:
                flat = {
                    f"{key}|{field}": torch.from_numpy(np.array(value, order="C"))
                    for key, values in self._new.items()
                    for field, value in values.items()
                }
                self._segments += 1
                self._write(f"{self._segments:06d}.safetensors", flat)
                self._found |= self._new
                self._new = {}
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or error
            self.tell(
                f"Progress cannot be saved in {self.folder} ({why}): if the "
                "run is stopped, what was measured since the last save is lost."
            )
        self._last = time.monotonic()
        self._cost = self._last - began

    def finish(self) -> None:
        """The run is through; what a run of less than one interval has measured is not written."""
        if self._bytes:
            self.flush()

    def _fits(self, name: str, tensors: Mapping[str, Tensor]) -> bool:
        others = (n for k, n in self._bytes.items() if k != name and not k.startswith(TRAINING))
        fits = name.startswith(TRAINING) or sum(others) + _bytes(tensors) <= MOST_BYTES
        if not fits:
            self.tell(
                f"Progress of more than {MOST_BYTES / 1e9:g} GB is not saved: if the run is "
                "stopped, a part of it is measured again."
            )
        return fits

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        assert self.folder is not None
        if not self._fits(name, tensors):
            return
        if not self._bytes:
            log.info(
                "Progress is saved in %s: if the run is stopped, the same command with --resume "
                "takes it up.",
                self.folder.parent,
            )
        size = _bytes(tensors)
        if size > MOST_BYTES and name not in self._bytes:
            log.info(
                "Progress of training takes %.1f GB there, and as much again while it is saved.",
                size / 1e9,
            )
        _write(self.folder / name, tensors)
        self._bytes[name] = size

    def _load(self) -> None:
        assert self.folder is not None
        for file in sorted(self.folder.glob(results.PROGRESS_FILES)):
            self._bytes[file.name] = file.stat().st_size
            if not file.stem.isdigit():
                continue
            self._segments = int(file.stem)
            for name, tensor in (_read(file) or {}).items():
                if name != DIGEST:
                    key, field = name.rsplit("|", 1)
                    self._found.setdefault(key, {})[field] = tensor.numpy().copy()


def _at_work(hand_out: Callable[Given, Iterator[Item]]) -> Callable[Given, Iterator[Item]]:
    """A method of a stage that hands out items: the stage is at work until they are through."""

    @functools.wraps(hand_out)
    def wrapped(*args: Given.args, **more: Given.kwargs) -> Iterator[Item]:
        stage: Any = args[0]
        return stage.through(hand_out(*args, **more))

    return wrapped


class Stage:
    """A part of a run whose batches have one size.

    It is at work within `with`, and while `batches`, `through`, `fold` or `each` hand out items.
    Memory that runs out then is its batches' fault, and no other's.
    """

    def __init__(self, journal: Journal, name: str) -> None:
        self.journal, self.name = journal, name
        self.now, self.least, self.unit = 0, None, "rows"
        self.training = False
        self._count = self._depth = 0
        self._at: tuple[int, Values] = (0, {})  # items that are done, and what they come to

    def __enter__(self) -> Stage:
        self._depth += 1
        self.journal.stage_now = self
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # what broke off within this stage is still its own
            return
        self._depth -= 1
        if not self._depth:
            self.journal.stage_now = None

    def through(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; this stage is at work until they are through."""
        with self:
            yield from items

    @property
    def size_key(self) -> str:
        """Under which the size of the batches is saved."""
        return f"{self.name}{SIZE}"

    def key(self, what: object) -> str:
        """Under which something is saved that depends on the size of the batches."""
        return f"{self.name}|{self.now}|{what}"

    def size(self, wanted: int, most: int, least: int = 1, unit: str = "rows") -> int:
        """How large a batch is: as it was when the stage began, or as wanted, halved as need be.

        Args:
            wanted: in the unit.
            most: of all there is together.
            least: what cannot be made smaller.
            unit: rows or tokens.
        """
        known = self.journal.get(self.size_key)
        if known is None:
            size = max(least, min(wanted, most) >> self.journal.halvings)
            known = {"size": np.array([size])}
            self.journal.put(self.size_key, known)
        self.now, self.least, self.unit = int(known["size"][0]), least, unit
        return self.now

    def batches(
        self, model: Model, text: Text, batch_size: int | Literal["auto"], *, graph: bool = False
    ) -> Iterator[TokenBatch]:
        """The text's batches on the model's device, of this stage's size."""
        rows = self.rows(model, text, batch_size, graph=graph)
        return self.through(text.batches(rows, model.device))

    def rows(
        self, model: Model, text: Text, batch_size: int | Literal["auto"], *, graph: bool = False
    ) -> int:
        """Rows of a batch of this stage."""
        wanted = batch_rows(model, text, batch_size, graph=graph)
        return self.size(wanted, sum(len(d.windows) for d in text.documents))

    @_at_work
    def each(
        self, count: int, compute: Callable[[int], Values], ahead: int = 1
    ) -> Iterator[dict[str, np.ndarray]]:
        """Small results 0 to count - 1, in order: those that were saved, or computed now.

        Args:
            count: how many.
            compute: number -> name -> tensor or array; a None is left out.
            ahead: results begun before the first of them is read, which waits for the device.
        """
        first, self._count = self._count, self._count + count
        for start in range(0, count, ahead):
            here = range(start, min(start + ahead, count))
            interrupts.begin()
            try:
                known = {i: self.journal.get(self.key(first + i)) for i in here}
                made = {i: compute(i) for i, values in known.items() if values is None}
                for i in here:
                    values = known[i]
                    if values is None:
                        values = {k: _array(v) for k, v in made[i].items() if v is not None}
                        self.journal.put(self.key(first + i), values)
                    yield values
            finally:
                interrupts.end()
            if self.journal.due():
                self.journal.flush()
            interrupts.check()

    def once(self, compute: Callable[[], Values]) -> dict[str, np.ndarray]:
        """One small result."""
        return next(iter(list(self.each(1, lambda _: compute()))))

    @_at_work
    def fold(
        self, items: Iterable[Item], state: Values, *, training: bool = False
    ) -> Iterator[Item]:
        """The items, less those that a saved state has in it already.

        Args:
            items: such as batches, in an order that is always the same.
            state: name -> what the loop adds up: arrays and tensors that it changes in place, lists
                and dicts, objects made of such, or with `state_dict` and `load_state_dict` as torch
                has them. Set to what was saved, before the first item.
            training: the items are training steps. What they come to holds whatever the size of
                the stage's batches, and is saved however large it is.
        """
        self.training = training
        done = self.journal.restore(self, state)
        count = 0
        for count, item in enumerate(items, 1):
            if count <= done:
                continue
            self._at = count - 1, state
            interrupts.begin()
            try:
                yield item
            finally:
                interrupts.end()
            self._at = count, state
            if self.journal.due():
                self._save()
            self.check()
        if self.journal.records and count > done:
            self.journal.keep(self, *self._at)

    def check(self) -> None:
        """Stop here if that was asked for: between a fold's items, or before one changed anything.

        Raises:
            KeyboardInterrupt: it was; what was added up is saved.
        """
        if interrupts.asked():
            self._save()
            interrupts.check()

    def _save(self) -> None:
        if self.journal.records and self._at[0]:
            self.journal.keep(self, *self._at)
            self.journal.flush()


def _array(value: Tensor | np.ndarray) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


_current = Journal()


def stage(what: str) -> Stage:
    """The next stage of the run at work."""
    return _current.stage(what)


# Runs ---------------------------------------------------------------------------------------------

Run = TypeVar("Run", bound=Any)


def measured(
    analyzer: str,
    make: Callable[[], Run],
    worth: Callable[[Run], bool],
    *,
    out: str | os.PathLike[str] | None = None,
    work: Callable[[Run], None] = lambda run: run.measure(),
) -> Run:
    """Make a run and let it measure; interrupted, it is incomplete, but kept.

    Args:
        analyzer: the command's name.
        make: a new run: it has `model`, `text` (or None), `config`, `notices`, `complete`.
        worth: whether an interrupted run has anything to show.
        out: the run's folder: progress goes to `<out>.partial`. None: nowhere.
        work: all that is to be done, inside `model.measuring()`.

    Raises:
        InterpError: a run to take up that is another one, or one that was not to be taken up and
            whose progress is there; out of memory where no smaller batch would help.
        KeyboardInterrupt: there is nothing to show, or it was asked for twice.
    """
    global _current
    before = _current
    run: Any = make()
    what = None if out is None else identity(analyzer, run)
    with _opened(run.config, what, out) as journal:
        _current = journal
        try:
            while not _attempted(journal, run, worth, work):
                run = None  # what it holds takes memory
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                run = make()
            journal.finish()
        finally:
            _current = before
            interrupts.reset()
    run.notices += journal.notices
    if what is not None:
        run.weights_sha256 = what["model"]["weights"].split()[0]
    return run


def _attempted(
    journal: Journal, run: Any, worth: Callable[[Any], bool], work: Callable[[Any], None]
) -> bool:
    """Whether that was all; False: the device ran out of memory, and batches are smaller now."""
    journal.begin()
    try:
        with run.model.measuring(fused=True):
            work(run)
    except KeyboardInterrupt:
        if interrupts.twice():
            raise
        journal.flush()
        if not worth(run):
            raise
        run.complete = False
        run.notices.append("Interrupted: only what was measured until then is here.")
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        journal.flush()
        journal.halve()
        return False
    return True


def out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory ran out."""
    told = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(w in told for w in OUT_OF_MEMORY)


@contextlib.contextmanager
def _opened(
    config: Any, what: dict[str, Any] | None, out: str | os.PathLike[str] | None
) -> Iterator[Journal]:
    """The run's journal, with what an earlier process has saved where that is to be taken up."""
    if out is None or what is None:
        if config.resume:
            raise UsageError("resume needs out: the folder of the run to take up.")
        yield Journal()
        return
    target = Path(out).expanduser()
    partial = results.partial_of(target)
    folder = partial / results.PROGRESS
    lying = results.unfinished(target) / results.PROGRESS if config.resume else folder
    with contextlib.ExitStack() as stack:
        with _told(partial):
            lying.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locks.exclusive(lying / LOCK_FILE, wait=False))
            known = read_json(lying / RUN_FILE) if config.resume else None
            if known is not None:  # refused before anything is moved
                expect_same(known, what)
            elif results.has_progress(lying.parent):
                raise InterpError(_not_ours(lying.parent, config.resume))
            if config.resume:
                results.reopen(target)
            _replace(folder / RUN_FILE, json.dumps(what, indent=1).encode())
        journal = Journal(folder, config.checkpoint_every)
        if not journal.empty:
            journal.notices.append(
                "Taken up where an earlier process stopped: seconds are those of the last part."
            )
        try:
            yield journal
        except (Exception, KeyboardInterrupt):
            if journal.empty:  # nothing is lost with it
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    partial.rmdir()
            raise


def _not_ours(folder: Path, resume: bool) -> str:
    if resume:
        return (
            f"The progress in {folder} does not say which run it is of ({RUN_FILE} is missing or "
            "damaged), so it is not taken up. Delete that folder to begin again."
        )
    return (
        f"{folder} holds what an earlier run has measured, which is not thrown away unasked: "
        "take it up (resume=True), give another out, or delete that folder."
    )


def discard(out: str | os.PathLike[str]) -> None:
    """Throw away what an unfinished run has left in `<out>.partial` to be taken up.

    Raises:
        InterpError: another process is at work in it, or it cannot be written to.
    """
    partial = results.partial_of(Path(out).expanduser())
    folder = partial / results.PROGRESS
    if not folder.is_dir():
        return
    with _told(partial), locks.exclusive(folder / LOCK_FILE, wait=False):
        for file in folder.glob(results.PROGRESS_FILES):
            file.unlink()


@contextlib.contextmanager
def _told(partial: Path) -> Iterator[None]:
    """What keeps progress from being saved, as an InterpError."""
    try:
        yield
    except locks.TakenError:
        raise InterpError(
            f"Another process is at work in {partial}: wait for it, or choose another --out."
        ) from None
    except OSError as error:
        raise InterpError(
            f"cannot save progress in {partial}: {error.strerror or error}. Free space, or "
            "choose another --out."
        ) from error


def identity(analyzer: str, run: Any) -> dict[str, Any]:
    """All that a run's numbers depend on, as JSON has it: `run.reads` is what else it has read."""
    options = {k: v for k, v in dataclasses.asdict(run.config).items() if k not in NO_MATTER}
    text = run.text
    found = {
        "analyzer": analyzer,
        "options": options,
        "model": run.model.describe() | {"weights": fingerprint(run.model)},
        "data": None if text is None else text.describe() | _digests(text),
        "versions": results.environment(),
        **getattr(run, "reads", {}),
    }
    return json.loads(json.dumps(found, default=str))


def fingerprint(model: Model) -> str:
    """Of all that a model's function depends on, as two digests: of its weights, and of the rest.

    The rest: buffers, configuration, and what is attached to it (by name: what a hook does cannot
    be told).
    """
    own = model.bridge.original_model
    weights, function = hashlib.sha256(), hashlib.sha256()
    for name, tensor in sorted(own.named_parameters(), key=_name):
        _take_in(weights, name, tensor)
    for name, tensor in sorted(own.named_buffers(), key=_name):
        _take_in(function, name, tensor)
    config = {k: v for k, v in own.config.to_dict().items() if k != "_name_or_path"}
    function.update(json.dumps(config, sort_keys=True, default=str).encode())
    attached = [*hooks.foreign_hooks(model), *hooks.left_on(model)]
    function.update(json.dumps(attached).encode())
    return f"{weights.hexdigest()} {function.hexdigest()}"


def _name(pair: tuple[str, Tensor]) -> str:
    return pair[0]


def _digests(text: Text) -> dict[str, Any]:
    """Of the windows' token ids, of all documents that further ones may be drawn from and where
    those start, and of what cuts and includes tokens.
    """
    tokens, source = hashlib.sha256(), hashlib.sha256()
    for document in text.documents:
        for window in document.windows:
            tokens.update(np.array([document.index, len(window), *window]).tobytes())
    for index, row in text.pool.candidates:
        encoded = row.encode(errors="surrogatepass")
        source.update(f"{index} {len(encoded)} ".encode() + encoded)
    backend = getattr(text.pool.encoder.tokenizer, "backend_tokenizer", None)
    tokenizer = str(type(text.pool.encoder.tokenizer)) if backend is None else backend.to_str()
    return {
        "token_ids": tokens.hexdigest(),
        "source_sha256": source.hexdigest(),
        "tokenizer_sha256": hashlib.sha256(tokenizer.encode()).hexdigest(),
        "special_ids": sorted(text.special_ids),
        "next": text.next,
    }


def expect_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to take up a run that is another one.

    Raises:
        InterpError: what differs, with what it was and what it is.
    """
    found = differences(before, now)
    if found:
        told = "; ".join(found[:MOST])
        more = f"; and {len(found) - MOST} more" if len(found) > MOST else ""
        raise InterpError(
            f"The run to take up is another one: {told}{more}. Ask for the same again, or choose "
            "another --out."
        )


# Files --------------------------------------------------------------------------------------------

DIGEST, NEW = "digest", ".new"


def _write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    whole = dict(tensors) | {DIGEST: _digest(tensors)}
    new = file.with_name(file.name + NEW)
    try:
        save_file({k: v.contiguous() for k, v in whole.items()}, new)
        with new.open("rb+") as out:
            os.fsync(out.fileno())
        os.replace(new, file)
    except BaseException:  # on a full disk it would be in the way of the tables
        new.unlink(missing_ok=True)
        raise


def _read(file: Path) -> dict[str, Tensor] | None:
    """A file's tensors; None for one that is absent or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (OSError, SafetensorError, ValueError, KeyError):
        return None
    digest = tensors.pop(DIGEST, None)
    whole = digest is not None and torch.equal(digest, _digest(tensors))
    return tensors if whole else None


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


def _digest(tensors: Mapping[str, Tensor]) -> Tensor:
    """[32] bytes."""
    return torch.frombuffer(bytearray(sha256(tensors)), dtype=torch.uint8)


def sha256(tensors: Mapping[str, Tensor]) -> bytes:
    """Of names, shapes, dtypes and contents."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        _take_in(digest, name, tensors[name])
    return digest.digest()


def _take_in(digest: Any, name: str, tensor: Tensor) -> None:
    """Add a tensor's name, shape, dtype and bytes to a digest."""
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy())


def read_json(file: Path) -> dict[str, Any] | None:
    """A file's contents; None for one that is absent or damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _replace(file: Path, contents: bytes) -> None:
    """Write a file that is whole or as it was before."""
    new = file.with_name(file.name + NEW)
    with new.open("wb") as out:
        out.write(contents)
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, file)


# State as a tree ----------------------------------------------------------------------------------
# What a loop adds up, as JSON and tensors. Objects are written as their attributes (or what their
# `state_dict` says) and restored into the objects that are there: nothing that was read says which
# class to make.


def _expect_apart(stage: str, state: Values) -> None:
    """Refuse a state in which two names hold one tensor: taken up, each would get its own."""
    names: dict[tuple[str, int], str] = {}
    seen: set[int] = set()  # objects that several names may hold: they stay one

    def look(value: Any, name: str) -> None:
        if isinstance(value, Tensor | np.ndarray):
            held = isinstance(value, Tensor)
            where = (value.device.type, value.data_ptr()) if held else ("cpu", value.ctypes.data)
            if value.nbytes and names.setdefault(where, name) != name:
                raise InterpError(
                    f"What the stage {stage!r} adds up holds one tensor as {names[where]} and as "
                    f"{name}: taken up, each would have its own. Make it two tensors."
                )
            return
        parts: Mapping[Any, Any] = {}
        if isinstance(value, Mapping):
            parts = value
        elif isinstance(value, list | tuple):
            parts = dict(enumerate(value))
        elif hasattr(value, "__dict__") and not hasattr(value, "load_state_dict"):
            parts = vars(value)
        if parts and id(value) not in seen:
            seen.add(id(value))
            for key, part in parts.items():
                look(part, f"{name}.{key}" if name else str(key))

    look(state, "")


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor | np.ndarray | np.generic):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        if not isinstance(value, Tensor):
            value = torch.from_numpy(np.require(value, requirements=["C", "W"]))
        name = str(len(tensors))
        tensors[name] = value.detach()
        return {kind: name, "device": str(value.device)}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_pack(part, tensors) for part in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_pack(k, tensors), _pack(v, tensors)] for k, v in value.items()]}
    if hasattr(value, "load_state_dict"):
        return {"state": _pack(value.state_dict(), tensors)}
    return {"object": _pack(vars(value), tensors)}


def _unpack(node: Any, now: Any, tensors: Mapping[str, Tensor], shared: bool = False) -> Any:
    """The value; `now` is what stands in its place, changed in place where others may hold it.

    shared: tensors too (elsewhere they are replaced: two attributes may start as one tensor).
    """
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        value = tensors[node["tensor"]].to(node["device"], copy=True)  # not mapped from a file
        if shared and isinstance(now, Tensor) and now.shape == value.shape:
            return now.copy_(value)
        return value
    if "array" in node:
        array = tensors[node["array"]].numpy()
        if isinstance(now, np.ndarray) and now.shape == array.shape and now.dtype == array.dtype:
            now[...] = array
            return now
        return array.copy() if array.ndim else array[()]
    if "state" in node:
        now.load_state_dict(_unpack(node["state"], None, tensors))
        return now
    if "object" in node:
        for name, part in node["object"]["dict"]:
            vars(now)[name] = _unpack(part, vars(now).get(name), tensors)
        return now
    if "dict" in node:
        pairs = [(_unpack(k, None, tensors), v) for k, v in node["dict"]]
        there = now if isinstance(now, dict) else {}
        new = {k: _unpack(v, there.get(k), tensors, shared) for k, v in pairs}
        if isinstance(now, dict):
            now.clear()
            now.update(new)
            return now
        return new
    (kind,) = node
    there = now if isinstance(now, list | tuple) else ()
    parts = [
        _unpack(part, there[i] if i < len(there) else None, tensors)
        for i, part in enumerate(node[kind])
    ]
    if kind == "list" and isinstance(now, list):
        now[:] = parts
        return now
    return parts if kind == "list" else tuple(parts)

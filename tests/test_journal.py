"""Runs that are stopped and taken up: what `journal` saves, and that tables end the same."""

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from interp import cli, interrupts, journal, locks, results, splice
from interp.analyzers.asymmetry import asymmetry
from interp.analyzers.ffn_keys import ffn_keys
from interp.analyzers.heads import heads
from interp.analyzers.qkv import qkv
from interp.errors import InterpError, UsageError
from interp.model import Model, load_model
from interp.text import load_text
from probes import activations
from probes.run import superposition
from tests import tiny

DOCUMENTS = tiny.corpus(24)
CASES = {
    "heads": (
        heads,
        {"exact": True, "prune": True, "rescore": True, "keep_one": True, "step": 0.25},
    ),
    "heads, resampled": (heads, {"exact": True, "ablation": "resample", "roles": True}),
    "asymmetry": (asymmetry, {"activations": True, "symmetrise": True}),
    "ffn-keys": (ffn_keys, {"layer": ("all",), "top": 3, "sign": "both", "batch_size": 1}),
    "ffn-keys, some": (ffn_keys, {"layer": (1,), "key": (3, 20), "top": 2, "batch_size": 1}),
    "qkv": (qkv, {"each": "mean", "fit_documents": 4}),
    "superposition": (
        superposition,
        {"layer": 1, "width": (2,), "k": 4, "train_tokens": 400, "train_batch": 40, "top": 2}
        | {"loss_documents": 3, "null_model": True},
    ),
}
KILLS = 3


class Killed(BaseException):
    """Stands for kill -9: nothing catches it, and nothing is saved after it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two layers of two heads: few enough to be stopped after every one."""
    made = tmp_path_factory.mktemp("model") / "small"
    return tiny.make_checkpoint("gpt2", made, n_layer=2, n_head=2)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def text(model):
    return load_text(DOCUMENTS, model, documents=4, context=20, windows=True)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Small batches and blocks; and nothing of the weights alone, which is measured each time."""
    from interp.analyzers.ffn_keys import prefixes
    from interp.analyzers.heads import circuits

    monkeypatch.setattr(prefixes, "BATCH_TOKENS", {"cpu": 50})
    monkeypatch.setattr(activations, "BLOCK_TOKENS", 120)

    def none(*_args):
        raise InterpError("not in these tests")

    monkeypatch.setattr(circuits, "measure", none)


def run(case, model, text, **more):
    function, options = CASES[case]
    return function(model, text, **{"progress": False, "batch_size": 2} | options | more)


def saved(result, folder):
    """Every table of a result as its file's bytes."""
    result.save(folder, overwrite=True)
    return contents(folder)


def contents(folder):
    """The bytes of every table and SAE of a saved run."""
    files = [*Path(folder).glob("*.parquet"), *Path(folder).glob("sae*/*")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture
def at_pass(monkeypatch):
    """at_pass(n, act): act at the n-th forward pass from now, before it; returns the count."""
    forward = Model.forward

    def set_up(n=None, act=None):
        count = [0]

        def wrapped(self, batch):
            count[0] += 1
            if count[0] == n:
                act()
            return forward(self, batch)

        monkeypatch.setattr(Model, "forward", wrapped)
        return count

    return set_up


def die():
    raise Killed


@pytest.fixture(scope="module")
def wholes():
    return {}


@pytest.fixture
def whole(wholes, model, text, at_pass, tmp_path):
    """case -> (its tables' bytes, its forward passes), of a run that nobody stops."""

    def get(case):
        if case not in wholes:
            count = at_pass()
            tables = saved(run(case, model, text), tmp_path / "whole")
            assert len(tables) >= 2
            wholes[case] = tables, count[0]
        return wholes[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_killed_and_taken_up(case, model, text, whole, at_pass, tmp_path):
    """Stopped dead at random passes, several times over: the bytes of a run that was not."""
    expected, total = whole(case)
    rng = random.Random(case)
    out = tmp_path / "run"
    for kill in range(KILLS):
        at_pass(3 + rng.randrange(max(1, total // KILLS - 1)), die)
        with pytest.raises(Killed):  # saved as often as can be: each start gets further
            run(case, model, text, out=out, resume=kill > 0, checkpoint_every=0)
        assert not out.exists()
    count = at_pass()
    taken = run(case, model, text, out=out, resume=True)
    assert taken.complete
    assert count[0] < total  # something had been kept
    assert any("Taken up" in notice for notice in taken.notices)
    assert saved(taken, out) == expected
    assert not (out / results.PROGRESS).exists()


SCRIPT = """
import os, signal, sys
from interp.model import Model
from interp import cli
forward, left = Model.forward, [int(sys.argv[1])]
def dying(self, batch):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(self, batch)
Model.forward = dying
cli.main(sys.argv[2:])
"""


@pytest.fixture
def command(folder, tmp_path, monkeypatch):
    """command(*words): a command line with this model and text, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n\n".join(DOCUMENTS))
    shared = ["--model", str(folder), "--data", "text.txt", "--documents", "3", "--context", "20"]
    shared += ["--no-progress", "--device", "cpu", "--checkpoint-every", "0"]
    return lambda name, *words: [name, *shared, *words]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_kill_9_of_another_process(command):
    """The same through the command line, with a process that is really killed."""
    root = Path(__file__).parents[1]
    asked = command("heads", "--exact", "--batch-size", "2")
    assert cli.run([*asked, "--out", "whole"]) == 0
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "12", *asked, "--out", "r"],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "--resume" in done.stderr  # told while there was time
    assert not Path("r").exists()
    assert cli.run([*asked, "--out", "r"]) == 2  # what was measured is not thrown away
    assert cli.run([*asked, "--out", "r", "--resume"]) == 0
    for file in Path("whole").glob("*.parquet"):
        assert (Path("r") / file.name).read_bytes() == file.read_bytes()
    assert not Path("r.partial").exists()


def test_a_run_that_is_complete_is_not_taken_up(command, capsys):
    asked = command("asymmetry", "--out", "r")
    assert cli.run(asked) == 0
    assert cli.run([*asked, "--resume"]) == 1
    assert "r holds a complete run: there is nothing to take up" in capsys.readouterr().err
    assert cli.run([*command("asymmetry", "--out", "s"), "--resume"]) == 1
    assert "there is no run to take up" in capsys.readouterr().err


# Damage -------------------------------------------------------------------------------------------


def cut_short(file):
    file.write_bytes(file.read_bytes()[:-7])


def empty(file):
    file.write_bytes(b"")


def flip(file):
    contents = bytearray(file.read_bytes())
    contents[-3] ^= 1
    file.write_bytes(contents)


def not_renamed(file):
    file.rename(file.with_name(file.name + ".new"))


@pytest.mark.parametrize("damage", [cut_short, empty, flip, not_renamed])
def test_damaged_progress_is_measured_again(damage, model, text, whole, at_pass, tmp_path):
    expected, total = whole("ffn-keys")
    at_pass(total // 2, die)
    with pytest.raises(Killed):
        run("ffn-keys", model, text, out=tmp_path / "run", checkpoint_every=0)
    progress = tmp_path / "run.partial" / results.PROGRESS
    files = sorted(progress.glob("*.safetensors"))
    assert {file.name[:4] for file in files} >= {"sums", "0000"}
    for file in (files[0], files[len(files) // 2], files[-1]):
        damage(file)
    taken = run("ffn-keys", model, text, out=tmp_path / "run", resume=True)
    assert saved(taken, tmp_path / "run") == expected


# Nothing is thrown away unasked -------------------------------------------------------------------


def everything_in(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_progress_is_not_thrown_away_unasked(model, text, whole, at_pass, tmp_path):
    out, progress = tmp_path / "run", tmp_path / "run.partial" / results.PROGRESS
    at_pass(12, die)
    with pytest.raises(Killed):
        run("heads", model, text, out=out, checkpoint_every=0)
    at_pass()
    before = everything_in(progress)
    assert any(name.endswith(".safetensors") for name in before)
    for more in ({}, {"seed": 1}):
        with pytest.raises(InterpError) as caught:
            run("heads", model, text, out=out, **more)
        told = str(caught.value)
        assert all(w in told for w in ("run.partial", "resume=True", "another out", "delete"))
        assert everything_in(progress) == before
    # Where it does not say any more which run it is of, nor is it taken for this one.
    (progress / journal.RUN_FILE).write_text("{")
    with pytest.raises(InterpError, match="does not say which run it is of"):
        run("heads", model, text, out=out, resume=True)
    (progress / journal.RUN_FILE).write_bytes(before[journal.RUN_FILE])
    assert everything_in(progress) == before
    assert saved(run("heads", model, text, out=out, resume=True), out) == whole("heads")[0]


def test_overwrite_throws_it_away(command, at_pass):
    asked = command("heads", "--batch-size", "1")
    assert cli.run([*asked, "--out", "whole"]) == 0
    at_pass(2, die)
    with pytest.raises(Killed):
        cli.run([*asked, "--seed", "1", "--out", "r"])
    count = at_pass()
    assert list(Path("r.partial", results.PROGRESS).glob("*.safetensors"))
    assert cli.run([*asked, "--out", "r"]) == 2
    with locks.exclusive(Path("r.partial", results.PROGRESS, journal.LOCK_FILE), wait=False):
        assert cli.run([*asked, "--out", "r", "--overwrite"]) == 1  # another process is at work
    assert list(Path("r.partial", results.PROGRESS).glob("*.safetensors"))
    before = count[0]
    assert cli.run([*asked, "--out", "r", "--overwrite"]) == 0
    assert count[0] > before
    for file in Path("whole").glob("*.parquet"):
        assert Path("r", file.name).read_bytes() == file.read_bytes()


# Another run --------------------------------------------------------------------------------------


@pytest.fixture
def begun(model, text, at_pass, tmp_path):
    """The folder of a run that was interrupted, and saved as incomplete."""

    def interrupt():
        raise KeyboardInterrupt

    at_pass(12, interrupt)
    result = run("heads", model, text, out=tmp_path / "run")
    assert not result.complete
    result.save(tmp_path / "run")
    at_pass()
    return tmp_path / "run"


def test_an_interrupted_run_is_taken_up(begun, model, text, whole):
    assert not results.load_result(begun).complete
    taken = run("heads", model, text, out=begun, resume=True)
    assert saved(taken, begun) == whole("heads")[0]
    assert results.load_result(begun).complete


def test_another_run_is_refused(begun, folder, model, text, monkeypatch, tmp_path):
    """The difference is named, and the run that is there stays as it is."""

    def refused(*words, model=model, text=text, case="heads", **more):
        before = sorted(file.name for file in begun.rglob("*"))
        with pytest.raises(InterpError) as caught:
            run(case, model, text, out=begun, resume=True, **more)
        message = str(caught.value)
        assert "is another one" in message
        assert all(word in message for word in words), message
        assert not re.search("[0-9a-f]{32}", message), message
        assert sorted(file.name for file in begun.rglob("*")) == before

    refused("--seed was 0 and is 1", seed=1)
    refused("--ablation was zero and is mean", ablation="mean")
    refused("--batch-size was 2 and is 3", batch_size=3)
    refused("command was heads and is qkv", case="qkv")
    fewer = load_text(DOCUMENTS, model, documents=3, context=20, windows=True)
    refused("number of documents was 4 and is 3", text=fewer)
    other = load_text(DOCUMENTS[::-1], model, documents=4, context=20, windows=True)
    refused("other text", text=other)
    # The same sample, but of a source that has another document to hold out.
    taken = {document.text for document in text.documents}
    other = [d if d in taken else d + " more" for d in DOCUMENTS]
    same = load_text(other, model, documents=4, context=20, windows=True)
    assert same.sha256 == text.sha256
    refused("other documents in the data beside those of the sample", text=same)
    # The same folder, one weight of it changed a little.
    changed = load_model(folder, device="cpu")
    next(changed.bridge.original_model.parameters()).data.view(-1)[3] += 1e-3
    refused("other weights, another configuration", model=changed)
    # Two rows changed places: every sum stays as it was.
    changed = load_model(folder, device="cpu")
    matrix = next(p for p in changed.bridge.original_model.parameters() if p.ndim == 2).data
    matrix[[4, 5]] = matrix[[5, 4]]
    refused("other weights, another configuration", model=changed)
    # The same weights, another function of them.
    changed = load_model(folder, device="cpu")
    changed.bridge.original_model.config.layer_norm_epsilon = 0.5
    refused("other weights, another configuration", model=changed)
    changed = load_model(folder, device="cpu")
    changed.bridge.blocks[0].hook_in.add_hook(lambda tensor, hook: tensor * 1.01)
    refused("other weights, another configuration", model=changed)
    # The same documents, but other ones are left for what is fitted or judged on others.
    moved = dataclasses.replace(text, next=text.next + 1)
    refused("other documents to draw further ones from", text=moved)
    versions = results.environment() | {"torch": "1.0"}
    with monkeypatch.context() as patch:
        patch.setattr(results, "environment", lambda: versions)
        refused("another version of torch", "1.0 is")


def test_options_that_change_no_number_may_differ(begun, model, text):
    assert run("heads", model, text, out=begun, resume=True, checkpoint_every=7).complete


def test_two_at_once(begun, model, text):
    progress = begun / results.PROGRESS
    with (
        locks.exclusive(progress / journal.LOCK_FILE, wait=False),
        pytest.raises(InterpError, match="Another process is at work"),
    ):
        run("heads", model, text, out=begun, resume=True)
    assert progress.is_dir()
    with pytest.raises(UsageError, match="resume needs out"):
        run("heads", model, text, resume=True)


# Interruptions ------------------------------------------------------------------------------------


def at_removal(patch, n, act):
    """Act while the n-th removal of the sweep is at work."""
    run, count = splice.run_edited, [0]
    before = 2 + 2 * 4  # whether a run from the middle is exact, how long two sweeps will take

    def wrapped(*args, **more):
        count[0] += 1
        if count[0] == before + n:
            act()
        return run(*args, **more)

    patch.setattr(splice, "run_edited", wrapped)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_finishes_the_batch(command, monkeypatch, capfd):
    """Once: what was at work is measured, saved, marked incomplete; then taken up."""
    asked = command("heads", "--exact", "--batch-size", "8")
    assert cli.run([*asked, "--out", "whole"]) == 0
    with monkeypatch.context() as patch:
        at_removal(patch, 2, lambda: signal.raise_signal(signal.SIGINT))
        assert cli.run([*asked, "--out", "r"]) == 130
    err = capfd.readouterr().err
    assert "finishing the batch at work" in err
    assert "saved in r" in err
    assert "the same command with --resume --out r goes on from there" in err
    result = results.load_result("r")
    assert not result.complete
    assert result.tables["heads"]["loss_delta"].notna().tolist() == [True, True, False, False]
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert cli.run([*asked, "--out", "r", "--resume"]) == 0
    for file in Path("whole").glob("*.parquet"):
        assert (Path("r") / file.name).read_bytes() == file.read_bytes()


@pytest.mark.usefixtures("heard")
def test_ctrl_c_twice_stops_now(command, monkeypatch, capfd):
    asked = command("heads", "--exact", "--batch-size", "8")

    def both():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        at_removal(patch, 2, both)
        assert cli.run([*asked, "--out", "r"]) == 130
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "interrupted; the same command with --resume --out r goes on" in captured.err
    assert not Path("r").exists()
    assert cli.run([*asked, "--out", "r", "--resume"]) == 0


def test_between_batches_a_signal_is_not_put_off():
    interrupts.reset()
    assert not interrupts.put_off()
    interrupts.reset()
    interrupts.begin()
    assert interrupts.put_off()
    assert not interrupts.put_off()
    assert interrupts.twice()
    interrupts.end()
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
    interrupts.reset()
    interrupts.check()


# Disk ---------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_does_not_end_the_run(model, text, whole, monkeypatch, tmp_path):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "_write", full)
    result = run("qkv", model, text, out=tmp_path / "run", checkpoint_every=0)
    told = [notice for notice in result.notices if "No space left on device" in notice]
    assert len(told) == 1
    assert saved(result, tmp_path / "run") == whole("qkv")[0]


def test_progress_is_bounded(model, text, whole, monkeypatch, tmp_path):
    monkeypatch.setattr(journal, "MOST_BYTES", 3000)
    sizes, most = {}, []
    write = journal._write

    def noted(file, tensors):
        write(file, tensors)
        sizes[file.name] = sum(t.nbytes for t in tensors.values())
        most.append(sum(sizes.values()))

    monkeypatch.setattr(journal, "_write", noted)
    result = run("qkv", model, text, out=tmp_path / "run", checkpoint_every=0)
    assert any("GB is not saved" in notice for notice in result.notices)
    assert 1000 < max(most) <= 3000
    assert saved(result, tmp_path / "run") == whole("qkv")[0]


def test_saves_are_apart(tmp_path, monkeypatch):
    """As asked, and further where a save takes long."""
    now = [0.0]
    monkeypatch.setattr(journal.time, "monotonic", lambda: now[0])
    made = journal.Journal(tmp_path, 60)
    for at, due in ((59, False), (60, True)):
        now[0] = at
        assert made.due() is due
    write = journal._write

    def slow(*args):
        now[0] += 30
        write(*args)

    monkeypatch.setattr(journal, "_write", slow)
    made.put("a", {"x": np.zeros(2)})
    made.flush()
    now[0] = 90 + 599
    assert not made.due()
    now[0] = 90 + 600
    assert made.due()
    assert not journal.Journal(None).due()


# State --------------------------------------------------------------------------------------------


class Sums:
    def __init__(self):
        self.same = self.other = torch.zeros(2)
        self.by_name = {}
        self.count, self.parts = 0, []


def test_state_comes_back_as_it_was(tmp_path):
    """Bit for bit, into the objects that hold it; an alias does not become one value."""
    made = journal.Journal(tmp_path, 0)
    numbers = np.array([0.1, np.nan, -0.0, np.inf])
    total, sums = torch.tensor([1 / 3], dtype=torch.float64), Sums()
    sums.same, sums.count = torch.tensor([1.5, 2.5]), 7
    sums.by_name = {(1, "a"): [np.int64(3), 0.1 + 0.2], 2: (None, True, "x")}
    sums.parts = [torch.tensor([True]), torch.zeros(3, 0), torch.ones(1, dtype=torch.bfloat16)]
    state = {"numbers": numbers, "total": total, "sums": sums}
    stage = made.stage("one")
    made.keep(stage, 5, state)
    made.flush()

    other = journal.Journal(tmp_path, 0)
    found, flat, back = np.zeros(4), torch.zeros(1, dtype=torch.float64), Sums()
    into = {"numbers": found, "total": flat, "sums": back}
    assert other.restore(other.stage("one"), into) == 5
    assert found.tobytes() == numbers.tobytes()
    assert torch.equal(flat, total)
    assert back.same.tolist() == [1.5, 2.5]
    assert back.other.tolist() == [0, 0]
    assert back.count == 7
    assert back.by_name == sums.by_name
    assert all(torch.equal(a, b) for a, b in zip(back.parts, sums.parts, strict=True))
    assert [p.dtype for p in back.parts] == [p.dtype for p in sums.parts]
    assert other.restore(other.stage("one"), into) == 0  # the second stage of that name


def test_a_state_that_holds_one_tensor_twice_is_refused(tmp_path):
    """Taken up, each name would have its own, and what is added to one would miss in the other."""
    made = journal.Journal(tmp_path, 0)
    one, sums = torch.zeros(3), Sums()
    state = {"a": one, "b": {"c": [one]}}
    with pytest.raises(InterpError, match=r"one tensor as a and as b\.c\.0"):
        list(made.stage("s").fold([1], state))
    with pytest.raises(InterpError, match="as a and as b"):  # a view of its memory
        list(made.stage("s").fold([1], {"a": one, "b": one.view(3, 1).numpy()}))
    with pytest.raises(InterpError, match=r"as sums\.same and as sums\.other"):
        list(made.stage("s").fold([1], {"sums": sums}))
    sums.other = torch.zeros(2)
    # Objects stay one, and nothing is nobody's.
    state = {"a": sums, "b": [sums], "c": torch.zeros(0), "d": torch.zeros(0), "e": sums.by_name}
    assert list(made.stage("s").fold([1, 2], state)) == [1, 2]


def test_training_is_saved_however_large_it_is(tmp_path, monkeypatch):
    """And what it has come to holds for batches of any size; sums of batches do neither."""
    monkeypatch.setattr(journal, "MOST_BYTES", 1000)
    made = journal.Journal(tmp_path, 0)
    for training in (True, False):
        stage, sums = made.stage(f"training {training}"), {"x": torch.zeros(1000)}
        stage.size(8, 100)
        for i in stage.fold(range(1, 5), sums, training=training):
            sums["x"] += i
    made.flush()
    other = journal.Journal(tmp_path, 0)
    for training, left in ((True, []), (False, [1, 2, 3, 4])):
        stage, sums = other.stage(f"training {training}"), {"x": torch.zeros(1000)}
        stage.now = 4
        assert list(stage.fold(range(1, 5), sums, training=training)) == left
        assert bool((sums["x"] == (10 if training else 0)).all())


def test_torchs_own_protocol(tmp_path):
    """An optimiser comes back by its own account: the next steps are the same."""

    def fresh():
        torch.manual_seed(3)
        layer = torch.nn.Linear(3, 2)
        return layer, torch.optim.Adam(layer.parameters(), lr=0.1)

    def step(layer, adam, i):
        adam.zero_grad()
        layer(torch.arange(3.0) + i).square().sum().backward()
        adam.step()

    straight, stopped, again = fresh(), fresh(), fresh()
    for i in range(8):
        step(*straight, i)
    made = journal.Journal(tmp_path, 0)
    for i in made.stage("t").fold(range(8), {"both": list(stopped)}, training=True):
        if i == 5:
            break
        step(*stopped, i)
    other = journal.Journal(tmp_path, 0)
    done = []
    for i in other.stage("t").fold(range(8), {"both": list(again)}, training=True):
        done.append(i)
        step(*again, i)
    assert done == [5, 6, 7]
    assert torch.equal(again[0].weight, straight[0].weight)
    assert not torch.equal(stopped[0].weight, straight[0].weight)


def test_large_sums_do_not_wait_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "HELD_BYTES", 1000)
    made = journal.Journal(tmp_path, 3600)
    for size in (1000, 100):
        list(made.stage(f"of {size}").fold(range(3), {"x": torch.zeros(size)}))
    assert [journal._read(file)["0"].shape for file in tmp_path.glob("sums-*")] == [(1000,)]


def test_a_disk_that_is_full_is_left_as_it_was(tmp_path, monkeypatch):
    """No half of a file that would take the tables' room."""

    def full(tensors, file):
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    made = journal.Journal(tmp_path, 0)
    list(made.stage("s").each(1, lambda i: {"x": torch.zeros(3)}))
    assert any("No space left" in notice for notice in made.notices)
    assert not list(tmp_path.iterdir())


def test_a_stage_hands_over_what_was_saved(tmp_path):
    asked = []

    def compute(i):
        asked.append(i)
        return {"x": torch.tensor([i / 7], dtype=torch.float64), "none": None}

    first = journal.Journal(tmp_path, 0)
    given = list(first.stage("s").each(3, compute))
    assert [list(g) for g in given] == [["x"]] * 3
    second = journal.Journal(tmp_path, 0)
    stage = second.stage("s")
    again = list(stage.each(5, compute, ahead=2))
    assert asked == [0, 1, 2, 3, 4]
    assert [float(g["x"][0]) for g in again] == [i / 7 for i in range(5)]
    assert float(stage.once(lambda: compute(5))["x"][0]) == 5 / 7


# Memory -------------------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch):
    """memory(n): a device on which more than n rows, or n * 20 tokens, do not fit."""
    forward = Model.forward

    def set_up(rows):
        sizes = []

        def limited(self, batch):
            n, length = batch.tokens.shape
            if n > rows and n * length > rows * 20:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            sizes.append(n)
            return forward(self, batch)

        monkeypatch.setattr(Model, "forward", limited)
        return sizes

    return set_up


def close(a, b, rough=None):
    """Tables that differ by rounding only; tenfold in columns that begin with `rough`."""
    assert a.tables.keys() == b.tables.keys()
    for name, table in a.tables.items():
        some = [c for c in table.columns if rough and c.startswith(rough)]
        pairs = [(table.drop(columns=some), b.tables[name].drop(columns=some), 1e-4)]
        pairs += [(table[some], b.tables[name][some], 1e-3)]
        for mine, other, rtol in pairs:
            pd.testing.assert_frame_equal(mine, other, atol=1e-5, rtol=rtol)


@pytest.mark.parametrize(
    ("case", "saving"), [*((case, False) for case in CASES), ("heads", True), ("ffn-keys", True)]
)
def test_a_batch_that_does_not_fit_is_halved(case, saving, model, text, memory, tmp_path):
    whole = run(case, model, text, batch_size="auto")
    sizes = memory(3)
    more = {"out": tmp_path / "r", "checkpoint_every": 0} if saving else {}
    found = run(case, model, text, batch_size="auto", **more)
    assert max(sizes) > 1
    told = [notice for notice in found.notices if "are halved" in notice]
    assert told
    assert found.complete
    close(found, whole)


def test_what_was_saved_before_is_used_again(model, text, memory, at_pass, tmp_path):
    """Out of memory late: earlier stages keep their batches, and are not measured again."""
    count = at_pass()
    run("qkv", model, text, batch_size=4)
    total = count[0]
    forward, passes = Model.forward, []

    def limited(self, batch):
        passes.append(len(batch.tokens))
        if len(passes) == total - 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "forward", limited)
        found = run("qkv", model, text, batch_size=4, out=tmp_path / "r", checkpoint_every=0)
    assert [n for n in found.notices if "are halved" in n] == [
        "Out of memory (interventions): batches of 4 rows are halved. "
        "Numbers change by rounding only."
    ]
    # Means and moments are of other documents, in batches of 4: those passes happen once.
    assert passes.count(4) <= total


def test_nothing_smaller_is_left(model, text, memory):
    memory(0)
    with pytest.raises(InterpError, match=r"Out of memory.*no smaller batch would help"):
        run("qkv", model, text, batch_size=2)


@pytest.mark.parametrize(
    ("case", "after"),
    [
        ("heads, resampled", "heads.circuits.measure"),
        ("asymmetry", "asymmetry.example.measure"),
        ("qkv", "qkv.overlap.measure"),
    ],
)
def test_memory_that_runs_out_after_a_stage_halves_no_batch(
    case, after, model, text, monkeypatch, tmp_path
):
    tried = []

    def full(*_args, **_more):
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(f"interp.analyzers.{after}", full)
    with pytest.raises(InterpError, match="Out of memory, and no smaller batch would help"):
        run(case, model, text, out=tmp_path / "r", checkpoint_every=0)
    assert len(tried) == 1


def test_when_a_stage_is_at_work():
    made = journal.Journal()
    stage = made.stage("s")
    assert made.stage_now is None
    for _ in stage.through([1, 2]):
        assert made.stage_now is stage
        for _ in stage.each(2, lambda i: {"x": torch.zeros(1)}):
            assert made.stage_now is stage
        assert made.stage_now is stage
    assert made.stage_now is None

    def break_off():
        for _ in stage.fold([1, 2], {}):
            raise KeyError

    with pytest.raises(KeyError):  # which is still told of it
        break_off()
    assert made.stage_now is stage


def test_other_runtime_errors_are_not_taken_for_it(model, text, at_pass):
    def fail():
        raise RuntimeError("shapes cannot be multiplied")

    at_pass(5, fail)
    with pytest.raises(RuntimeError, match="shapes"):
        run("qkv", model, text)

"""`superposition` stopped, taken up, out of memory: the bytes of a run that nothing stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from interp import cli, journal, load_result, results
from interp.errors import InterpError
from interp.model import Model
from probes import activations, baselines, training
from probes.judging import Judge
from probes.reading import Around
from probes.run import superposition
from tests import tiny
from tests.test_journal import Killed, close, contents
from tests.test_superposition import OPTIONS, text_of

SHARED = OPTIONS | {"null_model": True, "batch_size": 4}
TRAINED = 3 * 14  # steps of the SAE, the random dictionary and the null model, in three blocks
SHORT = SHARED | {"train_tokens": 500}


def run(model, **more):
    return superposition(model, text_of(model), **(SHARED | more))


def saved(result, folder):
    result.save(folder, overwrite=True)
    return contents(folder)


def at(patch, owner, name, n=None, act=None):
    """Act at the n-th call of a function from now, before it; returns one entry for each call."""
    function, calls = getattr(owner, name), []

    def wrapped(*args, **more):
        calls.append(None)
        if len(calls) == n:
            act()
        return function(*args, **more)

    patch.setattr(owner, name, wrapped)
    return calls


def die():
    raise Killed


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module", autouse=True)
def _small_blocks():
    """Of five steps: they are what is shuffled in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "BLOCK_TOKENS", 500)
        yield


@pytest.fixture(scope="module")
def tiny_model(load):
    return load("gpt2")[0]


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """(its files' bytes, its summary, its forward passes) of a run that nobody stops."""
    with pytest.MonkeyPatch.context() as patch:
        passes, steps = at(patch, Model, "forward"), at(patch, training.Job, "step")
        result = run(tiny_model)
    files = saved(result, tmp_path_factory.mktemp("whole") / "r")
    assert len(steps) == TRAINED
    assert "sae/sae_weights.safetensors" in files
    return files, result.summary, len(passes)


# Killed -------------------------------------------------------------------------------------------

PLACES = {  # where, its how manyth call; training steps that are left then
    "calibrating": (activations.Stream, "run", 3, TRAINED),
    "in the second of two SAEs": (training.Job, "step", 18, TRAINED - 2 * 8),
    "judging": (Judge, "see", 20, 14),
    "reading contexts": (Around, "see", 2, 14),
    "training the null model": (training.Job, "step", 37, 6),
    "reading for concepts": (baselines, "permuted", 2, 0),
}


@pytest.mark.parametrize("place", PLACES)
def test_killed_and_taken_up(place, tiny_model, whole, monkeypatch, tmp_path):
    owner, name, n, left = PLACES[place]
    expected, summary, total = whole
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        at(patch, owner, name, n, die)
        with pytest.raises(Killed):
            run(tiny_model, out=out)
    assert not out.exists()
    with monkeypatch.context() as patch:
        passes, steps = at(patch, Model, "forward"), at(patch, training.Job, "step")
        taken = run(tiny_model, out=out, resume=True)
    assert len(steps) == left
    assert len(passes) < total
    assert taken.complete
    assert taken.summary == summary
    assert saved(taken, out) == expected
    assert not (out / results.PROGRESS).exists()


SCRIPT = """
import os, signal, sys
from pathlib import Path
from interp.model import load_model
from probes import activations, training
from tests.test_superposition_resume import run
activations.BLOCK_TOKENS = 500
step, left = training.Job.step, [17]
def dying(self, x):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, x)
training.Job.step = dying
run(load_model(sys.argv[1], device="cpu"), out=Path(sys.argv[2]))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_kill_9(tiny_model, checkpoint, whole, tmp_path):
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(checkpoint("gpt2")), str(tmp_path / "a")],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    again = run(tiny_model, out=tmp_path / "a", resume=True)
    assert saved(again, tmp_path / "a") == whole[0]


def test_another_run_is_refused(tiny_model, monkeypatch, tmp_path):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        at(patch, training.Job, "step", 3, die)
        with pytest.raises(Killed):
            run(tiny_model, out=out)
    for changed, words in (
        ({"k": 3}, "--k was 4 and is 3"),
        ({"train_batch": 50}, "--train-batch was 100 and is 50"),
        ({"width": (3,)}, "--width was 2 and is 3"),
    ):
        with pytest.raises(InterpError, match=words):
            run(tiny_model, out=out, resume=True, **changed)


def test_another_sae_under_the_same_name_is_refused(tiny_model, monkeypatch, tmp_path):
    """What --sae names is read, not its name alone."""
    options = SHORT | {"null_model": False}
    superposition(tiny_model, text_of(tiny_model), **options).save(tmp_path / "made")
    options |= {"sae": str(tmp_path / "made"), "out": tmp_path / "run"}
    with monkeypatch.context() as patch:
        at(patch, Around, "see", 2, die)
        with pytest.raises(Killed):
            superposition(tiny_model, text_of(tiny_model), **options)
    file = tmp_path / "made" / "sae" / "sae_weights.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    weights["b_dec"][0] += 1e-3
    file.unlink()
    save_file(weights, file)
    with pytest.raises(InterpError, match="is another one: another autoencoder where --sae says"):
        superposition(tiny_model, text_of(tiny_model), **options, resume=True)


def test_a_cache_goes_with_it(tiny_model, monkeypatch, tmp_path):
    """Killed within the second of three blocks, which is read from the cache."""
    cached = {"activations_cache": tmp_path / "cache", "null_model": False}
    whole = superposition(tiny_model, text_of(tiny_model), **(SHARED | {"null_model": False}))
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        at(patch, training.Job, "step", 14, die)
        with pytest.raises(Killed):
            run(tiny_model, out=out, **cached)
    with monkeypatch.context() as patch:
        read = at(patch, activations.Stream, "pieces")
        taken = run(tiny_model, out=out, resume=True, **cached)
    assert len(read) == 2  # the calibration's, which are saved, and the last block's
    assert saved(taken, out) == saved(whole, tmp_path / "whole")


# Interrupted --------------------------------------------------------------------------------------


@pytest.fixture
def command(checkpoint, tmp_path, monkeypatch):
    """The words of a command line, in a folder of its own; ten steps."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n\n".join(tiny.corpus(90)))
    words = f"superposition --model {checkpoint('gpt2')} --data text.txt --documents 8 --context 32"
    words += " --layer 1 --width 2 --k 4 --train-tokens 1000 --train-batch 100 --loss-documents 2"
    words += " --top 2 --no-concepts --batch-size 4 --no-progress --device cpu --checkpoint-every 0"
    return words.split()


@pytest.mark.usefixtures("heard")
def test_ctrl_c_in_training_keeps_the_sae(command, monkeypatch, capfd):
    assert cli.run([*command, "--out", "whole"]) == 0
    with monkeypatch.context() as patch:
        at(patch, training.Job, "step", 5, ctrl_c)  # the first of two SAEs, third step
        assert cli.run([*command, "--out", "r"]) == 130
    err = capfd.readouterr().err
    assert "finishing the batch at work" in err
    assert "saved in r" in err
    assert "the same command with --resume --out r goes on from there" in err
    result = load_result("r")
    assert not result.complete
    assert result.summary["train_tokens"] == 300
    assert any(notice.startswith("Trained on 300 positions.") for notice in result.notices)
    assert (Path("r") / "sae" / "sae_weights.safetensors").is_file()
    with monkeypatch.context() as patch:
        steps = at(patch, training.Job, "step")
        assert cli.run([*command, "--out", "r", "--resume"]) == 0
    assert len(steps) == 2 * 7
    assert "300 of 1,000 positions are done" in capfd.readouterr().err
    assert contents("r") == contents("whole")


@pytest.mark.usefixtures("heard")
def test_ctrl_c_while_the_model_runs_for_a_block(command, monkeypatch):
    """It need not end; what was trained before is kept."""
    with monkeypatch.context() as patch:
        at(patch, activations.Stream, "block", 2, ctrl_c)
        runs, at_block = at(patch, activations.Stream, "run"), []
        at(patch, activations.Stream, "block", 2, lambda: at_block.append(len(runs)))
        assert cli.run([*command, "--out", "r"]) == 130
    assert len(runs) == at_block[0] + 1
    assert load_result("r").summary["train_tokens"] == 500
    assert cli.run([*command, "--out", "r", "--resume"]) == 0
    assert cli.run([*command, "--out", "whole"]) == 0
    assert contents("r") == contents("whole")


@pytest.mark.usefixtures("heard")
def test_ctrl_c_twice_stops_now(command, monkeypatch, capfd):
    def both():
        ctrl_c()
        ctrl_c()

    with monkeypatch.context() as patch:
        at(patch, training.Job, "step", 5, both)
        assert cli.run([*command, "--out", "r"]) == 130
    assert "interrupted; the same command with --resume --out r goes on" in capfd.readouterr().err
    assert not Path("r").exists()
    assert cli.run([*command, "--out", "r", "--resume"]) == 0


def interrupt():
    raise KeyboardInterrupt


def test_in_a_notebook_it_is_not_put_off(tiny_model, whole, monkeypatch, tmp_path):
    """Nobody handles the signal: it comes at once, here between the two SAEs of a step."""
    out = tmp_path / "r"
    with monkeypatch.context() as patch:
        at(patch, training.Job, "step", 22, interrupt)
        result = run(tiny_model, out=out)
    assert not result.complete
    assert result.summary["train_tokens"] == 1100
    result.save(out)
    assert not load_result(out).complete
    assert saved(run(tiny_model, out=out, resume=True), out) == whole[0]


def test_nothing_to_show(tiny_model, monkeypatch, tmp_path):
    """Interrupted before the first step: there is no SAE."""
    at(monkeypatch, training.Job, "step", 1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_model, out=tmp_path / "r")


# Out of memory ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(tiny_model):
    """Whether with concepts, which take longest -> a run on which memory never ran out."""
    return {
        concepts: superposition(tiny_model, text_of(tiny_model), concepts=concepts, **SHORT)
        for concepts in (False, True)
    }


STAGES = ["calibration", "training sae", "judging", "splicing", "reading", "concepts"]
STAGES += ["concepts of null model"]


def limited(patch, stage, rows):
    """A device on which more than so many rows do not fit while a stage is at work."""
    forward = Model.forward

    def wrapped(self, batch):
        now = journal._current.stage_now
        if now is not None and now.name == stage and len(batch.tokens) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(self, batch)

    patch.setattr(Model, "forward", wrapped)


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_that_does_not_fit_is_halved(stage, tiny_model, short, monkeypatch, tmp_path):
    """Once or twice; nothing is trained again, and the batches of training stay."""
    rows = 1 if stage in ("training sae", "judging") else 2
    step, sizes, concepts = training.Job.step, [], stage.startswith("concepts")

    def noted(self, x):
        sizes.append(len(x))
        step(self, x)

    with monkeypatch.context() as patch:
        limited(patch, stage, rows)
        patch.setattr(training.Job, "step", noted)
        found = superposition(
            tiny_model, text_of(tiny_model), out=tmp_path / "r", concepts=concepts, **SHORT
        )
    told = [notice for notice in found.notices if notice.startswith("Out of memory")]
    assert told == [
        f"Out of memory ({stage}): batches of {size} rows are halved. Numbers change by rounding "
        "only."
        for size in ((4, 2) if rows == 1 else (4,))
    ]
    assert sizes == 15 * [100]
    # Removing this MLP costs this model next to nothing: shares of that magnify rounding.
    close(found, short[concepts], rough="loss_recovered")


def test_training_goes_on_with_smaller_batches(tiny_model, whole, monkeypatch, tmp_path):
    """Out of memory in a late block, and killed after that: no step is done twice."""
    forward, out = Model.forward, tmp_path / "r"

    def limited(self, batch):
        if len(steps) == 2 * 10 and len(batch.tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, batch)

    with monkeypatch.context() as patch:
        steps = at(patch, training.Job, "step", 26, die)
        patch.setattr(Model, "forward", limited)
        with pytest.raises(Killed):
            run(tiny_model, out=out)
    with monkeypatch.context() as patch:
        left = at(patch, training.Job, "step")
        taken = run(tiny_model, out=out, resume=True)
    assert len(left) == TRAINED - 24
    name = "sae/sae_weights.safetensors"
    weights, expected = load(taken.files[name]), load(whole[0][name])
    for name, weight in weights.items():
        assert torch.allclose(weight, expected[name], atol=1e-3), name


def test_without_a_folder_it_begins_again(tiny_model, short, monkeypatch):
    limited(monkeypatch, "judging", 2)
    found = superposition(tiny_model, text_of(tiny_model), concepts=False, **SHORT)
    close(found, short[False])


def test_a_training_step_that_does_not_fit_is_told(tiny_model, monkeypatch):
    """A smaller batch of the model's would not help, and that of training is a hyper-parameter."""

    def full(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("sae_lens.training.sae_trainer.SAETrainer.step", full)
    with pytest.raises(InterpError, match=r"training step of sae .*smaller --train-batch or"):
        run(tiny_model)

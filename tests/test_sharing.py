"""Two processes at once, a network that is silent, a disk without room."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from interp import hub, locks, results
from interp.errors import InterpError
from tests import tiny
from tests.test_dequantise import write_gguf

ROOT = Path(__file__).parents[1]

CONVERT = """
import sys, time
from pathlib import Path
from interp import dequantise
convert = dequantise._convert
def slow(path, part):
    Path(sys.argv[2]).open("a").write("made\\n")
    time.sleep(1.5)
    return convert(path, part)
dequantise._convert = slow
folder, _ = dequantise.folder_of(Path(sys.argv[1]))
from interp.model import load_model
model = load_model(sys.argv[1], device="cpu")
print(sum(float(p.double().sum()) for p in model.bridge.original_model.parameters()))
"""


def start(script, *words, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_dequantise_one_file(tmp_path, cache):
    """One of them does it, the other waits; neither takes it from under the other."""
    write_gguf(tmp_path / "a.gguf")
    both = [start(CONVERT, tmp_path / "a.gguf", tmp_path / "log") for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0] != ""
    assert (tmp_path / "log").read_text() == "made\n"
    assert len(list((cache / "models").iterdir())) == 1


def test_a_lock_goes_with_its_holder(tmp_path):
    file = tmp_path / "lock"
    with (
        locks.exclusive(file, wait=False),
        pytest.raises(locks.TakenError),
        locks.exclusive(file, wait=False),
    ):
        pass
    with locks.exclusive(file, wait=True):
        pass


def test_a_cache_of_activations_is_not_emptied_by_another_run(tmp_path):
    """Begun by one process, opened by another before anything was said to be there."""
    from probes.activations import Cache

    first = Cache(tmp_path, {"a": 1}, (4, 2))
    first.map[:2] = 7
    second = Cache(tmp_path, {"a": 1}, (4, 2))
    first.write(0, np.full((2, 2), 7, dtype=np.float32))
    second.write(0, np.full((2, 2), 7, dtype=np.float32))
    third = Cache(tmp_path, {"a": 1}, (4, 2))
    assert third.done == 2
    assert (third.read(0, 2) == 7).all()


OFFLINE = """
import socket, sys
tried = []
def refuse(*words, **more):
    tried.append(words)
    raise OSError("no network in this test")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from interp import cli
status = cli.run(sys.argv[1:])
print("tried", tried)
sys.exit(status)
"""


@pytest.mark.parametrize("more", [[], ["--offline"]])
def test_a_run_with_all_at_hand_asks_nobody(checkpoint, tmp_path, more):
    """With the hub allowed: no library underneath asks it either."""
    (tmp_path / "text.txt").write_text("\n\n".join(tiny.corpus(4)))
    words = ["heads", "--model", checkpoint("llama"), "--data", tmp_path / "text.txt"]
    words += ["--context", "16", "--documents", "2", "--out", tmp_path / "r", *more]
    process = start(OFFLINE, *words, HF_HUB_OFFLINE="0")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "tried []"


def test_a_hub_that_takes_the_call_and_is_silent(monkeypatch):
    """It costs the limit, once: a second question is not asked."""
    from huggingface_hub import constants

    calls = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            held = []
            while True:
                try:
                    held.append(server.accept())
                except OSError:
                    return
                calls.append(1)

        threading.Thread(target=accept, daemon=True).start()
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.reachable.cache_clear()
        try:
            began = time.monotonic()
            assert not hub.reachable(timeout=0.3)
            assert not hub.reachable(timeout=0.3)
            assert hub.PROBE_SECONDS <= 3
            assert time.monotonic() - began < 30
        finally:
            hub.reachable.cache_clear()
    assert len(calls) == 1


def test_libraries_are_kept_from_asking(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(hub, "reachable", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub.asked_if_reachable():
        assert constants.is_offline_mode()
    assert not constants.is_offline_mode()
    monkeypatch.setattr(hub, "reachable", lambda: True)
    with hub.asked_if_reachable():
        assert not constants.is_offline_mode()


def test_no_room_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 5_000_000})
    monkeypatch.setattr(results.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InterpError, match="5 MB of disk are free"):
        results.check_folder(tmp_path / "deep" / "run")
    monkeypatch.undo()

    def full(**_more):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(results.tempfile, "TemporaryFile", full)
    with pytest.raises(InterpError, match=r"cannot make .*run': Disk quota exceeded"):
        results.check_folder(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_told_before_the_model_loads(checkpoint, tmp_path, monkeypatch, capsys):
    from interp import cli, model

    monkeypatch.setattr(model, "load_model", lambda *_a, **_m: pytest.fail("loaded"))
    monkeypatch.setattr(results, "ROOM", 10**18)
    words = ["heads", "--model", str(checkpoint("gpt2")), "--out", str(tmp_path / "r")]
    assert cli.run(words) == 1
    assert "of disk are free there" in capsys.readouterr().err


def test_torch_is_told_apart(monkeypatch):
    """What counts as out of memory: torch's own error, and its words on other devices."""
    from interp.journal import out_of_memory

    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"))
    told = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"
    assert out_of_memory(RuntimeError(told))
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))

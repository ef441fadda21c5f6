"""Runs that are killed (kill -9) at random moments and taken up, until they end: how many survived?

    python -m tests.kills [kills per analyzer]

A child process measures a tiny model; this one kills it after a random time, in the middle of
whatever it does, writing included. Every table and SAE of a run that ends must have the bytes of
one that nothing stopped. Prints one line per analyzer; exit status 1 where one differs.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from interp.model import load_model
from interp.text import load_text
from tests import tiny
from tests.test_journal import CASES, DOCUMENTS, contents, run

SEED = 0


def child(act):
    """Start a process that does this, and nothing after it."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        torch.set_num_threads(1)  # a forked process has no other threads
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        act()
        status = 0
    finally:
        os._exit(status)


def wait(process, seconds=None):
    """Its exit status; None where it is still at work after that time."""
    until = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(process, 0 if until is None else os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.002)


def main(kills):
    """Every analyzer in turn."""
    torch.set_num_threads(1)
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = tiny.make_checkpoint("gpt2", place / "small", n_layer=2, n_head=2)
        model = load_model(folder, device="cpu")
        text = load_text(DOCUMENTS, model, documents=4, context=20, windows=True)
        for case in CASES:
            whole, out = place / f"{case} whole", place / f"{case} run"
            began = time.monotonic()

            def measure(out, case=case, **more):
                run(case, model, text, out=out, **more).save(out)

            assert wait(child(lambda: measure(whole))) == 0  # noqa: B023
            took, expected = time.monotonic() - began, contents(whole)
            rng, survived, ended, same = random.Random(f"{SEED} {case}"), 0, 0, 0
            while survived < kills or not ended:
                again = out.with_name(out.name + ".partial").exists()
                every = rng.choice((0, 0, 1))
                process = child(lambda: measure(out, resume=again, checkpoint_every=every))  # noqa: B023
                status = wait(process, rng.uniform(0, took / 2) if survived < kills else None)
                if status is None:
                    os.kill(process, signal.SIGKILL)
                    status = wait(process)
                    survived += status == -signal.SIGKILL
                if not out.exists():
                    assert status != 1, "an error, not a kill"
                    continue
                ended += 1
                same += contents(out) == expected
                shutil.rmtree(out)
            print(f"{case}: {survived} kills; {same} of {ended} runs ended with the same bytes")
            wrong += ended - same
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))

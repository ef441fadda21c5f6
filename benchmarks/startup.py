"""What a user waits for before anything is measured: help and import, in fresh processes.

Commands alternate. CPU seconds (user and system) are given as a ratio to `python -c pass`, the
median of ten; the ceiling of 0.3 s is for the best of ten on the wall: a busy machine only adds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.common import Options, Row, Time

RUNS = 10
SECONDS = 0.3
SCRIPT = "import sys; from interp.cli import main; sys.argv = ['interp', *sys.argv[1:]]; main()"
COMMANDS = {
    "interp --help": [sys.executable, "-c", SCRIPT, "--help"],
    "interp heads --help": [sys.executable, "-c", SCRIPT, "heads", "--help"],
    "import interp": [sys.executable, "-c", "import interp"],
}
NOTHING = [sys.executable, "-c", "pass"]


def run(options: Options) -> list[Row]:
    wanted = {name: command for name, command in COMMANDS.items() if options.wants(name)}
    runs: dict[str, list[Time]] = {name: [] for name in ["nothing", *wanted]}
    for _ in range(options.reps or RUNS):
        for name, command in {"nothing": NOTHING, **wanted}.items():
            runs[name].append(once(command))
    rows = []
    for name in wanted:
        pairs = zip(runs[name], runs["nothing"], strict=True)
        rows.append(Row(name, "CPU s / python -c pass", [a.cpu / b.cpu for a, b in pairs]))
        wall = [t.wall for t in runs[name]]
        rows.append(Row(name, "seconds (best)", wall, at_most=SECONDS, best=True))
    return rows


def once(command: list[str]) -> Time:
    """One process, start to end."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command[-2:]} failed: {errors.decode()[-500:]}")
    return Time(wall, usage.ru_utime + usage.ru_stime)

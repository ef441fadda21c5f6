"""`python -m benchmarks [NAME ...]`: tables of ratios, kept in results.md."""

from __future__ import annotations

import argparse
import datetime
import importlib
import logging
import os
import platform
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

# name -> what its ratios are of; one module each, with run(options) -> rows
BENCHMARKS = {
    "startup": "CPU seconds of a command over those of `python -c pass`",
    "memory": "peak memory over that with fewer documents",
    "importance": "interp's gradients over one forward and one backward pass",
    "exact": "every head removed one at a time",
    "ffn_keys": "the triggers of all keys in one pass over the text",
    "removal": "speed of a checkpoint without some heads against what its weights promise",
    "growth": "how time and memory grow with the size of a job",
    "sae": "training and judging a sparse autoencoder",
    "asymmetry": "weight metrics over A written out, scores on text over a forward pass",
}
RESULTS = Path(__file__).with_name("results.md")
PACKAGES = ("torch", "transformers", "transformer-lens", "numpy")


def main() -> int:
    """Run what was asked for; 1 if a target was missed or a ratio does not count."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--reps", type=int, help="repetitions; default: each benchmark's own")
    parser.add_argument("--case", action="append", default=[], help="cases named so; not written")
    parser.add_argument("--batch-tokens", type=int, default=512, help="tokens of a batch")
    parser.add_argument("--no-write", action="store_true", help="leave results.md as it is")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    # Before torch is imported: threads that spin would slow the other side of a ratio too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.disable(logging.WARNING)
    from benchmarks.common import Options, table

    options = Options(given.device, given.reps, given.case, given.batch_tokens)
    good = True
    for name in [n for n in BENCHMARKS if n in (given.names or BENCHMARKS)]:
        began = time.perf_counter()
        rows = importlib.import_module(f"benchmarks.{name}").run(options)
        if not rows:
            continue
        section = "\n".join(
            [
                f"## {name}: {BENCHMARKS[name]}",
                "",
                table(rows),
                "",
                f"{_setting(given.device)}; {time.perf_counter() - began:.0f} s.",
            ]
        )
        print(section, end="\n\n", flush=True)
        good &= all(row.verdict in ("met", "") for row in rows)
        if not (given.no_write or given.case):
            write(name, section)
    return 0 if good else 1


def write(name: str, section: str) -> None:
    """Put a benchmark's section in place of its last one, the others staying as they are."""
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    parts = re.split(r"^(?=## )", old, flags=re.MULTILINE)[1:]
    sections = {part.split(":")[0].removeprefix("## "): part.strip() for part in parts}
    sections[name] = section
    head = (
        "# Benchmarks\n\nWritten by `python -m benchmarks`. Every figure is a ratio of things that "
        "ran\nalternately: the median of n repetitions, with the smallest and the largest."
    )
    ordered = [sections[n] for n in BENCHMARKS if n in sections]
    RESULTS.write_text("\n\n".join([head, *ordered]) + "\n", encoding="utf-8")


def _setting(device: str) -> str:
    python = f"Python {platform.python_version()}"
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    today = datetime.date.today().isoformat()
    where = f"{os.cpu_count()} cores of {_cpu()}"
    if device.startswith("cuda"):
        import torch

        where = f"{torch.cuda.get_device_name(device)}, {where}"
    return f"{today}, {where}, {platform.system()}, {python}, {packages}"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())

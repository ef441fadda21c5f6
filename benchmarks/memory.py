"""Peak memory against the number of documents, each run in a process of its own.

Peak resident memory of `interp.heads` on a small random model, with 100 and 1,000 documents. Python
with torch weighs several hundred MB before anything is measured, which would hide growth: so the
increment is given as well.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import Options, Row, peak_of, random_documents, save_gpt2, used

AT_MOST = 1.05
REPS = 1
WORDS = 64
SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 8192, "n_positions": 64}
CASES = {
    "heads --prune": {"prune": True, "step": 0.5},
    "heads --exact": {"exact": True},
}
COUNTS = (100, 1000)


def run(options: Options) -> list[Row]:
    rows: list[Row] = []
    wanted = [name for name in CASES if options.wants(name)]
    if not wanted:
        return rows
    with TemporaryDirectory() as temporary:
        folder = save_gpt2(Path(temporary) / "small", **SHAPE)
        for case in wanted:
            rows.append(compare(case, folder, options.reps or REPS))
    return rows


def compare(case: str, folder: Path, reps: int) -> Row:
    """1,000 documents over 100."""
    few, many = ([] for _ in COUNTS)
    for _ in range(reps):
        for count, peaks in zip(COUNTS, (few, many), strict=True):
            peaks.append(peak_of("benchmarks.memory", case, str(folder), str(count)))
    small, large = (statistics.median(peaks) for peaks in (few, many))
    note = (
        f"{case}: {small:.0f} MB with {COUNTS[0]} documents, {large - small:+.0f} MB with "
        f"{COUNTS[1]} (a batch is up to 32 documents of 64 tokens)."
    )
    ratios = [b / a for a, b in zip(few, many, strict=True)]
    return Row(case, f"{COUNTS[1]} / {COUNTS[0]} documents", ratios, at_most=AT_MOST, notes=[note])


def child(case: str, folder: str, documents: int) -> None:
    """The run itself, in a process of its own."""
    import interp

    # As many again: what --exact holds out must not be fewer than what it measures.
    made = random_documents(2 * documents, WORDS, SHAPE["vocab_size"])
    model = interp.load_model(folder, device="cpu")
    text = interp.load_text(made, model, documents=documents, context=WORDS)
    interp.heads(model, text, progress=False, **CASES[case])


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(used())

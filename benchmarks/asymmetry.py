"""Weight metrics of all heads against A written out; correlations on text against a bare forward.

The other side of the weights makes A = W_Q W_K^T, d_model x d_model in float64, head by head, and
reads the same metrics off it: symmetry and directionality by one pass each, and for the whole set
also the largest singular value, the eigenvalues, and the singular values of A - A^T. The shape is
GPT-2 XL's (48 layers of 25 heads, 1600 x 64); layers are alike, so that few stand for all of them.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.common import ZERO, Options, Row, full_text, peak_of, smollm2, timed, used
from interp import scores
from interp.analyzers.asymmetry import ontext, weights
from interp.progress import batches

HEADS, D_MODEL, D_HEAD, LAYERS = 25, 1600, 64, 48
FASTER, LESS, SLOWER = 50, 10, 1.5
NOISE = 5.0  # MB between two fresh processes that do the same
SOME = ("symmetry", "directionality")
CPU = torch.device("cpu")
CASES = {
    "all metrics, GPT-2 XL shape": weights.METRICS,
    "symmetry and directionality only": SOME,
}


def run(options: Options) -> list[Row]:
    rows = [of_weights(name, options) for name in CASES if options.wants(name)]
    if options.wants("memory"):
        rows.append(memory(options))
    for context in (64, 512):
        name = f"--activations, {context} tokens"
        if options.wants(name):
            rows.append(on_text(name, context, options))
    return rows


def layer() -> tuple[torch.Tensor, torch.Tensor]:
    """W_Q and W_K of one layer."""
    generator = torch.Generator().manual_seed(0)
    w_q, w_k = torch.randn(2, HEADS, D_MODEL, D_HEAD, generator=generator) / D_MODEL**0.5
    return w_q, w_k


def mine(w_q: torch.Tensor, w_k: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
    """[metric, head] by interp."""
    found = weights.Layer(w_q, w_k).metrics(names)
    return torch.stack([found[name] for name in names])


def written_out(w_q: torch.Tensor, w_k: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
    """[metric, head] from A itself."""
    out = []
    for q, k in zip(w_q.double(), w_k.double(), strict=True):
        a = q @ k.T
        square = (a * a).sum()
        found = {"symmetry": (a * a.T).sum() / square}
        rows, columns = a.norm(dim=1), a.norm(dim=0)
        found["directionality"] = weights.direction(rows, columns)
        if "stable_rank" in names:
            found["stable_rank"] = square / torch.linalg.matrix_norm(a, 2) ** 2
            values = torch.linalg.eigvals(a)
            top = values.abs().max()
            nonzero = values.abs() > weights.ZERO * top
            positive = nonzero & (values.real > weights.ZERO * top)
            found["positive_real"] = positive.sum() / nonzero.sum()
            s = torch.linalg.svdvals(a - a.T)
            found["antisymmetric_rank"] = (s**2).sum() ** 2 / (s**4).sum()
        out.append(torch.stack([found[name].double() for name in names]))
    return torch.stack(out, 1)


def of_weights(name: str, options: Options) -> Row:
    """How many times faster."""
    names = CASES[name]
    w_q, w_k = layer()
    some = 1 if names is not SOME else HEADS  # heads that are written out, the rest being alike
    mine(w_q, w_k, names)
    ratios, cpu, gap, fast = [], [], 0.0, ZERO
    for _ in range(options.reps or (2 if some == 1 else 5)):
        theirs, slow = timed(lambda: written_out(w_q[:some], w_k[:some], names), CPU)
        own, fast = timed(lambda: mine(w_q, w_k, names), CPU)
        slow = slow * (HEADS / some)
        ratios.append(slow.wall / fast.wall)
        cpu.append(slow.cpu / fast.cpu)
        gap = max(gap, float((own[:, :some] - theirs).abs().max()))
    note = (
        f"{name}: one of {LAYERS} layers; A written out for {some} of its {HEADS} heads; interp "
        f"takes {fast.wall:.2f} s per layer."
    )
    target = FASTER if some == 1 else None
    return Row(name, "A written out / interp", ratios, cpu, at_least=target, gap=gap, notes=[note])


def memory(options: Options) -> Row:
    """Peaks of fresh processes over that of one that measures next to nothing."""
    ratios, grown = [], {"written_out": 0.0, "mine": 0.0}
    nothing = peak_of("benchmarks.asymmetry", "nothing")
    for _ in range(options.reps or 3):
        for which in grown:
            grown[which] = max(peak_of("benchmarks.asymmetry", which) - nothing, NOISE)
        ratios.append(grown["written_out"] / grown["mine"])
    note = (
        f"memory: +{grown['written_out']:.1f} MB with A written out, +{grown['mine']:.1f} MB with "
        f"interp, over {nothing:.0f} MB (less than {NOISE} counts as {NOISE})."
    )
    return Row("memory", "A written out / interp", ratios, at_least=LESS, notes=[note])


def child(which: str) -> None:
    """The symmetry of one layer, in a process of its own."""
    w_q, w_k = layer()
    calls = {"mine": mine, "written_out": written_out}
    for call in calls.values():  # libraries set up their buffers
        call(w_q[:2, :128], w_k[:2, :128], SOME)
    if which in calls:
        calls[which](w_q, w_k, SOME)
    print(used())


def on_text(name: str, context: int, options: Options) -> Row:
    """How many times longer than a bare forward pass that writes out scores, as what reads them."""
    model = smollm2(options.device)
    forms = scores.form(model)
    size = max(1, 2048 // context)
    text = full_text(model, size, context)
    ratios, cpu = [], []

    def bare() -> None:
        for batch in batches(model, text, size):
            model.forward(batch)

    with model.measuring():
        bare()
        for _ in range(options.reps or 3):
            _, plain = timed(bare, model.device)
            _, own = timed(
                lambda: ontext.measure(model, text, forms, size, controls=False), model.device
            )
            ratios.append(own.wall / plain.wall)
            cpu.append(own.cpu / plain.cpu)
    note = f"{name}: a batch of {size} documents of the embedded model, without controls."
    return Row(name, "interp / bare forward", ratios, cpu, at_most=SLOWER, notes=[note])


if __name__ == "__main__":
    child(sys.argv[1])

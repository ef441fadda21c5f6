"""How a run of the toy model of superposition is told."""

from __future__ import annotations

from typing import Any

from interp.report.view import Digest, View
from interp.report.words import count, interval, number, percent, unsigned
from interp.results import Result


def findings(result: Result) -> list[str]:
    """Plain sentences, most important first."""
    summary = result.summary
    n, m = (count(result.config.get(key)) for key in ("features", "dimensions"))
    failed = [
        str(what)
        for what, agrees in zip(*_columns(result, "checks", "check", "agrees"), strict=True)
        if not agrees
    ]
    out = [
        f"{count(summary.get('checks_agree'))} of {count(summary.get('checks'))} comparisons with "
        "theory agree" + (f"; not: {'; '.join(failed)}." if failed else ".")
    ]
    out.append(
        f"{n} equally important features in {m} dimensions: dense, D* = m/|W|_F^2 is "
        f"{unsigned(summary.get('dense_d_star'), 2)} (no more is stored than there are "
        "dimensions, as in PCA; theory: 1); at density "
        f"{unsigned(summary.get('pairs_density'), 2)} they lie in antipodal pairs, D* "
        f"{unsigned(summary.get('pairs_d_star'), 3)} (theory: 1/2); sparser, up to "
        f"{count(summary.get('most_represented'))} features are represented."
    )
    if number(summary.get("calibration_mmcs")) is not None:
        out.append(_calibration(summary))
    return out


def _calibration(summary: dict[str, Any]) -> str:
    def of(key: str) -> Any:
        return summary.get(f"calibration_{key}")

    def share(value: Any) -> str:
        return unsigned(value, 3)

    told = share(of("mmcs"))
    told = f"{told} {interval(of('mmcs_low'), of('mmcs_high'), share)}".rstrip()
    return (
        f"Calibration of the instrument: SAEs trained on {count(of('features'))} planted features "
        f"in {count(of('d_model'))} dimensions ({count(of('active'))} active at a time, "
        f"{count(of('tokens'))} inputs) find them to a mean max cosine of "
        f"{told} (n = {count(of('seeds'))} seeds, each with "
        f"features of its own; random directions: {share(of('null_mmcs'))}); "
        f"{percent(of('recovered'))} of them to 0.9 or better."
    )


def _columns(result: Result, table: str, *names: str) -> list[list[Any]]:
    return [result.tables[table][name].tolist() for name in names]


def limits(result: Result) -> list[str]:
    """What the numbers are, and what they are not."""
    return [
        "A toy: independent, non-negative, uniform inputs, and nothing to compute but themselves. "
        "It shows that superposition happens where it pays and that these numbers find it; it "
        "does not show that a Transformer does the same.",
        "The calibration is on easy data: sparse, independent features, and as many as the SAE is "
        "wide. What it finds there it may still miss in a language model.",
        "Each model is one training run (of shapes and phases the best of three): where two "
        "arrangements cost nearly the same, as three features in a plane at density 0.7, which "
        "one is found is chance.",
    ]


def digests(result: Result) -> list[Digest]:
    """The comparisons with theory, and the sweep over densities."""
    return [_checks(result), _sweep(result)]


def _checks(result: Result) -> Digest:
    names = ("check", "expected", "found", "within", "agrees")
    rows = tuple(
        (what, f"{expected:.4g}", f"{found:.4g}", f"{within:.2g}", "yes" if agrees else "NO")
        for what, expected, found, within, agrees in zip(
            *_columns(result, "checks", *names), strict=True
        )
    )
    head = ("comparison with theory", "expected", "found", "within", "agrees")
    return Digest("Comparisons with theory", head, rows)


def _sweep(result: Result) -> Digest:
    names = ("density", "represented", "d_star", "antipodal_pairs", "dimensionality_p50", "loss")
    rows = tuple(
        (
            unsigned(p, 3),
            count(represented),
            unsigned(d_star, 3),
            count(pairs),
            unsigned(median, 3),
            unsigned(loss),
        )
        for p, represented, d_star, pairs, median, loss in zip(
            *_columns(result, "sweep", *names), strict=True
        )
    )
    head = ("density", "represented", "D*", "pairs", "median D", "loss")
    note = (
        "density: 1 - sparsity. D*: m/|W|_F^2. D: dimensions a represented feature has (|W_i|^2 "
        "above 0.5). At density 1 equally important features get an even share each (|W_i|^2 = "
        "m/n), so that none may count as represented."
    )
    n, m = (count(number(result.config.get(key))) for key in ("features", "dimensions"))
    return Digest(f"{n} features in {m} dimensions, by density", head, rows, note)


VIEW = View(
    question="Are more features stored than there are dimensions, and when?",
    findings=findings,
    limits=limits,
    digests=digests,
    quiet=frozenset({"checks", "sweep", "features", "shapes", "phase"}),
)

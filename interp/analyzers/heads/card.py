"""The model card of a checkpoint without some heads: what was cut out, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp import __version__, stats
from interp.analyzers.heads.speed import SECONDS
from interp.results import environment

if TYPE_CHECKING:
    from interp.analyzers.heads import _Run
    from interp.analyzers.heads.cutting import Cut


def write_card(file: Path, run: _Run, made: Cut, command: str | None) -> None:
    """Write the card as Markdown with the front matter that model hubs read."""
    parts = [
        "---\nlibrary_name: transformers\ntags:\n- pruned\n- attention-heads\n---\n",
        f"# {run.model.name} without {len(made.choice.heads)} attention heads\n",
        _what(run, made),
        _loading(made),
        "## Loss\n",
        _loss(run, made),
        _curve(run, made),
        "## Size and speed\n",
        _speed(run, made),
        "## Where it comes from\n",
        _provenance(run, command),
    ]
    file.write_text("\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _what(run: _Run, made: Cut) -> str:
    pruning = made.written.pruning
    rows = []
    for layer in range(made.layers):
        gone, left = pruning.removed.get(layer, ()), pruning.kept(layer)
        kv = f"{len(pruning.kept_kv(layer))} of {pruning.n_kv_heads}"
        rows.append(
            (layer, ", ".join(map(str, gone)) or "none", f"{len(left)} of {pruning.n_heads}", kv)
        )
    kept = (
        "The mean output of the heads cut out here stays as a constant in the output bias."
        if made.compensated
        else "Nothing stays in their place; the output bias is as it was."
    )
    earlier = run.model.cfg.removed
    before = f" {len(earlier)} of the heads below were gone before." if earlier else ""
    return (
        "Rows and columns of the query, key, value and output projections are cut out; all other "
        f"weights are untouched, and nothing was trained afterwards. {kept}{before}\n\n"
        + _table(("layer", "heads cut out", "query heads left", "KV heads left"), rows)
        + "\n\nHeads are numbered as in the unpruned model.\n"
    )


def _loading(made: Cut) -> str:
    plain = made.written.pruning.plain
    code = (
        "from transformers import AutoModelForCausalLM\n"
        'model = AutoModelForCausalLM.from_pretrained("this folder")'
        if plain
        else 'import interp\nmodel = interp.load_pruned("this folder")  # a transformers model'
    )
    why = (
        "Every layer keeps as many heads as the others, so plain transformers loads it."
        if plain
        else "transformers alone refuses it (size mismatch): its configuration has no word for "
        "layers that differ in their heads, or for fewer heads of the same size in this family. "
        "interp's loader takes transformers' own class and narrows its attention as config.json "
        "(`interp_pruned`) says."
    )
    return f"## Loading\n\n```python\n{code}\n```\n\n{why}\n"


def _loss(run: _Run, made: Cut) -> str:
    change = stats.paired_t(made.after - made.before)
    documents = {
        "held_out": "documents that had no say in the choice of heads",
        "sample": "the documents of the sample; the heads were named by the user",
        "curve": "the documents that chose the heads (there were no others), so a little too low",
    }[made.part]
    return (
        f"Mean cross-entropy over {len(made.before)} documents ({documents}), in nats per token:\n"
        f"before {made.before.mean():.4f}, after {made.after.mean():.4f}, change "
        f"{float(change.mean):+.4f} (95% paired t interval {float(change.low):+.4f} to "
        f"{float(change.high):+.4f}).\n\n"
        f"The checkpoint's logits differ from the masked model's by at most "
        f"{made.written.logit_gap:.1e} of the largest.\n"
    )


def _curve(run: _Run, made: Cut) -> str:
    order = made.choice.order
    if order is None:
        return ""
    rows = []
    for n, delta in sorted(order.points.items()):
        change = stats.paired_t(delta)
        rows.append(
            (
                order.heads_removed(n),
                f"{float(change.mean):+.4f}",
                f"{float(change.low):+.4f} to {float(change.high):+.4f}",
            )
        )
    return (
        f"The pruning curve, in the order `{order.name}` (the best of {made.choice.orders} for "
        f"this many heads), on {len(run.judge)} documents:\n\n"
        + _table(("heads removed", "loss change (nats per token)", "95% interval"), rows)
        + "\n"
    )


def _speed(run: _Run, made: Cut) -> str:
    names = {
        "parameters": "parameters",
        "weights_per_token": "weights that a decoded token is multiplied with",
        "cache_bytes_per_token": "KV cache, bytes per token",
    }
    sizes = [
        (names[name], f"{before:,}", f"{after:,}", f"{after / before:.3f}" if before else "-")
        for name, (before, after) in made.sizes.items()
    ]
    times = [
        (
            row["phase"],
            row["batch"],
            f"{row['original']:,.0f}",
            f"{row['pruned']:,.0f}",
            f"{row['speedup']:.2f} ({row['speedup_q1']:.2f} to {row['speedup_q3']:.2f})",
            row["rounds"],
            row["verdict"],
        )
        for row in (t.row() for t in made.timings)
    ]
    head = ("phase", "batch", "tokens/s before", "after", "speed-up", "rounds", "verdict")
    counted = _table(("", "before", "after", "ratio"), sizes)
    if not times:
        return counted
    prompt = made.timings[0].prompt
    return (
        counted
        + f"\n\nSpeed on {run.model.device.type}, {run.model.describe()['dtype']}, prompts of "
        f"{prompt} random tokens, both models timed in turn within about {SECONDS:g} s; speed-up: "
        "median over rounds, with its quartiles.\n\n" + _table(head, times) + "\n"
    )


def _provenance(run: _Run, command: str | None) -> str:
    model, data, versions = run.model.describe(), run.text.describe(), environment()
    facts: list[tuple[str, Any]] = [
        ("model", model["name"]),
        ("source", model["source"]),
        ("revision", model["revision"] or "none"),
        ("text", data["source"]),
        (
            "documents",
            f"{data['documents']} of at most {data['context']} tokens, seed {run.config.seed}",
        ),
        ("BOS", "yes" if data["bos"] else "no"),
        ("sha256 of the text", data["sha256"]),
        ("interp", __version__),
        ("torch, transformers", f"{versions['torch']}, {versions['transformers']}"),
    ]
    lines = "\n".join(f"- {name}: {value}" for name, value in facts)
    return f"{lines}\n" + (f"\n```\n{command}\n```\n" if command else "")


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)

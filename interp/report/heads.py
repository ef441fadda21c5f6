"""How a `heads` run is told: findings in words, what they do not show, and the small tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from interp.report import heads_agreement, heads_export, heads_roles
from interp.report.view import Digest, View, first_number, has
from interp.report.words import (
    DASH,
    MATERIAL,
    NATS,
    count,
    documents,
    head_label,
    interval,
    mapping,
    number,
    percent,
    signed,
    unsigned,
    visible,
)
from interp.results import Result

LIMITS = ("0.05", "0.01")
ORDERS = {
    "importance": "by importance_norm",
    "raw": "by importance, not normalised",
    "random": "random",
    "exact": "by loss_delta (exact)",
    "compensated": "by importance_norm, mean output kept",
    "rescore": "by importance_norm, re-scored each step",
}
_ABLATION = {
    "zero": "set to zero",
    "mean": "replaced by its mean over other documents",
    "resample": "replaced by that of another document",
}


def order_label(order: Any) -> str:
    """An order of removal in words; one that is not known keeps its name."""
    return ORDERS.get(str(order), visible(order, 40))


def total_heads(result: Result) -> int:
    """Heads of the model, 0 where unknown."""
    table = result.tables.get("heads")
    found = first_number(result.summary.get("heads"), len(table) if table is not None else None)
    return int(found or 0)


def ablation(result: Result) -> str:
    """The chosen ablation: zero, mean or resample."""
    return visible(result.config.get("ablation") or "zero", 20)


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def prunable(
    result: Result, order: str, limit: str
) -> tuple[float, float | None, float | None] | None:
    """(fraction, conservative end, optimistic end) of one order at one limit."""
    fraction, low, high = (
        number(mapping(mapping(result.summary.get(key)).get(order)).get(limit))
        for key in ("prunable", "prunable_low", "prunable_high")
    )
    return None if fraction is None else (fraction, low, high)


def orders(result: Result) -> list[str]:
    """Orders that have a prunable fraction, known ones first and in a fixed sequence."""
    found = mapping(result.summary.get("prunable"))
    return [order for order in ORDERS if order in found] + [o for o in found if o not in ORDERS]


def best_order(result: Result, limit: str) -> str | None:
    """The order that removes most within a limit: as the run names it, else the largest."""
    named = mapping(result.summary.get("best_order")).get(limit)
    if isinstance(named, str) and prunable(result, named, limit):
        return named
    scored = [
        (found[0], order) for order in orders(result) if (found := prunable(result, order, limit))
    ]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


# Findings -----------------------------------------------------------------------------------------


def findings(result: Result) -> list[str]:
    """Plain sentences, most important first; what was not measured is left out."""
    parts: Iterable[str | None] = (
        *(_prunable_sentence(result, limit) for limit in LIMITS),
        _verdicts(result),
        _significance(result),
        _both(result),
        _top(result),
        _correlation(result),
        _held_out(result),
        _interaction(result),
        _baseline(result),
    )
    more = heads_roles.findings(result)
    return [*heads_export.findings(result), *(part for part in parts if part), *more]


def _prunable_sentence(result: Result, limit: str) -> str | None:
    best = best_order(result, limit)
    found = prunable(result, best, limit) if best else None
    if best is None or found is None:
        return None
    total = total_heads(result)
    fraction, low, high = found
    of = f" ({round(fraction * total)} of {total})" if total else ""
    ends = (
        f" ({percent(low)} to {percent(high)} at the ends of its 95% interval)"
        if low is not None and high is not None
        else ""
    )
    tried = len(orders(result))
    whole = ", in whole KV groups," if result.config.get("unit") == "kv" else ""
    text = (
        f"{percent(fraction)} of the heads{of}{whole} can be removed together before the loss "
        f"rises by more than {limit} {NATS}{ends}"
    )
    if tried > 1:
        text += f"; that is the best of {tried} orders, {order_label(best)}"
        plain = prunable(result, "importance", limit)
        if best != "importance" and plain:
            text += f" ({order_label('importance')}: {percent(plain[0])})"
    else:
        text += f", removed {order_label(best)}"
    return text + "."


def _verdicts(result: Result) -> str | None:
    verdicts = mapping(result.summary.get("verdicts"))
    if number(verdicts.get("material")) is None:
        return None
    kind = ablation(result)
    how = _ABLATION.get(kind, kind)
    missing = int(number(verdicts.get("not measured")) or 0)
    total = total_heads(result)
    of = f"{total} heads"
    if missing:
        of = f"the {total - missing} heads measured so far, of {total},"
    return (
        f"Removed one at a time (output {how}), {count(verdicts['material'])} of "
        f"{of} are material (95% interval of the loss change wholly beyond "
        f"{MATERIAL} {NATS}), {count(verdicts.get('negligible'))} negligible (wholly within), "
        f"{count(verdicts.get('undecided'))} undecided."
    )


def _significance(result: Result) -> str | None:
    summary = result.summary
    if number(summary.get("significant")) is None:
        return None
    n = count(summary["significant"])
    text = f"Removing a head changes the loss significantly (q < 0.05) for {n} heads"
    if number(summary.get("significant_hurt")) is not None:
        text += (
            f": the loss rises for {count(summary['significant_hurt'])} and falls for "
            f"{count(summary.get('significant_improve'))}"
        )
    return (
        text + ". That count grows with the number of documents, however small the effects. "
        "Verdicts hold each head against a fixed size and are not corrected for the number of "
        "heads: of heads without any effect up to 5% may look material."
    )


def _both(result: Result) -> str | None:
    found = number(result.summary.get("material_zero_and_mean"))
    if found is None:
        return None
    return (
        f"{count(found)} heads are material under zero and under mean ablation alike. Zero "
        "ablation alone also counts heads whose output is nearly constant."
    )


def _top(result: Result) -> str | None:
    table = result.tables.get("heads")
    if table is None or not has(table, "importance_norm"):
        return None
    text = "Most sensitive heads (layer.head) for their layer, by importance_norm: "
    text += _first(table, "importance_norm")
    if has(table, "importance"):
        text += f"; in the whole model, by importance: {_first(table, 'importance')}"
    return text + "."


def _first(table: pd.DataFrame, column: str) -> str:
    top = table.nlargest(3, column)
    return ", ".join(
        f"{head_label(layer, head)} ({unsigned(value, 3)})"
        for layer, head, value in zip(top["layer"], top["head"], top[column], strict=True)
    )


def _correlation(result: Result) -> str | None:
    found = mapping(result.summary.get("rank_correlation"))
    named = {"importance_norm~kl": "KL", "importance_norm~loss_delta": "the signed loss change"}
    parts = [
        f"{number(found[key]):+.2f} with {words}"
        for key, words in named.items()
        if number(found.get(key)) is not None
    ]
    if not parts:
        return None
    return (
        f"Rank correlation of importance_norm over the heads: {', '.join(parts)}. It ranks "
        "sensitivity, and does not say whether the loss would rise or fall."
    )


def _held_out(result: Result) -> str | None:
    found = mapping(result.summary.get("held_out"))
    parts = []
    for key, words in (("top", "largest increase"), ("bottom", "largest decrease")):
        items = _items(found.get(key))
        if items:
            item = items[0]
            parts.append(
                f"{words}: {head_label(item.get('layer'), item.get('head'))}, "
                f"{signed(item.get('loss_delta_chosen'))} where chosen, "
                f"{signed(item.get('loss_delta'))} "
                f"{interval(item.get('ci_low'), item.get('ci_high'))} on held-out documents"
            )
    if not parts:
        return None
    told = "; ".join(parts)
    return f"Extremes flatter themselves, so they were measured again ({NATS}): {told}."


def _interaction(result: Result) -> str | None:
    total = total_heads(result)
    steps = [
        item
        for item in _items(result.summary.get("interaction"))
        if number(item.get("interaction")) is not None
        and 0 < (number(item.get("n_pruned")) or 0) <= total / 2
    ]
    if not steps:
        return None
    last = max(steps, key=lambda item: number(item["n_pruned"]) or 0)
    low, high = number(last.get("ci_low")), number(last.get("ci_high"))
    if low is None or high is None:
        told = "The difference has no interval"
    elif low > 0 or high < 0:
        told = "Single removals do not add up"
    else:
        told = "These documents do not tell it from adding up"
    ends = interval(low, high)
    return (
        f"{count(last['n_pruned'])} heads together change the loss by {signed(last.get('joint'))} "
        f"{NATS}, the sum of their own changes is {signed(last.get('sum_of_own'))}: a difference "
        f"of {signed(last.get('interaction'))} {ends}. {told}."
    )


def _baseline(result: Result) -> str | None:
    summary = result.summary
    if number(summary.get("baseline_loss")) is None:
        return None
    ends = interval(summary.get("baseline_low"), summary.get("baseline_high"), unsigned)
    text = f"Loss of the intact model: {unsigned(summary['baseline_loss'])} {NATS}"
    text += f", 95% interval {ends}" if ends else ""
    if summary.get("baseline_part", "sample") == "sample":
        text += f", over {documents(result)}" if documents(result) else ""
    else:
        text += f", over the {count(summary['baseline_documents'])} documents of the curve"
    # Equal where all documents have as many tokens: then there is nothing to say of it.
    weighted = unsigned(summary.get("baseline_loss_token_weighted"))
    if weighted not in (DASH, unsigned(summary["baseline_loss"])):
        text += f"; {weighted} with every token, not every document, counting once"
    return text + "."


def limits(result: Result) -> list[str]:
    """What the numbers are, and what they are not."""
    table = result.tables.get("heads", pd.DataFrame())
    exact = has(table, "loss_delta")
    out = [
        "importance and importance_norm rank sensitivity: how strongly a document's loss "
        "responds, in either direction, when the head's output is scaled a little. They follow "
        "how much the predictions move (KL), not the sign of the loss change: a high rank does "
        "not mean that the model gets worse without the head.",
        "importance_norm is divided by its layer's norm. It compares heads within a layer; "
        "across layers it is a convention that spreads the pruning over the layers.",
    ]
    if exact:
        out.append(
            "A loss change of one head is measured with all others in place. Heads that back "
            "each other up each look free and are not free together."
        )
        out.append(
            "Zero ablation also takes away the constant part of a head's output, which the rest "
            "of the model expects. The mean-ablated change leaves it in; a head that matters "
            "under both carries information."
        )
        out.append(
            "Undecided means that the interval is too wide to call, not that the effect is "
            "small: more documents settle it."
        )
    if "prune" in result.tables:
        out.append(
            "A prunable fraction is about average loss on this text. Rare abilities can be lost "
            "long before the average shows it. The best of several orders is a little flattered "
            "by being chosen."
        )
    out += [*heads_export.limits(result), *heads_roles.limits(result)]
    out.append(
        "Intervals and tests treat documents as the unit. They speak of text like this sample, "
        "not of other kinds of text, longer contexts or other models."
    )
    return out


# Small tables -------------------------------------------------------------------------------------


def digests(result: Result) -> list[Digest]:
    """The prunable share by order, the extreme heads measured again, and the interaction."""
    made = (_prune_digest(result), _held_out_digest(result), _interaction_digest(result))
    more = heads_roles.digests(result)
    return [*heads_export.digests(result), *(digest for digest in made if digest), *more]


def _with_ends(found: tuple[float, float | None, float | None] | None) -> str:
    if found is None:
        return DASH
    fraction, low, high = found
    if low is None or high is None:
        return percent(fraction)
    return f"{percent(fraction)} [{percent(low)}, {percent(high)}]"


def _prune_digest(result: Result) -> Digest | None:
    named = orders(result)
    if not named:
        return None
    shown = {limit: best_order(result, limit) for limit in LIMITS}
    rows = []
    for order in named:
        cells = [order_label(order)]
        for limit in LIMITS:
            mark = "* " if shown[limit] == order and len(named) > 1 else ""
            cells.append(mark + _with_ends(prunable(result, order, limit)))
        rows.append(tuple(cells))
    return Digest(
        title="Share of heads that can go before the loss rises by more than ...",
        head=("order of removal", *(f"{limit} {NATS}" for limit in LIMITS)),
        rows=tuple(rows),
        note="In brackets: the same at the two ends of the 95% interval over documents, the "
        "careful end first."
        + (" *: the best order." if len(named) > 1 else "")
        + (" random: of the mean of its orders." if "random" in named else ""),
    )


def _held_out_digest(result: Result) -> Digest | None:
    found = mapping(result.summary.get("held_out"))
    rows = [
        (
            head_label(item.get("layer"), item.get("head")),
            words,
            signed(item.get("loss_delta_chosen")),
            signed(item.get("loss_delta")),
            interval(item.get("ci_low"), item.get("ci_high")),
        )
        for key, words in (("top", "largest increase"), ("bottom", "largest decrease"))
        for item in _items(found.get(key))
    ]
    if not rows:
        return None
    return Digest(
        title=f"Extreme heads, measured again on held-out documents (loss change, {NATS})",
        head=("head", "chosen as", "where chosen", "held out", "95% interval"),
        rows=tuple(rows),
        note="Where it was chosen for being extreme, a head looks more extreme than it is.",
        terminal=False,
    )


def _interaction_digest(result: Result) -> Digest | None:
    steps = _items(result.summary.get("interaction"))
    if not steps:
        return None
    return Digest(
        title=f"Together and one by one (loss change, {NATS})",
        head=("heads removed", "together", "sum of their own", "difference", "95% interval"),
        rows=tuple(
            (
                count(item.get("n_pruned")),
                *(signed(item.get(key)) for key in ("joint", "sum_of_own", "interaction")),
                interval(item.get("ci_low"), item.get("ci_high")) or DASH,
            )
            for item in steps
        ),
        note="A difference above 0: the heads back each other up, and single removals hide it.",
        terminal=False,
    )


def narrow(table: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Columns for 80 characters; the unit of each is in its heading."""

    def column(name: str, form: Any) -> list[str]:
        return [form(value) for value in table[name]]

    labels = [head_label(*pair) for pair in zip(table["layer"], table["head"], strict=True)]
    out = [
        ("head", labels),
        ("import.\nnorm\n(share)", column("importance_norm", lambda value: unsigned(value, 3))),
    ]
    if not has(table, "loss_delta"):
        for name, heading in (
            ("importance", "importance\n(nats per\ntoken)"),
            ("importance_token", "importance\nby token\n(nats per\ntoken)"),
        ):
            if has(table, name):
                out.append((heading, column(name, lambda value: unsigned(value, 5))))
        return out
    out.append(("loss\nchange\n(nats/\ntoken)", column("loss_delta", signed)))
    if has(table, "ci_low") and has(table, "ci_high"):
        ends = [
            interval(*pair) or DASH for pair in zip(table["ci_low"], table["ci_high"], strict=True)
        ]
        out.append(("95% interval\n(nats/token)", ends))
    if has(table, "verdict"):
        out.append(("verdict", column("verdict", lambda value: visible(value, 12))))
    if has(table, "loss_delta_mean"):
        out.append(("mean-\nablated\n(nats/\ntoken)", column("loss_delta_mean", signed)))
    if has(table, "kl"):
        out.append(("KL\n(nats/\ntoken)", column("kl", unsigned)))
    return out


def compare(result: Result) -> list[tuple[str, str]]:
    """What runs are compared by."""
    summary = result.summary
    ends = interval(summary.get("baseline_low"), summary.get("baseline_high"), unsigned)
    before = f"{unsigned(summary.get('baseline_loss'))} {ends}".rstrip()
    out = [(f"loss before ({NATS})", before)]
    for limit in LIMITS:
        best = best_order(result, limit)
        found = prunable(result, best, limit) if best else None
        if best and found:
            ends = interval(found[1], found[2], percent)
            value = f"{percent(found[0])} {ends}, {order_label(best)}"
            out.append((f"heads that can go within {limit} {NATS}, best order", value))
    verdicts = mapping(summary.get("verdicts"))
    if number(verdicts.get("material")) is not None:
        of = total_heads(result)
        out += [(f"{name} heads", f"{count(verdicts.get(name))} of {of}") for name in verdicts]
    return out


VIEW = View(
    question="Which attention heads does the model need, and how many can be removed?",
    findings=findings,
    limits=limits,
    digests=digests,
    rank={"heads": (("loss_delta", True), ("importance_norm", False))},
    narrow={"heads": narrow},
    quiet=frozenset({"prune", "refine", "speed", "keep_one", "token_classes", "composition"}),
    compare=compare,
    together=heads_agreement.together,
)

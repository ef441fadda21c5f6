"""How keep-one and the heads' roles are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interp.report.view import Digest
from interp.report.words import (
    DASH,
    MATERIAL,
    NATS,
    count,
    head_label,
    interval,
    mapping,
    number,
    signed,
    unsigned,
    visible,
)
from interp.results import Result

PAIRS_TOLD = 5
ROLES = {
    "previous_token": "previous token",
    "duplicate_token": "same token earlier",
    "induction": "induction",
    "first_token": "first token",
    "other": "none of these",
}


def _of(value: Any, key: str) -> Mapping[str, Any]:
    return mapping(mapping(value).get(key))


def findings(result: Result) -> list[str]:
    """What one head of a layer carries, and which roles there are."""
    return [
        part
        for part in (
            _keep_one(result),
            _uneven(result),
            _roles(result),
            _hidden(result),
            _stable(result),
            _copying(result),
            _composition(result),
        )
        if part
    ]


def _keep_one(result: Result) -> str | None:
    found = _of(result.summary, "keep_one")
    verdicts = _of(found, "verdicts")
    if number(verdicts.get("material")) is None:
        return None
    layers = sum(int(number(v) or 0) for v in verdicts.values())
    most, least = _of(found, "largest"), _of(found, "smallest")
    judged = (
        "chosen and judged on the same documents, so too low"
        if found.get("chosen_on_the_same")
        else f"judged on {count(found.get('documents'))} documents that did not choose it"
    )
    return (
        f"With only its best head left ({judged}), {count(verdicts.get('negligible'))} of "
        f"{layers} layers are as good as before (95% interval of the loss change within "
        f"{MATERIAL} {NATS}), {count(verdicts['material'])} change the loss by more "
        f"({count(found.get('material_improve'))} lower it), "
        f"{count(verdicts.get('undecided'))} are undecided; from "
        f"{signed(least.get('loss_delta'))} (layer {count(least.get('layer'))}) to "
        f"{signed(most.get('loss_delta'))} (layer {count(most.get('layer'))})."
    )


def _uneven(result: Result) -> str | None:
    found = _of(_of(result.summary, "keep_one"), "unevenness")
    if number(found.get("gini")) is None:
        return None
    gini, high = number(found["gini"]), number(found.get("null_high"))
    beyond = gini is not None and high is not None and gini > high
    return (
        f"That loss is {'un' if beyond else ''}evenly spread over the layers"
        f"{'' if beyond else ', as far as these documents tell'}: Gini coefficient "
        f"{unsigned(gini, 2)}; layers that all cost the same would show "
        f"{unsigned(found.get('null_median'), 2)} on these documents, at most {unsigned(high, 2)}."
    )


def _roles(result: Result) -> str | None:
    found = _of(result.summary, "roles")
    by_role = _of(found, "by_role")
    if not by_role:
        return None
    total = sum(int(number(_of(by_role, role).get("heads")) or 0) for role in ROLES)
    parts = [
        f"{count(_of(by_role, role).get('heads'))} {words}"
        for role, words in ROLES.items()
        if role != "other"
    ]
    return (
        f"Of {total} heads, by where they look on {count(found.get('sequences'))} sequences of "
        f"{count(found.get('copy_length'))} random tokens said twice: {', '.join(parts)} (0.4 or "
        "more of the attention there, and more than any head of an untrained model)."
    )


def _hidden(result: Result) -> str | None:
    found = _of(result.summary, "token_classes")
    heads = {tuple(h) for name in found for h in _of(found, name).get("hidden") or []}
    if not found:
        return None
    return (
        f"{len(heads)} heads are negligible on average and material for some kind of token "
        "(repeated or new, early or late in the window)."
    )


def _stable(result: Result) -> str | None:
    found = _of(_of(result.summary, "roles"), "rank_correlation")
    across, within = (
        number(found.get(f"importance: {key}")) for key in ("text~repeated", "even~odd documents")
    )
    if across is None:
        return None
    halves = f"; halves of the text agree to {within:+.2f}" if within is not None else ""
    return (
        f"Rank correlation of importance between the text and the repeated random tokens: "
        f"{across:+.2f}{halves}."
    )


def _copying(result: Result) -> str | None:
    found = _of(_of(result.summary, "circuits"), "copying")
    if number(found.get("null_high")) is None:
        return None
    return (
        f"From the weights: {count(found.get('above'))} of {count(found.get('heads'))} heads copy "
        "(raise the tokens that they attend to, by the eigenvalues of W_E W_V W_O W_U) more than "
        f"97.5% of re-paired heads do, {count(found.get('below'))} less than 2.5%; median "
        f"{signed(found.get('median'))}, re-paired {signed(found.get('null_low'))} to "
        f"{signed(found.get('null_high'))} (1: all, 0: neither, -1: they lower them)."
    )


def _composition(result: Result) -> str | None:
    found, parts = _of(result.summary, "circuits"), []
    for kind, words in (("q", "queries"), ("k", "keys"), ("v", "values")):
        one = _of(found, kind)
        if number(one.get("null_999")) is not None:
            parts.append(
                f"{words} {count(one.get('above'))} of {count(one.get('pairs'))} (by chance "
                f"{count(one.get('by_chance'))}; median {unsigned(one.get('median'), 3)}, "
                f"re-paired {unsigned(one.get('null_median'), 3)})"
            )
    if not parts:
        return None
    return (
        "Pairs of heads of which the later one reads what the earlier one writes, more than 99.9% "
        f"of re-paired circuits: {'; '.join(parts)}."
    )


def limits(result: Result) -> list[str]:
    """What these numbers do not show."""
    out = []
    if _of(result.summary, "roles"):
        out.append(
            "A role says where a head looks on random tokens, not what it moves from there nor "
            "that the model needs it; heads share out over roles that are not asked for here."
        )
    if _of(result.summary, "circuits"):
        out.append(
            "Copying and composition are of the direct path and of weights alone: what layers "
            "between do is left out, and a head may compose with one that it never attends to."
        )
    if _of(result.summary, "keep_one"):
        out.append(
            "Keeping one head is measured layer by layer, all other layers whole; layers that can "
            "each do with one head cannot all do so together."
        )
    return out


def digests(result: Result) -> list[Digest]:
    """Layers with one head left, and roles beside importance."""
    made = (
        _keep_one_digest(result),
        _roles_digest(result),
        _classes_digest(result),
        _composition_digest(result),
    )
    return [d for d in made if d]


def _composition_digest(result: Result) -> Digest | None:
    table: Any = result.tables.get("composition")
    if table is None or table.empty:
        return None
    rows = []
    for kind, words in (("q", "queries"), ("k", "keys"), ("v", "values")):
        top = table[table["kind"] == kind].head(PAIRS_TOLD)
        for row in top.to_dict("records"):
            rows.append(
                (
                    f"{head_label(row['layer'], row['head'])} to "
                    f"{head_label(row['later_layer'], row['later_head'])}",
                    words,
                    unsigned(row["composition"], 3),
                    unsigned(row["percentile"], 1),
                )
            )
    return Digest(
        title="Pairs of heads that compose most, by the weights",
        head=("pair", "input", "composition", "percentile of re-paired"),
        rows=tuple(rows),
        terminal=False,
    )


def _keep_one_digest(result: Result) -> Digest | None:
    table = result.tables.get("keep_one")
    if table is None or table.empty:
        return None
    rows = tuple(
        (
            count(layer),
            head_label(layer, best),
            signed(delta),
            interval(low, high) or DASH,
            visible(verdict, 12),
            signed(average),
            signed(none),
        )
        for layer, best, delta, low, high, verdict, average, none in zip(
            *(
                table[name]
                for name in (
                    *("layer", "best_head", "loss_delta", "ci_low", "ci_high", "verdict"),
                    *("loss_delta_average", "loss_delta_none"),
                )
            ),
            strict=True,
        )
    )
    return Digest(
        title=f"One head left in a layer (loss change, {NATS})",
        head=("layer", "best head", "with it alone", "95% interval", "verdict", "any", "none"),
        rows=rows,
        note="any: mean over the layer's heads of keeping that one alone; none: no head left. "
        "The best head was chosen on other documents than those that judge it."
        if not _of(result.summary, "keep_one").get("chosen_on_the_same")
        else "any: mean over the layer's heads of keeping that one alone; none: no head left.",
        terminal=len(rows) <= 16,
    )


def _roles_digest(result: Result) -> Digest | None:
    found = _of(result.summary, "roles")
    by_role, untrained = _of(found, "by_role"), _of(found, "untrained")
    table = result.tables.get("heads")
    if not by_role or table is None:
        return None
    rows = []
    for role, words in ROLES.items():
        entry, null = _of(by_role, role), _of(untrained, role)
        top = DASH
        if role in table.columns and len(table):
            first = table.loc[table[role].idxmax()]
            top = f"{head_label(first['layer'], first['head'])} ({unsigned(first[role], 2)})"
        rows.append(
            (
                words,
                count(entry.get("heads")),
                top,
                unsigned(null.get("max"), 2),
                unsigned(entry.get("importance")),
                signed(entry.get("loss_delta")),
                interval(entry.get("ci_low"), entry.get("ci_high")) or DASH,
            )
        )
    return Digest(
        title="Where heads look, and what they are worth",
        head=(
            *("role", "heads", "strongest", "untrained"),
            *("importance", f"loss change ({NATS})", "95% interval"),
        ),
        rows=tuple(rows),
        note="strongest: the head that looks there most, and its share of attention; untrained: "
        "the largest share of any head of an untrained model. importance and loss change: mean "
        "over the role's heads.",
    )


def _classes_digest(result: Result) -> Digest | None:
    found, table = _of(result.summary, "token_classes"), result.tables.get("token_classes")
    if not found or table is None or table.empty:
        return None
    rows = []
    for name, entry in found.items():
        mine: Any = table[(table["token_class"] == name) & table["loss_delta"].notna()]
        top = mine.loc[mine["loss_delta"].abs().idxmax()] if len(mine) else None
        hidden = entry.get("hidden") or []
        rows.append(
            (
                visible(name, 20),
                count(entry.get("tokens")),
                unsigned(entry.get("loss"), 2),
                count(entry.get("material")),
                ", ".join(head_label(layer, head) for layer, head in hidden[:6])
                + (f" and {len(hidden) - 6} more" if len(hidden) > 6 else "")
                or DASH,
                DASH
                if top is None
                else f"{head_label(top['layer'], top['head'])} {signed(top['loss_delta'])} "
                f"{interval(top['ci_low'], top['ci_high'])}",
            )
        )
    return Digest(
        title=f"Heads by the kind of token that is predicted ({NATS})",
        head=(
            *("predicted token", "tokens", "loss", "material"),
            *("negligible on average", "largest change"),
        ),
        rows=tuple(rows),
        note="material: heads whose loss change on these tokens is beyond 0.01; negligible on "
        "average: those of them that an average over all tokens hides. The largest change of many "
        "heads is flattered by being chosen.",
        terminal=False,
    )

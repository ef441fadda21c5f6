"""How an `ffn-keys` run is told: findings in words, what they do not show, and the small tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from interp.report.browser import Browser
from interp.report.ffn_keys_tables import (
    STORIES,
    change,
    digests,
    key_label,
    listed,
    narrow,
    raised,
)
from interp.report.view import View, has
from interp.report.words import (
    DASH,
    count,
    interval,
    isolated,
    number,
    percent,
    probability,
    unsigned,
    visible,
)
from interp.results import Result

FEW = 3  # layers that are told one by one
BASES = {"_folded": "final norm folded in", "": "raw"}
DROPPED = {"last": "the last token", "random": "a random one", "first": "the first"}


def basis(table: pd.DataFrame) -> str | None:
    """The suffix of the basis that is told: with the final norm where it was measured."""
    return next((s for s in BASES if has(table, f"agreement_rate{s}")), None)


def layers_of(result: Result) -> pd.DataFrame:
    """One row per layer, an empty table where none was measured."""
    return result.tables.get("ffn_layers", pd.DataFrame())


def beyond(row: Mapping[str, Any], suffix: str) -> bool:
    """Whether more keys agree than chance gives, by the shuffles and by the frequency of tokens."""
    rate, shuffled, unigram, q = (
        number(row.get(f"agreement_{name}{suffix}"))
        for name in ("rate", "null_99", "unigram_99", "q")
    )
    if rate is None or shuffled is None:
        return False
    return rate > max(shuffled, unigram or 0.0) and (q is None or q < 0.05)


# Findings -----------------------------------------------------------------------------------------


def findings(result: Result) -> list[str]:
    """Plain sentences, most important first; what was not measured is left out."""
    table = layers_of(result)
    rows: list[dict[str, Any]] = [
        {str(k): v for k, v in r.items()} for r in table.to_dict("records")
    ]
    # Rates over the two or three keys that were asked for say nothing of their layer.
    single = bool(result.config.get("key"))
    parts: Iterable[str | None] = (
        *_prompt(result),
        *(_asked_for(result) if single else _agreement(rows, basis(table))),
        *([] if single else _each(rows, _last_token)),
        *([] if single else _each(rows, _earlier)),
        *_mutation(result),
        *_trend(result),
        *_each(rows, _active),
        *_each(rows, _zero_agreement),
        *_each(rows, _prediction),
        _exact(result),
    )
    return [part for part in parts if part]


def _layer(row: Mapping[str, Any]) -> str:
    return f"layer {count(row['layer'])}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of a few layers; of many the first, the middle and the last."""
    if len(rows) <= FEW:
        return rows
    return [rows[0], rows[len(rows) // 2], rows[-1]]


def _each(
    rows: list[dict[str, Any]], tell: Callable[[list[dict[str, Any]], int], str | None]
) -> list[str | None]:
    return [tell(_chosen(rows), len(rows))] if rows else []


def _of_layers(rows: list[dict[str, Any]], form: Callable[[dict[str, Any]], str | None]) -> str:
    """ "layer 3: ...; layer 15: ..."; without the name where there is one layer."""
    told = [(row, text) for row in rows if (text := form(row))]
    if len(rows) == 1:
        return told[0][1] if told else ""
    return "; ".join(f"{_layer(row)}: {text}" for row, text in told)


def _tiny(share: Any) -> str:
    """A share of keys: two digits however small, for rates of a few in a thousand."""
    found = number(share)
    if found is None:
        return DASH
    return f"{100 * found:.2g}%" if found < 0.1 else percent(found)


def _asked_for(result: Result) -> list[str]:
    """A sentence for each key that was asked for."""
    table = result.tables.get("keys", pd.DataFrame())
    suffix = "_folded" if has(table, "next_token_rank_folded") else ""
    out = []
    for row in table.head(STORIES).to_dict("records"):
        text = f"Key {key_label(row)}: largest coefficient {float(row['coefficient_max']):.3g}"
        if number(row.get("coefficient_mean")) is not None:
            text += f" (mean {float(row['coefficient_mean']):.2g})"
        if number(row.get("same_last_token")) is not None:
            text += (
                f"; {percent(row['same_last_token'])} of its triggers end in the same token, "
                f"of as many random positions {percent(row.get('same_last_token_null'))}"
            )
        if f"value_top_tokens{suffix}" in row:
            text += f"; its value raises {listed(row[f'value_top_tokens{suffix}'], 3)}"
        rank = number(row.get(f"next_token_rank{suffix}"))
        if rank is not None:
            text += f", and the token after its first trigger has rank {count(rank)} there"
        out.append(text + ".")
    if len(table) > STORIES:
        out.append(f"{count(len(table) - STORIES)} more keys are in the tables.")
    return out


def _agreement(rows: list[dict[str, Any]], suffix: str | None) -> list[str | None]:
    if suffix is None:
        return []
    known = [row for row in rows if number(row.get(f"agreement_rate{suffix}")) is not None]
    if len(known) <= FEW:
        return [_capital(_agreement_of(row, suffix)) for row in known]
    found = [row for row in known if beyond(row, suffix)]
    head = (
        f"In {len(found)} of {len(known)} layers more values than chance allows have as their top "
        "token the token that follows their key's first trigger (beyond the 99th percentile of "
        "both nulls, q < 0.05 over the layers)"
    )
    if not found:
        return [head + "."]
    named = ", ".join(count(row["layer"]) for row in found)
    best = max(found, key=lambda row: float(row[f"agreement_rate{suffix}"]))
    return [f"{head}: {named}.", f"Most in {_agreement_of(best, suffix)}"]


def _agreement_of(row: dict[str, Any], suffix: str) -> str:
    def value(name: str, end: str = suffix) -> float | None:
        return number(row.get(f"agreement_{name}{end}"))

    keys = number(row.get("agreement_keys")) or 0
    ends = interval(value("low"), value("high"), _tiny)
    chance = [
        f"{unsigned((value(name) or 0) * keys, 1)} {words} (99th percentile "
        f"{count(round((value(name + '_99') or 0) * keys))})"
        for name, words in (
            ("null", "with next tokens shuffled over the keys"),
            ("unigram", "with next tokens drawn by frequency"),
        )
        if value(name) is not None
    ]
    verdict = _agreement_verdict(row, suffix)
    other = next((s for s in BASES if s != suffix and value("count", s) is not None), None)
    text = (
        f"{_layer(row)}: for {count(value('count'))} of {count(keys)} keys "
        f"({_tiny(value('rate'))} {ends}) the value's top token is the token that follows the "
        f"key's first trigger; by chance {' or '.join(chance)}: {verdict} "
        f"({BASES[suffix]}"
    )
    if other is not None:
        text += f"; {BASES[other]}: {count(value('count', other))}"
    return text + ")."


def _agreement_verdict(row: dict[str, Any], suffix: str) -> str:
    if beyond(row, suffix):
        p = number(row.get(f"agreement_p{suffix}"))
        told = f" (p {probability(p)})" if p is not None else ""
        return f"more than chance{told}, and still few keys"
    return "no more than chance"


def _more(share: float, chance: float, keys: float) -> bool:
    """Whether a share of keys is beyond three standard errors of the chance share."""
    return share > chance + 3 * math.sqrt(max(chance * (1 - chance), 1e-4) / max(keys, 1))


def _last_token(rows: list[dict[str, Any]], _: int) -> str | None:
    def form(row: dict[str, Any]) -> str | None:
        share, null = number(row.get("same_last_token")), number(row.get("same_last_token_null"))
        if share is None or null is None:
            return None
        text = f"{percent(share)} against {percent(null)}"
        over, chance = (number(row.get(f"same_last_token_{k}")) for k in ("beyond_99", "chance_99"))
        if over is not None and chance is not None:
            more = _more(over, chance, number(row.get("keys")) or 0)
            text += f" ({_tiny(over)} of keys, by chance {_tiny(chance)}"
            text += ")" if more else ": no more than chance)"
        return text

    told = _of_layers(rows, form)
    if not told:
        return None
    return (
        "Share of a key's triggers that end in the same token, mean over keys, against as many "
        f"random positions (in brackets: keys beyond the latter's 99th percentile): {told}."
    )


def _earlier(rows: list[dict[str, Any]], _: int) -> str | None:
    def cosine(value: Any) -> str:
        return f"{value:+.3f}"

    def form(row: dict[str, Any]) -> str | None:
        gap, low, high = (number(row.get(f"earlier_gap{end}")) for end in ("", "_low", "_high"))
        if gap is None:
            return None
        verdict = "not told from 0"
        if low is not None and low > 0:
            verdict = "the triggers' texts have more in common"
        elif high is not None and high < 0:
            verdict = "the triggers' texts have less in common"
        text = f"{cosine(gap)} {interval(low, high, cosine)} ({verdict}"
        median = number(row.get("earlier_gap_median"))
        text += f"; median key {cosine(median)}" if median is not None else ""
        others = number(row.get("earlier_similarity_null"))
        text += f"; the other texts have {unsigned(others, 3)}" if others is not None else ""
        over = number(row.get("earlier_similarity_beyond"))
        if over is not None:
            text += f"; {percent(over)} of keys lie above all draws of other positions"
        return text + ")"

    told = _of_layers(rows, form)
    if not told:
        return None
    return (
        "Do the texts before a key's triggers have more words in common than the texts before "
        "other positions with the same last token? Likeness of such texts (TF-IDF cosine, from 0, "
        "no word in common, to 1, the same words), mean over keys, the triggers' minus the "
        f"others': {told}. By chance 5% of keys lie above all draws."
    )


def _mutation(result: Result) -> list[str | None]:
    table = result.tables.get("mutation")
    if table is None or not has(table, "change"):
        return []
    rows: list[dict[str, Any]] = []
    for layer, part in table.loc[table["sign"] == 1, :].groupby("layer", sort=True):
        found = {str(row["dropped"]): row for row in part.to_dict("records")}
        rows.append({"layer": layer, "found": found})
    if not rows:
        return []

    def one(row: Mapping[Any, Any]) -> str:
        ends = interval(row["change_low"], row["change_high"], change)
        return f"{change(row['change'])} {ends}".rstrip()

    def form(row: dict[str, Any]) -> str:
        found = row["found"]
        parts = [f"{words} {one(found[k])}" for k, words in DROPPED.items() if k in found]
        if "all" in found:
            parts.append(f"an unrelated text {change(found['all']['change'])}")
        return ", ".join(parts)

    keys = {count(r["keys"]) for row in rows for r in row["found"].values()}
    n = f"{keys.pop()} sampled keys" if len(keys) == 1 else "sampled keys"
    n = "1 key" if n.startswith("1 ") else n
    told = _of_layers(_chosen(rows), form)
    return [
        f"Change of a trigger's coefficient when a token of its prefix is dropped ({n}): {told}."
    ]


_SERIES = {
    "same_last_token": "the same last token (beyond chance)",
    "same_last_bigram": "the same last bigram",
    "same_last_shape": "the same word shape",
    "earlier_gap": "likeness of the earlier text (beyond matched positions)",
    "dropped_last": "the change when the last token is dropped",
    "dropped_random": "the change when a random token is dropped",
    "dropped_first": "the change when the first token is dropped",
}


def _trend(result: Result) -> list[str | None]:
    depth = result.summary.get("depth")
    if not isinstance(depth, Mapping):
        return []
    parts = [
        f"{words} {visible(one.get('trend'), 20)} (rho {float(one['rho']):+.2f} "
        f"{interval(one.get('low'), one.get('high'), lambda v: f'{v:+.2f}')})"
        for name, words in _SERIES.items()
        if isinstance(one := depth.get(name), Mapping) and number(one.get("rho")) is not None
    ]
    if not parts:
        return []
    return [
        f"From layer to layer over {count(depth.get('layers'))} layers (Spearman's rho of the "
        f"layers' means, 95% interval over keys): {'; '.join(parts)}. Layers with random weights "
        "show some of this too: it is no sign of learning by itself."
    ]


def _with_ends(
    row: Mapping[str, Any], name: str, form: Callable[[Any], str] = percent
) -> str | None:
    if number(row.get(name)) is None:
        return None
    low, high = number(row.get(f"{name}_low")), number(row.get(f"{name}_high"))
    if low is not None and high is not None:  # a t interval does not know where shares end
        low, high = max(low, 0.0), min(high, 1.0)
    return f"{form(row[name])} {interval(low, high, form)}".rstrip()


def _active(rows: list[dict[str, Any]], _: int) -> str | None:
    def form(row: dict[str, Any]) -> str | None:
        most, all_but = _with_ends(row, "active_share_90"), _with_ends(row, "active_share_99")
        if most is None:
            return None
        return most + (f" (all but 1%: {all_but})" if all_but else "")

    told = _of_layers(rows, form)
    if not told:
        return None
    return (
        "Many keys make one output: share of the layer's keys, the largest first, that it takes "
        f"until at most 10% of the output's squared norm is missing: {told}."
    )


def _zero_agreement(rows: list[dict[str, Any]], _: int) -> str | None:
    def form(row: dict[str, Any]) -> str | None:
        share = _with_ends(row, "zero_agreement")
        if share is None:
            return None
        null = _with_ends(row, "zero_agreement_null")
        if null is None:
            return share
        text = f"{share}, against {null}"
        apart = (number(row.get("zero_agreement_high")) or 1) < (
            number(row.get("zero_agreement_null_low")) or 0
        )
        return text + ("" if apart else " (not told from chance)")

    told = _of_layers(rows, form)
    if not told:
        return None
    return (
        "Zero agreement, positions where the output's top token is that of none of these keys, "
        f"with another position's output as the null: {told}."
    )


def _prediction(rows: list[dict[str, Any]], _: int) -> str | None:
    def form(row: dict[str, Any]) -> str | None:
        parts = [
            f"{share} {words}"
            for name, words in (
                ("unchanged", "unchanged"),
                ("refined", "refined"),
                ("overridden", "overridden"),
            )
            if (share := _with_ends(row, name))
        ]
        return ", ".join(parts) or None

    told = _of_layers(rows, form)
    n = next(
        (count(r["sampled_positions"]) for r in rows if number(r.get("sampled_positions"))), ""
    )
    if not told:
        return None
    at = f" ({n} positions)" if n else ""
    return (
        f"What the FFN does to the stream's top token{at}; refined: changes it to one that is the "
        f"top of neither stream nor output, overridden: to the output's own. {_capital(told)}."
    )


def _exact(result: Result) -> str | None:
    error = number(result.summary.get("reconstruction_error"))
    if error is None:
        return None
    return (
        "Check: coefficient * value summed over the keys, plus the bias, is the FFN's output to a "
        f"relative {unsigned(error, 6)}."
    )


# A prompt -----------------------------------------------------------------------------------------


def _prompt(result: Result) -> list[str | None]:
    found = result.summary.get("prompt")
    if not isinstance(found, Mapping):
        return []
    target, says = _quoted(found.get("target")), _quoted(found.get("says"))
    prompt = _quoted(result.config.get("prompt"), 80)
    first = number(found.get("rank")) == 1
    text = f"After {prompt} the token {target} has rank {count(found.get('rank'))}"
    log_prob = number(found.get("log_prob"))
    if log_prob is not None:
        text += f", probability {percent(math.exp(log_prob))}"
    text += "." if first else f"; the model says {says}."
    return [text, _parts(found), *_keys(result, found), _sums(found)]


def _quoted(value: Any, limit: int = 40) -> str:
    return f'"{isolated(visible(DASH if value is None else value, limit))}"'


def _logits(value: Any) -> str:
    found = number(value)
    return DASH if found is None else f"{found:+.2f}" if abs(found) >= 0.005 else f"{found:+.0e}"


def _parts(found: Mapping[str, Any]) -> str | None:
    if number(found.get("ffn")) is None or number(found.get("logit")) is None:
        return None
    return (
        f"Of its logit of {_logits(found['logit'])} the FFNs of all layers add "
        f"{_logits(found['ffn'])} directly at the last position; embedding, attention and the last "
        f"biases {_logits(found.get('rest'))} (attention carries also what FFNs wrote at earlier "
        "positions)."
    )


def _keys(result: Result, found: Mapping[str, Any]) -> list[str | None]:
    table = result.tables.get("prompt_keys")
    if table is None or not has(table, "contribution"):
        return []
    out: list[str | None] = []
    raising = table.loc[table["contribution"] > 0, :].nlargest(3, "contribution")
    names = [
        f"{key_label(row)} ({_logits(row['contribution'])}, above the mean of all tokens "
        f"{_logits(row.get('contribution_centred'))}; here it raises {raised(row, 3)})"
        for row in raising.to_dict("records")
    ]
    if names:
        out.append(f"Keys (layer.key) that add most to it directly, in logits: {', '.join(names)}.")
    if has(table, "ablated_logit"):
        change = table["ablated_logit"].to_numpy(dtype=float)
        direct = table["contribution"].to_numpy(dtype=float)
        known = np.isfinite(change)
        opposite = int(((change * direct) < 0)[known].sum())
        text = (
            f"Really removed one at a time, {opposite} of {int(known.sum())} of the largest keys "
            "move the logit the way their direct contribution says"
        )
        rho = number(found.get("contribution_and_ablation"))
        text += f" (rank correlation {rho:+.2f})" if rho is not None else ""
        strongest = table.loc[table["ablated_logit"].abs().idxmax(), :]
        text += (
            f"; most moves {key_label(strongest)}: {_logits(strongest['ablated_logit'])} logits, "
            f"directly {_logits(-strongest['contribution'])} was expected"
        )
        out.append(
            text + ". The difference is the final norm's scale and what later layers make of it."
        )
    return out


def _sums(found: Mapping[str, Any]) -> str | None:
    if number(found.get("sum_error")) is None:
        return None
    return (
        "Check: keys and bias add up to each layer's contribution within "
        f"{unsigned(found['sum_error'], 4)} logits, all parts to the logit within "
        f"{unsigned(found.get('logit_error'), 4)}."
    )


def limits(result: Result) -> list[str]:
    """What the numbers are, and what they are not."""
    out: list[str] = []
    if "triggers" in result.tables:
        out += [
            "Triggers are the few positions with the largest coefficient. What they have in common "
            "need not be what the key is for: most of its work is at smaller coefficients.",
            "A share of triggers with the same last token does not say that the key detects that "
            "token: any direction that carries a token's identity, as early layers' streams do, "
            "has such triggers.",
            "Agreement counts keys whose value's top token follows the first trigger. It is about "
            "few keys, and no proof that a key stores that continuation, nor is its absence one of "
            "the contrary. Its interval takes keys as independent; keys share triggers, so it is "
            "somewhat too narrow.",
            "Shares and agreement depend on the number of documents searched. Compare layers and "
            "models at equal numbers only.",
        ]
    if "mutation" in result.tables:
        out.append(
            "Triggers are maxima, so any change to their prefix lowers the coefficient. Compare "
            "the three kinds of dropped token with one another and with an unrelated text."
        )
    if has(layers_of(result), "unchanged"):
        out.append(
            "Tops of streams and outputs are read by the final norm and the unembedding, as if no "
            "layer followed. In early layers that is not what the model is about to say."
        )
    if "prompt_keys" in result.tables:
        out.append(
            "What a key adds to all tokens alike changes no probability: contribution_centred "
            "leaves it out. A direct contribution holds the final norm's scale fixed and leaves "
            "out later layers; the removal has both. Neither shows what FFNs did at earlier "
            "positions, where facts "
            "about a subject are mostly looked up."
        )
    return out


def compare(result: Result) -> list[tuple[str, str]]:
    """What runs are compared by: of each layer, agreement and last tokens, with their nulls."""
    out, suffix = [], basis(layers_of(result))
    for row in layers_of(result).to_dict("records"):
        named = f"layer {count(row['layer'])}"
        if suffix is not None and number(row.get(f"agreement_rate{suffix}")) is not None:
            ends = interval(
                row.get(f"agreement_low{suffix}"), row.get(f"agreement_high{suffix}"), _tiny
            )
            value = f"{_tiny(row[f'agreement_rate{suffix}'])} {ends}, null "
            value += _tiny(row.get(f"agreement_null{suffix}"))
            out.append((f"{named}: keys that agree ({BASES[suffix]})", value))
        if number(row.get("same_last_token")) is not None:
            value = f"{percent(row['same_last_token'])}, null "
            value += percent(row.get("same_last_token_null"))
            out.append((f"{named}: triggers with the same last token", value))
    return out


VIEW = View(
    question="What do the keys of the FFN answer to, and what do their values say?",
    findings=findings,
    limits=limits,
    digests=digests,
    rank={
        "keys": (("same_last_token", False), ("coefficient_max", False)),
        "prompt_keys": (("contribution", True),),
    },
    narrow=narrow,
    quiet=frozenset({"triggers", "histogram"}),
    browser=Browser(
        title="Browse the keys",
        noun="key",
        table="keys",
        by=("layer", "key"),
        shown=(
            ("agreement_folded", "agrees"),
            ("next_token_rank_folded", "next token's rank"),
            ("same_last_token", "same last token"),
            ("same_last_token_null", "by chance"),
            ("coefficient_max", "maximum"),
            ("coefficient_min", "minimum"),
            ("active_fraction", "active"),
        ),
        tokens=(
            ("value_top_tokens_folded", "value raises"),
            ("value_bottom_tokens_folded", "value lowers"),
            ("value_top_tokens", "value raises (raw)"),
            ("value_bottom_tokens", "value lowers (raw)"),
        ),
        first=("agreement_folded", "same_last_token", "coefficient_max"),
        examples="triggers",
        text=("prefix", "token", "following"),
        where=(
            ("next_token", "next token"),
            ("document", "document"),
            ("window", "window"),
            ("position", "position"),
        ),
        measured=(("coefficient", "coefficient"),),
        group=(
            "sign",
            ((1, "Triggers: the largest coefficients"), (-1, "The most negative coefficients")),
        ),
    ),
    compare=compare,
)

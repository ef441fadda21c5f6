"""What the columns of `kinds` and `lookup` mean."""

from __future__ import annotations

from interp.analyzers.ffn_keys.earlier import CONTEXT_DRAWS, LOCAL
from interp.analyzers.ffn_keys.patterns import DRAWS
from interp.results import Column

SHARE, KEYS_, POS = "share of triggers", "share of keys", "share of positions"
COSINE = "cosine"
_WHAT = {
    "same_last_token": "token",
    "same_last_bigram": "bigram (the token before and the trigger)",
    "same_last_shape": "word shape of the trigger (case, digits, leading space; runs collapsed)",
}
_EARLIER = (
    f"mean TF-IDF cosine over pairs of triggers, of their windows but the last {LOCAL} tokens, "
    "without the trigger's own term"
)
_MATCHED = (
    "positions of the same token (else one as frequent) after about as much text, in other "
    "documents"
)


def _ends(name: str, unit: str, of: str) -> dict[str, Column]:
    return {
        f"{name}_{end}": Column(unit, f"{word} end of {name}'s 95% t interval over {of}.")
        for end, word in (("low", "Lower"), ("high", "Upper"))
    }


def _keys() -> dict[str, Column]:
    out: dict[str, Column] = {}
    for end, triggers in (("", "triggers"), ("_negative", "negative triggers")):
        for name, what in _WHAT.items():
            of = f"{name}{end}"
            out[of] = Column(
                SHARE,
                f"Share of the most common {what} among the key's {triggers}; fewer than 2: "
                "missing. Compare only at equal numbers of documents.",
            )
            out[f"{of}_null"] = Column(
                SHARE, f"Mean of {of} over sets of as many random included positions."
            )
            out[f"{of}_beyond"] = Column(
                "true or false", f"{of} is above the 99th percentile of those random sets."
            )
        similarity = f"earlier_similarity{end}"
        out[similarity] = Column(COSINE, f"Of {triggers}: {_EARLIER}.")
        out[f"{similarity}_null"] = Column(
            COSINE, f"The same of {_MATCHED}; mean of {CONTEXT_DRAWS} draws; missing without any."
        )
        out[f"{similarity}_beyond"] = Column(
            "true or false",
            f"{similarity} is above all {CONTEXT_DRAWS} draws (by chance 1 key in 20).",
        )
    return out


def _layers() -> dict[str, Column]:
    out: dict[str, Column] = {}
    for end in ("", "_negative"):
        for name in _WHAT:
            of = f"{name}{end}"
            out[of] = Column(SHARE, f"Mean over keys of {of}.")
            null = "Of random positions, as many as most keys have triggers"
            out[f"{of}_null"] = Column(SHARE, f"{null}: mean of {of} over {DRAWS:,} draws.")
            out[f"{of}_null_95"] = Column(SHARE, f"{null}: 95th percentile.")
            out[f"{of}_null_99"] = Column(SHARE, f"{null}: 99th percentile.")
            for level in ("95", "99"):
                out[f"{of}_beyond_{level}"] = Column(
                    KEYS_, f"Keys with {of} above the {level}th percentile of as many positions."
                )
            out[f"{of}_chance_99"] = Column(
                KEYS_, f"{of}_beyond_99 of random sets: at most 1%, less where shares have steps."
            )
        similarity = f"earlier_similarity{end}"
        out[similarity] = Column(COSINE, f"Mean over keys of {similarity}.")
        out[f"{similarity}_null"] = Column(COSINE, f"Mean over keys of {similarity}_null.")
        gap = f"earlier_gap{end}"
        out[gap] = Column(COSINE, f"Mean over keys of {similarity} minus {similarity}_null.")
        out |= _ends(gap, COSINE, "keys")
        out[f"earlier_gap_median{end}"] = Column(
            COSINE, "Median over keys: documents that begin alike make a few keys' very large."
        )
        out[f"{similarity}_beyond"] = Column(
            KEYS_, f"Keys above all {CONTEXT_DRAWS} draws of matched positions; by chance 1 in 20."
        )
        out[f"earlier_same_token{end}"] = Column(
            "share of matches", "Matched positions with the trigger's very token."
        )
    out["sampled_positions"] = Column("positions", "Included positions that the mixture is of.")
    out["sampled_documents"] = Column("documents", "Documents that they lie in.")
    keys = "smallest number of keys, largest |coefficient| |value| first, that leaves at most"
    for name, unit, what in (
        ("active_share_90", KEYS_, f"Active share: {keys} 10% of |sum over keys|^2 unexplained."),
        ("active_share_99", KEYS_, f"The same with {keys} 1%."),
        (
            "zero_agreement",
            POS,
            "The top token of the FFN's output (bias included) is the top token of none of the "
            "keys of active_share_90 (bottom token where the coefficient is negative).",
        ),
        ("zero_agreement_null", POS, "The same with the output of another sampled position."),
        (
            "unchanged",
            POS,
            "The FFN's output leaves the stream's top token (final norm, unembedding) as it was.",
        ),
        (
            "refined",
            POS,
            "It changes it to a token that is the top of neither stream nor output alone.",
        ),
        ("overridden", POS, "It changes it to the output's own top token."),
        ("output_confirms", POS, "The output's own top token already was the stream's."),
    ):
        out[name] = Column(unit, what if what.endswith(".") else f"{what}.")
        out |= _ends(name, unit, "documents")
    return out


KEYS = _keys()
LAYERS = _layers()
_CHANGE = "relative change"
MUTATION = {
    "layer": Column("index", "Layer, counted from 0."),
    "sign": Column("1 or -1", "1: triggers with the largest coefficients; -1: most negative ones."),
    "dropped": Column(
        "word",
        "Token dropped from the prefix: first, random (between the two), last; all: the key's mean "
        "coefficient over the text instead, what an unrelated prefix gives.",
    ),
    "keys": Column("keys", "Sampled keys with a trigger in the documents that were run."),
    "triggers": Column("triggers", "Their triggers there; prefixes of 3 tokens or more."),
    "change": Column(
        _CHANGE,
        "Per key, sum of its triggers' coefficients after over before, minus 1; mean over keys.",
    ),
    **_ends("change", _CHANGE, "keys"),
    "change_median": Column(_CHANGE, "Median over keys."),
    "change_q25": Column(_CHANGE, "Lower quartile over keys."),
    "change_q75": Column(_CHANGE, "Upper quartile over keys."),
    "flipped": Column(KEYS_, "Keys whose summed coefficient changes its sign (change < -1)."),
}
PROMPT_KEYS = {
    "rank": Column("rank", "By |contribution|, 1 for the largest, over all keys of all layers."),
    "layer": Column("index", "Layer, counted from 0."),
    "key": Column("index", "Key within the layer, counted from 0."),
    "coefficient": Column("coefficient", "At the prompt's last position."),
    "contribution": Column(
        "logits",
        "What the key adds directly to the target's logit there: coefficient * value . W_U, with "
        "the final norm's own scale at this position held fixed.",
    ),
    "contribution_centred": Column(
        "logits", "The same minus its mean over the vocabulary, which changes no probability."
    ),
    "ablated_logit": Column(
        "logits",
        "Change of the target's logit with the coefficient set to 0 at the last position and the "
        "model run on; minus contribution where nothing later reads the key.",
    ),
    "ablated_log_prob": Column("nats", "The same of the target's log-probability."),
    "value_top_tokens": Column("tokens", "The 10 tokens that the value raises most, norm folded."),
    "value_bottom_tokens": Column("tokens", "The 10 tokens that it lowers most, norm folded."),
}
PROMPT_LAYERS = {
    "layer": Column("index", "Layer, counted from 0."),
    "ffn": Column("logits", "What the FFN's own output adds to the target's logit."),
    "keys": Column("logits", "Sum of contribution over the layer's keys."),
    "bias": Column("logits", "What the FFN's output bias adds."),
    "error": Column("logits", "keys + bias - ffn: rounding."),
    "raised": Column("logits", "Sum of contribution over the keys that raise the logit."),
    "lowered": Column("logits", "Sum over those that lower it."),
    "ffn_centred": Column("logits", "keys, each minus its mean over the vocabulary, summed."),
}
HISTOGRAM = {
    "layer": Column("index", "Layer, counted from 0."),
    "key": Column("index", "Key within the layer, counted from 0."),
    "low": Column("coefficient", "Lower edge of the bin, in it."),
    "high": Column("coefficient", "Upper edge, in it only for the last bin."),
    "positions": Column("positions", "Included positions with a coefficient in the bin."),
}
SUMMARY = {
    "depth": Column(
        "Spearman rho",
        "Of layer means with the layer: shares less their null, earlier_gap, and changes after a "
        "dropped token; 95% percentile interval over resampled keys; rises, falls or undecided. "
        "Only with 4 layers or more.",
    ),
    "prompt": Column(
        "as named",
        "The prompt's tokens, the target, its logit, log-probability (nats) and rank, what the "
        "model says first, what FFNs and all the rest add to the logit, and the largest error of "
        "the sums. Spearman's rho over the keys listed: contribution with the fall of the logit "
        "when ablated, and contribution_centred with that of the log-probability.",
    ),
}

"""What every column and summary key of an ffn-keys result means."""

from __future__ import annotations

from interp.results import Column

LOGITS = "logits per coefficient"
_BASES = {
    "": ("raw", "W_U v, the value as it is"),
    "_folded": ("folded", "W_U v with the final norm's gain (and centring, if LayerNorm) in it"),
}


def _values(suffix: str) -> dict[str, Column]:
    _, what = _BASES[suffix]
    return {
        f"value_top_ids{suffix}": Column("token ids", f"The 10 largest entries of {what}."),
        f"value_top_tokens{suffix}": Column("tokens", f"value_top_ids{suffix} as text."),
        f"value_bottom_ids{suffix}": Column("token ids", f"The 10 smallest entries of {what}."),
        f"value_bottom_tokens{suffix}": Column("tokens", f"value_bottom_ids{suffix} as text."),
        f"value_max_prob{suffix}": Column(
            "probability", f"Largest of softmax({what}); depends on the value's length."
        ),
        f"value_kurtosis{suffix}": Column(
            "excess kurtosis", f"Over the vocabulary, of {what}; 0 for a Gaussian."
        ),
        f"agreement{suffix}": Column(
            "true or false",
            f"Whether the largest entry of {what} is the next token of the first trigger; missing "
            "where that ends its document.",
        ),
        f"next_token_rank{suffix}": Column(
            "rank", f"Of that next token in {what}, 1 for the largest entry."
        ),
        f"agreement_negative{suffix}": Column(
            "true or false",
            f"Whether the smallest entry of {what} is the next token of the first negative "
            "trigger.",
        ),
        f"next_token_rank_negative{suffix}": Column(
            "rank", f"Of that next token from the bottom of {what}, 1 for the smallest entry."
        ),
    }


KEYS = {
    "layer": Column("index", "Layer, counted from 0."),
    "key": Column("index", "Key within the layer, counted from 0: column of W_in, row of W_out."),
    "coefficient_mean": Column("coefficient", "Mean over included positions."),
    "coefficient_max": Column("coefficient", "Largest over included positions."),
    "coefficient_min": Column("coefficient", "Smallest over included positions (--sign both)."),
    "active_fraction": Column(
        "share of positions",
        "Included positions whose pre-activation (the gate's, in gated models) is above 0.",
    ),
    "value_norm": Column("residual units", "l2 norm of the value."),
    **_values(""),
    **_values("_folded"),
}

TRIGGERS = {
    "layer": KEYS["layer"],
    "key": KEYS["key"],
    "sign": Column("1 or -1", "1: of the largest coefficients; -1: of the most negative ones."),
    "rank": Column("rank", "1 for the document with the largest (most negative) coefficient."),
    "coefficient": Column(
        "coefficient",
        "act(pre), in gated models act(gate) * up, at the position: the largest (most negative) "
        "of its document.",
    ),
    "document": Column("index", "Document's place in the source, counted from 0."),
    "window": Column("index", "Which of the document's windows, counted from 0 (--windows)."),
    "position": Column("index", "Token within the window, BOS counted, from 0."),
    "token_id": Column("token id", "The token at the position: the prefix's last."),
    "token": Column("token", "The same as text; bytes of a part of a character are escaped."),
    "next_token_id": Column(
        "token id", "The token after it in the document; missing at the document's end."
    ),
    "next_token": Column("token", "The same as text."),
    "prefix": Column(
        "text",
        "The document's text from the window's start to the end of the token (of the character "
        "that it is part of).",
    ),
    "following": Column("text", "The document's text right after the prefix, up to 12 tokens."),
}


def _agreements(suffix: str) -> dict[str, Column]:
    of = f"agreement{suffix}"
    return {
        f"agreement_count{suffix}": Column("keys", f"Keys with {of}."),
        f"agreement_rate{suffix}": Column("share of keys", f"{of}, of agreement_keys."),
        f"agreement_low{suffix}": Column(
            "share of keys", f"Lower end of agreement_rate{suffix}'s 95% interval over keys."
        ),
        f"agreement_high{suffix}": Column(
            "share of keys", f"Upper end of agreement_rate{suffix}'s 95% interval over keys."
        ),
        f"agreement_null{suffix}": Column(
            "share of keys", "Its mean with the next tokens shuffled over the layer's keys (null)."
        ),
        f"agreement_null_99{suffix}": Column(
            "share of keys", "The 99th percentile of the same, over 10,000 shuffles."
        ),
        f"agreement_p{suffix}": Column(
            "probability", f"How often a shuffle reaches agreement_rate{suffix}; at least 1e-4."
        ),
        f"agreement_q{suffix}": Column(
            "probability", "The same after Benjamini-Hochberg over the layers."
        ),
        f"agreement_unigram{suffix}": Column(
            "share of keys",
            "Expected with next tokens drawn by their frequency in the text (null).",
        ),
        f"agreement_unigram_99{suffix}": Column(
            "share of keys", "The 99th percentile of the same, over 10,000 draws."
        ),
        f"next_token_rank_median{suffix}": Column(
            "rank", f"Median over keys of next_token_rank{suffix}; chance: half the vocabulary."
        ),
        f"value_kurtosis_median{suffix}": Column(
            "excess kurtosis", f"Median over keys of value_kurtosis{suffix}."
        ),
    }


LAYERS = {
    "layer": KEYS["layer"],
    "keys": Column("keys", "Keys measured in this layer."),
    "documents": Column("documents", "Documents that its coefficients were read in."),
    "positions": Column("positions", "Included positions that its coefficients were read at."),
    "active_fraction_median": Column("share of positions", "Median over keys of active_fraction."),
    "agreement_keys": Column("keys", "Keys whose first trigger has a next token to agree with."),
    **_agreements(""),
    **_agreements("_folded"),
}

SUMMARY = {
    "layers": Column("index", "Layers measured."),
    "keys": Column("keys", "Keys measured, all layers together."),
    "documents": Column("documents", "Documents behind the triggers of every layer."),
    "positions": Column("positions", "Included positions behind the coefficients' means."),
    "triggers_per_key": Column("documents", "Triggers of each key: --top, or all documents."),
    "reconstruction_error": Column(
        "relative",
        "Largest |sum of coefficient * value + bias - FFN's output| at a position of two "
        "documents, over the output's norm there.",
    ),
    "agreement": Column(
        "keys and shares",
        "Per layer and basis: keys that agree, of how many, rate and 95% interval over keys, both "
        "nulls, and p of the shuffled one.",
    ),
}

"""What every column and summary key of an asymmetry result means."""

from __future__ import annotations

from interp.results import Column

NATS = "nats per token"
S = "-1 to 1"
R = "Pearson r"
_KINDS = {
    "score_correlation": "of S_ij with S_ji over pairs i > j of included positions (no mask)",
    "score_correlation_centred": "the same, row and column means of the included cells removed",
    "score_correlation_content": "of the scores with query and key both at rotary offset 0 "
    "(without rotary embedding: of the scores themselves)",
    "score_correlation_content_centred": "the same, row and column means removed: the headline",
}
_CONTROLS = {
    "score_correlation_offsets_removed": "as centred, the mean of each offset i - j removed too",
    "score_correlation_content_offsets_removed": "as content_centred, the mean of each offset too",
    "score_correlation_repaired": "as content_centred, with the keys of the next KV head (null)",
}
_BASES = {"": "", "_folded": " With the norm's gain (and centring) folded into W_Q and W_K."}


def _basis(suffix: str) -> dict[str, Column]:
    folded = _BASES[suffix]
    return {
        f"directionality{suffix}": Column(
            S,
            "(E_col - E_row) / (E_col + E_row), E the excess of A's column (key side) and row "
            "(query side) norms above mean + 2 sd." + folded,
        ),
        f"stable_rank{suffix}": Column("directions", "|A|_F^2 / |A|_2^2." + folded),
        f"positive_real{suffix}": Column(
            "share of eigenvalues", "A's nonzero eigenvalues with positive real part." + folded
        ),
        f"antisymmetric_rank{suffix}": Column(
            "directions",
            "Effective rank (sum s^2)^2 / sum s^4 of A's antisymmetric part; 0 if none." + folded,
        ),
        f"null_percentile{suffix}": Column(
            "percent", "Of symmetry among re-paired heads of all layers." + folded
        ),
    }


def _correlations() -> dict[str, Column]:
    out: dict[str, Column] = {}
    for name, what in {**_KINDS, **_CONTROLS}.items():
        out[name] = Column(R, f"Correlation {what}; mean over documents.")
        out[f"{name}_low"] = Column(R, f"Lower end of {name}'s 95% t interval over documents.")
        out[f"{name}_high"] = Column(R, f"Upper end of {name}'s 95% t interval over documents.")
    return out


def _effects(suffix: str, where: str) -> dict[str, Column]:
    out: dict[str, Column] = {}
    for name, what in (
        ("symmetrised", "contents of this head's scores exchanged at the same offset (swap_kept)"),
        ("control", "the exchanged half from permuted tokens"),
        ("excess", "loss_delta_symmetrised minus loss_delta_control"),
    ):
        out[f"loss_delta_{name}{suffix}"] = Column(
            NATS, f"Loss change, {what}; {where}, paired by document."
        )
        for end, word in (("low", "Lower"), ("high", "Upper")):
            out[f"{name}{suffix}_{end}"] = Column(
                NATS, f"{word} end of loss_delta_{name}{suffix}'s 95% paired t interval."
            )
    for name in ("symmetrised", "excess"):
        out[f"{name}{suffix}_q"] = Column(
            "probability",
            f"Paired t test of loss_delta_{name}{suffix} = 0, Benjamini-Hochberg over all heads.",
        )
    return out


HEADS = {
    "checkpoint": Column("name", "Revision or folder, in the order given."),
    "layer": Column("index", "Layer, counted from 0."),
    "head": Column("index", "Query head within the layer, counted from 0."),
    "kv_head": Column("index", "KV head that this query head reads: head // (heads / KV heads)."),
    "symmetry": Column(S, "<A, A^T> / |A|_F^2 of A = W_Q W_K^T, raw weights without biases."),
    "asymmetry": Column("0 to 1", "|A - A^T|_F^2 / (4 |A|_F^2) = (1 - symmetry) / 2."),
    "symmetry_folded": Column(
        S, "symmetry with the norm's gain (and, for LayerNorm, centring) folded into W_Q and W_K."
    ),
    "symmetry_data": Column(
        S,
        "tr(A S A S) / tr(A S A^T S), S the covariance of the attention's input over included "
        "positions: the symmetry of A on what it meets.",
    ),
    **_basis(""),
    **_basis("_folded"),
    **_correlations(),
    "score_null_percentile": Column(
        "percent", "Of score_correlation_content_centred among score_correlation_repaired."
    ),
    **_effects("", "the given text"),
    **_effects("_repeated", "second half of repeated random tokens"),
}
_FIRST = ("directionality", "stable_rank", "symmetry_data", "null_percentile")
ORDER = [
    *("checkpoint", "layer", "head", "kv_head", "symmetry", "asymmetry", "symmetry_folded"),
    *_FIRST,
    *(name for name in list(HEADS)[7:] if name not in _FIRST),
]

LAYERS = {
    "checkpoint": HEADS["checkpoint"],
    "layer": HEADS["layer"],
    "symmetry": Column(S, "Of the whole layer's A, the sum over its heads; raw weights."),
    "asymmetry": Column("0 to 1", "(1 - symmetry) / 2 of the whole layer's A."),
    "directionality": Column(S, "Of the whole layer's A; raw weights."),
    "symmetry_folded": Column(S, "symmetry of the whole layer's A, norm folded in."),
    "directionality_folded": Column(S, "directionality of the whole layer's A, norm folded in."),
    "head_median": Column(S, "Median over the layer's heads of their own symmetry."),
    "head_q25": Column(S, "Lower quartile of the same."),
    "head_q75": Column(S, "Upper quartile of the same."),
    "correlation_median": Column(
        R, "Median over the layer's heads of score_correlation_content_centred."
    ),
    "correlation_q25": Column(R, "Lower quartile of the same."),
    "correlation_q75": Column(R, "Upper quartile of the same."),
}

OFFSETS = {
    "layer": HEADS["layer"],
    "head": HEADS["head"],
    "offset": Column("tokens", "i - j, how far apart query and key are."),
    "symmetry": Column(
        S, "Of W_Q R W_K^T, R the rotation of this offset: contents exchanged, offset kept."
    ),
    "symmetry_reversed": Column(
        S, "Of the form at this offset with the transpose of that at minus it: S_ij against S_ji."
    ),
}

EXAMPLES = {
    "end": Column("word", "most or least symmetric heads."),
    "layer": HEADS["layer"],
    "head": HEADS["head"],
    "query": Column("position", "Of the token that asks, BOS counted."),
    "key": Column("position", "Of the token that is asked."),
    "query_token": Column("text", "The token that asks."),
    "key_token": Column("text", "The token that is asked."),
    "score": Column("score", "S before mask and softmax, as the model computes it."),
    "content": Column("score", "At rotary offset 0, row and column means removed."),
}

SYMMETRISE = {
    "text": Column("word", "natural: the given text; repeated: random tokens said twice."),
    "variant": Column("word", "What the scores of all heads of all layers became."),
    "loss_delta": Column(NATS, "Loss minus that of the unchanged model, paired by document."),
    "ci_low": Column(NATS, "Lower end of its 95% paired t interval over documents."),
    "ci_high": Column(NATS, "Upper end of its 95% paired t interval over documents."),
    "p_value": Column("probability", "Two-sided paired t test of loss_delta = 0."),
    "q_value": Column("probability", "p_value, Benjamini-Hochberg over this table."),
    "documents": Column("documents", "Documents behind it."),
    "meaning": Column("text", "The variant in words."),
}

SUMMARY = {
    "heads": Column("heads", "Query heads of the model."),
    "kv_heads": Column("heads", "KV heads per layer."),
    "symmetry": Column(S, "Over heads, raw weights: quartiles and extremes."),
    "symmetry_folded": Column(S, "The same, norm folded in."),
    "layer_symmetry": Column(S, "Over layers, of the whole layer's A: quartiles and extremes."),
    "null": Column(S, "Symmetry of re-paired heads, all layers together: quantiles."),
    "null_folded": Column(S, "The same, norm folded in."),
    "gaussian": Column(
        "as the metric", "Mean and standard deviation for Gaussian W_Q and W_K of this shape."
    ),
    "outside_null": Column("heads", "Heads below the 2.5th / above the 97.5th percentile of null."),
    "positive_real": Column("share of eigenvalues", "Median over heads."),
    "antisymmetric_rank": Column("directions", "Median over heads."),
    "biases": Column("true or false", "Whether q or k have biases (in scores, not in A)."),
    "offsets": Column(S, "Median over heads of symmetry, by offset i - j."),
    "documents": Column("documents", "Documents behind the score correlations."),
    "documents_too_short": Column("documents", "Fewer than 3 pairs: left out of them."),
    "claim": Column(
        R,
        "Per kind of score correlation: quartiles over heads, each with a 95% jackknife t interval "
        "over documents; whether the interquartile range lies within 0.3 to 0.5; heads inside.",
    ),
    "control_same": Column(R, "Smallest correlation with keys := queries; 1 if all is right."),
    "control_repaired": Column(R, "Correlations of re-paired heads: quantiles."),
    "offsets_removed": Column(R, "Median over heads with offset means removed as well."),
    "above_repaired": Column("heads", "Heads above the 97.5th percentile of re-paired ones."),
    "rank_correlation": Column("Spearman rho", "Over heads, with the headline correlation."),
    "baseline_loss": Column(NATS, "Unchanged model, per text."),
    "symmetrise": Column(NATS, "Loss change with all heads changed, per text and variant."),
    "single_heads": Column(
        "heads", "Heads whose loss change differs from their control's at q < 0.05, per text."
    ),
    "checkpoints": Column(S, "Median symmetry over heads and over layers, per checkpoint."),
}

"""What every column and summary key of a superposition result means."""

from __future__ import annotations

from interp.results import Column

NATS = "nats per token"
_LOW, _HIGH = "Lower end of {}'s 95% interval over documents.", "Upper end of {}'s 95% interval."


def _with_ends(name: str, unit: str, description: str) -> dict[str, Column]:
    return {
        name: Column(unit, description),
        f"{name}_low": Column(unit, _LOW.format(name)),
        f"{name}_high": Column(unit, _HIGH.format(name)),
    }


_QUALITY = {
    **_with_ends("l0", "components per position", "Mean number of active components."),
    **_with_ends(
        "fvu",
        "fraction of variance",
        "Unexplained: sum |x - x_hat|^2 / sum |x - mean(x)|^2 over all judged positions at once.",
    ),
    "explained_variance": Column("fraction of variance", "1 - fvu."),
    **_with_ends("cosine", "cosine", "Mean over positions of cos(x, x_hat)."),
    "shrinkage": Column(
        "ratio",
        "sum |x_hat - m|^2 / sum (x - m)(x_hat - m), m the mean: below 1 reconstructions are too "
        "short.",
    ),
}
_LOSS = {
    **_with_ends(
        "loss_delta",
        NATS,
        "Loss with the reconstruction at included positions minus the clean loss, paired by "
        "document.",
    ),
    **_with_ends("kl", NATS, "KL(clean || spliced) of the next-token distributions."),
    **_with_ends(
        "loss_recovered_zero",
        "fraction",
        "(loss with 0 there - this loss) / (loss with 0 there - clean loss).",
    ),
    **_with_ends(
        "loss_recovered_mean",
        "fraction",
        "The same with the training mean there instead of 0.",
    ),
}
BASELINES = {
    "dictionary": Column(
        "word",
        "sae: the one that is read. sae seed, sae width: further ones. random dictionary: fixed "
        "random decoder, trained encoder. pca: the first principal directions. pca per position: "
        "each position's largest of all. neurons: the MLP's own, largest contributions. null "
        "model: an SAE of, and judged on, a model with permuted weights. random error: x plus an "
        "error as long as the SAE's in a random direction. mean, zero: constants.",
    ),
    "components": Column("components", "Directions in the dictionary."),
    **_QUALITY,
    "loss": Column(NATS, "Spliced loss, mean over loss_documents."),
    **_LOSS,
    "dead_fraction": Column(
        "share of features", "Features that fire at none of the judged positions (tokens)."
    ),
    "dead_training": Column(
        "share of features", "Features without firing in the last part of training (its own count)."
    ),
    "tokens": Column("positions", "Judged positions behind everything but the loss."),
    "loss_documents": Column("documents", "Behind the loss, KL and their intervals."),
}

FEATURES = {
    "feature": Column("index", "Feature, counted from 0: row of W_dec."),
    "density": Column("share of positions", "Judged positions where it fires (is above 0)."),
    "fires": Column("true or false", "Whether it fires at any judged position."),
    "mean_activation": Column("activation", "Mean over the positions where it fires."),
    "max_activation": Column("activation", "Largest at a judged position; its decoder has norm 1."),
    "top_tokens": Column("tokens", "Of its first contexts, each once."),
    "promoted_tokens": Column("tokens", "The 10 largest entries of W_U times its decoder row."),
    "suppressed_tokens": Column("tokens", "The 10 smallest entries of the same."),
    "value_kurtosis": Column(
        "excess kurtosis", "Of these entries over the vocabulary; 0 for a Gaussian."
    ),
    "decoder_norm": Column("residual units", "l2 norm of its decoder row."),
    "nearest_neuron": Column(
        "index", "Neuron whose value vector has the largest |cosine| with its decoder row."
    ),
    "nearest_neuron_cosine": Column("cosine", "That cosine, with its sign."),
}

CONTEXTS = {
    "feature": FEATURES["feature"],
    "rank": Column("rank", "1 for the document with the largest activation."),
    "activation": Column("activation", "At the position: the largest of its document."),
    "document": Column("index", "Document's place in the source, counted from 0."),
    "window": Column("index", "Which of the document's windows, counted from 0 (--windows)."),
    "position": Column("index", "Token within the window, BOS counted, from 0."),
    "token_id": Column("token id", "The token at the position."),
    "token": Column("token", "The same as text; bytes of a part of a character are escaped."),
    "next_token_id": Column("token id", "The token after it; missing at the document's end."),
    "next_token": Column("token", "The same as text."),
    "prefix": Column("text", "The text from the window's start to the end of the token."),
    "following": Column("text", "The text right after, up to 12 tokens."),
    "active_from": Column(
        "characters",
        "Where tokens at which the feature fires begin in prefix + following (24 tokens before to "
        "8 after).",
    ),
    "active_to": Column("characters", "Where they end."),
    "active_value": Column("activation", "The feature's activation at each of them."),
}

DENSITY = {
    "dictionary": Column("word", "Which SAE; see the table baselines."),
    "low": Column("share of positions", "Lower edge of the bin of densities; 0: never fires."),
    "high": Column("share of positions", "Upper edge."),
    "features": Column("features", "With a density in the bin."),
}

TRAINING = {
    "dictionary": DENSITY["dictionary"],
    "tokens": Column("positions", "Trained on so far."),
    "loss": Column("loss", "Of the SAE on that batch, on activations of norm sqrt(d_model)."),
    "l0": Column("components per position", "Of that batch."),
    "fvu": Column("fraction of variance", "Of that batch, about the calibration's mean."),
    "dead": Column("share of features", "Without firing in the last part of training."),
}

SUMMARY = {
    "layer": Column("index", "Layer whose MLP output is taken apart."),
    "architecture": Column("word", "Of the SAE."),
    "features": Column("features", "Of the SAE."),
    "train_tokens": Column("positions", "That the SAE was trained on; null for a loaded one."),
    "tokens": BASELINES["tokens"],
    "documents": Column("documents", "Judged."),
    "loss_documents": BASELINES["loss_documents"],
    "components": Column("components", "Active in pca and neurons: the SAE's own L0, rounded."),
    "scale": Column("1 / residual units", "What activations were multiplied by in training."),
    **_QUALITY,
    "loss_clean": Column(NATS, "Of the model as it is, mean over loss_documents."),
    "loss_spliced": Column(NATS, "With the SAE's reconstruction at included positions."),
    "loss_zero": Column(NATS, "With 0 there."),
    "loss_mean": Column(NATS, "With the training mean there (of its first positions)."),
    "loss_error": Column(NATS, "With an error as long as the SAE's in a random direction there."),
    **_LOSS,
    "dead_fraction": BASELINES["dead_fraction"],
    "dead_tokens": Column("positions", "Behind dead_fraction."),
    "dead_fraction_training": BASELINES["dead_training"],
    "dead_tokens_training": Column("positions", "Behind dead_fraction_training."),
    **_with_ends("error_delta", NATS, "loss_error - loss_clean."),
    **_with_ends("error_excess", NATS, "loss_error - loss_spliced, paired by document."),
    **_with_ends("zero_delta", NATS, "loss_zero - loss_clean."),
    **_with_ends("mean_delta", NATS, "loss_mean - loss_clean."),
}

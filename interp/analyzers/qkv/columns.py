"""What every column and summary key of a qkv result means."""

from __future__ import annotations

from interp.results import Column

NATS = "nats per token"
KERNEL = "directions shared, 0 to d_head"

INTERVENTIONS = {
    "kind": Column(
        "name",
        "mean: replaced by the mean over other documents; noise: Gaussian noise added, with the "
        "covariance of what it is added to; rank: cut to a lower rank; share: heads share one.",
    ),
    "target": Column(
        "name",
        "q, k, v: of all heads, before rotation; o: the attention's output; qk: W_Q W_K^T; ov: "
        "W_V W_O; kv: keys and values both.",
    ),
    "level": Column(
        "see kind",
        "noise: its standard deviation over that of what it is added to; rank: share of d_head "
        "left; share: groups of heads (KV heads for k, v, kv), each with one q, k or v.",
    ),
    "method": Column(
        "name",
        "Of sharing. least_squares: the one vector that serves the group's heads best, each in its "
        "own basis; average: the mean after aligning the heads; random_groups: least squares, "
        "heads dealt to groups at random (control).",
    ),
    "layer": Column("index", "The layer changed; empty: all layers at once."),
    "loss_delta": Column(NATS, "Loss with the change minus loss without; mean over documents."),
    "ci_low": Column(NATS, "Lower end of loss_delta's paired 95% t interval over documents."),
    "ci_high": Column(NATS, "Upper end of loss_delta's paired 95% t interval over documents."),
    "p_value": Column("probability", "Two-sided paired t test of loss_delta = 0."),
    "q_value": Column("probability", "Benjamini-Hochberg over all rows of this table."),
    "documents": Column("documents", "Documents that the row is of."),
}
COMPARISONS = {
    "layer": INTERVENTIONS["layer"],
    "first": Column("name", "q, k, v or o, replaced by its mean."),
    "second": Column("name", "Another one, replaced by its mean."),
    "difference": Column(NATS, "loss_delta of first minus that of second, paired by document."),
    "ci_low": Column(NATS, "Lower end of its 95% t interval over documents."),
    "ci_high": Column(NATS, "Upper end of its 95% t interval over documents."),
    "p_value": Column("probability", "Two-sided paired t test of no difference."),
    "q_value": Column("probability", "Benjamini-Hochberg over all rows of this table."),
}
OVERLAP = {
    "layer": Column("index", "Layer."),
    "head": Column("index", "Query head."),
    "kv_head": Column("index", "The KV head it reads."),
    "pair": Column("name", "qk, qv or kv: whose planes (column spaces of W_Q, W_K, W_V)."),
    "weighted": Column(
        "true or false", "Directions count by the covariance of the attention's input along them."
    ),
    "kernel": Column(KERNEL, "Projection kernel |U^T V|_F^2 of the head's own two planes."),
    "null_mean": Column(KERNEL, "Mean over pairs of random planes (weighted alike)."),
    "null_low": Column(KERNEL, "2.5th percentile of those."),
    "null_high": Column(KERNEL, "97.5th percentile of those."),
    "percentile": Column("percent", "Where kernel lies among those."),
    "others_mean": Column(
        KERNEL, "Mean over the layer's pairs of heads that do not share a KV head."
    ),
}
SUMMARY = {
    "baseline_loss": Column(NATS, "Loss of the unchanged model; mean over documents."),
    "documents": Column("documents", "Documents whose losses are compared."),
    "fit_documents": Column("documents", "Documents that means and moments are of."),
    "fit_positions": Column("positions", "Included positions that means and moments are of."),
    "fitted_elsewhere": Column("true or false", "Those documents are others than the compared."),
    "mean": Column(
        NATS, "Target -> loss_delta with its interval, replaced by its mean everywhere."
    ),
    "ranking": Column(
        "share of layers",
        "Pair -> layers, share of them where the first one's mean replacement costs more, counts "
        "with q < 0.05 either way, and the paired difference with all layers changed at once.",
    ),
    "sharing": Column(
        NATS, "Target -> groups -> loss_delta with its interval (least squares, all layers)."
    ),
    "rank": Column(
        NATS, "Product -> share of d_head -> loss_delta with its interval (all layers)."
    ),
    "noise": Column(NATS, "Target -> size -> loss_delta with its interval (all layers)."),
    "overlap": Column(
        "heads", "Pair -> heads, median kernel, null mean, heads above and below its middle 95%."
    ),
}

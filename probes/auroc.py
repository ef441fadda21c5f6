"""Area under the ROC curve of many directions for many labels, exact with ties, and its error.

AUROC is the probability that a token with the label has a larger activation than one without it,
ties counting half: 0.5 says nothing, 1 separates. Sparse activations have most tokens tied at zero;
only the others need ranking.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64
from scipy import sparse
from scipy.stats import rankdata

BLOCK = 2_000_000  # numbers ranked at once


def auroc(
    activations: Any, labels: Bool[np.ndarray, "token label"]
) -> Float64[np.ndarray, "direction label"]:
    """AUROC of every direction for every label.

    Args:
        activations: [token, direction], a numpy array or a scipy sparse one.
        labels: which tokens have each label.

    Returns:
        Areas in [0, 1]; nan for a label that all tokens have, or none.
    """
    n = labels.shape[0]
    positive = labels.sum(0).astype(np.float64)
    chosen = labels.astype(np.float64)
    if sparse.issparse(activations):
        ranks, zero = _sparse_ranks(activations)
        sums = ranks.T @ chosen + zero[:, None] * positive
    else:
        step = max(1, BLOCK // max(1, n))
        width = activations.shape[1]
        sums = np.empty((width, labels.shape[1]))
        for start in range(0, width, step):
            block = np.asarray(activations[:, start : start + step])
            sums[start : start + step] = rankdata(block, axis=0).T @ chosen
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums - positive * (positive + 1) / 2) / (positive * (n - positive))


def _sparse_ranks(activations: Any) -> tuple[sparse.csc_array, Float64[np.ndarray, " direction"]]:
    """Midranks less the midrank of zero, as sparse as the activations, and the midrank of zero."""
    columns: Any = sparse.csc_array(activations, copy=True)
    columns.sum_duplicates()
    columns.eliminate_zeros()
    n, starts = columns.shape[0], columns.indptr
    ranks = np.empty(len(columns.data))
    zero = np.empty(columns.shape[1])
    for i, (first, last) in enumerate(itertools.pairwise(starts)):
        values = columns.data[first:last]
        tied, below = n - len(values), int((values < 0).sum())
        zero[i] = below + (tied + 1) / 2
        ranks[first:last] = rankdata(values) + np.where(values > 0, tied, 0) - zero[i]
    return sparse.csc_array((ranks, columns.indices, starts), shape=columns.shape), zero


def influence(
    activation: Float64[np.ndarray, " token"], label: Bool[np.ndarray, " token"]
) -> Float64[np.ndarray, " token"]:
    """What each token adds to the error of one AUROC.

    A token with the label gives (share of the others that it exceeds - AUROC) / (tokens with it),
    one without it the counterpart. They sum to 0. Summed within documents, their squares sum to the
    variance of the AUROC over documents.

    Source: DeLong, DeLong and Clarke-Pearson (1988); Obuchowski (1997) for clustered data.
    """
    rank = rankdata(activation)
    positive = int(label.sum())
    negative = len(label) - positive
    exceeds = np.empty(len(label))
    exceeds[label] = (rank[label] - rankdata(activation[label])) / negative
    exceeds[~label] = 1 - (rank[~label] - rankdata(activation[~label])) / positive
    area = exceeds[label].mean()
    return (exceeds - area) / np.where(label, positive, negative)

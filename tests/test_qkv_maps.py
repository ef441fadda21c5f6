"""The maps of the qkv analyzer against numpy, closed forms and changes of basis."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interp.analyzers.qkv import maps, overlap

METHODS = ("least_squares", "average")


def tensor(x):
    return torch.tensor(np.asarray(x), dtype=torch.float64)


def moment_of(x):
    """[head, d, head, d] E[x^T x] of [item, head, d]."""
    flat = x.reshape(len(x), -1)
    return tensor(flat.T @ flat / len(x)).reshape(*x.shape[1:], *x.shape[1:])


def applied(x, linear):
    n, heads, d = x.shape
    return (x.reshape(n, -1) @ linear.reshape(heads * d, -1).numpy()).reshape(x.shape)


@given(st.integers(0, 1000), st.integers(0, 6))
def test_truncation_leaves_the_best_product_of_that_rank(seed, rank):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(40, 6)) @ rng.normal(size=(6, 6)) + 1
    k = rng.normal(size=(50, 6)) @ rng.normal(size=(6, 6)) - 2
    t = maps.truncation(tensor(q.T @ q), tensor(k.T @ k), rank).numpy()
    assert np.linalg.matrix_rank(t, tol=1e-8) == rank
    gone = np.linalg.svd(q @ k.T, compute_uv=False)[rank:6]
    error = np.square(q @ k.T - q @ t @ k.T).sum()
    assert error == pytest.approx(np.square(gone).sum(), rel=1e-6, abs=1e-6)


def test_truncation_of_values_that_fill_few_dimensions():
    rng = np.random.default_rng(1)
    v = rng.normal(size=(30, 3)) @ rng.normal(size=(3, 8))
    t = maps.truncation(tensor(v.T @ v), torch.eye(8, dtype=torch.float64), 3).numpy()
    np.testing.assert_allclose(v @ t, v, atol=1e-8)


def bases(rng, heads, d):
    return rng.normal(size=(heads, d, d)) + 2 * np.eye(d)


@given(st.integers(0, 1000), st.sampled_from(METHODS))
def test_heads_that_differ_in_their_basis_only_share_exactly(seed, method):
    rng = np.random.default_rng(seed)
    one = rng.normal(size=(60, 4)) + 1
    change = bases(rng, 3, 4)
    x = np.einsum("nd,hde->nhe", one, change)
    metric = tensor(np.stack([m @ m.T for m in bases(rng, 3, 4)]))
    parts = maps.Parts.free(4)
    for groups in ([[0, 1, 2]], [[0, 2], [1]], [[0], [1], [2]]):
        linear = maps.shared(moment_of(x), metric, groups, parts, method)
        np.testing.assert_allclose(applied(x, linear), x, atol=1e-6)


@given(st.integers(0, 1000), st.sampled_from(METHODS))
def test_sharing_is_the_same_in_any_basis(seed, method):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(80, 4, 3)) + rng.normal(size=(1, 4, 3))
    metric = np.stack([m @ m.T for m in bases(rng, 4, 3)])
    change = bases(rng, 4, 3)
    moved = np.einsum("nhd,hde->nhe", x, change)
    back = np.linalg.inv(change)
    moved_metric = np.einsum("hde,hef,hgf->hdg", back, metric, back)
    groups, parts = [[0, 3], [1, 2]], maps.Parts.free(3)
    found = applied(x, maps.shared(moment_of(x), tensor(metric), groups, parts, method))
    again = applied(
        moved, maps.shared(moment_of(moved), tensor(moved_metric), groups, parts, method)
    )
    np.testing.assert_allclose(np.einsum("nhd,hde->nhe", found, change), again, atol=1e-6)
    # What is left is one vector per group: 3 dimensions of 6.
    for group in groups:
        assert np.linalg.matrix_rank(found[:, group].reshape(80, -1), tol=1e-8) == 3


@given(st.integers(0, 1000))
def test_least_squares_is_no_worse_than_the_average_or_any_other_vector(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(50, 3, 2)) + 1
    metric = np.stack([m @ m.T for m in bases(rng, 3, 2)])

    def error(made):
        gap = x - made
        return np.einsum("nhd,hde,nhe->", gap, metric, gap)

    parts = maps.Parts.free(2)
    best, average = (
        error(applied(x, maps.shared(moment_of(x), tensor(metric), [[0, 1, 2]], parts, m)))
        for m in METHODS
    )
    assert best <= average * (1 + 1e-9)
    for _ in range(5):  # any 2-dimensional summary, read by each head as well as it can
        summary = x.reshape(50, -1) @ rng.normal(size=(6, 2))
        fitted = np.linalg.lstsq(summary, x.reshape(50, -1), rcond=None)[0]
        assert best <= error((summary @ fitted).reshape(x.shape)) * (1 + 1e-9)


def turned(x, parts, angles):
    """x with each plane turned by its angle."""
    out = x.copy()
    for (i, j), angle in zip(parts.planes, angles, strict=True):
        c, s = np.cos(angle), np.sin(angle)
        out[..., i], out[..., j] = x[..., i] * c - x[..., j] * s, x[..., i] * s + x[..., j] * c
    return out


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_under_rotary_embedding_sharing_commutes_with_the_rotation(method, adjacent):
    rng = np.random.default_rng(3)
    parts = maps.Parts.rotary(7, 4, adjacent)
    assert parts.planes == (((0, 1), (2, 3)) if adjacent else ((0, 2), (1, 3)))
    assert parts.rest == (4, 5, 6)
    x = rng.normal(size=(90, 3, 7)) + 0.5
    metric = tensor(np.stack([m @ m.T for m in bases(rng, 3, 7)]))
    linear = maps.shared(moment_of(x), metric, [[0, 1, 2]], parts, method)
    angles = rng.uniform(0, 6, size=2)
    np.testing.assert_allclose(
        applied(turned(x, parts, angles), linear), turned(applied(x, linear), parts, angles)
    )
    # Heads that differ by a complex number per plane, and by a basis of the rest, share exactly.
    one = rng.normal(size=(90, 7)) + 1
    same = np.stack([turned(one, parts, rng.uniform(0, 6, size=2)) for _ in range(3)], 1)
    same[..., :4] *= np.array([1, -2, 0.3])[:, None]
    same[..., 4:] = np.einsum("nd,hde->nhe", one[:, 4:], bases(rng, 3, 3))
    made = applied(same, maps.shared(moment_of(same), metric, [[0, 1, 2]], parts, method))
    np.testing.assert_allclose(made, same, atol=1e-7)
    # A reflection of a plane is no such change.
    i = parts.planes[0][1]
    same[:, 1, i] *= -1
    made = applied(same, maps.shared(moment_of(same), metric, [[0, 1, 2]], parts, method))
    assert np.abs(made - same).max() > 0.1


def test_the_mean_over_rotations_is_that_of_many():
    rng = np.random.default_rng(5)
    parts = maps.Parts.rotary(5, 4, False)
    x = rng.normal(size=(1, 5)) + 1
    draws = np.concatenate([turned(x, parts, rng.uniform(0, 2 * np.pi, 2)) for _ in range(40_000)])
    found = parts.mean_over_rotations(tensor(x.T @ x)).numpy()
    expected = draws.T @ draws / len(draws)
    expected[4, :4] = expected[:4, 4] = 0  # the rest is not turned, and pairs with nothing
    np.testing.assert_allclose(found, expected, atol=0.1)


def test_projection_kernels_of_known_and_of_random_planes():
    eye = torch.eye(12, dtype=torch.float64)
    planes = torch.stack([eye[:, :4], eye[:, 2:6], eye[:, 8:]])
    spread = planes @ tensor(bases(np.random.default_rng(0), 3, 4))  # the same planes
    found = overlap.kernels(overlap.basis(spread), overlap.basis(spread))
    np.testing.assert_allclose(found, [[4, 2, 0], [2, 4, 0], [0, 0, 4]], atol=1e-12)
    null = overlap.random_kernels(96, 8, None, torch.Generator().manual_seed(0))
    assert null.mean() == pytest.approx(8 * 8 / 96, abs=4 * null.std() / len(null) ** 0.5)
    # An input that fills 8 dimensions only leaves one plane to all.
    root = torch.zeros(96, 96, dtype=torch.float64)
    root[:8, :8] = torch.eye(8)
    null = overlap.random_kernels(96, 8, root, torch.Generator().manual_seed(0))
    np.testing.assert_allclose(null, 8, atol=1e-6)

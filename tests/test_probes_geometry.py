"""Directions against closed forms, a brute-force count and nulls of known value."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interp.errors import InterpError
from interp.results import described
from probes import directions, geometry
from probes.directions import Gaussian, nearest, unit


def polygon(n):
    """n directions in a plane at equal angles."""
    angle = torch.arange(n, dtype=torch.float64) * 2 * np.pi / n
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def simplex(n):
    """n equiangular directions in n - 1 dimensions, as rows in n: cosines are -1/(n - 1)."""
    corners = torch.eye(n, dtype=torch.float64) - 1 / n
    return corners / corners.norm(dim=1, keepdim=True)


def random(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Closed forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (torch.eye(6), 1.0),
        (torch.cat([torch.eye(4), -torch.eye(4)]), 1 / 2),
        (polygon(3), 2 / 3),
        (polygon(5), 2 / 5),
        (polygon(7), 2 / 7),
        (simplex(4), 3 / 4),  # a tetrahedron
        (simplex(9), 8 / 9),
    ],
)
def test_dimensionality_of_known_figures(made, expected):
    np.testing.assert_allclose(geometry.dimensionality(made), expected, atol=1e-12)
    turned = made.double() @ torch.linalg.qr(random(made.shape[1], made.shape[1]))[0]
    np.testing.assert_allclose(geometry.dimensionality(3 * turned), expected, atol=1e-12)
    np.testing.assert_allclose(geometry.interference(turned), 1 / expected - 1, atol=1e-12)


def test_dimensionality_of_different_lengths_by_hand():
    W = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    # 4 / (2^2 + 1^2), 1 / (2^2 + 1^2); a direction that is zero has none.
    np.testing.assert_allclose(geometry.dimensionality(W), [0.8, 0.2, 0.0])
    np.testing.assert_allclose(geometry.interference(W), [1.0, 4.0, 0.0])


def test_a_batch_is_each_alone():
    W = random(3 * 7, 4).reshape(3, 7, 4)
    for one, row in zip(W, geometry.dimensionality(W), strict=True):
        np.testing.assert_allclose(geometry.dimensionality(one), row)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 10_000))
def test_dimensions_are_never_handed_out_twice(n, d, seed):
    """By brute force over pairs; a direction has at most one dimension, all have at most d."""
    W = unit(random(n, d, seed))
    D = geometry.dimensionality(W)
    pairs = (W[:, None] * W[None]).sum(-1).square().sum(1)
    np.testing.assert_allclose(D, 1 / pairs, rtol=1e-9)
    assert D.max() <= 1 + 1e-12 and D.sum() <= min(n, d) + 1e-9


def test_effective_dimension_by_hand():
    found = geometry.effective_dimension(torch.diag(torch.tensor([3.0, 1.0, 0.0])))
    assert found.participation_ratio == pytest.approx(16 / 10)
    # Shares 3/4 and 1/4: exp(-(3/4 ln 3/4 + 1/4 ln 1/4)) = 4 / 3^(3/4)
    assert found.entropy == pytest.approx(4 / 3**0.75)
    assert found.rank == 2
    flat = geometry.effective_dimension(5 * torch.eye(11))
    assert (flat.participation_ratio, flat.entropy, flat.rank) == pytest.approx((11, 11, 11))


# Nearest ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("chunk", [1, 37, 10**6])
def test_nearest_is_that_of_all_pairs(signed, chunk, monkeypatch):
    monkeypatch.setattr(directions, "CHUNK", chunk)
    a, b = unit(random(9, 5, 1)), unit(random(13, 5, 2))
    full = (a @ b.T).numpy()
    index = (full if signed else np.abs(full)).argmax(1)
    cosine, at = nearest(a, b, signed=signed)
    assert at.tolist() == index.tolist()
    np.testing.assert_allclose(cosine, full[np.arange(9), index])
    own = (a @ a.T).numpy()
    np.fill_diagonal(own, -2 if signed else 0)
    assert nearest(a, signed=signed)[1].tolist() == (own if signed else abs(own)).argmax(1).tolist()


def test_a_single_direction_has_no_other():
    cosine, at = nearest(torch.eye(1, 3).double())
    assert torch.isnan(cosine).all() and at.tolist() == [-1]


# The null -----------------------------------------------------------------------------------------


def test_random_directions_fill_the_subspace_of_the_data():
    basis = torch.linalg.qr(random(20, 20))[0][:, :5]
    drawn = Gaussian.of(basis @ basis.T).draw(4000, seed=3)
    np.testing.assert_allclose(drawn.norm(dim=1), 1)
    np.testing.assert_allclose(drawn @ (basis @ basis.T), drawn, atol=1e-6)
    # Isotropic within 5 dimensions: each pair's squared cosine is 1/5 on average.
    assert geometry.interference(drawn).mean() == pytest.approx(3999 / 5, rel=0.02)


def test_the_nulls_interference_has_its_expected_value():
    found = geometry.measure(torch.eye(30)[:10], torch.ones(10).bool(), torch.eye(30), draws=20)
    table = found.distributions.set_index(["statistic", "directions"])
    assert table.loc[("interference", "random"), "mean"] == pytest.approx(9 / 30, rel=0.05)
    assert table.loc[("interference", "random"), "n"] == 200
    assert table.loc[("interference", "features"), "mean"] == 0
    assert (found.features["interference_percentile"] == 0).all()
    assert found.summary["dimensions_used"] == pytest.approx(10)


def test_directions_of_the_null_are_ordinary_among_it():
    """Percentiles of directions drawn like the null are uniform; an isotropic null would fail."""
    scale = torch.arange(1, 25).double() ** -1.0
    covariance = torch.diag(scale)
    W = random(600, 24, 5) * scale.sqrt()
    neurons = random(40, 24, 6)
    found = geometry.measure(W, torch.ones(600).bool(), covariance, neurons, draws=5, seed=1)
    for name in ("interference", "feature_cosine", "neuron_cosine"):
        percentiles = found.features[f"{name}_percentile"]
        assert percentiles.mean() == pytest.approx(50, abs=5), name
        assert (percentiles > 90).mean() == pytest.approx(0.1, abs=0.05), name
    assert found.summary["beyond_null"] == pytest.approx(0.01, abs=0.015)
    isotropic = geometry.measure(W, torch.ones(600).bool(), torch.eye(24), neurons, seed=1)
    assert isotropic.features["interference_percentile"].mean() > 90


def test_copies_of_value_vectors_are_found():
    neurons = random(50, 32, 7)
    rows = torch.tensor([4, 17, 31])
    W = -3 * neurons[rows] + 0.05 * random(3, 32, 8)
    found = geometry.measure(W, torch.ones(3).bool(), torch.eye(32), neurons)
    assert found.features["nearest_neuron"].tolist() == rows.tolist()
    assert (found.features["neuron_cosine"] < -0.95).all()
    assert found.summary["beyond_null"] == 1


def test_dead_features_count_nowhere():
    W = random(12, 6, 9)
    live = torch.arange(12) % 3 != 0
    alone = geometry.measure(W[live], torch.ones(8).bool(), torch.eye(6))
    W[~live] = float("nan")
    found = geometry.measure(W, live, torch.eye(6))
    assert found.features["feature"].tolist() == torch.nonzero(live)[:, 0].tolist()
    np.testing.assert_array_equal(
        found.features["dimensionality"], alone.features["dimensionality"]
    )
    near = [found.features["feature"].tolist()[i] for i in alone.features["nearest_feature"]]
    assert found.features["nearest_feature"].tolist() == near
    assert (found.summary["n_live"], found.summary["n_features"]) == (8, 12)
    described(found.features, geometry.FEATURES)
    described(found.distributions, geometry.DISTRIBUTIONS)
    assert set(found.summary) <= set(geometry.SUMMARY)


def test_a_single_live_feature_is_measured():
    found = geometry.measure(torch.eye(4), torch.arange(4) == 2, torch.eye(4), torch.eye(4))
    assert found.features["dimensionality"].tolist() == [1.0]
    assert found.features["nearest_feature"].tolist() == [-1]
    assert found.features["nearest_neuron"].tolist() == [2]


def test_same_seed_same_numbers():
    W, live = random(20, 8), torch.ones(20).bool()
    one, same, other = (
        geometry.measure(W, live, torch.eye(8), seed=s).distributions for s in (3, 3, 4)
    )
    assert one.equals(same) and not one.equals(other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"live": torch.zeros(5).bool()}, "no live direction"),
        ({"live": torch.ones(4).bool()}, "mask"),
        ({"live": torch.ones(5)}, "mask"),
        ({"W_dec": torch.zeros(5, 3)}, "zero or not finite"),
        ({"W_dec": torch.full((5, 3), float("nan"))}, "zero or not finite"),
        ({"covariance": torch.eye(4)}, "d_model 3"),
        ({"covariance": torch.zeros(3, 3)}, "zero or not finite"),
        ({"covariance": torch.ones(3, 3).triu()}, "not symmetric"),
        ({"covariance": -torch.eye(3)}, "negative eigenvalue"),
        ({"W_out": torch.eye(4)}, "d_model 3"),
        ({"draws": 0}, "draws"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, said):
    given_ = {
        "W_dec": random(5, 3).float(),
        "live": torch.ones(5).bool(),
        "covariance": torch.eye(3),
    }
    with pytest.raises(InterpError, match=said):
        geometry.measure(**given_ | change)

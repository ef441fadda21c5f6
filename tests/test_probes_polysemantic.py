"""Neurons made of a known number of features; scikit-learn as the oracle of the pursuit."""

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import LinearRegression, orthogonal_mp_gram

from interp.errors import InterpError
from interp.results import described
from probes import polysemantic
from probes.polysemantic import measure, pursue

TOKENS, FEATURES = 6000, 60


@pytest.fixture(scope="module")
def features():
    """Independent sparse activations, all of one distribution."""
    rng = np.random.default_rng(0)
    on = rng.random((TOKENS, FEATURES)) < 0.1
    return np.where(on, rng.uniform(1, 2, (TOKENS, FEATURES)), 0)


@pytest.fixture(scope="module")
def first():
    return np.arange(TOKENS) % 2 == 0


def noise(width, seed=1):
    return np.random.default_rng(seed).normal(size=(TOKENS, width))


def test_neurons_of_a_known_number_of_features(features, first):
    f = features.T
    made = [f[3], f[1] + f[2], f[5] - f[6] + f[7] - f[8], 2 * f[1] + f[2]]
    neurons = np.stack([*made, noise(1)[:, 0]], axis=1) + 7
    found = measure(sparse.csr_array(features), neurons, first)
    table = found.neurons
    # Shares 0.8 and 0.2 in the fourth: 1 / (0.64 + 0.04).
    expected = [1, 2, 4, 1 / 0.68]
    np.testing.assert_allclose(table["effective_features"][:4], expected, rtol=0.05)
    assert table["features_90"][:4].tolist() == [1, 2, 4, 2]
    np.testing.assert_allclose(table["r2"][:4], 1, atol=1e-9)
    assert table["top_feature"][0] == 3 and table["top_feature"][3] == 1
    assert table["top_share"][3] == pytest.approx(0.8, abs=0.03)
    assert table["r2"][4] < 0.02 and table.loc[4, ["effective_features"]].isna().all()
    assert table["top_feature"][4] == -1
    assert (found.summary["neurons"], found.summary["explained"]) == (5, 4)
    assert found.summary["single_share"] == pytest.approx(2 / 4)
    assert found.summary["candidates"] == FEATURES and found.summary["tokens"] == TOKENS // 2
    described(table, polysemantic.NEURONS)
    assert set(found.summary) == set(polysemantic.SUMMARY)


def test_scale_and_mean_of_a_neuron_move_nothing(features, first):
    neurons = np.stack([features[:, 1] + features[:, 2], features[:, 4]], axis=1) + 0.3 * noise(2)
    one = measure(features, neurons, first)
    same = measure(sparse.coo_array(features), neurons * [1e-3, 50] + [3, -900], first)
    np.testing.assert_allclose(
        one.neurons.drop(columns="neuron"), same.neurons.drop(columns="neuron"), rtol=1e-6
    )
    np.testing.assert_allclose(one.null, same.null, rtol=1e-6)


def test_held_out_variance_is_that_of_a_regression(features, first):
    """R^2 and shares of the chosen features, by scikit-learn on the two halves."""
    neuron = features[:, 10] + 0.6 * features[:, 20] + 0.5 * noise(1)[:, 0] + 2
    found = measure(features, neuron[:, None], first, most=2).neurons.iloc[0]
    x = features[:, [10, 20]]
    fitted = LinearRegression().fit(x[first], neuron[first])
    held = neuron[~first]
    guess = fitted.predict(x[~first])
    # About the means of its own half, as every covariance is.
    left = held - guess - (held - guess).mean()
    assert found["r2"] == pytest.approx(1 - left.var() / held.var(), rel=1e-9)
    cov = np.array([np.cov(c, held, bias=True)[0, 1] for c in x[~first].T])
    shares = fitted.coef_ * cov / held.var()
    assert found["top_share"] == pytest.approx(shares.max(), rel=1e-9)
    assert found["effective_features"] == pytest.approx(
        1 / np.square(shares / shares.sum()).sum(), rel=1e-9
    )


def test_noise_features_do_not_count_held_out(first):
    """What the pursuit takes from noise on one half explains nothing on the other."""
    rng = np.random.default_rng(3)
    features = np.where(rng.random((TOKENS, 400)) < 0.02, 1.0, 0.0)
    found = measure(features, noise(20, 4), first).summary
    assert found["explained"] == 0 and found["median_r2"] < 0.01
    assert found["median_effective"] is None


def test_a_privileged_basis_needs_fewer_features_than_its_rotations(features, first):
    neurons = features[:, :30] + 0.1 * noise(30)
    found = measure(features, neurons, first)
    assert found.summary["median_effective"] == pytest.approx(1, abs=0.02)
    assert found.summary["null_median_effective"] > 5
    assert (found.neurons["effective_percentile"] < 1).all()
    assert found.summary["null_median_r2"] > 0.8
    turned = neurons @ np.linalg.qr(np.random.default_rng(5).normal(size=(30, 30)))[0]
    ordinary = measure(features, turned, first)
    assert ordinary.neurons["effective_percentile"].mean() == pytest.approx(50, abs=12)


def test_the_pursuit_is_scikit_learns():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(300, 12)) @ rng.normal(size=(12, 12))
    x /= x.std(0)
    x -= x.mean(0)
    y = x @ rng.normal(size=12) + rng.normal(size=300)
    gram, cross = x.T @ x / 300, x.T @ (y - y.mean()) / 300
    order, betas = pursue(gram, cross, 5)
    for k in range(1, 6):
        expected = orthogonal_mp_gram(gram, cross, n_nonzero_coefs=k, copy_Gram=True, copy_Xy=True)
        assert set(order[:k]) == set(np.flatnonzero(expected))
        np.testing.assert_allclose(betas[k - 1][:k], expected[order[:k]])


def test_repeated_features_are_taken_once():
    gram = np.array([[1.0, 1.0, 0.2], [1.0, 1.0, 0.2], [0.2, 0.2, 1.0]])
    order, betas = pursue(gram, np.array([1.0, 1.0, 0.5]), 3)
    assert sorted(order % 2) == [0, 0] or sorted(order) == [1, 2]
    assert betas.shape == (2, 2)
    assert pursue(gram, np.zeros(3), 3)[0].tolist() == []


def test_rare_features_and_constant_neurons_are_left_out(features, first):
    rare = features.copy()
    rare[first, 0] = 0
    rare[np.flatnonzero(first)[: polysemantic.FIRES - 1], 0] = 5.0
    neurons = np.stack([np.ones(TOKENS), features[:, 1]], axis=1)
    found = measure(rare, neurons, first)
    assert found.summary["candidates"] == FEATURES - 1
    assert found.neurons["neuron"].tolist() == [1]
    assert found.neurons["top_feature"].tolist() == [1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"neurons": np.ones((TOKENS, 2))}, "No neuron varies"),
        ({"neurons": np.full((TOKENS, 2), np.inf)}, "not finite"),
        ({"neurons": np.zeros((3, 2))}, "same tokens"),
        ({"features": sparse.csr_array((TOKENS, 4))}, "No feature fires"),
        ({"most": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_explained_is_refused(features, first, change, said):
    with pytest.raises(InterpError, match=said):
        measure(**{"features": features, "neurons": noise(2), "first_half": first} | change)

"""Metrics of reconstructions against closed-form cases, on data whose mean is not 0."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interp import stats
from interp.errors import InterpError
from probes.baselines import Moments, Neurons, Pca
from probes.judging import Judge, ratio


def quality(x, hat, documents=None, active=None, splits=()):
    x, hat = (torch.as_tensor(np.asarray(v), dtype=torch.float64) for v in (x, hat))
    documents = torch.zeros(len(x), dtype=torch.long) if documents is None else documents
    active = torch.ones(len(x)) if active is None else torch.as_tensor(active)
    judge = Judge(int(documents.max()) + 1, x.shape[1])
    edges = [0, *sorted(splits), len(x)]
    for a, b in itertools.pairwise(edges):
        judge.see(x[a:b], hat[a:b], active[a:b], documents[a:b])
    return judge.compute()


@pytest.fixture(scope="module")
def data():
    return 7 + np.random.default_rng(0).standard_normal((200, 5)) * [1, 2, 3, 0.5, 1]


def test_mean_predictor_explains_nothing_on_data_with_mean_7(data):
    found = quality(data, np.tile(data.mean(0), (200, 1)))
    assert found.fvu.value == pytest.approx(1, abs=1e-12)
    zero = quality(data, np.zeros_like(data))  # far worse than the mean
    assert zero.fvu.value == pytest.approx(1 + data.mean(0) @ data.mean(0) / data.var(0).sum())


def test_perfect_reconstruction(data):
    found = quality(data, data)
    assert found.fvu.value == 0
    assert found.cosine.value == pytest.approx(1, abs=1e-12)
    assert found.shrinkage == pytest.approx(1, abs=1e-12)
    assert found.tokens == 200


def test_hand_computed():
    # mean (2, 2); |x - mean|^2 = 8, 4, 20 (sum 32); errors 1, 0, 4 (sum 5).
    x = [[0, 0], [2, 0], [4, 6]]
    hat = [[1, 0], [2, 0], [4, 4]]
    found = quality(x, hat, active=[1.0, 2.0, 6.0])
    assert found.fvu.value == pytest.approx(5 / 32)
    assert found.l0.value == 3
    cosines = [0, 1, (16 + 24) / np.sqrt(52 * 32)]  # a vector of 0 points nowhere
    assert found.cosine.value == pytest.approx(np.mean(cosines))
    # deviations x: (-2,-2) (0,-2) (2,4); hat: (-1,-2) (0,-2) (2,2): 5 + 4 + 8 over 6 + 4 + 12.
    assert found.shrinkage == pytest.approx(17 / 22)


@pytest.mark.parametrize("short", [0.3, 0.8, 1.5])
def test_shrunk_reconstruction(data, short):
    mean = data.mean(0)
    found = quality(data, mean + short * (data - mean))
    assert found.fvu.value == pytest.approx((1 - short) ** 2)
    assert found.shrinkage == pytest.approx(short)


def test_a_large_offset_does_not_cancel(data):
    near, far = quality(data, data + 0.1), quality(data + 1e6, data + 1e6 + 0.1)
    assert far.fvu.value == pytest.approx(near.fvu.value, rel=1e-6)
    assert far.shrinkage == pytest.approx(near.shrinkage, rel=1e-6)


@given(st.lists(st.integers(1, 199), max_size=5), st.integers(0, 5))
def test_any_batches_give_the_same(splits, seed):
    rng = np.random.default_rng(seed)
    x = 7 + rng.standard_normal((200, 4))
    hat = x + 0.5 * rng.standard_normal((200, 4))
    documents = torch.from_numpy(np.sort(rng.integers(0, 9, 200)))
    whole, cut = quality(x, hat, documents), quality(x, hat, documents, splits=splits)
    for name in ("fvu", "l0", "cosine"):
        a, b = getattr(whole, name), getattr(cut, name)
        assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high), rel=1e-9)
    assert whole.shrinkage == pytest.approx(cut.shrinkage, rel=1e-9)


def test_fvu_is_not_the_mean_of_ratios():
    # Two documents of which one is far from the other: each one's own FVU is 1, the whole is not.
    x = np.array([[0.0], [0.2], [10.0], [10.2]])
    hat = np.array([[0.1], [0.1], [10.1], [10.1]])
    assert quality(x, hat).fvu.value == pytest.approx(0.04 / np.square(x - 5.1).sum())


def test_ratio_interval():
    over, under = np.array([1.0, 3.0, 2.0, 5.0]), np.full(4, 2.0)
    found, mean = ratio(over, under), stats.mean_interval(over / 2)
    expected = tuple(float(v) for v in (mean.mean, mean.low, mean.high))
    assert (found.value, found.low, found.high) == pytest.approx(expected)
    rng = np.random.default_rng(1)
    under = rng.uniform(1, 5, 400)
    over = 0.3 * under + rng.standard_normal(400) * 0.2
    found = ratio(over, under)
    draws = rng.integers(400, size=(4000, 400))
    error = (over[draws].sum(1) / under[draws].sum(1)).std()  # the bootstrap's, another method
    assert (found.high - found.low) / 2 == pytest.approx(1.966 * error, rel=0.06)
    assert found.value == over.sum() / under.sum()


def test_one_document_has_no_interval(data):
    found = quality(data, data + 1)
    assert np.isnan(found.fvu.low) and np.isnan(found.fvu.high)


def test_nothing_seen():
    assert np.isnan(Judge(2, 3).compute().fvu.value)


def test_a_reconstruction_that_is_not_finite_is_refused(data):
    with pytest.raises(InterpError, match="not finite"):
        quality(data, data * np.nan)


# Baselines ----------------------------------------------------------------------------------------


def calibrated(x, neurons=None, cut=37):
    moments = Moments()
    for part in (slice(0, cut), slice(cut, None)):
        moments.see(torch.from_numpy(x[part]).float(), None if neurons is None else neurons[part])
    return moments.compute()


def test_calibration_and_pca(data):
    found = calibrated(data)
    assert found.mean.numpy() == pytest.approx(data.mean(0), rel=1e-5)
    norms = np.linalg.norm(data, axis=1)
    assert found.scale == pytest.approx(np.sqrt(5) / norms.mean(), rel=1e-5)
    values = np.linalg.svd(data - data.mean(0), compute_uv=False) ** 2
    assert found.variances.numpy() == pytest.approx(values / 200, rel=1e-4)
    x = torch.from_numpy(data).float()
    hat, active = Pca(found, 2)(x, None)
    assert quality(data, hat).fvu.value == pytest.approx(values[2:].sum() / values.sum(), rel=1e-4)
    assert bool((active == 2).all())
    each, _ = Pca(found, 2, each=True)(x, None)
    assert quality(data, each).fvu.value < quality(data, hat).fvu.value
    codes = (each.double().numpy() - data.mean(0)) @ found.directions.numpy().T
    assert ((np.abs(codes) > 1e-4).sum(1) <= 2).all()
    everything, _ = Pca(found, 5, each=True)(x, None)
    assert quality(data, everything).fvu.value < 1e-9


def test_neurons_by_contribution():
    from interp.analyzers.ffn_keys.coefficients import Memory

    rng = np.random.default_rng(2)
    values = torch.from_numpy(rng.standard_normal((6, 4))).float()
    values[0] *= 20  # a small change of it moves the output most
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
    memory = Memory(0, values, bias)
    neurons = torch.from_numpy(5 + rng.standard_normal((50, 6))).float()
    x = neurons @ values + bias
    found = calibrated(x.double().numpy(), neurons)
    everything, _ = Neurons(found, memory, 6)(x, neurons)
    assert torch.allclose(everything, x, atol=1e-3)
    one, active = Neurons(found, memory, 1)(x, neurons)
    deviation = (neurons - neurons.mean(0))[:, 0:1]
    assert torch.allclose(one, x.mean(0) + deviation * values[0], atol=1e-2)
    assert bool((active == 1).all())

"""The calibration: known recoveries, a known null, and SAELens' own SAE on the easy setting."""

import dataclasses

import numpy as np
import pytest
import torch

from probes import calibration
from probes.calibration import Setting, calibrate, plant, recovery

SMALL = Setting(features=40, d_model=30, active=3, tokens=2_000, batch=100)


def test_recovery_by_hand():
    planted = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    decoder = torch.tensor([[3.0, 4.0], [-5.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(recovery(decoder, planted), [0.6, 0.8])
    assert recovery(torch.zeros(3, 2), planted).tolist() == [0, 0]


def test_the_planted_directions_make_the_activations():
    """Inputs are sparse, non-negative combinations of the planted directions and a bias."""
    planted, batches = plant(Setting(features=6, d_model=30, active=2, batch=4000), seed=3)
    x = next(batches).double()
    np.testing.assert_allclose(planted.norm(dim=1), 1, rtol=1e-6)
    quiet = x[x.norm(dim=1).argmin()]  # nothing is active: the bias alone
    found = torch.linalg.lstsq(planted.double().T, (x - quiet).T).solution
    assert torch.allclose(found.T @ planted.double(), x - quiet, atol=1e-5)
    active = found > 1e-4
    assert found.min() > -1e-4
    assert active.sum(0).double().mean().item() == pytest.approx(2, rel=0.05)
    assert found[active].mean().item() == pytest.approx(1, rel=0.02)


def test_batches_depend_on_the_seed_alone():
    batches = [plant(SMALL, seed)[1] for seed in (0, 0, 1)]
    first = [next(b) for b in batches]
    torch.manual_seed(5)
    second = [next(b) for b in batches]
    for made in (first, second):
        assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    assert not torch.equal(first[0], second[0])


def test_the_summary_is_that_of_the_decoders():
    """A trainer that returns the planted directions, and one that returns other seeds' ones."""

    def told(setting, batches, seed):
        return 2 * plant(setting, seed)[0].flip(0)

    found = calibrate(SMALL, train=told, seeds=3)
    assert found.mmcs == pytest.approx(1) and found.recovered == 1
    assert (found.features, found.active, found.tokens, found.seeds) == (40, 3, 2_000, 3)

    def half(setting, batches, seed):
        return torch.cat([plant(setting, seed)[0][:20], -plant(setting, seed)[0][20:]])

    found = calibrate(SMALL, train=half, seeds=2)
    assert found.recovered == pytest.approx(0.5)
    assert found.mmcs_low <= found.mmcs <= found.mmcs_high
    assert found.mmcs == pytest.approx(np.mean(found.mmcs_by_seed))
    assert set(found.describe()) == set(calibration.COLUMNS)


def test_random_directions_score_as_the_null():
    """Directions of one setting with the data's covariance, drawn here by numpy."""

    def chance(setting, batches, seed):
        x = torch.cat([next(batches) for _ in range(20)]).numpy()
        drawn = np.random.default_rng(seed).multivariate_normal(np.zeros(30), np.cov(x.T), size=40)
        return torch.from_numpy(drawn)

    found = calibrate(SMALL, train=chance, seeds=4)
    assert found.mmcs == pytest.approx(found.null_mmcs, abs=0.03)
    assert found.recovered < 0.02


def test_saelens_trainer_finds_the_planted_features():
    setting = dataclasses.replace(Setting(), features=64, d_model=48, tokens=100_000)
    found = calibrate(setting, seeds=1)
    assert found.mmcs > 0.95 > 2 * found.null_mmcs
    assert found.recovered > 0.85
    again = calibrate(dataclasses.replace(setting, tokens=5_000), seeds=1)
    assert again.mmcs < found.mmcs
    assert again.mmcs == calibrate(dataclasses.replace(setting, tokens=5_000), seeds=1).mmcs

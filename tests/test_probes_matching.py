"""Matching against planted copies, scipy on the absolute case, and random directions."""

import numpy as np
import pytest
import torch
from sae_lens.synthetic import mean_correlation_coefficient

from interp.errors import InterpError
from interp.results import described
from probes import matching
from probes.matching import match


def random(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


D = 40
EYE = torch.eye(D)


@pytest.mark.parametrize("most", [5_000, 1])
def test_permuted_noisy_copies_come_back(most):
    """30 features, the first 20 copied in another order, at other lengths, with 10% noise."""
    a = torch.nn.functional.normalize(random(30, D), dim=1)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    copies = (a[order] + 0.1 * random(20, D, 2) / D**0.5) * torch.linspace(0.5, 4, 20)[:, None]
    b = torch.cat([copies, random(10, D, 3)])
    found = match(a, b, EYE, most=most)
    table = found.features
    where = {int(order[i]): i for i in range(20)}
    assert table["matched_feature"][:20].tolist() == [where[i] for i in range(20)]
    assert table["returns"].tolist() == [True] * 20 + [False] * 10
    assert (table["matched_cosine"][:20] > 0.98).all()
    assert found.summary["returning_first"] == pytest.approx(20 / 30)
    assert found.summary["returning_second"] == pytest.approx(20 / 30)
    assert found.summary["null_returning_first"] == 0
    assert found.summary["method"] == ("assignment" if most > 1 else "mutual")
    assert set(found.summary) == set(matching.SUMMARY)
    described(table, matching.MATCHES)


def test_opposite_directions_do_not_match():
    a = random(10, D)
    assert match(a, a, EYE).summary["returning_first"] == 1
    found = match(a, -a, EYE)
    assert found.summary["returning_first"] == 0
    assert (found.features["matched_feature"] != found.features["feature"]).all()


def test_one_to_one_is_not_nearest():
    """Two copies of one feature: only one of them has come back."""
    a = torch.stack([EYE[0], EYE[0] + 0.1 * EYE[1], EYE[2]])
    b = torch.stack([EYE[0], EYE[5], EYE[2]])
    found = match(a, b, EYE)
    assert found.features["matched_feature"].tolist() == [0, 1, 2]
    assert found.features["nearest_feature"].tolist() == [0, 0, 2]
    assert found.features["returns"].tolist() == [True, False, True]
    assert found.summary["returning_first"] == pytest.approx(2 / 3)
    mutual = match(a, b, EYE, most=1)
    assert mutual.features["matched_feature"].tolist() == [0, -1, 2]
    assert mutual.summary["matched"] == 2


def test_the_mean_is_that_of_another_implementation():
    """SAELens' coefficient takes absolute cosines: of directions in one orthant it is the same."""
    a, b = random(12, 6, 4).abs(), random(12, 6, 5).abs()
    expected = mean_correlation_coefficient(a, b)
    assert match(a, b, torch.eye(6)).summary["mean_cosine"] == pytest.approx(expected, abs=1e-6)


def test_unequal_numbers_and_dead_features():
    a = random(8, D, 6)
    b = torch.cat([a[[5, 2]], random(1, D, 7)])
    live = torch.tensor([True, True, True, False, False, True, False, True])
    a[~live] = float("nan")
    found = match(a, b, EYE, live, torch.tensor([True, True, False]))
    assert found.features["feature"].tolist() == [0, 1, 2, 5, 7]
    assert found.features["matched_feature"].tolist() == [-1, -1, 1, 0, -1]
    assert found.features["matched_cosine"].notna().tolist() == [False, False, True, True, False]
    assert found.summary["returning_first"] == pytest.approx(2 / 5)
    assert found.summary["returning_second"] == 1


@pytest.mark.parametrize("most", [5_000, 1])
def test_random_directions_match_as_the_null_does(most):
    scale = 1.0 / torch.arange(1, D + 1)
    a, b = (random(300, D, s) * scale.sqrt() for s in (8, 9))
    found = match(a, b, torch.diag(scale), draws=5, most=most)
    assert found.summary["mean_cosine"] == pytest.approx(
        found.summary["null_mean_cosine"], abs=0.02
    )
    assert found.summary["nearest_mean_first"] == pytest.approx(
        found.summary["null_nearest_mean"], abs=0.02
    )
    returning = found.summary["returning_first"]
    assert returning <= 0.03  # 1% by chance where the percentile, and not 0.7, is the bar
    assert found.summary["null_cosine"] > 0.7


def test_nearly_one_dimension_matches_by_chance():
    """Where all directions are alike, cosines of 0.9 are no evidence: the null says so."""
    covariance = torch.diag(torch.tensor([400.0] + [1.0] * (D - 1)))
    a, b = (random(50, D, s) @ covariance.sqrt() for s in (10, 11))
    found = match(a, b, covariance, draws=5)
    assert (found.features["matched_cosine"] > 0.7).mean() > 0.5
    assert found.summary["null_returning_first"] > 0.5
    assert found.summary["returning_first"] < 0.1


def test_the_decoders_own_covariance():
    W = torch.tensor([[2.0, 0.0], [0.0, 5.0], [0.0, -1.0], [9.0, 9.0]])
    live = torch.tensor([True, True, True, False])
    np.testing.assert_allclose(
        matching.decoder_covariance(W, live), np.diag([1 / 3, 2 / 3]), atol=1e-12
    )


def test_bad_shapes_are_refused():
    with pytest.raises(InterpError, match="d_model"):
        match(random(3, 4), random(3, 5), torch.eye(4))
    with pytest.raises(InterpError, match="draws"):
        match(random(3, 4), random(3, 4), torch.eye(4), draws=0)
    with pytest.raises(InterpError, match="no live"):
        match(random(3, 4), random(3, 4), torch.eye(4), torch.zeros(3).bool())

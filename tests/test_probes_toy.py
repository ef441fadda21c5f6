"""Toy models against theory, and how a run of them is told."""

import io

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from interp.errors import UsageError
from interp.report import print_result, render
from interp.results import load_result
from probes.toy_models import antipodal_pairs, fit, superposition_boundary, toy


@pytest.fixture(scope="module")
def small():
    return toy(features=10, dimensions=2, steps=150, calibrations=0, progress=False)


def ones(*shape):
    return torch.ones(*shape)


def test_dense_features_are_pca():
    """m most important features stored alone; the others cost their variance, 1/12 each."""
    importance = torch.tensor([[1.0, 0.8, 0.6, 0.2, 0.1, 0.05]])
    found = fit(ones(1, 6), importance, 3, steps=800, seed=0)
    np.testing.assert_allclose((found.W[0].T @ found.W[0])[:3, :3], np.eye(3), atol=0.05)
    np.testing.assert_allclose(found.squares[0, 3:], 0, atol=0.02)
    np.testing.assert_allclose(found.b[0], [0, 0, 0, 0.5, 0.5, 0.5], atol=0.05)
    assert found.loss.item() == pytest.approx(0.35 / 12, rel=0.05)


def test_sparse_features_share_dimensions_in_known_figures():
    """Two pairs in a plane, and a pentagon; of four starts each the one with the lowest loss."""
    has = torch.tensor([[1.0, 1, 1, 1, 0]] * 4 + [[1.0] * 5] * 4)
    found = fit(0.05 * has, has, 2, steps=700, seed=0)
    square, pentagon = (int(found.loss[s].argmin()) + s.start for s in (slice(0, 4), slice(4, 8)))
    np.testing.assert_allclose(found.dimensionality[square, :4], 0.5, atol=0.02)
    assert found.dimensionality[square, 4] == 0  # the feature that is not there
    np.testing.assert_allclose(found.dimensionality[pentagon], 0.4, atol=0.02)
    assert antipodal_pairs(found.W[square]) == 2 and antipodal_pairs(found.W[pentagon]) == 0


def test_a_pair_in_one_dimension_costs_what_theory_says():
    """(1 + r) p^2 / 6 with unit weights; training may do slightly better, dropping worse."""
    p = torch.tensor([[0.2, 0.2], [0.2, 0.2]])
    signs = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    found = fit(p, torch.tensor([[1.0, 1.0], [1.0, 0.05]]), 1, steps=700, seed=1, signs=signs)
    pair, drop = 2 * 0.2**2 / 6, 0.05 * (0.2 / 3 - 0.2**2 / 4)
    assert 0.85 * pair < found.loss[0].item() < 1.03 * pair
    assert (found.squares[0] > 0.5).all()
    # At r = 0.05, below the boundary p / (2 - 2.5 p) = 0.133, the second feature is dropped.
    assert superposition_boundary(0.2) == pytest.approx(0.2 / 1.5)
    assert found.squares[1, 1] < 0.5
    assert found.loss[1].item() < 1.05 * drop


def test_the_boundary_is_where_both_costs_are_equal():
    for p in (0.05, 0.3, 0.6):
        r = float(superposition_boundary(p))
        rng = np.random.default_rng(0)
        x = np.where(rng.random((2_000_000, 2)) < p, rng.random((2_000_000, 2)), 0)
        both = np.minimum(x[:, 0], x[:, 1]) ** 2 * (1 + r)  # each loses the smaller of the two
        assert both.mean() == pytest.approx(r * x[:, 1].var(), rel=0.02)
    assert np.isinf(superposition_boundary(0.9)) and np.isinf(superposition_boundary(1.0))


def test_antipodal_pairs_by_hand():
    def count(*columns):
        return antipodal_pairs(torch.tensor(columns, dtype=torch.float32).T)

    assert count((1, 0), (-1, 0), (0, 1), (0, -0.9)) == 2
    assert count((1, 0), (-0.5, 0)) == 0  # the second is not represented
    assert count((1, 0), (-1, 0.01), (-1, -0.01)) == 0  # two share one side
    assert count((1, 0), (0, 1)) == 0


def test_same_seed_same_weights():
    one, same, other = (fit(0.3 * ones(2, 5), ones(2, 5), 2, steps=20, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.W, same.W) and torch.equal(one.loss, same.loss)
    assert not torch.equal(one.W, other.W)


def test_a_run_holds_what_it_says(small, tmp_path):
    sweep, features = small.tables["sweep"], small.tables["features"]
    assert sweep["density"].tolist() == sorted(sweep["density"], reverse=True)
    for row in sweep.itertuples():
        here = features[(features["experiment"] == "sweep") & (features["density"] == row.density)]
        assert len(here) == 10
        assert here["square"].sum() == pytest.approx(row.frobenius_squared, rel=1e-5)
        assert row.d_star == pytest.approx(2 / row.frobenius_squared)
        assert here["represented"].sum() == row.represented
    assert (sweep["dimensionality_sum"] < 2 + 1e-6).all()
    checks = small.tables["checks"]
    off = (checks["found"] - checks["expected"]).abs()
    assert (checks["agrees"] == (off <= checks["within"])).all()
    assert small.summary["checks_agree"] == checks["agrees"].sum()
    assert small.tables["shapes"].groupby(["features", "density"])["best"].any().all()
    folder = small.save(tmp_path / "run")
    again = load_result(folder)
    for name, table in small.tables.items():
        pd.testing.assert_frame_equal(again.tables[name], table)


def test_it_is_told_in_80_columns_with_all_figures(small):
    out = io.StringIO()
    print_result(small, console=Console(file=out, width=80, highlight=False))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert "comparisons with theory agree" in words and "antipodal pairs" in words
    assert "nan" not in words and "None" not in words
    agree = small.summary["checks_agree"]
    assert f"{agree} of {small.summary['checks']} comparisons" in words
    assert set(small.figures) == {"plateaus", "importance", "shapes", "phase"}
    for name in small.figures:
        figure = small.figure(name)
        assert figure.data and figure.layout.meta["title"]
    page = render([small])
    assert "toy model of superposition" in page and "Traceback" not in page


@pytest.mark.parametrize(
    "options", [{"features": 10, "dimensions": 5}, {"dimensions": 1}, {"steps": 0}]
)
def test_sizes_that_show_nothing_are_refused(options):
    with pytest.raises(UsageError):
        toy(**options, progress=False)

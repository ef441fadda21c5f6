"""Reducers against numpy and brute force, and the promise that batches and shards do not matter."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interp.errors import InterpError
from interp.reducers import Histogram, Mean, MeanVar, PerDocument, Reservoir, TopK

FEATURES = 3
EDGES = [-1.0, 0.0, 0.5, 1.0]
# name -> (new reducer, whether update takes documents and positions)
REDUCERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "Mean": (lambda: Mean((FEATURES,)), False),
    "MeanVar": (lambda: MeanVar((FEATURES,), ddof=1), False),
    "Histogram": (lambda: Histogram(EDGES, (FEATURES,)), False),
    "TopK": (lambda: TopK(4, (FEATURES,)), True),
    "Reservoir": (lambda: Reservoir(5, (FEATURES,), seed=3), True),
}
EXACT = ["Histogram", "TopK", "Reservoir"]


def stream(seed: int, n_documents: int, n_positions: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values full of ties `[document, position, feature]`, ids and mask `[document, position]`."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, (n_documents, n_positions, FEATURES), generator=generator) / 2
    documents = torch.arange(n_documents)[:, None].expand(-1, n_positions)
    positions = torch.arange(n_positions).expand(n_documents, -1)
    mask = torch.rand(n_documents, n_positions, generator=generator) < 0.7
    mask[0, 0] = True
    return values, documents, positions, mask


def feed(name: str, pieces: list[list[Tensor]]) -> Any:
    new, takes_ids = REDUCERS[name]
    reducer = new()
    for values, documents, positions, mask in pieces:
        if takes_ids:
            reducer.update(values, documents, positions, mask=mask)
        else:
            reducer.update(values, mask=mask)
    return reducer


def outcome(reducer: Any) -> list[Tensor]:
    result = reducer.compute()
    parts = [result] if isinstance(result, Tensor) else list(result)
    return [torch.as_tensor(part) for part in parts]


@pytest.mark.parametrize("name", REDUCERS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    n_documents=st.integers(1, 9),
    n_positions=st.integers(1, 5),
    shards=st.integers(1, 4),
    shuffle=st.integers(0, 2**20),
)
def test_any_split_gives_the_same_result(
    name: str, seed: int, n_documents: int, n_positions: int, shards: int, shuffle: int
) -> None:
    whole = list(stream(seed, n_documents, n_positions))
    whole[0] = whole[0] + 0.1  # not exact in binary, so that sums do round
    expected = outcome(feed(name, [whole]))

    rng = random.Random(shuffle)
    rows = list(range(n_documents))
    rng.shuffle(rows)
    reducers = []
    for shard in range(shards):
        left = rows[shard::shards]
        pieces = []
        while left:
            size = rng.randint(1, len(left))
            pieces.append([part[left[:size]] for part in whole])
            left = left[size:]
        reducers.append(feed(name, pieces))
    while len(reducers) > 1:  # a random tree of merges
        a = reducers.pop(rng.randrange(len(reducers)))
        rng.choice(reducers).merge(a)

    for got, want in zip(outcome(reducers[0]), expected, strict=True):
        if name in EXACT:
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", REDUCERS)
def test_the_mask_decides_what_is_looked_at(name: str) -> None:
    values, documents, positions, mask = stream(5, 6, 4)
    spoiled = values.clone()
    spoiled[~mask] = float("nan")  # padding may hold anything
    got = outcome(feed(name, [[spoiled, documents, positions, mask]]))

    flat = [part[mask] for part in (values, documents, positions)]
    everything = torch.ones(len(flat[0]), dtype=torch.bool)
    want = outcome(feed(name, [[*flat, everything]]))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    unmasked = outcome(feed(name, [[values, documents, positions, torch.ones_like(mask)]]))
    assert any(a.shape != b.shape or not a.equal(b) for a, b in zip(unmasked, got, strict=True))


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_kept_value_that_is_not_finite_is_an_error(name: str, bad: float) -> None:
    values, documents, positions, mask = stream(5, 6, 4)
    values[0, 0, 1] = bad
    with pytest.raises(InterpError, match="not finite"):
        feed(name, [[values, documents, positions, mask]])


@pytest.mark.parametrize("name", REDUCERS)
def test_a_batch_without_kept_items_changes_nothing(name: str) -> None:
    batch = list(stream(7, 4, 3))
    nothing = [*batch[:3], torch.zeros_like(batch[3])]
    want = outcome(feed(name, [batch]))
    for pieces in ([nothing, batch], [batch, nothing]):
        got = outcome(feed(name, pieces))
        assert all(a.equal(b) for a, b in zip(got, want, strict=True))
    merged, empty = feed(name, [batch]), feed(name, [nothing])
    merged.merge(empty)
    assert all(a.equal(b) for a, b in zip(outcome(merged), want, strict=True))
    empty.merge(merged)
    assert all(a.equal(b) for a, b in zip(outcome(empty), want, strict=True))


@pytest.mark.parametrize("name", REDUCERS)
def test_merge_leaves_the_other_as_it_was(name: str) -> None:
    values, documents, positions, mask = stream(7, 6, 3)
    first, second = (
        feed(name, [[part[half] for part in (values, documents, positions, mask)]])
        for half in (slice(0, 3), slice(3, 6))
    )
    before = outcome(second)
    first.merge(second)
    feed_more = [values + 1, documents + 100, positions]
    if REDUCERS[name][1]:
        first.update(*feed_more)
    else:
        first.update(feed_more[0])
    assert all(a.equal(b) for a, b in zip(outcome(second), before, strict=True))


@pytest.mark.parametrize("name", REDUCERS)
def test_merging_itself_or_another_kind_is_an_error(name: str) -> None:
    reducer = feed(name, [list(stream(1, 2, 2))])
    with pytest.raises(InterpError, match="cannot merge"):
        reducer.merge(reducer)
    with pytest.raises(InterpError, match="cannot merge"):
        reducer.merge(PerDocument((FEATURES,)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Mean((2,)), Mean((3,))),
        (MeanVar(ddof=0), MeanVar(ddof=1)),
        (TopK(2), TopK(3)),
        (Histogram([0, 1]), Histogram([0, 2])),
        (Reservoir(2, seed=0), Reservoir(2, seed=1)),
    ],
)
def test_other_settings_do_not_merge(a: Any, b: Any) -> None:
    with pytest.raises(InterpError, match="cannot merge"):
        a.merge(b)


def test_shapes_masks_and_ids_are_checked() -> None:
    values = torch.zeros(4, 4, FEATURES)
    with pytest.raises(InterpError, match="feature_shape"):
        Mean((5,)).update(values)
    with pytest.raises(InterpError, match="mask"):  # would select by index
        Mean((FEATURES,)).update(values, mask=torch.ones(4, 4, dtype=torch.long))
    with pytest.raises(InterpError, match="mask"):  # would broadcast
        Mean((FEATURES,)).update(values, mask=torch.ones(4, dtype=torch.bool))
    ids = torch.arange(16).reshape(4, 4)
    with pytest.raises(InterpError, match="ids"):  # would broadcast along the wrong side
        TopK(2, (FEATURES,)).update(values, ids[0], ids)
    with pytest.raises(InterpError, match="ids"):
        TopK(2, (FEATURES,)).update(values, ids, ids.float())
    for documents, positions in ((ids - 1, ids), (ids, ids - 1), (ids + 2**31, ids)):
        with pytest.raises(InterpError, match="out of range"):
            TopK(2, (FEATURES,)).update(values, documents, positions)
    for make in (
        lambda: TopK(0),
        lambda: Reservoir(0, seed=0),
        lambda: Reservoir(1, seed=-1),
        lambda: MeanVar(ddof=-1),
        lambda: Histogram([0.0]),
        lambda: Histogram([0.0, 0.0, 1.0]),
        lambda: Histogram([0.0, float("inf")]),
    ):
        with pytest.raises(InterpError):
            make()
    for empty in (Mean(), MeanVar(ddof=1), Reservoir(1, seed=0), PerDocument()):
        with pytest.raises(InterpError, match="no item"):
            empty.compute()


# Mean and MeanVar


def test_mean_by_hand() -> None:
    mean = Mean((2,))
    mean.update(torch.tensor([[1.0, 10.0], [2.0, 20.0]]))
    mean.update(torch.tensor([[6.0, 60.0], [99.0, 99.0]]), mask=torch.tensor([True, False]))
    assert mean.compute().tolist() == [3.0, 30.0]
    assert mean.compute().dtype == torch.float64


def test_mean_of_booleans_is_a_share() -> None:
    share = Mean()
    share.update(torch.tensor([True, False, False, False]))
    assert share.compute().item() == 0.25


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_accumulated_in_float64(dtype: torch.dtype) -> None:
    values = torch.linspace(0, 1, 50_000).to(dtype)
    mean, moments = Mean(), MeanVar(ddof=0)
    for piece in values.split(7_777):
        mean.update(piece)
        moments.update(piece)
    exact = values.double().numpy()
    assert mean.compute().item() == pytest.approx(exact.mean(), rel=1e-12)
    assert moments.compute().mean.item() == pytest.approx(exact.mean(), rel=1e-12)
    assert moments.compute().variance.item() == pytest.approx(exact.var(), rel=1e-12)


@pytest.mark.parametrize(("ddof", "variance"), [(0, 2.0), (1, 2.5)])
def test_variance_by_hand(ddof: int, variance: float) -> None:
    moments = MeanVar(ddof=ddof)
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        moments.update(torch.tensor(value))
    result = moments.compute()
    assert (result.mean.item(), result.variance.item()) == (3.0, pytest.approx(variance, rel=1e-14))
    assert result.n_items == 5


def test_variance_survives_a_large_mean() -> None:
    """The difference of E[x^2] and E[x]^2 is noise here: a float64 near 1e16 is even."""
    values = 1e8 + torch.tensor([0.0, 1.0, 2.0] * 50, dtype=torch.float64)
    moments = MeanVar(ddof=0)
    for piece in values.split(11):
        moments.update(piece)
    assert moments.compute().variance.item() == pytest.approx(2 / 3, rel=1e-7)


@settings(max_examples=60, deadline=None)
@given(value=st.floats(-1e15, 1e15, allow_nan=False), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_a_constant_has_variance_exactly_zero(value: float, sizes: list[int]) -> None:
    moments = MeanVar(ddof=0)
    for size in sizes:
        moments.update(torch.full((size,), value, dtype=torch.float64))
    result = moments.compute()
    assert (result.mean.item(), result.variance.item()) == (value, 0.0)


def test_variance_of_one_item_is_undefined_not_zero() -> None:
    moments = MeanVar(ddof=1)
    moments.update(torch.tensor(3.0))
    assert moments.compute().mean.item() == 3.0
    assert moments.compute().variance.isnan()


# Histogram


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), size=st.integers(0, 60))
def test_histogram_counts_as_numpy_does(seed: int, size: int) -> None:
    values = np.random.default_rng(seed).integers(-8, 9, (size, 2)) / 4  # many on an edge
    histogram = Histogram(EDGES, (2,))
    histogram.update(torch.from_numpy(values))
    result = histogram.compute()
    for feature in range(2):
        column = values[:, feature]
        assert result.counts[feature].tolist() == np.histogram(column, EDGES)[0].tolist()
        assert result.below[feature] == sum(v < -1 for v in column)
        assert result.above[feature] == sum(v > 1 for v in column)
    assert result.counts.sum() + result.below.sum() + result.above.sum() == 2 * size


def test_histogram_compares_in_float64() -> None:
    histogram = Histogram([0.0, 0.1, 1.0])
    histogram.update(torch.tensor(0.1, dtype=torch.float32))  # is 0.100000001..., above the edge
    histogram.update(torch.tensor(np.nextafter(0.1, 0), dtype=torch.float64))  # just below
    assert histogram.compute().counts.tolist() == [1, 1]


# TopK


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    n_documents=st.integers(1, 8),
    n_positions=st.integers(1, 6),
    k=st.integers(1, 9),
    batch=st.integers(1, 8),
)
def test_top_k_is_what_sorting_everything_gives(
    seed: int, n_documents: int, n_positions: int, k: int, batch: int
) -> None:
    values, documents, positions, mask = stream(seed, n_documents, n_positions)
    top = TopK(k, (FEATURES,))
    for rows in torch.randperm(n_documents).split(batch):
        top.update(values[rows], documents[rows], positions[rows], mask=mask[rows])
    result = top.compute()
    for feature in range(FEATURES):
        items = [
            (-values[d, p, feature].item(), d, p)
            for d in range(n_documents)
            for p in range(n_positions)
            if mask[d, p]
        ]
        got = zip(
            (-result.values[:, feature]).tolist(),
            result.documents[:, feature].tolist(),
            result.positions[:, feature].tolist(),
            strict=True,
        )
        assert list(got) == sorted(items)[:k]


def test_top_k_ties_go_to_the_earlier_document_then_position() -> None:
    top = TopK(3)
    ids = torch.tensor([9, 2, 2, 5]), torch.tensor([0, 7, 4, 1])
    top.update(torch.tensor([1.0, 1.0, 1.0, 1.0]), *ids)
    result = top.compute()
    assert result.documents.tolist() == [2, 2, 5]
    assert result.positions.tolist() == [4, 7, 1]


def test_top_k_zeros_of_either_sign_are_equal() -> None:
    for first, second in ((0.0, -0.0), (-0.0, 0.0)):
        top = TopK(1)
        top.update(torch.tensor([first, second]), torch.tensor([4, 1]), torch.tensor([0, 0]))
        assert top.compute().documents.tolist() == [1]
        assert not torch.signbit(top.compute().values).any()


def test_top_k_keeps_large_ids_and_exact_values() -> None:
    top = TopK(2)
    ids = torch.tensor([2**31 - 1, 0]), torch.tensor([2**32 - 1, 2**32 - 2])
    top.update(torch.tensor([0.1, 0.3]), *ids)
    result = top.compute()
    assert result.documents.tolist() == [0, 2**31 - 1]
    assert result.positions.tolist() == [2**32 - 2, 2**32 - 1]
    assert result.values.float().equal(torch.tensor([0.3, 0.1]))


def test_top_k_of_fewer_items_has_fewer_rows() -> None:
    top = TopK(5, (2,))
    assert top.compute().values.shape == (0, 2)
    top.update(torch.ones(3, 2), torch.arange(3), torch.zeros(3, dtype=torch.long))
    assert top.compute().values.shape == (3, 2)


@pytest.mark.parametrize("name", ["TopK", "Reservoir"])
def test_an_item_counted_twice_is_an_error(name: str) -> None:
    batch = list(stream(2, 1, 3))
    with pytest.raises(InterpError, match="twice"):
        feed(name, [batch, batch])
    a, b = feed(name, [batch]), feed(name, [batch])
    before = outcome(a)
    with pytest.raises(InterpError, match="twice"):
        a.merge(b)
    assert all(x.equal(y) for x, y in zip(outcome(a), before, strict=True))


# Reservoir


def sample(n: int, size: int, seed: int, batch: int = 100) -> list[int]:
    reservoir = Reservoir(size, seed=seed)
    for ids in torch.arange(n).split(batch):
        reservoir.update(ids.float() * 3, ids, torch.zeros_like(ids))
    result = reservoir.compute()
    assert result.values.tolist() == (result.documents * 3).tolist()  # each with its own value
    return result.documents.tolist()


def test_reservoir_samples_uniformly() -> None:
    n, size, seeds = 40, 10, 600
    hits = np.zeros(n)
    for seed in range(seeds):
        chosen = sample(n, size, seed)
        assert len(set(chosen)) == size and chosen == sorted(chosen)
        hits[chosen] += 1
    # Each id is in a quarter of the samples: 150 of 600, binomial sd 10.6; 4.5 sd for 40 ids.
    assert np.abs(hits - 150).max() < 48
    # And the ids vary as much as chance has it, not less (chi square, 39 degrees of freedom).
    assert 15 < (np.square(hits - 150) / (150 * 0.75)).sum() < 75


def test_reservoir_depends_on_the_seed_and_not_on_the_batches() -> None:
    assert sample(200, 20, seed=1, batch=7) == sample(200, 20, seed=1, batch=200)
    assert sample(200, 20, seed=1) != sample(200, 20, seed=2)
    # Near seeds are unrelated: two samples of 20 of 200 share 2 on average.
    shared = [len({*sample(200, 20, s)} & {*sample(200, 20, s + 1)}) for s in range(60)]
    assert 1.3 < np.mean(shared) < 2.8


def test_reservoir_positions_of_a_document_are_sampled_one_by_one() -> None:
    reservoir = Reservoir(200, seed=0)
    documents = torch.arange(50)[:, None].expand(50, 40)
    positions = torch.arange(40).expand(50, 40)
    reservoir.update(torch.zeros(50, 40), documents, positions)
    result = reservoir.compute()
    # 200 of 2000: 4 per document and 5 per position on average.
    assert np.bincount(result.documents, minlength=50).max() < 14
    assert np.bincount(result.positions, minlength=40).max() < 16


def test_reservoir_keeps_the_dtype_and_refuses_a_mixture() -> None:
    reservoir = Reservoir(5, seed=0)
    one = torch.tensor([0])
    reservoir.update(torch.tensor([0.1], dtype=torch.bfloat16), one, one)
    assert reservoir.compute().values.dtype == torch.bfloat16
    with pytest.raises(InterpError, match="dtype"):
        reservoir.update(torch.tensor([0.1]), one + 1, one)


# PerDocument


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), n=st.integers(1, 12), batch=st.integers(1, 12))
def test_document_rows_are_the_same_in_any_batches_and_shards(
    seed: int, n: int, batch: int
) -> None:
    rng = np.random.default_rng(seed)
    documents = torch.from_numpy(rng.choice(1000, n, replace=False))
    values = torch.from_numpy(rng.normal(size=(n, 2, 3)).astype(np.float32))
    shards = [PerDocument((2, 3)), PerDocument((2, 3))]
    for i, rows in enumerate(torch.arange(n).split(batch)):
        shards[i % 2].update(values[rows], documents[rows])
    shards[1].merge(shards[0])
    result = shards[1].compute()
    assert result.documents.tolist() == sorted(documents.tolist())
    assert result.values.dtype == torch.float64
    for row, document in zip(result.values, result.documents, strict=True):
        assert row.equal(values[documents == document][0].double())


def test_document_rows_come_once() -> None:
    rows = PerDocument()
    with pytest.raises(InterpError, match="twice"):
        rows.update(torch.ones(2), torch.tensor([3, 3]))
    rows.update(torch.ones(2), torch.tensor([3, 4]))
    with pytest.raises(InterpError, match="twice"):
        rows.update(torch.ones(1), torch.tensor([4]))
    other = PerDocument()
    other.update(torch.ones(1), torch.tensor([3]))
    with pytest.raises(InterpError, match="twice"):
        rows.merge(other)
    assert rows.compute().documents.tolist() == [3, 4]

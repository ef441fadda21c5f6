"""Dropped tokens: which prefixes are run, and that the coefficients are those of a plain model."""

import numpy as np
import pytest

from interp.analyzers.ffn_keys import mutation, patterns, trend
from interp.analyzers.ffn_keys.mutation import READ, Asked, Mutated
from interp.analyzers.ffn_keys.patterns import Positions
from interp.text import load_text
from tests import ffn_plain, tiny

FAMILIES = ("gpt2", "neox", "llama")


@pytest.fixture(scope="module")
def case(load):
    """family -> (model, plain model, text, positions, what was asked, what was measured)."""
    made = {}

    def get(family):
        if family not in made:
            model, plain = load(family)
            text = load_text(tiny.corpus(10), model, documents=10, context=48)
            at = Positions.of(text)
            rng = np.random.default_rng(0)
            asked = {
                layer: Asked(layer, np.array(keys), patterns.random_sets(at, 6, len(keys), rng))
                for layer, keys in ((0, [3, 11]), (2, [0, 7, 40]))
            }
            asked[2].places[0, 2:] = -1
            with model.measuring():
                found = mutation.measure(model, at, asked, seed=1)
            made[family] = model, plain, text, at, asked, found
        return made[family]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_coefficients_are_those_of_the_mutated_prefix_alone(case, family):
    _, plain, _, at, asked, found = case(family)
    seen = 0
    for layer, one in asked.items():
        for (k, rank), place in np.ndenumerate(one.places):
            got = {kind: found[layer].coefficient[kind][k, rank] for kind in READ}
            start = at.start[max(place, 0)]
            first = start + at.bos
            if place < 0 or place - first < 2 or not at.included[place - 1]:
                assert all(np.isnan(v) for v in got.values())
                continue
            prefix = at.ids[start : place + 1].tolist()
            key, n = one.keys[k], int(first - start)

            def end(ids, layer=layer, key=key):
                return ffn_plain.coefficients(plain, ids, layer)[-1, key]

            assert got["none"] == pytest.approx(end(prefix), abs=1e-4)
            assert got["first"] == pytest.approx(end(prefix[:n] + prefix[n + 1 :]), abs=1e-4)
            assert got["last"] == pytest.approx(end(prefix[:-1]), abs=1e-4)
            between = range(n + 1, len(prefix) - 1)
            others = [end(prefix[:i] + prefix[i + 1 :]) for i in between]
            assert np.abs(np.array(others) - got["random"]).min() < 1e-4
            seen += 1
    assert seen > 10


def test_batches_change_nothing(case):
    model, _, _, at, asked, found = case("llama")
    with model.measuring():
        alone = mutation.measure(model, at, asked, seed=1, batch_tokens=1)
    for layer, one in alone.items():
        for kind in READ:
            assert one.coefficient[kind] == pytest.approx(
                found[layer].coefficient[kind], abs=1e-4, nan_ok=True
            )


@pytest.mark.parametrize("bos", [False, True])
def test_dropped_tokens_are_uniform_over_each_prefix(bos):
    """Also for triggers that share a run with an earlier trigger of the same document."""
    ids = np.arange(100, 120)
    at = Positions(ids, np.zeros(20, int), np.zeros(20, int), np.arange(20) > 0, bos)
    places = np.array([4, 5, 9, 15])
    counts = {place: np.zeros(20) for place in places}
    for seed in range(4000):
        made = mutation.plan(at, places, seed)
        for i, place in enumerate(made.places):
            run = made.runs[made.run[READ.index("random"), i]]
            end = made.position[READ.index("random"), i]
            assert run[end] == ids[place]  # the trigger is still the last token read
            gone = set(ids[: place + 1]) - set(run[: end + 1])
            assert len(gone) == 1
            counts[place][gone.pop() - 100] += 1
    first = int(bos)
    for place, count in counts.items():
        inside = count[first + 1 : place]
        assert inside.sum() == 4000  # never the first, the last or the BOS
        expected = 4000 / len(inside)
        assert (np.square(inside - expected) / expected).sum() < len(inside) + 6 * len(
            inside
        ) ** 0.5


def test_other_triggers_have_no_say():
    ids = np.arange(64)
    at = Positions(ids, np.zeros(64, int), np.zeros(64, int), ids > 0, False)

    def lost(places):
        made = mutation.plan(at, np.array(places), 3)
        i = list(made.places).index(50)
        run = made.runs[made.run[READ.index("random"), i]]
        return (set(range(51)) - set(run[: made.position[READ.index("random"), i] + 1])).pop()

    assert lost([50]) == lost([5, 20, 50]) == lost([49, 50, 63])


def test_few_runs_answer_for_many_triggers():
    ids = np.arange(64)
    at = Positions(ids, np.zeros(64, int), np.zeros(64, int), ids > 0, False)
    made = mutation.plan(at, np.arange(2, 64), 0)
    assert len(made.places) == 62
    assert len(made.runs) < 15  # 2 and about log(62) random ones
    assert all(made.position[0] == made.places)


def test_change_by_hand():
    nan = np.nan
    before = np.array([[4.0, 2.0], [1.0, nan], [nan, nan], [-4.0, -1.0]])
    after = np.array([[1.0, 2.0], [-0.5, nan], [nan, nan], [-2.0, -0.5]])
    one = Mutated(np.arange(4), {"none": before, "last": after})
    assert one.change("last") == pytest.approx([-0.5, -1.5, nan, -0.5], nan_ok=True)


def test_keys_are_sampled_once_for_a_seed():
    keys = np.arange(50, 90)
    first, again, other = (mutation.sample_keys(keys, 10, s, 3) for s in (0, 0, 1))
    assert (first == again).all() and (first != other).any()
    assert len(set(first)) == 10 and set(first) <= set(keys)
    assert (mutation.sample_keys(keys, 100, 0, 3) == keys).all()


# Trends over layers


def layers_of(means, spread=0.1, keys=60, seed=0):
    rng = np.random.default_rng(seed)
    return [m + spread * rng.standard_normal(keys) for m in means]


def test_trends():
    layers = list(range(8))
    series = {
        "down": layers_of(np.linspace(1, 0, 8)),
        "up": layers_of(np.linspace(0, 1, 8)),
        "flat": layers_of(np.zeros(8), spread=1),
        "missing": [*layers_of(np.zeros(7)), np.full(60, np.nan)],
    }
    found = trend.of(layers, series, seed=0)
    assert (found["down"]["trend"], found["down"]["rho"]) == ("falls", -1)
    assert (found["up"]["trend"], found["up"]["rho"]) == ("rises", 1)
    assert found["flat"]["trend"] == "undecided"
    assert found["flat"]["low"] < found["flat"]["rho"] < found["flat"]["high"]
    assert "missing" not in found


def test_three_layers_are_no_trend():
    found = trend.of([0, 5, 9], {"down": layers_of([2, 1, 0])}, seed=0)
    assert "down" not in found and "3 layers" in found["not_measurable"]

"""How keys mix: counted by brute force, and against plain transformers, one position at a time."""

import numpy as np
import pytest
import torch

from interp.analyzers.ffn_keys import coefficients, mixture
from interp.analyzers.ffn_keys.lens import Lens
from interp.analyzers.ffn_keys.mixture import OVERRIDDEN, REFINED, UNCHANGED, active_count
from interp.analyzers.ffn_keys.patterns import Positions
from interp.text import load_text
from tests import ffn_plain, tiny

FAMILIES = ("gpt2", "neox", "llama", "llama-tied")


def brute(c, values, limit):
    """The first k whose largest keys leave at most `limit`, each sum made anew in float64."""
    out = []
    for row in c:
        order = np.argsort(-np.abs(row) * np.linalg.norm(values, axis=1), kind="stable")
        whole = row @ values
        for k in range(len(row) + 1):
            left = whole - row[order[:k]] @ values[order[:k]]
            if left @ left <= limit * (whole @ whole):
                break
        out.append(k)
    return out


@pytest.mark.parametrize(("keys", "width"), [(1, 3), (17, 5), (64, 8), (90, 200)])
def test_active_count_against_brute_force(keys, width):
    rng = np.random.default_rng(keys)
    c, values = rng.standard_normal((40, keys)) ** 3, rng.standard_normal((keys, width))
    counts, order = active_count(torch.from_numpy(c), torch.from_numpy(values))
    assert counts[0].tolist() == brute(c, values, 0.1)
    assert counts[1].tolist() == brute(c, values, 0.01)
    assert (counts[0] <= counts[1]).all()
    assert (order.sort(1).values == torch.arange(keys)).all()


def test_active_count_by_hand():
    values = torch.eye(4, dtype=torch.float64)
    values[3] = torch.tensor([0, 0, 0, 10.0])
    c = torch.tensor(
        [
            [3.0, 0, 0, 0],  # one key
            [1, 1, 1, 0],  # a third each: all three for 90% and for 99%
            [-4, 1, 0, 0],  # 16 of 17 are 94%
            [4, 1, 0, 0.5],  # the last value is long: 25 of 42, then 16, then 1
            [0, 0, 0, 0],  # nothing to explain
        ],
        dtype=torch.float64,
    )
    counts, order = active_count(c, values)
    assert counts.tolist() == [[1, 3, 1, 2, 0], [1, 3, 2, 3, 0]]
    assert order[3, :2].tolist() == [3, 0]


def test_unexplained_need_not_fall_steadily():
    values = torch.tensor([[1.0, 0], [0, 1], [0, 1]], dtype=torch.float64)
    # Two large keys that cancel: all three are needed.
    c = torch.tensor([[0.2, 10, -9]], dtype=torch.float64)
    assert active_count(c, values[[1, 0, 0]])[0].tolist() == [[2], [3]]
    # The first key explains the sum (10, 0.1); the second spoils it again, to 24%.
    c = torch.tensor([[10, 5, -4.9]], dtype=torch.float64)
    assert active_count(c, values)[0].tolist() == [[1], [1]]


def plain_layer(plain, ids, layer, place, tops, size):
    """(k90, agrees, moved, same) at one position, by plain transformers."""
    c, y, post, _ = ffn_plain.run(plain, ids)
    c, y, post = c[layer][place], y[layer][place], post[layer][place]
    values = ffn_plain.values(plain, layer)
    row = c.double().numpy()
    k = brute(row[None], values, 0.1)[0]
    order = np.argsort(-np.abs(row) * np.linalg.norm(values, axis=1), kind="stable")[:k]
    own = ffn_plain.top_token(y.double().numpy(), plain, size)
    said = {int(tops[1][i] if row[i] < 0 else tops[0][i]) for i in order}
    before, after = (int(ffn_plain.say(plain, x)[:size].argmax()) for x in (post - y, post))
    moved = UNCHANGED if after == before else OVERRIDDEN if after == own else REFINED
    return k, own in said, moved, before == own


@pytest.fixture(scope="module")
def case(load):
    made = {}

    def get(family):
        if family not in made:
            model, plain = load(family)
            text = load_text(tiny.corpus(8), model, documents=8, context=40)
            at = Positions.of(text)
            places = mixture.sample(at, np.arange(8), 30, seed=0)
            lens, tops = Lens(model), {}
            for layer in (0, 2):
                logits = lens.own(coefficients.memory(model, layer).values)
                tops[layer] = logits.argmax(1).numpy(), logits.argmin(1).numpy()
            with model.measuring():
                found = mixture.measure(model, at, places, tops, lens)
            made[family] = model, plain, at, places, tops, lens, found
        return made[family]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_what_plain_transformers_say(case, family):
    model, plain, at, places, tops, _, found = case(family)
    for layer, one in found.items():
        assert one.n_keys == model.cfg.d_mlp
        for i, place in enumerate(places):
            start = at.start[place]
            ids = at.ids[start : place + 1].tolist()
            k, agrees, moved, same = plain_layer(
                plain, ids, layer, place - start, tops[layer], model.cfg.vocab_size
            )
            assert abs(one.active90[i] - k) <= 1  # rounding at the limit
            assert (one.agrees[i], one.moved[i], one.same[i]) == (agrees, moved, same)
    every = np.concatenate([one.moved for one in found.values()])
    assert len(set(every)) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_tops_are_those_of_the_norm_folded_unembedding(case, family):
    model, plain, _, _, tops, _, _ = case(family)
    values = ffn_plain.values(plain, 2)
    for key in range(0, len(values), 9):
        for sign, found in zip((1, -1), tops[2], strict=True):
            assert found[key] == ffn_plain.top_token(
                sign * values[key], plain, model.cfg.vocab_size
            )


def test_batches_change_nothing(case):
    model, _, at, places, tops, lens, found = case("llama")
    with model.measuring():
        alone = mixture.measure(model, at, places, tops, lens, batch_tokens=1)
    for layer, one in alone.items():
        for name in ("agrees", "agrees_null", "moved", "same", "document"):
            assert (getattr(one, name) == getattr(found[layer], name)).all()
        assert np.abs(one.active99 - found[layer].active99).max() <= 1


def test_sampled_positions_are_spread_over_the_documents():
    ids = np.zeros(100, int)
    document = np.repeat(np.arange(5), [40, 20, 20, 2, 18])
    start = np.repeat([0, 40, 60, 80, 82], [40, 20, 20, 2, 18])
    at = Positions(ids, document, start, start != np.arange(100), False)
    places = mixture.sample(at, np.array([0, 1, 3, 4]), 14, seed=0)
    counts = np.bincount(document[places], minlength=5)
    assert counts[2] == 0  # not among the documents asked for
    assert counts[3] == 1  # it has no more
    assert set(counts[[0, 1, 4]]) <= {3, 4}
    assert at.included[places].all() and len(set(places)) == len(places)
    assert (np.diff(places) > 0).all()
    assert len(mixture.sample(at, np.arange(5), 3, seed=0)) == 3


def finish(own, before, after, members, negative, up, down):
    n = len(members)
    one = mixture._Layer(
        np.zeros((2, n), int),
        np.array([before, after, own]),
        np.packbits(members, axis=1),
        np.packbits(negative, axis=1),
    )
    return mixture._finish(one, np.arange(n), np.array(up), np.array(down))


def test_agreement_and_moves_by_hand():
    members = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 0, 0]], bool)
    negative = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]], bool)
    found = finish(
        own=[5, 9, 5, 5],
        before=[1, 9, 3, 5],
        after=[5, 9, 4, 5],
        members=members,
        negative=negative,
        up=[5, 6, 7],
        down=[8, 9, 5],
    )
    assert found.agrees.tolist() == [True, True, True, False]  # 5 up, 9 down, 5 down, no key
    # Against the output of the position two further on: 5, 5, 5, 9.
    assert found.agrees_null.tolist() == [True, True, True, False]
    assert found.moved.tolist() == [OVERRIDDEN, UNCHANGED, REFINED, UNCHANGED]
    assert found.same.tolist() == [False, True, False, True]

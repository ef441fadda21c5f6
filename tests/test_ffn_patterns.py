"""What triggers have in common: hand-counted shares, calibrated nulls, sklearn as the oracle."""

from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer

from interp.analyzers.ffn_keys import earlier, patterns
from interp.analyzers.ffn_keys.earlier import EarlierText
from interp.analyzers.ffn_keys.patterns import Positions, Surfaces, modal_share, word_shape
from interp.analyzers.ffn_keys.triggers import TopDocuments
from interp.text import load_text


def positions(documents, included=None, bos=False):
    """Positions of documents of ids; all but the first of each included."""
    ids = np.concatenate([np.array(d) for d in documents])
    document = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    starts = np.concatenate([[0], np.cumsum([len(d) for d in documents])[:-1]])
    start = np.repeat(starts, [len(d) for d in documents])
    if included is None:
        included = start != np.arange(len(ids))
    return Positions(ids, document, start, included, bos)


def names_of(at):
    return {int(i): f" w{i}" for i in np.unique(at.ids)}


@pytest.mark.parametrize(
    ("token", "shape"),
    [
        (" Paris", "_Xx"),
        ("ing", "x"),
        ("USA", "X"),
        (" 1998", "_d"),
        ("iPhone4", "xXxd"),
        (",", ","),
        ("...", "."),
        ("\n\n", "n"),
        ("  ", "_ "),
        ("中文", "c"),
        ("\ufffd", "?"),
        ("", ""),
    ],
)
def test_word_shape(token, shape):
    assert word_shape(token) == shape


def test_modal_share_by_hand():
    label = np.array([7, 7, 7, 3, 3, 9])
    places = np.array(
        [[0, 1, 2, 3], [0, 3, 4, 5], [5, -1, -1, -1], [3, 4, -1, -1], [-1, -1, -1, -1]]
    )
    share = modal_share(label, places)
    assert share[:2] == pytest.approx([3 / 4, 2 / 4])
    assert share[3] == 1.0
    assert np.isnan(share[2]) and np.isnan(share[4])  # one place agrees with itself


def test_modal_share_against_counting():
    rng = np.random.default_rng(0)
    label, places = rng.integers(0, 9, 500), rng.integers(0, 500, (200, 11))
    counted = [Counter(label[row].tolist()).most_common(1)[0][1] / 11 for row in places]
    assert modal_share(label, places) == pytest.approx(counted)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("windows", [False, True])
def test_positions_are_those_of_the_batches(load, corpus, family, windows):
    model, _ = load(family)
    text = load_text(corpus, model, documents=8, context=16, windows=windows)
    at = Positions.of(text)
    ids, included, document = [], [], []
    for batch in text.batches(3):
        ids += batch.tokens[batch.mask].tolist()
        included += batch.included[batch.mask].tolist()
        document += batch.rows[:, None].expand_as(batch.mask)[batch.mask].tolist()
    assert at.ids.tolist() == ids
    assert at.included.tolist() == included
    assert at.document.tolist() == document
    assert at.bos == (family == "llama")
    assert len(at.windows) == sum(len(d.windows) for d in text.documents)


def test_triggers_become_places(load, corpus):
    """A trigger's place carries the token that stands at that position of that document."""
    model, _ = load("llama")
    text = load_text(corpus, model, documents=6, context=16, windows=True)
    at, top = Positions.of(text), TopDocuments(3, 2)
    chosen = [(5, len(text.documents[5].windows) - 1, 1), (2, 0, 3)]
    for row, window, position in chosen:
        place = torch.full((1, 2), window * text.context + position)
        values = torch.tensor([[1.0 + row, 0.0]])
        top.add(values, torch.tensor([text.documents[row].index]), place)
    places = at.triggers(text, top.compute())
    tokens = [text.documents[r].windows[w][p] for r, w, p in chosen]
    assert at.ids[places[0, :2]].tolist() == tokens
    assert at.document[places[0, :2]].tolist() == [5, 2]
    assert places[0, 2] == -1
    assert (places[1] == -1).all()  # a coefficient of 0 triggers nothing


def test_bigrams_are_ordered_pairs():
    at = positions([[1, 2, 3], [2, 1, 3], [9, 2, 3]])
    label = patterns.labels(at, names_of(at))["bigram"]
    assert label[1] != label[4]  # (1, 2) and (2, 1)
    assert label[2] == label[8] != label[5]  # (2, 3) twice, and (1, 3)


def random_text(seed, documents=120, length=30, vocabulary=40):
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, vocabulary + 1)
    return [
        rng.choice(np.arange(1, vocabulary + 1), length, p=p / p.sum()) for _ in range(documents)
    ]


def test_random_sets_take_one_included_position_per_document():
    documents = random_text(0, documents=9)
    at = positions(documents)
    at.included[:60] = False  # the first two documents have none
    sets = patterns.random_sets(at, 25, 50, np.random.default_rng(0))
    assert sets.shape == (50, 7)
    assert at.included[sets].all()
    assert all(len(set(at.document[row])) == 7 for row in sets)


def test_null_of_random_triggers_is_calibrated():
    """Keys whose triggers are random are beyond as often as is said, and never more than 5%, 1%."""
    at = positions(random_text(1))
    sets = patterns.random_sets(at, 20, 4000, np.random.default_rng(9))
    found = Surfaces(at, names_of(at), seed=0).measure(sets)
    for kind in ("token", "bigram"):
        one = found[kind]
        for beyond, expected, most in zip(
            (one.beyond95, one.beyond99), one.by_chance, (0.05, 0.01), strict=True
        ):
            assert expected <= most
            assert beyond.mean() == pytest.approx(expected, abs=4 * (most / 4000) ** 0.5)
        assert one.share.mean() == pytest.approx(one.null[0], abs=0.01)
        assert 0 < one.null[0] < 1


def test_null_has_the_number_of_triggers_of_its_key():
    at = positions(random_text(2))
    places = patterns.random_sets(at, 20, 2, np.random.default_rng(0))
    places[1, 3:] = -1
    null = Surfaces(at, names_of(at), seed=0).measure(places)["token"].null
    assert null[1] > null[0] + 0.1  # three random positions agree more easily than twenty


def test_planted_patterns_are_beyond_their_null():
    documents = [d.copy() for d in random_text(3)]
    for d in documents:
        d[5:7] = [50, 51]  # a rare pair, at the same position of every document
    at = positions(documents)
    every = np.arange(0, 25)[None] * 30
    places = np.concatenate([every + 6, every + 17, np.full((1, 25), -1)])
    found = Surfaces(at, names_of(at), seed=0).measure(places)
    for kind in ("token", "bigram"):
        assert found[kind].share[0] == 1
        assert found[kind].beyond99.tolist() == [True, False, False]
    assert np.isnan(found["token"].share[2])


# Earlier text


def topics(n=60, length=40, seed=0):
    """Even documents speak of words 100 to 129, odd ones of 200 to 229; 1 to 9 are everywhere."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        base = 100 if i % 2 == 0 else 200
        words = rng.integers(base, base + 30, length)
        words[rng.random(length) < 0.4] = rng.integers(1, 10)
        out.append(np.where(rng.random(length) < 0.3, rng.integers(1, 10, length), words))
    return out


def test_vectors_are_sklearns():
    """The vectors are those of TfidfVectorizer on the text up to 4 tokens before the end."""
    documents = topics(12)
    at = positions(documents)
    mine = EarlierText(at, names_of(at), seed=0)
    whole = [" ".join(f"w{i}" for i in d) for d in documents]
    oracle = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\S+").fit(whole)
    places = np.array([39, 40 + 12, 3 * 40 + 20])
    texts = []
    for place in places:
        d, p = divmod(place, 40)
        before = documents[d][: p + 1 - earlier.LOCAL]
        texts.append(" ".join(f"w{i}" for i in before if i != documents[d][p]))
    order = [oracle.vocabulary_[w] for w in sorted(oracle.vocabulary_)]
    assert mine.vectors(places).toarray() == pytest.approx(
        oracle.transform(texts).toarray()[:, order]
    )


def test_vectors_leave_bos_punctuation_and_the_own_term_out():
    at = positions([[0, 5, 6, 7, 8, 5, 5, 5, 5], [0, 6, 6, 6, 6, 6, 6, 6]], bos=True)
    names = {0: "<s>", 5: " cat", 6: " ...", 7: "Cat", 8: "dog"}
    mine = EarlierText(at, names, 0)
    # " cat" is the trigger's own term, whatever its case and space: only "dog" is left.
    assert mine.vectors(np.array([8])).tocoo().data.tolist() == [1.0]
    assert mine.vectors(np.array([7])).nnz == 0  # "dog" is too near
    assert mine.vectors(np.array([16])).nnz == 0


def test_similarity_by_hand():
    rows = np.array([0, 1, 2, 3, 4])
    from scipy import sparse

    half = np.sqrt(0.5)
    vectors = sparse.csr_matrix(np.array([[1.0, 0], [0, 1], [half, half], [0, 0], [1, 0]]))
    places = np.array([[0, 1, -1], [0, 1, 2], [0, 4, 3], [3, 0, -1]])
    found = earlier._similarity(places, rows, vectors)
    assert found[0] == pytest.approx(0)
    assert found[1] == pytest.approx((0 + half + half) / 3)
    assert found[2] == pytest.approx(1)  # a place with no text before it is no pair
    assert np.isnan(found[3])


def test_matched_positions_share_token_and_length_and_lie_apart():
    at = positions(topics(80))
    mine = EarlierText(at, names_of(at), seed=0)
    rng = np.random.default_rng(1)
    places = patterns.random_sets(at, 15, 30, rng)
    match = mine.matched(places, rng)
    assert (match >= 0).mean() > 0.95
    for own, other in zip(places, match, strict=True):
        real = other >= 0
        assert not set(own) & set(other[real])
        assert len(set(at.document[other[real]])) == real.sum()
        assert at.included[other[real]].all()
        length = [np.floor(np.log2(x - at.start[x] + 1)) for x in (own[real], other[real])]
        assert (length[0] == length[1]).all()
    same = at.ids[match] == at.ids[places]
    assert same[match >= 0].mean() > 0.8


def test_random_triggers_are_no_more_alike_than_their_matches():
    at = positions(topics(80))
    places = patterns.random_sets(at, 15, 400, np.random.default_rng(2))
    found = EarlierText(at, names_of(at), seed=0).measure(places)
    gap = found.similarity - found.null
    assert abs(gap.mean()) < 4 * gap.std() / 20
    assert found.beyond.mean() < 0.1  # 1 in 20 by chance


def test_triggers_of_one_topic_are_more_alike_than_their_matches():
    at = positions(topics(80))
    rng = np.random.default_rng(3)
    everywhere = np.flatnonzero(at.included & (at.ids < 10) & (np.arange(len(at.ids)) % 40 > 20))
    one = everywhere[at.document[everywhere] % 2 == 0]
    documents = np.unique(at.document[one])[:20]
    places = np.array([[rng.choice(one[at.document[one] == d]) for d in documents]])
    found = EarlierText(at, names_of(at), seed=0).measure(places)
    assert found.beyond[0]
    assert found.similarity[0] > found.null[0] + 0.05


def test_a_fixed_phrase_is_no_topic():
    """Three words right before the trigger: the same for all, or others in every document."""
    similarity = []
    for phrase in ([301, 302, 303], None):
        documents = [d.copy() for d in random_text(4, vocabulary=200)]
        for i, d in enumerate(documents[:25]):
            d[17:21] = [*(phrase or range(310 + 3 * i, 313 + 3 * i)), 304]
        at = positions(documents)
        mine = EarlierText(at, {i: f" w{i}" for i in range(1, 400)}, 0)
        similarity.append(mine.measure(np.arange(25)[None] * 30 + 20).similarity[0])
    assert similarity[0] == pytest.approx(similarity[1])


def test_the_same_seed_gives_the_same_numbers():
    at = positions(topics(40))
    places = patterns.random_sets(at, 10, 5, np.random.default_rng(0))
    first, again, other = (EarlierText(at, names_of(at), s).measure(places) for s in (0, 0, 1))
    assert (first.null == again.null).all()
    assert (first.null != other.null).any()

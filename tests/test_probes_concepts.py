"""Concept scores: sklearn as the oracle, noise at 0.5, planted concepts found, honest intervals."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse
from sklearn.metrics import roc_auc_score

from interp.analyzers.ffn_keys.patterns import Positions
from interp.errors import InterpError
from interp.results import described
from probes import concept_scores
from probes.auroc import auroc, influence
from probes.concept_scores import score
from probes.concepts import Concepts, bank, every_label, halves

# AUROC --------------------------------------------------------------------------------------------


@given(
    hnp.arrays(
        np.float64, (23, 4), elements=st.sampled_from([0.0, 0.0, -1.5, -0.5, 0.25, 1.0, 2.0])
    ),
    hnp.arrays(np.bool_, (23, 3)),
)
def test_areas_are_sklearns(x, labels):
    """With many ties, at zero and elsewhere, values on both sides of zero; sparse and dense."""
    expected = np.full((4, 3), np.nan)
    for i in range(4):
        for j in range(3):
            if 0 < labels[:, j].sum() < 23:
                expected[i, j] = roc_auc_score(labels[:, j], x[:, i])
    np.testing.assert_allclose(auroc(x, labels), expected, atol=1e-12)
    stored = sparse.csr_array(x)
    stored.data[:1] = 0.0  # an explicit zero is a zero
    dense = stored.toarray()
    np.testing.assert_array_equal(auroc(stored, labels), auroc(dense, labels))


def test_influence_by_hand():
    """Exceeded shares of positives 1/2 and 1, of negatives 1 and 1/2, around an area of 3/4."""
    found = influence(np.array([1.0, 2.0, 0.0, 1.5]), np.array([True, True, False, False]))
    np.testing.assert_allclose(found, [-0.125, 0.125, 0.125, -0.125])


def test_influence_is_the_derivative_of_the_area():
    """A token counted 1.001 times moves the area by 0.001 of its influence."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, 50).astype(float), rng.random(50) < 0.3
    found = influence(x, y)
    base = roc_auc_score(y, x)
    for i in (0, 7, 31, int(np.flatnonzero(y)[0])):
        weight = np.ones(50)
        weight[i] += 1e-4
        moved = (roc_auc_score(y, x, sample_weight=weight) - base) / 1e-4
        assert moved == pytest.approx(found[i], abs=1e-4)
    assert found.sum() == pytest.approx(0, abs=1e-12)


# The bank -----------------------------------------------------------------------------------------

VOCABULARY = ["<s>", " the", " cat", " Dog", ".", ",", " 42", "ing", " run", "The", " (", ")", '"']
NAMES = dict(enumerate(VOCABULARY))


def positions(windows, bos=True):
    """Windows of ids, one a document."""
    lengths = [len(w) for w in windows]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    ids = np.concatenate([np.array(w) for w in windows])
    included = ids != 0
    included[starts] = False
    document = np.repeat(np.arange(len(windows)), lengths)
    return Positions(ids, document, np.repeat(starts, lengths), included, bos)


def random_text(documents=40, length=60, seed=0):
    rng = np.random.default_rng(seed)
    return positions([[0, *rng.integers(1, len(VOCABULARY), length)] for _ in range(documents)])


def by_name(window, bos=True):
    """name -> labels of a document's included positions, among those of nine others."""
    at = positions([window] + [[0, 5, 2, 2, 5, 3]] * 9, bos)
    here = at.candidates[at.document[at.candidates] == 0]
    return {n: x[here].astype(int).tolist() for _, n, x in every_label(at, NAMES, 0)}


def label(found, name):
    return found.labels[:, found.names.index(name)].astype(int).tolist()


def test_labels_by_hand():
    #        <s> The cat  run ing  .  the Dog  (  42  )  "  the "  cat
    window = [0, 9, 2, 8, 7, 4, 1, 3, 10, 6, 11, 12, 1, 12, 2]
    got = by_name(window)
    assert got['word "the"'] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0]
    assert got['word before "the"'] == [0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0]
    assert got["capitalised"] == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert got["continues a word"] == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert got["punctuation"] == [0, 0, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0]
    assert got["after punctuation"] == [0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 1]
    assert got["token of the sentence: 0"] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert got["token of the sentence: 3-5"] == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert got["in brackets"] == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert got["in straight quotation marks"] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0]
    assert got["word seen before in the window"] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert got["position in the window: 4-7"] == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert got['shape "_d"'] == [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert got["digits only"] == got['shape "_d"']


def test_without_bos_the_first_word_begins_the_sentence():
    got = by_name([1, 2, 8, 4, 1, 2], bos=False)
    assert got["token of the sentence: 1"] == [1, 0, 0, 0, 1]
    assert got["token of the sentence: 0"] == [0, 0, 0, 1, 0]


def test_only_common_labels_are_kept():
    found = bank(random_text(), NAMES, least=30)
    for half in (found.first_half, ~found.first_half):
        positives = found.labels[half].sum(0)
        assert (positives >= 30).all() and (half.sum() - positives >= 30).all()
        for i in range(len(found.names)):
            assert len(np.unique(found.document[half & found.labels[:, i]])) >= 5
    columns = {c.tobytes() for c in found.labels.T}  # as "digits only", the shape "_d" again
    assert len(columns) == len(found.names)
    assert len(set(found.names)) == len(found.names) == len(found.kinds)


def test_topics_are_clusters_of_documents():
    """Two vocabularies in turn: with enough documents their topics part them."""
    rng = np.random.default_rng(0)
    sets = [[1, 2, 3], [7, 8, 1]]
    windows = [[0, *rng.choice(sets[i % 2], 20)] for i in range(30)]
    found = bank(positions(windows), NAMES)
    topics = [i for i, kind in enumerate(found.kinds) if kind == "topic"]
    assert topics
    for i in topics:
        of = found.document[found.labels[:, i]]
        assert len(set(of % 2)) == 1  # never both vocabularies
        assert (found.labels[np.isin(found.document, of), i]).all()  # whole documents


def test_halves_are_of_documents():
    document = np.repeat(np.arange(7), 3)
    first = halves(document, 0)
    assert all(len(set(first[document == d])) == 1 for d in range(7))
    assert len(set(document[first])) == 3
    assert any((halves(document, seed) != first).any() for seed in range(1, 4))
    with pytest.raises(InterpError, match="at least 4"):
        halves(np.array([0, 1, 2]), 0)
    with pytest.raises(InterpError, match="more documents"):
        bank(positions([[0, 1, 2, 3]] * 6), NAMES)


# Scores -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def concepts():
    return bank(random_text(), NAMES)


def noise(n, width, seed=0):
    return np.random.default_rng(seed).normal(size=(n, width)) + 7


def test_noise_scores_one_half_held_out(concepts):
    """Chosen, noise looks like something; held out it is 0.5 within its error."""
    n = len(concepts.document)
    x = noise(n, 400)
    quiet = sparse.csr_array(np.where(np.random.default_rng(1).random((n, 400)) < 0.03, x, 0))
    table = score({"dense": x, "sparse": quiet}, concepts).dictionaries
    for _, row in table.iterrows():
        assert row["auroc_chosen"] > (0.56 if row["dictionary"] == "dense" else 0.52)
        assert row["auroc_low"] < 0.5 < row["auroc_high"]
        assert row["concept_auroc_low"] < 0.5 < row["concept_auroc_high"]
        assert row["concept_auroc_all"] == pytest.approx(row["concept_auroc"])
        assert row["auroc_high"] - row["auroc_low"] < 0.02
        assert row["auroc"] == pytest.approx(0.5, abs=0.01)
        assert row["monosemantic"] == 0 and row["multi_concept_share"] == 0


def test_planted_concepts_are_found(concepts):
    names = ['word "cat"', "punctuation", 'word before "the"']
    planted = np.stack([label(concepts, name) for name in names], axis=1).astype(float)
    x = noise(len(planted), 6, 2)
    x[:, [1, 3, 4]] += 8 * planted * np.array([1, -1, 1])
    found = score({"planted": x, "noise": noise(len(planted), 6, 3)}, concepts)
    table = found.directions[found.directions["dictionary"] == "planted"].set_index("direction")
    assert table.loc[[1, 3, 4], "concept"].tolist() == names
    assert table.loc[[1, 3, 4], "sign"].tolist() == [1, -1, 1]
    assert (table.loc[[1, 3, 4], "auroc"] > 0.99).all()
    assert (table.loc[[0, 2, 5], "auroc"] < 0.6).all()
    by_concept = found.concepts[found.concepts["dictionary"] == "planted"].set_index("concept")
    assert by_concept.loc[names, "direction"].tolist() == [1, 3, 4]
    first, second = (found.dictionaries.iloc[i] for i in range(2))
    assert first["monosemantic"] == 3 and first["monosemantic_share"] == 0.5
    assert first["concepts_told"] >= 3 and second["concepts_told"] == 0
    margin = found.margins("planted").iloc[0]
    assert margin["against"] == "noise"
    assert margin["auroc"] == pytest.approx(first["auroc"] - second["auroc"])
    assert margin["auroc_low"] > 0 and margin["concept_auroc_low"] > 0
    for made, columns in (
        (found.dictionaries, concept_scores.DICTIONARIES),
        (found.directions, concept_scores.DIRECTIONS),
        (found.concepts, concept_scores.CONCEPTS),
        (found.margins("noise"), concept_scores.MARGINS),
    ):
        assert list(described(made, columns)) == list(columns)


def test_planted_features_beat_what_they_are_mixed_in(concepts):
    """22 concepts as directions in 6 dimensions: features tell them, dimensions do not.

    The margins asked for: 0.05 per direction, and per concept with all directions.
    """
    rng = np.random.default_rng(10)
    names = [i for i, kind in enumerate(concepts.kinds) if kind in ("word", "word before")]
    planted = concepts.labels[:, names] * rng.uniform(1, 2, (len(concepts.document), len(names)))
    directions = rng.normal(size=(len(names), 6))
    x = planted @ (directions / np.linalg.norm(directions, axis=1, keepdims=True))
    x += 0.05 * rng.normal(size=x.shape)
    _, _, components = np.linalg.svd(x - x.mean(0), full_matrices=False)
    made = {
        "features": sparse.csr_array(planted),
        "neurons": x,
        "pca": x @ components.T,
        "random": x @ rng.normal(size=(6, len(names))),
    }
    of_these = dataclasses.replace(
        concepts,
        names=[concepts.names[i] for i in names],
        kinds=[concepts.kinds[i] for i in names],
        labels=concepts.labels[:, names],
    )
    found = score(made, of_these)
    table = found.dictionaries.set_index("dictionary")
    assert len(names) >= 20 and (table["candidates"] == 6).all()
    assert table["available"].tolist() == [len(names), 6, 6, len(names)]
    assert table.loc["features", "monosemantic_share"] == 1
    assert table.loc["features", "concepts_told_all"] == len(names)
    assert table.loc["features", "concept_auroc_all"] == pytest.approx(1)
    # Six features tell six concepts, and little of the others: what equal numbers cost them.
    assert table.loc["features", "concepts_told"] == 6
    margins = found.margins("features")
    assert (margins["auroc_low"] > 0.05).all()
    assert (margins["concept_auroc_all_low"] > 0.05).all()
    small = found.concepts[found.concepts["dictionary"] == "neurons"]
    assert (small["auroc"] == small["auroc_equal"]).all()  # all six are candidates


def test_areas_are_those_of_the_halves(concepts):
    """Every number of a direction, by sklearn on its half."""
    x = noise(len(concepts.document), 5, 4)
    x[:, 2] += 2 * concepts.labels[:, 3]
    found = score({"x": x}, concepts)
    for row in found.directions.itertuples():
        y = concepts.labels[:, concepts.names.index(row.concept)]
        for half, value in (
            (concepts.first_half, row.auroc_chosen),
            (~concepts.first_half, row.auroc),
        ):
            assert roc_auc_score(y[half], row.sign * x[half, row.direction]) == pytest.approx(value)
    first = concepts.first_half
    best = max(
        max(a, 1 - a) for y in concepts.labels.T for a in [roc_auc_score(y[first], x[first, 0])]
    )
    assert found.directions["auroc_chosen"][0] == pytest.approx(best)


def test_two_concepts_without_a_common_token(concepts):
    cat, the = (np.array(label(concepts, f'word "{w}"')) for w in ("cat", "the"))
    tokens = len(cat)
    one, both = 8.0 * cat, 8.0 * (cat | the)
    x = noise(tokens, 2, 5) + np.stack([one, both], axis=1)
    found = score({"x": x}, concepts).directions
    assert found["multi_concept"].tolist() == [False, True]


def test_equally_many_candidates_and_constant_columns_left_out(concepts):
    n = len(concepts.document)
    wide, narrow = noise(n, 30, 6), noise(n, 4, 7)
    wide[:, ::2] = 3.0
    wide[~concepts.first_half, 0] = 9.0  # constant where concepts are chosen
    found = score({"wide": wide, "narrow": narrow, "zero": sparse.csr_array(wide - 3)}, concepts)
    assert found.dictionaries["available"].tolist() == [15, 4, 15]
    assert (found.dictionaries["candidates"] == 4).all()
    drawn = found.directions.groupby("dictionary")["direction"].apply(list)
    assert all(i % 2 for i in drawn["wide"]) and drawn["narrow"] == [0, 1, 2, 3]


def test_sparse_and_dense_are_the_same(concepts):
    x = np.maximum(noise(len(concepts.document), 8, 8) - 8.5, 0)
    x[:, 1] += concepts.labels[:, 0]
    one, same = score({"x": x}, concepts), score({"x": sparse.coo_array(x)}, concepts)
    assert one.directions.equals(same.directions) and one.concepts.equals(same.concepts)
    np.testing.assert_allclose(one.influences["x"], same.influences["x"], atol=1e-15)


def test_intervals_cover_with_documents_that_differ():
    """A direction that works better in some documents: 95% intervals, of documents as clusters."""
    rng = np.random.default_rng(9)
    documents, length = 30, 20
    document = np.repeat(np.arange(2 * documents), length)
    first = document < documents
    big, y_big, hits = [], [], 0

    def sample(count):
        strength = rng.normal(1, 1.5, (count, 1, 1))
        y = rng.random((count, length)) < 0.3
        x = rng.normal(size=(count, length)) + (strength[:, :, 0] * y)
        return x.ravel(), y.ravel()

    big, y_big = sample(20_000)
    truth = roc_auc_score(y_big, big)
    runs = 200
    for _ in range(runs):
        x, y = sample(2 * documents)
        one = Concepts(["y"], ["word"], y[:, None], document, first)
        row = score({"x": x[:, None]}, one).dictionaries.iloc[0]
        hits += row["auroc_low"] <= truth <= row["auroc_high"]
    assert 0.9 <= hits / runs <= 0.985


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({}, "no dictionary"),
        ({"x": np.zeros((3, 2))}, "same tokens"),
        ({"x": None}, "varies"),
        ({"x": np.nan}, "not finite"),
    ],
)
def test_what_cannot_be_scored_is_refused(concepts, made, said):
    n = len(concepts.document)
    if "x" in made and not isinstance(made["x"], np.ndarray):
        made = {"x": np.full((n, 2), 1.0 if made["x"] is None else made["x"])}
    with pytest.raises(InterpError, match=said):
        score(made, concepts)
    with pytest.raises(InterpError, match="no dictionary 'y'"):
        score({"x": noise(n, 2)}, concepts).margins("y")

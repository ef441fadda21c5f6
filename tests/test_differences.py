"""What is said of a run to take up that is another one: words a person can act on."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interp.differences import differences

SHA = {letter: letter * 64 for letter in "abcdef"}
WAS = {
    "analyzer": "heads",
    "options": {"seed": 0, "exact": False, "layer": [3, 6], "heads": None, "step": 0.1},
    "model": {"name": "m", "source": "/models/m", "n_layers": 12, "weights": SHA["a"]},
    "data": {
        "source": "news",
        "documents": 4,
        "tokens": 80,
        "seed": 0,
        "sha256": SHA["a"],
        "token_ids": SHA["a"],
        "source_sha256": SHA["a"],
        "tokenizer_sha256": SHA["a"],
        "special_ids": [0, 1],
        "next": 4,
    },
    "versions": {"torch": "2.12.0", "sae_lens": None, "platform": "Linux-6.1"},
}


def changed(**parts):
    return {
        part: WAS[part] | parts[part]
        if isinstance(WAS[part], dict) and part in parts
        else parts.get(part, WAS[part])
        for part in WAS
    }


def test_nothing_differs():
    assert differences(WAS, changed()) == []
    assert differences({"data": None}, {}) == []


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"analyzer": "qkv"}, ["command was heads and is qkv"]),
        ({"options": {"seed": 3}}, ["--seed was 0 and is 3"]),
        ({"options": {"exact": True}}, ["--exact was off and is on"]),
        ({"options": {"layer": []}}, ["--layer was 3, 6 and is none"]),
        ({"options": {"heads": "3.1"}}, ["--heads was none and is 3.1"]),
        # What the other documents bring with them is not told beside them.
        (
            {"data": {"documents": 3, "tokens": 60, "sha256": SHA["b"], "next": 3}},
            ["number of documents was 4 and is 3"],
        ),
        (
            {"data": {"source": "b.txt", "source_sha256": SHA["b"]}},
            ["--data was news and is b.txt"],
        ),
        (
            {"data": {"sha256": SHA["b"], "token_ids": SHA["b"], "source_sha256": SHA["c"]}},
            ["other text"],
        ),
        (
            {"data": {"source_sha256": SHA["b"], "next": 5}},
            ["other documents in the data beside those of the sample"],
        ),
        ({"data": {"next": 5}}, ["other documents to draw further ones from"]),
        ({"data": {"tokenizer_sha256": SHA["b"], "token_ids": SHA["b"]}}, ["another tokenizer"]),
        ({"data": {"special_ids": [0]}}, ["other special tokens"]),
        (
            {"model": {"weights": SHA["b"]}},
            ["other weights, another configuration of the model, or other hooks on it"],
        ),
        ({"model": {"name": "n", "weights": SHA["b"]}}, ["model was m and is n"]),
        ({"model": {"n_layers": 6}}, ["model n layers was 12 and is 6"]),
        ({"versions": {"torch": "2.13.0"}}, ["another version of torch (2.12.0 was, 2.13.0 is)"]),
        (
            {"versions": {"sae_lens": "6.1", "platform": "macOS"}},
            [
                "another version of sae_lens (none was, 6.1 is)",
                "another machine or operating system (Linux-6.1 was, macOS is)",
            ],
        ),
        # One seed, of the run and of its text: told once.
        ({"options": {"seed": 1}, "data": {"seed": 1}}, ["--seed was 0 and is 1"]),
        # Too long to read.
        ({"options": {"heads": "3.1," * 40}}, ["another --heads"]),
    ],
)
def test_in_plain_words(now, told):
    assert differences(WAS, changed(**now)) == told


def test_names_of_a_training():
    """Not sorted into parts: as `probes.checkpoints` has them."""
    before = {"k": 4, "weights": SHA["a"], "text": SHA["a"], "version of torch": "2.12"}
    now = {"k": 5, "weights": SHA["b"], "text": SHA["b"], "version of torch": "2.13"}
    assert differences(before, now) == [
        "k was 4 and is 5",
        "other weights, another configuration of the model, or other hooks on it",
        "other text",
        "version of torch was 2.12 and is 2.13",
    ]


VALUES = st.sampled_from([None, True, 0, 1, "x", SHA["a"], SHA["b"], [1, 2], []])
NAMES = st.sampled_from(["seed", "documents", "weights", "sha256", "name", "torch", "other"])
WHOLE = st.dictionaries(
    st.sampled_from([*WAS, "k"]), VALUES | st.dictionaries(NAMES, VALUES, max_size=4), max_size=4
)


@given(before=WHOLE, now=WHOLE)
def test_no_difference_goes_untold_and_no_digest_is_shown(before, now):
    def flat(value, name=""):
        if not isinstance(value, dict):
            return {name: value} if value is not None else {}
        return {k: v for key, part in value.items() for k, v in flat(part, f"{name}.{key}").items()}

    told = differences(before, now)
    assert bool(told) == (flat(before) != flat(now))
    assert not re.search("[0-9a-f]{32}", " ".join(told))

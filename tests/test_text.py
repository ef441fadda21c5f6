"""Documents, sample, tokens and masks: everything a number stands on before the model runs."""

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import datasets
import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from interp import assets, hub
from interp.errors import InterpError
from interp.sources import _listed, read_source
from interp.text import Text, TokenBatch, load_text

END = "<|endoftext|>"


def byte_model(
    *,
    start: str | None = END,
    end: str | None = END,
    template: str | None = None,
    last: bool = False,
    n_ctx: int = 128,
    vocab_size: int = 300,
    **overrides: Any,
) -> SimpleNamespace:
    """One token per byte, like GPT-2 without merges; specials are ids 0, 1, 2 (or `last`).

    `template` is what plain `tokenizer(text)` does, for instance "<s> $A </s>".
    """
    special = [END, "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet + special if last else special + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    if template:
        ids = [(token, vocab[token]) for token in special if token in template]
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=None, special_tokens=ids
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=start, eos_token=end, unk_token=None
    )
    cfg = SimpleNamespace(vocab_size=vocab_size, n_ctx=n_ctx)
    return SimpleNamespace(tokenizer=tokenizer, cfg=cfg, **overrides)


GPT2 = byte_model()
LAST = byte_model(last=True)  # as in GPT-2 itself, where id 0, the padding, is an ordinary token
LLAMA = byte_model(start="<s>", end="</s>", template="<s> $A")


def decode(model: Any, ids: Sequence[int]) -> str:
    return model.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def draw(source: Any, model: Any = GPT2, **options: Any) -> Text:
    return load_text(source, model, **options)


# ---------------------------------------------------------------- tokens, BOS, special strings


def test_no_bos_by_gpt2s_convention_and_bos_by_llamas():
    assert draw(["abc"]).documents[0].windows == [GPT2.tokenizer("abc").input_ids]
    text = draw(["abc"], LLAMA)
    assert text.documents[0].windows == [LLAMA.tokenizer("abc").input_ids]
    assert text.documents[0].windows[0][0] == text.bos_id == 1 and text.bos


def test_bos_asked_for_or_refused():
    plain = GPT2.tokenizer("abc").input_ids
    assert draw(["abc"], bos=True).documents[0].windows == [[0, *plain]]  # id 0 is a valid BOS
    assert draw(["abc"], bos=True).bos_id == 0
    assert draw(["abc"], LLAMA, bos=True).documents[0].windows == [[1, *plain]]  # never twice
    assert draw(["abc"], LLAMA, bos=False).documents[0].windows == [plain]
    assert draw(["abc"], LLAMA, bos=False).bos_id is None


@pytest.mark.parametrize(
    ("template", "start", "end", "expected"),
    [
        ("$A </s>", "<s>", "</s>", None),  # an EOS that is appended is neither kept nor a BOS
        (f"$A {END}", END, END, None),  # the same, where BOS and EOS are one token
        (f"{END} $A {END}", END, END, 0),
        ("<s> $A </s>", "<s>", "</s>", 1),
        ("<s> $A", None, None, 1),  # what the tokenizer does counts, not what it is called
        ("<s> $A", "</s>", "</s>", 1),
        (None, None, "</s>", None),
    ],
)
def test_bos_follows_the_plain_call(template, start, end, expected):
    model = byte_model(template=template, start=start, end=end)
    text = draw(["hello"], model)
    body = GPT2.tokenizer("hello").input_ids
    assert text.documents[0].windows == [([] if expected is None else [expected]) + body]
    assert text.bos_id == expected


def test_a_models_own_bos_overrides_the_tokenizer():
    model = byte_model(start="<s>", bos_token_id=0, bos_default=True)
    assert draw(["abc"], model).documents[0].windows[0][0] == 0
    assert draw(["abc"], model, bos=False).bos_id is None
    assert 0 in draw(["abc"], model).special_ids
    off = byte_model(start="<s>", template="<s> $A", bos_token_id=None, bos_default=False)
    assert not draw(["abc"], off).bos
    none = byte_model(start="<s>", template="<s> $A", bos_token_id=None, bos_default=None)
    assert draw(["abc"], none).bos_id == 1


def test_bos_with_unknown_words():
    """BOS is found although every probe is unknown, and unknown is the BOS itself."""
    backend = Tokenizer(models.WordLevel({END: 0, "w1": 1}, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"bos_token": END, "unk_token": END, "eos_token": END}
    cfg = SimpleNamespace(vocab_size=2, n_ctx=64)
    plain = SimpleNamespace(
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, **tokens), cfg=cfg
    )
    text = draw(["w1 w1 what"], plain)
    assert text.documents[0].windows == [[1, 1, 0]] and not text.bos
    assert any("1 of 3 tokens" in notice and "unknown" in notice for notice in text.notices)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    added = SimpleNamespace(
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, **tokens), cfg=cfg
    )
    assert draw(["w1 w1"], added).documents[0].windows == [[0, 1, 1]]


def test_a_tokenizer_that_always_adds_bos():
    """Some ignore add_special_tokens=False: still never twice, and --no-bos has none."""

    class Always:
        def __getattr__(self, name: str) -> Any:
            return getattr(GPT2.tokenizer, name)

        def __call__(self, texts: list[str], **options: Any) -> Any:
            rows = GPT2.tokenizer(texts, **options)["input_ids"]
            return {"input_ids": [[0, *row] for row in rows]}

    model = SimpleNamespace(tokenizer=Always(), cfg=GPT2.cfg)
    plain = GPT2.tokenizer("abc").input_ids
    for bos, expected in [(None, [0, *plain]), (True, [0, *plain]), (False, plain)]:
        assert draw(["abc"], model, bos=bos).documents[0].windows == [expected]


def test_no_bos_token_to_add():
    with pytest.raises(InterpError, match="has no BOS token"):
        draw(["abc"], byte_model(start=None), bos=True)  # EOS is not taken for it


def test_several_tokens_before_the_text():
    model = byte_model(template=f"{END} <s> $A")
    with pytest.raises(InterpError, match="2 special tokens"):
        draw(["abc"], model)
    assert draw(["abc"], model, bos=False).documents[0].windows == [GPT2.tokenizer("abc").input_ids]


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("literal", [END, "<s>", "</s>"])
def test_a_literal_special_string_stays_text(model, literal):
    document = f"{literal}before {literal} after{literal}"
    text = draw([document], model, bos=True)
    ids = text.documents[0].windows[0]
    assert not set(ids[1:]) & {0, 1, 2}
    assert decode(model, ids[1:]) == document
    assert set(model.tokenizer(document, add_special_tokens=False).input_ids) & {0, 1, 2}
    assert text.notices == []


def test_the_tokenizer_is_left_as_it_was():
    model = byte_model()
    backend = model.tokenizer.backend_tokenizer
    before = (backend.to_str(), backend.encode_special_tokens)
    draw([f"a{END}b"], model)
    assert (backend.to_str(), backend.encode_special_tokens) == before
    assert backend.encode(f"a{END}b").ids[1] == 0


def test_added_tokens_that_are_not_special_stay_tokens():
    model = byte_model()
    model.tokenizer.add_tokens(["    "])
    assert draw(["a    b"], model).documents[0].windows[0][1] == len(model.tokenizer) - 1


def test_special_ids_hold_flagged_added_tokens_and_bos():
    model = byte_model(start="<s>", end="<s>", bos_token_id=0, bos_default=True)
    model.tokenizer.backend_tokenizer.add_special_tokens(["<img>"])
    ordinary = byte_model(bos_token_id=50, bos_default=True)
    assert 50 in draw(["abc"], ordinary).special_ids
    image = model.tokenizer.convert_tokens_to_ids("<img>")
    assert {0, 1, image} <= draw(["abc"], model).special_ids


@pytest.mark.parametrize(
    "document",
    [
        "family 👨‍👩‍👧‍👦 and flag 🇩🇪 done",
        "שלום עולם مرحبا",
        "zero\u200bwidth\u200djoiner\ufeffmark",
        "e\u0301 is not é",
        "nul\x00 and \x1b[31m escape",
        "tabs\tand\u2028line\u2029separators\x0b\x0c",
        "  leading and trailing  \n",
    ],
)
def test_no_text_is_lost(document, tmp_path):
    assert decode(GPT2, draw([document]).documents[0].windows[0]) == document
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": document}), encoding="utf-8")
    (tmp_path / "raw.jsonl").write_text(
        json.dumps({"text": document}, ensure_ascii=False), encoding="utf-8"
    )
    for name in ("d.jsonl", "raw.jsonl"):
        assert [d.text for d in draw(tmp_path / name).documents] == [document]


def test_ids_outside_the_vocabulary():
    with pytest.raises(InterpError, match=r"token id \d+ is outside .* vocabulary of 50"):
        draw(["hello"], byte_model(vocab_size=50))
    with pytest.raises(InterpError, match="token id 299 is outside"):
        draw(["hello"], byte_model(vocab_size=299, bos_token_id=299), bos=True)


# ---------------------------------------------------------------- context and windows


def test_context_cuts_and_counts_bos_included():
    text = draw(["abcdefgh", "abc", "abcd"], context=4)
    assert [len(d.windows[0]) for d in text.documents] == [4, 3, 4]
    assert text.truncated == 1 and [d.truncated for d in text.documents] == [True, False, False]
    text = draw(["abcdefgh", "abc", "abcd"], context=4, bos=True)
    assert [decode(GPT2, d.windows[0][1:]) for d in text.documents] == ["abc", "abc", "abc"]
    assert text.truncated == 2
    assert text.tokens == 12 and text.predicted_tokens == 9


def test_windows_hold_all_of_a_document():
    (document,) = draw(["abcdefghij"], context=4, windows=True).documents
    assert [decode(GPT2, w) for w in document.windows] == ["abcd", "efgh", "ij"]
    (document,) = draw(["abcdefghij"], context=4, windows=True, bos=True).documents
    assert [w[0] for w in document.windows] == [0, 0, 0, 0]
    assert [decode(GPT2, w[1:]) for w in document.windows] == ["abc", "def", "ghi", "j"]
    assert not document.truncated


def test_a_last_window_of_one_token_is_dropped_and_counted():
    text = draw(["abcdefghi"], context=4, windows=True)
    assert [decode(GPT2, w) for w in text.documents[0].windows] == ["abcd", "efgh"]
    assert text.truncated == 1 and text.tokens == 8


def test_windows_stay_one_document():
    text = draw(["abcdefghij", "xyz"], context=4, windows=True)
    batches = list(text.batches(3))
    assert [batch.rows.tolist() for batch in batches] == [[0, 0, 0], [1]]
    assert len(text) == 2
    for batch in batches:
        assert not batch.included[:, 0].any()  # each window starts anew for the model


def test_arguments_are_checked():
    for options, message in [
        ({"documents": 0}, "documents must be a whole number of at least 1, got 0"),
        ({"context": 1}, "context must be a whole number of at least 2, got 1"),
        ({"context": 129}, "context 129 is longer than the 128 positions of the model"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"min_tokens": 1}, "min_tokens must be a whole number of at least 2"),
    ]:
        with pytest.raises(InterpError, match=message):
            draw(["abc"], **options)
    with pytest.raises(InterpError, match="needs a model that has a tokenizer"):
        draw(["abc"], SimpleNamespace(tokenizer=None))
    for model in (None, "gpt2"):
        with pytest.raises(InterpError, match=r"load_text\(source, load_model\('gpt2'\)\)"):
            load_text(["abc"], model)
    with pytest.raises(InterpError, match="batch_size must be"):
        draw(["abc"]).batches(0)


# ---------------------------------------------------------------- which documents


def test_blank_short_and_repeated_documents_are_counted():
    rows = ["", " \n\t\u00a0", "a", "good one", "good one", "another", "b", "good one "]
    text = draw(rows)
    assert [(d.index, d.text) for d in text.documents] == [
        (3, "good one"),
        (5, "another"),
        (7, "good one "),
    ]
    assert text.skipped == 4 and text.duplicates == 1
    assert any("3 usable documents, of 8 asked for" in notice for notice in text.notices)
    assert len(draw(rows, min_tokens=8)) == 2


def test_fewer_documents_than_asked_for_is_said(tmp_path):
    (tmp_path / "d.txt").write_text("one one\n\ntwo two")
    (notice,) = draw(tmp_path / "d.txt", documents=3).notices
    assert notice.endswith("d.txt: 2 usable documents, of 3 asked for")
    assert draw(tmp_path / "d.txt", documents=2).notices == []
    assert draw(["one one", "two two"]).notices == []  # a list is what it is
    (notice,) = draw(["one one", "two two"], documents=1).notices
    assert notice == "list of 2 documents: a sample of 1; ask for more documents to use them all"


def test_min_tokens_does_not_count_bos():
    assert draw(["a", "bc"], bos=True).documents[0].text == "bc"
    assert draw(["a", "bc"], bos=True).skipped == 1


def test_nothing_usable():
    with pytest.raises(
        InterpError, match=r"no usable document: of 4, 2 are blank, 1 repeat another and 1 have"
    ):
        draw(["", " ", "a", "a"])
    with pytest.raises(InterpError, match="holds no document"):
        draw([])


def test_a_document_of_special_tokens_alone_is_not_usable():
    backend = Tokenizer(models.WordLevel({END: 0, "w1": 1}, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=END)
    model = SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(vocab_size=2, n_ctx=64))
    text = draw(["what is this", "w1 what", "w1 w1"], model)
    assert [d.index for d in text.documents] == [2] and text.skipped == 2


def test_half_a_surrogate_pair_is_repaired(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "bad \\ud83d end"}\n{"text": "good \\ud83d\\ude00"}\n')
    text = draw(path)
    assert [d.text for d in text.documents] == ["bad \ufffd end", "good 😀"]
    assert len(text.sha256) == 64 and any("surrogate" in notice for notice in text.notices)


ROWS = [f"document {i}" if i % 3 else "x" for i in range(60)]  # 40 usable, 20 too short


def indices(text: Text) -> list[int]:
    return [document.index for document in text.documents]


def test_the_sample_is_seeded_and_in_source_order():
    first = draw(ROWS, documents=10, seed=3)
    assert indices(first) == sorted(indices(first)) == indices(draw(ROWS, documents=10, seed=3))
    assert len(set(indices(first))) == 10
    assert indices(first) != indices(draw(ROWS, documents=10, seed=4))
    assert all(first.documents[k].text == ROWS[i] for k, i in enumerate(indices(first)))
    # More documents contain fewer ones: a larger run extends a smaller one.
    assert set(indices(first)) < set(indices(draw(ROWS, documents=20, seed=3)))
    assert indices(draw(ROWS, documents=40)) == [i for i in range(60) if i % 3]
    assert indices(draw(ROWS, documents=999)) == [i for i in range(60) if i % 3]


def test_the_order_of_a_seed_is_pinned():
    """Python promises `Random.random`'s sequence: results of one version are those of the next."""
    rng = random.Random(0)
    keys = [rng.random() for _ in range(6)]
    expected = sorted(sorted(range(6), key=keys.__getitem__)[:3])
    assert expected == [2, 3, 5]
    assert indices(draw([f"d{i}" for i in range(6)], documents=3, seed=0)) == expected


def test_the_sample_is_uniform_over_usable_documents():
    """Counts of each document, and of each pair, against their binomial expectation."""
    rows = [f"document {i}" if i % 2 else "x" for i in range(12)]  # 6 usable
    single: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    n = 1200
    for seed in range(n):
        a, b = indices(draw(rows, documents=2, seed=seed))
        single.update((a, b))
        pairs[a, b] += 1
    assert set(single) == {1, 3, 5, 7, 9, 11} and len(pairs) == 15
    for counts, p in ((single, 1 / 3), (pairs, 1 / 15)):
        bound = 4.5 * math.sqrt(n * p * (1 - p))
        assert all(abs(count - n * p) < bound for count in counts.values())


def test_only_what_is_drawn_is_tokenised():
    class Counting:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(GPT2.tokenizer, name)

        def __call__(self, texts: list[str], **options: Any) -> Any:
            self.seen += texts
            return GPT2.tokenizer(texts, **options)

    counting = Counting()
    model = SimpleNamespace(tokenizer=counting, cfg=GPT2.cfg)
    text = draw([f"document {i}" for i in range(5000)], model, documents=5)
    assert len([t for t in counting.seen if t.startswith("document")]) == 5
    assert len(text) == 5 and text.describe()["distinct_documents"] == 5000


def test_held_out_continues_the_order():
    text = draw(ROWS, documents=10, seed=3)
    more = text.held_out(10)
    assert set(indices(text)) | set(indices(more)) == set(indices(draw(ROWS, documents=20, seed=3)))
    assert not set(indices(text)) & set(indices(more))
    assert indices(more) == sorted(indices(more)) == indices(text.held_out(10))
    rest = more.held_out(99)
    assert len(rest) == 20 and not set(indices(rest)) & {*indices(text), *indices(more)}
    assert any("20 usable held-out documents, of 99" in notice for notice in rest.notices)
    assert more.describe()["part"] == "held_out" and more.sha256 != text.sha256
    with pytest.raises(InterpError, match=r"no usable document .* left to hold out"):
        rest.held_out(1)
    with pytest.raises(InterpError, match="n must be"):
        text.held_out(0)
    # Also what a subset leaves out is not held out: the whole sample is used up.
    assert indices(text.subset([0, 1]).held_out(10)) == indices(more)


def test_rest_is_everything_that_was_not_drawn_whole():
    text = draw(ROWS, documents=10, seed=3, context=5)
    rest = list(text.rest())
    found = [d.index for d in rest]
    assert sorted(found + indices(text)) == sorted(indices(draw(ROWS, documents=999)))
    assert found != sorted(found) or len(found) <= 64  # in the seeded order, a chunk at a time
    assert found == [d.index for d in text.subset([1]).rest()]
    assert not any(d.truncated for d in rest)
    ids = {d.index: sum(len(w) for w in d.windows) for d in rest}
    whole = {d.index: len(d.windows[0]) for d in draw(ROWS, documents=999, context=128).documents}
    assert all(whole[i] - 1 <= ids[i] <= whole[i] for i in ids)
    assert list(draw(ROWS, documents=999).rest()) == []


def test_distinct():
    text = draw(["ab", "abc", "abcd"])
    assert text.distinct() == (text, [])
    once, notices = text.subset([2, 0, 2, 2]).distinct()
    assert [d.text for d in once.documents] == ["abcd", "ab"]
    assert notices == ["2 documents are in the text more than once; each counts once."]


def test_subset():
    text = draw(["ab", "abc", "abcd"], context=3)
    part = text.subset([2, 0])
    assert [d.text for d in part.documents] == ["abcd", "ab"] and part.truncated == 1
    assert part.tokens == 5 and part.describe()["part"] == "subset"
    assert part.sha256 == text.subset([2, 0]).sha256 != text.subset([0, 2]).sha256
    for wrong in ([], [3], [-1]):
        with pytest.raises(InterpError, match=r"of a text of 3: expected 0 to 2"):
            text.subset(wrong)


def test_sha256_is_of_text_and_boundaries():
    base = draw(["ab cd", "ef"]).sha256
    assert base == draw(["ab cd", "ef", ""]).sha256 == draw(["ab cd", "ef"], context=2).sha256
    assert draw(["ab", "cde"]).sha256 != draw(["abc", "de"]).sha256
    others = [["ab cd", "eg"], ["ab", "cdef"], ["ab cde", "f "], ["ef", "ab cd"]]
    assert len({base, *(draw(rows).sha256 for rows in others)}) == 5


def test_describe():
    text = draw(["abcdef", "abc", "abc", "", "x"], context=4, bos=True)
    description = text.describe()
    assert json.loads(json.dumps(description)) == description
    assert description == {
        "source": "list of 5 documents",
        "documents": 2,
        "tokens": 8,
        "predicted_tokens": 6,
        "context": 4,
        "bos": True,
        "bos_id": 0,
        "truncated_documents": 1,
        "skipped_documents": 2,
        "duplicate_documents": 1,
        "distinct_documents": 3,
        "min_tokens": 2,
        "windows": False,
        "literal_special_tokens": "text",
        "text_column": None,
        "part": "sample",
        "seed": 0,
        "sha256": text.sha256,
    }
    assert repr(text) == "Text('list of 5 documents': 2 documents, 8 tokens, sample)"


# ---------------------------------------------------------------- batches


def test_a_batch_by_hand():
    text = draw(["abc", "de"], bos=True)
    (batch,) = text.batches(8)
    a, b, c, d, e = (GPT2.tokenizer(x).input_ids[0] for x in "abcde")
    assert batch.tokens.tolist() == [[0, a, b, c], [0, d, e, 0]]
    assert batch.mask.tolist() == [[True] * 4, [True, True, True, False]]
    assert batch.included.tolist() == [[False, True, True, True], [False, True, True, False]]
    assert batch.predicted.tolist() == [[True, True, True, False], [True, True, False, False]]
    assert batch.targets[0, :3].tolist() == [a, b, c] and batch.targets[1, :2].tolist() == [d, e]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 2]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch.rows.tolist() == [0, 1]
    for tensor in (batch.tokens, batch.rows, batch.targets, batch.position_ids):
        assert tensor.dtype == torch.long
    assert batch.attention_mask.dtype == torch.long
    for tensor in (batch.mask, batch.included, batch.predicted):
        assert tensor.dtype == torch.bool
    (batch,) = draw(["abc", "de"], LAST).batches(8)
    assert batch.tokens[1, 2] == 0 and 0 not in LAST.tokenizer.all_special_ids
    assert batch.included.tolist() == [[False, True, True], [False, True, False]]
    moved = batch.to("cpu")
    assert torch.equal(moved.tokens, batch.tokens) and torch.equal(moved.rows, batch.rows)


def test_the_first_position_is_not_included_without_bos_either():
    (batch,) = draw(["abc"]).batches(1)
    assert batch.included.tolist() == [[False, True, True]]


def test_a_special_token_within_a_document_is_not_included():
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "w1": 1, "w2": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    model = SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(vocab_size=3, n_ctx=64))
    (batch,) = draw(["w1 zzz w2 w1"], model).batches(1)
    assert batch.tokens.tolist() == [[1, 0, 2, 1]]
    assert batch.included.tolist() == [[False, False, True, True]]
    assert batch.predicted.tolist() == [[True, True, True, False]]


def test_documents_of_two_tokens_alone():
    (batch,) = draw(["ab", "cd"]).batches(2)
    assert batch.tokens.shape == (2, 2)
    assert batch.predicted.tolist() == [[True, False]] * 2


def per_document(batches: Sequence[TokenBatch]) -> dict[int, list[tuple[list[int], ...]]]:
    """What each document's rows say, padding cut off after checking that it is padding."""
    seen: dict[int, list[tuple[list[int], ...]]] = {}
    for batch in batches:
        assert batch.mask.any(dim=0).all()  # no column of padding alone
        for i, row in enumerate(batch.rows.tolist()):
            n = int(batch.mask[i].sum())
            assert batch.mask[i, :n].all() and not batch.mask[i, n:].any()
            for outside in (batch.tokens, batch.included, batch.predicted):
                assert not outside[i, n:].any()
            parts = (batch.tokens, batch.included, batch.predicted, batch.position_ids)
            real = tuple(part[i, :n].tolist() for part in parts)
            targets = batch.targets[i, : n - 1].tolist()
            seen.setdefault(row, []).append((*real, targets))
    return seen


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.text(max_size=30), min_size=1, max_size=12),
    size=st.integers(1, 15),
    context=st.integers(2, 20),
    bos=st.booleans(),
    windows=st.booleans(),
    model=st.sampled_from([GPT2, LAST, LLAMA]),
)
def test_batching_never_changes_a_document(rows, size, context, bos, windows, model):
    options = {"context": context, "bos": bos, "windows": windows}
    try:
        text = draw(rows, model, documents=12, **options)
    except InterpError as error:
        assert "no usable document" in str(error)
        return
    together = per_document(list(text.batches(size)))
    assert sorted(together) == list(range(len(text)))
    tokens = predicted = 0
    for i, document in enumerate(text.documents):
        alone = draw([document.text], model, **options)
        assert per_document(list(alone.batches(1)))[0] == together[i]
        assert [row[0] for row in together[i]] == document.windows
        body = [t for w in document.windows for t in w[1 if bos else 0 :]]
        whole = model.tokenizer(
            document.text, add_special_tokens=False, split_special_tokens=True
        ).input_ids
        assert body == whole[: len(body)]
        assert document.truncated == (len(body) < len(whole))
        if windows:
            assert len(whole) - len(body) <= (0 if bos else 1)
        for row in together[i]:
            assert 2 <= len(row[0]) <= context
            assert row[1] == [False] + [t not in text.special_ids for t in row[0][1:]]
            assert row[2] == [True] * (len(row[0]) - 1) + [False]
            assert row[3] == list(range(len(row[0])))
            assert row[4] == row[0][1:]
            tokens += len(row[0])
            predicted += len(row[0]) - 1
    assert (text.tokens, text.predicted_tokens) == (tokens, predicted)


# ---------------------------------------------------------------- sources


def texts(source: Any, **options: Any) -> list[str]:
    return [document.text for document in draw(source, **options).documents]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_txt(tmp_path, newline):
    path = tmp_path / "a file.TXT"
    content = "\ufeff\n\nfirst line\n  second line\n \t\n\n\nsecond document\u2028same line\n\n"
    path.write_bytes(content.replace("\n", newline).encode())
    expected = ["first line\n  second line", "second document\u2028same line"]
    assert texts(path) == texts(str(path)) == expected


def test_jsonl_with_differing_fields(tmp_path):
    path = tmp_path / "d.jsonl"
    lines = [
        '{"text": "one 1", "id": 1}',
        "",
        '{"id": 2}',
        '{"text": null}',
        '{"x": [], "text": "two"}',
    ]
    path.write_bytes("\r\n".join(lines).encode())
    text = draw(path)
    assert [(d.index, d.text) for d in text.documents] == [(0, "one 1"), (3, "two")]
    assert text.skipped == 2 and text.describe()["text_column"] == "text"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"d\.jsonl, line 3: not valid JSON"),
        ("[1]", "line 3: expected a JSON object, found list"),
        ('{"text": 7}', "line 3: 'text' is not a string but int"),
        ("[" * 100_000, "line 3: not valid JSON"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path, line, message):
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line)
    with pytest.raises(InterpError, match=message):
        draw(path)


def test_csv_with_quoted_newlines_and_ragged_rows(tmp_path):
    path = tmp_path / "d.csv"
    path.write_bytes(
        b'id,text\r\n1,"two\nlines, ""quoted"""\r\n2\r\n\r\n3,stray,comma\r\n4,NA\r\n5,null\r\n'
    )
    text = draw(path)
    assert [(d.index, d.text) for d in text.documents] == [
        (0, 'two\nlines, "quoted"'),
        (2, "stray"),
        (3, "NA"),
        (4, "null"),
    ]
    assert text.skipped == 1
    assert any("1 row(s) with more fields than the header" in notice for notice in text.notices)


def test_csv_of_a_long_field(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text("text\n" + "long " * 50_000 + "\n")
    assert len(draw(path).documents[0].text) == 250_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('id,text\n1,"never closed\n2,b\n', "malformed CSV"),
        ("id;text\n1;hello\n", "seems separated by ';'"),
        ("id\ttext\n1\thello\n", "seems separated by"),
        ("text,text\nab,cd\n", "2 columns named 'text'"),
        ("label,review\npos,good film\n", "its columns: 'label', 'review'. Name one with --text"),
        ("text\n", "holds no document"),
        ("", "holds no document"),
    ],
)
def test_csv_errors(tmp_path, content, message):
    path = tmp_path / "d.csv"
    path.write_text(content)
    with pytest.raises(InterpError, match=message):
        draw(path)


def write_parquet(path: Any, **columns: Any) -> Any:
    pq.write_table(pa.table(columns), path)
    return path


def test_parquet(tmp_path):
    path = write_parquet(
        tmp_path / "k=v d.parquet",
        id=[1, 2, 3],
        text=pa.array(["one", None, "two"], pa.large_string()),
        other=["x", "y", "z"],
        **{"text.en": ["aa", "bb", "cc"]},
    )
    text = draw(path)
    assert [(d.index, d.text) for d in text.documents] == [(0, "one"), (2, "two")]
    assert texts(path, text_column="text.en") == ["aa", "bb", "cc"]
    coded = pa.array(["one", "two", "one"]).dictionary_encode()
    assert texts(write_parquet(tmp_path / "c.parquet", text=coded)) == ["one", "two"]


def test_parquet_without_a_text_column(tmp_path):
    path = write_parquet(tmp_path / "d.parquet", a=["x"], b=["y"], n=[1])
    with pytest.raises(InterpError, match=r"no column 'text', .* its columns: 'a', 'b', 'n'"):
        draw(path)
    with pytest.raises(InterpError, match="no column 'c'; its columns: 'a', 'b', 'n'"):
        draw(path, text_column="c")
    with pytest.raises(InterpError, match=r"column 'n' of .* holds no text"):
        draw(path, text_column="n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(InterpError, match="not a readable parquet file"):
        draw(tmp_path / "bad.parquet")


def test_which_column_is_read(tmp_path):
    path = write_parquet(tmp_path / "one.parquet", n=[1], review=["good film"])
    text = draw(path)
    assert texts(path) == ["good film"] and text.describe()["text_column"] == "review"
    assert any("the documents are column 'review'" in notice for notice in text.notices)
    path = write_parquet(tmp_path / "known.parquet", url=["http://x"], content=["good film"])
    assert texts(path) == ["good film"]
    path = write_parquet(tmp_path / "two.parquet", content=["aa"], sentence=["bb"])
    with pytest.raises(InterpError, match="unclear"):
        draw(path)
    assert texts(path, text_column="sentence") == ["bb"]
    with pytest.raises(InterpError, match="Did you mean 'sentence'"):
        draw(path, text_column="sentense")
    (tmp_path / "n.csv").write_text("id,stars,review\n1,4.5,fine film\n")
    assert texts(tmp_path / "n.csv") == ["fine film"]
    path = write_parquet(tmp_path / "number.parquet", text=[1], other=["x y"])
    with pytest.raises(InterpError, match=r"column 'text' of .* holds no text"):
        draw(path)  # and 'other' is not read in its place


def test_a_folder(tmp_path):
    folder = tmp_path / "my data"
    (folder / "b sub").mkdir(parents=True)
    (folder / "b sub" / "x.jsonl").write_text('{"text": "from jsonl"}\n')
    (folder / "a.txt").write_text("one one\n\ntwo two\n")
    (folder / "c.csv").write_text("text\nfrom csv\n")
    (folder / "readme.md").write_text("not read")
    (folder / ".hidden.txt").write_text("not read")
    text = draw(f"{folder}/")
    assert [(d.index, d.text) for d in text.documents] == [
        (0, "one one"),
        (1, "two two"),
        (2, "from jsonl"),
        (3, "from csv"),
    ]
    assert any("1 file(s) of other kinds" in notice for notice in text.notices)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InterpError, match=r"holds no \.txt, \.jsonl, \.csv, \.parquet file"):
        draw(tmp_path / "empty")


def test_unreadable_files(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin1"))
    with pytest.raises(InterpError, match=r"latin\.txt is not UTF-8 \(byte 3: 0xe9\)"):
        draw(path)
    (tmp_path / "d.json").write_text("{}")
    with pytest.raises(InterpError, match=r"cannot read '.*d\.json': expected 'news', a \.txt"):
        draw(tmp_path / "d.json")
    with pytest.raises(InterpError, match=r"no data source .*latim\.txt.*mean '.*latin\.txt'"):
        draw(tmp_path / "latim.txt")
    with pytest.raises(InterpError, match="document 1 of the list is not a string but int"):
        _listed(["fine", 7])


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("asked the network")

    monkeypatch.setattr(hub, "reachable", refuse)
    monkeypatch.setattr(datasets, "load_dataset", refuse)


@pytest.mark.parametrize("name", ["nwes", "imdb", "", " ", "a b/c", "./x/y", "d.csv", "a\0b"])
def test_unknown_sources_say_what_is_possible(no_network, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterpError, match=r"no data source .*expected 'news', .*owner/name"):
        draw(name)
    with pytest.raises(InterpError, match="Did you mean 'news'"):
        draw("new")
    with pytest.raises(InterpError, match=r"list of strings") as caught:
        draw("The document itself, not its name. " * 200)
    assert len(str(caught.value)) < 400


def test_a_hub_id_offline_or_without_a_hub(no_network, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterpError, match="offline forbids asking the Hub"):
        draw("owner/name", offline=True)
    monkeypatch.setattr(hub, "reachable", lambda: False)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "names").mkdir()
    with pytest.raises(InterpError, match=r"no Hub answers.*Did you mean 'owner/names'"):
        draw("owner/name")


@pytest.fixture
def streamed(monkeypatch):
    """A Hub in which every data set has these rows."""
    asked: list[Any] = []
    rows = [{"text": f"row {i}", "n": i} for i in range(300)]

    def load_dataset(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        if options["split"] != "train":
            raise ValueError(f"Bad split: {options['split']}. Available: ['train']\nmore lines")
        return datasets.IterableDataset.from_generator(lambda: iter(rows))

    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_streamed_hub_data_set(streamed, monkeypatch):
    text = draw("owner/name:config", documents=5)
    assert streamed == [(("owner/name", "config"), {"split": "train", "streaming": True})]
    assert all(d.text == f"row {d.index}" for d in text.documents)
    assert indices(text) == indices(draw([f"row {i}" for i in range(300)], documents=5))
    assert text.notices == [] and text.describe()["source"] == "owner/name:config"
    monkeypatch.setattr("interp.sources.HUB_ROWS", 100)
    text = draw("owner/name", documents=10)
    assert max(indices(text)) < 100
    assert any("sample is of the first 100 rows" in notice for notice in text.notices)
    assert len(draw("owner/name", documents=25, text_column="text")) == 25  # 10 rows for each


def test_hub_errors_are_one_line(streamed):
    with pytest.raises(InterpError) as caught:
        draw("owner/name", split="test")
    assert str(caught.value) == (
        "Hub data set 'owner/name', split 'test': Bad split: test. Available: ['train']"
    )


def test_options_that_do_not_apply_are_refused(tmp_path):
    (tmp_path / "d.txt").write_text("some text")
    for source in (tmp_path / "d.txt", ["some text"], "news"):
        with pytest.raises(InterpError, match="has no columns"):
            draw(source, text_column="title")
        with pytest.raises(InterpError, match="has no splits"):
            draw(source, split="test")


def test_news(monkeypatch):
    def documents(offline: bool, notify: Any) -> list[str]:
        assert offline
        notify("fetched")
        return ["article one", "", "article two"]

    monkeypatch.setattr(assets, "news_documents", documents)
    text = draw("news", offline=True)
    assert [d.text for d in text.documents] == ["article one", "article two"]
    assert "fetched" in text.notices and text.source == "news" and text.skipped == 1


def test_read_source_keeps_rows_without_text():
    assert read_source(["a", "", "b"]).rows == ["a", "", "b"]

"""A bank of mechanical labels of tokens: what a direction could be about, without a human judge.

Each label is a rule on tokens and documents: the word, the word before, its shape, punctuation,
digits, capitals, endings, the place in the sentence and in the document, what repeats, and the
topic (a cluster of documents by TF-IDF). No label looks at an activation.

What the bank cannot say: a direction that matches none of the labels may have a clear meaning that
is not in the bank. Scores compare dictionaries under one bank; they are no census of meanings.
Sentence ends are found by punctuation, and topics by a clustering that a human might not share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64
from scipy import sparse

from interp.analyzers.ffn_keys.patterns import Positions, word_shape
from interp.errors import InterpError

LEAST = 20  # tokens with, and without, a label in each half
LEAST_DOCUMENTS = 5  # that they are spread over
WORDS, WORDS_BEFORE, SHAPES, TOPICS = 60, 30, 25, 10
ENDINGS = ("ed", "ing", "ly", "er", "es", "tion", "al", "ity", "ment", "en", "on", "an", "in")
SENTENCE = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-5": (3, 5), "6-10": (6, 10)}
SENTENCE |= {"11-20": (11, 20), "21 or more": (21, 10**9)}
PLACES = {"1-3": (1, 3), "4-7": (4, 7), "8-15": (8, 15), "16-31": (16, 31), "32-63": (32, 63)}
PLACES |= {"64-127": (64, 127), "128 or more": (128, 10**9)}
LENGTHS = {"1": (1, 1), "2-3": (2, 3), "4-6": (4, 6), "7 or more": (7, 10**9)}


@dataclass(frozen=True)
class Concepts:
    """Labels of the included positions of a text, in its order.

    Attributes:
        names: of the labels, such as 'word "the"'.
        kinds: "word", "word before", "shape", "characters", "ending", "sentence", "document",
            "context" or "topic", one a label.
        labels: which tokens have each label.
        document: the document of each token.
        first_half: whether that document is of the half on which concepts are chosen.
    """

    names: list[str]
    kinds: list[str]
    labels: Bool[np.ndarray, "token label"]
    document: Int64[np.ndarray, " token"]
    first_half: Bool[np.ndarray, " token"]


def halves(document: Int64[np.ndarray, " token"], seed: int) -> Bool[np.ndarray, " token"]:
    """Whether a token's document is in the first half of the documents, drawn at random.

    Raises:
        InterpError: fewer than 4 documents.
    """
    known, inverse = np.unique(document, return_inverse=True)
    if len(known) < 4:
        raise InterpError(
            f"Concepts are chosen on half of the documents and scored on the other; "
            f"{len(known)} document(s) are too few. Give at least 4, better 100."
        )
    order = np.random.default_rng([seed, 11]).permutation(len(known))
    return (order < len(known) // 2)[inverse]


def bank(at: Positions, names: dict[int, str], *, seed: int = 0, least: int = LEAST) -> Concepts:
    """The labels that are common enough to be scored.

    A label is kept where each half of the documents has at least `least` tokens with it and without
    it, either of them in at least 5 documents. Of labels with the same tokens the first is kept.

    Args:
        at: every token of the text.
        names: id -> its text, its leading space included, for every id of the text.
        seed: of the halves and of the topics.
        least: tokens.

    Raises:
        InterpError: fewer than 4 documents, or no label common enough.
    """
    places = at.candidates
    document = at.document[places]
    first = halves(document, seed)
    seen: set[bytes] = set()
    kept: list[tuple[str, str, np.ndarray]] = []
    for kind, name, everywhere in every_label(at, names, seed):
        label = everywhere[places]
        key = np.packbits(label).tobytes()
        if key not in seen and _common(label, document, first, least):
            seen.add(key)
            kept.append((kind, name, label))
    if not kept:
        raise InterpError(
            f"No mechanical label has {least} tokens with and without it in both halves of the "
            f"{len(np.unique(document))} documents: give more documents."
        )
    return Concepts(
        names=[name for _, name, _ in kept],
        kinds=[kind for kind, _, _ in kept],
        labels=np.stack([label for _, _, label in kept], axis=1),
        document=document,
        first_half=first,
    )


def _common(label: np.ndarray, document: np.ndarray, first: np.ndarray, least: int) -> bool:
    for half in (first, ~first):
        for which in (label & half, ~label & half):
            if which.sum() < least or len(np.unique(document[which])) < LEAST_DOCUMENTS:
                return False
    return True


# The labels ---------------------------------------------------------------------------------------

Label = tuple[str, str, np.ndarray]  # kind, name, [token] of the whole text


def every_label(at: Positions, names: dict[int, str], seed: int) -> Iterator[Label]:
    """Each label of the bank, common or not: its kind, name and [token] over the whole text."""
    unique, inverse = np.unique(at.ids, return_inverse=True)
    texts = [names[int(token)] for token in unique]
    words = [text.strip().lower() for text in texts]

    def by_text(rule: Callable[[str], bool]) -> np.ndarray:
        return np.array([rule(text) for text in texts])[inverse]

    word = _numbered(words)[inverse]
    before = np.concatenate([[-1], word[:-1]])
    before[at.windows] = -1
    if at.bos:
        before[(at.windows + 1).clip(max=len(before) - 1)] = -1
    yield from _most_common("word", word, at, words, WORDS)
    yield from _most_common("word before", before, at, words, WORDS_BEFORE)
    shapes = [word_shape(text) for text in texts]
    shape = _numbered(shapes)[inverse]
    yield from _most_common("shape", shape, at, shapes, SHAPES)
    yield from _characters(by_text)
    yield from _context(at, by_text, word)
    yield from _topics(at, words, inverse, seed)


def _most_common(
    kind: str, of: np.ndarray, at: Positions, texts: list[str], most: int
) -> Iterator[Label]:
    """One label for each of the most frequent values at included positions."""
    counts = Counter(of[at.included].tolist())
    for value, _ in counts.most_common(most):
        if value >= 0:
            yield kind, f'{kind} "{texts[value]}"', of == value


def _characters(by_text: Callable[[Callable[[str], bool]], np.ndarray]) -> Iterator[Label]:
    rules: dict[str, Callable[[str], bool]] = {
        "punctuation": _punctuation,
        "sentence end": _ends_sentence,
        "comma, colon or semicolon": lambda t: t.strip() in {",", ";", ":"},
        "quotation mark": lambda t: any(c in "\"'\u201c\u201d\u2018\u2019`" for c in t),
        "bracket": lambda t: any(c in "()[]{}" for c in t),
        "dash": lambda t: any(c in "-\u2013\u2014" for c in t),
        "line break": lambda t: "\n" in t,
        "digit": lambda t: any(c.isdigit() for c in t),
        "digits only": lambda t: t.strip().isdigit(),
        "letters only": lambda t: t.strip().isalpha(),
        "lower case": lambda t: t.strip().isalpha() and t.islower(),
        "capitalised": lambda t: t.strip()[:1].isupper() and not _all_capitals(t),
        "all capitals": _all_capitals,
        "leading space": lambda t: t[:1] == " ",
        "not ASCII": lambda t: not t.isascii(),
    }
    for name, rule in rules.items():
        yield "characters", name, by_text(rule)
    for name, (low, high) in LENGTHS.items():
        yield (
            "characters",
            f"characters: {name}",
            by_text(lambda t, low=low, high=high: low <= len(t.strip()) <= high),
        )
    for ending in ENDINGS:
        yield (
            "ending",
            f'ends in "{ending}"',
            by_text(lambda t, e=ending: t.strip().isalpha() and t.endswith(e) and t.strip() != e),
        )


def _context(
    at: Positions, by_text: Callable[[Callable[[str], bool]], np.ndarray], word: np.ndarray
) -> Iterator[Label]:
    position = np.arange(len(at.ids)) - at.start
    first = position == 0

    def before(label: np.ndarray) -> np.ndarray:
        moved = np.concatenate([[False], label[:-1]])
        return moved & ~first

    glued = by_text(lambda t: t[:1].isalpha()) & before(by_text(lambda t: t[-1:].isalpha()))
    yield "context", "continues a word", glued
    yield "context", "after punctuation", before(by_text(_punctuation))
    yield "context", "after a digit", before(by_text(lambda t: t[-1:].isdigit()))
    yield "context", "after a capitalised token", before(by_text(lambda t: t.strip()[:1].isupper()))
    again = _seen_before(word, at.start)
    yield "context", "word seen before in the window", again
    opened = by_text(lambda t: "(" in t).astype(int) - by_text(lambda t: ")" in t).astype(int)
    yield "context", "in brackets", _running(opened, at.start) > 0
    marks = by_text(lambda t: t.count('"') % 2 == 1).astype(int)
    yield "context", "in straight quotation marks", _running(marks, at.start) % 2 == 1
    since = _since(by_text(_ends_sentence), first, at.bos)
    for name, (low, high) in SENTENCE.items():
        yield "sentence", f"token of the sentence: {name}", (since >= low) & (since <= high)
    for name, (low, high) in PLACES.items():
        inside = (position >= low) & (position <= high)
        yield "document", f"position in the window: {name}", inside


def _topics(at: Positions, words: list[str], inverse: np.ndarray, seed: int) -> Iterator[Label]:
    """Clusters of documents by the TF-IDF of their words (k-means on unit vectors)."""
    from sklearn.cluster import KMeans
    from sklearn.feature_extraction.text import TfidfTransformer

    terms = sorted({w for w in words if any(c.isalpha() for c in w)})
    number = {w: i for i, w in enumerate(terms)}
    term = np.array([number.get(w, -1) for w in words])[inverse]
    used = at.included & (term >= 0)
    documents, row = np.unique(at.document[used], return_inverse=True)
    clusters = min(TOPICS, len(documents) // 10)
    if clusters < 2:
        return
    shape = (len(documents), len(terms))
    at_32 = (row.astype(np.int32), term[used].astype(np.int32))  # scikit-learn takes no others
    counts = sparse.csr_array((np.ones(len(row)), at_32), shape=shape)
    vectors = TfidfTransformer(sublinear_tf=True).fit_transform(counts)
    options: dict[str, Any] = {"n_init": 4, "random_state": seed}
    fitted: Any = KMeans(clusters, **options).fit(vectors)
    for i, centre in enumerate(fitted.cluster_centers_):
        top = ", ".join(terms[j] for j in np.argsort(-centre)[:3])
        yield "topic", f"topic {i} ({top})", np.isin(at.document, documents[fitted.labels_ == i])


# Rules --------------------------------------------------------------------------------------------


def _punctuation(text: str) -> bool:
    bare = text.strip()
    return bool(bare) and not any(c.isalnum() for c in bare)


def _all_capitals(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare.isalpha() and bare.isupper()


def _ends_sentence(text: str) -> bool:
    return "\n" in text or text.strip().rstrip("\"')\u201d\u2019")[-1:] in {".", "!", "?"}


def _numbered(texts: list[str]) -> np.ndarray:
    """[text] the index of the first text that equals it; -1 for an empty one."""
    first: dict[str, int] = {}
    return np.array([first.setdefault(t, i) if t else -1 for i, t in enumerate(texts)])


def _since(ends: np.ndarray, first: np.ndarray, bos: bool) -> np.ndarray:
    """[token] tokens since the sentence began: 0 for the one after an end or at a window's start.

    Args:
        ends: which tokens end a sentence.
        first: which are the first of a window.
        bos: whether these are BOS, so that the text starts with the next.
    """
    begins = np.concatenate([[True], ends[:-1]]) | first
    if bos:
        begins[1:] |= first[:-1]
    index = np.arange(len(ends))
    return index - np.maximum.accumulate(np.where(begins, index, 0))


def _running(steps: np.ndarray, start: np.ndarray) -> np.ndarray:
    """[token] sum of the steps of the window's earlier tokens."""
    total = np.concatenate([[0], steps.cumsum()])
    return total[:-1] - total[start]


def _seen_before(word: np.ndarray, start: np.ndarray) -> np.ndarray:
    """[token] whether the window has the same word earlier."""
    order = np.lexsort((np.arange(len(word)), word, start))
    same = np.zeros(len(word), dtype=bool)
    a, b = order[:-1], order[1:]
    same[b] = (word[a] == word[b]) & (start[a] == start[b])
    return same

"""Loss changes by class of token, against plain transformers read token by token."""

import numpy as np
import pytest
import torch

import interp
from interp.analyzers.heads import tokenclasses
from interp.text import load_text
from tests import oracle, tiny

NAMES = list(tokenclasses.CLASSES)


def classes_of(ids):
    """Per predicted token the names of its classes, spelled out with lists."""
    out = []
    for t in range(1, len(ids)):
        pairs = [(ids[s - 1], ids[s]) for s in range(1, t)]
        if ids[t] not in ids[:t]:
            kind = "first seen"
        elif (ids[t - 1], ids[t]) in pairs:
            kind = "repeated bigram"
        else:
            kind = "repeated"
        place = "position 1-15" if t < 16 else "position 16-63" if t < 64 else "position 64 on"
        out.append({kind, place})
    return out


def test_classes_by_hand(load):
    model, _ = load("gpt2")
    text = load_text(tiny.corpus(6), model, documents=6, context=64)
    batch = text.batch_of([(i, 0) for i in range(6)])
    found = tokenclasses.masks(batch)
    for i, document in enumerate(text.documents):
        ids = document.windows[0]
        expected = classes_of(ids)
        for t in range(batch.tokens.shape[1]):
            mine = {NAMES[c] for c in range(len(NAMES)) if found[c, i, t]}
            assert mine == (expected[t] if t < len(ids) - 1 else set())
    assert found[2].any() and found[1].any()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_loss_changes_are_the_oracles(load, family):
    model, plain = load(family)
    text = load_text(tiny.corpus(7), model, documents=7, context=64)
    result = interp.heads(model, text, roles=True, exact=True, batch_size=3, progress=False)
    table = result.tables["token_classes"].set_index(["token_class", "layer", "head"])
    ids = [d.windows[0] for d in text.documents]
    kinds = [classes_of(s) for s in ids]
    clean = [oracle.token_losses(plain, s) for s in ids]
    for head in [(0, 1), (2, 3)]:
        edited = oracle.edited(plain, [head])
        delta = [oracle.token_losses(edited, s) - c for s, c in zip(ids, clean, strict=True)]
        for name in result.summary["token_classes"]:
            per = [
                np.mean([x for x, k in zip(d, kind, strict=True) if name in k])
                for d, kind in zip(delta, kinds, strict=True)
                if any(name in k for k in kind)
            ]
            row = table.loc[(name, *head)]
            assert row["documents"] == len(per)
            assert row["loss_delta"] == pytest.approx(np.mean(per), abs=2e-5)
            half = np.std(per, ddof=1) / np.sqrt(len(per))
            assert (row["ci_high"] - row["ci_low"]) / (2 * half) == pytest.approx(
                {7: 2.446912, 6: 2.570582, 5: 2.776445, 4: 3.182446, 3: 4.302653}[len(per)],
                rel=1e-3,
            )
    found = result.summary["token_classes"]
    tokens = sum(len(s) - 1 for s in ids)
    assert sum(found[n]["tokens"] for n in NAMES[:3] if n in found) == tokens
    assert sum(found[n]["tokens"] for n in NAMES[3:] if n in found) == tokens
    assert "position 64 on" not in found  # the context ends there


def test_an_induction_head_works_on_repeated_bigrams(plant):
    model, text, case = plant("induction")
    result = interp.heads(model, text, roles=True, exact=True, progress=False)
    table = result.tables["token_classes"].set_index(["token_class", "layer", "head"])
    head = case["heads"]["induction"]
    assert table.loc[("repeated bigram", *head), "loss_delta"] > 1
    assert abs(table.loc[("first seen", *head), "loss_delta"]) < 0.2


def test_windows_of_a_document_add_up():
    made = tokenclasses.ByClass(1, 1)
    scores = interp_scores([1.0, 2.0, 3.0])
    batch = batch_of([[5, 6, 5, 6]])
    made.start(batch, scores)
    made.add(0, made.of(interp_scores([1.5, 2.0, 7.0])))
    made.start(batch, scores)
    made.add(0, made.of(interp_scores([1.5, 2.0, 3.0])))
    # 6 is new, 5 repeats after another token, 6 repeats after the same one; two windows.
    assert made.counts[:, 0].tolist() == [2, 2, 2, 6, 0, 0]
    np.testing.assert_allclose(made.delta(0), [[0.5]])
    np.testing.assert_allclose(made.delta(1), [[0.0]])
    np.testing.assert_allclose(made.delta(2), [[2.0]])
    assert len(made.delta(4)) == 0


def interp_scores(nll):
    from interp.splice import Scores

    values = torch.tensor(nll)
    return Scores(values.sum()[None].double(), None, values)


def batch_of(rows):
    from interp.text import TokenBatch

    tokens = torch.tensor(rows)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    first = torch.arange(tokens.shape[1]) > 0
    zeros = torch.zeros(len(rows), dtype=torch.long)
    return TokenBatch(tokens, mask, mask & first, zeros, zeros)

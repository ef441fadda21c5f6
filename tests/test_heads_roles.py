"""--roles: where heads look, against plain transformers, planted circuits and closed forms."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import interp
from interp import report
from interp.analyzers.heads import roles
from interp.errors import InterpError
from interp.model import untrained
from interp.report import heads as heads_view
from interp.text import load_text
from tests import oracle, tiny

FAMILIES = ("gpt2", "neox", "llama")


@pytest.fixture(scope="module")
def measured(load, checkpoint):
    """family -> (model, plain eager model, text, result of --roles)."""
    made = {}

    def get(family):
        if family not in made:
            model, _ = load(family)
            eager = AutoModelForCausalLM.from_pretrained(
                checkpoint(family), attn_implementation="eager"
            ).eval()
            text = load_text(tiny.corpus(10), model, documents=10, context=64)
            result = interp.heads(model, text, roles=True, exact=True, progress=False)
            made[family] = model, eager, text, result
        return made[family]

    return get


def attentions(plain, ids):
    with torch.no_grad():
        found = plain(torch.tensor([ids]), output_attentions=True).attentions
    return np.stack([layer[0].double().numpy() for layer in found])  # [layer, head, query, key]


def grid(result, column):
    table = result.tables["heads"]
    out = np.full((table["layer"].max() + 1, table["head"].max() + 1), np.nan)
    out[table["layer"], table["head"]] = table[column]
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_are_random_tokens_said_twice(measured, family):
    model, _, text, result = measured(family)
    ids = [d.windows[0] for d in roles.repeated(model, text, 0).documents]
    bos = [1] if family == "llama" else []
    length = (64 - len(bos)) // 2  # the context is too short for 50
    assert len(ids) == 50 and {len(s) for s in ids} == {len(bos) + 2 * length}
    for s in ids:
        assert s[: len(bos)] == bos
        first, second = s[len(bos) : len(bos) + length], s[len(bos) + length :]
        assert first == second and len(set(first)) == length
        assert not set(first) & set(text.special_ids) and max(first) < tiny.REAL_VOCAB
    assert len({tuple(s) for s in ids}) == 50
    assert ids == [d.windows[0] for d in roles.repeated(model, text, 0).documents]
    assert ids != [d.windows[0] for d in roles.repeated(model, text, 1).documents]
    found = result.summary["roles"]
    assert (found["sequences"], found["copy_length"], found["documents"]) == (50, length, 10)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_plain_attention(measured, family):
    model, plain, text, result = measured(family)
    start = int(family == "llama")
    totals = {name: [] for name in (*roles.NAMED, "entropy")}
    for document in roles.repeated(model, text, 0).documents:
        ids = document.windows[0]
        a, length = attentions(plain, ids), (len(ids) - start) // 2
        scores = {name: [] for name in totals}
        for t in range(start + length + 1, len(ids)):
            earlier = ids.index(ids[t], start)  # found, not computed
            assert earlier < t
            scores["previous_token"].append(a[:, :, t, t - 1])
            scores["duplicate_token"].append(a[:, :, t, earlier])
            scores["induction"].append(a[:, :, t, earlier + 1])
            scores["first_token"].append(a[:, :, t, 0])
            p = a[:, :, t, : t + 1]
            scores["entropy"].append(-(p * np.log(np.maximum(p, 1e-300))).sum(-1))
        for name, values in scores.items():
            totals[name].append(np.mean(values, axis=0))
    for name, values in totals.items():
        np.testing.assert_allclose(grid(result, name), np.mean(values, axis=0), atol=2e-6)
    half = 2.009575 * np.std(totals["induction"], axis=0, ddof=1) / np.sqrt(50)  # t(49), 97.5%
    mean = np.mean(totals["induction"], axis=0)
    width = grid(result, "induction_high") - grid(result, "induction_low")
    np.testing.assert_allclose(width, 2 * mean * np.sinh(half / mean), atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_on_text_are_those_of_plain_attention(measured, family):
    _, plain, text, result = measured(family)
    totals = {name: [] for name in roles.ON_TEXT}
    for document in text.documents:
        ids = document.windows[0]
        a = attentions(plain, ids)
        at = [t for t in range(2, len(ids)) if ids[t] not in text.special_ids]
        p = a[:, :, at]
        totals["previous_token"].append(np.mean([a[:, :, t, t - 1] for t in at], axis=0))
        totals["first_token"].append(p[..., 0].mean(-1))
        totals["entropy"].append(-(p * np.log(np.maximum(p, 1e-300))).sum(-1).mean(-1))
    for name, values in totals.items():
        column = grid(result, f"{name}_text")
        np.testing.assert_allclose(column, np.mean(values, axis=0), atol=2e-6)


def test_planted_heads_have_their_roles(plant):
    model, text, case = plant("induction")
    result = interp.heads(model, text, roles=True, exact=True, progress=False)
    table = result.tables["heads"].set_index(["layer", "head"])
    for role, head in case["heads"].items():
        assert table.loc[head, "role"] == role and table.loc[head, role] > 0.5
        others = table.drop(index=head)[role]
        assert table.loc[head, role] > 2 * others.max()
    assert (table["role"] == "other").sum() == 6
    assert table.loc[case["heads"]["previous_token"], "previous_token_text"] > 0.5
    found = result.summary["roles"]
    assert {role: found["by_role"][role]["heads"] for role in ("previous_token", "induction")} == {
        "previous_token": 1,
        "induction": 1,
    }
    # The loss change of a role is that of its heads.
    own = found["by_role"]["induction"]
    assert own["loss_delta"] == pytest.approx(table.loc[case["heads"]["induction"], "loss_delta"])
    others = table[table["role"] == "other"]["loss_delta"]
    assert found["by_role"]["other"]["loss_delta"] == pytest.approx(others.mean(), abs=1e-9)
    assert own["loss_delta"] > 0.1 > found["by_role"]["other"]["loss_delta_magnitude"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_untrained_model_is_seeded_and_of_the_same_shape(load, family):
    model, plain = load(family)
    before = torch.random.get_rng_state()
    one, same, other = (untrained(model, seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert (one.cfg.n_heads, one.cfg.d_head, one.cfg.n_layers, one.cfg.vocab_rows) == (
        model.cfg.n_heads,
        model.cfg.d_head,
        model.cfg.n_layers,
        model.cfg.vocab_rows,
    )
    w = [oracle.projection(m.bridge.original_model, 0).weight for m in (one, same, other)]
    assert torch.equal(w[0], w[1]) and not torch.equal(w[0], w[2])
    assert not torch.equal(w[0], oracle.projection(plain, 0).weight)


def test_untrained_heads_attend_evenly_and_have_no_role(measured):
    *_, result = measured("llama")
    found = result.summary["roles"]["untrained"]
    # Weights of standard deviation 0.02: scores near 0, so attention is spread over all before.
    length = 31
    expected = np.mean([1 / (t + 1) for t in range(length + 2, 2 * length + 1)])
    for name in roles.NAMED:
        assert found[name]["median"] == pytest.approx(expected, rel=0.1)


def test_even_attention_by_hand():
    """Attention 1 / (t + 1) over the past: every score has a closed form."""
    made = roles.Roles(
        repeated={
            name: np.full((2, 1, 2), 0.1)
            + np.array([[[0.5, 0.0]], [[0.6, 0.0]]]) * (name == "induction")
            for name in (*roles.NAMED, "entropy")
        },
        text={name: np.full((2, 1, 2), 0.2) for name in roles.ON_TEXT},
        untrained={name: np.full((2, 1, 2), 0.1) for name in roles.NAMED},
        length=8,
        importance=np.ones((1, 2)),
    )
    found = roles.columns(made)
    assert found["role"].tolist() == [["induction", "other"]]
    np.testing.assert_allclose(found["induction"], [[0.65, 0.1]])
    # Not above what an untrained model scores: no role.
    made.untrained["induction"][:] = 0.7
    assert roles.columns(made)["role"].tolist() == [["other", "other"]]


def test_rank_correlations(measured):
    *_, result = measured("gpt2")
    found = result.summary["roles"]["rank_correlation"]
    assert set(found) == {
        "importance: text~repeated",
        "importance: even~odd documents",
        "loss_delta: even~odd documents",
        "kl: even~odd documents",
    }
    assert all(-1 <= value <= 1 for value in found.values())


def test_one_role_or_other_for_every_head(measured):
    *_, result = measured("neox")
    found = result.summary["roles"]["by_role"]
    assert sum(entry["heads"] for entry in found.values()) == len(result.tables["heads"])


def test_heads_that_were_cut_out_have_no_row(load, tmp_path, monkeypatch):
    from interp.analyzers.heads import speed

    monkeypatch.setattr(speed, "SECONDS", 0.0)
    model, _ = load("gpt2")
    text = load_text(tiny.corpus(6), model, documents=4, context=64)
    interp.heads(model, text, export=tmp_path / "p", heads="1.0,1.1,1.2,1.3,2.0", progress=False)
    small = interp.load_model(tmp_path / "p", device="cpu")
    text = load_text(tiny.corpus(6), small, documents=4, context=64)
    table = interp.heads(small, text, roles=True, progress=False).tables["heads"]
    assert len(table) == 7 and table["induction"].notna().all()
    whole = interp.heads(model, text, roles=True, progress=False).tables["heads"]
    first = whole[whole["layer"] == 0]["induction"].to_numpy()  # nothing before it has changed
    np.testing.assert_allclose(table[table["layer"] == 0]["induction"], first, atol=1e-6)


def test_too_short_a_context_is_told(tmp_path):
    folder = tiny.make_checkpoint("gpt2", tmp_path / "m", n_positions=7)
    model = interp.load_model(folder, device="cpu")
    text = load_text(tiny.corpus(4), model, documents=4, context=7)
    with pytest.raises(InterpError, match="copies of 4 tokens or more"):
        interp.heads(model, text, roles=True, progress=False)


def test_the_page_tells_of_roles_and_kinds_of_token(plant):
    model, text, case = plant("induction")
    result = interp.heads(model, text, roles=True, exact=True, keep_one=True, progress=False)
    assert {"induction", "previous_token", "first_token", "keep_one"} <= set(result.figures)
    figure = result.figure("induction")
    layer, head = case["heads"]["induction"]
    assert figure.data[0].z[layer][head] == result.tables["heads"]["induction"].max()
    told = " ".join(heads_view.VIEW.findings(result))
    assert "1 previous token, 0 same token earlier, 1 induction, 0 first token" in told
    assert "With only its best head left" in told
    rows = {d.title: d.rows for d in heads_view.VIEW.digests(result)}
    roles_rows = {row[0]: row for row in rows["Where heads look, and what they are worth"]}
    assert roles_rows["induction"][1] == "1"
    assert roles_rows["induction"][2].startswith(f"{layer}.{head} (")
    kinds = {
        row[0]: row for row in rows["Heads by the kind of token that is predicted (nats per token)"]
    }
    most = kinds["repeated bigram"][5].split()[0]  # it needs both of them
    assert most in {f"{planted[0]}.{planted[1]}" for planted in case["heads"].values()}
    assert "could not be drawn" not in report.render([result])

"""Geometry, concepts, neurons and seeds of `superposition`, and its toy, on planted models."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load as load_weights
from sklearn.metrics import roc_auc_score

import probes
from interp.cli import run as interp_command
from interp.errors import UsageError
from interp.model import load_model
from interp.report import figure, figure_names, print_result, render
from interp.report.superposition import findings
from interp.text import load_text
from probes import concepts, meaning
from probes.run import superposition
from tests import superposed, tiny

MARGIN = 0.05  # AUROC by which the SAE must beat everything else; fixed before the first run


def planted_labels(at, names, seed):
    """The features that the planted model's MLP writes, in the place of the bank's own labels."""
    for i in range(superposed.FEATURES):
        yield "planted", f"feature {i}", superposed.strengths()[at.ids, i] > 0


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """(model, result) of an SAE that had enough to learn from."""
    model = load_model(superposed.make(tmp_path_factory.mktemp("planted") / "m"), device="cpu")
    text = load_text(superposed.texts(600), model, documents=60, context=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concepts, "every_label", planted_labels)
        result = superposition(
            model, text, layer=1, width=(2,), k=3, train_tokens=30_000, train_batch=128, lr=6e-3,
            seeds=2, null_model=True, loss_documents=2, progress=False,
        )  # fmt: skip
    return model, result


def test_features_tell_what_was_planted_and_nothing_else_does(planted):
    """Held-out documents, every dictionary with all its directions; paired by document."""
    _, result = planted
    scores = result.tables["concept_scores"].set_index("dictionary")
    assert set(scores.index) == {
        "sae", "random dictionary", "null model", "neurons", "pca", "random directions",
    }  # fmt: skip
    assert scores.loc["sae", "concepts"] > 100
    assert scores.loc["random directions", "available"] == 2 * superposed.D_MODEL
    assert scores.loc["sae", "concept_auroc_all"] > 0.9
    margins = result.tables["concept_margins"].set_index("against")
    for other in ("neurons", "pca", "null model", "random directions"):
        assert margins.loc[other, "concept_auroc_all_low"] > MARGIN, other
    assert result.summary["concept_margin"] == margins["concept_auroc_all"].min()


def test_scores_are_those_of_the_saved_sae(planted):
    """AUROCs of a few features again, from the SAE's files and the tokens, by scikit-learn."""
    import torch

    model, result = planted
    weights = load_weights(result.files["sae/sae_weights.safetensors"])
    text = load_text(superposed.texts(600), model, documents=60, context=64)
    ids = [np.array(d.windows[0][1:]) for d in text.documents]
    document = np.repeat(np.arange(60), [len(i) for i in ids])
    first = concepts.halves(document, 0)
    held = np.concatenate(ids)[~first]
    # The planted model by hand: LayerNorm of the token's vector, plus the MLP's bias.
    x = superposed.strengths()[held] @ superposed.directions()
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    bias = model.bridge.original_model.transformer.h[1].mlp.c_proj.bias.detach().double().numpy()
    up = model.bridge.original_model.transformer.h[1].mlp.c_fc.weight.detach().double().numpy()
    x = x + bias + superposed.BIAS * up.T.sum(0)
    pre = torch.from_numpy(x).float() - weights["b_dec"]
    pre = (pre @ weights["W_enc"] + weights["b_enc"]).relu()
    value, index = pre.topk(3, dim=1)
    acts = torch.zeros_like(pre).scatter_(1, index, value).numpy()
    table = result.tables["features"]
    some = table.loc[table["concept"].notna() & (table["density"] > 0.01), :].head(12)
    assert len(some) == 12
    for row in some.to_dict("records"):
        label = superposed.strengths()[held, int(row["concept"].split()[1])] > 0
        area = roc_auc_score(label, row["concept_sign"] * acts[:, row["feature"]])
        assert row["concept_auroc"] == pytest.approx(area, abs=0.01)


def test_other_seed(planted):
    _, result = planted
    table, features = result.tables["matches"], result.tables["features"].set_index("feature")
    own, other = (
        load_weights(result.files[f"{name}/sae_weights.safetensors"])["W_dec"].double().numpy()
        for name in ("sae", "sae-seed-1")
    )
    matched = table.loc[table["matched_feature"] >= 0, :]
    assert len(matched) == result.summary["match_matched"]
    for row in matched.head(40).to_dict("records"):
        a, b = own[row["feature"]], other[row["matched_feature"]]
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert row["matched_cosine"] == pytest.approx(cosine, abs=1e-6)
        assert features.loc[row["feature"], "matched_cosine"] == row["matched_cosine"]
    assert set(table["feature"]) == set(features.index[features["fires"]])
    assert result.summary["match_seeds"] == 1
    # Planted features come back; random directions do not.
    assert result.summary["match_returning_first"] > 0.4
    assert result.summary["match_null_returning_first"] < 0.05
    assert table["returns"].mean() == pytest.approx(result.summary["match_returning_first"])


def test_geometry_by_hand(planted):
    _, result = planted
    features = result.tables["features"]
    live = features["fires"].to_numpy()
    W = load_weights(result.files["sae/sae_weights.safetensors"])["W_dec"].double().numpy()[live]
    W /= np.linalg.norm(W, axis=1, keepdims=True)
    squares = np.square(W @ W.T)
    own = features.loc[live, :]
    assert own["interference"].to_numpy() == pytest.approx(squares.sum(1) - 1)
    assert own["dimensionality"].to_numpy() == pytest.approx(1 / squares.sum(1))
    assert features.loc[~live, "dimensionality"].isna().all()
    assert result.summary["n_live"] == live.sum()
    assert result.summary["dimensionality_median"] == pytest.approx(np.median(1 / squares.sum(1)))
    n, rng = len(W), np.random.default_rng(0)
    even = [rng.standard_normal((n, superposed.D_MODEL)) for _ in range(20)]
    even = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in even]
    even = np.mean([np.median(1 / np.square(x @ x.T).sum(1)) for x in even])
    assert result.summary["dimensionality_even"] == pytest.approx(even, rel=0.02)
    np.fill_diagonal(squares, 0)
    kept = own["feature"].to_numpy()
    assert own["nearest_feature"].tolist() == kept[squares.argmax(1)].tolist()


def test_neurons_take_many_features(planted):
    """Each neuron is a random mixture of all features, and so is each rotated one."""
    _, result = planted
    summary = result.summary
    assert summary["neurons"] == superposed.D_MLP == len(result.tables["neurons"])
    assert summary["neurons_median_effective"] > 5
    assert summary["neurons_single_share"] == 0
    assert summary["neurons_median_effective"] == pytest.approx(
        summary["neurons_null_median_effective"], rel=0.3
    )


def test_every_number_has_a_unit(planted):
    _, result = planted
    assert not set(result.summary) - set(result.summary_columns)


def test_it_is_told_with_its_nulls(planted):
    """Every sentence once, with its null beside it; figures; 80 columns in a terminal."""
    _, result = planted
    told = " ".join(findings(result))
    scores = result.tables["concept_scores"].set_index("dictionary")["concept_auroc_all"]
    assert f"to a mean AUROC of {scores['sae']:.3f} [" in told
    for name, words in (
        ("neurons", "MLP neurons"),
        ("random directions", "random directions"),
        ("null model", "SAE features of a model with permuted weights"),
    ):
        assert re.search(rf"{words} {scores[name]:.3f} \([0-9,]+; worse\)", told)
    assert "come back in another seed's SAE" in told
    assert "of a dimension to itself (median D_i), as many random directions" in told
    assert "that of randomly rotated neurons by" in told
    assert "nan" not in told and "None" not in told
    assert {"concepts", "geometry"} <= set(figure_names(result))
    drawn = figure(result, "concepts")
    assert list(drawn.data[0].x) == scores.tolist()
    assert figure(result, "geometry").to_json()
    out = io.StringIO()
    print_result(result, rows=3, console=Console(file=out, width=80, highlight=False))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "How well single directions tell labels" in text
    assert "How well single directions tell labels" in render([result])


OPTIONS = {
    "layer": 1, "width": (2,), "k": 4, "train_tokens": 2000, "train_batch": 100,
    "loss_documents": 2, "top": 3, "progress": False,
}  # fmt: skip


def text_of(model, documents=15):
    return load_text(tiny.corpus(90), model, documents=documents, context=32)


@pytest.fixture(scope="module")
def tiny_model(load):
    return load("gpt2")[0]


def test_interrupted_while_scoring_keeps_what_was_judged(tiny_model, monkeypatch, tmp_path):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(meaning.concept_scores, "score", stop)
    result = superposition(tiny_model, text_of(tiny_model), **OPTIONS)
    assert not result.complete
    assert {"baselines", "features", "contexts", "geometry"} <= set(result.tables)
    assert "concept_scores" not in result.tables
    assert result.summary["loss_delta"] is not None
    result.save(tmp_path / "run")


def test_too_few_documents_for_concepts_is_said(tiny_model):
    result = superposition(tiny_model, text_of(tiny_model, 3), **OPTIONS)
    assert result.complete
    assert any("Concepts are not scored: " in n and "too few" in n for n in result.notices)
    assert any(n.startswith("Neurons are not explained") for n in result.notices)
    assert "geometry" in result.tables


def test_no_concepts(tiny_model):
    result = superposition(tiny_model, text_of(tiny_model), concepts=False, **OPTIONS)
    assert "geometry" in result.tables
    assert not {"concepts", "neurons"} & set(result.tables)


def test_batches_of_any_size_score_the_same(tiny_model):
    one, many = (
        superposition(
            tiny_model, text_of(tiny_model), batch_size=size, **(OPTIONS | {"train_tokens": 500})
        )
        for size in (1, 7)
    )
    for name in ("concept_auroc_all", "auroc"):
        a, b = (r.tables["concept_scores"][name].to_numpy() for r in (one, many))
        assert a == pytest.approx(b, abs=0.02)


# Toy ----------------------------------------------------------------------------------------------


def test_public_names():
    from probes import superposition as by_name
    from probes import toy

    assert by_name is superposition
    assert callable(toy) and toy is probes.toy


def test_toy_command(tmp_path, capsys, monkeypatch, no_network):
    from probes import calibration

    small = calibration.Setting(features=12, d_model=8, active=1, tokens=2000, batch=100)
    monkeypatch.setattr(calibration, "Setting", lambda: small)
    folder = tmp_path / "toy"
    command = ["superposition", "--toy", "--toy-steps", "15", "--no-progress", "--out", str(folder)]
    assert interp_command([*command, "--format", "json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["analyzer"] == "superposition-toy"
    assert out["config"]["steps"] == 15
    assert out["command"] == "interp superposition --toy --toy-steps 15"
    assert out["summary"]["calibration_seeds"] == 3
    assert 0 < out["summary"]["calibration_mmcs"] <= 1
    page = (folder / "report.html").read_text()
    assert "Calibration of the instrument" in page
    assert "12 planted features in 8 dimensions" in page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layer", "3"], "--layer must be left out with --toy"),
        (["--resume"], "--resume must be left out with --toy"),
        (["--model", "gpt2"], "leave their options out"),
        (["--data", "x.txt"], "leave their options out"),
        (["--toy-steps", "5"], "--toy-steps must be 10 or more"),
    ],
)
def test_toy_takes_no_options_of_a_model(options, words, capsys):
    assert interp_command(["superposition", "--toy", *options]) == 2
    assert words in capsys.readouterr().err


def test_toy_in_python():
    with pytest.raises(UsageError, match="left out with --toy"):
        superposition(None, None, toy=True, null_model=True)

"""The whole of `superposition` on tiny and planted models: tables, files, refusals."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_weights

import probes
from interp import load_result
from interp.cli import run as interp_command
from interp.errors import InterpError, UsageError
from interp.model import load_model
from interp.text import load_text
from probes import activations
from probes.run import Run, superposition
from tests import superposed, tiny

OPTIONS = {
    "layer": 1,
    "width": (2,),
    "k": 4,
    "train_tokens": 2000,
    "train_batch": 100,
    "loss_documents": 5,
    "top": 3,
    "checkpoint_every": 0,
    "progress": False,
}


def text_of(model, n=90, documents=15, **options):
    return load_text(tiny.corpus(n), model, documents=documents, context=32, **options)


@pytest.fixture(scope="module")
def tiny_model(load):
    return load("gpt2")[0]


@pytest.fixture(scope="module")
def done(tiny_model):
    options = OPTIONS | {"width": (2, 3), "seeds": 2, "null_model": True}
    return superposition(tiny_model, text_of(tiny_model), **options)


def rows(result):
    return result.tables["baselines"].set_index("dictionary")


def test_public_name():
    assert probes.superposition is superposition


def test_constants_recover_nothing_of_what_they_cost(done):
    found = rows(done)
    assert found.loc["zero", "loss_recovered_zero"] == 0
    assert found.loc["mean", "loss_recovered_mean"] == 0
    assert found.loc["zero", "fvu"] > 1
    assert found.loc["mean", "fvu"] == pytest.approx(1, abs=0.05)  # the training text's mean
    assert found.loc["mean", "l0"] == 0


def test_summary_and_table_agree(done):
    summary, found = done.summary, rows(done)
    for name in ("fvu", "l0", "loss_delta", "loss_delta_low", "loss_recovered_mean", "kl"):
        assert summary[name] == found.loc["sae", name]
    delta = summary["loss_spliced"] - summary["loss_clean"]
    assert summary["loss_delta"] == pytest.approx(delta, abs=1e-9)
    recovered = (summary["loss_zero"] - summary["loss_spliced"]) / (
        summary["loss_zero"] - summary["loss_clean"]
    )
    assert summary["loss_recovered_zero"] == pytest.approx(recovered)
    assert summary["explained_variance"] == 1 - summary["fvu"]
    assert list(found.index[:4]) == ["sae", "sae width 3", "sae seed 1", "null model"]
    assert found.loc["random error", "fvu"] == found.loc["sae", "fvu"]
    assert done.complete


def test_everything_is_recounted_from_the_saved_sae(tiny_model, done, tmp_path):
    """L0, FVU, density, dead features, contexts and their activations, from files and oracle."""
    from sae_lens import SAE

    done.save(tmp_path / "run")
    sae = SAE.load_from_disk(tmp_path / "run" / "sae")
    text = text_of(tiny_model)
    with tiny_model.measuring():
        parts = list(activations.judged(tiny_model, 1, text, text.batches(1)))
    x = torch.cat([p.x for p in parts]).double()
    with torch.no_grad():
        acts = sae.encode(x.float()).numpy()
        hat = sae.decode(torch.from_numpy(acts)).double().numpy()
    x, table = x.numpy(), done.tables["features"]
    assert done.summary["l0"] == pytest.approx((acts > 0).sum(1).mean())
    fvu = np.square(x - hat).sum() / np.square(x - x.mean(0)).sum()
    assert done.summary["fvu"] == pytest.approx(fvu, rel=1e-5)
    assert table["density"].to_numpy() == pytest.approx((acts > 0).mean(0))
    assert done.summary["dead_fraction"] == (~(acts > 0).any(0)).mean()
    assert done.summary["dead_tokens"] == len(x)
    silent = table.loc[~table["fires"], "feature"].tolist()
    assert silent
    assert not set(silent) & set(done.tables["contexts"]["feature"])
    assert done.tables["density"].groupby("dictionary")["features"].sum()["sae"] == len(table)

    index = torch.cat([p.index for p in parts]).numpy()
    position = torch.cat([p.position for p in parts]).numpy()
    sources = {d.index: d for d in text.documents}
    for feature, own in done.tables["contexts"].groupby("feature"):
        best = {d: acts[index == d, feature].max() for d in np.unique(index)}
        wanted = sorted((v for v in best.values() if v > 0), reverse=True)[:3]
        assert own["activation"].to_numpy() == pytest.approx(wanted, rel=1e-4)
        for row in own.to_dict("records"):
            here = (index == row["document"]) & (position == row["position"])
            assert acts[here, feature] == pytest.approx(row["activation"], rel=1e-4)
            whole = sources[row["document"]].text
            shown = row["prefix"] + row["following"]
            assert whole.startswith(shown)
            assert row["prefix"].endswith(row["token"])
            ends = tokens_ends(tiny_model, whole)
            at = (index == row["document"]) & (acts[:, feature] > 0)
            near = [
                (ends[p - 1] if p else 0, ends[p], acts[at & (position == p), feature][0])
                for p in position[at]
                if row["position"] - 24 <= p <= row["position"] + 8
            ]
            found = list(
                zip(row["active_from"], row["active_to"], row["active_value"], strict=True)
            )
            assert np.array(found) == pytest.approx(np.array(near), rel=1e-4)


def tokens_ends(model, text):
    return [end for _, end in model.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]]


def test_nearest_neurons_and_promoted_tokens(tiny_model, done):
    decoder = load_weights(done.files["sae/sae_weights.safetensors"])["W_dec"].double().numpy()
    values = tiny_model.bridge.original_model.transformer.h[1].mlp.c_proj.weight.detach()
    values = values.double().numpy()
    cosine = decoder @ values.T
    cosine /= np.linalg.norm(decoder, axis=1)[:, None] * np.linalg.norm(values, axis=1)
    table = done.tables["features"]
    best = np.abs(cosine).argmax(1)
    assert table["nearest_neuron"].tolist() == best.tolist()
    assert table["nearest_neuron_cosine"].to_numpy() == pytest.approx(
        cosine[np.arange(len(best)), best], abs=1e-4
    )


def test_files_and_saved_run(done, tmp_path):
    folder = done.save(tmp_path / "run")
    again = load_result(folder)
    assert (folder / "sae-width-3" / "cfg.json").is_file()
    assert not (folder / "null-model").exists()
    assert again.to_json() == done.to_json()
    copy = again.save(tmp_path / "copy")
    kept = "sae/sae_weights.safetensors"
    assert (copy / kept).read_bytes() == done.files[kept]
    (folder / kept).unlink()
    with pytest.raises(InterpError, match="damaged"):
        load_result(folder)


def test_batch_size_changes_nothing_but_rounding(tiny_model):
    options = OPTIONS | {"train_tokens": 500}
    one, many = (
        superposition(tiny_model, text_of(tiny_model), batch_size=size, **options)
        for size in (1, 7)
    )
    numbers = ["l0", "fvu", "loss_delta", "dead_fraction", "cosine"]
    assert [one.summary[n] for n in numbers] == pytest.approx(
        [many.summary[n] for n in numbers], abs=2e-3
    )


def test_judged_documents_are_not_trained_on(tiny_model):
    run = Run(
        tiny_model,
        text_of(tiny_model),
        probes.run.with_options(
            probes.run.SuperpositionConfig, None, OPTIONS | {"train_tokens": 10**6}
        ),
    )
    trained = {tuple(w.tolist()) for w in run.fitting.windows.ids}
    judged = {tuple(w) for d in run.text.documents for w in d.windows}
    assert not trained & judged
    assert run.fitting.windows.documents == 75
    assert any("of --train-tokens 1,000,000" in n for n in run.notices)
    # Chunked, not cut: every token of the other documents is there once.
    others = [
        t for i, t in enumerate(tiny.corpus(90)) if i not in {d.index for d in run.text.documents}
    ]
    whole = sum(len(ids) for ids in tiny_model.tokenizer(others)["input_ids"])
    lost = whole - sum(len(w) for w in run.fitting.windows.ids)
    assert 0 <= lost <= len(others)  # a last window of one token is dropped


# A cache, an interruption -------------------------------------------------------------------------


def test_cache_spares_the_model_and_changes_no_weight(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "BLOCK_TOKENS", 500)
    straight = superposition(tiny_model, text_of(tiny_model), **OPTIONS)
    cached = OPTIONS | {"activations_cache": tmp_path / "cache"}
    first = superposition(tiny_model, text_of(tiny_model), **cached)
    assert first.files == straight.files
    assert any("--activations-cache: " in n and "MB" in n for n in first.notices)
    asked = []
    original = activations.Stream.pieces

    def watch(self, start, stop, rows):
        asked.append((start, stop))
        return original(self, start, stop, rows)

    monkeypatch.setattr(activations.Stream, "pieces", watch)
    second = superposition(tiny_model, text_of(tiny_model), **(cached | {"width": (3,)}))
    assert len(asked) == 1  # the calibration
    assert second.summary["features"] == 3 * 40


def test_a_cache_that_is_too_large_is_refused(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "CACHE_BYTES", 1000)
    with pytest.raises(InterpError, match="fewer --train-tokens"):
        superposition(tiny_model, text_of(tiny_model), activations_cache=tmp_path, **OPTIONS)


def test_ctrl_c_while_splicing_keeps_the_documents_that_are_done(tiny_model, monkeypatch):
    from interp import splice

    score, calls = splice.forward_scores, []

    def interrupt(*args):
        calls.append(0)
        if len(calls) == 25:
            raise KeyboardInterrupt
        return score(*args)

    monkeypatch.setattr(splice, "forward_scores", interrupt)
    result = superposition(tiny_model, text_of(tiny_model), batch_size=1, **OPTIONS)
    assert not result.complete
    assert 0 < result.summary["loss_documents"] < 5
    assert result.summary["loss_delta"] is not None


# A loaded SAE -------------------------------------------------------------------------------------


def test_loaded_sae_gives_the_same_numbers(tiny_model, done, tmp_path):
    done.save(tmp_path / "run")
    options = {"layer": 1, "loss_documents": 5, "top": 3, "progress": False}
    for folder in ("run", "run/sae"):
        again = superposition(
            tiny_model, text_of(tiny_model), sae=str(tmp_path / folder), train_tokens=2000,
            train_batch=100, **options,
        )  # fmt: skip
        for name in ("fvu", "l0", "loss_delta", "dead_fraction", "shrinkage"):
            assert again.summary[name] == pytest.approx(done.summary[name], rel=1e-9), name
        assert again.summary["train_tokens"] is None
        assert "random dictionary" not in set(again.tables["baselines"]["dictionary"])
    with pytest.raises(UsageError, match=r"is of blocks\.1\.hook_mlp_out"):
        superposition(tiny_model, text_of(tiny_model), sae=str(tmp_path / "run"), layer=0)


@pytest.mark.parametrize(
    ("named", "words"), [("nowhere", "no RELEASE/ID"), (".", "holds no SAE"), ("a/b", "loaded")]
)
def test_an_sae_that_is_not_there(tiny_model, named, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterpError, match=words):
        superposition(tiny_model, text_of(tiny_model), sae=named, progress=False, layer=1)


@pytest.mark.hub
def test_a_published_sae_has_its_published_numbers():
    """gpt2-small-mlp-tm, layer 6: L0 40 and explained variance 0.508 in SAELens' registry."""
    try:
        model = load_model("gpt2", device="cpu")
        text = load_text("news", model, documents=100, context=128, bos=True)
        result = superposition(
            model, text, layer=6, sae="gpt2-small-mlp-tm/blocks.6.hook_mlp_out", progress=False
        )
    except InterpError as error:
        pytest.skip(str(error))
    assert result.summary["l0"] == pytest.approx(40, rel=0.25)
    assert result.summary["explained_variance"] == pytest.approx(0.508, abs=0.1)


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": 9}, "layers 0 to 2"),
        ({"k": 81}, "more than the 80 features"),
        ({"k": 0}, "--k must be 1 or more"),
        ({"width": (8, 8)}, "8 is given more than once"),
        ({"lr": 0.0}, "--lr must be above 0"),
        ({"arch": "relu"}, "topk or batchtopk"),
        ({"widht": (8,)}, "did you mean 'width'"),
    ],
)
def test_refusals(tiny_model, options, words):
    with pytest.raises(UsageError, match=words):
        superposition(tiny_model, text_of(tiny_model), **(OPTIONS | options))


def test_options_without_effect_are_said(tiny_model, done, tmp_path):
    from interp.config import SuperpositionConfig

    def notices(**options):
        run = Run(tiny_model, text_of(tiny_model), SuperpositionConfig(layer=1, **options))
        return [n for n in run.notices if "changes nothing" in n]

    assert notices() == []
    assert notices(sparsity=2.0) == [
        "--sparsity changes nothing here: --arch topk has no such thing."
    ]
    assert notices(arch="gated", sparsity=2.0) == []
    assert notices(arch="gated", k=3) == [
        "--k changes nothing here: --arch gated has no such thing."
    ]
    assert notices(sae=str(done.save(tmp_path / "run")), width=(2,)) == [
        "--width changes nothing here: an SAE is loaded, not trained."
    ]


def test_hardly_sparse_is_said(tiny_model, done):
    options = OPTIONS | {"arch": "standard", "sparsity": 0.0, "k": 32, "loss_documents": 0}
    result = superposition(tiny_model, text_of(tiny_model), **options)
    assert result.summary["l0"] > 20
    assert any("hardly sparse" in n for n in result.notices)
    assert "loss_delta" not in result.summary
    assert not any("hardly sparse" in n for n in done.notices)


def test_nothing_left_to_train_on(tiny_model):
    with pytest.raises(InterpError, match="left to train on"):
        superposition(tiny_model, text_of(tiny_model, 20, 20), **OPTIONS)


def test_command(checkpoint, tmp_path, capsys):
    data = tmp_path / "text.txt"
    data.write_text("\n\n".join(tiny.corpus(60)))
    options = "--layer 1 --width 2 --k 4 --train-batch 50 --train-tokens 300 --loss-documents 2"
    command = [
        *("superposition", "--model", str(checkpoint("gpt2")), "--data", str(data)),
        *options.split(),
        *("--documents", "8", "--context", "32", "--no-progress", "--out", str(tmp_path / "r")),
    ]
    assert interp_command([*command, "--format", "json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["analyzer"] == "superposition"
    assert set(out["files"]) == {"sae/cfg.json", "sae/sae_weights.safetensors"}
    assert not (tmp_path / "r.partial").exists()
    assert interp_command([*command, "--resume"]) == 1
    assert "complete run" in capsys.readouterr().err
    page = (tmp_path / "r" / "report.html").read_text()
    assert "Browse the features" in page


def test_resume_without_a_run(checkpoint, tmp_path, capsys):
    shared = ["superposition", "--model", str(checkpoint("gpt2")), "--resume"]
    assert interp_command([*shared, "--out", str(tmp_path / "none")]) == 1
    assert interp_command(shared) == 2
    said = capsys.readouterr().err
    assert "no run to take up" in said
    assert "--resume needs --out" in said


# A planted model ----------------------------------------------------------------------------------


def test_planted_features_are_found(tmp_path):
    """Margins stated in advance: see the assertions; all numbers are of held-out documents."""
    model = load_model(superposed.make(tmp_path / "model"), device="cpu")
    text = load_text(superposed.texts(400), model, documents=30, context=64)
    result = superposition(
        model, text, layer=1, width=(4,), k=3, train_tokens=20_000, train_batch=64, lr=3e-3,
        null_model=True, loss_documents=10, progress=False,
    )  # fmt: skip
    found = rows(result)
    own = found.loc["sae", "fvu_high"]
    assert own < 0.4
    for other in ("neurons", "pca", "pca per position", "random dictionary", "null model"):
        assert own < found.loc[other, "fvu_low"] - 0.2, other
    decoder = load_weights(result.files["sae/sae_weights.safetensors"])["W_dec"].double().numpy()
    table = result.tables["features"]
    live = decoder[table["fires"].to_numpy()]
    best = (superposed.directions() @ live.T).max(1)
    assert np.mean(best) > 0.9
    rng = np.random.default_rng(0)
    chance = rng.standard_normal(live.shape)
    chance /= np.linalg.norm(chance, axis=1, keepdims=True)
    assert (superposed.directions() @ chance.T).max(1).mean() < 0.6

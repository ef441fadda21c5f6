"""The model and text that come with interp, end to end: what a first run without a hub does."""

import json
from pathlib import Path

import numpy as np
import pytest

from interp import assets, cli, dequantise, names, splice
from interp.analyzers.heads import curve
from interp.errors import InterpError
from interp.model import load_model
from interp.results import load_result
from interp.text import load_text
from tests import oracle

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def model():
    """The embedded model, fetched and dequantised at most once per machine."""
    try:
        for name in assets.ASSETS:
            assets.fetch(name)
    except InterpError as error:
        pytest.skip(f"the embedded model and text cannot be had here: {error}")
    return load_model(names.EMBEDDED, device="cpu")


@pytest.fixture(scope="module")
def plain(model):
    """Plain transformers on the dequantised copy in the cache."""
    folder, _ = dequantise.folder_of(assets.fetch(names.EMBEDDED))
    assert Path(folder).parent == assets.cache_dir() / "models"
    return oracle.load(folder)


def test_facts(model):
    facts = {
        "family": "llama",
        "n_layers": 30,
        "n_heads": 9,
        "n_kv_heads": 3,
        "d_model": 576,
        "d_head": 64,
        "d_mlp": 1536,
        "gated": True,
        "parallel": False,
        "rotary_fraction": 1.0,
        "norm": "RMS",
        "tied": True,
        "vocab_size": 49152,
        "vocab_rows": 49152,
        "n_ctx": 8192,
        "removed": (),
    }
    assert vars(model.cfg) == facts
    assert model.describe()["source"] == names.EMBEDDED_SOURCE
    assert model.notices == ["smollm2-135m is instruct-tuned, with 4-bit weights dequantised."]


def test_the_first_command(model, plain, tmp_path, monkeypatch, capsys):
    """`interp heads --prune` where no model is named, gpt2 is not cached and no hub answers."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(curve, "RANDOM_SEEDS", 1)  # five of them are half of the time
    monkeypatch.chdir(tmp_path)
    words = "heads --prune --unit kv --documents 4 --context 32 --no-progress --out r"
    assert cli.run(words.split()) == 0
    out, err = capsys.readouterr()
    told = "using the embedded smollm2-135m (instruct-tuned, 4-bit weights dequantised)"
    assert err.count(told) == 1
    assert "saved in r" in err
    result = load_result("r")
    assert sum(told in notice for notice in result.notices) == 1
    assert result.model["name"] == "smollm2-135m"
    assert result.model["source"] == names.EMBEDDED_SOURCE
    assert (result.data["bos"], result.data["bos_id"]) == (True, 0)
    assert len(result.tables["heads"]) == 270
    assert json.loads(Path("r/result.json").read_text())["complete"] is True
    assert all(part in out for part in ("smollm2-135m", "4 documents"))

    text = load_text("news", model, documents=4, context=32)
    assert text.sha256 == result.data["sha256"]
    ids = [d.windows[0] for d in text.documents]
    assert all(row[0] == 0 and len(row) == 32 for row in ids)
    expected = oracle.document_losses(plain, ids)
    # float32 log_softmax over 49,152 words: 1.5e-5 from float64 on some CPUs, the same in all runs.
    assert abs(result.summary["baseline_loss"] - expected.mean()) < 3e-5
    (batch,) = text.batches(4)
    with model.measuring():
        losses = splice.forward_scores(model, batch).loss.numpy() / 31
    np.testing.assert_allclose(losses, expected, atol=3e-5)
    everything = result.tables["prune"].query("order == 'importance' and fraction == 1.0")
    gone = oracle.ablated_losses(plain, ids, oracle.heads_of(plain)).mean()
    assert abs(everything["loss"].item() - gone) < 1e-4


def test_bos_is_the_one_with_the_lowest_loss(model, plain):
    """`<|endoftext|>` against no BOS and against the `<|im_start|>` that the checkpoint names."""
    assert model.tokenizer.convert_ids_to_tokens([0, 1]) == ["<|endoftext|>", "<|im_start|>"]
    assert model.tokenizer.bos_token_id == 1
    text = load_text("news", model, documents=8, context=33, bos=False)
    bodies = [d.windows[0] for d in text.documents]
    assert all(len(body) == 33 for body in bodies)
    # The loss of the same 32 tokens each time: all but the body's first, which needs a BOS.
    losses = {}
    for name, start in (("none", []), ("endoftext", [0]), ("im_start", [1])):
        rows = [start + body for body in bodies]
        by_token = [oracle.token_losses(plain, row)[len(start) :] for row in rows]
        losses[name] = float(np.mean(by_token))
    assert losses["endoftext"] < losses["none"] - 0.05
    assert losses["endoftext"] < losses["im_start"] - 0.05

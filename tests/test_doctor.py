"""interp doctor: healthy models pass, what loading refuses is named, and the installation."""

import json
import shutil

import numpy as np
import pytest
import torch

import interp
import interp.config
from interp import cli, hooks, pruned, pruning, scores
from interp.doctor import arithmetic, examination, installation, outcome, specimens
from interp.doctor.case import gap, gap_by_dimension
from interp.doctor.outcome import Check, Measured, NotApplicableError
from interp.errors import CheckError, InterpError, UsageError
from interp.model import load_model
from tests import oracle, tiny
from tests.faults import ALL
from tests.loading import put_weights, weights_of
from tests.test_dequantise import write_gguf

NAMES = [check.name for check in examination.CHECKS]


# Healthy models


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_healthy_model_passes(load, family):
    model, _ = load(family)
    report = interp.examine(model)
    assert report.failures() == []
    assert report.passed
    assert [o.check for o in report.outcomes] == NAMES
    missing = [(o.check, o.note) for o in report.outcomes if o.verdict == "not applicable"]
    assert missing == [
        ("GGUF tensors", "the checkpoint is no GGUF file"),
        ("GPU as CPU", "there is no GPU here"),
    ]
    for o in report.outcomes:
        if o.verdict == "PASS":
            assert o.error <= o.tolerance
        if o.unit == "relative" and o.error is not None:
            assert o.error < o.tolerance / 10  # not by a hair's breadth


def test_an_examination_leaves_the_model_as_it_was(load):
    model, _ = load("llama")
    ids = torch.tensor([[1, 7, 8, 9]])
    with model.measuring():
        before = model.bridge(ids).clone()
    wanted = [p.requires_grad for p in model.bridge.parameters()]
    assert hooks.left_on(model) == []
    interp.examine(model)
    assert hooks.left_on(model) == []
    assert [p.requires_grad for p in model.bridge.parameters()] == wanted
    with model.measuring():
        assert torch.equal(model.bridge(ids), before)


def test_two_examinations_agree(load):
    model, _ = load("gpt2")
    first, second = (interp.examine(model).to_json() for _ in range(2))
    assert first["checks"] == second["checks"]


def test_only_a_model_is_examined():
    with pytest.raises(UsageError, match="load_model"):
        interp.examine("gpt2")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(checkpoint, dtype):
    report = interp.examine(load_model(checkpoint("llama"), device="cpu", dtype=dtype))
    assert report.failures() == []
    reasons = {o.check: o.note for o in report.outcomes if o.verdict == "not applicable"}
    assert "16-bit" in reasons["written-out arithmetic"]
    assert "float32" in reasons["gradient importance"]


def test_without_a_tokenizer(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gpt2"), tmp_path / "m")
    for file in folder.glob("*token*"):
        file.unlink()
    report = interp.examine(load_model(folder, device="cpu"))
    assert report.failures() == []
    reasons = {o.check: o.note for o in report.outcomes if o.verdict == "not applicable"}
    assert reasons["BOS policy"] == "this model has no tokenizer"
    assert "KV mapping" not in reasons  # on made-up ids


@pytest.mark.parametrize("family", ALL)
def test_a_checkpoint_without_some_heads(tmp_path, family):
    small = tiny.make_model(family)
    gone = [(0, 0), (0, 1), (0, 2), *((2, h) for h in range(small.config.num_attention_heads))]
    pruned.cut(small, pruning.plan(small.config, gone))
    small.save_pretrained(tmp_path / "m")
    tiny.make_tokenizer(family).save_pretrained(tmp_path / "m")
    report = interp.examine(load_model(tmp_path / "m", device="cpu"))
    assert report.failures() == []
    assert sum(o.verdict == "PASS" for o in report.outcomes) == len(NAMES) - 2


def test_a_family_whose_arithmetic_is_not_written_out(tmp_path):
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    )
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    tiny.make_tokenizer("gpt2").save_pretrained(tmp_path / "opt")
    report = interp.examine(load_model(tmp_path / "opt", device="cpu"))
    by_name = {o.check: o for o in report.outcomes}
    assert "opt is not written out" in by_name["KV mapping"].note
    assert by_name["logits"].verdict == by_name["hooks leave"].verdict == "PASS"
    assert report.failures() == []
    # Here the bridge shows the pattern in place of the scores, which nobody may take for scores.
    with pytest.raises(InterpError, match="after the softmax"):
        scores.form(load_model(tmp_path / "opt", device="cpu"))


# What a check says


def test_a_check_that_raises_is_a_failure():
    def broken(_):
        raise KeyError("nothing\nhere")

    found = outcome.judged("m", Check("c", "count", "", broken), None)
    assert (found.verdict, found.error) == ("FAIL", None)
    assert found.note == "KeyError: 'nothing\\nhere'"
    nan = outcome.judged("m", Check("c", "count", "", lambda _: Measured(float("nan"), 1)), None)
    assert nan.verdict == "FAIL"

    def absent(_):
        raise NotApplicableError("none here")

    found = outcome.judged("m", Check("c", "count", "", absent), None)
    assert (found.verdict, found.note) == ("not applicable", "none here")


# The oracle against plain transformers


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in tiny.FAMILIES),
        ("gpt2", {"activation_function": "relu", "scale_attn_weights": False}),
        ("neox", {"rotary_pct": 1.0, "rotary_emb_base": 500}),
        ("neox", {"attention_bias": False, "hidden_act": "gelu_new"}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
        ),
        (
            "llama",
            {
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
        ),
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    ],
)
def test_the_written_out_forward_pass(tmp_path, family, overrides):
    tiny.make_checkpoint(family, tmp_path, **overrides)
    plain = oracle.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    documents = [[5, 9, 17, 4, 250, 3, 3, 8], [7, 6], list(range(20, 52))]
    assert arithmetic.unsupported(config, 32) is None
    made = arithmetic.Arithmetic(config, plain.state_dict()).logits(documents)
    exact = oracle.double(plain)
    for ids, seen in zip(documents, made, strict=True):
        expected = oracle.logits(exact, ids).numpy()
        assert np.abs(seen - expected).max() < 1e-5  # transformers' rotation is float32


def test_what_is_not_written_out():
    llama = {"model_type": "llama", "hidden_act": "silu"}
    cases = [
        ({"model_type": "gemma2"}, "gemma2"),
        (llama | {"rope_scaling": {"type": "yarn"}}, "yarn"),
        (llama | {"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
        (llama | {"hidden_act": "xielu"}, "xielu"),
        ({"model_type": "mistral", "hidden_act": "silu", "sliding_window": 8}, "sliding window"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "inverse_layer"),
    ]
    for config, word in cases:
        assert word in arithmetic.unsupported(config, 20)
    assert arithmetic.unsupported(llama, 20) is None


def test_gap():
    a = np.array([[3.0, 4.0], [0.0, 1e-6]])
    assert gap(a, a) == 0
    assert gap(a + np.array([[0, 0.4], [0, 0]]), a) == pytest.approx(0.1)
    # 1e-6 counts as a thousandth of 4
    assert gap(a + np.array([[0, 0], [0, 4e-6]]), a) == pytest.approx(1e-3)
    assert gap(np.full((1, 2), np.nan), np.ones((1, 2))) != 0
    with pytest.raises(InterpError, match="shape"):
        gap(a, a[:1])


def test_gap_by_dimension():
    a = np.array([[1000.0, 2.0, -1.0, 1e-9], [-500.0, 1.0, 0.5, 0.0]])
    assert gap_by_dimension(a, a) == (0.0, 0)
    off = np.array([[0, 0, 0, 0], [0, 0, 0.1, 0]])
    assert gap_by_dimension(a + off, a) == (pytest.approx(0.1), 2)  # 0.1 of 1, though 1000 is there
    assert gap(a + off, a) < 1e-3
    assert gap_by_dimension(a - [0, 0, 0, 3e-6], a) == (pytest.approx(2e-3), 3)  # of 1.5 / 1000
    # What cancels is relative to what it is made of.
    assert gap_by_dimension(a + off, a, [a, 10 * a]) == (pytest.approx(0.01), 2)
    assert np.isnan(gap_by_dimension(a * [1, 1, np.nan, 1], a)[0])
    with pytest.raises(InterpError, match="shape"):
        gap_by_dimension(a, a[:1])


# GGUF files


def test_a_gguf_file(tmp_path, cache):
    from gguf import GGMLQuantizationType

    path = tmp_path / "tiny.gguf"
    write_gguf(path, GGMLQuantizationType.Q8_0)
    report = interp.examine(load_model(path, device="cpu"))
    assert report.failures() == []
    (row,) = [o for o in report.outcomes if o.check == "GGUF tensors"]
    assert (row.verdict, row.error) == ("PASS", 0.0)
    # The copy in the cache, damaged in a way that is whole and finite.
    (folder,) = (cache / "models").iterdir()
    weights = weights_of(folder)
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = weights[name].roll(1, 0)
    put_weights(folder, weights)
    failures = interp.examine(load_model(path, device="cpu")).failures()
    assert [(o.check, o.note[:19]) for o in failures] == [("GGUF tensors", "blk.0.attn_k.weight")]


# Loading


def bridge_without_scale(monkeypatch):
    """TransformerBridge wrong from the start: what load_model refuses."""
    from transformer_lens.model_bridge.generalized_components import attention

    before = attention.AttentionBridge._apply_reconstruct_attention_mask

    def masked(self, attn_scores, **kwargs):
        return before(self, attn_scores=4 * attn_scores, **kwargs)

    name = "_apply_reconstruct_attention_mask"
    monkeypatch.setattr(attention.AttentionBridge, name, masked)


@pytest.fixture
def doctor(capsys, monkeypatch, tmp_path):
    """Run `interp doctor` in an empty folder: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        status = cli.run(["doctor", *map(str, arguments)])
        return status, *capsys.readouterr()

    return call


def examined(doctor, *arguments):
    """The same as JSON: (status, failed checks, name -> row)."""
    status, out, _ = doctor(*arguments, "--format", "json")
    rows = json.loads(out)["checks"]
    return (
        status,
        [r["check"] for r in rows if r["verdict"] == "FAIL"],
        {r["check"]: r for r in rows},
    )


@pytest.mark.parametrize("family", ALL)
def test_a_refusal_at_load_is_told_apart_further(doctor, checkpoint, monkeypatch, family):
    bridge_without_scale(monkeypatch)
    with pytest.raises(CheckError, match="differ from plain") as caught:
        load_model(checkpoint(family), device="cpu")
    assert caught.value.check == "logits"
    status, failed, rows = examined(doctor, "--model", checkpoint(family))
    assert status == 1
    assert failed[0] == "attention scores"
    assert "4 times" in rows["attention scores"]["note"]
    assert "logits" in failed


@pytest.mark.parametrize("family", ALL)
def test_a_nan_in_the_checkpoint(doctor, checkpoint, tmp_path, family):
    folder = shutil.copytree(checkpoint(family), tmp_path / "m")
    weights = weights_of(folder)
    name = next(n for n in weights if ".1." in n and "norm" not in n and weights[n].ndim == 2)
    weights[name][3, 1] = float("nan")
    put_weights(folder, weights)
    status, failed, rows = examined(doctor, "--model", folder)
    assert (status, failed[0]) == (1, "finite weights")
    assert rows["finite weights"]["note"] == f"in the checkpoint, first {name}[3, 1]"
    assert rows["finite weights"]["error"] == 1
    assert "finite activations" in failed


def test_every_refusal_names_a_check(checkpoint, tmp_path, monkeypatch):
    """What probe refuses without anything being wrong elsewhere is still a failure."""
    found = [outcome.judged("m", Check(n, "count", "", lambda _: Measured(0)), None) for n in NAMES]
    for name in ("logits", "finite activations", "head contributions"):
        assert name in NAMES
        told = outcome.refused(found, [(name, "why")])
        assert [o.check for o in told if o.verdict == "FAIL"] == [name]
        assert [o.note for o in told if o.verdict == "FAIL"] == ["why"]


def test_a_checkpoint_that_does_not_load(doctor, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gpt2"), tmp_path / "m")
    weights = weights_of(folder)
    del weights["transformer.h.1.attn.c_attn.weight"]
    put_weights(folder, weights)
    status, failed, rows = examined(doctor, "--model", folder)
    assert (status, failed) == (1, ["loading"])
    assert "lacks transformer.h.1.attn.c_attn.weight" in rows["loading"]["note"]
    assert rows["logits"]["verdict"] == "not applicable"
    assert rows["logits"]["note"] == "the model did not load"
    assert list(rows) == ["loading", *NAMES]


# The command


def test_the_command_on_a_healthy_model(doctor, checkpoint):
    status, out, err = doctor("--model", checkpoint("llama"))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.rstrip().endswith("PASS")]) == 40
    assert "GPU as CPU: not applicable. there is no GPU here" in out
    assert lines[-1] == "42 checks: 40 passed, 0 failed, 2 not applicable."
    assert "Look first" not in out


def test_the_command_on_a_broken_model(doctor, checkpoint, monkeypatch):
    bridge_without_scale(monkeypatch)
    status, out, err = doctor("--model", checkpoint("neox"))
    assert (status, err) == (1, "")
    assert "Look first at: attention scores (neox)." in " ".join(out.split())
    assert "Traceback" not in out


def test_json(doctor, checkpoint):
    status, out, err = doctor("--model", checkpoint("gpt2"), "--format", "json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    assert found["passed"] is True
    assert found["command"] == "doctor"
    assert found["model"]["name"] == "gpt2"
    assert found["environment"]["torch"] == torch.__version__
    keys = {"subject", "check", "verdict", "error", "tolerance", "unit", "note", "meaning"}
    assert all(set(row) == keys for row in found["checks"])


def test_a_model_that_is_not_there_is_an_error_and_no_table(doctor):
    status, out, err = doctor("--model", "gtp2")
    assert (status, out) == (1, "")
    assert "Did you mean 'gpt2'" in err
    assert doctor("--model", ".", "--dtype", "int8")[0] == 2
    assert doctor("--documents", "3")[0] == 2
    status, _, err = doctor("--revision", "main")
    assert status == 2
    assert "--model" in err


# The installation


@pytest.fixture(scope="module")
def healthy():
    return installation.examine_installation(interp.config.DoctorOptions(offline=True))


def test_a_healthy_installation(healthy):
    assert healthy.failures() == []
    subjects = list(dict.fromkeys(o.subject for o in healthy.outcomes))
    assert subjects == ["installation", *(f"tiny {name}" for name in specimens.SPECIMENS)]
    for subject in subjects[1:]:
        names = [o.check for o in healthy.outcomes if o.subject == subject]
        assert names == ["loading", *NAMES]
    assert {o.note for o in healthy.outcomes if o.check == "hub"} == {"--offline was given"}


def test_the_installation_as_a_table(doctor, healthy, monkeypatch, no_network):
    monkeypatch.setattr(installation, "examine_installation", lambda *_: healthy)
    status, out, _ = doctor("--offline")
    assert status == 0
    assert "tiny Llama, shared keys: 42 checks: 40 passed, 0 failed, 2 not applicable." in out


def installed(name, **options):
    """One check of the installation."""
    check = next(c for c in installation.CHECKS if c.name == name)
    return outcome.judged("i", check, interp.config.DoctorOptions(**options))


def test_a_package_outside_the_working_set(monkeypatch):
    assert installed("packages").verdict in ("PASS", "not applicable")
    needs = ["torch<1", "numpy>=1", "no-such-package-here>=2", "pytest>=900; extra == 'test'"]
    monkeypatch.setattr(installation.importlib.metadata, "requires", lambda _: needs)
    found = installed("packages")
    assert (found.verdict, found.error) == ("FAIL", 2)
    assert found.note == f"torch {torch.__version__}, torch<1 is needed"


def test_a_torch_that_computes_something_else(monkeypatch):
    assert installed("torch").verdict == "PASS"
    before = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda x, dim: before(x * 1.001, dim))
    assert installed("torch").verdict == "FAIL"


def test_no_device(monkeypatch):
    assert installed("device", device="cpu").verdict == "not applicable"
    if not torch.cuda.is_available():
        assert "is not here" in installed("device", device="cuda:7").note


def test_a_cache_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))
    assert installed("cache folder").verdict == "PASS"
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "file"))
    found = installed("cache folder")
    assert found.verdict == "FAIL"
    assert "INTERP_CACHE" in found.note


def test_a_full_disk(cache, monkeypatch):
    usage = type("Usage", (), {"free": 10**6})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "0.0 GB left" in installed("cache folder").note


def test_no_plotly_js(monkeypatch):
    import plotly.offline

    assert installed("plotly.js").verdict == "PASS"
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "")
    assert installed("plotly.js").verdict == "FAIL"


def test_damaged_assets(cache):
    assert "nothing is fetched yet" in installed("embedded assets").note
    (cache / "assets").mkdir(parents=True)
    (cache / "assets" / "NewsArticles.zip").write_bytes(b"not the news")
    found = installed("embedded assets")
    assert (found.verdict, found.error) == ("FAIL", 1)
    assert "news damaged" in found.note


def test_the_hub(monkeypatch):
    from interp import hub

    assert "HF_HUB_OFFLINE" in installed("hub").note
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "reachable", lambda: False)
    assert installed("hub").verdict == "not applicable"
    monkeypatch.setattr(hub, "reachable", lambda: True)
    assert installed("hub").verdict == "PASS"


def test_a_specimen_that_cannot_be_made(monkeypatch):
    def broken(*_):
        raise OSError("no space left")

    monkeypatch.setattr(specimens, "make", broken)
    report = installation.examine_installation(interp.config.DoctorOptions(offline=True))
    failed = {(o.subject, o.check, o.note) for o in report.failures()}
    told = "OSError: no space left"
    assert failed == {(f"tiny {name}", "loading", told) for name in specimens.SPECIMENS}

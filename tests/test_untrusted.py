"""What a checkpoint that somebody else made may not do: run code, or reach outside its folder."""

import ast
import hashlib
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import interp
from interp import hub
from interp.errors import InterpError
from interp.model import load_model
from interp.text import load_text
from tests import tiny
from tests.loading import logits_of, put_weights, refused

ROOT = Path(__file__).parents[1]
LOADERS = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (Path(self.file),))


@pytest.fixture
def copy(checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    return folder


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_bomb_works(tmp_path):
    """The next tests prove nothing without it."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "gone off")))
    assert (tmp_path / "gone off").exists()


def test_a_pickle_is_never_opened(copy, tmp_path):
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth"):
        (copy / name).write_bytes(pickle.dumps(Bomb(tmp_path / "gone off")))
    load_model(copy, device="cpu")  # the safetensors beside them are what counts
    (copy / "model.safetensors").unlink()
    refused("pickle", "--allow-pickle", folder=copy)
    # Asked for, torch still reads tensors only.
    refused("cannot be loaded", folder=copy, allow_pickle=True)
    assert not (tmp_path / "gone off").exists()


def test_code_of_the_checkpoint_is_not_run(copy, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked to run it"))
    mark = tmp_path / "gone off"
    code = f"open({str(mark)!r}, 'w').close()\nclass Any: pass\nOurConfig = OurModel = Ours = Any\n"
    (copy / "ours.py").write_text(code)
    named = {"AutoConfig": "ours.OurConfig", "AutoModelForCausalLM": "ours.OurModel"}
    edit(copy / "config.json", auto_map=named)
    edit(copy / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "ours.Ours"]})
    load_model(copy, device="cpu")  # transformers' own class of that kind
    edit(copy / "config.json", model_type="ours")
    refused("needs Python code", "--trust-remote-code", folder=copy)
    assert not mark.exists()


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OursConfig(LlamaConfig):
    model_type = "ours"

class OursForCausalLM(LlamaForCausalLM):
    config_class = OursConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * FACTOR
        return out
"""


@pytest.fixture(scope="module")
def _modules(tmp_path_factory):
    """Where transformers copies such code to import it."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("modules")
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", [*sys.path])
        yield


@pytest.fixture
def foreign(copy, _modules):
    """foreign(factor): a Llama whose own Python code multiplies logits by a factor."""

    def make(factor=1.0, code=CODE):
        (copy / "ours.py").write_text(code.replace("FACTOR", str(factor)))
        named = {"AutoConfig": "ours.OursConfig", "AutoModelForCausalLM": "ours.OursForCausalLM"}
        edit(copy / "config.json", auto_map=named, model_type="ours")
        return copy

    return make


def test_code_that_is_trusted_runs_and_is_told(foreign, load):
    known, _ = load("llama")
    model = load_model(foreign(), device="cpu", trust_remote_code=True)
    assert type(model.bridge.original_model).__name__ == "OursForCausalLM"
    assert (model.cfg.family, model.cfg.n_kv_heads) == ("ours", 2)
    ids = [1, 9, 30, 4]
    assert torch.equal(logits_of(model, ids), logits_of(known, ids))
    assert known.fuses and not model.fuses  # nobody vouches for what it inherits
    (told,) = [n for n in model.notices if "Python code" in n]
    assert "ran (ours.OursConfig, ours.OursForCausalLM)" in told
    digest = hashlib.sha256((model.folder / "ours.py").read_bytes()).hexdigest()
    assert model.describe()["remote_code"] == {"ours.py": digest}
    text = load_text(tiny.corpus(8), model, documents=3, context=16)
    result = interp.heads(model, text, progress=False)
    assert told in result.notices
    assert result.model["remote_code"] == {"ours.py": digest}
    with pytest.raises(InterpError, match=r"came with it \(ours\.py\)"):
        interp.heads(model, text, export=model.folder / "small", heads="0.0")
    report = interp.examine(model)
    assert report.failures() == []
    notes = {o.check: o.note for o in report.outcomes}
    assert "own code" in notes["written-out arithmetic"]


def test_code_that_the_bridge_runs_counts(foreign, load):
    """What the class does around its layers is measured as well."""
    known, _ = load("llama")
    model = load_model(foreign(2.0), device="cpu", trust_remote_code=True)
    assert torch.equal(logits_of(model, [1, 9, 30]), 2 * logits_of(known, [1, 9, 30]))
    assert not model.logits_are_unembedded


OTHER_ATTENTION = """
from transformers.models.llama.modeling_llama import LlamaAttention

class OursAttention(LlamaAttention):
    def forward(self, *args, **kwargs):
        out, *rest = super().forward(*args, **kwargs)
        return (out * 0.5, *rest)

class OursForCausalLM(OursForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = OursAttention
"""


def test_what_the_bridge_does_not_compute_is_refused(foreign):
    """It knows a Llama in the class, and makes that Llama's attention."""
    folder = foreign(code=CODE + OTHER_ATTENTION)
    refused("differ from plain", folder=folder, trust_remote_code=True)


def test_a_class_that_the_bridge_does_not_know(foreign):
    lone = """
from transformers import LlamaConfig, PreTrainedModel
from torch import nn

class OursConfig(LlamaConfig):
    model_type = "ours"

class OursForCausalLM(PreTrainedModel):
    config_class = OursConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, 4)
        self.post_init()
"""
    folder = foreign(code=lone)
    weights = {"embedding.weight": torch.zeros(300, 4)}
    put_weights(folder, weights)
    refused("no token embedding", folder=folder, trust_remote_code=True)


def test_code_of_another_repository_is_refused(foreign):
    folder = foreign()
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "them/repo--ours.Ours"})
    refused("another repository", "them/repo", folder=folder, trust_remote_code=True)


def test_code_that_is_not_run_is_told(copy):
    edit(copy / "config.json", auto_map={"AutoModelForCausalLM": "ours.OursForCausalLM"})
    model = load_model(copy, device="cpu")
    assert any("ours.OursForCausalLM" in n and "was not run" in n for n in model.notices)
    assert "remote_code" not in model.describe()


def test_an_adapter_is_not_taken_for_a_model(copy):
    """transformers would load the model that it names, from wherever that is."""
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    refused("adapter_config.json", "merge", folder=copy)


@pytest.mark.parametrize("shard", ["../model.safetensors", "{root}/model.safetensors", "a/b", ".."])
def test_an_index_does_not_lead_out(copy, tmp_path, shard):
    weights = load_file(copy / "model.safetensors")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (copy / "model.safetensors").unlink()
    shard = shard.format(root=tmp_path)
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}
    (copy / hub.INDEX).write_text(json.dumps(index))
    refused(repr(shard), "no file of its own folder", folder=copy)


def test_nothing_of_ours_unpickles():
    """No module that unpickles is imported, and no loader of torch or numpy is told to."""
    for file in sorted([*ROOT.glob("interp/**/*.py"), *ROOT.glob("probes/**/*.py")]):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "torch.save", "eval", "exec"), file
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert given.get("trust_remote_code", "False") != "True", file
                assert called != "np.load" or "allow_pickle" not in given, file
                if called.endswith(".from_pretrained") and called.startswith("Auto"):
                    assert "trust_remote_code" in given, (file, called)
                    assert given["local_files_only"] == "True", (file, called)
                continue
            else:
                continue
            assert not names & LOADERS, (file, names)

"""What a checkpoint that somebody else made may not do: run code, or reach outside its folder."""

import ast
import json
import pickle
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from interp import hub
from interp.model import load_model
from tests.loading import refused

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
    refused("needs Python code", "never runs", folder=copy)
    assert not mark.exists()


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
                assert given.get("trust_remote_code", "False") == "False", file
                assert called != "np.load" or "allow_pickle" not in given, file
                if called.endswith(".from_pretrained") and called.startswith("Auto"):
                    assert given["trust_remote_code"] == "False", (file, called)
                    assert given["local_files_only"] == "True", (file, called)
                continue
            else:
                continue
            assert not names & LOADERS, (file, names)

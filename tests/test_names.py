"""What a model name means: short names, folders, the hub's cache, the hub, and the default."""

import shutil
import types

import pytest
import torch

from interp import hub, names
from interp.errors import InterpError
from interp.model import load_model
from tests import tiny
from tests.loading import logits_of, refused, weights_of


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gtp2", "'gpt2'"),
        ("pythia70m", "'pythia-70m'"),
        ("smollm2-135", "'smollm2-135m'"),
        ("no such thing at all", "Short names: smollm2-135m, gpt2"),
    ],
)
def test_unknown_name(name, hint, no_network):
    assert hint in refused(f"There is no model {name!r}", folder=name)


def test_a_folder_nearby_is_suggested(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    message = refused(folder=str(tmp_path / "chekpoint"))
    assert f"Did you mean '{tmp_path / 'checkpoint'}'" in message


@pytest.mark.parametrize("name", ["", "  ", "x" * 5000, "~nobody_of_that_name/model", "a\0b"])
def test_names_that_cannot_be(name):
    refused(folder=name)


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "model.bin").write_text("x")
    refused("no .gguf file", folder=tmp_path / "model.bin")


def test_revisions_belong_to_hub_models(checkpoint):
    refused("has no revisions", "step1000", folder=checkpoint("gpt2"), revision="step1000")
    refused("has no revisions", folder="smollm2-135m", revision="main")
    refused("has no revisions", folder=None, revision="main")


def in_hub_cache(cache, repo, source, commit, *refs):
    """Put a checkpoint folder into a hub cache, as huggingface_hub lays it out."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    shutil.copytree(source, folder / "snapshots" / commit)
    for ref in refs:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return folder / "snapshots" / commit


@pytest.fixture
def pythia(hub_cache, checkpoint, tmp_path):
    """pythia-70m at two revisions in the hub cache; returns the commits."""
    other_weights = tiny.make_checkpoint("neox", tmp_path / "early", seed=5)
    in_hub_cache(hub_cache, "EleutherAI/pythia-70m", checkpoint("neox"), "a" * 40, "main")
    in_hub_cache(hub_cache, "EleutherAI/pythia-70m", other_weights, "b" * 40, "step1000")
    return "a" * 40, "b" * 40


def test_revisions(pythia, load, no_network):
    main = load_model("pythia-70m", device="cpu")
    early = load_model("pythia-70m", revision="step1000", device="cpu")
    assert (main.revision, early.revision) == pythia
    assert main.source == early.source == "EleutherAI/pythia-70m"
    assert main.name == "pythia-70m"
    assert early.describe()["revision"] == "b" * 40
    expected = logits_of(load("neox")[0], [3, 4])
    assert torch.equal(logits_of(main, [3, 4]), expected)
    assert not torch.allclose(logits_of(early, [3, 4]), expected)
    by_commit = load_model("EleutherAI/pythia-70m", revision="b" * 40, device="cpu")
    assert torch.equal(logits_of(by_commit, [3, 4]), logits_of(early, [3, 4]))


def test_a_revision_that_is_not_there(pythia, no_network):
    message = refused("'step7'", "HF_HUB_OFFLINE", folder="pythia-70m", revision="step7")
    assert "main, step1000" in message


def test_offline_never_asks(pythia, monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: pytest.fail("asked the hub"))
    load_model("pythia-70m", device="cpu", offline=True)
    refused("--offline", folder="pythia-160m", offline=True)
    refused("--offline", folder="pythia-70m", revision="step2", offline=True)


def test_a_download_that_was_cut_short_is_not_used(pythia, hub_cache):
    folder = hub_cache / "models--EleutherAI--pythia-70m/snapshots" / pythia[0]
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    refused("not in the local cache", folder="pythia-70m")


def test_pickles_in_the_hub_cache(pythia, hub_cache):
    folder = hub_cache / "models--EleutherAI--pythia-70m/snapshots" / pythia[0]
    torch.save(weights_of(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused("pickle", "--allow-pickle", folder="pythia-70m")
    load_model("pythia-70m", device="cpu", allow_pickle=True)


def test_gpt2_under_its_owners_name(hub_cache, checkpoint):
    in_hub_cache(hub_cache, "openai-community/gpt2", checkpoint("gpt2"), "c" * 40, "main")
    assert load_model("gpt2", device="cpu").source == "openai-community/gpt2"


# Asking the hub


@pytest.fixture
def fresh_hub(monkeypatch):
    """Nothing asked yet, and asking allowed."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked = hub.reachable
    asked.cache_clear()
    yield
    asked.cache_clear()


def test_a_silent_network_costs_a_moment_once(fresh_hub, monkeypatch):
    import time
    import urllib.request

    asked = []

    def hang(*_args, **_more):
        asked.append(1)
        time.sleep(2)

    monkeypatch.setattr(urllib.request, "urlopen", hang)
    began = time.monotonic()
    assert not hub.reachable(timeout=0.2)
    assert not hub.reachable(timeout=0.2)
    assert time.monotonic() - began < 5
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("status", "answers"), [(200, True), (404, True), (503, False), (407, False)]
)
def test_what_counts_as_an_answer(fresh_hub, monkeypatch, status, answers):
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(hub, "endpoint", lambda: f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        assert hub.reachable() == answers
    finally:
        server.shutdown()
        server.server_close()


def test_an_error_of_the_hub_is_one_line(fresh_hub, hub_cache, monkeypatch):
    from huggingface_hub import HfApi, errors

    monkeypatch.setattr(hub, "reachable", lambda: True)

    def info(error):
        def call(*_args, **_more):
            raise error

        monkeypatch.setattr(HfApi, "model_info", call)

    response = types.SimpleNamespace(headers={}, request=None, status_code=404)
    info(errors.RevisionNotFoundError("404\nmore", response=response))
    refused("has no revision 'step9'", folder="pythia-70m", revision="step9")
    info(errors.RepositoryNotFoundError("404\nmore", response=response))
    refused("no folder 'some/model'", "knows no model", folder="some/model")
    info(errors.GatedRepoError("403\nmore", response=response))
    refused("gated", "hf auth login", folder="some/model")
    info(OSError("first\nsecond"))
    refused("first", folder="some/model")


@pytest.mark.hub
def test_a_revision_from_the_hub():
    if not hub.reachable():
        pytest.skip("no model hub answers here (HF_HUB_OFFLINE is set in the tests)")
    with pytest.raises(InterpError, match="no revision 'step999999'"):
        load_model("pythia-14m", revision="step999999")


# The model that is taken when none is named


@pytest.fixture
def embedded(monkeypatch, checkpoint):
    """The embedded model's place taken by a tiny one."""
    folder = checkpoint("llama")
    monkeypatch.setattr(names.assets, "fetch", lambda name, offline=False: folder)
    return folder


def test_default_is_gpt2_where_it_is_cached(hub_cache, checkpoint, embedded, no_network):
    in_hub_cache(hub_cache, "gpt2", checkpoint("gpt2"), "d" * 40, "main")
    found = names.resolve(None)
    assert (found.name, found.source, found.revision) == ("gpt2", "gpt2", "d" * 40)
    assert found.notices == []
    assert names.resolve(None, offline=True).name == "gpt2"


def test_default_is_the_embedded_model_without_a_hub(hub_cache, embedded, no_network):
    found = names.resolve(None)
    assert found.name == "smollm2-135m"
    assert (found.bos_token_id, found.bos_default) == (0, True)
    (notice,) = found.notices
    assert "no model hub answered" in notice
    assert "embedded smollm2-135m (instruct-tuned, 4-bit weights dequantised)" in notice
    (notice,) = names.resolve(None, offline=True).notices
    assert "--offline" in notice


def test_default_is_fetched_where_the_hub_answers(hub_cache, checkpoint, embedded, monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(hub, "snapshot", lambda repo: (checkpoint("gpt2"), "e" * 40))
    assert names.resolve(None).name == "gpt2"


def test_default_when_the_hub_answers_but_does_not_deliver(hub_cache, embedded, monkeypatch):
    def fail(repo):
        raise InterpError("Fetching 'gpt2' failed: 401.")

    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(hub, "snapshot", fail)
    found = names.resolve(None)
    assert found.name == "smollm2-135m"
    assert "Fetching 'gpt2' failed: 401" in found.notices[0]


def test_default_ignores_a_gpt2_that_it_could_not_load(hub_cache, checkpoint, embedded):
    folder = in_hub_cache(hub_cache, "gpt2", checkpoint("gpt2"), "d" * 40, "main")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert names.resolve(None).name == "smollm2-135m"


def test_a_named_model_is_never_replaced(hub_cache, embedded):
    refused("'gpt2' is not in the local cache", folder="gpt2")


def test_default_where_the_network_is_blocked(fresh_hub, hub_cache, embedded, monkeypatch):
    import socket
    import time

    def refuse(*_args, **_more):
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert hub.PROBE_SECONDS == 3
    began = time.monotonic()
    (notice,) = names.resolve(None).notices
    assert "no model hub answered" in notice
    assert time.monotonic() - began < 3.5

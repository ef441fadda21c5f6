"""Shared by all tests: threads that do not spin, no network, models loaded once."""

import os
import signal
import socket

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a hub call hangs where there is none

from jaxtyping import install_import_hook

install_import_hook(
    [
        "interp.text",
        "interp.reducers",
        "interp.splice",
        "interp.interventions",
        "probes.activations",
        "probes.baselines",
        "probes.judging",
        "probes.reading",
        "probes.splicing",
        "probes.training",
    ],
    "beartype.beartype",
)

import pytest
from hypothesis import settings

from tests import oracle, planted, tiny

# Derandomised: a failure in CI is a failure here.
settings.register_profile("tests", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """family -> folder of a tiny checkpoint in that exact architecture."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = tiny.make_checkpoint(family, tmp_path_factory.mktemp("tiny") / family)
        return made[family]

    return get


@pytest.fixture(scope="session")
def load(checkpoint):
    """family -> (interp model, the oracle's plain transformers model)."""
    from interp.model import load_model

    made = {}

    def get(family):
        if family not in made:
            folder = checkpoint(family)
            made[family] = (load_model(folder, device="cpu"), oracle.load(folder))
        return made[family]

    return get


@pytest.fixture(scope="session")
def plant(tmp_path_factory):
    """name -> (interp model, interp text of its documents, what planted.py says of it)."""
    from interp.model import load_model
    from interp.text import load_text

    made = {}

    def get(name):
        if name not in made:
            case = planted.MAKERS[name](tmp_path_factory.mktemp("planted") / name)
            model = load_model(case["folder"], device="cpu")
            texts = case["texts"]
            text = load_text(texts, model, documents=len(texts), context=64)
            assert [d.windows[0] for d in text.documents] == case["documents"]
            made[name] = (model, text, case)
        return made[name]

    return get


@pytest.fixture(scope="session")
def corpus():
    """Made-up documents of 3 to 60 tokens."""
    return tiny.corpus(8)


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to connect fails the test."""
    attempts = []

    def refuse(self, address):
        attempts.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    yield
    assert not attempts


@pytest.fixture
def heard():
    """Ctrl-C as a terminal's Python has it; the processes of pytest-xdist ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of interp's own."""
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"

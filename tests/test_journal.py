"""Runs that are stopped and taken up: what `journal` saves, and that tables end the same."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from interp import config, interrupts, journal, results
from interp.analyzers.asymmetry import asymmetry
from interp.analyzers.ffn_keys import ffn_keys
from interp.analyzers.heads import heads
from interp.analyzers.qkv import qkv
from interp.config import with_options
from interp.errors import InterpError, UsageError
from interp.model import load_model
from interp.text import load_text
from tests import tiny

DOCUMENTS = tiny.corpus(24)
CASES = {
    "heads": (heads, {"exact": True, "prune": True, "rescore": True, "keep_one": True}),
    "heads, resampled": (heads, {"exact": True, "ablation": "resample", "roles": True}),
    "asymmetry": (asymmetry, {"activations": True, "symmetrise": True}),
    "ffn-keys": (ffn_keys, {"layer": ("all",), "top": 3, "sign": "both", "mutation_keys": 5}),
    "ffn-keys, some": (ffn_keys, {"layer": (1,), "key": (3, 20), "top": 2}),
    "qkv": (qkv, {"each": "mean", "fit_documents": 4}),
}
CASES["heads"][1]["step"] = 0.25


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it, and nothing is saved after it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers of two heads: few enough to be stopped after every one."""
    folder = tmp_path_factory.mktemp("model")
    tiny.make_checkpoint("gpt2", folder, n_layer=2, n_head=2)
    return load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def text(model):
    return load_text(DOCUMENTS, model, documents=4, context=20, windows=True)


def run(case, model, text, **more):
    function, options = CASES[case]
    return function(model, text, progress=False, batch_size=2, **options, **more)


def bytes_of(result, folder):
    """Every table of a saved result, as its file's bytes."""
    result.save(folder, overwrite=True)
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.parquet"))}


def killed_after(monkeypatch, passes, model):
    """The model dies at a forward pass: after that many of them."""
    left = [passes]
    forward = type(model).forward

    def dying(self, batch):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return forward(self, batch)

    monkeypatch.setattr(type(model), "forward", dying)


def passes_of(case, model, text, monkeypatch):
    """(result, number of forward passes) of a run that nobody stops."""
    count = [0]
    forward = type(model).forward

    def counting(self, batch):
        count[0] += 1
        return forward(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", counting)
        return run(case, model, text), count[0]


KILLS = 3


@pytest.mark.parametrize("case", CASES)
def test_killed_and_taken_up(case, model, text, monkeypatch, tmp_path):
    """Stopped dead at random passes, several times over: the bytes of a run that was not."""
    whole, total = passes_of(case, model, text, monkeypatch)
    expected = bytes_of(whole, tmp_path / "whole")
    assert len(expected) >= 2
    rng = random.Random(case)
    out = tmp_path / "run"
    done = 0
    for kill in range(KILLS):
        # Saved after every pass: so each start gets further than the one before.
        with monkeypatch.context() as patch:
            killed_after(patch, rng.randrange(total // KILLS), model)
            with pytest.raises(Killed):
                run(case, model, text, out=out, resume=kill > 0, checkpoint_every=0)
        done += 1
        assert not out.exists()
    taken, again = None, [0]
    forward = type(model).forward

    def counting(self, batch):
        again[0] += 1
        return forward(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", counting)
        taken = run(case, model, text, out=out, resume=True)
    assert taken.complete
    assert done == KILLS
    assert bytes_of(taken, out) == expected
    assert not (out / results.PROGRESS).exists()

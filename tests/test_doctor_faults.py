"""Each fault that is planted in a loaded model is named by the check that is about it."""

import pytest
import torch

import interp
from interp import scores
from interp.doctor import examination, outcome, wiring
from interp.doctor.case import Case
from interp.errors import InterpError
from interp.model import load_model
from tests import oracle
from tests.faults import ALL, FAULTS, block, changed, loud, own
from tests.loading import saved

NAMES = [check.name for check in examination.CHECKS]
PLANTED = [(name, family) for name, fault in FAULTS.items() for family in fault.families]


@pytest.fixture
def fresh(checkpoint):
    """family -> a model of one's own, to plant in."""
    return lambda family: load_model(checkpoint(family), device="cpu")


def first_failure(model, until):
    """The first failed check, in the order of the table; checks after `until` are not run."""
    case = Case(model)
    with case.examined():
        for check in examination.CHECKS[:until]:
            found = outcome.judged("m", check, case)
            if found.verdict == "FAIL":
                return found
    return None


def one_check(model, name):
    case = Case(model)
    with case.examined():
        return outcome.judged("m", examination.CHECKS[NAMES.index(name)], case)


@pytest.mark.parametrize(("name", "family"), PLANTED)
def test_a_planted_fault_is_named(fresh, monkeypatch, name, family):
    fault, model = FAULTS[name], fresh(family)
    fault.plant(model, monkeypatch)
    if fault.only and family == fault.families[0]:  # a whole examination takes longest
        (found,) = interp.examine(model).failures()
        assert found.check == fault.check, found
    elif fault.first:
        found = first_failure(model, NAMES.index(fault.check) + 1)
        assert found is not None, f"nothing failed up to {fault.check}"
        assert found.check == fault.check, found
    else:
        found = one_check(model, fault.check)
        assert found.verdict == "FAIL", found
    assert fault.note in found.note


def test_every_check_fails_for_some_fault():
    """A check that no fault makes fail is decoration."""
    elsewhere = {"GPU as CPU", "GGUF tensors"}  # below, and in test_doctor.py
    assert {fault.check for fault in FAULTS.values()} == set(NAMES) - elsewhere


def test_the_check_of_gpus(fresh):
    model = fresh("gpt2")
    case = Case(model)
    with case.examined():
        assert wiring.against_cpu(case).error < 1e-5
        case.clean[1, 2, 3] += 1.0  # as a GPU that computes one logit wrong
        assert wiring.against_cpu(case).error > 1e-2


# Beside a dimension that is far larger than the others

OUTLIER, SIZE = 5, 300.0


def with_outlier(model):
    """One dimension of the stream is 300 times the others, from the first layer on."""
    bias = oracle.projection(model, 0).bias
    if bias is not None:
        bias.data[OUTLIER] = SIZE
    else:
        model.get_input_embeddings().weight.data[:, OUTLIER] = SIZE


def but_the_outlier(model, factor=1.01):
    """[d_model] a factor on every other dimension."""
    factors = torch.full((model.cfg.d_model,), factor)
    factors[OUTLIER] = 1.0
    return factors


@pytest.mark.parametrize("family", ALL)
def test_beside_an_outlier_dimension(tmp_path, family):
    model, _ = saved(family, tmp_path / "m", with_outlier)
    assert interp.examine(model).failures() == []
    loud(block(model).hook_resid_post, but_the_outlier(model))
    found = first_failure(model, len(NAMES))
    assert (found.check, "dimension" in found.note) == ("residual stream", True)


@pytest.mark.parametrize("family", ["gpt2", "neox"])
def test_contributions_beside_an_outlier_dimension(tmp_path, family):
    """The attention of layer 0 writes it, in a bias."""
    model, _ = saved(family, tmp_path / "m", with_outlier)
    factors = but_the_outlier(model)
    factors = factors if family == "gpt2" else factors[:, None]  # [in, out], elsewhere [out, in]
    changed(own(model.bridge.blocks[0].attn.o).weight, lambda w: w * factors)
    found = first_failure(model, len(NAMES))
    assert (found.check, found.note[:18]) == ("head contributions", "layer 0, dimension")


# What cannot be made is tried once


def test_a_refusal_is_asked_for_once(fresh, monkeypatch):
    asked = []

    def refuse(model):
        asked.append(model)
        raise InterpError("no such form")

    monkeypatch.setattr(scores, "form", refuse)
    report = interp.examine(fresh("gpt2"))
    told = [o.check for o in report.failures() if o.note == "no such form"]
    assert len(told) > 2
    assert told[0] == "score form"
    assert len(asked) == 1

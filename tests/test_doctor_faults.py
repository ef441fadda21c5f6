"""Each fault that is planted in a loaded model is named by the check that is about it."""

import pytest

from interp.doctor import examination, outcome, wiring
from interp.doctor.case import Case
from interp.model import load_model
from tests.faults import FAULTS

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
    if fault.first:
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

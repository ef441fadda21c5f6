"""How each analyzer's results are told; one that is not listed is shown by its tables alone."""

from __future__ import annotations

from collections.abc import Mapping

from interp.report import asymmetry, ffn_keys, heads, qkv, superposition, toy
from interp.report.view import View
from interp.results import Result

VIEWS: Mapping[str, View] = {
    "heads": heads.VIEW,
    "asymmetry": asymmetry.VIEW,
    "ffn-keys": ffn_keys.VIEW,
    "qkv": qkv.VIEW,
    "superposition-toy": toy.VIEW,
    "superposition": superposition.VIEW,
}


def view_of(result: Result) -> View:
    """The view of the result's analyzer, an empty one where there is none."""
    return VIEWS.get(result.analyzer, View())

"""Probes: everything in the toolkit that has fitted parameters.

    from probes import superposition, toy
    result = superposition(model, text, layer=6)
    truth = toy()

Loaded on first use: `import probes` imports neither torch nor SAELens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probes.run import superposition
    from probes.toy_models import toy

# public name -> module that defines it; no module has a public name, which it would hide.
_PUBLIC = {"superposition": "probes.run", "toy": "probes.toy_models"}

__all__ = ["superposition", "toy"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'probes' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value

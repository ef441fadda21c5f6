"""Probes: everything in the toolkit that has fitted parameters.

    from probes import superposition
    result = superposition(model, text, layer=6)

Loaded on first use: `import probes` imports neither torch nor SAELens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probes.run import superposition

__all__ = ["superposition"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'probes' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module("probes.run"), name)
    globals()[name] = value
    return value

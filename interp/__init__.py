"""interp: measure what a Transformer block does.

    import interp
    model = interp.load_model("gpt2")
    text = interp.load_text("news", model, documents=64, context=128)
    result = interp.heads(model, text, prune=True)

Everything is loaded on first use: `import interp` imports neither torch nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from interp.errors import InterpError

if TYPE_CHECKING:
    from interp.agreement import head_agreement
    from interp.analyzers.asymmetry import asymmetry
    from interp.analyzers.ffn_keys import ffn_keys
    from interp.analyzers.heads import heads
    from interp.analyzers.qkv import qkv
    from interp.doctor.examination import examine
    from interp.model import Model, load_model
    from interp.pruned import load_pruned
    from interp.results import Result, load_result
    from interp.text import Text, load_text

__version__ = "0.1.0"

# public name -> module that defines it
_PUBLIC = {
    "head_agreement": "interp.agreement",
    "asymmetry": "interp.analyzers.asymmetry",
    "examine": "interp.doctor.examination",
    "ffn_keys": "interp.analyzers.ffn_keys",
    "heads": "interp.analyzers.heads",
    "load_model": "interp.model",
    "Model": "interp.model",
    "load_pruned": "interp.pruned",
    "load_text": "interp.text",
    "Text": "interp.text",
    "load_result": "interp.results",
    "qkv": "interp.analyzers.qkv",
    "Result": "interp.results",
}

__all__ = [
    "InterpError",
    "Model",
    "Result",
    "Text",
    "__version__",
    "asymmetry",
    "examine",
    "ffn_keys",
    "head_agreement",
    "heads",
    "load_model",
    "load_pruned",
    "load_result",
    "load_text",
    "qkv",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'interp' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

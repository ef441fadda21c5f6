"""Numbers and foreign text as a reader meets them, the same in the terminal, on the page and in
figures.

Names, tokens and documents come from anywhere. Here they become plain visible characters: control,
zero-width and direction-changing characters are shown by their escapes, since one of them could
reorder or hide the numbers beside it. Escaping for HTML is the page's own business and happens
after this.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Mapping
from typing import Any

import pandas as pd

from interp.results import Result

NATS = "nats per token"
MATERIAL = 0.01  # nats per token; the verdict's limit, and the stricter of the two pruning limits
INTERRUPTED = "Interrupted"
"""How the notice of a run begins that says where it was interrupted."""
_HIDDEN = {"Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"}
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
DASH = "\u2013"  # for what was not measured


def visible(text: Any, limit: int | None = None) -> str:
    """`text` with every invisible character escaped, cut after `limit` characters with a count of
    the rest.
    """
    text = str(text)
    rest = 0
    if limit is not None and len(text) > limit:
        rest = len(text) - limit
        text = text[:limit]
    shown = "".join(
        _escape(char) if unicodedata.category(char) in _HIDDEN else char for char in text
    )
    return f"{shown}... ({rest:,} more characters)" if rest else shown


def _escape(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    code = ord(char)
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )


def isolated(text: str) -> str:
    """Keep right-to-left letters from reordering what stands beside them (HTML has <bdi>)."""
    if any(unicodedata.bidirectional(char) in ("R", "AL") for char in text):
        return f"\u2068{text}\u2069"
    return text


def in_figure(text: Any, limit: int = 60) -> str:
    """`text` as plotly draws it verbatim: plotly renders a subset of HTML in titles, labels and
    hovers.
    """
    return html.escape(isolated(visible(text, limit)), quote=False)


def number(value: Any) -> float | None:
    """`value` as a finite float, None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def signed(value: Any) -> str:
    """A change in nats: four decimals with its sign; smaller ones keep one digit instead of reading
    zero.
    """
    found = number(value)
    if found is None:
        return DASH
    if found == 0:
        return "0"
    return f"{found:+.4f}" if abs(found) >= 0.00005 else f"{found:+.0e}"


def unsigned(value: Any, digits: int = 4) -> str:
    """A quantity that cannot be negative, with `digits` decimals; smaller ones keep one digit."""
    found = number(value)
    if found is None:
        return DASH
    if found == 0:
        return "0"
    return f"{found:.{digits}f}" if abs(found) >= 0.5 * 10**-digits else f"{found:.0e}"


def probability(value: Any) -> str:
    """A p- or q-value."""
    found = number(value)
    if found is None:
        return DASH
    return f"{found:.3f}" if found >= 0.001 else "0" if found == 0 else f"{found:.0e}"


def interval(low: Any, high: Any, form: Any = signed) -> str:
    """[low, high], or nothing where there is none."""
    if number(low) is None or number(high) is None:
        return ""
    return f"[{form(low)}, {form(high)}]"


def percent(fraction: Any) -> str:
    """A fraction as a whole percentage; with a decimal where that would read 0 or 100 wrongly."""
    found = number(fraction)
    if found is None:
        return DASH
    whole = f"{100 * found:.0f}%"
    if whole in ("0%", "100%") and found not in (0.0, 1.0):
        return f"{100 * found:.1f}%"
    return whole


def plain(value: Any) -> Any:
    """A cell of a table as None, a bool, an int, a float or a str; a list becomes a str."""
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        value = value.tolist()
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    if value is None or value is pd.NA or value != value:
        return None
    return value if isinstance(value, bool | int | float) else str(value)


def count(value: Any) -> str:
    """A whole number with thousands separators."""
    found = number(value)
    return DASH if found is None else f"{found:,.0f}"


def head_label(layer: Any, head: Any) -> str:
    """3.1 is layer 3, head 1, as the command line takes it."""
    return f"{count(layer)}.{count(head)}"


def mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def interruption(result: Result) -> str:
    """One sentence of a run that was interrupted: its own, where it has one; "" of a whole run."""
    if result.complete:
        return ""
    own = " ".join(notice for notice in result.notices if _interrupted(notice))
    return own or f"{INTERRUPTED}: only what was measured until then is here."


def other_notices(result: Result) -> list[str]:
    """The notices without what `interruption` says, so that it is said once."""
    return [n for n in result.notices if result.complete or not _interrupted(n)]


def _interrupted(notice: str) -> bool:
    return notice.startswith(INTERRUPTED)


def documents(result: Result) -> str:
    """The sample: "32 documents, 1,984 predicted tokens"."""
    parts = []
    if number(result.data.get("documents")) is not None:
        n = count(result.data["documents"])
        parts.append(f"{n} document{'' if n == '1' else 's'}")
    if number(result.data.get("predicted_tokens")) is not None:
        parts.append(f"{count(result.data['predicted_tokens'])} predicted tokens")
    return ", ".join(parts)


def sample(result: Result) -> str:
    """The sample and where it is from: "32 documents, 1,984 predicted tokens; news, ..."."""
    found = documents(result)
    source, context = result.data.get("source"), number(result.data.get("context"))
    parts = [isolated(visible(source, 40))] if source and found else []
    if parts and context is not None:
        windows = "windows of" if result.data.get("windows") else "the first"
        parts.append(f"{windows} {count(context)} tokens of each")
    return "; ".join(part for part in (found, ", ".join(parts)) if part)


def model_name(result: Result, limit: int = 60) -> str:
    """The model's name, with its revision where that is a name and no commit hash."""
    name = visible(result.model.get("name") or "unnamed model", limit)
    revision = result.model.get("revision")
    if revision and len(str(revision)) < 20:
        name += f" @ {visible(revision)}"
    return name

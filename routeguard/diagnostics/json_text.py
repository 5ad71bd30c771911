"""Results as JSON that a person can read as well: a field a line, and each array of numbers on one line."""

from __future__ import annotations

import json
import math
from typing import Any

_INDENT = 2


def json_text(value: Any, depth: int = 0) -> str:
    """JSON of dicts, lists and plain values; infinite and undefined numbers, for which JSON has no word, become null.

    An array of plain values stands on one line, without spaces; a matrix has a line a row.
    """
    inside, outside = " " * _INDENT * (depth + 1), " " * _INDENT * depth
    if isinstance(value, dict) and value:
        parts = [f"{json.dumps(str(name))}: {json_text(part, depth + 1)}" for name, part in value.items()]
        return "{\n" + ",\n".join(inside + part for part in parts) + f"\n{outside}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(part, (dict, list, tuple)) for part in value):
        return "[\n" + ",\n".join(inside + json_text(part, depth + 1) for part in value) + f"\n{outside}]"
    if isinstance(value, (list, tuple)):
        return json.dumps([_finite(part) for part in value], separators=(",", ":"), allow_nan=False)
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

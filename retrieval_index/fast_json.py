"""JSON where its speed counts: passages read from disk, and answers of the server."""

from __future__ import annotations

import json
from typing import Any

import orjson

loads = orjson.loads


def dumps(value: Any) -> bytes:
    """Compact UTF-8; half surrogate pairs, which UTF-8 cannot hold, become question marks."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")

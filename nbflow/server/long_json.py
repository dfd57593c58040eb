"""JSON of long responses, encoded in slices: the encoder holds the GIL, which stalls streams."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

_SLICE = 64
"""Entries per slice: the log-probabilities of one token may take two kilobytes."""


def long_response(body: dict[str, Any]) -> Response:
    """Return a JSON response in ASCII; call it in a worker thread."""
    return Response(_written(body), 200, None, "application/json")


def _written(value: Any) -> str:
    if isinstance(value, dict):
        items = (
            f"{json.dumps(str(key))}: {_each(item) if key == 'choices' else _written(item)}"
            for key, item in value.items()
        )
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list) and len(value) > _SLICE:
        slices = (value[i : i + _SLICE] for i in range(0, len(value), _SLICE))
        return "[" + ", ".join(json.dumps(part)[1:-1] for part in slices) + "]"
    return json.dumps(value)


def _each(values: list[Any]) -> str:
    return "[" + ", ".join(map(_written, values)) + "]"

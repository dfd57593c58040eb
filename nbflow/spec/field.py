"""One field of a model specification: type, bounds, default and meaning, and its checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbflow.utils.safe_repr import shown
from nbflow.utils.toml_schema import Kind, check_value
from nbflow_kernels.errors import UsageError

REQUIRED = object()
"""Default of a mandatory field."""

MAX_LAYERS = 4096
"""Bound on layers: the deepest published transformer has 1,000."""
MAX_HEADS = 4096
"""Bound on heads: published models have at most some 256."""
MAX_EXPERTS = 4096
"""Bound on the experts of a layer: published models have at most 2,048."""
MAX_WIDTH = 1 << 24
"""Bound on widths: several hundred times those of published models."""
MAX_CONTEXT = 1 << 24
"""Bound on contexts: published models state up to 10,485,760."""
MAX_TAPS = 256
"""Bound on the taps of short convolutions: published models have 3 or 4."""
MAX_INT = 2**31 - 1
"""Bound on all other whole numbers: kernels count in 32 bits."""
MAX_FLOAT = 3.4028234663852886e38
"""Bound on numbers: kernels compute in float32."""
MIN_POSITIVE = 1.1754943508222875e-38
"""Least positive number: the least normal float32."""
MAX_ITEMS = 4096
"""Bound on the entries of a list, e.g. one per layer."""


@dataclass(frozen=True)
class Field:
    """One field."""

    kind: Kind
    """Type: see `nbflow.utils.toml_schema.Kind`."""
    doc: str
    """Meaning, for the documentation."""
    default: Any = REQUIRED
    """Value if not stated; None: derived from other fields, or absent."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other names of its values in configurations, for rules without `values`."""
    least: float | None = None
    """Lower bound; by default 0 for whole numbers, else -`MAX_FLOAT`."""
    most: float | None = None
    """Upper bound; by default `MAX_INT` for whole numbers, else `MAX_FLOAT`."""
    absent: tuple[float, ...] = ()
    """Numbers that files write for an absent value."""


def check_field(value: Any, where: str, field: Field) -> Any:
    """Return a value with the type and within the bounds of a field, None for an absent number.

    `where` (file and key) begins the error messages.
    """
    checked = check_value(value, where, field.kind)
    if field.kind is dict:
        _check_table(checked, where)
    elif isinstance(field.kind, list):
        checked = tuple(item for item in checked if item not in field.absent)
        if len(checked) > MAX_ITEMS:
            raise UsageError(f"{where}: may have at most {MAX_ITEMS} entries, got {len(checked)}")
        for item in checked if field.kind[0] in (int, float) else ():
            check_bounds(item, where, field)
    elif field.kind in (int, float):
        if checked in field.absent:
            return None
        check_bounds(checked, where, field)
    return checked


def check_bounds(number: float, where: str, field: Field) -> None:
    """Raise `UsageError` unless a number is finite and within the bounds of a field."""
    whole = field.kind not in (float, [float])
    least = (0 if whole else -MAX_FLOAT) if field.least is None else field.least
    most = (MAX_INT if whole else MAX_FLOAT) if field.most is None else field.most
    if not least <= number <= most:  # false for NaN, too
        bounds = f"{least} to {most}" if whole else f"a number from {least:g} to {most:g}"
        raise UsageError(f"{where}: must be {bounds}, got {shown(number)}")


def _check_table(table: dict[str, Any], where: str) -> None:
    """Raise `UsageError` for a number of a nested table that is not finite or too large."""
    inner: list[tuple[str, Any]] = [(where, table)]
    while inner:
        at, value = inner.pop()
        if isinstance(value, dict):
            inner += [(f"{at}.{key:.80}", item) for key, item in value.items()]
        elif isinstance(value, list):
            if len(value) > MAX_ITEMS:
                raise UsageError(f"{at}: may have at most {MAX_ITEMS} entries, got {len(value)}")
            inner += [(at, item) for item in value]
        elif isinstance(value, str) and not at.endswith("type"):
            raise UsageError(f"{at}: must be a number, got {shown(value):.80}")
        elif isinstance(value, int | float) and not -MAX_FLOAT <= value <= MAX_FLOAT:
            raise UsageError(f"{at}: must be a finite float32, got {shown(value)}")

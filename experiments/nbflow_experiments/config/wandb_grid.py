"""Translation of Weights & Biases sweep files (``method: grid``).

A file like this gives the same points as the TOML below it::

    name: bits                      [sweep]
    method: grid                    name = "bits"
    parameters:                     [settings]
      model: {value: tiny_python}   model = "tiny_python"
      weights:                      [axes]
        values: [f32, q4]           weights = ["f32", "q4"]
      batch:                        batch = "1..4"
        distribution: int_uniform
        min: 1
        max: 4

Keys without a meaning for a grid are rejected, not ignored.  Parameters are settings
(`nbflow_experiments.settings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbflow_kernels.errors import UsageError, unknown_name

_KEYS = ("name", "description", "method", "parameters")
_REFUSED = {
    "metric": "a grid measures everything; choose measures with --measures",
    "early_terminate": "no point of a grid is ended early; --timeout S ends a point that hangs",
    "run_cap": "every point of a grid is run; narrow the lists, or run a part with --shard I/N",
    "program": "nbflow measures the points itself; remove it",
    "command": "nbflow measures the points itself; remove it",
    "project": "results go to a folder (--out), not to a service; remove it",
    "entity": "results go to a folder (--out), not to a service; remove it",
    "controller": "results go to a folder (--out), not to a service; remove it",
}
_OF_PARAMETER = ("value", "values", "distribution", "min", "max", "q")
_DISTRIBUTIONS = ("constant", "categorical", "int_uniform", "q_uniform")


def is_wandb(data: Mapping[str, Any]) -> bool:
    """Return whether a parsed file is a W&B sweep file."""
    return "method" in data or "parameters" in data


def from_wandb(data: Mapping[str, Any], path: object) -> dict[str, Any]:
    """Translate a W&B grid to an nbflow sweep file.

    Raises
    ------
    UsageError
        If the method is not grid, or the file uses a feature that a grid lacks.
    """
    for key in data:
        if key in _REFUSED:
            raise UsageError(f"{path}: {key!r} is not supported: {_REFUSED[key]}")
        if key not in _KEYS:
            raise unknown_name(f"entry of {path}", str(key), _KEYS)
    if data.get("method") != "grid":
        raise UsageError(
            f"{path}: method must be grid, got {data.get('method')!r}; random and bayes choose "
            f"points by chance, a sweep measures all it is given: write the values as lists"
        )
    parameters = data.get("parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        raise UsageError(f"{path}: parameters must be a table of settings, got {parameters!r}")
    sweep: dict[str, Any] = {"sweep": {}, "settings": {}, "axes": {}}
    for key in ("name", "description"):
        if key in data:
            sweep["sweep"][key] = data[key]
    for name, parameter in parameters.items():
        section, value = _translate(str(name), parameter, path)
        sweep[section][str(name)] = value
    return sweep


def _translate(name: str, parameter: Any, path: object) -> tuple[str, Any]:
    """Return the section that a parameter belongs to, and its value there."""
    place = f"{path}: parameters.{name}"
    if not isinstance(parameter, Mapping):
        raise UsageError(f"{place} must have value or values, got {parameter!r}")
    if "parameters" in parameter:
        raise UsageError(f"{place} is nested; settings are flat: write its entries one level up")
    for key in parameter:
        if key not in _OF_PARAMETER:
            raise unknown_name(f"entry of {place}", str(key), _OF_PARAMETER)
    distribution = parameter.get("distribution")
    if distribution is not None and distribution not in _DISTRIBUTIONS:
        raise UsageError(
            f"{place}: a grid has no points of distribution {distribution!r}; write values: [...]"
        )
    found = {"value", "values", "min", "max"} & set(parameter)
    if found == {"value"}:
        return "settings", parameter["value"]
    if found == {"values"}:
        values = parameter["values"]
        return "axes", values if isinstance(values, list) else [values]
    if found == {"min", "max"}:
        step = parameter.get("q", 1)
        return "axes", {"start": parameter["min"], "stop": parameter["max"], "step": step}
    raise UsageError(f"{place} must have either value, or values, or min and max")

"""What a sweep file says, as plain data: TOML of ours, Weights & Biases' grids in YAML or JSON."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from nbflow_experiments.extras import require
from nbflow_experiments.wandb_grid import from_wandb, is_wandb
from nbflow_kernels.errors import UsageError

SUFFIXES = (".toml", ".yaml", ".yml", ".json")
"""Endings of sweep files."""
_MOST_BYTES = 2**22  # a sweep is written by hand


def is_sweep_file(text: str) -> bool:
    """Return whether a word of the command line names a sweep file, and not a model."""
    return text.lower().endswith(SUFFIXES) and not Path(text).is_dir()


def read_sweep_file(path: Path) -> dict[str, Any]:
    """Return the content of a sweep file, in the words of a TOML one.

    Raises
    ------
    UsageError
        If it cannot be read, is too large, or not what its ending says.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} has {path.stat().st_size} bytes; a sweep file has at most 4M")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the sweep file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file in UTF-8") from None
    data = _parse(path, text)
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold a table, got {type(data).__name__}")
    return from_wandb(data, path) if is_wandb(data) else data


def _parse(path: Path, text: str) -> Any:
    """Return the parsed text, by the ending of the file."""
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        yaml = require("yaml")
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{path} is not valid YAML: {error}") from None
    try:
        return json.loads(text) if suffix == ".json" else tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None

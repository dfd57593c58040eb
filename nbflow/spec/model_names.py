"""Names of the models that come with the package (`nbflow_specs.MODELS`).

A model is found by the name of its file or by one of its ``aliases``; case does not count, and
``-`` is ``_``.
"""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

from nbflow.utils.toml_schema import read_toml, strings
from nbflow_kernels.errors import UsageError
from nbflow_specs import MODELS

LIST = "'nbflow spec --list' lists all names"
_SHOWN = 120  # characters shown of a name, which may come from a request


def known_models() -> dict[str, Path]:
    """Return name -> model file of the models that come with the package."""
    return {path.stem: path for path in sorted(MODELS.glob("*.toml"))}


def model_name(name: str) -> str | None:
    """Return the name of a packaged model by any of its names, or None.

    Examples
    --------
    >>> from nbflow.spec.model_names import model_name
    >>> model_name("internlm-chat-20b"), model_name("llama2_7b_chat_hf"), model_name("none")
    ('internlm_chat_20b', 'llama2_7b_chat', None)
    """
    if (MODELS / f"{name}.toml").is_file() and Path(name).name == name:
        return name
    found = _all_names().get(_folded(name))
    return None if found is None else found[0]


def aliases_of(path: Path) -> tuple[str, ...]:
    """Return the other names of a model from its file."""
    return strings(read_toml(path).get("aliases", []), f"{path}: aliases")


def unknown_model(kind: str, name: str) -> UsageError:
    """Return the error for an unknown name, with close ones; `kind` is "model" or "spec"."""
    names = _all_names()
    close = difflib.get_close_matches(_folded(name)[:_SHOWN], names, n=3)
    hint = f"; did you mean {' or '.join(repr(names[c][1]) for c in close)}?" if close else ";"
    return UsageError(f"unknown {kind} {name!r:.{_SHOWN}}{hint} {LIST}")


@cache
def _all_names() -> dict[str, tuple[str, str]]:
    """Return folded name -> name of the file, and the name as it is written."""
    return {
        _folded(written): (stem, written)
        for stem, path in known_models().items()
        for written in (stem, *aliases_of(path))
    }


def _folded(name: str) -> str:
    return name.casefold().replace("-", "_")

"""The stand-in has no name and no parameter that CuPy has not, where CuPy is installed."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import nbflow_ptx.cupy_stand_in as stand_in

cupy = pytest.importorskip("cupy", reason="CuPy is not installed: there is nothing to compare")
OWN = {
    *("reset", "last_launch", "mapped", "memory_bytes", "installed"),
    *("cuda.MemoryPool.take", "cuda.MemoryPool.give", "cuda.alloc_pinned_memory.check"),
    *("cuda.Stream.note_sent", "cuda.Stream.check_sent"),
}
"""Further names that tests, launchers and the stand-in use."""
PLACES = {"": (stand_in, cupy), "cuda.": (stand_in.cuda, cupy.cuda)}


def names(of: Any, home: str) -> dict[str, Any]:
    """Return what is public of a module or class, and can be called, of modules named so."""
    return {
        name: value
        for name, value in vars(of).items()
        if not name.startswith("_")
        and callable(value)
        and re.fullmatch(home, str(getattr(value, "__module__", "")))
    }


def parameters(function: Any) -> list[str] | None:
    """Return the names of parameters that can be given by name, if they are known."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in found if p.kind in named and not p.name.startswith("_")]


def compare(name: str, ours: Any, theirs: Any) -> list[str]:
    """Return where ours goes beyond theirs."""
    if inspect.isclass(ours):
        return beyond(f"{name}.", names(ours, ".*"), theirs)
    wanted, known = parameters(ours), parameters(theirs)
    if wanted is None or known is None:
        return []
    return [f"{name}({p})" for p in wanted if p not in known and p != "self"]


def beyond(place: str, ours: dict[str, Any], theirs: Any) -> list[str]:
    """Return which of our names, or of their parameters, theirs have not."""
    wrong: list[str] = []
    for name, value in ours.items():
        if place + name in OWN:
            continue
        found = getattr(theirs, name, None)
        wrong += [place + name] if found is None else compare(place + name, value, found)
    return wrong


@pytest.mark.parametrize("place", PLACES)
def test_names_and_parameters_are_cupys(place: str) -> None:
    here, there = PLACES[place]
    home = stand_in.__name__ if here is stand_in else r"nbflow_ptx\..*"
    assert beyond(place, names(here, home), there) == []


def test_the_runtime_has_what_is_asked_of_it() -> None:
    for name in vars(stand_in.cuda.runtime):
        assert hasattr(cupy.cuda.runtime, name)

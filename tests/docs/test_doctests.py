"""Doctests of nbflow and nbflow_experiments."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import nbflow
import nbflow_experiments

NEED_AN_EXTRA = {"nbflow_experiments.scoring.lm_eval"}
"""Modules that import a package which the tests do not install; they have no examples."""


def modules():
    for package in (nbflow, nbflow_experiments):
        yield package.__name__
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name not in NEED_AN_EXTRA and not found.name.endswith("__main__"):
                yield found.name


@pytest.mark.parametrize("name", list(modules()))
def test_examples(name):
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    result = doctest.testmod(module, optionflags=flags)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    with_examples = [
        test.name
        for name in modules()
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]
    for name in (
        "nbflow.engine.load.load",
        "nbflow.engine.llm.LLM.logits",
        "nbflow.engine.llm.LLM.generate",
        "nbflow.checkpoint.open_weights",
    ):
        assert name in with_examples

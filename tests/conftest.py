"""The order of the tests, and what Python's garbage collector goes through meanwhile."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the file that takes longest: at the end one worker would run it alone."""
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")


def pytest_configure() -> None:
    """Let Python's collector go through everything seldom, and through what stays only once.

    Compilers, programs and the tests themselves are millions of objects that stay: with what the
    collector does by itself, and with tests that collect to count what is left of an object, going
    through them was a third of the time of all tests.
    """
    gc.set_threshold(gc.get_threshold()[0], gc.get_threshold()[1], 1000)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Take what a file has left for what stays."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()

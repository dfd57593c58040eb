"""Run a function in a forked child."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from nbflow_kernels.errors import UsageError


def in_forked_child(function: Callable[[], Any]) -> Any:
    """Return the result of a function, or its error as text; fail if it takes a minute."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        try:
            there.send(function())
        except UsageError as error:
            there.send(f"{type(error).__name__}: {error}")

    child = context.Process(target=run)
    child.start()
    there.close()
    try:
        assert here.poll(60.0), "the child hangs"
        return here.recv()
    finally:
        child.kill()
        child.join()

"""Test order, cores, garbage collection, and the HTTP server that several folders share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import openai
    from server_process import Server

    import nbflow


LONGEST = (
    *("docs/test_notebooks.py", "cuda/test_ops.py", "cuda/test_engine.py", "kernels/test_ops.py"),
    *("mpi/test_faults.py", "server/test_ranks.py", "cuda/test_quantized_matmul.py"),
    *("cuda/test_fusion_and_graphs.py", "engine/test_batch_invariance.py", "mpi/test_mpi.py"),
    *("kernels/ops/test_quantized_matmul.py", "cuda/test_dequantize.py"),
    *("experiments/test_sweep_mpi.py", "kernels/formats/test_user_formats.py"),
    *("cuda/test_attention_compiled_code.py", "cuda/test_matmul_wgmma.py"),
)
"""Files that take more than 15 seconds with an empty cache of kernels, the longest first.

Notebooks and the kernels' ops need many of the same kernels: CUDA files come in between, so that
one process does not wait for the other's compilations."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: at the end one worker would run them alone."""
    folder = Path(__file__).parent
    place = {folder / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
ON_ALL_CORES = ("distributed", "kernels", "mpi", "server")
"""Folders whose tests are about threads and ranks that run at the same time."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep a worker, and what it starts, on one core where there is a worker for each.

    Models take as many threads as there are cores.  With other workers on these cores, threads
    wait for each other between two operators, and use up the others' time while they poll: tests of
    models took 1.7 times as long.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and CORES and int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= len(CORES):
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        own = {CORES[int(worker) % len(CORES)]}
        os.sched_setaffinity(0, CORES if folder in ON_ALL_CORES else own)


def pytest_configure() -> None:
    """Prepare the process of the tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # of a shell that runs the tests in the background; tested programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _collect_garbage_seldom()


def _collect_garbage_seldom() -> None:
    """Let Python's collector go through everything seldom, and through what stays only once.

    Compilers, programs and the tests themselves are millions of objects that stay: with what the
    collector does by itself, and with tests that collect to count what is left of an object, going
    through them was a third of the time of all tests.
    """
    gc.set_threshold(gc.get_threshold()[0], gc.get_threshold()[1], 1000)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Take what a file has left for what stays, and what each test of a device has.

    A model collects garbage when it begins on a device, and would go through the programs of all
    kernels that the tests of a file have emulated so far.
    """
    if nextitem is None or nextitem.path != item.path or item.path.parent.name == "cuda":
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one server per session on the bundled model."""
    from server_process import CONFIG, Server

    with Server(CONFIG, tmp_path_factory.mktemp("server")) as running:
        yield running
        assert running.stop() == 0, "".join(running.log)


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    """Return the official client, connected to `server`."""
    return server.client()


@pytest.fixture(scope="session")
def offline() -> Iterator[nbflow.LLM]:
    """Load the server's model without a server, to compare with."""
    import nbflow

    with nbflow.load("tiny_python", threads=1) as model:
        yield model

"""Whole models on a real device (``-m gpu``): graphs, ranks, formats, memory.

The stand-in for CuPy runs work at once; a device runs it later, concurrently with what the host
does next.  So what is compared here is what depends on the order of things.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from test_engine import ENCODERS, FOLDER, FORMATS, TOLERANCE, error

import nbflow
from nbflow.engine.worker_step import worker_step

pytestmark = pytest.mark.gpu
PROMPTS = [[3, 9, 4], [7, 1, 8, 2, 6], [5], list(range(3, 24))]
GREEDY: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """A graph that cannot be captured is a warning to users, and an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@contextmanager
def on_device(name: str, **options: Any) -> Iterator[nbflow.LLM]:
    with nbflow.load(FOLDER / name, device="cuda", kv="f32", **options) as model:
        yield model


def tokens(model: nbflow.LLM, n: int = 12) -> list[list[int]]:
    return [result.ids for result in model.generate_batch(PROMPTS, n, **GREEDY)]


def by_cpu(name: str) -> list[list[int]]:
    with nbflow.load(FOLDER / name, kv="f32") as model:
        return tokens(model)


def by_graph(model: nbflow.LLM) -> int:
    return sum(getattr(engine.executor, "steps_by_graph", 0) for engine in model.workers)


@pytest.mark.parametrize(
    "name",
    ["llama31", "qwen3", "gemma2", "phi", "gpt_neox", "mixtral", "olmoe", "deepseek_v3"],
)
def test_tokens_from_graphs_are_the_cpus(name: str) -> None:
    """Many steps without synchronization, reusing graphs and pinned memory."""
    with on_device(name) as model:
        assert tokens(model) == by_cpu(name)
        assert by_graph(model) > 5
        assert tokens(model) == by_cpu(name)  # again, with memory that has been used


def test_graphs_change_no_bit() -> None:
    prompt, logits = [[3, 9, 4]], []
    for graphs in (True, False):
        with on_device("llama31", graphs=graphs) as model:
            (engine,) = model.workers
            engine.table.add(7)
            engine.run_step(worker_step(engine, [7], prompt, [2]))
            for token in range(5):
                engine.run_step(worker_step(engine, [7], [[token]], [0]))
                logits.append(np.array(engine.executor.buffer("logits", 1)))
            assert bool(by_graph(model)) == graphs
    for one, other in zip(logits[:5], logits[5:], strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("partition", ["0;1", "0&1"])
@pytest.mark.parametrize("devices", ["cuda", "cpu,cuda"])
def test_ranks(partition: str, devices: str) -> None:
    """Threads with a stream each; with one device they share it."""
    options: dict[str, Any] = {"device": devices, "partition": partition, "kv": "f32"}
    with nbflow.load(FOLDER / "llama31", **options) as model:
        assert tokens(model) == by_cpu("llama31")
        assert by_graph(model) > 5


@pytest.mark.parametrize(("weights", "kv", "activations"), [*FORMATS, ("q4_k", "bf16", "bf16")])
def test_formats(weights: str, kv: str, activations: str) -> None:
    """GPU version of the emulator's test; bfloat16 rounds activations, 2**-9 = 2e-3 each."""
    options = {"weights": weights, "kv": kv, "activations": activations}
    ids = np.arange(3, 12)
    with nbflow.load(FOLDER / "qwen3", **options) as model:
        expected = model.logits(ids)
    with nbflow.load(FOLDER / "qwen3", device="cuda", max_step_tokens=5, **options) as model:
        assert error(model.logits(ids), expected) < (2e-2 if activations == "bf16" else 5e-3)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name: str) -> None:
    with nbflow.load(FOLDER / name) as model:
        expected = model.hidden(np.arange(3, 11))
    with nbflow.load(FOLDER / name, device="cuda") as model:
        assert error(model.hidden(np.arange(3, 11)), expected) < TOLERANCE


def test_encoder_with_decoder() -> None:
    source, target = [5, 9, 7, 3], [2, 8, 4]
    with nbflow.load(FOLDER / "t5", kv="f32") as model:
        expected = model.logits(target, encoder_ids=source)
    with on_device("t5") as model:
        assert error(model.logits(target, encoder_ids=source), expected) < TOLERANCE


def test_what_lies_in_the_hosts_memory_changes_no_token() -> None:
    with on_device("llama31", kv_host_percent=50, embeddings_on_host=True) as model:
        assert tokens(model) == by_cpu("llama31")
        assert by_graph(model) > 5


def test_drawing_is_the_cpus() -> None:
    options: dict[str, Any] = {"decoding": "top_p", "seed": 3, "temperature": 1.5, **GREEDY}
    with nbflow.load(FOLDER / "llama31", kv="f32") as model:
        expected = [r.ids for r in model.generate_batch(PROMPTS, 8, **options)]
    with on_device("llama31") as model:
        assert [r.ids for r in model.generate_batch(PROMPTS, 8, **options)] == expected


def test_a_long_prompt_and_the_bundled_model() -> None:
    """Prompts in several steps; tensor cores take float16 operands, 2**-11 = 5e-4 each."""
    options: dict[str, Any] = {"weights": "q4_k", "kv": "f16"}
    with nbflow.load("tiny_python", **options) as model:
        ids = model.tokenizer.encode("def main(argument):\n    return argument\n" * 8)
        expected = model.logits(ids)
    with nbflow.load("tiny_python", device="cuda", max_step_tokens=64, **options) as model:
        assert error(model.logits(ids), expected) < 5e-3

"""Processes forked after a model was used, as in pre-fork servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_child import in_forked_child

import nbflow
from nbflow.engine.llm_engine import EngineClosed
from nbflow_kernels.cpu import graph

PROMPT = [1, 2, 3, 4, 5]


def _tokens(model: nbflow.LLM) -> list[int]:
    return model.generate(PROMPT, max_tokens=12, ignore_eos=True).ids


def _load(checkpoint: Path, **options: Any) -> nbflow.LLM:
    return nbflow.load(checkpoint, max_step_tokens=64, **options)


@pytest.fixture(autouse=True)
def _shared_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels of the small model on several threads."""
    monkeypatch.setattr(graph, "MIN_WORK_PER_PART", 1)


def test_child_generates_with_the_model_of_its_parent_and_with_its_own(checkpoint: Path) -> None:
    with _load(checkpoint, threads=2) as model:
        expected = _tokens(model)

        def generate() -> list[list[int]]:
            with _load(checkpoint, threads=2) as own:
                return [_tokens(model), _tokens(own), _tokens(model)]

        assert in_forked_child(generate) == [expected] * 3
        assert _tokens(model) == expected


def test_child_says_that_ranks_that_are_threads_stayed_behind(checkpoint: Path) -> None:
    with _load(checkpoint, partition="0&1", threads=1) as model:
        expected = _tokens(model)
        assert "which was forked; load the model here" in in_forked_child(lambda: _tokens(model))

        def with_own() -> list[int]:
            with _load(checkpoint, partition="0&1", threads=1) as own:
                return _tokens(own)

        assert in_forked_child(with_own) == expected
        assert _tokens(model) == expected


def test_child_has_not_the_thread_of_an_engine_but_may_start_one(checkpoint: Path) -> None:
    with _load(checkpoint, threads=2) as model, nbflow.LLMEngine(model) as engine:

        def generate(engine: nbflow.LLMEngine) -> list[int]:
            request = model.make_request(PROMPT, max_tokens=12, ignore_eos=True)
            return engine.submit(request).result().ids

        expected = generate(engine)
        refused = in_forked_child(lambda: generate(engine))
        assert refused.startswith(EngineClosed.__name__)
        assert "forked" in refused

        def with_own() -> list[int]:
            engine.close()
            with nbflow.LLMEngine(model) as own:
                return generate(own)

        assert in_forked_child(with_own) == expected
        assert generate(engine) == expected

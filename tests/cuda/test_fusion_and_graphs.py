"""A decode step on CUDA devices: one kernel for several ops, and the step as a graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import write_llama

import nbflow
from nbflow.engine.worker_step import worker_step
from nbflow.executor.bind import PythonOp
from nbflow.executor.cuda_fusion import ExpertFusion, find_fusions
from nbflow.program import build, fuse
from nbflow.spec import resolve
from nbflow_kernels.cuda import Kernel
from nbflow_ptx.checks import NO_CHECKS
from nbflow_ptx.cupy_stand_in.kernel_device import SHARED_KB
from nbflow_ptx.cupy_stand_in.state import State

pytestmark = pytest.mark.compiler
FOLDER = Path(__file__).parents[1] / "golden" / "families"
OPTIONS = {"weights": "q8_0", "kv": "f32"}
TOLERANCE = 4e-6
"""Relative to the largest logit, against the CPU; see `test_engine.TOLERANCE`."""


def load(name: str | Path, **options: Any) -> nbflow.LLM:
    return nbflow.load(FOLDER / name, device="emulator", **{**OPTIONS, **options})


class Sequences:
    """Sequences of a model's engine, run step by step."""

    def __init__(self, model: nbflow.LLM, prompts: list[list[int]]) -> None:
        (self.engine,) = model.workers
        self.executor: Any = self.engine.executor
        self.numbers = list(range(100, 100 + len(prompts)))
        for number in self.numbers:
            self.engine.table.add(number)
        ends = np.cumsum([len(p) for p in prompts]) - 1
        self.engine.run_step(worker_step(self.engine, self.numbers, prompts, list(ends)))

    def step(self, tokens: list[int]) -> np.ndarray:
        """Give the first sequences one more token each; return their logits."""
        n = len(tokens)
        new = [[token] for token in tokens]
        self.engine.run_step(worker_step(self.engine, self.numbers[:n], new, range(n)))
        return np.array(self.executor.buffer("logits", n))

    def launches(self, tokens: list[int]) -> int:
        """Return the kernels that a step starts."""
        before = State.n_launches
        self.step(tokens)
        return State.n_launches - before


@contextmanager
def sequences(name: str, prompts: list[list[int]], **options: Any) -> Iterator[Sequences]:
    with load(name, **options) as model:
        yield Sequences(model, prompts)


def expected(name: str, prompts: list[list[int]], tokens: list[list[int]], **options: Any) -> Any:
    """Return the CPU's logits after all of these tokens, for each sequence."""
    with nbflow.load(FOLDER / name, **{**OPTIONS, **options}) as model:
        both = zip(prompts, tokens, strict=True)
        return [model.logits(prompt + more)[len(prompt) :] for prompt, more in both]


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


# kernels of a step besides those of its layers: token embedding, rows that are wanted, final norm,
# head, and what is given behind the name; then those of a layer
STEPS = {
    "llama31": (4, 5),
    # norms behind attention and network; a soft cap; a float16 head
    "gemma2": (6, 5),
    "phi": (4, 5),  # both read one norm; biases, a plain activation
    "olmoe": (5, 5),  # experts, norms over all heads; a float16 head takes two kernels
}


@pytest.mark.parametrize("name", STEPS)
def test_kernels_of_a_step_and_its_logits(name: str, cupy: Any) -> None:
    prompts, tokens = [[3]], [[7, 1]]
    wanted = expected(name, prompts, tokens)[0]
    outside, of_a_layer = STEPS[name]
    with sequences(name, prompts) as run:  # kernel by kernel, then captured, then launched again
        assert error(run.step([7])[0], wanted[0]) < TOLERANCE
        n_launches = run.launches([1])
        assert n_launches == outside + len(run.executor.program.layers) * of_a_layer
        assert error(run.executor.buffer("logits", 1)[0], wanted[1]) < TOLERANCE
        assert (run.executor.steps_by_kernel, run.executor.steps_by_graph) == (1, 2)
        (bound,) = (b for b in run.executor._bound.values() if b.graphs is not None)
        assert bound.graphs.n_graphs == 1


@pytest.mark.parametrize(("name", "shared_kb"), [("llama31", 99), ("olmoe", 99), ("llama31", 163)])
def test_a_step_on_a_device_with_other_shared_memory_and_more_multiprocessors(
    name: str, shared_kb: int, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """99 KB as on sm_86 and sm_89, whose kernels would have to be compiled, and 128 as there."""
    monkeypatch.setitem(SHARED_KB, "sm_80", shared_kb)
    cupy.reset(n_sms=128)
    wanted = expected(name, [[3]], [[7]])[0]
    outside, of_a_layer = STEPS[name]
    with sequences(name, [[3]]) as run:
        n_launches = run.launches([7])
        assert n_launches == outside + len(run.executor.program.layers) * of_a_layer
        assert error(run.executor.buffer("logits", 1)[0], wanted[0]) < TOLERANCE


def test_layers_with_sinks_of_their_own_are_captured(cupy: Any) -> None:
    prompts, options = [[3]], {"weights": None}
    wanted = expected("gpt_oss", prompts, [[7]], **options)[0]
    with sequences("gpt_oss", prompts, **options) as run:
        assert error(run.step([7])[0], wanted[0]) < TOLERANCE
        assert (run.executor.steps_by_kernel, run.executor.steps_by_graph) == (1, 1)


PATTERNS = {
    "qwen3": 5,  # norms of the heads
    "granite": 5,  # scaled sums
    "cohere": 5,
    "cohere_plus": 9,  # norms of each head, of another kind than the kernel of q, k and v has
    "glm4": 5,
    "opt_350m": 5,  # norms behind the sums
    "gpt_neox": 5,  # two norms of one residual
    "olmo2": 5,  # norms over all heads
    "granitemoe": 5,  # a scaled sum behind experts
    "qwen3_moe": 5,
    "glm4_moe": 5,
    "deepseek_moe": 5,  # an expert of all tokens
    "qwen2_moe": 5,  # of which each takes a share
    "olmoe": 5,
    "deepseek_v3": 8,  # latent attention
}


@pytest.mark.parametrize("name", PATTERNS)
def test_ops_of_a_layer_that_are_one_kernel(name: str) -> None:
    program = fuse(build(resolve(FOLDER / name).spec))
    fusions, index, n_kernels = find_fusions(program), 0, 0
    while index < len(program.ops):
        first = fusions[index][0] if index in fusions else None
        if program.ops[index].layer == 1:
            n_kernels += 2 if isinstance(first, ExpertFusion) else 1
        index = index + 1 if first is None else first.last + 1
    assert n_kernels == PATTERNS[name]


def test_a_row_has_the_same_bits_in_a_graph_for_more(cupy: Any) -> None:
    """Three sequences run in the graph for four, one of them then alone."""
    prompts = [[3], [7], [5]]
    with sequences("llama31", prompts) as run:
        steps = [run.step([1, 2, 3]), run.step([4, 5, 6])]
        assert run.executor.steps_by_graph == 2
        steps += [run.step([7]), run.step([8])]
        assert (run.executor.steps_by_kernel, run.executor.steps_by_graph) == (2, 3)
    with sequences("llama31", prompts[:1], graphs=False) as run:
        for token, step in zip([1, 4, 7, 8], steps, strict=True):
            assert run.step([token])[0].tobytes() == step[0].tobytes()
        assert run.executor.report() == "emulator: 0 of 5 steps as CUDA graphs, of 0 shapes"


def test_steps_of_several_tokens_for_each_sequence_run_in_graphs(cupy: Any) -> None:
    """Steps that verify draft tokens: five tokens run in the graph for eight."""
    texts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [7, 2, 8, 1, 8, 2, 8]]
    with load("llama31", graphs=False) as model:
        wanted = [model.logits(text) for text in texts]
    with sequences("llama31", [text[:1] for text in texts]) as run:
        for i in range(3):
            new = [texts[0][1 + 3 * i : 4 + 3 * i], texts[1][1 + 2 * i : 3 + 2 * i]]
            run.engine.run_step(worker_step(run.engine, run.numbers, new, range(5)))
            found = run.executor.buffer("logits", 5)
            rows = [*wanted[0][1 + 3 * i : 4 + 3 * i], *wanted[1][1 + 2 * i : 3 + 2 * i]]
            assert found.tobytes() == np.array(rows).tobytes()
        assert (run.executor.steps_by_kernel, run.executor.steps_by_graph) == (2, 2)


def steps(model: nbflow.LLM, batches: list[list[list[int]]]) -> list[np.ndarray]:
    """Run batches of new sequences, whose pages are others each time; return their last logits."""
    (engine,) = model.workers
    engine.storage.ensure(16)  # whose growth would end all graphs
    found: list[np.ndarray] = []
    for batch in batches:
        first = max(engine.table.sequences, default=0) + 1
        numbers = range(first, first + len(batch))
        for number in numbers:
            engine.table.add(number)
        ends = np.cumsum([len(ids) for ids in batch]) - 1
        engine.run_step(worker_step(engine, list(numbers), batch, list(ends)))
        found.append(np.array(engine.executor.buffer("logits", len(batch))))
    return found


@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0"])
def test_prompts_of_a_bucket_share_a_graph(kv: str, tmp_path: Path, cupy: Any) -> None:
    """Other ids, pages and division into sequences; the step after the first is captured."""
    cupy.reset(checks=NO_CHECKS)
    write_llama(  # with a head size for tensor cores
        tmp_path, n_layers=1, hidden_size=32, intermediate_size=32, n_heads=2, n_kv_heads=1,
        head_dim=16, vocab_size=64, max_context=256,
    )  # fmt: skip
    rng = np.random.default_rng(3)
    prompt = rng.integers(3, 60, (5, 16)).tolist()
    batches = [
        [prompt[0][:13], prompt[0][:3]],
        [prompt[1][:2], prompt[2][:12]],
        [prompt[3][:8], prompt[4][:1]],
    ]
    with load(tmp_path, kv=kv, graphs=False) as model:
        wanted = steps(model, batches)
    with load(tmp_path, kv=kv) as model:
        executor: Any = model.workers[0].executor
        found = steps(model, batches)
        assert (executor.steps_by_kernel, executor.steps_by_graph) == (1, 2)
        (bound,) = executor._bound.values()
        assert bound.is_prompt
        assert bound.host.size == (16, 2, 2)
    for ours, other in zip(found, wanted, strict=True):
        assert ours.tobytes() == other.tobytes()


def test_graphs_of_prompts_are_limited(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used are dropped, and captured again when their shape is back."""
    from nbflow.executor import cuda

    cupy.reset(arch="sm_89")  # for which no kernel is loaded: none is compiled nor run
    monkeypatch.setattr(Kernel, "prepare", lambda *_: lambda *_: None)
    short, long = [[[3] * 9]], [[[5] * 17]]
    with load("llama31") as model:
        executor: Any = model.workers[0].executor

        def captured(batches: list[list[list[int]]]) -> list[int]:
            steps(model, batches)
            for number in model.workers[0].table.sequences:
                model.workers[0].table.drop(number)
            bound = executor._bound.values()
            return sorted(b.host.size[0] for b in bound if b.graphs is not None)

        executor.reserve(24, 2)
        assert captured(short + short) == [16]
        monkeypatch.setattr(cuda, "MAX_PROMPT_GRAPHS", 1)
        assert captured(long + long) == [24]
        assert captured(short) == [24]
        assert captured(short) == [16]
        held = model.memory()[0]
        assert held["step_bytes"] > held["graph_bytes"] == executor.graph_bytes
        (graphs,) = (b.graphs for b in executor._bound.values() if b.graphs is not None)
        graphs.n_bytes = 8
        monkeypatch.setattr(cuda, "MAX_PROMPT_GRAPH_BYTES", 8)
        monkeypatch.setattr(cuda, "MAX_PROMPT_GRAPHS", 2)
        assert captured(long + long) == [16, 24]
        monkeypatch.setattr(cuda, "MAX_PROMPT_GRAPH_BYTES", -1)
        (bound,) = (b for b in executor._bound.values() if b.host.size[0] == 24)
        executor._limit_prompt_graphs(bound)
        assert captured(long + long + long) == []
        assert not bound.fits


def test_rows_have_the_same_bits_op_by_op(cupy: Any) -> None:
    """Nine tokens at once are too many for the fused kernels; in three steps they are not."""
    ids = list(range(3, 12))
    with load("llama31", max_step_tokens=9) as model:
        whole = model.logits(ids)
    with load("llama31", max_step_tokens=3) as model:
        assert model.logits(ids).tobytes() == whole.tobytes()


def test_ranks_run_graphs_between_their_exchanges(cupy: Any) -> None:
    options = {"weights": None, "partition": "0&1"}
    with nbflow.load(FOLDER / "llama31", kv="f32") as model:
        expected = model.generate([3], 3, ignore_eos=True).ids
    with load("llama31", **options) as model:
        assert model.generate([3], 3, ignore_eos=True).ids == expected
        for engine in model.workers:
            executor: Any = engine.executor
            assert executor.steps_by_graph == 2
            (graphs,) = (b.graphs for b in executor._bound.values() if b.graphs)
            # sums behind the embedding, attention and network of two layers, and the head
            assert (graphs.n_graphs, len(graphs.parts)) == (6, 6 + 6)


def test_pages_that_have_moved_are_noticed(cupy: Any) -> None:
    prompts = [[3]]
    wanted = expected("llama31", prompts, [[1, 2]])[0]
    with sequences("llama31", prompts) as run:
        assert error(run.step([1])[0], wanted[0]) < TOLERANCE
        run.engine.storage.ensure(run.engine.storage.n_pages + 3)  # other arrays
        assert error(run.step([2])[0], wanted[1]) < TOLERANCE
        assert (run.executor.steps_by_kernel, run.executor.steps_by_graph) == (2, 1)


def test_an_op_that_waits_cannot_be_captured(cupy: Any) -> None:
    from nbflow.executor.cuda_graphs import capture

    x = cupy.zeros(4, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    for call in (x.get, stream.synchronize, lambda: x.set(np.zeros(4, np.float32))):
        with stream, pytest.raises(ValueError, match="while a stream is captured"):
            capture([PythonOp("x", call)], cupy, stream, type(x).__kernel_device__)
        assert not stream.is_capturing()


def test_vram_is_accounted_to_the_byte(cupy: Any) -> None:
    device = State.device
    with sequences("llama31", [[3]]) as run:
        for token in (1, 2):
            run.step([token])
        held = run.engine.memory()
        names = ("weight_bytes", "kv_bytes", "workspace_bytes", "step_bytes")
        # loaded kernels have variables, and launches parameters
        variables = (each for held in device.variables.values() for each in held.values())
        places = (*variables, device._workspace, device._parameters)
        loaded = sum(place.nbytes for place in places if place is not None)
        assert device.device_bytes - loaded == sum(held[name] for name in names)
    del run
    gc.collect()
    assert device.device_bytes == loaded  # nothing is left behind


@pytest.mark.parametrize("name", ["llama31", "bert"])
def test_hidden_states_without_logits(name: str) -> None:
    """Texts that are embedded share steps with requests that draw; the head leaves them out."""
    prompts, rows, found = [[3, 5, 7], [2, 9]], [2, 3, 4], []
    for n_logits in (3, 1, 0):
        with load(name) as model:
            (engine,) = model.workers
            for number in (0, 1):
                engine.table.add(number)
            engine.run_step(worker_step(engine, [0, 1], prompts, rows, None, n_logits))
            states = np.array(engine.executor.buffer("y", 3))
            found.append((states, np.array(engine.executor.buffer("logits", n_logits))))
    for states, logits in found[1:]:
        assert states.tobytes() == found[0][0].tobytes()
        assert logits.tobytes() == found[0][1][: len(logits)].tobytes()
    assert np.abs(found[0][1]).max() > 0

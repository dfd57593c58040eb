"""Sections ``model_*``: whole models of random weights, their speed and their memory."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import nbflow
from nbflow.benchmark.timing import Test, time_test
from nbflow.first_gpu_run.random_model import SHAPES, write
from nbflow.first_gpu_run.sections import Context
from nbflow.planner.memory_plan import plan_memory
from nbflow_kernels.benchmarks.gpu import copy_bandwidth
from nbflow_kernels.cuda import cache

BATCHES = (1, 8, 32)
TESTS = (
    *(Test(0, 64, batch, depth=64) for batch in BATCHES),
    *(Test(n, 0) for n in (512, 2048)),
    *(Test(0, 64, 1, depth=2048),),
)
EMULATED = (Test(0, 1, 1),)
EMULATED_FORMAT = "q4_0"
REPEATS = 5
COPY_BYTES = 1 << 28


def one_model(context: Context, shape: str, format: str) -> None:
    """Load a model of random weights and time it; `shape` and `format` name it."""
    cupy = context.cupy()
    chosen = shape
    if context.emulator:
        chosen, format = ("tiny-moe" if SHAPES[shape].n_experts else "tiny"), EMULATED_FORMAT
    device = "emulator" if context.emulator else "cuda"
    copy = None if context.emulator else _copy_bandwidth(cupy)
    with tempfile.TemporaryDirectory(prefix="nbflow-") as folder:
        path, started = Path(folder, "model.gguf"), time.perf_counter()
        write(path, SHAPES[chosen], format)
        context.emit({"written_s": time.perf_counter() - started, "bytes": path.stat().st_size})
        options: dict[str, Any] = {"device": device, "kv": "f16"}
        tests = EMULATED if context.emulator else TESTS
        before, started = _used(cupy, context), time.perf_counter()
        with nbflow.load(path, **options) as model:
            after = _used(cupy, context)
            context.emit({"loaded_s": time.perf_counter() - started, "vram_bytes": after - before})
            for test in tests:
                context.emit(_timed(model, test, 1 if context.emulator else REPEATS, copy))
            _emit_memory(context, model, path, options, _used(cupy, context) - before)
    context.emit({"machine code": dict(cache.sources)})


def _copy_bandwidth(cupy: Any) -> float:
    """Return the copy bandwidth, and leave no memory in CuPy's pool."""
    found = copy_bandwidth(cupy, 5, COPY_BYTES)
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    return found


def _used(cupy: Any, context: Context) -> int:
    """Return the bytes in use on the device."""
    if context.emulator:
        return int(cupy.memory_bytes()["device_bytes"])
    cupy.cuda.Device().synchronize()
    free, total = cupy.cuda.Device().mem_info
    return int(total - free)


def _timed(model: nbflow.LLM, test: Test, repeats: int, copy: float | None) -> dict[str, Any]:
    """Return a row: tokens/s, share of the copy bandwidth, steps that were graphs."""
    row: dict[str, Any] = {"test": test.name, "batch": test.batch}
    try:
        time_test(model, test)
        steps = _steps(model)
        seconds = [time_test(model, test) for _ in range(repeats)]
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {error}"[:2000]}
    median = statistics.median(seconds)
    by_graph, by_kernel = (now - old for now, old in zip(_steps(model), steps, strict=True))
    row |= {"tokens_per_s": test.n_tokens / median, "samples_s": seconds}
    row |= {"steps_by_graph": by_graph, "steps_by_kernel": by_kernel}
    if test.n_gen and not test.n_prompt:
        row["read_bytes_per_s"] = model.memory()[0]["matrix_bytes"] * test.n_gen / median
        if copy:
            row["copy_share"] = row["read_bytes_per_s"] / copy
    return row


def _steps(model: nbflow.LLM) -> tuple[int, int]:
    """Return how many steps were graphs, and how many single launches."""
    executor = model.workers[0].executor
    return getattr(executor, "steps_by_graph", 0), getattr(executor, "steps_by_kernel", 0)


def _emit_memory(
    context: Context, model: nbflow.LLM, path: Path, options: dict[str, Any], taken: int
) -> None:
    """Write what the model has allocated, what the device says, and the plan."""
    held = model.memory()[0]
    own = sum(held[key] for key in ("weight_bytes", "kv_bytes", "workspace_bytes", "step_bytes"))
    row: dict[str, Any] = {"memory": held, "counted_bytes": own, "vram_bytes": taken}
    row["counted_share"] = own / max(taken, 1)
    try:
        plan = plan_memory(path, **options, max_sequences=max(BATCHES)).ranks[0]
        row["planned_weight_bytes"] = plan.weight_bytes
        row["weight_share_of_plan"] = held["weight_bytes"] / max(plan.weight_bytes, 1)
    except Exception as error:
        row["error"] = f"no plan: {type(error).__name__}: {error}"[:500]
    context.emit(row)

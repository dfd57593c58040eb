"""Memory use of a point.

The KV cache and the buffers of earlier steps are freed and the peaks restarted; then the `decode`
measure's work runs once, untimed: `batch` prompts of `prompt` tokens and `decode` steps.
`weight_bytes` is what each rank of the model holds; `kv_bytes` the largest number of bytes of KV
pages in use at once, without pages that the cache holds in reserve, `kv_allocated_bytes` with them;
`workspace_bytes` the buffers of the largest step.  All have their sums over the ranks (tensors that
several ranks store count once per rank).  The `plan_` columns are the memory plan's predictions of
the same, from the model's header, the partition and the lengths.

`vram_` columns are there if a rank is on a device: the driver's count of memory in use
(cudaMemGetInfo; the emulator's own count), of whole devices, summed over them.
`vram_before_bytes` is read before the model is loaded, when each process has its CUDA context and
freed memory was returned; the others are differences to it: after loading, after the batch, and the
largest reading while it ran (after the first two runs of each shape of step).  They hold what the
plan leaves out, too: code of kernels loaded since, and the rounding of CuPy's pools.  The plan's
`plan_step_bytes` counts the longest prompt and the largest decode step.  Programs that allocate on
the device meanwhile are counted as well.  `nvml_bytes` is the driver's number of
the processes alone, with their contexts.

`peak_rss_bytes` is the peak resident set of the whole process during this run, with Python, the
compiled kernels and the weights, without loading and the evaluation (since the process began where
the system cannot reset the mark); ranks that share a process report the same number, and the
summary is the largest.  The emulator's devices are in this memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from nbflow_experiments import backend
from nbflow_experiments.measures.measure import Context, Measure, MeasureResult, Reading
from nbflow_kernels.errors import UsageError

_OF_RANKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "weight_bytes": ("weight_bytes", sum),
    "kv_bytes": ("kv_used_bytes", sum),
    "kv_allocated_bytes": ("kv_bytes", sum),
    "workspace_bytes": ("workspace_bytes", sum),
    "peak_rss_bytes": ("peak_rss_bytes", max),
}
"""Metric -> key of `LLM.memory`, and how ranks are summarized."""
_OF_DEVICE_RANKS = ("step_bytes", "graph_bytes", "communicator_bytes")
_OF_DEVICES = ("vram_before_bytes", "vram_load_bytes", "vram_bytes", "vram_peak_bytes")
_OF_PROCESSES = ("pool_bytes", "nvml_bytes")
_OF_PLAN = ("weight_bytes", "kv_bytes", "workspace_bytes")


def run(context: Context) -> MeasureResult:
    """Run the batch once and read the counters of every rank."""
    # Points share a loaded model, whose cache and peak would be those of the largest before.
    context.model.reset_memory()
    batch, prompt, steps = (context.number(name) for name in ("batch", "prompt", "decode"))
    backend.time_decode(context.model, prompt, steps, batch, 1, 0)
    rows, devices = context.model.memory(), context.model.devices()
    if not context.leads:
        return MeasureResult()
    readings: list[Reading] = []
    for name, (key, total) in _OF_RANKS.items():
        readings += _readings(name, [(row["rank"], row[key]) for row in rows], total)
    readings += _device_readings(rows, devices)
    try:
        readings += _planned(context)
    except UsageError as error:
        warnings.warn(f"no memory plan: {error}", stacklevel=1)
    hardware = dict.fromkeys(f"{d['device']}: {d['hardware']}" for d in devices)
    return MeasureResult(readings, devices="; ".join(hardware))


def _readings(
    name: str, values: Sequence[tuple[int, int]], total: Callable[..., Any] = sum
) -> list[Reading]:
    """Return the summary of values by rank, followed by each; none without values."""
    if not values:
        return []
    whole = Reading(name, float(total(value for _, value in values)), "byte", len(values))
    return [whole, *(Reading(name, float(value), "byte", rank=rank) for rank, value in values)]


def _device_readings(
    rows: Sequence[dict[str, int]], devices: Sequence[dict[str, str]]
) -> list[Reading]:
    """Return the memory of devices: what ranks share counts once, with the first of them."""
    ranks: list[dict[str, int]] = []
    shared: dict[str, dict[str, int]] = {}
    of_process: dict[tuple[str, str], dict[str, int]] = {}
    for row, device in zip(rows, devices, strict=True):
        if device["key"]:
            ranks.append(row)
            shared.setdefault(device["key"], row)
            of_process.setdefault((device["key"], device["process"]), row)
    readings: list[Reading] = []
    for names, chosen in (
        (_OF_DEVICE_RANKS, ranks),
        (_OF_DEVICES, [*shared.values()]),
        (_OF_PROCESSES, [*of_process.values()]),
    ):
        for name in names:
            readings += _readings(name, [(row["rank"], row[name]) for row in chosen if name in row])
    return readings


def _planned(context: Context) -> list[Reading]:
    """Return the memory plan of the point."""
    plan = backend.plan_memory(context.config, context.model.plan.partition)
    readings: list[Reading] = []
    for name in _OF_PLAN:
        readings += _readings(f"plan_{name}", [(r.rank, getattr(r, name)) for r in plan.ranks])
    on_devices = [r for r, device in zip(plan.ranks, plan.devices, strict=True) if device != "cpu"]
    readings += _readings("plan_step_bytes", [(r.rank, r.step_bytes) for r in on_devices])
    return readings + _readings("plan_vram_bytes", [(r.rank, r.device_bytes) for r in on_devices])


MEASURE = Measure("memory", "point", run, str(__doc__))

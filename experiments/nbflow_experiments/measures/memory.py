"""Memory use of a point.

The KV cache and the buffers of earlier steps are freed and the peaks restarted; then the `decode`
measure's work runs once, untimed: `batch` prompts of `prompt` tokens and `decode` steps.
`weight_bytes` is what each rank of the model holds; `kv_bytes` the largest number of bytes of KV
pages in use at once, without pages that the cache holds in reserve.  Both have their sums over the
ranks (tensors that several ranks store count once per rank).  `peak_rss_bytes` is the peak resident
set of the whole process during this run, with Python, the compiled kernels and the weights, without
loading and the evaluation (since the process began where the system cannot reset the mark); ranks
that share a process report the same number, and the summary is the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbflow_experiments import backend
from nbflow_experiments.measures.measure import Context, Measure, MeasureResult, Reading


def run(context: Context) -> MeasureResult:
    """Run the batch once and read the counters of every rank."""
    # Points share a loaded model, whose cache and peak would be those of the largest before.
    context.model.reset_memory()
    batch, prompt, steps = (context.number(name) for name in ("batch", "prompt", "decode"))
    backend.time_decode(context.model, prompt, steps, batch, 1, 0)
    rows = context.model.memory()
    if not context.leads:
        return MeasureResult()
    totals: dict[str, tuple[str, Callable[..., Any]]] = {
        "weight_bytes": ("weight_bytes", sum),
        "kv_bytes": ("kv_used_bytes", sum),
        "peak_rss_bytes": ("peak_rss_bytes", max),
    }
    readings = [
        Reading(name, float(total(row[key] for row in rows)), "byte", len(rows))
        for name, (key, total) in totals.items()
    ]
    readings += [
        Reading(name, float(row[key]), "byte", rank=row["rank"])
        for row in rows
        for name, (key, _) in totals.items()
    ]
    return MeasureResult(readings)


MEASURE = Measure("memory", "point", run, str(__doc__))

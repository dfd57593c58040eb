"""Memory use of a point.

Bytes of the weights and of the key/value cache that each rank of the model holds, and their sums
over the ranks (tensors that several ranks store count once per rank).  The peak resident set is
that of the whole process since the model was loaded (since its start where the system cannot reset
the mark), with Python, the compiled kernels and the logits of the evaluation; ranks that share a
process report the same number, and the summary is the largest.  Read once, after the other
measures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbflow_experiments.measures.measure import Context, Measure, MeasureResult, Reading


def run(context: Context) -> MeasureResult:
    """Read the counters of every rank."""
    rows = context.model.memory()
    if not context.leads:
        return MeasureResult()
    totals: dict[str, Callable[..., Any]]
    totals = {"weight_bytes": sum, "kv_bytes": sum, "peak_rss_bytes": max}
    readings = [
        Reading(name, float(total(row[name] for row in rows)), "byte", len(rows))
        for name, total in totals.items()
    ]
    readings += [
        Reading(name, float(row[name]), "byte", rank=row["rank"]) for row in rows for name in totals
    ]
    return MeasureResult(readings)


MEASURE = Measure("memory", "point", run, str(__doc__))

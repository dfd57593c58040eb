"""Memory use of a point.

Bytes of the weights and of the key/value cache that each rank of the model holds, and their sums
over the ranks (tensors that several ranks store count once per rank).  The peak resident set is
that of the whole process since the model was loaded (since its start where the system cannot reset
the mark), with Python, the compiled kernels and the logits of the evaluation; ranks that share a
process report the same number, and the summary is the largest.  Read once, after the other
measures.
"""

from __future__ import annotations

from nbflow_experiments.measures.measure import Context, Measure, MeasureResult, Reading


def run(context: Context) -> MeasureResult:
    """Read the counters of every rank."""
    rows = context.model.memory()
    if not context.leads:
        return MeasureResult()
    n = len(rows)
    readings = [
        Reading("weight_bytes", float(sum(r["weight_bytes"] for r in rows)), "byte", n),
        Reading("kv_bytes", float(sum(r["kv_bytes"] for r in rows)), "byte", n),
        Reading("peak_rss_bytes", float(max(r["peak_rss_bytes"] for r in rows)), "byte", n),
    ]
    for row in rows:
        for name in ("weight_bytes", "kv_bytes", "peak_rss_bytes"):
            readings.append(Reading(name, float(row[name]), "byte", rank=row["rank"]))
    return MeasureResult(readings)


MEASURE = Measure("memory", "point", run, str(__doc__))

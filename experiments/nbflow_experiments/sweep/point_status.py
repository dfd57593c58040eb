"""Status of a finished point, and its error as plain data.

========== =================================================================================
done       every measure ran, and every summary is a finite number
nonfinite  every measure ran, but some summary is not finite
oom        memory ran out
timeout    it was ended after ``--timeout`` seconds
failed     anything else
========== =================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from nbflow_experiments import backend
from nbflow_experiments.config.points import Point
from nbflow_experiments.measures import MeasureResult
from nbflow_experiments.store import provenance
from nbflow_experiments.store.results_folder import SCHEMA_VERSION
from nbflow_experiments.sweep.rank_barrier import StepFailed

OUTLIER_BITS = 64
"""Bits of an outlier that is stored outside the format."""


def new_result(point: Point, launch: str, attempt: int) -> dict[str, Any]:
    """Return the result of a point that begins now, as if all went well."""
    return {
        "schema_version": SCHEMA_VERSION,
        "id": point.id,
        "status": "done",
        "error": None,
        "launch": launch,
        "attempt": attempt,
        "started": provenance.now(),
        "quality_shared_from": None,
    }


def note_failure(result: dict[str, Any], failure: StepFailed) -> None:
    """Put the first rank's error into a result, and which ranks failed."""
    first = failure.failures[0]
    memory = "MemoryError" in first.type or "OUT_OF_MEMORY" in first.message.upper()
    result["status"] = "oom" if memory else "failed"
    result["error"] = {
        "type": first.type,
        "message": first.message,
        "traceback": first.traceback,
        "ranks": [f.rank for f in failure.failures],
    }


def note_not_finite(result: dict[str, Any], readings: Iterable[Mapping[str, Any]]) -> None:
    """Mark a result that succeeded if summaries of it are not finite numbers."""
    names = [
        reading["metric"]
        for reading in readings
        if reading["rank"] is None
        and reading["repeat"] is None
        and not math.isfinite(reading["value"])
    ]
    if names and result["status"] == "done":
        result["status"] = "nonfinite"  # pandas would read "nan" as a missing value
        message = f"not finite: {', '.join(names)}"
        result["error"] = {"type": "NotFinite", "message": message, "traceback": "", "ranks": []}


def bits_per_weight(point: Point, measured: Mapping[str, MeasureResult]) -> float:
    """Return the bits of a weight: the format's, and with outliers what was counted, if it was."""
    bits, outliers = backend.bits_per_weight(str(point.config["weights"])), point.config["outliers"]
    if not outliers:
        return bits
    counted = measured.get("weight_error", MeasureResult()).readings
    stored = [r.value for r in counted if r.metric == "stored_bits_per_weight"]
    return stored[0] if stored else bits + OUTLIER_BITS * float(outliers)

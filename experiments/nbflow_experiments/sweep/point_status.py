"""Status of a finished point, and its error as plain data.

========== =================================================================================
done       every measure ran, and every summary is a finite number
nonfinite  every measure ran, but some summary is not finite
oom        out of memory
timeout    ended after ``--timeout`` seconds
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
    """Return the initial result of a starting point, with status done."""
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
    """Record the first rank's error and the failed ranks in a result."""
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
    """Mark a successful result as nonfinite if a summary is not finite."""
    names = [
        reading["metric"]
        for reading in readings
        if reading["rank"] is None
        and reading["repeat"] is None
        and not math.isfinite(reading["value"])
    ]
    if names and result["status"] == "done":
        result["status"] = "nonfinite"  # pandas reads "nan" as a missing value
        message = f"not finite: {', '.join(names)}"
        result["error"] = {"type": "NotFinite", "message": message, "traceback": "", "ranks": []}


def bits_per_weight(point: Point, measured: Mapping[str, MeasureResult]) -> float:
    """Return the bits per weight: the format's, or the measured ones if there are outliers."""
    config, outliers = point.config, point.config["outliers"]
    bits = backend.bits_per_weight(str(config["weights"]), str(config["model"]))
    if not outliers:
        return bits
    counted = measured.get("weight_error", MeasureResult()).readings
    stored = [r.value for r in counted if r.metric == "stored_bits_per_weight"]
    return stored[0] if stored else bits + OUTLIER_BITS * float(outliers)

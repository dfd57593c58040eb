"""Table of docs/cuda.md: host time of launches, from results/launches."""

from __future__ import annotations

from pathlib import Path

from published_rows import latest

ROWS = Path(__file__).resolve().parents[2] / "results/launches/amd-epyc-zen4-2-cores/rows.jsonl"


def launches() -> str:
    """Return the microseconds of a launch by op."""
    lines = ["| call | launches | op | recorded |", "|---|---:|---:|---:|"]
    for row in latest(ROWS, "op"):
        times = (row["now_us"], row["recorded_us"])
        cells = " | ".join(f"{time:.1f}" for time in times)
        lines.append(f"| {row['op']} | {row['launches']} | {cells} |")
    return "\n".join(lines)

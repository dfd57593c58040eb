"""Table of docs/performance.md: the int8 GEMV by format, from results/gemv."""

from __future__ import annotations

from pathlib import Path

from published_rows import latest

ROWS = Path(__file__).resolve().parents[2] / "results/gemv/intel-xeon-2-cores/rows.jsonl"


def gemv() -> str:
    """Return instructions, speed in the cache and share of the read bandwidth by format."""
    lines = [
        "| format | bits/weight | instructions | in the cache, GB/s | read, GB/s | share |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in latest(ROWS, "weights"):
        cells = (
            f"{row['packed_bits_per_weight']:.2f}",
            f"{row['instructions_per_512_weights']:.0f}",
            f"{row['cached_gb_per_s_of_a_thread']:.0f}",
            f"{row['read_gb_per_s']:.1f}",
            f"{row['share_of_read']:.0%}",
        )
        lines.append(f"| {row['weights']} | {' | '.join(cells)} |")
    return "\n".join(lines)

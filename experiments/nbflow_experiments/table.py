"""Tables for the terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nbflow_experiments.config.points import Point
from nbflow_experiments.optional_packages import require

_COLUMNS = (
    ("bits_per_weight", "bits", "{:.2f}", 1.0),
    ("weight_error_relative", "weight error", "{:.4f}", 1.0),
    ("perplexity", "perplexity", "{:.3f}", 1.0),
    ("kld_mean_nats", "KLD/nat", "{:.2e}", 1.0),
    ("top1_agreement_share", "top-1 %", "{:.1f}", 100.0),
    ("prefill_tokens_per_s", "prefill tok/s", "{:.0f}", 1.0),
    ("decode_tokens_per_s", "decode tok/s", "{:.0f}", 1.0),
    ("batching_tokens_per_s", "batched tok/s", "{:.0f}", 1.0),
    ("batching_speedup", "of one by one", "{:.2f}", 1.0),
    ("prefix_cold_ttft_s", "cold TTFT ms", "{:.1f}", 1e3),
    ("prefix_ttft_s", "warm TTFT ms", "{:.1f}", 1e3),
    ("cascade_flat_s", "flat us", "{:.0f}", 1e6),
    ("cascade_shared_speedup", "shared, times", "{:.2f}", 1.0),
    ("cascade_levels_speedup", "levels, times", "{:.2f}", 1.0),
    ("cascade_byte_ratio", "bytes, times", "{:.2f}", 1.0),
    ("speculation_accepted_share", "accepted %", "{:.1f}", 100.0),
    ("speculation_tokens_per_step", "tokens/step", "{:.2f}", 1.0),
    ("speculation_speedup", "of plain", "{:.2f}", 1.0),
    ("traffic_bytes_per_token", "sent B/tok", "{:.0f}", 1.0),
    ("weight_bytes", "weights MB", "{:.2f}", 1e-6),
)


def console() -> Any:
    """Return a rich console; wide where the output is not a terminal."""
    width = None if sys.stdout.isatty() else 170
    return require("rich.console").Console(width=width, highlight=False, force_jupyter=False)


def summary_table(rows: Sequence[Mapping[str, Any]], factors: Sequence[str]) -> Any:
    """Return the final table of a sweep.

    Parameters
    ----------
    rows : sequence of mappings
        For each point its settings, ``status``, ``bits_per_weight``, the summaries by metric and
        ``perplexity_stderr``.
    factors : sequence of str
        Settings that vary; they come first.
    """
    table = require("rich.table").Table(box=require("rich.box").SIMPLE_HEAD)
    for factor in factors:
        table.add_column(factor)
    shown = [c for c in _COLUMNS if any(row.get(c[0]) is not None for row in rows)]
    for _, heading, _, _ in shown:
        table.add_column(heading, justify="right")
    failed = any(row["status"] != "done" for row in rows)
    if failed:
        table.add_column("status")
    text = require("rich.text").Text
    for row in rows:
        cells = [str(row[factor]) for factor in factors]
        cells += [_cell(row, name, form, factor) for name, _, form, factor in shown]
        if failed:
            cells.append(row["status"])
        table.add_row(*(text(cell) for cell in cells))
    return table


def _cell(row: Mapping[str, Any], name: str, form: str, factor: float) -> str:
    """Return one number as text, with its standard error where that is quoted."""
    value = row.get(name)
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    text = form.format(value * factor) if abs(value) < 1e5 or factor < 1 else f"{value:.3g}"
    error = row.get(f"{name}_stderr")
    if name == "perplexity" and error is not None and math.isfinite(error):
        text += f" ± {error:.3f}" if error < 1e5 else f" ± {error:.3g}"
    return text


def points_table(
    points: Sequence[Point], factors: Sequence[str], estimates: Sequence[Mapping[str, int]]
) -> Any:
    """Return the table of ``--dry-run``."""
    table = require("rich.table").Table(box=require("rich.box").SIMPLE_HEAD)
    table.add_column("point", no_wrap=True)
    for factor in factors:
        table.add_column(factor)
    table.add_column("weights MB", justify="right")
    table.add_column("KV MB", justify="right")
    text = require("rich.text").Text
    for point, estimate in zip(points, estimates, strict=True):
        cells = [point.short, *(str(point.config[factor]) for factor in factors)]
        cells.append(f"{estimate['weight_bytes'] / 1e6:.2f}")
        cells.append(f"{estimate['kv_bytes'] / 1e6:.2f}")
        table.add_row(*(text(cell) for cell in cells))
    return table

"""Terminal output of a sweep: a progress bar or plain lines, and the tables."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nbflow_experiments.config.points import Point
from nbflow_experiments.optional_packages import require
from nbflow_experiments.terminal_table import print_table

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
    ("vram_bytes", "VRAM MB", "{:.2f}", 1e-6),
)
"""Columns of the final table: metric, heading, format and factor."""


def label(point: Point, factors: Sequence[str]) -> str:
    """Return the settings that distinguish a point: ``weights=q4 partition=0&1``."""
    return " ".join(f"{name}={point.config[name]}" for name in factors) or point.short


def headline(kind: str, message: str) -> str:
    """Return type and first line of a recorded error; all of it is in ``log.txt``."""
    lines = message.strip().splitlines() or [""]
    return f"{kind}: {lines[0]}" + (" ..." if len(lines) > 1 else "")


def _failure(error: Mapping[str, Any]) -> str:
    return headline(error["type"], error["message"])


class Reporter:
    """Progress reporter; the base class is silent, for child processes."""

    def __init__(self, factors: Sequence[str] = (), total: int = 0) -> None:
        self.factors = factors
        self.total = total

    def begins(self, point: Point) -> None:
        """Report the start of a point."""

    def step(self, name: str) -> None:
        """Report the current step."""

    def ends(self, point: Point, result: dict[str, Any], *, last: bool = True) -> None:
        """Report the end of an attempt; `last` if it will not be retried."""

    def close(self) -> None:
        """Restore the terminal."""


class PlainReporter(Reporter):
    """One line per finished point, for logs."""

    def __init__(self, factors: Sequence[str], total: int) -> None:
        super().__init__(factors, total)
        self._start = time.perf_counter()
        self._count = 0

    def ends(self, point: Point, result: dict[str, Any], *, last: bool = True) -> None:
        """Write one line."""
        if result["error"] and not last:
            failure = f"{result['status']} ({_failure(result['error'])})"
            print(f"{label(point, self.factors)}: {failure}, once more", flush=True)
            return
        self._count += 1
        elapsed = time.perf_counter() - self._start
        left = elapsed / self._count * (self.total - self._count)
        text = f"[{self._count}/{self.total}] {label(point, self.factors)}: {result['status']}"
        if result["error"]:
            text += f" ({_failure(result['error'])})"
        print(f"{text} in {result['wall_s']:.1f} s, about {left:.0f} s left", flush=True)


class BarReporter(Reporter):
    """Progress bar with current point and step; failures are printed above it."""

    def __init__(self, factors: Sequence[str], total: int) -> None:
        super().__init__(factors, total)
        progress = require("rich.progress")
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=30),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(elapsed_when_finished=False),
            progress.TextColumn("{task.description}", markup=False),
        )
        self._task = self._bar.add_task("", total=total)
        self._bar.start()
        self._label = ""

    def begins(self, point: Point) -> None:
        """Show the point."""
        self._label = label(point, self.factors)
        self._bar.update(self._task, description=self._label)

    def step(self, name: str) -> None:
        """Show the step."""
        self._bar.update(self._task, description=f"{self._label}: {name}")

    def ends(self, point: Point, result: dict[str, Any], *, last: bool = True) -> None:
        """Advance the bar."""
        if result["error"]:
            text = f"{result['status']}: {self._label}: {_failure(result['error'])}"
            self._bar.console.print(text, markup=False)
            if not last:
                return
        self._bar.advance(self._task)

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()


def make_reporter(factors: Sequence[str], total: int) -> Reporter:
    """Return a bar on a terminal, plain lines otherwise."""
    if sys.stdout.isatty() and total:
        return BarReporter(factors, total)
    return PlainReporter(factors, total)


def print_summary(rows: Sequence[Mapping[str, Any]], factors: Sequence[str]) -> None:
    """Print the final table of a sweep.

    Parameters
    ----------
    rows : sequence of mappings
        For each point its settings, ``status``, ``bits_per_weight``, the summaries by metric and
        ``perplexity_stderr``.
    factors : sequence of str
        Settings that vary; they come first.
    """
    shown = [c for c in _COLUMNS if any(row.get(c[0]) is not None for row in rows)]
    status = ["status"] if any(row["status"] != "done" for row in rows) else []
    cells = [
        [
            *(str(row[name]) for name in factors),
            *(_cell(row, name, form, factor) for name, _, form, factor in shown),
            *(row[name] for name in status),
        ]
        for row in rows
    ]
    print_table([*factors, *(heading for _, heading, _, _ in shown), *status], cells, len(factors))


def _cell(row: Mapping[str, Any], name: str, form: str, factor: float) -> str:
    """Return one number as text, with its standard error if the table shows it."""
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


def print_points(
    points: Sequence[Point], factors: Sequence[str], estimates: Sequence[Mapping[str, int]]
) -> None:
    """Print the table of ``--dry-run``."""
    sizes = {"weight_bytes": "weights MB", "kv_bytes": "KV MB"}
    if any(estimate["state_bytes"] for estimate in estimates):
        sizes["state_bytes"] = "states MB"
    cells = [
        [
            point.short,
            *(str(point.config[factor]) for factor in factors),
            *(f"{estimate[name] / 1e6:.2f}" for name in sizes),
        ]
        for point, estimate in zip(points, estimates, strict=True)
    ]
    print_table(["point", *factors, *sizes.values()], cells, 1 + len(factors))

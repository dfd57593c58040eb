"""What rank 0 shows while a sweep runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from nbflow_experiments.config.points import Point
from nbflow_experiments.optional_packages import require


def label(point: Point, factors: Sequence[str]) -> str:
    """Return what tells a point from the others: ``weights=q4 partition=0&1``."""
    return " ".join(f"{name}={point.config[name]}" for name in factors) or point.short


def headline(error: Mapping[str, Any]) -> str:
    """Return type and first line of a recorded error; all of it is in ``log.txt``."""
    lines = str(error["message"]).strip().splitlines() or [""]
    return f"{error['type']}: {lines[0]}" + (" ..." if len(lines) > 1 else "")


class Reporter(ABC):
    """Shows progress.

    Parameters
    ----------
    factors : sequence of str
        Settings that vary.
    total : int
        Points to run.
    """

    def __init__(self, factors: Sequence[str], total: int) -> None:
        self.factors = factors
        self.total = total
        self.count = 0

    @abstractmethod
    def begins(self, point: Point) -> None:
        """Say that a point begins."""

    @abstractmethod
    def step(self, name: str) -> None:
        """Say what is being done."""

    @abstractmethod
    def ends(self, point: Point, result: dict[str, Any], *, last: bool = True) -> None:
        """Say how an attempt at a point ended; `last` if there is no other after a failure."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainReporter(Reporter):
    """One line per finished point, for logs."""

    def __init__(self, factors: Sequence[str], total: int) -> None:
        super().__init__(factors, total)
        self._start = time.perf_counter()

    def begins(self, point: Point) -> None:
        """Say nothing: a line is written when the point ends."""

    def step(self, name: str) -> None:
        """Say nothing."""

    def ends(self, point: Point, result: dict[str, Any], *, last: bool = True) -> None:
        """Write one line."""
        if result["error"] and not last:
            failure = f"{result['status']} ({headline(result['error'])})"
            print(f"{label(point, self.factors)}: {failure}, once more", flush=True)
            return
        self.count += 1
        elapsed = time.perf_counter() - self._start
        left = elapsed / self.count * (self.total - self.count)
        text = f"[{self.count}/{self.total}] {label(point, self.factors)}: {result['status']}"
        if result["error"]:
            text += f" ({headline(result['error'])})"
        print(f"{text} in {result['wall_s']:.1f} s, about {left:.0f} s left", flush=True)

    def close(self) -> None:
        """Do nothing: there is nothing to tidy up."""


class SilentReporter(Reporter):
    """Nothing, where another process reports."""

    def begins(self, point: Point) -> None:
        """Say nothing."""

    def step(self, name: str) -> None:
        """Say nothing."""

    def ends(self, point: Point, result: dict[str, Any], *, last: bool = True) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Do nothing."""


class BarReporter(Reporter):
    """A progress bar with the present point and step; failures stay above it."""

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
        """Move the bar on."""
        if result["error"]:
            text = f"{result['status']}: {self._label}: {headline(result['error'])}"
            self._bar.console.print(text, markup=False)
            if not last:
                return
        self._bar.advance(self._task)

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()


def make_reporter(factors: Sequence[str], total: int) -> Reporter:
    """Return the reporter that suits the output."""
    if sys.stdout.isatty() and total:
        return BarReporter(factors, total)
    return PlainReporter(factors, total)

"""Trace of steps: each op with its time and the first values of its output."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any, TextIO

from nbflow.program.records import Op
from nbflow_kernels.arrays import on_host

N_VALUES = 4
"""Values shown of the last row of an output: that of the newest token."""


class TracePrinter:
    """Printer of one rank's ops, `Executor.trace`.

    Parameters
    ----------
    rank : int
        Number of the rank.
    file : text file, optional
        By default standard error.
    """

    def __init__(self, rank: int, file: TextIO | None = None) -> None:
        self._rank = rank
        self._file = file
        self._n_steps, self._step = 0, ""
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def begin(self, model: str, n_tokens: int, n_logits: int) -> None:
        """Print the head of a step of a model, or of its encoder."""
        self._n_steps += 1
        self._seconds.clear()
        self._step = f"trace rank {self._rank} step {self._n_steps}"
        self._print(f"{self._step}: {model}, {n_tokens} tokens, {n_logits} rows of logits")

    def op(self, op: Op, output: Any, seconds: float) -> None:
        """Print an op; `output` is its output matrix, or None."""
        self._seconds[op.kind] += seconds
        where = "" if op.layer is None else f"L{op.layer}"
        line = f"  {where:<4} {op.kind:<15} {op.out:<12} {seconds * 1e3:9.3f} ms"
        if output is not None:
            line += f"  {output.shape[0]} x {output.shape[1]}"
            if output.size:
                values = on_host(output[len(output) - 1])[:N_VALUES]
                line += "  " + " ".join(f"{value:.5g}" for value in values)
        self._print(line)

    def end(self) -> None:
        """Print the time of a step by kind of op."""
        total = sum(self._seconds.values())
        ordered = sorted(self._seconds.items(), key=lambda item: -item[1])
        kinds = ", ".join(f"{kind} {seconds * 1e3:.3f}" for kind, seconds in ordered)
        self._print(f"{self._step}: {total * 1e3:.3f} ms: {kinds}")

    def _print(self, line: str) -> None:
        print(line, file=self._file or sys.stderr, flush=True)

#!/usr/bin/env python3
"""Run nbflow with sleeping steps, to measure the overhead of scheduling and serving alone.

    python tools/measure/scheduling_overhead.py '[[1, 0.02], [32, 0.11]]' serve MODEL --port 8080

The first argument is a list of pairs: tokens of a step and its seconds (interpolated in between,
extrapolated after the last pair); the other arguments are those of nbflow.  Requests, pages and
steps are those of a real run, except that a CPU step sleeps instead of running its kernels and
sampling, so tokens are meaningless.  The CPU time of the process is the overhead per request.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

from nbflow.cli import main as nbflow_main
from nbflow.engine.multi_step import MultiStepDecode
from nbflow.executor import CpuExecutor, Step

Times = Sequence[tuple[int, float]]


def seconds_of(times: Times, n_tokens: int) -> float:
    """Return the seconds of a step with `n_tokens` tokens.

    Examples
    --------
    >>> [seconds_of([(1, 0.5), (3, 0.75)], n) for n in (1, 2, 5)]
    [0.5, 0.625, 1.0]
    """
    counts, seconds = zip(*times, strict=True)
    if n_tokens > counts[-1] and len(times) > 1:
        slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        return float(seconds[-1] + slope * (n_tokens - counts[-1]))
    return float(np.interp(n_tokens, counts, seconds))


@contextlib.contextmanager
def idle(times: Times) -> Iterator[None]:
    """Replace the steps of all models of this process by sleeping."""

    def run(self: CpuExecutor, step: Step) -> None:
        self._prepared(step)
        time.sleep(seconds_of(times, len(step.ids)))

    def run_repeated(
        self: CpuExecutor,
        step: Step,
        decode_steps: MultiStepDecode,
        further: Any,
        n: int,
        stop: Any,
    ) -> None:
        self._prepared(step)
        time.sleep(n * seconds_of(times, len(step.ids)))
        decode_steps.n_steps[0] = n

    with patch.multiple(CpuExecutor, run=run, run_repeated=run_repeated):
        yield


def main() -> None:
    """Run nbflow's command line."""
    if len(sys.argv) < 3:
        sys.exit((__doc__ or "").strip())
    times = [(int(n), float(s)) for n, s in json.loads(sys.argv[1])]
    sys.argv = ["nbflow", *sys.argv[2:]]
    with idle(times):
        nbflow_main()


if __name__ == "__main__":
    main()

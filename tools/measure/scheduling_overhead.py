#!/usr/bin/env python3
"""nbflow with steps that take their time and do no work: what is left is scheduling and serving.

    python tools/measure/scheduling_overhead.py '[[1, 0.02], [32, 0.11]]' serve MODEL --port 8080

The first argument has pairs of a number of tokens and the seconds of a step with so many (between
them times are interpolated, behind the last pair they go on as before it); what follows are
nbflow's own.  Everything is as in a real run, requests, pages, numbers of the steps, waiting for
them, except that a step on the CPU sleeps in place of its products, attention and draws, and the
tokens mean nothing.  The processor time of such a process is what requests cost besides the model.
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
    """Return the seconds of a step with so many tokens.

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
    """Let the steps of all models of this process sleep meanwhile."""

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

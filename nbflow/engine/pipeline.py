"""Pipeline parallelism: as many steps in flight as there are stages.

With one step in flight, a stage idles while the others compute.  Here a rank dispatches a step for
some requests, then one for others, before it collects the outputs of the first, which the rank with
the head broadcasts as soon as they exist.  Only the requests of a step in flight wait.  Prompt
chunks that sample no token follow each other without waiting.

Every rank dispatches and collects the same steps in the same order without communication.  Results
do not change: a row is independent of the rest of its step.
"""

from __future__ import annotations

from collections import deque

from nbflow.engine.interfaces import StepRunner
from nbflow.engine.outputs import RequestDelta, StepOutput
from nbflow.engine.scheduler import ScheduledRequest


class Pipeline:
    """Steps of a rank in flight, at most `depth`: the number of stages."""

    def __init__(self, worker: StepRunner, depth: int) -> None:
        self._worker = worker
        self._depth = depth
        self._steps: deque[tuple[list[ScheduledRequest], StepOutput]] = deque()
        self._collected: list[RequestDelta] = []

    def step(self) -> list[RequestDelta]:
        """Dispatch one step per stage and return the outputs collected meanwhile."""
        requests = self._worker.scheduler.requests  # some may have ended since
        outputs = [output for output in self._collected if output.request in requests]
        self._collected = []
        for _ in range(self._depth):
            if len(self._steps) == self._depth:
                outputs += self._collect()
            # a request in flight cannot be preempted
            while self._steps and self._pages_are_scarce():
                outputs += self._collect()
            if not self._dispatch(outputs):
                break
        if not outputs and self._steps:
            outputs = self._collect()
        return outputs

    def drain(self) -> None:
        """Collect all steps in flight; the next `step` returns their outputs.

        Other messages between the ranks would mix with those of the steps.
        """
        while self._steps:
            self._collected += self._collect()

    def end_all(self) -> None:
        """Collect all steps in flight and drop their outputs."""
        self.drain()
        self._collected = []

    def _in_flight(self) -> set[int]:
        return {entry.request.id for scheduled, _ in self._steps for entry in scheduled}

    def _pages_are_scarce(self) -> bool:
        """Return whether the next step may preempt a request."""
        scheduler = self._worker.scheduler
        return scheduler.table.n_available < scheduler.n_sequences

    def _dispatch(self, outputs: list[RequestDelta]) -> bool:
        """Dispatch a step on this rank; False if nothing can run."""
        worker, in_flight = self._worker, self._in_flight()
        n = len(worker.scheduler.requests)
        scheduled = worker.scheduler.next_step(in_flight, -(-n // self._depth))
        if not scheduled:
            return False
        output = worker.dispatch_step(scheduled)
        if output.arrays:
            self._steps.append((scheduled, output))
        else:
            outputs += worker.collect_step(scheduled, output)
        return True

    def _collect(self) -> list[RequestDelta]:
        """Collect the oldest step."""
        return self._worker.collect_step(*self._steps.popleft())

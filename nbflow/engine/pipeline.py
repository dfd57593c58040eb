"""Pipeline parallelism: as many steps in flight as there are stages.

With one step at a time, a stage idles while the others work on it.  Here a rank dispatches a step
with some of the requests, then one with others, before it collects the outputs of the first: the
rank with the head sends these to every rank as soon as it has them.  Only the requests of a step in
flight wait.  A chunk of a prompt that draws nothing has nothing to wait for, so chunks follow each
other without a pause.

Every rank begins and ends the same steps in the same order, so that they need not tell each other
which.  Results do not change: a row does not depend on what else is in its step.
"""

from __future__ import annotations

from collections import deque

from nbflow.engine.interfaces import StepRunner
from nbflow.engine.outputs import RequestDelta, StepOutput
from nbflow.engine.scheduler import ScheduledRequest


class Pipeline:
    """Steps of a rank in flight.

    Parameters
    ----------
    rank : StepRunner
        The rank.
    depth : int
        Most steps in flight: the number of stages.
    """

    def __init__(self, rank: StepRunner, depth: int) -> None:
        self._rank = rank
        self._depth = depth
        self._steps: deque[tuple[list[ScheduledRequest], StepOutput]] = deque()
        self._collected: list[RequestDelta] = []

    def step(self) -> list[RequestDelta]:
        """Begin as many steps as there are stages, and return what came out meanwhile."""
        requests = self._rank.scheduler.requests  # some may have been ended since
        outputs = [output for output in self._collected if output.request in requests]
        self._collected = []
        for _ in range(self._depth):
            if len(self._steps) == self._depth:
                outputs += self._collect()
            while self._steps and self._is_short():  # pages can only be taken from who waits
                outputs += self._collect()
            if not self._dispatch(outputs):
                break
        if not outputs and self._steps:
            outputs = self._collect()
        return outputs

    def settle(self) -> None:
        """Wait for all steps in flight; the next `step` returns their outputs.

        Messages between ranks outside of the steps would meet those of the steps.
        """
        while self._steps:
            self._collected += self._collect()

    def end_all(self) -> None:
        """Wait for all steps in flight and drop their outputs."""
        self.settle()
        self._collected = []

    def _busy(self) -> set[int]:
        return {work.request.id for works, _ in self._steps for work in works}

    def _is_short(self) -> bool:
        """Return whether some request might have to give its pages back in the next step."""
        scheduler = self._rank.scheduler
        return scheduler.table.n_available < scheduler.width

    def _dispatch(self, outputs: list[RequestDelta]) -> bool:
        """Run this rank's part of a step; False if there is nothing to run."""
        rank, busy = self._rank, self._busy()
        n = len(rank.scheduler.requests)
        works = rank.scheduler.next_step(busy, -(-n // self._depth))
        if not works:
            return False
        outcome = rank.dispatch_step(works)
        if outcome.arrays:
            self._steps.append((works, outcome))
        else:
            outputs += rank.collect_step(works, outcome)
        return True

    def _collect(self) -> list[RequestDelta]:
        """Receive what the oldest step gave, and give it to its requests."""
        return self._rank.collect_step(*self._steps.popleft())

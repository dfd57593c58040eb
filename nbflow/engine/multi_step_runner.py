"""Multi-step decodes of a worker: choice of steps and buffers, and the tokens of the requests."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from nbflow.engine.interfaces import StepRunner
from nbflow.engine.multi_step import MAX_STEPS, MultiStepDecode
from nbflow.engine.outputs import RequestDelta
from nbflow.engine.request import Request
from nbflow.engine.scheduler import ScheduledRequest
from nbflow.engine.worker_step import worker_step
from nbflow.executor import CpuExecutor
from nbflow.sampling.strategy import no_distribution

MAX_DECODES = 32
"""Most cached buffers, one for each strategy and batch size."""


class MultiStepRunner:
    """Runs several decode steps of a worker at once, where Python is not needed between them."""

    def __init__(self, worker: StepRunner) -> None:
        self._worker = worker
        self._decodes: dict[tuple[Any, ...], MultiStepDecode] = {}
        self._last: MultiStepDecode | None = None
        self._step_s = math.inf

    def stop(self) -> None:
        """End the running decode after its present step; any thread may call this."""
        if (decode := self._last) is not None:
            decode.stop[0] = 1

    def can_run(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Return whether all requests decode and none waits, so that several steps can run."""
        worker = self._worker
        return (
            isinstance(worker.executor, CpuExecutor)
            and worker.comm.size == 1
            and all(w.request.is_generating and w.request.n_proposed == 0 for w in scheduled)
            and all(w.request.search is None for w in scheduled)
            and len(scheduled) == len(worker.scheduler.running)
            and MultiStepDecode.can_run([w.request for w in scheduled])
        )

    def run(self, scheduled: Sequence[ScheduledRequest], burst_s: float) -> list[RequestDelta]:
        """Run decode steps of these requests for at most `burst_s` seconds."""
        requests = [w.request for w in scheduled]
        n_steps = self._reserve(requests, self._n_steps(requests, burst_s))
        decode = self._last = self._buffers(requests)
        errors = decode.begin(requests)
        if errors:  # the others decode in the next step
            for b, error in errors.items():
                requests[b].fail(error)
            return [RequestDelta(requests[b]) for b in errors]
        worker, n = self._worker, len(requests)
        assert isinstance(worker.executor, CpuExecutor)
        executor = worker.executor
        sequences, tokens = [r.id for r in requests], [r.pending for r in requests]
        step = worker_step(worker, sequences, tokens, range(n))
        worker.prepare()
        started = time.perf_counter()
        executor.run_repeated(
            step,
            decode,  # the calls write to its arrays
            lambda bound: decode.calls(bound, executor.buffer("logits", n)),
            n_steps,
            decode.stop,
        )
        self._step_s = (time.perf_counter() - started) / int(decode.n_steps[0])
        return self._apply(requests, decode)

    def _n_steps(self, requests: Sequence[Request], burst_s: float) -> int:
        """Return the steps that fit in `burst_s` and that no request ends or changes before."""
        fitting = max(1, min(MAX_STEPS, int(burst_s / self._step_s)))
        n_steps = min(fitting, *(r.max_tokens - len(r.ids) for r in requests))
        until_long = (self._worker.scheduler.n_until_long_rope(r) for r in requests)
        return min(n_steps, *until_long)

    def _reserve(self, requests: Sequence[Request], n_steps: int) -> int:
        """Reserve pages for `n_steps` steps, or fewer if pages are short; return the steps."""
        table = self._worker.table
        while n_steps > 1:
            missing = sum(table.n_missing_pages(r.id, n_steps) for r in requests)
            if missing <= table.n_available:
                break
            n_steps //= 2
        for request in requests:
            table.reserve(request.id, n_steps)
        return n_steps

    def _buffers(self, requests: Sequence[Request]) -> MultiStepDecode:
        """Return the buffers for these requests, cached."""
        key = MultiStepDecode.key(requests)
        if key not in self._decodes:
            if len(self._decodes) >= MAX_DECODES:
                self._decodes.clear()
            self._decodes[key] = MultiStepDecode(*key)
        return self._decodes[key]

    def _apply(self, requests: Sequence[Request], decode: MultiStepDecode) -> list[RequestDelta]:
        """Append the tokens of a finished decode to its requests."""
        done = int(decode.n_steps[0])
        tokens, logprobs = (a[:, :done].tolist() for a in (decode.tokens, decode.token_logprobs))
        outputs = []
        for b, request in enumerate(requests):
            n_before = len(request.ids)
            self._worker.table.extend(request.id, done - 1)
            request.n_computed += done
            for s, token in enumerate(tokens[b]):
                if token < 0:
                    request.fail(no_distribution())
                    break
                request.accept(token, logprobs[b][s] if request.wants_logprobs else math.nan)
            self._worker.scheduler.commit(request)
            outputs.append(RequestDelta(request))
            outputs[-1].add(n_before)
        return outputs

"""Multi-step decode: several decode steps without Python between them.

While every sequence of a step decodes, the inputs of the next step follow from the sampled tokens:
the token is the next id, positions and lengths grow by one.  Sampling and this update are compiled
calls appended to those of the program, and the thread pool repeats the whole list
(`nbflow.executor.CpuExecutor.run_repeated`).  The tokens are those of single steps.  The loop ends
when a sequence samples an end token, or after a number of steps that the caller derives from a time
limit, so that new requests wait no longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.engine.request import Request
from nbflow.engine.sampler import log_probabilities
from nbflow.executor.cpu import BoundProgram
from nbflow.sampling import Strategy
from nbflow.sampling.strategies import Sample
from nbflow.sampling.strategy import FilteredRows, is_filtered
from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.graph import GraphNode
from nbflow_kernels.cpu.parallel_for import capture

MAX_STEPS = 512
"""Most steps of one multi-step decode."""


class MultiStepDecode:
    """Buffers for a multi-step decode of `n` sequences.

    They have one strategy, or filters with parameters of their own (`strategy` None).  A sequence
    has at most `n_stops` end tokens.
    """

    def __init__(self, strategy: Strategy | None, n: int, n_stops: int, logprobs: bool) -> None:
        self.strategy = strategy
        self.filters = FilteredRows([Sample()] * n)
        """Filters of the sequences, if `strategy` is None."""
        self.logprobs = logprobs
        self.drawn = np.zeros(n, np.int32)
        self.seeds = np.zeros(n, np.uint64)
        self.offsets = np.zeros(n, np.uint64)
        self.stops = np.zeros((n, n_stops), np.int32)
        self.tokens = np.zeros((n, MAX_STEPS), np.int32)
        self.drawn_logprobs = np.full((n, 1), np.nan)
        self.token_logprobs = np.full((n, MAX_STEPS), np.nan)
        self.n_steps = np.zeros(1, np.int64)
        self.stop = np.zeros(1, np.int64)

    @staticmethod
    def can_run(requests: Sequence[Request]) -> bool:
        """Return whether these requests share one launch of compiled strategies."""
        if any(r.n_top_logprobs or not r.strategy.compiled for r in requests):
            return False
        return _all_filtered(requests) or len({r.strategy for r in requests}) == 1

    @classmethod
    def key(cls, requests: Sequence[Request]) -> tuple[Any, ...]:
        """Return the constructor's arguments for these requests."""
        n_stops = max(1, *(len(r.stop_ids) for r in requests))
        strategy = None if _all_filtered(requests) else requests[0].strategy
        return strategy, len(requests), n_stops, any(r.wants_logprobs for r in requests)

    def begin(self, requests: Sequence[Request]) -> dict[int, Exception]:
        """Fill the buffers for the first step; return errors by row."""
        self.stops[:] = -1
        errors: dict[int, Exception] = {}
        for b, request in enumerate(requests):
            try:
                self.seeds[b] = request.seed
                self.offsets[b] = len(request.ids)
                self.stops[b, : len(request.stop_ids)] = sorted(request.stop_ids)
            except Exception as error:
                errors[b] = error
        if self.strategy is None:
            self.filters.fill([request.strategy for request in requests])
        self.n_steps[0] = self.stop[0] = 0
        return errors

    def calls(self, bound: BoundProgram, logits: np.ndarray) -> list[GraphNode]:
        """Return the calls from the logits of a step to the inputs of the next one."""
        with capture() as seen:
            (self.strategy or self.filters).launch(logits, self.seeds, self.offsets, self.drawn)
            if self.logprobs:
                log_probabilities(logits, self.drawn, self.drawn_logprobs)
        assert seen.complete
        calls = list(seen.calls)
        arrays = bound.arrays
        args = (
            self.drawn, self.drawn_logprobs, self.stops, self.tokens, self.token_logprobs,
            self.n_steps, self.stop, self.offsets, arrays.ids, arrays.positions, arrays.rope_rows,
            arrays.kv_lens,
        )  # fmt: skip
        calls.append(GraphNode(_next_step, args, 1, 1.0))
        if bound.attention is not None:
            calls += bound.attention.next_step_calls()
        return calls


def _all_filtered(requests: Sequence[Request]) -> bool:
    return all(is_filtered(request.strategy) for request in requests)


@jit.kernel
def _next_step(
    drawn: Any, drawn_logprobs: Any, stops: Any, tokens: Any, token_logprobs: Any, n_steps: Any,
    flag: Any, offsets: Any, ids: Any, positions: Any, rope_rows: Any, kv_lens: Any, start: Any,
    stop: Any,
) -> None:  # fmt: skip
    """Record the sampled tokens and make them the input of the next step."""
    step = n_steps[0]
    for b in range(len(drawn)):
        token = drawn[b]
        tokens[b, step] = token
        token_logprobs[b, step] = drawn_logprobs[b, 0]
        if token < 0:  # no distribution: the caller raises after the loop
            flag[0] = 1
            token = np.int32(0)
        for s in range(stops.shape[1]):
            if token == stops[b, s]:
                flag[0] = 1
        ids[b] = token
        positions[b] += 1
        rope_rows[b] += 1
        kv_lens[b] += 1
        offsets[b] += np.uint64(1)
    n_steps[0] = step + 1

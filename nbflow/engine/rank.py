"""One rank of a model: its part of the program, its pages, and the loop over steps.

Every rank runs the same host code on the same requests; the rank that holds the head draws the next
tokens and tells the others.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.cache import KVStorage, PageTable
from nbflow.decoding.strategy import check_drawn
from nbflow.engine.burst import MAX_STEPS, Burst
from nbflow.engine.draw import Drawn, draw
from nbflow.engine.memory import Memory
from nbflow.engine.request import Request
from nbflow.engine.scheduler import next_tokens
from nbflow.execute import CpuExecutor, RankWeights, Step, make_step
from nbflow.execute.weights import stored_bytes
from nbflow.parallel.comm import Comm
from nbflow.parallel.plan import Plan, make_plan
from nbflow.program import build, fuse, partition
from nbflow.program.cost import bytes_sent
from nbflow.spec.model_spec import ModelSpec
from nbflow.system import peak_rss_bytes, reset_peak_rss
from nbflow.weights import WeightFile
from nbflow_kernels.threads import set_num_threads

Event = tuple[int, int, float]
"""A new token: index of the request, token, log-probability."""

PAGE_SIZE = 64
"""Tokens of a page of the KV cache: as many as attention takes at a time, and long enough a piece
of memory for the processor to read ahead (with 16, reading takes up to half as long again)."""
MAX_BURSTS = 32
"""Bursts (strategies and batch sizes) kept."""
MAX_LOGIT_BYTES = 64 * 2**20
"""Logits of all positions are computed in pieces of at most this size."""


def make_groups(plan: Plan, comm: Comm) -> dict[tuple[int, ...], Comm]:
    """Return the communicator of this rank's stage; every rank of `comm` must call it."""
    groups: dict[tuple[int, ...], Comm] = {}
    for group in dict.fromkeys(r.group for r in plan.ranks):
        if len(group) > 1:
            part = comm.split([plan.numbers.index(rank) for rank in group])
            if part is not None:
                groups[group] = part
    return groups


class RankEngine:
    """The part of a model that one rank holds and runs.

    Parameters
    ----------
    plan : Plan
        Who holds what.
    file : WeightFile
        The checkpoint, open.
    comm : Comm
        All ranks of the plan, in its order.
    groups : dict
        The communicators of the stages this rank belongs to, from `make_groups`.
    spec, weights, outliers, activations, kv, threads, max_step_tokens
        As in `nbflow.load`, resolved.
    """

    def __init__(
        self,
        plan: Plan,
        file: WeightFile,
        comm: Comm,
        groups: dict[tuple[int, ...], Comm],
        *,
        spec: ModelSpec,
        weights: str | None,
        outliers: float,
        activations: str,
        kv: str,
        threads: int,
        max_step_tokens: int,
        page_size: int = PAGE_SIZE,
    ) -> None:
        reset_peak_rss()
        self._threads = threads
        set_num_threads(threads)
        self.plan, self.comm, self.spec = plan, comm, spec
        options: dict[str, Any] = {
            "weights": weights, "outliers": outliers, "activations": activations, "kv": kv,
            "page_size": page_size,
        }  # fmt: skip
        self._encoded: Memory | None = None
        if spec.encoder is not None:
            encoder_plan = make_plan(spec.encoder, plan.partition, plan.block_size)
            encoder = RankEngine(
                encoder_plan, file, comm, groups, spec=spec.encoder, threads=threads,
                max_step_tokens=max_step_tokens, **options,
            )  # fmt: skip
            self._encoded = Memory(encoder, spec, plan.ranks[comm.rank], file, **options)
        self.mine = plan.ranks[comm.rank]
        self.program = fuse(partition(build(spec), self.mine))
        started, before = time.perf_counter(), file.bytes_read
        self.weights = RankWeights(self.program, file, weights, outliers)
        self.weights.pack()
        self.load_seconds = time.perf_counter() - started
        self.bytes_read = file.bytes_read - before
        self.storage = KVStorage(
            self.program.layers, page_size, self.program.n_kv_heads, spec.head_dim, kv
        )
        self.table = PageTable(page_size)
        self.executor = CpuExecutor(
            self.program, self.weights, self.storage, comm, plan.numbers, activations,
            None if self._encoded is None else self._encoded.storage,
        )  # fmt: skip
        self._groups = groups
        self.executor.set_groups(groups)
        self._head = plan.numbers.index(plan.head_rank)
        self._budget = max_step_tokens
        self._requests: list[Request] = []
        self._sent_before: dict[str, int] = {}
        self._predicted_bytes = 0
        self._bursts: dict[tuple[Any, ...], Burst] = {}
        self._burst_s = 0.0
        self._step_s = math.inf
        self._bytes_sent = functools.cache(
            functools.partial(bytes_sent, self.program, self.mine.rank)
        )

    # ---- all positions at once ----------------------------------------------------------------

    def outputs(
        self,
        ids: Sequence[int],
        name: str,
        types: Sequence[int] | None = None,
        encoder_ids: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Return a buffer of the last stage ("logits" or "y") after every token, on every rank."""
        width = self.spec.vocab_size if name == "logits" else self.spec.hidden_size
        result = np.empty((len(ids), width), np.float32)
        piece = max(1, min(self._budget, MAX_LOGIT_BYTES // (4 * self.spec.vocab_size)))
        if not self.spec.causal:  # every token sees all others
            piece = len(ids)
        self._add(-1, encoder_ids)
        try:
            for start in range(0, len(ids), piece):
                chunk = list(ids[start : start + piece])
                some_types = None if types is None else types[start : start + piece]
                step = self._step([-1], [chunk], range(len(chunk)), some_types)
                self._run(step)
                rows = result[start : start + len(chunk)]
                if self.mine.last:
                    np.copyto(rows, self.executor.buffer(name, len(chunk)))
                self._broadcast(rows)
        finally:
            self._drop(-1)
        return result

    # ---- sequences ----------------------------------------------------------------------------

    def _add(self, sequence: int, encoder_ids: Sequence[int] | None) -> None:
        """Begin a sequence; if there is an encoder, run it on the sequence's input."""
        if self._encoded is not None:
            assert encoder_ids is not None  # checked by the caller
            self._encoded.add(sequence, encoder_ids)
        self.table.add(sequence)

    def _drop(self, sequence: int) -> None:
        """End a sequence."""
        self.table.drop(sequence)
        if self._encoded is not None:
            self._encoded.drop(sequence)

    def _step(
        self,
        sequences: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logit_rows: Sequence[int],
        types: Sequence[int] | None = None,
    ) -> Step:
        memory = None if self._encoded is None else self._encoded.table
        return make_step(self.table, sequences, tokens, logit_rows, types, memory)

    # ---- generation ---------------------------------------------------------------------------

    def begin(self, burst_s: float, requests: list[Request]) -> None:
        """Start to work on these requests instead of any others.

        Steps that need no look at the requests run in bursts of at most `burst_s` seconds.
        """
        self.end()
        self._burst_s = burst_s
        for i, request in enumerate(requests):
            self._add(i, request.encoder_ids)
            self._requests = requests[: i + 1]

    def end(self) -> None:
        """Stop working on the present requests."""
        for i in range(len(self._requests)):
            self._drop(i)
        self._requests = []

    def advance(self) -> list[Event]:
        """Run a step, or a burst of them, and return the new tokens in order."""
        chosen = next_tokens(self._requests, self._budget)
        requests = [self._requests[i] for i, _ in chosen]
        if self._can_burst(requests, sum(n for _, n in chosen)):
            return self._burst([i for i, _ in chosen], requests)
        tokens = [r.pending[:n] for r, (_, n) in zip(requests, chosen, strict=True)]
        ready = [
            r.n_done + n == len(r.prompt) + len(r.ids)
            for r, (_, n) in zip(requests, chosen, strict=True)
        ]
        ends = np.cumsum([n for _, n in chosen]) - 1
        step = self._step(
            [i for i, _ in chosen],
            tokens,
            [int(e) for e, r in zip(ends, ready, strict=True) if r],
        )
        self._run(step)
        for request, (_, n) in zip(requests, chosen, strict=True):
            request.n_done += n
        waiting = [(i, r) for (i, _), r, ok in zip(chosen, requests, ready, strict=True) if ok]
        drawn = self._draw([r for _, r in waiting])
        events = []
        for b, ((i, request), token, logprob) in enumerate(
            zip(waiting, drawn.tokens, drawn.logprobs, strict=True)
        ):
            request.accept(token, logprob, drawn.top(b, request.n_top_logprobs))
            events.append((i, token, logprob))
        return events

    def _can_burst(self, requests: Sequence[Request], n_tokens: int) -> bool:
        """Return whether the next steps can run as one burst."""
        generating = n_tokens == len(requests) and all(r.ids for r in requests)
        return generating and self.comm.size == 1 and Burst.fits(requests)

    def _burst(self, indices: Sequence[int], requests: Sequence[Request]) -> list[Event]:
        """Run several steps in which each of these requests draws a token."""
        fitting = max(1, min(MAX_STEPS, int(self._burst_s / self._step_s)))
        n_steps = min(fitting, *(r.max_tokens - len(r.ids) for r in requests))
        for i in indices:
            self.table.reserve(i, n_steps)
        key = Burst.key(requests)
        if key not in self._bursts:
            if len(self._bursts) >= MAX_BURSTS:
                self._bursts.clear()
            self._bursts[key] = Burst(*key)
        burst = self._bursts[key]
        burst.begin(requests)
        step = self._step(indices, [r.pending for r in requests], range(len(requests)))
        set_num_threads(self._threads)
        self.storage.ensure(self.table.n_pages)
        started = time.perf_counter()
        self.executor.run_repeated(
            step,
            burst,  # the calls write to its arrays
            lambda bound: burst.calls(bound, self.executor.buffer("logits", len(requests))),
            n_steps,
            burst.stop,
        )
        done = int(burst.n_steps[0])
        self._step_s = (time.perf_counter() - started) / done
        check_drawn(burst.tokens[:, :done])
        tokens, logprobs = burst.tokens[:, :done].tolist(), burst.token_logprobs.tolist()
        for i, request in zip(indices, requests, strict=True):
            self.table.extend(i, done - 1)
            request.n_done += done
        events = []
        for s in range(done):
            for b, (i, request) in enumerate(zip(indices, requests, strict=True)):
                logprob = logprobs[b][s] if request.wants_logprobs else math.nan
                request.accept(tokens[b][s], logprob)
                events.append((i, tokens[b][s], logprob))
        return events

    def _draw(self, requests: Sequence[Request]) -> Drawn:
        """Choose the next token of each request; every rank gets the same ones."""
        drawn = Drawn.empty(requests)
        if requests:
            if self.comm.rank == self._head:
                drawn = draw(self.executor.buffer("logits", len(requests)), requests)
            self._broadcast(drawn.array)
        return drawn

    # ---- running and counting -----------------------------------------------------------------

    def _run(self, step: Step) -> None:
        set_num_threads(self._threads)  # another model of this thread may have changed it
        self.storage.ensure(self.table.n_pages)
        self.executor.run(step)
        if self.comm.size > 1:
            self._predicted_bytes += self._bytes_sent(len(step.ids), len(step.logit_rows))

    def _broadcast(self, array: np.ndarray) -> None:
        """Give every rank the head rank's array."""
        if self.comm.size > 1:
            self.comm.Bcast(array, self._head)
            if self.comm.rank == self._head:
                self._predicted_bytes += array.nbytes * (self.comm.size - 1)

    def _sent(self) -> dict[str, int]:
        total = dict(self.comm.sent)
        for group in self._groups.values():
            for kind, n in group.sent.items():
                total[kind] = total.get(kind, 0) + n
        return total

    def reset_traffic(self) -> None:
        """Count the bytes sent from here on."""
        self._sent_before = self._sent()
        self._predicted_bytes = 0
        if self._encoded is not None:
            self._encoded.encoder.reset_traffic()

    def traffic(self) -> dict[str, int]:
        """Return the bytes this rank has sent since `reset_traffic`, measured and predicted."""
        now = self._sent()
        measured = sum(n - self._sent_before.get(kind, 0) for kind, n in now.items())
        predicted = self._predicted_bytes
        if self._encoded is not None:  # what it sends is measured by the same communicators
            predicted += self._encoded.encoder.traffic()["predicted_bytes"]
        return {"measured_bytes": measured, "predicted_bytes": predicted}

    def memory(self) -> dict[str, int]:
        """Return what this rank holds, in bytes."""
        held = {
            "rank": self.mine.rank,
            "weight_bytes": self.weights.n_bytes,
            "matrix_bytes": self.matrix_bytes,
            "kv_bytes": self.storage.n_bytes,
            "workspace_bytes": self.executor.workspace_bytes,
            "peak_rss_bytes": peak_rss_bytes(),
        }
        more = {} if self._encoded is None else self._encoded.memory()
        return {key: n + more.get(key, 0) for key, n in held.items()}

    @property
    def matrix_bytes(self) -> int:
        """Bytes of matrices that one generation step reads; experts count by their share."""
        moe = self.spec.moe
        shares = {"linear": 1.0, "experts": moe.top_k / moe.n_experts if moe else 0.0}
        return round(
            sum(
                shares[op.kind] * stored_bytes(matrix)
                for op, operands in zip(self.program.ops, self.weights.operands, strict=True)
                if op.kind in shares
                for matrix in operands
            )
        )

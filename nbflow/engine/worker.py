"""One rank of a model: its part of the program, its pages, and the loop over steps.

Every rank runs the same host code on the same requests; the rank that holds the head draws the next
tokens and tells the others.
"""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.checkpoint import WeightFile
from nbflow.distributed.comm import Comm, RankError
from nbflow.distributed.links import Links
from nbflow.distributed.plan import Plan, make_plan
from nbflow.engine.cross_attention import CrossAttentionCache
from nbflow.engine.embedding import token_types
from nbflow.engine.evaluator import MAX_LOGIT_BYTES, PromptEvaluator
from nbflow.engine.multi_step import MAX_STEPS, MultiStepDecode
from nbflow.engine.outputs import ERROR_BYTES, RequestDelta, StepOutput
from nbflow.engine.pipeline import Pipeline
from nbflow.engine.replicas.address import own_addresses
from nbflow.engine.request import FinishReason, Proposals, Request
from nbflow.engine.scheduler import ScheduledRequest, Scheduler
from nbflow.engine.search.runtime import fork_sequences
from nbflow.executor import HOST, CpuExecutor, Device, Step, WeightLoader, make_executor, make_step
from nbflow.kv_cache import BlockTable, make_storage
from nbflow.options import OffloadConfig
from nbflow.planner.memory import PAGE_SIZE
from nbflow.program import build, fuse, partition
from nbflow.program.cost import bytes_sent
from nbflow.program.read_operand import stored_bytes
from nbflow.quantization.policy import Weights
from nbflow.quantization.quantizer_options import QuantizerOptions
from nbflow.sampling.strategy import no_distribution
from nbflow.spec.model_spec import ModelSpec
from nbflow.utils.rank_status import WAITING, WORKING, status
from nbflow.utils.system import available_memory_bytes, peak_rss_bytes, reset_peak_rss
from nbflow_kernels.cpu.parallel_for import set_num_threads
from nbflow_kernels.errors import UsageError

MAX_BURSTS = 32
"""Bursts (strategies and batch sizes) kept."""


def make_groups(plan: Plan, comm: Comm) -> dict[tuple[int, ...], Comm]:
    """Return the communicator of this rank's stage; every rank of `comm` must call it."""
    groups: dict[tuple[int, ...], Comm] = {}
    for group in dict.fromkeys(r.group for r in plan.ranks):
        if len(group) > 1:
            part = comm.split([plan.numbers.index(rank) for rank in group])
            if part is not None:
                groups[group] = part
    return groups


class Worker:
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
    spec, weights, encoding, activations, kv, threads, max_step_tokens
        As in `nbflow.load`, resolved.
    place : Place
        Where weights, pages and buffers live.
    links : Links, optional
        The communicators for arrays on devices, from `make_links`.
    offload : OffloadConfig
        Parts that lie in host memory, if the place is a device.
    """

    def __init__(
        self,
        plan: Plan,
        file: WeightFile,
        comm: Comm,
        groups: dict[tuple[int, ...], Comm],
        *,
        spec: ModelSpec,
        weights: Weights,
        encoding: QuantizerOptions,
        activations: str,
        kv: str,
        threads: int,
        max_step_tokens: int,
        page_size: int = PAGE_SIZE,
        place: Device = HOST,
        links: Links | None = None,
        offload: OffloadConfig | None = None,
    ) -> None:
        reset_peak_rss()
        self._threads = threads
        set_num_threads(threads)
        self.plan, self.comm, self.spec = plan, comm, spec
        offload = offload if offload and not place.on_host else OffloadConfig()
        options: dict[str, Any] = {
            "weights": weights, "encoding": encoding, "activations": activations, "kv": kv,
            "page_size": page_size, "place": place, "offload": offload,
        }  # fmt: skip
        self.encoded: CrossAttentionCache | None = None
        if spec.encoder is not None:
            encoder_plan = make_plan(spec.encoder, plan.partition, plan.block_size)
            encoder = Worker(
                encoder_plan, file, comm, groups, spec=spec.encoder, threads=threads,
                max_step_tokens=max_step_tokens, links=links, **options,
            )  # fmt: skip
            self.encoded = CrossAttentionCache(
                encoder, spec, plan.ranks[comm.rank], file, **options
            )
        self.mine = plan.ranks[comm.rank]
        self.program = fuse(partition(build(spec), self.mine))
        started, before = time.perf_counter(), file.bytes_read
        self.weights = WeightLoader(self.program, file, weights, encoding=encoding)
        self.weights.settle(place, offload.embeddings_on_host)
        self.load_seconds = time.perf_counter() - started
        self.bytes_read = file.bytes_read - before
        self.storage = make_storage(
            spec, self.program.layers, page_size, self.program.n_kv_heads, kv,
            place.purposed("the key/value cache"),
            (
                place.purposed("the host's part of the key/value cache").mapped(),
                offload.host_layers(len(self.program.layers)),
            ),
        )  # fmt: skip
        self.max_step_tokens = max_step_tokens
        self.table = BlockTable(page_size)
        self.scheduler = Scheduler(self.table, max_step_tokens, short_context=spec.short_context)
        self.executor = make_executor(
            self.program, self.weights, self.storage, comm, plan.numbers, activations,
            None if self.encoded is None else self.encoded.storage, place=place,
        )  # fmt: skip
        self._comms = [comm, *groups.values(), *(links.comms if links else ())]
        self.executor.set_groups(groups, links)
        self._head = plan.numbers.index(plan.head_rank)
        self._sequences = PromptEvaluator(self)
        n_stages = plan.ranks[-1].stage + 1
        together = n_stages > 1 and self.encoded is None
        self._pipeline = Pipeline(self, n_stages) if together else None
        self._limits: tuple[int | None, int | None, int | None, bool] = (None, None, None, False)
        self._sent_before = self._sent()  # communicators are shared with earlier models
        self._predicted_bytes = 0
        self._bursts: dict[tuple[Any, ...], MultiStepDecode] = {}
        self._step_s = math.inf
        self._bytes_sent = functools.cache(
            functools.partial(bytes_sent, self.program, self.mine.rank)
        )

    # ---- sequences of others ------------------------------------------------------------------

    def sequences(self, method: str, *args: Any) -> Any:
        """Call a method of `PromptEvaluator`."""
        with self._watched():
            if self._pipeline is not None:
                self._pipeline.settle()
            return getattr(self._sequences, method)(*args)

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Return what a step is run in: on this rank's device, and noticed if it never ends."""
        self.executor.place.activate()  # the thread may have made no other step
        return status.watched() if self.comm.size > 1 else contextlib.nullcontext()

    def run_step(
        self,
        sequences: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logit_rows: Sequence[int],
        types: Sequence[int] | None = None,
        n_logits: int | None = None,
    ) -> None:
        """Run more tokens of sequences; results are in the executor's buffers.

        Hidden states are computed of the rows, and logits of the first `n_logits`: by default all.
        """
        self.executor.place.activate()
        self._run(self._step(sequences, tokens, logit_rows, types, n_logits))

    def _step(
        self,
        sequences: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logit_rows: Sequence[int],
        types: Sequence[int] | None = None,
        n_logits: int | None = None,
    ) -> Step:
        memory = None if self.encoded is None else self.encoded.table
        return make_step(
            self.table, sequences, tokens, logit_rows, types, memory,
            short_context=self.spec.short_context, n_logits=n_logits,
        )  # fmt: skip

    # ---- generation ---------------------------------------------------------------------------

    def configure(
        self,
        max_step_tokens: int | None = None,
        max_sequences: int | None = None,
        max_pages: int | None = None,
        prefix_cache: bool = False,
    ) -> None:
        """Have these limits, and an empty cache where they are other ones than before.

        Without arguments they are those of `nbflow.load`.  With `max_pages` that many are made at
        once, so that no step has to wait for it; the system gives memory to a page when it is
        first written.  All ranks must call it then: they agree that each has room.
        """
        limits = max_step_tokens, max_sequences, max_pages, prefix_cache
        if limits == self._limits:
            return
        self.executor.place.activate()
        self.end_all()
        if self.table.sequences:
            raise UsageError("a session has sequences on this model; close it first")
        if self._pipeline is not None:
            self._pipeline.end_all()
        self.executor.forget()
        self.storage.release()
        self._begin((None, None, None, False))
        if max_pages is not None:  # an engine's: all the memory it will take is taken now
            failure = None
            try:
                self.storage.ensure(max_pages)
                tokens = max_step_tokens or self.max_step_tokens
                self.executor.reserve(tokens, max_sequences or tokens)
            except UsageError as error:
                failure = error
            try:
                self._agree(failure)
            except UsageError:  # there is no room: go on as before
                self.storage.release()
                raise
        self._begin(limits)

    def _agree(self, failure: UsageError | None) -> None:
        """Raise the same on every rank if one has failed, so that all of them go on as before."""
        if self.comm.size == 1:
            if failure is not None:
                raise failure
            return
        mine = None if failure is None else f"rank {self.mine.rank}: {failure}"
        found = self.comm.bcast_object(self.comm.gather_object(mine))
        for text in found:
            if text is not None:
                raise UsageError(text)

    def _begin(self, limits: tuple[int | None, int | None, int | None, bool]) -> None:
        """Have an empty cache with these limits."""
        max_step_tokens, max_sequences, max_pages, prefix_cache = self._limits = limits
        self.table = BlockTable(self.storage.page_size, max_pages)
        self.table.grow(max_pages or 0)
        self.scheduler = Scheduler(
            self.table,
            max_step_tokens or self.max_step_tokens,
            max_sequences,
            max(1, MAX_LOGIT_BYTES // (4 * self.spec.vocab_size)),
            prefix_cache,
            short_context=self.spec.short_context,
            n_vocab=self.spec.vocab_size,
        )

    def submit(self, request: Request) -> None:
        """Take a request; `advance` works on all there are."""
        self.scheduler.add(request)

    def end(self, request_id: int, reason: FinishReason) -> None:
        """End a request for another reason than its own, if it is still there."""
        for request in self.scheduler.requests:
            if request.id == request_id:
                request.finish_reason = reason
                self._remove(request)
        if self._pipeline is not None and not self.scheduler.requests:
            self._pipeline.end_all()  # steps of requests that are gone

    def clear_prefix_cache(self) -> None:
        """Forget which tokens the pages hold."""
        self.table.clear_cache()

    def end_all(self, reason: FinishReason = "abort") -> None:
        """End all requests."""
        if self._pipeline is not None:
            self._pipeline.end_all()
        for request in self.scheduler.requests:
            self.end(request.id, reason)

    def advance(self, burst_s: float, proposed: Proposals | None = None) -> list[RequestDelta]:
        """Run a step, or a burst of at most `burst_s` seconds, and return what came out.

        `proposed` are tokens of a draft model (`nbflow.engine.speculative.draft_model`), which this
        step verifies.

        A step that fails ends the requests that were in it, where this is the only rank; among
        several, who fails leaves the others waiting in the middle of a step, so the error is
        raised.
        """
        for request in self.scheduler.running:
            request.proposed = None if proposed is None else proposed.get(request.id)
        with self._watched():
            return self._advance(burst_s)

    def _advance(self, burst_s: float) -> list[RequestDelta]:
        if self._pipeline is not None:
            outputs = self._pipeline.advance()
            self._remove_ended(outputs)
            return outputs
        works = self.scheduler.next_step()
        if not works:
            assert not self.scheduler.requests, "requests are left, but none can run"
            return []
        try:
            if self.encoded is not None:
                self.encoded.update(self.scheduler.running)
            outputs = (
                self._burst(works, burst_s) if self._can_burst(works) else self._one_step(works)
            )
        except Exception as error:
            if self.comm.size > 1:
                raise
            for work in works:
                work.request.fail(error)
            outputs = [RequestDelta(work.request) for work in works]
        self._remove_ended(outputs)
        return outputs

    def _remove_ended(self, outputs: Sequence[RequestDelta]) -> None:
        for output in outputs:
            if output.request.finish_reason is not None:
                self._remove(output.request)

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        if self.encoded is not None:
            self.encoded.update(self.scheduler.running)

    def _one_step(self, works: Sequence[ScheduledRequest]) -> list[RequestDelta]:
        """Run one step, draw, and enter the pages that are full into the cache."""
        return self.end_step(works, self.begin_step(works))

    def begin_step(self, works: Sequence[ScheduledRequest]) -> StepOutput:
        """Run one step; on the rank with the head, draw, and tell the others."""
        parts = [part for work in works for part in work.parts]
        rows: list[int] = []
        end = 0
        for work in works:
            start, end = end, end + work.n_tokens + len(work.drafts)
            rows += range(end - work.n_logits, end)
            rows += [start + i for i in work.state_rows]
        n_logits = sum(work.n_logits for work in works)
        self.run_step(
            [sequence for sequence, _ in parts], [ids for _, ids in parts], rows,
            token_types(works), n_logits,
        )  # fmt: skip
        outcome = StepOutput.empty(works, self.spec.vocab_size, self.spec.hidden_size)
        if self.comm.rank == self._head:
            states = functools.partial(self.executor.buffer, "y", len(rows))
            if n_logits:
                outcome.compute(self.executor.logits(n_logits), works, states)
            if n_logits < len(rows) or outcome.vectors.size:
                outcome.pool(works, states()[n_logits:] if rows else outcome.vectors[:0])
            failed = outcome.failed(works)
            for array in (*outcome.arrays, *([outcome.words(failed)] if failed else [])):
                self._post(array)
        return outcome

    def end_step(
        self, works: Sequence[ScheduledRequest], outcome: StepOutput
    ) -> list[RequestDelta]:
        """Give the requests of a step what it gave."""
        if self.comm.rank != self._head and outcome.arrays:
            status.set(WAITING, "draw")
            for array in outcome.arrays:
                self.comm.Recv(array, self._head)
            failed = outcome.failed(works)
            if failed:
                words = np.empty((len(failed), ERROR_BYTES), np.uint8)
                self.comm.Recv(words, self._head)
                outcome.take_words(failed, words)
            status.set(WORKING, "draw")
        # some may have been ended while the step was on its way
        ended = {w.request.id for w in works if w.request.finish_reason is not None}
        outputs = [o for o in outcome.apply(works) if o.request.id not in ended]
        for work in works:
            request = work.request
            if request.id in ended:
                continue
            if work.drafts:
                self.table.truncate(request.id, request.n_done)
            if not request.branches:
                self._commit(request)
            if request.searching is not None and request.finish_reason is None:
                self._follow(request)
        return outputs

    def _follow(self, request: Request) -> None:
        """Let the sequences of a search follow what it has decided."""
        forks = fork_sequences(request, self.table, self.scheduler.numbers)
        if self.encoded is not None:
            for old, new in forks:
                self.encoded.table.fork(old, new)

    def _commit(self, request: Request) -> None:
        if not self.scheduler.prefix_cache or request.error is not None:
            return
        if self.table.has_full_page(request.id):
            self.table.commit(request.id, request.prompt + request.ids)

    def _can_burst(self, works: Sequence[ScheduledRequest]) -> bool:
        """Return whether the next steps can run as one burst: all generate, nobody is to join."""
        return (
            isinstance(self.executor, CpuExecutor)
            and self.comm.size == 1
            and all(w.request.is_generating and w.request.n_proposed == 0 for w in works)
            and all(w.request.search is None for w in works)
            and len(works) == len(self.scheduler.running)
            and MultiStepDecode.fits([w.request for w in works])
        )

    def _burst(self, works: Sequence[ScheduledRequest], burst_s: float) -> list[RequestDelta]:
        """Run several steps in which each of these requests draws a token."""
        requests = [w.request for w in works]
        fitting = max(1, min(MAX_STEPS, int(burst_s / self._step_s)))
        n_steps = min(fitting, *(r.max_tokens - len(r.ids) for r in requests))
        n_steps = min(n_steps, *(self.scheduler.n_alike(r) for r in requests))
        n_steps = self._reserve(requests, n_steps)
        key = MultiStepDecode.key(requests)
        if key not in self._bursts:
            if len(self._bursts) >= MAX_BURSTS:
                self._bursts.clear()
            self._bursts[key] = MultiStepDecode(*key)
        burst = self._bursts[key]
        wrong = burst.begin(requests)
        if wrong:  # the others draw in the next step
            for b, error in wrong.items():
                requests[b].fail(error)
            return [RequestDelta(requests[b]) for b in wrong]
        assert isinstance(self.executor, CpuExecutor)
        step = self._step(
            [r.id for r in requests], [r.pending for r in requests], range(len(requests))
        )
        self._prepare()
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
        tokens, logprobs = (a[:, :done].tolist() for a in (burst.tokens, burst.token_logprobs))
        outputs = []
        for b, request in enumerate(requests):
            n_before = len(request.ids)
            self.table.extend(request.id, done - 1)
            request.n_done += done
            for s, token in enumerate(tokens[b]):
                if token < 0:
                    request.fail(no_distribution())
                    break
                request.accept(token, logprobs[b][s] if request.wants_logprobs else math.nan)
            self._commit(request)
            outputs.append(RequestDelta(request))
            outputs[-1].add(n_before)
        return outputs

    def _reserve(self, requests: Sequence[Request], n_steps: int) -> int:
        """Give all requests pages for so many steps, or for as many as there are pages."""
        table = self.table
        while n_steps > 1:
            missing = sum(table.missing(r.id, n_steps) for r in requests)
            if missing <= table.n_available:
                break
            n_steps //= 2
        for request in requests:
            table.reserve(request.id, n_steps)
        return n_steps

    # ---- running and counting -----------------------------------------------------------------

    def _prepare(self) -> None:
        """Have threads and pages as the next step needs them."""
        set_num_threads(self._threads)  # another model of this thread may have changed it
        if self.table.n_pages > self.storage.n_pages:
            self.executor.forget()  # or the pages of before stay beside the new ones
            self.storage.ensure(self.table.n_pages)
        self.storage.copy_pages(self.table.take_copies())

    def _run(self, step: Step) -> None:
        try:
            self._prepare()
            self.executor.run(step)
        except UsageError as error:  # of this rank's memory or device: the others go on
            if self.comm.size == 1:
                raise
            raise RankError(f"rank {self.mine.rank}: {error}") from error
        if self.comm.size > 1:
            self._predicted_bytes += sum(self._bytes_sent(*n) for n in self.executor.sizes(step))

    def _post(self, array: np.ndarray) -> None:
        """Send every other rank an array that this one, with the head, has computed."""
        for other in range(self.comm.size):
            if other != self.comm.rank:
                self.comm.Post(array, other)
                self._predicted_bytes += array.nbytes

    def broadcast(self, array: np.ndarray) -> None:
        """Give every rank the head rank's array."""
        if self.comm.size > 1:
            self.comm.Bcast(array, self._head)
            if self.comm.rank == self._head:
                self._predicted_bytes += array.nbytes * (self.comm.size - 1)

    def _sent(self) -> dict[str, int]:
        return dict(sum((comm.sent for comm in self._comms), Counter()))

    def reset_traffic(self) -> None:
        """Count the bytes sent from here on."""
        self._sent_before = self._sent()
        self._predicted_bytes = 0
        if self.encoded is not None:
            self.encoded.encoder.reset_traffic()

    def traffic(self) -> dict[str, int]:
        """Return the bytes this rank has sent since `reset_traffic`, measured and predicted."""
        now = self._sent()
        measured = sum(n - self._sent_before.get(kind, 0) for kind, n in now.items())
        predicted = self._predicted_bytes
        if self.encoded is not None:  # what it sends is measured by the same communicators
            predicted += self.encoded.encoder.traffic()["predicted_bytes"]
        return {"measured_bytes": measured, "predicted_bytes": predicted}

    def exchange_error(self) -> dict[str, float]:
        """Return what rounding partial sums has cost: `Comm.rounding_error`, the largest."""
        errors = (comm.rounding_error for comm in self._comms)
        return {"rounding_error": max(errors, default=0.0)}

    def page_memory(self) -> dict[str, Any]:
        """Return the bytes of a page, those that are available, and which machine has them."""
        return {
            "page_bytes": self.storage.page_bytes,
            "available_bytes": available_memory_bytes(),
            "host": platform.node(),
        }

    def whereabouts(self) -> dict[str, Any]:
        """Return the name of this rank's machine, and its addresses."""
        return {"host": platform.node(), "addresses": own_addresses()}

    def memory(self) -> dict[str, int]:
        """Return what this rank holds, in bytes."""
        held = {
            "rank": self.mine.rank,
            "weight_bytes": self.weights.n_bytes,
            "matrix_bytes": self.matrix_bytes,
            "kv_bytes": self.storage.n_bytes,
            "host_bytes": self.weights.host_bytes + self.storage.host_bytes,
            "workspace_bytes": self.executor.workspace_bytes,
            "step_bytes": self.executor.step_bytes,
        }
        more = {} if self.encoded is None else self.encoded.memory()
        whole = {key: n + more.get(key, 0) for key, n in held.items()}
        used = self.executor.place.used_bytes
        return {**whole, "device_used_bytes": used, "peak_rss_bytes": peak_rss_bytes()}

    @property
    def matrix_bytes(self) -> int:
        """Bytes of matrices that one generation step reads; experts count by their share."""
        moe = self.spec.moe
        shares = dict.fromkeys(("linear", "heads_linear"), 1.0)
        shares["experts"] = moe.top_k / moe.n_experts if moe else 0.0
        return round(
            sum(
                shares[op.kind] * stored_bytes(matrix)
                for op, operands in zip(self.program.ops, self.weights.operands, strict=True)
                if op.kind in shares
                for matrix in operands
            )
        )

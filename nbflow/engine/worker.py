"""Worker: one rank of a model, with its shard of the program, its KV cache and its scheduler.

Every rank runs the same host code on the same requests.  The rank with the head samples the next
tokens and broadcasts them.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.checkpoint import WeightFile
from nbflow.distributed.comm import Comm, RankError
from nbflow.distributed.device_comms import DeviceComms
from nbflow.distributed.plan import Plan, make_plan
from nbflow.engine.cross_attention import CrossAttentionCache
from nbflow.engine.errors import ERROR_BYTES
from nbflow.engine.evaluator import MAX_LOGIT_BYTES, PromptEvaluator
from nbflow.engine.multi_step_runner import MultiStepRunner
from nbflow.engine.outputs import RequestDelta, StepOutput
from nbflow.engine.pipeline import Pipeline
from nbflow.engine.rank_options import RankOptions
from nbflow.engine.replicas.address import own_addresses
from nbflow.engine.request import FinishReason, Proposals, Request
from nbflow.engine.scheduler import ScheduledRequest, Scheduler
from nbflow.engine.search.runtime import fork_sequences
from nbflow.engine.token_times import TokenTimes
from nbflow.engine.worker_step import worker_step
from nbflow.executor import Step, WeightLoader, make_executor
from nbflow.executor.device_memory import DeviceMemory
from nbflow.kv_cache import BlockTable, KVStorage, StateStorage, StateTable, make_storage
from nbflow.planner.memory import PAGE_SIZE
from nbflow.program import build, fuse, partition
from nbflow.program.cost import bytes_sent
from nbflow.program.read_operand import operand_bytes
from nbflow.spec.model_spec import ModelSpec
from nbflow.utils.rank_status import WAITING, WORKING, status
from nbflow.utils.system import available_memory_bytes, peak_rss_bytes, reset_peak_rss
from nbflow_kernels.cpu.parallel_for import set_num_threads
from nbflow_kernels.errors import UsageError

StepLimits = tuple[int | None, int | None, int | None, bool, int]
"""Arguments of `Worker.configure`."""
NO_LIMITS: StepLimits = (None, None, None, False, 0)


class Worker(TokenTimes):
    """Shard of a model that one rank holds and runs.

    The ranks of `comm` are those of the plan, in its order; `groups` are from `make_groups`, and
    `links` from `make_device_comms`.  `device_memory` reads the memory of the rank's device.
    `LLM.call` calls methods by name, on every rank.
    """

    def __init__(
        self,
        plan: Plan,
        file: WeightFile,
        comm: Comm,
        groups: dict[tuple[int, ...], Comm],
        spec: ModelSpec,
        options: RankOptions,
        *,
        links: DeviceComms | None = None,
        device_memory: DeviceMemory | None = None,
    ) -> None:
        reset_peak_rss()
        set_num_threads(*options.threads)
        self.plan, self.comm, self.spec, self._threads = plan, comm, spec, options.threads
        self.mine = plan.ranks[comm.rank]
        self.max_step_tokens = options.max_step_tokens
        self.cross_attention: CrossAttentionCache | None = None
        self._encoder: Worker | None = None
        if spec.encoder is not None:
            encoder_plan = make_plan(spec.encoder, plan.partition, plan.block_size)
            self._encoder = Worker(
                encoder_plan, file, comm, groups, spec.encoder, options, links=links,
                device_memory=device_memory,
            )  # fmt: skip
            self.cross_attention = CrossAttentionCache(
                self._encoder, spec, self.mine, file, options
            )
        self.program = fuse(partition(build(spec), self.mine))
        self._load(file, options)
        self.scheduler = Scheduler(
            self.table, self.max_step_tokens, short_context=spec.short_context
        )
        self.executor = make_executor(
            self.program, self.weights, self.storage, comm, plan.numbers, options.activations,
            None if self.cross_attention is None else self.cross_attention.storage,
            device=options.place, states=self.states,
        )  # fmt: skip
        self.executor.device_memory = device_memory or self.executor.device_memory
        self.executor.trace = options.trace
        self._comms = [comm, *groups.values(), *(links.comms if links else ())]
        self.executor.set_groups(groups, links)
        self._head = plan.numbers.index(plan.head_rank)
        self._sequences = PromptEvaluator(self)
        n_stages = plan.ranks[-1].stage + 1 if self.cross_attention is None else 1
        self._pipeline = Pipeline(self, n_stages) if n_stages > 1 else None
        self._limits = NO_LIMITS
        self._sent_before = self._sent()  # communicators are shared with earlier models
        self._predicted_bytes = 0
        self.multi_step = MultiStepRunner(self)
        count = functools.partial(bytes_sent, self.program, self.mine.rank)
        self._bytes_sent = functools.cache(count)

    def _load(self, file: WeightFile, options: RankOptions) -> None:
        """Load the weights, and make the caches of keys, values and recurrent states."""
        spec, place, layers = self.spec, options.place, self.program.kv_layers
        before = file.bytes_read
        self.weights: WeightLoader = WeightLoader(
            self.program, file, options.weights, options.encoding, packed=place.on_host
        )
        self.weights.finalize(place, options.offload.embeddings_on_host and not place.on_host)
        self.bytes_read = file.bytes_read - before
        memory = options.cache_memory("the key/value cache", len(layers))
        self.storage: KVStorage = make_storage(
            spec, layers, PAGE_SIZE, self.program.heads_of, options.kv, *memory
        )
        self.states: StateStorage = StateStorage(
            self.program.states, place.for_purpose("the recurrent states")
        )
        self.table: BlockTable = BlockTable(
            PAGE_SIZE, states=StateTable() if spec.is_recurrent else None
        )

    # ---- forward passes -----------------------------------------------------------------------

    def sequences(self, method: str, *args: Any) -> Any:
        """Call a method of `PromptEvaluator`."""
        with self._watched():
            if self._pipeline is not None:
                self._pipeline.drain()
            return getattr(self._sequences, method)(*args)

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Activate this rank's device; return a context in which a hanging step is reported."""
        self.executor.device.activate()  # of this thread
        return status.step() if self.comm.size > 1 else contextlib.nullcontext()

    def run_step(self, step: Step) -> None:
        """Run a forward pass; results are in the executor's buffers."""
        self.executor.device.activate()
        try:
            self.prepare()
            self.executor.run(step)
        except UsageError as error:  # memory or device of this rank; the others continue
            if self.comm.size == 1:
                raise
            raise RankError(f"rank {self.mine.rank}: {error}") from error
        if self.comm.size > 1:
            self._predicted_bytes += sum(self._bytes_sent(*n) for n in self.executor.sizes(step))

    # ---- generation ---------------------------------------------------------------------------

    def configure(
        self,
        max_step_tokens: int | None = None,
        max_sequences: int | None = None,
        max_pages: int | None = None,
        prefix_cache: bool = False,
        prefix_states: int = 0,
    ) -> None:
        """Set limits; clears the KV cache if they change.

        Without arguments the limits are those of `nbflow.load`.  `max_pages` pages are allocated at
        once, so that steps do not wait for it; the system maps their memory at the first write.
        Collective: fails on every rank if one lacks the memory.
        """
        limits = max_step_tokens, max_sequences, max_pages, prefix_cache, prefix_states
        if limits == self._limits:
            return
        self._clear()
        if max_pages is not None:  # an engine's: allocate everything now
            failure = None
            try:
                self.storage.ensure(max_pages)
                self.states.ensure((max_sequences or 0) + prefix_states)
                tokens = max_step_tokens or self.max_step_tokens
                self.executor.reserve(tokens, max_sequences or tokens)
            except UsageError as error:
                failure = error
            try:
                self._agree(failure)
            except UsageError:  # not enough memory: keep the former limits
                self.storage.release()
                self.states.release()
                raise
        self._begin(limits)

    def _clear(self) -> None:
        """End all requests and free the KV cache; the limits are those of `nbflow.load`."""
        self.executor.device.activate()
        self.end_all()
        if self.table.sequences:
            raise UsageError("a session has sequences on this model; close it first")
        if self._pipeline is not None:
            self._pipeline.end_all()
        self.executor.release_bindings()
        self.storage.release()
        self.states.release()
        self._begin(NO_LIMITS)

    def _agree(self, failure: UsageError | None) -> None:
        """Raise the same error on every rank if one has failed."""
        if self.comm.size == 1 and failure is not None:
            raise failure
        mine = None if failure is None else f"rank {self.mine.rank}: {failure}"
        found = self.comm.bcast_object(self.comm.gather_object(mine))
        for text in filter(None, found):
            raise UsageError(text)

    def _begin(self, limits: StepLimits) -> None:
        """Create an empty block table and scheduler with these limits."""
        max_step_tokens, max_sequences, max_pages, prefix_cache, n_kept = self._limits = limits
        n_rows = (max_sequences or 0) + n_kept
        states = StateTable(n_rows, n_kept) if self.spec.is_recurrent else None
        self.table = BlockTable(self.storage.page_size, max_pages, states=states)
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
        """Add a request to the scheduler."""
        self.scheduler.add(request)

    def end(self, request_id: int, reason: FinishReason) -> None:
        """End a request from outside, if it is still present."""
        for request in self.scheduler.requests:
            if request.id == request_id:
                request.finish_reason = reason
                self._remove(request)
        if self._pipeline is not None and not self.scheduler.requests:
            self._pipeline.end_all()  # steps in flight have no requests left

    def clear_prefix_cache(self) -> None:
        """Clear the prefix cache."""
        self.table.clear_cache()

    def end_all(self, reason: FinishReason = "abort") -> None:
        """End all requests."""
        if self._pipeline is not None:
            self._pipeline.end_all()
        for request in self.scheduler.requests:
            self.end(request.id, reason)

    def step(self, burst_s: float, proposed: Proposals | None = None) -> list[RequestDelta]:
        """Run one step, or at most `burst_s` seconds of decode steps, and return the new tokens.

        `proposed` are tokens of a draft model (`nbflow.engine.speculative.draft_model`), which this
        step verifies.
        """
        started = time.perf_counter()
        for request in self.scheduler.running:
            request.proposed = None if proposed is None else proposed.get(request.id)
        with self._watched():
            deltas = self._run_next(burst_s) if self._pipeline is None else self._pipeline.step()
        self._note_tokens(deltas, started)
        for delta in deltas:
            if delta.request.finish_reason is not None:
                self._remove(delta.request)
        return deltas

    def _run_next(self, burst_s: float) -> list[RequestDelta]:
        """Run the next step of the scheduler.

        An error ends the requests of the step if this is the only rank.  Among several it is
        raised: the others wait in the middle of the step.
        """
        scheduled = self.scheduler.next_step()
        if not scheduled:
            assert not self.scheduler.requests, "requests are left, but none can run"
            return []
        try:
            if self.cross_attention is not None:
                self.cross_attention.update(self.scheduler.running)
            if self.multi_step.can_run(scheduled):
                return self.multi_step.run(scheduled, burst_s)
            return self.collect_step(scheduled, self.dispatch_step(scheduled))
        except Exception as error:
            if self.comm.size > 1:
                raise
            for entry in scheduled:
                entry.request.fail(error)
            return [RequestDelta(entry.request) for entry in scheduled]

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        if self.cross_attention is not None:
            self.cross_attention.update(self.scheduler.running)

    def dispatch_step(self, scheduled: Sequence[ScheduledRequest]) -> StepOutput:
        """Run the forward pass; on the rank with the head, sample and send to the others."""
        parts = [part for entry in scheduled for part in entry.parts]
        rows: list[int] = []
        end = 0
        for entry in scheduled:
            start, end = end, end + entry.n_tokens + len(entry.drafts)
            rows += [start + i for i in entry.logit_rows]
            if entry.request.pooling is not None:
                rows += [start + i for i in entry.state_rows]
        n_logits = sum(entry.n_logits for entry in scheduled)
        types = None
        if any(entry.request.pooling and entry.request.pooling.token_types for entry in scheduled):
            types = [token_type for entry in scheduled for token_type in entry.token_types]
        numbers, tokens = [sequence for sequence, _ in parts], [ids for _, ids in parts]
        self.run_step(worker_step(self, numbers, tokens, rows, types, n_logits))
        output = StepOutput.empty(scheduled, self.spec.vocab_size, self.spec.hidden_size)
        if self.comm.rank == self._head:
            states = functools.partial(self.executor.buffer, "y", len(rows))
            if n_logits:
                output.compute(self.executor.logits(n_logits), scheduled, states)
            if n_logits < len(rows) or output.vectors.size:
                output.pool(scheduled, states()[n_logits:] if rows else output.vectors[:0])
            failed = output.failed_requests(scheduled)
            for array in (*output.arrays, *([output.encode_errors(failed)] if failed else [])):
                self._post(array)
        return output

    def collect_step(
        self, scheduled: Sequence[ScheduledRequest], output: StepOutput
    ) -> list[RequestDelta]:
        """Receive the output of a step and apply it to its requests."""
        if self.comm.rank != self._head and output.arrays:
            status.set(WAITING, "draw")
            for array in output.arrays:
                self.comm.Recv(array, self._head)
            failed = output.failed_requests(scheduled)
            if failed:
                words = np.empty((len(failed), ERROR_BYTES), np.uint8)
                self.comm.Recv(words, self._head)
                output.decode_errors(failed, words)
            status.set(WORKING, "draw")
        # some may have ended while the step was in flight
        ended = {w.request.id for w in scheduled if w.request.finish_reason is not None}
        outputs = output.apply(scheduled)
        if ended:
            outputs = [o for o in outputs if o.request.id not in ended]
        for entry in scheduled:
            request = entry.request
            if request.id in ended:
                continue
            if entry.drafts:
                request.n_computed = self.table.truncate(request.id, request.n_computed)
            if not request.branches:
                self.scheduler.commit(request)
            if request.search_state is not None and request.finish_reason is None:
                self._follow(request)
        return outputs

    def _follow(self, request: Request) -> None:
        """Fork and drop sequences as a search has decided."""
        forks = fork_sequences(request, self.table, self.scheduler.numbers)
        if self.cross_attention is not None:
            for old, new in forks:
                self.cross_attention.table.fork(old, new)

    # ---- pages, messages, statistics ----------------------------------------------------------

    def prepare(self) -> None:
        """Set the number of threads, grow the KV cache and copy pages for the next step."""
        set_num_threads(*self._threads)  # another model of this thread may have changed it
        if self.table.n_pages > self.storage.n_pages:
            self.executor.release_bindings()  # frees the former pages before new ones are allocated
            self.storage.ensure(self.table.n_pages)
        self.storage.copy_pages(self.table.take_copies())
        self.states.update(self.table.states)

    def _post(self, array: np.ndarray) -> None:
        """Send an array to every other rank without waiting."""
        for other in range(self.comm.size):
            if other != self.comm.rank:
                self.comm.Post(array, other)
                self._predicted_bytes += array.nbytes

    def broadcast(self, array: np.ndarray) -> None:
        """Broadcast an array of the rank with the head."""
        if self.comm.size > 1:
            self.comm.Bcast(array, self._head)
            if self.comm.rank == self._head:
                self._predicted_bytes += array.nbytes * (self.comm.size - 1)

    def _sent(self) -> dict[str, int]:
        return dict(sum((comm.bytes_sent() for comm in self._comms), Counter()))

    def reset_traffic(self) -> None:
        """Reset the counters of sent bytes."""
        self._sent_before = self._sent()
        self._predicted_bytes = 0
        if self._encoder is not None:
            self._encoder.reset_traffic()

    def traffic(self) -> dict[str, int]:
        """Return measured and predicted bytes sent since `reset_traffic`."""
        now = self._sent()
        measured = sum(n - self._sent_before.get(kind, 0) for kind, n in now.items())
        predicted = self._predicted_bytes
        if self._encoder is not None:  # measured by the same communicators
            predicted += self._encoder.traffic()["predicted_bytes"]
        return {"measured_bytes": measured, "predicted_bytes": predicted}

    def transport(self) -> dict[str, str]:
        """Return the transport of arrays between ranks; see `LLM.transport`."""
        return self.executor.device_comms.described

    def all_reduce_error(self) -> dict[str, float]:
        """Return the largest `Comm.rounding_error` of the communicators."""
        errors = (comm.rounding_error for comm in self._comms)
        return {"rounding_error": max(errors, default=0.0)}

    def page_memory(self) -> dict[str, Any]:
        """Return the size of a page, the available memory, and the machine."""
        return {
            "page_bytes": self.storage.page_bytes,
            "state_bytes": self.states.row_bytes,
            "available_bytes": available_memory_bytes(),
            "host": platform.node(),
        }

    def host_addresses(self) -> dict[str, Any]:
        """Return name and addresses of this rank's machine."""
        return {"host": platform.node(), "addresses": own_addresses()}

    def reset_memory(self) -> None:
        """Free the KV cache and the buffers of steps; restart the peak resident memory."""
        self._clear()
        self.executor.release_buffers()
        for part in (self.cross_attention, self._encoder):
            if part is not None:
                part.reset_memory()
        self.executor.device_memory.restart()
        reset_peak_rss()

    def devices(self) -> dict[str, str]:
        """Return this rank's device, see `DeviceMemory.describe`."""
        return self.executor.device_memory.describe()

    def memory(self) -> dict[str, int]:
        """Return the memory of this rank in bytes, and on a device the readings of its driver."""
        self.executor.device.activate()
        held = {
            "rank": self.mine.rank,
            "weight_bytes": self.weights.n_bytes,
            "matrix_bytes": self.matrix_bytes,
            "kv_bytes": self.storage.n_bytes + self.states.n_bytes,
            "kv_used_bytes": self.table.most_used_pages * self.storage.page_bytes
            + self.states.used_bytes(self.table.states),
            "host_bytes": self.weights.host_bytes + self.storage.host_bytes,
            "workspace_bytes": self.executor.workspace_bytes,
            "step_bytes": self.executor.step_bytes,
            "graph_bytes": self.executor.graph_bytes,
        }
        parts = [p.memory() for p in (self.cross_attention, self._encoder) if p is not None]
        for key in held.keys() - {"rank", "matrix_bytes"}:
            held[key] += sum(part[key] for part in parts)
        readings = self.executor.device_memory.readings()
        return {**held, **readings, "peak_rss_bytes": peak_rss_bytes()}

    @property
    def matrix_bytes(self) -> int:
        """Bytes of matrices read by a decode step; experts count by the routed share."""
        moe = self.spec.moe
        shares = dict.fromkeys(("linear", "heads_linear"), 1.0)
        shares["experts"] = moe.top_k / moe.n_experts if moe else 0.0
        read = (
            shares[op.kind] * operand_bytes(matrix)
            for op, operands in zip(self.program.ops, self.weights.operands, strict=True)
            if op.kind in shares
            for matrix in operands
        )
        return round(sum(read))

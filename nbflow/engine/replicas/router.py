"""Replica router: sends each request to the least loaded replica of a model.

Each replica has its own engine.  Engines of this process are called directly, others by RPC over a
socket (`nbflow.engine.replicas.rpc`).  Replicas are independent: others survive the failure of one.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from nbflow.engine.errors import EngineClosed, QueueFull
from nbflow.engine.limits import fit
from nbflow.engine.llm import LLM, STREAM_MULTI_STEP_S
from nbflow.engine.llm_engine import LLMEngine
from nbflow.engine.replicas.offline import Replicas
from nbflow.engine.replicas.rpc import Address, Listener, RemoteEngine, serve_replica
from nbflow.engine.request import FinishReason, Request
from nbflow.engine.request_handle import OnEvents, RequestHandle
from nbflow.engine.stats import EngineStats
from nbflow.options import EngineOptions
from nbflow.utils.rank_status import status
from nbflow_kernels.errors import UsageError

MAX_AFFINITY_LOAD = 4
"""Most extra sequences of a replica that is preferred for its cached prefix."""
MAX_AFFINITY_ENTRIES = 65_536
"""Prefixes whose replica is recorded."""

logger = logging.getLogger(__name__)


ReplicaEngine = LLMEngine | RemoteEngine
"""Engine of a replica, in this process or another one."""


class ReplicaRouter(LLMEngine):
    """Engine of a model with replicas, created by `nbflow.LLMEngine`.

    Under mpirun the first rank of the first replica leads; all others `follow`.  A request goes to
    the least loaded replica, or to one with its prompt prefix in the cache unless that has much
    more load (`MAX_AFFINITY_LOAD`).  The options are those of each replica.
    """

    def __init__(
        self,
        model: LLM,
        options: EngineOptions | None = None,
        *,
        burst_s: float = STREAM_MULTI_STEP_S,
        **changes: Any,
    ) -> None:
        assert isinstance(model, Replicas)
        super().__init__(model, options, burst_s=burst_s, **changes)
        self._replicas = model
        self._ranks = model.gather("host_addresses")  # collective
        self._own = [LLMEngine.with_limits(m, self.limits, burst_s) for m in model.mine]
        self._engines: list[ReplicaEngine] = []
        self._listener: Listener | None = None
        self._affinity: OrderedDict[tuple[str, bytes], ReplicaEngine] = OrderedDict()

    # ---- lifecycle ----------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """True on the rank that takes requests; the others `follow`."""
        return self._replicas.leads

    @property
    def leads_replica(self) -> bool:
        """True on the process that decides for the ranks of its replica."""
        return self._replicas.leads_replica

    @property
    def state(self) -> str:
        """State of the router: new, running, closed or failed (see `on_failure`)."""
        if self._state == "running" and self._has_failed():
            return "failed"
        return self._state

    @property
    def failure(self) -> BaseException | None:
        """Error of the first failed replica."""
        return next((m.failure for m in self._engines if m.failure is not None), None)

    def _has_failed(self) -> bool:
        living = [m.alive for m in self._engines]
        return not (all(living) if self._on_failure == "stop" else any(living))

    def _launch(self) -> None:
        """Start the replicas of this process; wait for the others to `follow`."""
        n_remote = self._replicas.n - len(self._own)
        if n_remote:
            self._listener = Listener(self._ranks)
        self._replicas.broadcast(self._listener and self._listener.address)
        for engine in self._own:
            engine.start()
        self._engines += self._own
        if self._listener is not None:
            for index, connection in self._listener.accept(n_remote):
                self._engines.append(RemoteEngine(index, connection, self.model, self.limits))

    def follow(self, draft: LLM | None = None) -> None:
        """Run as another rank until the first one closes the engine.

        The first rank of a replica may have a draft model.
        """
        if self.leads:
            raise UsageError("this rank leads the engine; start it, and submit requests")
        self._replicas.claim(self)
        address: Address | None = self._replicas.broadcast(None)
        (engine,) = self._own
        if self._replicas.index:
            status.is_needed = False
        if not engine.leads:
            engine.follow()
        else:
            assert address is not None
            serve_replica(engine, self._replicas.index, address, draft)
        self._replicas.release(self)

    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """See `LLMEngine.close`."""
        with self._lock:
            was, self._state = self._state, "closed"
        if was != "running":
            return
        with ThreadPoolExecutor(len(self._engines)) as pool:
            list(pool.map(lambda member: member.close(drain, timeout), self._engines))
        if self._listener is not None:
            self._listener.close()
        self._replicas.release(self)

    # ---- called by other threads --------------------------------------------------------------

    def submit(self, request: Request, on_events: OnEvents | None = None) -> RequestHandle:
        """See `LLMEngine.submit`."""
        fit(request, self.model, self.limits)
        with self._lock:
            members = self._by_load(request)
            for member in members:
                with contextlib.suppress(QueueFull, EngineClosed):
                    return member.submit(request, on_events)
            return members[0].submit(request, on_events)  # raises the reason

    def _by_load(self, request: Request | None = None) -> list[ReplicaEngine]:
        """Return the running replicas in order of preference for a request."""
        self._check_running()
        living = sorted((m for m in self._engines if m.alive), key=lambda m: m.load)
        if not living:
            raise EngineClosed(f"all replicas have failed or ended: {self.failure}")
        size = self.limits.page_size
        if request is None or not self.limits.prefix_cache or not request.uses_prefix_cache:
            return living
        if len(request.prompt) <= size:
            return living
        page = np.array(request.prompt[:size], np.int64).tobytes()
        home = self._affinity.get((request.cache_salt, page))
        if home is None or not home.alive or home.load > living[0].load + MAX_AFFINITY_LOAD:
            home = living[0]
        self._affinity[request.cache_salt, page] = home
        self._affinity.move_to_end((request.cache_salt, page))
        if len(self._affinity) > MAX_AFFINITY_ENTRIES:
            self._affinity.popitem(last=False)
        return [home, *(m for m in living if m is not home)]

    def cancel(self, handle: RequestHandle, reason: FinishReason = "abort") -> None:
        """See `LLMEngine.cancel`."""
        handle.cancel(reason)  # calls its replica

    def flush(self) -> None:
        """See `LLMEngine.flush`."""
        for member in self._by_load():
            member.flush()

    def call(self, method: str, *args: Any) -> Any:
        """Raise: a call needs one model."""
        raise UsageError(f"{method!r} is a call for one model; this engine has several replicas")

    def stats(self) -> EngineStats:
        """Return the total statistics of all replicas."""
        total = EngineStats()
        for part in self.replica_stats():
            for name, value in vars(part).items() if part is not None else ():
                setattr(total, name, getattr(total, name) + value)
        return total

    def replica_stats(self) -> list[EngineStats | None]:
        """Return the statistics of each replica, None for those without a report.

        Remote replicas report periodically; this does not wait.
        """
        found: list[EngineStats | None] = []
        for member in self._engines:
            found.append(None)
            if member.alive:
                with contextlib.suppress(EngineClosed):
                    found[-1] = member.stats()
        return found

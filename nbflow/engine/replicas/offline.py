"""Data-parallel replicas for batches: each is a whole model on separate ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nbflow.distributed import Comm, Plan
from nbflow.engine.llm import LLM, STREAM_MULTI_STEP_S
from nbflow.engine.outputs import RequestOutput, TokenOutput
from nbflow.engine.request import Request


class Replicas(LLM):
    """Replicas of a model, as seen by one process.

    Request i of a batch runs on replica i modulo their number.  Every replica makes all other calls
    (logits, a single sequence) itself, with the same result.

    Parameters
    ----------
    mine : list of LLM
        Replicas of this process: one under mpirun, all where ranks are threads.
    plan : Plan
        All ranks of all replicas.
    comm : Comm
        Those ranks in order; a single one where ranks are threads.
    index, n : int
        Index of the first replica of this process, and their number.
    engine_class : type
        `nbflow.engine.replicas.router.ReplicaRouter`.
    """

    def __init__(
        self, mine: list[LLM], plan: Plan, comm: Comm, index: int, n: int, engine_class: type[Any]
    ) -> None:
        first = mine[0]
        super().__init__(
            first.spec, plan, first._tokenizer, first.workers, first._rank_threads, first.threads,
            first.defaults, first._why_no_tokenizer,
        )  # fmt: skip
        self.lock = first.lock  # shared: both call its workers
        self.engine_class = engine_class
        self.mine = mine
        """Replicas of this process."""
        self._comm = comm
        self.index = index
        """Index of the first of them."""
        self.n = n
        """Number of replicas."""

    def close(self) -> None:
        """Close all replicas of this process."""
        for model in self.mine:
            model.close()
        self.workers, self._rank_threads = [], None

    @property
    def leads(self) -> bool:
        """True on the process that decides for all replicas."""
        return self.index == 0 and super().leads

    @property
    def leads_replica(self) -> bool:
        """True on the process that decides for the ranks of its replica."""
        return super().leads

    def broadcast(self, value: Any) -> Any:
        """Broadcast a value of the first rank of the first replica to all ranks."""
        return self._comm.bcast_object(value)

    def stream(self, *args: Any, **options: Any) -> Iterator[int]:
        """Run `LLM.stream` on the replica of each process."""
        yield from self.mine[0].stream(*args, **options)

    def generate(self, *args: Any, **options: Any) -> RequestOutput:
        """Run `LLM.generate` on the replica of each process."""
        return self.mine[0].generate(*args, **options)

    def run_requests(
        self,
        requests: list[Request],
        burst_s: float = STREAM_MULTI_STEP_S,
        share_prompts: bool = False,
    ) -> Iterator[list[tuple[int, TokenOutput]]]:
        """Run `LLM.run_requests`; tokens of other processes' replicas arrive in two exchanges.

        One exchange follows the first tokens, one the end.  The iterator must be exhausted.
        """
        if len(self.mine) > 1:
            yield self._run_all(requests, burst_s, share_prompts)
            return
        own = list(range(self.index, len(requests), self.n))
        meetings = 0
        mine = [requests[i] for i in own]
        for events in self.mine[0].run_requests(mine, burst_s, share_prompts):
            yield [(own[i], token) for i, token in events]
            if meetings == 0 and all(requests[i].ids for i in own):
                meetings += 1
                yield self._exchange_results(requests)
        for _ in range(2 - meetings):
            yield self._exchange_results(requests)

    def _run_all(
        self, requests: list[Request], burst_s: float, share_prompts: bool
    ) -> list[tuple[int, TokenOutput]]:
        """Run each replica in a thread and return all tokens."""

        def run(index: int) -> None:
            mine = requests[index :: self.n]
            for _ in self.mine[index].run_requests(mine, burst_s, share_prompts):
                pass

        with ThreadPoolExecutor(self.n) as pool:
            list(pool.map(run, range(self.n)))
        return [
            (i, TokenOutput(token, logprob))
            for i, request in enumerate(requests)
            for token, logprob in zip(request.ids, request.logprobs, strict=True)
        ]

    def _exchange_results(self, requests: list[Request]) -> list[tuple[int, TokenOutput]]:
        """Exchange the results so far between all ranks; return the tokens new to this one."""
        mine = requests[self.index :: self.n]
        own = [(r.ids, r.logprobs, r.finish_reason, r.found) for r in mine]
        everywhere = self._comm.bcast_object(self._comm.gather_object((self.index, own)))
        events = []
        for index, results in dict(everywhere).items():
            if index == self.index:
                continue
            for i, (ids, logprobs, reason, found) in zip(
                itertools.count(index, self.n), results, strict=False
            ):
                request = requests[i]
                new = range(len(request.ids), len(ids))
                events += [(i, TokenOutput(ids[s], logprobs[s])) for s in new]
                request.ids, request.logprobs, request.finish_reason = ids, logprobs, reason
                request.found = found
        return events

    def reset_memory(self) -> None:
        """Run `LLM.reset_memory` on the replicas of this process."""
        for model in self.mine:
            model.reset_memory()

    def reset_traffic(self) -> None:
        """Reset the counters of bytes sent between the ranks of each replica."""
        for model in self.mine:
            model.reset_traffic()

    def gather(self, method: str) -> list[dict[str, Any]]:
        """Return the results of all ranks of all replicas, on every one of them."""
        parts = [model.gather(method) for model in self.mine]
        if len(self.mine) == 1:
            everywhere = self._comm.bcast_object(self._comm.gather_object((self.index, parts[0])))
            parts = [part for _, part in sorted(dict(everywhere).items())]
        return [rank for part in parts for rank in part]

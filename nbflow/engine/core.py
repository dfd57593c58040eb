"""Core of the engine: submits requests to the workers of a model and runs their steps.

`LLM.generate`, searches, embeddings and draft models reach it through `ModelLock`, the requests of
a running engine through `LLMEngine`; both only decide when a step runs and who reads its output.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.distributed.comm import RankError
from nbflow.engine.errors import Unsendable
from nbflow.engine.interfaces import ModelRunner
from nbflow.engine.outputs import RequestDelta
from nbflow.engine.request import FinishReason, Request
from nbflow.engine.stop_checker import StopChecker
from nbflow_kernels.errors import UsageError

Command = tuple[str, tuple[Any, ...]]
"""Name of a method of every worker, and its arguments."""


class EngineCore:
    """Submits requests to the workers of a model, runs steps, and ends requests.

    Parameters
    ----------
    model : ModelRunner
        The model.
    broadcasts : bool
        True if only the first rank decides: it broadcasts its commands to the other processes,
        which `follow`.  False if every process makes the same calls.
    """

    def __init__(self, model: ModelRunner, broadcasts: bool = False) -> None:
        self._model = model
        self._broadcasts = broadcasts
        self._stops = StopChecker(lambda: model.tokenizer)

    def submit(self, requests: Sequence[Request]) -> list[Any]:
        """Add requests to the scheduler of every rank; return an exception for each refused."""
        return self.execute([("submit", (request,)) for request in requests])

    def step(self, burst_s: float) -> list[RequestDelta]:
        """Run one step, or as many decode steps as fit into `burst_s` seconds.

        Draft models propose tokens before it; stop texts are checked after it.  The last token of
        a finished request carries the finish reason.
        """
        deltas: list[RequestDelta] = self._call("step", burst_s, self._model.proposed())
        for request in self._stops.check(deltas):
            self._call("end", request.id, request.finish_reason)
        for delta in deltas:
            if delta.request.finish_reason is not None:
                delta.close()
                self._release_draft(delta.request)
        return deltas

    def end(self, request: Request, reason: FinishReason) -> str | None:
        """End a request on every rank; return the text held back for a stop text."""
        self._call("end", request.id, reason)
        return self.release(request)

    def release(self, request: Request) -> str | None:
        """Free the state of a request held here; return the text held back for a stop text."""
        self._release_draft(request)
        return self._stops.finish(request)

    @staticmethod
    def _release_draft(request: Request) -> None:
        if request.drafter is not None:
            request.drafter.release(request)

    def _call(self, method: str, *args: Any) -> Any:
        (result,) = self.execute([(method, args)])
        if isinstance(result, Exception):
            raise result
        return result

    def execute(self, commands: list[Command], received: bool = False) -> list[Any]:
        """Call methods of every worker; return the first rank's results.

        A `UsageError` stands for the result of its command: all ranks raise it alike.  Among
        several ranks any other error is raised, because the others may wait within the step.
        With `received`, every process has the commands already.
        """
        if self._broadcasts and commands and not received:
            self.broadcast(commands)
        results: list[Any] = []
        for method, args in commands:
            try:
                results.append(self._model.call(method, *args)[0])
            except Exception as error:
                alike = isinstance(error, UsageError) and not isinstance(error, RankError)
                if not alike and self._model.workers[0].comm.size > 1:
                    raise
                results.append(error)
        return results

    def follow(self) -> None:
        """Execute the first rank's commands until it broadcasts None."""
        while (commands := self.broadcast(None)) is not None:
            self.execute(commands, received=True)

    def broadcast(self, commands: list[Command] | None) -> list[Command] | None:
        """Return the first rank's commands on every rank; None ends `follow`."""
        workers = self._model.workers
        if not workers or self._model.ranks_are_threads or workers[0].comm.size == 1:
            return commands
        comm = workers[0].comm
        try:
            data = np.frombuffer(pickle.dumps(commands), np.uint8)
        except Exception as error:  # nothing has been sent yet
            raise Unsendable(f"cannot send this to the other ranks: {error}") from error
        size = np.array([data.size])
        comm.Bcast(size, 0)
        message = data.copy() if comm.rank == 0 else np.empty(int(size[0]), np.uint8)
        comm.Bcast(message, 0)
        result: list[Command] | None = pickle.loads(message.tobytes())
        return result

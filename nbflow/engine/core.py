"""Core of the engine: requests of a model, run step by step.

`LLM.generate`, searches, embeddings and drafted requests reach it through `Turns`, requests of a
running engine through `LLMEngine`; both only decide when a step runs and who gets what it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nbflow.engine.interfaces import ModelRunner
from nbflow.engine.outputs import RequestDelta
from nbflow.engine.request import FinishReason, Request
from nbflow.engine.stop_checker import StopChecker

Command = tuple[str, tuple[Any, ...]]
"""Name of a method of every worker, and its arguments."""


class EngineCore:
    """Submits requests to the workers of a model, runs their steps, and ends them.

    Parameters
    ----------
    model : ModelRunner
        The model.
    execute : callable, optional
        Runs commands on every rank and returns the first rank's results, where an exception may
        stand for a command that failed alike on all of them.  By default the workers of this
        process are called, and what they raise is raised.
    """

    def __init__(
        self, model: ModelRunner, execute: Callable[[list[Command]], list[Any]] | None = None
    ) -> None:
        self._model = model
        self._execute = execute
        self._stops = StopChecker(lambda: model.tokenizer)

    def run(self, command: Command) -> Any:
        """Call a method of the workers of this process; return the first one's result."""
        method, args = command
        if method == "submit":  # each rank has a request of its own
            return self._model.call(method, per_engine=self._model.copies(args[0]))[0]
        return self._model.call(method, *args)[0]

    def submit(self, requests: Sequence[Request]) -> list[Any]:
        """Give requests to the scheduler of every rank; return an exception for each refused."""
        commands: list[Command] = [("submit", (request,)) for request in requests]
        if self._execute is None:
            return [self.run(command) for command in commands]
        return self._execute(commands)

    def step(self, burst_s: float) -> list[RequestDelta]:
        """Run a step, or as many as fit into `burst_s` seconds, and return what came out.

        Requests that draft models propose tokens to verify them; stop texts are looked for; the
        last token of a request that has ended says so.
        """
        deltas: list[RequestDelta] = self._call("advance", burst_s, self._model.proposed())
        for request in self._stops.check(deltas):
            self._call("end", request.id, request.finish_reason)
        for delta in deltas:
            if delta.request.finish_reason is not None:
                delta.close()
                self._forget(delta.request)
        return deltas

    def end(self, request: Request, reason: FinishReason) -> str | None:
        """End a request on every rank; return the text that was held back for a stop text."""
        self._call("end", request.id, reason)
        return self.forget(request)

    def forget(self, request: Request) -> str | None:
        """Free what is held here for a request; return the text that was held back."""
        self._forget(request)
        return self._stops.finish(request)

    @staticmethod
    def _forget(request: Request) -> None:
        if request.drafter is not None:
            request.drafter.forget(request)

    def _call(self, method: str, *args: Any) -> Any:
        """Run one command; raise what failed alike on all ranks."""
        if self._execute is None:
            return self._model.call(method, *args)[0]
        (result,) = self._execute([(method, args)])
        if isinstance(result, Exception):
            raise result
        return result

"""Protocols between the modules of the engine: what each asks of the model and of a worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nbflow.distributed.comm import Comm
from nbflow.distributed.plan import Plan, RankPlan
from nbflow.engine.outputs import RequestDelta, RequestOutput, StepOutput, TokenOutput
from nbflow.engine.request import DraftProposer, Proposals, Request
from nbflow.engine.scheduler import ScheduledRequest, Scheduler
from nbflow.executor.executor import Executor
from nbflow.kv_cache import BlockTable, KVStorage
from nbflow.spec.model_spec import ModelSpec
from nbflow.tokenization import Tokenizer


class EncoderCache(Protocol):
    """Keys and values that a decoder reads of its encoder."""

    table: BlockTable

    def add(self, inputs: Mapping[int, Sequence[int]]) -> None:
        """Run the encoder on the inputs of sequences."""

    def drop(self, sequence: int) -> None:
        """Forget a sequence, if it is there."""


class StepRunner(Protocol):
    """Worker of one rank: runs steps for the pipeline, the evaluator and the encoder's cache."""

    comm: Comm
    spec: ModelSpec
    mine: RankPlan
    max_step_tokens: int
    table: BlockTable
    scheduler: Scheduler
    executor: Executor

    @property
    def storage(self) -> KVStorage:
        """Return the pages."""

    @property
    def encoded(self) -> EncoderCache | None:
        """Return what is kept of the encoder, of a decoder that has one."""

    def run_step(
        self,
        sequences: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logit_rows: Sequence[int],
        types: Sequence[int] | None = None,
        n_logits: int | None = None,
    ) -> None:
        """Run more tokens of sequences."""

    def dispatch_step(self, works: Sequence[ScheduledRequest]) -> StepOutput:
        """Run one step of requests."""

    def collect_step(
        self, works: Sequence[ScheduledRequest], outcome: StepOutput
    ) -> list[RequestDelta]:
        """Give the requests of a step what it gave."""

    def broadcast(self, array: np.ndarray) -> None:
        """Give every rank the head rank's array."""

    def sequences(self, method: str, *args: Any) -> Any:
        """Call a method of the evaluator."""

    def memory(self) -> dict[str, int]:
        """Return the bytes this rank holds."""

    def reset_traffic(self) -> None:
        """Count the bytes sent from here on."""

    def traffic(self) -> dict[str, int]:
        """Return the bytes sent since `reset_traffic`."""


class ModelInfo(Protocol):
    """Facts about a loaded model: its specification, tokenizer and ranks."""

    spec: ModelSpec
    plan: Plan
    defaults: Mapping[str, float]

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raises without one."""

    @property
    def optional_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer if there is one."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a text."""

    @property
    def leads(self) -> bool:
        """Return whether this process decides what the ranks do."""

    @property
    def participates(self) -> bool:
        """Return whether this process holds a part of the model."""

    @property
    def ranks_are_threads(self) -> bool:
        """Return whether all ranks are threads of this process."""

    @property
    def drafter(self) -> DraftProposer:
        """Return what lets the model propose tokens to another one's requests."""

    def generation(self, request: Request) -> RequestOutput:
        """Return the result of a request that has ended."""

    def generations(self, request: Request) -> list[RequestOutput]:
        """Return all results of a search, best first."""


class ModelRunner(ModelInfo, Protocol):
    """Loaded model whose ranks can be called."""

    engine: object | None

    @property
    def workers(self) -> Sequence[StepRunner]:
        """Return the workers of this process."""

    @property
    def on_rank_thread(self) -> bool:
        """Return whether this is the thread of a rank."""

    def check_free(self) -> None:
        """Raise unless no engine runs the model."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker of this process."""

    def gather(self, method: str) -> list[dict[str, Any]]:
        """Return the results of all ranks, on every one of them."""

    def proposed(self) -> Proposals | None:
        """Return what draft models propose for the next step."""

    def make_request(
        self,
        prompt: Any,
        max_tokens: int = 128,
        decoding: Any = "greedy",
        seed: int = 0,
        ignore_eos: bool = False,
        decoder_ids: Sequence[int] | None = None,
        **parameters: Any,
    ) -> Request:
        """Return a checked request."""

    def run_requests(
        self, requests: list[Request], burst_s: float = ..., share_prompts: bool = False
    ) -> Iterator[list[tuple[int, TokenOutput]]]:
        """Run requests to their end."""

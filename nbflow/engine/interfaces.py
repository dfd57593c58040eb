"""Protocols of the model and its workers, for modules that must not import them."""

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
    """Encoder keys and values that the decoder reads."""

    table: BlockTable

    def add(self, inputs: Mapping[int, Sequence[int]]) -> None:
        """Run the encoder on the inputs of sequences."""

    def drop(self, sequence: int) -> None:
        """Drop a sequence if it is present."""


class StepRunner(Protocol):
    """Worker of one rank, as pipeline, evaluator and cross-attention cache use it."""

    comm: Comm
    spec: ModelSpec
    mine: RankPlan
    max_step_tokens: int
    table: BlockTable
    scheduler: Scheduler
    executor: Executor

    @property
    def storage(self) -> KVStorage:
        """Return the storage of the KV cache."""

    @property
    def cross_attention(self) -> EncoderCache | None:
        """Return the cross-attention cache of a decoder with an encoder."""

    def run_step(
        self,
        sequences: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logit_rows: Sequence[int],
        types: Sequence[int] | None = None,
        n_logits: int | None = None,
    ) -> None:
        """Run a forward pass over new tokens of sequences."""

    def dispatch_step(self, scheduled: Sequence[ScheduledRequest]) -> StepOutput:
        """Run the forward pass and sampling of one step."""

    def collect_step(
        self, scheduled: Sequence[ScheduledRequest], output: StepOutput
    ) -> list[RequestDelta]:
        """Apply the output of a step to its requests."""

    def broadcast(self, array: np.ndarray) -> None:
        """Broadcast an array of the rank with the head."""

    def sequences(self, method: str, *args: Any) -> Any:
        """Call a method of the evaluator."""


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
        """Return the tokenizer, or None."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Return the end-of-text tokens."""

    @property
    def leads(self) -> bool:
        """Return whether this process has the first rank."""

    @property
    def participates(self) -> bool:
        """Return whether this process holds a part of the model."""

    @property
    def ranks_are_threads(self) -> bool:
        """Return whether all ranks are threads of this process."""

    @property
    def drafter(self) -> DraftProposer:
        """Return the proposer that uses this model as draft model."""

    def generation(self, request: Request) -> RequestOutput:
        """Return the result of a finished request."""

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
        """Return whether this thread runs a rank."""

    def check_free(self) -> None:
        """Raise if an engine runs the model."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker of this process."""

    def gather(self, method: str) -> list[dict[str, Any]]:
        """Return the results of all ranks, on every one of them."""

    def proposed(self) -> Proposals | None:
        """Return the draft tokens for the next step."""

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
        """Return a validated request."""

    def run_requests(
        self, requests: list[Request], burst_s: float = ..., share_prompts: bool = False
    ) -> Iterator[list[tuple[int, TokenOutput]]]:
        """Run requests until they finish."""

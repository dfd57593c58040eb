"""Protocols of the model (`LLM`) and its workers, for modules that must not import them.

The methods are described by the classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nbflow.distributed.comm import Comm
from nbflow.distributed.plan import Plan, RankPlan
from nbflow.engine.classification_head import ClassificationHead
from nbflow.engine.outputs import RequestDelta, RequestOutput, StepOutput, TokenOutput
from nbflow.engine.request import DraftProposer, Proposals, Request
from nbflow.engine.scheduler import ScheduledRequest, Scheduler
from nbflow.executor.executor import Executor
from nbflow.executor.step import Step
from nbflow.kv_cache import BlockTable, KVStorage
from nbflow.spec.model_spec import ModelSpec
from nbflow.tokenization import Tokenizer


class EncoderCache(Protocol):
    """Encoder keys and values that the decoder reads."""

    table: BlockTable

    def add(self, inputs: Mapping[int, Sequence[int]]) -> None: ...

    def drop(self, sequence: int) -> None: ...


class StepRunner(Protocol):
    """Worker of one rank, as pipeline, evaluator, multi-step and cross-attention use it."""

    comm: Comm
    spec: ModelSpec
    mine: RankPlan
    max_step_tokens: int
    table: BlockTable
    scheduler: Scheduler
    executor: Executor

    @property
    def storage(self) -> KVStorage: ...

    @property
    def cross_attention(self) -> EncoderCache | None: ...

    def run_step(self, step: Step) -> None: ...

    def prepare(self) -> None: ...

    def dispatch_step(self, scheduled: Sequence[ScheduledRequest]) -> StepOutput: ...

    def collect_step(
        self, scheduled: Sequence[ScheduledRequest], output: StepOutput
    ) -> list[RequestDelta]: ...

    def broadcast(self, array: np.ndarray) -> None: ...

    def sequences(self, method: str, *args: Any) -> Any: ...


class ModelInfo(Protocol):
    """Facts about a loaded model: its specification, tokenizer and ranks."""

    spec: ModelSpec
    plan: Plan
    defaults: Mapping[str, float]
    classification_head: ClassificationHead | None

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def optional_tokenizer(self) -> Tokenizer | None: ...

    @property
    def end_ids(self) -> tuple[int, ...]: ...

    @property
    def leads(self) -> bool: ...

    @property
    def participates(self) -> bool: ...

    @property
    def ranks_are_threads(self) -> bool: ...

    @property
    def drafter(self) -> DraftProposer: ...

    def generation(self, request: Request) -> RequestOutput: ...

    def generations(self, request: Request) -> list[RequestOutput]: ...


class ModelRunner(ModelInfo, Protocol):
    """Loaded model whose ranks can be called."""

    engine: object | None

    @property
    def workers(self) -> Sequence[StepRunner]: ...

    @property
    def on_rank_thread(self) -> bool: ...

    def check_free(self) -> None: ...

    def call(self, method: str, *args: Any) -> list[Any]: ...

    def gather(self, method: str) -> list[dict[str, Any]]: ...

    def proposed(self) -> Proposals | None: ...

    def make_request(
        self,
        prompt: Any,
        max_tokens: int = 128,
        decoding: Any = "greedy",
        seed: int = 0,
        ignore_eos: bool = False,
        decoder_ids: Sequence[int] | None = None,
        **parameters: Any,
    ) -> Request: ...

    def run_requests(
        self, requests: list[Request], burst_s: float = ..., share_prompts: bool = False
    ) -> Iterator[list[tuple[int, TokenOutput]]]: ...

"""Workloads and predictions: what is asked of a partition, and what it can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbflow.planner.machine import Device
from nbflow.planner.stage_cost import RankWork, RunConfig, Stage
from nbflow.program.cost import StepShape
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Workload:
    """Batch, prompts and answers of a prediction."""

    batch: int = 1
    """Sequences at once."""
    prompt: int = 512
    """Tokens of each prompt."""
    generate: int = 128
    """Tokens that each sequence draws; their mean context is used."""
    context: int | None = None
    """Tokens of each sequence that the cache has room for; by default prompt + generate."""

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "generate"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.room < self.prompt + self.generate:
            raise UsageError(
                f"context must hold prompt and new tokens, {self.prompt} + {self.generate}, got "
                f"{self.context}"
            )

    @property
    def room(self) -> int:
        """Tokens that the cache holds for each sequence."""
        return self.prompt + self.generate if self.context is None else self.context


@dataclass(frozen=True)
class RankPrediction:
    """Memory and traffic of one rank."""

    rank: int
    """Its number."""
    device: str
    """Name of its device."""
    layers: tuple[int, int]
    """Its layers."""
    heads: tuple[int, int]
    """Its query heads."""
    kv_heads: tuple[int, int]
    """Its key/value heads."""
    ffn: tuple[int, int]
    """Its columns of the feed-forward network."""
    vocab: tuple[int, int]
    """Its rows of embedding and head, if its stage has them."""
    experts: tuple[int, int]
    """Its experts."""
    weight_bytes: int
    """Weights in the device's memory."""
    kv_bytes: int
    """Cache there."""
    workspace_bytes: int
    """Buffers of the largest step."""
    host_bytes: int
    """Weights and cache in the host's memory."""
    sent_bytes_per_token: float
    """Payload it sends for each generated token of a sequence."""
    free_bytes: int
    """Free memory of the device; negative where it does not fit."""
    host_free_bytes: int
    """Free memory of the host's share that it may use."""


@dataclass(frozen=True)
class Prediction:
    """Predicted speed and memory of a partition."""

    partition: str
    """The partition string."""
    kind: str
    """"one rank", "by layer", "by tensor", "hybrid", with "replicas" in front if there are any."""
    workload: Workload
    """The workload."""
    micro_batches: int
    """Parts in which the batch of a replica goes through the stages."""
    prefill_s: float
    """Time until all prompts have been read."""
    decode_s: float
    """Time in which every sequence gets a token."""
    exchange_share: float
    """Share of `decode_s` that the slowest stage spends in exchanges within itself."""
    bubble: float
    """Share of the stages' time in which they wait for each other while tokens are generated."""
    ranks: tuple[RankPrediction, ...]
    """All ranks."""

    @property
    def fits(self) -> bool:
        """True if every rank has the memory."""
        return all(r.free_bytes >= 0 and r.host_free_bytes >= 0 for r in self.ranks)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens of prompts read per second."""
        return self.workload.batch * self.workload.prompt / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens generated per second, all sequences together; 0 for a model that reads only."""
        return self.workload.batch / self.decode_s if self.decode_s else 0.0

    @property
    def request_s(self) -> float:
        """Time from a batch's arrival to its last token."""
        return self.prefill_s + self.workload.generate * self.decode_s


@dataclass(frozen=True)
class Steps:
    """The largest steps of a program."""

    n_tokens: int
    """Tokens in one."""
    n_logits: int
    """Rows of the head's in one."""


def predicted_rank(
    parts: Sequence[tuple[RankWork, int, Steps]], device: Device, setting: RunConfig, sent: float
) -> RankPrediction:
    """Return what one rank holds.

    Parameters
    ----------
    parts : sequence of tuples
        What it runs, the decoder first: the work, the tokens its cache has room for, its steps.
    device : Device
        What it runs on.
    setting : Setting
        Formats, and what is kept on the host.
    sent : float
        The bytes that it sends for a generated token.
    """
    plan = parts[0][0].plan
    weights = sum(work.weight_bytes() for work, _, _ in parts)
    kv = sum(work.kv_token_bytes(setting.kv) * tokens for work, tokens, _ in parts)
    kv_on_host = sum(  # of whole layers, as `OffloadConfig.host_layers` counts them
        work.kv_token_bytes(setting.kv)
        * tokens
        * int(work.n_layers * setting.kv_host)
        // max(1, work.n_layers)
        for work, tokens, _ in parts
    )
    embeddings = sum(work.embedding_bytes() for work, _, _ in parts)
    on_host = kv_on_host + (embeddings if setting.embedding_on_host else 0)
    workspace = sum(
        work.workspace_bytes(StepShape(1, steps.n_tokens, 1, steps.n_logits))
        for work, _, steps in parts
    )
    here = weights + kv - on_host + workspace + device.reserved_bytes
    return RankPrediction(
        plan.rank, device.name, plan.layers, plan.heads, plan.kv_heads, plan.ffn, plan.vocab,
        plan.experts,
        weight_bytes=weights - (on_host - kv_on_host),
        kv_bytes=kv - kv_on_host,
        workspace_bytes=workspace,
        host_bytes=on_host,
        sent_bytes_per_token=sent,
        free_bytes=round(device.memory_bytes - here),
        host_free_bytes=round(device.host_memory_bytes - on_host) if on_host else 0,
    )  # fmt: skip


def kind_of(stages: list[Stage]) -> str:
    """Return what a partition is called."""
    by_tensor = any(len(stage.ranks) > 1 for stage in stages)
    if len(stages) == 1:
        return "by tensor" if by_tensor else "one rank"
    return "hybrid" if by_tensor else "by layer"

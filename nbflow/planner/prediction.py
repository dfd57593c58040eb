"""Workloads, and predictions of memory and speed for a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbflow.planner.machine import Device
from nbflow.planner.stage_cost import RankWork, RunConfig, Stage
from nbflow.program.cost import StepShape
from nbflow.spec import ModelSpec
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Workload:
    """Batch, prompts and answers of a prediction."""

    batch: int = 1
    prompt: int = 512
    generate: int = 128
    """Tokens that each sequence generates; decode steps are costed at their mean context."""
    context: int | None = None
    """Tokens of each sequence that the KV cache holds; prompt + generate by default."""

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "generate"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_tokens < self.prompt + self.generate:
            raise UsageError(
                "context must be at least prompt + generate = "
                f"{self.prompt} + {self.generate}, got {self.context}"
            )

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds for each sequence."""
        return self.prompt + self.generate if self.context is None else self.context


def fitting_workload(
    spec: ModelSpec,
    batch: int,
    prompt: int | None = None,
    generate: int | None = None,
    context: int | None = None,
) -> Workload:
    """Return a workload of 512 prompt and 128 generated tokens, or of fewer in a short context.

    Given numbers stay as they are.
    """
    longest, usual = spec.max_context, Workload()
    if spec.encoder is not None:
        most = spec.encoder.max_context
    elif not spec.causal:
        most = longest
    else:
        most = max(1, longest // 2 if generate is None else longest - generate)
    prompt = min(usual.prompt, most) if prompt is None else prompt
    left = longest - (prompt if spec.encoder is None else 1)
    generate = max(1, min(usual.generate, left)) if generate is None else generate
    return Workload(batch, prompt, generate, context)


@dataclass(frozen=True)
class RankPrediction:
    """Memory and communication of one rank."""

    rank: int
    device: str
    layers: tuple[int, int]
    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    ffn: tuple[int, int]
    vocab: tuple[int, int]
    """Range of rows of embedding and head, if its stage has them."""
    experts: tuple[int, int]
    weight_bytes: int
    """Weights in the device's memory, in the layout of its kernels."""
    kv_bytes: int
    """KV cache there."""
    workspace_bytes: int
    """Buffers of the largest step."""
    host_bytes: int
    """Weights and KV cache in host memory."""
    sent_bytes_per_token: float
    """Payload sent per generated token of a sequence."""
    free_bytes: int
    """Free memory of the device; negative where it does not fit."""
    host_free_bytes: int
    """Free host memory of the rank's share."""


@dataclass(frozen=True)
class Prediction:
    """Predicted speed and memory of a partition."""

    partition: str
    kind: str
    """"one rank", "by layer" (pipeline), "by tensor" or "hybrid"; prefixed for replicas."""
    workload: Workload
    micro_batches: int
    """Micro-batches of a replica's batch."""
    prefill_s: float
    decode_s: float
    """Time of a decode step: one token for every sequence."""
    all_reduce_share: float
    """Share of `decode_s` that the slowest stage spends in tensor parallel communication."""
    bubble: float
    """Pipeline bubble: idle share of the stages during decode."""
    ranks: tuple[RankPrediction, ...]

    @property
    def fits(self) -> bool:
        """True if every rank fits into its memory."""
        return all(r.free_bytes >= 0 and r.host_free_bytes >= 0 for r in self.ranks)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second."""
        return self.workload.batch * self.workload.prompt / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Generated tokens per second of all sequences; 0 for an encoder."""
        return self.workload.batch / self.decode_s if self.decode_s else 0.0

    @property
    def request_s(self) -> float:
        """Time from a batch's arrival to its last token."""
        return self.prefill_s + self.workload.generate * self.decode_s


def rank_prediction(
    parts: Sequence[tuple[RankWork, int, StepShape]],
    device: Device,
    config: RunConfig,
    sent: float,
) -> RankPrediction:
    """Return memory and communication of one rank.

    `parts` are its programs, the decoder's first: work, tokens of the KV cache, largest step.
    `sent` is the number of bytes sent per generated token.
    """
    plan = parts[0][0].plan
    on_device, activations = device.is_accelerator, device.arithmetic(config.activations)
    held = [work.weight_bytes(on_device) for work, _, _ in parts]
    weights = sum(w.n_bytes for w in held)
    kv = sum(work.kv_token_bytes(config.kv) * tokens for work, tokens, _ in parts)
    # a row of logits for each sequence
    kv += sum(work.state_bytes() * shape.n_logits for work, _, shape in parts)
    kv_on_host = sum(  # whole layers, as in `OffloadConfig.host_layers`
        work.kv_token_bytes(config.kv)
        * tokens
        * int(work.n_kv_layers * config.kv_host)
        // max(1, work.n_kv_layers)
        for work, tokens, _ in parts
    )
    tables_on_host = sum(w.table_bytes for w in held) if config.embedding_on_host else 0
    on_host = kv_on_host + tables_on_host
    workspace = sum(work.workspace_bytes(step, activations, on_device) for work, _, step in parts)
    used = weights + kv - on_host + workspace + device.reserved_bytes
    return RankPrediction(
        plan.rank, device.name, plan.layers, plan.heads, plan.kv_heads, plan.ffn, plan.vocab,
        plan.experts,
        weight_bytes=weights - tables_on_host,
        kv_bytes=kv - kv_on_host,
        workspace_bytes=workspace,
        host_bytes=on_host,
        sent_bytes_per_token=sent,
        free_bytes=round(device.memory_bytes - used),
        host_free_bytes=round(device.host_memory_bytes - on_host) if on_host else 0,
    )  # fmt: skip


def kind_of(stages: list[Stage]) -> str:
    """Return the kind of a partition."""
    by_tensor = any(len(stage.ranks) > 1 for stage in stages)
    if len(stages) == 1:
        return "by tensor" if by_tensor else "one rank"
    return "hybrid" if by_tensor else "by layer"

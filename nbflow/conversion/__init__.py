"""Writes checkpoints in another format: GGUF, or safetensors with block formats."""

from __future__ import annotations

from nbflow.conversion.plan import TensorPlan
from nbflow.conversion.quantize_checkpoint import WrittenCheckpoint, quantize_checkpoint

__all__ = ["TensorPlan", "WrittenCheckpoint", "quantize_checkpoint"]

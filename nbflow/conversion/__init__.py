"""Writes checkpoints in another format: GGUF, or safetensors with block formats."""

from __future__ import annotations

from nbflow.conversion.plan import NewTensor
from nbflow.conversion.quantize_checkpoint import WrittenCheckpoint, quantize_checkpoint

__all__ = ["NewTensor", "WrittenCheckpoint", "quantize_checkpoint"]

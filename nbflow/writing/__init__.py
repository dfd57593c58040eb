"""Writes checkpoints in another format: GGUF, or safetensors with block formats."""

from __future__ import annotations

from nbflow.writing.checkpoint import WrittenCheckpoint, quantize_checkpoint
from nbflow.writing.plan import NewTensor

__all__ = ["NewTensor", "WrittenCheckpoint", "quantize_checkpoint"]

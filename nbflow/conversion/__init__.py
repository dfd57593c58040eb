"""Conversion of checkpoints: to GGUF, or to safetensors with block formats."""

from __future__ import annotations

from nbflow.conversion.plan import TensorConversion
from nbflow.conversion.quantize_checkpoint import WrittenCheckpoint, quantize_checkpoint

__all__ = ["TensorConversion", "WrittenCheckpoint", "quantize_checkpoint"]

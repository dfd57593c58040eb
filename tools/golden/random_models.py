"""Models with random weights, for `tools/golden/families.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Convert = Callable[[Tensors, dict[str, Any]], tuple[Tensors, dict[str, Any]]]


@dataclass
class Made:
    """A model with random weights."""

    model: Any
    """Model with `save_pretrained`."""
    logits: Callable[[torch.Tensor], torch.Tensor]
    """Ids (1, T) to logits (1, T, V)."""
    convert: Convert | None = None
    """Conversion of `model`'s tensors and configuration to the published ones."""


def randomize(model: torch.nn.Module) -> None:
    """Make norms and biases random too, so that a miss shows, and round all to float16."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        elif "embed" not in name:
            parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
        parameter.data = parameter.data.half().float()
    for module in model.modules():
        if hasattr(module, "create_weight"):  # sinusoids are computed, not stored
            module.weight.data = module.create_weight()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_((0.2 * torch.randn_like(buffer)).half().float())

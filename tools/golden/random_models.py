"""Models with random weights, for `tools/golden/families.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

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
        if name.endswith("A_log"):  # states that last for some tokens
            parameter.data = 0.5 * torch.randn_like(parameter) - 3.0
        elif parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        elif "embed" not in name:
            parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
        parameter.data = parameter.data.half().float()
    for module in model.modules():
        if hasattr(module, "create_weight"):  # sinusoids are computed, not stored
            module.weight.data = module.create_weight()
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_((0.2 * torch.randn_like(buffer)).half().float())
        elif name.endswith("layer_scalar"):
            buffer.copy_((1.0 + 0.2 * torch.randn_like(buffer)).half().float())


@contextlib.contextmanager
def in_float64(model: torch.nn.Module) -> Iterator[None]:
    """Compute a model in float64, also where its code asks for float32."""
    to, cast, softmax = torch.Tensor.to, torch.Tensor.type, torch.nn.functional.softmax

    def widened(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        if options.get("dtype") is torch.float32:
            options["dtype"] = torch.float64
        return to(self, *wide, **options)

    def widened_type(self: torch.Tensor, dtype: Any = None) -> Any:
        return cast(self, torch.float64 if dtype is torch.float32 else dtype)

    def softmax_in_dtype(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return softmax(x, *args, **{k: v for k, v in options.items() if k != "dtype"})

    with (
        mock.patch.object(torch.Tensor, "to", widened),
        mock.patch.object(torch.Tensor, "type", widened_type),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch.nn.functional, "softmax", softmax_in_dtype),
    ):
        model.double()
        yield
    model.float()

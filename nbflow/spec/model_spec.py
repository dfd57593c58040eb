"""Resolved specification of a model: every number and tensor name is known.

It comes from a family file (structure, config keys and tensor names of an architecture) and the
checkpoint's configuration; see `nbflow.spec.resolve`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from nbflow.spec.architecture import Architecture
from nbflow.spec.check_numbers import check_numbers
from nbflow.spec.tensor_layout import TensorLayout, find_layout
from nbflow.spec.tensor_shapes import tensor_shapes


@dataclass(frozen=True)
class ModelSpec(Architecture):
    """A transformer, fully resolved."""

    encoder: ModelSpec | None = None
    """Encoder whose hidden states the layers attend to, or None."""

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def parts(self) -> tuple[ModelSpec, ...]:
        """The model itself, and its encoder if it has one."""
        return (self,) if self.encoder is None else (self, self.encoder)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return our name -> shape of every tensor of the model."""
        return dict(self._shapes)

    @property
    def n_parameters(self) -> int:
        """Parameters of the model and its encoder; shared tensors count once."""
        n = sum(math.prod(shape) for shape in self._shapes.values())
        if self.encoder is not None:
            own = {self.checkpoint_name(name) for name in self._shapes}
            for name, shape in self.encoder.tensor_shapes().items():
                n += 0 if self.encoder.checkpoint_name(name) in own else math.prod(shape)
        return n

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of one of our tensors (``layers.3.attn.q.weight``)."""
        return self._shapes[name]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return tensor_shapes(self)

    @cached_property
    def _layouts(self) -> dict[str, TensorLayout]:
        return {}

    def tensor_layout(self, name: str) -> TensorLayout:
        """Return the location of one of our tensors in the checkpoint; KeyError without a name."""
        if name not in self._layouts:
            self._layouts[name] = find_layout(self, self._shapes, name)
        return self._layouts[name]

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name for one of ours (``layers.3.attn.q.weight``)."""
        return self.tensor_layout(name).name

    def as_dict(self) -> dict[str, Any]:
        """Return the spec as plain data, for JSON and hashing."""
        data = asdict(self)
        for key in ("biases", "full_layers", "unrotated_layers", "rotated_cache"):
            data[key] = sorted(data[key])
        if self.encoder is not None:
            data["encoder"] = self.encoder.as_dict()
        if self.moe is not None:
            data["moe"]["layers"] = sorted(self.moe.layers)
        return data

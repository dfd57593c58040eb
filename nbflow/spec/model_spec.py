"""Specification of a model, shared by the program, the planner and the readers.

A `ModelSpec` is resolved: every number is known.  It comes from a family (`families/*.toml`, how an
architecture is composed and how its tensors and config keys are called) and a checkpoint's own
configuration; see `nbflow.spec.resolve`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from nbflow.spec.architecture import Architecture
from nbflow.spec.check_numbers import check_numbers
from nbflow.spec.tensor_layout import TensorLayout, stored
from nbflow.spec.tensor_shapes import tensor_shapes


@dataclass(frozen=True)
class ModelSpec(Architecture):
    """A transformer, fully resolved."""

    encoder: ModelSpec | None = None
    """The encoder whose hidden states the layers attend to, or None."""

    def __post_init__(self) -> None:
        check_numbers(self)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return our name -> shape of every tensor of the model, layers written out."""
        return dict(self._shapes)

    @property
    def n_parameters(self) -> int:
        """Numbers in all tensors, the encoder's included; what two parts share counts once."""
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
        """Return where in the checkpoint one of our tensors (``layers.3.attn.q.weight``) lies.

        Raises
        ------
        KeyError
            If the specification has no name for it.
        """
        if name not in self._layouts:
            self._layouts[name] = stored(self, self._shapes, name)
        return self._layouts[name]

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name for one of ours (``layers.3.attn.q.weight``)."""
        return self.tensor_layout(name).name

    def as_dict(self) -> dict[str, Any]:
        """Return the spec as plain data (for JSON and for hashing)."""
        data = asdict(self)
        for key in ("biases", "full_layers", "unrotated_layers"):
            data[key] = sorted(data[key])
        if self.encoder is not None:
            data["encoder"] = self.encoder.as_dict()
        if self.moe is not None:
            data["moe"]["layers"] = sorted(self.moe.layers)
        return data

"""Changes to the float32 model: weights, keys and values, arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nbflow.quantization.policy import is_quantized
from nbflow_experiments.analysis.layer_programs import Stage
from nbflow_experiments.analysis.treatments import Checkpoint, Format, Treatment
from nbflow_kernels import QuantTensor
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Change:
    """Deviation from the float32 model: weights, KV cache or activation format."""

    weights: Treatment | None = None
    """Replacement of the matrices that a weight format applies to."""
    kv: str = "f32"
    """Format of the keys and values, as in `nbflow.load`."""
    activations: str = "f32"
    """Arithmetic of the products, as in `nbflow.load`."""

    @property
    def label(self) -> str:
        """Label in tables."""
        parts = [] if self.weights is None else [self.weights.label]
        parts += [] if self.kv == "f32" else [f"kv {self.kv}"]
        parts += [] if self.activations == "f32" else [f"{self.activations} activations"]
        return ", ".join(parts) or "f32"

    def encode(self, checkpoint: Checkpoint, stage: Stage) -> dict[str, QuantTensor]:
        """Return the changed matrices of a stage, by canonical name."""
        if self.weights is None:
            return {}
        shapes = checkpoint.spec.tensor_shapes()
        return {
            name: self.weights.encode(name, checkpoint.matrix(name))
            for name in stage.tensors
            if is_quantized(name, shapes[name])
        }

    @contextmanager
    def applied(self, stage: Stage, matrices: dict[str, QuantTensor]) -> Iterator[Stage]:
        """Yield the stage with this change applied; `matrices` come from `encode`."""
        same = self.kv == "f32" and self.activations == "f32"
        changed = stage if same else stage.alike(self.kv, self.activations)
        changed.use(matrices)
        try:
            yield changed
        finally:
            changed.use({})


def as_changes(changes: Sequence[str | Treatment | Change]) -> list[Change]:
    """Convert format names and treatments to weight changes."""
    found = []
    for change in changes:
        if isinstance(change, str):
            change = Format(change)
        found.append(change if isinstance(change, Change) else Change(weights=change))
    labels = [change.label for change in found]
    if not labels or len(set(labels)) < len(labels):
        raise UsageError(f"one or more different changes are needed, got {labels}")
    return found

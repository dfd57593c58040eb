"""Plan of a conversion: each tensor of the new file, its format and the source of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile
from nbflow.checkpoint.dtypes import ITEM_BYTES
from nbflow.checkpoint.writers.tensor_plan import TensorHeader, TensorPlan
from nbflow.conversion.format_rules import FormatRules
from nbflow.conversion.tensor_rows import Rows, Statistics, StoredRows, row_chunks
from nbflow.quantization.importance import Importance, first_names
from nbflow.quantization.quantizer_options import QuantizerOptions
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class TensorConversion(TensorHeader):
    """A tensor of the new file and its sources."""

    stored: str
    sources: tuple[Rows, ...]
    """Sources of its rows, in order."""
    ours: tuple[str, ...] = ()
    """Our names of its parts."""
    importance: np.ndarray | None = field(default=None, compare=False)
    """Error weights of the columns, float32 (1 or parts, columns), or second moments of the inputs,
    (1 or parts, columns, columns)."""

    @property
    def is_requantized(self) -> bool:
        """True if stored blocks become other blocks, which loses precision twice."""
        return self.stored not in ITEM_BYTES and self.format != self.stored

    def plan(self, options: QuantizerOptions) -> TensorPlan:
        """Return the tensor to be written."""
        return TensorPlan(self.name, self.shape, self.format, partial(self._chunks, options))

    def _chunks(self, options: QuantizerOptions) -> Iterator[bytes | memoryview]:
        known: list[Statistics] = [] if self.importance is None else list(self.importance)
        for i, rows in enumerate(self.sources):
            own = known[i if len(known) > 1 else 0] if known else None
            yield from row_chunks(rows, self.format, self.name, options, own)


def plan_as_stored(
    spec: ModelSpec, file: WeightFile, rules: FormatRules, *, blocks: bool = True
) -> list[TensorConversion]:
    """Return the tensors under the checkpoint's own names, in its order.

    Without `blocks`, whole blocks and unused rules are not checked.
    """
    parts_of: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    transposed = set()
    for part, ours in ((s, name) for s in spec.parts for name in s.tensor_shapes()):
        layout = part.tensor_layout(ours)
        parts_of.setdefault(layout.name, []).append((ours, part.shape_of(ours)))
        if layout.transposed:
            transposed.add(layout.name)
    tensors = []
    for name in file.names():
        chosen = rules.of(name, parts_of.get(name, []))
        in_blocks = chosen is not None and nk.FORMATS[chosen].block_size > 1
        if blocks and in_blocks and name in transposed:
            raise UsageError(
                f"tensor {name} is stored as (in, out), but blocks lie along the inputs; "
                "checkpoints of this family cannot be written in blocks, load them with weights="
            )
        dtype = file.dtype(name)
        rows = StoredRows(file, name)
        own_names = tuple(own for own, _ in parts_of.get(name, []))
        format = chosen or dtype
        tensors.append(TensorConversion(name, file.shape(name), format, dtype, (rows,), own_names))
    if blocks:
        rules.check_rules()
        check_blocks(tensors)
    return tensors


def check_blocks(tensors: Sequence[TensorHeader]) -> None:
    """Raise unless the rows of every tensor are whole blocks of its format."""
    sizes: Mapping[str, int] = {name: nk.FORMATS[name].block_size for name in nk.FORMATS}
    wrong = [t for t in tensors if t.shape and t.shape[-1] % sizes.get(t.format, 1)]
    if wrong:
        first = wrong[0]
        raise UsageError(
            f"tensor {first.name} has rows of {first.shape[-1]} weights, no multiple of the "
            f"{first.format} block of {sizes[first.format]}, and so have {len(wrong) - 1} others; "
            "choose another format, or give them one with a rule, e.g. "
            f"'{first.name}=f16'"
        )


def attach_importance(
    tensors: Sequence[TensorConversion], importance: Importance | None
) -> tuple[list[TensorConversion], list[str]]:
    """Attach importance to the tensors to be converted; return notes too."""
    if importance is None:
        return list(tensors), []
    result, missing = [], []
    for tensor in tensors:
        if tensor.format == tensor.stored or len(tensor.shape) < 2:
            result.append(tensor)
            continue
        found = _found(tensor, importance)
        if found is None:
            missing.append(tensor.name)
            result.append(tensor)
        else:
            result.append(dataclasses.replace(tensor, importance=_checked(tensor, *found)))
    n_converted = sum(t.format != t.stored and len(t.shape) > 1 for t in tensors)
    if len(missing) == n_converted:
        raise UsageError(
            f"there are importances for {first_names(importance)}, but for none of the matrices "
            f"that are converted, {first_names(missing)}"
        )
    if not missing:
        return result, []
    return result, [f"{len(missing)} matrices have no importances: {first_names(missing)}"]


def _found(tensor: TensorConversion, importance: Importance) -> tuple[str, Any] | None:
    """Return the name and the array of importance that belongs to a tensor, or None."""
    if tensor.name in importance:
        return tensor.name, importance[tensor.name]
    ours = [name for name in tensor.ours if name in importance]
    arrays = [np.asarray(importance[name]) for name in ours]
    if not ours:
        return None
    if len(ours) == len(tensor.sources) and len({a.shape for a in arrays}) == 1:
        return ours[0], arrays[0] if len(ours) == 1 else np.stack(arrays)  # one array per part
    return ours[0], arrays[0]


def _checked(tensor: TensorConversion, name: str, vector: Any) -> np.ndarray:
    """Return the importance of a tensor's parts, (1 or parts, K), or (1 or parts, K, K)."""
    K, n = tensor.shape[-1], len(tensor.sources)
    array = np.asarray(vector, np.float32)
    if n > 1 and array.shape == (n * K,):  # the older form concatenates experts
        array = array.reshape(n, K)
    if array.shape in ((K,), (n, K)):
        return array.reshape(-1, K)
    if array.shape in ((K, K), (n, K, K)):  # second moments
        return array.reshape(-1, K, K)
    raise UsageError(
        f"importances of {name} must have shape ({K},), the columns of {tensor.name}, "
        f"or ({n}, {K}), or be second moments ({K}, {K}), got {array.shape}"
    )

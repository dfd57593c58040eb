"""AWQ for a model: the preceding norm or matrix absorbs the column factors.

======================  ============================================================================
matrices                divided by their factors
======================  ============================================================================
attn.q, k, v; ffn.gate  weight and bias of the norm before them, unless norms come after the
and up; experts         sublayers or have no weights
attn.o                  the rows of attn.v, and its bias; query heads that share values share
                        factors
ffn.down, each          the rows of ffn.up, and its bias, where the network is gated, or its
expert's too            activation is relu or relu2
======================  ============================================================================

Matrices without statistics, and those with the same inputs, are not scaled.  The factors of a norm
are computed from its weights after rounding to the stored type, so that products are preserved to
float32 precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile
from nbflow.program.read_operand import read_operand
from nbflow.program.records import Operand
from nbflow.quantization.transforms.norm_consumers import (
    experts_can_transform,
    has_plain_mixers,
    has_plain_residuals,
    norm_readers,
)
from nbflow.quantization.transforms.transform import ChannelScale, LinearMap, WeightTransform
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers.awq import search_scales

FormatOf = Callable[[str], str | None]
"""Our name of a matrix -> its new format, or None."""


@dataclass
class _Search:
    """Inputs and results of the search for factors."""

    spec: ModelSpec
    file: WeightFile
    format_of: FormatOf
    statistics: Mapping[str, NDArray[Any]]
    columns: dict[str, tuple[LinearMap, ...]] = field(default_factory=dict)
    rows: dict[str, tuple[LinearMap, ...]] = field(default_factory=dict)
    vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def read(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32."""
        return read_operand(self.spec, self.file, Operand(name)).astype(np.float32)

    def scales(
        self, names: Sequence[str], shared: NDArray[np.intp] | None = None
    ) -> NDArray[np.float64] | None:
        """Return the factors of matrices with the same inputs, or None without gain."""
        known = [self.statistics[name] for name in names if name in self.statistics]
        matrices = []
        for name in names:
            format = self.format_of(name)
            if format is not None and nk.FORMATS[format].block_size > 1:
                matrices.append((self.read(name), nk.FORMATS[format]))
        if not known or not matrices:
            return None
        try:
            found = search_scales(matrices, known[0], shared)
        except UsageError as error:
            raise UsageError(f"tensor {names[0]}: {error}") from error
        return found.scales if found.exponent > 0 else None


def scale_columns(
    spec: ModelSpec,
    file: WeightFile,
    format_of: FormatOf,
    statistics: Mapping[str, NDArray[Any]],
) -> WeightTransform:
    """Search the factors of all columns of a model and return the transform.

    Raises
    ------
    UsageError
        If there are no statistics of any matrix, or experts cannot be scaled.
    """
    if not has_plain_mixers(spec):
        raise UsageError(
            f"{spec.name}: quantizer 'awq' does not support recurrent layers and gated attention; "
            "use 'gptq', 'hqq' or 'search'"
        )
    if not has_plain_residuals(spec):
        raise UsageError(
            f"{spec.name}: quantizer 'awq' does not support shared keys and values, per-layer "
            "embeddings, several residual streams and factors of them; use 'gptq', 'hqq' or "
            "'search'"
        )
    if not set(spec.tensor_shapes()) & set(statistics):
        raise UsageError(
            "quantizer 'awq' needs statistics of the inputs: nbflow imatrix MODEL -o FILE, "
            "then --importance FILE"
        )
    if not experts_can_transform(spec):
        raise UsageError(
            f"{spec.name}: quantizer 'awq' does not support experts with biases, non-contiguous "
            "rows or a latent width; use 'gptq', 'hqq' or 'search'"
        )
    search = _Search(spec, file, format_of, statistics)
    if spec.norm_weight:
        for norm, readers in norm_readers(spec).items():
            if norm != "final_norm":  # the head keeps its stored format
                _scale_into_norm(search, norm, readers)
    for i in range(spec.n_layers):
        if spec.latent is None:
            _scale_into_values(search, f"layers.{i}.attn")
        for network in _networks(spec, i):
            _scale_into_up(search, f"layers.{i}.{network}")
    return WeightTransform(spec, search.columns, search.rows, search.vectors)


def _networks(spec: ModelSpec, layer: int) -> list[str]:
    if not spec.has_experts(layer):
        return ["ffn"]
    assert spec.moe is not None
    return [f"moe.{j}" for j in range(spec.moe.n_experts)] + ["shared"] * bool(spec.moe.shared_size)


def _scale_into_norm(search: _Search, norm: str, readers: Sequence[str]) -> None:
    """Divide a norm's weight and bias, and multiply the columns of its readers."""
    scales = search.scales(readers)
    if scales is None:
        return
    name, offset = f"{norm}.weight", search.spec.norm_offset
    stored_weight = search.read(name).reshape(-1).astype(np.float64)
    dtype = search.file.dtype(search.spec.tensor_layout(name).name)
    new = _as_stored((stored_weight + offset) / scales - offset, dtype)
    # the effective factors after rounding
    effective, before = new.astype(np.float64) + offset, stored_weight + offset
    usable = (effective != 0) & (before != 0)
    exact = np.where(usable, before / np.where(usable, effective, 1.0), 1.0)
    new = np.where(usable, new, stored_weight).astype(np.float32)
    search.vectors[name] = new
    bias = f"{norm}.bias"
    if bias in search.spec.tensor_shapes():
        search.vectors[bias] = (search.read(bias).reshape(-1) / exact).astype(np.float32)
    for reader in readers:
        search.columns[reader] = (*search.columns.get(reader, ()), ChannelScale(exact))


def _as_stored(values: NDArray[np.float64], dtype: str) -> NDArray[np.float32]:
    """Round values to a stored type."""
    if dtype in ("f16", "bf16"):
        return nk.dequantize(nk.quantize(values.astype(np.float32), dtype))
    return values.astype(np.float32)


def _scale_into_values(search: _Search, prefix: str) -> None:
    """Divide the rows of attn.v, and multiply the columns of attn.o."""
    spec = search.spec
    each = spec.n_heads // spec.n_kv_heads
    heads = np.arange(spec.n_heads) // each
    shared = (heads[:, None] * spec.head_dim + np.arange(spec.head_dim)).reshape(-1)
    scales = search.scales([f"{prefix}.o.weight"], shared)
    if scales is None:
        return
    search.columns[f"{prefix}.o.weight"] = (ChannelScale(scales),)
    of_values = np.empty(spec.n_kv_heads * spec.head_dim)
    of_values[shared] = 1 / scales
    _divide_rows(search, f"{prefix}.v", of_values)


def _scale_into_up(search: _Search, prefix: str) -> None:
    """Divide the rows of an up matrix, and multiply the columns of the down matrix."""
    spec = search.spec
    if spec.activation == "swigluoai" or not (spec.gated or spec.activation in ("relu", "relu2")):
        return
    scales = search.scales([f"{prefix}.down.weight"])
    if scales is None:
        return
    search.columns[f"{prefix}.down.weight"] = (ChannelScale(scales),)
    squared = not spec.gated and spec.activation == "relu2"
    _divide_rows(search, f"{prefix}.up", scales**-0.5 if squared else 1 / scales)


def _divide_rows(search: _Search, matrix: str, inverse: NDArray[np.float64]) -> None:
    """Multiply the rows of a matrix and its bias."""
    for kind in ("weight", "bias"):
        name = f"{matrix}.{kind}"
        if name in search.spec.tensor_shapes():
            search.rows[name] = (ChannelScale(inverse),)

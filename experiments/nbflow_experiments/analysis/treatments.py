"""Tensor treatments: a format and its quantizer, noise, or another checkpoint's weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile, open_weights
from nbflow.checkpoint.weight_file import ITEM_BYTES
from nbflow.conversion.importance_names import gguf_names_of, with_our_names
from nbflow.program.read_operand import read_operand, read_quantized_operand
from nbflow.program.records import Operand
from nbflow.quantization.importance import read_importance
from nbflow.quantization.quantizer_options import QuantizerOptions
from nbflow.spec import resolve
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels import QuantTensor
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.quantizers import QUANTIZER_NAMES
from nbflow_kernels.quantizers.outliers import check_ratio


class Treatment(Protocol):
    """Protocol of a tensor treatment; user classes implement these two members."""

    @property
    def label(self) -> str:
        """Label in tables."""

    def encode(self, name: str, matrix: NDArray[np.float32]) -> QuantTensor:
        """Return the treated tensor (N, K) of canonical name `name`."""


class Checkpoint:
    """A model's specification and its open weight file; usable in a ``with`` statement."""

    def __init__(
        self, model: str | os.PathLike[str], spec: str | os.PathLike[str] | None = None
    ) -> None:
        resolved = resolve(model, spec=spec)
        self.spec: ModelSpec = resolved.spec
        self.file: WeightFile = open_weights(resolved.path)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def matrix(self, name: str) -> NDArray[np.float32]:
        """Return a tensor of the model as float32 (rows, columns)."""
        return np.ascontiguousarray(read_operand(self.spec, self.file, Operand(name)), np.float32)


@dataclass(frozen=True)
class Format:
    """Quantization to a weight format.

    Parameters
    ----------
    format : str
        Its name in `nbflow_kernels.FORMATS`.
    quantizer : str
        One of `nbflow_kernels.quantizers.QUANTIZER_NAMES`.
    outliers : float
        Share of weights stored exactly as outliers, as in `nbflow_kernels.quantize`.
    statistics : mapping, optional
        Canonical tensor name -> mean squares (K,) or second moments (K, K) of the tensor's inputs,
        from `read_statistics`.

    Raises
    ------
    UsageError
        If the format or quantizer does not exist, or the quantizer does not support outliers.
    """

    format: str
    quantizer: str = "search"
    outliers: float = 0.0
    statistics: Mapping[str, NDArray[Any]] | None = None

    def __post_init__(self) -> None:
        nk.FORMATS[self.format]  # raises for an unknown name
        if self.quantizer not in QUANTIZER_NAMES:
            raise unknown_name("quantizer", self.quantizer, QUANTIZER_NAMES)
        if check_ratio(self.outliers) and self.quantizer not in (
            *nk.quantizers.FORMAT_QUANTIZER_NAMES,
            "outliers",
        ):
            raise UsageError(
                f"quantizer {self.quantizer!r} does not support outliers; take 'search', "
                "'reference' or 'outliers'"
            )
        if self.quantizer == "outliers" and not self.outliers:
            raise UsageError(
                "quantizer 'outliers' needs outliers, a share of the weights in 0..0.05"
            )

    @property
    def label(self) -> str:
        """Format name and non-default options."""
        extra = [] if self.quantizer == "search" else [self.quantizer]
        extra += [f"outliers {self.outliers:g}"] if self.outliers else []
        extra += ["weighted"] if self.statistics is not None and self.quantizer != "gptq" else []
        return f"{self.format} ({', '.join(extra)})" if extra else self.format

    @cached_property
    def _options(self) -> QuantizerOptions:
        return QuantizerOptions(self.quantizer, self.statistics or {}, outliers=self.outliers)

    def encode(self, name: str, matrix: NDArray[np.float32]) -> QuantTensor:
        """Quantize a tensor; errors name the tensor."""
        return self._options.quantize_matrix(name, matrix, self.format)


@dataclass(frozen=True)
class Noise:
    """Gaussian noise with the row-wise RMS of another treatment's error.

    Baseline that separates the direction of a quantization error from its size.

    Parameters
    ----------
    like : Treatment
        Treatment whose error sets the RMS.
    seed : int
        Seed; each tensor draws its own noise.
    """

    like: Treatment
    seed: int = 0

    @property
    def label(self) -> str:
        """Label of the imitated treatment."""
        return f"noise like {self.like.label}"

    def encode(self, name: str, matrix: NDArray[np.float32]) -> QuantTensor:
        """Return the noisy tensor as float32."""
        error = nk.dequantize(self.like.encode(name, matrix)).astype(np.float64) - matrix
        size = np.sqrt(np.mean(error**2, axis=1, keepdims=True))
        rng = np.random.default_rng([self.seed, *name.encode()])
        noisy = matrix + size * rng.standard_normal(matrix.shape)
        return nk.quantize(noisy.astype(np.float32), "f32")


def read_statistics(
    file: str | os.PathLike[str], model: str, spec: str | None = None
) -> dict[str, NDArray[Any]]:
    """Read an importance file and map it to canonical tensor names.

    Parameters
    ----------
    file : path
        File of ``nbflow imatrix`` or llama.cpp's ``imatrix``.
    model, spec
        The model it was collected on, as in `nbflow.load`.
    """
    return with_our_names(read_importance(file), gguf_names_of(model, spec))


class StoredWeights:
    """Weights of another checkpoint of the same model.

    Parameters
    ----------
    path : str or path
        The quantized checkpoint.
    spec : ModelSpec
        The model to compare with.

    Raises
    ------
    UsageError
        If it is another model, or its rows are in another order.
    """

    def __init__(self, path: str | os.PathLike[str], spec: ModelSpec) -> None:
        self._other = Checkpoint(path)
        self.path = Path(path)
        self.label = self.path.name
        try:
            self._check(path, spec)
        except UsageError:
            self.close()
            raise

    def _check(self, path: str | os.PathLike[str], spec: ModelSpec) -> None:
        """Raise unless tensor names and row order match the model."""
        other = self._other.spec
        if other.tensor_shapes() != spec.tensor_shapes():
            raise UsageError(f"{path}: its tensors are not those of {spec.name}; is it that model?")
        if other.rope.style != spec.rope.style:
            raise UsageError(
                f"{path}: its rows of queries and keys are in the order of rotary pairs "
                f"{other.rope.style!r}, those of {spec.name} {spec.rope.style!r}; compare files "
                "of one kind (GGUF with GGUF)"
            )

    def close(self) -> None:
        """Close the file."""
        self._other.file.close()

    def encode(self, name: str, matrix: NDArray[np.float32]) -> QuantTensor:
        """Return the other checkpoint's tensor; `matrix` is unused."""
        other = self._other
        dtype = other.file.dtype(other.spec.tensor_layout(name).name)
        if dtype not in ITEM_BYTES:
            tensors = read_quantized_operand(other.spec, other.file, Operand(name))
            return QuantTensor.concatenate(tensors)
        return nk.quantize(other.matrix(name), dtype if dtype in ("f16", "bf16") else "f32")

"""Preparation of quantization: weight transforms and quantizer options from a quantizer's name.

A name is parts joined by ``+``: transforms, in order, and the quantizer of the matrices, by
default ``auto``: ``gptq``, ``awq``, ``hadamard+gptq``, ``hadamard+awq``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint import WeightFile
from nbflow.quantization.importance import first_names
from nbflow.quantization.policy import is_matrix
from nbflow.quantization.quantizer_options import GPTQ_NEEDS, Importance, QuantizerOptions
from nbflow.quantization.transforms.awq import FormatOf, scale_columns
from nbflow.quantization.transforms.hadamard import rotate, rotated_spec
from nbflow.quantization.transforms.transform import WeightTransform
from nbflow.quantization.transforms.transformed_file import TransformedFile
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.quantizers import AUTO, DAMPING, QUANTIZER_NAMES

TRANSFORMS = ("awq", "hadamard")
"""Parts of a name that are transforms of the model."""


def parse_quantizer(name: str) -> tuple[tuple[str, ...], str]:
    """Parse a name into transforms and the quantizer of the matrices.

    Examples
    --------
    >>> parse_quantizer("hadamard+gptq")
    (('hadamard',), 'gptq')
    >>> parse_quantizer("awq")
    (('awq',), 'auto')
    """
    parts = name.split("+")
    for part in parts:
        if part not in (*TRANSFORMS, *QUANTIZER_NAMES):
            raise unknown_name("quantizer", part, (*TRANSFORMS, *QUANTIZER_NAMES))
    transforms = tuple(part for part in parts if part in TRANSFORMS)
    rest = parts[len(transforms) :]
    if (
        len(rest) > 1
        or parts[: len(transforms)] != list(transforms)
        or len(set(parts)) < len(parts)
    ):
        raise UsageError(
            f"a quantizer is any of {', '.join(TRANSFORMS)}, each once, and then one of "
            f"{', '.join(QUANTIZER_NAMES)}, joined by +, e.g. 'awq+gptq'; got {name!r}"
        )
    return transforms, rest[0] if rest else AUTO


def quantizer_of(spec: ModelSpec, name: str) -> str:
    """Return the quantizer of a model's matrices: "search" for "auto" unless it predicts tokens.

    The gain of a block matters to the next token's distribution; embeddings of an encoder drift
    less with the least squared error (docs/quantization.md).
    """
    return "search" if name == AUTO and not spec.causal else name


@dataclass(frozen=True)
class Prepared:
    """A model to be quantized."""

    spec: ModelSpec
    """Specification of the model after the transforms."""
    quantizer: QuantizerOptions
    transforms: tuple[WeightTransform, ...] = ()
    before: tuple[ModelSpec, ...] = ()
    """The specification before each transform."""

    def apply_to(self, file: WeightFile) -> WeightFile:
        """Return a checkpoint with the transforms applied."""
        for spec, transform in zip(self.before, self.transforms, strict=True):
            file = TransformedFile(file, spec, transform)
        return file

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""
        return tuple(note for transform in self.transforms for note in transform.notes)


def transformed_spec(spec: ModelSpec, quantizer: str) -> ModelSpec:
    """Return the specification of a model after the transforms of a quantizer's name."""
    return rotated_spec(spec) if "hadamard" in parse_quantizer(quantizer)[0] else spec


def no_format(quantizer: str) -> UsageError:
    """Return the error for a quantizer without a weight format."""
    return UsageError(
        f"quantizer={quantizer!r} and importance need a weight format, e.g. weights='q4'"
    )


def prepare(
    spec: ModelSpec,
    file: WeightFile,
    format_of: FormatOf,
    quantizer: str = AUTO,
    importance: Importance | None = None,
    *,
    act_order: bool = False,
    damping: float = DAMPING,
    outliers: float = 0.0,
    seed: int = 0,
) -> Prepared:
    """Compute the transforms and options of a quantizer; no tensor is converted.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    file : WeightFile
        Its checkpoint.
    format_of : callable
        Our name of a matrix -> its new format, or None.
    quantizer : str
        See the module.
    importance : mapping, optional
        Name of a matrix, ours or the checkpoint's -> mean squares (K,) or second moments (K, K).
    act_order, damping
        Of GPTQ; see `nbflow_kernels.quantizers.quantize_calibrated`.
    outliers : float
        Share of the weights stored exactly, for "auto", "search", "unbiased" and "reference" (may
        be 0) and "outliers".
    seed : int
        Seed of random rotations.

    Raises
    ------
    UsageError
        If the quantizer is unknown, lacks statistics, or cannot transform the model.
    """
    transforms, last = parse_quantizer(quantizer)
    last = quantizer_of(spec, last)
    known = our_statistics(spec, importance or {})
    if last == "gptq" and not any(a.ndim == 2 for a in known.values()):
        raise UsageError(GPTQ_NEEDS)
    if last in ("gptq", "hqq") and outliers:
        raise UsageError(
            f"outliers go with quantizers auto, search, unbiased, reference and outliers, "
            f"got quantizer {quantizer!r}"
        )
    if last == "outliers" and not outliers:
        raise UsageError("quantizer 'outliers' needs outliers, a share of the weights, e.g. 0.005")
    if (act_order or damping != DAMPING) and last != "gptq":
        raise UsageError(f"act_order and damping are for quantizer 'gptq', got {quantizer!r}")
    made, before = [], []
    for name in transforms:
        if name == "awq":
            transform = scale_columns(spec, file, format_of, known)
        else:
            transform = rotate(spec, file, seed)
        known = {own: transform.statistics(own, a) for own, a in known.items()}
        made.append(transform)
        before.append(spec)
        file = TransformedFile(file, spec, transform)
        spec = transform.spec
    options = QuantizerOptions(last, known, act_order, damping, outliers)
    return Prepared(spec, options, tuple(made), tuple(before))


def our_statistics(spec: ModelSpec, importance: Importance) -> dict[str, NDArray[Any]]:
    """Return statistics under our names of the matrices, float32 (K,) or (K, K) each."""
    found: dict[str, NDArray[Any]] = {}
    for name, shape in spec.tensor_shapes().items():
        if not is_matrix(name, shape):
            continue
        array = importance.get(name)
        if array is None:
            array = importance.get(spec.tensor_layout(name).name)
        if array is None:
            continue
        known, K = np.asarray(array, np.float32), shape[1]
        if known.shape not in ((K,), (K, K)):
            raise UsageError(
                f"importances of {name} must have shape ({K},), the columns, or be second moments "
                f"({K}, {K}), got {known.shape}"
            )
        found[name] = known
    if importance and not found:
        raise UsageError(
            f"there are importances for {first_names(importance)}, but for none of the matrices "
            f"of {spec.name}"
        )
    return found

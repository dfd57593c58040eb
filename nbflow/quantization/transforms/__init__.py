"""Models that compute the same with other weights, which lose less in a format.

A *transform* multiplies what goes from one matrix of a model to the next by something, and undoes it
in the next matrix: factors of columns (AWQ), or rotations (QuaRot).
`nbflow.quantization.transforms.transform` says what that means for each tensor,
`nbflow.quantization.transforms.transformed_file` shows a checkpoint as if it were folded, and
`nbflow.quantization.prepare` makes of the name of an encoder what has to be done.
"""

from __future__ import annotations

from nbflow.quantization.prepare import (
    Prepared,
    no_format,
    parse_quantizer,
    prepare,
    transformed_spec,
)
from nbflow.quantization.transforms.awq import scale_columns
from nbflow.quantization.transforms.hadamard import rotate
from nbflow.quantization.transforms.transform import WeightTransform
from nbflow.quantization.transforms.transformed_file import TransformedFile

__all__ = [
    "Prepared",
    "TransformedFile",
    "WeightTransform",
    "no_format",
    "parse_quantizer",
    "prepare",
    "rotate",
    "scale_columns",
    "transformed_spec",
]

"""Function-preserving weight transforms (AWQ scaling, Hadamard rotation).

A transform multiplies the activations between two matrices by a linear map and undoes it in the
second matrix, so that the model computes the same and quantization errors are smaller.
`transform` has the effect on each tensor, `transformed_file` is the checkpoint after a transform,
and `nbflow.quantization.prepare` parses the name of a quantizer with transforms.
"""

from __future__ import annotations

from nbflow.quantization.transforms.awq import scale_columns
from nbflow.quantization.transforms.hadamard import rotate
from nbflow.quantization.transforms.transform import WeightTransform
from nbflow.quantization.transforms.transformed_file import TransformedFile

__all__ = [
    "TransformedFile",
    "WeightTransform",
    "rotate",
    "scale_columns",
]

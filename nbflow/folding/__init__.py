"""Models that compute the same with other weights, which lose less in a format.

A *folding* multiplies what goes from one matrix of a model to the next by something, and undoes it
in the next matrix: factors of columns (AWQ), or rotations (QuaRot).  `nbflow.folding.folding` says
what that means for each tensor, `nbflow.folding.file` shows a checkpoint as if it were folded, and
`nbflow.folding.encoders` makes of the name of an encoder what has to be done.
"""

from __future__ import annotations

from nbflow.folding.awq import scale_columns
from nbflow.folding.encoders import Prepared, check_encoder, folded_spec, no_format, prepare
from nbflow.folding.file import FoldedFile
from nbflow.folding.folding import Folding
from nbflow.folding.hadamard import rotate

__all__ = [
    "FoldedFile",
    "Folding",
    "Prepared",
    "check_encoder",
    "folded_spec",
    "no_format",
    "prepare",
    "rotate",
    "scale_columns",
]

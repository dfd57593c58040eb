"""Quantizers of the trellis-coded formats q2t, q3t and q4t.

"reference" finds one path, at the scale that fits normally distributed weights; "search" tries the
scales of `STEPS` around it.  Both end with the best scale of the path.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.formats import trellis
from nbflow_kernels.formats.registry import Bytes, Floats
from nbflow_kernels.quantizers.block_formats import BlockQuantizer
from nbflow_kernels.quantizers.search.trellis import search

STEPS = (0.94, 1.06)
"""Scales that "search" tries besides that of "reference", relative to it."""
NORMAL = {2: 1 / 45.18, 3: 1 / 42.2, 4: 1 / 39.85}
"""Scale of normally distributed weights by bits, relative to their root mean square."""


def _trellis(format: trellis.TrellisFormat) -> BlockQuantizer:
    """Return the quantizers of a format."""
    bits = format.stream_bits

    def pack(x: Floats, weight: Floats, steps: tuple[float, ...]) -> Bytes:
        streams, d = search(x, weight, bits, np.array(steps, np.float32) * NORMAL[bits])
        return format.pack_blocks(code=streams, d=d)

    def reference(x: Floats, importance: Floats | None) -> Bytes:
        weight = np.ones((1, x.shape[1]), np.float32) if importance is None else importance
        return pack(x, weight, (1.0,))

    def search_rows(x: Floats, weight: Floats) -> Bytes:
        return pack(x, weight, STEPS)

    return BlockQuantizer(reference, search_rows)


QUANTIZERS = {
    format.name: _trellis(format)
    for format in (trellis.Q2T_B256, trellis.Q3T_B256, trellis.Q4T_B256)
}

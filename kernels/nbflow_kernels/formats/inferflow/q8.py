"""8-bit formats: one byte per weight.

``q8_b32t1``: 32 weights in 36 bytes, (2 + 2 + 32) * 8 / 32 = 9 bits per weight.

======  =====  ==========================================
offset  bytes  field
======  =====  ==========================================
0       2      base, float16
2       2      scale, float16
4       32     codes, uint8
======  =====  ==========================================

weight = base + scale * code.  Plain: base = min, scale = range / 255.

``q8_b32t2`` (short name ``q8``): 32 weights in 34 bytes, (2 + 32) * 8 / 32 = 8.5 bits per weight.
The same bytes as GGML's Q8_0.

======  =====  ==========================================
offset  bytes  field
======  =====  ==========================================
0       2      scale, float16
2       32     codes, int8
======  =====  ==========================================

weight = scale * code.  Plain: scale = max|x| / 127, halves rounded away from zero.

Source: Inferflow, quant_types.h (formats Q8_B32T1 and Q8_B32T2).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._jit import inline, njit
from nbflow_kernels.formats.affine_format import ABSMAX, F16_PAIR, F16_SCALE, RANGE, AffineFormat
from nbflow_kernels.formats.decode import decode_codes


@inline
def code_q8_b32t1(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`."""
    return row[at + 4 + i]


@inline
def code_q8_b32t2(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`, plus 128."""
    return row[at + 2 + i] ^ 128


@njit
def _codes_q8_b32t1(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q8_b32t1, 32, 36, data, codes, start, stop)


@njit
def _codes_q8_b32t2(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q8_b32t2, 32, 34, data, codes, start, stop)


Q8_B32T1 = AffineFormat(
    name="q8_b32t1",
    block_size=32,
    block_bytes=36,
    n_codes=256,
    rule=RANGE,
    divisor=255,
    parameters=F16_PAIR,
    base_at=0,
    scale_at=2,
    pack_codes=lambda codes: codes,
    unpack_codes=lambda blocks: blocks[:, 4:],
    codes_kernel=_codes_q8_b32t1,
    code=code_q8_b32t1,
)

Q8_B32T2 = AffineFormat(
    name="q8_b32t2",
    block_size=32,
    block_bytes=34,
    n_codes=256,
    rule=ABSMAX,
    divisor=127,
    parameters=F16_SCALE,
    base_at=0,
    scale_at=0,
    pack_codes=lambda codes: codes ^ np.uint8(128),
    unpack_codes=lambda blocks: blocks[:, 2:] ^ np.uint8(128),
    codes_kernel=_codes_q8_b32t2,
    code=code_q8_b32t2,
    codes_at=2,
    zero=128,
)

"""The codes of q3, q3h and q4 in larger blocks: fewer bits go to bases and scales.

    nbflow sweep experiments/sweeps/pareto.toml      # takes them from here

========== ==== ===== ====================================================
name       block bits/weight of it codes
========== ==== ===== ====================================================
q3_b64t1     64  3.5   3
q3h_b128t1  128  3.75  3.5
q3h_b256t1  256  3.625 3.5
q4_b128t1   128  4.25  4
q4_b256t1   256  4.125 4
========== ==== ===== ====================================================

Each is a table of its bytes, so that all quantizers know it.
"""

from __future__ import annotations

from nbflow_kernels import FORMATS
from nbflow_kernels.formats.affine_format import RANGE, AffineFormat
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16


def _format(name: str, size: int, planes: tuple[Plane, ...], radix: int = 0) -> AffineFormat:
    """Return a format of base, scale and codes in blocks of `size`."""
    code = Field("code", size, planes, radix=radix)
    table = FieldTable(size, (float16("base", 0), float16("scale", 2), code))
    return AffineFormat(name, table, RANGE, divisor=code.n_values - 1)


def _q3h(name: str, size: int) -> AffineFormat:
    """Return q3h with the planes of pair codes that a larger block needs."""
    middle, low = 4 + size // 16, 4 + size // 16 + size // 8
    planes = (Plane(4, 1, shift=6), Plane(middle, 2, shift=4), Plane(low, 4))
    return _format(name, size, planes, radix=11)


# two blocks of q3's planes, one behind the other
_Q3_PLANES = (
    Plane(4, 1, shift=2, count=32),
    Plane(8, 2, count=32),
    Plane(16, 1, shift=2, first=32),
    Plane(20, 2, first=32),
)
Q3_B64T1 = _format("q3_b64t1", 64, _Q3_PLANES)
Q3H_B128T1, Q3H_B256T1 = _q3h("q3h_b128t1", 128), _q3h("q3h_b256t1", 256)
Q4_B128T1 = _format("q4_b128t1", 128, (Plane(4, 4),))
Q4_B256T1 = _format("q4_b256t1", 256, (Plane(4, 4),))

for _new in (Q3_B64T1, Q3H_B128T1, Q3H_B256T1, Q4_B128T1, Q4_B256T1):
    FORMATS.add(_new)

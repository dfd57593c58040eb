"""Cases of the mask operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase, exact_case


def _case(op: str, name: str, **arguments: Any) -> OpCase:
    """Return an exact case; callables make arguments from random numbers."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        return {k: v(rng) if callable(v) else v for k, v in arguments.items()}

    return exact_case(op, name, inputs, "booleans and bits: no rounding")


def _bools(*shape: int) -> Any:
    return lambda rng: rng.random(shape) < 0.5


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


CASES = [
    _case("packbits", "big", x=_bools(21)),
    _case("packbits", "little", x=_bools(16), bitorder="little"),
    _case("packbits", "bytes", x=lambda rng: rng.integers(0, 3, 13).astype(np.uint8)),
    _case("packbits", "empty", x=_bools(0)),
    _case("segment_packbits", "big", x=_bools(30), indptr=_ints(0, 8, 8, 21, 30)),
    _case(
        "segment_packbits", "little", x=_bools(30), indptr=_ints(0, 1, 17, 30), bitorder="little"
    ),
    _case("segment_packbits", "nothing", x=_bools(0), indptr=_ints(0)),
    _case("convert_bsr_mask_layout", "rows", mask=_bools(5, 3, 4), indptr=_ints(0, 2, 2, 5)),
    _case("convert_bsr_mask_layout", "vectors", mask=_bools(4, 1, 1), indptr=_ints(0, 4)),
    _case("convert_bsr_mask_layout", "nothing", mask=_bools(0, 2, 2), indptr=_ints(0, 0)),
]

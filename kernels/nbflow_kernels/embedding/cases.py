"""Test and benchmark cases of the embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase

_WIDEN = {"float32": 4, "float16": 2, "uint16": 2}


def _table(rng: np.random.Generator, V: int, E: int, dtype: str) -> Any:
    table = rng.standard_normal((V, E), dtype=np.float32)
    if dtype == "uint16":
        return (table.view(np.uint32) >> 16).astype(np.uint16)
    return table.astype(dtype)


def _inputs(T: int, V: int, E: int, dtype: str) -> Callable[[np.random.Generator], dict[str, Any]]:
    return lambda rng: {
        "ids": rng.integers(0, V, T).astype(np.int32),
        "table": _table(rng, V, E, dtype),
    }


def _quantized(T: int, V: int, E: int, format: str) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        from nbflow_kernels.quantizers import quantize

        table = quantize(_table(rng, V, E, "float32"), format, quantizer="reference")
        return {"ids": rng.integers(0, V, T).astype(np.int32), "table": table}

    return OpCase(
        op="embedding",
        name=f"quantized_{format}",
        inputs=inputs,
        reason="the same decoder as dequantize",
        out=((T, E), "float32"),
        exact=True,
    )


def _case(name: str, T: int, V: int, E: int, dtype: str, timed: bool = False) -> OpCase:
    return OpCase(
        op="embedding",
        name=name,
        inputs=_inputs(T, V, E, dtype),
        reason="a copy; widening to float32 is exact",
        n_bytes=T * E * (_WIDEN[dtype] + 4),
        out=((T, E), "float32"),
        exact=True,
        timed=timed,
    )


def _scaled(dtype: str) -> OpCase:
    return OpCase(
        op="embedding",
        name=f"scaled_{dtype}",
        inputs=lambda rng: _inputs(5, 20, 33, dtype)(rng) | {"scale": 33**0.5},
        rtol=2 * 2.0**-24,
        reason="the scale and the product are rounded",
        out=((5, 33), "float32"),
    )


CASES: list[OpCase] = [
    _case("f32", 7, 50, 33, "float32"),
    _case("f16", 7, 50, 33, "float16"),
    _case("bf16", 7, 50, 33, "uint16"),
    _case("one_row", 1, 5, 1, "float32"),
    _case("no_rows", 0, 5, 16, "float16"),
    *(_scaled(dtype) for dtype in _WIDEN),
    _quantized(9, 50, 96, "q4"),
    _quantized(3, 20, 70, "q6"),
    _quantized(4, 20, 33, "bf16"),
    # a table of 67 MB: larger than the last-level cache, quicker to make than the real 32000 rows
    _case("llama2_7b_prefill", 512, 8192, 4096, "float16", timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

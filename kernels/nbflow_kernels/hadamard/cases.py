"""Test and benchmark cases of Hadamard transforms."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase

_LARGEST = 4.0


def _case(
    name: str, T: int, width: int, block: int, padding: int = 0, timed: bool = False
) -> OpCase:
    """Return a case; rows of x are `padding` columns apart."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        x = rng.uniform(-_LARGEST, _LARGEST, (T, width + padding)).astype(np.float32)
        return {"x": x[:, :width], "block": block}

    # each of log2(n) passes and the scale round to 2**-24 of a partial sum; those are at most
    # n * 4, and 4 sqrt(n) after the scale
    n_roundings = max(1, block.bit_length())
    return OpCase(
        op="hadamard_transform",
        name=name,
        inputs=inputs,
        rtol=0.0,
        atol=n_roundings * _LARGEST * block**0.5 * 2.0**-24,
        reason="log2(n) + 1 roundings, each 2**-24 of at most 4 sqrt(n) after the scale",
        n_bytes=8 * T * width,
        n_flops=T * width * block.bit_length(),
        out=((T, width), "float32"),
        timed=timed,
    )


CASES: list[OpCase] = [
    _case("one", 2, 3, 1),
    _case("pairs", 3, 6, 2),
    _case("eight", 3, 40, 8, padding=3),
    _case("sixteen", 5, 48, 16),
    _case("vectors", 3, 96, 32, padding=4),
    _case("heads_of_64", 7, 192, 64),
    _case("largest", 2, 2048, 1024),
    _case("no_rows", 0, 64, 64),
    _case("llama2_7b_prefill", 512, 4096, 128, timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

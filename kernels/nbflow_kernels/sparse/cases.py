"""Test and benchmark cases of sparse products."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.formats.csr import CsrMatrix
from nbflow_kernels.op_case import OpCase

_REASON = (
    "float32 sums of n products of two N(0, 1) numbers, one after the other: partial sums below "
    "4 * sqrt(n), n roundings of half a unit in the last place added at random: "
    "4 * sqrt(n) * sqrt(n) * 6e-8, n the largest number of values in a row"
)


def _case(
    name: str, T: int, N: int, K: int, share: float, accumulate: bool = False, timed: bool = False
) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        dense = rng.standard_normal((N, K), dtype=np.float32)
        w = CsrMatrix.from_mask(dense, rng.random((N, K)) < share)
        made: dict[str, Any] = {"x": rng.standard_normal((T, K), dtype=np.float32), "w": w}
        if accumulate:
            made |= {"accumulate": True, "out": rng.standard_normal((T, N), dtype=np.float32)}
        return made

    nnz = int(N * K * share)
    largest = K if share == 1 else 3 * K * share + 10  # values in a row
    return OpCase(
        op="sparse_matmul",
        name=name,
        inputs=inputs,
        rtol=0.0,
        atol=4 * largest * 6e-8,
        reason=_REASON,
        n_bytes=8 * nnz + 4 * (T * K + T * N + N),
        n_flops=2 * T * nnz,
        out=None if accumulate else ((T, N), "float32"),
        mutates=("out",) if accumulate else (),
        timed=timed,
    )


CASES = [
    _case("odd", 3, 37, 51, 0.1),
    _case("one_row", 1, 16, 100, 0.05),
    _case("full", 2, 5, 9, 1.0),
    _case("empty", 2, 5, 9, 0.0),
    _case("no_rows", 0, 5, 9, 0.5),
    _case("accumulate", 4, 33, 64, 0.1, accumulate=True),
    _case("llama2_7b_outliers", 1, 11008, 4096, 0.005, accumulate=True, timed=True),
]

"""Test and benchmark cases of the matrix product."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase

_ITEM_BYTES = {"float32": 4, "float16": 2, "uint16": 2}
_REASON = (
    "float32 sum of K products of N(0, 1) and N(0, 1 / K) numbers: every partial sum is below 5, "
    "K / 16 + 5 roundings of half a unit (3e-7) each, added at random: sqrt(K / 16 + 5) * 3e-7 * 3"
)


def _weights(rng: np.random.Generator, N: int, K: int, dtype: str) -> Any:
    w = rng.standard_normal((N, K), dtype=np.float32) / np.float32(max(K, 1) ** 0.5)
    if dtype == "uint16":
        return (w.view(np.uint32) >> 16).astype(np.uint16)
    return w.astype(dtype)


def _case(
    name: str,
    T: int,
    N: int,
    K: int,
    dtype: str = "float32",
    *,
    bias: bool = False,
    accumulate: bool = False,
    timed: bool = False,
) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        made: dict[str, Any] = {
            "x": rng.standard_normal((T, K), dtype=np.float32),
            "w": _weights(rng, N, K, dtype),
        }
        if bias:
            made["bias"] = rng.standard_normal(N, dtype=np.float32)
        if accumulate:
            made |= {"accumulate": True, "out": rng.standard_normal((T, N), dtype=np.float32)}
        return made

    return OpCase(
        op="matmul",
        name=name,
        inputs=inputs,
        rtol=0.0,
        # K = 11008: sqrt(693) * 9e-7 = 2.4e-5; K = 1: 2.2e-6
        atol=9e-7 * math.sqrt(K / 16 + 5),
        reason=_REASON,
        n_bytes=4 * T * K + _ITEM_BYTES[dtype] * N * K + 4 * T * N,
        n_flops=2 * T * N * K,
        out=None if accumulate else ((T, N), "float32"),
        mutates=("out",) if accumulate else (),
        timed=timed,
        arithmetic="f32",
    )


CASES: list[OpCase] = [
    _case("one", 1, 1, 1),
    _case("vector", 1, 7, 48),
    _case("ragged", 5, 9, 77, bias=True),
    _case("ragged_many_tokens", 70, 6, 523, "float16"),
    _case("panels", 6, 5, 4120, bias=True),
    _case("accumulate", 6, 8, 64, accumulate=True),
    _case("accumulate_bias", 17, 10, 600, "uint16", bias=True, accumulate=True),
    _case("f16", 4, 8, 32, "float16"),
    _case("bf16", 2, 3, 80, "uint16"),
    _case("no_rows", 0, 4, 32),
    _case("no_columns", 2, 3, 0, bias=True),
    _case("two_threads", 20, 301, 512),
    _case("one_stream", 1, 1030, 1024),
    _case("llama2_7b_decode_f32", 1, 4096, 4096, timed=True),
    _case("llama2_7b_decode_f16", 1, 4096, 4096, "float16", timed=True),
    _case("llama2_7b_decode_bf16", 1, 4096, 4096, "uint16", timed=True),
    _case("llama2_7b_batch8_f32", 8, 4096, 4096, timed=True),
    _case("llama2_7b_prefill_f32", 128, 4096, 4096, timed=True),
    _case("llama2_7b_prefill_f16", 128, 4096, 4096, "float16", timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

"""Test and benchmark cases of the causal convolution."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase
from nbflow_kernels.state_format import decode_state, encode_state

_HALF_UNIT = 2.0**-24  # rounding of one float32 operation, relative


def _case(
    name: str,
    lengths: list[int],
    C: int,
    K: int,
    *,
    bias: bool = False,
    activation: str | None = None,
    padding: int = 0,
    dtype: str = "float32",
    timed: bool = False,
) -> OpCase:
    """Return a case; rows of x are the middle of a matrix that is `padding` columns wider."""
    T, B = sum(lengths), len(lengths)

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        wide = rng.uniform(-2.0, 2.0, (T, C + padding)).astype(np.float32)
        return {
            "x": wide[:, padding // 2 : padding // 2 + C],
            "weight": rng.uniform(-1.0, 1.0, (C, K)).astype(np.float32),
            "bias": rng.uniform(-1.0, 1.0, C).astype(np.float32) if bias else None,
            "state": encode_state(rng.uniform(-2.0, 2.0, (B + 2, C, K - 1)), dtype),
            "indptr": np.cumsum([0, *lengths], dtype=np.int32),
            "state_indices": rng.permutation(B + 2)[:B].astype(np.int32),
            "activation": activation,
        }

    # |x| <= 2, |w| and |b| <= 1: no partial sum is above 2 K + 1; each of K fused multiply-adds
    # rounds one of them to 2**-24
    atol = K * (2 * K + 1) * _HALF_UNIT
    reason = "K fused multiply-adds of partial sums up to 2 K + 1, each rounded to 2**-24"
    rtol = 0.0
    if activation is not None:
        # the argument is at most 17: rounded, 17 * 2**-24 = 1e-6; exp 2e-7, 3 roundings; and
        # SiLU's slope is at most 1.1
        rtol, atol = 2e-6, 1.1 * atol
        reason += "; SiLU: exponent <= 17 rounded to 2**-24, exp 2e-7, 3 roundings"
    return OpCase(
        op="causal_conv1d",
        name=name,
        inputs=inputs,
        rtol=rtol,
        atol=atol,
        reason=reason,
        n_bytes=4 * (2 * T * C + C * (K + bias) + 2 * B * C * (K - 1)),
        n_flops=2 * T * C * K,
        out=((T, C), "float32"),
        mutates=("state",),
        decoded={"state": lambda stored: decode_state(stored, K - 1)},
        timed=timed,
    )


CASES: list[OpCase] = [
    _case("ragged", [5, 1, 2, 0, 9], 37, 4, bias=True, activation="silu"),
    _case("lfm2", [1, 4], 32, 3, padding=8),
    _case("two_taps", [3, 1], 16, 2, bias=True),
    _case("eight_taps", [4, 12, 1], 20, 8),
    _case("one_channel", [6], 1, 4),
    _case("half", [5, 1], 20, 4, bias=True, dtype="float16"),
    _case("bfloat16", [2, 0, 5], 16, 3, activation="silu", dtype="uint16"),
    _case("no_rows", [0, 0], 16, 4),
    _case("qwen3_next_decode", [1] * 8, 8192, 4, activation="silu", timed=True),
    _case("qwen3_next_prefill", [512], 8192, 4, activation="silu", timed=True),
    _case("lfm2_prefill", [512], 2048, 3, timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

"""Test and benchmark cases of normalization."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.opcase import OpCase

_HALF_UNIT = 2.0**-24  # rounding of one float32 operation, relative
_REASON = "float32 sum of E squares in 64 lanes: (E / 64 + 10) / 2 + 5 roundings of 2**-24"
_LAYER_REASON = "mean of |x| <= 5 summed in 16 lanes: random walk of E / 16 + 6 roundings of 2**-24"


def _rtol(E: int) -> float:
    """Half of the sum's error reaches the root; root, division, offset and two products add 5."""
    return ((E / 64 + 10) / 2 + 5) * _HALF_UNIT


def _layer_atol(E: int) -> float:
    """Return the error of the mean, which the difference x - mean passes on as it is."""
    return 5.0 * math.sqrt(E / 16 + 6) * _HALF_UNIT


def _rows(rng: np.random.Generator, T: int, E: int) -> Any:
    return rng.standard_normal((T, E), dtype=np.float32)


def _rms_inputs(
    T: int, E: int, **scalars: float
) -> Callable[[np.random.Generator], dict[str, Any]]:
    return lambda rng: {
        "x": _rows(rng, T, E),
        "weight": _rows(rng, 1, E)[0],
        "eps": 1e-5,
        **scalars,
    }


def _layer_inputs(T: int, E: int, bias: bool) -> Callable[[np.random.Generator], dict[str, Any]]:
    return lambda rng: {
        "x": _rows(rng, T, E) + np.float32(0.5),
        "weight": _rows(rng, 1, E)[0],
        "bias": _rows(rng, 1, E)[0] if bias else None,
        "eps": 1e-5,
    }


def _fused_inputs(T: int, E: int) -> Callable[[np.random.Generator], dict[str, Any]]:
    return lambda rng: {
        "x": _rows(rng, T, E),
        "residual": _rows(rng, T, E),
        "weight": _rows(rng, 1, E)[0],
        "eps": 1e-6,
    }


def _rms(name: str, T: int, E: int, timed: bool = False, **scalars: float) -> OpCase:
    return OpCase(
        op="rmsnorm",
        name=name,
        inputs=_rms_inputs(T, E, **scalars),
        rtol=_rtol(E),
        atol=0.0,
        reason=_REASON,
        n_bytes=4 * (2 * T * E + E),
        n_flops=4 * T * E,
        out=((T, E), "float32"),
        timed=timed,
    )


def _layer(name: str, T: int, E: int, bias: bool, timed: bool = False) -> OpCase:
    return OpCase(
        op="layernorm",
        name=name,
        inputs=_layer_inputs(T, E, bias),
        rtol=_rtol(E),
        atol=_layer_atol(E),
        reason=_LAYER_REASON,
        n_bytes=4 * (2 * T * E + (1 + bias) * E),
        n_flops=7 * T * E,
        out=((T, E), "float32"),
        timed=timed,
    )


def _fused(name: str, T: int, E: int, timed: bool = False) -> OpCase:
    return OpCase(
        op="fused_add_rmsnorm",
        name=name,
        inputs=_fused_inputs(T, E),
        rtol=_rtol(E),
        # the sum residual + x is rounded: 2**-24 of at most 8, relative to a result near zero
        atol=2e-6,
        reason=_REASON + "; rounding of residual + x",
        n_bytes=4 * (4 * T * E + E),
        n_flops=5 * T * E,
        mutates=("x", "residual"),
        timed=timed,
    )


CASES: list[OpCase] = [
    _rms("small", 3, 8),
    _rms("one_column", 2, 1),
    _rms("ragged", 5, 77),
    _rms("one_row", 1, 288),
    _rms("no_rows", 0, 64),
    _rms("gemma_offset", 4, 100, offset=1.0),
    _rms("two_threads", 300, 1000),
    _rms("llama2_7b_decode", 1, 4096, timed=True),
    _rms("llama2_7b_prefill", 512, 4096, timed=True),
    _layer("small", 3, 8, bias=True),
    _layer("ragged_no_bias", 5, 77, bias=False),
    _layer("one_row", 1, 288, bias=True),
    _layer("no_rows", 0, 64, bias=True),
    _layer("gpt2_xl_prefill", 512, 1600, bias=True, timed=True),
    _fused("ragged", 5, 77),
    _fused("one_row", 1, 288),
    _fused("llama2_7b_decode", 1, 4096, timed=True),
    _fused("llama2_7b_prefill", 512, 4096, timed=True),
]
"""Every case of the family; see `nbflow_kernels.opcase.OpCase`."""

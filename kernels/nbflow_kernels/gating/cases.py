"""Test and benchmark cases of gated products."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase

# The exponent of the logistic function is at most 6, rounded to 2**-24 of itself: 4e-7; exp, the
# sum, the division and the products add 2e-7 + 3 * 6e-8.
_LOGISTIC = (1e-6, "exponent <= 6 rounded to 2**-24 of itself, exp 2e-7, 3 roundings")
_TOLERANCE = {
    "sigmoid": _LOGISTIC,
    "silu": _LOGISTIC,
    "identity": (6e-8, "one rounding of the product"),
}


def _case(
    name: str, T: int, width: int, activation: str, padding: int = 0, timed: bool = False
) -> OpCase:
    """Return a case; gate and x are columns of one array that is `padding` columns wider."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        both = rng.uniform(-6.0, 6.0, (T, 2 * width + padding)).astype(np.float32)
        if not padding:
            return {"gate": both[:, :width].copy(), "x": both[:, width:], "activation": activation}
        return {"gate": both[:, :width], "x": both[:, width + padding :], "activation": activation}

    rtol, reason = _TOLERANCE[activation]
    return OpCase(
        op="gated_product",
        name=name,
        inputs=inputs,
        rtol=rtol,
        atol=0.0,
        reason=reason,
        n_bytes=12 * T * width,
        n_flops=T * width * (1 if activation == "identity" else 20),
        out=((T, width), "float32"),
        timed=timed,
    )


def _decay_case(name: str, T: int, H: int) -> OpCase:
    """Return a case of `log_decay`; x is columns of a wider array."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        return {
            "x": rng.uniform(-6.0, 6.0, (T, H + 3)).astype(np.float32)[:, 3:],
            "rate": -rng.uniform(0.01, 16.0, H).astype(np.float32),
            "bias": rng.uniform(-2.0, 2.0, H).astype(np.float32),
        }

    return OpCase(
        op="log_decay",
        name=name,
        inputs=inputs,
        # softplus changes by at most its argument's error, |x + b| <= 8 rounded to 5e-7 of a
        # result that is at least e**-8 for -8: exp doubles that relative error of 8 * 6e-8
        rtol=2e-6,
        atol=0.0,
        reason="x + b <= 8 rounded to 2**-24 of itself, exp 2e-7, softplus 5e-7, 2 roundings",
        n_bytes=4 * (2 * T * H + 2 * H),
        n_flops=T * H * 40,
        out=((T, H), "float32"),
    )


def _extend_case(name: str, T: int, H: int, D: int, W: int, exponential: bool) -> OpCase:
    """Return a case of `extend_heads`; x and numbers are columns of wider arrays."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        heads = rng.standard_normal((T, H + 1, D), dtype=np.float32)[:, 1:]
        numbers = rng.uniform(-6.0, 1.0, (T, H + 2)).astype(np.float32)[:, 2:]
        return {"x": heads, "numbers": numbers, "n_columns": W - D, "exponential": exponential}

    return OpCase(
        op="extend_heads", name=name, inputs=inputs, rtol=5e-7 if exponential else 0.0, atol=0.0,
        reason="exp of a number of at most 6 is off by 2e-7 of itself, one rounding"
        if exponential
        else "copies",
        n_bytes=4 * T * H * (D + W + 1), n_flops=T * H, out=((T, H, W), "float32"),
    )  # fmt: skip


def _clip_case(name: str, T: int, width: int, padding: int) -> OpCase:
    """Return a case of `clip`; x is columns of a wider array, and has the special values."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        x = rng.uniform(-6.0, 6.0, (T, width + padding)).astype(np.float32)
        x[:, padding : padding + 4] = np.array([np.nan, np.inf, -np.inf, 1.75])[:width]
        return {"x": x[:, padding:], "limit": 1.75}

    return OpCase(
        op="clip", name=name, inputs=inputs, rtol=0.0, atol=0.0, reason="copies; 1.75 is exact",
        n_bytes=8 * T * width, n_flops=2 * T * width, out=((T, width), "float32"),
    )  # fmt: skip


CASES: list[OpCase] = [
    _clip_case("ragged", 5, 37, 3),
    _clip_case("one_column", 3, 1, 0),
    _extend_case("ragged", 3, 2, 12, 28, True),
    _extend_case("queries", 5, 3, 7, 8, False),
    _decay_case("ragged", 5, 37),
    _decay_case("one_head", 3, 1),
    _case("ragged", 3, 37, "sigmoid"),
    _case("silu", 2, 20, "silu", padding=4),
    _case("identity", 5, 33, "identity", padding=3),
    _case("one_column", 4, 1, "sigmoid"),
    _case("no_rows", 0, 16, "silu"),
    _case("qwen3_next_prefill", 512, 4096, "sigmoid", timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

"""Test and benchmark cases of the activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase

# The argument u of exp(-u) is rounded to 2**-24 of |u|, so e is off by |u| * 2**-24 of itself:
# 20 * 6e-8 = 1.2e-6 for SiLU and the tails of the inputs below (|u| <= 20); exp, the sum, the
# division and the product with `up` add 2e-7 + 3 * 6e-8.  Quick GELU rounds once more: 1.702 * v.
_SILU = (2e-6, "exponent |u| <= 20 rounded to 2**-24 of itself, exp 2e-7, 3 roundings")
# GELU's inputs stay within |v| <= 6: v**2 / 2 <= 18; the cubic form has 2 * u <= 25 and adds two
# roundings to u: 25 * 3 * 6e-8 = 4.5e-6.
_TANH = (5e-6, "exponent 2u <= 25 with 3 roundings of 2**-24, exp 2e-7, 3 roundings")
_GELU = (3e-6, "exponent v**2 / 2 <= 18 with 2 roundings, polynomial 4.5e-8, exp 2e-7, 4 roundings")
_RELU = (6e-8, "one rounding of the product")
_RELU2 = (1.2e-7, "two roundings of a product")
# up to 1.702 * 6 = 10.2 in the exponent, with 2 roundings; the sum up + 1 is rounded to 2**-24 of
# at most 7 while it may be near zero: 6 * 7 * 2**-24 = 2.5e-6, absolute
_CLAMPED = (
    3e-6,
    "exponent <= 10.2 with 2 roundings of 2**-24, exp 2e-7, 5 roundings; up + 1 cancels",
)
_CLAMPED_ATOL = 3e-6
# expm1 has 3e-7 of at most 1, e**v - 1 - x cancels up to 6e-8 of |x| <= 6, and the sum with
# beta x <= 3 passes through 0: 0.8 * (3e-7 + 4e-7) + 2 * 6e-8 * 3 = 1e-6, absolute
_XIELU = (2.4e-7, "4 roundings of 2**-24; expm1 3e-7, and e**x - 1 - x cancels")
_XIELU_ATOL = 1e-6
_ATOL = {"swigluoai_and_mul": _CLAMPED_ATOL, "xielu": _XIELU_ATOL}
_TOLERANCE = {
    "xielu": _XIELU,
    "silu": _SILU,
    "gelu": _GELU,
    "gelu_tanh": _TANH,
    "gelu_quick": _SILU,
    "relu": _RELU,
    "relu2": _RELU2,
    "sigmoid": _SILU,
    "swigluoai": _CLAMPED,
}


def _inputs(
    T: int, width: int, options: dict[str, Any]
) -> Callable[[np.random.Generator], dict[str, Any]]:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        x = rng.uniform(-6.0, 6.0, (T, width)).astype(np.float32)
        x[rng.random(x.shape) < 0.05] = 0.0
        return {"x": x, **options}

    return make


# Special values of float32.  e**-89 * 89 = 2e-37 and less may be lost.
_EXTREMES = (-np.inf, np.inf, np.nan, -3e38, 3e38, -1e13, 1e13, -1e4, 1e4, -100, 100, -89, 89, -0.0)
_TAIL = 3e-37


def _extreme_case(op: str) -> OpCase:
    """Return a case of `_EXTREMES`, for gated ops of each of them as gate and as factor."""
    gated = op.endswith("_and_mul")
    largest = 1e15 if op.startswith("relu2") else np.inf  # its square is a float32
    values = [v for v in _EXTREMES if not np.isfinite(v) or abs(v) < largest]
    up = [0.5, -np.inf, np.inf, np.nan, -0.5]
    # a tail that float32 loses, times infinity, is NaN instead of infinity
    pairs = [(g, u) for g in values for u in up if not (-1e3 < g < 0 and np.isinf(u))]
    pairs = pairs if gated else [(g, 0.0) for g in values]
    gates, ups = np.array(pairs, np.float32).T
    options: dict[str, Any] = {}
    if op == "swigluoai_and_mul":
        x, options = np.stack([gates, ups], axis=1).reshape(1, -1), {"limit": 7.0}
    else:
        x = np.concatenate([gates, ups])[None] if gated else gates[None]
    rtol, reason = _TOLERANCE[op.removesuffix("_and_mul")]
    return OpCase(
        op=op, name="extremes", inputs=lambda rng: {"x": x.copy(), **options}, rtol=rtol,
        atol=_CLAMPED_ATOL if options else _TAIL, reason=f"{reason}; less than 3e-37 is lost",
        out=((1, len(gates)), "float32"),
    )  # fmt: skip


def _case(op: str, name: str, T: int, width: int, *, timed: bool = False, **options: Any) -> OpCase:
    gated = op.endswith("_and_mul") or op == "glu"
    function = options.get("activation", "sigmoid") if op == "glu" else op
    rtol, reason = _TOLERANCE[function.removesuffix("_and_mul")]
    columns = 2 * width if gated else width
    return OpCase(
        op=op,
        name=name,
        inputs=_inputs(T, columns, options),
        rtol=rtol,
        atol=_ATOL.get(op, 0.0),
        reason=reason,
        n_bytes=4 * T * (columns + width),
        n_flops=T * width * (20 if gated else 19),
        out=((T, width), "float32"),
        timed=timed,
    )


_PLAIN = ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "sigmoid")
_GATED = tuple(f"{name}_and_mul" for name in _PLAIN)

CASES: list[OpCase] = [
    *(_case(op, "ragged", 3, 37) for op in _PLAIN + _GATED),
    *(_case(op, "one_row", 1, 64) for op in _PLAIN + _GATED),
    *(_extreme_case(op) for op in (*_PLAIN, *_GATED, "swigluoai_and_mul")),
    _case("silu_and_mul", "one_column", 5, 1),
    _case("silu_and_mul", "no_rows", 0, 16),
    _case("silu", "two_threads", 200, 1001),
    _case("glu", "original", 3, 37),
    _case("glu", "gelu_gate_second", 3, 16, activation="gelu"),
    _case("glu", "gate_first", 2, 20, activation="silu", gate_first=True),
    _case("swigluoai_and_mul", "interleaved", 3, 37, limit=4.0),
    _case("swigluoai_and_mul", "halves", 3, 37, interleaved=False),
    _case("swigluoai_and_mul", "one_row", 1, 64, alpha=1.0),
    _case("xielu", "ragged", 3, 37, alpha_p=0.8, alpha_n=0.8),
    _case("xielu", "other_slope", 1, 64, alpha_p=0.3, alpha_n=0.8, beta=0.4, eps=-1e-3),
    _case("silu_and_mul", "llama2_7b_decode", 1, 11008, timed=True),
    _case("silu_and_mul", "llama2_7b_prefill", 512, 11008, timed=True),
    _case("gelu_tanh_and_mul", "gemma_2b_prefill", 512, 16384, timed=True),
    _case("gelu", "gpt_neox_20b_prefill", 512, 24576, timed=True),
    _case("relu2", "nemotron_4_15b_prefill", 512, 24576, timed=True),
    _case("swigluoai_and_mul", "gpt_oss_expert_prefill", 512, 2880, timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

"""Test and benchmark cases of the activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.opcase import OpCase

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
_TOLERANCE = {
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
        atol=_CLAMPED_ATOL if op == "swigluoai_and_mul" else 0.0,
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
    _case("silu_and_mul", "one_column", 5, 1),
    _case("silu_and_mul", "no_rows", 0, 16),
    _case("silu", "two_threads", 200, 1001),
    _case("glu", "original", 3, 37),
    _case("glu", "gelu_gate_second", 3, 16, activation="gelu"),
    _case("glu", "gate_first", 2, 20, activation="silu", gate_first=True),
    _case("swigluoai_and_mul", "interleaved", 3, 37, limit=4.0),
    _case("swigluoai_and_mul", "halves", 3, 37, interleaved=False),
    _case("swigluoai_and_mul", "one_row", 1, 64, alpha=1.0),
    _case("silu_and_mul", "llama2_7b_decode", 1, 11008, timed=True),
    _case("silu_and_mul", "llama2_7b_prefill", 512, 11008, timed=True),
    _case("gelu_tanh_and_mul", "gemma_2b_prefill", 512, 16384, timed=True),
    _case("gelu", "gpt_neox_20b_prefill", 512, 24576, timed=True),
    _case("relu2", "nemotron_4_15b_prefill", 512, 24576, timed=True),
    _case("swigluoai_and_mul", "gpt_oss_expert_prefill", 512, 2880, timed=True),
]
"""Every case of the family; see `nbflow_kernels.opcase.OpCase`."""

"""Test and benchmark cases of normalization."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.formats.float8 import FLOAT8, decode_float8, float8_values
from nbflow_kernels.op_case import OpCase

_HALF_UNIT = 2.0**-24  # rounding of one float32 operation, relative
_REASON = "float32 sum of E squares in 64 lanes: (E / 64 + 10) / 2 + 5 roundings of 2**-24"
_LAYER_REASON = (
    "mean of |x| <= 5 summed in 64 lanes: random walk of E / 64 + 10 roundings of 2**-24"
)
_ADDED = "; rounding of residual + x"


def _rtol(E: int) -> float:
    """Half of the sum's error reaches the root; root, division, offset and two products add 5."""
    return ((E / 64 + 10) / 2 + 5) * _HALF_UNIT


def _layer_atol(E: int) -> float:
    """Return the error of the mean, which the difference x - mean passes on as it is."""
    return 5.0 * math.sqrt(E / 64 + 10) * _HALF_UNIT


def _rows(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


def _heads(rng: np.random.Generator, T: int, H: int, E: int) -> Any:
    """Return (T, H, E) query rows that are the middle columns of a wider matrix."""
    return _rows(rng, T, H + 2, E)[:, 1 : H + 1]


def _inputs(
    op: str, shape: tuple[int, ...], weight: tuple[int, ...] | None, scalars: dict[str, Any]
) -> Callable[[np.random.Generator], dict[str, Any]]:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        x = _heads(rng, *shape) if len(shape) == 3 else _rows(rng, *shape)
        arguments: dict[str, Any] = {"x": x}
        if "fused" in op:
            arguments["residual"] = _rows(rng, *shape)
        if op not in ("l2norm", "linear_norm"):
            arguments["weight"] = None if weight is None else _rows(rng, *weight)
        if "layernorm" in op:
            x += np.float32(0.5)
            if scalars.get("bias", True):
                arguments["bias"] = _rows(rng, *shape[-1:])
        return arguments | {k: v for k, v in scalars.items() if k != "bias"}

    return make


def _tolerance(op: str, E: int) -> tuple[float, float, str]:
    """Return rtol, atol and the reason for both."""
    if op == "linear_norm":
        return 2 * _HALF_UNIT, 0.0, "the factor and the product are rounded"
    # the sum residual + x is rounded: 2**-24 of at most 8, times a weight of at most 4
    added, words = (2e-6, _ADDED) if "fused" in op else (0.0, "")
    if "layernorm" in op:
        return _rtol(E), _layer_atol(E) + added, _LAYER_REASON + words
    return _rtol(E), added, _REASON + words


def _case(
    op: str,
    name: str,
    *shape: int,
    weight: tuple[int, ...] | None = (),
    timed: bool = False,
    **scalars: Any,
) -> OpCase:
    """Return a case; the weight has a number for each column unless another shape is given."""
    n, E = math.prod(shape), shape[-1]
    columns = (E,) if weight == () else weight
    rtol, atol, reason = _tolerance(op, E)
    fused, layer = "fused" in op, "layernorm" in op
    n_weights = 0 if columns is None or op in ("l2norm", "linear_norm") else math.prod(columns)
    return OpCase(
        op=op,
        name=name,
        inputs=_inputs(op, shape, columns, scalars),
        rtol=rtol,
        atol=atol,
        reason=reason,
        n_bytes=4 * ((4 if fused else 2) * n + (1 + layer) * n_weights),
        n_flops=n * (1 if op == "linear_norm" else 4 + 3 * layer + fused),
        out=None if fused else (shape, "float32"),
        mutates=("x", "residual") if fused else (),
        timed=timed,
    )


# The gate f(g) has |g| <= 6 in its exponent, rounded to 2**-24 of itself, exp 2e-7, 4 roundings:
# 6 * 6e-8 + 2e-7 + 4 * 6e-8 = 8e-7, which a gate before the norm brings into the mean square, too.
_GATE_ERROR = 8e-7


def _gated_case(
    name: str,
    T: int,
    C: int,
    size: int,
    *,
    shared: bool = False,
    timed: bool = False,
    **options: Any,
) -> OpCase:
    """Return a case of `gated_rmsnorm`; x and gate are columns of one matrix."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        both = _rows(rng, T, 2 * C)
        both[:, C:] = rng.uniform(-6.0, 6.0, (T, C))
        weight = _rows(rng, size if shared else C)
        given = {"group_size": size, **options} if size != C else options
        return {"x": both[:, :C], "gate": both[:, C:], "weight": weight, "eps": 1e-5, **given}

    return OpCase(
        "gated_rmsnorm", name, inputs, _rtol(size) + 2 * _GATE_ERROR, 0.0,
        f"{_REASON}; gate: exponent |g| <= 6, exp 2e-7, 4 roundings, twice if gated first",
        n_bytes=4 * (3 * T * C + C), n_flops=T * C * 22, out=((T, C), "float32"), timed=timed,
    )  # fmt: skip


def _float8_case(op: str, name: str, *shape: int, out_format: str, scale: float) -> OpCase:
    """Return a case with float8 results, compared as numbers."""
    mantissa = FLOAT8[out_format].mantissa

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        given = _inputs(op, shape, shape[-1:], {"eps": 1e-6})(rng)
        out = np.full((*shape[:-1], shape[-1] + 3), 0xFF, np.uint8)[..., : shape[-1]]
        out = out if len(shape) == 2 else np.full(shape, 0xFF, np.uint8)
        return given | {"out": out, "scale": scale, "out_format": out_format}

    return OpCase(
        op, name, inputs, 2.0**-mantissa, float(float8_values(out_format)[1]),
        "next to a middle of two float8 numbers, either: a step of 2**-mantissa, or the smallest",
        mutates=("out", *(("residual",) if "fused" in op else ())),
        decoded={"out": lambda codes: decode_float8(codes, out_format)},
        n_bytes=math.prod(shape) * (13 if "fused" in op else 5),
    )  # fmt: skip


CASES: list[OpCase] = [
    _case("rmsnorm", "small", 3, 8, eps=1e-5),
    _case("rmsnorm", "one_column", 2, 1, eps=1e-5),
    _case("rmsnorm", "ragged", 5, 77, eps=1e-5),
    _case("rmsnorm", "one_row", 1, 288, eps=1e-5),
    _case("rmsnorm", "no_rows", 0, 64, eps=1e-5),
    _case("rmsnorm", "gemma_offset", 4, 100, eps=1e-5, offset=1.0),
    _case("rmsnorm", "two_threads", 300, 1000, eps=1e-5),
    _case("rmsnorm", "no_weight", 3, 90, eps=1e-5, weight=None),
    _case("rmsnorm", "heads", 5, 3, 80, eps=1e-6),
    _case("rmsnorm", "heads_odd_size", 4, 2, 20, eps=1e-6, offset=1.0),
    _case("rmsnorm", "weight_per_head", 4, 3, 100, eps=1e-6, weight=(3, 100)),
    _case("rmsnorm", "llama2_7b_decode", 1, 4096, eps=1e-5, timed=True),
    _case("rmsnorm", "llama2_7b_prefill", 512, 4096, eps=1e-5, timed=True),
    _case("rmsnorm", "qwen3_8b_query_heads", 512, 32, 128, eps=1e-6, timed=True),
    _case("gemma_rmsnorm", "ragged", 5, 77, eps=1e-6),
    _case("gemma_rmsnorm", "heads", 3, 2, 256, eps=1e-6),
    _case("layernorm", "small", 3, 8, eps=1e-5),
    _case("layernorm", "ragged_no_bias", 5, 77, eps=1e-5, bias=False),
    _case("layernorm", "no_weight_no_bias", 2, 130, eps=1e-5, bias=False, weight=None),
    _case("layernorm", "one_row", 1, 288, eps=1e-5),
    _case("layernorm", "no_rows", 0, 64, eps=1e-5),
    _case("layernorm", "heads", 4, 3, 80, eps=1e-5),
    _case("layernorm", "weight_per_head", 4, 3, 100, eps=1e-5, bias=False, weight=(3, 100)),
    _case("layernorm", "gpt2_xl_prefill", 512, 1600, eps=1e-5, timed=True),
    _case("fused_add_rmsnorm", "ragged", 5, 77, eps=1e-6),
    _case("fused_add_rmsnorm", "one_row", 1, 288, eps=1e-6),
    _case("fused_add_rmsnorm", "heads", 3, 2, 20, eps=1e-6),
    _case("fused_add_rmsnorm", "llama2_7b_decode", 1, 4096, eps=1e-6, timed=True),
    _case("fused_add_rmsnorm", "llama2_7b_prefill", 512, 4096, eps=1e-6, timed=True),
    _case("gemma_fused_add_rmsnorm", "ragged", 5, 77, eps=1e-6),
    _case("fused_add_layernorm", "ragged", 5, 77, eps=1e-5),
    _case("fused_add_layernorm", "no_bias", 2, 128, eps=1e-5, bias=False),
    _case("fused_add_layernorm", "gpt2_xl_prefill", 512, 1600, eps=1e-5, timed=True),
    _case("l2norm", "ragged", 5, 77, eps=1e-6),
    _case("l2norm", "heads", 3, 4, 80, eps=1e-6),
    _case("linear_norm", "root_of_the_size", 3, 77),
    _case("linear_norm", "given_scale", 2, 3, 16, scale=12.0),
    _float8_case("rmsnorm_quant", "ragged", 5, 77, out_format="f8_e4m3", scale=0.01),
    _float8_case("rmsnorm_quant", "heads", 3, 2, 80, out_format="f8_e5m2", scale=1.0),
    _float8_case("rmsnorm_quant", "no_rows", 0, 64, out_format="f8_e4m3", scale=1.0),
    _float8_case("fused_add_rmsnorm_quant", "ragged", 5, 77, out_format="f8_e5m2", scale=10.0),
    _float8_case("fused_add_rmsnorm_quant", "one_row", 1, 288, out_format="f8_e4m3", scale=0.01),
    _float8_case("layernorm_quant", "ragged", 5, 77, out_format="f8_e4m3", scale=10.0),
    _float8_case("layernorm_quant", "one_row", 1, 288, out_format="f8_e5m2", scale=1.0),
    _gated_case("one_group", 5, 77, 77),
    _gated_case("groups_gate_first", 3, 90, 30, gate_first=True),
    _gated_case("shared_weight", 2, 128, 32, shared=True),
    _gated_case("sigmoid_gate_first", 2, 64, 64, gate_first=True, activation="sigmoid"),
    _gated_case("sigmoid_heads", 2, 40, 20, activation="sigmoid"),
    _gated_case("no_rows", 0, 64, 64),
    _gated_case("nemotron_h_8b_prefill", 512, 8192, 1024, gate_first=True, timed=True),
    _gated_case("qwen3_next_heads", 512, 4096, 128, shared=True, timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

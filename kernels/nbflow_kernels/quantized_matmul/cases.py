"""Test and benchmark cases of the quantized matrix product."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.formats import FORMATS, QuantTensor
from nbflow_kernels.formats.column_order import order_by_group
from nbflow_kernels.formats.user import UserFormat
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.quantizers import quantize

_F32_REASON = (
    "float32 sums of K products of N(0, 1) and N(0, 1/K) numbers in 4 chains: partial sums below "
    "4, K roundings of at most 2.4e-7 added at random, whose root mean square is 0.58 of the "
    "largest: 3 * sqrt(K) * 1.4e-7"
)
_REASON = {
    "f32": _F32_REASON,
    "bf16": f"the reference rounds to bfloat16 too, whose products are exact; then {_F32_REASON}",
    "int8": (
        "exact integer sums; K/16 of them at most are scaled (one rounding) and added to partial "
        "sums below 16, twice where there are bases: 2 * K/16 roundings of at most 9.5e-7 added at "
        "random, root mean square 0.58 of that: 3 * sqrt(K/8) * 5.5e-7"
    ),
}


def weights(
    rng: np.random.Generator,
    N: int,
    K: int,
    format: str,
    reordered: bool = False,
    scaled: bool = False,
) -> QuantTensor:
    """Return N(0, 1/K) weights; those of a large matrix repeat after 512 rows.

    With `reordered`, columns belong to four groups of different sizes in any order; with `scaled`,
    they have factors of 0.5 to 1.
    """
    if scaled:
        plain = weights(rng, N, K, format, reordered)
        factors = rng.uniform(0.5, 1.0, K).astype(np.float32)
        return QuantTensor(format, (N, K), plain.data, None, plain.column_order, factors)
    if reordered:
        groups = rng.choice(4, K, p=(0.4, 0.1, 0.2, 0.3))
        order, _ = order_by_group(groups, 4, FORMATS[format].block_size)
        stored = weights(rng, N, len(order), format)
        return QuantTensor(format, (N, K), stored.data, column_order=order)
    w = rng.standard_normal((min(N, 512), K), dtype=np.float32) / np.float32(K**0.5)
    # the reference quantizer is fast, and this tests the product
    some = quantize(w, format, quantizer="reference")
    return QuantTensor(format, (N, K), some.data[np.arange(N) % max(1, len(some.data))])


def _case(
    name: str,
    T: int,
    N: int,
    K: int,
    format: str,
    *,
    activations: str = "f32",
    bias: bool = False,
    accumulate: bool = False,
    timed: bool = False,
    device_only: bool = False,
    reordered: bool = False,
    scaled: bool = False,
) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        made: dict[str, Any] = {
            "x": rng.standard_normal((T, K), dtype=np.float32),
            "w": weights(rng, N, K, format, reordered, scaled),
        }
        if activations != "f32":
            made["activations"] = activations
        if bias:
            made["bias"] = rng.standard_normal(N, dtype=np.float32)
        if accumulate:
            made |= {"accumulate": True, "out": rng.standard_normal((T, N), dtype=np.float32)}
        return made

    chosen = FORMATS[format]
    weight_bytes = N * chosen.row_blocks(K) * chosen.block_bytes
    # K = 4096: 3 * 64 * 1.4e-7 = 2.7e-5; the 8 stands for bias and old output
    exact = 3 * (K + 8) ** 0.5 * 1.4e-7
    atol = {"f32": exact, "bf16": exact, "int8": 3 * (K / 8 + 8) ** 0.5 * 5.5e-7}
    return OpCase(
        op="qmatmul",
        name=name if activations == "f32" else f"{name}_{activations}",
        inputs=inputs,
        rtol=0.0,
        atol=atol[activations],
        reason=_REASON[activations],
        n_bytes=weight_bytes + 4 * (T * K + T * N),
        n_flops=2 * T * N * K,
        out=None if accumulate else ((T, N), "float32"),
        mutates=("out",) if accumulate else (),
        timed=timed or device_only,
        device_only=device_only,
        arithmetic=activations,
    )


# a format per packed layout; the others differ in storage only
FORMS = (
    *("q8_b32t1", "q8", "q6", "q5", "q5_b32t1", "q5_0", "q4", "q4_b64t1", "q4_b16", "q4_0"),
    *("q3h", "q3", "q2"),
)
LARGE_BLOCK_FORMS = (
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4"),
    *("iq3_s", "iq3_xxs", "iq2_s", "iq2_xxs", "iq1_m", "iq1_s", "tq2_0", "q2_0", "q1_0"),
    *("q2t", "q3t", "q4t"),
)
_TIMED = ("q8_0", "q4_0", "q4_k", "q8", "q4", "q3h")
_BOTH = ("f32", "int8")
_FLOATS = ("f32", "f16", "bf16")
# a format per kind of codes and parameters
_BF16_FORMATS = (*_FLOATS, "q8", "q6", "q4_b16", "q3h", "q2")

# weights of Llama 3 8B: gate and up, output, down; GEMV and GEMM
_ON_DEVICES = (
    ("q4_0", 28672, 4096, (1, 8, 16, 32, 64, 512)),
    *((f, 28672, 4096, (1, 16, 32, 64)) for f in ("q4_k", "q3h", "q8_0", "q2_k")),
    *(("q4_0", N, K, (1, 8, 64)) for N, K in ((4096, 4096), (4096, 14336))),
    *((f, 14336, 4096, (1,)) for f in ("q4_0", "q6_k", "iq4_xs")),
)

# prompts at the rate of the tensor cores
_PROMPTS = (("q4_k", 512), ("q4_k", 1536), ("q8_0", 512), ("bf16", 512), ("bf16", 1536))

CASES = [
    *(_case(f"{f}_one_row", 1, 37, 200, f, activations=a) for a in _BOTH for f in FORMS),
    *(_case(f"{f}_odd", 7, 37, 200, f, bias=True, activations=a) for a in _BOTH for f in FORMS),
    *(_case(f"{f}_one_row", 1, 37, 600, f, bias=True) for f in LARGE_BLOCK_FORMS),
    *(_case(f"{f}_odd", 6, 37, 600, f, activations="int8") for f in LARGE_BLOCK_FORMS),
    *(_case(f"{f}_one_row", 1, 37, 203, f, bias=True) for f in _FLOATS),
    *(_case(f"{f}", 3, 5, 24, f) for f in _FLOATS),
    *(_case(f"{f}_ragged", 17, 37, 203, f, bias=True) for f in _FLOATS),
    *(_case(f, 9, 37, 203, f, activations="bf16", bias=True) for f in _BF16_FORMATS),
    *(
        _case(f"reordered_{f}", T, 37, 203, f, activations=a, bias=True, reordered=True)
        for f, T in (("int4_g32", 1), ("uint4_g64", 5), ("uint3_g16_f32", 40))
        for a in ("f32", "bf16", "int8")
    ),
    _case("scaled_int4_g32", 1, 37, 203, "int4_g32", bias=True, scaled=True),
    _case("scaled_uint4_g64", 5, 37, 203, "uint4_g64", activations="int8", scaled=True),
    _case("one_row", 1, 20, 100, "q4", activations="bf16"),
    _case("long_rows", 7, 18, 4300, "q4", accumulate=True),
    _case("long_rows", 7, 18, 8500, "f16", activations="bf16", accumulate=True),
    _case("no_rows", 0, 16, 64, "f16", activations="bf16"),
    _case("no_outputs_f16", 3, 0, 64, "f16"),
    *(_case("one_weight", 1, 1, 1, "q4", activations=a) for a in _BOTH),
    *(_case("no_rows", 0, 16, 64, "q4", activations=a) for a in _BOTH),
    *(_case("no_outputs", 2, 0, 64, "q4", activations=a) for a in _BOTH),
    *(
        _case("one_row_accumulate", 1, 33, 96, "q4", bias=True, accumulate=True, activations=a)
        for a in _BOTH
    ),
    *(_case("accumulate", 5, 33, 96, "q3h", accumulate=True, activations=a) for a in _BOTH),
    *(_case("many_tiles", 70, 100, 600, "q4", bias=True, activations=a) for a in _BOTH),
    *(
        _case(f"llama2_7b_{f}_{T}", T, 11008, 4096, f, activations=a, timed=True)
        for a in _BOTH
        for f in _TIMED
        for T in (1, 64, 512)
    ),
    *(_case(f"llama2_7b_f16_{T}", T, 11008, 4096, "f16", timed=True) for T in (1, 8, 64, 512)),
    *(
        _case(f"llama2_7b_{f}_{T}", T, 11008, 4096, f, activations="bf16", timed=True)
        for f in ("q4_0", "f16")
        for T in (64, 512)
    ),
    *(
        _case(f"llama3_28672x4096_{f}_{T}", T, 28672, 4096, f, activations=a, device_only=True)
        for a in ("bf16", "int8")
        for f in ("q4_0", "q4_k", "q3h", "q8_0")
        for T in (1, 16, 32, 64)
    ),
    *(
        _case(f"llama3_{N}x{K}_{f}_{T}", T, N, K, f, device_only=True)
        for f, N, K, rows in _ON_DEVICES
        for T in rows
    ),
    *(
        _case(f"llama3_28672x4096_{f}_{T}", T, 28672, 4096, f, activations="bf16", device_only=True)
        for f, T in _PROMPTS
    ),
]


def user_cases() -> list[OpCase]:
    """Return the cases of registered user formats."""
    cases = []
    for format in FORMATS.values():
        if isinstance(format, UserFormat):
            for kind in ("f32", "bf16", "int8"):
                cases.append(_case(f"{format.name}_odd", 7, 37, 200, format.name, activations=kind))
                for T in (1, 64):
                    large = (f"llama2_7b_{format.name}_{T}", T, 11008, 4096, format.name)
                    cases.append(_case(*large, activations=kind, timed=True))
    return cases

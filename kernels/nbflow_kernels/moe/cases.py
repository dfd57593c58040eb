"""Test and benchmark cases of routing, grouped GEMM and the MoE layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nbflow_kernels.formats import FORMATS, QuantTensor
from nbflow_kernels.moe.fused_moe import SharedExpert
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.quantizers import quantize

INT8 = (
    "exact integer sums of 32 columns, each scaled (one rounding) and added to partial sums below "
    "16: 3 * sqrt(K / 16) * 9.5e-7"
)
PRODUCT = "float32 sums of K products of N(0, 1) and N(0, 1/K) numbers: 3 * sqrt(K/2) * 2.4e-7"


def _product_error(K: int) -> float:
    """Return the tolerance of a product: K / 2 random roundings of partial sums below 5."""
    return float(3 * (K / 2 + 2) ** 0.5 * 2.4e-7)


def _routing(
    name: str, T: int, E: int, top_k: int, *, bias: bool = False, **options: Any
) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        logits = (2 * rng.standard_normal((T, E))).astype(np.float32)
        logits[:, E // 2] = logits[:, E // 3]  # a tie
        made: dict[str, Any] = {"logits": logits, "top_k": top_k, **options}
        if bias:
            made["correction_bias"] = rng.uniform(-0.5, 0.1, E).astype(np.float32)
        return made

    reason = "float64 inside, one rounding to float32"
    return OpCase("moe_routing", name, inputs, 1e-7, 1e-12, reason, n_bytes=4 * T * E)


def _ids(rng: np.random.Generator, T: int, E: int, k: int) -> np.ndarray:
    """Return k different experts per token; a few are -1."""
    ids = np.argsort(rng.random((T, E)), axis=1)[:, :k].astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    return ids


def _permute(name: str, T: int, E: int, k: int) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        return {"ids": _ids(rng, T, E, k), "n_experts": E}

    return OpCase("moe_permute", name, inputs, 0.0, 0.0, "integers", exact=True)


def _weights(rng: np.random.Generator, E: int, N: int, K: int, kind: str) -> Any:
    """Return E matrices (N, K) of N(0, 1/K) numbers; those of a large stack repeat."""
    some = rng.standard_normal((min(E * N, 512), K), dtype=np.float32) / np.float32(K**0.5)
    pick = np.arange(E * N) % len(some)
    if kind == "list":
        matrices = list(some[pick].reshape(E, N, K))
        return [quantize(matrices[0], "q8", quantizer="reference"), *matrices[1:]]
    if kind == "bf16_array":
        return (some[pick].view(np.uint32) >> 16).astype(np.uint16).reshape(E, N, K)
    if kind.endswith("_array"):
        return some[pick].astype(kind.removesuffix("_array")).reshape(E, N, K)
    stored = quantize(some, kind, quantizer="reference")
    return QuantTensor(kind, (E, N, K), stored.data[pick])


def _grouped(
    name: str, lengths: list[int], N: int, K: int, kind: str, *, bias: bool = False,
    rows: bool = False, unused: int = 0, activations: str = "f32", timed: bool = False,
) -> OpCase:  # fmt: skip
    E, P = len(lengths), sum(lengths) + unused

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        made: dict[str, Any] = {
            "x": rng.standard_normal((P, K), dtype=np.float32),
            "weights": _weights(rng, E, N, K, kind),
            "indptr": np.array([0, *np.cumsum(lengths)], np.int32),
        }
        if bias:
            made["bias"] = rng.standard_normal((E, N), dtype=np.float32)
        if rows:
            made["rows"] = rng.integers(0, P, P).astype(np.int32)
        if activations != "f32":
            made["activations"] = activations
        return made

    used = sum(length > 0 for length in lengths)
    row_bytes = FORMATS[kind].row_blocks(K) * FORMATS[kind].block_bytes if timed else 0
    # "bf16": the reference rounds both sides too, and products of bfloat16 numbers are exact
    atol, reason = _product_error(K), PRODUCT
    if activations == "int8":
        atol, reason = 3 * (K / 16) ** 0.5 * 9.5e-7, INT8
    return OpCase(
        "grouped_matmul", name, inputs, 0.0, atol, reason,
        n_bytes=used * N * row_bytes + 4 * P * (N + K),
        n_flops=2 * sum(lengths) * N * K,
        out=((P, N), "float32"),
        timed=timed,
    )  # fmt: skip


def _combine(name: str, T: int, k: int, H: int, *, accumulate: bool = False) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        places = rng.permutation(T * k).astype(np.int32).reshape(T, k)
        places[rng.random(places.shape) < 0.2] = -1
        made: dict[str, Any] = {
            "y": rng.standard_normal((T * k, H), dtype=np.float32),
            "weights": rng.random((T, k), dtype=np.float32),
            "inverse": places,
        }
        if accumulate:
            made |= {"accumulate": True, "out": rng.standard_normal((T, H), dtype=np.float32)}
        return made

    return OpCase(
        "moe_combine",
        name,
        inputs,
        0.0,
        # k + 1 roundings of half a unit of sums below 8
        (k + 1) * 2.4e-7,
        "k roundings in float32 of sums below 8",
        out=None if accumulate else ((T, H), "float32"),
        mutates=("out",) if accumulate else (),
    )


def _layer(
    name: str, T: int, E: int, k: int, H: int, F: int, kind: str, *, separate: bool = False,
    shared: str = "", activation: str = "silu", bias: bool = False, gate_first: bool = True,
    weigh_inputs: bool = False, gated: bool = True, timed: bool = False,
) -> OpCase:  # fmt: skip
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        weights = rng.random((T, k), dtype=np.float32)
        made: dict[str, Any] = {
            "x": rng.standard_normal((T, H), dtype=np.float32),
            "gate_up": _weights(rng, E, F if separate or not gated else 2 * F, H, kind),
            "down": _weights(rng, E, H, F, kind),
            "topk_weights": weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-6),
            "topk_ids": _ids(rng, T, E, k),
            "activation": activation,
            "weigh_inputs": weigh_inputs,
        }
        if not gate_first:
            made["gate_first"] = False
        if not gated:
            made["gated"] = False
        if separate:
            made["up"] = _weights(rng, E, F, H, kind)
        if shared:
            made["shared"] = _shared(rng, H, F, separate or not gated, shared == "gated")
            if not gated:
                made["shared"] = replace(made["shared"], up=None)
        if bias:
            first_width = F if separate or not gated else 2 * F
            for part, width in (("gate_up", first_width), ("up", F), ("down", H)):
                if part != "up" or separate:
                    made[f"{part}_bias"] = rng.standard_normal((E, width), dtype=np.float32)
        return made

    return OpCase(
        "fused_moe",
        name,
        inputs,
        0.0,
        # gate and up are off by a product's error e; a(g) u by (|u| + 1.1 |g|) e, below 10 e at
        # 4.5 deviations, as is the square of u without a gate, 2 |u| e; the down projection
        # averages those at random, and adds its own; twice that with a shared expert
        (24 if shared else 12) * _product_error(max(H, F)),
        "errors of two products and of the activation between; see moe/cases.py",
        out=((T, H), "float32"),
        n_bytes=min(E, T * k) * 3 * F * FORMATS[kind].row_blocks(H) * FORMATS[kind].block_bytes
        if timed
        else 0,
        n_flops=6 * T * k * H * F,
        timed=timed,
    )


def _shared(rng: np.random.Generator, H: int, F: int, separate: bool, gated: bool) -> SharedExpert:
    stack = [_weights(rng, 1, F if separate else 2 * F, H, "float16_array")[0]]
    stack.append(_weights(rng, 1, H, F, "float32_array")[0])
    up = _weights(rng, 1, F, H, "float32_array")[0] if separate else None
    gate = rng.standard_normal(H, dtype=np.float32) / np.float32(H**0.5) if gated else None
    return SharedExpert(stack[0], stack[1], up, gate)


_ACTIVE_6 = [1 if e in (3, 17, 20, 41, 42, 60) else 0 for e in range(64)]

CASES = [
    _routing("mixtral", 9, 8, 2),
    _routing("qwen2_moe", 9, 60, 4, renormalize=False),
    _routing("qwen3_moe", 5, 128, 8),
    _routing(
        "deepseek_v2", 7, 32, 6, renormalize=False, n_groups=4, top_k_groups=2,
        routed_scaling_factor=16.0,
    ),
    _routing(
        "deepseek_v3", 7, 64, 8, bias=True, scoring="sigmoid", n_groups=8, top_k_groups=4,
        group_score="top2_sum", routed_scaling_factor=2.5,
    ),
    _routing("llama4", 5, 16, 1, scoring="sigmoid", renormalize=False),
    _routing("phimoe", 7, 16, 2, renormalize=False, mixer_margin=0.5),
    _routing("inferflow", 6, 8, 4, min_score=0.05),
    _routing("softmax_bias", 6, 12, 3, bias=True),
    _routing("no_tokens", 0, 8, 2),
    _permute("plain", 20, 8, 2),
    _permute("many_experts", 3, 64, 6),
    _permute("no_tokens", 0, 4, 2),
    _grouped("f32", [2, 0, 5, 1], 24, 48, "float32_array"),
    _grouped("f16", [2, 0, 5, 1], 24, 48, "float16_array", bias=True),
    _grouped("bf16_ragged", [1, 3], 7, 33, "bf16_array", rows=True),
    _grouped("q4", [2, 0, 5, 1], 37, 96, "q4", bias=True),
    _grouped("q8_padded_columns", [1, 0, 3], 20, 72, "q8", rows=True),
    _grouped("list_of_kinds", [2, 1, 3], 20, 64, "list"),
    _grouped("bf16_activations", [2, 0, 5, 1], 37, 96, "q4_0", bias=True, activations="bf16"),
    _grouped("bf16_long_segment", [70, 3], 20, 96, "q4_0", activations="bf16"),
    _grouped("int8_activations", [1, 0, 9], 20, 96, "q8_0", rows=True, activations="int8"),
    _grouped("unused_rows", [1, 2], 5, 32, "float32_array", unused=3),
    _grouped("no_rows", [0, 0], 5, 32, "float32_array"),
    _grouped("two_threads", [9, 0, 1, 2], 200, 512, "q4"),
    _grouped("deepseek_moe_16b_down_1_token", _ACTIVE_6, 2048, 1408, "q4", timed=True),
    _grouped("deepseek_moe_16b_down_64_tokens", [6] * 64, 2048, 1408, "q4", timed=True),
    _combine("plain", 7, 3, 40),
    _combine("short_rows", 4, 2, 5),
    _combine("accumulate", 3, 2, 33, accumulate=True),
    _layer("f32", 6, 5, 2, 32, 24, "float32_array"),
    _layer("apart", 6, 5, 2, 32, 24, "float32_array", separate=True, activation="gelu"),
    _layer("q4", 5, 4, 2, 64, 32, "q4", shared="plain"),
    _layer("q8_apart_shared_gate", 5, 4, 2, 64, 32, "q8", separate=True, shared="gated"),
    _layer("one_token", 1, 8, 3, 64, 48, "q4"),
    _layer("no_tokens", 0, 4, 2, 32, 32, "float32_array"),
    _layer("gpt_oss", 3, 4, 2, 64, 32, "q4", separate=True, activation="swigluoai", bias=True),
    _layer("biases", 3, 4, 2, 32, 24, "float32_array", activation="swigluoai", bias=True),
    _layer("limit", 3, 4, 2, 32, 24, "float32_array", activation="swigluoai:0.7:1.3", bias=True),
    _layer("llama4", 5, 4, 2, 32, 24, "float32_array", shared="plain", weigh_inputs=True),
    _layer(
        "up_first", 3, 4, 2, 32, 24, "float32_array", shared="plain", bias=True, gate_first=False,
    ),
    _layer(
        "nemotron_3", 5, 4, 2, 32, 24, "float32_array", gated=False, activation="relu2",
        shared="plain",
    ),
    _layer("no_gate_q4", 3, 4, 2, 64, 32, "q4", gated=False, activation="silu", bias=True),
    _layer("deepseek_moe_16b_1_token", 1, 64, 6, 2048, 1408, "q4", timed=True),
]  # fmt: skip
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

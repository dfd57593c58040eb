"""Cases of the attention ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.kv_cache.codebooks import CODEBOOKS
from nbflow_kernels.kv_cache.formats import kv_formats
from nbflow_kernels.kv_cache.reference import encode
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.position import rope_cos_sin_cache

# Scores are dot products of D products with unit variance after scaling: float32 with 16 partial
# sums gives about sqrt(D / 16 + 8) * 2**-24 * 4 = 1e-6 at |score| < 4, which is the relative error
# of a weight; exp adds 2e-7.  A result is a mean of values |v| < 5 under such weights, whose
# errors are independent, and their sum is divided out: below 5 * (1e-6 + 2e-7) / 2 = 3e-6.  The
# LSE has the absolute error of a score, times log2(e), and half an ulp at 16, 1e-6.
ATOL = 3e-6
HALF: dict[str, Any] = {"dtype": np.float16, "kv_layout": "HND"}  # the engine's cache
MIXED = {"kv_format": "q4_0/q8_0"}
# keys with a bias of 5 have a length of 40: scores up to 8, and a float32 table of rotations
BEFORE_ROPE: dict[str, Any] = {"sm_scale": 0.05, "rtol": 4e-6}
ON_DEVICES: dict[str, Any] = {"kv_layout": "HND", "timed": True, "device_only": True}
PROMPT = (4096, 4096, 8, 2)
REASON = "scores off by 1e-6 (float32 dot product), values up to 5; LSE up to 16"


def cut_of_values(code_bits: int) -> float:
    """Return the error of sums over values of a block format on tensor cores.

    Codes are subnormal float16 operands, which count as 2**-14 (`cuda/quantized_operands.cuh`).  Up
    to Ada 24 bits are kept, so a term of a sum over 16 keys loses up to 2**-14 of one step of the
    values times the largest weight.  Losses of k keys are independent: sqrt(k / 3) of that.  Times
    the largest weight's share of k it is 0.7 at most, for few keys.  Four standard deviations are
    3 * 2**-14 steps; a step of values below 4 is 4 / 2**(bits - 1).  Hopper keeps one bit more.
    """
    return 3 * 2.0**-14 * 4 / (1 << code_bits - 1)


CUT_REASON = "; and sums over values cut to 3 * 2**-14 of a step of theirs, 4 / 2**(bits - 1)"
# Float16 queries, on a device: one rounded after its factor is 2**-12 of itself off, so a score
# 1.4e-4 times a normal number, 8e-4 among 1e8 of them; a weight is another 2**-12 off.  Where two
# keys are seen, a result is p (1 - p) < 1/4 of that off, times a difference of values below 8:
# 2e-3; it is below 8 itself and rounded to float16, 2e-3.
HALF_ATOL = 4e-3
HALF_REASON = "queries, weights and results of float16: scores off by 1e-3, values differ by 8"


def _single(
    T: int,
    N: int,
    H: int,
    G: int,
    D: int,
    *,
    dtype: Any = np.float32,
    q_dtype: Any = np.float32,
    dim_vo: int | None = None,
    mask: str = "",
    sinks: bool = False,
    key_rope: int = 0,
    **options: Any,
) -> Callable[[np.random.Generator], dict[str, Any]]:
    """Return inputs of one request; T = 0 is decode, without the row axis."""
    heads_first = options.get("kv_layout") == "HND"

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        rows = (G, N) if heads_first else (N, G)
        arguments = {
            "q": rng.standard_normal((T, H, D) if T else (H, D)).astype(q_dtype),
            "k": rng.standard_normal((*rows, D)).astype(dtype),
            "v": rng.standard_normal((*rows, D if dim_vo is None else dim_vo)).astype(dtype),
            **options,
        }
        if "kv_format" in options:
            for name, format in zip("kv", kv_formats(options["kv_format"]), strict=True):
                arguments[name] = encode(arguments[name], format.dtype, format.name)
        visible = rng.random((T, N)) < 0.5
        if mask == "bytes":
            arguments["custom_mask"] = visible
        elif mask == "bits":
            arguments["packed_custom_mask"] = np.packbits(visible, bitorder="little")
        if key_rope:
            arguments |= {
                "key_cos_sin": rope_cos_sin_cache(N + 3, key_rope, theta=1e4),
                "key_bias": 5 * rng.standard_normal((G, D)).astype(np.float32),
            }
        if sinks:
            arguments["sinks"] = rng.standard_normal(H).astype(np.float32)
        return arguments

    return inputs


def _case(
    name: str,
    *shape: int,
    timed: bool = False,
    device_only: bool = False,
    rtol: float = 0.0,
    **options: Any,
) -> OpCase:
    """Return a prefill case, or a decode case for T = 0; `shape` is (T, N, H, G, D)."""
    T, N, H, G, D = shape
    itemsize = np.dtype(options.get("dtype", np.float32)).itemsize
    half = options.get("q_dtype") is np.float16
    D_vo = options.get("dim_vo") or D
    row_bytes = (D + D_vo) * itemsize
    cut, why = 0.0, ""
    if "kv_format" in options:
        keys, values = kv_formats(options["kv_format"])
        row_bytes = keys.row_bytes(D) + values.row_bytes(D_vo)
        if values.name not in CODEBOOKS:  # these are decoded to float32 everywhere
            cut, why = cut_of_values(int(values.name[1])), CUT_REASON
    pairs = max(T, 1) * N - (T * (T - 1) // 2 if options.get("causal") and T <= N else 0)
    plain = not options.get("return_lse") and not half
    atol, reason = (HALF_ATOL, HALF_REASON) if half else (ATOL, REASON)
    return OpCase(
        "single_prefill_with_kv_cache" if T else "single_decode_with_kv_cache", name,
        _single(T, N, H, G, D, **options), rtol, atol + cut,
        reason + why + ("; float32 table of rotations" if rtol else ""),
        out=((T, H, D_vo)[0 if T else 1 :], "float32") if plain else None,
        n_bytes=N * G * row_bytes + 4 * max(T, 1) * H * (D + D_vo),
        n_flops=2 * H * (D + D_vo) * pairs, timed=timed, device_only=device_only,
    )  # fmt: skip


def _states(rng: np.random.Generator) -> dict[str, Any]:
    s_a, s_b = (rng.normal(0, 5, (6, 3)).astype(np.float32) for _ in "ab")
    s_a[0], s_b[1], s_a[2], s_b[2] = -np.inf, -np.inf, -np.inf, -np.inf
    v_a, v_b = (rng.standard_normal((6, 3, 20)).astype(np.float32) for _ in "ab")
    return {"v_a": v_a, "s_a": s_a, "v_b": v_b, "s_b": s_b}


def _states_in_place(rng: np.random.Generator) -> dict[str, Any]:
    states = _states(rng)
    names = {"v": "v_a", "s": "s_a", "v_other": "v_b", "s_other": "s_b"}
    return {
        **{name: states[other] for name, other in names.items()},
        "mask": np.array([True, False, True, True, False, True]),
    }


def _many_states(rng: np.random.Generator) -> dict[str, Any]:
    s = rng.normal(0, 5, (4, 5, 3)).astype(np.float32)
    s[0, 1:4], s[1] = -np.inf, -np.inf
    return {"v": rng.standard_normal((4, 5, 3, 20)).astype(np.float32), "s": s}


def _merge(op: str, name: str, inputs: Callable[..., dict[str, Any]], **options: Any) -> OpCase:
    reason = "float64 inside, one rounding to float32 (6e-8)"
    return OpCase(op, name, inputs, 2e-7, 1e-7, reason, **options)


def _selection(
    name: str, lens: tuple[int, ...], H: int, D: int, page_size: int, top_k: int
) -> OpCase:
    """Return a selection for the last two rows of each sequence, and a row without keys."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        n_pages = [-(-n // page_size) for n in lens]
        rows = [(b, n - i) for b, n in enumerate(lens) for i in (2, 1)] + [(0, -1)]
        T, total = len(rows), sum(n_pages)
        return {
            "q": rng.standard_normal((T, H, D), dtype=np.float32),
            "weights": rng.standard_normal((T, H), dtype=np.float32),
            "k_cache": rng.standard_normal((total + 1, page_size, D), dtype=np.float32),
            "batch_indices": np.array([b for b, _ in rows], np.int32),
            "positions": np.array([p for _, p in rows], np.int32),
            "kv_indices": rng.permutation(total + 1)[:total].astype(np.int32),
            "kv_indptr": np.cumsum([0, *n_pages]).astype(np.int32),
            "top_k": top_k,
        }

    return OpCase(
        "select_top_keys", name, inputs, 0.0, 0.0,
        "positions; no two different scores of a case are as close as float32 rounds",
        out=((2 * len(lens) + 1, top_k), "int32"),
        n_bytes=4 * D * sum(lens), n_flops=4 * H * D * sum(lens),
    )  # fmt: skip


CASES = [
    _case("all_heads", 5, 37, 3, 3, 16),
    _case("causal_append", 7, 150, 4, 2, 64, causal=True, return_lse=True),
    _case("one_kv_head", 3, 70, 16, 1, 80, causal=True),
    _case("size_20", 9, 65, 6, 2, 20, causal=True),
    _case("size_100", 2, 130, 2, 1, 100, return_lse=True),
    _case("more_rows_than_keys", 6, 4, 2, 2, 32, causal=True, return_lse=True),
    _case("no_keys", 2, 0, 2, 1, 16, return_lse=True),
    _case("window", 70, 200, 2, 1, 32, causal=True, window_left=20, return_lse=True),
    _case("window_0", 3, 70, 2, 2, 16, causal=True, window_left=0),
    _case("chunks", 70, 200, 2, 1, 32, causal=True, attention_chunk=48, return_lse=True),
    _case("chunks_and_window", 9, 70, 4, 2, 16, attention_chunk=21, window_left=7),
    _case("soft_cap", 5, 90, 4, 2, 48, causal=True, logits_soft_cap=1.5),
    _case("scale", 5, 90, 4, 2, 48, sm_scale=0.3, return_lse=True),
    _case("mask", 6, 140, 4, 2, 32, mask="bytes", return_lse=True),
    _case("packed_mask", 5, 71, 4, 2, 32, mask="bits", return_lse=True),
    _case("alibi", 5, 90, 6, 2, 32, causal=True, pos_encoding_mode="ALIBI", return_lse=True),
    _case("sinks", 5, 90, 6, 2, 32, causal=True, sinks=True, return_lse=True),
    _case("natural_lse", 5, 90, 4, 2, 32, causal=True, return_lse=True, lse_base="e"),
    _case("scales", 5, 90, 4, 2, 32, scale_q=0.5, k_scale=1.5, v_scale=0.75, causal=True),
    _case("rotated", 5, 90, 4, 2, 36, causal=True, pos_encoding_mode="ROPE_LLAMA", rtol=4e-6),
    *(
        _case(f"keys_before_rope_{name}", *shape, **options, **BEFORE_ROPE)
        for name, shape, options in (
            ("q8_0", (6, 140, 6, 2, 64), {"causal": True, "key_rope": 64, "kv_format": "q8_0"}),
            ("pairs", (6, 140, 6, 2, 64), {"key_rope": 20, "key_interleave": True, **MIXED}),
            ("decode", (0, 140, 6, 2, 96), {"key_rope": 64, "window_left": 80, **MIXED}),
            ("half", (5, 90, 4, 2, 48), {"key_rope": 48, **HALF}),
        )
    ),
    _case("lm4", 5, 140, 4, 2, 64, causal=True, kv_format="lm4", return_lse=True),
    _case("lm3_and_lm2", 0, 90, 6, 2, 96, kv_format="lm3/lm2"),
    _case("values_of_128", 3, 70, 2, 2, 192, dim_vo=128, causal=True, return_lse=True),
    _case("half", 5, 90, 4, 2, 48, causal=True, dtype=np.float16),
    _case("heads_first", 5, 90, 4, 2, 36, causal=True, kv_layout="HND", return_lse=True),
    _case("heads_first_half", 5, 90, 4, 2, 36, kv_layout="HND", dtype=np.float16),
    _case("llama2_7b", 512, 512, 32, 32, 128, causal=True, timed=True),
    _case("llama3_8b", 512, 512, 32, 8, 128, causal=True, timed=True, **HALF),
    _case("llama3_8b_q8_0", 512, 512, 32, 8, 128, causal=True, kv_format="q8_0", **ON_DEVICES),
    # prefill throughput on a device
    *(
        _case(f"prompt_{D}{name}", *PROMPT, D, causal=True, q_dtype=q_dtype, **HALF | ON_DEVICES)
        for D in (64, 128, 256)
        for name, q_dtype in (("", np.float32), ("_half", np.float16))
    ),
    _case("grouped", 0, 130, 12, 4, 64, return_lse=True),
    _case("odd", 0, 67, 5, 1, 20, window_left=30, logits_soft_cap=2.0),
    _case("chunk", 0, 2119, 5, 1, 20, attention_chunk=65),
    _case("one_key", 0, 1, 2, 2, 16),
    _case("sink_and_cap", 0, 40, 4, 2, 64, sinks=True, logits_soft_cap=5.0, return_lse=True),
    _case("llama2_7b", 0, 1024, 32, 32, 128, timed=True, **HALF),
    _case("llama2_7b_tokens_first", 0, 1024, 32, 32, 128, dtype=np.float16, timed=True),
    _case("llama3_8b", 0, 4096, 32, 8, 128, timed=True, **HALF),
    # keys of eight sequences of 4096
    _case("llama3_8b_f16", 0, 32768, 32, 8, 128, dtype=np.float16, **ON_DEVICES),
    _case("llama3_8b_q8_0", 0, 32768, 32, 8, 128, kv_format="q8_0", **ON_DEVICES),
    _case("llama3_8b_q4_0", 0, 32768, 32, 8, 128, kv_format="q4_0", **ON_DEVICES),
    _merge("merge_state", "with_empty_sides", _states),
    _merge("merge_state_in_place", "with_a_mask", _states_in_place, mutates=("v", "s")),
    _merge("merge_states", "five_with_empty_ones", _many_states),
    _selection("all_keys", (3, 9), 2, 12, 4, 16),
    _selection("some_keys", (70, 5, 33), 8, 20, 8, 11),
    _selection("equal_scores", (90,), 1, 16, 16, 60),  # half of the scores are zeros
    _selection("one_key", (600,), 4, 32, 16, 1),
]

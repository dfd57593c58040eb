"""Cases of the position ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase, exact_case
from nbflow_kernels.position import (
    DynamicNtkRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    YarnRopeScaling,
    rope_cos_sin_cache,
)

# x * cos - y * sin with |x|, |y| up to about 5: cos and sin are off by half an ulp (3e-8 each),
# and three roundings of 2**-24 follow: 5 * (2 * 3e-8 + 3 * 6e-8) = 1.2e-6, absolute because the
# two products may cancel.
ATOL = 1.5e-6
REASON = "two float32 products, |x| < 5, may cancel; cos and sin rounded to float32"


def _rows(rng: np.random.Generator, T: int, H: int, D: int, spread: int = 0) -> np.ndarray:
    """Return (T, H, D) rows, with `spread` elements between them."""
    wide = rng.standard_normal((T, H * D + spread)).astype(np.float32)
    return np.lib.stride_tricks.as_strided(wide, (T, H, D), (wide.strides[0], 4 * D, 4))


def _case_inplace(
    name: str, *shape: int, is_neox: bool, spread: int = 0, timed: bool = False
) -> OpCase:
    T, H, G, D, rotary_dim = shape

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        return {
            "positions": rng.integers(0, 50, T).astype(np.int32),
            "query": _rows(rng, T, H, D, spread),
            "key": _rows(rng, T, G, D, spread),
            "cos_sin_cache": rope_cos_sin_cache(50, rotary_dim, theta=1e4),
            "is_neox": is_neox,
        }

    rotated = T * (H + G) * rotary_dim
    return OpCase(
        "apply_rope_with_cos_sin_cache_inplace", name, inputs, 0.0, ATOL, REASON,
        mutates=("query", "key"), n_bytes=2 * 4 * rotated, n_flops=3 * rotated, timed=timed,
    )  # fmt: skip


def _pos_ids(T: int, H: int, G: int, D: int, **options: Any) -> Callable[..., dict[str, Any]]:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        pos_ids = rng.integers(0, 90, T).astype(np.int32)
        return {"q": _rows(rng, T, H, D), "k": _rows(rng, T, G, D), "pos_ids": pos_ids, **options}

    return inputs


def _turned_back(rng: np.random.Generator) -> dict[str, Any]:
    return {**_pos_ids(6, 2, 1, 32)(rng), "pos_ids": np.arange(-4, 2, dtype=np.int32)}


def _ragged(**options: Any) -> Callable[[np.random.Generator], dict[str, Any]]:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        return {
            "q": _rows(rng, 7, 3, 20),
            "k": _rows(rng, 7, 1, 20),
            "indptr": np.array([0, 4, 4, 7], np.int32),
            "offsets": np.array([0, 5, 30], np.int32),
            **options,
        }

    return inputs


def _apply(op: str, name: str, inputs: Callable[..., dict[str, Any]]) -> OpCase:
    changed = ("q", "k") if op.endswith("_inplace") else ()
    return OpCase(op, name, inputs, 0.0, ATOL, REASON, mutates=changed)


_FLAT = {"positions": np.array([4, 0, 9], np.int32), "head_size": 32, "is_neox": False}


def _flat(rng: np.random.Generator) -> dict[str, Any]:
    """Return query and key rows without a head axis."""
    query, key = (_rows(rng, 3, H, 32).reshape(3, H * 32) for H in (3, 2))
    cache = rope_cos_sin_cache(10, 32, theta=1e4)
    return {"query": query, "key": key, "cos_sin_cache": cache, **_FLAT}


def _float8_case(
    name: str, heads: tuple[int, int], d: int, n: int, *, given: bool = True, **options: Any
) -> OpCase:
    """Return a case of rotations with float8 results; 0 key heads are one without an axis.

    Outputs are `given`, or new arrays.
    """
    H, G = heads

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        q, k = _rows(rng, 5, H, d + n), _rows(rng, 5, max(G, 1), d + n)
        k = k if G else k[:, 0]
        outs = {
            f"{which}_{part}_out": np.full(x[..., columns].shape, 0x7F, np.uint8)
            for which, x in (("q", q), ("k", k))
            for part, columns in (("rope", slice(0, d)), ("nope", slice(d, None)))
        }
        return {
            "q_rope": q[..., :d], "k_rope": k[..., :d],
            "q_nope": q[..., d:] if n else None, "k_nope": k[..., d:] if n else None,
            "cos_sin_cache": rope_cos_sin_cache(30, d, theta=1e4),
            "pos_ids": np.array([3, 0, 29, 7, 7], np.int32), **options, **(outs if given else {}),
        }  # fmt: skip

    return exact_case(
        "rope_quantize_fp8", name, inputs,
        "one rounding to float8, and no number of these is next to the middle of two",
        mutates=("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out") if given else (),
    )  # fmt: skip


LLAMA31 = {"rope_theta": 1e4, "rope_scale": 4.0, "high_freq_factor": 3.0, "old_context_len": 64}

SCALINGS = {
    "linear": LinearRopeScaling(factor=4.0),
    "reversed": LinearRopeScaling(factor=-1.0),
    "dynamic": DynamicNtkRopeScaling(factor=2.0, original_max_position=64),
    "yarn": YarnRopeScaling(factor=4.0, original_max_position=64),
    "yarn_deepseek": YarnRopeScaling(
        factor=40.0, original_max_position=64, mscale=0.707, mscale_all_dim=1.0, beta_fast=16.0
    ),
    "yarn_not_truncated": YarnRopeScaling(factor=8.0, original_max_position=64, truncate=False),
    "llama3": Llama3RopeScaling(original_max_position=64),
    "proportional": ProportionalRopeScaling(partial_rotary_factor=0.3, factor=2.0),
    "longrope": LongRopeScaling(
        short_factor=tuple(1.0 + 0.1 * j for j in range(10)),
        long_factor=tuple(1.0 + 2.0 * j for j in range(10)),
        original_max_position=64,
        factor=32.0,
    ),
}
"""A scaling of each kind for 20 rotated elements and a trained length of 64."""


def _table(name: str, atol: float = 1.2e-7, **arguments: Any) -> OpCase:
    return OpCase(
        "rope_cos_sin_cache", name,
        lambda rng: {"max_pos": 100, "rotary_dim": 20, "theta": 1e6, **arguments}, 0.0, atol,
        "float64 angles up to 100, results in -2..2 rounded to float32: half an ulp",
    )  # fmt: skip


def _frequencies(name: str, seq_len: int | None) -> OpCase:
    arguments = {"rotary_dim": 20, "theta": 1e4, "scaling": SCALINGS[name], "seq_len": seq_len}
    return OpCase(
        "rope_frequencies", name if seq_len is None else f"{name}_{seq_len}", lambda rng: arguments,
        1e-13, 0.0, "a power (its exponent up to 14) and a few roundings in float64, 2**-53 each",
    )  # fmt: skip


def _sinusoidal(name: str, T: int, dim: int, **options: Any) -> OpCase:
    return OpCase(
        "sinusoidal_position_embedding", name,
        lambda rng: {"positions": np.arange(T, dtype=np.int32) * 3, "dim": dim, **options},
        0.0, 6e-8, "float64 angles, results in -1..1 rounded to float32: half an ulp",
        out=((T, dim), "float32"),
    )  # fmt: skip


def _learned(name: str, T: int, E: int, dtype: str, offset: int) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        table = rng.standard_normal((T + 9, E), dtype=np.float32)
        bits = (table.view(np.uint32) >> 16).astype(np.uint16)
        return {
            "x": rng.standard_normal((T, E), dtype=np.float32),
            "positions": rng.integers(0, T + 5, T).astype(np.int32),
            "table": bits if dtype == "uint16" else table.astype(dtype),
            "offset": offset,
        }

    return OpCase(
        "add_learned_positions", name, inputs, 2.0**-24, 0.0, "one rounding of the sum",
        out=((T, E), "float32"),
    )  # fmt: skip


def _temperature(name: str, T: int, H: int, D: int, spread: int = 0, offset: int = 0) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        positions = rng.integers(0, 300, T).astype(np.int32)
        query = _rows(rng, T, H, D, spread)
        return {"positions": positions, "query": query, "scale": 0.3, "floor": 7, "offset": offset}

    return OpCase(
        "apply_attention_temperature_inplace", name, inputs, 2 * 2.0**-24, 0.0,
        "the factor and the product are rounded to float32", mutates=("query",),
    )  # fmt: skip


def _alibi(name: str, H: int, Tq: int, Tk: int, symmetric: bool) -> OpCase:
    lengths = {"n_queries": Tq, "n_keys": Tk, "symmetric": symmetric}
    return OpCase(
        "alibi_bias", name, lambda rng: {"slopes": rng.random(H, dtype=np.float32), **lengths},
        2.0**-24, 0.0, "one rounding of the product", out=((H, Tq, Tk), "float32"),
    )  # fmt: skip


def _bucket(name: str, n: int, **options: Any) -> OpCase:
    arguments = {"relative_position": np.arange(-n, n, dtype=np.int32), **options}
    return exact_case("relative_position_bucket", name, lambda rng: arguments, "integers")


def _bias(name: str, Tq: int, Tk: int, bidirectional: bool) -> OpCase:
    lengths = {"n_queries": Tq, "n_keys": Tk, "bidirectional": bidirectional}
    return exact_case(
        "relative_position_bias", name,
        lambda rng: {"table": rng.standard_normal((32, 6), dtype=np.float32), **lengths},
        "a copy", out=((6, Tq, Tk), "float32"),
    )  # fmt: skip


def _slopes(n_heads: int) -> OpCase:
    return OpCase(
        "alibi_slopes", f"{n_heads}_heads", lambda rng: {"n_heads": n_heads}, 2.0**-24, 0.0,
        "rounded to float32",
    )  # fmt: skip


CASES = [
    _case_inplace("halves", 5, 4, 2, 64, 64, is_neox=True),
    _case_inplace("halves_odd_size", 3, 3, 1, 20, 20, is_neox=True),
    _case_inplace("partial", 4, 2, 2, 80, 32, is_neox=True),
    _case_inplace("interleaved", 5, 4, 2, 64, 64, is_neox=False),
    _case_inplace("interleaved_partial", 4, 2, 1, 100, 50, is_neox=False),
    _case_inplace("far_rows", 3, 2, 2, 36, 36, is_neox=True, spread=24),
    _case_inplace("no_rows", 0, 2, 2, 16, 16, is_neox=True),
    _case_inplace("llama2_7b", 512, 32, 32, 128, 128, is_neox=True, timed=True),
    _case_inplace("chatglm2_6b", 512, 32, 2, 128, 64, is_neox=False, timed=True),
    OpCase("apply_rope_with_cos_sin_cache", "flat_heads", _flat, 0.0, ATOL, REASON),
    _float8_case("halves", (3, 2), 32, 20),
    _float8_case("interleaved_latent", (2, 0), 36, 50, is_neox=False, quant_scale_q=0.3),
    _float8_case("all_rotated", (2, 1), 20, 0, quantize_dtype="f8_e5m2", quant_scale_kv=100.0),
    _float8_case("new_arrays", (2, 1), 16, 8, given=False, quantize_dtype="f8_e5m2"),
    _apply("apply_rope_pos_ids", "plain", _pos_ids(6, 4, 2, 32)),
    _apply(
        "apply_rope_pos_ids",
        "all_options",
        _pos_ids(6, 4, 2, 40, rotary_dim=24, interleave=True, rope_scale=8.0, rope_theta=5e5),
    ),
    _apply("apply_rope_pos_ids", "turned_back", _turned_back),
    _apply("apply_rope_pos_ids_inplace", "scaled", _pos_ids(6, 4, 2, 32, rope_scale=2.0)),
    _apply("apply_rope", "ragged", _ragged()),
    _apply("apply_rope", "interleaved", _ragged(interleave=True)),
    _apply("apply_rope_inplace", "ragged", _ragged(rotary_dim=12)),
    _apply("apply_llama31_rope_pos_ids", "defaults", _pos_ids(6, 4, 2, 32)),
    _apply("apply_llama31_rope_pos_ids", "all_options", _pos_ids(6, 4, 2, 40, **LLAMA31)),
    _apply("apply_llama31_rope_pos_ids_inplace", "partial", _pos_ids(3, 2, 1, 40, rotary_dim=24)),
    _apply("apply_llama31_rope", "ragged", _ragged(**LLAMA31)),
    _apply("apply_llama31_rope_inplace", "interleaved", _ragged(interleave=True, **LLAMA31)),
    _table("interpolated", scale=4.0, atol=6e-8),
    *(_table(name, scaling=scaling) for name, scaling in SCALINGS.items()),
    _table("longrope_short", scaling=SCALINGS["longrope"], seq_len=64),
    *(_frequencies(name, None) for name in SCALINGS),
    _frequencies("dynamic", 128),
    _frequencies("longrope", 65),
    _temperature("ministral3", 5, 3, 12),
    _temperature("llama4", 4, 2, 20, offset=1),
    _temperature("far_rows", 3, 4, 16, spread=9),
    _temperature("no_rows", 0, 2, 8),
    *(_slopes(n) for n in (1, 6, 16, 40, 112)),
    _alibi("causal", 3, 4, 9, symmetric=False),
    _alibi("symmetric", 2, 5, 5, symmetric=True),
    _bucket("encoder", 300),
    _bucket("decoder", 300, bidirectional=False),
    _bucket("few", 40, num_buckets=8, max_distance=20),
    _bias("encoder", 7, 7, bidirectional=True),
    _bias("decoder_step", 1, 200, bidirectional=False),
    _bias("no_keys", 0, 0, bidirectional=True),
    _sinusoidal("fairseq", 7, 10),
    _sinusoidal("fairseq_m2m_100", 4, 33, offset=-1, padding_idx=2),
    _sinusoidal("fairseq_interleaved", 3, 8, interleave=True),
    _sinusoidal("paper", 7, 12, form="paper"),
    _sinusoidal("paper_halves", 5, 9, form="paper", interleave=False, base=1e3),
    _learned("f32", 5, 33, "float32", offset=2),
    _learned("f16", 5, 16, "float16", offset=0),
    _learned("bf16", 1, 7, "uint16", offset=3),
    _learned("no_rows", 0, 8, "float32", offset=0),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

"""Cases of the rotary embedding ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.opcase import OpCase
from nbflow_kernels.position import rope_cos_sin_cache

# x * cos - y * sin with |x|, |y| up to about 5: cos and sin are off by half an ulp (3e-8 each),
# and three roundings of 2**-24 follow: 5 * (2 * 3e-8 + 3 * 6e-8) = 1.2e-6, absolute because the
# two products may cancel.
ATOL = 1.5e-6
REASON = "two float32 products, |x| < 5, may cancel; cos and sin rounded to float32"


def _rows(rng: np.random.Generator, T: int, H: int, D: int, spread: int = 0) -> np.ndarray:
    """Return (T, H, D) rows, `spread` elements apart from each other."""
    wide = rng.standard_normal((T, H * D + spread)).astype(np.float32)
    return wide[:, : H * D].reshape(T, H, D) if not spread else _view(wide, T, H, D)


def _view(wide: np.ndarray, T: int, H: int, D: int) -> np.ndarray:
    strides = (wide.strides[0], 4 * D, 4)
    return np.lib.stride_tricks.as_strided(wide, (T, H, D), strides)


def _inplace(
    T: int, H: int, G: int, D: int, rotary_dim: int, *, is_neox: bool, spread: int = 0
) -> Callable[[np.random.Generator], dict[str, Any]]:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        return {
            "positions": rng.integers(0, 50, T).astype(np.int32),
            "query": _rows(rng, T, H, D, spread),
            "key": _rows(rng, T, G, D, spread),
            "cos_sin_cache": rope_cos_sin_cache(50, rotary_dim, theta=1e4),
            "is_neox": is_neox,
        }

    return inputs


def _case_inplace(name: str, *shape: int, timed: bool = False, **options: Any) -> OpCase:
    T, H, G, D, rotary_dim = shape
    return OpCase(
        "apply_rope_with_cos_sin_cache_inplace",
        name,
        _inplace(T, H, G, D, rotary_dim, **options),
        rtol=0.0,
        atol=ATOL,
        reason=REASON,
        mutates=("query", "key"),
        n_bytes=2 * 4 * T * (H + G) * rotary_dim,
        n_flops=3 * T * (H + G) * rotary_dim,
        timed=timed,
    )


def _pos_ids(T: int, H: int, G: int, D: int, **options: Any) -> Callable[..., dict[str, Any]]:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        pos_ids = rng.integers(0, 90, T).astype(np.int32)
        return {"q": _rows(rng, T, H, D), "k": _rows(rng, T, G, D), "pos_ids": pos_ids, **options}

    return inputs


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


CASES = [
    _case_inplace("halves", 5, 4, 2, 64, 64, is_neox=True),
    _case_inplace("halves_odd_size", 3, 3, 1, 20, 20, is_neox=True),
    _case_inplace("partial", 4, 2, 2, 80, 32, is_neox=True),
    _case_inplace("interleaved", 5, 4, 2, 64, 64, is_neox=False),
    _case_inplace("interleaved_partial", 4, 2, 1, 100, 50, is_neox=False),
    _case_inplace("far_rows", 3, 2, 2, 36, 36, is_neox=True, spread=24),
    _case_inplace("no_rows", 0, 2, 2, 16, 16, is_neox=True),
    _case_inplace("llama2_7b", 512, 32, 32, 128, 128, is_neox=True, timed=True),
    OpCase("apply_rope_pos_ids", "plain", _pos_ids(6, 4, 2, 32), 0.0, ATOL, REASON),
    OpCase(
        "apply_rope_pos_ids",
        "all_options",
        _pos_ids(6, 4, 2, 40, rotary_dim=24, interleave=True, rope_scale=8.0, rope_theta=5e5),
        0.0,
        ATOL,
        REASON,
    ),
    OpCase("apply_rope", "ragged", _ragged(), 0.0, ATOL, REASON),
    OpCase("apply_rope", "interleaved", _ragged(interleave=True), 0.0, ATOL, REASON),
    OpCase(
        "rope_cos_sin_cache",
        "interpolated",
        lambda rng: {"max_pos": 100, "rotary_dim": 20, "theta": 1e6, "scale": 4.0},
        rtol=0.0,
        atol=6e-8,
        reason="float64 angles up to 25, results in -1..1 rounded to float32: half an ulp",
    ),
]

"""Test and benchmark cases of the gated delta rule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase
from nbflow_kernels.state_format import decode_state, encode_state, rounding_of

_HALF_UNIT = 2.0**-24  # rounding of one float32 operation, relative


def _tolerance(Dk: int, length: int, dtype: str) -> tuple[float, float, str]:
    """Return rtol, atol and the reason for both.

    A product of a column with a key or query is a float32 sum of Dk terms.  Its partial sums are
    below 2: the state's numbers are below 1 at first, keys have length 1, decay and correction
    shrink the state, and a value adds at most 1.  The roundings add like a random walk.  So do
    those of earlier tokens, of which the decay leaves about the last 8.
    """
    atol = 2.0 * math.sqrt(Dk * min(max(length, 1), 8)) * _HALF_UNIT
    reason = "random walk of Dk additions in each of 8 tokens, 2**-24 of partial sums below 2"
    rtol, unit = rounding_of(dtype, 2.0)
    if rtol:
        # float64 and float32 may round a state number to either neighbour
        return rtol, atol + unit, f"{reason}; the state's number rounded to either neighbour"
    return 0.0, atol, reason


def _case(
    name: str,
    lengths: list[int],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    *,
    per_channel: bool = False,
    normalize_qk: bool = True,
    dtype: str = "float32",
    start_positions: tuple[int, ...] | None = None,
    strongest: float = 0.5,
    timed: bool = False,
    **options: Any,
) -> OpCase:
    """Return a case; `strongest` is the greatest decay, -g, `heads` Hk and Hv, `sizes` Dk and Dv.

    Queries, keys and values are columns of one matrix, as after a convolution.
    """
    T, B = sum(lengths), len(lengths)
    (Hk, Hv), (Dk, Dv) = heads, sizes

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        mixed = rng.standard_normal((T, 2 * Hk * Dk + Hv * Dv), np.float32)
        q, k, v = np.split(mixed, [Hk * Dk, 2 * Hk * Dk], axis=1)
        np.clip(v / 4.0, -1.0, 1.0, out=v)
        q, k, v = (a.reshape(T, H, D) for a, H, D in ((q, Hk, Dk), (k, Hk, Dk), (v, Hv, Dv)))
        if not normalize_qk:
            for a in (q, k):
                a /= np.sqrt((a**2).sum(-1, keepdims=True))
        decays = (T, Hv, Dk) if per_channel else (T, Hv)
        state = rng.uniform(-1.0, 1.0, (B + 1, Hv, Dk, Dv)).astype(np.float32)
        positions = {}
        if start_positions is not None:
            positions["start_positions"] = np.array(start_positions, np.int32)
        return {
            "q": q, "k": k, "v": v,
            "g": (strongest * rng.uniform(-1.0, 0.0, decays)).astype(np.float32),
            "beta": rng.uniform(0.0, 1.0, (T, Hv)).astype(np.float32),
            "state": encode_state(state, dtype),
            "indptr": np.cumsum([0, *lengths], dtype=np.int32),
            "state_indices": rng.permutation(B + 1)[:B].astype(np.int32),
            "normalize_qk": normalize_qk, **positions, **options,
        }  # fmt: skip

    rtol, atol, reason = _tolerance(Dk, max(lengths, default=0), dtype)
    atol *= options.get("scale", 1.0)
    n_stored = encode_state(np.zeros((Hv, Dk, Dv), np.float32), dtype).nbytes
    n_inputs = T * (2 * Hk * Dk + 2 * Hv * Dv + Hv * (1 + (Dk if per_channel else 1)))
    return OpCase(
        op="gated_delta_rule",
        name=name,
        inputs=inputs,
        rtol=rtol,
        atol=atol,
        reason=reason,
        n_bytes=4 * n_inputs + 2 * n_stored * sum(n > 0 for n in lengths),
        n_flops=7 * T * Hv * Dk * Dv,  # a product for the decay, three multiply-adds
        out=((T, Hv, Dv), "float32"),
        mutates=("state",),
        decoded={"state": lambda stored: decode_state(stored, Dv)},
        timed=timed,
    )


QWEN3_NEXT: dict[str, Any] = {"heads": (16, 32), "sizes": (128, 128)}
KIMI_LINEAR: dict[str, Any] = {"heads": (32, 32), "sizes": (128, 128), "per_channel": True}

CASES: list[OpCase] = [
    _case("ragged", [5, 1, 0, 19], (2, 4), (20, 37)),
    _case("chunks", [35, 16], (1, 2), (32, 64), start_positions=(13, 32)),
    _case("steps", [20], (1, 2), (32, 32), chunked=False),
    _case("per_channel", [33, 3], (2, 2), (24, 20), per_channel=True, normalize_qk=False),
    _case("strong_decay", [32], (1, 1), (16, 16), per_channel=True, strongest=40.0),
    _case("scaled", [2, 1], (1, 1), (8, 16), normalize_qk=False, scale=1.0),
    _case("decode", [1, 1, 1], (2, 4), (32, 64)),
    _case("half", [17, 1], (1, 2), (20, 24), dtype="float16"),
    _case("bfloat16", [3, 1], (1, 1), (8, 20), dtype="uint16"),
    _case("q8_0", [9, 1], (1, 2), (20, 72), dtype="uint8"),
    _case("q8_0_steps", [3, 0, 1], (1, 1), (16, 33), dtype="uint8", chunked=False),
    _case("no_tokens", [0, 0], (1, 1), (16, 16)),
    _case("qwen3_next_decode", [1], **QWEN3_NEXT, timed=True),
    _case("qwen3_next_decode_8", [1] * 8, **QWEN3_NEXT, timed=True),
    _case("qwen3_next_decode_8_half", [1] * 8, **QWEN3_NEXT, dtype="float16", timed=True),
    _case("qwen3_next_decode_8_q8_0", [1] * 8, **QWEN3_NEXT, dtype="uint8", timed=True),
    _case("qwen3_next_prefill", [256], **QWEN3_NEXT, timed=True),
    _case("qwen3_next_prefill_steps", [256], **QWEN3_NEXT, timed=True, chunked=False),
    _case("kimi_linear_decode_8", [1] * 8, **KIMI_LINEAR, timed=True),
    _case("kimi_linear_prefill", [256], **KIMI_LINEAR, timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

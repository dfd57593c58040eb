"""Test and benchmark cases of the state-space layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase
from nbflow_kernels.state_format import decode_state, encode_state, rounding_of

# Inputs as in trained models: time steps softplus(N(-1, 1)), about 0.3 and at most 3, and rates in
# -4..-0.5.  A decay exp(a dt) is off by 2e-7 (exp) + |a dt| * 5e-7 (softplus, product) at most,
# where it is at least e**-1.5 (smaller ones leave nothing of the error): 1e-6, and by 1.5e-7 as a
# root mean square.  A term dt x b of the state has gone through m decays, which leave 0.86**m of it
# at the slowest rate (dt = 0.3): about 7 terms through 7 decays each count, 7 * sqrt(7) * 1.5e-7 =
# 2.8e-6 of a term.  Terms are N(0, 1) numbers times 0.3 to 1, results sums of N products with
# N(0, 1 / N) numbers, of the size of a term; the largest of thousands are twice as far off.
_ATOL, _RTOL = 6e-6, 2e-6
_REASON = "7 terms through 7 decays that are off by 1.5e-7 (exp, softplus, product), twice that"


def tolerances(rtol: float, atol: float, reason: str, dtype: str) -> tuple[float, float, str]:
    """Return the tolerances of a case whose states are rounded to a dtype.

    The largest of thousands of N(0, 1) numbers is below 5, and so is the state.
    """
    relative, absolute = rounding_of(dtype, 5.0)
    if not relative:
        return rtol, atol, reason
    return rtol + relative, atol + absolute, f"{reason}; a state rounded to either neighbour"


def batch(lengths: Sequence[int], n_states: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return `indptr` of sequences, and their rows of a pool in any order; -1 for empty ones."""
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    indices = rng.permutation(n_states)[: len(lengths)].astype(np.int32)
    indices[np.array(lengths) == 0] = -1
    return {"indptr": indptr, "state_indices": indices}


def _normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


def _mamba2_case(
    name: str,
    lengths: Sequence[int],
    sizes: tuple[int, int, int, int],
    *,
    plain: bool = False,
    dtype: str = "float32",
    timed: bool = False,
    **options: Any,
) -> OpCase:
    """Return a case with `sizes` H, P, G, N; x, b and c are columns of one matrix.

    `plain` leaves out the skip connection, the bias and softplus.
    """
    H, P, G, N = sizes
    T, B = sum(lengths), len(lengths)

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        wide = _normal(rng, T, H * P + 2 * G * N)
        wide[:, H * P + G * N :] /= np.float32(N**0.5)
        x, b, c = np.split(wide, [H * P, H * P + G * N], axis=1)
        dt = _normal(rng, T, H)
        made = {
            "x": x.reshape(T, H, P),
            "dt": np.log1p(np.exp(dt - 1)) if plain else dt,
            "a": -rng.uniform(0.5, 4.0, H).astype(np.float32),
            "b": b.reshape(T, G, N),
            "c": c.reshape(T, G, N),
            "state": encode_state(_normal(rng, B + 2, H, P, N), dtype),
            **batch(lengths, B + 2, rng),
        }
        if plain:
            return {**made, "dt_softplus": False, **options}
        bias = np.full(H, -1, np.float32)
        return {**made, "d": _normal(rng, H), "dt_bias": bias, **options}

    return OpCase(
        "mamba2_scan", name, inputs, *tolerances(_RTOL, _ATOL, _REASON, dtype),
        n_bytes=4 * (2 * B * H * P * N + T * (2 * H * P + H + 2 * G * N)),
        n_flops=5 * T * H * P * N, out=((T, H, P), "float32"), mutates=("state",), timed=timed,
        arithmetic="f32", decoded={"state": lambda stored: decode_state(stored, N)},
    )  # fmt: skip


def _mamba1_case(
    name: str, lengths: Sequence[int], C: int, N: int, *, plain: bool = False,
    dtype: str = "float32", timed: bool = False,
) -> OpCase:  # fmt: skip
    """Return a case; `plain` leaves out the skip connection, the bias and softplus."""
    T, B = sum(lengths), len(lengths)

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        columns = _normal(rng, T, 2 * N)
        columns[:, N:] /= np.float32(N**0.5)
        dt = _normal(rng, T, C)
        made = {
            "x": _normal(rng, T, C),
            "dt": np.log1p(np.exp(dt - 1)) if plain else dt,
            "a": -rng.uniform(0.5, 4.0, (C, N)).astype(np.float32),
            "b": columns[:, :N],
            "c": columns[:, N:],
            "state": encode_state(_normal(rng, B + 2, C, N), dtype),
            **batch(lengths, B + 2, rng),
        }
        if plain:
            return {**made, "dt_softplus": False}
        return {**made, "d": _normal(rng, C), "dt_bias": np.full(C, -1, np.float32)}

    return OpCase(
        "mamba1_scan", name, inputs, *tolerances(_RTOL, _ATOL, _REASON, dtype),
        n_bytes=4 * (2 * B * C * N + C * N + T * (3 * C + 2 * N)), n_flops=5 * T * C * N,
        out=((T, C), "float32"), mutates=("state",), timed=timed,
        decoded={"state": lambda stored: decode_state(stored, N)},
    )  # fmt: skip


CASES: list[OpCase] = [
    _mamba2_case("steps", (3, 1, 0, 2), (4, 6, 2, 20)),
    _mamba2_case("decode", (1, 1, 1), (3, 16, 1, 32)),
    _mamba2_case("chunks_and_steps", (66, 1, 33), (2, 20, 1, 18)),
    _mamba2_case("whole_chunks", (64,), (2, 32, 2, 16), plain=True),
    _mamba2_case("limits", (5,), (2, 8, 1, 16), dt_limits=(0.2, 0.5)),
    _mamba2_case("half", (34, 2), (2, 20, 1, 18), dtype="float16"),
    _mamba2_case("bfloat16", (3, 0, 1), (2, 6, 2, 20), dtype="uint16"),
    _mamba2_case("q8_0", (33, 2), (2, 8, 1, 40), dtype="uint8"),
    _mamba2_case("no_tokens", (0, 0), (2, 8, 1, 16)),
    _mamba2_case("mamba2_2_7b_decode", (1,), (80, 64, 1, 128), timed=True),
    _mamba2_case("mamba2_2_7b_decode_8", (1,) * 8, (80, 64, 1, 128), timed=True),
    _mamba2_case("mamba2_2_7b_steps_31", (31,), (80, 64, 1, 128), timed=True),
    _mamba2_case("mamba2_2_7b_prefill_512", (512,), (80, 64, 1, 128), timed=True),
    _mamba2_case("nemotron_h_8b_prefill_512", (512,), (128, 64, 8, 128), timed=True),
    _mamba1_case("ragged", (3, 1, 0, 2), 20, 5),
    _mamba1_case("two_blocks", (7, 1), 32, 16),
    _mamba1_case("plain", (4,), 17, 18, plain=True),
    _mamba1_case("half", (3, 1), 17, 16, dtype="float16"),
    _mamba1_case("bfloat16", (2,), 16, 5, dtype="uint16"),
    _mamba1_case("q8_0", (3, 0, 1), 20, 16, dtype="uint8"),
    _mamba1_case("falcon_mamba_7b_decode", (1,), 8192, 16, timed=True),
    _mamba1_case("falcon_mamba_7b_prefill_256", (256,), 8192, 16, timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

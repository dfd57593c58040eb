"""Test and benchmark cases of ops on rows by their statistics."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase

_UNIT = 2.0**-24  # rounding of one float32 operation, relative
# On CUDA each of 256 threads adds every 256th square; on the CPU each of 64 lanes every 64th.
_REASON = "float32 sum of E squares in 64 lanes: (E / 64 + 10) / 2 + 5 roundings of 2**-24, twice"


def _n_roundings(width: int) -> float:
    return width / 64 + 10


def _match_case(name: str, T: int, E: int, *, strided: bool = False, timed: bool = False) -> OpCase:
    """Return a case of `match_rms`; the first row is below the least mean square."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        x = rng.standard_normal((T, E + 3 * strided), dtype=np.float32)
        x[:1] *= np.float32(1e-4)
        like = 3 * rng.standard_normal((T, 2 * E), dtype=np.float32)
        return {"x": x[:, 3 * strided :], "like": like[:, E:] if strided else like[:, E:].copy()}

    return OpCase(
        op="match_rms", name=name, inputs=inputs, rtol=(_n_roundings(E) + 5) * _UNIT, atol=0.0,
        reason=_REASON, n_bytes=12 * T * E, n_flops=5 * T * E, out=((T, E), "float32"), timed=timed,
    )  # fmt: skip


def _moments_case(name: str, T: int, width: int) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        x = rng.standard_normal((T, width + 5), dtype=np.float32) + np.float32(0.5)
        return {"x": x[:, 5:]}

    # numbers of size |x| <= 5 around 0.5: a random walk of the roundings of sums up to 1.5 width
    return OpCase(
        op="row_moments", name=name, inputs=inputs, rtol=_n_roundings(width) * _UNIT,
        atol=1.5 * width**0.5 * _n_roundings(width) ** 0.5 * _UNIT,
        reason="float32 sums in 64 lanes: width / 64 + 10 roundings of 2**-24; a sum of numbers of "
        "both signs is off by these of its parts",
        n_bytes=4 * T * width, n_flops=3 * T * width, out=((T, 2), "float32"),
    )  # fmt: skip


def _topk_case(
    name: str, T: int, width: int, deviations: float, *, shard: int = 0, timed: bool = False
) -> OpCase:
    """Return a case of `gaussian_topk`; of `shard` columns, if given, with the whole's moments."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        x = 2 * rng.standard_normal((T, width), dtype=np.float32) - np.float32(1.0)
        given: dict[str, Any] = {"x": x, "deviations": deviations}
        if shard:
            sums = x.sum(axis=1, dtype=np.float64), np.sum(x.astype(np.float64) ** 2, axis=1)
            moments = np.stack(sums, axis=1).astype(np.float32)
            given |= {"x": x[:, :shard], "moments": moments, "width": width}
        return given

    # the mean square is 5: half of its error reaches a deviation of 2, and the mean is off by as
    # much of 1; x - cutoff is rounded to 2**-24 of at most 10
    roundings = _n_roundings(width)
    return OpCase(
        op="gaussian_topk", name=name, inputs=inputs, rtol=_UNIT,
        atol=(roundings * (abs(deviations) * 5 / 4 + 1) + 10) * _UNIT,
        reason="cutoff: float32 sums in 64 lanes, width / 64 + 10 roundings of 2**-24, of the mean "
        "and of the mean square",
        n_bytes=8 * T * width, n_flops=5 * T * width, out=((T, shard or width), "float32"),
        timed=timed,
    )  # fmt: skip


CASES: list[OpCase] = [
    _match_case("ragged", 3, 37),
    _match_case("strided", 2, 70, strided=True),
    _match_case("one_column", 4, 1),
    _match_case("no_rows", 0, 16),
    _match_case("gemma_3n_prefill", 512, 2048, timed=True),
    _moments_case("ragged", 3, 77),
    _moments_case("one_column", 2, 1),
    _moments_case("wide", 2, 8192),
    _topk_case("ragged", 3, 77, 0.5),
    _topk_case("negative", 2, 130, -0.25),
    _topk_case("shard", 3, 160, 1.0, shard=53),
    _topk_case("one_row", 1, 64, 1.645),
    _topk_case("no_rows", 0, 16, 1.0),
    _topk_case("gemma_3n_prefill", 128, 16384, 1.6448536, timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

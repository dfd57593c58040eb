"""Test and benchmark cases of retrieval by product keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase

_UNIT = 2.0**-24  # rounding of one float32 operation, relative


def _routing_case(
    name: str, T: int, n_keys: int, top_k: int, *, timed: bool = False, **shard: int
) -> OpCase:
    """Return a case of scores that are multiples of 1/64: exact sums, some of them equal."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        scores = np.round(rng.standard_normal((T, 2 * n_keys)) * 64) / 64
        return {"scores": scores.astype(np.float32), "top_k": top_k, **shard}

    return OpCase(
        op="product_key_routing", name=name, inputs=inputs, rtol=(12 + top_k / 2) * _UNIT,
        reason="exp of a difference down to -12: 12 roundings of 2**-24 on CUDA; a sum of top_k "
        "positive terms",
        n_bytes=8 * T * (n_keys + top_k), n_flops=2 * T * n_keys * min(n_keys, top_k), timed=timed,
    )  # fmt: skip


def _dot_case(
    name: str, T: int, N: int, E: int, R: int, *, outside: bool = False, timed: bool = False
) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        x = rng.standard_normal((T, E + 3), dtype=np.float32)[:, 3:]
        table = rng.standard_normal((N, E), dtype=np.float32)
        ids = rng.integers(-2 * outside, N + 3 * outside, (T, R), dtype=np.int32)
        return {"x": x, "table": table, "ids": ids}

    # sums of E products of size 1 in 32 lanes: a random walk of sqrt(E) with E / 32 + 6 roundings
    return OpCase(
        op="gathered_dot", name=name, inputs=inputs, rtol=0.0,
        atol=4 * E**0.5 * (E / 32 + 6) ** 0.5 * _UNIT,
        reason="float32 sums of E products in 32 lanes: E / 32 + 6 roundings of partial sums of up "
        "to 4 sqrt(E)",
        n_bytes=4 * T * (E + R * (E + 2)), n_flops=2 * T * R * E, out=((T, R), "float32"),
        timed=timed,
    )  # fmt: skip


CASES: list[OpCase] = [
    _routing_case("few", 3, 5, 4),
    _routing_case("all", 2, 3, 9),
    _routing_case("one", 2, 7, 1),
    _routing_case("one_key", 2, 1, 1),
    _routing_case("shard", 4, 9, 6, first=20, n_experts=31),
    _routing_case("many_keys", 2, 300, 5),
    _routing_case("no_rows", 0, 4, 2),
    _routing_case("doge_prefill", 128, 128, 64, timed=True),
    _dot_case("ragged", 3, 11, 37, 5),
    _dot_case("outside", 3, 5, 70, 9, outside=True),
    _dot_case("one_column", 2, 4, 1, 3),
    _dot_case("empty_table", 2, 0, 8, 2, outside=True),
    _dot_case("no_rows", 0, 4, 16, 2),
    _dot_case("doge_prefill", 128, 16384, 1024, 64, timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

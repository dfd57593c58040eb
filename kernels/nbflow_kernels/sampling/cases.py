"""Cases of softmax, argmax and sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.opcase import OpCase

EXACT = "integers; the same uniform number and sums in float64"
# The kept sum is float64 in both; one division is rounded to float32 (6e-8).
RENORM = "float64 inside, one rounding to float32"


def _logits(B: int, V: int, **options: Any) -> Callable[[np.random.Generator], dict[str, Any]]:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        logits = (3 * rng.standard_normal((B, V))).astype(np.float32)
        logits[:, rng.random(V) < 0.1] = -np.inf
        logits[:, V // 2] = 1.0  # at least one token is possible
        return {"logits": logits, **options}

    return inputs


def _softmax(name: str, B: int, V: int, timed: bool = False, **options: Any) -> OpCase:
    return OpCase(
        "softmax",
        name,
        _logits(B, V, **options),
        # (x - max) / temperature up to 60 in float32: two roundings, 60 * 1.2e-7 = 7e-6 relative;
        # below e**-60 nothing is left but atol
        rtol=1e-5,
        atol=1e-20,
        reason="exponents up to 60 rounded to float32: 60 * 2**-23; sums in blocks",
        out=((B, V), "float32"),
        n_bytes=8 * B * V,
        n_flops=20 * B * V,
        timed=timed,
    )


def _probs(
    B: int, V: int, concentration: float = 0.05, **options: Any
) -> Callable[[np.random.Generator], dict[str, Any]]:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        probs = rng.dirichlet(np.full(V, concentration), B).astype(np.float32)
        probs[:, rng.random(V) < 0.1] = 0.0
        probs[:, V // 2] += np.float32(0.01)
        probs[:, V // 2 + 1] = probs[:, V // 2]  # a tie
        return {"probs": probs, **options}

    return inputs


def _draw(op: str, name: str, B: int, V: int, timed: bool = False, **options: Any) -> OpCase:
    return OpCase(
        f"{op}_from_probs",
        name,
        _probs(B, V, **{"seed": 1234, **options}),
        rtol=0.0,
        atol=0.0,
        reason=EXACT,
        exact=True,
        n_bytes=4 * B * V,
        timed=timed,
    )


def _column(*values: float) -> np.ndarray:
    return np.array(values)


CASES = [
    _softmax("plain", 3, 100),
    _softmax("short_row", 2, 5),
    _softmax("per_row_temperature", 2, 64, temperature=_column(0.5, 2.0)),
    _softmax("llama3", 4, 128256, temperature=0.7, timed=True),
    OpCase(
        "argmax", "plain", _logits(4, 1000), 0.0, 0.0, "integers", exact=True, n_bytes=4 * 4 * 1000
    ),
    OpCase("argmax", "short_row", _logits(3, 7), 0.0, 0.0, "integers", exact=True),
    OpCase(
        "argmax",
        "llama3",
        _logits(4, 128256),
        0.0,
        0.0,
        "integers",
        exact=True,
        n_bytes=4 * 4 * 128256,
        timed=True,
    ),
    _draw("sampling", "plain", 40, 50),
    _draw(
        "sampling",
        "streams",
        3,
        50,
        seed=np.array([1, 2, 2**63], np.uint64),
        offset=np.array([0, 2**40, 5]),
    ),
    _draw("sampling", "shared_rows", 2, 50, indices=np.array([1, 1, 0, 1], np.int32), offset=9),
    _draw("top_k_sampling", "plain", 40, 300, top_k=5),
    _draw("top_k_sampling", "per_row", 3, 300, top_k=np.array([1, 40, 1000])),
    _draw("top_p_sampling", "plain", 40, 300, top_p=0.8),
    _draw("top_p_sampling", "per_row", 3, 300, top_p=_column(0.0, 0.5, 1.0)),
    _draw("top_p_sampling", "llama3", 1, 128256, top_p=0.9, concentration=0.01, timed=True),
    _draw("min_p_sampling", "plain", 40, 300, min_p=0.1),
    _draw("min_p_sampling", "per_row", 3, 300, min_p=_column(0.0, 0.5, 1.0)),
    _draw("top_k_top_p_sampling", "top_k_first", 40, 300, top_k=10, top_p=0.8),
    _draw(
        "top_k_top_p_sampling",
        "joint",
        40,
        300,
        top_k=10,
        top_p=0.8,
        filter_apply_order="joint",
    ),
    OpCase("top_k_renorm_probs", "plain", _probs(4, 300, top_k=7), 2e-7, 0.0, RENORM),
    OpCase(
        "top_k_renorm_probs", "per_row", _probs(2, 33, top_k=np.array([1, 50])), 2e-7, 0.0, RENORM
    ),
    OpCase("top_p_renorm_probs", "plain", _probs(4, 300, top_p=0.7), 2e-7, 0.0, RENORM),
]

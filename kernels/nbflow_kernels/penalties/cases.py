"""Cases of penalties, biases and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase

ONCE = "float64 inside, one rounding to float32"
COPY = "a copy, or -inf"


def _logits(rng: np.random.Generator, B: int, V: int) -> np.ndarray:
    logits = (3 * rng.standard_normal((B, V))).astype(np.float32)
    logits[:, V // 3] = -np.inf
    logits[:, V // 4] = 0.0
    return logits


def _ragged(rng: np.random.Generator, B: int, V: int, n: int) -> dict[str, Any]:
    """Return lists of up to `n` tokens, the second one empty; few different tokens."""
    lengths = rng.integers(n // 2, n + 1, B)
    lengths[1:2] = 0
    return {
        "token_ids": rng.integers(0, min(V, 12), lengths.sum()).astype(np.int32),
        "indptr": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
    }


def _case(
    op: str,
    name: str,
    B: int,
    V: int,
    n: int,
    *,
    exact: bool = False,
    timed: bool = False,
    extra: Callable[[np.random.Generator, dict[str, Any]], None] | None = None,
    **options: Any,
) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        made = {"logits": _logits(rng, B, V), **_ragged(rng, B, V, n), **options}
        if extra is not None:
            extra(rng, made)
        return made

    return OpCase(
        op,
        name,
        inputs,
        rtol=0.0 if exact else 1.2e-7,
        atol=0.0 if exact else 1e-6,  # half a unit of logits and penalties up to 16
        reason=COPY if exact else ONCE,
        mutates=("logits",),
        exact=exact,
        n_bytes=12 * B * n,
        timed=timed,
    )


def _biases(rng: np.random.Generator, made: dict[str, Any]) -> None:
    made["biases"] = rng.standard_normal(len(made["token_ids"]), dtype=np.float32)


def _bitmask(name: str, B: int, V: int, timed: bool = False) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        words = rng.integers(-(2**31), 2**31, (B, (V + 31) // 32)).astype(np.int32)
        words[:, ::3] = -1
        words[:, 1::4] = 0
        return {"logits": _logits(rng, B, V), "bitmask": words}

    return OpCase(
        "apply_token_bitmask",
        name,
        inputs,
        reason=COPY,
        mutates=("logits",),
        exact=True,
        n_bytes=4 * B * V + B * V // 8,
        timed=timed,
    )


CASES = [
    _case("apply_penalties", "repetition", 3, 50, 30, repetition_penalty=1.3),
    _case(
        "apply_penalties", "all_per_row", 4, 50, 30,
        repetition_penalty=np.array([1.0, 1.2, 0.8, 2.0]),
        frequency_penalty=np.array([0.0, 0.1, 0.2, -0.3]),
        presence_penalty=0.5,
        window=np.array([-1, 5, 0, 12]),
        prompt_lens=np.array([3, 0, 2, 10]),
    ),
    _case(
        "apply_penalties", "llama3", 4, 128256, 2048,
        timed=True, repetition_penalty=1.1, frequency_penalty=0.1,
    ),
    *(
        _case("apply_no_repeat_ngram", f"n{n}", 4, 40, 60, exact=True, ngram_size=n)
        for n in (0, 1, 2, 3)
    ),
    _case(
        "apply_no_repeat_ngram", "per_row", 3, 40, 9, exact=True, ngram_size=np.array([2, 3, 50])
    ),
    _case("apply_dry_penalty", "plain", 5, 40, 80, multiplier=0.8),
    _case(
        "apply_dry_penalty", "breakers", 6, 40, 80,
        multiplier=np.array([0.0, 1.0, 2.0, 0.5, 1.0, 1.0]),
        base=np.array([1.5, 1.5, 1.1, 1.0, 1.75, 1.75]),
        allowed_length=1,
        window=np.array([-1, -1, 30, -1, 0, -1]),
        breakers=((3,), (4, 5), (6, 1, 2), (7, 5), (8, 4, 5), (2, 2)),
    ),
    _case("apply_logit_bias", "plain", 3, 30, 9, extra=_biases),
    _case("mask_token_ids", "masked", 3, 37, 6, exact=True),
    _case("mask_token_ids", "kept", 3, 37, 6, exact=True, keep=True),
    _bitmask("plain", 3, 100),
    _bitmask("whole_words", 2, 64),
    _bitmask("llama3", 4, 128256, timed=True),
]  # fmt: skip
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

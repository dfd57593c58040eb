"""Test and benchmark cases of softmax, argmax and sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase

EXACT = "integers; the same uniform number and sums in float64"
# The kept sum is float64 in both; one division is rounded to float32 (6e-8).
RENORM = "float64 inside, one rounding to float32, of subnormals too (atol)"


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


def _exact(
    op: str, name: str, inputs: Any, n_bytes: int, *, reason: str = EXACT, **more: Any
) -> OpCase:
    return OpCase(op, name, inputs, reason=reason, exact=True, n_bytes=n_bytes, **more)


def _draw(op: str, name: str, B: int, V: int, timed: bool = False, **options: Any) -> OpCase:
    inputs = _probs(B, V, **{"seed": 1234, **options})
    return _exact(f"{op}_from_probs", name, inputs, 4 * B * V, timed=timed)


def _mirostat(name: str, B: int, V: int, **options: Any) -> OpCase:
    """Return a Mirostat case, which also compares the cut: the log of a share of a float64 sum."""
    case = _draw("mirostat_sampling", name, B, V, **options)
    # sums of 300 numbers in two orders: 300 * 2**-53 = 3e-14, of a cut around 3
    return replace(case, exact=False, atol=1e-12, reason=EXACT + ", in any order")


_JOINT: dict[str, Any] = {"filter_apply_order": "joint"}


def _column(*values: float) -> np.ndarray:
    return np.array(values, float)


def _counts(*values: int) -> np.ndarray:
    return np.array(values)


def _ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _logit_draw(op: str, name: str, B: int, V: int, timed: bool = False, **options: Any) -> OpCase:
    return _exact(op, name, _logits(B, V, **{"seed": 99, **options}), 4 * B * V, timed=timed)


def _argmax(name: str, B: int, V: int, timed: bool = False) -> OpCase:
    return _exact("argmax", name, _logits(B, V), 4 * B * V, reason="integers", timed=timed)


def _renorm(op: str, name: str, B: int, V: int, **options: Any) -> OpCase:
    return OpCase(op, name, _probs(B, V, **options), 2e-7, 1e-45, RENORM, out=((B, V), "float32"))


def _renorms(op: str, **options: Any) -> tuple[OpCase, OpCase, OpCase]:
    """Return a usual case, a row shorter than a vector, and one of many chunks with a tail."""
    return (
        _renorm(op, "plain", 4, 300, **options),
        _renorm(op, "short_row", 2, 9, **options),
        _renorm(op, "many_chunks", 2, 9_001, **options),
    )


def _top_k_transform(op: str, name: str, lengths: list[int], k: int, **options: Any) -> OpCase:
    """Return a case with a window of each length; sequences are longer than the windows."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        N, L = len(lengths), max(lengths) + 5
        given = {"lengths": np.array(lengths, np.int32), "k": k, **options}
        scores = rng.integers(-9, 9, (N, L)).astype(np.float32)  # many ties
        starts = rng.integers(0, 6, N).astype(np.int32)
        if given.pop("starts", False):
            given["row_starts"] = np.minimum(starts, L - np.array(lengths, np.int32))
        if op == "top_k_ragged_transform":
            return {"input": scores, "offsets": 100 * np.arange(N, dtype=np.int32), **given}
        pages = rng.permutation(3 * (L + 6)).astype(np.int32).reshape(3, -1)
        given["row_to_batch"] = rng.integers(0, 3, N).astype(np.int32)
        if "page_size" in options:
            given["page_table_row_starts"] = starts
        return {"input": scores, "src_page_table": pages, **given}

    return _exact(op, name, inputs, 4 * sum(lengths), reason="positions")


def _top_k(name: str, B: int, V: int, k: int, timed: bool = False, **options: Any) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        rows = rng.integers(-50, 50, (B, V)).astype(np.float32)  # many ties
        rows[:, 1::3] += rng.standard_normal(rows[:, 1::3].shape, dtype=np.float32)
        rows[:, 4] = -np.inf
        return {"input": rows, "k": k, **options}

    return _exact("top_k", name, inputs, 4 * B * V, reason="a copy", timed=timed)


def _mask(op: str, name: str, B: int, V: int, timed: bool = False, **options: Any) -> OpCase:
    inputs, out = _logits(B, V, **options), ((B, V), "float32")
    return _exact(op, name, inputs, 8 * B * V, reason="a copy", out=out, timed=timed)


def _chain(name: str, B: int, n: int, V: int, timed: bool = False) -> OpCase:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        target = rng.dirichlet(np.full(V, 0.5), (B, n + 1)).astype(np.float32)
        other = rng.dirichlet(np.full(V, 0.5), (B, n)).astype(np.float32)
        draft = (target[:, :n] + other) / 2
        ids = rng.integers(0, V, (B, n)).astype(np.int32)
        ids[::2] = draft[::2].argmax(axis=-1)
        rows = {"draft_probs": draft, "draft_token_ids": ids, "target_probs": target}
        return {**rows, "seed": 5, "offset": 1}

    # only the row of the drawn token is read
    return _exact("chain_speculative_sampling", name, inputs, 4 * B * V * 2, timed=timed)


CASES = [
    _softmax("plain", 3, 100),
    _softmax("short_row", 2, 5),
    _softmax("per_row_temperature", 2, 64, temperature=_column(0.5, 2.0)),
    _softmax("llama3", 4, 128256, temperature=0.7, timed=True),
    _argmax("plain", 4, 1000),
    _argmax("short_row", 3, 7),
    _argmax("llama3", 4, 128256, timed=True),
    _draw("sampling", "plain", 40, 50),
    _draw(
        "sampling", "streams", 3, 50,
        seed=np.array([1, 2, 2**63], np.uint64), offset=_counts(0, 2**40, 5),
    ),
    _draw("sampling", "shared_rows", 2, 50, indices=_ids(1, 1, 0, 1), offset=9),
    _draw("top_k_sampling", "plain", 40, 300, top_k=5),
    _draw("top_k_sampling", "per_row", 3, 300, top_k=_counts(1, 40, 1000)),
    _draw("top_p_sampling", "plain", 40, 300, top_p=0.8),
    _draw("top_p_sampling", "per_row", 3, 300, top_p=_column(0.0, 0.5, 1.0)),
    _draw("top_p_sampling", "llama3", 1, 128256, top_p=0.9, concentration=0.01, timed=True),
    _draw("min_p_sampling", "plain", 40, 300, min_p=0.1),
    _draw("min_p_sampling", "per_row", 3, 300, min_p=_column(0.0, 0.5, 1.0)),
    _draw("top_k_top_p_sampling", "top_k_first", 40, 300, top_k=10, top_p=0.8),
    _draw("top_k_top_p_sampling", "joint", 40, 300, top_k=10, top_p=0.8, **_JOINT),
    _draw("top_k_sampling", "many_chunks", 3, 20_003, top_k=_counts(3, 700, 20_000)),
    _draw("top_p_sampling", "many_chunks", 3, 20_003, top_p=_column(0.3, 0.9, 0.999)),
    _draw("top_p_sampling", "flat", 2, 9_000, concentration=50.0, top_p=0.7),
    _draw("typical_sampling", "plain", 40, 300, typical_p=0.5),
    _draw("typical_sampling", "per_row", 3, 300, typical_p=_column(0.0, 0.3, 1.0)),
    _draw("typical_sampling", "many_chunks", 2, 20_003, typical_p=0.7, concentration=1.0),
    _draw("typical_sampling", "llama3", 1, 128256, typical_p=0.9, timed=True),
    _draw("tail_free_sampling", "plain", 40, 300, z=0.95),
    _draw("tail_free_sampling", "first_left_out", 9, 50, z=0.5, first_counts=False),
    _draw("tail_free_sampling", "per_row", 3, 300, z=_column(0.0, 0.9, 1.0)),
    _draw("tail_free_sampling", "shared_rows", 2, 9, z=0.9, indices=_ids(1, 1, 0)),
    _mirostat("plain", 40, 300, mu=3.0, tau=2.5),
    _mirostat("per_row", 3, 300, mu=_column(0.0, 4.0, 50.0)),
    _logit_draw("sampling_from_logits", "plain", 40, 300, temperature=0.7),
    _logit_draw("sampling_from_logits", "shared_rows", 2, 50, indices=_ids(1, 1, 0)),
    _logit_draw("sampling_from_logits", "llama3", 4, 128256, timed=True),
    _logit_draw("top_k_top_p_sampling_from_logits", "top_k_first", 40, 300, top_k=9, top_p=0.8),
    _logit_draw(
        "top_k_top_p_sampling_from_logits", "joint", 3, 300,
        top_k=_counts(1, 40, 300), top_p=0.9, temperature=_column(0.5, 1.0, 2.0), **_JOINT,
    ),
    _logit_draw(
        "top_k_top_p_sampling_from_logits", "llama3", 4, 128256, top_k=40, top_p=0.95, timed=True
    ),
    *_renorms("top_k_renorm_probs", top_k=7),
    *_renorms("top_p_renorm_probs", top_p=0.7),
    *_renorms("min_p_renorm_probs", min_p=0.2),
    *_renorms("typical_renorm_probs", typical_p=0.6),
    *_renorms("tail_free_renorm_probs", z=0.9),
    *_renorms("xtc_renorm_probs", probability=0.5, threshold=0.1, seed=3),
    _renorm("top_k_renorm_probs", "per_row", 2, 33, top_k=_counts(1, 50)),
    _renorm(
        "xtc_renorm_probs", "per_row", 3, 40, probability=_column(0, 1, 1), threshold=0.05, seed=4
    ),
    _top_k("plain", 5, 300, 7),
    _top_k("all", 3, 33, 33),
    _top_k("in_order_of_index", 3, 300, 20, sorted=False),
    _top_k("many_chunks", 2, 20_003, 150),
    _top_k("llama3", 4, 128256, 50, timed=True),
    _top_k_transform("top_k_ragged_transform", "plain", [40, 7, 0, 300], 7),
    _top_k_transform(
        "top_k_ragged_transform", "last_of_equals", [600, 3, 30], 20, tie_break=2, starts=True
    ),
    _top_k_transform("top_k_page_table_transform", "plain", [33, 1, 16, 280], 16),
    _top_k_transform(
        "top_k_page_table_transform", "windows", [50, 9, 64], 8, starts=True, tie_break=1
    ),
    _top_k_transform(
        "top_k_page_table_transform", "pages", [300, 5, 64], 30, starts=True, page_size=4
    ),
    _mask("top_k_mask_logits", "plain", 4, 300, top_k=7),
    _mask("top_k_mask_logits", "per_row", 3, 33, top_k=_counts(1, 5, 100)),
    _mask("top_k_mask_logits", "llama3", 4, 128256, top_k=50, timed=True),
    _mask("top_n_sigma_mask_logits", "plain", 4, 300, n=1.0),
    _mask("top_n_sigma_mask_logits", "per_row", 3, 37, n=_column(0.0, 0.5, 2.0)),
    _chain("plain", 20, 4, 50),
    _chain("no_draft", 3, 0, 20),
    _chain("one", 5, 1, 16),
    _chain("llama3", 1, 5, 128256, timed=True),
]  # fmt: skip
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

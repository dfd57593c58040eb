"""Test and benchmark cases of the logits ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase

# exp is off by 2e-7 of itself; its argument u by three roundings, 3 * 6e-8 * |u|, which counts
# little where u is far below 0; 64 float32 additions in a lane are off by a random walk of
# sqrt(64) * 6e-8 = 5e-7.  The logarithm of the sum is off by as much, absolute.
_SUM = 1e-6
_SUM_REASON = "log of a sum: exp 2e-7, 64 additions in a lane 5e-7, absolute"
# (x - top) / T has three roundings, the sum with the logarithm one; all terms have one sign.
_RTOL = 4 * 2.0**-24
# tanh 5e-7, the quotient and the product 6e-8 each, relative to at most the cap, for x and the top
_CAP = 2 * 7e-7
_CAP_REASON = "; tanh 7e-7 of the cap, twice"

Inputs = Callable[[np.random.Generator], dict[str, Any]]


def _logits(rng: np.random.Generator, B: int, V: int) -> Any:
    x = 4.0 * rng.standard_normal((B, V), dtype=np.float32)
    x[rng.random(x.shape) < 0.02] = -np.inf
    x[:, :1] = 0.0  # a row keeps an element
    return x


def _of_sums(
    op: str, name: str, inputs: Inputs, logits_soft_cap: float | None, **more: Any
) -> OpCase:
    """Return a case with the tolerance of the logarithm of a sum of capped logits."""
    cap = logits_soft_cap or 0.0
    reason = _SUM_REASON + (_CAP_REASON if cap else "")
    return OpCase(op, name, inputs, _RTOL, _SUM + _CAP * cap, reason, **more)


def _log_softmax(name: str, B: int, V: int, timed: bool = False, **options: Any) -> OpCase:
    return _of_sums(
        "log_softmax",
        name,
        lambda rng: {"logits": _logits(rng, B, V), **options},
        options.get("logits_soft_cap"),
        n_bytes=8 * B * V,
        n_flops=20 * B * V,
        out=((B, V), "float32"),
        timed=timed,
    )


def _token(
    name: str, B: int, V: int, K: int | None = None, timed: bool = False, **options: Any
) -> OpCase:
    return _of_sums(
        "token_log_probs",
        name,
        lambda rng: {
            "logits": _logits(rng, B, V),
            "ids": rng.integers(0, V, (B,) if K is None else (B, K)).astype(np.int32),
            **options,
        },
        options.get("logits_soft_cap"),
        n_bytes=4 * B * V,
        n_flops=18 * B * V,
        timed=timed,
    )


def _pair(B: int, V: int, distance: float) -> Inputs:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        p = _logits(rng, B, V)
        noise = np.float32(distance) * rng.standard_normal((B, V), dtype=np.float32)
        return {"logits_p": p, "logits_q": p + noise}

    return inputs


def _kl(name: str, B: int, V: int, distance: float, timed: bool = False) -> OpCase:
    return OpCase(
        "kl_divergence",
        name,
        _pair(B, V, distance),
        # the mean of (p - q) has 64 additions too, relative to its terms of size `distance`
        atol=2 * _SUM + 2e-6 * distance,
        reason="logs of two sums, 1e-6 each, and a mean of differences 2e-6 of their size",
        n_bytes=8 * B * V,
        n_flops=40 * B * V,
        timed=timed,
    )


def _agreement(name: str, B: int, V: int, distance: float) -> OpCase:
    inputs, reason = _pair(B, V, distance), "a comparison of places"
    return OpCase("top1_agreement", name, inputs, reason=reason, exact=True)


def _cap(name: str, shape: tuple[int, ...], cap: float, timed: bool = False) -> OpCase:
    n = int(np.prod(shape))
    return OpCase(
        "soft_cap",
        name,
        lambda rng: {"logits": 20.0 * rng.standard_normal(shape, dtype=np.float32), "cap": cap},
        rtol=7e-7,
        reason="tanh 5e-7, a quotient and a product of one rounding each",
        n_bytes=8 * n,
        n_flops=20 * n,
        out=(shape, "float32"),
        timed=timed,
    )


def _scores(shape: tuple[int, ...], masked: Any, biased: Any, options: dict[str, Any]) -> Inputs:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        arguments = {"scores": 3.0 * rng.standard_normal(shape, dtype=np.float32), **options}
        if masked is not None:
            arguments["mask"] = rng.random(masked) < 0.7
        if biased is not None:
            arguments["bias"] = rng.standard_normal(biased, dtype=np.float32)
        return arguments

    return inputs


def _softmax(
    name: str,
    *shape: int,
    mask: tuple[int, ...] | None = None,
    bias: tuple[int, ...] | None = None,
    timed: bool = False,
    **options: Any,
) -> OpCase:
    cap = options.get("logits_soft_cap") or 0.0
    n = int(np.prod(shape))
    return OpCase(
        "masked_softmax",
        name,
        _scores(shape, mask, bias, options),
        # |u| <= 30 with three roundings: 30 * 3 * 6e-8 = 5.4e-6; exp, sum and two products 1e-6
        rtol=7e-6 + _CAP * cap,
        atol=1e-37,
        reason="exponent |u| <= 30 with 3 roundings, exp 2e-7, sum 5e-7; below e**-87 absolute"
        + (_CAP_REASON if cap else ""),
        n_bytes=8 * n,
        n_flops=22 * n,
        out=(shape, "float32"),
        timed=timed,
    )


def _nothing_seen(rng: np.random.Generator) -> dict[str, Any]:
    mask = np.ones((3, 20), bool)
    mask[1] = False
    return {"scores": rng.standard_normal((3, 20), dtype=np.float32), "mask": mask}


CASES: list[OpCase] = [
    _log_softmax("ragged", 5, 77),
    _log_softmax("one_column", 3, 1),
    _log_softmax("no_rows", 0, 40),
    _log_softmax("temperature", 3, 130, temperature=0.7),
    _log_softmax("temperatures", 3, 48, temperature=np.array([0.5, 1.0, 3.0])),
    _log_softmax("capped", 4, 100, logits_soft_cap=30.0, temperature=2.0),
    _log_softmax("several_blocks", 2, 5003),
    _log_softmax("llama3_vocabulary", 8, 128256, timed=True),
    _token("ragged", 5, 77),
    _token("several_ids", 3, 200, 4),
    _token("no_rows", 0, 40),
    _token("capped", 4, 100, logits_soft_cap=5.0, temperature=np.array([0.5, 1.0, 2.0, 3.0])),
    _token("several_blocks", 2, 5003),
    _token("llama3_vocabulary", 8, 128256, timed=True),
    _kl("ragged", 5, 77, 0.5),
    _kl("near", 4, 1500, 0.01),
    _kl("one_column", 2, 1, 1.0),
    _kl("no_rows", 0, 40, 1.0),
    _kl("llama3_vocabulary", 8, 128256, 0.1, timed=True),
    _agreement("ragged", 40, 77, 0.5),
    _cap("ragged", (5, 77), 30.0),
    _cap("one_axis", (1100,), 50.0),
    _cap("small", (3,), 1e4),
    _cap("gemma2_vocabulary", (8, 256000), 30.0, timed=True),
    _softmax("ragged", 5, 77, sm_scale=0.25),
    _softmax("causal", 2, 3, 6, 40, sm_scale=0.5, causal=True),
    _softmax("more_queries_than_keys", 2, 9, 5, causal=True),
    _softmax("mask", 3, 7, 33, mask=(7, 33)),
    _softmax("mask_of_keys", 2, 3, 4, 50, mask=(2, 1, 1, 50)),
    _softmax("mask_of_queries", 3, 7, 33, mask=(7, 1)),
    _softmax("everything", 2, 4, 6, 39, mask=(6, 39), bias=(4, 1, 39), causal=True, sm_scale=0.3),
    _softmax("capped_with_bias", 4, 5, 64, bias=(4, 5, 64), logits_soft_cap=5.0),
    _softmax("several_blocks", 2, 2100, mask=(2100,)),
    _softmax("one_key", 4, 3, 1),
    _softmax("no_keys", 3, 2, 0),
    _softmax("no_rows", 0, 7, bias=(7,)),
    OpCase("masked_softmax", "nothing_seen", _nothing_seen, 7e-6, 1e-37, "as the others"),
    _softmax("llama2_7b_prefill", 32, 512, 512, causal=True, sm_scale=0.088, timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""

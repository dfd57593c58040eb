"""Filters and penalties against the numbers llama.cpp's own test expects.

The vectors are those of tests/test-sampling.cpp, llama.cpp commit 07e4038f: probabilities before,
what is left after, within 1e-5.  Left out: what means "off" there and is an error here (top_k 0,
min_p above 1), and the temperature 0, which is `argmax` here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk

FOUR = (0.1, 0.2, 0.3, 0.4)
FALLING = (0.4, 0.3, 0.2, 0.1)


def row(values: Any) -> np.ndarray:
    return np.array([values], np.float32)


def check(got: np.ndarray, wanted: Any) -> None:
    np.testing.assert_allclose(got[0], wanted, rtol=0, atol=1e-5)


def test_temperature() -> None:
    check(nk.softmax(np.log(row(FOUR)), 1.0), FOUR)
    assert nk.argmax(np.log(row(FOUR))).tolist() == [3]


@pytest.mark.parametrize(
    ("op", "parameter", "wanted"),
    [
        ("top_k", 1, (0, 0, 0, 1)),
        ("top_k", 3, (0, 0.22222, 0.33333, 0.44444)),
        ("top_k", 4, FOUR),
        ("top_p", 0.0, (0, 0, 0, 1)),
        ("top_p", 0.7, (0, 0, 0.428571, 0.571429)),
        ("top_p", 0.8, (0, 0.22222, 0.33333, 0.44444)),
        ("top_p", 1.0, FOUR),
        ("min_p", 0.0, FOUR),
        ("min_p", 0.24, FOUR),
        ("min_p", 0.26, (0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9)),
        ("min_p", 0.49, (0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9)),
        ("min_p", 0.51, (0, 0, 0.3 / 0.7, 0.4 / 0.7)),
        ("min_p", 0.74, (0, 0, 0.3 / 0.7, 0.4 / 0.7)),
        ("min_p", 0.76, (0, 0, 0, 1)),
        ("min_p", 1.0, (0, 0, 0, 1)),
    ],
)
def test_filters(op: str, parameter: float, wanted: Any) -> None:
    check(getattr(nk, f"{op}_renorm_probs")(row(FOUR), parameter), wanted)


@pytest.mark.parametrize(
    ("threshold", "left"), [(0.09, (3,)), (0.19, (2, 3)), (0.29, (1, 2, 3)), (0.39, (0, 1, 2, 3))]
)
def test_xtc(threshold: float, left: tuple[int, ...]) -> None:
    kept = np.where(np.isin(range(4), left), FALLING, 0.0)
    check(nk.xtc_renorm_probs(row(FALLING), 1.0, threshold, seed=0), kept / kept.sum())
    check(nk.xtc_renorm_probs(row(FALLING), 0.0, threshold, seed=0), FALLING)


@pytest.mark.parametrize(
    ("probs", "wanted"),
    [
        ((0.97, 0.01, 0.01, 0.01), (1, 0, 0, 0)),
        ((0.4, 0.2, 0.2, 0.2), (0, 1 / 3, 1 / 3, 1 / 3)),
    ],
)
def test_typical(probs: Any, wanted: Any) -> None:
    check(nk.typical_renorm_probs(row(probs), 0.5), wanted)


@pytest.mark.parametrize(
    ("n", "wanted"), [(1.0, (0, 0, 0.428571, 0.571429)), (0.0, FOUR), (3.0, FOUR)]
)
def test_top_n_sigma(n: float, wanted: Any) -> None:
    check(nk.softmax(nk.top_n_sigma_mask_logits(np.log(row(FOUR)), n)), wanted)


@pytest.mark.parametrize(
    ("history", "wanted", "repetition", "others"),
    [
        ((0,), (0, 0.25, 0.25, 0.25, 0.25), 50.0, 0.0),
        ((0, 1, 2), (0, 0, 0, 0.5, 0.5), 50.0, 0.0),
        ((0, 1, 2, 0, 0), (0, 0, 0, 0.5, 0.5), 50.0, 0.0),
        ((0,), (0.000011, 0.249997, 0.249997, 0.249997, 0.249997), 1.0, 5.0),
        ((0, 1, 2), (0.000023, 0.000023, 0.000023, 0.499966, 0.499966), 1.0, 5.0),
        ((0, 1, 2, 0, 0), (0.0, 0.000023, 0.000023, 0.499977, 0.499977), 1.0, 5.0),
    ],
)
def test_penalties(history: Any, wanted: Any, repetition: float, others: float) -> None:
    logits = np.log(row([0.2] * 5))
    nk.apply_penalties(
        logits,
        np.array(history, np.int32),
        np.array([0, len(history)], np.int32),
        repetition_penalty=repetition,
        frequency_penalty=others,
        presence_penalty=others,
    )
    check(nk.softmax(logits), wanted)


@pytest.mark.parametrize(
    ("n", "history", "wanted", "multiplier", "allowed", "window", "breakers"),
    [
        (4, (0, 1), (0.25,) * 4, 1.0, 2, 4, ()),
        (4, (0, 1, 2, 0, 1), (0.296923, 0.296923, 0.109232, 0.296923), 1.0, 2, 5, ()),
        (5, (0, 1, 3, 4, 0, 1), (0.2,) * 5, 1.0, 2, 6, ((3,),)),
        (5, (0, 1, 2, 0, 1), (0.241818, 0.241818, 0.032727, 0.241818, 0.241818), 2.0, 2, 5, ()),
        (5, (0, 1, 2, 3, 4, 0, 1), (0.2,) * 5, 1.0, 4, 7, ()),
    ],
)
def test_dry(
    n: int, history: Any, wanted: Any, multiplier: float, allowed: int, window: int, breakers: Any
) -> None:
    logits = np.log(row([1 / n] * n))
    nk.apply_dry_penalty(
        logits,
        np.array(history, np.int32),
        np.array([0, len(history)], np.int32),
        multiplier=multiplier,
        base=1.1,
        allowed_length=allowed,
        window=window,
        breakers=breakers,
    )
    check(nk.softmax(logits), wanted)


QUEUES = [
    *[("k", k, 1.0, 1.0) for k in (10_000, 1, 100)],
    *[("p", 1, p, 1.0) for p in (1.0, 0.0, 0.0003, 0.8)],
    *[("m", 1, 1.0, m) for m in (1.0, 1e-12, 9997.9 / 9999.0, 0.1)],
    *[(q, 100, 0.8, 0.1) for q in ("kp", "km", "pk", "pm", "mk", "mp")],
    ("mp", 100, 0.8, 9997.9 / 9999.0),
    *[(q, 100, 0.8, 0.1) for q in ("kpm", "kmp", "pkm", "pmk", "mkp", "mpk")],
]


@pytest.mark.parametrize(("queue", "k", "p", "m"), QUEUES)
def test_chains_of_filters(queue: str, k: int, p: float, m: float) -> None:
    """Token i of 10000 has the weight i; a chain keeps the tokens from some id on."""
    weights = np.arange(10_000)
    probs = row(weights / weights.sum())
    least = 1
    for name in queue:
        ids = weights[least:]
        if name == "k":
            probs = nk.top_k_renorm_probs(probs, k)
            least = max(least, 10_000 - k)
        elif name == "p":
            probs = nk.top_p_renorm_probs(probs, p)
            sums = np.cumsum(ids[::-1])
            least = 10_000 - 1 - int(np.searchsorted(sums, p * sums[-1]))
        else:
            probs = nk.min_p_renorm_probs(probs, m)
            least = max(least, int(np.ceil(m * 9_999)))
        np.testing.assert_array_equal(np.flatnonzero(probs[0]), weights[least:])

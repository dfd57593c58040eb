"""User-defined attention variants against the reference and built-in options."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal

from nbflow_kernels.attention import (
    AttentionVariant,
    BatchPrefillWithPagedKVCacheWrapper,
    reference,
    single_prefill_with_kv_cache,
)
from nbflow_kernels.attention.cases import ATOL
from nbflow_kernels.attention.cpu import vectorizable_math
from nbflow_kernels.cpu.parallel_for import set_num_threads
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import alibi_slopes


def sigmoid(params: Any, logit: Any, batch: Any, qo: Any, kv: Any, head: Any, g: Any) -> Any:
    return 1.0 / (1.0 + math.exp(-(logit + params[0])))


def capped(params: Any, logit: Any, batch: Any, qo: Any, kv: Any, head: Any, g: Any) -> Any:
    return params[0] * math.tanh(logit / params[0])


class Everything:
    """All three hooks as an ordinary class; the mask and the factors are arrays."""

    params = (
        np.arange(40) % 3 != 1,  # which keys are seen
        np.array([1.0, 2.0, 0.5, 1.5]),  # a factor for each head
    )

    def logits_transform(params, logit, batch, qo_idx, kv_idx, qo_head, kv_head):  # type: ignore
        return logit * params[1][qo_head] + 0.01 * (kv_idx - qo_idx) + 0.1 * kv_head

    def logits_mask(params, batch, qo_idx, kv_idx, qo_head, kv_head):  # type: ignore
        return params[0][kv_idx]

    @staticmethod
    def output_transform(params: Any, output: Any, batch: Any, qo_idx: Any, qo_head: Any) -> Any:
        return output + params[1][qo_head]


SIGMOID = AttentionVariant(logits_transform=sigmoid, params=(-1.5,), use_softmax=False)
CAPPED = AttentionVariant(logits_transform=capped, params=(3.0,))


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return normal(rng, 6, 4, 20), normal(rng, 40, 2, 20), normal(rng, 40, 2, 20)


@pytest.mark.parametrize("variant", [SIGMOID, Everything], ids=["sigmoid", "everything"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window_left": 15, "attention_chunk": 37}]
)
def test_variants_equal_the_reference(variant: Any, options: dict[str, Any]) -> None:
    q, k, v = arrays()
    as_reference = AttentionVariant(
        **{
            name: getattr(variant, name)
            for name in ("logits_transform", "logits_mask", "output_transform", "params")
            if hasattr(variant, name)
        },
        use_softmax=getattr(variant, "use_softmax", True),
    )
    want = reference.single_prefill_with_kv_cache(q, k, v, variant=as_reference, **options)
    got = single_prefill_with_kv_cache(q, k, v, variant=variant, **options)
    # sigmoid: sums of up to 40 weights below 1 with scores off by 1e-6, rounded once to float32
    np.testing.assert_allclose(got, want, rtol=0, atol=10 * ATOL)


def test_soft_cap_written_as_a_variant() -> None:
    q, k, v = arrays()
    got = single_prefill_with_kv_cache(q, k, v, variant=CAPPED, return_lse=True)
    want = single_prefill_with_kv_cache(q, k, v, logits_soft_cap=3.0, return_lse=True)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2 * ATOL)  # two kernels' errors


def test_batches_rows_threads_and_formats() -> None:
    rng = np.random.default_rng(2)
    lens, rows = [40, 0, 25], ints(0, 6, 6, 7)
    q = normal(rng, 7, 4, 64)
    for format in ("f16", "q8_0"):
        paged = Paged(rng, lens, (4, 2, 64), 8, "HND", format=format)
        results = []
        for threads in (1, 2):
            set_num_threads(threads)
            wrapper = BatchPrefillWithPagedKVCacheWrapper(kv_layout="HND")
            paged.plan(wrapper, rows, variant=CAPPED)
            results.append(wrapper.run(q, paged.cache))
        np.testing.assert_array_equal(*results)
        one = single_prefill_with_kv_cache(
            q[6:], paged.k[2], paged.v[2], causal=True, variant=CAPPED, kv_format=format
        )
        np.testing.assert_array_equal(results[0][6:], one)


def test_qo_idx_counts_the_rows_of_a_request_and_batch_the_requests() -> None:
    def where(params: Any, output: Any, batch: Any, qo_idx: Any, qo_head: Any) -> Any:
        return 100.0 * batch + 10.0 * qo_idx + qo_head

    paged = Paged(np.random.default_rng(3), [3, 5], (2, 1, 16), 4)
    wrapper = BatchPrefillWithPagedKVCacheWrapper()
    paged.plan(wrapper, ints(0, 1, 3), variant=AttentionVariant(output_transform=where))
    got = wrapper.run(np.zeros((3, 2, 16), np.float32), paged.cache)[..., 0]
    np.testing.assert_array_equal(got, [[0, 1], [100, 101], [110, 111]])


def relative(params: Any, logit: Any, batch: Any, qo: Any, kv: Any, head: Any, g: Any,
             qo_pos: Any) -> Any:  # fmt: skip
    return logit + params[0][head, min(qo_pos - kv, 7)]


def near(params: Any, batch: Any, qo: Any, kv: Any, head: Any, g: Any, qo_pos: Any) -> Any:
    return qo_pos - kv < params[1]


def by_position(params: Any, output: Any, batch: Any, qo: Any, head: Any, qo_pos: Any) -> Any:
    return output * (1.0 + 0.25 * qo_pos)


def test_positions_and_sinks_in_prefill_and_decode() -> None:
    """Rows of a prompt and of a decode step in one paged batch."""
    rng = np.random.default_rng(7)
    bias = rng.standard_normal((4, 8))
    variant = AttentionVariant(relative, near, by_position, params=(bias, 30))
    sinks = normal(rng, 4)
    paged, rows = Paged(rng, [40, 25, 3], (4, 2, 32), 8), ints(0, 6, 7, 10)
    q = normal(rng, 10, 4, 32)
    wrapper = BatchPrefillWithPagedKVCacheWrapper()
    paged.plan(wrapper, rows, variant=variant)
    got = wrapper.run(q, paged.cache, sinks=sinks)
    for i, (first, last) in enumerate(itertools.pairwise(rows)):
        want = reference.single_prefill_with_kv_cache(
            q[first:last], paged.k[i], paged.v[i], causal=True, variant=variant, sinks=sinks
        )
        # outputs of at most 5 scaled by up to 11
        np.testing.assert_allclose(got[first:last], want, rtol=0, atol=20 * ATOL)


def short(params: Any, logit: Any) -> Any:
    return logit


def opens_a_file(params: Any, logit: Any, batch: Any, qo: Any, kv: Any, head: Any, g: Any) -> Any:
    return len(open("nothing").read())


@pytest.mark.parametrize(
    ("variant", "options", "words"),
    [
        (object(), {}, "variant must have one of the attributes logits_transform, logits_mask"),
        (
            AttentionVariant(logits_transform=short),
            {},
            r"variant.logits_transform must take \(params, logit, batch, .* got \(params, logit\)",
        ),
        (AttentionVariant(logits_transform=math.exp), {}, "must be a Python function"),
        (AttentionVariant(logits_transform=opens_a_file), {}, "variant cannot be compiled"),
        (
            AttentionVariant(logits_transform=capped, params=("a",)),
            {},
            r"variant.params\[0\] must be a number, a NumPy array or .* got builtins.str",
        ),
        (CAPPED, {"logits_soft_cap": 1.0}, "variant replaces logits_soft_cap"),
        (CAPPED, {"pos_encoding_mode": "ALIBI"}, "variant replaces"),
        (CAPPED, {"pos_encoding_mode": "ROPE_LLAMA"}, "does not support pos_encoding_mode"),
        (SIGMOID, {"sinks": np.zeros(4, np.float32)}, "sinks need a softmax"),
        (SIGMOID, {"return_lse": True}, "return_lse needs a softmax"),
    ],
)
def test_wrong_variants_are_named(variant: Any, options: dict[str, Any], words: str) -> None:
    q, k, v = arrays()
    with pytest.raises(UsageError, match=words):
        single_prefill_with_kv_cache(q, k, v, variant=variant, **options)


def alibi(params: Any, logit: Any, batch: Any, qo: Any, kv: Any, head: Any, g: Any) -> Any:
    return logit + params[0][head] * (kv - qo - params[1])


def window(params: Any, batch: Any, qo: Any, kv: Any, head: Any, g: Any) -> Any:
    return kv >= qo + params[0] - params[1]


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        (
            AttentionVariant(alibi, params=(alibi_slopes(4).astype(np.float64), 2100 - 5)),
            {"pos_encoding_mode": "ALIBI"},
        ),
        (AttentionVariant(logits_mask=window, params=(2100 - 5, 70)), {"window_left": 70}),
        (CAPPED, {"logits_soft_cap": 3.0}),
    ],
    ids=["alibi", "window", "cap"],
)
def test_built_in_options_written_as_variants(variant: Any, options: dict[str, Any]) -> None:
    """Several splits of 2048 keys."""
    rng = np.random.default_rng(4)
    q, k, v = normal(rng, 5, 4, 20), normal(rng, 2100, 2, 20), normal(rng, 2100, 2, 20)
    got = single_prefill_with_kv_cache(q, k, v, causal=True, variant=variant, return_lse=True)
    want = single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2 * ATOL)  # two kernels' errors


def test_weights_without_softmax_are_summed_over_all_keys() -> None:
    rng = np.random.default_rng(5)
    q, k, v = normal(rng, 2, 2, 16), normal(rng, 4200, 1, 16), normal(rng, 4200, 1, 16)
    mask = rng.random((2, 4200)) < 0.5
    want = reference.single_prefill_with_kv_cache(q, k, v, variant=SIGMOID, custom_mask=mask)
    got = single_prefill_with_kv_cache(q, k, v, variant=SIGMOID, custom_mask=mask)
    # 2100 values below 5 in float32: partial sums up to 200 are rounded, sqrt(2100) * 2**-24 * 200
    np.testing.assert_allclose(got, want, rtol=0, atol=6e-4)
    # the plan of another call has its softmax
    again = single_prefill_with_kv_cache(q, k, v)
    np.testing.assert_allclose(
        again, reference.single_prefill_with_kv_cache(q, k, v), rtol=0, atol=ATOL
    )


def test_a_wrapper_may_be_planned_with_and_without_a_variant() -> None:
    rng = np.random.default_rng(6)
    paged = Paged(rng, [40, 25], (4, 2, 32), 8)
    q, rows = normal(rng, 2, 4, 32), ints(0, 1, 2)
    wrapper = BatchPrefillWithPagedKVCacheWrapper()
    paged.plan(wrapper, rows, variant=CAPPED)
    capped_once = wrapper.run(q, paged.cache)
    paged.plan(wrapper, rows)
    np.testing.assert_array_equal(wrapper.run(q, paged.cache), paged.run(q, rows)[0])
    assert np.abs(wrapper.run(q, paged.cache) - capped_once).max() > 1e-3


def test_functions_that_are_replaced_are_as_exact() -> None:
    x = np.concatenate([np.linspace(-800, 800, 40001), np.logspace(-300, 1, 500)])
    x = np.concatenate([x, -x, [np.inf, -np.inf, np.nan]])
    with np.errstate(over="ignore", under="ignore"):
        for found, function in ((vectorizable_math.exp, np.exp), (vectorizable_math.tanh, np.tanh)):
            got = np.array([found(value) for value in x])
            want = function(x)
            normal_range = np.abs(want) > 1e-307  # what is smaller becomes 0
            np.testing.assert_allclose(got[normal_range], want[normal_range], rtol=1e-14)
            assert (got[~normal_range & ~np.isnan(want)] <= 1e-307).all()
            assert np.isnan(got[-1])

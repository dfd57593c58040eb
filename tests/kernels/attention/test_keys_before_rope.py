"""Paged attention over keys that are stored before RoPE and without a bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.attention import reference
from nbflow_kernels.attention.cases import ATOL
from nbflow_kernels.errors import UsageError

H, G, D, PAGE = 4, 2, 64, 16
LENS = (70, 67, 5)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    """Return a batch whose first two requests share four pages, with keys before and after RoPE."""
    rng = np.random.default_rng(5)
    indptr, indices = ints(0, 5, 10, 11), ints(0, 1, 2, 3, 4, 0, 1, 2, 3, 6, 8)
    last = ints(*(n - (n - 1) // PAGE * PAGE for n in LENS))
    k, v = rng.standard_normal((2, sum(LENS), G, D)).astype(np.float32)
    k[70:134], v[70:134] = k[:64], v[:64]  # the shared prefix
    return {
        "table": (indptr, indices, last), "k": k, "v": v,
        "q": rng.standard_normal((3, H, D)).astype(np.float32),
        "bias": rng.standard_normal((G, D)).astype(np.float32),
        "cos_sin": nk.rope_cos_sin_cache(96, 48, theta=1e4),
    }  # fmt: skip


def fill(step: dict[str, Any], keys: np.ndarray, kv_format: str, **rope: Any) -> np.ndarray:
    """Return pages with these keys; `rope` rotates them as they are written."""
    indptr, indices, last = step["table"]
    format = nk.kv_format(kv_format)
    cache = np.zeros((9, 2, PAGE, G, format.row_length(D)), format.dtype)
    rows = nk.get_batch_indices_positions(ints(0, 70, 137, 142), ints(*LENS), 142)
    nk.append_paged_kv_cache(
        keys, step["v"], *rows, cache, indices, indptr, last, kv_format=kv_format, **rope
    )
    return cache


def attend(step: dict[str, Any], cache: np.ndarray, kv_format: str, module: Any = nk, **more: Any):
    """Attend with one row per request."""
    indptr, indices, last = step["table"]
    run = {name: more.pop(name) for name in ("key_bias",) if name in more}
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper()
    wrapper.plan(
        ints(0, 1, 2, 3), indptr, indices, last, H, G, D, PAGE, causal=True, kv_format=kv_format,
        **more,
    )  # fmt: skip
    return wrapper.run(step["q"], cache, **run)


def test_rotation_on_reading_equals_rotation_on_writing(step):
    table, bias = step["cos_sin"], step["bias"]
    for interleave in (False, True):
        written = fill(step, step["k"] + bias, "f32", cos_sin=table, interleave=interleave)
        before = fill(step, step["k"], "f32")
        rope = {"key_cos_sin": table, "key_interleave": interleave, "key_bias": bias}
        found = attend(step, before, "f32", **rope)
        np.testing.assert_array_equal(found, attend(step, written, "f32"))


@pytest.mark.parametrize("kv_format", ["f16", "q4_0"])
def test_batches_equal_the_reference(step, kv_format):
    cache = fill(step, step["k"], kv_format)
    rope = {"key_cos_sin": step["cos_sin"], "key_bias": step["bias"]}
    found = attend(step, cache, kv_format, **rope)
    want = attend(step, cache, kv_format, reference, **rope)
    np.testing.assert_allclose(found, want, rtol=0, atol=ATOL)
    # a shared prefix is read once for two requests, with the same bits
    alone = attend(step, cache, kv_format, disable_page_sharing=True, **rope)
    np.testing.assert_array_equal(found, alone)


def test_decode_wrapper_takes_the_same_arguments(step):
    cache, (indptr, indices, last) = fill(step, step["k"], "q8_0"), step["table"]
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(
        indptr, indices, last, H, G, D, PAGE, kv_format="q8_0", key_cos_sin=step["cos_sin"]
    )
    found = wrapper.run(step["q"], cache, key_bias=step["bias"])
    rope = {"key_cos_sin": step["cos_sin"], "key_bias": step["bias"]}
    np.testing.assert_array_equal(found, attend(step, cache, "q8_0", **rope))
    without = wrapper.run(step["q"], cache)  # the bias belongs to a call
    np.testing.assert_array_equal(without, attend(step, cache, "q8_0", key_cos_sin=step["cos_sin"]))


def test_wrong_arguments_are_refused(step):
    cache, table = fill(step, step["k"], "f32"), step["cos_sin"]
    for wrong, message in (
        (table[:69], "69 rows, and a request has 70 keys"),
        (np.zeros((96, 66), np.float32), "at most head_dim = 64, got 66"),
        (np.zeros((96, 7), np.float32), "even number of columns"),
    ):
        with pytest.raises(UsageError, match=message):
            attend(step, cache, "f32", key_cos_sin=wrong)
    with pytest.raises(TypeError, match="key_cos_sin"):
        attend(step, cache, "f32", key_cos_sin=table.astype(np.float64))
    with pytest.raises(UsageError, match="key_bias is for keys stored before RoPE"):
        attend(step, cache, "f32", key_bias=step["bias"])
    with pytest.raises(UsageError, match="key_bias"):
        attend(step, cache, "f32", key_cos_sin=table, key_bias=step["bias"][:1])

"""Arrays of other libraries, half precision and int64 indices at the boundary of public ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from foreign_arrays import Foreign, foreign, unwrapped

import nbflow_kernels as nk
from nbflow_kernels import op_registry
from nbflow_kernels.cpu.interpreter.memory import bf16_to_f32, f32_to_bf16
from nbflow_kernels.errors import UsageError
from nbflow_kernels.exchange.array_exchange import exported, native
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.testing import checks

HALF_FAMILIES = (
    "norm", "activation", "position", "matmul", "quantized_matmul", "sampling", "logits", "gating",
    "hadamard", "row_statistics",
)  # fmt: skip
FIRST = {
    c.op: c for c in reversed(list(op_registry.all_cases())) if not c.timed and c.n_bytes < 1e7
}
NO_ARRAYS = {"alibi_slopes", "rope_cos_sin_cache", "rope_frequencies"}
"""Ops of numbers alone.  To make the inputs of others compiles quantizers: not at import."""
WITH_ARRAYS = [c for c in FIRST.values() if c.op not in NO_ARRAYS]


def _leaves(value: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in checks.leaves(value)]


def _call(case: OpCase, given: dict[str, Any]) -> tuple[Any, Any]:
    result = getattr(nk, case.op)(**given)
    return result, [given[name] for name in case.mutates if name in given]


def test_ops_without_arrays_are_named() -> None:
    for op in NO_ARRAYS:
        leaves = checks.leaves(checks.make_inputs(FIRST[op]))
        assert not any(isinstance(leaf, np.ndarray) for leaf in leaves), op


@pytest.mark.parametrize("case", WITH_ARRAYS, ids=lambda case: case.op)
def test_dlpack_arrays_give_the_same_bits_and_their_kind(case: OpCase) -> None:
    here = checks.make_inputs(case)
    assert any(isinstance(leaf, np.ndarray) for leaf in checks.leaves(here))
    there = foreign(checks.make_inputs(case))
    wanted, found = _call(case, here), _call(case, there)
    assert _leaves(unwrapped(found)) == _leaves(wanted)
    for leaf, like in zip(checks.leaves(found), checks.leaves(wanted), strict=True):
        assert isinstance(leaf, Foreign) == isinstance(like, np.ndarray)


HALF = [c for c in WITH_ARRAYS if op_registry.family_of(c.op) in HALF_FAMILIES]


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.op)
def test_float16_is_computed_in_float32_and_rounded_once(case: OpCase) -> None:
    reads = op_registry.READS_HALF.get(case.op, ())

    def half(value: Any) -> Any:
        is_float = isinstance(value, np.ndarray) and value.dtype == np.float32
        with np.errstate(over="ignore"):
            return value.astype(np.float16) if is_float else value

    def wide(value: Any) -> Any:
        is_half = isinstance(value, np.ndarray) and value.dtype == np.float16
        return value.astype(np.float32) if is_half else value

    narrow = {n: v if n in reads else half(v) for n, v in checks.make_inputs(case).items()}
    rounded = {n: v if n in reads else wide(v) for n, v in narrow.items()}
    floats = [n for n, v in narrow.items() if n not in reads and v is not rounded[n]]
    found, wanted = _call(case, narrow), _call(case, rounded)
    for a, b in zip(checks.leaves(found), checks.leaves(wanted), strict=True):
        b = np.asarray(b)
        if floats and b.dtype == np.float32 and case.op not in op_registry.FLOAT32_RESULTS:
            assert a.dtype == np.float16
            with np.errstate(over="ignore"):
                b = b.astype(np.float16)
        np.testing.assert_array_equal(a, b)


class BFloat16(Foreign):
    """Bits behind a dtype that NumPy lacks, with the two members that libraries have for it."""

    dtype = "other.bfloat16"
    uint16 = np.uint16
    bfloat16 = "other.bfloat16"

    def view(self, dtype: Any) -> Any:
        return Foreign(self.array)

    def __array_namespace__(self) -> Any:
        return _Other


class _Other:
    uint8, uint16, bfloat16 = np.uint8, np.uint16, "other.bfloat16"

    class Bits(Foreign):
        def view(self, dtype: Any) -> Any:
            return BFloat16(self.array)

    @staticmethod
    def from_dlpack(array: Any) -> Any:
        return _Other.Bits(np.from_dlpack(array))


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def test_bfloat16_goes_in_and_comes_out_in_place_too() -> None:
    x, residual, weight = _normal(3, 40), _normal(3, 40)[::-1].copy(), _normal(40)
    bits = [f32_to_bf16(a) for a in (x, residual, weight)]
    wide = [bf16_to_f32(b) for b in bits]
    found = nk.rmsnorm(BFloat16(bits[0]), BFloat16(bits[2]))
    assert isinstance(found, BFloat16)
    np.testing.assert_array_equal(found.array, f32_to_bf16(nk.rmsnorm(wide[0], wide[2])))
    given = [BFloat16(b) for b in bits]
    nk.fused_add_rmsnorm(*given)
    nk.fused_add_rmsnorm(*wide)
    np.testing.assert_array_equal(given[1].array, f32_to_bf16(wide[1]))
    np.testing.assert_array_equal(given[0].array, f32_to_bf16(wide[0]))
    assert nk.rmsnorm(x, BFloat16(bits[2])).dtype == np.float32  # x is NumPy's and float32


class Float8(Foreign):
    """Codes behind a dtype that NumPy lacks."""

    dtype = "other.float8_e5m2"

    def view(self, dtype: Any) -> Any:
        return Foreign(self.array)

    def __array_namespace__(self) -> Any:
        return _Other


def test_float8_outputs_name_their_format() -> None:
    x, codes = _normal(3, 40), np.zeros((3, 40), np.uint8)
    nk.rmsnorm_quant(Float8(codes), Foreign(x), None, 0.5)
    wanted = np.zeros_like(codes)
    nk.rmsnorm_quant(wanted, x, None, 0.5, out_format="f8_e5m2")
    np.testing.assert_array_equal(codes, wanted)
    q, table, at = _normal(3, 2, 8), nk.rope_cos_sin_cache(3, 8, theta=1e4), np.arange(3)
    out, rotation = np.zeros((3, 2, 8), np.uint8), (table, at.astype(np.int32))
    found = nk.rope_quantize_fp8(
        *map(Foreign, (q, q)), None, None, *rotation, q_rope_out=Float8(out)
    )
    assert found[0].array is out
    wanted = nk.rope_quantize_fp8(q, q, None, None, *rotation, quantize_dtype="f8_e5m2")
    np.testing.assert_array_equal(out, wanted[0])
    np.testing.assert_array_equal(found[1].array, wanted[1])
    with pytest.raises(UsageError, match="must be that of the outputs and caches, f8_e5m2, got"):
        nk.rope_quantize_fp8(
            q, q, None, None, *rotation, quantize_dtype="f8_e4m3", q_rope_out=Float8(out)
        )


def test_weights_of_half_precision_are_read_as_they_are() -> None:
    x, w = _normal(2, 16), _normal(5, 16)
    wanted = nk.matmul(x, f32_to_bf16(w))
    np.testing.assert_array_equal(nk.matmul(x, BFloat16(f32_to_bf16(w))), wanted)
    table = Foreign(w.astype(np.float16))
    assert nk.embedding(np.array([1], np.int32), table).dtype == np.float32


def test_attention_in_bfloat16() -> None:
    q, k, v = _normal(4, 32), _normal(9, 2, 32), _normal(9, 2, 32)[::-1].copy()
    bits = [f32_to_bf16(a) for a in (q, k, v)]
    wanted, lse = nk.single_decode_with_kv_cache(*map(bf16_to_f32, bits), return_lse=True)
    found = nk.single_decode_with_kv_cache(*map(BFloat16, bits), return_lse=True)
    np.testing.assert_array_equal(found[0].array, f32_to_bf16(wanted))
    np.testing.assert_array_equal(found[1].array, lse)


def test_bfloat16_cache() -> None:
    cache, q = _normal(2, 2, 4, 2, 32), _normal(2, 4, 32)
    bits = f32_to_bf16(cache)
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper()
    table = [np.array(a, np.int32) for a in ([0, 1, 2], [1, 0], [4, 3])]
    wrapper.plan(*table, 4, 2, 32, 4, q_data_type="bfloat16", kv_data_type="bfloat16")
    wanted = wrapper.run(bf16_to_f32(f32_to_bf16(q)), bits)
    found = wrapper.run(BFloat16(f32_to_bf16(q)), BFloat16(bits))
    np.testing.assert_array_equal(found.array, f32_to_bf16(wanted))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_of_jax(dtype: str) -> None:
    jnp = pytest.importorskip("jax.numpy", reason="needs JAX, which the tests do not install")
    x = jnp.asarray(_normal(3, 8)).astype(dtype)
    found = nk.silu(x)
    assert isinstance(found, type(x))
    assert found.dtype == x.dtype
    wanted = jnp.asarray(nk.silu(np.asarray(x, np.float32))).astype(dtype)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    with pytest.raises(UsageError, match="out is written to and must not be read-only"):
        nk.silu(_normal(3, 8), out=jnp.zeros((3, 8), "float32"))


def test_bfloat16_of_numpy() -> None:
    ml_dtypes = pytest.importorskip(
        "ml_dtypes", reason="needs ml_dtypes, which the tests do not install"
    )
    x = _normal(3, 8).astype(ml_dtypes.bfloat16)
    found = nk.silu(x)
    np.testing.assert_array_equal(found, nk.silu(x.astype(np.float32)).astype(x.dtype))
    out = np.empty_like(x)
    assert nk.silu(x, out=out) is out
    np.testing.assert_array_equal(out, found)


def test_out_of_another_dtype_and_library() -> None:
    x = _normal(2, 8)
    out = np.empty((2, 8), np.float16)
    assert nk.silu(x, out) is out
    np.testing.assert_array_equal(out, nk.silu(x).astype(np.float16))
    there = Foreign(np.empty((2, 8), np.float32))
    assert nk.silu(x, out=there) is there
    np.testing.assert_array_equal(there.array, nk.silu(x))
    same = x.astype(np.float16)
    wanted = nk.silu(same)
    assert nk.silu(same, out=same) is same
    np.testing.assert_array_equal(same, wanted)


def test_int64_indices() -> None:
    probs = np.full((2, 4), 0.25, np.float32)
    rows = np.array([1, 0, 1])
    found = nk.sampling_from_probs(probs, rows, seed=3)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(
        found, nk.sampling_from_probs(probs, rows.astype(np.int32), seed=3)
    )
    table = _normal(5, 3)
    np.testing.assert_array_equal(nk.embedding(np.array([4, 0]), table), table[[4, 0]])
    with pytest.raises(UsageError, match="ids must fit in 32 bits, got 4294967296"):
        nk.embedding(np.array([2**32]), table)


def test_wrappers_take_foreign_arrays_in_plan_and_run() -> None:
    cache, q = _normal(2, 2, 4, 2, 32), _normal(2, 4, 32)
    table = [np.array(a) for a in ([0, 1, 2], [1, 0], [4, 3])]  # int64
    there = nk.BatchDecodeWithPagedKVCacheWrapper()
    there.plan(*map(Foreign, table), 4, 2, 32, 4)
    here = nk.BatchDecodeWithPagedKVCacheWrapper()
    here.plan(*(a.astype(np.int32) for a in table), 4, 2, 32, 4)
    wanted = here.run(q, cache)
    np.testing.assert_array_equal(there.run(Foreign(q), Foreign(cache)).array, wanted)
    pair = (Foreign(cache[:, 0]), Foreign(cache[:, 1]))
    np.testing.assert_array_equal(there.run(Foreign(q), pair).array, wanted)


def test_products_of_any_leading_axes() -> None:
    x, w = _normal(2, 3, 64), _normal(8, 64)
    flat = x.reshape(6, 64)
    np.testing.assert_array_equal(nk.matmul(x, w), nk.matmul(flat, w).reshape(2, 3, 8))
    qt = nk.quantize(Foreign(w), "q8")
    wanted = nk.qmatmul(flat, qt)
    np.testing.assert_array_equal(nk.qmatmul(x, qt), wanted.reshape(2, 3, 8))
    np.testing.assert_array_equal(nk.qmatmul(flat[0], qt), nk.qmatmul(flat[:1], qt)[0])
    out = np.full((2, 3, 8), np.nan, np.float32)
    assert nk.qmatmul(x, qt, out=out) is out
    np.testing.assert_array_equal(out, wanted.reshape(2, 3, 8))
    with pytest.raises(UsageError, match=r"out must have shape \(2, 3, 8\), got \(6, 8\)"):
        nk.qmatmul(x, qt, out=out.reshape(6, 8))


def test_flashinfers_names_of_arguments() -> None:
    x, weight = _normal(2, 8), _normal(8)
    wanted = nk.layernorm(x, weight, weight)
    np.testing.assert_array_equal(nk.layernorm(input=x, gemma=weight, beta=weight), wanted)
    np.testing.assert_array_equal(nk.silu_and_mul(input=x), nk.silu_and_mul(x))
    with pytest.raises(TypeError, match="unexpected keyword argument 'inputs'"):
        nk.silu(inputs=x)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        nk.silu(x, input=x)
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments but 3"):
        nk.silu(x, None, Foreign(x))


def test_sampling_without_a_seed_draws_anew() -> None:
    probs = np.full((1, 2**20), 1.0, np.float32)
    # two equal draws of 2**20 tokens: probability 1e-6
    assert nk.sampling_from_probs(probs)[0] != nk.sampling_from_probs(probs)[0]


def test_keys_and_values_of_any_stride() -> None:
    q, packed = _normal(5, 4, 32), _normal(7, 6, 32)
    k, v = packed[:, 2:4], packed[:, 4:]
    assert not k.flags.c_contiguous
    wanted = nk.single_prefill_with_kv_cache(q, k.copy(), v.copy(), causal=True)
    np.testing.assert_array_equal(nk.single_prefill_with_kv_cache(q, k, v, causal=True), wanted)
    heads_first = [a.transpose(1, 0, 2) for a in (k, v)]
    found = nk.single_prefill_with_kv_cache(q, *heads_first, causal=True, kv_layout="HND")
    np.testing.assert_array_equal(found, wanted)
    ragged = nk.BatchPrefillWithRaggedKVCacheWrapper()
    ragged.plan(np.array([0, 5], np.int32), np.array([0, 7], np.int32), 4, 2, 32, causal=True)
    np.testing.assert_array_equal(ragged.run(q, k, v), ragged.run(q, k.copy(), v.copy()))
    wide = _normal(7, 2, 64)[:, :, ::2]
    with pytest.raises(UsageError, match="k must be contiguous in the last axis"):
        nk.single_prefill_with_kv_cache(q, wide, v)


def test_errors_name_the_argument() -> None:
    x, weight = _normal(2, 8), _normal(8)
    with pytest.raises(TypeError, match="weight must have dtype float32, got float64"):
        nk.rmsnorm(x, Foreign(weight.astype(np.float64)))
    with pytest.raises(UsageError, match="x must be C-contiguous"):
        nk.rmsnorm(Foreign(_normal(8, 2).T), weight)
    with pytest.raises(TypeError, match="x must have dtype float32, got int64"):
        nk.rmsnorm(x.astype(np.int64), weight)
    frozen = x.copy()
    frozen.flags.writeable = False
    assert nk.rmsnorm(Foreign(frozen), weight).array.shape == (2, 8)
    for out in (frozen, Foreign(frozen)):
        with pytest.raises(UsageError, match="out is written to and must not be read-only"):
            nk.rmsnorm(x, weight, out=out)
    with pytest.raises(UsageError, match="x is written to and must not be read-only"):
        nk.fused_add_rmsnorm(Foreign(frozen), x, weight)


def test_devices_without_kernels_and_tensors_with_gradients_are_refused() -> None:
    class Metal(Foreign):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (8, 0)

    class Refuses(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("conjugated")

    class Differentiable(Foreign):
        requires_grad = True

        def __array_namespace__(self) -> Any:
            return self

        def is_grad_enabled(self) -> bool:
            return True

    for kind, message in (
        (Metal, "x must be in host memory or on a CUDA device, got .* type 8; copy it to the host"),
        (Refuses, "x, of type Refuses, cannot be read without a copy: conjugated"),
        (Differentiable, r"x requires gradients, .* pass x\.detach\(\)"),
    ):
        with pytest.raises(UsageError, match=message):
            nk.silu(kind(_normal(2, 2)))


def test_memory_is_shared_both_ways() -> None:
    array = _normal(3)
    assert np.shares_memory(native("x", Foreign(array)), array)
    assert np.shares_memory(exported(array, Foreign(array)).array, array)


def test_methods_with_fixed_options_take_any_array() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((5, 2, 32)).astype(np.float32) for _ in range(3))
    wrapper = nk.BatchPrefillWithRaggedKVCacheWrapper()
    rows = np.array([0, 5], np.int32)
    wrapper.plan(rows, rows, 2, 2, 32)
    wanted = wrapper.run(q, k, v, return_lse=True)
    found = wrapper.run_return_lse(*foreign((q, k, v)))
    assert isinstance(found[0], Foreign)
    assert _leaves(unwrapped(found)) == _leaves(wanted)

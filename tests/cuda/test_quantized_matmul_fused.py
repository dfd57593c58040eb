"""GEMV with fused prologue and epilogues: the bits of the separate ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
import nbflow_ptx
from nbflow_kernels.formats.layout_mma import unit_form
from nbflow_kernels.kv_cache import cuda as kvcache
from nbflow_kernels.kv_cache.cpu_codec import F16
from nbflow_kernels.kv_cache.cuda import format_type
from nbflow_kernels.kv_cache.formats import kv_format
from nbflow_kernels.position import cuda as position
from nbflow_kernels.quantized_matmul import cuda_fused
from nbflow_kernels.quantized_matmul.cuda import ActivationPrecision

pytestmark = pytest.mark.compiler
K = 300  # three chunks of a norm, the last one partial


def weights(format: str, n_rows: int, cupy: Any) -> nk.QuantTensor:
    rng = np.random.default_rng(n_rows)
    w = rng.standard_normal((n_rows, K), dtype=np.float32) / np.float32(K**0.5)
    return nk.quantize(w, format, quantizer="reference").to_device(cupy.zeros(1))


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def same(a: Any, b: Any) -> bool:
    return bool(a.get().tobytes() == b.get().tobytes())


@pytest.mark.parametrize(
    ("kind", "activations"),
    [("rms", "f32"), ("layer", "f32"), ("rms", "int8"), ("layer", "int8"), ("rms", "bf16")],
)
def test_norm_prologue(kind: str, activations: str, cupy: Any) -> None:
    source, w = cupy.asarray(numbers(5, K)), weights("q4_0", 37, cupy)
    weight, bias = cupy.asarray(numbers(K)), cupy.asarray(numbers(1, K)[0])
    rows = cupy.asarray(np.array([4, 0, 2], np.int32))
    x = source[np.array([4, 0, 2])]
    if kind == "rms":
        h = nk.rmsnorm(x, weight, eps=1e-5, offset=1.0)
    else:
        h = nk.layernorm(x, weight, bias, eps=1e-5)
    wanted = nk.qmatmul(h, w, activations=activations)
    written, out = cupy.empty((3, K), np.float32), cupy.empty((3, 37), np.float32)
    other = cupy.empty((3, K), np.float32)
    offset = 1.0 if kind == "rms" else 0.0
    norm = cuda_fused.Norm(kind, weight, bias, 1e-5, offset, written, (bias, weight, other))
    cuda_fused.fused_gemv(source, w, None, out, rows=rows, norm=norm, activations=activations)
    assert same(written, h)
    if kind == "rms":
        assert same(other, nk.rmsnorm(x, bias, eps=1e-5, offset=1.0))
    else:
        assert same(other, nk.layernorm(x, bias, weight, eps=1e-5))
    assert same(out, wanted)


@pytest.mark.parametrize("n_sms", [4, 132])  # several row tiles per thread block; a part of one
def test_gate_epilogue(n_sms: int, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(cupy.ndarray.__kernel_device__), "n_sms", n_sms)
    width = 2 * 64 + 21  # partial row tiles, three regions
    x, w = cupy.asarray(numbers(3, K)), weights("q3h", 2 * width, cupy)
    both = nk.qmatmul(x, w)
    wanted = nk.silu_and_mul(both)
    out, product = cupy.empty((3, width), np.float32), cupy.empty(both.shape, np.float32)
    for _ in range(2):  # arrival counters are reset
        cuda_fused.fused_gemv(x, w, None, product, epilogue=cuda_fused.GateEpilogue("silu", out))
        assert same(product, both)
        assert same(out, wanted)


def test_activation_epilogue_and_scaled_accumulation(cupy: Any) -> None:
    x, w, bias = cupy.asarray(numbers(2, K)), weights("q4_0", 37, cupy), cupy.asarray(numbers(37))
    plain = nk.qmatmul(x, w, bias=bias)
    out = cupy.empty((2, 37), np.float32)
    cuda_fused.fused_gemv(x, w, bias, out, epilogue=cuda_fused.Activation("gelu_tanh"))
    assert same(out, nk.gelu_tanh(plain))
    old = cupy.asarray(numbers(2, 37))
    out[...] = old
    cuda_fused.fused_gemv(x, w, bias, out, added=0.25)
    wanted = nk.moe_combine(
        plain,
        cupy.full((2, 1), 0.25, np.float32),
        cupy.asarray(np.array([[0], [1]], np.int32)),
        accumulate=True,
        out=old,
    )
    assert same(out, wanted)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_epilogue(kind: str, cupy: Any) -> None:
    x, w = cupy.asarray(numbers(3, K)), weights("q4_0", 150, cupy)
    weight, bias, old = (cupy.asarray(numbers(*s)) for s in ((150,), (151,), (3, 150)))
    bias = bias[:150]
    o = nk.qmatmul(x, w)
    if kind == "rms":
        normal = nk.rmsnorm(o, weight, eps=1e-6)
    else:
        normal = nk.layernorm(o, weight, bias, eps=1e-6)
    out, product = old.copy(), cupy.empty((3, 150), np.float32)
    norm = cuda_fused.Norm(kind, weight, bias, 1e-6, 0.0, out)
    cuda_fused.fused_gemv(x, w, None, product, epilogue=cuda_fused.NormEpilogue(norm, 1.0))
    assert same(product, o)
    assert np.array_equal(out.get(), old.get() + normal.get())
    cuda_fused.fused_gemv(x, w, None, product, epilogue=cuda_fused.NormEpilogue(norm))
    assert same(out, normal)


@pytest.mark.parametrize(
    ("format", "head_dim", "style", "of_all"),
    [("f16", 12, "half", False), ("q8_0", 160, "pairs", False), ("f16", 93, "half", True)],
)
def test_rope_kv_append_epilogue(
    format: str, head_dim: int, style: str, of_all: bool, cupy: Any
) -> None:
    """Two query heads, one key and value head: norms, RoPE, KV append; a row without a page."""
    D, n_tokens, page_size = head_dim, 3, 4
    x, w = cupy.asarray(numbers(n_tokens, K)), weights("q4_0", 4 * D, cupy)
    q_weight = cupy.asarray(numbers(2 * D if of_all else D))
    k_weight = cupy.asarray(numbers(1, D)[0])
    table = cupy.asarray(nk.rope_cos_sin_cache(64, D // 2, theta=1e4))
    positions = cupy.asarray(np.array([5, -1, 2], np.int32))
    requests = cupy.asarray(np.array([0, 0, 1], np.int32))
    indices = cupy.asarray(np.array([2, 0, 1], np.int32))
    indptr = cupy.asarray(np.array([0, 2, 3], np.int32))
    form = kv_format(format)
    shape = (3, 1, page_size, form.row_length(D))
    pages = [cupy.zeros(shape, form.dtype) for _ in range(4)]

    plain = nk.qmatmul(x, w)
    heads = plain.reshape(n_tokens, 4, D)
    q, k, v = heads[:, :2], heads[:, 2:3], heads[:, 3:]
    all_q = plain[:, : 2 * D] if of_all else q
    nk.rmsnorm(all_q, q_weight, eps=1e-6, out=all_q)
    nk.rmsnorm(k, k_weight, eps=1e-6, out=k)
    position.apply_rope_with_cos_sin_cache_inplace(positions, q, k, table, style == "half")
    kvcache.append_paged_kv_cache(
        k, v, requests, positions, *pages[:2], indices, indptr, "HND", (form.kind, form.kind)
    )
    out = cupy.empty((n_tokens, 4 * D), np.float32)
    placement = cuda_fused.KvPlacement(
        positions, requests, indices, indptr, "HND", positions, table, style == "half"
    )
    then = cuda_fused.RopeKvAppendEpilogue(
        placement, D, 0, 2, 1, *pages[2:], (form.kind, form.kind), q_weight, k_weight, 1e-6, 0.0,
        of_all,
    )  # fmt: skip
    cuda_fused.fused_gemv(x, w, None, out, epilogue=then)
    assert np.array_equal(out.get(), plain.get(), equal_nan=True)
    for wanted, got in zip(pages[:2], pages[2:], strict=True):
        assert wanted.get().any()
        assert same(wanted, got)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("then", [cuda_fused.RopeKvAppendEpilogue, cuda_fused.GateEpilogue])
def test_fused_kernels_keep_two_thread_blocks_per_sm(then: Any, arch: str) -> None:
    f16 = format_type(F16).replace(" ", "")
    macros: dict[Any, tuple[tuple[str, str], ...]] = {
        cuda_fused.RopeKvAppendEpilogue: (
            ("K_FORMAT", f16),
            ("V_FORMAT", f16),
            ("NORM_OF_ALL_HEADS", 0),
        ),
        cuda_fused.GateEpilogue: (("FUNCTION", "Silu"),),
    }
    form = unit_form(nk.FORMATS["q4_k"].integer_form)
    kernel = cuda_fused._kernel(
        form, 1, True, ActivationPrecision.F32_SUMS, 1, then.number, then.parameters, macros[then]
    )
    code, entry = kernel.compile(arch, "ptx")
    found = nbflow_ptx.lint(code.decode(), arch)[entry]
    assert found.registers is not None, found.registers_from
    assert found.registers <= 128  # two thread blocks of 256 threads per SM
    # the plain GEMV spills 28 bytes on sm_80 and 4 on sm_90, with a norm 60 and 12: the first unit
    # is in flight while tokens are normalized
    assert max(found.spill_stores or 0, found.spill_loads or 0) <= 64
    assert (found.fp64, found.local_accesses) == (0, 0)
    assert found.wide_loads > 0

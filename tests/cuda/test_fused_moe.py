"""Fused MoE in two kernels: the bits of the separate ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
import nbflow_ptx
from nbflow_kernels.formats.layout_mma import unit_form
from nbflow_kernels.moe import cuda as moe
from nbflow_kernels.moe import cuda_fused_moe
from nbflow_kernels.quantized_matmul.cuda_fused import Norm

pytestmark = pytest.mark.compiler


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def quantized(cupy: Any, *shape: int) -> nk.QuantTensor:
    w = numbers(*shape) / np.float32(shape[-1] ** 0.5)
    return nk.quantize(w, "q4_0", quantizer="reference").to_device(cupy.zeros(1))


def layer(
    cupy: Any, H: int, F: int, S: int, *, E: int = 6, here: tuple[int, int] | None = None,
    router: str = "float32", gated: bool = True, **options: Any,
) -> cuda_fused_moe.Experts:  # fmt: skip
    first, end = here or (0, E)
    n, weights = end - first, numbers(E, H)
    if router == "uint16":
        weights = (weights.view(np.uint32) >> 16).astype(np.uint16)
    shared = None
    if S:
        gate = cupy.asarray(numbers(H)) if gated else None
        shared = cuda_fused_moe.Shared((quantized(cupy, 2 * S, H),), quantized(cupy, H, S), gate)
    ups = nk.quantize(numbers(n, F, H)[:, ::-1], "q4_0", quantizer="reference").to_device(
        cupy.zeros(1)
    )
    return cuda_fused_moe.Experts(
        quantized(cupy, n, F, H), ups, quantized(cupy, n, H, F), "silu", cupy.asarray(weights), 2,
        first=first, shared=shared, **options,
    )  # fmt: skip


def one_by_one(cupy: Any, h: Any, layer: cuda_fused_moe.Experts) -> tuple[Any, Any]:
    """Return the logits and the output of the separate ops."""
    logits = nk.matmul(h, layer.router)
    scores, ids = nk.moe_routing(
        logits, layer.top_k, scoring=layer.scoring, correction_bias=layer.bias,
        n_groups=layer.n_groups, top_k_groups=layer.top_k_groups, group_score=layer.group_score,
        routed_scaling_factor=layer.routed_scaling_factor,
    )  # fmt: skip
    here = ids.get() - np.int32(layer.first)
    here[(here < 0) | (here >= layer.gates.shape[0])] = -1
    out = nk.fused_moe(h, layer.gates, layer.downs, scores, cupy.asarray(here), up=layer.ups)
    if layer.shared is not None:
        hidden = nk.silu_and_mul(nk.qmatmul(h, layer.shared.gate_up[0]))
        result = nk.qmatmul(hidden, layer.shared.down)
        if layer.shared.gate is not None:
            moe.scale_rows(h, layer.shared.gate, result)
        add(cupy, out, 1.0, result)
    return logits, out


def add(cupy: Any, to: Any, scale: float, x: Any) -> None:
    rows = cupy.asarray(np.arange(len(x), dtype=np.int32)[:, None])
    nk.moe_combine(x, cupy.full((len(x), 1), scale, np.float32), rows, accumulate=True, out=to)


def same(a: Any, b: Any) -> bool:
    return bool(a.get().tobytes() == b.get().tobytes())


def check(cupy: Any, x: np.ndarray, layer: cuda_fused_moe.Experts, normed: bool = True) -> None:
    tokens, n = cupy.asarray(x), len(x)
    assert layer.fits(type(tokens).__kernel_device__, n)
    norm, h, written = None, tokens, cupy.empty(x.shape, np.float32)
    if normed:
        norm = Norm("rms", cupy.asarray(numbers(x.shape[1])), None, 1e-5, out=written)
        h = nk.rmsnorm(tokens, norm.weight, eps=1e-5)
    wanted_logits, wanted = one_by_one(cupy, h, layer)
    logits, out = cupy.empty(wanted_logits.shape, np.float32), cupy.empty(x.shape, np.float32)
    layer.run(tokens, logits, out, norm=norm)
    assert same(logits, wanted_logits)
    assert same(out, wanted)
    assert not normed or same(written, h)
    residual = cupy.asarray(numbers(n, x.shape[1], 1)[..., 0])
    result = residual.copy()
    add(cupy, residual, 0.5, wanted)
    layer.run(tokens, logits, out, norm=norm, residual=result, scale=0.5)  # resets counters
    assert same(result, residual)


def test_group_routing_and_shared_expert_with_up_within_a_row_tile(
    cupy: Any,
) -> None:
    bias = cupy.asarray(numbers(6, 1)[:, 0])
    groups = {"n_groups": 3, "top_k_groups": 2, "group_score": "top2_sum"}
    options = {"scoring": "sigmoid", "bias": bias, "routed_scaling_factor": 1.5, **groups}
    check(cupy, numbers(3, 300), layer(cupy, 300, 40, 24, gated=False, **options))


def test_experts_of_a_rank_and_tokens_without_experts(cupy: Any) -> None:
    some, x = layer(cupy, 40, 24, 0, here=(2, 5)), numbers(3, 40)
    for nowhere in ([1], [0, 2]):
        x[nowhere] = np.nan
        check(cupy, x, some)


def test_split_columns_and_several_items_per_thread_block(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = type(cupy.ndarray.__kernel_device__)
    monkeypatch.setattr(device, "max_shared_bytes", 20_000)
    monkeypatch.setattr(device, "n_sms", 3)
    wide = layer(cupy, 40, 14 * 128 + 40, 0, E=2)  # seven units of two chunks, one of one
    shape = wide._shape(cupy.ndarray.__kernel_device__, 3)
    assert shape is not None
    assert shape.parts == 4
    check(cupy, numbers(3, 40), wide)


def test_more_tokens_than_fit_without_a_norm_and_a_router_in_bfloat16(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(cupy.ndarray.__kernel_device__), "max_shared_bytes", 19_500)
    wide = layer(cupy, 1160, 24, 0, E=20, router="uint16")  # more than one thread block's logits
    shape = wide._shape(cupy.ndarray.__kernel_device__, 3)
    assert shape is not None
    assert shape.up_tokens == 2
    check(cupy, numbers(3, 1160), wide, normed=False)


def test_unsupported_layers_do_not_fit(cupy: Any) -> None:
    device = cupy.ndarray.__kernel_device__
    some = layer(cupy, 40, 24, 0)
    assert some.fits(device, 8)
    assert not some.fits(device, 9)
    assert not layer(cupy, 36, 24, 0, router="uint16").fits(device, 1)  # partial loads


def test_kernels_keep_two_thread_blocks_per_sm() -> None:
    form = unit_form(nk.FORMATS["q4_k"].integer_form)
    up = cuda_fused_moe._up_kernel(form, 1, True, 1, "ROUTER_BF16", "bf16", "Silu")
    for kernel in (up, cuda_fused_moe._down_kernel(form, 1, True)):
        code, entry = kernel.compile("sm_90", "ptx")
        found = nbflow_ptx.lint(code.decode(), "sm_90")[entry]
        assert found.registers is not None, found.registers_from
        assert found.registers <= 128  # two thread blocks of 256 threads per SM
        # as in `gemv`: values that change once per row tile spill
        assert max(found.spill_stores or 0, found.spill_loads or 0) <= 64
        assert found.local_accesses == 0
        assert found.static_shared_bytes is None or found.static_shared_bytes <= 2048
        assert found.wide_loads > 0

"""Registers, spills and instructions of compiled attention, cache and sampling kernels."""

from __future__ import annotations

from typing import Any

import pytest

import nbflow_ptx
from nbflow_kernels.attention import cuda as attention
from nbflow_kernels.attention.cuda import flash_prefill_wgmma, quantized_kv
from nbflow_kernels.cuda import all_reduce
from nbflow_kernels.kv_cache import cuda as kvcache
from nbflow_kernels.kv_cache.cpu_codec import F16, KINDS
from nbflow_kernels.sampling import cuda as sampling

pytestmark = pytest.mark.compiler


def facts(kernel: Any, arch: str, most_spilled: int = 0) -> nbflow_ptx.KernelFacts:
    code, entry = kernel.compile(arch, "ptx")
    found = nbflow_ptx.lint(code.decode(), arch)[entry]
    assert found.registers is not None, found.registers_from
    assert (found.spill_stores or 0) + (found.spill_loads or 0) <= most_spilled
    return found


@pytest.mark.parametrize(
    ("D_qk", "D_vo", "exact", "many", "arch", "most_registers"),
    [
        (64, 64, True, False, "sm_90", 128),  # 4 thread blocks of 128 per multiprocessor
        (128, 128, True, False, "sm_90", 255),  # 2 (shared memory limit)
        (128, 128, False, False, "sm_80", 255),
        (128, 128, True, True, "sm_80", 255),  # 2
        (128, 128, False, True, "sm_90", 255),
        (192, 128, True, True, "sm_90", 255),
        (256, 256, True, False, "sm_90", 168),  # 3
        (576, 512, True, False, "sm_90", 255),  # 1, of latent vectors
    ],
)
def test_tensor_core_kernels_keep_sums_in_registers_and_copy_16_bytes(
    D_qk: int, D_vo: int, exact: bool, many: bool, arch: str, most_registers: int
) -> None:
    v_in_k = D_vo > attention.MAX_HEAD_COLUMNS
    kernel = attention.mma_kernel((F16, F16), D_qk, D_vo, exact, many, v_in_k)
    found = facts(kernel, arch)
    assert (found.fp64, found.local_accesses, found.stack_bytes) == (0, 0, 0)
    assert found.async_copies
    steps = D_qk // 16 * 2 * (4 if many else 1)  # Q K^T
    steps += 4 * ((D_vo // 8 if many else -(-D_vo // 32)) + 1)  # P V, and row sums
    # the compiler may duplicate a loop's body, but never computes less
    assert (found.tensor_core or 0) >= steps * (2 if exact else 1)
    assert found.registers is not None
    assert found.registers <= most_registers


@pytest.mark.parametrize(
    ("name", "quads", "copy", "arch", "most_registers"),
    [
        ("q8_0", 1, quantized_kv.RUNS, "sm_90", 168),  # 3 thread blocks per multiprocessor
        ("q4_0", 4, 8, "sm_80", 255),  # 2, of prompts
    ],
)
def test_kernels_of_block_formats_keep_sums_in_registers(
    name: str, quads: int, copy: int, arch: str, most_registers: int
) -> None:
    kernel = quantized_kv.kernel((KINDS[name],) * 2, (4, 4), quads, copy)
    # 16 vectors need all registers: addresses and ranges spill, outside the inner loops
    found = facts(kernel, arch, most_spilled=160 if quads == 4 else 0)
    assert (found.fp64, found.local_accesses) == (0, 0)
    # 32 keys and 128 columns: products with four vectors in pairs, of scores and of values
    assert (found.tensor_core or 0) >= quads * (2 * 8 + 2 * 8)
    assert found.async_copies
    assert found.registers is not None
    assert found.registers <= most_registers


@pytest.mark.parametrize(
    ("D", "exact", "warpgroups", "plain"),
    [
        (64, True, 2, False),
        (128, True, 2, True),
        (256, False, 2, True),
        (256, True, 1, False),
    ],
)
def test_prompts_by_wgmma_keep_sums_in_registers(
    D: int, exact: bool, warpgroups: int, plain: bool
) -> None:
    """At most 255 registers, with one thread block per multiprocessor."""
    found = facts(flash_prefill_wgmma.kernel((F16, F16), D, D, exact, warpgroups, plain), "sm_90a")
    assert (found.fp64, found.local_accesses, found.stack_bytes) == (0, 0, 0)
    products = (D // 16 + 64 // 16) * (2 if exact else 1)  # of keys, of values
    assert (found.tensor_core or 0) >= 2 * products  # a split's first chunk, and the others
    assert found.async_copies


def test_fallback_kernel_and_merges_have_no_float64() -> None:
    for kernel in (
        attention.simt_kernel((KINDS["q8_0"], KINDS["q4_0"])),
        attention.merge_many_kernel,
    ):
        assert facts(kernel, "sm_80").fp64 == 0


def test_appending_moves_16_bytes_at_once() -> None:
    found = facts(kvcache.append_kernel((F16, F16)), "sm_90")
    assert (found.fp64, found.stack_bytes) == (0, 0)
    assert found.wide_loads > 0
    assert 8 in (found.global_stores or {})  # four float16
    assert facts(kvcache.append_kernel((KINDS["q8_0"], KINDS["q4_0"])), "sm_80").fp64 == 0


def test_samplers_stay_in_registers() -> None:
    """1024 threads per row have 64 registers each."""
    for kernel in (sampling.sample.kernel, sampling.sample_logits.kernel):
        found = facts(kernel, "sm_80")
        assert found.registers is not None
        assert found.registers <= 64


def test_sums_over_ranks_move_16_bytes_at_once() -> None:
    for name, arch in (("one_shot", "sm_80"), ("two_shot", "sm_90")):
        found = facts(all_reduce.kernel_of(name, "uint16"), arch)
        assert (found.fp64, found.stack_bytes) == (0, 0)
        assert found.wide_loads > 0
        assert 16 in (found.global_stores or {})

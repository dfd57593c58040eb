"""Compiled code of the kernels: registers, widths of accesses, no float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nbflow_kernels as nk
import nbflow_ptx
from nbflow_kernels.activation import cuda as activation
from nbflow_kernels.formats import cuda_dequantize, cuda_gather
from nbflow_kernels.formats.float8 import FLOAT8
from nbflow_kernels.formats.layout_mma import unit_form
from nbflow_kernels.kv_cache import cuda_nvfp4
from nbflow_kernels.linear_attention import cuda as linear_attention
from nbflow_kernels.logits import cuda as logits
from nbflow_kernels.matmul import cuda_wgmma
from nbflow_kernels.norm import cuda as norm
from nbflow_kernels.position import cuda as position
from nbflow_kernels.quantized_matmul import cuda_gemm_wgmma
from nbflow_kernels.sparse import cuda as sparse
from nbflow_kernels.state_format import F32
from nbflow_kernels.state_space import cuda as state_space

pytestmark = pytest.mark.compiler
E5M2 = FLOAT8["f8_e5m2"]
HALVES = ", i32 gate, i32 up"
XIELU = ", f32 alpha_p, f32 alpha_n, f32 beta, f32 eps"
# kernel, bytes of its accesses besides those of 16, most registers
HOT: dict[str, tuple[Any, set[int], int]] = {
    # a row of 4096: 256 threads with 16 numbers each, twice where there is a residual
    "rmsnorm": (lambda: norm._instance("rms", 256, 4, True), set(), 64),
    "rmsnorm of heads": (lambda: norm._instance("rms", 32, 4, True), set(), 64),
    "layernorm": (lambda: norm._instance("layer", 256, 4, True), set(), 64),
    "SwiGLU": (lambda: activation._kernel("gated", "Silu", True, HALVES), set(), 32),
    "GeGLU": (lambda: activation._kernel("gated", "GeluTanh", True, HALVES), set(), 32),
    "GELU": (lambda: activation._kernel("plain", "Gelu", True, ""), set(), 32),
    "rope of halves": (lambda: position._rope(True, True), {4}, 40),  # 4: the position
    "rope of pairs": (lambda: position._rope(False, True), {4, 8}, 40),  # 8: two cosines
    "embedding": (lambda: cuda_gather._gather(0, True, False), {4}, 32),  # 4: the token
}


def _facts(kernel: Any, arch: str) -> nbflow_ptx.KernelFacts:
    code, entry = kernel.compile(arch, "ptx")
    facts = nbflow_ptx.lint(code.decode(), arch)[entry]
    assert facts.registers is not None, facts.registers_from
    assert (facts.spill_stores, facts.spill_loads) == (0, 0)
    return facts


@pytest.mark.parametrize("name", HOT)
def test_hot_kernels_move_16_bytes_at_once_and_keep_rows_in_registers(name: str) -> None:
    make, others, most_registers = HOT[name]
    facts = _facts(make(), "sm_90")
    assert facts.fp64 == 0
    assert (facts.local_accesses, facts.stack_bytes) == (0, 0)
    assert set(facts.global_loads or {}) | set(facts.global_stores or {}) <= {16} | others
    assert facts.wide_loads > 0
    assert facts.registers is not None
    assert facts.registers <= most_registers


@pytest.mark.parametrize(
    "kernel",
    [
        sparse._sparse_matmul, logits._soft_cap, norm._linear, position._alibi,
        norm._gated_instance(256, 2, True, True), norm._instance("rms", 32, 1, True, E5M2),
        position._encode(False, E5M2), cuda_nvfp4._append,
        linear_attention._instance(16, F32), state_space._instance(32, 4, False, F32),
        state_space._instance(16, 1, True, F32),
        activation._kernel("xielu", "", True, XIELU),
    ],
    ids=repr,
)  # fmt: skip
def test_float32_kernels_have_no_float64(kernel: Any) -> None:
    assert _facts(kernel, "sm_80").fp64 == 0


@pytest.mark.parametrize("name", ["q4_k", "q3h", "q8", "mxfp4"])
def test_decoders_have_no_float64_and_no_local_memory(name: str) -> None:
    facts = _facts(cuda_dequantize._decoder(nk.FORMATS[name], False), "sm_90")
    assert (facts.fp64, facts.local_accesses) == (0, 0)


def test_sums_of_rows_are_float64_but_not_what_is_done_for_each_logit() -> None:
    facts = _facts(logits._log_softmax, "sm_80")
    assert facts.stack_bytes == 0
    assert facts.registers is not None
    assert facts.registers <= 64  # two thread blocks of 512 on a multiprocessor


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("name", ["rows of bfloat16", "q8_0"])
def test_products_by_wgmma_keep_both_sums_in_registers(name: str, cluster: int) -> None:
    """Register budget of 255: two accumulators of 96 or 64, and the weights of two steps."""
    if name.startswith("rows"):
        kernel = cuda_wgmma._kernel(2, "bf16", 1, 192, cluster)
    else:
        form = unit_form(nk.FORMATS[name].integer_form)
        kernel = cuda_gemm_wgmma.kernel(
            form, cuda_wgmma.Tiling(cuda_gemm_wgmma.MAX_TOKENS, cluster)
        )
    facts = _facts(kernel, "sm_90a")
    assert (facts.fp64, facts.local_accesses, facts.stack_bytes) == (0, 0, 0)
    assert facts.tensor_core == 4 + 3  # a step of 64 columns; fence, commit, wait
    assert (facts.async_copies or 0) + facts.wide_loads > 0


def test_sources_need_no_headers_of_cuda() -> None:
    """NVRTC alone has none: they are another package, which a machine may lack."""
    sources = [p for p in Path(nk.__file__).parent.rglob("*.cu*") if p.suffix in (".cu", ".cuh")]
    assert len(sources) > 50
    assert [p.name for p in sources if "#include <" in p.read_text(encoding="utf-8")] == []

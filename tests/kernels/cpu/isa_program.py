"""Prints digests of results that must not depend on the processor; run by test_isa.py."""

from __future__ import annotations

import hashlib
import json
import sys

import numba
import numpy as np
import toolkit_kernels as kernels
from llvmlite import binding

import nbflow_kernels as nk
from nbflow_kernels.cpu import isa, jit, register_tiles, simd, simd_memory
from nbflow_kernels.cpu.interpreter.memory import f32_to_bf16


@jit.kernel
def widen(halves, n, wide):  # type: ignore[no-untyped-def]
    for i in range(0, n, 32):
        simd.store_f32(wide + 2 * i, simd.load_f16(halves + i))
    simd_memory.write_f32(wide, simd.half_to_float(simd_memory.read_u16(halves)))
    simd_memory.write_f32(wide + 4, simd_memory.read_f16(halves + 2))


@jit.kernel
def narrow(wide, n, halves, pairs):  # type: ignore[no-untyped-def]
    for i in range(0, n, 64):
        v = simd.load_f32(wide + i)
        simd_memory.store_f16(halves + i // 2, v)
        simd.store_i32(pairs + i, register_tiles.to_pairs(v, v))
    simd_memory.write_f16(halves, simd_memory.read_f32(wide))


def conversions() -> None:
    """Compare every float16, and the floats where rounding turns, with NumPy."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    wide = np.empty(1 << 16, np.float32)
    widen(halves.ctypes.data, halves.nbytes, wide.ctypes.data)
    right = halves.view(np.float16).astype(np.float32)
    nan = np.isnan(right)
    assert np.array_equal(wide.view(np.uint32)[~nan], right.view(np.uint32)[~nan])
    assert np.isnan(wide[nan]).all()
    with np.errstate(all="ignore"):
        between = right[:-1] / 2 + right[1:] / 2  # halfway between neighbours, and next to that
    around = [between, np.nextafter(between, np.float32(9e9)), np.nextafter(between, -between)]
    floats = np.concatenate([right, *around, np.float32([7e4, -1e38, 1e-45, 65519.996])])
    floats = np.resize(floats, floats.size // 16 * 16 + 16).astype(np.float32)
    out = np.empty(floats.size, np.uint16)
    pairs = np.empty(2 * floats.size, np.uint16)
    narrow(floats.ctypes.data, floats.nbytes, out.ctypes.data, pairs.ctypes.data)
    with np.errstate(all="ignore"):
        want = floats.astype(np.float16)
    nan = np.isnan(want)
    assert np.array_equal(out[~nan], want.view(np.uint16)[~nan])
    assert np.isnan(out.view(np.float16)[nan]).all()
    finite = np.isfinite(floats) & ((np.abs(floats) > 1.2e-38) | (floats == 0))
    assert np.array_equal(pairs[::2][finite], f32_to_bf16(floats)[finite])
    assert np.isnan((pairs[::2][np.isnan(floats)].astype(np.uint32) << 16).view(np.float32)).all()


INT8 = {
    # 8-bit codes, whose products 16-bit sums do not hold: GEMV, GEMV of several rows, GEMM; pairs
    "generic": (("q8_0", 1), ("q8_0", 5), ("q8_0", 20), ("q3h", 1), ("q3_k", 9)),  # scales in codes
    "avx2": (("q8_0", 1), ("q8_0", 20), ("q3h", 1), ("q2t", 1), ("q3t", 1)),  # bit streams
}
"""Formats and numbers of rows of the products with int8 activations, by processor."""


def products(processor: str) -> dict[str, str]:
    """Return digests of products on one of the processors of `INT8`."""
    digests = {f"{name} {n}": _digest(_int8(name, n)) for name, n in INT8[processor]}
    return digests | (float_products() if processor == "avx2" else {})


def _int8(name: str, n_rows: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    w = rng.standard_normal((35, 288), dtype=np.float32)
    x = rng.standard_normal((n_rows, 288), dtype=np.float32)
    w[0], x[0] = 9.0, -3.0  # every code and every activation at its limit
    return nk.qmatmul(x, nk.quantize(w, name, quantizer="reference"), activations="int8")


def float_products() -> dict[str, str]:
    """Return digests of products in register tiles, which are half as wide without AVX-512."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 203), dtype=np.float32)
    w = rng.standard_normal((18, 203), dtype=np.float32)
    half, q4 = (nk.quantize(w, name, quantizer="reference") for name in ("f16", "q4"))
    found = {
        "f16": nk.qmatmul(x, half), "f16 GEMV": nk.qmatmul(x[:1], half),
        "f16 in bfloat16": nk.qmatmul(x, half, activations="bf16"),
        "q4": nk.qmatmul(x, q4), "f32": nk.matmul(x, w),
    }  # fmt: skip
    return {name: _digest(y) for name, y in found.items()}


def _digest(y: np.ndarray) -> str:
    return hashlib.sha256(y.tobytes()).hexdigest()


def arm_instructions() -> int:
    """Compile kernels of vector functions for Arm; return the number of fused multiply-adds.

    Only for a processor without features: other code names instructions of x86.
    """
    n = 0
    for kernel in (kernels.use_simd, kernels.use_int8, kernels.use_tiles_int8):
        again = numba.njit(error_model="numpy")(kernel.py_func)  # cached kernels have no text
        again.compile((numba.int64,) * 4)
        (text,) = again.inspect_llvm().values()
        n += _for_arm(text).count("\tfmla\t")
    return n


def _for_arm(text: str) -> str:
    kept = [line for line in text.splitlines() if not line.startswith("target ")]
    parsed = binding.parse_assembly("\n".join(kept))
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple("aarch64-linux-gnu").create_target_machine(opt=2)
    return str(machine.emit_assembly(parsed))


if __name__ == "__main__":
    conversions()
    plain = "sse2" not in isa.features()
    report = {
        "features": sorted(isa.features()),
        "wide_registers": register_tiles.has_wide_registers(),
        "results": products("generic" if plain else "avx2"),
        "fused_on_arm": arm_instructions() if plain else 0,
    }
    json.dump(report, sys.stdout)

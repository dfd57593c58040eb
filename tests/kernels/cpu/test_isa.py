"""The same bits on other processors, and code for Arm, which is compiled but not run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import isa_program
import pytest
from llvmlite import binding, ir

import nbflow_kernels
from nbflow_kernels.cpu import float16, isa, simd, simd_int8

ROOT = Path(nbflow_kernels.__path__[0]).parent
AVX2 = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt"


def _start(cpu: str, features: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    program = str(Path(__file__).with_name("isa_program.py"))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, program], env=environment, **pipes)  # type: ignore[call-overload,no-any-return]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of this architecture")
def test_same_bits_with_avx512_avx2_and_nothing() -> None:
    """Products with int8 activations and in register tiles, and all conversions of 16-bit floats.

    With AVX2 there are 16 registers of 8 lanes: one chain after the other, no products of pairs.
    """
    running = [_start("haswell", AVX2), _start("generic", "")]
    here = {processor: isa_program.products(processor) for processor in ("avx2", "generic")}
    isa_program.conversions()
    done = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, done, strict=True):
        assert process.returncode == 0, errors[-2000:]
    avx2, generic = (json.loads(printed) for printed, _ in done)
    assert "avx2" in avx2["features"]
    assert not any(name.startswith("avx512") for name in avx2["features"])
    assert not avx2["wide_registers"]
    assert generic["features"] == ["x86"]
    assert avx2["results"] == here["avx2"]
    assert generic["results"] == here["generic"]
    assert generic["fused_on_arm"] > 20  # multiply-adds in code for Arm


# ---- code for Arm -----------------------------------------------------------------------------


def _compile(text: str, features: str) -> str:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    parsed = binding.parse_assembly(text)
    parsed.verify()
    machine = binding.Target.from_triple("aarch64-linux-gnu").create_target_machine(
        cpu="generic", features=features, opt=2
    )
    return str(machine.emit_assembly(parsed))


_ACC, _BYTES = simd.i32x16.llvm, simd.i8x64.llvm
_HALVES = ir.VectorType(ir.IntType(16), 16)


@pytest.mark.parametrize(
    ("features", "instruction"), [("dotprod", "sdot"), ("i8mm", "usdot"), ("neon", "sshll")]
)
@pytest.mark.parametrize("seven", [False, True])
def test_byte_products_on_arm(features: str, instruction: str, seven: bool) -> None:
    known = frozenset({"aarch64", features})

    def emit(builder, args):  # type: ignore[no-untyped-def]
        return simd_int8.emit_dot(builder, *args, seven, known)

    text = _in_module([_ACC, _BYTES, _BYTES], emit, f"+{features}")
    assert text.count(instruction) >= 4
    assert "\tbl\t" not in text  # no call of a library


def test_conversions_on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "features", lambda: frozenset({"aarch64"}))
    text = _in_module([_HALVES], lambda b, a: float16.emit_widen(b, a[0]), "")
    assert "fcvtl" in text
    text = _in_module([simd.f32x16.llvm], lambda b, a: float16.emit_narrow(b, a[0]), "")
    assert "fcvtn" in text


def _in_module(types, emit, features: str) -> str:  # type: ignore[no-untyped-def]
    """Compile ``f(*pointers, to)`` that stores what `emit` makes of the values at the pointers."""
    module = ir.Module()
    pointers = [t.as_pointer() for t in types]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*pointers, ir.IntType(64)]), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    value = emit(builder, [builder.load(p) for p in function.args[:-1]])
    builder.store(value, builder.inttoptr(function.args[-1], value.type.as_pointer()))
    builder.ret_void()
    return _compile(str(module), features)

"""Kernels as plain Python: fallbacks of the vector functions, ops and the engine with JIT off."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import toolkit_kernels as kernels
from mpirun import PYTHONPATH
from numba.core.extending import _Intrinsic
from synthetic_formats import FORMATS as SYNTHETIC

import nbflow_kernels
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.program import build
from nbflow.spec import resolve
from nbflow_kernels import op_registry
from nbflow_kernels.cpu.interpreter import FALLBACKS, memory, simd, simd_int8
from nbflow_kernels.cpu.interpreter.atomics import Hook
from nbflow_kernels.formats.layout_cpu import packed_form

ROOT = Path(nbflow_kernels.__path__[0]).parents[1]


def _intrinsics() -> list[tuple[str, str]]:
    """Return module and name of every intrinsic of the package."""
    found = set()
    for module in pkgutil.walk_packages(nbflow_kernels.__path__, "nbflow_kernels."):
        if module.name == "nbflow_kernels.torch":  # has no kernels and needs PyTorch
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, _Intrinsic):
                found.add((value._defn.__module__, value._name))
    return sorted(found)


@pytest.mark.parametrize(("module", "name"), _intrinsics())
def test_intrinsic_has_a_fallback_that_a_kernel_here_compares(module: str, name: str) -> None:
    fallback = getattr(importlib.import_module(FALLBACKS[module]), name.lstrip("_"))
    assert fallback.__doc__
    some = kernels.use_form(packed_form(SYNTHETIC["like_q4_k"].integer_form))
    used: set[str] = set()
    for kernel in (some, *vars(kernels).values()):
        if hasattr(kernel, "py_func"):
            used |= set(kernel.py_func.__code__.co_names)
    assert name.lstrip("_") in used


def _assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    """Compare bits; the payload of NaN does not count."""
    a, b = found.view(np.uint32), wanted.view(np.uint32)
    both_nan = np.isnan(found.view(np.float32)) & np.isnan(wanted.view(np.float32))
    different = np.flatnonzero((a != b) & ~both_nan)
    assert different.size == 0, f"words {different[:20]}"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "name",
    [
        "simd",
        "memory",
        "atomics",
        "int8",
        "tiles_int8",
        "tiles",
        "tiles_lower",
        "shuffle",
        "compare",
        "narrow",
        "double",
        "accumulators",
        "columns",
    ],
)
def test_fallbacks_give_the_same_bits(name: str, seed: int) -> None:
    kernel = getattr(kernels, f"use_{name}")
    inputs = kernels.operands(seed, memory.f32_to_bf16)
    likes = [np.empty(0, t) for t in (np.float32, np.int16, np.uint16, np.int32)]
    likes = likes if name == "tiles" else []
    outs = [np.zeros(4096, np.uint8) for _ in range(2)]
    for run, out in zip((kernel, kernels.stepped(kernel)), outs, strict=True):
        run(*(array.ctypes.data for array in inputs), out.ctypes.data, *likes)
    assert outs[0].any()
    _assert_same(outs[1], outs[0])


def test_address_and_calls() -> None:
    absolute = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value
    row_range = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)
    trampoline = row_range(lambda args, start, stop: args + 10 * start + stop)
    pointer = ctypes.cast(trampoline, ctypes.c_void_p).value
    x, outs = np.arange(16, dtype=np.float32), np.zeros((2, 16), np.float32)
    for find, call, out in (
        (kernels.use_address, kernels.use_calls, outs[0]),
        (kernels.stepped(kernels.use_address), kernels.stepped(kernels.use_calls), outs[1]),
    ):
        find(x, out.ctypes.data)
        assert out.tolist() == x.tolist()
        call(absolute, pointer, out.ctypes.data)
        assert out[:2].tolist() == [7.0, 59.0]


def test_calls_of_hooks() -> None:
    calls = []
    hook = Hook(lambda *arguments: calls.append(arguments))
    pointer = ctypes.cast(hook, ctypes.c_void_p).value
    for run in (kernels.use_hook, kernels.stepped(kernels.use_hook)):
        run(pointer, 2**40)
    assert calls == [(2**40, *range(1, 9))] * 2


_VARIANT = """
import numpy as np, nbflow_kernels as nk
from nbflow_kernels.attention import reference
def logits(params, logit, batch, qo, kv, head, g): return params[0] * logit + kv
def mask(params, batch, qo, kv, head, g): return kv != 2
def output(params, x, batch, qo, head): return x + head
variant = nk.AttentionVariant(logits, mask, output, (0.5,), False)
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((n, 2, 16)).astype(np.float32) for n in (1, 5, 5))
got = nk.single_prefill_with_kv_cache(q, k, v, variant=variant)
want = reference.single_prefill_with_kv_cache(q, k, v, variant=variant)
print(np.abs(got - want).max())
"""


def test_variants_without_compiling() -> None:
    assert float(_without_compiling(_VARIANT)) < 1e-5  # weights up to 5, four values below 3


def test_fma_rounds_once() -> None:
    """Sums that a detour through float64 would round twice: halfway, but for the last bit."""
    a = simd.splat(1.0 + 2.0**-12)
    c = simd.splat(2.0**-60)
    exact = 1.0 + 2.0**-11 + 2.0**-24  # halfway between two float32
    assert simd.fma(a, a, c)[0] == np.float32(1.0 + 2.0**-11 + 2.0**-23)
    assert simd.fma(a, a, simd.splat(-(2.0**-60)))[0] == np.float32(1.0 + 2.0**-11)
    assert simd.fma(a, a, simd.splat(0.0))[0] == np.float32(exact)


@pytest.mark.parametrize("name", [*SYNTHETIC, "nf4_b64", "q2t_b256"])
def test_fallbacks_read_packed_weights_to_the_bit(name: str, rng: np.random.Generator) -> None:
    form = packed_form((SYNTHETIC.get(name) or nbflow_kernels.FORMATS[name]).integer_form)
    stored = rng.integers(0, 256, form.block_bytes).astype(np.uint8)
    if form.d_type in ("f16", "f32"):  # ordinary numbers
        numbers = rng.standard_normal(form.d_bytes // (2 if form.d_type == "f16" else 4))
        dtype = np.float16 if form.d_type == "f16" else np.float32
        stored[: form.d_bytes] = numbers.astype(dtype).view(np.uint8)
    # values of each code vector, and sums of each unit with a trellis
    outs = np.zeros((2, 256 * form.block // 4 + 128 * form.block // form.unit), np.uint8)
    kernel = kernels.use_form(form)
    for run, out in zip((kernel, kernels.stepped(kernel)), outs, strict=True):
        run(stored.ctypes.data, out.ctypes.data)
    assert outs[0].any()
    _assert_same(outs[1], outs[0])


def test_fallbacks_read_blocks_by_the_type_of_a_scalar() -> None:
    inputs = kernels.operands(1, memory.f32_to_bf16)
    f, b = inputs[0].ctypes.data, inputs[2].ctypes.data
    outs = np.zeros((2, 640), np.uint8)
    for run, out in zip(
        (kernels.use_blocks, kernels.stepped(kernels.use_blocks)), outs, strict=True
    ):
        run(np.int8(0), np.int16(0), f, b, out.ctypes.data)
    _assert_same(outs[1], outs[0])


def test_mistakes_are_caught() -> None:
    fallback = simd_int8
    vector = simd.load_f32(np.zeros(16, np.float32).ctypes.data)
    with pytest.raises(ValueError, match="read-only"):
        vector[0] = 1.0
    with pytest.raises(IndexError, match="used 64 as an address"):
        simd.load_f32(64)
    with pytest.raises(TypeError, match="lanes do not match"):
        simd.add(vector, simd.splat_i32(1))
    with pytest.raises(ValueError, match="below 128"):
        fallback.dot_u7_i8(simd.splat_i32(0), fallback.splat_bytes(200), fallback.splat_bytes(1))


def _without_compiling(program: str, *arguments: str) -> str:
    """Return what a program prints with JIT off."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


_CASES = """
import json
from nbflow_kernels import op_registry
from nbflow_kernels.testing import checks
# minutes of encoding: these formats search for scales, one trial after the other
slow = ("iq", "tq", "mxfp", "nvfp", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "two_threads", "long")
chosen = {}
for case in op_registry.all_cases():
    if not case.timed and not case.name.startswith(slow):
        chosen.setdefault(case.op, []).append(case)
print(json.dumps({case.id: checks.check(case) for some in chosen.values() for case in some[:4]}))
"""


def test_every_op_as_python() -> None:
    """Some cases of each op against the reference."""
    errors: dict[str, float] = json.loads(_without_compiling(_CASES))
    assert max(errors.values()) <= 1.0
    with_cases = {case.op for case in op_registry.all_cases()}
    assert {name.split("-")[0] for name in errors} == with_cases


_DECODE = """
import json, sys, numpy as np, nbflow
with nbflow.load(sys.argv[1], kv="f32", threads=2) as model:
    prompt = json.loads(sys.argv[2])
    new = [int(i) for i in model.generate(prompt, max_tokens=3, ignore_eos=True).ids]
    logits = model.logits([*prompt, *new])
print(json.dumps([new, logits.tolist()]))
"""


def test_engine_decodes_as_python() -> None:
    """Logits of a quantized model as the NumPy executor has them, and the tokens that follow."""
    path = Path(__file__).parents[2] / "golden" / "llama2c" / "v2_unshared.bin"
    prompt = [1, 260, 7, 301, 44, 44, 269, 3, 99]
    new, logits = json.loads(_without_compiling(_DECODE, str(path), json.dumps(prompt)))
    assert new == np.argmax(logits, 1)[len(prompt) - 1 : -1].tolist()
    program = build(resolve(path).spec)
    with open_weights(path) as file:
        reference = ReferenceExecutor(program, WeightLoader(program, file, None))
    wanted = reference.logits(np.array([*prompt, *new]))
    # float32 on both sides, a few hundred additions one after the other: 300 * 2**-24 = 2e-5
    assert np.abs(np.array(logits) - wanted).max() < 2e-5 * np.abs(wanted).max()

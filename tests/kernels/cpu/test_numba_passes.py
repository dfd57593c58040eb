"""Kernels compile to the same code without the passes that have nothing to do."""

from __future__ import annotations

import re
import sys
from functools import reduce

import numba
import numpy as np
import pytest
from numba.core import base, codegen, compiler, event, postproc, runtime, types, untyped_passes
from numba.core.registry import cpu_target
from numba.core.runtime import _nrt_python
from numba.core.types.functions import Function

from nbflow_kernels.cpu import jit, numba_compile_time, numba_lowering, numba_passes, simd


def scaled_sum(a, n, out):
    total = 0.0
    for i in range(n):
        x = a[i]
        if x < 0.0:
            total -= x * 2.0
        elif i % 3 == 0:
            total += max(x, 1.0)
            n -= 1
    view = a[1:n]
    out[0], out[1] = total, view[0]


def comprehension(a, n, out):
    squares = [a[i] * a[i] for i in range(n)]
    out[0] = squares[n - 1]


def closure(a, n, out):
    factor = 3.0

    def times(x):
        return x * factor

    out[0] = times(a[0])


def reduction(a, n, out):
    out[0] = reduce(lambda x, y: x + 2.0 * y, a)


def whole_arrays(a, n, out):
    out[:] = a[:2] * 2.0 + np.array([1.0, 4.0])


def generator(a, n, out):
    for i, x in enumerate(_odd(a)):
        out[i] = x


@jit.device_function
def _odd(a):
    for i in range(1, a.shape[0], 2):
        yield a[i]


def _code(function: object, **options: object) -> str:
    """Return the LLVM code of a function after optimization, with neutral names."""
    compiled = numba.njit(fastmath=jit.FAST_MATH, **jit._OPTIONS, **options)(function)  # type: ignore[call-overload]
    compiled.compile((types.float64[::1], types.int64, types.float64[::1]))
    (text,) = compiled.inspect_llvm().values()
    body = re.search(r"^define .*?^}", text, re.DOTALL | re.MULTILINE)
    assert body
    code = re.sub(r'@"?[\w.$<>:]+"?', "@name", body[0])
    values = list(dict.fromkeys(re.findall(r"%[\w.]*\d[\w.]*", code)))
    return re.sub(r"%[\w.]*\d[\w.]*", lambda found: f"%{values.index(found[0])}", code)


def test_code_is_that_of_numbas_passes(monkeypatch):
    # kernels' libraries optimize in other steps
    monkeypatch.setattr(jit.KernelCompiler, "library", codegen.JITCodeLibrary)
    shorter = _code(scaled_sum, pipeline_class=jit.KernelCompiler)
    assert "fadd" in shorter
    assert shorter == _code(scaled_sum, pipeline_class=compiler.Compiler)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (scaled_sum, (17.0, 1.0)),
        (comprehension, (1.0, np.nan)),
        (closure, (-12.0, np.nan)),
        (reduction, (6.0, np.nan)),
        (whole_arrays, (-7.0, 6.0)),
        (generator, (1.0, 1.0)),
    ],
)
def test_kernels_with_all_that_the_passes_seek(function, wanted):
    a, out = np.array([-4.0, 1.0, 3.0, 1.0]), np.full(2, np.nan)
    if function is scaled_sum:
        wanted = _in_python(a)
    jit.kernel(function)(a, 4, out)
    np.testing.assert_array_equal(out, wanted)


def _in_python(a: np.ndarray) -> np.ndarray:
    out = np.full(2, np.nan)
    scaled_sum(a, 4, out)
    return out


def test_an_entry_point_is_made_for_the_first_call_from_python():
    compiled, kinds = jit.kernel(scaled_sum), (types.float64[::1], types.int64, types.float64[::1])
    compiled.compile_code(kinds)
    assert not compiled._entries
    a, out = np.array([-4.0, 1.0, 3.0, 1.0]), np.full(2, np.nan)
    before = sys.getrefcount(a)
    for _ in range(3):
        compiled(a, 4, out)
    assert tuple(out) == (9.0, 1.0)
    assert sys.getrefcount(a) == before
    assert list(compiled._entries) == list(compiled.overloads) == [kinds]
    assert compiled._entries[kinds] is compiled.compile(kinds)
    with pytest.raises(TypeError, match="arg"):
        compiled(a)


def test_passes_are_left_out_by_what_a_function_contains():
    def kinds(function: object) -> list[str]:
        contexts = cpu_target.typing_context, cpu_target.target_context
        state = compiler.Compiler(*contexts, None, (), None, compiler.Flags(), {}).state
        pipeline = compiler.DefaultPassBuilder.define_nopython_pipeline(state)
        identity = numba.core.bytecode.FunctionIdentity.from_function(function)
        code = numba.core.bytecode.ByteCode(identity)
        return [kind.__name__ for kind, _ in numba_passes.kernel_passes(pipeline.passes, code)]

    closures = untyped_passes.InlineClosureLikes.__name__
    assert closures not in kinds(scaled_sum)
    for function in (comprehension, closure, reduction):
        assert closures in kinds(function)
    assert {"KernelRewrites", "NopythonRewrites"} & {*kinds(scaled_sum)} == {"KernelRewrites"}


def test_other_functions_keep_numbas_post_processing():
    function = compiler.run_frontend(scaled_sum)
    postproc.PostProcessor(function).run()
    assert set(function.block_entry_vars) == set(function.blocks.values())


def test_sizes_and_listeners_are_those_of_numba():
    context = cpu_target.target_context
    context.refresh()
    for kind in (types.int8, types.float32, types.float64, types.UniTuple(types.int32, 3)):
        llvm_type = context.get_value_type(kind)
        for _ in range(2):
            assert context.get_abi_sizeof(llvm_type) == numba_compile_time.numba_abi_size(
                context, llvm_type
            )
    assert base.BaseContext.get_abi_sizeof is not numba_compile_time.numba_abi_size
    with event.install_recorder("numba:run_pass") as seen:
        numba.njit(scaled_sum).compile((types.float64[::1], types.int64, types.float64[::1]))
    assert {e.data["name"].split()[0] for _, e in seen.buffer} >= {"nopython_type_inference"}


def test_an_intrinsic_found_again_has_the_type_that_numba_finds():
    context = cpu_target.typing_context
    context.refresh()
    kind = context.resolve_value_type(simd.splat)
    assert isinstance(kind, Function)
    found = [kind.get_call_type(context, (types.float32,), {}) for _ in range(2)]
    (template,) = kind.templates
    assert (
        found[0]
        == found[1]
        == numba_compile_time.numba_type_intrinsic(template(context), (types.float32,), {})
    )


def sums_of_arrays(n, out):
    last = np.zeros(3)
    for i in range(n):
        pair = np.full(2, 1.0 + i), i
        if i % 2:
            last = pair[0]
        out[0] += pair[0][0] + pair[1]
    out[1] = last[0]


def test_arrays_are_released_and_numbers_have_no_end_of_life():
    compiled = jit.kernel(sums_of_arrays)
    out = np.zeros(2)
    _nrt_python.memsys_enable_stats()
    try:
        compiled(5, out)
        before = runtime.rtsys.get_allocation_stats()
        compiled(5, out)
        after = runtime.rtsys.get_allocation_stats()
    finally:
        _nrt_python.memsys_disable_stats()
    assert after.alloc - before.alloc == after.free - before.free >= 6
    np.testing.assert_array_equal(out, [50.0, 4.0])
    owners = numba_lowering.owns_memory
    context = cpu_target.target_context
    assert owners(context, types.Tuple((types.float64[::1], types.int64)))
    assert not owners(context, types.UniTuple(types.int64, 3))
    assert not owners(context, simd.f32x16)

"""Compiled kernels of user-defined formats.

The user's functions are compiled without FMA contraction, so that a weight decodes to the same bits
in every kernel.  A kernel closes over a format's `UserCode` and passes it to `encode_block`,
`decode_block`, ..., which are resolved at compile time.  Format name and source digest are its key
in the disk cache.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import datamodel, extending, types
from numba.core.imputils import lower_constant
from numba.core.typing.typeof import typeof_impl

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_memory import write_f32
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.codec_spec import CodecSpec

DECODED_ROWS = 16  # rows interleaved in a decoded panel


class UserCode:
    """Functions of one user-defined format.

    Parameters
    ----------
    name : str
        Name of the format.
    digest : str
        Digest of the source file, or a unique string without one.
    on_disk : bool
        Cache compiled kernels on disk.
    block_size, block_bytes : int
        Weights and bytes per block.
    functions : dict of str to callable
        The user's functions by name.
    """

    def __init__(
        self,
        name: str,
        digest: str,
        on_disk: bool,
        block_size: int,
        block_bytes: int,
        functions: dict[str, Callable[..., Any]],
    ) -> None:
        self.name, self.digest, self.on_disk = name, digest, on_disk
        self.block_size, self.block_bytes = block_size, block_bytes
        self.functions = functions
        # only kernels call them; their compiler names symbols stably, which cached code contains
        options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        compile_user: Any = numba.njit(
            error_model="numpy", nogil=True, pipeline_class=jit.DeviceCompiler, **options
        )
        self.compiled = {key: compile_user(function) for key, function in functions.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return _key, (self.name, self.digest)  # the disk cache pickles a kernel's constants

    def __hash__(self) -> int:
        return hash((self.name, self.digest))

    def __eq__(self, other: object) -> bool:
        return self is other

    def njit(self, function: Callable[..., Any]) -> Any:
        """Compile a kernel, cached on disk if `on_disk`."""
        if self.on_disk:
            return jit.kernel(function)
        options: Any = {"nogil": True, "error_model": "numpy", "fastmath": jit.FAST_MATH}
        return numba.njit(**options)(function)


def _key(name: str, digest: str) -> tuple[str, str]:
    return name, digest


def user_error(
    name: str, function: str, functions: dict[str, Callable[..., Any]], error: Exception
) -> UsageError:
    """Make the error that names the format and the line of the user's code."""
    files = {f.__code__.co_filename for f in functions.values()}
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    line = ""
    for file, number in re.findall(r'File "([^"]+)", line (\d+)', text):
        if any(file == f or f.endswith(file) for f in files):
            line = f", line {number}"
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename in files:
            line = f", line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    kind = type(error).__name__
    lines = [part.strip() for part in text.splitlines() if part.strip()]
    lines = [part for part in lines if not part.startswith(("Failed in", "During:", "File "))]
    reason = " ".join(lines[:3])[:300] if lines else kind
    if "setitem(readonly" in text:
        reason = "what is read (x, weight, block) must not be written; only out may be"
    return UsageError(f"format {name}: {function}{line}: {kind}: {reason}")


class CodeType(types.Type):
    """Numba type of one format's `UserCode`."""

    def __init__(self, code: UserCode) -> None:
        self.code = code
        super().__init__(name=f"user_format({code.name}, {code.digest})")


@extending.register_model(CodeType)
class _CodeModel(datamodel.models.OpaqueModel):
    pass


@typeof_impl.register(UserCode)
def _typeof_code(code, context):
    return CodeType(code)


@lower_constant(CodeType)
def _constant_code(context, builder, code_type, value):
    return context.get_dummy_value()


_OPTIONS: Any = {"error_model": "numpy", "no_cfunc_wrapper": True}


def _user_function(name: str) -> Callable[..., Any]:
    """Make ``f(code, *args)``, which calls the format's function `name` in compiled code."""

    def function(code, *args):
        return code.functions[name](*args)

    def chosen(code, *args):
        compiled = code.code.compiled[name]
        return lambda code, *args: compiled(*args)

    extending.overload(function, strict=False, jit_options=_OPTIONS)(chosen)
    return function


encode_block = _user_function("quantize_block")
encode_block_weighted = _user_function("quantize_block_weighted")
decode_block = _user_function("dequantize_block")
code_of = _user_function("code")
d_of = _user_function("d")
m_of = _user_function("m")
scale_of = _user_function("scale")
min_of = _user_function("min")


# ---- storage -------------------------------------------------------------------------------------


@functools.cache
def quantizer(code: UserCode) -> Any:
    """Make the kernel ``(x, data, start, stop)`` that quantizes rows."""
    size, n_bytes = code.block_size, code.block_bytes

    @code.njit
    def encode(x, data, start, stop):
        for row in range(start, stop):
            for b in range(x.shape[1] // size):
                block = data[row, b * n_bytes : (b + 1) * n_bytes]
                encode_block(code, x[row, b * size : (b + 1) * size], block)

    return encode


@functools.cache
def weighted_quantizer(code: UserCode) -> Any:
    """Make the kernel ``(x, weight, data, start, stop)`` of importance-weighted quantization."""
    size, n_bytes = code.block_size, code.block_bytes

    @code.njit
    def encode_weighted(x, weight, data, start, stop):
        for row in range(start, stop):
            w = weight[min(row, len(weight) - 1)]
            for b in range(x.shape[1] // size):
                columns = slice(b * size, (b + 1) * size)
                block = data[row, b * n_bytes : (b + 1) * n_bytes]
                encode_block_weighted(code, x[row, columns], w[columns], block)

    return encode_weighted


@functools.cache
def decoder(code: UserCode) -> Any:
    """Make the kernel ``(data, out, start, stop)`` that dequantizes rows."""
    size, n_bytes = code.block_size, code.block_bytes

    @code.njit
    def decode(data, out, start, stop):
        room = np.empty(size, np.float32)
        n_columns = out.shape[1]
        for row in range(start, stop):
            for b in range(data.shape[1] // n_bytes):
                decode_block(code, data[row, b * n_bytes : (b + 1) * n_bytes], room)
                for i in range(min(size, n_columns - b * size)):
                    out[row, b * size + i] = room[i]

    return decode


@functools.cache
def integer_decoder(code: UserCode, form: CodecSpec) -> Any:
    """Make the kernel ``(data, codes, d, m, scales, mins, start, stop)``; see `DecodedBlocks`."""
    size, n_bytes, n_d = code.block_size, code.block_bytes, code.block_size // form.block
    has_m, has_scales, has_mins = form.base != "none", form.scales, form.base == "min"
    n_scales = size // form.sub_block

    @code.njit
    def decode(data, codes, d, m, scales, mins, start, stop):
        for row in range(start, stop):
            for b in range(data.shape[1] // n_bytes):
                block = data[row, b * n_bytes : (b + 1) * n_bytes]
                for i in range(size):
                    codes[row, b * size + i] = code_of(code, block, i)
                for j in range(n_d):
                    d[row, b * n_d + j] = d_of(code, block, j)
                    if has_m:
                        m[row, b * n_d + j] = m_of(code, block, j)
                if has_scales:
                    for s in range(n_scales):
                        scales[row, b * n_scales + s] = scale_of(code, block, s)
                        if has_mins:
                            mins[row, b * n_scales + s] = min_of(code, block, s)

    return decode


# ---- dequantized panels for matmuls --------------------------------------------------------------


@jit.device_function(inline="llvm")
def decode_panel(source, at, k, n, to):
    """Dequantize columns k to k + n of the 16 rows at address `at` to address `to`, column-major.

    `source` is the code, the rows' bytes and a buffer for a block; k and n are multiples of it.
    """
    code, data, room, n_bytes = source
    size = len(room)
    first = (at - simd.address(data)) // max(1, data.shape[1])
    count = min(DECODED_ROWS, len(data) - first)
    if count < DECODED_ROWS:
        for i in range(n):
            simd.store_f32(to + 64 * i, simd.splat(0.0))
    for b in range(k // size, (k + n) // size):
        for lane in range(count):
            decode_block(code, data[first + lane, b * n_bytes : (b + 1) * n_bytes], room)
            for i in range(size):
                write_f32(to + 64 * (b * size - k + i) + 4 * lane, room[i])

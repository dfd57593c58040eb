"""Row gather with dequantization on CUDA; the quantizers are in `nbflow_kernels.quantizers.cuda`.

The Numba kernels call the scalar decoders of the CPU kernels, and the decode formula rounds only
once: CPU and CUDA weights are bit-identical.
"""

from __future__ import annotations

import functools
import importlib
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.affine_format import F16_SCALE, U8_PAIR, AffineFormat
from nbflow_kernels.formats.bit_fields import scalar_decoder
from nbflow_kernels.formats.block_format import BlockFormat, FieldFormat, value_table
from nbflow_kernels.formats.cuda_csr import add_rows
from nbflow_kernels.formats.cuda_gather import gather, scale_in_place
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.ggml.k_format import KQuantFormat
from nbflow_kernels.formats.user import UserFormat
from nbflow_kernels.jit_cache import source_digest

if TYPE_CHECKING:
    from nbflow_kernels.formats.registry import QuantFormat
    from nbflow_kernels.formats.tensor import QuantTensor

_THREADS = 128
_PIECE = 8  # weights per thread, which share a scale


def decode(qt: QuantTensor, ids: Any, scale: float, out: Any) -> None:
    """Dequantize rows `ids` (None: all), times `scale`, to `out` (T, columns).

    `out` is float32, or float16 without outliers.  An index out of range gives a row of NaN.
    """
    if not out.size:
        return
    if not qt.on_device:
        raise UsageError(f"{qt!r} lies in host memory, the result on a CUDA device; see to_device")
    late = scale if qt.outliers is not None else 1.0  # outliers are scaled with the rest
    _decode(qt, ids, scale / late, out)
    if qt.outliers is not None:
        add_rows(qt.outliers, ids, out)
        if late != 1.0:
            scale_in_place(out, late)


def _decode(qt: QuantTensor, ids: Any, scale: float, out: Any) -> None:
    """Dequantize rows without the outliers."""
    format, columns = qt.format, qt.shape[-1]
    if isinstance(format, FloatFormat):
        gather(ids, qt.data.view(format.dtype), scale, out)
        return
    device = cuda.device_of(out)
    half = out.dtype == np.float16
    kernel = (
        _user_decoder(format, half) if isinstance(format, UserFormat) else _decoder(format, half)
    )
    piece = format.block_size if isinstance(format, UserFormat) else _PIECE
    table, values = _tables(format, device)
    grid = (cuda.ceil_div(cuda.ceil_div(columns, piece), _THREADS), min(len(out), 65535))
    row_bytes = qt.data.shape[1]
    args = (
        qt.data, ids, table, values, out, qt.n_rows, len(out), columns, row_bytes, scale,
        ids is not None,
    )  # fmt: skip
    kernel(grid, _THREADS, args)


def _tables(format: QuantFormat, device: cuda.KernelDevice) -> tuple[Any, Any]:
    """Return the lookup table of the scalar decoder and the codebook, in device memory."""
    if not isinstance(format, BlockFormat):
        return None, None
    key = ("quants", format.name)
    found = device.constants.get(key)
    if found is None:
        table = np.ascontiguousarray(format.table) if format.table.size else np.zeros(1, np.uint8)
        found = device.asarray(table), device.asarray(value_table(format.form))
        device.constants[key] = found
    return found


# ---- decoding -----------------------------------------------------------------------------------


def _numba_cuda() -> Any:
    """Import `numba.cuda` on first use: importing it takes half a second."""
    return importlib.import_module("numba.cuda")


def _declared(format: QuantFormat, half: bool) -> str:
    wide = isinstance(format, BlockFormat) and format.table.dtype == np.uint16
    return (
        f"u8* data, i32*? ids, {'u16' if wide else 'u8'}*? table, f32*? values, "
        f"{'f16' if half else 'f32'}* out, i32 n_rows, i32 T, i32 columns, i64 row_bytes, "
        "f32 factor, i32 gathers"
    )


@functools.cache
def _decoder(format: Any, half: bool) -> cuda.Kernel:
    """Make the dequantization kernel, `_PIECE` weights of a row per thread."""
    from nbflow_kernels.cuda import numba_conversions as numbers

    nc = _numba_cuda()
    block, block_bytes, sub_block = format.block_size, format.block_bytes, _sub_block(format)
    parameters, value, has_base = _reader(format)
    store = numbers.narrow if half else numbers.same

    @cuda.numba_kernel(
        _declared(format, half), key=key_of(format), fuse=False, name=f"decode_{format.name}"
    )
    def decode(data, ids, table, values, out, n_rows, T, columns, row_bytes, factor, gathers):
        first = (nc.blockIdx.x * nc.blockDim.x + nc.threadIdx.x) * _PIECE
        if first >= columns:
            return
        for t in range(nc.blockIdx.y, T, nc.gridDim.y):
            row = np.int64(t)
            if gathers:
                row = np.int64(ids[t])
            to = np.int64(t) * columns
            if row < 0 or row >= n_rows:
                for i in range(first, min(first + _PIECE, columns)):
                    out[to + i] = store(np.float32(np.nan))
            else:
                at = row * row_bytes + first // block * block_bytes
                inside = first % block
                step, base = parameters(data, at, inside // sub_block)
                for i in range(min(_PIECE, columns - first)):
                    v = value(data, at, inside + i, table, values)
                    w = numbers.fma(step, v, base) if has_base else step * v
                    out[to + first + i] = store(w * factor)

    return decode


@functools.cache
def _user_decoder(format: UserFormat, half: bool) -> cuda.Kernel:
    """Make the dequantization kernel of a user-defined format, one block per thread."""
    from nbflow_kernels.cuda import numba_conversions as numbers

    nc = _numba_cuda()
    size, n_bytes = format.block_size, format.block_bytes
    decode_block = on_device(format, "dequantize_block")
    store = numbers.narrow if half else numbers.same

    @cuda.numba_kernel(
        _declared(format, half), key=user_key(format), fuse=False, name=f"decode_{format.name}"
    )
    def decode(data, ids, table, values, out, n_rows, T, columns, row_bytes, factor, gathers):
        b = nc.blockIdx.x * nc.blockDim.x + nc.threadIdx.x
        if b * size >= columns:
            return
        block, room = nc.local.array(n_bytes, np.uint8), nc.local.array(size, np.float32)
        for t in range(nc.blockIdx.y, T, nc.gridDim.y):
            row = np.int64(t)
            if gathers:
                row = np.int64(ids[t])
            known = row >= 0 and row < n_rows
            if known:
                for i in range(n_bytes):
                    block[i] = data[row * row_bytes + b * n_bytes + i]
                decode_block(block, room)
            for i in range(min(size, columns - b * size)):
                w = room[i] * factor if known else np.float32(np.nan)
                out[np.int64(t) * columns + b * size + i] = store(w)

    return decode


def user_key(format: UserFormat) -> str | None:
    """Return the disk-cache key of a user-defined format; None disables the disk cache."""
    return f"{format.name} {format.digest}" if format.code.on_disk else None


def on_device(format: UserFormat, name: str) -> Any:
    """Compile a user's function for CUDA, with the device versions of `block_bytes`."""
    from nbflow_kernels.cuda import numba_conversions as numbers
    from nbflow_kernels.formats import block_bytes

    function: Any = format.code.functions[name]
    there = {id(getattr(block_bytes, n)): getattr(numbers, n) for n in block_bytes.__all__}
    names = {k: there.get(id(v), v) for k, v in function.__globals__.items()}
    again = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    return numbers.device(again)


def key_of(format: FieldFormat) -> str:
    """Return the disk-cache key of a format's kernels."""
    file = Path(format.code.py_func.__code__.co_filename)  # type: ignore[attr-defined]
    return f"{format.name} {source_digest(file)} {format.fields!r}"


def _sub_block(format: Any) -> int:
    return int(format.integer_form.sub_block)


def _reader(format: Any) -> tuple[Any, Any, bool]:
    """Make ``parameters(data, at, s)`` -> (step, base) and ``value(data, at, i, table, values)``.

    The third result is True if the format has a base.
    """
    if isinstance(format, AffineFormat):
        return _linear_parameters(format), _value(format), format.parameters != F16_SCALE
    if isinstance(format, KQuantFormat):
        return _k_parameters(format), _value(format), format.has_mins
    assert isinstance(format, BlockFormat)
    return _integer_parameters(format), _table_value(format), False


def _value(format):
    from nbflow_kernels.cuda.numba_conversions import device

    code, zero = format.code, format.integer_form.zero

    @device
    def value(data, at, i, table, values):
        return np.float32(np.int32(code(data, at, i, table)) - np.int32(zero))

    return value


def _table_value(format: BlockFormat) -> Any:
    from nbflow_kernels.cuda.numba_conversions import device

    code = format.code

    @device
    def value(data, at, i, table, values):
        return values[code(data, at, i, table)]

    return value


def _linear_parameters(format: AffineFormat) -> Any:
    from nbflow_kernels.cuda.numba_conversions import device, half_at

    scale_at = format.fields.at("scale")
    base_at = format.fields.at("base") if "base" in format.fields else 0

    @device
    def halves(data, at, s):
        return half_at(data, at + scale_at), half_at(data, at + base_at)

    @device
    def bytes_(data, at, s):
        base = np.float32(data[at + base_at]) / np.float32(100) - np.float32(1)
        return np.float32(data[at + scale_at]) / np.float32(1000), base

    return bytes_ if format.parameters == U8_PAIR else halves


def _k_parameters(format: KQuantFormat) -> Any:
    from nbflow_kernels.cuda.numba_conversions import device, half_at

    scale, d_at = format.scale, format.fields.at("d")
    if not format.has_mins:

        @device
        def signed(data, at, s):
            return half_at(data, at + d_at) * np.float32(scale(data, at, s)), np.float32(0)

        return signed
    minimum, dmin_at = format.minimum, format.fields.at("dmin")

    @device
    def with_minimum(data, at, s):
        step = half_at(data, at + d_at) * np.float32(scale(data, at, s))
        return step, -(half_at(data, at + dmin_at) * np.float32(minimum(data, at, s)))

    return with_minimum


def _integer_parameters(format: BlockFormat) -> Any:
    from nbflow_kernels.cuda import numba_conversions as numbers

    form, d, d_at = format.form, format.fields["d"], format.fields.at("d")
    factor = np.float32(form.factor)
    of_block = {"e8m0": numbers.e8m0_at, "e4m3": numbers.e4m3_at, "f16": numbers.half_at}[
        form.d_type
    ]
    d_bits, scale = scalar_decoder(d), format.scale if form.scales else None

    @numbers.device
    def with_d_bits(data, at, s):
        step = numbers.half(np.int32(d_bits(data, at, 0))) * factor
        return step * np.float32(scale(data, at, s)), np.float32(0)

    @numbers.device
    def with_scales(data, at, s):
        step = of_block(data, at + d_at) * factor
        return step * np.float32(scale(data, at, s)), np.float32(0)

    @numbers.device
    def for_each_sub_block(data, at, s):
        return of_block(data, at + d_at + s) * factor, np.float32(0)

    if len(d.planes) > 1:
        return with_d_bits
    return with_scales if form.scales else for_each_sub_block

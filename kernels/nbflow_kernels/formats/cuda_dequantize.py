"""Row gather with dequantization on CUDA; the quantizers are in `nbflow_kernels.quantizers.cuda`.

`cuda_dequantize.cu` is compiled for the field table and the formula of each format,
`cuda_dequantize_mma.cu` for the MMA layout of tensors whose storage bytes were dropped.  The
formula rounds only once: CPU and CUDA weights are bit-identical.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import trellis_code
from nbflow_kernels.formats.affine_format import AffineFormat
from nbflow_kernels.formats.block_format import BlockFormat, FieldFormat
from nbflow_kernels.formats.column_order import inverse
from nbflow_kernels.formats.cuda_csr import add_rows
from nbflow_kernels.formats.cuda_gather import gather, gather_columns, scale_in_place
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.ggml.iq_grids import GridFormat
from nbflow_kernels.formats.ggml.ternary import Base3Format
from nbflow_kernels.formats.layout_mma import CHUNK, MmaLayout
from nbflow_kernels.formats.user import UserFormat

if TYPE_CHECKING:
    from nbflow_kernels.formats.codec_spec import Field
    from nbflow_kernels.formats.tensor import QuantTensor

_THREADS = 128
_PIECE = 8
"""Weights per thread at most; they share a scale."""
_D_TYPES = {"f16": 0, "e8m0": 1, "e4m3": 2, "u8": 3, "f32": 4}
_BASES = {"none": 0, "d": 1, "min": 2, "zero": 3, "base": 4}
_FROM_FIELD, _ON_GRID, _BASE_3, _TRELLIS = range(4)


def decode(qt: QuantTensor, ids: Any, scale: float, out: Any) -> None:
    """Dequantize rows `ids` (None: all), times `scale`, to `out` (T, columns).

    `out` is float32, or float16 without outliers.  An index out of range gives a row of NaN.
    """
    if not out.size:
        return
    if not qt.on_device:
        raise UsageError(f"{qt!r} lies in host memory, the result on a CUDA device; see to_device")
    if qt.column_order is not None:
        _decode_reordered(qt, ids, scale, out)
        return
    late = scale if qt.outliers is not None else 1.0  # outliers are scaled with the rest
    _decode(qt, ids, scale / late, out)
    if qt.outliers is not None:
        add_rows(qt.outliers, ids, out)
        if late != 1.0:
            scale_in_place(out, late)


def _decode_reordered(qt: QuantTensor, ids: Any, scale: float, out: Any) -> None:
    """Dequantize rows whose columns are stored in another order, or have factors."""
    device, order = cuda.device_of(out), cuda.to_host(qt.column_order)
    columns = device.asarray(inverse(order))
    if qt.column_scales is None:
        rows = device.empty((len(out), len(order)), out.dtype)
        _decode(qt, ids, scale, rows)
        gather_columns(rows, columns, out)
        return
    rows = device.empty((len(out), len(order)), np.float32)
    _decode(qt, ids, scale, rows)
    factors = np.where(order >= 0, cuda.to_host(qt.column_scales)[order], np.float32(0))
    wide = out if out.dtype == np.float32 else device.empty(out.shape, np.float32)
    gather_columns(rows, columns, wide, device.asarray(factors))
    if wide is not out:
        gather(None, wide, 1.0, out)


def _decode(qt: QuantTensor, ids: Any, scale: float, out: Any) -> None:
    """Dequantize rows without the outliers to `out` (T, stored columns)."""
    format, columns, half = qt.format, qt.n_stored_columns, out.dtype == np.float16
    if isinstance(format, FloatFormat):
        gather(ids, qt.data.view(format.dtype), scale, out)
        return
    if not qt.has_storage:
        _decode_units(qt, ids, scale, out)
        return
    sizes = (qt.n_rows, len(out), columns, qt.data.shape[1], scale)
    if isinstance(format, UserFormat):
        from nbflow_kernels.formats import user_cuda

        kernel, piece = user_cuda.decoder(format, half), format.block_size
        args: tuple[Any, ...] = (qt.data, ids, out, *sizes, ids is not None)
    else:
        assert isinstance(format, FieldFormat)
        kernel, piece = _decoder(format, half), _piece(format)
        wide = columns % 4 == 0 and cuda.address(out) % 16 == 0
        args = (qt.data, ids, *_tables(format, cuda.device_of(out)), out, *sizes, wide)
    grid = (cuda.ceil_div(cuda.ceil_div(columns, piece), _THREADS), min(len(out), 65535))
    kernel(grid, _THREADS, args)


def _decode_units(qt: QuantTensor, ids: Any, scale: float, out: Any) -> None:
    """Dequantize rows of a tensor without storage bytes, from the MMA layout."""
    units, columns = qt.units(), qt.n_stored_columns
    matrix_rows = qt.shape[-2] if len(qt.shape) > 1 else 1
    wide = columns % 2 == 0 and cuda.address(out) % 8 == 0
    grid = (cuda.ceil_div(cuda.ceil_div(columns, CHUNK), _THREADS // 4), min(len(out), 65535))
    args = (
        units.data, ids, out, qt.n_rows, len(out), columns, matrix_rows,
        units.form.tile_bytes(columns), scale, wide,
    )  # fmt: skip
    _unit_kernel(units.form, out.dtype == np.float16)(grid, _THREADS, args)


@functools.cache
def _unit_kernel(form: MmaLayout, half: bool) -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "cuda_dequantize_mma.cu", f"decode_rows<{'unsigned short' if half else 'float'}>",
        f"u8* weights, i32*? ids, {'f16' if half else 'f32'}* out, i32 n_rows, i32 n_out, "
        "i32 columns, i32 matrix_rows, i64 tile_bytes, f32 factor, i32 wide",
        defines=form.defines(),
    )  # fmt: skip


def _tables(format: FieldFormat, device: cuda.KernelDevice) -> tuple[Any, Any]:
    """Return the grid and the codebook in device memory, None for those that a format lacks.

    The grid of a trellis is the code of each state.
    """
    trellis = format.integer_form.trellis
    if not trellis and (not isinstance(format, BlockFormat) or format.form.values is None):
        return None, None
    key = ("formats", format.name)
    found = device.constants.get(key)
    if found is None:
        if trellis:
            codes = trellis_code.codes_of_states(trellis).astype(np.uint16)
            found = device.asarray(codes), None
        else:
            assert isinstance(format, BlockFormat)
            grid = device.asarray(format.grid) if isinstance(format, GridFormat) else None
            found = grid, device.asarray(np.array(format.form.values, np.float32))
        device.constants[key] = found
    return found


def _piece(format: FieldFormat) -> int:
    """Return the weights per thread, which are all in the same planes."""
    codes = format.fields["point" if isinstance(format, GridFormat) else "code"]
    each = format.block_size // codes.n_stored
    return math.gcd(_PIECE, format.integer_form.sub_block, *(each * p.first for p in codes.planes))


@functools.cache
def _decoder(format: FieldFormat, half: bool) -> cuda.Kernel:
    return _kernel(tuple(_defines(format).items()), half)


@functools.cache
def _kernel(defines: tuple[tuple[str, str | int], ...], half: bool) -> cuda.Kernel:
    """Return the kernel of a format, which formats with equal tables and formulas share."""
    return cuda.cpp_kernel(
        __file__, "cuda_dequantize.cu", f"decode_rows<{'unsigned short' if half else 'float'}>",
        f"u8* data, i32*? ids, u16*? grid, f32*? values, {'f16' if half else 'f32'}* out, "
        "i32 n_rows, i32 n_out, i32 columns, i64 row_bytes, f32 factor, i32 wide",
        defines=dict(defines), options=("-fmad=false",),
    )  # fmt: skip


def _defines(format: FieldFormat) -> dict[str, str | int]:
    """Return the macros of `cuda_dequantize.cu` for a format."""
    form, fields = format.integer_form, format.fields
    affine, on_grid = isinstance(format, AffineFormat), isinstance(format, GridFormat)
    own_base = "base" if "base" in fields and not affine else ""  # float32
    names = {
        "CODE": "point" if on_grid else "code",
        "SIGN": "sign",
        "SCALE": "scale" if form.scales else "",
        "MIN": "zero" if "zero" in fields else "min",
        "D": "scale" if affine else "d",
        "M": "base" if affine or own_base else "dmin",
    }
    kind = _ON_GRID if on_grid else _BASE_3 if isinstance(format, Base3Format) else _FROM_FIELD
    kind = _TRELLIS if form.trellis else kind
    found: dict[str, str | int] = {
        "BLOCK": format.block_size,
        "BLOCK_BYTES": format.block_bytes,
        "SUB_BLOCK": form.sub_block,
        "D_BLOCK": form.block,
        "PIECE": _piece(format),
        "D_TYPE": _D_TYPES[format.stored_d_type],
        "BASE": _BASES["zero" if "zero" in fields else own_base or form.base],
        "CODES": kind,
        "ZERO": form.zero,
        "FACTOR": f"{form.factor!r}f",
        "HAS_VALUES": int(form.values is not None),
        "PER_POINT": format.block_size // fields["point"].n if on_grid else 8,
        "PER_SIGN": format.block_size // fields["sign"].n if on_grid else 8,
        "TRELLIS_BITS": form.trellis,
        "CODE_FIELD_AT": fields.at("point" if on_grid else "code"),
        "SIGN_BITS": fields["sign"].bits if on_grid else 1,
    }
    for name, field in names.items():
        found[f"{name}_FIELD"] = _initializer(fields[field]) if field in fields else "{}"
    return found


def _initializer(field: Field) -> str:
    """Return a field as the initializer of the C++ struct `Field`."""
    planes = []
    for p in field.planes:
        end = p.first + p.span(field.n_stored) if p.first or p.count else 0
        numbers = (
            p.at, p.bits, p.shift, p.stride, p.bit, p.per_group, p.first, end, p.step, p.pitch,
            p.word_bytes,
        )  # fmt: skip
        planes.append("{" + ",".join(map(str, numbers)) + "}")
    head = (len(planes), field.flip, field.radix, field.factor, field.offset)
    return f"{{{','.join(map(str, head))},{{{','.join(planes)}}}}}"

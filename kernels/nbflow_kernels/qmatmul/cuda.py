"""Quantized matrix product on CUDA devices, by tensor cores, from `quants.units`.

Activations are float16 numbers, two for each: their sum is exact to 22 bits, or 2**-30 of the
largest of 128 columns (2**-25 with 3.5 bits).  Codes are float16 numbers as they are, products
exact, and sums float32.  The order of additions depends on the number of columns alone
(`slots.cuh`), so that a row of the result is bitwise the same in any batch, by either kernel:

``few_rows``    up to 8 rows, or rows of several matrices: bound by the bytes of the weights
``many_rows``   each weight is decoded once for 32 rows

Activations in bfloat16 go with weights rounded to bfloat16: `rounded`.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from nbflow_kernels.cuda import Kernel, KernelDevice, ceil_div, cpp_kernel, device_of
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.errors import UsageError
from nbflow_kernels.matmul import cuda as dense
from nbflow_kernels.qmatmul import rounded
from nbflow_kernels.quants.tensor import QuantTensor
from nbflow_kernels.quants.units import CHUNK, ROWS, UNIT, UnitForm, Units
from nbflow_kernels.sparse import cuda as sparse

SLOTS = 8
"""Pieces that the columns are cut into (`slots.cuh`)."""
FEW = 8
"""Rows that one operand of the tensor cores holds."""
WARPS = 8
RING = 3
"""Of `many_rows`: chunks of tokens on their way."""
STATIC_BYTES = 2048
"""At most what `few_rows` declares itself: who is ready, factors of norms, codes of a block."""
ROWS_AT_ONCE = 1024
"""Rows that are staged together: bounds the memory for them."""

FEW_PARAMETERS = (
    "u8* weights, f32* x, f32*? bias, f32* out, f32*? partial, i32*? arrived, i32*? indptr, "
    "i32*? rows, i64 group_bytes, i64 tile_bytes, i64 x_stride, i64 out_stride, i32 n_tokens, "
    "i32 n_rows, i32 n_columns, f32 added, i32 int8"
)
_STAGE = "f32* x, u8* records, i64 x_stride, i32 n_tokens, i32 n_columns, i32 int8"
_MANY = (
    "u8* weights, u8* records, f32*? bias, f32* out, f32*? partial, i32*? arrived, i64 tile_bytes, "
    "i64 out_stride, i32 n_tokens, i32 n_rows, i32 n_columns, i32 accumulate"
)


def qmatmul(
    x: Any, w: QuantTensor, bias: Any, accumulate: bool, activations: str, out: Any
) -> None:
    """See `nbflow_kernels.qmatmul`."""
    if not x.shape[0] or not w.shape[0]:
        return
    if activations == "bf16":
        rounded.qmatmul(x, w, bias, accumulate, out)
    elif w.is_float:
        dense.multiply(x, w.array, bias, accumulate, out)
    elif w.format.decodes_from_storage:
        rounded.decoded(x, w, bias, accumulate, activations == "int8", out)
    else:
        multiply(x, w.units(), bias, accumulate, activations == "int8", out)
    if w.outliers is not None:
        if activations == "int8":
            x = rounded.to_int8_grid(x)
        sparse.sparse_matmul(x, w.outliers, True, out)


def multiply(x: Any, w: Units, bias: Any, accumulate: bool, int8: bool, out: Any) -> None:
    """Multiply by a matrix in units."""
    for row in range(0, len(x), ROWS_AT_ONCE):
        part = slice(row, row + ROWS_AT_ONCE)
        launch = few_rows if len(x[part]) <= FEW else many_rows
        launch(x[part], w, bias, accumulate, int8, out[part])


class FewShape(NamedTuple):
    """How `few_rows` is launched for a number of tokens."""

    tokens: int
    """Tokens that the kernel is compiled for."""
    parts: int
    """Thread blocks that divide the slots of a row tile."""
    grid: int
    shared: int
    """Bytes."""
    n_groups: int
    """Groups of row tiles that a thread block computes at once."""

    @classmethod
    def of(cls, device: KernelDevice, w: Units, n_tokens: int) -> FewShape | None:
        """Return the shape, or None where the tokens do not fit the shared memory."""
        tokens = next(n for n in (1, 2, 4, 8) if n >= n_tokens)
        per_sm, parts = 2, 1
        while parts < SLOTS and _few_bytes(w.form, tokens, w.n_columns, parts) > _half(device):
            parts *= 2
        shared = _few_bytes(w.form, tokens, w.n_columns, parts)
        if shared > _half(device):
            per_sm = 1
            if shared + STATIC_BYTES > device.max_shared_bytes:
                return None
        n_groups = ceil_div(w.n_tiles * SLOTS, WARPS * parts)
        grid = min(n_groups, max(1, per_sm * device.n_sms // parts))
        return cls(tokens, parts, grid, shared, n_groups)


def few_rows(x: Any, w: Units, bias: Any, accumulate: bool, int8: bool, out: Any) -> None:
    """Multiply up to 8 rows."""
    shape = FewShape.of(device_of(x), w, len(x))
    if shape is None:
        half = len(x) // 2
        if not half:
            raise UsageError(f"{w.n_columns} columns do not fit the shared memory of the device")
        few_rows(x[:half], w, bias, accumulate, int8, out[:half])
        few_rows(x[half:], w, bias, accumulate, int8, out[half:])
        return
    few_kernel(w.form, shape.tokens, is_whole(w))(
        (shape.grid, shape.parts), 32 * WARPS,
        few_arguments(shape, x, w, bias, float(accumulate), int8, out), shape.shared,
    )  # fmt: skip


def few_arguments(
    shape: FewShape, x: Any, w: Units, bias: Any, added: float, int8: bool, out: Any,
    rows: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of `few_rows` for one matrix."""
    partial, arrived = _shared_sums(device_of(x), shape.parts, w.n_tiles, shape.n_groups)
    return (
        w.data, x, bias, out, partial, arrived, None, rows, 0, w.form.tile_bytes(w.n_columns),
        *_strides(x, out), len(out), w.n_rows, w.n_columns, added, int(int8),
    )  # fmt: skip


def grouped(
    x: Any, w: Units, n_matrices: int, indptr: Any, rows: Any, bias: Any, n_rows: int, out: Any
) -> None:
    """Multiply rows ``indptr[e]:indptr[e + 1]`` (of `rows` of `x`) by matrix e of `n_rows` rows.

    A matrix is read once for 8 rows.
    """
    device, form = device_of(x), w.form
    n_tiles, tile_bytes = ceil_div(n_rows, ROWS), form.tile_bytes(w.n_columns)
    tokens = next(
        (n for n in (8, 4, 2, 1) if _few_bytes(form, n, w.n_columns, 1) <= _half(device)), 1
    )
    shared = _few_bytes(form, tokens, w.n_columns, 1)
    grid = min(n_tiles, max(1, 2 * device.n_sms))
    few_kernel(form, tokens, is_whole(w))(
        (grid, 1, n_matrices), 32 * WARPS,
        (
            w.data, x, bias, out, None, None, indptr, rows, n_tiles * tile_bytes, tile_bytes,
            *_strides(x, out), len(x), n_rows, w.n_columns, 0.0, 0,
        ),
        shared=shared,
    )  # fmt: skip


def bands(x: Any, w: QuantTensor, activations: str, out: Any) -> bool:
    """Multiply bands of columns by a matrix each: ``out[:, h] = x[:, h] @ w[h].T``.

    Up to 8 rows by blocks are one launch, floats for any number of rows one or two.  Returns False,
    and does nothing, where there is no such kernel.

    Parameters
    ----------
    x : array of float32, shape (T, H, K)
        Rows of bands.
    w : QuantTensor, shape (H, N, K)
        A matrix for each, without outliers and not of a format that is decoded from storage.
    activations : {"f32", "int8", "bf16"}
        As of `qmatmul`.
    out : array of float32, shape (T, H, N)
        The results; the bits are those of band by band.
    """
    if activations == "bf16":
        return False
    if w.is_float:
        dense.bands(x, w.array, out)
        return True
    return _bands(x, w.units(), activations == "int8", out)


def _bands(x: Any, w: Units, int8: bool, out: Any) -> bool:
    """Do as `bands` with matrices in units, if there are few rows and they fit."""
    n_tokens, n_bands, n_rows = out.shape
    device, form = device_of(x), w.form
    tokens = next((n for n in (1, 2, 4, 8) if n >= n_tokens), 0)
    shared = _few_bytes(form, tokens, w.n_columns, 1)
    if not tokens or shared + STATIC_BYTES > device.max_shared_bytes:
        return False
    n_units = ceil_div(w.n_columns, UNIT)
    slots = next((n for n in (1, 2, 4) if n >= n_units), SLOTS)
    n_tiles, tile_bytes = ceil_div(n_rows, ROWS), form.tile_bytes(w.n_columns)
    grid = min(ceil_div(n_tiles * slots, WARPS), max(1, 2 * device.n_sms // n_bands))
    few_kernel(form, tokens, is_whole(w), bands=True)(
        (grid, 1, n_bands), 32 * WARPS,
        (
            w.data, x, None, out, None, None, None, None, n_tiles * tile_bytes, tile_bytes,
            *_strides(x, out), n_tokens, n_rows, w.n_columns, 0.0, int(int8), x.strides[1] // 4,
            out.strides[1] // 4,
        ),
        shared=shared,
    )  # fmt: skip
    return True


class ManyShape(NamedTuple):
    """How `many_rows` divides the work."""

    row_tiles: int
    """Of a warp."""
    token_tiles: int
    """Groups of 8 tokens of a thread block."""
    per_sm: int
    """Thread blocks on a processor."""

    @classmethod
    def of(cls, form: UnitForm, n_groups: int) -> ManyShape:
        """Return the shape: small for up to 16 tokens, where waiting for the weights counts."""
        if n_groups <= 2:
            return cls(1, 2, 2)
        return cls(1 if form.sub_block == 16 else 2, 4, 1)  # what a warp has registers for


def many_rows(x: Any, w: Units, bias: Any, accumulate: bool, int8: bool, out: Any) -> None:
    """Multiply any number of rows."""
    device, form = device_of(x), w.form
    n_groups, n_chunks = ceil_div(len(x), 8), ceil_div(w.n_columns, CHUNK)
    record = record_bytes(form, 8)
    records = workspace(device, "qmatmul records", n_chunks * n_groups * record, "u1")
    x_stride, out_stride = _strides(x, out)
    _stage_kernel(form)(
        (n_chunks, n_groups), 256, (x, records, x_stride, len(x), w.n_columns, int(int8))
    )
    shape = ManyShape.of(form, n_groups)
    grid = ceil_div(w.n_tiles, WARPS * shape.row_tiles), ceil_div(n_groups, shape.token_tiles)
    parts = 1
    while parts < SLOTS and grid[0] * grid[1] * parts * 2 <= shape.per_sm * device.n_sms:
        parts *= 2
    partial, arrived = _shared_sums(device, parts, w.n_tiles * n_groups, grid[0] * grid[1])
    many_kernel(form, shape)(
        (grid[0], parts, grid[1]), 32 * WARPS,
        (
            w.data, records, bias, out, partial, arrived, form.tile_bytes(w.n_columns), out_stride,
            len(x), w.n_rows, w.n_columns, int(accumulate),
        ),
        shared=RING * shape.token_tiles * record,
    )  # fmt: skip


def record_bytes(form: UnitForm, tokens: int) -> int:
    """Return the bytes of a staged chunk (`staging.cuh`)."""
    each = 512 + 8 * max(1, CHUNK // form.sub_block // 2) + 4
    return ceil_div(tokens * each, 16) * 16


def _few_bytes(form: UnitForm, tokens: int, n_columns: int, parts: int) -> int:
    """Return the shared memory of `few_rows` if `parts` thread blocks divide the slots."""
    n_chunks = ceil_div(n_columns, CHUNK)
    n_units, step = ceil_div(n_chunks, 2), SLOTS // parts
    starts = [n_units * slot // SLOTS for slot in range(0, SLOTS + 1, step)]
    most = max(b - a for a, b in pairwise(starts))
    return 2 * most * record_bytes(form, tokens) + 2 * 512 * WARPS


def is_whole(w: Units) -> bool:
    """Return whether all units have two chunks."""
    return ceil_div(w.n_columns, CHUNK) % 2 == 0


def _half(device: Any) -> int:
    """Return the shared memory that lets two thread blocks run on a processor."""
    return int(device.max_shared_bytes) // 2 - 1024 - STATIC_BYTES


def _shared_sums(device: Any, parts: int, n_tiles: int, n_counters: int) -> tuple[Any, Any]:
    """Return the memory for slots' sums and the counters of who has arrived, if needed."""
    if parts == 1:
        return None, None
    partial = workspace(device, "qmatmul sums", n_tiles * SLOTS * 128, "f4")
    return partial, workspace(device, "qmatmul arrived", n_counters, "i4", zero=True)


def _strides(x: Any, out: Any) -> tuple[int, int]:
    """Return the distances of rows in numbers."""
    return x.strides[0] // 4, out.strides[0] // 4


@cache
def few_kernel(form: UnitForm, tokens: int, whole: bool, bands: bool = False) -> Kernel:
    """Return `few_rows` compiled for a form; `whole`: units have two chunks always."""
    own: dict[str, str | int] = {"TOKENS": tokens, "WARPS": WARPS, "WHOLE": int(whole)}
    parameters = FEW_PARAMETERS
    if bands:
        own["BANDS"] = 1
        parameters += ", i64 x_band, i64 out_band"
    defines = {**form.defines(), **own}
    return cpp_kernel(__file__, "few_rows.cu", "few_rows", parameters, defines=defines)


@cache
def many_kernel(form: UnitForm, shape: ManyShape) -> Kernel:
    """Return `many_rows` compiled for a form."""
    return cpp_kernel(__file__, "many_rows.cu", "many_rows", _MANY, defines=_many(form, shape))


@cache
def _stage_kernel(form: UnitForm) -> Kernel:
    """Return `stage_rows` compiled for a form."""
    defines = _many(form, ManyShape(1, 1, 1))  # of which it needs nothing
    return cpp_kernel(__file__, "many_rows.cu", "stage_rows", _STAGE, defines=defines)


def _many(form: UnitForm, shape: ManyShape) -> dict[str, str | int]:
    own = {"ROW_TILES": shape.row_tiles, "TOKEN_TILES": shape.token_tiles, "PER_SM": shape.per_sm}
    return {**form.defines(), **own}

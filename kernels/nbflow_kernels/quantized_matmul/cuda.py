"""Quantized matrix product on CUDA devices, by tensor cores, from `formats.layout_mma`.

There are three arithmetics (`cuda_stage_activations.cuh`), whose sums are all float32:

`F32_SUMS`    activations are two float16 numbers each, whose sum is exact to 22 bits, or 2**-30
              of the largest of 128 columns (2**-25 with 3.5 bits); codes are float16 numbers as
              they are
`INT8_SUMS`   activations are integers of 8 bits: of 32 columns the sum of products is exact
`BF16`        activations and weights rounded to bfloat16

The order of additions depends on the number of columns alone (`cuda_split_k.cuh`), so that a row of
the result is bitwise the same in any batch, by either kernel:

``gemv``    up to 8 rows, or rows of several matrices: bound by the bytes of the weights
``gemm``   each weight is decoded once for 16, 32 or (bfloat16) 64 rows

More rows in bfloat16 go with panels of weights, to the same bits: `rounded`.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

from nbflow_kernels.cuda import Kernel, KernelDevice, ceil_div, cpp_kernel, device_of
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.layout_mma import CHUNK, ROWS, UNIT, MmaLayout, MmaPacked
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.matmul import cuda as dense
from nbflow_kernels.quantized_matmul import cuda_dequant_gemm
from nbflow_kernels.sparse import cuda as sparse

SLOTS = 8
"""Pieces that the columns are cut into (`cuda_split_k.cuh`)."""
FEW = 8
"""Rows that one operand of the tensor cores holds."""
WARPS = 8
RING = 2
"""Of `gemm`: units of tokens on their way."""
BF16_ROWS = 64
"""Rows in bfloat16 up to which weights are decoded in registers; panels are for more."""
STEP, UNIT_STEPS = 64, 4
"""Columns of a step, which slots in bfloat16 are made of; steps of a unit."""
STATIC_BYTES = 2048
"""At most what `gemv` declares itself: who is ready, factors of norms, codes of a block."""
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
    "i64 out_stride, i32 n_tokens, i32 n_rows, i32 n_columns, i32 block_tiles, i32 accumulate"
)


class ActivationPrecision(IntEnum):
    """What activations are on tensor cores; the numbers of `cuda_stage_activations.cuh`."""

    F32_SUMS = 0
    INT8_SUMS = 1
    BF16 = 2

    @classmethod
    def of(cls, form: MmaLayout, activations: str) -> ActivationPrecision:
        """Return that of a kind of activations; of 8 bits it may be float32."""
        if activations == "bf16":
            return cls.BF16
        return cls.INT8_SUMS if activations == "int8" and form.integer_sums else cls.F32_SUMS


F32 = ActivationPrecision.F32_SUMS


def qmatmul(
    x: Any, w: QuantTensor, bias: Any, accumulate: bool, activations: str, out: Any
) -> None:
    """See `nbflow_kernels.qmatmul`."""
    if not x.shape[0] or not w.shape[0]:
        return
    has_units = not w.is_float and not w.format.decodes_from_storage
    if activations == "bf16" and not (has_units and len(x) <= BF16_ROWS):
        cuda_dequant_gemm.qmatmul(x, w, bias, accumulate, out)
    elif w.is_float:
        dense.multiply(x, w.array, bias, accumulate, out)
    elif not has_units:
        cuda_dequant_gemm.decoded(x, w, bias, accumulate, activations == "int8", out)
    else:
        multiply(x, w.units(), bias, accumulate, activations, out)
    if w.outliers is not None:
        if activations == "int8":
            x = cuda_dequant_gemm.to_int8_grid(x)
        sparse.sparse_matmul(x, w.outliers, True, out)


def multiply(x: Any, w: MmaPacked, bias: Any, accumulate: bool, activations: str, out: Any) -> None:
    """Multiply by a matrix in units."""
    for row in range(0, len(x), ROWS_AT_ONCE):
        part = slice(row, row + ROWS_AT_ONCE)
        launch = gemv if len(x[part]) <= FEW else gemm
        launch(x[part], w, bias, accumulate, activations, out[part])


class GemvShape(NamedTuple):
    """How `gemv` is launched for a number of tokens."""

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
    def of(
        cls,
        device: KernelDevice,
        w: MmaPacked,
        n_tokens: int,
        arithmetic: ActivationPrecision = F32,
    ) -> GemvShape | None:
        """Return the shape, or None where the tokens do not fit the shared memory."""
        tokens = next(n for n in (1, 2, 4, 8) if n >= n_tokens)
        record, half = record_bytes(w.form, tokens, arithmetic), half_of_shared(device)
        per_sm, parts = 2, 1
        while parts < SLOTS and _few_bytes(record, w.n_columns, parts, arithmetic) > half:
            parts *= 2
        shared = _few_bytes(record, w.n_columns, parts, arithmetic)
        if shared > half:
            per_sm = 1
            if shared + STATIC_BYTES > device.max_shared_bytes:
                return None
        n_groups = ceil_div(w.n_tiles * SLOTS, WARPS * parts)
        grid = min(n_groups, max(1, per_sm * device.n_sms // parts))
        return cls(tokens, parts, grid, shared, n_groups)


def gemv(x: Any, w: MmaPacked, bias: Any, accumulate: bool, activations: str, out: Any) -> None:
    """Multiply up to 8 rows."""
    arithmetic = ActivationPrecision.of(w.form, activations)
    shape = GemvShape.of(device_of(x), w, len(x), arithmetic)
    if shape is None:
        half = len(x) // 2
        if not half:
            raise UsageError(f"{w.n_columns} columns do not fit the shared memory of the device")
        gemv(x[:half], w, bias, accumulate, activations, out[:half])
        gemv(x[half:], w, bias, accumulate, activations, out[half:])
        return
    few_kernel(w.form, shape.tokens, is_whole(w, arithmetic), arithmetic)(
        (shape.grid, shape.parts), 32 * WARPS,
        few_arguments(shape, x, w, bias, float(accumulate), activations, out), shape.shared,
    )  # fmt: skip


def few_arguments(
    shape: GemvShape, x: Any, w: MmaPacked, bias: Any, added: float, activations: str, out: Any,
    rows: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of `gemv` for one matrix."""
    partial, arrived = _shared_sums(device_of(x), shape.parts, w.n_tiles, shape.n_groups)
    return (
        w.data, x, bias, out, partial, arrived, None, rows, 0, w.form.tile_bytes(w.n_columns),
        *_strides(x, out), len(out), w.n_rows, w.n_columns, added,
        _rounds_first(w.form, activations),
    )  # fmt: skip


def _rounds_first(form: MmaLayout, activations: str) -> int:
    """Return whether activations are rounded to 8 bits and then multiplied as float32."""
    return int(activations == "int8" and ActivationPrecision.of(form, activations) == F32)


def grouped(
    x: Any, w: MmaPacked, n_matrices: int, indptr: Any, rows: Any, bias: Any, n_rows: int, out: Any
) -> None:
    """Multiply rows ``indptr[e]:indptr[e + 1]`` (of `rows` of `x`) by matrix e of `n_rows` rows.

    A matrix is read once for 8 rows.
    """
    device, form = device_of(x), w.form
    n_tiles, tile_bytes = ceil_div(n_rows, ROWS), form.tile_bytes(w.n_columns)
    tokens = next(
        (
            n
            for n in (8, 4, 2, 1)
            if _few_bytes(record_bytes(form, n), w.n_columns, 1) <= half_of_shared(device)
        ),
        1,
    )
    shared = _few_bytes(record_bytes(form, tokens), w.n_columns, 1)
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
    return _bands(x, w.units(), activations, out)


def _bands(x: Any, w: MmaPacked, activations: str, out: Any) -> bool:
    """Do as `bands` with matrices in units, if there are few rows and they fit."""
    n_tokens, n_bands, n_rows = out.shape
    device, form = device_of(x), w.form
    tokens = next((n for n in (1, 2, 4, 8) if n >= n_tokens), 0)
    arithmetic = ActivationPrecision.of(form, activations)
    shared = _few_bytes(record_bytes(form, tokens, arithmetic), w.n_columns, 1)
    if not tokens or shared + STATIC_BYTES > device.max_shared_bytes:
        return False
    n_units = ceil_div(w.n_columns, UNIT)
    slots = next((n for n in (1, 2, 4) if n >= n_units), SLOTS)
    n_tiles, tile_bytes = ceil_div(n_rows, ROWS), form.tile_bytes(w.n_columns)
    grid = min(ceil_div(n_tiles * slots, WARPS), max(1, 2 * device.n_sms // n_bands))
    few_kernel(form, tokens, is_whole(w, arithmetic), arithmetic, bands=True)(
        (grid, 1, n_bands), 32 * WARPS,
        (
            w.data, x, None, out, None, None, None, None, n_tiles * tile_bytes, tile_bytes,
            *_strides(x, out), n_tokens, n_rows, w.n_columns, 0.0,
            _rounds_first(form, activations), x.strides[1] // 4, out.strides[1] // 4,
        ),
        shared=shared,
    )  # fmt: skip
    return True


class GemmShape(NamedTuple):
    """How `gemm` divides the work."""

    row_tiles: int
    """Of a warp."""
    token_tiles: int
    """Groups of 8 tokens of a thread block."""

    @classmethod
    def of(
        cls, form: MmaLayout, n_groups: int, arithmetic: ActivationPrecision = F32,
        max_shared_bytes: int | None = None,
    ) -> GemmShape:  # fmt: skip
        """Return the shape for a number of groups of 8 tokens: what a warp has registers for."""
        row_tiles, most = 2, 8 if arithmetic == ActivationPrecision.BF16 else 4
        if arithmetic != ActivationPrecision.BF16 and form.sub_block == 16:
            row_tiles = 1
        room = max_shared_bytes
        while room and most > 1 and cls(row_tiles, most).shared_bytes(form, arithmetic) > room:
            most -= 1
        return cls(row_tiles, ceil_div(n_groups, ceil_div(n_groups, most)))

    def shared_bytes(self, form: MmaLayout, arithmetic: ActivationPrecision) -> int:
        """Return the bytes of the ring and of the totals."""
        results = 4 * self.row_tiles * self.token_tiles
        record = record_bytes(form, 8, arithmetic)
        return 2 * RING * self.token_tiles * record + 4 * 32 * WARPS * results

    def grid(self, n_sms: int, n_tiles: int, n_groups: int) -> tuple[int, int, int, int]:
        """Return the grid, and how many row tiles a thread block has: all have about as many."""
        most, n_pieces = WARPS * self.row_tiles, ceil_div(n_groups, self.token_tiles)
        n_blocks = ceil_div(n_tiles, most) * n_pieces
        parts = 1
        while parts < SLOTS and n_blocks * parts * 2 <= n_sms:
            parts *= 2
        places = ceil_div(n_blocks * parts, n_sms) * n_sms // (parts * n_pieces)
        block_tiles = ceil_div(ceil_div(n_tiles, places), self.row_tiles) * self.row_tiles
        return ceil_div(n_tiles, block_tiles), parts, n_pieces, block_tiles


def gemm(x: Any, w: MmaPacked, bias: Any, accumulate: bool, activations: str, out: Any) -> None:
    """Multiply any number of rows."""
    device, form, arithmetic = device_of(x), w.form, ActivationPrecision.of(w.form, activations)
    n_groups, n_chunks = ceil_div(len(x), 8), ceil_div(w.n_columns, CHUNK)
    room = device.max_shared_bytes - 64  # for what the kernel declares itself
    shape = GemmShape.of(form, n_groups, arithmetic, room)
    *grid, block_tiles = shape.grid(device.n_sms, w.n_tiles, n_groups)
    n_groups = grid[2] * shape.token_tiles  # with zeros behind the rows
    size = n_chunks * n_groups * record_bytes(form, 8, arithmetic)
    records = workspace(device, "qmatmul records", size, "u1")
    x_stride, out_stride = _strides(x, out)
    rounds = _rounds_first(form, activations)
    _stage_kernel(form, arithmetic)(
        (n_chunks, n_groups), 256, (x, records, x_stride, len(x), w.n_columns, rounds)
    )
    partial, arrived = _shared_sums(device, grid[1], w.n_tiles * n_groups, grid[0] * grid[2])
    many_kernel(form, shape, is_whole(w, arithmetic), arithmetic)(
        tuple(grid), 32 * WARPS,
        (
            w.data, records, bias, out, partial, arrived, form.tile_bytes(w.n_columns), out_stride,
            len(x), w.n_rows, w.n_columns, block_tiles, int(accumulate),
        ),
        shared=shape.shared_bytes(form, arithmetic),
    )  # fmt: skip


def record_bytes(form: MmaLayout, tokens: int, arithmetic: ActivationPrecision = F32) -> int:
    """Return the bytes of a staged chunk (`cuda_stage_activations.cuh`)."""
    if arithmetic == ActivationPrecision.BF16:
        return 256 * tokens
    sums_and_factor = 8 * max(1, CHUNK // form.sub_block // 2) + 4
    numbers = 512 if arithmetic == F32 else 256 + 4 * (CHUNK // 32)
    return ceil_div(tokens * (numbers + sums_and_factor), 16) * 16


def _few_bytes(
    record: int, n_columns: int, parts: int, arithmetic: ActivationPrecision = F32
) -> int:
    """Return the shared memory of `gemv` if `parts` thread blocks divide the slots."""
    size = STEP if arithmetic == ActivationPrecision.BF16 else STEP * UNIT_STEPS
    n_pieces, per_unit = ceil_div(n_columns, size), STEP * UNIT_STEPS // size
    starts = [n_pieces * slot // SLOTS for slot in range(SLOTS + 1)]
    step = SLOTS // parts
    most = max(
        ceil_div(starts[slot + step], per_unit) - starts[slot] // per_unit
        for slot in range(0, SLOTS, step)
    )
    return 2 * most * record + 2 * 512 * WARPS


def is_whole(w: MmaPacked, arithmetic: ActivationPrecision = F32) -> bool:
    """Return whether all units have two chunks and all slots whole units."""
    if arithmetic == ActivationPrecision.BF16:
        return ceil_div(w.n_columns, STEP) % (SLOTS * UNIT_STEPS) == 0
    return ceil_div(w.n_columns, CHUNK) % 2 == 0


def half_of_shared(device: Any) -> int:
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
def few_kernel(
    form: MmaLayout,
    tokens: int,
    whole: bool,
    arithmetic: ActivationPrecision = F32,
    *,
    bands: bool = False,
) -> Kernel:
    """Return `gemv` compiled for a form; `whole`: as `is_whole` says."""
    defines, parameters = few_defines(form, tokens, whole, arithmetic), FEW_PARAMETERS
    if bands:
        defines["BANDS"] = 1
        parameters += ", i64 x_band, i64 out_band"
    return cpp_kernel(__file__, "cuda_gemv.cu", "few_rows", parameters, defines=defines)


def few_defines(
    form: MmaLayout, tokens: int, whole: bool, arithmetic: ActivationPrecision
) -> dict[str, str | int]:
    """Return the macros of `gemv`."""
    own = {"TOKENS": tokens, "WARPS": WARPS, "WHOLE": int(whole), "ARITHMETIC": int(arithmetic)}
    return {**form.defines(), **own}


@cache
def many_kernel(
    form: MmaLayout, shape: GemmShape, whole: bool, arithmetic: ActivationPrecision = F32
) -> Kernel:
    """Return `gemm` compiled for a form; `whole`: as `is_whole` says."""
    defines = _many(form, shape, whole, arithmetic)
    return cpp_kernel(__file__, "cuda_gemm.cu", "many_rows", _MANY, defines=defines)


@cache
def _stage_kernel(form: MmaLayout, arithmetic: ActivationPrecision) -> Kernel:
    """Return `stage_rows` compiled for a form."""
    defines = _many(form, GemmShape(1, 1), False, arithmetic)  # of which it needs nothing
    return cpp_kernel(__file__, "cuda_gemm.cu", "stage_rows", _STAGE, defines=defines)


def _many(
    form: MmaLayout, shape: GemmShape, whole: bool, arithmetic: ActivationPrecision
) -> dict[str, str | int]:
    tiles = {"ROW_TILES": shape.row_tiles, "TOKEN_TILES": shape.token_tiles}
    return {**form.defines(), **tiles, "WHOLE": int(whole), "ARITHMETIC": int(arithmetic)}

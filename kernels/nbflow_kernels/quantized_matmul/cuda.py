"""Quantized matrix product on CUDA devices: choice of the kernel and launches.

=====================================================  =============================================
rows, weights                                          kernel
=====================================================  =============================================
up to 8, or rows of several matrices                   `gemv` (`cuda_gemv.cu`), bound by memory
more                                                   `gemm` (`cuda_gemm.cu`), a weight is
                                                       dequantized once for up to 32 rows (bf16 64)
more than 64, bfloat16 activations                     `cuda_dequant_gemm`: `wgmma`, or panels
float weights                                          `matmul.cuda`
user formats without integer codes                     `cuda_dequant_gemm`: panels
=====================================================  =============================================

Both kernels run on tensor cores, read `formats.layout_mma`, and add in float32, with activations as
(`ActivationPrecision`, `cuda_stage_activations.cuh`):

`F32_SUMS`    two float16 numbers, exact to 2**-23 of the largest of 128 columns; codes are
              float16 numbers
`INT8_SUMS`   int8: sums of products over 32 columns are exact
`BF16`        bfloat16, and weights rounded to bfloat16

Split-K depends only on the number of columns (`cuda_split_k.cuh`), so a row of the result is
bitwise the same in any batch, by either kernel.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache, lru_cache
from typing import Any, NamedTuple

from nbflow_kernels.cuda import Kernel, KernelDevice, ceil_div, cpp_kernel, device_of
from nbflow_kernels.cuda.workspace import allocated_bytes, workspace
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.cuda_gather import gather_columns
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.layout_mma import CHUNK, ROWS, UNIT, MmaLayout, MmaPacked, unit_form
from nbflow_kernels.formats.layout_mma_codes import FLOATS
from nbflow_kernels.formats.registry import QuantFormat
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.matmul import cuda as float_cuda
from nbflow_kernels.quantized_matmul import cuda_dequant_gemm
from nbflow_kernels.quantized_matmul.cuda_dequant_gemm import has_mma_layout
from nbflow_kernels.sparse import cuda as sparse

SPLITS = 8
"""Splits of the columns (`cuda_split_k.cuh`)."""
GEMV_MAX_ROWS = 8
"""Rows of activations in one MMA operand."""
WARPS = 8
RING = 2
"""Pipeline depth of `gemm`, in units of activations."""
BF16_MAX_ROWS = 64
"""Rows in bfloat16 up to which weights are dequantized in registers; panels are for more."""
STEP = 64
"""Columns of a step, the granularity of splits in bfloat16."""
UNIT_STEPS = 4
"""Steps of a unit."""
STATIC_BYTES = 2048
"""Upper bound of the static shared memory of `gemv`."""
MAX_STAGED_ROWS = 1024
"""Rows staged at a time, which bounds the workspace."""

GEMV_PARAMETERS = (
    "u8* weights, f32* x, f32*? bias, f32* out, f32*? partial, i32*? arrived, i32*? indptr, "
    "i32*? rows, i64 group_bytes, i64 tile_bytes, i64 x_stride, i64 out_stride, i32 n_tokens, "
    "i32 n_rows, i32 n_columns, f32 added, i32 int8"
)
_STAGE_PARAMETERS = "f32* x, u8* records, i64 x_stride, i32 n_tokens, i32 n_columns, i32 int8"
_GEMM_PARAMETERS = (
    "u8* weights, u8* records, f32*? bias, f32* out, f32*? partial, i32*? arrived, i64 tile_bytes, "
    "i64 out_stride, i32 n_tokens, i32 n_rows, i32 n_columns, i32 block_tiles, i32 accumulate"
)


class ActivationPrecision(IntEnum):
    """Activations on tensor cores; the values of `ARITHMETIC` in `cuda_stage_activations.cuh`."""

    F32_SUMS = 0
    INT8_SUMS = 1
    BF16 = 2

    @classmethod
    def of(cls, form: MmaLayout, activations: str) -> ActivationPrecision:
        """Return the precision for a kind of activations; "int8" may need `F32_SUMS`."""
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
    if w.column_order is not None:
        x = _in_stored_order(x, w)
    has_units = has_mma_layout(w)
    if activations == "int8" and not w.format.takes_int8:
        activations = "f32"
    if activations == "bf16" and not (has_units and len(x) <= BF16_MAX_ROWS):
        cuda_dequant_gemm.qmatmul(x, w, bias, accumulate, out)
    elif w.is_float:
        float_cuda.matmul(x, w.array, bias, accumulate, out)
    elif not has_units:
        cuda_dequant_gemm.decoded(x, w, bias, accumulate, activations == "int8", out)
    else:
        multiply(x, w.units(), bias, accumulate, activations, out)
    if w.outliers is not None:
        if activations == "int8":
            x = cuda_dequant_gemm.to_int8_grid(x)
        sparse.sparse_matmul(x, w.outliers, True, out)


def _in_stored_order(x: Any, w: QuantTensor) -> Any:
    """Return activations in the order of a weight's stored columns, times their factors."""
    shape = len(x), w.n_stored_columns
    gathered = workspace(device_of(x), "qmatmul columns", shape[0] * shape[1], "f4")
    gathered = gathered[: shape[0] * shape[1]].reshape(shape)
    gather_columns(x, w.column_order, gathered, w.column_scales)
    return gathered


def multiply(x: Any, w: MmaPacked, bias: Any, accumulate: bool, activations: str, out: Any) -> None:
    """Multiply by a matrix in the MMA layout."""
    n_rows = len(x)
    if n_rows <= MAX_STAGED_ROWS:  # slices of device arrays take as long as a launch
        launch = gemv if n_rows <= GEMV_MAX_ROWS else gemm
        launch(x, w, bias, accumulate, activations, out)
        return
    for row in range(0, n_rows, MAX_STAGED_ROWS):
        part = slice(row, row + MAX_STAGED_ROWS)
        multiply(x[part], w, bias, accumulate, activations, out[part])


class GemvPlan(NamedTuple):
    """Launch parameters of `gemv` for a matrix, a number of tokens and a device."""

    tokens: int
    """Tokens the kernel is compiled for."""
    grid: tuple[int, int]
    """Thread blocks; along the second axis they share the splits of a row tile."""
    shared: int
    """Bytes of dynamic shared memory."""
    n_groups: int
    """Groups of row tiles; a thread block computes one group at a time."""
    arithmetic: ActivationPrecision
    whole: bool
    """See `is_whole`."""
    n_tiles: int
    tile_bytes: int
    rounds_first: int
    """See `_rounds_first`."""

    @property
    def parts(self) -> int:
        """Thread blocks that share the splits of a row tile."""
        return self.grid[1]


def plan_gemv(
    device: KernelDevice, w: MmaPacked, n_tokens: int, activations: str
) -> GemvPlan | None:
    """Return the launch parameters, or None if the tokens do not fit the shared memory."""
    shape = w.form, w.n_rows, w.n_columns
    return _plan_gemv(*shape, n_tokens, activations, device.n_sms, device.max_shared_bytes)


@lru_cache(4096)  # planning takes as long as the rest of a launch
def _plan_gemv(
    form: MmaLayout, n_rows: int, n_columns: int, n_tokens: int, activations: str, n_sms: int,
    max_shared_bytes: int,
) -> GemvPlan | None:  # fmt: skip
    arithmetic, n_tiles = ActivationPrecision.of(form, activations), ceil_div(n_rows, ROWS)
    tokens = next(n for n in (1, 2, 4, 8) if n >= n_tokens)
    record, half = record_bytes(form, tokens, arithmetic), _half(max_shared_bytes)
    per_sm, parts = 2, 1
    while parts < SPLITS and _gemv_shared_bytes(record, n_columns, parts, arithmetic) > half:
        parts *= 2
    shared = _gemv_shared_bytes(record, n_columns, parts, arithmetic)
    if shared > half:
        per_sm = 1
        if shared + STATIC_BYTES > max_shared_bytes:
            return None
    n_groups = ceil_div(n_tiles * SPLITS, WARPS * parts)
    return GemvPlan(
        tokens, (min(n_groups, max(1, per_sm * n_sms // parts)), parts), shared, n_groups,
        arithmetic, is_whole(n_columns, arithmetic), n_tiles, form.tile_bytes(n_columns),
        _rounds_first(form, activations),
    )  # fmt: skip


def gemv(x: Any, w: MmaPacked, bias: Any, accumulate: bool, activations: str, out: Any) -> None:
    """Multiply up to 8 rows."""
    device = device_of(x)
    plan = plan_gemv(device, w, len(x), activations)
    if plan is None:
        half = len(x) // 2
        if not half:
            raise UsageError(
                f"activations for {w.n_columns} columns do not fit the shared memory of the device"
            )
        gemv(x[:half], w, bias, accumulate, activations, out[:half])
        gemv(x[half:], w, bias, accumulate, activations, out[half:])
        return
    gemv_kernel(w.form, plan.tokens, plan.whole, plan.arithmetic)(
        plan.grid, 32 * WARPS,
        gemv_arguments(plan, device, x, w, bias, float(accumulate), out), plan.shared,
    )  # fmt: skip


def gemv_arguments(
    plan: GemvPlan, device: KernelDevice, x: Any, w: MmaPacked, bias: Any, added: float, out: Any,
    rows: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of `gemv` for one matrix."""
    partial, arrived = _split_workspace(device, plan.parts, plan.n_tiles, plan.n_groups)
    return (
        w.data, x, bias, out, partial, arrived, None, rows, 0, plan.tile_bytes,
        *_strides(x, out), len(out), w.n_rows, w.n_columns, added, plan.rounds_first,
    )  # fmt: skip


def _rounds_first(form: MmaLayout, activations: str) -> int:
    """Return whether activations are rounded to int8 and multiplied in `F32_SUMS`."""
    rounds = activations == "int8" and form.takes_int8
    return int(rounds and ActivationPrecision.of(form, activations) == F32)


def grouped(
    x: Any, w: MmaPacked, n_matrices: int, indptr: Any, rows: Any, bias: Any, n_rows: int,
    activations: str, out: Any,
) -> None:  # fmt: skip
    """Multiply rows ``indptr[e]:indptr[e + 1]`` (of `rows` of `x`) by matrix e: grouped GEMV.

    A matrix has `n_rows` rows and is read once for 8 rows of activations.
    """
    device, form = device_of(x), w.form
    arithmetic = ActivationPrecision.of(form, activations)
    n_tiles, tile_bytes = ceil_div(n_rows, ROWS), form.tile_bytes(w.n_columns)

    def shared_bytes(tokens: int) -> int:
        return _gemv_shared_bytes(
            record_bytes(form, tokens, arithmetic), w.n_columns, 1, arithmetic
        )

    half = half_of_shared(device)
    tokens = next((n for n in (8, 4, 2, 1) if shared_bytes(n) <= half), 1)
    grid = min(n_tiles, max(1, 2 * device.n_sms))
    gemv_kernel(form, tokens, is_whole(w.n_columns, arithmetic), arithmetic)(
        (grid, 1, n_matrices), 32 * WARPS,
        (
            w.data, x, bias, out, None, None, indptr, rows, n_tiles * tile_bytes, tile_bytes,
            *_strides(x, out), len(x), n_rows, w.n_columns, 0.0, _rounds_first(form, activations),
        ),
        shared=shared_bytes(tokens),
    )  # fmt: skip


def batched(x: Any, w: QuantTensor, activations: str, out: Any) -> bool:
    """Batched product: ``out[:, h] = x[:, h] @ w[h].T``, with the bits of H single products.

    `w` (H, N, K) has no outliers or `column_order`, and is not in a user format without integer
    codes.  One launch
    for up to 8 rows and block formats, one or two for float weights and any number of rows.
    Returns False, and does nothing, in other cases.
    """
    if activations == "bf16":
        return False
    if w.is_float:
        float_cuda.batched(x, w.array, out)
        return True
    return _batched(x, w.units(), activations, out)


def _batched(x: Any, w: MmaPacked, activations: str, out: Any) -> bool:
    """Run `gemv` batched if there are up to 8 rows and they fit the shared memory."""
    n_tokens, n_matrices, n_rows = out.shape
    device, form = device_of(x), w.form
    tokens = next((n for n in (1, 2, 4, 8) if n >= n_tokens), 0)
    arithmetic = ActivationPrecision.of(form, activations)
    shared = _gemv_shared_bytes(record_bytes(form, tokens, arithmetic), w.n_columns, 1)
    if not tokens or shared + STATIC_BYTES > device.max_shared_bytes:
        return False
    n_units = ceil_div(w.n_columns, UNIT)
    splits = next((n for n in (1, 2, 4) if n >= n_units), SPLITS)
    n_tiles, tile_bytes = ceil_div(n_rows, ROWS), form.tile_bytes(w.n_columns)
    grid = min(ceil_div(n_tiles * splits, WARPS), max(1, 2 * device.n_sms // n_matrices))
    gemv_kernel(form, tokens, is_whole(w.n_columns, arithmetic), arithmetic, is_batched=True)(
        (grid, 1, n_matrices), 32 * WARPS,
        (
            w.data, x, None, out, None, None, None, None, n_tiles * tile_bytes, tile_bytes,
            *_strides(x, out), n_tokens, n_rows, w.n_columns, 0.0,
            _rounds_first(form, activations), x.strides[1] // 4, out.strides[1] // 4,
        ),
        shared=shared,
    )  # fmt: skip
    return True


class GemmShape(NamedTuple):
    """Tile of `gemm`."""

    row_tiles: int
    """Row tiles per warp."""
    token_tiles: int
    """Groups of 8 tokens per thread block."""

    @classmethod
    def of(
        cls, form: MmaLayout, n_groups: int, arithmetic: ActivationPrecision = F32,
        max_shared_bytes: int | None = None,
    ) -> GemmShape:  # fmt: skip
        """Return the largest shape that fits the registers and the shared memory."""
        row_tiles, token_tiles = 2, 8 if arithmetic == ActivationPrecision.BF16 else 4
        two_numbers = form.kind == FLOATS  # of a weight: twice the operands
        if arithmetic != ActivationPrecision.BF16 and (form.sub_block == 16 or two_numbers):
            row_tiles = 1
        if max_shared_bytes is not None:
            while token_tiles > 1 and (
                cls(row_tiles, token_tiles).shared_bytes(form, arithmetic) > max_shared_bytes
            ):
                token_tiles -= 1
        return cls(row_tiles, ceil_div(n_groups, ceil_div(n_groups, token_tiles)))

    def shared_bytes(self, form: MmaLayout, arithmetic: ActivationPrecision) -> int:
        """Return the bytes of the ring and the totals in shared memory."""
        results = 4 * self.row_tiles * self.token_tiles
        record = record_bytes(form, 8, arithmetic)
        return 2 * RING * self.token_tiles * record + 4 * 32 * WARPS * results

    def grid(self, n_sms: int, n_tiles: int, n_groups: int) -> tuple[int, int, int, int]:
        """Return the grid and the row tiles per thread block, balanced over the SMs."""
        n_token_tiles = ceil_div(n_groups, self.token_tiles)
        n_blocks = ceil_div(n_tiles, WARPS * self.row_tiles) * n_token_tiles
        parts = 1
        while parts < SPLITS and n_blocks * parts * 2 <= n_sms:
            parts *= 2
        n_row_blocks = ceil_div(n_blocks * parts, n_sms) * n_sms // (parts * n_token_tiles)
        block_tiles = ceil_div(ceil_div(n_tiles, n_row_blocks), self.row_tiles) * self.row_tiles
        return ceil_div(n_tiles, block_tiles), parts, n_token_tiles, block_tiles


class GemmPlan(NamedTuple):
    """Launch parameters of `gemm` for a matrix, a number of tokens and a device."""

    shape: GemmShape
    grid: tuple[int, int, int]
    block_tiles: int
    """Row tiles per thread block."""
    n_groups: int
    """Groups of 8 tokens, padded with zeros to whole tiles."""
    record_bytes: int
    """Bytes of all staged activations."""
    shared: int
    """Bytes of dynamic shared memory."""
    arithmetic: ActivationPrecision
    whole: bool
    """See `is_whole`."""
    n_tiles: int
    tile_bytes: int
    rounds_first: int
    """See `_rounds_first`."""

    @property
    def sums(self) -> tuple[int, int, int]:
        """Arguments of `_split_workspace` after the device."""
        return self.grid[1], self.n_tiles * self.n_groups, self.grid[0] * self.grid[2]


@lru_cache(4096)  # planning takes longer than a launch
def _plan_gemm(
    form: MmaLayout, n_rows: int, n_columns: int, n_tokens: int, activations: str, n_sms: int,
    max_shared_bytes: int,
) -> GemmPlan:  # fmt: skip
    arithmetic, n_tiles = ActivationPrecision.of(form, activations), ceil_div(n_rows, ROWS)
    n_groups, dynamic_bytes = ceil_div(n_tokens, 8), max_shared_bytes - 64  # the rest is static
    shape = GemmShape.of(form, n_groups, arithmetic, dynamic_bytes)
    *grid, block_tiles = shape.grid(n_sms, n_tiles, n_groups)
    n_groups = grid[2] * shape.token_tiles
    size = ceil_div(n_columns, CHUNK) * n_groups * record_bytes(form, 8, arithmetic)
    return GemmPlan(
        shape, (grid[0], grid[1], grid[2]), block_tiles, n_groups, size,
        shape.shared_bytes(form, arithmetic), arithmetic, is_whole(n_columns, arithmetic),
        n_tiles, form.tile_bytes(n_columns), _rounds_first(form, activations),
    )  # fmt: skip


def gemm(x: Any, w: MmaPacked, bias: Any, accumulate: bool, activations: str, out: Any) -> None:
    """Multiply any number of rows."""
    device, form, n_tokens = device_of(x), w.form, len(x)
    limits = device.n_sms, device.max_shared_bytes
    plan = _plan_gemm(form, w.n_rows, w.n_columns, n_tokens, activations, *limits)
    records = workspace(device, "qmatmul records", plan.record_bytes, "u1")
    x_stride, out_stride = _strides(x, out)
    _stage_kernel(form, plan.arithmetic)(
        (ceil_div(w.n_columns, CHUNK), plan.n_groups), 256,
        (x, records, x_stride, n_tokens, w.n_columns, plan.rounds_first),
    )  # fmt: skip
    partial, arrived = _split_workspace(device, *plan.sums)
    gemm_kernel(form, plan.shape, plan.whole, plan.arithmetic)(
        plan.grid, 32 * WARPS,
        (
            w.data, records, bias, out, partial, arrived, plan.tile_bytes, out_stride,
            n_tokens, w.n_rows, w.n_columns, plan.block_tiles, int(accumulate),
        ),
        shared=plan.shared,
    )  # fmt: skip


def workspace_bytes(
    format: QuantFormat, n_rows: int, n_columns: int, n_tokens: int, activations: str, device: Any
) -> dict[str, int]:
    """Return the sizes of the workspaces of `qmatmul` by name, those of outliers excepted.

    `n_columns` are those of a stored row; `device` has `n_sms`, `max_shared_bytes` and `arch`.
    """
    shape, has_units = (n_rows, n_columns), format.has_mma_layout
    if activations == "int8" and not format.takes_int8:
        activations = "f32"
    if activations == "bf16" and not (has_units and n_tokens <= BF16_MAX_ROWS):
        return cuda_dequant_gemm.workspace_bytes(format, *shape, n_tokens, device)
    if isinstance(format, FloatFormat):
        return float_cuda.workspace_bytes(format.dtype.name, *shape, n_tokens, device)
    if not has_units:
        return cuda_dequant_gemm.decoded_workspace_bytes(*shape)
    return multiply_workspace_bytes(format, *shape, n_tokens, activations, device)


def multiply_workspace_bytes(
    format: QuantFormat, n_rows: int, n_columns: int, n_tokens: int, activations: str, device: Any
) -> dict[str, int]:
    """Return the sizes of the workspaces of `multiply` by name."""
    shape = unit_form(format.integer_form), n_rows, n_columns
    limits = device.n_sms, device.max_shared_bytes
    if n_tokens <= GEMV_MAX_ROWS:
        gemv_plan = _plan_gemv(*shape, n_tokens, activations, *limits)
        if gemv_plan is None:
            return {}
        return _split_bytes(gemv_plan.parts, gemv_plan.n_tiles, gemv_plan.n_groups)
    plan = _plan_gemm(*shape, min(n_tokens, MAX_STAGED_ROWS), activations, *limits)
    records = {"qmatmul records": allocated_bytes(plan.record_bytes, 1)}
    return records | _split_bytes(*plan.sums)


def record_bytes(form: MmaLayout, tokens: int, arithmetic: ActivationPrecision = F32) -> int:
    """Return the bytes of a staged chunk (`cuda_stage_activations.cuh`)."""
    if arithmetic == ActivationPrecision.BF16:
        return 256 * tokens
    sums_and_factor = 8 * max(1, CHUNK // form.sub_block // 2) + 4
    numbers = 512 if arithmetic == F32 else 256 + 4 * (CHUNK // 32)
    return ceil_div(tokens * (numbers + sums_and_factor), 16) * 16


def _gemv_shared_bytes(
    record: int, n_columns: int, parts: int, arithmetic: ActivationPrecision = F32
) -> int:
    """Return the shared memory of `gemv` if `parts` thread blocks share the splits."""
    size = STEP if arithmetic == ActivationPrecision.BF16 else STEP * UNIT_STEPS
    n_steps, per_unit = ceil_div(n_columns, size), STEP * UNIT_STEPS // size
    starts = [n_steps * split // SPLITS for split in range(SPLITS + 1)]
    step = SPLITS // parts
    max_units = max(
        ceil_div(starts[split + step], per_unit) - starts[split] // per_unit
        for split in range(0, SPLITS, step)
    )
    return 2 * max_units * record + 2 * 512 * WARPS


def is_whole(n_columns: int, arithmetic: ActivationPrecision = F32) -> bool:
    """Return whether all units have two chunks and all splits are whole units."""
    if arithmetic == ActivationPrecision.BF16:
        return ceil_div(n_columns, STEP) % (SPLITS * UNIT_STEPS) == 0
    return ceil_div(n_columns, CHUNK) % 2 == 0


def half_of_shared(device: Any) -> int:
    """Return the dynamic shared memory with which two thread blocks fit an SM."""
    return _half(device.max_shared_bytes)


def _half(max_shared_bytes: int) -> int:
    return max_shared_bytes // 2 - 1024 - STATIC_BYTES


def _split_workspace(device: Any, parts: int, n_tiles: int, n_counters: int) -> tuple[Any, Any]:
    """Return partial sums and arrival counters, or None where one thread block has all splits."""
    if parts == 1:
        return None, None
    partial = workspace(device, "qmatmul sums", n_tiles * SPLITS * 128, "f4")
    return partial, workspace(device, "qmatmul arrived", n_counters, "i4", zero=True)


def _strides(x: Any, out: Any) -> tuple[int, int]:
    """Return the row strides in numbers."""
    return x.strides[0] // 4, out.strides[0] // 4


def _split_bytes(parts: int, n_tiles: int, n_counters: int) -> dict[str, int]:
    """Return the sizes of `_split_workspace` by name."""
    if parts == 1:
        return {}
    return {
        "qmatmul sums": allocated_bytes(n_tiles * SPLITS * 128, 4),
        "qmatmul arrived": allocated_bytes(n_counters, 4),
    }


@cache
def gemv_kernel(
    form: MmaLayout,
    tokens: int,
    whole: bool,
    arithmetic: ActivationPrecision = F32,
    *,
    is_batched: bool = False,
) -> Kernel:
    """Return `gemv` compiled for a layout; see `is_whole` for `whole`."""
    defines, parameters = gemv_defines(form, tokens, whole, arithmetic), GEMV_PARAMETERS
    if is_batched:
        defines["BATCHED"] = 1
        parameters += ", i64 x_batch_stride, i64 out_batch_stride"
    return cpp_kernel(__file__, "cuda_gemv.cu", "gemv", parameters, defines=defines)


def gemv_defines(
    form: MmaLayout, tokens: int, whole: bool, arithmetic: ActivationPrecision
) -> dict[str, str | int]:
    """Return the macros of `gemv`."""
    own = {"TOKENS": tokens, "WARPS": WARPS, "WHOLE": int(whole), "ARITHMETIC": int(arithmetic)}
    return {**form.defines(), **own}


@cache
def gemm_kernel(
    form: MmaLayout, shape: GemmShape, whole: bool, arithmetic: ActivationPrecision = F32
) -> Kernel:
    """Return `gemm` compiled for a layout; see `is_whole` for `whole`."""
    defines = _gemm_defines(form, shape, whole, arithmetic)
    return cpp_kernel(__file__, "cuda_gemm.cu", "gemm", _GEMM_PARAMETERS, defines=defines)


@cache
def _stage_kernel(form: MmaLayout, arithmetic: ActivationPrecision) -> Kernel:
    """Return `stage_activations` compiled for a layout."""
    defines = _gemm_defines(form, GemmShape(1, 1), False, arithmetic)  # any shape
    return cpp_kernel(
        __file__, "cuda_gemm.cu", "stage_activations", _STAGE_PARAMETERS, defines=defines
    )


def _gemm_defines(
    form: MmaLayout, shape: GemmShape, whole: bool, arithmetic: ActivationPrecision
) -> dict[str, str | int]:
    tiles = {"ROW_TILES": shape.row_tiles, "TOKEN_TILES": shape.token_tiles}
    return {**form.defines(), **tiles, "WHOLE": int(whole), "ARITHMETIC": int(arithmetic)}

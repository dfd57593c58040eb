"""GEMV and GEMM on tensor cores (`mma.sync`), float16 or bfloat16 weights: `cuda_mma.cu`.

An activation is decomposed into numbers of the weights' type: three of bfloat16, which hold all 24
bits, two of float16 after scaling each token by a power of two (exact to 2**-22 of the number or
2**-38 of the token's largest), or one, rounded.  A row of the result is bitwise the same in any
batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from nbflow_kernels.cuda import (
    Kernel,
    KernelDevice,
    address,
    ceil_div,
    cpp_kernel,
    device_of,
)
from nbflow_kernels.cuda.workspace import allocated_bytes, workspace

STEP = 64
"""Columns of a step of split-K; tokens are padded to it."""
LOAD_COLUMNS = 8
"""Columns of a 16-byte load; rows must be a multiple."""
GEMV_TOKENS = 8
"""Tokens of a thread block of `gemv`."""
GEMV_ROWS = 32
"""Rows of a thread block of `gemv`."""
GEMV_MAX_TOKENS = 16
"""Up to here two `gemv` launches beat `gemm`, which has too few thread blocks to fill a device."""
MAX_STAGED_TOKENS = 1024
"""Tokens staged at a time, which bounds the workspace."""
MAX_STAGED_ROWS = 1 << 14
"""Tokens times matrices staged at a time for batched products."""
KINDS = {"float16": (1, "f16", 2), "uint16": (2, "bf16", 3)}
"""dtype of weights -> number in the kernels, name, parts of a float32 activation."""


class GemmTile(NamedTuple):
    """Tile of `gemm`; a warp has `row_tiles` x `token_tiles` results of 16 x 8."""

    row_tiles: int
    token_warps: int
    token_tiles: int

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return 64 * self.row_tiles

    @property
    def tokens(self) -> int:
        """Tokens of a thread block."""
        return 8 * self.token_warps * self.token_tiles

    def shared_bytes(self, parts: int) -> int:
        """Return the bytes of the shared-memory ring."""
        return (3 if parts == 3 else 4) * (self.rows + parts * self.tokens) * 2 * STEP


SMALL, LARGE = GemmTile(1, 1, 4), GemmTile(2, 2, 8)
MIDDLE = GemmTile(2, 1, 8)
"""For devices whose shared memory `LARGE` exceeds: 163 KB (sm_80) or 99 KB (sm_86, sm_89)."""
SMALL_MAX_TOKENS = 64
"""Tokens up to which `SMALL` is chosen."""


@dataclass(frozen=True)
class StagedTokens:
    """Tokens decomposed into 16-bit numbers, in global memory."""

    kind: int
    name: str
    n_parts: int
    parts: Any
    """[part][token][stride], 16 bits each."""
    factors: Any
    """float32 per token; None if all are 1."""
    n_tokens: int
    stride: int
    n_matrices: int


def fits(w: Any) -> bool:
    """Return whether the kernels support the dtype, row length and alignment of weights (N, K)."""
    fits = w.dtype.name in KINDS and w.shape[-1] % LOAD_COLUMNS == 0 and w.size > 0
    return fits and address(w) % 16 == 0


def multiply(
    x: Any, w: Any, bias: Any, accumulate: bool, out: Any, *, rounded: bool = False,
    fragment_order: bool = False,
) -> None:  # fmt: skip
    """Multiply float32 rows by a matrix (N, K) that `fits`; see `stage` for the options."""
    for row in range(0, len(x), MAX_STAGED_TOKENS):
        part = slice(row, row + MAX_STAGED_TOKENS)
        staged = stage(x[part], w.dtype.name, rounded=rounded, fragment_order=fragment_order)
        multiply_staged(staged, w, bias, accumulate, out[part])


def stage(
    x: Any, dtype: str, *, rounded: bool = False, fragment_order: bool = False
) -> StagedTokens:
    """Stage float32 rows (T, K), or those of a batched product (T, H, K), for weights of a dtype.

    `rounded` rounds each number to one of the weights' type instead of decomposing it.
    `fragment_order` is for weights with columns permuted by `column_at`, as
    `cuda_dequant_gemm.unpack` writes them.
    """
    kind, name, n_parts = KINDS[dtype]
    n_parts = 1 if rounded else n_parts
    n_tokens, n_columns, device = x.shape[0], x.shape[-1], device_of(x)
    n_matrices, x_batch_stride = (x.shape[1], x.strides[1] // 4) if x.ndim == 3 else (1, 0)
    stride = row_stride(n_columns)
    size = n_matrices * n_parts * n_tokens * stride
    parts = workspace(device, f"matmul {name} tokens", size, "u2" if name == "bf16" else "f2")
    factors = workspace(device, "matmul factors", n_matrices * n_tokens, "f4")
    _stage(kind, name, n_parts, fragment_order)(
        (n_tokens, 1, n_matrices), 256,
        (x, parts, factors, x.strides[0] // 4, n_tokens, n_columns, stride, x_batch_stride),
    )  # fmt: skip
    if kind != 1:
        factors = None
    return StagedTokens(kind, name, n_parts, parts, factors, n_tokens, stride, n_matrices)


def row_stride(n_columns: int) -> int:
    """Return the numbers of a staged token."""
    return ceil_div(n_columns, STEP) * STEP


def workspace_bytes(dtype: str, n_columns: int, n_tokens: int, rounded: bool) -> dict[str, int]:
    """Return the sizes of the workspaces of `multiply` by name."""
    _, name, n_parts = KINDS[dtype]
    n_tokens = min(n_tokens, MAX_STAGED_TOKENS)
    size = (1 if rounded else n_parts) * n_tokens * row_stride(n_columns)
    return {
        f"matmul {name} tokens": allocated_bytes(size, 2),
        "matmul factors": allocated_bytes(n_tokens, 4),
    }


def grouped(x: Any, w: Any, bias: Any, indptr: Any, rows: Any, out: Any) -> None:
    """Multiply rows ``indptr[e]:indptr[e + 1]`` (of `rows` of `x`) by matrix e of `w` (E, N, K).

    A matrix is read once for 8 rows; the bits are those of `multiply`.
    """
    staged, (E, n_rows, n_columns) = stage(x, w.dtype.name), w.shape
    _kernel("gemv", staged.kind, staged.name, staged.n_parts)(
        (ceil_div(n_rows, GEMV_ROWS), 1, E), 256,
        (
            w, staged.parts, staged.factors, bias, out, out.strides[0] // 4, staged.n_tokens, 0, 0,
            n_rows, n_columns, staged.stride, 0, 0, indptr, rows,
        ),
    )  # fmt: skip


def multiply_staged(x: StagedTokens, w: Any, bias: Any, accumulate: bool, out: Any) -> None:
    """Multiply staged rows by a matrix (N, K) of their type, or batched by (H, N, K)."""
    n_rows, n_columns = w.shape[-2:]
    batch_stride = out.strides[1] // 4 if out.ndim == 3 else 0

    def arguments(first: int, stop: int) -> tuple[Any, ...]:
        return (
            w, x.parts, x.factors, bias, out, out.strides[0] // 4, x.n_tokens, first, stop, n_rows,
            n_columns, x.stride, int(accumulate), batch_stride,
        )  # fmt: skip

    if x.n_tokens <= GEMV_MAX_TOKENS:
        gemv, grid = _kernel("gemv", x.kind, x.name, x.n_parts), ceil_div(n_rows, GEMV_ROWS)
        for first in range(0, x.n_tokens, GEMV_TOKENS):
            stop = min(x.n_tokens, first + GEMV_TOKENS)
            gemv((grid, 1, x.n_matrices), 256, (*arguments(first, stop), None, None))
        return
    tile = tile_of(device_of(x.parts), x.n_tokens, x.n_parts)
    _kernel("gemm", x.kind, x.name, x.n_parts, tile)(
        (ceil_div(n_rows, tile.rows), ceil_div(x.n_tokens, tile.tokens), x.n_matrices),
        128 * tile.token_warps, arguments(0, x.n_tokens), tile.shared_bytes(x.n_parts),
    )  # fmt: skip


def tile_of(device: KernelDevice, n_tokens: int, n_parts: int) -> GemmTile:
    """Return the tile of `gemm`: the largest that fits, or `SMALL` for few tokens."""
    large = (LARGE, MIDDLE) if n_tokens > SMALL_MAX_TOKENS else ()
    return next((t for t in large if t.shared_bytes(n_parts) <= device.max_shared_bytes), SMALL)


@cache
def _stage(kind: int, name: str, n_parts: int, fragment_order: bool) -> Kernel:
    """Return the kernel `stage`."""
    parameters = (
        f"f32* x, {name}* parts, f32* factors, i64 x_stride, i32 n_tokens, i32 n_columns, "
        "i32 stride, i64 x_batch_stride"
    )
    entry = f"stage<{kind}, {n_parts}, {str(fragment_order).lower()}>"
    return cpp_kernel(__file__, "cuda_mma.cu", entry, parameters)


@cache
def _kernel(entry: str, kind: int, name: str, n_parts: int, tile: GemmTile | None = None) -> Kernel:
    """Return the kernel `gemv` or `gemm` for a type of weights."""
    parameters = (
        f"{name}* w, {name}* parts, f32*? factors, f32*? bias, f32* out, i64 out_stride, "
        "i32 n_staged, i32 first, i32 n_tokens, i32 n_rows, i32 n_columns, i32 stride, "
        "i32 accumulate, i64 out_batch_stride"
    )
    if entry == "gemv":
        parameters += ", i32*? indptr, i32*? rows"
    numbers = ", ".join(map(str, (kind, n_parts, *(tile or ()))))
    return cpp_kernel(__file__, "cuda_mma.cu", f"{entry}<{numbers}>", parameters)

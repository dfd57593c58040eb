"""Matrix product with weights in float16 or bfloat16 on tensor cores: `cuda_mma.cu`.

Activations become numbers of the weights' type: three of bfloat16, which hold all 24 bits, two of
float16 after a power of two for each token (exact to 2**-22 of the number or 2**-38 of the token's
largest), or one, rounded.  A row of the result is bitwise the same in any batch.  Devices of
compute capability 9.0 multiply many tokens with `wgmma`, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from nbflow_kernels.cuda import Kernel, address, ceil_div, cpp_kernel, device_of
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.matmul import cuda_wgmma

STEP = 64
"""Columns that are added together; tokens are padded to it."""
PIECE = 8
"""Columns of a load; rows must be whole ones."""
FEW, FEW_ROWS = 8, 32
"""Tokens and rows of a thread block of `few`."""
TWICE = 16
"""Up to so many tokens are two times few: `many` has too few thread blocks to fill a device."""
ROWS_AT_ONCE = 1024
"""Tokens that are staged together: bounds the memory for them."""
BANDS_AT_ONCE = 1 << 14
"""The same of bands of columns."""
KINDS = {"float16": (1, "f16", 2), "uint16": (2, "bf16", 3)}
"""Of a type of weights: the kernels' number, the name, and the parts of a float32 number."""


class Shape(NamedTuple):
    """How `many` divides the work; a warp has `row_tiles` x `token_tiles` results of 16 x 8."""

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
        """Return the bytes of the ring."""
        return (3 if parts == 3 else 4) * (self.rows + parts * self.tokens) * 2 * STEP


SMALL, LARGE = Shape(1, 1, 4), Shape(2, 2, 8)
MOST_OF_SMALL = 64
"""Tokens up to which `SMALL` is taken."""


@dataclass(frozen=True)
class Staged:
    """Tokens in the numbers that tensor cores take."""

    kind: int
    name: str
    n_parts: int
    parts: Any
    """[part][token][stride], 16 bits each."""
    factors: Any
    """float32 for each token; None if they are all 1."""
    n_tokens: int
    stride: int
    n_bands: int


def fits(w: Any) -> bool:
    """Return whether weights (N, K) have a type and rows that tensor cores read."""
    whole = w.dtype.name in KINDS and w.shape[-1] % PIECE == 0 and w.size > 0
    return whole and address(w) % 16 == 0


def multiply(
    x: Any, w: Any, bias: Any, accumulate: bool, out: Any, *, rounded: bool = False,
    of_units: bool = False,
) -> None:  # fmt: skip
    """Multiply float32 rows by a matrix (N, K) that `fits`; see `stage` for the options."""
    if cuda_wgmma.takes(device_of(x), len(x)):
        cuda_wgmma.multiply(x, w, bias, accumulate, out, rounded=rounded, in_pieces=not of_units)
        return
    for row in range(0, len(x), ROWS_AT_ONCE):
        part = slice(row, row + ROWS_AT_ONCE)
        staged = stage(x[part], w.dtype.name, rounded=rounded, of_units=of_units)
        multiply_staged(staged, w, bias, accumulate, out[part])


def stage(x: Any, dtype: str, *, rounded: bool = False, of_units: bool = False) -> Staged:
    """Return float32 rows (T, K), or bands (T, H, K), for weights of a type.

    They are `rounded` to one number, or else as many as hold them.  `of_units`: with weights in the
    order of `column_at`, which `qmatmul.rounded.unpack` writes.
    """
    kind, name, n_parts = KINDS[dtype]
    n_parts = 1 if rounded else n_parts
    n_tokens, n_columns, device = x.shape[0], x.shape[-1], device_of(x)
    n_bands, x_band = (x.shape[1], x.strides[1] // 4) if x.ndim == 3 else (1, 0)
    stride = ceil_div(n_columns, STEP) * STEP
    size = n_bands * n_parts * n_tokens * stride
    parts = workspace(device, f"matmul {name} tokens", size, "u2" if name == "bf16" else "f2")
    factors = workspace(device, "matmul factors", n_bands * n_tokens, "f4")
    _stage(kind, name, n_parts, of_units)(
        (n_tokens, 1, n_bands), 256,
        (x, parts, factors, x.strides[0] // 4, n_tokens, n_columns, stride, x_band),
    )  # fmt: skip
    if kind != 1:
        factors = None
    return Staged(kind, name, n_parts, parts, factors, n_tokens, stride, n_bands)


def multiply_staged(x: Staged, w: Any, bias: Any, accumulate: bool, out: Any) -> None:
    """Multiply staged rows by a matrix of their type, or bands by those of (H, N, K)."""
    n_rows, n_columns = w.shape[-2:]
    if x.n_tokens <= TWICE:
        for first in range(0, x.n_tokens, FEW):
            _few(x, w, bias, accumulate, out, first)
        return
    shape = SMALL if x.n_tokens <= MOST_OF_SMALL else LARGE
    _kernel("many", x.kind, x.name, x.n_parts, shape)(
        (ceil_div(n_rows, shape.rows), ceil_div(x.n_tokens, shape.tokens), x.n_bands),
        128 * shape.token_warps,
        (
            w, x.parts, x.factors, bias, out, out.strides[0] // 4, x.n_tokens, 0, x.n_tokens,
            n_rows, n_columns, x.stride, int(accumulate), _band(out),
        ),
        shape.shared_bytes(x.n_parts),
    )  # fmt: skip


def _few(x: Staged, w: Any, bias: Any, accumulate: bool, out: Any, first: int) -> None:
    n_rows, n_columns = w.shape[-2:]
    _kernel("few", x.kind, x.name, x.n_parts)(
        (ceil_div(n_rows, FEW_ROWS), 1, x.n_bands), 256,
        (
            w, x.parts, x.factors, bias, out, out.strides[0] // 4, x.n_tokens, first,
            min(x.n_tokens, first + FEW), n_rows, n_columns, x.stride, int(accumulate),
            _band(out),
        ),
    )  # fmt: skip


def _band(out: Any) -> int:
    """Return how far the results of two bands lie apart, in numbers."""
    return out.strides[1] // 4 if out.ndim == 3 else 0


@cache
def _stage(kind: int, name: str, n_parts: int, of_units: bool) -> Kernel:
    """Return the kernel that stages tokens."""
    parameters = (
        f"f32* x, {name}* parts, f32* factors, i64 x_stride, i32 n_tokens, i32 n_columns, "
        "i32 stride, i64 x_band"
    )
    entry = f"stage<{kind}, {n_parts}, {str(of_units).lower()}>"
    return cpp_kernel(__file__, "cuda_mma.cu", entry, parameters)


@cache
def _kernel(entry: str, kind: int, name: str, n_parts: int, shape: Shape | None = None) -> Kernel:
    """Return a kernel for a type of weights."""
    parameters = (
        f"{name}* w, {name}* parts, f32*? factors, f32*? bias, f32* out, i64 out_stride, "
        "i32 n_staged, i32 first, i32 n_tokens, i32 n_rows, i32 n_columns, i32 stride, "
        "i32 accumulate, i64 out_band"
    )
    numbers = ", ".join(map(str, (kind, n_parts, *(shape or ()))))
    return cpp_kernel(__file__, "cuda_mma.cu", f"{entry}<{numbers}>", parameters)

"""GEMM by `wgmma` (compute capability 9.0), main loop in `cuda_wgmma_mainloop.cuh`.

They have the rate of tensor cores that `mma.sync`, which every other product uses, does not reach.
The order of sums is the same, so a row of the result has the same bits in any batch as long as a
step of 16 columns is added alike by both instructions.  No manual says so: `agrees` tries it once
on each device, and where they differ all products stay with `mma.sync`.

Thread blocks may run in clusters of two, with rows beside each other: each brings half of the
tokens for both, which changes no sum.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nbflow_kernels.cuda import Kernel, KernelDevice, ceil_div, cpp_kernel, device_of
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.errors import UsageError

STEP, LINE = 64, 128
"""Columns of a step, and bytes of a token's."""
ROWS, THREADS = 128, 256
"""Of a thread block."""
TOKENS = (64, 128, 192)
"""Of a thread block: what there is to choose from."""
ROWS_AT_ONCE = 1536
"""Tokens that are staged together, whole tiles: bounds the memory for them."""
MORE_THAN = 64
"""Tokens for which `tensor_cores.many` has small thread blocks, and as much to do."""
ALIGNED = 1024
"""Bytes: where tokens may begin in shared memory."""
_WEIGHTS_RING = 4 * ROWS * LINE
_VARIABLE, _CLUSTERS = "NBFLOW_WGMMA", "NBFLOW_CLUSTERS"


@dataclass(frozen=True)
class Lines:
    """Tokens as `stage_lines` writes them."""

    kind: int
    name: str
    n_parts: int
    lines: Any
    """[step][part][token], 128 bytes each."""
    factors: Any
    """float32 for each token; None if they are all 1."""
    n_tokens: int
    n_staged: int
    """Tokens, and zeros that fill the last tile."""
    n_steps: int
    tile: int
    """Tokens of a thread block."""

    @property
    def grid_x(self) -> int:
        """Tiles."""
        return self.n_staged // self.tile

    def ring_bytes(self, together: int) -> int:
        """Return the shared memory for tokens of a thread block (`TokenRing`)."""
        n_lines = self.n_parts * self.tile
        stages = (3 if n_lines > 192 else 4) + (together > 1 and n_lines <= 256)
        return stages * n_lines * LINE


@dataclass(frozen=True)
class Tiling:
    """How the tokens of a product are shared out."""

    tokens: int
    """Of a thread block."""
    together: int
    """Thread blocks of a cluster, which bring the same tokens for each other."""

    def row_tiles(self, n_rows: int) -> int:
        """Return the row tiles, whole clusters of them."""
        return ceil_div(n_rows, ROWS * self.together) * self.together


def takes(device: KernelDevice, n_tokens: int) -> bool:
    """Return whether products of so many tokens are to be made here."""
    return n_tokens > MORE_THAN and usable(device)


def usable(device: KernelDevice) -> bool:
    """Return whether a device has `wgmma` and may be given it.

    The environment variable NBFLOW_WGMMA decides: 0, never; 1, always where there is `wgmma`;
    else where it `agrees`.
    """
    if device.arch != "sm_90":
        return False
    chosen = _chosen(_VARIABLE)
    return chosen == "1" or (not chosen and agrees(device))


def cluster_sizes() -> tuple[int, ...]:
    """Return the thread blocks of a cluster that there are to choose from.

    The environment variable NBFLOW_CLUSTERS decides: 0, no clusters; 1, always clusters; else both.
    """
    return {"0": (1,), "1": (2,), "": (1, 2)}[_chosen(_CLUSTERS)]


def _chosen(variable: str) -> str:
    chosen = os.environ.get(variable, "")
    if chosen not in ("", "0", "1"):
        raise UsageError(f"{variable} must be 0, 1 or empty, got '{chosen}'")
    return chosen


def agrees(device: KernelDevice) -> bool:
    """Return whether `wgmma` and `mma.sync` give the same bits on a device.

    Found at the first call: as with every kernel, run it once before a graph is captured.
    """
    key = ("matmul", "wgmma agrees")
    if key not in device.constants:
        device.constants[key] = all(same_bits(device, dtype) for dtype in ("float16", "uint16"))
    return bool(device.constants[key])


def same_bits(device: KernelDevice, dtype: str) -> bool:
    """Return whether both instructions give the same bits for weights of a type.

    Terms have sizes from 2**-16 to 2**16 and any sign, so that the bits tell how many are added
    together, and which are shifted out of the sum.
    """
    from nbflow_kernels.matmul import cuda_mma

    rng = np.random.default_rng(0)
    n_rows, n_tokens, n_columns = ROWS, 8, 8 * STEP
    sizes = rng.integers(-8, 9, (2, n_columns))
    w = np.ldexp(rng.standard_normal((n_rows, n_columns)), sizes[0]).astype(np.float32)
    w = w.view(np.uint32) >> 16 if dtype == "uint16" else w.astype(np.float16).view(np.uint16)
    weights = device.asarray(w.astype(np.uint16).view(dtype))
    x = np.ldexp(rng.standard_normal((n_tokens, n_columns)), sizes[1]).astype(np.float32)
    tokens = device.asarray(x)
    found = [device.empty((n_tokens, n_rows), "f4") for _ in range(2)]
    cuda_mma.multiply_staged(
        cuda_mma.stage(tokens, dtype, rounded=True), weights, None, False, found[0]
    )
    multiply_lines(stage(tokens, dtype, 1, 64, in_pieces=True), weights, None, False, found[1])
    few, many = (out.get().tobytes() for out in found)
    return bool(few == many)


def tiling(
    n_tokens: int,
    n_rows: int,
    n_sms: int,
    most: int = TOKENS[-1],
    weights: int = ROWS,
    sizes: tuple[int, ...] = (1, 2),
) -> Tiling:
    """Return the tiles that take least time: waves of thread blocks times what a step takes.

    A step takes the tensor cores about as long for a token as the second-level cache, which brings
    128 bytes for each token of a thread block (of a cluster) and those of the weights, which count
    as `weights` tokens.  Few thread blocks get more of the cache, so that clusters do not help.
    """
    choices = [Tiling(t, n) for t in reversed(TOKENS) if t <= most for n in sizes]

    def n_blocks(choice: Tiling) -> int:
        return ceil_div(n_tokens, choice.tokens) * choice.row_tiles(n_rows)

    def cost(choice: Tiling) -> int:
        at_once = n_sms // choice.together * choice.together
        step = max(choice.tokens, choice.tokens // choice.together + weights)
        return ceil_div(n_blocks(choice), at_once) * step

    def helps(choice: Tiling) -> bool:
        return choice.together == 1 or (n_rows > ROWS and 2 * n_blocks(choice) > n_sms)

    return min([c for c in choices if helps(c)] or choices, key=cost)


def multiply(
    x: Any, w: Any, bias: Any, accumulate: bool, out: Any, *, rounded: bool, in_pieces: bool
) -> None:
    """Multiply float32 rows by a matrix, row by row; `rounded` to one number, else exactly."""
    from nbflow_kernels.matmul.cuda_mma import KINDS

    device, dtype = device_of(x), w.dtype.name
    n_parts = 1 if rounded else KINDS[dtype][2]
    most = 128 if n_parts == 3 else TOKENS[-1]  # as much as the shared memory holds
    for row in range(0, len(x), ROWS_AT_ONCE):
        tokens, to = x[row : row + ROWS_AT_ONCE], out[row : row + ROWS_AT_ONCE]
        chosen = tiling(len(tokens), len(w), device.n_sms, most, sizes=cluster_sizes())
        lines = stage(tokens, dtype, n_parts, chosen.tokens, in_pieces=in_pieces)
        multiply_lines(lines, w, bias, accumulate, to, chosen.together)


def stage(x: Any, dtype: str, n_parts: int, tile: int, *, in_pieces: bool) -> Lines:
    """Return float32 rows for weights of a type, in tiles.

    `in_pieces`: for weights row by row; else steps are of neighbouring columns.
    """
    from nbflow_kernels.matmul.cuda_mma import KINDS

    kind, name, _ = KINDS[dtype]
    (n_tokens, n_columns), device = x.shape, device_of(x)
    n_steps, n_staged = ceil_div(n_columns, STEP), ceil_div(n_tokens, tile) * tile
    lines = workspace(device, "matmul lines", n_steps * n_parts * n_staged * LINE, "u1")
    factors = workspace(device, "matmul factors", n_tokens, "f4")
    _stage(kind, n_parts, in_pieces)(
        n_staged, 256, (x, lines, factors, x.strides[0] // 4, n_tokens, n_columns, n_steps)
    )
    scaled = factors if kind == 1 else None
    return Lines(kind, name, n_parts, lines, scaled, n_tokens, n_staged, n_steps, tile)


def multiply_lines(
    x: Lines, w: Any, bias: Any, accumulate: bool, out: Any, together: int = 1
) -> None:
    """Multiply staged rows by a matrix of their type, row by row; see `Tiling.together`."""
    n_rows, n_columns = w.shape
    _kernel(x.kind, x.name, x.n_parts, x.tile, together)(
        (x.grid_x, Tiling(x.tile, together).row_tiles(n_rows)), THREADS,
        (
            w, x.lines, x.factors, bias, out, out.strides[0] // 4, x.n_staged, x.n_tokens,
            n_rows, n_columns, x.n_steps, int(accumulate),
        ),
        _WEIGHTS_RING + ALIGNED + x.ring_bytes(together),
    )  # fmt: skip


@cache
def _stage(kind: int, n_parts: int, in_pieces: bool) -> Kernel:
    parameters = (
        "f32* x, u8* lines, f32* factors, i64 x_stride, i32 n_tokens, i32 n_columns, i32 n_steps"
    )
    entry = f"stage_lines<{kind}, {n_parts}, {str(in_pieces).lower()}>"
    return cpp_kernel(__file__, "cuda_wgmma.cu", entry, parameters, arch_specific=True)


@cache
def _kernel(kind: int, name: str, n_parts: int, tile: int, together: int = 1) -> Kernel:
    parameters = (
        f"{name}* w, u8* lines, f32*? factors, f32*? bias, f32* out, i64 out_stride, "
        "i32 n_staged, i32 n_tokens, i32 n_rows, i32 n_columns, i32 n_steps, i32 accumulate"
    )
    entry = f"tile<{kind}, {n_parts}, {tile}>"
    defines = {"CLUSTER": together}
    return cpp_kernel(
        __file__, "cuda_wgmma.cu", entry, parameters, defines=defines, arch_specific=True
    )

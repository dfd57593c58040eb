"""GEMM by `wgmma` (compute capability 9.0), main loop in `cuda_wgmma_mainloop.cuh`.

`wgmma` reaches the full rate of the tensor cores, which `mma.sync` does not.  The order of sums is
that of `cuda_mma`, so a row of the result has the same bits in any batch, provided that both
instructions add a step of 16 columns alike; `matmul.cuda.same_bits` tests that on each device.

Clusters of two thread blocks with adjacent rows multicast the tokens: each copies half of them for
both, which does not change any sum.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from nbflow_kernels.cuda import Kernel, ceil_div, cpp_kernel, device_of
from nbflow_kernels.cuda.workspace import allocated_bytes, workspace
from nbflow_kernels.errors import UsageError
from nbflow_kernels.matmul.cuda_mma import KINDS

STEP = 64
"""Columns of a step."""
LINE = 128
"""Bytes of a token in a step."""
ROWS = 128
"""Rows of a thread block."""
THREADS = 256
"""Threads of a thread block."""
TOKENS = (64, 128, 192)
"""Tile sizes in tokens."""
MAX_STAGED_TOKENS = 1536
"""Tokens staged at a time, whole tiles, which bounds the workspace."""
ALIGNED = 1024
"""Alignment of the tokens in shared memory, in bytes."""
_WEIGHTS_RING = 4 * ROWS * LINE


@dataclass(frozen=True)
class SwizzledTokens:
    """Tokens in 128-byte swizzled lines, as `stage_swizzled` writes them."""

    kind: int
    name: str
    n_parts: int
    data: Any
    """[step][part][token], 128 bytes each."""
    factors: Any
    """float32 per token; None if all are 1."""
    n_tokens: int
    n_staged: int
    """Tokens, padded with zeros to whole tiles."""
    n_steps: int
    tile: int
    """Tokens of a thread block."""

    @property
    def grid_x(self) -> int:
        """Number of tiles."""
        return self.n_staged // self.tile

    def ring_bytes(self, cluster: int) -> int:
        """Return the bytes of the ring of token tiles in shared memory (`TokenRing`)."""
        n_lines = self.n_parts * self.tile
        stages = (3 if n_lines > 192 else 4) + (cluster > 1 and n_lines <= 256)
        return stages * n_lines * LINE


@dataclass(frozen=True)
class Tiling:
    """Tile and cluster size of a product."""

    tokens: int
    """Tokens of a thread block."""
    cluster: int
    """Thread blocks of a cluster, which share the copies of the tokens."""

    def row_tiles(self, n_rows: int) -> int:
        """Return the number of row tiles, a multiple of the cluster size."""
        return ceil_div(n_rows, ROWS * self.cluster) * self.cluster


def cluster_sizes() -> tuple[int, ...]:
    """Return the cluster sizes to choose from.

    The environment variable NBFLOW_CLUSTERS restricts them: 0, no clusters; 1, only clusters.
    """
    return {"0": (1,), "1": (2,), "": (1, 2)}[environment_switch("NBFLOW_CLUSTERS")]


def environment_switch(variable: str) -> str:
    """Return the value of an environment variable: "0", "1" or empty."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise UsageError(f"{variable} must be 0, 1 or empty, got '{value}'")
    return value


def tiling(
    n_tokens: int,
    n_rows: int,
    n_sms: int,
    max_tokens: int = TOKENS[-1],
    weight_cost: int = ROWS,
    sizes: tuple[int, ...] = (1, 2),
) -> Tiling:
    """Return the tiling with the least predicted time: waves of thread blocks times cost of a step.

    The cost of a step is the larger of tensor-core time and L2 traffic, both in tokens: a thread
    block (or cluster) reads 128 bytes per token, and weights that cost as much as `weight_cost`
    tokens.  With few thread blocks L2 bandwidth is not the limit and clusters do not help.
    """
    choices = [Tiling(t, n) for t in reversed(TOKENS) if t <= max_tokens for n in sizes]

    def n_blocks(choice: Tiling) -> int:
        return ceil_div(n_tokens, choice.tokens) * choice.row_tiles(n_rows)

    def cost(choice: Tiling) -> int:
        resident = n_sms // choice.cluster * choice.cluster
        step = max(choice.tokens, choice.tokens // choice.cluster + weight_cost)
        return ceil_div(n_blocks(choice), resident) * step

    def helps(choice: Tiling) -> bool:
        return choice.cluster == 1 or (n_rows > ROWS and 2 * n_blocks(choice) > n_sms)

    return min([c for c in choices if helps(c)] or choices, key=cost)


def multiply(
    x: Any, w: Any, bias: Any, accumulate: bool, out: Any, *, rounded: bool, row_major: bool
) -> None:
    """Multiply float32 rows by a row-major matrix; see `cuda_mma.stage` for `rounded`."""
    device, dtype = device_of(x), w.dtype.name
    n_parts = 1 if rounded else KINDS[dtype][2]
    max_tokens = max_tile(n_parts)
    for row in range(0, len(x), MAX_STAGED_TOKENS):
        part = slice(row, row + MAX_STAGED_TOKENS)
        tokens = x[part]
        chosen = tiling(len(tokens), len(w), device.n_sms, max_tokens, sizes=cluster_sizes())
        staged = stage(tokens, dtype, n_parts, chosen.tokens, row_major=row_major)
        multiply_staged(staged, w, bias, accumulate, out[part], chosen.cluster)


def max_tile(n_parts: int) -> int:
    """Return the largest tile in tokens whose parts fit the shared memory."""
    return 128 if n_parts == 3 else TOKENS[-1]


def stage(x: Any, dtype: str, n_parts: int, tile: int, *, row_major: bool) -> SwizzledTokens:
    """Stage float32 rows for weights of a dtype, in tiles of `tile` tokens.

    `row_major`: permute columns for row-major weights (`position_of_column`); else weights are in
    fragment order.
    """
    kind, name, _ = KINDS[dtype]
    (n_tokens, n_columns), device = x.shape, device_of(x)
    n_steps, n_staged = ceil_div(n_columns, STEP), ceil_div(n_tokens, tile) * tile
    data = workspace(device, "matmul swizzled tokens", n_steps * n_parts * n_staged * LINE, "u1")
    factors = workspace(device, "matmul factors", n_tokens, "f4")
    _stage(kind, n_parts, row_major)(
        n_staged, 256, (x, data, factors, x.strides[0] // 4, n_tokens, n_columns, n_steps)
    )
    scaled = factors if kind == 1 else None
    return SwizzledTokens(kind, name, n_parts, data, scaled, n_tokens, n_staged, n_steps, tile)


def workspace_bytes(
    n_rows: int, n_columns: int, n_tokens: int, n_parts: int, n_sms: int, **tile_limits: int
) -> dict[str, int]:
    """Return the sizes of the workspaces of staged tokens; `tile_limits` are those of `tiling`."""
    n_tokens = min(n_tokens, MAX_STAGED_TOKENS)
    tile = tiling(n_tokens, n_rows, n_sms, **tile_limits, sizes=cluster_sizes()).tokens
    lines = ceil_div(n_columns, STEP) * n_parts * ceil_div(n_tokens, tile) * tile
    return {
        "matmul swizzled tokens": allocated_bytes(lines * LINE, 1),
        "matmul factors": allocated_bytes(n_tokens, 4),
    }


def multiply_staged(
    x: SwizzledTokens, w: Any, bias: Any, accumulate: bool, out: Any, cluster: int = 1
) -> None:
    """Multiply staged rows by a matrix of their type, with clusters of a size."""
    n_rows, n_columns = w.shape
    _kernel(x.kind, x.name, x.n_parts, x.tile, cluster)(
        (x.grid_x, Tiling(x.tile, cluster).row_tiles(n_rows)), THREADS,
        (
            w, x.data, x.factors, bias, out, out.strides[0] // 4, x.n_staged, x.n_tokens,
            n_rows, n_columns, x.n_steps, int(accumulate),
        ),
        _WEIGHTS_RING + ALIGNED + x.ring_bytes(cluster),
    )  # fmt: skip


@cache
def _stage(kind: int, n_parts: int, row_major: bool) -> Kernel:
    parameters = (
        "f32* x, u8* staged, f32* factors, i64 x_stride, i32 n_tokens, i32 n_columns, i32 n_steps"
    )
    entry = f"stage_swizzled<{kind}, {n_parts}, {str(row_major).lower()}>"
    return cpp_kernel(__file__, "cuda_wgmma.cu", entry, parameters, arch_specific=True)


@cache
def _kernel(kind: int, name: str, n_parts: int, tile: int, cluster: int = 1) -> Kernel:
    parameters = (
        f"{name}* w, u8* staged, f32*? factors, f32*? bias, f32* out, i64 out_stride, "
        "i32 n_staged, i32 n_tokens, i32 n_rows, i32 n_columns, i32 n_steps, i32 accumulate"
    )
    entry = f"gemm<{kind}, {n_parts}, {tile}>"
    defines = {"CLUSTER": cluster}
    return cpp_kernel(
        __file__, "cuda_wgmma.cu", entry, parameters, defines=defines, arch_specific=True
    )

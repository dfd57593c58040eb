"""Lower triangular matrices times the tokens of a float register tile.

The matrix M is float32 in memory, row t at ``at + row * t``; what lies above its diagonal is not
read.  Its numbers are broadcast, so that all lanes and groups of a tile are independent systems.

====================================  =========================================================
`substitute(tile, at, row)`           X with ``X[t] = tile[t] + sum of M[t, s] X[s] for s < t``
`add_lower(tile, at, row, u)`         ``tile[t] + sum of M[t, s] U[s] for s <= t``, U a tile at `u`
====================================  =========================================================

The sums run over rising s, each term a fused multiply-add.
"""

from __future__ import annotations

import functools

from nbflow_kernels.cpu import interpreter, llvm
from nbflow_kernels.cpu.llvm import F32
from nbflow_kernels.cpu.simd import f32x16

intrinsic = functools.partial(interpreter.intrinsic, fallback="register_tiles_lower")


@intrinsic
def substitute(typing_context, tile, at, row):
    """Return X with ``X[t] = tile[t] + sum of M[t, s] X[s] for s < t``.

    M is float32 in memory, row t at ``at + row * t``; what is not below its diagonal is not read.
    """

    def codegen(context, builder, signature, args):
        address, row = (llvm.int64(context, builder, signature, args, i) for i in (1, 2))
        value, groups = args[0], tile.groups
        for t in range(1, tile.tokens):
            at = llvm.element(builder, address, row, t)
            for s in range(t):
                factor = llvm.splat(
                    builder, llvm.load(builder, llvm.offset(builder, at, 4 * s), F32)
                )
                for g in range(groups):
                    x, total = (builder.extract_value(value, groups * i + g) for i in (s, t))
                    total = llvm.fma(builder, factor, x, total)
                    value = builder.insert_value(value, total, groups * t + g)
        return value

    return tile(tile, at, row), codegen


@intrinsic
def add_lower(typing_context, tile, at, row, u):
    """Return ``tile[t] + sum of M[t, s] U[s] for s <= t``; M is as in `substitute`.

    U is a tile of the same shape in memory.
    """

    def codegen(context, builder, signature, args):
        address, row, u = (llvm.int64(context, builder, signature, args, i) for i in (1, 2, 3))
        value, groups = args[0], tile.groups
        for s in range(tile.tokens):
            column = llvm.offset(builder, address, 4 * s)
            at = [llvm.offset(builder, u, 64 * (groups * s + g)) for g in range(groups)]
            xs = [llvm.load(builder, x, f32x16.llvm) for x in at]
            for t in range(s, tile.tokens):
                factor = llvm.load(builder, llvm.element(builder, column, row, t), F32)
                for g, x in enumerate(xs):
                    total = builder.extract_value(value, groups * t + g)
                    total = llvm.fma(builder, llvm.splat(builder, factor), x, total)
                    value = builder.insert_value(value, total, groups * t + g)
        return value

    return tile(tile, at, row, u), codegen

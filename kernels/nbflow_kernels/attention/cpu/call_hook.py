"""Calls of compiled functions by address, from kernels that are cached on disk.

A kernel with the user's functions inside would be compiled, for seconds, in each process.  A *hook*
is compiled alone, in a fraction of that, and called once for 64 scores.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import types

from nbflow_kernels.cpu import interpreter, llvm
from nbflow_kernels.cpu.llvm import I64

intrinsic = functools.partial(
    interpreter.intrinsic, fallback="nbflow_kernels.attention.cpu.hook_fallback"
)

N_ARGUMENTS = 9
SIGNATURE: Any = types.void(types.int64, types.CPointer(types.float32), *[types.int64] * 7)
"""Address of the parameters; numbers to change in place, and the range [first, last) of them; key
of number 0; request, query row in it, query head and key/value head."""


@intrinsic
def call_hook(
    typing_context, address, params, numbers, first, last, key, request, row, qo_head, kv_head
):
    """Call the function at an address with the other arguments, see `SIGNATURE`."""

    def codegen(context, builder, signature, args):
        values = [llvm.int64(context, builder, signature, args, i) for i in range(len(args))]
        function = ir.FunctionType(ir.VoidType(), [I64] * N_ARGUMENTS)
        builder.call(builder.inttoptr(values[0], function.as_pointer()), values[1:])
        return context.get_dummy_value()

    arguments = (
        address, params, numbers, first, last, key, request, row, qo_head, kv_head
    )  # fmt: skip
    return types.none(*arguments), codegen

"""Atomic operations, spin-wait hints and calls through function pointers, inside kernels.

======================================  =======================================================
`exchange(addr, x)`                     store an int64 and return the old one
`add(addr, x)`                          add to an int64 and return the old one; both seq. cst.
`load(addr)` / `store(addr, x)`         acquire / release
`load_in_order(addr)`                   seq. cst. load: ordered after a preceding `exchange`
`pause()`                               spin-wait hint to the core
`cycles()`                              the processor's cycle counter, 0 where there is none
`call_row_range(f, args, start, stop)`  call a trampoline (`nbflow_kernels.cpu.graph`); 0 unless
                                        the kernel raised
`call_int(f, x)`                        call the C function ``int f(int)`` at an address
`call_hook(f, a1, ..., a9)`             call a function of nine int64 without a result
======================================  =======================================================
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import binding, ir
from numba.core import types

from nbflow_kernels.cpu import interpreter, llvm
from nbflow_kernels.cpu.llvm import I32, I64

intrinsic = functools.partial(interpreter.intrinsic, fallback="atomics")


def _cell(context, builder, signature, args):
    return llvm.pointer(builder, llvm.int64(context, builder, signature, args), I64)


def _make_read_modify_write(name: str, operation: str) -> Any:
    def modify(typing_context, addr, x):
        def codegen(context, builder, signature, args):
            cell = _cell(context, builder, signature, args)
            value = llvm.int64(context, builder, signature, args, 1)
            return builder.atomic_rmw(operation, cell, value, "seq_cst")

        return types.int64(addr, x), codegen

    modify.__name__ = name
    return intrinsic(modify)


exchange = _make_read_modify_write("exchange", "xchg")
add = _make_read_modify_write("add", "add")


def _make_load(name: str, ordering: str) -> Any:
    def load(typing_context, addr):
        def codegen(context, builder, signature, args):
            return builder.load_atomic(_cell(context, builder, signature, args), ordering, 8)

        return types.int64(addr), codegen

    load.__name__ = name
    return intrinsic(load)


load = _make_load("load", "acquire")
# Arm may reorder an acquire load before a preceding sequentially consistent exchange.
load_in_order = _make_load("load_in_order", "seq_cst")


@intrinsic
def store(typing_context, addr, x):
    """Store an int64 with release order."""

    def codegen(context, builder, signature, args):
        value = llvm.int64(context, builder, signature, args, 1)
        builder.store_atomic(value, _cell(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.none(addr, x), codegen


@intrinsic
def pause(typing_context):
    """Give the core a spin-wait hint."""

    def codegen(context, builder, signature, args):
        machine = binding.get_process_triple().split("-")[0]
        if machine in ("x86_64", "i686", "i386"):
            llvm.call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif machine in ("aarch64", "arm64"):
            wait = ir.Constant(I32, 1)  # yield
            llvm.call(builder, "llvm.aarch64.hint", ir.VoidType(), [wait])
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def cycles(typing_context):
    """Return the processor's cycle counter."""

    def codegen(context, builder, signature, args):
        return llvm.call(builder, "llvm.readcyclecounter", I64, [])

    return types.int64(), codegen


@intrinsic
def call_row_range(typing_context, function, args_at, start, stop):
    """Call a trampoline for rows [start, stop); not 0 if the kernel raised."""

    def codegen(context, builder, signature, args):
        values = [llvm.int64(context, builder, signature, args, i) for i in range(4)]
        kind = ir.FunctionType(I64, [I64] * 3)
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])

    return types.int64(function, args_at, start, stop), codegen


@intrinsic
def call_int(typing_context, function, x):
    """Call the C function ``int f(int)`` at an address."""

    def codegen(context, builder, signature, args):
        values = [llvm.int64(context, builder, signature, args, i) for i in range(2)]
        kind = ir.FunctionType(I32, [I32])
        pointer = builder.inttoptr(values[0], kind.as_pointer())
        return builder.sext(builder.call(pointer, [builder.trunc(values[1], I32)]), I64)

    return types.int64(function, x), codegen


@intrinsic
def call_hook(typing_context, function, a1, a2, a3, a4, a5, a6, a7, a8, a9):
    """Call a function of nine int64 (or pointers) without a result at an address."""

    def codegen(context, builder, signature, args):
        values = [llvm.int64(context, builder, signature, args, i) for i in range(10)]
        kind = ir.FunctionType(ir.VoidType(), [I64] * 9)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.none(function, a1, a2, a3, a4, a5, a6, a7, a8, a9), codegen

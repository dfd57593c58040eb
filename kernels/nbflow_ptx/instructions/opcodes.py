"""The instruction set: which function binds which opcode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nbflow_ptx.instructions import (
    atomics,
    builtin_calls,
    cluster_addresses,
    convert,
    floating,
    integer,
    load_store,
    mbarrier,
    mma,
    warp_collectives,
    wgmma,
)
from nbflow_ptx.instructions.binder import Binder, Run
from nbflow_ptx.instructions.warp_collectives import Collective
from nbflow_ptx.parsing.syntax import Instruction

R = TypeVar("R")
Bind = Callable[[Binder, Instruction], R]


def _table(*rows: tuple[Bind[R], str]) -> dict[str, Bind[R]]:
    return {opcode: bind for bind, opcodes in rows for opcode in opcodes.split()}


#: Instructions a thread executes by itself.
PLAIN: dict[str, Bind[Run]] = _table(
    (integer.add, "add sub addc subc"),
    (integer.multiply, "mul mul24"),
    (integer.multiply_add, "mad mad24 madc"),
    (integer.divide, "div rem"),
    (integer.minmax, "min max"),
    (integer.unary, "neg abs"),
    (integer.sad, "sad"),
    (integer.logic, "and or xor not cnot"),
    (integer.shift, "shl shr"),
    (integer.funnel_shift, "shf"),
    (integer.lop3, "lop3"),
    (integer.permute, "prmt"),
    (integer.extract_field, "bfe"),
    (integer.insert_field, "bfi"),
    (integer.bit_mask, "bmsk"),
    (integer.count_bits, "popc clz brev bfind"),
    (integer.dot_product, "dp4a dp2a"),
    (floating.fma, "fma"),
    (floating.root, "rcp sqrt rsqrt"),
    (floating.special, "ex2 lg2 sin cos tanh"),
    (floating.copysign, "copysign"),
    (floating.testp, "testp"),
    (convert.move, "mov"),
    (convert.convert, "cvt"),
    (convert.to_generic, "cvta"),
    (convert.is_space, "isspacep"),
    (cluster_addresses.map_to_rank, "mapa"),
    (cluster_addresses.find_rank, "getctarank"),
    (convert.set_predicate, "setp"),
    (convert.set_value, "set"),
    (convert.select, "selp"),
    (convert.select_by_sign, "slct"),
    (load_store.load, "ld ldu"),
    (load_store.store, "st"),
    (load_store.async_copy, "cp"),
    (load_store.fence, "fence membar"),
    (load_store.nothing, "prefetch prefetchu applypriority nanosleep pmevent griddepcontrol"),
    (load_store.set_registers, "setmaxnreg"),
    (mbarrier.mbarrier, "mbarrier"),
    (load_store.create_policy, "createpolicy"),
    (atomics.atomic, "atom red"),
    (builtin_calls.call, "call"),
    (builtin_calls.trap, "trap brkpt"),
)
#: Instructions the lanes of a warp execute together.
WARP: dict[str, Bind[Collective]] = _table(
    (warp_collectives.shuffle, "shfl"),
    (warp_collectives.vote, "vote"),
    (warp_collectives.match, "match"),
    (warp_collectives.reduce, "redux"),
    (warp_collectives.elect, "elect"),
    (mma.mma, "mma"),
    (mma.load_matrix, "ldmatrix"),
    (mma.store_matrix, "stmatrix"),
    (mma.transpose, "movmatrix"),
)
#: Instructions the four warps of a warpgroup execute together.
WARPGROUP: dict[str, Bind[Collective]] = _table(
    (wgmma.wgmma, "wgmma"),
)

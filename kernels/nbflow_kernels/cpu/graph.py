"""Captured kernel calls that the thread pool runs without Python in between.

A step of a model is some hundred kernel calls of a few microseconds each.  From Python each costs
1 to 50 microseconds more, so a `CpuGraph` writes the calls into a table once: for each, the
kernel's machine code, its arguments and its number of rows.  The threads of a pool
(`nbflow_kernels.cpu.thread_pool`) run the table, each thread its share of the rows of every call,
with a barrier of 0.1 microseconds where one call's result is another's input.

The kernels stay as they are, functions of arrays and numbers compiled one by one.  A *trampoline*,
one per signature and made in a millisecond, reads the arguments from memory and calls the kernel.
Arguments are fixed when the graph is made; what changes from step to step is in the arrays, or in a
*cell*: an array of one int64 instead of a number of rows.

With compiling off (`nbflow_kernels.cpu.interpreter`) the table stays empty, and the pool makes the
calls one by one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.compiler_lock import global_compiler_lock

from nbflow_kernels.cpu import interpreter
from nbflow_kernels.cpu.compile_processes import Task, compile_in_processes
from nbflow_kernels.cpu.jit import CachedKernel
from nbflow_kernels.cpu.splits import count_parts

_I64 = ir.IntType(64)

# The columns of a table.
FUNCTION, ARGUMENTS, ROWS, PARTS, GRAIN, BARRIER, READS, ROW_BYTES, TILE = range(9)
COLUMNS = 9

# The smallest array argument that idle threads prefetch; see `thread_pool._prefetch_next`.
STREAMED_BYTES = 256 << 10

# Below this many multiply-adds for each thread a call is not shared: a core does some 30 in a
# nanosecond at best, and a barrier costs a hundred.
MIN_WORK_PER_PART = 20_000
# Above this many, rows are scheduled dynamically: a thread that loses its core delays one chunk.
DYNAMIC_WORK = 40_000_000
CHUNKS_PER_THREAD = 8


@dataclass(frozen=True)
class GraphNode:
    """``kernel(*args, 0, n_rows)``, the rows of which may be shared by threads."""

    kernel: Callable[..., None]
    """A compiled kernel; its last two arguments are a range of rows."""
    args: tuple[Any, ...]
    """The kernel's other arguments."""
    n_rows: Any
    """Number of rows, or a cell with it: an array of one int64, read when the call is made."""
    work: float
    """Multiply-adds (or operations of like cost) of the whole call."""
    held: Any = None
    """Keeps these arrays alive: `args` holds raw addresses."""
    tile: int = 1
    """Rows that the kernel computes together: parts are multiples of it, but for the last."""

    def __call__(self) -> None:
        """Make the call in the present thread."""
        self.kernel(*self.args, 0, int(self.n_rows[0]) if self.is_dynamic else self.n_rows)

    @property
    def is_dynamic(self) -> bool:
        """Return True if the number of rows is known only when the call is made."""
        return isinstance(self.n_rows, np.ndarray)

    def parts(self, n_threads: int) -> int:
        """Return how many threads share the call; all of them if its size is not known yet."""
        if self.is_dynamic:
            return n_threads
        return count_parts(int(self.n_rows), self.work, n_threads, MIN_WORK_PER_PART, self.tile)


class CpuGraph:
    """Table of calls for a pool of `n_threads`; see `ThreadPool.run_graph`."""

    def __init__(self, calls: Sequence[GraphNode], n_threads: int) -> None:
        self.calls = tuple(calls)
        self.n_threads = n_threads
        self.table = np.zeros((len(calls), COLUMNS), np.int64)
        self.table_at = self.table.ctypes.data
        self._kept: list[Any] = []  # the table holds addresses only
        self.is_shared = False
        """True if any call is divided among the threads."""
        if not interpreter.is_on():  # which has no machine code
            self._fill()

    def _fill(self) -> None:
        calls, n_threads = self.calls, self.n_threads
        parts = [call.parts(n_threads) for call in calls]
        self.is_shared = max(parts, default=1) > 1
        for i, (call, made) in enumerate(zip(calls, machine_calls(calls), strict=True)):
            row = self.table[i]
            row[FUNCTION] = made[0]
            row[ARGUMENTS] = self._keep(made[1])
            cell = call.n_rows if call.is_dynamic else np.array([call.n_rows], np.int64)
            row[ROWS] = self._keep(cell)
            row[PARTS], row[TILE] = parts[i], call.tile
            if parts[i] > 1 and len(calls) > 1 and not call.is_dynamic and call.work > DYNAMIC_WORK:
                tiles = call.n_rows // (parts[i] * CHUNKS_PER_THREAD * call.tile)
                row[GRAIN] = max(1, tiles) * call.tile
            if parts[i] > 1:
                row[READS], row[ROW_BYTES] = _streamed(call)
            # calls of one thread follow each other in that thread; the last waits for everybody
            row[BARRIER] = i + 1 == len(parts) or max(parts[i], parts[i + 1]) > 1

    def _keep(self, array: np.ndarray) -> int:
        self._kept.append(array)
        return array.ctypes.data


def machine_calls(calls: Sequence[GraphNode]) -> list[tuple[int, np.ndarray]]:
    """Return the trampoline of each call's kernel and the words that it reads the arguments from.

    Compiles kernels that are not compiled yet.
    """
    keys = [(call.kernel, tuple(map(_kind, call.args))) for call in calls]
    missing = {key: call for key, call in zip(keys, calls, strict=True) if key not in _codes}
    if missing:
        _add_codes(missing)
    codes = [_codes[key] for key in keys]
    return [
        (code.trampoline, _argument_block(code, call.args))
        for code, call in zip(codes, calls, strict=True)
    ]


def call_with_integers(kernel: Any, args: tuple[Any, ...], n_rows: int) -> bool:
    """Call ``kernel(*args, 0, n_rows)`` by address if all arguments are integers.

    Without the GIL and without an entry point for Python, whose compilation takes 25 ms.

    Returns
    -------
    bool
        False if the call was not made, because the kernel is not compiled code, or an argument is
        neither an integer, nor a tuple of integers, nor None.
    """
    words, key = list[Any](), [kernel]
    for value in args:
        if type(value) is tuple:
            words += value
            key.append(len(value))
        else:
            words.append(0 if value is None else value)
            key.append(value is None)
    if not isinstance(kernel, CachedKernel) or set(map(type, words)) != {int}:
        return False
    function = _functions.get(found := tuple(key))
    if function is None:
        kinds = 2 * (ctypes.c_void_p,) + (len(words) + 2) * (ctypes.c_int64,)
        code = _machine_code(GraphNode(kernel, args, n_rows, 0.0))
        function = _functions[found] = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(code.address)
    result, raised = ctypes.c_void_p(), ctypes.c_void_p()
    status = function(ctypes.byref(result), ctypes.byref(raised), *words, 0, n_rows)
    if status != 0:  # from 1 on: an exception of the kernel
        raise error_of(raised.value or _UNKNOWN if status > 0 else _UNKNOWN, kernel)
    return True


_functions: dict[tuple[Any, ...], Any] = {}  # by kernel and, for each argument, None or a length


def _streamed(call: GraphNode) -> tuple[int, int]:
    """Return address and bytes per row of the largest array among the arguments, if it is large."""
    arrays = [a for a in call.args if isinstance(a, np.ndarray) and a.flags.c_contiguous]
    largest = max(arrays, key=lambda a: a.nbytes, default=None)
    if largest is None or largest.nbytes < STREAMED_BYTES or call.is_dynamic:
        return 0, 0
    return largest.ctypes.data, largest.nbytes // int(call.n_rows)


@dataclass(frozen=True)
class _Code:
    """Machine code of a kernel for one signature."""

    signature: tuple[Any, ...]
    address: int
    trampoline: int = 0
    """Address of its trampoline; 0 before that is made."""


_codes: dict[tuple[Any, ...], _Code] = {}  # by kernel and kinds of arguments


def _kind(value):
    """Return a cheap key of the value's Numba type; `numba.typeof` takes far longer."""
    kind = type(value)
    if kind is np.ndarray:
        return value.dtype, value.ndim, value.flags.num
    if kind is tuple:
        return tuple(map(_kind, value))
    if kind is int:
        return kind, value >> 63
    return kind


def _add_codes(missing: dict[tuple[Any, ...], GraphNode]) -> None:
    found, left = dict[tuple[Any, ...], _Code](), dict(missing)
    calls = [call for call in missing.values() if not _is_locked(call)]
    tasks = (missing_kernel(call.kernel, signature_of(call)) for call in calls)
    compile_in_processes([task for task in tasks if task is not None][:0:-1])
    while left:  # those that other processes are compiling last
        key = next((key for key, call in left.items() if not _is_locked(call)), next(iter(left)))
        found[key] = _machine_code(left.pop(key))
    codes = {key: found[key] for key in missing}
    functions = _trampolines([code.signature for code in codes.values()])
    for (key, code), function in zip(codes.items(), functions, strict=True):
        _codes[key] = dataclasses.replace(code, trampoline=function)


def _is_locked(call: GraphNode) -> bool:
    """Return whether another process is compiling a call's kernel."""
    kernel = call.kernel
    return isinstance(kernel, CachedKernel) and kernel.is_locked(signature_of(call))


def missing_kernel(
    kernel: Any, signature: tuple[Any, ...], from_python: bool = False
) -> Task | None:
    """Return a task that compiles a kernel; None if the cache has it or cannot keep it.

    With an entry point for calls `from_python`; graphs call by address.
    """
    if not isinstance(kernel, CachedKernel) or kernel.is_cached(signature):
        return None
    return functools.partial(kernel.compile if from_python else kernel.compile_code, signature)


def signature_of(call: GraphNode) -> tuple[Any, ...]:
    """Return the Numba types that a call's kernel is compiled for."""
    return (*(numba.typeof(a) for a in call.args), types.int64, types.int64)


def _machine_code(call: GraphNode) -> _Code:
    """Compile a call's kernel for its arguments, or find it compiled."""
    kernel: Any = call.kernel
    signature = signature_of(call)
    if signature not in kernel.overloads:
        kernel.compile_code(signature)
    compiled = kernel.overloads[signature]
    name = compiled.fndesc.llvm_func_name
    return _Code(signature, compiled.library.get_pointer_to_function(name))


# ---- arguments ------------------------------------------------------------------------------


def _argument_block(code: _Code, args: tuple[Any, ...]) -> np.ndarray:
    """Return the kernel's address and its arguments, 8 bytes each, as the trampoline reads them."""
    words = [code.address]
    for value, kind in zip(args, code.signature, strict=False):
        _add_words(words, value, kind)
    return np.array(words, np.int64)


def _add_words(words: list[int], value: Any, kind: Any) -> None:
    """Append a value the way Numba passes it: an array as seven or more words."""
    if isinstance(kind, types.Array):
        address = value.__array_interface__["data"][0]
        words += (0, 0, value.size, value.itemsize, address, *value.shape, *value.strides)
    elif isinstance(kind, types.BaseTuple):
        members: Any = kind
        for v, k in zip(value, members.types, strict=True):
            _add_words(words, v, k)
    elif isinstance(kind, types.Float):
        bits = struct.pack("<d", value) if kind.bitwidth == 64 else struct.pack("<f4x", value)
        words += struct.unpack("<q", bits)
    elif isinstance(kind, types.Boolean | types.Integer):
        words.append(int(value))
    elif isinstance(kind, types.NoneType):
        words.append(0)
    else:
        raise TypeError(f"a graph cannot hold an argument of type {kind}")


# ---- trampolines ----------------------------------------------------------------------------


_made: dict[tuple[Any, ...], int] = {}  # signature to address
_engines: list[Any] = []  # own the code at those addresses


def _trampolines(signatures: list[tuple[Any, ...]]) -> list[int]:
    """Return the address of ``int64 f(arguments, start, stop)`` for each signature.

    The function returns 0, or the address of Numba's description of the exception.
    """
    with global_compiler_lock:
        missing = [s for s in dict.fromkeys(signatures) if s not in _made]
        if missing:
            module = ir.Module(name="nbflow_trampolines")
            names = [f"nbflow_call_{len(_made) + i}" for i in range(len(missing))]
            for name, signature in zip(names, missing, strict=True):
                _add_trampoline(module, name, signature)
            parsed = llvm.parse_assembly(str(module))
            machine = llvm.Target.from_default_triple().create_target_machine(opt=1)
            engine = llvm.create_mcjit_compiler(parsed, machine)
            engine.finalize_object()
            _engines.append(engine)
            for name, signature in zip(names, missing, strict=True):
                _made[signature] = engine.get_function_address(name)
        return [_made[s] for s in signatures]


def _add_trampoline(module: ir.Module, name: str, signature: tuple[Any, ...]) -> None:
    from numba.core.registry import cpu_target

    context = cpu_target.target_context
    function = ir.Function(module, ir.FunctionType(_I64, [_I64] * 3), name=name)
    builder = ir.IRBuilder(function.append_basic_block())
    block, start, stop = function.args

    def word(i, kind):
        at = builder.add(block, ir.Constant(_I64, 8 * i))
        return builder.load(builder.inttoptr(at, ir.PointerType(kind)))

    packer = context.get_arg_packer(signature[:-2])
    flat = [word(i + 1, kind) for i, kind in enumerate(packer.argument_types)]
    args = [*packer.from_arguments(builder, flat), start, stop]
    kind = context.call_conv.get_function_type(types.none, signature)
    callee = builder.inttoptr(word(0, _I64), kind.as_pointer())
    status, _ = context.call_conv.call_function(builder, callee, types.none, signature, args)
    raised = builder.ptrtoint(status.excinfoptr, _I64)
    raised = builder.select(status.is_user_exc, raised, ir.Constant(_I64, _UNKNOWN))
    builder.ret(builder.select(status.is_error, raised, ir.Constant(_I64, 0)))


# ---- exceptions -----------------------------------------------------------------------------

_UNKNOWN = 1  # instead of an address


class _Raised(ctypes.Structure):
    """Numba's description of an exception, as compiled code leaves it."""

    _fields_ = (
        ("pickled", ctypes.c_void_p),
        ("n_bytes", ctypes.c_int32),
        ("values", ctypes.c_void_p),
        ("unwrap", ctypes.c_void_p),
        ("n_values", ctypes.c_int32),
    )


def error_of(address: int, kernel: Any) -> BaseException:
    """Return the exception that a kernel raised in a graph, with the kernel's name as a note.

    Parameters
    ----------
    address : int
        The trampoline's result.
    kernel : callable
        The kernel.
    """
    name = getattr(kernel, "__qualname__", repr(kernel))
    unknown = RuntimeError(f"kernel {name} failed in a CPU graph with an unknown error")
    if address == _UNKNOWN:
        return unknown
    raised = _Raised.from_address(address)
    try:
        made, values, _ = pickle.loads(ctypes.string_at(raised.pickled, raised.n_bytes))
        # values known only when it was raised are not in the pickle: their places hold None
        error = made(*(() if raised.n_values > 0 else values))
    except Exception:
        return unknown
    error.add_note(f"raised by kernel {name} in a CPU graph")
    return error if isinstance(error, BaseException) else unknown

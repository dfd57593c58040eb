"""Shortcuts in Numba's front end, in which most of the time to compile a kernel is spent.

Of the time to compile a kernel, LLVM takes a third; the rest is Numba's Python code.  It resolves
each operation on numbers by trying all templates of the operator, NumPy's universal functions
among them, and lists the variables of each statement a hundred times, through every attribute.
Here the resolution of an operation is kept for the types of its arguments, and lists skip what
contains no variables.  It also formats a log entry per statement, announces each call of LLVM, and
computes the sizes of types by LLVM; here it does so once, or for listeners.  Types and code that
result are the same.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import llvmlite.ir
from numba.core import base, event, ir, ssa, targetconfig, types
from numba.core.types.functions import BaseFunction
from numba.core.typing import templates

from nbflow_kernels.cpu.numba_passes import compiling_kernel

CALL_TYPES = "_nbflow_call_types"
"""Attribute of a typing context: signatures by function type and arguments."""
_LOCKS = frozenset({"numba:compiler_lock", "numba:llvm_lock"})
_ATOMS = frozenset({ir.Loc, str, int, float, bool, type(None)})
_SCALARS = frozenset({
    types.Integer, types.Float, types.Boolean, types.IntegerLiteral, types.BooleanLiteral,
})  # fmt: skip
numba_call_type = BaseFunction.get_call_type
"""Numba's own method, which the shortcut calls for other types."""
numba_list_vars = ir.Inst._rec_list_vars
"""Numba's own method, which the shortcut calls for other values."""
numba_type_intrinsic = templates._IntrinsicTemplate.generic
numba_abi_size = base.BaseContext.get_abi_sizeof
numba_start_event, numba_end_event = event.start_event, event.end_event
numba_options_equal = targetconfig.TargetConfig.__eq__
numba_mangle_options = targetconfig.TargetConfig.get_mangle_string
numba_option_values = targetconfig.TargetConfig.values
_mangled: dict[Any, str] = {}
_defaults: dict[Any, dict[str, Any]] = {}
numba_install_timer = event.install_timer

ABI_SIZES = "_nbflow_abi_sizes"
"""Attribute of a target context: sizes in bytes by LLVM type."""
_NUMBERS = (
    llvmlite.ir.IntType,
    llvmlite.ir.FloatType,
    llvmlite.ir.DoubleType,
    llvmlite.ir.PointerType,
    llvmlite.ir.VectorType,
)


def remember_call_types() -> None:
    """Resolve an operator or builtin once for each combination of scalar types."""
    BaseFunction.get_call_type = _get_call_type  # type: ignore[method-assign]


def skip_atoms() -> None:
    """List the variables of IR statements without visiting strings, numbers and locations."""
    ir.Inst._rec_list_vars = _list_vars  # type: ignore[method-assign]


def find_implementations_once() -> None:
    """Look an intrinsic up before the registries of all of Numba, and other facts once each."""
    templates._IntrinsicTemplate.generic = _type_intrinsic  # type: ignore[method-assign]
    base._has_loc = functools.lru_cache(4096)(base._has_loc)
    base.BaseContext.get_abi_sizeof = _abi_size  # type: ignore[method-assign]


def skip_logs_and_events() -> None:
    """Skip the log of each statement, events that nothing listens to, and timers of each lock."""
    ssa._run_ssa_block_pass = _rewrite_statements
    event.start_event = _start_event
    event.end_event = _end_event
    event.install_timer = _install_timer


def compare_options_as_set() -> None:
    """Compare, hash and list options of the compiler without asking for each, defaults too."""
    targetconfig.TargetConfig.__eq__ = _options_equal  # type: ignore[method-assign]
    targetconfig.TargetConfig.__hash__ = _options_hash  # type: ignore[method-assign]
    targetconfig.TargetConfig.get_mangle_string = _mangled_options  # type: ignore[method-assign]
    targetconfig.TargetConfig.values = _option_values  # type: ignore[method-assign]


def _options_equal(self: Any, other: Any) -> Any:
    if type(self) is type(other) and self._values == other._values:
        return True
    return numba_options_equal(self, other)


def _options_hash(self: Any) -> int:
    return hash(type(self))  # Numba's is that of the names, which all options share


def _option_values(self: Any) -> dict[str, Any]:
    kind = type(self)
    if kind not in _defaults:
        _defaults[kind] = {name: option.default for name, option in kind.options.items()}
    return {**_defaults[kind], **self._values}


def _mangled_options(self: Any) -> str:
    key = type(self), self.summary()
    if key not in _mangled:
        _mangled[key] = numba_mangle_options(self)
    return _mangled[key]


def _type_intrinsic(self: Any, args: Any, kws: Any) -> Any:
    found = self._impl_cache.get((self.context, args, tuple(kws.items())))
    return numba_type_intrinsic(self, args, kws) if found is None else found


def _abi_size(self: Any, kind: Any) -> Any:
    if type(kind) not in _NUMBERS:  # structures may share a name
        return numba_abi_size(self, kind)
    known = self.__dict__.setdefault(ABI_SIZES, {})
    if kind not in known:
        known[kind] = numba_abi_size(self, kind)
    return known[kind]


def _rewrite_statements(states: Any, block: Any, handler: Any) -> Any:
    on_assign, on_other = handler.on_assign, handler.on_other
    for statement in block.body:
        if isinstance(statement, ir.Assign):
            yield on_assign(states, statement)
        else:
            yield on_other(states, statement)


def _start_event(kind: str, data: Any = None) -> None:
    if event._registered[kind]:
        numba_start_event(kind, data)


def _end_event(kind: str, data: Any = None, exc_details: Any = None) -> None:
    if event._registered[kind]:
        numba_end_event(kind, data, exc_details)


def _install_timer(kind: str, callback: Any) -> Any:
    # These time each call of LLVM and each pass, for the metadata of a compiled function.
    if kind in _LOCKS and compiling_kernel.value:
        return contextlib.nullcontext()
    return numba_install_timer(kind, callback)


def _get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
    if kws or not all(type(arg) in _SCALARS for arg in args):
        return numba_call_type(self, context, args, kws)
    known = context.__dict__.setdefault(CALL_TYPES, {})
    key = self, tuple(args)
    found = known.get(key)
    if found is None:
        found = numba_call_type(self, context, args, kws)
        # The implementation of an overload depends on the caller's flags too.
        if found is not None and self._impl_keys[found.args] is self.typing_key:
            known[key] = found
    else:
        self._impl_keys[found.args] = self.typing_key
    return found


def _list_vars(self: Any, value: Any) -> list[Any]:
    found: list[Any] = []
    _add_vars(value, found)
    return found


def _add_vars(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind is ir.Var:
        found.append(value)
    elif kind is dict:
        for part in value.values():
            if type(part) not in _ATOMS:
                _add_vars(part, found)
    elif kind is list or kind is tuple:
        for part in value:
            _add_vars(part, found)
    elif isinstance(value, ir.Var):
        found.append(value)
    elif isinstance(value, ir.Inst):
        found.extend(value.list_vars())
    elif isinstance(value, (list, tuple)):
        for part in value:
            _add_vars(part, found)
    elif isinstance(value, dict):
        _add_vars(dict(value), found)

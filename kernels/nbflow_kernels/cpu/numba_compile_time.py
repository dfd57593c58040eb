"""Shortcuts in Numba's front end, in which most of the time to compile a kernel is spent.

Of the time to compile a kernel, LLVM takes a third; the rest is Numba's Python code.  It resolves
each operation on numbers by trying all templates of the operator, NumPy's universal functions
among them, and lists the variables of each statement a hundred times, through every attribute.
Here the resolution of an operation is kept for the types of its arguments, and lists skip what
contains no variables.  Types and code that result are the same.
"""

from __future__ import annotations

from typing import Any

from numba.core import ir, types
from numba.core.types.functions import BaseFunction

CALL_TYPES = "_nbflow_call_types"
"""Attribute of a typing context: signatures by function type and arguments."""
_ATOMS = frozenset({ir.Loc, str, int, float, bool, type(None)})
_SCALARS = frozenset({
    types.Integer, types.Float, types.Boolean, types.IntegerLiteral, types.BooleanLiteral,
})  # fmt: skip
numba_call_type = BaseFunction.get_call_type
"""Numba's method."""
numba_list_vars = ir.Inst._rec_list_vars
"""Numba's method."""


def remember_call_types() -> None:
    """Resolve an operator or builtin once for each combination of scalar types."""
    BaseFunction.get_call_type = _get_call_type  # type: ignore[method-assign]


def skip_atoms() -> None:
    """List the variables of IR statements without visiting strings, numbers and locations."""
    ir.Inst._rec_list_vars = _list_vars  # type: ignore[method-assign]


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

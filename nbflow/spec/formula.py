"""Formulas in family files: arithmetic on numbers, our fields and keys of the configuration."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_OF_TWO: dict[str, Callable[[Any, Any], Any]] = {"min": min, "max": max}
FUNCTIONS = ("sqrt", *_OF_TWO)
MAX_LENGTH = 200
_MOST = 2**63 - 1


def check_formula(formula: Any, where: str) -> str:
    """Return a formula if its syntax is valid; names may have any value."""
    if not isinstance(formula, str):
        raise UsageError(f"{where}: must be text in quotes, got {formula!r:.80}")
    try:
        evaluate(formula, where, lambda name: 1)
    except UsageError as error:
        if isinstance(error.__cause__, ValueError | ZeroDivisionError | OverflowError):
            return formula  # valid, though not with these values
        raise
    return formula


def names_in(formula: str) -> list[str]:
    """Return the names in a formula, in order."""
    names: dict[str, None] = {}
    evaluate(formula, "", lambda name: names.setdefault(name, None))
    return list(names)


def evaluate(formula: str, where: str, value_of: Callable[[str], Any]) -> float | int | None:
    """Return the value of ``a / sqrt(b)`` and the like.

    Parameters
    ----------
    formula : str
        Numbers, names, ``+ - * / // %``, ``sqrt(a)``, ``min(a, b)``, ``max(a, b)``, brackets; a
        dot in a name goes into a table.
    where : str
        Begins the error messages.
    value_of : callable
        Returns the number of a name, or None, which makes the result None.

    Raises
    ------
    UsageError
        If the formula is not of this form or cannot be evaluated.

    Examples
    --------
    >>> evaluate("4 * sqrt(n)", "here", {"n": 9}.get)
    12.0
    """
    names: set[str] = set()

    def walk(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.Name | ast.Attribute):
            name = ast.unparse(node)
            names.add(name)
            value = value_of(name)
            if value is not None and type(value) not in (int, float):
                raise UsageError(f"{where}: {name} must be a number, got {shown(value):.80}")
            if type(value) is int and not -_MOST <= value <= _MOST:
                raise UsageError(f"{where}: {name} must fit 64 bits, got {shown(value)}")
            return math.nan if value is None else value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            name, values = node.func.id, [walk(argument) for argument in node.args]
            if name == "sqrt" and len(values) == 1:
                return math.sqrt(values[0])
            if name in _OF_TWO and len(values) == 2:
                return math.nan if any(map(math.isnan, values)) else _OF_TWO[name](*values)
        raise wrong

    wrong = UsageError(
        f"{where}: not a formula: {formula!r:.80}; it may have numbers, fields and keys, "
        "+ - * / // %, sqrt(a), min(a, b), max(a, b) and brackets"
    )
    if len(formula) > MAX_LENGTH:
        raise UsageError(f"{where}: a formula may have at most {MAX_LENGTH} characters")
    try:
        result = walk(ast.parse(formula, mode="eval").body)
    except SyntaxError:
        raise wrong from None
    except UsageError:
        raise
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        found = ", ".join(f"{name} = {shown(value_of(name))}" for name in sorted(names))
        raise UsageError(f"{where}: cannot evaluate {formula!r} with {found}: {error}") from error
    if isinstance(result, float) and math.isnan(result):
        return None
    return result  # type: ignore[no-any-return]

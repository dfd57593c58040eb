"""The shortcuts in Numba's front end find the types and variables that Numba finds."""

from __future__ import annotations

import itertools
import operator

import pytest
from numba.core import compiler, ir, types
from numba.core.registry import cpu_target

from nbflow_kernels.cpu import (
    jit,  # noqa: F401, which installs the shortcuts
    numba_compile_time,
)

SCALARS = (types.int32, types.uint8, types.int64, types.float32, types.float64, types.boolean)
OPERATORS = (operator.add, operator.truediv, operator.lt, operator.rshift, operator.eq)


def sample(a, n, pair, limit=3):
    total = 0.0
    for i in range(n):
        a[i, 0], a[i, 1:] = a[i, 1] * pair[0], pair[1]
        total += max(a[i, 0], limit, key=abs) if i % 2 else -a[i, 2]
        if total > limit:
            break
    return total, [x + 1 for x in range(n)], {"n": n}


def test_each_statement_has_the_same_variables():
    seen = 0
    for block in compiler.run_frontend(sample).blocks.values():
        for statement in block.body:
            for part in (statement, getattr(statement, "value", None)):
                if isinstance(part, ir.Inst):
                    inside = part._kws if isinstance(part, ir.Expr) else part.__dict__
                    wanted = numba_compile_time.numba_list_vars(part, inside)
                    assert part.list_vars() == wanted, part
                    seen += len(wanted)
    assert seen > 100


@pytest.mark.parametrize("function", OPERATORS)
def test_operations_have_the_types_that_numba_resolves(function):
    context = cpu_target.typing_context
    context.refresh()
    kind = context.resolve_value_type(function)
    for pair in itertools.product(SCALARS, repeat=2):
        found = []
        for resolve in (
            numba_compile_time.numba_call_type, type(kind).get_call_type, type(kind).get_call_type
        ):  # fmt: skip
            try:
                signature = resolve(kind, context, pair, {})
                found.append((signature, kind.get_impl_key(signature)))
            except Exception as error:
                found.append((type(error), None))
        assert found[1:] == found[:1] * 2, pair
    assert any(key[0] is kind for key in context.__dict__[numba_compile_time.CALL_TYPES])


def test_options_are_equal_and_named_as_numba_says():
    plain, explicit, other = compiler.Flags(), compiler.Flags(), compiler.Flags()
    explicit.nrt = plain.nrt  # the default, set
    other.nrt = not plain.nrt
    for a, b in itertools.product((plain, explicit, other), repeat=2):
        assert (a == b) == numba_compile_time.numba_options_equal(a, b)
        assert a != b or hash(a) == hash(b)
        for _ in range(2):
            assert a.get_mangle_string() == numba_compile_time.numba_mangle_options(a)
            assert list(a.values().items()) == [*numba_compile_time.numba_option_values(a).items()]
    assert plain == explicit != other

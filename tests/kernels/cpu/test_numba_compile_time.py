"""The shortcuts in Numba's front end find the types and variables that Numba finds."""

from __future__ import annotations

import copy
import itertools
import operator
import types as python_types
import warnings

import pytest
from numba.core import compiler, errors, ir, typeinfer, types
from numba.core.registry import cpu_target

from nbflow_kernels.cpu import (
    jit,  # noqa: F401, which installs the shortcuts
    numba_compile_time,
    numba_passes,
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


@pytest.mark.parametrize("error", [errors.TypingError("no such type"), KeyError("name")])
def test_errors_are_explained_as_numba_does(error):
    messages = []
    for context in (numba_compile_time.numba_error_context, typeinfer.new_error_context):
        made = copy.deepcopy(error)
        outer, inner = context("at {loc}", loc=ir.Loc("file.py", 7)), context("in {}", "call")
        with pytest.raises(type(error)) as caught, outer, inner:
            raise made
        assert caught.value is made
        messages.append(str(made))
    assert messages[0] == messages[1]
    assert ("in call" in messages[0]) == isinstance(error, errors.NumbaError)


def test_warnings_have_the_place_that_numba_gives_them():
    def warn(line, kind):
        def constraint(inference):
            warnings.warn("slow", kind, stacklevel=1)
            if line == 2:
                raise errors.TypingError("unknown")

        constraint.loc = ir.Loc("file.py", line)
        return constraint

    network = typeinfer.ConstraintNetwork()
    kinds = errors.NumbaWarning, errors.NumbaPerformanceWarning, UserWarning
    for i, kind in enumerate(kinds):
        network.append(warn(i + 1, kind))
    results = []
    for propagate in (numba_compile_time.numba_propagate, type(network).propagate):
        inference = python_types.SimpleNamespace(warnings=errors.WarningsFixer(errors.NumbaWarning))
        fixer = inference.warnings
        with warnings.catch_warnings(record=True) as others, numba_passes.compiling_kernel:
            warnings.simplefilter("always")
            failed = propagate(network, inference)
        assert inference.warnings is fixer
        lines = [(str(other.message), other.category, other.lineno) for other in others]
        results.append((dict(fixer._warnings), lines, [str(each) for each in failed]))
    assert results[0] == results[1]
    assert set(results[0][0]) == {("file.py", 1, kinds[0]), ("file.py", 2, kinds[1])}
    assert len(results[0][1]) == len(results[0][2]) == 1

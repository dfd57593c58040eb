"""Copies that Numba's inliner makes of a function's IR."""

from __future__ import annotations

import copy
from typing import Any

import numba
import numpy as np
import pytest
from numba.core import inline_closurecall, ir

from nbflow_kernels.compilation.numba_inlining import share_scopes


@numba.njit(inline="always")
def _clipped(x: Any, low: Any, high: Any) -> Any:
    if x < low:
        return low
    if x > high:
        return high
    return x


@numba.njit(inline="always")
def _sum_of_clipped(x: Any, low: Any, high: Any) -> Any:
    total = 0.0
    for i in range(len(x)):
        total += _clipped(x[i], low, high) if i % 2 else _clipped(-x[i], low, high)
    return total


def test_a_scope_is_copied_once_per_copy_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def deepcopy(self: ir.Scope, memo: dict[int, object]) -> ir.Scope:
        copied.append(self)
        made = copy.copy(self)
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    monkeypatch.setattr(ir.Scope, "__deepcopy__", deepcopy, raising=False)
    run = numba.njit(lambda x: _sum_of_clipped(x, -0.5, 2.0))
    x = np.array([1.0, 3.0, -4.0, -0.25])
    assert run(x) == -0.5 + 2.0 + 2.0 - 0.25
    # three functions are inlined; Numba copies each twice, and keeps the second
    assert len([scope for scope in copied if scope.has_parent]) == 6


def test_another_inliner_is_left_alone() -> None:
    worker = inline_closurecall.InlineWorker.inline_ir
    share_scopes(inline_closurecall)  # a second time
    assert inline_closurecall.InlineWorker.inline_ir is worker
    share_scopes(numba)  # has none

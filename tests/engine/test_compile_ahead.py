"""Kernels that other processes compile while a model is loaded."""

from __future__ import annotations

import dataclasses
import gc
import inspect

import pytest
from numba.core import types
from numba.core.registry import CPUDispatcher

import nbflow
from nbflow.distributed import quantized_all_reduce
from nbflow.engine import compile_ahead, multi_step
from nbflow.executor import attention_plans, bind
from nbflow_kernels.attention.cpu.flash_attention import flash_attention
from nbflow_kernels.attention.cpu.precompile import attention_tasks
from nbflow_kernels.attention.cpu.scheduler import schedule
from nbflow_kernels.cpu import compile_processes, thread_pool
from nbflow_kernels.cpu.jit import CachedKernel
from nbflow_kernels.cpu.register_tiles import has_wide_registers
from nbflow_kernels.kv_cache.cpu import _append_floats
from nbflow_kernels.kv_cache.cpu_codec import KINDS
from nbflow_kernels.logits.cpu import _token_log_probs
from nbflow_kernels.sampling.cpu import _argmax


@pytest.mark.parametrize("module", [multi_step, bind, attention_plans, quantized_all_reduce])
def test_kernels_call_only_functions_of_the_digest(module):
    """Their cache entries are found by their module and `nbflow_kernels`, wherever nbflow lies."""
    kernels = [found for found in vars(module).values() if isinstance(found, CachedKernel)]
    own = [kernel for kernel in kernels if kernel.py_func.__module__ == module.__name__]
    assert own
    for kernel in own:
        assert kernel._cache._cache_file._stamp[1] is None
        used = inspect.getclosurevars(kernel.py_func).globals.values()
        modules = {found.__module__ for found in used if isinstance(found, CPUDispatcher)}
        assert all(name.startswith(("nbflow_kernels.", module.__name__)) for name in modules)


def test_the_pool_is_compiled_while_the_engine_is_imported(monkeypatch):
    asked, given, compiled = [], [], []
    monkeypatch.setattr(CachedKernel, "is_cached", lambda self, sig: asked.append(self))
    monkeypatch.setattr(CachedKernel, "compile", lambda self, sig: compiled.append(self))
    monkeypatch.setattr(compile_processes, "may_fork", lambda: True)
    monkeypatch.setattr(compile_processes, "compile_in_processes", given.extend)
    nbflow.compile_early()
    assert asked == [thread_pool._serve, thread_pool._announce]
    for task in given:
        task()
    assert compiled == asked == [thread_pool._serve, thread_pool._announce, schedule]


def test_the_collector_is_off_while_the_engine_is_imported(monkeypatch):
    seen = []
    monkeypatch.setattr(nbflow, "compile_early", lambda: seen.append(gc.isenabled()))
    assert gc.isenabled()
    assert nbflow.__getattr__("load") is nbflow.load
    gc.disable()
    try:
        nbflow.__getattr__("load")
        assert seen[0] is seen[-1] is gc.isenabled() is False
    finally:
        gc.enable()
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        nbflow.__getattr__("lod")
    nbflow.__getattr__("load")
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, False),
        ({"logits_soft_cap": 30.0}, True),
        ({"attention_sinks": True}, True),
        ({"position": "alibi"}, True),
    ],
)
def test_models_with_more_than_plain_attention(model, changes, wanted):
    assert compile_ahead._has_extras(dataclasses.replace(model.spec, **changes)) == wanted


def test_the_kernels_are_those_that_a_model_calls(model, monkeypatch):
    asked = []
    monkeypatch.setattr(CachedKernel, "is_cached", lambda self, sig: asked.append((self, sig)))
    monkeypatch.setattr(compile_ahead, "may_fork", lambda: True)
    monkeypatch.setattr(compile_ahead, "compile_in_processes", list)
    tasks = compile_ahead.compile_ahead(model.spec, "f16", "f32")
    monkeypatch.undo()
    kernels = [kernel for kernel, _ in asked]
    assert {flash_attention, schedule, _append_floats, _token_log_probs, _argmax} == set(kernels)
    assert len(tasks) == len(kernels)
    model.generate([1, 2, 3], max_tokens=1)
    for kernel, signature in asked:
        assert tuple(map(types.unliteral, signature)) in kernel.overloads, kernel


@pytest.mark.parametrize("int8_scores", [False, True])
def test_prompts_over_int8_blocks_have_a_kernel_of_their_own(monkeypatch, int8_scores):
    asked = []
    monkeypatch.setattr(CachedKernel, "is_cached", lambda self, sig: asked.append(self))
    for kind, n in (("f16", 1), ("q8_0", 2 if has_wide_registers() else 1)):
        asked.clear()
        attention_tasks((KINDS[kind], KINDS[kind]), (64, 64), int8_scores=int8_scores)
        assert asked.count(flash_attention) == n

"""Kernels that a process compiles while another one compiles attention."""

from __future__ import annotations

from numba import int64

from nbflow.engine.compile_ahead import sampling_kernels
from nbflow_kernels.cpu import thread_pool
from nbflow_kernels.logits.cpu import _token_log_probs
from nbflow_kernels.sampling.cpu import _argmax


def test_what_follows_the_first_forward_pass_is_compiled(model):
    for compile_one in (*sampling_kernels(), thread_pool.compile_pool):
        compile_one()
    pool = (thread_pool._serve, thread_pool._announce)  # the first has the jobs' code
    assert all((int64, int64, int64) in kernel.overloads for kernel in pool)
    kernels = (_argmax, _token_log_probs)
    compiled = [set(kernel.overloads) for kernel in kernels]
    assert all(compiled)
    model.generate([1, 2, 3], max_tokens=1)
    assert [set(kernel.overloads) for kernel in kernels] == compiled

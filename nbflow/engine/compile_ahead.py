"""Compile the kernels of a first token with two processes.

A helper process compiles attention and what fills the KV cache, about half of the work.  When this
process needs them before the helper is done, it compiles meanwhile what comes after the first
forward pass: the kernels of the thread pool, greedy sampling and log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from nbflow.engine.sampler import log_probabilities
from nbflow.sampling.strategies import Greedy
from nbflow.spec.kv_formats import parse_kv
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.attention.cpu.precompile import start_helper
from nbflow_kernels.cpu.graph import compile_meanwhile, signature_of
from nbflow_kernels.cpu.parallel_for import capture
from nbflow_kernels.cpu.thread_pool import compile_pool


def compile_ahead(spec: ModelSpec, kv: str) -> None:
    """Start a helper process if the kernel cache lacks attention of a model with this KV format."""
    if spec.latent is not None:
        return
    keys, values = parse_kv(kv).default
    helper = start_helper((keys.kind, values.kind), (spec.cached_dim, spec.value_dim))
    if helper is not None and not compile_meanwhile:
        compile_meanwhile.extend((compile_pool, *sampling_kernels()))


def sampling_kernels() -> list[Callable[[], None]]:
    """Return functions that compile the kernels of greedy sampling with log-probabilities."""
    logits, tokens = np.zeros((1, 1), np.float32), np.zeros(1, np.int32)
    with capture() as seen:
        Greedy().launch(logits, np.zeros(1, np.uint64), np.zeros(1, np.uint64), tokens)
        log_probabilities(logits, tokens, np.zeros((1, 1)))
    kernels: list[tuple[Any, Any]] = [(call.kernel, signature_of(call)) for call in seen.calls]
    return [partial(kernel.compile, signature) for kernel, signature in kernels]

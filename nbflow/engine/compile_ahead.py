"""Compile the kernels of a first token in several processes.

Children compile what any model needs, attention first, while this process loads the weights; the
kernels of the graphs are then shared among processes, too (`nbflow_kernels.cpu.graph`).
"""

from __future__ import annotations

import numpy as np

from nbflow.engine.sampler import log_probabilities
from nbflow.sampling.strategies import Greedy
from nbflow.spec.kv_formats import parse_kv
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.attention.cpu.precompile import attention_tasks
from nbflow_kernels.cpu.compile_processes import Task, compile_in_processes, may_fork
from nbflow_kernels.cpu.graph import missing_kernel, signature_of
from nbflow_kernels.cpu.parallel_for import capture


def compile_ahead(spec: ModelSpec, kv: str, activations: str) -> list[int]:
    """Start processes for what the kernel cache lacks of a model with these options."""
    if not may_fork():
        return []
    tasks = sampling_tasks()
    if spec.latent is None:
        keys, values = parse_kv(kv).default
        dims = spec.cached_dim, spec.value_dim
        kinds, int8 = (keys.kind, values.kind), activations == "int8"
        tasks = attention_tasks(kinds, dims, _has_extras(spec), int8) + tasks
    return compile_in_processes(tasks)


def _has_extras(spec: ModelSpec) -> bool:
    """Return whether attention plans of the model have more than the plain kernel does."""
    has_bias = spec.position in ("alibi", "relative") or spec.attention is not None
    return has_bias or spec.attention_sinks or bool(spec.logits_soft_cap)


def sampling_tasks() -> list[Task]:
    """Return the compilations of greedy sampling with log-probabilities that the cache lacks."""
    logits, tokens = np.zeros((1, 1), np.float32), np.zeros(1, np.int32)
    with capture() as seen:
        log_probabilities(logits, tokens, np.zeros((1, 1)))
        Greedy().launch(logits, np.zeros(1, np.uint64), np.zeros(1, np.uint64), tokens)
    made = (
        missing_kernel(call.kernel, signature_of(call), from_python=True) for call in seen.calls
    )
    return [task for task in made if task is not None]

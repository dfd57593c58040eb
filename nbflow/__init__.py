"""nbflow: kernel-first LLM inference for research.

>>> import nbflow
>>> with nbflow.load("tiny_python") as model:
...     model.spec.n_layers
4

Names are imported when first used, so that ``import nbflow`` costs a few milliseconds.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nbflow.checkpoint import open_weights
    from nbflow.conversion import quantize_checkpoint
    from nbflow.engine.classify import classify
    from nbflow.engine.fill_mask import fill_mask
    from nbflow.engine.llm import LLM
    from nbflow.engine.llm_engine import LLMEngine
    from nbflow.engine.load import load
    from nbflow.engine.outputs import RequestOutput
    from nbflow.engine.search.api import beam_search, contrastive_search
    from nbflow.option_fields import option
    from nbflow.options import EngineOptions, LoadOptions, SamplingParams
    from nbflow.sampling import register_strategy
    from nbflow.spec import load_tokenizer
    from nbflow.spec.plugin_ops import OpPartition, register_op
    from nbflow_kernels.attention.variants import register_attention
    from nbflow_kernels.errors import MissingExtraError, UsageError
    from nbflow_kernels.formats.user import register_format
    from nbflow_kernels.plugins import load_plugin

_WHERE = {
    "LLMEngine": "nbflow.engine.llm_engine",
    "EngineOptions": "nbflow.options",
    "RequestOutput": "nbflow.engine.outputs",
    "LoadOptions": "nbflow.options",
    "OpPartition": "nbflow.spec.plugin_ops",
    "LLM": "nbflow.engine.llm",
    "SamplingParams": "nbflow.options",
    "beam_search": "nbflow.engine.search.api",
    "classify": "nbflow.engine.classify",
    "load_plugin": "nbflow_kernels.plugins",
    "option": "nbflow.option_fields",
    "register_attention": "nbflow_kernels.attention.variants",
    "register_format": "nbflow_kernels.formats.user",
    "register_op": "nbflow.spec.plugin_ops",
    "register_strategy": "nbflow.sampling",
    "contrastive_search": "nbflow.engine.search.api",
    "fill_mask": "nbflow.engine.fill_mask",
    "load": "nbflow.engine.load",
    "load_tokenizer": "nbflow.spec",
    "open_weights": "nbflow.checkpoint",
    "quantize_checkpoint": "nbflow.conversion",
    "MissingExtraError": "nbflow_kernels.errors",
    "UsageError": "nbflow_kernels.errors",
}

__all__ = [
    "LLM",
    "EngineOptions",
    "LLMEngine",
    "LoadOptions",
    "MissingExtraError",
    "OpPartition",
    "RequestOutput",
    "SamplingParams",
    "UsageError",
    "__version__",
    "beam_search",
    "classify",
    "contrastive_search",
    "fill_mask",
    "load",
    "load_plugin",
    "load_tokenizer",
    "open_weights",
    "option",
    "quantize_checkpoint",
    "register_attention",
    "register_format",
    "register_op",
    "register_strategy",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imports leave next to no garbage, and collections meanwhile take a seventh of their time.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        if name == "load":
            compile_early()
        return getattr(import_module(_WHERE[name]), name)
    finally:
        if is_collecting:
            gc.enable()


def compile_early() -> None:
    """Start to compile what all models need in children, while this process imports the engine.

    With a full kernel cache it does nothing; see `nbflow_kernels.cpu.compile_processes`.
    """
    from nbflow_kernels.cpu.compile_processes import compile_in_processes, may_fork
    from nbflow_kernels.cpu.thread_pool import pool_tasks

    tasks = pool_tasks() if may_fork() else []
    if tasks:  # loading needs the pool first
        compile_in_processes([*tasks, _compile_schedule])


def _compile_schedule() -> None:
    """Compile the schedule of attention; imports its package, which the parent does meanwhile."""
    from nbflow_kernels.attention.cpu.precompile import schedule_task

    task = schedule_task()
    if task is not None:
        task()


def __dir__() -> list[str]:
    return __all__

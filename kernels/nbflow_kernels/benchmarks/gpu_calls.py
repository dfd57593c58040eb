"""The timed calls of a case on a CUDA device, and what kind of case it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import nbflow_kernels
from nbflow_kernels.op_case import OpCase

Call = Callable[[], Any]

KINDS = ("gemv", "attention", "prompts", "other")
"""Kinds of cases in the order in which they are measured.

``gemv`` and ``attention`` are what a decode step runs, products of few rows and attention of one
row per sequence; ``prompts`` are products and attention of many rows.
"""
DECODE_KINDS = ("gemv", "attention")
MAX_GEMV_ROWS = 16

PRODUCTS = ("matmul", "qmatmul")
_ATTENTION = ("single_decode_with_kv_cache", "single_prefill_with_kv_cache")
_AT_RUN = ("q_scale", "k_scale", "v_scale", "sinks", "return_lse", "lse_base")


def kind(case: OpCase) -> str:
    """Return the kind of a case, one of `KINDS`."""
    if case.op in PRODUCTS and case.out is not None:
        return "gemv" if case.out[0][0] <= MAX_GEMV_ROWS else "prompts"
    if case.op in _ATTENTION:
        return "attention" if case.op == _ATTENTION[0] else "prompts"
    return "other"


def make_call(case: OpCase, arguments: dict[str, Any], out: dict[str, Any]) -> Call:
    """Return the call of a case with arguments on the device.

    Attention is planned here, once, as the steps of a model plan it: the call runs the plan.
    """
    if case.op in _ATTENTION:
        return _planned(arguments, out)
    op = getattr(nbflow_kernels, case.op)
    return lambda: op(**arguments, **out)


def _planned(arguments: dict[str, Any], out: dict[str, Any]) -> Call:
    """Return a call that runs the plan of one request."""
    options = dict(arguments)
    q, k, v = (options.pop(name) for name in "qkv")
    call: dict[str, Any] = {name: options.pop(name) for name in _AT_RUN if name in options}
    layout = options.pop("kv_layout", "NHD")
    n_keys, n_heads = k.shape[1::-1] if layout == "HND" else k.shape[:2]
    rows = q if q.ndim == 3 else q[None]
    if "out" in out:
        call["out"] = out["out"] if q.ndim == 3 else out["out"][None]
    if "kv_format" not in options:
        options["head_dim_vo"] = v.shape[2]
    wrapper = nbflow_kernels.BatchPrefillWithRaggedKVCacheWrapper(kv_layout=layout)
    wrapper.plan(
        np.array([0, len(rows)], np.int32), np.array([0, n_keys], np.int32), rows.shape[1],
        n_heads, rows.shape[2], **options,
    )  # fmt: skip
    return lambda: wrapper.run(rows, k, v, **call)

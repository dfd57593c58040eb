"""Run a plan on checked arrays, on the CPU or a CUDA device."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_together, empty, is_cuda
from nbflow_kernels.attention import cuda
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.attention.options import head_factors, output_dtype
from nbflow_kernels.attention.plan import AttentionPlan, padded_key_bias
from nbflow_kernels.attention.variants import AttentionVariant, read_variant
from nbflow_kernels.cpu.parallel_for import together
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.kv_cache.page_table import strides


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of a call beyond the plan, as in `BatchPrefillWithPagedKVCacheWrapper.run`."""

    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    sinks: Any = None
    key_bias: Any = None
    out: Any = None
    lse: Any = None
    return_lse: bool = False
    lse_base: str = "2"
    o_dtype: Any = None
    """dtype of the result; by default that of the queries."""
    tensor_cores: bool = False
    """Raise if no tensor-core kernel supports the call."""


def check_variant(
    variant: Any, plan: AttentionPlan, call: AttentionCall
) -> AttentionVariant | None:
    """Return the checked variant; raise if options conflict with it."""
    if variant is None:
        return None
    if plan.logits_soft_cap or plan.table(at.SLOPES) is not None:
        raise UsageError(
            "variant replaces logits_soft_cap and pos_encoding_mode='ALIBI'; write them in its "
            "logits_transform"
        )
    if plan.table(at.ROPE) is not None:
        raise UsageError("variant does not support pos_encoding_mode='ROPE_LLAMA'; rotate q and k")
    if plan.table(at.KEY_ROPE) is not None:
        raise UsageError("variant does not support key_cos_sin; rotate keys before the cache")
    functions = read_variant(variant)
    if call.sinks is not None and not functions.use_softmax:
        raise UsageError("sinks need a softmax, and variant.use_softmax is False")
    if call.return_lse and not functions.use_softmax:
        raise UsageError("return_lse needs a softmax, and variant.use_softmax is False")
    if plan.n_merges:
        raise UsageError("variant must be given to plan(...) too, which then splits no keys")
    return functions


def check_devices(plan: AttentionPlan, call: AttentionCall, q: Any) -> None:
    """Raise unless workspace and queries are on one device, with tensor cores if required."""
    workspace = plan.workspace
    if workspace is not None and is_cuda(workspace) != is_cuda(q):
        devices = ("in host memory", "on a CUDA device")
        raise UsageError(
            f"float_workspace_buffer is {devices[is_cuda(workspace)]}, q is {devices[is_cuda(q)]}: "
            "pass a buffer on the same device, or None"
        )
    if call.tensor_cores and not is_cuda(q):
        raise UsageError(
            "use_tensor_cores=True needs arrays on a CUDA device, got q in host memory; leave it "
            "False"
        )


@dataclass
class PlannedRun:
    """One run of a plan on checked queries and caches."""

    plan: AttentionPlan
    q: Any
    k: Any
    v: Any
    kinds: tuple[int, int]
    call: AttentionCall
    variant: Any = None
    page_bytes: tuple[int, int] | None = None
    """Overrides the page strides on a device, for overlapping pages."""
    scales: tuple[Any, Any] | None = None
    """Scales of keys and values in NVFP4 caches."""
    out: Any = None
    """Set by `run_plan`: what the kernels write, float32 on the CPU; `lse` likewise."""
    lse: Any = None
    dtype: Any = None
    """Set by `run_plan`: dtype of the result."""


def run_plan(*runs: PlannedRun) -> Any:
    """Attend with plans; return the result of the run, or (out, lse), or a tuple of those of all.

    On the CPU the runs share one launch; on a device they are launched one after the other.
    """
    functions = [_prepare(run) for run in runs]
    pairs = list(zip(runs, functions, strict=True))
    if is_cuda(runs[0].q):
        for run, variant in pairs:
            _run_cuda(run, variant)
    else:
        with together() if len(runs) > 1 else contextlib.nullcontext():
            for run, variant in pairs:
                _run_cpu(run, variant)
        for run in runs:
            if run.plan.n_merges:
                launch.merge_splits(run.plan, run.out, run.lse)
    results = [_result(run) for run in runs]
    return results[0] if len(runs) == 1 else tuple(results)


def _prepare(run: PlannedRun) -> AttentionVariant | None:
    """Check the arguments of a call, set them in the plan and make the outputs."""
    plan, q, call = run.plan, run.q, run.call
    H, G, _, D_vo = plan.heads
    dtype = run.dtype = output_dtype(call.o_dtype, q)
    if call.out is not None:
        check_array("out", call.out, (plan.n_query_rows, H, D_vo), dtype)
    if call.lse is not None:
        check_array("lse", call.lse, (plan.n_query_rows, H))
    if call.sinks is not None:
        check_array("sinks", call.sinks, (H,))
        if not is_cuda(q):
            check_together(q=q, sinks=call.sinks)
    check_devices(plan, call, q)
    if call.lse_base not in ("2", "e"):
        raise unknown_name("lse_base", call.lse_base, ("2", "e"))
    functions = check_variant(run.variant, plan, call)
    scores = head_factors(H, H // G, call.q_scale, call.k_scale)
    plan.set_factors(scores, head_factors(H, H // G, None, None, call.v_scale))
    if call.sinks is not None or plan.table(at.SINKS) is not None:
        plan.set_table(at.SINKS, call.sinks)
    _set_key_bias(plan, call.key_bias, q)
    plan.header[at.LSE_NATURAL] = call.lse_base == "e"
    _set_scales(plan, run.scales, q)
    run.out, run.lse = call.out, call.lse
    written = dtype if is_cuda(q) else np.dtype(np.float32)  # by the kernels
    if run.out is None or run.out.dtype != written:
        run.out = empty(q, (plan.n_query_rows, H, D_vo), written)
    if run.lse is None and call.return_lse:
        run.lse = empty(q, (plan.n_query_rows, H))
    return functions


def _set_key_bias(plan: AttentionPlan, bias: Any, q: Any) -> None:
    """Check the bias of keys that are stored before RoPE, and set it in the plan."""
    if bias is not None:
        if plan.table(at.KEY_ROPE) is None:
            raise UsageError("key_bias is for keys stored before RoPE; give key_cos_sin too")
        check_array("key_bias", bias, (plan.heads[1], plan.heads[2]))
        if is_cuda(bias) != is_cuda(q):
            check_together(q=q, key_bias=bias)
        bias = padded_key_bias(bias)
    if bias is not None or plan.table(at.KEY_BIAS) is not None:
        plan.set_table(at.KEY_BIAS, bias)


def _set_scales(plan: AttentionPlan, scales: tuple[Any, Any] | None, q: Any) -> None:
    """Set the addresses and strides of the scales of an NVFP4 cache in the plan, or none."""
    if scales is not None and is_cuda(q):
        raise UsageError(
            "kv_cache_sf is for arrays in host memory: no CUDA kernel reads NVFP4 caches; append "
            "to a cache of kv_format='q4_0' or 'f8_e4m3'"
        )
    fields = plan.header[at.SCALES : at.SCALES + 8]
    if scales is None:
        fields[0] = 0
    else:
        parts = [(address_of(x), *strides(x, plan.kv_layout)) for x in scales]
        fields[:] = (*parts[0], *parts[1])


def _run_cpu(run: PlannedRun, functions: AttentionVariant | None) -> None:
    """Process the work items of a run; `merge_splits` follows."""
    plan, q, call = run.plan, run.q, run.call
    if plan.fixed_rows is not None:
        for array, given in ((run.out, call.out), (run.lse, call.lse)):
            if array is not None and array is not given:
                array[plan.n_rows :] = 0.0  # padding rows
    if q.dtype != np.float32:
        run.q = q.astype(np.float32)  # must live until the launch
    launch.attend_variant(plan, functions, run.q, run.k, run.v, run.out, run.lse, run.kinds)


def _result(run: PlannedRun) -> Any:
    """Return what the caller wanted of a run, in the dtype wanted."""
    out = narrow_output(run.out, run.call.out, run.dtype)
    return (out, run.lse) if run.call.return_lse else out


def narrow_output(found: Any, out: Any, dtype: Any) -> Any:
    """Return the float32 result in `dtype`, in `out` if given."""
    if found.dtype == dtype:
        return found
    if out is None:
        return found.astype(dtype)
    out[...] = found
    return out


def _run_cuda(run: PlannedRun, functions: AttentionVariant | None) -> None:
    """Run a plan on a CUDA device; the kernels write any output dtype."""
    plan, call, page_bytes = run.plan, run.call, run.page_bytes
    for name, array in (("k", run.k), ("v", run.v), ("out", run.out), ("lse", run.lse)):
        if array is not None and not is_cuda(array):
            raise TypeError(f"{name} must be on the device, as q is, got a NumPy array")
    arguments = (run.q, run.k, run.v, run.out, run.lse, run.kinds)
    if functions is None:
        tensor_cores = call.tensor_cores
        cuda.attend(plan, *arguments, page_bytes=page_bytes, tensor_cores=tensor_cores)
    elif call.tensor_cores:
        raise UsageError("use_tensor_cores=True is not supported with variant; leave it False")
    else:
        cuda.attend_variant(plan, functions, *arguments, page_bytes=page_bytes)

"""Binding of fused mixture-of-experts layers (`ExpertFusion`) to launches of their kernels."""

from __future__ import annotations

from typing import Any

from nbflow.executor.bind import Binder, PythonOp
from nbflow.executor.bind_cuda_fused import norm_of
from nbflow.executor.cuda_fusion import ExpertFusion
from nbflow.executor.executor import Executor
from nbflow_kernels.activation.cuda import FUNCTIONS
from nbflow_kernels.cuda import device_of
from nbflow_kernels.formats import QuantTensor
from nbflow_kernels.moe import cuda_fused_moe


def bind_experts(binder: Binder, fusion: ExpertFusion) -> PythonOp | None:
    """Return the launch of a layer's two kernels; None if they do not support it."""
    executor = binder.executor
    ops, activations = executor.program.ops, executor.activations
    # with int8 activations the shared expert reads another quantization than the routed ones
    if activations not in ("f32", "int8") or (fusion.shared and activations != "f32"):
        return None
    op, router = ops[fusion.experts], ops[fusion.router]
    if any(op.attrs.get(word) for word in ("biased", "weigh_inputs", "scaled")):
        return None
    if op.attrs["activation"] not in FUNCTIONS:
        return None
    out, logits = binder.view(op.out), binder.view(router.out)
    layer = _layer(binder, fusion)
    if layer is None or not layer.fits(device_of(out), len(out)):
        return None
    norm, x = None, binder.view(router.inputs[0])
    if fusion.norm is not None:
        norm = norm_of(executor, fusion.norm, x if fusion.keeps_norm else None)
        x = binder.view(ops[fusion.norm].inputs[0])
    residual, scale = None, 1.0
    if fusion.add is not None:
        residual = binder.view(ops[fusion.add].out)
        scale = float(ops[fusion.add].attrs.get("scale", 1.0))
    return PythonOp(
        op.kind,
        lambda: layer.run(x, logits, out, norm=norm, residual=residual, scale=scale),
    )


def _layer(binder: Binder, fusion: ExpertFusion) -> cuda_fused_moe.Experts | None:
    """Return the weights of the layer, or None if the kernels do not support their formats."""
    executor: Executor = binder.executor
    operands, spec = executor.weights.operands, executor.program.spec.moe
    assert spec is not None
    op = executor.program.ops[fusion.experts]
    stacks, (router,) = operands[fusion.experts], operands[fusion.router]
    if isinstance(router, QuantTensor):
        if not router.is_float:
            return None
        router = router.array
    if len(stacks) != 3 or any(len(w.shape) != 3 for w in stacks):  # several formats
        return None
    return cuda_fused_moe.Experts(
        *stacks, activation=op.attrs["activation"], router=router,
        bias=executor.weights.bias[fusion.experts], first=op.attrs["experts"][0],
        shared=_shared(operands, fusion), **spec.routing,
    )  # fmt: skip


def _shared(operands: list[tuple[Any, ...]], fusion: ExpertFusion) -> cuda_fused_moe.Shared | None:
    """Return the shared expert."""
    if fusion.shared is None:
        return None
    both, down = fusion.shared
    gate = None if fusion.scale_rows is None else operands[fusion.scale_rows][0]
    return cuda_fused_moe.Shared(operands[both], operands[down][0], gate)

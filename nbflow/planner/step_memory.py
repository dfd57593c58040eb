"""Memory of steps on a device in addition to their buffers: what `Executor.step_bytes` counts.

These are index arrays, attention plans, workspaces of kernels and CUDA graphs.  A plan counts the
longest prompt and the largest decode step; further shapes of steps take less.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import nbflow_kernels as nk
from nbflow.planner.memory import concatenated
from nbflow.planner.planned_model import PlannedModel
from nbflow.program.cost import FLOAT32_BYTES
from nbflow.program.records import Op, Program, mask_of

INT32_BYTES = 4
GRAPH_KERNEL_BYTES = 2048
"""Device memory of a kernel in a graph: estimated, drivers do not document it."""
COMMUNICATOR_BYTES = 128 << 20
"""Device memory of an NCCL communicator: estimated, it depends on the links."""
MAX_SPLIT_TOKENS = 1024
"""Tokens up to which products may be split; their sums do not grow with the number of tokens."""
ATTENTIONS = ("attention", "cross_attention")


@dataclass(frozen=True)
class DeviceLimits:
    """Numbers of a device that size grids and workspaces."""

    n_sms: int
    max_shared_bytes: int
    arch: str


H100 = DeviceLimits(132, 227 << 10, "sm_90")
"""Limits of devices that need not exist; others have fewer multiprocessors."""


def device_limits(device: str) -> DeviceLimits:
    """Return the limits of the emulated device, and of an H100 for all others."""
    if not device.startswith("emulator"):
        return H100
    stand_in: Any = importlib.import_module("nbflow_ptx.cupy_stand_in")
    found = stand_in.ndarray.__kernel_device__
    return DeviceLimits(found.n_sms, found.max_shared_bytes, found.arch)


@dataclass(frozen=True)
class StepShape:
    """Size of a step."""

    n_tokens: int
    n_states: int
    n_logits: int
    n_sequences: int
    n_pages: int
    rows_each: int
    """Largest number of tokens of a sequence."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes of all shapes of steps."""

    n_bytes: int
    """All of them."""
    graph_bytes: int
    """The part of CUDA graphs."""


def step_bytes(
    program: Program,
    model: PlannedModel,
    activations: str,
    shapes: tuple[StepShape, ...],
    page_size: int,
    device: str,
    graphs: bool = True,
) -> StepBytes:
    """Return the bytes of steps of these shapes on a device."""
    if not program.ops or not shapes:
        return StepBytes(0, 0)
    limits = device_limits(device)
    workspaces: Counter[str] = Counter()
    total = n_graphs = 0
    for shape in shapes:
        total += INT32_BYTES * (5 * shape.n_tokens + shape.n_states + 4 * shape.n_sequences + 2)
        total += INT32_BYTES * shape.n_pages
        attention = _attention_bytes(program, shape, page_size, limits)
        total += attention.pop("plan", 0)
        for found in (attention, _product_bytes(program, model, activations, shape, limits)):
            for name, n_bytes in found.items():
                workspaces[name] = max(workspaces[name], n_bytes)
        n_graphs += bool(program.layers and program.spec.causal)
    in_graphs = 0
    if graphs and device.startswith("cuda"):
        in_graphs = n_graphs * len(program.ops) * GRAPH_KERNEL_BYTES
    return StepBytes(total + workspaces.total() + in_graphs, in_graphs)


def _attention_bytes(
    program: Program, shape: StepShape, page_size: int, limits: DeviceLimits
) -> dict[str, int]:
    """Return the bytes of attention plans, as "plan", and of the workspace that they share."""
    from nbflow.executor.cuda_graphs import attention_limits  # late: loads the CUDA launchers
    from nbflow_kernels.attention.cuda.plan import StaticCapacity, partial_floats
    from nbflow_kernels.attention.cuda.scheduler import MAX_SPLIT_KEYS
    from nbflow_kernels.attention.plan_layout import HEADER_SIZE

    ops = [op for op in program.ops if op.kind in ATTENTIONS]
    kinds = {(op.kind, mask_of(op), program.heads_of(op.layer or 0)) for op in ops}
    found: dict[str, int] = {}
    if any(op.kind == "select_keys" for op in program.ops):
        found["key scores"] = FLOAT32_BYTES * shape.n_tokens * shape.n_pages * page_size
    for _, _, of_layer in kinds:
        heads = program.n_heads, of_layer.n_kv_heads, of_layer.key_dim, of_layer.value_dim
        capacity = StaticCapacity.of(
            heads[0] // heads[1], shape.n_tokens, shape.rows_each, shape.n_sequences,
            shape.n_pages * page_size, MAX_SPLIT_KEYS,
            **attention_limits(heads, shape.rows_each, limits.n_sms),
        )  # fmt: skip
        tables = 3 * shape.n_sequences + 2 + shape.n_pages
        tables += 8 * capacity.n_items + 4 * capacity.n_tiles
        arrived = max(64, capacity.n_tiles * heads[1] * capacity.most)
        n_bytes = INT32_BYTES * (tables + arrived) + 8 * HEADER_SIZE
        found["plan"] = found.get("plan", 0) + n_bytes
        partials = FLOAT32_BYTES * (capacity.n_partials * partial_floats(heads) + 4)
        found["partials"] = max(found.get("partials", 0), partials)
    return found


def _product_bytes(
    program: Program,
    model: PlannedModel,
    activations: str,
    shape: StepShape,
    limits: DeviceLimits,
) -> dict[str, int]:
    """Return the largest workspace of each name that products with weights share."""
    from nbflow_kernels.cuda.workspace import allocated_bytes  # late, as above
    from nbflow_kernels.quantized_matmul import cuda as product

    found: Counter[str] = Counter()
    products: Counter[tuple[str, int, int, str]] = Counter()
    of_experts: Counter[tuple[str, int, int, str]] = Counter()
    sizes = shape.n_tokens, shape.n_states, shape.n_logits
    for op in program.ops:
        if op.kind == "experts" and shape.n_tokens:
            found |= _expert_bytes(program, op, shape.n_tokens)
            of_experts |= _expert_products(program, model, op, activations, shape.n_tokens)
        if op.kind != "linear":
            continue
        n_tokens = program.buffers[op.out].n_rows(*sizes)
        for matrix in _matrices(program, model, op) if n_tokens else ():
            products |= {(*matrix, activations): n_tokens}
            if any(model.kept_groups(w.name) for w in op.weights):
                size = allocated_bytes(n_tokens * matrix[2], FLOAT32_BYTES)
                found |= {"qmatmul columns": size}
    for chosen, is_expert in ((products, False), (of_experts, True)):
        for (name, n_rows, n_columns, arithmetic), most in chosen.items():
            format = nk.FORMATS[name]
            # one expert's matrix of several in the MMA layout is not dequantized
            whole = is_expert and format.has_mma_layout
            sizes_of = product.multiply_workspace_bytes if whole else product.workspace_bytes
            for n_tokens in {*range(1, min(most, MAX_SPLIT_TOKENS), 8), most}:
                found |= sizes_of(format, n_rows, n_columns, n_tokens, arithmetic, limits)
    return dict(found)


def _expert_bytes(program: Program, op: Op, n_tokens: int) -> dict[str, int]:
    """Return the scratch of experts that do not run as fused kernels, which take less."""
    from nbflow_kernels.cuda.workspace import allocated_bytes  # late, as above

    moe, (first, end) = program.spec.moe, op.attrs["experts"]
    assert moe is not None
    n_pairs, weight = n_tokens * moe.top_k, op.weights[0]
    width = weight.shape(program.spec.shape_of(weight.name))[-2]
    n_columns = program.buffers[op.inputs[0]].width
    items = {
        "rows": n_pairs, "indptr": end - first + 1, "inverse": n_pairs, "hidden": n_pairs * width,
        "gate and up": n_pairs * width * (2 if op.attrs.get("gated", True) else 1),
        "results": n_pairs * program.buffers[op.out].width,
    }  # fmt: skip
    if op.attrs.get("weigh_inputs"):
        items |= {"weighed": n_pairs * n_columns, "tokens and ones": 2 * n_pairs}
    if _take_turns(n_pairs, end - first):
        items["inputs"] = n_pairs * n_columns
    return {f"experts {name}": allocated_bytes(n, FLOAT32_BYTES) for name, n in items.items()}


def _expert_products(
    program: Program, model: PlannedModel, op: Op, activations: str, n_tokens: int
) -> dict[tuple[str, int, int, str], int]:
    """Return the products of experts one after the other: each may have any number of tokens."""
    moe, (first, end) = program.spec.moe, op.attrs["experts"]
    assert moe is not None
    if not _take_turns(n_tokens * moe.top_k, end - first):
        return {}
    arithmetic = "bf16" if activations == "bf16" else "f32"
    shapes = {(model.format_of(w.name), program.spec.shape_of(w.name)) for w in op.weights}
    return {(format, s[-2], s[-1], arithmetic): n_tokens for format, s in shapes}


def _take_turns(n_pairs: int, n_experts: int) -> bool:
    """Return whether the host launches a product for each expert."""
    from nbflow_kernels.moe.cuda import MIN_ROWS_TO_SYNC  # late, as above

    return n_pairs >= MIN_ROWS_TO_SYNC * n_experts


def _matrices(program: Program, model: PlannedModel, op: Op) -> list[tuple[str, int, int]]:
    """Return format, rows and columns of the matrices of a product, which formats divide."""
    found = []
    for _, run in groupby(op.weights, key=lambda w: model.format_of(w.name)):
        stored, (n_rows, n_columns) = concatenated(program, model, tuple(run))
        found.append((stored, n_rows, n_columns))
    return found

"""Fused MoE layer for up to 8 tokens on CUDA devices, in two kernels.

``cuda_fused_moe_up.cu``    norm, router GEMM, top-k routing, gate and up projections, activation
``cuda_fused_moe_down.cu``  down projections, weighted sum, residual

Both kernels include the shared expert.  Routing stays on the device, so the grid depends only on
the number of tokens.  The bits are those of the separate ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from nbflow_kernels.activation.cuda import FUNCTIONS
from nbflow_kernels.cuda import Kernel, KernelDevice, ceil_div, cpp_kernel, device_of
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.formats.layout_mma import CHUNK, ROWS, MmaLayout
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.matmul import cuda_mma
from nbflow_kernels.moe.cuda import ROUTING, has_units
from nbflow_kernels.quantized_matmul.cuda import (
    GEMV_MAX_ROWS,
    SPLITS,
    STATIC_BYTES,
    WARPS,
    half_of_shared,
    record_bytes,
)
from nbflow_kernels.quantized_matmul.cuda_fused import NORM_NUMBERS, NORM_PARAMETERS, Norm

ROUTER_ROWS, _ROUTER_BYTES = 16, 4 * (8 * 128 + 16)  # as in `cuda_router_gemm.cuh`
_ROUTERS = {"float32": ("ROUTER_F32", "f32"), "float16": ("ROUTER_F16", "f16")}
_ROUTERS["uint16"] = ("ROUTER_BF16", "bf16")
_ACTIVE_INTS = 1 + GEMV_MAX_ROWS  # of `ActiveExpert` in `cuda_active_experts.cuh`
_STATE_INTS = 4  # of `State` in `cuda_fused_moe_up.cu`
_MATRICES = (
    "u8*? {0}_gate, u8*? {0}_up, f32*? {0}_hidden, i64 {0}_bytes, i32 {0}_width, i32 {0}_shift"
)
_ROUTER = (
    "{0}* router, f32*? shared_gate, f32* logits, f32* weights, f32*? shared_factors, i32* ids"
)
_UP = (
    "i32* plan, i32* state, i64 tile_bytes, i32 n_tokens, i32 n_columns, i32 n_routers, "
    "i32 first_expert, i32 n_experts, i32 end"
)
_DOWN = (
    "u8*? {0}, f32*? {0}_hidden, f32*? {0}_results, i64 {0}_bytes, i64 {0}_tile_bytes, "
    "i32 {0}_columns, i32 {0}_parts"
)
_SUMS = (
    "f32* weights, f32*? shared_factors, i32* ids, f32*? out, f32*? x, i64 out_stride, "
    "i64 x_stride, f32 scale, i32 k, i32 first_expert, i32 n_experts"
)


@dataclass(frozen=True)
class Shared:
    """The shared expert, which all tokens use."""

    gate_up: tuple[QuantTensor, ...]
    """Gate and up projection: one matrix (2S, H), or two (S, H)."""
    down: QuantTensor
    """(H, S)."""
    gate: Any = None
    """float32 (H,): the result is multiplied by ``sigmoid(gate @ token)``."""

    @property
    def width(self) -> int:
        """Number of hidden units."""
        return int(self.down.shape[1])

    @cached_property
    def halves(self) -> tuple[Any, Any, int]:
        """Data of the gate, data of up from its first row tile on, and its first row in there."""
        first = self.gate_up[0].units()
        if len(self.gate_up) == 2:
            return first.data, self.gate_up[1].units().data, 0
        tile, shift = divmod(self.width, ROWS)
        return first.data, first.data[tile * first.form.tile_bytes(first.n_columns) :], shift


@dataclass(frozen=True)
class Experts:
    """Weights of an MoE layer, or of the experts of this rank, on one device."""

    gates: QuantTensor
    """(n, F, H)."""
    ups: QuantTensor
    downs: QuantTensor
    """(n, H, F)."""
    activation: str
    router: Any
    """float32, float16 or bfloat16 bits (E, H)."""
    top_k: int
    bias: Any = None
    """float32 (E,), correction bias; this and the following as in `nbflow_kernels.moe_routing`."""
    scoring: str = "softmax"
    renormalize: bool = True
    n_groups: int = 1
    top_k_groups: int = 1
    group_score: str = "max"
    routed_scaling_factor: float = 1.0
    min_score: float = 0.0
    mixer_margin: float = 0.0
    first: int = 0
    """Index of the first expert of this rank."""
    shared: Shared | None = None
    _shapes: dict[tuple[Any, int], Any] = field(default_factory=dict, repr=False, compare=False)

    def fits(self, device: KernelDevice, n_tokens: int) -> bool:
        """Return whether `run` supports the weights and a number of tokens."""
        matrices = [self.gates, self.ups, self.downs]
        if self.shared is not None:
            matrices += [*self.shared.gate_up, self.shared.down]
        if n_tokens > GEMV_MAX_ROWS or not all(map(has_units, matrices)):
            return False
        forms = [w.units().form for w in matrices]
        same_forms = len({*forms[:2], *forms[3:-1]}) == 1 and len({forms[2], *forms[3:][-1:]}) == 1
        router_fits = self.router.dtype == np.float32 or cuda_mma.fits(self.router)
        return same_forms and router_fits and self._shape(device, n_tokens) is not None

    def run(
        self, x: Any, logits: Any, out: Any, *, norm: Norm | None = None, residual: Any = None,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Compute the layer for up to 8 tokens, which `norm` normalizes first.

        `logits` (T, E) gets the output of the router, `out` that of the layer; with a `residual`
        the output times `scale` is added to that instead.
        """
        device = device_of(x)
        shape = self._shape(device, len(x))
        assert shape is not None
        buffers = _Buffers(device, self, len(x), shape)
        self._run_up(x, logits, norm, shape, buffers)
        self._run_down(out, residual, scale, shape, buffers)

    def _run_up(
        self, x: Any, logits: Any, norm: Norm | None, shape: _LaunchShape, buffers: _Buffers
    ) -> None:  # fmt: skip
        gates, ups, shared = self.gates.units(), self.ups.units(), self.shared
        n_routed = self.router.shape[0]
        tile_bytes, width = gates.form.tile_bytes(gates.n_columns), self.gates.shape[1]
        kind, name = _ROUTERS[self.router.dtype.name]
        arguments: tuple[Any, ...] = (x, x.strides[0] // 4)
        if norm is not None:
            arguments += norm.arguments
        of_shared: tuple[Any, ...] = (None, None, None, 0, 0, 0)
        if shared is not None:
            gate, up, shift = shared.halves
            of_shared = gate, up, buffers.shared_hidden, 0, shared.width, shift
        arguments += (
            self.router, None if shared is None else shared.gate, logits, buffers.weights,
            buffers.factors, buffers.ids, self.bias, n_routed, self.top_k,
            int(self.scoring == "sigmoid"),
            int(self.renormalize), self.n_groups, self.top_k_groups,
            int(self.group_score == "top2_sum"), self.routed_scaling_factor, self.min_score,
            self.mixer_margin,
            gates.data, ups.data, buffers.hidden, ceil_div(width, ROWS) * tile_bytes, width, 0,
            *of_shared, buffers.plan, buffers.state, tile_bytes, len(x), gates.n_columns,
            ceil_div(n_routed, ROUTER_ROWS), self.first, self.gates.shape[0], 0,
        )  # fmt: skip
        normed = 0 if norm is None else NORM_NUMBERS[norm.kind]
        function = FUNCTIONS[self.activation]
        whole = _n_chunks(gates.n_columns) % 2 == 0
        _up_kernel(gates.form, shape.up_tokens, whole, normed, kind, name, function)(
            shape.up_grid, 32 * WARPS, arguments, shape.up_bytes
        )

    def _run_down(
        self, out: Any, residual: Any, scale: float, shape: _LaunchShape, buffers: _Buffers
    ) -> None:
        downs, shared = self.downs.units(), self.shared
        n_rows, n_columns = self.downs.shape[1:]
        tile_bytes = downs.form.tile_bytes(n_columns)
        of_shared: tuple[Any, ...] = (None, None, None, 0, 0, 1, 1)
        whole = _n_chunks(n_columns) % 2 == 0
        if shared is not None:
            whole = whole and _n_chunks(shared.width) % 2 == 0
            of_shared = (
                shared.down.units().data, buffers.shared_hidden, buffers.shared_results, 0,
                downs.form.tile_bytes(shared.width), shared.width, shape.shared_parts,
            )  # fmt: skip
        _down_kernel(downs.form, shape.down_tokens, whole)(
            shape.down_grid, 32 * WARPS,
            (
                downs.data, buffers.hidden, buffers.results, ceil_div(n_rows, ROWS) * tile_bytes,
                tile_bytes, n_columns, shape.parts, *of_shared, buffers.weights, buffers.factors,
                buffers.ids, out, residual, out.strides[0] // 4,
                0 if residual is None else residual.strides[0] // 4, scale, self.top_k,
                self.first, self.gates.shape[0], buffers.plan, buffers.arrived, len(out), n_rows,
                shape.record_bytes, 0,
            ),
            shape.down_bytes,
        )  # fmt: skip

    def _shape(self, device: KernelDevice, n_tokens: int) -> _LaunchShape | None:
        """Return the launch parameters, or None if the tokens do not fit the shared memory."""
        key = device.key, n_tokens
        if key not in self._shapes:
            self._shapes[key] = _LaunchShape.of(device, self, n_tokens)
        found: _LaunchShape | None = self._shapes[key]
        return found


@dataclass(frozen=True)
class _LaunchShape:
    """Launch parameters of both kernels for a number of tokens."""

    up_tokens: int
    """Tokens staged at a time."""
    up_grid: int
    up_bytes: int
    """Bytes of dynamic shared memory."""
    down_tokens: int
    down_grid: int
    down_bytes: int
    record_bytes: int
    """Bytes of the staged tokens among them."""
    parts: int
    """Thread blocks that share the splits of a row tile."""
    shared_parts: int

    @classmethod
    def of(cls, device: KernelDevice, experts: Experts, n_tokens: int) -> _LaunchShape | None:
        bucket = next(n for n in (1, 2, 4, 8) if n >= n_tokens)
        max_bytes, half = device.max_shared_bytes - STATIC_BYTES, half_of_shared(device)
        H, F = experts.gates.shape[2], experts.gates.shape[1]
        S = 0 if experts.shared is None else experts.shared.width
        n_active = min(experts.gates.shape[0], n_tokens * experts.top_k)
        E = experts.router.shape[0]

        tokens = bucket
        while (n_bytes := _up_bytes(experts, n_tokens, tokens)) > max_bytes:
            tokens //= 2
            if not tokens:
                return None
        n_routers = ceil_div(E, ROUTER_ROWS)
        n_items = n_active * _n_groups(F, H, 1) + _n_groups(S, H, 1)
        n_workers = (1 + (n_bytes <= half)) * device.n_sms - n_routers
        grid = n_routers + max(1, min(n_items, n_workers))

        form = experts.downs.units().form
        columns = [F, S] if S else [F]
        split = _split_columns(form, bucket, columns, half)
        split = split or _split_columns(form, bucket, columns, max_bytes)
        if split is None:
            return None
        parts, records = split
        down_bytes = records + _SUM_BYTES * bucket
        n_items = n_active * parts[0] * _n_groups(H, F, parts[0])
        if S:
            n_items += parts[1] * _n_groups(H, S, parts[1])
        down_grid = min(n_items, (1 + (down_bytes <= half)) * device.n_sms)
        return cls(
            tokens, grid, n_bytes, bucket, down_grid, down_bytes, records, parts[0], parts[-1]
        )


_SUM_BYTES = 2 * 4 * ROWS * WARPS
"""Per token: sums of the warps, double buffered."""


def _up_bytes(experts: Experts, n_tokens: int, tokens: int) -> int:
    """Return the shared memory of `experts_up` with `tokens` staged at a time."""
    E, H = experts.router.shape
    n_chunks = _n_chunks(H)
    routing = n_tokens * (8 * (2 * E + experts.n_groups) + 4 * E)
    found: int = max(
        n_chunks * record_bytes(experts.gates.units().form, tokens) + 3 * _SUM_BYTES * tokens,
        tokens * n_chunks * 4 * CHUNK + _ROUTER_BYTES,
        routing,
        4 * n_tokens * n_chunks,
    )
    return found


def _split_columns(
    form: MmaLayout, tokens: int, columns: list[int], max_bytes: int
) -> tuple[list[int], int] | None:
    """Return the parts of each matrix's columns with which tokens fit, and their bytes."""
    max_bytes -= _SUM_BYTES * tokens
    all_parts, largest = [], 0
    for n in columns:
        n_units = ceil_div(_n_chunks(n), 2)
        for parts in (1, 2, 4, 8) if n_units >= SPLITS else (1,):
            starts = [n_units * p // parts for p in range(parts + 1)]
            units = max(b - a for a, b in pairwise(starts))
            n_bytes = 2 * units * record_bytes(form, tokens)
            if n_bytes <= max_bytes:
                break
        else:
            return None
        all_parts.append(parts)
        largest = max(largest, n_bytes)
    return all_parts, largest


def _n_groups(n_rows: int, n_columns: int, parts: int) -> int:
    """Return the work items of a part of a matrix: `Columns` in `cuda_tile_scheduler.cuh`."""
    at_once = WARPS // (min(SPLITS, ceil_div(_n_chunks(n_columns), 2)) // parts)
    return ceil_div(ceil_div(n_rows, ROWS), at_once)


def _n_chunks(n_columns: int) -> int:
    return ceil_div(n_columns, CHUNK)


class _Buffers:
    """Intermediate results of the kernels, in workspaces that all calls share."""

    def __init__(
        self, device: KernelDevice, experts: Experts, n_tokens: int, shape: _LaunchShape
    ) -> None:
        F, H = experts.gates.shape[1:]
        S, gated, n_pairs = 0, False, n_tokens * experts.top_k
        if experts.shared is not None:
            S, gated = experts.shared.width, experts.shared.gate is not None
        sums = [SPLITS if parts > 1 else 1 for parts in (shape.parts, shape.shared_parts)]
        self.weights, self.hidden, self.results, self.factors = _carve_workspace(
            device, "experts", (n_pairs, n_pairs * F, n_pairs * sums[0] * H, n_tokens * gated)
        )
        self.shared_hidden, self.shared_results = _carve_workspace(
            device, "shared expert", (n_tokens * S, n_tokens * sums[1] * H * bool(S))
        )
        n_active = min(experts.gates.shape[0], n_pairs)
        sizes = n_pairs, 1 + _ACTIVE_INTS * n_active
        self.ids, self.plan = _carve_workspace(device, "active experts", sizes, "i4")
        sizes = _STATE_INTS, ceil_div(H, ROWS)
        self.state, self.arrived = _carve_workspace(
            device, "experts arrived", sizes, "i4", zero=True
        )


def _carve_workspace(
    device: KernelDevice, name: str, sizes: tuple[int, ...], dtype: str = "f4", zero: bool = False
) -> list[Any]:
    """Return arrays in one workspace, aligned to 16 bytes; None for those of size 0."""
    starts = [0, *accumulate(ceil_div(size, 4) * 4 for size in sizes)]
    whole = workspace(device, name, starts[-1], dtype, zero=zero)
    ranges = zip(starts, sizes, strict=False)
    return [whole[start : start + size] if size else None for start, size in ranges]


@cache
def _up_kernel(
    form: MmaLayout, tokens: int, whole: bool, norm: int, router: str, name: str, function: str
) -> Kernel:
    parameters = (
        f"f32* x, i64 x_stride, {NORM_PARAMETERS + ', ' if norm else ''}{_ROUTER.format(name)}, "
        f"{ROUTING}, {_MATRICES.format('experts')}, {_MATRICES.format('shared')}, {_UP}"
    )
    more: dict[str, str | int] = {"NORM": norm, "ROUTER": router, "FUNCTION": function}
    defines = {**_defines(form, tokens, whole), **more}
    return cpp_kernel(__file__, "cuda_fused_moe_up.cu", "experts_up", parameters, defines=defines)


@cache
def _down_kernel(form: MmaLayout, tokens: int, whole: bool) -> Kernel:
    parameters = (
        f"{_DOWN.format('experts')}, {_DOWN.format('shared')}, {_SUMS}, i32* plan, i32* arrived, "
        "i32 n_tokens, i32 n_rows, i32 record_bytes, i32 end"
    )
    defines = _defines(form, tokens, whole)
    return cpp_kernel(
        __file__, "cuda_fused_moe_down.cu", "experts_down", parameters, defines=defines
    )


def _defines(form: MmaLayout, tokens: int, whole: bool) -> dict[str, str | int]:
    own: dict[str, str | int] = {"TOKENS": tokens, "WARPS": WARPS, "WHOLE": int(whole)}
    return {**form.defines(), **own}

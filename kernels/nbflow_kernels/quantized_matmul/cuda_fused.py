"""GEMV with a fused norm prologue and fused epilogues.

The kernel is `cuda_gemv.cu`.  Prologue: norm of the activations.  Epilogues: activation, gated
activation, RoPE and KV-cache append (of MLA, too), or norm of the results.  The bits are those of
the separate ops, so the caller may choose either by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from nbflow_kernels.activation.cuda import FUNCTIONS
from nbflow_kernels.cuda import Kernel, KernelDevice, ceil_div, cpp_kernel, device_of
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.formats.layout_mma import MmaLayout
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.kv_cache.cuda import format_type
from nbflow_kernels.kv_cache.page_table import strides
from nbflow_kernels.quantized_matmul.cuda import (
    GEMV_MAX_ROWS,
    GEMV_PARAMETERS,
    WARPS,
    ActivationPrecision,
    gemv_arguments,
    gemv_defines,
    plan_gemv,
)
from nbflow_kernels.quantized_matmul.cuda_dequant_gemm import has_mma_layout

NORM_NUMBERS = {"rms": 1, "layer": 2}
"""`RMS_NORM` and `LAYER_NORM` of `cuda_prologue_norm.cuh`."""
_GATE_REGION, _NORM_CHUNK = 64, 128  # as in `cuda_epilogues.cuh` and `normalize.cuh`

_SCALING = "f32*? {0}_weight, f32*? {0}_bias, f32*? {0}_out, i64 {0}_out_stride"
NORM_PARAMETERS = f"{_SCALING.format('norm')}, {_SCALING.format('second')}, f32 eps, f32 offset"
_REGIONS = "i32* arrived_regions"


@dataclass(frozen=True)
class Norm:
    """Norm of each row."""

    kind: str
    """``"rms"`` or ``"layer"``."""
    weight: Any
    bias: Any
    eps: float
    offset: float = 0.0
    """Added to the weight of an RMS norm."""
    out: Any = None
    """Output of the normalized rows; None: not written."""
    second: tuple[Any, Any, Any] | None = None
    """Weight, bias and output of a second norm of the same rows, which is only written."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Members of the struct `Norm` in `cuda_prologue_norm.cuh`."""
        second = _scaling(*(self.second or (None, None, None)))
        return (*self.scaling, *second, self.eps, self.offset)

    @property
    def scaling(self) -> tuple[Any, ...]:
        """Members of the struct `Scaling`."""
        return _scaling(self.weight, self.bias, self.out)


def _sums_bytes(width: int, n_tokens: int) -> int:
    """Return the bytes of a float per chunk of each row."""
    return 4 * n_tokens * ceil_div(width, _NORM_CHUNK)


def _format(which: str, kind: int) -> tuple[str, str]:
    """Return the macro with the KV-cache format of keys or values."""
    return f"{which}_FORMAT", format_type(kind).replace(" ", "")


def _scaling(weight: Any, bias: Any, out: Any) -> tuple[Any, ...]:
    return (weight, bias, out, 0 if out is None else out.strides[0] // 4)


class EpilogueLaunch(NamedTuple):
    """Launch parameters of an epilogue for a matrix and a number of tokens."""

    defines: tuple[tuple[str, str | int], ...] = ()
    """Further macros."""
    arguments: tuple[Any, ...] = ()
    """Kernel arguments after the counters of the regions."""
    n_regions: int = 0
    """Regions (`cuda_epilogue_sync.cuh`) of the matrix."""
    shared_bytes: int = 0
    """Bytes of dynamic shared memory."""


class Epilogue:
    """Base of the epilogues, and the empty one."""

    number = 0
    """Value of the macro EPILOGUE in `cuda_epilogues.cuh`."""
    parameters = ""

    def launch(self, n_rows: int, n_tokens: int) -> EpilogueLaunch:
        """Return the launch parameters for a matrix of `n_rows` rows."""
        return EpilogueLaunch()


NOTHING = Epilogue()


@dataclass(frozen=True)
class Activation(Epilogue):
    """Elementwise activation."""

    activation: str
    number = 1

    def launch(self, n_rows: int, n_tokens: int) -> EpilogueLaunch:
        """See `Epilogue.launch`."""
        return EpilogueLaunch((("FUNCTION", FUNCTIONS[self.activation]),))


@dataclass(frozen=True)
class GateEpilogue(Epilogue):
    """Gated activation: ``out = activation(gate) * up``, the halves of the result."""

    activation: str
    out: Any
    number = 2
    parameters = "f32* gated, i64 gated_stride, i32 width, i32 gate, i32 up, i32 padding"

    def launch(self, n_rows: int, n_tokens: int) -> EpilogueLaunch:
        """See `Epilogue.launch`."""
        width = self.out.shape[1]
        return EpilogueLaunch(
            (("FUNCTION", FUNCTIONS[self.activation]),),
            (self.out, self.out.strides[0] // 4, width, 0, width, 0),
            ceil_div(n_rows // 2, _GATE_REGION),
        )


@dataclass(frozen=True)
class KvPlacement:
    """Positions of tokens, block table and RoPE table."""

    positions: Any
    """int32 (T,): this and the following as in `nbflow_kernels.append_paged_kv_cache`."""
    batch_indices: Any
    kv_indices: Any
    kv_indptr: Any
    kv_layout: str
    rope_rows: Any
    """int32 (T,): rows of `cos_sin`; the positions, unless the table has other rows."""
    cos_sin: Any = None
    """float32 (rows, 2 * half), or None: no RoPE."""
    is_neox: bool = True
    parameters = (
        "f32*? cos_sin, i32* rope_rows, i32* positions, i32* batch_indices, i32* kv_indices, "
        "i32* kv_indptr, i32 half, i32 is_neox, i32 n_rope_rows, i32 n_requests, i32 n_pages, "
        "i32 page_size"
    )

    def arguments(self, pages: Any) -> tuple[Any, ...]:
        """Return the members of the struct in `cuda_epilogue_rope_kv_append.cuh`."""
        table = self.cos_sin
        half, n_rows = (0, 0) if table is None else (table.shape[1] // 2, len(table))
        page_size = pages.shape[1 if self.kv_layout == "NHD" else 2]
        return (
            table, self.rope_rows, self.positions, self.batch_indices, self.kv_indices,
            self.kv_indptr, half, int(self.is_neox), n_rows, len(self.kv_indptr) - 1,
            pages.shape[0], page_size,
        )  # fmt: skip

    def cache(self, pages: Any) -> tuple[Any, ...]:
        """Return pages with the strides of pages, tokens and heads."""
        return (pages, *strides(pages, self.kv_layout))


def _cache_parameters(name: str) -> str:
    return f"any* {name}, i64 {name}_page, i64 {name}_token, i64 {name}_head"


@dataclass(frozen=True)
class RopeKvAppendEpilogue(Epilogue):
    """Epilogue of the QKV projection: head norms, RoPE, KV-cache append."""

    placement: KvPlacement
    head_dim: int
    first: int
    """Index of the matrix's first head, in the order queries, keys, values."""
    n_q: int
    n_k: int
    keys: Any
    values: Any
    kinds: tuple[int, int]
    """Formats of keys and of values (`nbflow_kernels.kv_cache.cpu_codec.KINDS`)."""
    q_weight: Any = None
    """float32 (head_dim,), RMS norm of each query head; None: no norm.  With `of_all` float32
    (n_q * head_dim,), one norm over all query heads."""
    k_weight: Any = None
    eps: float = 0.0
    offset: float = 0.0
    of_all: bool = False
    """Norms are over all heads together; then a matrix has all queries or keys, or none."""
    number = 3
    parameters = (
        f"{KvPlacement.parameters}, f32*? q_weight, f32*? k_weight, {_cache_parameters('keys')}, "
        f"{_cache_parameters('values')}, i32 head_dim, i32 first, i32 n_q, i32 n_k, f32 head_eps, "
        "f32 head_offset"
    )

    def launch(self, n_rows: int, n_tokens: int) -> EpilogueLaunch:
        """See `Epilogue.launch`."""
        placement = self.placement
        formats = (_format(which, kind) for which, kind in zip("KV", self.kinds, strict=True))
        arguments = (
            *placement.arguments(self.keys), self.q_weight, self.k_weight,
            *placement.cache(self.keys), *placement.cache(self.values), self.head_dim,
            self.first, self.n_q, self.n_k, self.eps, self.offset,
        )  # fmt: skip
        return EpilogueLaunch(
            (*formats, ("NORM_OF_ALL_HEADS", int(self.of_all))),
            arguments,
            3 if self.of_all else n_rows // self.head_dim,
            _sums_bytes(n_rows, n_tokens) if self.of_all else 0,
        )


@dataclass(frozen=True)
class MlaEpilogue(Epilogue):
    """Epilogue of the MLA projections.

    Copies the last columns of queries to `queries` and rotates them; normalizes the first columns
    of the latent vector, rotates the others, and appends it to its page.
    """

    placement: KvPlacement
    head_dim: int
    """Head size of the queries, which are the first rows of the product."""
    n_q: int
    """Query heads in this matrix."""
    rank: int
    """Normalized columns of a latent vector; as many columns of `queries` are not written."""
    queries: Any
    """float32 (T, heads, width)."""
    latent: Any
    """float32 (T, width): the latent vectors, changed in place."""
    first: int | None
    """First row of the latent vectors in the matrix; -1 if computed before, None if not here."""
    pages: Any
    kind: int
    weight: Any
    """float32 (rank,), weight of the RMS norm."""
    eps: float
    offset: float = 0.0
    number = 5
    parameters = (
        f"{KvPlacement.parameters}, f32* queries, f32* latent, i64 query_stride, "
        f"i64 latent_stride, f32*? latent_weight, {_cache_parameters('vectors')}, i32 head_dim, "
        "i32 n_q, i32 width, i32 rank, i32 first, i32 n_latent, f32 latent_eps, f32 latent_offset"
    )

    def launch(self, n_rows: int, n_tokens: int) -> EpilogueLaunch:
        """See `Epilogue.launch`."""
        first, n_latent = (0, 0) if self.first is None else (self.first, 1)
        arguments = (
            *self.placement.arguments(self.pages), self.queries, self.latent,
            self.queries.strides[0] // 4, self.latent.strides[0] // 4, self.weight,
            *self.placement.cache(self.pages), self.head_dim, self.n_q, self.latent.shape[1],
            self.rank, first, n_latent, self.eps, self.offset,
        )  # fmt: skip
        return EpilogueLaunch((_format("K", self.kind),), arguments, self.n_q + n_latent)


@dataclass(frozen=True)
class NormEpilogue(Epilogue):
    """Norm of the result, written to `norm.out`, or times `added` (if not 0) added to it."""

    norm: Norm
    added: float = 0.0
    number = 4
    parameters = (
        f"{_SCALING.format('row')}, f32 row_eps, f32 row_offset, f32 row_added, i32 padding"
    )

    def launch(self, n_rows: int, n_tokens: int) -> EpilogueLaunch:
        """See `Epilogue.launch`."""
        return EpilogueLaunch(
            (("ROW_NORM", NORM_NUMBERS[self.norm.kind]),),
            (*self.norm.scaling, self.norm.eps, self.norm.offset, self.added, 0),
            1,
            _sums_bytes(n_rows, n_tokens),
        )


def can_fuse(device: KernelDevice, w: Any, n_tokens: int, activations: str) -> bool:
    """Return whether `fused_gemv` supports a weight and a number of rows."""
    if not isinstance(w, QuantTensor) or not has_mma_layout(w):
        return False
    if w.outliers is not None or w.column_order is not None:
        return False
    if n_tokens > GEMV_MAX_ROWS:
        return False
    return plan_gemv(device, w.units(), n_tokens, activations) is not None


def fused_gemv(
    x: Any, w: QuantTensor, bias: Any, out: Any, *, rows: Any = None, norm: Norm | None = None,
    epilogue: Epilogue = NOTHING, added: float = 0.0, activations: str = "f32",
) -> None:  # fmt: skip
    """Multiply up to 8 rows by a weight that `can_fuse`, with a fused norm and a fused epilogue.

    `out` gets the result before the epilogue, except that an `Activation` is applied to it; if
    `added` is not 0, the result times this is added to it.  `rows` is the row of `x` for each row
    of `out`.  The output of `norm` must not be `x`, which all thread blocks read.
    """
    if not len(out):
        return
    device, units = device_of(x), w.units()
    plan = plan_gemv(device, units, len(out), activations)
    assert plan is not None
    arguments = gemv_arguments(plan, device, x, units, bias, added, out, rows)
    if norm is not None:
        arguments += norm.arguments
    launch = epilogue.launch(units.n_rows, len(out))
    if launch.n_regions:
        arrived = workspace(device, "qmatmul regions", launch.n_regions, "i4", zero=True)
        arguments += (arrived, *launch.arguments)
    kind = 0 if norm is None else NORM_NUMBERS[norm.kind]
    epilogue_key = epilogue.number, epilogue.parameters, launch.defines
    _kernel(units.form, plan.tokens, plan.whole, plan.arithmetic, kind, *epilogue_key)(
        plan.grid, 32 * WARPS, arguments, max(plan.shared, launch.shared_bytes)
    )


@cache
def _kernel(
    form: MmaLayout, tokens: int, whole: bool, arithmetic: ActivationPrecision, norm: int,
    epilogue: int, epilogue_parameters: str, more: tuple[tuple[str, str | int], ...],
) -> Kernel:  # fmt: skip
    """Return `gemv` with a prologue and an epilogue."""
    parts = [GEMV_PARAMETERS]
    if norm:
        parts.append(NORM_PARAMETERS)
    if epilogue_parameters:
        parts += [_REGIONS, epilogue_parameters]
    defines: dict[str, str | int] = {
        **gemv_defines(form, tokens, whole, arithmetic),
        "NORM": norm,
        "EPILOGUE": epilogue,
        **dict(more),
    }
    return cpp_kernel(__file__, "cuda_gemv.cu", "gemv", ", ".join(parts), defines=defines)

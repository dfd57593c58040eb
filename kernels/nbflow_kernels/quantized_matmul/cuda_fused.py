"""Products of a few rows with what comes in front of them and behind them, in one kernel.

The kernel is `cuda_gemv.cu`: a norm of the rows on their way to where they are staged, and behind
the product an activation, a gate, what attention's heads go through until they lie in their pages,
or a norm of the results.  The bits are those of the ops one by one, so that either may be chosen by
the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from nbflow_kernels.activation.cuda import FUNCTIONS
from nbflow_kernels.cuda import Kernel, KernelDevice, ceil_div, cpp_kernel, device_of
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.formats.layout_mma import MmaLayout
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.kv_cache.cuda import format_type, strides
from nbflow_kernels.quantized_matmul.cuda import (
    FEW,
    FEW_PARAMETERS,
    WARPS,
    ActivationPrecision,
    GemvShape,
    few_arguments,
    few_defines,
    is_whole,
)

NORM_KINDS = {"rms": "RMS_NORM", "layer": "LAYER_NORM"}
"""Names in `cuda_prologue_norm.cuh`."""
NORM_NUMBERS = {"rms": 1, "layer": 2}
_GATE_PIECE, _NORM_CHUNK = 64, 128  # as in `cuda_epilogues.cuh` and `normalize.cuh`

_SCALING = "f32*? {0}_weight, f32*? {0}_bias, f32*? {0}_out, i64 {0}_out_stride"
NORM_PARAMETERS = f"{_SCALING.format('norm')}, {_SCALING.format('second')}, f32 eps, f32 offset"
_REGIONS = "i32* arrived_regions"


@dataclass(frozen=True)
class Norm:
    """A norm of each row."""

    kind: str
    """``"rms"`` or ``"layer"``."""
    weight: Any
    bias: Any
    eps: float
    offset: float = 0.0
    """Added to the weight of an rms norm."""
    out: Any = None
    """Where the normalized rows are written; None: nowhere."""
    second: tuple[Any, Any, Any] | None = None
    """Weight, bias and output of another norm of the same rows, which is written alone."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return the members of the struct in `cuda_prologue_norm.cuh`."""
        second = _scaling(*(self.second or (None, None, None)))
        return (*self.scaling, *second, self.eps, self.offset)

    @property
    def scaling(self) -> tuple[Any, ...]:
        """Return the members of its part."""
        return _scaling(self.weight, self.bias, self.out)


def _sums_bytes(width: int, n_tokens: int) -> int:
    """Return the bytes of the sums of all chunks of rows."""
    return 4 * n_tokens * ceil_div(width, _NORM_CHUNK)


def _format(which: str, kind: int) -> tuple[str, str]:
    """Return the macro that says how keys or values are stored."""
    return f"{which}_FORMAT", format_type(kind).replace(" ", "")


def _scaling(weight: Any, bias: Any, out: Any) -> tuple[Any, ...]:
    return (weight, bias, out, 0 if out is None else out.strides[0] // 4)


class Epilogue:
    """What the results of a product go through."""

    number = 0
    """Its macro in `cuda_epilogues.cuh`."""
    parameters = ""

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        """Return further macros."""
        return ()

    def n_regions(self, n_rows: int) -> int:
        """Return how many regions (`cuda_epilogue_sync.cuh`) a matrix of so many rows has."""
        return 0

    def shared_bytes(self, n_rows: int, n_tokens: int) -> int:
        """Return the dynamic shared memory that it needs."""
        return 0

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments behind the regions' counters."""
        return ()


NOTHING = Epilogue()


@dataclass(frozen=True)
class Activation(Epilogue):
    """An activation of each result."""

    activation: str
    number = 1

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        """See `Epilogue.defines`."""
        return (("FUNCTION", FUNCTIONS[self.activation]),)


@dataclass(frozen=True)
class GateEpilogue(Epilogue):
    """``out = activation(gate) * up``, the halves of the results."""

    activation: str
    out: Any
    gate_first: bool = True
    number = 2
    parameters = "f32* gated, i64 gated_stride, i32 width, i32 gate, i32 up, i32 padding"

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        """See `Epilogue.defines`."""
        return (("FUNCTION", FUNCTIONS[self.activation]),)

    def n_regions(self, n_rows: int) -> int:
        """See `Epilogue.n_regions`."""
        return ceil_div(n_rows // 2, _GATE_PIECE)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """See `Epilogue.arguments`."""
        width = self.out.shape[1]
        gate, up = (0, width) if self.gate_first else (width, 0)
        return (self.out, self.out.strides[0] // 4, width, gate, up, 0)


@dataclass(frozen=True)
class Places:
    """Where tokens are in their sequences, and these in pages."""

    positions: Any
    """int32 (T,): as the following those of `nbflow_kernels.append_paged_kv_cache`."""
    batch_indices: Any
    kv_indices: Any
    kv_indptr: Any
    kv_layout: str
    rope_rows: Any
    """int32 (T,): rows of `cos_sin`; the positions, unless the table has other rows."""
    cos_sin: Any = None
    """float32 (rows, 2 * half), or None: nothing is rotated."""
    is_neox: bool = True
    parameters = (
        "f32*? cos_sin, i32* rope_rows, i32* positions, i32* batch_indices, i32* kv_indices, "
        "i32* kv_indptr, i32 half, i32 is_neox, i32 n_rope_rows, i32 n_requests, i32 n_pages, "
        "i32 page_size"
    )

    def arguments(self, pages: Any) -> tuple[Any, ...]:
        """Return the struct's members (`cuda_epilogue_rope_kv_append.cuh`) for such pages."""
        table = self.cos_sin
        half, n_rows = (0, 0) if table is None else (table.shape[1] // 2, len(table))
        page_size = pages.shape[1 if self.kv_layout == "NHD" else 2]
        return (
            table, self.rope_rows, self.positions, self.batch_indices, self.kv_indices,
            self.kv_indptr, half, int(self.is_neox), n_rows, len(self.kv_indptr) - 1,
            pages.shape[0], page_size,
        )  # fmt: skip

    def cache(self, pages: Any) -> tuple[Any, ...]:
        """Return pages with the distances of pages, tokens and heads."""
        return (pages, *strides(pages, self.kv_layout))


def _cache_parameters(name: str) -> str:
    return f"any* {name}, i64 {name}_page, i64 {name}_token, i64 {name}_head"


@dataclass(frozen=True)
class RopeKvAppendEpilogue(Epilogue):
    """Heads of queries, keys and values: normalized, rotated, keys and values written to pages."""

    places: Places
    head_dim: int
    first: int
    """Number of the matrix's first head; queries come first, then keys, then values."""
    n_q: int
    n_k: int
    keys: Any
    values: Any
    kinds: tuple[int, int]
    """Formats of keys and of values (`nbflow_kernels.kv_cache.cpu_codec.KINDS`)."""
    q_weight: Any = None
    """float32 (head_dim,): of the rms norm of each query head; None: no norm.  With `of_all`
    float32 (n_q * head_dim,): of a norm over all of them together."""
    k_weight: Any = None
    eps: float = 0.0
    offset: float = 0.0
    of_all: bool = False
    """Whether norms are over all heads together; no matrix then has a part of queries or keys."""
    number = 3
    parameters = (
        f"{Places.parameters}, f32*? q_weight, f32*? k_weight, {_cache_parameters('keys')}, "
        f"{_cache_parameters('values')}, i32 head_dim, i32 first, i32 n_q, i32 n_k, f32 head_eps, "
        "f32 head_offset"
    )

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        """See `Epilogue.defines`."""
        formats = (_format(which, kind) for which, kind in zip("KV", self.kinds, strict=True))
        return (*formats, ("NORM_OF_ALL_HEADS", int(self.of_all)))

    def n_regions(self, n_rows: int) -> int:
        """See `Epilogue.n_regions`."""
        return 3 if self.of_all else n_rows // self.head_dim

    def shared_bytes(self, n_rows: int, n_tokens: int) -> int:
        """See `Epilogue.shared_bytes`."""
        return _sums_bytes(n_rows, n_tokens) if self.of_all else 0

    @property
    def arguments(self) -> tuple[Any, ...]:
        """See `Epilogue.arguments`."""
        places = self.places
        return (
            *places.arguments(self.keys), self.q_weight, self.k_weight, *places.cache(self.keys),
            *places.cache(self.values), self.head_dim, self.first, self.n_q, self.n_k, self.eps,
            self.offset,
        )  # fmt: skip


@dataclass(frozen=True)
class MlaEpilogue(Epilogue):
    """What latent attention reads of a product's queries, and of the vector that all heads read.

    The last columns of queries are copied to `queries` and rotated there; the latent vector is
    normalized in its first columns, rotated in its others, and written to its page.
    """

    places: Places
    head_dim: int
    """Of the product's queries, its first rows."""
    n_q: int
    """Their heads in this matrix."""
    rank: int
    """Columns of a latent vector that are normalized; as many of `queries` are left alone."""
    queries: Any
    """float32 (T, heads, width)."""
    latent: Any
    """float32 (T, width): the vectors, in place."""
    first: int | None
    """Row of the matrix at which they begin; -1 if they were there before, None for none of it."""
    pages: Any
    kind: int
    weight: Any
    """float32 (rank,): of the rms norm."""
    eps: float
    offset: float = 0.0
    number = 5
    parameters = (
        f"{Places.parameters}, f32* queries, f32* latent, i64 query_stride, i64 latent_stride, "
        f"f32*? latent_weight, {_cache_parameters('vectors')}, i32 head_dim, i32 n_q, i32 width, "
        "i32 rank, i32 first, i32 n_latent, f32 latent_eps, f32 latent_offset"
    )

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        """See `Epilogue.defines`."""
        return (_format("K", self.kind),)

    def n_regions(self, n_rows: int) -> int:
        """See `Epilogue.n_regions`."""
        return self.n_q + (self.first is not None)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """See `Epilogue.arguments`."""
        first, n_latent = (0, 0) if self.first is None else (self.first, 1)
        return (
            *self.places.arguments(self.pages), self.queries, self.latent,
            self.queries.strides[0] // 4, self.latent.strides[0] // 4, self.weight,
            *self.places.cache(self.pages), self.head_dim, self.n_q, self.latent.shape[1],
            self.rank, first, n_latent, self.eps, self.offset,
        )  # fmt: skip


@dataclass(frozen=True)
class NormEpilogue(Epilogue):
    """A norm of the results' rows, put to `norm.out`, or times `added` (not 0) added to it."""

    norm: Norm
    added: float = 0.0
    number = 4
    parameters = (
        f"{_SCALING.format('row')}, f32 row_eps, f32 row_offset, f32 row_added, i32 padding"
    )

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        """See `Epilogue.defines`."""
        return (("ROW_NORM", NORM_KINDS[self.norm.kind]),)

    def n_regions(self, n_rows: int) -> int:
        """See `Epilogue.n_regions`."""
        return 1

    def shared_bytes(self, n_rows: int, n_tokens: int) -> int:
        """See `Epilogue.shared_bytes`."""
        return _sums_bytes(n_rows, n_tokens)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """See `Epilogue.arguments`."""
        return (*self.norm.scaling, self.norm.eps, self.norm.offset, self.added, 0)


def can_fuse(device: KernelDevice, w: Any, n_tokens: int, activations: str) -> bool:
    """Return whether `fused_gemv` takes a weight and so many rows."""
    if not isinstance(w, QuantTensor) or w.is_float or w.format.decodes_from_storage:
        return False
    if w.outliers is not None or n_tokens > FEW:
        return False
    units = w.units()
    arithmetic = ActivationPrecision.of(units.form, activations)
    return GemvShape.of(device, units, n_tokens, arithmetic) is not None


def fused_gemv(
    x: Any, w: QuantTensor, bias: Any, out: Any, *, rows: Any = None, norm: Norm | None = None,
    then: Epilogue = NOTHING, added: float = 0.0, activations: str = "f32",
) -> None:  # fmt: skip
    """Multiply up to 8 rows, normalized by `norm`, and go on as `then` says.

    Parameters
    ----------
    x : array of float32, shape (T, K)
        The rows, or where `rows` (int32, as many as `out` has) chooses them from.
    w : QuantTensor, shape (N, K)
        One that `can_fuse` accepts.
    bias : array of float32, shape (N,), or None
        Added to the results.
    out : array of float32, shape (T, N)
        The results before `then`, except that an `Activation` is applied to them.
    rows : array of int32, optional
        Which rows of `x`.
    norm : Norm, optional
        Of the rows; its `out` must not be `x`, which all thread blocks read.
    then : Epilogue
        What comes behind.
    added : float
        Not 0: results times this are added to what `out` holds.
    activations : {"f32", "bf16", "int8"}
        As in `nbflow_kernels.qmatmul`.
    """
    if not len(out):
        return
    device, units = device_of(x), w.units()
    arithmetic = ActivationPrecision.of(units.form, activations)
    shape = GemvShape.of(device, units, len(out), arithmetic)
    assert shape is not None
    arguments = few_arguments(shape, x, units, bias, added, activations, out, rows)
    if norm is not None:
        arguments += norm.arguments
    n_regions = then.n_regions(units.n_rows)
    if n_regions:
        arrived = workspace(device, "qmatmul regions", n_regions, "i4", zero=True)
        arguments += (arrived, *then.arguments)
    kind = 0 if norm is None else NORM_NUMBERS[norm.kind]
    then_key = then.number, then.parameters, then.defines
    whole = is_whole(units, arithmetic)
    _kernel(units.form, shape.tokens, whole, arithmetic, kind, *then_key)(
        (shape.grid, shape.parts), 32 * WARPS, arguments,
        max(shape.shared, then.shared_bytes(units.n_rows, len(out))),
    )  # fmt: skip


@cache
def _kernel(
    form: MmaLayout, tokens: int, whole: bool, arithmetic: ActivationPrecision, norm: int,
    then: int, then_parameters: str, more: tuple[tuple[str, str | int], ...],
) -> Kernel:  # fmt: skip
    """Return `few_rows` with a prologue and an epilogue."""
    parts = [FEW_PARAMETERS]
    if norm:
        parts.append(NORM_PARAMETERS)
    if then_parameters:
        parts += [_REGIONS, then_parameters]
    defines: dict[str, str | int] = {
        **few_defines(form, tokens, whole, arithmetic),
        "NORM": norm,
        "EPILOGUE": then,
        **dict(more),
    }
    return cpp_kernel(__file__, "cuda_gemv.cu", "few_rows", ", ".join(parts), defines=defines)

"""`QuantTensor`: quantized weights in their storage format and in the packed layouts."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, is_cuda
from nbflow_kernels.cpu.fork import in_child
from nbflow_kernels.cpu.parallel_for import at_once
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.codec_spec import ReadRows
from nbflow_kernels.formats.column_order import (
    check_column_order,
    check_column_scales,
    order_like,
    same_columns,
)
from nbflow_kernels.formats.csr import CsrMatrix
from nbflow_kernels.formats.floats import FloatFormat, PackedFloats
from nbflow_kernels.formats.layout_cpu import CpuPacked
from nbflow_kernels.formats.registry import FORMATS, QuantFormat

if TYPE_CHECKING:
    from nbflow_kernels.formats.layout_mma import MmaPacked

_pack_lock = threading.Lock()


@in_child
def _free_lock() -> None:
    """Replace the lock, which another thread of the parent may have held at the fork."""
    global _pack_lock
    _pack_lock = threading.Lock()


class QuantTensor:
    """An array of weights in a format.

    The last axis is the contraction axis of matmuls and is split into the format's blocks; all
    other axes together are the rows.  The last block of a row is padded.

    Parameters
    ----------
    format : str or QuantFormat
        The format, or its name.
    shape : tuple of int
        Shape of the weights.
    data : array of uint8, shape (rows, row bytes)
        The storage bytes: the published layout, rows without gaps.  A NumPy array, or one on a
        CUDA device; see `to_device`.
    outliers : CsrMatrix, shape (rows, columns), optional
        Added to the decoded weights.
    column_order : array of int32, shape (S,), optional
        Column of the weights that each stored column holds, every column once; -1 for padding,
        which counts as zeros.  `data` then has rows of S columns.  None: stored in order.
    column_scales : array of float32, shape (K,), optional
        Factors of the columns: a decoded weight is multiplied by that of its column, and products
        multiply the activations instead, before they are rounded.

    Attributes
    ----------
    format : QuantFormat
        Storage format.
    shape : tuple of int
        Shape of the weights.
    data : array of uint8, shape (rows, row bytes)
        The storage bytes.  Do not change them after the first product: `packed` is made once.
    outliers : CsrMatrix or None
        Corrections added to the decoded values of single weights.
    column_order : array of int32, shape (S,), or None
        Order of the stored columns (GPTQ's act-order), in the memory of the weights.  With
        `column_scales` always an array.
    column_scales : array of float32, shape (K,), or None
        Factors of the columns (ModelOpt's pre_quant_scale), in the memory of the weights.

    Raises
    ------
    UsageError
        If the format is unknown, `data` does not have the size of format and shape, `outliers`
        or `column_scales` have another shape, or `column_order` does not name every column once; if
        one of the latter two goes with outliers or a format without a packed layout.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import quantize
    >>> qt = quantize(np.ones((2, 64), np.float32), "q4")
    >>> qt.format.name, qt.shape, qt.nbytes
    ('q4_b32t1a', (2, 64), 80)
    """

    __slots__ = (
        "_data", "_matrices", "_packed", "_units", "column_order", "column_scales", "format",
        "outliers", "shape",
    )  # fmt: skip

    def __init__(
        self,
        format: str | QuantFormat,
        shape: tuple[int, ...],
        data: NDArray[np.uint8],
        outliers: CsrMatrix | None = None,
        column_order: NDArray[np.int32] | None = None,
        column_scales: NDArray[np.float32] | None = None,
    ) -> None:
        self._matrices: tuple[QuantTensor, ...] | None = None
        self.format = _format(format)
        self.shape = _checked_shape(shape)
        if column_scales is not None:
            check_column_scales(column_scales, self.shape[-1])
            if column_order is None:
                column_order = order_like(column_scales)
        self.column_order, self.column_scales = column_order, column_scales
        if column_order is not None:
            check_column_order(column_order, self.shape[-1])
            if outliers is not None or self.is_float or self.format.decodes_from_storage:
                raise UsageError(
                    "column_order and column_scales go with a block format that has a packed "
                    f"layout, and without outliers, got {self.format.name}"
                )
        wanted = _data_shape(self.format, (*self.shape[:-1], self.n_stored_columns))
        known = isinstance(data, np.ndarray) or is_cuda(data)
        if not known or data.dtype != np.uint8:
            found = data.dtype.name if known else type(data).__name__
            raise TypeError(
                f"data must be an array (NumPy's or on a CUDA device) of uint8, got {found}"
            )
        if data.shape != wanted:
            raise UsageError(
                f"data of a {self.format.name} tensor of shape {self.shape} must have shape "
                f"(rows, row bytes) = {wanted}, got {data.shape}"
            )
        if is_cuda(data):
            check_array("data", data, wanted, np.uint8)
        self._data: NDArray[np.uint8] | None = data if is_cuda(data) else np.ascontiguousarray(data)
        self._packed: CpuPacked | PackedFloats | None = None
        self._units: MmaPacked | None = None
        if outliers is not None and outliers.shape != (self.n_rows, self.shape[-1]):
            raise UsageError(
                f"outliers must have shape (rows, columns) = {(self.n_rows, self.shape[-1])}, got "
                f"{outliers.shape}"
            )
        self.outliers = outliers

    @classmethod
    def from_bytes(
        cls,
        data: bytes | bytearray | memoryview | NDArray[Any],
        format: str | QuantFormat,
        shape: tuple[int, ...],
    ) -> QuantTensor:
        """Return the tensor with these storage bytes, e.g. of a file; the inverse of `tobytes`.

        Parameters
        ----------
        data : bytes-like or array
            The bytes of the tensor, which are copied.
        format : str or QuantFormat
            The format, or its name.
        shape : tuple of int
            Shape of the weights.

        Raises
        ------
        UsageError
            If the number of bytes does not match format and shape.
        """
        found_format, shape = _format(format), _checked_shape(shape)
        wanted = _data_shape(found_format, shape)
        array = np.frombuffer(data, np.uint8)
        if array.size != math.prod(wanted):
            raise UsageError(
                f"data must hold {math.prod(wanted)} bytes ({found_format.name}, shape {shape}), "
                f"got {array.size}"
            )
        return cls(found_format, shape, array.reshape(wanted).copy())

    @classmethod
    def read(cls, rows: ReadRows, format: str | QuantFormat, shape: tuple[int, ...]) -> QuantTensor:
        """Return a tensor of which only the CPU layout is made, from rows read in pieces.

        It equals ``QuantTensor(format, shape, rows(0, n_rows))`` after `drop_storage`, without
        room for the whole storage bytes.  Formats without a packed layout keep them.

        Parameters
        ----------
        rows : callable
            ``rows(start, stop)`` returns the storage bytes of rows, uint8 (stop - start, row
            bytes).  Several threads call it at once, each is done with the bytes before its next
            call, and the same rows may be read twice.
        format : str or QuantFormat
            The format, or its name.
        shape : tuple of int
            Shape of the weights.

        Examples
        --------
        >>> import numpy as np
        >>> from nbflow_kernels import QuantTensor
        >>> numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
        >>> w = QuantTensor.read(lambda i, j: numbers[i:j].view(np.uint8), "f32", (3, 4))
        >>> w.has_storage, w.packed_nbytes > 0
        (False, True)
        """
        tensor = object.__new__(cls)
        tensor.format, tensor.shape = _format(format), _checked_shape(shape)
        tensor.outliers = tensor.column_order = tensor.column_scales = None
        tensor._data = tensor._packed = tensor._matrices = tensor._units = None
        if tensor.format.decodes_from_storage:
            return cls(format, shape, rows(0, tensor.n_rows).copy())
        with at_once():
            tensor._packed = tensor._pack(rows)
        return tensor

    @property
    def data(self) -> NDArray[np.uint8]:
        """The storage bytes, shape (rows, row bytes).

        Raises
        ------
        UsageError
            After `drop_storage`.
        """
        if self._data is None:
            raise UsageError(
                "the storage bytes of this tensor were dropped; products, dequantize and embedding "
                "still work, for anything else quantize it again"
            )
        return self._data

    @property
    def has_storage(self) -> bool:
        """True until `drop_storage` frees the storage bytes."""
        return self._data is not None

    @property
    def on_device(self) -> bool:
        """True if the weights are in the memory of a CUDA device."""
        return is_cuda(self._data) or self._units is not None

    def to_device(self, like: Any = None) -> QuantTensor:
        """Copy storage bytes and outliers to a CUDA device.

        Parameters
        ----------
        like : array on a device, optional
            Array on the target device; CuPy's current device by default.

        Raises
        ------
        MissingExtraError
            If CuPy is not installed.
        UsageError
            After `drop_storage`.
        """
        from nbflow_kernels.cuda import to_device

        if self.on_device:
            return self
        outliers = self.outliers.to_device(like) if self.outliers is not None else None
        of_columns = (
            None if part is None else to_device(part, like)
            for part in (self.column_order, self.column_scales)
        )  # fmt: skip
        data = to_device(self.data, like)
        return QuantTensor(self.format, self.shape, data, outliers, *of_columns)

    def to_host(self) -> QuantTensor:
        """Copy the tensor to NumPy arrays; the inverse of `to_device`."""
        from nbflow_kernels.cuda import to_host

        if not self.on_device:
            return self
        outliers = self.outliers.to_host() if self.outliers is not None else None
        of_columns = (
            None if part is None else to_host(part)
            for part in (self.column_order, self.column_scales)
        )  # fmt: skip
        return QuantTensor(self.format, self.shape, to_host(self.data), outliers, *of_columns)

    def drop_storage(self) -> None:
        """Make the packed layout and free the storage bytes.

        Products, `dequantize` and `embedding` still work and give the same results.  Formats
        without a packed layout keep their storage bytes.
        """
        if self.format.decodes_from_storage or (self.on_device and not self.format.has_mma_layout):
            return
        if self.on_device:
            self.units()
        else:
            self.packed()
        self._data = None

    def tobytes(self) -> bytes:
        """Return the storage bytes in the published layout.

        Raises
        ------
        UsageError
            If the tensor has outliers or an order of columns, which the layout cannot store.
        """
        if self.outliers is not None or self.column_order is not None:
            what = "outliers" if self.outliers is not None else "column_order"
            raise UsageError(
                f"the storage layout has no place for the {what} of this tensor; pickle the "
                f"tensor, or take data.tobytes() and {what}"
            )
        return self.to_host().data.tobytes()

    @property
    def nbytes(self) -> int:
        """Storage size in bytes, outliers and order included, packed layouts excluded."""
        n_rows, row_bytes = _data_shape(self.format, (*self.shape[:-1], self.n_stored_columns))
        return n_rows * row_bytes + self.extra_nbytes

    @property
    def extra_nbytes(self) -> int:
        """Bytes of the outliers, and of the order and factors of columns."""
        extra = (self.outliers, self.column_order, self.column_scales)
        return sum(int(part.nbytes) for part in extra if part is not None)

    @property
    def n_stored_columns(self) -> int:
        """Columns of a stored row: those of the weights, or more with padding."""
        return self.shape[-1] if self.column_order is None else len(self.column_order)

    @property
    def packed_nbytes(self) -> int:
        """Size of the CPU layout in bytes; 0 before the first product."""
        return self._packed.nbytes if self._packed is not None else 0

    @property
    def units_nbytes(self) -> int:
        """Size of the MMA layout in bytes; 0 before the first product."""
        return self._units.nbytes if self._units is not None else 0

    @property
    def n_rows(self) -> int:
        """Number of rows: the product of all axes but the last."""
        return math.prod(self.shape[:-1])

    @property
    def is_float(self) -> bool:
        """True for the formats f32, f16 and bf16."""
        return isinstance(self.format, FloatFormat)

    @property
    def array(self) -> NDArray[Any]:
        """Weights of a float format as an array of `shape`, without a copy (bf16: uint16 bits).

        Raises
        ------
        UsageError
            If the format is a block format.
        """
        if not isinstance(self.format, FloatFormat):
            raise UsageError(f"a {self.format.name} tensor is no array of floats; use dequantize")
        values: NDArray[Any] = self.data.view(self.format.dtype)
        return values.reshape(self.shape)

    def packed(self) -> CpuPacked | PackedFloats:
        """Return the CPU layout, made at the first call and cached.

        Raises
        ------
        UsageError
            If the tensor lies on a CUDA device.
        """
        if self.on_device:
            raise UsageError(f"{self!r} lies on a CUDA device; take to_host() for the CPU's layout")
        if self._packed is None:
            with _pack_lock, at_once():
                if self._packed is None:
                    self._packed = self._pack(lambda start, stop: self.data[start:stop])
        return self._packed

    def _pack(self, rows: ReadRows) -> CpuPacked | PackedFloats:
        packed: CpuPacked | PackedFloats = self.format.pack(
            rows, self.n_rows, self.format.row_blocks(self.n_stored_columns)
        )
        return packed

    def units(self) -> MmaPacked:
        """Return the MMA layout on a CUDA device, made at the first call and cached.

        For a tensor (..., N, K) it is the concatenated layouts of the matrices.

        Raises
        ------
        UsageError
            If the tensor is not on a device, or its format has no integer form.
        """
        if self._units is not None:
            return self._units
        from nbflow_kernels.cuda import to_device, to_host
        from nbflow_kernels.formats import layout_mma as units

        if not self.on_device:
            raise UsageError(f"{self!r} is not on a CUDA device; take to_device()")
        with _pack_lock:
            if self._units is None:
                n_rows = self.shape[-2] if len(self.shape) > 1 else 1
                host = to_host(self.data)
                if n_rows and len(host) > n_rows:
                    host = units.whole_tiles(host, n_rows)
                made = units.pack(self.format, host, self.n_stored_columns)
                self._units = replace(made, data=to_device(made.data, self.data))
        return self._units

    def rows(self, start: int, stop: int) -> QuantTensor:
        """Return rows [start, stop) as a tensor of shape (stop - start, columns), without a copy.

        Raises
        ------
        UsageError
            If the range does not lie in 0..n_rows.
        """
        if not 0 <= start <= stop <= self.n_rows:
            raise UsageError(f"rows must lie in 0..{self.n_rows}, got {start}..{stop}")
        shape = (stop - start, self.shape[-1])
        some = None if self.outliers is None else self.outliers.rows(slice(start, stop))
        of_columns = self.column_order, self.column_scales
        return QuantTensor(self.format, shape, self.data[start:stop], some, *of_columns)

    def columns(self, start: int, stop: int) -> QuantTensor:
        """Return columns [start, stop) of all rows; both bounds are block boundaries.

        Raises
        ------
        UsageError
            If a bound is inside a block or out of range, or columns are stored in another order.
        """
        size, n_bytes, K = self.format.block_size, self.format.block_bytes, self.shape[-1]
        if self.column_order is not None:
            raise UsageError("columns cannot be cut from a tensor with a column_order")
        if not 0 <= start <= stop <= K or start % size or (stop % size and stop != K):
            raise UsageError(
                f"columns must lie in 0..{K} and between blocks of {size}, got {start}..{stop}"
            )
        cut = slice(start // size * n_bytes, -(-stop // size) * n_bytes)
        shape = (*self.shape[:-1], stop - start)
        some = None if self.outliers is None else self.outliers.columns(start, stop)
        return QuantTensor(self.format, shape, np.ascontiguousarray(self.data[:, cut]), some)

    @classmethod
    def concatenate(cls, tensors: Sequence[QuantTensor]) -> QuantTensor:
        """Concatenate matrices of one format and width along the rows, with their outliers.

        Raises
        ------
        UsageError
            If formats, widths, orders or factors of columns differ, or `tensors` is empty.
        """
        kinds = {(t.format.name, t.shape[-1]) for t in tensors}
        if len(kinds) != 1:
            raise UsageError(
                f"tensors must be of one format and number of columns, got {sorted(kinds)}"
            )
        like = tensors[0].data if tensors[0].on_device else None
        tensors = [t.to_host() for t in tensors]
        order, scales = tensors[0].column_order, tensors[0].column_scales
        if not all(same_columns(t.column_order, order) for t in tensors):
            raise UsageError("tensors must have the same column_order")
        if not all(same_columns(t.column_scales, scales) for t in tensors):
            raise UsageError("tensors must have the same column_scales")
        data = np.concatenate([t.data for t in tensors])
        shape = (len(data), tensors[0].shape[-1])
        outliers = None
        if any(t.outliers is not None for t in tensors):
            outliers = CsrMatrix.concatenate(
                [t.outliers or CsrMatrix.empty((t.n_rows, shape[1])) for t in tensors]
            )
        together = cls(tensors[0].format, shape, data, outliers, order, scales)
        return together if like is None else together.to_device(like)

    def matrices(self) -> tuple[QuantTensor, ...]:
        """Return the matrices (N, K) of a tensor of shape (..., N, K) as views.

        They are made at the first call and cached, with their packed layouts.

        Raises
        ------
        UsageError
            If the tensor has less than three axes.
        """
        if self._matrices is None:
            if len(self.shape) < 3:
                raise UsageError(f"matrices need a tensor of shape (..., N, K), got {self.shape}")
            n, n_matrices = self.shape[-2], math.prod(self.shape[:-2])
            if self._data is None and self._units is not None:
                self._matrices = tuple(map(self._matrix_of_units, range(n_matrices)))
            else:
                self._matrices = tuple(self.rows(n * i, n * i + n) for i in range(n_matrices))
        return self._matrices

    def _matrix_of_units(self, index: int) -> QuantTensor:
        """Return one matrix as a slice of the MMA layout, without storage bytes."""
        assert self._units is not None
        matrix = object.__new__(QuantTensor)
        matrix.format, matrix.shape, matrix.outliers = self.format, self.shape[-2:], None
        matrix.column_order, matrix.column_scales = self.column_order, self.column_scales
        matrix._data = matrix._packed = matrix._matrices = None
        matrix._units = self._units.matrix(index, self.shape[-2])
        return matrix

    def __reduce__(self) -> tuple[Any, ...]:
        host = self.to_host()
        parts = host.format, host.shape, host.data, host.outliers
        return QuantTensor, (*parts, host.column_order, host.column_scales)

    def __repr__(self) -> str:
        few = f", outliers={self.outliers.nnz}" if self.outliers is not None else ""
        if self.column_order is not None:
            few += ", reordered" if self.column_scales is None else ", scaled columns"
        place = ", on a CUDA device" if self.on_device else ""
        return (
            f"QuantTensor({self.format.name}, shape={self.shape}, nbytes={self.nbytes}{few}{place})"
        )


def _format(format: str | QuantFormat) -> QuantFormat:
    if isinstance(format, QuantFormat):
        return format
    return FORMATS[format]


def _checked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    checked = tuple(int(n) for n in shape)
    if not checked or checked[-1] < 1 or min(checked) < 0:
        raise UsageError(
            f"shape must have at least one axis, no negative ones and a last one >= 1, got {shape}"
        )
    return checked


def _data_shape(format: QuantFormat, shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), format.row_blocks(shape[-1]) * format.block_bytes

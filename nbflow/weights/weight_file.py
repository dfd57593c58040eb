"""What every reader of weights offers: a table of tensors, and arrays cut from it on demand."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from nbflow.weights.byte_file import ByteFile
from nbflow_kernels.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from nbflow_kernels.quants import QuantTensor

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "u8": 1,
    "i8": 1,
    "u16": 2,
    "i16": 2,
    "u32": 4,
    "i32": 4,
    "u64": 8,
    "i64": 8,
    "f8_e4m3": 1,
    "f8_e5m2": 1,
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
}
"""Bytes of one element of every dtype a reader may meet."""

_NUMPY: dict[str, str] = {
    "bool": "|b1",
    "u8": "|u1",
    "i8": "|i1",
    "u16": "<u2",
    "i16": "<i2",
    "u32": "<u4",
    "i32": "<i4",
    "u64": "<u8",
    "i64": "<i8",
    "f16": "<f2",
    "bf16": "<u2",  # widened to float32 after reading
    "f32": "<f4",
    "f64": "<f8",
}

Span = tuple[int, int]


def tensor_bytes(dtype: str, shape: tuple[int, ...], where: str) -> int:
    """Return the bytes of a tensor of plain elements or of blocks (`nbflow_kernels.FORMATS`).

    Raises
    ------
    UsageError
        If the type is unknown, or the rows are not whole blocks; the message begins with `where`.
    """
    if dtype in ITEM_BYTES:
        return math.prod(shape) * ITEM_BYTES[dtype]
    from nbflow_kernels.quants import FORMATS

    known = FORMATS.get(dtype)
    if known is None:
        raise UsageError(f"{where}: type {dtype} cannot be read")
    if not shape or shape[-1] % known.block_size:
        raise UsageError(
            f"{where}: rows of {dtype} must be multiples of {known.block_size}, got shape {shape}"
        )
    return int(math.prod(shape) // known.block_size * known.block_bytes)


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    """Name in the file's own terms."""
    dtype: str
    """Stored element type, a key of `ITEM_BYTES`, or the name of a block format."""
    shape: tuple[int, ...]
    """Rows first, as the file says."""
    file: ByteFile
    """The file that holds it."""
    offset: int
    """First byte, counted from the beginning of the file."""


class WeightFile:
    """Named tensors in one or several files, read only where asked.

    Opening reads headers; `array` reads exactly the bytes of the rows and columns asked for.
    A reader makes one of these; users get it from `nbflow.weights.open_weights`.  It is a context
    manager, and several threads may read at once.

    Parameters
    ----------
    path : Path
        What the user named: a file or a folder.
    format : str
        Name of the file format.
    entries : sequence of TensorEntry
        The tensors, in the file's order.
    config : callable
        Gives the model configuration that belongs to the weights, or None.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        entries: Sequence[TensorEntry],
        files: Sequence[ByteFile],
        config: Callable[[], dict[str, Any] | None],
    ) -> None:
        self.path = path
        """What was opened: a file or a folder."""
        self.format = format
        """Name of the file format."""
        self.bytes_read = 0
        """Bytes of tensor data read so far; headers do not count."""
        self._entries: Mapping[str, TensorEntry] = {entry.name: entry for entry in entries}
        self._files = tuple(files)
        self._config = config
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of all tensors, in the file's order."""
        return list(self._entries)

    def files(self) -> list[Path]:
        """Return the files that hold the tensors."""
        return [file.path for file in self._files]

    def config(self) -> dict[str, Any] | None:
        """Return the model's configuration as the checkpoint states it, or None without one.

        Returns
        -------
        dict or None
            ``config.json`` of the folder for safetensors; the header's numbers for llama2.c.
        """
        return self._config()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return self.entry(name).shape

    def dtype(self, name: str) -> str:
        """Return the stored element type of tensor `name`, e.g. ``"bf16"``."""
        return self.entry(name).dtype

    def n_bytes(self, name: str) -> int:
        """Return the bytes tensor `name` takes in the file."""
        entry = self.entry(name)
        return tensor_bytes(entry.dtype, entry.shape, f"{entry.file.path}: tensor {name!r}")

    def entry(self, name: str) -> TensorEntry:
        """Return where tensor `name` lies, or raise `UsageError` with close names."""
        try:
            return self._entries[name]
        except KeyError:
            raise UsageError(
                f"{self.path}: {unknown_name('tensor', name, self._some(name))}"
            ) from None

    def array(
        self,
        name: str,
        rows: Span | None = None,
        columns: Span | None = None,
        *,
        flat: bool = False,
    ) -> np.ndarray[Any, Any]:
        """Read a tensor, or a rectangle of it.

        Parameters
        ----------
        name : str
            Name of the tensor in the file's terms.
        rows : (start, stop), optional
            Which rows (first dimension) to read; all by default.
        columns : (start, stop), optional
            Which columns to read, for a tensor of two dimensions; all by default.
        flat : bool
            Count all dimensions but the last as rows of a matrix.

        Returns
        -------
        array, C-contiguous
            In the stored type; bf16 and block formats as float32, which is exact for bf16.

        Raises
        ------
        UsageError
            If there is no such tensor, the range does not fit, the element type has no NumPy
            equivalent, or the file cannot be read.
        """
        entry = _flat(self.entry(name)) if flat else self.entry(name)
        row_span = self._span(entry, "rows", rows, axis=0)
        column_span = self._span(entry, "columns", columns, axis=1)
        if entry.dtype in ITEM_BYTES:
            return self._decode(entry, row_span, column_span)
        return self._dequantized(entry, row_span, column_span)

    def quantized(
        self,
        name: str,
        rows: Span | None = None,
        columns: Span | None = None,
        *,
        flat: bool = False,
    ) -> QuantTensor:
        """Read a tensor that is stored in a block format, as it is.

        Parameters
        ----------
        name : str
            Name of the tensor in the file's terms.
        rows, columns : (start, stop), optional
            As in `array`; columns must begin and end between blocks.
        flat : bool
            As in `array`.

        Returns
        -------
        QuantTensor

        Raises
        ------
        UsageError
            If the tensor is not stored in blocks, or the columns cut one; otherwise as `array`.
        """
        from nbflow_kernels.quants import FORMATS, QuantTensor

        entry = _flat(self.entry(name)) if flat else self.entry(name)
        if entry.dtype in ITEM_BYTES:
            raise UsageError(f"{self.path}: tensor {name!r} is stored as {entry.dtype}, not blocks")
        row_span = self._span(entry, "rows", rows, axis=0)
        column_span = self._span(entry, "columns", columns, axis=1)
        block, size = FORMATS[entry.dtype].block_size, FORMATS[entry.dtype].block_bytes
        first, last = column_span or (0, entry.shape[-1])
        if first % block or last % block:
            raise UsageError(
                f"{self.path}: columns of tensor {name!r} must begin and end at multiples of the "
                f"{entry.dtype} block of {block}, got ({first}, {last})"
            )
        n_rows = math.prod(entry.shape[:-1])
        stored = dataclasses.replace(
            entry, dtype="u8", shape=(n_rows, entry.shape[-1] // block * size)
        )
        if row_span is not None and len(entry.shape) != 2:
            raise UsageError(f"{self.path}: rows of {entry.dtype} are cut from matrices only")
        span = (first // block * size, last // block * size)
        data = self._decode(stored, row_span, span)
        shape = (len(data), last - first) if len(entry.shape) == 2 else entry.shape
        return QuantTensor(entry.dtype, shape, data)

    def _dequantized(
        self, entry: TensorEntry, rows: Span | None, columns: Span | None
    ) -> np.ndarray[Any, Any]:
        """Read the whole blocks around a rectangle and cut it out."""
        from nbflow_kernels.quants import FORMATS, dequantize

        flat = entry.shape != self.entry(entry.name).shape
        if columns is None:
            return dequantize(self.quantized(entry.name, rows, flat=flat))
        block = FORMATS[entry.dtype].block_size
        first = columns[0] // block * block
        around = (first, -(-columns[1] // block) * block)
        wide = dequantize(self.quantized(entry.name, rows, around, flat=flat))
        return np.ascontiguousarray(wide[:, columns[0] - first : columns[1] - first])

    def close(self) -> None:
        """Close the files; closing twice does nothing."""
        for file in self._files:
            file.close()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"WeightFile({str(self.path)!r}, {self.format}, {len(self._entries)} tensors)"

    def _some(self, name: str, limit: int = 8) -> list[str]:
        """Return the names closest to a misspelt one, so that the message stays readable."""
        import difflib

        names = list(self._entries)
        return difflib.get_close_matches(name, names, n=limit, cutoff=0.0) or names[:limit]

    def _span(self, entry: TensorEntry, what: str, span: Span | None, axis: int) -> Span | None:
        """Check a (start, stop) pair against the shape; None means all."""
        if span is None:
            return None
        rank_needed = 1 if axis == 0 else 2
        rank = len(entry.shape)
        if rank < rank_needed or (axis == 1 and rank != 2):
            raise UsageError(
                f"{self.path}: {what} cannot be cut from tensor {entry.name!r} "
                f"of shape {entry.shape}"
            )
        start, stop = (int(bound) for bound in span)
        if not 0 <= start <= stop <= entry.shape[axis]:
            raise UsageError(
                f"{self.path}: {what} of tensor {entry.name!r} must lie within "
                f"0..{entry.shape[axis]}, got ({start}, {stop})"
            )
        return start, stop

    def _decode(
        self, entry: TensorEntry, rows: Span | None, columns: Span | None
    ) -> np.ndarray[Any, Any]:
        """Read the elements of a rectangle and give them a NumPy type."""
        if entry.dtype not in _NUMPY:
            raise UsageError(
                f"{entry.file.path}: tensor {entry.name!r} is stored as {entry.dtype}, which "
                f"cannot be read; readable are {', '.join(_NUMPY)}"
            )
        data = self._read(entry, np.dtype(_NUMPY[entry.dtype]), rows, columns)
        if entry.dtype != "bf16":
            return data
        wide = np.empty(data.shape, np.float32)
        bits = wide.view(np.uint32)
        bits[...] = data
        bits <<= 16
        return wide

    def _read(
        self, entry: TensorEntry, dtype: np.dtype[Any], rows: Span | None, columns: Span | None
    ) -> np.ndarray[Any, Any]:
        """Read a rectangle of plain elements, and nothing else of the file."""
        shape = list(entry.shape)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        start = 0
        if rows is not None:
            start, shape[0] = rows[0], rows[1] - rows[0]
        if columns is None or columns == (0, entry.shape[1]):
            out = np.empty(shape, dtype)
            self._fill(entry.file, out, entry.offset + start * row_bytes)
            return out
        shape[1] = columns[1] - columns[0]
        out = np.empty(shape, dtype)
        first = entry.offset + columns[0] * dtype.itemsize
        for i in range(shape[0]):
            self._fill(entry.file, out[i], first + (start + i) * row_bytes)
        return out

    def _fill(self, file: ByteFile, target: np.ndarray[Any, Any], offset: int) -> None:
        """Fill a C-contiguous array from the file and count the bytes."""
        if target.size == 0:
            return
        file.read_into(target.reshape(-1).view(np.uint8).data, offset)
        with self._lock:
            self.bytes_read += target.nbytes


def _flat(entry: TensorEntry) -> TensorEntry:
    """Return an entry with all dimensions but the last as one; vectors stay as they are."""
    if len(entry.shape) < 3:
        return entry
    return dataclasses.replace(entry, shape=(math.prod(entry.shape[:-1]), entry.shape[-1]))

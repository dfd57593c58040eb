"""Open weight file: a table of tensors, and arrays read on demand."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from nbflow.checkpoint.dtypes import ITEM_BITS, ITEM_BYTES, NUMPY, WIDENED, tensor_bytes, widen
from nbflow.checkpoint.strided_read import is_contiguous, read_strided
from nbflow.utils.binary_file import ByteFile
from nbflow_kernels.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from nbflow.checkpoint.column_groups import StoredColumns
    from nbflow_kernels.formats import QuantTensor

__all__ = ["ITEM_BYTES", "Span", "StoredParts", "TensorEntry", "WeightFile"]

Span = tuple[int, int]
Read = Callable[["TensorEntry", Span | None, Span | None], np.ndarray[Any, Any]]
"""``read(entry, rows, columns)`` returns a rectangle of a stored tensor."""

_PLAIN = ("f32", "f16", "bf16")  # types whose bytes are weights
_FEW = 8  # columns that are fewer than one in so many are read row by row if rows are long
_GAP_BYTES = 32 << 10  # copied by the system in the time of a call from Python
_READ_BYTES = 1 << 18  # read at once with the bytes between columns
_CHUNK_BYTES = 1 << 24  # of a tensor that is read in chunks
_REPEATED_BYTES = 1 << 20  # allowed for every tensor that repeats its elements


def _check_repeats(entry: TensorEntry, n_bytes: int) -> None:
    """Refuse a view with more bytes than its file, which repeated elements (stride 0) allow."""
    if n_bytes > max(entry.file.size, _REPEATED_BYTES):
        raise UsageError(
            f"{entry.file.path}: tensor {entry.name!r} repeats its elements (strides "
            f"{entry.strides}) and would take {n_bytes} bytes, more than the file has; read fewer "
            "rows at once"
        )


@dataclass(frozen=True)
class TensorEntry:
    """Location, type and shape of one tensor."""

    name: str
    """Name in the file's own terms."""
    dtype: str
    """Stored element type, a key of `ITEM_BYTES`, or the name of a block format; with separate
    scales, the type that it is read as."""
    shape: tuple[int, ...]
    """Shape, rows first."""
    file: ByteFile
    """The file that holds it."""
    offset: int
    """Offset of the first byte in the file."""
    strides: tuple[int, ...] | None = None
    """Strides in elements; None if contiguous."""
    order: str = "<"
    """Byte order of the elements, as in `struct`."""
    scaled: StoredParts | None = None
    """Codes and scales, if they are separate tensors."""

    @property
    def stored_dtype(self) -> str:
        """Type of the codes without scales: FP8 where `dtype` is f32."""
        if self.scaled is None or self.dtype not in ITEM_BITS:
            return self.dtype
        return self.scaled.codes.dtype


class StoredParts(Protocol):
    """Several stored tensors that together are one: codes and scales, perhaps zero points."""

    @property
    def codes(self) -> TensorEntry:
        """Codes, a matrix."""

    @property
    def scales(self) -> TensorEntry:
        """Scales."""

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """All stored tensors, codes first."""

    def values(self, read: Read, rows: Span, columns: Span) -> np.ndarray[Any, Any]:
        """Return a rectangle as float32."""

    def blocks(self, read: Read, format: Any, rows: Span, columns: Span) -> np.ndarray[Any, Any]:
        """Return the storage bytes (rows, row bytes) of a rectangle in a block format."""


@runtime_checkable
class ReorderedParts(StoredParts, Protocol):
    """Stored tensors of a matrix whose columns get another order or factors (`QuantTensor`)."""

    @property
    def column_groups(self) -> StoredColumns:
        """Groups of columns, which give the order, or factors."""

    def quantized(self, read: Read, rows: Span, columns: Span) -> QuantTensor:
        """Return a rectangle, columns between any bounds, in a format that suits them."""


class WeightFile:
    """Named tensors in one or several files, read only where asked.

    Opening reads headers; `array` reads the bytes of the rows asked for, and no other rows.
    A reader makes one of these; users get it from `nbflow.checkpoint.open_weights`.  It is a
    context manager, and several threads may read at once.

    `path` is what the user named, a file or a folder; `config` returns the model configuration, or
    None; `scales` are scales of other tensors.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        entries: Sequence[TensorEntry],
        files: Sequence[ByteFile],
        config: Callable[[], dict[str, Any] | None],
        scales: Sequence[TensorEntry] = (),
    ) -> None:
        self.path = path
        """Opened file or folder."""
        self.format = format
        """Name of the file format."""
        self.bytes_read = 0
        """Bytes of tensor data returned so far: no headers, and no gaps between columns."""
        self._entries: Mapping[str, TensorEntry] = {entry.name: entry for entry in entries}
        self._scales: Mapping[str, TensorEntry] = {entry.name: entry for entry in scales}
        self._files = tuple(files)
        self._config = config
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of all tensors, in the file's order."""
        return list(self._entries)

    def scales(self) -> list[str]:
        """Return the names of scales of other tensors, which `names` omits."""
        return list(self._scales)

    def files(self) -> list[Path]:
        """Return the files that hold the tensors."""
        return [file.path for file in self._files]

    def config(self) -> dict[str, Any] | None:
        """Return the model's configuration as the checkpoint states it, or None without one.

        This is ``config.json`` of the folder for safetensors and pickles, the header's numbers for
        llama2.c and GGML, the metadata for GGUF.
        """
        return self._config()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return self.entry(name).shape

    def dtype(self, name: str) -> str:
        """Return the stored element type of tensor `name`, e.g. ``"bf16"``.

        FP8 with scales counts as ``"f32"``, the type that `array` returns.
        """
        return self.entry(name).dtype

    def n_bytes(self, name: str) -> int:
        """Return the bytes tensor `name` takes in the file, with its scales."""
        return sum(
            tensor_bytes(part.dtype, part.shape, f"{part.file.path}: tensor {part.name!r}")
            for part in _parts(self.entry(name))
        )

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of tensor `name`."""
        found = self._entries.get(name) or self._scales.get(name)
        if found is None:
            raise UsageError(f"{self.path}: {unknown_name('tensor', name, self._some(name))}")
        return found

    def array(
        self,
        name: str,
        rows: Span | None = None,
        columns: Span | None = None,
        *,
        flat: bool = False,
        widen_bf16: bool = True,
    ) -> np.ndarray[Any, Any]:
        """Read a tensor, or a rectangle of it.

        Parameters
        ----------
        name : str
            Name of the tensor in the file's terms.
        rows : (start, stop), optional
            Rows (first dimension) to read; all by default.
        columns : (start, stop), optional
            Columns to read, for a tensor of two dimensions; all by default.
        flat : bool
            Flatten all dimensions but the last into rows.
        widen_bf16 : bool
            False returns bf16 as its bits, uint16.

        Returns
        -------
        array, C-contiguous
            In the stored type; bf16, 8-bit floats and block formats as float32, which is exact for
            bf16 and 8-bit floats.  The product of FP8 and a scale is rounded once.

        Raises
        ------
        UsageError
            If the tensor does not exist, the range does not fit, the element type has no NumPy
            equivalent, or the file cannot be read.
        """
        entry = _flat(self.entry(name)) if flat else self.entry(name)
        row_span = self._span(entry, "rows", rows, axis=0)
        column_span = self._span(entry, "columns", columns, axis=1)
        if entry.dtype not in ITEM_BYTES:
            return self._dequantized(entry, row_span, column_span)
        if entry.scaled is not None:
            whole = (0, entry.shape[0]), (0, entry.shape[1])
            rectangle = row_span or whole[0], column_span or whole[1]
            return entry.scaled.values(self._decode, *rectangle)
        return self._decode(entry, row_span, column_span, widen_bf16)

    def is_as_stored(self, name: str) -> bool:
        """Return whether the file holds the values that `array` returns, without a transform."""
        return self.entry(name).scaled is None

    def column_groups(self, name: str) -> StoredColumns | None:
        """Return groups or factors of the columns of `quantized`; None if they are as they are."""
        scaled = self.entry(name).scaled
        return scaled.column_groups if isinstance(scaled, ReorderedParts) else None

    def quantized(
        self,
        name: str,
        rows: Span | None = None,
        columns: Span | None = None,
        *,
        flat: bool = False,
    ) -> QuantTensor:
        """Read a tensor in a block format, without dequantizing.

        Parameters
        ----------
        name : str
            Name of the tensor in the file's terms.
        rows, columns : (start, stop), optional
            As in `array`; columns must begin and end between blocks, unless the columns are put
            into another order (`column_groups`).
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
        from nbflow_kernels.formats import FORMATS, QuantTensor

        entry = _flat(self.entry(name)) if flat else self.entry(name)
        if entry.dtype in ITEM_BYTES:
            raise UsageError(f"{self.path}: tensor {name!r} is stored as {entry.dtype}, not blocks")
        row_span = self._span(entry, "rows", rows, axis=0)
        column_span = self._span(entry, "columns", columns, axis=1)
        if isinstance(entry.scaled, ReorderedParts):
            whole = (0, entry.shape[0]), (0, entry.shape[1])
            return entry.scaled.quantized(
                self._decode, row_span or whole[0], column_span or whole[1]
            )
        block, size = self._block(entry, column_span)
        first, last = column_span or (0, entry.shape[-1])
        if row_span is not None and len(entry.shape) < 2:
            raise UsageError(f"{self.path}: rows of {entry.dtype} are not cut from a vector")
        start, stop = row_span or (0, entry.shape[0] if len(entry.shape) > 1 else 1)
        inner = entry.shape[1:-1]  # dimensions that are part of a row of the file's
        shape = (stop - start, *inner, last - first) if len(entry.shape) > 1 else entry.shape
        n_bytes = math.prod(inner) * entry.shape[-1] // block * size
        if entry.scaled is not None:
            n = math.prod(inner)
            rectangle = (start * n, stop * n), (first, last)
            blocks = entry.scaled.blocks(self._decode, FORMATS[entry.dtype], *rectangle)
        else:
            lead = entry.shape[:1] if len(entry.shape) > 1 else (1,)
            stored = dataclasses.replace(entry, dtype="u8", shape=(*lead, n_bytes))
            cut = None if column_span is None else (first // block * size, last // block * size)
            blocks = self._decode(stored, row_span, cut)
        blocks = blocks.reshape(math.prod(shape[:-1]), (last - first) // block * size)
        return QuantTensor(entry.dtype, shape, self._host_blocks(entry, blocks))

    def read_rows(
        self, name: str, rows: Span | None, columns: Span | None, out: np.ndarray[Any, Any]
    ) -> None:
        """Read the stored bytes of a matrix, or of a rectangle of it, into a buffer.

        Parameters
        ----------
        name : str
            Name of the tensor in the file's terms; all dimensions but the last are rows.
        rows, columns : (start, stop), optional
            As in `quantized`.
        out : array of uint8, shape (rows, row bytes), C-contiguous
            Gets the numbers little-endian, or the blocks.

        Raises
        ------
        UsageError
            As `array` and `quantized`, or if `out` has another shape.
        """
        entry = _flat(self.entry(name))
        row_span = self._span(entry, "rows", rows, axis=0)
        column_span = self._span(entry, "columns", columns, axis=1)
        strides = entry.strides
        if (
            (entry.dtype in ITEM_BYTES and entry.dtype not in _PLAIN)
            or (strides is not None and not is_contiguous(entry.shape, strides))
            or (entry.scaled is not None or entry.order != "<" or len(entry.shape) != 2)
        ):
            self._copy_rows(name, rows, columns, out)
            return
        block, size = self._block(entry, column_span)
        n_bytes = entry.shape[1] // block * size
        first, last = column_span or (0, entry.shape[1])
        cut = first // block * size, last // block * size
        start, stop = row_span or (0, entry.shape[0])
        if out.shape != (stop - start, cut[1] - cut[0]) or out.dtype != np.uint8:
            raise UsageError(
                f"out must be uint8 of shape {(stop - start, cut[1] - cut[0])} for tensor "
                f"{name!r}, got {out.dtype.name} of shape {out.shape}"
            )
        self._fill_rows(entry.file, out, entry.offset + start * n_bytes, cut, n_bytes)

    def _copy_rows(
        self, name: str, rows: Span | None, columns: Span | None, out: np.ndarray[Any, Any]
    ) -> None:
        """Read rows that need a conversion, such as of the byte order, and copy them to `out`."""
        if self.column_groups(name) is not None:
            raise UsageError(f"{self.path}: columns of {name!r} have an order; use quantized")
        if self.entry(name).dtype in ITEM_BYTES:
            found = self.array(name, rows, columns, flat=True, widen_bf16=False).view(np.uint8)
        else:
            found = self.quantized(name, rows, columns, flat=True).data
        out[...] = found

    def _block(self, entry: TensorEntry, columns: Span | None) -> tuple[int, int]:
        """Return weights and bytes per block, and refuse columns that cut one."""
        if entry.dtype in ITEM_BYTES:
            return 1, ITEM_BYTES[entry.dtype]
        from nbflow_kernels.formats import FORMATS

        block, size = FORMATS[entry.dtype].block_size, FORMATS[entry.dtype].block_bytes
        first, last = columns or (0, entry.shape[-1])
        if first % block or last % block:
            raise UsageError(
                f"{self.path}: columns of tensor {entry.name!r} must begin and end at multiples of "
                f"the {entry.dtype} block of {block}, got ({first}, {last})"
            )
        return block, size

    def _host_blocks(self, entry: TensorEntry, blocks: np.ndarray[Any, Any]) -> Any:
        """Return blocks (rows, bytes) in little-endian byte order."""
        if entry.order != "<":
            raise UsageError(f"{self.path}: {entry.dtype} cannot be read in another byte order")
        return blocks

    def _dequantized(
        self, entry: TensorEntry, rows: Span | None, columns: Span | None
    ) -> np.ndarray[Any, Any]:
        """Read and dequantize the whole blocks around a rectangle, then cut it out."""
        from nbflow_kernels.formats import FORMATS, dequantize

        flat = entry.shape != self.entry(entry.name).shape
        if columns is None or isinstance(entry.scaled, ReorderedParts):
            return dequantize(self.quantized(entry.name, rows, columns, flat=flat))
        block = FORMATS[entry.dtype].block_size
        first = columns[0] // block * block
        around = (first, -(-columns[1] // block) * block)
        values = dequantize(self.quantized(entry.name, rows, around, flat=flat))
        return np.ascontiguousarray(values[:, columns[0] - first : columns[1] - first])

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
        """Return a few names close to a misspelled one."""
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
        self, entry: TensorEntry, rows: Span | None, columns: Span | None, widen_bf16: bool = True
    ) -> np.ndarray[Any, Any]:
        """Read the elements of a rectangle as a NumPy type."""
        if entry.dtype not in NUMPY:
            raise UsageError(
                f"{entry.file.path}: tensor {entry.name!r} is stored as {entry.dtype}, which "
                f"cannot be read; readable are {', '.join(NUMPY)}"
            )
        data = self._read(entry, np.dtype(entry.order + NUMPY[entry.dtype]), rows, columns)
        if not data.dtype.isnative:
            data = data.astype(data.dtype.newbyteorder("="))
        is_widened = entry.dtype in WIDENED and (widen_bf16 or entry.dtype != "bf16")
        return widen(data, entry.dtype) if is_widened else data

    def _read(
        self, entry: TensorEntry, dtype: np.dtype[Any], rows: Span | None, columns: Span | None
    ) -> np.ndarray[Any, Any]:
        """Read a rectangle of plain elements."""
        shape = list(entry.shape)
        for axis, span in enumerate((rows, columns)):
            if span is not None:
                shape[axis] = span[1] - span[0]
        if entry.strides is not None and not is_contiguous(entry.shape, entry.strides):
            return self._read_view(entry, dtype, (rows, columns), tuple(shape))
        row_bytes = math.prod(entry.shape[1:]) * dtype.itemsize
        first = entry.offset + (rows[0] * row_bytes if rows is not None else 0)
        out = np.empty(shape, dtype)
        if columns is None:
            self._fill(entry.file, out, first)
        else:
            cut = columns[0] * dtype.itemsize, columns[1] * dtype.itemsize
            as_bytes = out.view(np.uint8) if out.size else np.empty((0, 0), np.uint8)
            self._fill_rows(entry.file, as_bytes, first, cut, row_bytes)
        return out

    def _fill_rows(
        self, file: ByteFile, out: np.ndarray[Any, Any], first: int, cut: Span, row_bytes: int
    ) -> None:
        """Fill bytes (rows, n) with a range of rows that lie `row_bytes` apart in the file.

        Many rows are read per system call, with the bytes between them, unless those are long.
        """
        if out.shape[1] == row_bytes:
            self._fill(file, out, first)
            return
        if row_bytes > max(_GAP_BYTES, _FEW * out.shape[1]):
            for i, row in enumerate(out):
                self._fill(file, row, first + i * row_bytes + cut[0])
            return
        n_rows = max(1, min(len(out), _READ_BYTES // max(row_bytes, 1)))
        whole = np.empty((n_rows, row_bytes), np.uint8)
        for start in range(0, len(out), n_rows):
            some = whole[: len(out) - start]
            # the last row ends with its last column: behind it the file may end
            wanted = some.reshape(-1)[cut[0] : some.size - row_bytes + cut[1]]
            file.read_into(wanted.data, first + start * row_bytes + cut[0])
            out[start : start + len(some)] = some[:, cut[0] : cut[1]]
        with self._lock:
            self.bytes_read += out.nbytes

    def _read_view(
        self,
        entry: TensorEntry,
        dtype: np.dtype[Any],
        spans: Sequence[Span | None],
        shape: tuple[int, ...],
    ) -> np.ndarray[Any, Any]:
        """Read a rectangle of a strided view."""
        assert entry.strides is not None
        _check_repeats(entry, math.prod(shape) * dtype.itemsize)
        cuts = zip(spans, entry.strides, strict=False)
        starts = [span[0] * stride for span, stride in cuts if span is not None]
        return read_strided(
            lambda target, offset: self._fill(entry.file, target, offset),
            dtype,
            entry.offset + sum(starts) * dtype.itemsize,
            shape,
            entry.strides,
        )

    def stored_chunks(self, name: str) -> Iterator[bytes]:
        """Yield the stored bytes of tensor `name` in chunks of at most 16 MiB.

        A strided view is yielded row by row; a single row may exceed a chunk.  Scales follow their
        codes.
        """
        entry = self.entry(name)
        if entry.scaled is None:
            yield from self._chunks(entry, self.n_bytes(name))
            return
        for part in _parts(entry):
            yield from self._chunks(part, tensor_bytes(part.dtype, part.shape, part.name))

    def _chunks(self, entry: TensorEntry, n_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of one stored tensor."""
        if entry.strides is None or is_contiguous(entry.shape, entry.strides):
            end = entry.offset + n_bytes
            for offset in range(entry.offset, end, _CHUNK_BYTES):
                chunk = np.empty(min(_CHUNK_BYTES, end - offset), np.uint8)
                self._fill(entry.file, chunk, offset)
                yield chunk.tobytes()
            return
        _check_repeats(entry, n_bytes)
        item = np.dtype(f"V{ITEM_BYTES[entry.dtype]}")
        row_bytes = max(1, math.prod(entry.shape[1:]) * item.itemsize)
        n_rows = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(0, entry.shape[0], n_rows):
            stop = min(start + n_rows, entry.shape[0])
            yield self._read(entry, item, (start, stop), None).tobytes()

    def sha256(self, name: str) -> str:
        """Return the hexadecimal SHA-256 of the stored bytes of tensor `name`."""
        import hashlib

        digest = hashlib.sha256()
        for chunk in self.stored_chunks(name):
            digest.update(chunk)
        return digest.hexdigest()

    def _fill(self, file: ByteFile, target: np.ndarray[Any, Any], offset: int) -> None:
        """Fill a C-contiguous array from the file and count the bytes."""
        if target.size == 0:
            return
        file.read_into(target.reshape(-1).view(np.uint8).data, offset)
        with self._lock:
            self.bytes_read += target.nbytes


def _parts(entry: TensorEntry) -> tuple[TensorEntry, ...]:
    """Return the stored tensors of an entry: itself, or codes and scales."""
    return (entry,) if entry.scaled is None else entry.scaled.parts


def _flat(entry: TensorEntry) -> TensorEntry:
    """Return an entry with all dimensions but the last flattened."""
    if len(entry.shape) < 3:
        return entry
    return dataclasses.replace(entry, shape=(math.prod(entry.shape[:-1]), entry.shape[-1]))

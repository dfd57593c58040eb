"""Load a rank's shard of the weights: read, concatenate and quantize.

Only the rank's own bytes are read.  The operands of one op are read as they are stored,
concatenated by rows and then quantized; rows are quantized independently, so the blocks equal those
of a single rank.  Operands that the checkpoint stores in different formats stay separate matrices.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile
from nbflow.checkpoint.weight_file import ITEM_BYTES
from nbflow.distributed.device import Device
from nbflow.program.read_operand import (
    convert,
    has_whole_rows,
    operand_bytes,
    read_operand,
    read_operand_rows,
    read_quantized_operand,
)
from nbflow.program.records import Op, Operand, Program, expert_parts
from nbflow.quantization.policy import Weights, weight_formats
from nbflow.quantization.quantizer_options import QuantizerOptions
from nbflow.utils.load_progress import progress
from nbflow.utils.rank_status import status
from nbflow_kernels.attention.plan import padded_key_bias
from nbflow_kernels.cpu import huge_pages
from nbflow_kernels.cpu.parallel_for import parallel_chunks
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers.outliers import sample_rows, soft_range

FORMAT_OF_DTYPE = {"float32": "f32", "float16": "f16", "uint16": "bf16"}
STORED_FLOATS = {format: np.dtype(name) for name, format in FORMAT_OF_DTYPE.items()}
FLOATS = frozenset(STORED_FLOATS)
_CHUNK_BYTES = 1 << 20  # of a table, read by a thread at once


class _Buffer(threading.local):
    """Rows of stored bytes that a thread reads before it packs them."""

    memory: np.ndarray = np.empty(0, np.uint8)

    def rows(self, n_rows: int, row_bytes: int) -> np.ndarray:
        """Return uint8 (n_rows, row_bytes), valid until the next call of this thread."""
        n_bytes = n_rows * row_bytes
        if len(self.memory) < n_bytes:
            self.memory = np.empty(n_bytes, np.uint8)
        return self.memory[:n_bytes].reshape(n_rows, row_bytes)


class WeightLoader:
    """Weights of a program's ops, by op index.

    The operands of a linear op are matrices whose rows, concatenated, are its outputs.

    Parameters
    ----------
    program : Program
        Program of the rank.
    file : WeightFile
        Open checkpoint.
    weights : str, path or WeightFormats, optional
        Format of the matrices, or a policy (`nbflow.quantization.policy`); None keeps the stored
        formats.
    encoding : QuantizerOptions, optional
        Quantizer of the matrices.
    joined : bool
        Concatenate the tensors of an op that have one format; False keeps them apart.
    packed : bool
        Read matrices directly into the layout of the CPU kernels, in chunks of rows that several
        threads read, quantize if `weights` says so, and pack.
    """

    def __init__(
        self,
        program: Program,
        file: WeightFile,
        weights: Weights,
        encoding: QuantizerOptions | None = None,
        joined: bool = True,
        packed: bool = False,
    ) -> None:
        self._file = file
        self._encoding = encoding or QuantizerOptions()
        self._program = program
        self._formats = weight_formats(weights)
        self._joined, self._packed = joined, packed
        self._loaded: dict[tuple[Operand, ...], Any] = {}
        self._host_tables: dict[int, Any] = {}
        self._buffer = _Buffer()
        self._tables = program.tables
        before = file.bytes_read
        with progress.reading(self._bytes_to_read(), lambda: file.bytes_read - before):
            self.operands: list[tuple[Any, ...]] = [self._operands(op) for op in program.ops]
            self.bias: list[np.ndarray | None] = [self._bias(op) for op in program.ops]
        del self._file, self._loaded, self._tables, self._buffer

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights; one used twice (a tied head) counts once."""
        arrays = [a for a in (*sum(self.operands, ()), *self.bias) if a is not None]
        return sum({id(a): operand_bytes(a) for a in arrays}.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of embedding tables that a device reads from host memory."""
        return sum(operand_bytes(table) for table in self._host_tables.values())

    def _bytes_to_read(self) -> int:
        """Return the bytes of the rank's operands in the checkpoint."""
        spec, file, n_bytes = self._program.spec, self._file, 0.0
        for operand in {p for op in self._program.ops for p in (*op.weights, *op.bias)}:
            name = spec.checkpoint_name(operand.name)
            shape = operand.shape(spec.shape_of(operand.name))
            n_bytes += math.prod(shape) * file.n_bytes(name) / max(math.prod(file.shape(name)), 1)
        return int(n_bytes)

    def finalize(self, device: Device, embeddings_on_host: bool = False) -> None:
        """Move all operands to a device, in the layout that its kernels read.

        With `embeddings_on_host`, tables that are only looked up stay in pinned host memory, from
        which the device's kernels read rows.
        """
        if device.on_host:
            self._pack()
        else:
            self._to_device(device.for_purpose("the weights"), embeddings_on_host)

    def _pack(self) -> None:
        """Keep only the layout that the CPU kernels read."""
        for op, operands in zip(self._program.ops, self.operands, strict=True):
            for tensor in operands:
                status.progress(op.weights[0].name if op.weights else op.kind)
                if isinstance(tensor, nk.QuantTensor):
                    tensor.drop_storage()

    def _to_device(self, device: Device, embeddings_on_host: bool) -> None:
        """Move all operands to a device, except attention biases, which the host reads."""
        moved: dict[int, tuple[Any, Any]] = {}  # id -> operand (kept alive: ids are reused), copy
        ops = list(zip(self._program.ops, self.operands, strict=True))
        tables = {id(t) for op, operands in ops if op.kind == "embedding" for t in operands}
        others = {id(t) for op, operands in ops if op.kind != "embedding" for t in operands}
        mapped = device.for_purpose("the token embedding").mapped()

        def move(operand: Any) -> Any:
            if operand is None:
                return None
            if id(operand) in moved:
                return moved[id(operand)][1]
            status.heartbeat()
            looked_up = id(operand) in tables
            stays = embeddings_on_host and looked_up and id(operand) not in others
            target = mapped if stays else device
            quantized = isinstance(operand, nk.QuantTensor)
            new = target.quantized(operand) if quantized else target.put(operand)
            moved[id(operand)] = operand, new
            if stays:
                self._host_tables[id(new)] = new
            elif quantized and (not looked_up or id(operand) in others):
                device.drop_storage(new)
            return new

        for index, op in enumerate(self._program.ops):
            self.bias[index] = move(self.bias[index])
            on_host = op.kind in ("attention", "cross_attention", "activation")
            if not on_host or op.attrs.get("key_bias"):
                operands = self.operands[index]
                if op.kind == "experts":
                    operands = stack_experts(op, operands)
                elif op.kind == "heads_linear":
                    operands = stack_heads(operands)
                self.operands[index] = tuple(map(move, operands))

    def _operands(self, op: Op) -> tuple[Any, ...]:
        if op.kind in ("experts", "heads_linear"):  # each matrix by itself
            return tuple(self._once((w,), self._weight) for w in op.weights)
        if op.kind == "attention":
            if op.attrs.get("key_bias"):
                D = self._program.heads_of(op.layer or 0).key_dim
                return (padded_key_bias(self._vector(op.weights).reshape(-1, D)),)
            return tuple(self._once((w,), self._relative_bias) for w in op.weights)
        if op.attrs.get("normalize_rows"):
            return (self._normalized(op.weights[0]),)
        if op.kind == "embedding" and not op.weights:
            return (sinusoidal_table(self._program),)
        if op.kind in ("linear", "embedding"):
            key = self._formats_of if self._joined else None
            runs = [tuple(run) for _, run in groupby(op.weights, key=key)]
            read = self._table if op.kind == "embedding" else self._weight
            return tuple(self._once(run, read) for run in runs)
        if op.kind == "conv":
            return tuple(self._once((w,), self._taps) for w in op.weights)
        if op.kind in ("plugin", "retrieve"):
            return tuple(self._once((w,), self._array) for w in op.weights)
        vectors = tuple(self._once((w,), self._vector) for w in op.weights)
        if op.kind in ("log_decay", "mamba1", "mamba2"):  # A_log becomes the rate
            rate = vectors[0]
            if not self._program.spec.stored_rates:
                rate = -np.exp(rate.astype(np.float64)).astype(np.float32)
            if op.kind == "mamba1":
                rate = rate.reshape(op.attrs["state"])
            elif op.kind == "log_decay":  # of a head, for its columns
                rate = rate.repeat(len(vectors[1]) // len(rate))
            return rate, *vectors[1:]
        if op.kind == "scale_columns":
            width = self._program.buffers[op.out].width
            return tuple(vector.repeat(width // len(vector)) for vector in vectors)
        if op.attrs.get("own_weights"):  # a row per head
            vectors = (np.stack(vectors),)
        if op.kind == "norm" and op.attrs["norm"] == "layer" and vectors:
            # the rms norm kernel adds the offset itself
            return (vectors[0] + np.float32(op.attrs.get("offset", 0.0)), *vectors[1:])
        return vectors

    def _bias(self, op: Op) -> np.ndarray | None:
        if not op.bias:
            return None
        return np.concatenate([self._once((b,), self._vector) for b in op.bias])

    def _once(self, operands: tuple[Operand, ...], read: Callable[[Any], Any]) -> Any:
        if operands not in self._loaded:
            status.progress(operands[0].name)
            self._loaded[operands] = read(operands)
        return self._loaded[operands]

    def _vector(self, operands: Sequence[Operand]) -> np.ndarray:
        return self._read(operands[0]).reshape(-1).astype(np.float32)

    def _array(self, operands: Sequence[Operand]) -> np.ndarray:
        return np.ascontiguousarray(self._read(operands[0]), np.float32)

    def _taps(self, operands: Sequence[Operand]) -> np.ndarray:
        """Return the taps of a convolution by channel, float32 (C, K)."""
        taps = self._read(operands[0])
        return np.ascontiguousarray(taps.reshape(len(taps), -1), np.float32)

    def _relative_bias(self, operands: Sequence[Operand]) -> np.ndarray:
        """Return the relative position bias by head and distance, (H, 2 * max_context - 1)."""
        spec = self._program.spec
        table = self._read(operands[0]).astype(np.float32)
        distances = np.arange(1 - spec.max_context, spec.max_context, dtype=np.int32)
        buckets = nk.relative_position_bucket(
            distances,
            bidirectional=not spec.causal,
            num_buckets=spec.bias_buckets,
            max_distance=spec.bias_max_distance,
        )
        return np.ascontiguousarray(table[buckets].T)

    def _normalized(self, operand: Operand) -> Any:
        """Return a float32 matrix with rows of unit length.

        Rounding to the stored type would change the logits.
        """
        wide = self._read(operand).astype(np.float32, copy=False)
        wide = wide / np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
        return nk.QuantTensor("f32", wide.shape, wide.view(np.uint8).reshape(len(wide), -1))

    def _read(self, operand: Operand) -> np.ndarray:
        """Return a rank's shard of a tensor in its stored type."""
        return read_operand(self._program.spec, self._file, operand)

    def _target_format(self, operand: Operand) -> str | None:
        """Return the format that a tensor is converted to, or None."""
        if self._formats is None:
            return None
        return self._formats.of(operand.name, self._program.spec.shape_of(operand.name))

    def _formats_of(self, operand: Operand) -> tuple[str | None, str | None, object]:
        """Return target and stored format and order of columns, which one matrix has in common."""
        name = self._program.spec.checkpoint_name(operand.name)
        stored = self._stored_format(operand)
        order = None if stored is None else self._file.column_groups(name)
        return self._target_format(operand), stored, order

    def _stored_format(self, operand: Operand) -> str | None:
        """Return the block format that a tensor keeps from the checkpoint, or None."""
        layout = self._program.spec.tensor_layout(operand.name)
        dtype = self._file.dtype(layout.name)
        as_floats = dtype in ITEM_BYTES or self._target_format(operand) or layout.head_rows
        return None if as_floats else dtype

    def _weight(self, operands: tuple[Operand, ...]) -> Any:
        """Return a matrix for products as a `QuantTensor`, floats included.

        A float table that is both looked up and multiplied (a tied head) stays an array, also on
        a rank that does not look up.
        """
        packed = self._packed_matrix(operands, floats=operands not in self._tables)
        if packed is not None:
            return packed
        matrix = self._matrix(operands)
        if isinstance(matrix, nk.QuantTensor) or operands in self._tables:
            return matrix
        format = FORMAT_OF_DTYPE[matrix.dtype.name]
        data = np.ascontiguousarray(matrix).view(np.uint8).reshape(len(matrix), -1)
        return nk.QuantTensor(format, matrix.shape, data)

    def _table(self, operands: tuple[Operand, ...]) -> Any:
        """Return a table that is looked up: an array of floats, or a `QuantTensor` of blocks."""
        packed = self._packed_matrix(operands, floats=False)
        table = self._matrix(operands) if packed is None else packed
        is_reordered = isinstance(table, nk.QuantTensor) and table.column_order is not None
        return nk.dequantize(table) if is_reordered else table

    def _matrix(self, operands: Sequence[Operand]) -> Any:
        if self._stored_format(operands[0]) is not None:
            return self._stored_blocks(operands)
        if self._keeps_rows(operands):
            return self._stored_floats(operands)
        format, spec = self._target_format(operands[0]), self._program.spec
        in_blocks = format is not None and nk.FORMATS[format].block_size > 1
        if in_blocks:
            return nk.QuantTensor.concatenate([self._quantized(p, str(format)) for p in operands])
        arrays = [self._read(p) for p in operands]
        stored = {self._file.dtype(spec.checkpoint_name(p.name)) for p in operands}
        dtype = np.result_type(*arrays)
        matrix = np.concatenate([a.astype(dtype, copy=False) for a in arrays])
        if format is not None:
            return convert(matrix, format, " + ".join(map(str, operands)))
        if stored == {"bf16"}:
            return convert(matrix, "bf16", operands[0].name)
        if matrix.dtype in (np.float32, np.float16):
            return matrix
        return matrix.astype(np.float32)

    def _keeps_rows(self, operands: Sequence[Operand]) -> bool:
        """Return whether rows of a matrix are stored bytes of the checkpoint, of one type."""
        spec, file = self._program.spec, self._file
        stored = {file.dtype(spec.checkpoint_name(p.name)) for p in operands}
        target = self._target_format(operands[0])
        return (
            len(stored) == 1
            and stored <= nk.FORMATS.keys()
            and (target is None or target in stored & FLOATS)
            and all(has_whole_rows(spec, file, p) for p in operands)
        )

    def _quantizes_rows(self, operands: Sequence[Operand]) -> bool:
        """Return whether rows of a matrix are floats of the file that are quantized one by one."""
        spec, file = self._program.spec, self._file
        target = self._target_format(operands[0])
        return (
            target is not None
            and nk.FORMATS[target].block_size > 1
            and self._encoding.needs_only_rows
            and {file.dtype(spec.checkpoint_name(p.name)) for p in operands} <= FLOATS
            and all(has_whole_rows(spec, file, p) for p in operands)
        )

    def _packed_matrix(self, operands: Sequence[Operand], floats: bool) -> nk.QuantTensor | None:
        """Read a matrix into the CPU layout chunk by chunk; None if it is read as a whole.

        Float formats are read as a whole without `floats`.
        """
        if not self._packed:
            return None
        spec, file = self._program.spec, self._file
        if self._keeps_rows(operands):
            name, read = file.dtype(spec.checkpoint_name(operands[0].name)), self._stored_rows
        elif self._quantizes_rows(operands):
            name, read = str(self._target_format(operands[0])), self._quantized_rows
        else:
            return None
        format = nk.FORMATS[name]
        if format.block_size == 1 and not floats:
            return None
        fill, shape, row_bytes = self._rows_of(operands, format, read)

        def rows(start: int, stop: int) -> np.ndarray:
            """Return storage bytes of rows [start, stop)."""
            out = self._buffer.rows(stop - start, row_bytes)
            fill(start, stop, out)
            return out

        try:
            return nk.QuantTensor.read(rows, format, shape)
        except UsageError:
            if read == self._stored_rows:
                raise
            return None  # reading the whole tensor finds the same error, and its row

    def _rows_of(
        self, operands: Sequence[Operand], format: Any, read: Callable[..., None]
    ) -> tuple[Callable[[int, int, np.ndarray], None], tuple[int, int], int]:
        """Return a reader of rows of all operands together, their shape, and bytes per row.

        ``read(operand, format, out)`` writes the storage bytes of an operand's rows to `out`.
        """
        spec, parts, n_rows = self._program.spec, list[tuple[Operand, int, int, int]](), 0
        shapes = [p.shape(spec.shape_of(p.name)) for p in operands]
        for p, shape in zip(operands, shapes, strict=True):
            first = p.rows[0] if p.rows is not None else 0
            parts.append((p, first - n_rows, n_rows, n_rows + shape[0]))
            n_rows += shape[0]

        def fill(start: int, stop: int, out: np.ndarray) -> None:
            status.heartbeat()
            for operand, offset, begin, last in parts:
                low, high = max(start, begin), min(stop, last)
                if low < high:
                    some = replace(operand, rows=(low + offset, high + offset))
                    read(some, format, out[low - start : high - start])

        n_columns = shapes[0][1]
        return fill, (n_rows, n_columns), format.row_blocks(n_columns) * format.block_bytes

    def _stored_floats(self, operands: Sequence[Operand]) -> np.ndarray:
        """Read a matrix of floats as it is stored, bf16 as uint16, on several threads."""
        dtype = self._file.dtype(self._program.spec.checkpoint_name(operands[0].name))
        fill, shape, row_bytes = self._rows_of(operands, nk.FORMATS[dtype], self._stored_rows)
        out = huge_pages.zeros(shape[0] * row_bytes).reshape(shape[0], row_bytes)

        def read(start: int, stop: int) -> None:
            fill(start, stop, out[start:stop])

        parallel_chunks(read, shape[0], max(1, _CHUNK_BYTES // row_bytes))
        return out.view(STORED_FLOATS[dtype])

    def _stored_rows(self, operand: Operand, format: Any, out: np.ndarray) -> None:
        """Read rows as stored bytes, which are in the format."""
        read_operand_rows(self._program.spec, self._file, operand, out)

    def _quantized_rows(self, operand: Operand, format: Any, out: np.ndarray) -> None:
        """Read rows and quantize them."""
        out[...] = self._encoding.quantize(self._read(operand), format.name).data

    def _stored_blocks(self, operands: Sequence[Operand]) -> nk.QuantTensor:
        """Concatenate tensors of one block format as they are stored."""
        spec = self._program.spec
        return nk.QuantTensor.concatenate(
            [rows for p in operands for rows in read_quantized_operand(spec, self._file, p)]
        )

    def _quantized(self, operand: Operand, format: str) -> nk.QuantTensor:
        """Quantize a shard to the same values as in the whole tensor."""
        limits = self._soft_range(operand.name) if self._encoding.needs_range else None
        whole = operand.columns is not None and self._encoding.needs_whole_rows
        read = replace(operand, columns=None) if whole else operand
        rows = self._read(read).astype(np.float32, copy=False)
        found = self._encoding.quantize_matrix(
            operand.name, rows, format, columns=read.columns, outlier_range=limits
        )
        return found.columns(*operand.columns) if whole and operand.columns is not None else found

    def _soft_range(self, name: str) -> tuple[float, float]:
        """Return the values beyond which weights of a tensor are outliers.

        A sample of rows of the whole tensor decides, whatever the partition.
        """
        n_rows, n_columns = self._program.spec.shape_of(name)
        chosen = sample_rows(n_rows, n_columns)
        if chosen.step == 1:
            sample = self._read(Operand(name))
        else:
            rows = [self._read(Operand(name, rows=(r, r + 1))) for r in chosen]
            sample = np.concatenate(rows)
        return soft_range(sample, self._encoding.outliers)


def stack_experts(op: Op, matrices: Sequence[Any]) -> tuple[Any, ...]:
    """Stack the matrices of the experts of an op by kind, so that kernels index them on the device.

    Matrices of several formats, with outliers or orders of columns stay separate.
    """
    parts = expert_parts(op, matrices)
    kinds = {(i, w.format.name) for i, part in enumerate(parts) for w in part}
    if len(kinds) > len(parts) or any(map(_needs_more, matrices)):
        return tuple(matrices)
    return tuple(
        nk.QuantTensor(
            part[0].format, (len(part), *part[0].shape), np.concatenate([w.data for w in part])
        )
        for part in parts
    )


def _needs_more(w: nk.QuantTensor) -> bool:
    """Return True for a weight whose product needs more than its blocks."""
    return w.outliers is not None or w.column_order is not None


def stack_heads(matrices: Sequence[Any]) -> tuple[Any, ...]:
    """Stack the matrices of heads, if one kernel supports them all."""
    first = matrices[0]
    if not isinstance(first, nk.QuantTensor):
        return tuple(matrices)
    if not (first.is_float or first.format.has_mma_layout):
        return tuple(matrices)
    if any(w.format != first.format or _needs_more(w) for w in matrices):
        return tuple(matrices)
    data = np.concatenate([w.data for w in matrices])
    return (nk.QuantTensor(first.format, (len(matrices), *first.shape), data),)


def sinusoidal_table(program: Program) -> np.ndarray:
    """Return the sinusoidal embedding of all positions, float32 (max_context, E)."""
    spec = program.spec
    positions = np.arange(spec.max_context, dtype=np.int32)
    table: np.ndarray = nk.sinusoidal_position_embedding(
        positions,
        spec.hidden_size,
        form="fairseq" if spec.sinusoids == "fairseq" else "paper",
        interleave=spec.sinusoids == "alternating",
        offset=spec.position_offset,
    )
    return table

"""A rank's weights: read from the checkpoint, cut, joined and put into the weight format.

Only the rank's own bytes are read.  The parts of one matrix are read as they are stored, put one
below the other, and then converted; a quantized row does not depend on its neighbours, so the
blocks are the ones a single rank would hold.  Parts that the checkpoint stores in different formats
stay separate matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile
from nbflow.checkpoint.weight_file import ITEM_BYTES
from nbflow.distributed.device import Device
from nbflow.program.read_operand import convert, quantized_pieces, read_part, stored_bytes
from nbflow.program.records import Op, Operand, Program
from nbflow.quantization.policy import Weights, weight_formats
from nbflow.quantization.quantizer_options import QuantizerOptions
from nbflow.utils.rank_status import status
from nbflow_kernels.quantizers.outliers import sample_rows, soft_range

FORMAT_OF_DTYPE = {"float32": "f32", "float16": "f16", "uint16": "bf16"}


class WeightLoader:
    """The operands of a program's ops, by op index.

    Those of a linear op are matrices one below the other, of one row per output in all.

    Parameters
    ----------
    program : Program
        What the rank runs.
    file : WeightFile
        The checkpoint, open.
    weights : str, path or WeightFormats, optional
        Format of the matrices, or a policy (`nbflow.quantization.policy`); None keeps what is
        stored.
    outliers : float
        Share of the weights that stay exact, where no `encoding` says so.
    encoding : QuantizerOptions, optional
        How matrices are put into their formats.
    joined : bool
        Whether the tensors of an op that have one format become one matrix; else each stays one.
    """

    def __init__(
        self,
        program: Program,
        file: WeightFile,
        weights: Weights,
        outliers: float = 0.0,
        encoding: QuantizerOptions | None = None,
        joined: bool = True,
    ) -> None:
        self._file = file
        self._encoding = encoding or QuantizerOptions(outliers=outliers)
        self._program = program
        self._formats = weight_formats(weights)
        self._joined = joined
        self._loaded: dict[tuple[Operand, ...], Any] = {}
        self._mapped: dict[int, Any] = {}
        self._shared = {op.weights for op in program.ops if op.kind == "embedding"}
        self.operands: list[tuple[Any, ...]] = [self._operands(op) for op in program.ops]
        self.bias: list[np.ndarray | None] = [self._bias(op) for op in program.ops]
        del self._file, self._loaded, self._shared

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all weights; one used twice (a tied head) counts once."""
        arrays = [a for a in (*sum(self.operands, ()), *self.bias) if a is not None]
        return sum({id(a): stored_bytes(a) for a in arrays}.values())

    @property
    def host_bytes(self) -> int:
        """Return the bytes of tables that lie in the host's memory, beside a device."""
        return sum(stored_bytes(table) for table in self._mapped.values())

    def settle(self, place: Device, embeddings_on_host: bool = False) -> None:
        """Put all operands to a place, in the layout that the kernels there compute from.

        With `embeddings_on_host` the tables that are only looked up stay in the host's memory,
        where a device's kernels read the rows they need.
        """
        if place.on_host:
            self._pack()
        else:
            self._move(place.purposed("the weights"), embeddings_on_host)

    def _pack(self) -> None:
        """Keep only the layout that the CPU's kernels compute from."""
        for op, operands in zip(self._program.ops, self.operands, strict=True):
            for tensor in operands:
                status.progress(op.weights[0].name if op.weights else op.kind)
                if isinstance(tensor, nk.QuantTensor):
                    tensor.drop_storage()

    def _move(self, place: Device, embeddings_on_host: bool) -> None:
        """Put all operands to a device; a table of attention's, which a plan reads, stays."""
        moved: dict[int, tuple[Any, Any]] = {}  # with the operand, which keeps its id its own
        ops = list(zip(self._program.ops, self.operands, strict=True))
        tables = {id(t) for op, operands in ops if op.kind == "embedding" for t in operands}
        others = {id(t) for op, operands in ops if op.kind != "embedding" for t in operands}
        far = place.purposed("the token embedding").mapped()

        def move(operand: Any) -> Any:
            if operand is None:
                return None
            if id(operand) in moved:
                return moved[id(operand)][1]
            status.beat()
            looked_up = id(operand) in tables
            stays = embeddings_on_host and looked_up and id(operand) not in others
            where = far if stays else place
            quantized = isinstance(operand, nk.QuantTensor)
            new = where.quantized(operand) if quantized else where.put(operand)
            moved[id(operand)] = operand, new
            if stays:
                self._mapped[id(new)] = new
            elif quantized and not looked_up:  # rows are decoded from storage
                place.drop_storage(new)
            return new

        for index, op in enumerate(self._program.ops):
            self.bias[index] = move(self.bias[index])
            if op.kind not in ("attention", "cross_attention"):
                operands = self.operands[index]
                if op.kind == "experts":
                    operands = stacks(operands)
                elif op.kind == "heads_linear":
                    operands = stack_of_heads(operands)
                self.operands[index] = tuple(map(move, operands))

    def _operands(self, op: Op) -> tuple[Any, ...]:
        if op.kind in ("experts", "heads_linear"):  # each matrix by itself
            return tuple(self._once((w,), self._weight) for w in op.weights)
        if op.kind == "attention":
            return tuple(self._once((w,), self._bias_by_distance) for w in op.weights)
        if op.attrs.get("normalize_rows"):
            return (self._normalized(op.weights[0]),)
        if op.kind == "embedding" and not op.weights:
            return (sinusoidal_table(self._program),)
        if op.kind in ("linear", "embedding"):
            key = self._kind if self._joined else None
            runs = [tuple(run) for _, run in groupby(op.weights, key=key)]
            read = self._matrix if op.kind == "embedding" else self._weight
            return tuple(self._once(run, read) for run in runs)
        vectors = tuple(self._once((w,), self._vector) for w in op.weights)
        if op.attrs.get("own_weights"):  # a row for each head
            vectors = (np.stack(vectors),)
        if op.kind == "norm" and op.attrs["norm"] == "layer" and vectors:
            # of the rms norm the kernel adds it, a layer norm's does not
            return (vectors[0] + np.float32(op.attrs.get("offset", 0.0)), *vectors[1:])
        return vectors

    def _bias(self, op: Op) -> np.ndarray | None:
        if not op.bias:
            return None
        return np.concatenate([self._once((b,), self._vector) for b in op.bias])

    def _once(self, parts: tuple[Operand, ...], read: Callable[[Any], Any]) -> Any:
        if parts not in self._loaded:
            status.progress(parts[0].name)
            self._loaded[parts] = read(parts)
        return self._loaded[parts]

    def _vector(self, parts: Sequence[Operand]) -> np.ndarray:
        return self._read(parts[0]).reshape(-1).astype(np.float32)

    def _bias_by_distance(self, parts: Sequence[Operand]) -> np.ndarray:
        """Return the relative bias of each head at the distances of keys, (H, 2 * context - 1)."""
        spec = self._program.spec
        table = self._read(parts[0]).astype(np.float32)
        distances = np.arange(1 - spec.max_context, spec.max_context, dtype=np.int32)
        buckets = nk.relative_position_bucket(
            distances,
            bidirectional=not spec.causal,
            num_buckets=spec.bias_buckets,
            max_distance=spec.bias_max_distance,
        )
        return np.ascontiguousarray(table[buckets].T)

    def _normalized(self, part: Operand) -> Any:
        """Return a matrix whose rows are divided by their lengths, as float32.

        In the stored type the rounding of the quotients would show in the logits.
        """
        wide = self._read(part).astype(np.float32, copy=False)
        wide = wide / np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
        return nk.QuantTensor("f32", wide.shape, wide.view(np.uint8).reshape(len(wide), -1))

    def _read(self, part: Operand) -> np.ndarray:
        """Return a tensor, or a rank's part of it, in the type it is stored as."""
        return read_part(self._program.spec, self._file, part)

    def _converted(self, part: Operand) -> str | None:
        """Return the format that the user asked for, for a tensor that it applies to."""
        if self._formats is None:
            return None
        return self._formats.of(part.name, self._program.spec.shape_of(part.name))

    def _kind(self, part: Operand) -> tuple[str | None, str | None]:
        """Return what must be alike for parts to lie in one matrix."""
        return self._converted(part), self._stored_format(part)

    def _stored_format(self, part: Operand) -> str | None:
        """Return the block format a tensor keeps from the checkpoint, or None."""
        place = self._program.spec.tensor_layout(part.name)
        dtype = self._file.dtype(place.name)
        as_floats = dtype in ITEM_BYTES or self._converted(part) or place.turned
        return None if as_floats else dtype

    def _weight(self, parts: tuple[Operand, ...]) -> Any:
        """Return a matrix that products are made with: floats too in a layout for computing.

        A table that is looked up and multiplied with (a tied head) stays an array.
        """
        matrix = self._matrix(parts)
        if isinstance(matrix, nk.QuantTensor) or parts in self._shared:
            return matrix
        format = FORMAT_OF_DTYPE[matrix.dtype.name]
        data = np.ascontiguousarray(matrix).view(np.uint8).reshape(len(matrix), -1)
        return nk.QuantTensor(format, matrix.shape, data)

    def _matrix(self, parts: Sequence[Operand]) -> Any:
        if self._stored_format(parts[0]) is not None:
            return self._blocks(parts)
        format, spec = self._converted(parts[0]), self._program.spec
        in_blocks = format is not None and nk.FORMATS[format].block_size > 1
        if in_blocks and not self._encoding.is_default:
            return nk.QuantTensor.concatenate([self._encoded(p, str(format)) for p in parts])
        arrays = [self._read(p) for p in parts]
        stored = {self._file.dtype(spec.checkpoint_name(p.name)) for p in parts}
        dtype = np.result_type(*arrays)
        matrix = np.concatenate([a.astype(dtype, copy=False) for a in arrays])
        if format is not None:
            return convert(matrix, format, " + ".join(map(str, parts)))
        if stored == {"bf16"}:
            return convert(matrix, "bf16", parts[0].name)
        if matrix.dtype in (np.float32, np.float16):
            return matrix
        return matrix.astype(np.float32)

    def _blocks(self, parts: Sequence[Operand]) -> nk.QuantTensor:
        """Return tensors of one block format, one below the other, as they are stored."""
        spec = self._program.spec
        return nk.QuantTensor.concatenate(
            [piece for p in parts for piece in quantized_pieces(spec, self._file, p)]
        )

    def _encoded(self, part: Operand, format: str) -> nk.QuantTensor:
        """Return a rank's part of a tensor in a format, as it would be of the whole tensor."""
        limits = self._soft_range(part.name) if self._encoding.needs_range else None
        whole = part.columns is not None and self._encoding.needs_whole_rows
        read = replace(part, columns=None) if whole else part
        rows = self._read(read).astype(np.float32, copy=False)
        found = self._encoding.quantize_matrix(
            part.name, rows, format, columns=read.columns, outlier_range=limits
        )
        return found.columns(*part.columns) if whole and part.columns is not None else found

    def _soft_range(self, name: str) -> tuple[float, float]:
        """Return the values beyond which weights of a tensor are outliers.

        It is decided by the whole tensor, so that it does not depend on the partition; for that,
        some rows of it are read.
        """
        n_rows, n_columns = self._program.spec.shape_of(name)
        chosen = sample_rows(n_rows, n_columns)
        if chosen.step == 1:
            sample = self._read(Operand(name))
        else:
            rows = [self._read(Operand(name, rows=(r, r + 1))) for r in chosen]
            sample = np.concatenate(rows)
        return soft_range(sample, self._encoding.outliers)


def stacks(matrices: Sequence[Any]) -> tuple[Any, ...]:
    """Return gates, ups and downs of experts as three stacks, which devices choose from themselves.

    Matrices of several formats, or with outliers, stay as they are.
    """
    n = len(matrices) // 3
    parts = [matrices[i * n : (i + 1) * n] for i in range(3)]
    kinds = {(i, w.format.name) for i, part in enumerate(parts) for w in part}
    if len(kinds) > 3 or any(w.outliers is not None for w in matrices):
        return tuple(matrices)
    return tuple(
        nk.QuantTensor(part[0].format, (n, *part[0].shape), np.concatenate([w.data for w in part]))
        for part in parts
    )


def stack_of_heads(matrices: Sequence[Any]) -> tuple[Any, ...]:
    """Return the matrices of heads as one stack, if one kernel can take them all."""
    first = matrices[0]
    if not isinstance(first, nk.QuantTensor) or first.format.decodes_from_storage:
        return tuple(matrices)
    if any(w.format != first.format or w.outliers is not None for w in matrices):
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
        form=spec.sinusoids,
        interleave=False,
        offset=spec.position_offset,
    )
    return table

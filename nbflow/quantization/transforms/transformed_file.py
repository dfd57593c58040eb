"""A checkpoint after a weight transform, under the same names."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile
from nbflow.checkpoint.weight_file import Span
from nbflow.quantization.policy import is_quantized
from nbflow.quantization.transforms.transform import WeightTransform
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.tensor_layout import TensorLayout
from nbflow_kernels.errors import UsageError

PLAIN = ("f32", "f16", "bf16", "f64")
_CHUNK = 1 << 22  # values rounded to the stored type per pass


class TransformedFile(WeightFile):
    """The tensors of a checkpoint after a transform, under the checkpoint's own names.

    Changed tensors are computed whole when read; the last one is cached.  Matrices to be quantized
    are float32, so that they are rounded once; other tensors are rounded to their stored type, as a
    written file would contain them.
    """

    def __init__(self, file: WeightFile, spec: ModelSpec, transform: WeightTransform) -> None:
        self._inner, self._spec, self._transform = file, spec, transform
        self._held: dict[str, list[str]] = {}
        changed = set()
        for ours in transform.spec.tensor_shapes():
            name = _checkpoint_name(transform.spec, ours)
            self._held.setdefault(name, []).append(ours)
            if transform.changes(ours):
                changed.add(name)
        self._changed = changed
        names = file.names()
        self._new_head = (
            _checkpoint_name(transform.spec, "head.weight") if _unties(spec, transform) else ""
        )
        if self._new_head and self._new_head not in names:
            names.append(self._new_head)
        entries = []
        for name in names:
            entry = dataclasses.replace(file.entry(self._source(name)), name=name)
            if name in changed:
                if entry.dtype not in PLAIN:
                    raise UsageError(
                        f"tensor {name} is stored as {entry.dtype}, and this quantizer changes it; "
                        "use a checkpoint of floats (f32, f16, bf16)"
                    )
                entry = dataclasses.replace(entry, strides=None, order="<", scaled=None)
            entries.append(entry)
        super().__init__(file.path, file.format, entries, (), file.config)
        self._last: tuple[str, np.ndarray[Any, Any]] = ("", np.zeros(0, np.float32))
        self._computing = threading.Lock()

    def _source(self, name: str) -> str:
        """Return the stored tensor a new one is computed from."""
        return _checkpoint_name(self._spec, "embed.weight") if name == self._new_head else name

    def files(self) -> list[Any]:
        """Return the files that hold the tensors."""
        return self._inner.files()

    def close(self) -> None:
        """Close the checkpoint."""
        self._inner.close()

    def array(
        self,
        name: str,
        rows: Span | None = None,
        columns: Span | None = None,
        *,
        flat: bool = False,
        widen_bf16: bool = True,
    ) -> np.ndarray[Any, Any]:
        """Read a transformed tensor as float32, or another one; see `WeightFile.array`."""
        if name not in self._changed:
            return self._inner.array(name, rows, columns, flat=flat, widen_bf16=widen_bf16)
        shape = self.entry(name).shape
        whole = self._whole(name)
        if not flat and len(shape) > 2:
            whole = whole.reshape(shape)
        cut = whole if rows is None else whole[slice(*rows)]
        cut = cut if columns is None else cut[:, slice(*columns)]
        return np.ascontiguousarray(cut)

    def is_as_stored(self, name: str) -> bool:
        """Return whether no transform changes a tensor; see `WeightFile.is_as_stored`."""
        return name not in self._changed and self._inner.is_as_stored(name)

    def quantized(
        self,
        name: str,
        rows: Span | None = None,
        columns: Span | None = None,
        *,
        flat: bool = False,
    ) -> nk.QuantTensor:
        """Read a tensor stored in blocks, which no transform changes."""
        return self._inner.quantized(name, rows, columns, flat=flat)

    def read_rows(
        self, name: str, rows: Span | None, columns: Span | None, out: np.ndarray[Any, Any]
    ) -> None:
        """Read the stored bytes of a matrix; see `WeightFile.read_rows`."""
        if name in self._changed:
            self._copy_rows(name, rows, columns, out)
        else:
            self._inner.read_rows(name, rows, columns, out)

    def stored_chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor, rounded to its stored type."""
        if name not in self._changed:
            yield from self._inner.stored_chunks(name)
            return
        values, dtype = self._whole(name).reshape(-1), self.dtype(name)
        for first in range(0, len(values), _CHUNK):
            part = values[first : first + _CHUNK]
            if dtype == "f64":
                yield part.astype("<f8").tobytes()
            else:
                yield nk.quantize(part, dtype).data.tobytes()

    def _whole(self, name: str) -> np.ndarray[Any, Any]:
        """Return a changed tensor as float32 rows, the leading dimensions flattened."""
        with self._computing:
            if self._last[0] != name:
                self._last = name, self._computed(name)
                self.bytes_read = self._inner.bytes_read
            return self._last[1]

    def _computed(self, name: str) -> np.ndarray[Any, Any]:
        whole = self._inner.array(self._source(name), flat=True).astype(np.float32)
        members = self._held[name]
        for ours in members:
            if self._transform.changes(ours):
                _replace(whole, self._transform.spec.tensor_layout(ours), ours, self._transform)
        shapes = [self._transform.spec.shape_of(ours) for ours in members]
        converted = all(map(is_quantized, members, shapes))
        return whole if converted else _rounded(whole, self.dtype(name))


def _unties(spec: ModelSpec, transform: WeightTransform) -> bool:
    return spec.tied_head and not transform.spec.tied_head


def _checkpoint_name(spec: ModelSpec, ours: str) -> str:
    """Return the checkpoint's name of a tensor, or of the fused tensor it is part of."""
    try:
        return spec.tensor_layout(ours).name
    except KeyError:
        raise UsageError(f"family {spec.family!r} has no name for the new tensor {ours}") from None


def _replace(
    whole: np.ndarray[Any, Any], place: TensorLayout, ours: str, transform: WeightTransform
) -> None:
    """Replace one of our tensors within the stored tensor, in place."""
    if whole.ndim == 1 or len(transform.spec.shape_of(ours)) == 1:
        rows = whole.reshape(-1)
    else:
        rows = whole.T if place.transposed else whole
    spans = place.rows or ((0, len(rows)),)
    new = transform.apply(ours, np.concatenate([rows[a:b] for a, b in spans]))
    ends = np.cumsum([b - a for a, b in spans])
    for (a, b), part in zip(spans, np.split(new, ends[:-1]), strict=True):
        rows[a:b] = part


def _rounded(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Round float32 values to a stored type; bfloat16 stays float32, as when read."""
    if dtype == "f16":
        return values.astype(np.float16)
    return nk.dequantize(nk.quantize(values, dtype)) if dtype == "bf16" else values

"""Tensors of a checkpoint file to be written: name, shape, format and chunks of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint.dtypes import tensor_bytes


@dataclass(frozen=True)
class TensorHeader:
    """Name, shape and format of a tensor in the new file."""

    name: str
    shape: tuple[int, ...]
    """Rows first."""
    format: str
    """A plain type or a block format."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return tensor_bytes(self.format, self.shape, f"tensor {self.name}")


@dataclass(frozen=True)
class TensorPlan(TensorHeader):
    """A tensor to be written."""

    chunks: Callable[[], Iterator[bytes | memoryview]] = field(compare=False)
    """Yields the bytes of the tensor."""

    def write(self, file: BinaryIO) -> None:
        """Write the bytes of the tensor."""
        start = file.tell()
        for chunk in self.chunks():
            file.write(chunk)
        assert file.tell() - start == self.n_bytes


def float32_plan(name: str, values: NDArray[Any]) -> TensorPlan:
    """Return the plan of an array that is written as float32."""
    array = np.asarray(values, "<f4")
    return TensorPlan(name, array.shape, "f32", lambda: iter([array.tobytes()]))

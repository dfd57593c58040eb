"""Strided reads: a box of elements that are not contiguous in the file."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

_GAP_BYTES = 1 << 16  # spans up to this are read with their gaps in one call
_SPAN_BYTES = 1 << 26  # longer spans are read in parts


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether elements with these strides (in elements) lie row after row."""
    step = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1 and stride != step:
            return False
        step *= n
    return True


def n_elements_spanned(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last one, gaps included.

    Examples
    --------
    >>> n_elements_spanned((3, 2), (10, 1))
    22
    """
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def read_strided(
    fill: Callable[[NDArray[Any], int], None],
    dtype: np.dtype[Any],
    first: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> NDArray[Any]:
    """Read a box of elements into a new array.

    ``fill(array, offset)`` reads a contiguous array at a byte offset; `first` is that of the first
    element.  Strides count elements and are not negative; 0 repeats elements.
    """
    out: NDArray[Any] = np.empty(shape, dtype)
    if out.size == 0:
        return out
    # from the longest stride to the shortest, in file order
    box = out.squeeze()
    kept = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n > 1]
    axes = sorted(range(len(kept)), key=lambda a: -kept[a][1])
    box = box.transpose(axes)
    lengths, steps = tuple(kept[a][0] for a in axes), tuple(kept[a][1] for a in axes)
    _read_box(fill, box, first, lengths, steps)
    return out


def _read_box(
    fill: Callable[[NDArray[Any], int], None],
    out: NDArray[Any],
    first: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> None:
    """Read a box with descending strides, in one call if it is dense enough, else in parts."""
    size = out.dtype.itemsize
    n_span = n_elements_spanned(shape, strides)
    dense = n_span <= 2 * math.prod(shape) and n_span * size <= _SPAN_BYTES
    if not shape or dense or n_span * size <= _GAP_BYTES:
        span = np.empty(n_span, out.dtype)
        fill(span, first)
        out[...] = as_strided(span, shape, tuple(stride * size for stride in strides))
    elif len(shape) == 1 and strides[0] == 1:
        if out.flags.c_contiguous:
            fill(out, first)
        else:
            _read_parts(fill, out, first, shape, strides, _SPAN_BYTES // size)
    else:
        n_together = max(1, _GAP_BYTES // max(1, strides[0] * size))
        n_together = n_together if n_together < shape[0] else 1  # parts must be smaller
        _read_parts(fill, out, first, shape, strides, n_together)


def _read_parts(
    fill: Callable[[NDArray[Any], int], None],
    out: NDArray[Any],
    first: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    n_together: int,
) -> None:
    """Read a box in parts of `n_together` along its first axis."""
    if strides[0] == 0:  # repeated elements are read once
        _read_box(fill, out[0], first, shape[1:], strides[1:])
        out[1:] = out[0]
        return
    for i in range(0, shape[0], n_together):
        n = min(n_together, shape[0] - i)
        at = first + i * strides[0] * out.dtype.itemsize
        if n == 1:
            _read_box(fill, out[i, ...], at, shape[1:], strides[1:])
        else:
            _read_box(fill, out[i : i + n], at, (n, *shape[1:]), strides)

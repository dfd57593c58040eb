"""Array checks and transfers shared by the public functions, on NumPy and CUDA arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow_kernels.errors import UsageError


def is_cuda(array: object) -> bool:
    """Return True if `array` has the CUDA array interface (CuPy)."""
    return hasattr(array, "__cuda_array_interface__")


def array_shapes(*arrays: Any) -> tuple[Any, ...]:
    """Return what `check_array` looks at, of each array, as a key for checks that are passed."""
    return tuple(
        (type(a), getattr(a, "shape", None), getattr(a, "strides", None), getattr(a, "dtype", None))
        for a in arrays
    )


def empty(like: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    """Return a new uninitialized array on the device of `like`."""
    if not is_cuda(like):
        return np.empty(shape, dtype)
    from nbflow_kernels.cuda import device_of

    return device_of(like).empty(shape, dtype)


def output(
    like: Any, shape: tuple[int, ...], out: Any, dtype: Any = np.float32, *, rows: bool = False
) -> Any:
    """Return `out` after its check (`check_array`), or a new array on the device of `like`."""
    if out is None:
        return empty(like, shape, dtype)
    check_array("out", out, shape, dtype, rows=rows)
    check_writable("out", out)
    return out


def check_writable(name: str, array: Any) -> None:
    """Raise if an array that is written to is read-only."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise UsageError(f"{name} is written to and must not be read-only; pass a copy")


def on_device(array: Any, like: Any) -> Any:
    """Return `array` on the device of `like`: itself, or a copy of an array on the host."""
    if is_cuda(array):
        return array
    from nbflow_kernels.cuda import device_of

    return device_of(like).asarray(array)


def all_on_device(arrays: Sequence[Any], like: Any) -> list[Any]:
    """Return arrays on the device of `like`; all those in host memory are copied at once."""
    offsets, n_bytes = [], 0
    for array in arrays:
        offsets.append(n_bytes)
        n_bytes += 0 if is_cuda(array) else -(-array.nbytes // 16) * 16
    packed = np.zeros(n_bytes, np.uint8)
    for offset, array in zip(offsets, arrays, strict=True):
        if not is_cuda(array):
            packed[offset : offset + array.nbytes] = (
                np.ascontiguousarray(array).view(np.uint8).ravel()
            )
    copied = on_device(packed, like) if n_bytes else None
    return [
        a if copied is None or is_cuda(a)
        else copied[offset : offset + a.nbytes].view(a.dtype).reshape(a.shape)
        for offset, a in zip(offsets, arrays, strict=True)
    ]  # fmt: skip


def on_host(array: Any) -> Any:
    """Return `array`, or a NumPy copy of an array on a CUDA device (synchronizes)."""
    if not is_cuda(array):
        return array
    from nbflow_kernels.cuda import to_host

    return to_host(array)


def check_together(**arrays: Any) -> None:
    """Raise unless all arrays and quantized tensors are in host memory, or all on CUDA devices.

    Raises
    ------
    UsageError
        With the name of one array on each side.
    """
    places: dict[bool, str] = {}
    for name, array in arrays.items():
        if array is not None:
            places[is_cuda(array) or getattr(array, "on_device", False)] = name
    if len(places) == 2:
        raise UsageError(
            f"{places[True]} is on a CUDA device and {places[False]} in host memory; bring both to "
            "one device: cupy.asarray, or to_device() of a QuantTensor"
        )


def overlap(a: Any, b: Any) -> bool:
    """Return True if two arrays may share memory, i.e. their memory bounds overlap."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        both = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        return both and np.may_share_memory(a, b)
    if not a.size or not b.size:
        return False
    starts = [v.__cuda_array_interface__["data"][0] for v in (a, b)]
    ends = [
        start + v.itemsize + sum((n - 1) * s for n, s in zip(v.shape, v.strides, strict=True))
        for start, v in zip(starts, (a, b), strict=True)
    ]
    return bool(starts[0] < ends[1] and starts[1] < ends[0])


def output_array(
    x: Any, shape: tuple[int, ...], out: Any, accumulate: bool = False, *, rows: bool = False
) -> Any:
    """Return `out`, or a new float32 array on the device of the activations `x`.

    Raises
    ------
    UsageError, TypeError
        As `check_array`; if `out` overlaps `x`, or `accumulate` is given without `out`.
    """
    if out is None and accumulate:
        raise UsageError("accumulate=True needs out=, the array to add to")
    found = output(x, shape, out, rows=rows)
    if out is not None and overlap(x, out):
        raise UsageError("out must not overlap x; pass another array")
    return found


def check_array(
    name: str,
    array: Any,
    shape: tuple[int | None, ...],
    dtype: Any = np.float32,
    *,
    rows: bool = False,
    any_stride: bool = False,
) -> None:
    """Raise unless `array` is a C-contiguous array of the expected shape and dtype.

    Parameters
    ----------
    name : str
        Name of the parameter, for the message.
    array : array
        The argument.
    shape : tuple of int or None
        Expected shape; None matches any length.
    dtype : dtype or tuple of dtypes
        Expected dtype, or the allowed ones.
    rows : bool
        Allow any stride of axis 0, e.g. a slice of columns of a wider matrix.
    any_stride : bool
        Allow any stride of all axes but the last.

    Raises
    ------
    TypeError
        If `array` is not an array, or has another dtype.
    UsageError
        If the shape differs or the array is not C-contiguous.
    """
    if not isinstance(array, np.ndarray) and not is_cuda(array):
        raise TypeError(
            f"{name} must be a NumPy array or an array on a CUDA device, got {type(array).__name__}"
        )
    wanted = [np.dtype(d) for d in (dtype if isinstance(dtype, tuple) else (dtype,))]
    if array.dtype not in wanted:
        names = " or ".join(d.name for d in wanted)
        raise TypeError(f"{name} must have dtype {names}, got {array.dtype.name}")
    fits = array.ndim == len(shape) and all(
        want is None or want == got for want, got in zip(shape, array.shape, strict=True)
    )
    if not fits:
        want_text = "(" + ", ".join("any" if s is None else str(s) for s in shape) + ")"
        raise UsageError(f"{name} must have shape {want_text}, got {tuple(array.shape)}")
    inner = array[:1] if rows else array
    if any_stride:
        inner = array[(slice(0, 1),) * (array.ndim - 1)]
    if not inner.flags.c_contiguous:
        order = "C-contiguous"
        if any_stride:
            order = "contiguous in the last axis (its innermost stride must be 1)"
        raise UsageError(f"{name} must be {order}; pass numpy.ascontiguousarray({name})")


def as_rows(x: Any, out: Any, n: int) -> tuple[Any, Any, tuple[int, ...]]:
    """Return activations (..., K) as rows (T, K), `out` (..., N) alike, and the result's shape.

    Arrays of two axes, and what is not an array, are returned as they are.
    """
    if getattr(x, "ndim", 2) == 2:
        return x, out, ()
    check_array("x", x, (None,) * max(x.ndim, 1))
    shape, T = (*x.shape[:-1], n), math.prod(x.shape[:-1])
    if out is not None:
        check_array("out", out, shape)
        out = out.reshape(T, n)
    return x.reshape(T, x.shape[-1]), out, shape


def check_rows(name: str, array: Any) -> None:
    """Raise unless `array` is float32 (B, V) with V >= 1."""
    check_array(name, array, (None, None))
    if array.shape[1] == 0:
        raise UsageError(f"{name} must have at least one column, got shape {array.shape}")


def check_ids(name: str, ids: Any, n: int, meaning: str) -> None:
    """Raise unless indices are in 0..n - 1; on a device they are not checked: it would wait."""
    if not is_cuda(ids) and ids.size and (ids.min() < 0 or ids.max() >= n):
        wrong = ids[(ids < 0) | (ids >= n)][0]
        raise UsageError(f"{name} must be in 0..{n - 1}, {meaning}, got {wrong}")


def per_row(name: str, value: Any, B: int) -> Any:
    """Return one float64 per row from a number or an array of shape (B,)."""
    array = np.asarray(on_host(value), np.float64)
    if array.shape not in ((), (B,)):
        raise UsageError(f"{name} must be a number or have shape ({B},), got {array.shape}")
    return np.broadcast_to(array, B)


def temperatures(value: Any, B: int) -> Any:
    """Return one positive float32 per row; None is 1."""
    scale = per_row("temperature", 1.0 if value is None else value, B)
    # the reciprocal of a smaller number overflows
    if not ((scale >= np.finfo(np.float32).tiny) & np.isfinite(scale)).all():
        raise UsageError(f"temperature must be positive, got {scale.min()}; for 0 use argmax")
    return scale.astype(np.float32)


def check_indptr(
    name: str, indptr: Any, n: int | None = None, *, end: tuple[str, int] | None = None
) -> None:
    """Raise unless `indptr` has `n` int32 offsets that start at 0 and never fall.

    `end` is the wanted last offset, with its description for the message.
    """
    check_array(name, indptr, (n,), np.int32)
    if len(indptr) == 0 or indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
        raise UsageError(f"{name} must start at 0 and never fall, got {indptr.tolist()}")
    if end is not None and indptr[-1] != end[1]:
        raise UsageError(f"{name} must end at {end[0]}, {end[1]}, got {indptr[-1]}")


def check_range(wanted: str, indices: Any, n: int) -> None:
    """Raise unless all indices are in 0..n - 1; `wanted` is the message, with {} for the range."""
    if indices.size and (indices.min() < 0 or indices.max() >= n):
        bad = indices[(indices < 0) | (indices >= n)][0]
        raise UsageError(f"{wanted.format(f'0..{n - 1}')}, got {bad}")


def check_sequences(indptr: Any, state_indices: Any, n_rows: int, n_states: int) -> None:
    """Raise unless `indptr` divides `n_rows` rows into sequences that have states of their own.

    Values on a device are not checked: it would wait.

    Raises
    ------
    UsageError
        If `indptr` does not rise from 0 to `n_rows`, or a sequence with rows has an index outside
        ``0..n_states - 1`` or that of another one.
    TypeError
        If one of them is not an int32 array.
    """
    check_array("indptr", indptr, (None,), np.int32)
    check_array("state_indices", state_indices, (max(len(indptr) - 1, 0),), np.int32)
    if is_cuda(indptr):
        return
    check_indptr("indptr", indptr, end=("the rows of the batch", n_rows))
    used = state_indices[indptr[1:] > indptr[:-1]]
    check_ids("state_indices", used, n_states, "the rows of state")
    if len(np.unique(used)) < len(used):
        raise UsageError(
            "state_indices must differ: two sequences cannot update one state, got "
            f"{state_indices.tolist()}"
        )

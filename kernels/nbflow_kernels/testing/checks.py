"""Check of an op's test case against its reference, shared by tests and benchmarks."""

from __future__ import annotations

import copy
import importlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.arrays import is_cuda
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.op_registry import family_of, load, module_of


class CheckError(AssertionError):
    """An op's result differs from the reference by more than its case allows."""


def make_inputs(case: OpCase) -> dict[str, Any]:
    """Return the keyword arguments of a case: new arrays, the same numbers each time."""
    return case.inputs(np.random.default_rng(zlib.crc32(case.id.encode())))


def make_out(case: OpCase) -> dict[str, Any]:
    """Return ``{"out": array}`` filled with NaN (integers: the minimum), or an empty dict."""
    if case.out is None:
        return {}
    shape, dtype = case.out
    is_float = np.issubdtype(np.dtype(dtype), np.floating)
    return {"out": np.full(shape, np.nan if is_float else np.iinfo(dtype).min, dtype)}


def leaves(value: Any) -> list[Any]:
    """Return the arrays and scalars of a result: a value, or tuples, lists and dicts of them."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [value]


def _mapped(function, value):
    """Apply a function to the leaves of a value; see `leaves`."""
    if isinstance(value, dict):
        return {name: _mapped(function, item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(function, item) for item in value)
    return function(value)


Place = Callable[[Any, bool], Any]
"""Copies a NumPy array to a device: ``(array, whether it is an output)``."""


def placer(cupy: Any) -> Place:
    """Return the `Place` that copies with CuPy and keeps the stride of rows."""

    def place(array: np.ndarray, is_output: bool) -> Any:
        row = array.strides[0] if array.ndim > 1 and array.size else 0
        whole = np.ascontiguousarray(array)
        if row <= array[:1].nbytes or not array[:1].flags.c_contiguous:
            return cupy.asarray(whole)
        wide = cupy.zeros((array.shape[0], row // array.itemsize), array.dtype)
        found = wide[:, : array[:1].size].reshape(array.shape)
        found[...] = cupy.asarray(whole)
        return found

    return place


Inputs = dict[str, Any]


def run(case: OpCase, place: Place | None = None, inputs: Inputs | None = None) -> dict[str, Any]:
    """Call the public function; return its result and its arguments after the call.

    `inputs` are those of `make_inputs`, new ones by default; a call on a device does not change
    them.  With `place` the arguments, except those named in `case.host`, are copied to a device
    first, and the results are copied back to NumPy arrays.
    """
    arguments = make_inputs(case) if inputs is None else inputs
    out = make_out(case)
    if place is not None:
        arguments, out = placed(case, arguments, out, place)
    function = getattr(importlib.import_module(module_of()[case.op]), case.op)
    result = function(**arguments, **out)
    if out:
        first = result[0] if isinstance(result, tuple) else result
        if first is not out["out"]:
            raise CheckError(f"{case.id}: the function returned another array than out=")
    if place is not None:
        _check_placed(case, arguments, result)
        result, arguments = _mapped(_fetched, (result, arguments))
    return {"result": result, "arguments": arguments}


def placed(
    case: OpCase, arguments: dict[str, Any], out: dict[str, Any], place: Place
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a call and its output, copied to a device."""

    def on_device(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return place(value, False)
        if hasattr(value, "to_device"):
            return value.to_device(place(np.zeros(1, np.float32), False))
        return value

    return (
        {n: v if n in case.host else _mapped(on_device, v) for n, v in arguments.items()},
        {name: place(value, True) for name, value in out.items()},
    )


def _check_placed(case: OpCase, arguments: dict[str, Any], result: Any) -> None:
    """Raise if the result of arrays on a device is in host memory; tables of numbers may be."""
    if not any(is_cuda(a) for a in leaves(arguments)):
        return
    for leaf in leaves(result):
        if isinstance(leaf, np.ndarray):
            raise CheckError(f"{case.id}: arguments are on a device, the result is in host memory")


def _fetched(leaf):
    """Return a leaf in host memory."""
    if hasattr(leaf, "to_host"):
        return leaf.to_host()
    return cuda.to_host(leaf) if is_cuda(leaf) else leaf


def run_reference(case: OpCase, inputs: Inputs | None = None) -> dict[str, Any]:
    """Call the reference with float32 inputs widened to float64; `inputs` stay unchanged."""
    given = make_inputs(case) if inputs is None else inputs
    arguments = {
        name: _mapped(_widened, copy.deepcopy(value) if name in case.mutates else value)
        for name, value in given.items()
    }
    result = getattr(load(family_of(case.op), "reference"), case.op)(**arguments)
    return {"result": result, "arguments": arguments}


def check(case: OpCase, place: Place | None = None, inputs: Inputs | None = None) -> float:
    """Compare the op with its reference on one case, on a device if there is a `place`.

    Pass `inputs` of `make_inputs` where they take long to make.

    Returns
    -------
    float
        The largest error relative to the tolerance (0 for an exact case).

    Raises
    ------
    CheckError
        If a result or a mutated argument is off by more than the case allows, has another shape,
        or an argument that is not in `mutates` was changed.
    """
    got, want = run(case, place, inputs), run_reference(case, inputs)
    _check_unchanged(case, got["arguments"], inputs)
    worst = _compare(case, "result", got["result"], want["result"])
    for name in case.mutates:
        both = (run["arguments"][name] for run in (got, want))
        found = _compare(case, name, *map(case.decoded.get(name, _as_stored), both))
        worst = max(worst, found)
    return worst


def _as_stored(argument: Any) -> Any:
    return argument


def _widened(leaf):
    """Copy a float32 array to float64; keep everything else, float16 storage too."""
    is_f32 = isinstance(leaf, np.ndarray) and leaf.dtype == np.float32
    return leaf.astype(np.float64) if is_f32 else leaf


def _check_unchanged(case: OpCase, arguments: Inputs, inputs: Inputs | None) -> None:
    """Raise if an argument that is not in `mutates` was changed."""
    for name, before in (make_inputs(case) if inputs is None else inputs).items():
        if name in case.mutates:
            continue
        for old, new in zip(leaves(before), leaves(arguments[name]), strict=True):
            if isinstance(old, np.ndarray) and not np.array_equal(old, new, equal_nan=_floats(old)):
                raise CheckError(f"{case.id}: {name} was changed, but is not in mutates")


def _floats(array: Any) -> bool:
    return bool(np.issubdtype(array.dtype, np.floating))


def _compare(case: OpCase, what: str, got: Any, want: Any) -> float:
    """Return the largest error over the arrays of a result, relative to the tolerance."""
    got_leaves, want_leaves = leaves(got), leaves(want)
    if len(got_leaves) != len(want_leaves):
        raise CheckError(
            f"{case.id}: {what} has {len(got_leaves)} arrays, the reference {len(want_leaves)}"
        )
    pairs = zip(got_leaves, want_leaves, strict=True)
    return max((_error(case, what, np.asarray(g), np.asarray(w)) for g, w in pairs), default=0.0)


def _error(case: OpCase, what: str, got: Any, want: Any) -> float:
    """Return the largest error of one array relative to the tolerance; raise above 1."""
    if got.shape != want.shape:
        raise CheckError(f"{case.id}: {what} has shape {got.shape}, the reference {want.shape}")
    if got.size == 0:
        return 0.0
    if case.exact or not _floats(got):
        same = np.array_equal(got, want.astype(got.dtype), equal_nan=_floats(got))
        if not same:
            raise CheckError(f"{case.id}: {what} is not bit for bit the reference")
        return 0.0
    with np.errstate(invalid="ignore"):  # inf - inf where both are infinite
        found, wanted = got.astype(np.float64), want.astype(np.float64)
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        allowed = case.atol + case.rtol * np.abs(wanted)
        share = np.where(same, 0.0, np.abs(found - wanted) / np.maximum(allowed, 1e-300))
    share = np.where(np.isnan(share), np.inf, share)
    worst = int(np.argmax(share))
    if share.flat[worst] > 1.0:
        index = tuple(int(i) for i in np.unravel_index(worst, got.shape))
        raise CheckError(
            f"{case.id}: {what}{list(index)} is {found.flat[worst]:.9g}, the reference "
            f"{wanted.flat[worst]:.9g}; {int((share > 1.0).sum())} of {got.size} elements are off "
            f"by more than rtol {case.rtol:g}, atol {case.atol:g} ({case.reason})"
        )
    return float(share.flat[worst])

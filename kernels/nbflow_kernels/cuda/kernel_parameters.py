"""A kernel's declared parameters: how its arguments are checked and packed."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nbflow_kernels.cuda.devices import address

# name -> (array types a pointer to it takes, letter of `struct` for a scalar or "")
TYPES: dict[str, tuple[tuple[Any, ...], str]] = {
    "i8": ((np.int8,), "b"),
    "u8": ((np.uint8, np.bool_), "B"),
    "i16": ((np.int16,), "h"),
    "u16": ((np.uint16,), "H"),
    "i32": ((np.int32,), "i"),
    "u32": ((np.uint32,), "I"),
    "i64": ((np.int64,), "q"),
    "u64": ((np.uint64,), "Q"),
    "f16": ((np.float16,), ""),
    "bf16": ((np.uint16,), ""),
    "f32": ((np.float32,), "f"),
    "f64": ((np.float64,), "d"),
    "any": ((), ""),
}

_PARAMETER = re.compile(r"(\w+)(?:(\*)(\?)?)? (\w+)")


@dataclass(frozen=True)
class Parameter:
    """Kernel parameter: name, (pointed-to) type, and whether it may be None."""

    name: str
    type: str
    pointer: bool
    optional: bool


class Parameters:
    """The parameters of a kernel.

    Parameters
    ----------
    text : str
        The declaration, e.g. ``"f32* x, f32*? weight, i32 n, f32 eps"``.

    Examples
    --------
    >>> from nbflow_kernels.cuda.kernel_parameters import Parameters
    >>> Parameters("i32 n, f32 eps").pack("scale", (3, 0.5)).hex()
    '030000000000003f'
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.all = tuple(_parsed(part, text) for part in text.split(","))
        # native alignment: CUDA lays parameters out as C does the members of a struct
        self._struct = struct.Struct(
            "@" + "".join("Q" if p.pointer else TYPES[p.type][1] for p in self.all)
        )
        # a dtype is usually NumPy's only object of its kind: comparing it is faster than its hash
        self._pointers = tuple(
            (i, (*map(np.dtype, TYPES[p.type][0]), None)[0], TYPES[p.type][0], p.optional)
            for i, p in enumerate(self.all)
            if p.pointer
        )

    @cached_property
    def first_pointer(self) -> int:
        """Index of the first array argument that cannot be None: it chooses the device."""
        return next(i for i, p in enumerate(self.all) if p.pointer and not p.optional)

    def pack(self, kernel: str, args: tuple[Any, ...]) -> bytes:
        """Return the arguments as the bytes of a C struct; `kernel` is named in errors.

        Raises
        ------
        TypeError
            If an argument does not fit its parameter.
        """
        values = list(args)
        try:
            for i, usual, types, optional in self._pointers:  # in line: up to 50 for a launch
                array = args[i]
                if array is None and optional:
                    values[i] = 0
                    continue
                if types and array.dtype is not usual and array.dtype.type not in types:
                    raise AttributeError
                at = array.data.ptr  # not there if the array is the host's
                values[i] = at if array.size else 0
            return self._struct.pack(*values)
        except (AttributeError, IndexError, OverflowError, struct.error):
            return self._pack_checked(kernel, args)

    def _pack_checked(self, kernel: str, args: tuple[Any, ...]) -> bytes:
        """Pack one by one: arrays that are not CuPy's, and arguments that do not fit."""
        if len(args) != len(self.all):
            raise TypeError(f"{kernel} takes {len(self.all)} arguments, got {len(args)}")
        values = [
            _pointer(kernel, p, a) if p.pointer else a for p, a in zip(self.all, args, strict=True)
        ]
        for p, a in zip(self.all, values, strict=True):
            _check_scalar(kernel, p, a)
        return self._struct.pack(*values)


def _parsed(part: str, text: str) -> Parameter:
    found = _PARAMETER.fullmatch(part.strip())
    kind, pointer, optional, name = found.groups() if found else ("", "", "", "")
    if kind not in TYPES or not (pointer or TYPES[kind][1]):
        raise TypeError(f"'{part.strip()}' of '{text}' is not a parameter like 'f32* x' or 'i32 n'")
    return Parameter(name, kind, bool(pointer), bool(optional))


def _pointer(kernel: str, p: Parameter, a: Any) -> int:
    """Return the address of an array argument."""
    if a is None and p.optional:
        return 0
    if not hasattr(a, "__cuda_array_interface__"):
        raise TypeError(
            f"{kernel}: {p.name} must be an array on the device, got {type(a).__name__}"
        )
    wanted = TYPES[p.type][0]
    if wanted and a.dtype.type not in wanted:
        raise TypeError(f"{kernel}: {p.name} must be a {p.type} array, got {a.dtype.name}")
    return address(a) if a.size else 0


def _check_scalar(kernel: str, p: Parameter, a: Any) -> None:
    try:
        struct.pack("Q" if p.pointer else TYPES[p.type][1], a)
    except (struct.error, OverflowError):
        raise TypeError(f"{kernel}: {p.name} must fit {p.type}, got {a!r}") from None

"""What a torch pickle may name, and what we make of it: plain descriptions, never the things.

A pickle is a program that names functions and calls them.  Here a name stands for an entry of
`GLOBALS` and nothing is looked up, imported or called: ``torch._utils._rebuild_tensor_v2`` becomes
a `Tensor`, a note of storage, offset, shape and strides.  Any other name is refused.

Layout of the calls: https://github.com/pytorch/pytorch/blob/v2.6.0/torch/_utils.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nbflow.weights.dtypes import ITEM_BYTES
from nbflow.weights.shown import shown
from nbflow.weights.strided import n_elements_spanned

MAX_DIMENSIONS = 16


class Refused(Exception):
    """Something a state dict does not need; the machine adds file and position."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that may occur."""

    name: str
    """Module and name, e.g. ``torch.FloatStorage``."""
    kind: str
    """One of ``storage``, ``dtype``, ``call``, ``inert``."""
    meaning: Any = None
    """Element type of a storage or dtype (None: bytes), function of a call."""


@dataclass(slots=True, eq=False)
class Table:
    """A dict: pairs in order, never hashed, so that no key can be costly."""

    items: list[tuple[Any, Any]] = field(default_factory=list)
    """Keys and values."""


@dataclass(slots=True, eq=False)
class Inert:
    """A value without meaning for weights, e.g. a set; its content is dropped."""

    name: str
    """What it was."""


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Bytes of a file that tensors share."""

    key: str
    """Its name in the file."""
    dtype: str | None
    """Element type, None for bytes of any type."""
    n_bytes: int
    """Bytes."""
    first: int = 0
    """First byte, counted from the beginning of storage `key`."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A view of a storage."""

    storage: Storage
    """Where its elements are."""
    dtype: str
    """Element type, a key of `nbflow.weights.dtypes.ITEM_BITS`."""
    offset: int
    """First element, counted from the beginning of the storage."""
    shape: tuple[int, ...]
    """Rows first."""
    strides: tuple[int, ...]
    """In elements."""


def describe(value: Any) -> str:
    """Return what kind of thing a value is, in a few words however large it is."""
    if isinstance(value, Global):
        return value.name
    if isinstance(value, (str, bytes, int, float)) and not isinstance(value, bool):
        short = value[:40] if isinstance(value, (str, bytes)) else value
        return f"{type(value).__name__} {short!r}"
    names = {Table: "dict", Storage: "storage", Tensor: "tensor"}
    if isinstance(value, Inert):
        return value.name
    return names.get(type(value), type(value).__name__)


def _rebuild_tensor(args: tuple[Any, ...]) -> Tensor:
    """_rebuild_tensor(storage, offset, size, stride)."""
    _count(args, 4, 4)
    storage = args[0]
    if not isinstance(storage, Storage):
        raise Refused(f"a tensor of {describe(storage)} instead of a storage")
    return _tensor(storage, storage.dtype or "u8", args[1], args[2], args[3])


def _rebuild_tensor_v2(args: tuple[Any, ...]) -> Tensor:
    """_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata=None)."""
    _count(args, 6, 7)
    _no_metadata(args[6:])
    return _rebuild_tensor(args[:4])


def _rebuild_tensor_v3(args: tuple[Any, ...]) -> Tensor:
    """_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata)."""
    _count(args, 7, 8)
    _no_metadata(args[7:])
    storage, dtype = args[0], args[6]
    if not isinstance(storage, Storage) or not isinstance(dtype, Global) or dtype.kind != "dtype":
        raise Refused(f"a tensor of {describe(storage)} with the type {describe(dtype)}")
    return _tensor(storage, dtype.meaning, args[1], args[2], args[3])


def _tensor(storage: Storage, dtype: str, offset: Any, shape: Any, strides: Any) -> Tensor:
    """Return a tensor if its elements lie within its storage."""
    for what, numbers in (("size", shape), ("stride", strides), ("offset", (offset,))):
        if type(numbers) is not tuple or len(numbers) > MAX_DIMENSIONS:
            raise Refused(f"a tensor whose {what} is {describe(numbers)}")
        wrong = [n for n in numbers if type(n) is not int or not 0 <= n < 1 << 62]
        if wrong:
            raise Refused(f"a tensor whose {what} has {describe(wrong[0])}")
    if len(shape) != len(strides):
        raise Refused(f"a tensor with {len(shape)} dimensions and {len(strides)} strides")
    spanned = n_elements_spanned(shape, strides)
    needed = (offset + spanned) * ITEM_BYTES[dtype] if spanned else 0
    if needed > storage.n_bytes:
        raise Refused(
            f"a tensor of {needed} bytes (offset {offset}, shape {shape}, strides {strides}, "
            f"{dtype}) in storage {shown(storage.key)} of {storage.n_bytes} bytes"
        )
    return Tensor(storage, dtype, offset, shape, strides)


def _rebuild_parameter(args: tuple[Any, ...]) -> Any:
    """_rebuild_parameter(data, requires_grad, hooks) and _with_state(..., state)."""
    _count(args, 2, 4)
    return _must_be_tensor(args[0])


def _rebuild_on_device(args: tuple[Any, ...]) -> Tensor:
    """_rebuild_device_tensor_from_cpu_tensor(data, dtype, device, requires_grad)."""
    _count(args, 4, 4)
    tensor = _must_be_tensor(args[0])
    if not isinstance(args[1], Global) or args[1].meaning != tensor.dtype:
        raise Refused(f"a tensor of {tensor.dtype} that becomes {describe(args[1])} on a device")
    return tensor


def _rebuild_from_type(args: tuple[Any, ...]) -> Any:
    """_rebuild_from_type_v2(function, type, args, state): a tensor with attributes."""
    _count(args, 4, 4)
    function = args[0]
    if not isinstance(function, Global) or function.kind != "call" or type(args[2]) is not tuple:
        raise Refused(f"a tensor rebuilt by {describe(function)}")
    if function.meaning is _rebuild_from_type:
        raise Refused("a tensor rebuilt within itself")
    return _must_be_tensor(function.meaning(args[2]))


def _table(args: tuple[Any, ...]) -> Table:
    """OrderedDict(), OrderedDict([[key, value], ...]), defaultdict(factory), Counter({...})."""
    pairs = args[-1] if args else None
    if type(pairs) is not list:
        return Table(list(pairs.items) if isinstance(pairs, Table) else [])
    table = Table()
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise Refused(f"an OrderedDict of {describe(pair)} instead of pairs")
        table.items.append((pair[0], pair[1]))
    return table


def _size(args: tuple[Any, ...]) -> Any:
    """torch.Size((3, 4)) is the tuple."""
    _count(args, 1, 1)
    if type(args[0]) not in (tuple, list):
        raise Refused(f"a torch.Size of {describe(args[0])}")
    return tuple(args[0])


def _must_be_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise Refused(f"a parameter of {describe(value)} instead of a tensor")
    return value


def _no_metadata(rest: tuple[Any, ...]) -> None:
    """Refuse the marks of a tensor that is to be conjugated or negated on reading."""
    metadata = rest[0] if rest else None
    if metadata is not None and not (isinstance(metadata, Table) and not metadata.items):
        raise Refused(f"a tensor with metadata ({describe(metadata)}), e.g. a conjugated one")


def _count(args: tuple[Any, ...], least: int, most: int) -> None:
    if not least <= len(args) <= most:
        raise Refused(f"a call with {len(args)} arguments instead of {least}..{most}")


_STORAGES = {
    "DoubleStorage": "f64",
    "FloatStorage": "f32",
    "HalfStorage": "f16",
    "BFloat16Storage": "bf16",
    "LongStorage": "i64",
    "IntStorage": "i32",
    "ShortStorage": "i16",
    "CharStorage": "i8",
    "ByteStorage": "u8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "c128",
    "ComplexFloatStorage": "c64",
    "UntypedStorage": None,
}
_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8_e4m3",
    "float8_e5m2": "f8_e5m2",
    "float8_e4m3fnuz": "f8_e4m3fnuz",
    "float8_e5m2fnuz": "f8_e5m2fnuz",
    "float8_e8m0fnu": "f8_e8m0",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "bool",
    "complex32": "c32",
    "complex64": "c64",
    "complex128": "c128",
}
_CALLS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _rebuild_on_device,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": _size,
    "collections.OrderedDict": _table,
    "collections.defaultdict": _table,
    "collections.Counter": _table,
    "torch.device": lambda args: Inert("torch.device"),
    "_codecs.encode": lambda args: Inert("bytes"),
    "argparse.Namespace": lambda args: Inert("argparse.Namespace"),
    "numpy.dtype": lambda args: Inert("numpy.dtype"),
    "numpy.core.multiarray.scalar": lambda args: Inert("a NumPy scalar"),
    "numpy._core.multiarray.scalar": lambda args: Inert("a NumPy scalar"),
}
_BUILTINS = ("set", "frozenset", "bytearray", "bytes", "complex", "range", "slice")
_INERT = (
    "torch.Tensor",
    "torch._tensor.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("list", "dict")),
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("int", "float")),
)


def _globals() -> dict[str, Global]:
    """Return every name that may occur."""
    table = [
        Global(f"{module}.{name}", "storage", dtype)
        for module in ("torch", "torch.cuda", "torch.storage")
        for name, dtype in _STORAGES.items()
    ]
    table += [Global(f"torch.{name}", "dtype", dtype) for name, dtype in _DTYPES.items()]
    table += [Global(name, "call", call) for name, call in _CALLS.items()]
    for name in _BUILTINS:
        for module in ("builtins", "__builtin__"):
            call = _inert_call(name)
            table.append(Global(f"{module}.{name}", "call", call))
    table += [Global(name, "inert") for name in _INERT]
    return {entry.name: entry for entry in table}


def _inert_call(name: str) -> Callable[[tuple[Any, ...]], Inert]:
    return lambda args: Inert(name)


GLOBALS = _globals()
"""Every name that a pickle may mention, with its module."""

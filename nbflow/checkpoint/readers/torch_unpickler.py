"""Unpickler for torch checkpoints that builds descriptions of tensors and runs no code.

`pickletools.genops` scans the opcodes first: only those in `_OPCODES` pass, with bounded numbers,
lines, memo and count.  Then `pickle.Unpickler` builds the value with the names in `_NAMES` only,
which stand for descriptions instead of real objects; dicts are lists of pairs, because hashing a
hostile key may not terminate.

Calls: https://github.com/pytorch/pytorch/blob/v2.6.0/torch/_utils.py
"""

from __future__ import annotations

import codecs
import io
import pickle
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nbflow.checkpoint.dtypes import ITEM_BYTES
from nbflow.checkpoint.strided_read import n_elements_spanned
from nbflow.utils.binary_file import ByteFile
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

MAX_OPCODES = 1 << 21  # at up to 300 bytes each in a hostile file
_MAX_INTEGER_BITS = 128
_MAX_LINE = 256
_MAX_DIMENSIONS = 16

codecs.lookup("raw_unicode_escape")  # imported now: untrusted input must not trigger imports

_OPCODES = {
    "PROTO", "FRAME", "MARK", "STOP", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE",
    "INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "BINFLOAT", "BINSTRING",
    "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "EMPTY_SET", "ADDITEMS", "FROZENSET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD",
    "BINPERSID", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE",
}  # fmt: skip
_REPLACED = {
    "FRAME": b"",  # lengths change
    "EMPTY_DICT": b"ccollections\nOrderedDict\n)R",
    "EMPTY_SET": b"cbuiltins\nset\n)R",
    "FROZENSET": b"t0cbuiltins\nset\n)R",
    "NEWOBJ": b"R",
}
"""Replacements of opcodes that would hash keys or instantiate classes."""


class Refused(Exception):
    """Content of a pickle that no state dict needs."""


class _Value:
    """Base of the values of a pickle; their attributes cannot be set (BUILD)."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise Refused(f"attributes (BUILD) of {describe(self)}")


@dataclass(slots=True, eq=False)
class Name(_Value):
    """A permitted name: a function, an element type, or a mere name."""

    name: str
    call: Callable[..., Any] | None = None
    storage: bool = False
    dtype: str | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Return the description that a call of the function makes."""
        if self.call is None:
            raise Refused(f"a call of {self.name}")
        return self.call(*arguments)


class Dict(_Value):
    """A dict as an ordered list of pairs, which copies share."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Any = None) -> None:
        self.pairs: list[Any] = pairs.pairs if isinstance(pairs, Dict) else pairs or []
        if type(self.pairs) is not list:
            raise Refused(f"a dict of {describe(pairs)}")

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, (str, bytes, int, float, tuple, type(None))):
            raise Refused(f"a dict with the key {describe(key)}")
        self.pairs.append((key, value))

    def __setstate__(self, state: Any) -> None:
        """Drop attributes, e.g. torch's ``_metadata`` of an OrderedDict."""


class _Ignored(_Value):
    """A value without tensors, e.g. a set; its content is dropped."""

    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        """Drop an element."""

    def __setstate__(self, state: Any) -> None:
        """Drop attributes."""


@dataclass(slots=True, eq=False)
class Storage(_Value):
    """Byte range of the file that tensors share."""

    key: str
    dtype: str | None
    n_bytes: int
    first: int = 0
    """Offset; a legacy storage may be a part of storage `key`."""


@dataclass(slots=True, eq=False)
class Tensor(_Value):
    """A strided view of a storage; offset and strides in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def describe(value: Any) -> str:
    """Return the kind of a value, and the value if that is short."""
    if isinstance(value, Name):
        return value.name
    kind = type(value).__name__.removeprefix("_").lower()
    return f"{kind} {shown(value)}" if isinstance(value, (str, bytes, int, float)) else kind


def is_count(value: Any) -> bool:
    """Return whether a value is an integer >= 0 that fits into 62 bits."""
    return type(value) is int and 0 <= value < 1 << 62


def _view(storage: Any, dtype: str | None, offset: Any, shape: Any, strides: Any) -> Tensor:
    """Return a tensor if its elements lie within its storage."""
    if not isinstance(storage, Storage):
        raise Refused(f"a tensor of {describe(storage)} instead of a storage")
    for what, numbers in (("size", shape), ("stride", strides), ("offset", (offset,))):
        if type(numbers) is not tuple or len(numbers) > _MAX_DIMENSIONS:
            raise Refused(f"a tensor whose {what} is {describe(numbers)}")
        wrong = [n for n in numbers if not is_count(n)]
        if wrong:
            raise Refused(f"a tensor whose {what} has {describe(wrong[0])}")
    if len(shape) != len(strides):
        raise Refused(f"a tensor with {len(shape)} dimensions and {len(strides)} strides")
    dtype = dtype or storage.dtype or "u8"
    spanned = n_elements_spanned(shape, strides)
    needed = (offset + spanned) * ITEM_BYTES[dtype] if spanned else 0
    if needed > storage.n_bytes:
        raise Refused(
            f"a tensor of {needed} bytes (offset {offset}, shape {shape}, strides {strides}, "
            f"{dtype}) in storage {shown(storage.key)} of {storage.n_bytes} bytes"
        )
    return Tensor(storage, dtype, offset, shape, strides)


# Functions that a pickle calls, with torch's arguments; a wrong number of them is a TypeError.


def _rebuild_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None
) -> Tensor:
    return _rebuild_v3(storage, offset, size, stride, grad, hooks, Name("none"), metadata)


def _rebuild_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any,
    metadata: Any = None,
) -> Tensor:  # fmt: skip
    if metadata is not None and not (isinstance(metadata, Dict) and not metadata.pairs):
        raise Refused(f"a tensor with metadata ({describe(metadata)}), e.g. a conjugated one")
    if not isinstance(dtype, Name) or dtype.storage:
        raise Refused(f"a tensor of the type {describe(dtype)}")
    return _view(storage, dtype.dtype, offset, size, stride)


def _rebuild_parameter(data: Any, grad: Any, hooks: Any = None, state: Any = None) -> Tensor:
    if not isinstance(data, Tensor):
        raise Refused(f"a parameter of {describe(data)} instead of a tensor")
    return data


def _rebuild_on_device(data: Any, dtype: Any, device: Any, grad: Any) -> Tensor:
    tensor = _rebuild_parameter(data, grad)
    if not isinstance(dtype, Name) or dtype.dtype != tensor.dtype:
        raise Refused(f"a tensor of {tensor.dtype} that becomes {describe(dtype)} on a device")
    return tensor


def _rebuild_from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Tensor:
    if not isinstance(function, Name) or function.call is _rebuild_from_type:
        raise Refused(f"a tensor rebuilt by {describe(function)}")
    return _rebuild_parameter(function(*arguments), False)


def _size(numbers: Any) -> Any:
    if type(numbers) is not tuple:
        raise Refused(f"a torch.Size of {describe(numbers)}")
    return numbers


_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2", "float8_e4m3fnuz": "f8_e4m3fnuz",
    "float8_e5m2fnuz": "f8_e5m2fnuz", "float8_e8m0fnu": "f8_e8m0", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8",
    "bool": "bool", "complex32": "c32", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
_STORAGES = {
    "Double": "f64", "Float": "f32", "Half": "f16", "BFloat16": "bf16", "Long": "i64", "Int": "i32",
    "Short": "i16", "Char": "i8", "Byte": "u8", "Bool": "bool", "ComplexDouble": "c128",
    "ComplexFloat": "c64", "Untyped": None,
}  # fmt: skip
_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": lambda *a: _view(a[0], None, *a[1:]),
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _rebuild_on_device,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": _size,
    "collections.OrderedDict": Dict,
    "collections.defaultdict": lambda factory=None, pairs=None: Dict(pairs),
    "collections.Counter": Dict,
    "argparse.Namespace": lambda: _Ignored(),
}
_CALLS |= dict.fromkeys(
    ("torch.device", "_codecs.encode", "numpy.dtype", "numpy.core.multiarray.scalar",
     "numpy._core.multiarray.scalar"),
    _Ignored,
)  # fmt: skip


def _names() -> Iterator[Name]:
    """Yield the permitted names."""
    for module in ("torch", "torch.cuda", "torch.storage"):
        for kind, dtype in _STORAGES.items():
            yield Name(f"{module}.{kind}Storage", storage=True, dtype=dtype)
    for name, dtype in _DTYPES.items():
        yield Name(f"torch.{name}", dtype=dtype)
    for name, call in _CALLS.items():
        yield Name(name, call)
    for module in ("builtins", "__builtin__"):
        for name in ("set", "frozenset", "bytearray", "bytes", "complex", "range", "slice"):
            yield Name(f"{module}.{name}", _Ignored)
        for name in ("list", "dict", "int", "float"):
            yield Name(f"{module}.{name}")
    for name in ("Tensor", "_tensor.Tensor", "nn.parameter.Parameter", "nn.parameter.Buffer"):
        yield Name(f"torch.{name}")


_NAMES = {name.name: name for name in _names()}


class Pickles:
    """One or more consecutive pickles in a range of a file, which may exceed the last one."""

    def __init__(self, file: ByteFile, start: int, stop: int) -> None:
        self.file = file
        self.start = start
        """First byte in the file."""
        self.data = file.read(start, stop - start)
        """The bytes from `start` on."""
        self.used = 0
        """Bytes of the pickles that have been read."""


def _scan(pickles: Pickles) -> bytearray:
    """Return the next pickle with `_REPLACED` opcodes, if all are in `_OPCODES` and bounded."""
    data = pickles.data
    stream = io.BytesIO(data)
    copied = stream.seek(pickles.used)
    result = bytearray()
    for i, (opcode, argument, position) in enumerate(pickletools.genops(stream)):
        name = opcode.name
        if i >= MAX_OPCODES:
            raise Refused(f"more than {MAX_OPCODES} opcodes")
        if name not in _OPCODES:
            at = pickles.start + (position or 0)
            raise Refused(f"opcode {name} at byte {at}, which no state dict needs")
        if type(argument) is int and abs(argument) > i:  # rarely
            if name == "LONG_BINPUT":  # the memo is an array
                raise Refused(f"memo {argument} after {i} opcodes")
            if name == "FRAME" and argument > len(data) - stream.tell():
                raise Refused(f"a frame of {argument} bytes, more than there are")
            if argument.bit_length() > _MAX_INTEGER_BITS:
                raise Refused(f"an integer of {argument.bit_length()} bits")
        if name in _REPLACED:
            result += data[copied:position] + _REPLACED[name]
            copied = stream.tell()
    pickles.used = stream.tell()
    return result + data[copied : pickles.used]


class _Unpickler(pickle.Unpickler):
    """Unpickler whose names are descriptions."""

    def __init__(self, data: bytearray, storage: Callable[[Any], Storage]) -> None:
        super().__init__(io.BytesIO(data), encoding="latin-1")
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """Return the description of a name, without importing it."""
        full = f"{module[:_MAX_LINE]}.{name[:_MAX_LINE]}"
        if full not in _NAMES:
            raise Refused(f"the name {shown(full)}, which no state dict needs")
        return _NAMES[full]

    def persistent_load(self, pid: Any) -> Storage:
        """Return a storage."""
        return self._storage(pid)


def load_pickle(pickles: Pickles, storage: Callable[[Any], Storage]) -> Any:
    """Return the value of the next pickle, of tensors and plain values, and advance `pickles`.

    `storage` returns the storage of a persistent id, or raises `Refused`.
    """
    what = f"the pickle at byte {pickles.start + pickles.used}"
    try:
        return _Unpickler(_scan(pickles), storage).load()
    except Refused as problem:
        raise unreadable(pickles.file, what, problem) from problem
    except (pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise unreadable(pickles.file, what, f"an error: {error!s:.400}") from error


def unreadable(file: ByteFile, what: str, problem: object) -> UsageError:
    """Return the error for a pickle with refused content."""
    return UsageError(
        f"{file.path}: {what} has {problem}; nothing was imported or executed.  Only tensors in "
        "dicts and lists can be read: save model.state_dict(), or convert the file to safetensors "
        "where you trust it"
    )

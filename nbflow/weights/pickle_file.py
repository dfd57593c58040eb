"""Torch checkpoints, ``.bin``, ``.pt``, ``.pth``: read without unpickling anything.

===========  ==================================================================================
layout       what lies where
===========  ==================================================================================
zip          since torch 1.6: a zip archive with one folder; ``data.pkl`` the pickle,
             ``data/KEY`` the bytes of storage KEY, ``byteorder`` ``little`` or ``big``
legacy       before, or ``_use_new_zipfile_serialization=False``: five pickles (a magic number,
             1001, the writer's sizes, the object, the keys of its storages in file order),
             then per storage an i64 count of elements and the bytes, little-endian
===========  ==================================================================================

A tensor in the pickle names a storage (a *persistent id*: element type, key, elements), an offset,
a shape and strides; tensors may share a storage, and a legacy storage may be part of another one.
The pickle is run by `nbflow.weights.pickle_machine`, which can build nothing but such descriptions.

A tensor is called by its way through dicts and lists, joined by dots.  If the file is one dict that
has no tensors itself and exactly one of the entries `WRAPPERS`, the names of that entry stand
without it, as in the state dict that was saved with an optimizer beside it.

Layout: https://github.com/pytorch/pytorch/blob/v2.6.0/torch/serialization.py
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbflow.weights.byte_cursor import ByteCursor
from nbflow.weights.byte_file import ByteFile
from nbflow.weights.dtypes import ITEM_BYTES
from nbflow.weights.pickle_machine import MAX_PICKLE_BYTES, PickleMachine
from nbflow.weights.pickle_values import Global, Refused, Storage, Table, Tensor, describe
from nbflow.weights.shards import open_checkpoint
from nbflow.weights.shown import shown
from nbflow.weights.weight_file import TensorEntry, WeightFile, tensor_bytes
from nbflow.weights.zip_file import MAGIC as ZIP_MAGIC
from nbflow.weights.zip_file import Member, read_directory
from nbflow_kernels.errors import UsageError

FORMAT = "pickle"
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "weights")

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_MAGIC = b"\x8a\x0a" + _MAGIC_NUMBER.to_bytes(10, "little")
_PROTOCOL = 1001
_MAX_DEPTH = 64
_MAX_KEY = 256  # characters in the key of a storage; torch's are short numbers
_MAX_VISITS = 1 << 17
_MAX_NAME = 4096
_MAX_NAME_CHARACTERS = 1 << 26  # of all names together


def matches(path: Path, head: bytes) -> bool:
    """Return whether a file that begins with `head` is a zip archive or a legacy torch file."""
    if head[:4] == ZIP_MAGIC:
        return True
    body = head[11:] if head[2:3] == b"\x95" else head[2:]  # protocol 4 begins with a frame
    return head[:1] == b"\x80" and body.startswith(_MAGIC)


def open_file(path: Path) -> WeightFile:
    """Open an index or one file; see `nbflow.weights.open_weights`."""
    return open_checkpoint(path, FORMAT, _read_tensors)


@dataclass
class _Place:
    """Where the bytes of a storage lie."""

    offset: int
    order: str


def _read_tensors(file: ByteFile) -> list[TensorEntry]:
    """Return the tensors of one file of either layout."""
    if file.read(0, 4) == ZIP_MAGIC:
        value, places = _read_zip(file)
    else:
        value, places = _read_legacy(file)
    entries = []
    for name, tensor in _named(file, value).items():
        place = places[tensor.storage.key]
        size = ITEM_BYTES[tensor.dtype]
        offset = place.offset + tensor.storage.first + tensor.offset * size
        tensor_bytes(tensor.dtype, tensor.shape, f"{file.path}: tensor {shown(name)}")
        if 0 in tensor.shape:  # its offset and strides say nothing
            offset, strides = place.offset, None
        else:
            strides = tensor.strides
        entries.append(
            TensorEntry(name, tensor.dtype, tensor.shape, file, offset, strides, place.order)
        )
    return entries


def _read_zip(file: ByteFile) -> tuple[Any, dict[str, _Place]]:
    """Return the value of ``data.pkl`` and the places of its storages."""
    members = read_directory(file)
    roots = [name.removesuffix("/data.pkl") for name in members if name.endswith("/data.pkl")]
    roots = [root for root in roots if "/" not in root]
    if len(roots) != 1:
        raise UsageError(
            f"{file.path}: a zip archive with {len(roots)} data.pkl instead of one; torch.save "
            "writes FOLDER/data.pkl and FOLDER/data/..."
        )
    root = roots[0]
    if f"{root}/constants.pkl" in members:
        raise UsageError(
            f"{file.path}: a TorchScript program, not a checkpoint; save model.state_dict()"
        )
    order = _byte_order(file, members.get(f"{root}/byteorder"))
    places: dict[str, _Place] = {}

    def persistent(identity: Any) -> Storage:
        dtype, key, n_elements = _identity(identity, 5)
        member = members.get(f"{root}/data/{key}")
        if member is None:
            raise Refused(f"storage {shown(key)}, which is not in the archive")
        n_bytes = _storage_bytes(dtype, n_elements)
        if n_bytes > member.n_bytes:
            raise Refused(
                f"storage {shown(key)} of {n_bytes} bytes, of which the archive has "
                f"{member.n_bytes}"
            )
        places[key] = _Place(member.offset, order)
        return Storage(key, dtype, n_bytes)

    member = members[f"{root}/data.pkl"]
    machine = PickleMachine(_pickle_cursor(file, member.offset, member.n_bytes), persistent)
    return machine.load(), places


def _byte_order(file: ByteFile, member: Member | None) -> str:
    """Return the byte order of the storages, as in `struct`."""
    if member is None:
        return "<"
    orders = {b"little": "<", b"big": ">"}
    text = file.read(member.offset, min(member.n_bytes, 16))
    if text not in orders:
        raise UsageError(f"{file.path}: byteorder must be little or big, got {shown(text)}")
    return orders[text]


def _read_legacy(file: ByteFile) -> tuple[Any, dict[str, _Place]]:
    """Return the object and the places of its storages."""
    cursor = _pickle_cursor(file, 0, file.size)
    elements: dict[str, tuple[str, int]] = {}  # of the whole storages: type and count

    def persistent(identity: Any) -> Storage:
        dtype, key, n_elements = _identity(identity, 6)
        if dtype is None:
            raise Refused(f"storage {shown(key)} without an element type")
        if elements.setdefault(key, (dtype, n_elements)) != (dtype, n_elements):
            raise Refused(f"storage {shown(key)} with two types or sizes")
        n_bytes = _storage_bytes(dtype, n_elements)
        if n_bytes > file.size:
            raise Refused(f"storage {shown(key)} of {n_bytes} bytes, more than the file has")
        whole = Storage(key, dtype, n_bytes)
        return whole if identity[5] is None else _part(whole, identity[5])

    machine = PickleMachine(cursor, persistent)
    if machine.load() != _MAGIC_NUMBER or machine.load() != _PROTOCOL:
        raise UsageError(f"{file.path}: not a torch file: the magic number or protocol is wrong")
    _check_sizes(file, machine.load())
    value = machine.load()
    keys = machine.load()
    if type(keys) is not list or not all(isinstance(key, str) for key in keys):
        raise UsageError(f"{file.path}: the list of storages is {describe(keys)}")
    return value, _legacy_places(file, cursor.position, keys, elements)


def _part(whole: Storage, view: Any) -> Storage:
    """Return the part of a legacy storage that a persistent id names: (key, offset, elements)."""
    if type(view) is not tuple or len(view) != 3 or not all(_is_count(n) for n in view[1:]):
        raise Refused(f"a part of a storage that is {describe(view)}")
    assert whole.dtype is not None
    size = ITEM_BYTES[whole.dtype]
    if (view[1] + view[2]) * size > whole.n_bytes:
        raise Refused(f"a part of storage {shown(whole.key)} that is larger than the storage")
    return Storage(whole.key, whole.dtype, view[2] * size, view[1] * size)


def _check_sizes(file: ByteFile, sizes: Any) -> None:
    """Refuse a file of a machine that we know no file of."""
    items = sizes.items if isinstance(sizes, Table) else []
    if not any(key == "little_endian" and value is True for key, value in items):
        raise UsageError(f"{file.path}: a legacy torch file must be of a little-endian machine")


def _legacy_places(
    file: ByteFile, position: int, keys: list[str], elements: dict[str, tuple[str, int]]
) -> dict[str, _Place]:
    """Walk over the storages behind the pickles and return their places."""
    places: dict[str, _Place] = {}
    for key in keys:
        if key not in elements or key in places:
            raise UsageError(
                f"{file.path}: the list of storages has {shown(key)}, which "
                f"{'occurs twice' if key in places else 'no tensor uses'}"
            )
        dtype, n_elements = elements[key]
        found = int.from_bytes(file.read(position, 8), "little")
        n_bytes = n_elements * ITEM_BYTES[dtype]
        if found != n_elements or position + 8 + n_bytes > file.size:
            raise UsageError(
                f"{file.path}: storage {shown(key)} must have {n_elements} elements of {dtype} at "
                f"byte {position}, found a count of {found} and {file.size - position} bytes; the "
                "file is truncated or damaged"
            )
        places[key] = _Place(position + 8, "<")
        position += 8 + n_bytes
    missing = [key for key in elements if key not in places]
    if missing:
        raise UsageError(f"{file.path}: storage {shown(missing[0])} is not in the file")
    return places


def _pickle_cursor(file: ByteFile, start: int, n_bytes: int) -> ByteCursor:
    """Return a cursor over at most as much as a pickle may have."""
    return ByteCursor(file, start, start + min(n_bytes, MAX_PICKLE_BYTES))


def _identity(identity: Any, n_fields: int) -> tuple[str | None, str, int]:
    """Return element type, key and elements of ("storage", type, key, device, elements, ...)."""
    if type(identity) is not tuple or len(identity) != n_fields or identity[0] != "storage":
        raise Refused(f"a persistent id that is {describe(identity)} and not a storage")
    kind, key, n_elements = identity[1], identity[2], identity[4]
    if not isinstance(kind, Global) or kind.kind != "storage":
        raise Refused(f"a storage of the type {describe(kind)}")
    if not isinstance(key, str) or len(key) > _MAX_KEY or not _is_count(n_elements):
        raise Refused(f"a storage called {describe(key)} of {describe(n_elements)} elements")
    return kind.meaning, key, n_elements


def _storage_bytes(dtype: str | None, n_elements: int) -> int:
    return n_elements * (1 if dtype is None else ITEM_BYTES[dtype])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _named(file: ByteFile, value: Any) -> dict[str, Tensor]:
    """Return the tensors below a value by name, in the file's order."""
    wrapper = _wrapper(value)
    holders = _holders(value)
    tensors: dict[str, Tensor] = {}
    n_visits = n_characters = 0
    waiting: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while waiting:
        path, value = waiting.pop()
        n_visits += 1
        if n_visits + len(waiting) > _MAX_VISITS or len(path) > _MAX_DEPTH:
            raise UsageError(
                f"{file.path}: tensors are nested more than {_MAX_DEPTH} deep, or are more than "
                f"{_MAX_VISITS} once every shared dict and list is written out"
            )
        if not isinstance(value, Tensor):
            children = [
                ((*path, _key(key)), child)
                for key, child in _children(value)
                if isinstance(child, Tensor) or id(child) in holders
            ]
            waiting += reversed(children)
            continue
        parts = path[1:] if path[:1] == (wrapper,) else path
        length = sum(map(len, parts))
        n_characters += length
        if length > _MAX_NAME or n_characters > _MAX_NAME_CHARACTERS:
            raise UsageError(f"{file.path}: the name of a tensor is too long: {shown(parts[-1])}")
        name = ".".join(parts) or "tensor"
        if name in tensors:
            raise UsageError(f"{file.path}: two tensors have the name {shown(name)}")
        tensors[name] = value
    return tensors


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a dict, list or tuple holds, with keys; nothing of anything else."""
    if isinstance(value, Table):
        return value.items
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _holders(root: Any) -> set[int]:
    """Return the ids of the dicts, lists and tuples that have a tensor somewhere below them.

    Each is looked at once, so that structures which share their parts cost no more than they take
    in the file.
    """
    first_parent: dict[int, int] = {id(root): 0}
    more_parents: dict[int, list[int]] = {}  # of what is shared
    direct, waiting = [], [root]
    while waiting:
        value = waiting.pop()
        for _, child in _children(value):
            if isinstance(child, Tensor):
                direct.append(id(value))
            elif isinstance(child, (Table, list, tuple)):
                if id(child) in first_parent:
                    more_parents.setdefault(id(child), []).append(id(value))
                else:
                    first_parent[id(child)] = id(value)
                    waiting.append(child)
    holders: set[int] = set()
    while direct:
        holder = direct.pop()
        if holder and holder not in holders:
            holders.add(holder)
            direct.append(first_parent[holder])
            direct += more_parents.get(holder, ())
    return holders


def _key(key: Any) -> str:
    """Return how a dict's key appears in a name."""
    if isinstance(key, bytes):
        return key[: _MAX_NAME + 1].decode("latin-1")  # a longer one will be refused
    if isinstance(key, tuple):
        return "tuple"
    return key if isinstance(key, str) else str(key)


def _wrapper(value: Any) -> str | None:
    """Return the one entry of `WRAPPERS` that the names stand without, or None."""
    if not isinstance(value, Table) or any(isinstance(child, Tensor) for _, child in value.items):
        return None
    found = [key for key, child in value.items if key in WRAPPERS and isinstance(child, Table)]
    return found[0] if len(found) == 1 else None

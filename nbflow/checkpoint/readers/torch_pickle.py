"""Torch checkpoints, ``.bin``, ``.pt``, ``.pth``: tensor descriptions, read without running code.

===========  ==================================================================================
layout       content
===========  ==================================================================================
zip          since torch 1.6: a zip archive with one folder; ``data.pkl`` the pickle,
             ``data/KEY`` the bytes of storage KEY, ``byteorder`` ``little`` or ``big``
legacy       before, or ``_use_new_zipfile_serialization=False``: five pickles (a magic number,
             1001, the writer's sizes, the object, the keys of its storages in file order),
             then per storage an i64 count of elements and the bytes, little-endian
===========  ==================================================================================

A tensor in the pickle is a storage (a *persistent id*: element type, key, elements), an offset, a
shape and strides; tensors may share a storage, and a legacy storage may be part of another one.
`nbflow.checkpoint.readers.torch_unpickler` builds these descriptions and runs no code.

A tensor's name is its path through dicts and lists, joined by dots.  If the file is one dict
without tensors and with exactly one of the entries `WRAPPERS`, that entry's name is left out, as in
a state dict saved together with an optimizer.

Layout: https://github.com/pytorch/pytorch/blob/v2.6.0/torch/serialization.py
"""

from __future__ import annotations

import codecs
import io
import struct
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from nbflow.checkpoint.dtypes import ITEM_BYTES, tensor_bytes
from nbflow.checkpoint.readers.torch_unpickler import (
    MAX_OPCODES,
    Dict,
    Name,
    Pickles,
    Refused,
    Storage,
    Tensor,
    describe,
    is_count,
    load_pickle,
    unreadable,
)
from nbflow.checkpoint.shards import open_checkpoint
from nbflow.checkpoint.weight_file import TensorEntry, WeightFile
from nbflow.utils.binary_file import ByteFile
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

FORMAT = "pickle"
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "weights")

_ZIP_MAGIC, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_MAGIC = b"\x8a\x0a" + _MAGIC_NUMBER.to_bytes(10, "little")
_PROTOCOL = 1001
_MAX_DIRECTORY_BYTES = 1 << 24
_MAX_PICKLE_BYTES = 1 << 26
_MAX_LEGACY_BYTES = 1 << 24  # read whole to find the end of the pickles
_MAX_KEY = 256  # characters in the key of a storage; torch's are short numbers
_MAX_DEPTH = 64
_MAX_TENSORS = 1 << 16
_MAX_NAME = 4096
_MAX_NAME_CHARACTERS = 1 << 26  # of all names together

codecs.lookup("cp437")  # imported now: untrusted input must not trigger imports


def matches(path: Path, head: bytes) -> bool:
    """Return whether a file that begins with `head` is a zip archive or a legacy torch file."""
    body = head[11:] if head[2:3] == b"\x95" else head[2:]  # protocol 4 begins with a frame
    return head[:4] == _ZIP_MAGIC or (head[:1] == b"\x80" and body.startswith(_MAGIC))


def open_file(path: Path) -> WeightFile:
    """Open an index or one file; see `nbflow.checkpoint.open_weights`."""
    return open_checkpoint(path, FORMAT, _read_tensors)


def _read_tensors(file: ByteFile) -> list[TensorEntry]:
    """Return the tensors of one file of either layout."""
    read = _read_zip if file.read(0, 4) == _ZIP_MAGIC else _read_legacy
    try:
        value, offsets, order = read(file)
        tensors = _named(file, value)
    except Refused as problem:
        raise unreadable(file, "its pickle", problem) from problem
    entries = []
    for name, tensor in tensors.items():
        tensor_bytes(tensor.dtype, tensor.shape, f"{file.path}: tensor {shown(name)}")
        offset, strides = offsets[tensor.storage.key], None
        if 0 not in tensor.shape:  # offset and strides of an empty tensor mean nothing
            offset += tensor.storage.first + tensor.offset * ITEM_BYTES[tensor.dtype]
            strides = tensor.strides
        entries.append(TensorEntry(name, tensor.dtype, tensor.shape, file, offset, strides, order))
    return entries


def _read_zip(file: ByteFile) -> tuple[Any, dict[str, int], str]:
    """Return the value of ``data.pkl``, the offsets of its storages and their byte order."""
    members = _members(file)
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
    offsets: dict[str, int] = {}

    def storage(identity: Any) -> Storage:
        dtype, key, n_elements = _identity(identity, 5)
        if f"{root}/data/{key}" not in members:
            raise Refused(f"storage {shown(key)}, which is not in the archive")
        offsets[key], available = members[f"{root}/data/{key}"]
        n_bytes = n_elements * ITEM_BYTES[dtype or "u8"]
        if n_bytes > available:
            raise Refused(f"storage {shown(key)} of {n_bytes} bytes; the archive has {available}")
        return Storage(key, dtype, n_bytes)

    start, n_bytes = members[f"{root}/data.pkl"]
    stop = start + min(n_bytes, _MAX_PICKLE_BYTES)
    value = load_pickle(Pickles(file, start, stop), storage)
    return value, offsets, _byte_order(file, members.get(f"{root}/byteorder"))


def _byte_order(file: ByteFile, member: tuple[int, int] | None) -> str:
    """Return the byte order of the storages, as in `struct`."""
    text = b"little" if member is None else file.read(member[0], min(member[1], 16))
    if text not in (b"little", b"big"):
        raise UsageError(f"{file.path}: byteorder must be little or big, got {shown(text)}")
    return "<" if text == b"little" else ">"


class _BoundedReads(io.FileIO):
    """File that refuses to read a huge zip directory."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `_MAX_DIRECTORY_BYTES`."""
        if size is not None and size > _MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"its directory is longer than {_MAX_DIRECTORY_BYTES} bytes")
        return super().read(-1 if size is None else size)


def _members(file: ByteFile) -> dict[str, tuple[int, int]]:
    """Return offset and bytes of each member of a zip archive, which must be stored uncompressed.

    `zipfile` finds the members; their offsets are checked here, because tensors are read by byte
    range.
    """
    try:
        with _BoundedReads(file.fd, closefd=False) as stream, zipfile.ZipFile(stream) as archive:
            infos, directory = archive.infolist(), archive.start_dir
            end = file.size - 22 - len(archive.comment)
    except (zipfile.BadZipFile, NotImplementedError, OverflowError, OSError, struct.error) as error:
        raise _damaged(file, str(error)) from error
    except ValueError as error:  # a name that is not UTF-8, a seek before the start
        raise _damaged(file, str(error)) from error
    if file.read(end, 4) != _ZIP_END:
        raise _damaged(file, "something follows its end record")
    spans, members = [], {}
    for info in infos:
        name, where = info.orig_filename, f"its member {info.orig_filename!r:.120}"
        if info.flag_bits & 1 or info.compress_type or info.compress_size != info.file_size:
            raise UsageError(
                f"{file.path}: zip member {name!r:.120} is compressed or encrypted; torch writes "
                "members uncompressed: unpack the archive and zip it again with zip -0"
            )
        header = file.read(info.header_offset, 30) if info.header_offset >= 0 else b""
        if len(header) < 30 or header[:4] != _ZIP_MAGIC:
            raise _damaged(file, f"{where} is not at byte {info.header_offset}")
        n_name, n_extra = struct.unpack_from("<2H", header, 26)
        encoding = "utf-8" if info.flag_bits & 0x800 else "cp437"
        if file.read(info.header_offset + 30, n_name) != name.encode(encoding):
            raise _damaged(file, f"{where} has another name at byte {info.header_offset}")
        if name in members:
            raise _damaged(file, f"{where} occurs twice")
        start = info.header_offset + 30 + n_name + n_extra
        members[name] = start, info.file_size
        spans.append((info.header_offset, start + info.file_size, where))
    spans = [*sorted(spans), (directory, directory, "its directory")]
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if stop > start:
            raise _damaged(file, f"{first} ends at byte {stop}, but {second} begins at {start}")
    return members


def _damaged(file: ByteFile, reason: str) -> UsageError:
    return UsageError(f"{file.path}: the zip archive is truncated or damaged: {reason:.400}")


def _read_legacy(file: ByteFile) -> tuple[Any, dict[str, int], str]:
    """Return the object, the offsets of its storages and their byte order."""
    pickles = Pickles(file, 0, min(file.size, _MAX_LEGACY_BYTES))
    elements: dict[str, tuple[str, int]] = {}  # of the whole storages: type and count

    def storage(identity: Any) -> Storage:
        dtype, key, n_elements = _identity(identity, 6)
        if dtype is None:
            raise Refused(f"storage {shown(key)} without an element type")
        if elements.setdefault(key, (dtype, n_elements)) != (dtype, n_elements):
            raise Refused(f"storage {shown(key)} with two types or sizes")
        size, view = ITEM_BYTES[dtype], identity[5]
        if n_elements * size > file.size:
            raise Refused(f"storage {shown(key)} of {n_elements * size} bytes, more than the file")
        if view is None:
            return Storage(key, dtype, n_elements * size)
        if type(view) is not tuple or len(view) != 3 or not all(map(is_count, view[1:])):
            raise Refused(f"a part of a storage that is {describe(view)}")
        if view[1] + view[2] > n_elements:
            raise Refused(f"a part of storage {shown(key)} that is larger than the storage")
        return Storage(key, dtype, view[2] * size, view[1] * size)

    if load_pickle(pickles, storage) != _MAGIC_NUMBER or load_pickle(pickles, storage) != _PROTOCOL:
        raise UsageError(f"{file.path}: not a torch file: the magic number or protocol is wrong")
    sizes = load_pickle(pickles, storage)
    pairs = sizes.pairs if isinstance(sizes, Dict) else []
    if not any(tuple(pair) == ("little_endian", True) for pair in pairs):
        raise UsageError(f"{file.path}: a legacy torch file must be of a little-endian machine")
    value = load_pickle(pickles, storage)
    keys = load_pickle(pickles, storage)
    if type(keys) is not list or not all(isinstance(key, str) for key in keys):
        raise UsageError(f"{file.path}: the list of storages is {describe(keys)}")
    return value, _legacy_offsets(file, pickles.used, keys, elements), "<"


def _legacy_offsets(
    file: ByteFile, position: int, keys: list[str], elements: dict[str, tuple[str, int]]
) -> dict[str, int]:
    """Return the offsets of the storages, which follow the pickles at `position`."""
    offsets: dict[str, int] = {}
    for key in keys:
        if key not in elements or key in offsets:
            raise UsageError(
                f"{file.path}: the list of storages has {shown(key)}, which "
                f"{'occurs twice' if key in offsets else 'no tensor uses'}"
            )
        dtype, n_elements = elements[key]
        found = int.from_bytes(file.read(position, 8), "little")
        offsets[key] = position + 8
        n_bytes = n_elements * ITEM_BYTES[dtype]
        if found != n_elements or position + 8 + n_bytes > file.size:
            raise UsageError(
                f"{file.path}: storage {shown(key)} must have {n_elements} elements of {dtype} at "
                f"byte {position}, found a count of {found} and {file.size - position} bytes; the "
                "file is truncated or damaged"
            )
        position += 8 + n_bytes
    missing = elements.keys() - offsets.keys()
    if missing:
        raise UsageError(f"{file.path}: storage {shown(min(missing))} is not in the file")
    return offsets


def _identity(identity: Any, n_fields: int) -> tuple[str | None, str, int]:
    """Return element type, key and elements of ("storage", type, key, device, elements, ...)."""
    if type(identity) is not tuple or len(identity) != n_fields or identity[0] != "storage":
        raise Refused(f"a persistent id that is {describe(identity)} and not a storage")
    kind, key, n_elements = identity[1], identity[2], identity[4]
    if not isinstance(kind, Name) or not kind.storage:
        raise Refused(f"a storage of the type {describe(kind)}")
    if not isinstance(key, str) or len(key) > _MAX_KEY or not is_count(n_elements):
        raise Refused(f"a storage called {describe(key)} of {describe(n_elements)} elements")
    return kind.dtype, key, n_elements


def _named(file: ByteFile, root: Any) -> dict[str, Tensor]:
    """Return the tensors below a value by name, in the file's order.

    Dicts, lists and tuples may be shared or recursive: the steps are bounded, and values without
    tensors are searched once.
    """
    wrapper = _wrapper(root)
    tensors: dict[str, Tensor] = {}
    without: set[int] = set()
    n_steps = n_characters = 0

    def search(value: Any, path: tuple[str, ...]) -> None:
        nonlocal n_steps, n_characters
        if isinstance(value, Tensor):
            parts = path[1:] if path[:1] == (wrapper,) else path
            length = sum(map(len, parts))
            n_characters += length
            if length > _MAX_NAME or n_characters > _MAX_NAME_CHARACTERS:
                raise Refused(f"a tensor whose name is too long: {shown(parts[-1])}")
            name = ".".join(parts) or "tensor"
            if name in tensors:
                raise UsageError(f"{file.path}: two tensors have the name {shown(name)}")
            tensors[name] = value
            return
        n_before = len(tensors)
        for key, child in _children(value):
            n_steps += 1
            if n_steps > MAX_OPCODES or len(tensors) > _MAX_TENSORS or len(path) > _MAX_DEPTH:
                raise Refused(
                    f"values nested more than {_MAX_DEPTH} deep, or more than {_MAX_TENSORS} "
                    f"tensors or {MAX_OPCODES} values once every shared dict and list is copied"
                )
            if isinstance(child, (Tensor, Dict, list, tuple)) and id(child) not in without:
                search(child, (*path, _key(key)))
        if len(tensors) == n_before:
            without.add(id(value))

    search(root, ())
    return tensors


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield keys and values of a dict, list or tuple."""
    if isinstance(value, (list, tuple)):
        yield from enumerate(value)
    for pair in value.pairs if isinstance(value, Dict) else ():
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise Refused(f"an OrderedDict of {describe(pair)} instead of pairs")
        yield pair[0], pair[1]


def _key(key: Any) -> str:
    """Return a dict's key as part of a name."""
    if isinstance(key, bytes):
        return key[: _MAX_NAME + 1].decode("latin-1")  # longer ones are refused
    return key if isinstance(key, str) else "tuple" if isinstance(key, tuple) else str(key)


def _wrapper(value: Any) -> str | None:
    """Return the entry of `WRAPPERS` that names omit, or None."""
    if not isinstance(value, Dict):
        return None
    found = []
    for key, child in _children(value):
        if isinstance(child, Tensor):
            return None
        if key in WRAPPERS and isinstance(child, Dict):
            found.append(key)
    return found[0] if len(found) == 1 else None

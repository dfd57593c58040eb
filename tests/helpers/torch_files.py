"""Pickles and torch checkpoints made by hand, opcode by opcode, honest ones and others."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C


class Name:
    """A name that the pickle mentions, "module name"; calling it makes a `Call`."""

    def __init__(self, text: Any) -> None:
        self.module, self.name = str(text).split(" ")

    def __call__(self, *args: Any) -> Call:
        return Call(self, args)


class Call:
    """A REDUCE of a name."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args


class Persistent:
    """A BINPERSID."""

    def __init__(self, identity: Any) -> None:
        self.identity = identity


class Raw:
    """Opcodes as they are."""

    def __init__(self, data: bytes) -> None:
        self.data = data


class Opcodes:
    """Writes protocol 2."""

    def __init__(self) -> None:
        self.data = b""

    def value(self, value: Any) -> Opcodes:
        """Append the opcodes that push a value."""
        self.data += self._encode(value)
        return self

    def _encode(self, value: Any) -> bytes:
        encode = self._encode
        match value:
            case Raw():
                return value.data
            case Name():
                return f"c{value.module}\n{value.name}\n".encode()
            case Call():
                return encode(value.function) + encode(value.args) + b"R"
            case Persistent():
                return encode(value.identity) + b"Q"
            case bool():
                return b"\x88" if value else b"\x89"
            case None:
                return b"N"
            case int() if 0 <= value < 256:
                return b"K" + bytes([value])
            case int():
                data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
                return b"\x8a" + bytes([len(data)]) + data
            case float():
                return b"G" + struct.pack(">d", value)
            case str():
                return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
            case bytes():
                return b"C" + bytes([len(value)]) + value
            case tuple():
                return b"(" + b"".join(map(encode, value)) + b"t"
            case list():
                return b"](" + b"".join(map(encode, value)) + b"e"
            case dict():
                items = b"".join(encode(k) + encode(v) for k, v in value.items())
                return b"}(" + items + b"u"
        raise TypeError(f"no opcodes for {value!r}")


def pickled(value: Any) -> bytes:
    """Return one pickle."""
    return b"\x80\x02" + Opcodes().value(value).data + b"."


def write_zip(
    path: Path,
    value: Any,
    storages: dict[str, bytes],
    *,
    pickle: bytes | None = None,
    sparse: dict[str, int] | None = None,
) -> None:
    """Write a checkpoint in the zip layout; `sparse` makes storages longer by a hole."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        archive.writestr("x/data.pkl", pickled(value) if pickle is None else pickle)
        archive.writestr("x/byteorder", "little")
        for key, data in storages.items():
            if sparse is not None and key in sparse:
                _write_sparse(archive, f"x/data/{key}", data, sparse[key])
            else:
                archive.writestr(f"x/data/{key}", data)


def _write_sparse(archive: zipfile.ZipFile, name: str, data: bytes, n_bytes: int) -> None:
    """Add a member that is a hole after its first bytes."""
    info = zipfile.ZipInfo(name)
    info.header_offset = archive.fp.tell()
    info.CRC = 0
    info.file_size = info.compress_size = n_bytes
    header = info.FileHeader(zip64=n_bytes > 0xFFFFFFFF)
    archive.fp.write(header + data)
    archive.fp.truncate(info.header_offset + len(header) + n_bytes)
    archive.fp.seek(0, 2)
    archive.filelist.append(info)
    archive.NameToInfo[name] = info
    archive.start_dir = archive.fp.tell()
    archive._didModify = True


def write_legacy(
    path: Path, value: Any, storages: dict[str, bytes], elements: dict[str, int]
) -> None:
    """Write a checkpoint in the layout before torch 1.6."""
    sizes = {"protocol_version": 1001, "little_endian": True}
    data = b"".join(pickled(v) for v in (MAGIC_NUMBER, 1001, sizes, value, list(storages)))
    for key, content in storages.items():
        data += struct.pack("<q", elements[key]) + content
    path.write_bytes(data)

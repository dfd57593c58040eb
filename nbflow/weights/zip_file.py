r"""The table of a zip archive whose members are stored as they are, as torch writes it.

===============  ====================================================================
record           fields that count (little-endian)
===============  ====================================================================
member           at the place the directory says: ``PK\3\4``, 22 bytes, u16 length of
                 the name, u16 length of the extra field, name, extra, data
directory entry  ``PK\1\2``, u16 flags at 8, u16 method at 10, u32 stored size at 20,
                 u32 size at 24, u16 lengths of name, extra, comment at 28, u32 place
                 at 42, name, extra, comment
end              ``PK\5\6``, u16 disks at 4 and 6, u16 entries at 8 and 10, u32 size of
                 the directory at 12, u32 its place at 16, u16 length of comment at 20
zip64 locator    20 bytes before the end: ``PK\6\7``, u64 place of the zip64 end at 8
zip64 end        ``PK\6\6``, u64 entries at 32, u64 directory size at 40, place at 48
zip64 extra      id 1: u64 size, stored size, place, each only if its field is all ones
===============  ====================================================================

Nothing is decompressed: a compressed member is refused, so there is nothing to blow up.  The places
of members are checked against the file and against each other before anything else is read.

Layout: APPNOTE.TXT 6.3.10, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

from nbflow.weights.byte_file import ByteFile
from nbflow_kernels.errors import UsageError

MAGIC = b"PK\x03\x04"

_MAX_DIRECTORY_BYTES = 1 << 26
_MAX_MEMBERS = 1 << 20
_END, _END_BYTES = b"PK\x05\x06", 22
_END64, _END64_BYTES = b"PK\x06\x06", 56
_LOCATOR, _LOCATOR_BYTES = b"PK\x06\x07", 20
_ENTRY, _ENTRY_BYTES = b"PK\x01\x02", 46
_LOCAL_BYTES = 30
_ENCRYPTED = 1  # flag


@dataclass(frozen=True)
class Member:
    """Where one member's data lie."""

    name: str
    """Name in the archive."""
    offset: int
    """First byte of its data in the file."""
    n_bytes: int
    """Bytes of data."""


def read_directory(file: ByteFile) -> dict[str, Member]:
    """Return the members of a zip archive by name.

    Raises
    ------
    UsageError
        If the archive is damaged, has a member that is compressed, encrypted, there twice or over
        another one, or has more than a million members.
    """
    n_members, size, start = _find_directory(file)
    if n_members * _ENTRY_BYTES > size or n_members > _MAX_MEMBERS or size > _MAX_DIRECTORY_BYTES:
        raise UsageError(
            f"{file.path}: the zip directory says it has {n_members} members in {size} bytes, "
            "which cannot be; the file is damaged"
        )
    data = file.read(start, size)
    members: dict[str, Member] = {}
    spans = []
    position = 0
    for i in range(n_members):
        name, offset, n_bytes, position = _read_entry(file, data, position, i)
        if name in members:
            raise UsageError(f"{file.path}: zip member {name!r:.120} is there twice")
        members[name] = Member(name, _data_offset(file, name, offset, n_bytes, start), n_bytes)
        spans.append((offset, members[name].offset + n_bytes, name))
    spans.sort()
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise UsageError(f"{file.path}: zip members {first!r:.120} and {second!r:.120} overlap")
    return members


def _find_directory(file: ByteFile) -> tuple[int, int, int]:
    """Return entries, bytes and place of the directory."""
    tail_start = max(0, file.size - _END_BYTES - 0xFFFF)
    tail = file.read(tail_start, file.size - tail_start)
    at = tail.rfind(_END)
    while at >= 0 and not _ends_file(tail, at):
        at = tail.rfind(_END, 0, at + 3) if at else -1
    if at < 0:
        raise UsageError(
            f"{file.path}: the zip archive has no end record; it is truncated or damaged"
        )
    disk, directory_disk, here, n_members = struct.unpack_from("<4H", tail, at + 4)
    size, start = struct.unpack_from("<2I", tail, at + 12)
    end = tail_start + at
    locator = file.read(end - _LOCATOR_BYTES, _LOCATOR_BYTES) if end >= _LOCATOR_BYTES else b""
    if locator[:4] == _LOCATOR:
        end = struct.unpack_from("<Q", locator, 8)[0]
        record = file.read(end, _END64_BYTES) if end < file.size else b""
        if len(record) < _END64_BYTES or record[:4] != _END64:
            raise UsageError(f"{file.path}: the zip64 end record is not where it must be")
        disk, directory_disk = struct.unpack_from("<2I", record, 16)
        here, n_members, size, start = struct.unpack_from("<4Q", record, 24)
    if disk or directory_disk or here != n_members:
        raise UsageError(f"{file.path}: the zip archive is one of several parts")
    if start + size > end:
        raise UsageError(
            f"{file.path}: the zip directory of {size} bytes at {start} must end before its end "
            f"record at {end}; the file is damaged"
        )
    return n_members, size, start


def _ends_file(tail: bytes, at: int) -> bool:
    """Return whether the end record at `at` and its comment reach exactly to the end."""
    n_left = len(tail) - at - _END_BYTES
    return n_left >= 0 and bool(struct.unpack_from("<H", tail, at + 20)[0] == n_left)


def _read_entry(file: ByteFile, data: bytes, position: int, i: int) -> tuple[str, int, int, int]:
    """Return name, place and size of directory entry `i`, and where the next one begins."""
    entry = data[position : position + _ENTRY_BYTES]
    if len(entry) < _ENTRY_BYTES or entry[:4] != _ENTRY:
        raise UsageError(f"{file.path}: entry {i} of the zip directory is damaged")
    flags, method = struct.unpack_from("<2H", entry, 8)
    stored, size, n_name, n_extra, n_comment, disk = struct.unpack_from("<2I4H", entry, 20)
    offset = struct.unpack_from("<I", entry, 42)[0]
    end = position + _ENTRY_BYTES + n_name + n_extra + n_comment
    if end > len(data):
        raise UsageError(f"{file.path}: entry {i} of the zip directory is cut off")
    begin = position + _ENTRY_BYTES
    name = data[begin : begin + n_name].decode("utf-8", errors="surrogateescape")
    extra = data[begin + n_name : begin + n_name + n_extra]
    size, stored, offset = _zip64(file, name, extra, [size, stored, offset])
    if flags & _ENCRYPTED or method != 0 or size != stored or disk not in (0, 0xFFFF):
        how = "encrypted" if flags & _ENCRYPTED else f"not stored as it is (method {method})"
        raise UsageError(
            f"{file.path}: zip member {name!r:.120} is {how}; torch writes members uncompressed: "
            "unpack the archive and zip it again with zip -0"
        )
    return name, offset, size, end


def _zip64(file: ByteFile, name: str, extra: bytes, numbers: list[int]) -> list[int]:
    """Return the numbers (size, stored size, place), those of all ones from the zip64 field."""
    position = 0
    while position + 4 <= len(extra):
        kind, n_bytes = struct.unpack_from("<2H", extra, position)
        field = extra[position + 4 : position + 4 + n_bytes]
        if kind == 1:
            wide = [number == 0xFFFFFFFF for number in numbers]
            if len(field) < 8 * sum(wide):
                raise UsageError(f"{file.path}: zip member {name!r:.120} has a short zip64 field")
            values = iter(struct.unpack_from(f"<{sum(wide)}Q", field))
            return [next(values) if w else n for n, w in zip(numbers, wide, strict=True)]
        position += 4 + n_bytes
    return numbers


def _data_offset(file: ByteFile, name: str, offset: int, n_bytes: int, stop: int) -> int:
    """Return the first byte of a member's data; its own header must agree with the directory."""
    header = file.read(offset, _LOCAL_BYTES) if offset + _LOCAL_BYTES <= stop else b""
    if header[:4] != MAGIC:
        raise UsageError(f"{file.path}: zip member {name!r:.120} is not at byte {offset}")
    n_name, n_extra = struct.unpack_from("<2H", header, 26)
    local = file.read(offset + _LOCAL_BYTES, n_name).decode("utf-8", errors="surrogateescape")
    start: int = offset + _LOCAL_BYTES + n_name + n_extra
    if local != name:
        raise UsageError(
            f"{file.path}: zip member {name!r:.120} is called {local!r:.120} at byte {offset}"
        )
    if start + n_bytes > stop:
        raise UsageError(
            f"{file.path}: zip member {name!r:.120} needs {n_bytes} bytes at {start}, but the "
            f"directory begins at {stop}; the file is truncated or damaged"
        )
    return start

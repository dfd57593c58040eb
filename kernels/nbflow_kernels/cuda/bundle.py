"""Bundles: one compressed file with the machine code of many kernels, for a device elsewhere.

A kernel is found by the digest of its source, options and target; the versions of the compilers are
recorded, but need not be those of the machine that reads the file.  `write` makes a bundle,
`use` or the environment variable NBFLOW_CUDA_BUNDLE names one, `find` reads a kernel.

==============  =========================================================================
field           content
==============  =========================================================================
magic           ``nbflow cuda bundle 1`` and a line feed
length          u64, of the index
digest          SHA-256 of the index
index           JSON, deflated: ``target``, ``compilers``, ``groups``, ``kernels``
groups          kernels one after the other, compressed together by LZMA
==============  =========================================================================

Every number of a file is checked against its size and the limits below before it is used.  The
machine code itself is run: use bundles of people whose programs you would run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import lzma
import os
import struct
import tempfile
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nbflow_kernels.errors import UsageError

VARIABLE = "NBFLOW_CUDA_BUNDLE"
MAGIC = b"nbflow cuda bundle 1\n"
GROUP_BYTES = 4 << 20
"""Bytes of kernels that are compressed together, unless one kernel is larger."""
MAX_FILE_BYTES = 1 << 30
MAX_INDEX_BYTES = 64 << 20
MAX_GROUP_BYTES = 64 << 20
MAX_KERNELS = 100_000
_HEAD = struct.Struct("<Q32s")
_LZMA_MEMORY = 128 << 20
_GROUPS_KEPT = 8


@dataclass(frozen=True)
class BundledKernel:
    """Machine code of a kernel for `write`."""

    key: str
    """Digest of source, options and target; see `nbflow_kernels.cuda.cache`."""
    name: str
    """The kernel's name, by which similar kernels are compressed together."""
    entry: str
    """Name of the function in the code."""
    compiler: str
    """Versions of the compilers."""
    code: bytes


@dataclass(frozen=True)
class _Place:
    """Position of a kernel: its group, and the bytes in it."""

    group: int
    start: int
    stop: int
    entry: str


class Bundle:
    """A bundle opened for reading.

    Parameters
    ----------
    path : str or path
        The file.

    Raises
    ------
    UsageError
        If the file is missing, damaged or no bundle.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                index, start, size = _read_index(file)
            self._groups = _groups(index, start, size)
            self._kernels = _kernels(index, [group[2] for group in self._groups])
            self.target = _text(index["target"])
            self.compilers = tuple(_text(name) for name in index["compilers"])
        except OSError as error:
            raise UsageError(
                f"the bundle of CUDA kernels {self.path} cannot be read ({error.strerror}); "
                f"{VARIABLE} or use_bundle names it"
            ) from error
        except (ValueError, KeyError, TypeError, zlib.error, RecursionError) as error:
            raise self._damaged(error) from error
        self._group = functools.lru_cache(_GROUPS_KEPT)(self._read_group)

    def __len__(self) -> int:
        return len(self._kernels)

    def find(self, key: str) -> tuple[bytes, str] | None:
        """Return code and entry name of a kernel; None if the bundle does not have it."""
        place = self._kernels.get(key)
        if place is None:
            return None
        try:
            group = self._group(place.group)
        except (OSError, ValueError, lzma.LZMAError) as error:
            raise self._damaged(error) from error
        return group[place.start : place.stop], place.entry

    def _read_group(self, number: int) -> bytes:
        start, packed, size, digest = self._groups[number]
        with self.path.open("rb") as file:
            file.seek(start)
            data = file.read(packed)
        unpack = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_LZMA_MEMORY)
        found = unpack.decompress(data, max_length=size + 1)
        if len(found) != size or hashlib.sha256(found).hexdigest() != digest:
            raise ValueError(f"group {number} differs from its digest")
        return found

    def _damaged(self, error: BaseException) -> UsageError:
        return UsageError(
            f"{self.path} is not a whole bundle of CUDA kernels ({error}); write it again with "
            f"nbflow_kernels.testing.cuda_compile_all --bundle, or unset {VARIABLE}"
        )


def _read_index(file: BinaryIO) -> tuple[dict[str, Any], int, int]:
    """Return the index, where the groups start, and the size of the file."""
    size = os.fstat(file.fileno()).st_size
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("it begins differently")
    head = file.read(_HEAD.size)
    if len(head) != _HEAD.size or size > MAX_FILE_BYTES:
        raise ValueError(f"it has {size} bytes")
    n_bytes, digest = _HEAD.unpack(head)
    start = len(MAGIC) + _HEAD.size + n_bytes
    if n_bytes > MAX_INDEX_BYTES or start > size:
        raise ValueError(f"an index of {n_bytes} bytes in a file of {size}")
    packed = file.read(n_bytes)
    if hashlib.sha256(packed).digest() != digest:
        raise ValueError("the index differs from its digest")
    unpack = zlib.decompressobj()
    text = unpack.decompress(packed, MAX_INDEX_BYTES)
    if unpack.unconsumed_tail:
        raise ValueError(f"the index has more than {MAX_INDEX_BYTES} bytes")
    index = json.loads(text)
    if not isinstance(index, dict):
        raise ValueError("the index is not a table")
    return index, start, size


def _groups(index: Mapping[str, Any], start: int, size: int) -> list[tuple[int, int, int, str]]:
    """Return start, compressed bytes, bytes and digest of each group."""
    groups = []
    for packed, n_bytes, digest in index["groups"]:
        packed, n_bytes = _count(packed, size), _count(n_bytes, MAX_GROUP_BYTES)
        groups.append((start, packed, n_bytes, _text(digest)))
        start += packed
    if start != size:
        raise ValueError(f"its groups end at byte {start} of {size}")
    return groups


def _kernels(index: Mapping[str, Any], sizes: list[int]) -> dict[str, _Place]:
    """Return the place of each kernel by its key."""
    listed = index["kernels"]
    if not isinstance(listed, dict) or len(listed) > MAX_KERNELS:
        raise ValueError(f"the index must be a table of at most {MAX_KERNELS} kernels")
    found = {}
    for key, (group, start, n_bytes, entry, _) in listed.items():
        group = _count(group, len(sizes) - 1)
        start = _count(start, sizes[group])
        stop = start + _count(n_bytes, sizes[group] - start)
        found[key] = _Place(group, start, stop, _text(entry))
    return found


def _count(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"a number must be 0..{most}, got {value!r:.40}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 10_000:
        raise ValueError(f"a name is wanted, got {value!r:.40}")
    return value


def write(path: str | os.PathLike[str], target: str, kernels: Iterable[BundledKernel]) -> int:
    """Write a bundle, replacing an old file at once; return its size in bytes."""
    ordered = sorted(kernels, key=lambda kernel: (kernel.name, kernel.entry, kernel.key))
    compilers = sorted({kernel.compiler for kernel in ordered})
    index: dict[str, Any] = {"target": target, "compilers": compilers, "groups": [], "kernels": {}}
    parts: list[bytes] = []
    for group in _grouped(ordered):
        start = 0
        for kernel in group:
            place = [len(parts), start, len(kernel.code), kernel.entry]
            index["kernels"][kernel.key] = [*place, compilers.index(kernel.compiler)]
            start += len(kernel.code)
        whole = b"".join(kernel.code for kernel in group)
        parts.append(lzma.compress(whole, lzma.FORMAT_XZ, preset=6))
        digest = hashlib.sha256(whole).hexdigest()
        index["groups"].append([len(parts[-1]), len(whole), digest])
    packed = zlib.compress(json.dumps(index).encode(), 9)
    head = MAGIC + _HEAD.pack(len(packed), hashlib.sha256(packed).digest())
    return _replace(Path(path), [head, packed, *parts])


def _grouped(kernels: list[BundledKernel]) -> list[list[BundledKernel]]:
    """Return consecutive kernels of `GROUP_BYTES` together."""
    groups: list[list[BundledKernel]] = []
    left = 0
    for kernel in kernels:
        if len(kernel.code) > left:
            groups.append([])
            left = max(GROUP_BYTES, len(kernel.code))
        groups[-1].append(kernel)
        left -= len(kernel.code)
    return groups


def _replace(path: Path, parts: list[bytes]) -> int:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return sum(map(len, parts))


_chosen: str | os.PathLike[str] | None = None
_opened: dict[str, Bundle] = {}
_lock = threading.Lock()


def use(path: str | os.PathLike[str] | None) -> None:
    """Look for kernels in a bundle; None: in the one that the environment names, if any."""
    global _chosen
    _chosen = path


def is_named() -> bool:
    """Return whether `use` or the environment names a bundle."""
    return bool(_chosen or os.environ.get(VARIABLE, ""))


def current() -> Bundle | None:
    """Return the bundle in use, or None.

    Raises
    ------
    UsageError
        If the file is missing, damaged or no bundle.
    """
    name = str(_chosen or os.environ.get(VARIABLE, ""))
    if not name:
        return None
    with _lock:
        if name not in _opened:
            _opened[name] = Bundle(name)
        return _opened[name]


def find(key: str) -> tuple[bytes, str] | None:
    """Return code and entry name of a kernel in the bundle in use; None if it has none."""
    bundle = current()
    return None if bundle is None else bundle.find(key)

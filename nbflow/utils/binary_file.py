"""Bounded reads of untrusted files: whole, by position, or as a sequence of numbers and strings."""

from __future__ import annotations

import os
import stat
import struct
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from nbflow_kernels.errors import UsageError

_MAX_READ_BYTES = 1 << 30  # Linux moves at most 2 GiB - 4 KiB in one call
_CHUNK_BYTES = 1 << 16
_MAX_STRING_BYTES = 1 << 26  # far above every chat template


class ByteFile:
    """A regular file opened for positioned reads; several threads may read at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1
        """File descriptor, -1 once closed; its own position is not used here."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"{path}: cannot be opened: {error.strerror}") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise UsageError(f"{path}: must be a regular file")
        self.fd = fd
        self.size = status.st_size
        """Bytes in the file when it was opened."""

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Return up to `n_bytes` bytes at `offset`, fewer only at the end of the file."""
        data = bytearray(max(0, min(n_bytes, self.size - offset)))
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes, contiguous) with the file's bytes from `offset` on."""
        if self.fd < 0:
            raise UsageError(f"{self.path}: the weight file is closed")
        done = 0
        while done < len(target):
            try:
                n = os.preadv(self.fd, [target[done : done + _MAX_READ_BYTES]], offset + done)
            except OSError as error:
                raise UsageError(f"{self.path}: cannot be read: {error.strerror}") from error
            if n == 0:
                raise UsageError(
                    f"{self.path}: ended at byte {offset + done}, but it had {self.size} bytes "
                    "when it was opened; something changes the file"
                )
            done += n

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def read_head(path: Path, n_bytes: int) -> bytes:
    """Return the first bytes of a file."""
    with closing(ByteFile(path)) as file:
        return file.read(0, n_bytes)


def read_file(path: Path, max_bytes: int, kind: str) -> bytes:
    """Return the content of a file, or raise `UsageError` if it is longer than `max_bytes`.

    `kind` names such files in the message, e.g. "a vocabulary".
    """
    with closing(ByteFile(path)) as file:
        if file.size > max_bytes:
            raise UsageError(f"{path}: {kind} may have at most {max_bytes} bytes, got {file.size}")
        return file.read(0, file.size)


def read_text(path: Path, max_bytes: int, kind: str) -> str:
    """Return the content of a UTF-8 file; see `read_file`."""
    try:
        return read_file(path, max_bytes, kind).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: {error}") from error


class ByteCursor:
    """Sequential reader; every length is checked against the end before memory is allocated."""

    def __init__(self, file: ByteFile) -> None:
        self.file = file
        self.position = 0
        """Next byte, counted from the beginning of the file."""
        self.stop = file.size
        self.order = "<"
        """Byte order of the numbers, as in `struct`."""
        self._begin = 0  # offset of the buffer in the file
        self._buffer = b""

    @property
    def left(self) -> int:
        """Bytes between the position and the end."""
        return self.stop - self.position

    def take(self, n_bytes: int, what: str) -> bytes:
        """Return the next `n_bytes` bytes; `what` names them in the error message."""
        if n_bytes < 0:
            raise UsageError(
                f"{self.file.path}: {what} at byte {self.position} states {n_bytes} bytes; it is "
                "damaged"
            )
        begin = self.position - self._begin
        if begin + n_bytes > len(self._buffer):
            if n_bytes > self.left:
                raise UsageError(
                    f"{self.file.path}: {what} at byte {self.position} needs {n_bytes} bytes, but "
                    f"the file ends at {self.stop}; it is truncated or damaged"
                )
            n_wanted = min(max(n_bytes, _CHUNK_BYTES), self.left)
            self._buffer = self.file.read(self.position, n_wanted)
            self._begin, begin = self.position, 0
        self.position += n_bytes
        return self._buffer[begin : begin + n_bytes]

    def number(self, code: str, what: str) -> Any:
        """Return the next number of a type of `struct`."""
        return struct.unpack(self.order + code, self.take(struct.calcsize("=" + code), what))[0]

    def numbers(self, code: str, count: int, what: str) -> list[Any]:
        """Return the next `count` numbers of a type of `struct`."""
        n_bytes = count * struct.calcsize("=" + code)
        return list(struct.unpack(f"{self.order}{count}{code}", self.take(n_bytes, what)))

    def text(self, length: str, what: str, limit: int = _MAX_STRING_BYTES) -> str:
        """Return the next string, its length before it as a number of `struct`.

        Bytes that are not UTF-8 (parts of characters in a vocabulary) become surrogates.
        """
        n_bytes = self.number(length, what)
        if n_bytes > limit and n_bytes <= self.left:
            raise UsageError(
                f"{self.file.path}: {what} at byte {self.position} has {n_bytes} bytes; at most "
                f"{limit} are allowed"
            )
        return self.take(n_bytes, what).decode("utf-8", errors="surrogateescape")

    def texts(self, length: str, count: int, what: str) -> list[str]:
        """Return the next `count` strings; see `text`."""
        size = struct.calcsize("=" + length)
        order: Literal["little", "big"] = "little" if self.order == "<" else "big"
        found = []
        for _ in range(count):
            begin = self.position - self._begin
            start = begin + size
            end = start + int.from_bytes(self._buffer[begin:start], order)
            if start <= len(self._buffer) and end <= len(self._buffer):  # at hand: no call
                found.append(self._buffer[start:end].decode("utf-8", errors="surrogateescape"))
                self.position += end - begin
            else:
                found.append(self.text(length, what))
        return found

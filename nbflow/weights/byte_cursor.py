"""Numbers, strings and lines read one after the other from a file, never past its end."""

from __future__ import annotations

import struct
from typing import Any, Literal

from nbflow.weights.byte_file import ByteFile
from nbflow_kernels.errors import UsageError

_CHUNK_BYTES = 1 << 16
_MAX_STRING_BYTES = 1 << 26  # far above every chat template


class ByteCursor:
    """A position in a file; every read is checked against the end before memory is taken.

    Parameters
    ----------
    file : ByteFile
        The file.
    start, stop : int, optional
        The bytes that belong to what is read; the whole file by default.
    order : {"<", ">"}
        Byte order of the numbers, as in `struct`.
    """

    def __init__(
        self, file: ByteFile, start: int = 0, stop: int | None = None, order: str = "<"
    ) -> None:
        self.file = file
        self.position = start
        """Next byte, counted from the beginning of the file."""
        self.stop = file.size if stop is None else stop
        """First byte that is not to be read."""
        self.order = order
        """Byte order of the numbers."""
        self._begin = start  # place of the buffer in the file
        self._buffer = b""

    @property
    def left(self) -> int:
        """Return how many bytes there are between here and the end."""
        return self.stop - self.position

    def take(self, n_bytes: int, what: str) -> bytes:
        """Return the next `n_bytes` bytes; `what` names them in the error message."""
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

        Bytes that are not UTF-8 (pieces of characters in a vocabulary) become surrogates.
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

    def line(self, limit: int, what: str) -> bytes:
        """Return the bytes up to the next line feed, without it."""
        data = self.file.read(self.position, min(limit + 1, self.left))
        end = data.find(b"\n")
        if end < 0:
            raise UsageError(
                f"{self.file.path}: {what} at byte {self.position} has no end within {limit} bytes"
            )
        self.position += end + 1
        return data[:end]

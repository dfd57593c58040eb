"""A file read by position, with every failure named after the file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nbflow_kernels.errors import UsageError

_MAX_READ_BYTES = 1 << 30  # Linux moves at most 2 GiB - 4 KiB in one call


class ByteFile:
    """A regular file opened for positioned reads; several threads may read at once.

    Parameters
    ----------
    path : Path
        The file.

    Raises
    ------
    UsageError
        If it does not exist, cannot be read or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"{path}: cannot be opened: {error.strerror}") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise UsageError(f"{path}: must be a regular file")
        self._fd = fd
        self.size = status.st_size
        """Bytes in the file when it was opened."""

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Return up to `n_bytes` bytes at `offset`, fewer only at the end of the file."""
        data = bytearray(max(0, min(n_bytes, self.size - offset)))
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes, contiguous) with the file's bytes from `offset` on."""
        if self._fd < 0:
            raise UsageError(f"{self.path}: the weight file is closed")
        done = 0
        while done < len(target):
            try:
                n = os.preadv(self._fd, [target[done : done + _MAX_READ_BYTES]], offset + done)
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
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

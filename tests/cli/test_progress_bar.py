"""The progress bar of loading."""

from __future__ import annotations

import io
import time

from nbflow.cli.progress_bar import load_progress_bar
from nbflow.utils.load_progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _load(stream: io.StringIO) -> None:
    with load_progress_bar(stream), progress.reading(2_000_000_000, lambda: 500_000_000):
        deadline = time.monotonic() + 10
        while stream.isatty() and "GB/s" not in stream.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_bytes_and_rate_on_a_terminal() -> None:
    stream = Terminal()
    _load(stream)
    assert "25% 0.50 of 2.00 GB, " in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_nothing_in_a_file() -> None:
    stream = io.StringIO()
    _load(stream)
    assert stream.getvalue() == ""

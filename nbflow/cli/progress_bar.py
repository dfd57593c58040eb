"""Progress bar of loading: bytes and rate, on terminals only."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from nbflow.utils.load_progress import progress

_PERIOD_S = 0.1
_WIDTH = 24
_CLEAR = "\r\x1b[K"


def bar_line(n_read: int, total: int, seconds: float) -> str:
    """Return the bar after some seconds.

    Examples
    --------
    >>> bar_line(1_100_000_000, 2_200_000_000, 0.5)
    'loading [############            ] 50% 1.10 of 2.20 GB, 2.20 GB/s'
    """
    share = n_read / total if total else 0.0
    bar = "#" * int(_WIDTH * share)
    rate = n_read / 1e9 / max(seconds, 1e-9)
    amount = f"{n_read / 1e9:.2f} of {total / 1e9:.2f} GB, {rate:.2f} GB/s"
    return f"loading [{bar:{_WIDTH}}] {share:.0%} {amount}"


@contextlib.contextmanager
def load_progress_bar(stream: TextIO | None = None) -> Iterator[None]:
    """Show the progress of loading on a terminal (standard error by default) within the block."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield
        return
    done = threading.Event()
    progress.reset()

    def draw() -> None:
        started, shown = 0.0, False
        while not done.wait(_PERIOD_S):
            n_read, total = progress.bytes()
            if not total:
                continue
            started = started or time.perf_counter() - _PERIOD_S
            line = bar_line(n_read, total, time.perf_counter() - started)
            stream.write(_CLEAR + line)
            stream.flush()
            shown = True
        if shown:
            stream.write(_CLEAR)
            stream.flush()

    thread = threading.Thread(target=draw, daemon=True, name="nbflow-load-progress")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()

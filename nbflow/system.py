"""What the process uses of its machine."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path


def peak_rss_bytes() -> int:
    """Return the most memory the process has held since `reset_peak_rss`, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    scale = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def reset_peak_rss() -> None:
    """Begin to measure the peak anew (Linux; elsewhere the peak is that of the whole process)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")

"""Run a command under mpirun and return its output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SOURCES = [ROOT, *(ROOT / name for name in ("kernels", "specs", "experiments"))]
"""Source roots, for processes that tests start."""
PYTHONPATH = os.pathsep.join(map(str, SOURCES))
MPIRUN = next((str(p) for p in [BIN / "mpirun"] if p.exists()), shutil.which("mpirun"))


def mpirun(
    n: int, *command: str, timeout: int = 300, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on `n` ranks."""
    paths = [PYTHONPATH, os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [str(MPIRUN), "-n", str(n), sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
    )

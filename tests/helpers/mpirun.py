"""Run Python in a process, or under mpirun, and return its output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SOURCES = [ROOT, *(ROOT / name for name in ("kernels", "specs", "experiments"))]
"""Source roots, for processes that tests start."""
PYTHONPATH = os.pathsep.join(map(str, SOURCES))
MPIRUN = next((str(p) for p in [BIN / "mpirun"] if p.exists()), shutil.which("mpirun"))


def python(*arguments: object, paths: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; it imports from `paths`, too."""
    found = [*map(str, paths), PYTHONPATH, os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(found)},
    )


def mpirun(
    n: int,
    *command: str,
    timeout: int = 300,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on `n` ranks."""
    paths = [PYTHONPATH, os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [str(MPIRUN), "-n", str(n), sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
    )

"""The cache of compiled kernels notices edits in whatever a kernel is made of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbflow_kernels
from nbflow_kernels import _jit

ROOT = Path(nbflow_kernels.__path__[0])


def test_digest_follows_imports() -> None:
    sources = {
        file.relative_to(ROOT).as_posix() for file in _jit._source(ROOT / "qmatmul" / "cpu.py")[1]
    }
    assert {"qmatmul/int8.py", "threads.py"} <= sources
    assert "norm/cpu.py" not in sources


def _result(folder: Path, cache: Path) -> tuple[str, int]:
    """Return what the kernel prints in a new process, and how many files the cache holds."""
    environment = os.environ | {
        "PYTHONPATH": f"{folder}:{ROOT.parent}",
        "NUMBA_CACHE_DIR": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-c", "import kernel; print(kernel.twice(10))"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip(), sum(1 for f in cache.rglob("*.nbc"))


def test_kernels_outside_of_the_package_are_cached(tmp_path: Path) -> None:
    code = "from nbflow_kernels._jit import njit\n\n@njit\ndef twice(x):\n    return {} * x\n"
    (tmp_path / "kernel.py").write_text(code.format(2))
    cache = tmp_path / "cache"
    assert _result(tmp_path, cache) == ("20", 1)
    assert _result(tmp_path, cache) == ("20", 1)
    (tmp_path / "kernel.py").write_text(code.format(3))
    assert _result(tmp_path, cache) == ("30", 2)


def test_digest_changes_with_an_inlined_function(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    package = tmp_path / "nbflow_kernels"
    (package / "family").mkdir(parents=True)
    (package / "family" / "cpu.py").write_text(
        "from nbflow_kernels.family import (\n    one,  # a, comment\n    two as three,\n)\n"
    )
    for name in ("one", "two"):
        (package / "family" / f"{name}.py").write_text("import nbflow_kernels.deep\n")
    (package / "deep.py").write_text("VALUE = 1\n")
    monkeypatch.setattr(_jit, "_ROOT", package)
    digests = set()
    for value in (1, 2, 1):
        (package / "deep.py").write_text(f"VALUE = {value}\n")
        _jit._source.cache_clear()
        _jit.source_digest.cache_clear()
        digests.add(_jit.source_digest(package / "family" / "cpu.py"))
    assert len(digests) == 2
    _jit._source.cache_clear()
    _jit.source_digest.cache_clear()

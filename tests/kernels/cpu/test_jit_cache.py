"""The cache of compiled kernels notices edits in whatever a kernel is made of."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest

import nbflow_kernels
from nbflow_kernels.compilation import jit_cache
from nbflow_kernels.cpu import jit

ROOT = Path(nbflow_kernels.__path__[0])


def test_digest_follows_imports() -> None:
    sources = {
        file.relative_to(ROOT).as_posix()
        for file in jit_cache._source(ROOT / "quantized_matmul" / "cpu.py")[1]
    }
    assert {"quantized_matmul/cpu_gemv_int8.py", "cpu/parallel_for.py"} <= sources
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
    code = "from nbflow_kernels.cpu import jit\n\n@jit.kernel\ndef twice(x):\n    return {} * x\n"
    (tmp_path / "kernel.py").write_text(code.format(2))
    cache = tmp_path / "cache"
    assert _result(tmp_path, cache) == ("20", 1)
    assert len(list(cache.rglob("*.nbe"))) == 1  # the entry point for Python
    assert _result(tmp_path, cache) == ("20", 1)
    (tmp_path / "kernel.py").write_text(code.format(3))
    assert _result(tmp_path, cache) == ("30", 2)


def test_device_functions_are_in_the_cached_code_of_their_kernel(tmp_path: Path) -> None:
    code = """
from nbflow_kernels.cpu import jit

@jit.device_function(inline="llvm")
def half(x):
    return x // 2

@jit.device_function
def around(x):
    return half(x) + half(x + 1)

@jit.kernel
def twice(x):
    return around(x) + around(x)
"""
    (tmp_path / "kernel.py").write_text(code)
    assert _result(tmp_path, tmp_path / "cache") == ("20", 1)
    assert _result(tmp_path, tmp_path / "cache") == ("20", 1)


def test_device_functions_may_raise_and_serve_several_kernels() -> None:
    @jit.device_function
    def root(x):  # type: ignore[no-untyped-def]
        if x < 0.0:
            raise ValueError("negative")
        return x**0.5

    for factor in (1.0, 2.0):
        kernel = numba.njit(lambda x, factor=factor: factor * root(x))
        assert kernel(9.0) == 3.0 * factor
        with pytest.raises(ValueError, match="negative"):
            kernel(-1.0)


@pytest.mark.parametrize("decorate", [jit.kernel, jit.device_function])
@pytest.mark.parametrize("was_on", [True, False])
def test_collector_is_as_before_after_compiling(was_on: bool, decorate: Any) -> None:
    seen, look = _looks_at_collector()
    inner = decorate(lambda: look())
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(numba.core.errors.TypingError):
            jit.kernel(lambda: inner() + "no number")()
        assert not any(seen)
        assert seen
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()


def _looks_at_collector() -> tuple[list[bool], Any]:
    seen: list[bool] = []

    @numba.extending.intrinsic
    def look(typing_context):  # type: ignore[no-untyped-def]
        seen.append(gc.isenabled())
        return numba.types.int64(), lambda *_: numba.core.cgutils.intp_t(1)

    return seen, look


def test_collector_goes_on_while_others_compile() -> None:
    seen, look = _looks_at_collector()
    before = gc.isenabled()
    gc.enable()
    try:
        numba.njit(lambda: look())()
    finally:
        (gc.enable if before else gc.disable)()
    assert seen
    assert all(seen)


def _number(compiled: Any) -> int:
    """Return the number in the name of a compiled function."""
    (result,) = compiled.overloads.values()
    return int(result.fndesc.uid)


def test_functions_of_others_keep_the_names_that_numba_gives() -> None:
    """Numba counts from 1, in a process that compiles with nbflow, too."""
    ours, theirs = jit.kernel(lambda x: x + 1), numba.njit(lambda x: x + 1)
    assert (ours(1), theirs(1)) == (2, 2)
    assert _number(theirs) < 2**32
    assert _number(ours) > 2**32  # 48 random bits, of which the first 16 are hardly ever 0


def test_names_differ_in_forked_children() -> None:
    def name() -> int:
        compiled = jit.kernel(lambda x: x + 1)
        compiled._cache.disable()
        compiled(1)
        return _number(compiled)

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    children = [context.Process(target=lambda: there.send(name())) for _ in range(2)]
    for child in children:
        child.start()
    assert all(here.poll(60) for _ in children)
    numbers = {here.recv() for _ in children} | {name()}
    for child in children:
        child.join()
    assert len(numbers) == 3
    assert min(abs(a - b) for a, b in itertools.combinations(numbers, 2)) > 1000


def test_numbas_cache_folder_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may make a cached function at the same time."""
    seen = []
    njit = numba.njit

    def look(*args: Any, **options: Any) -> Any:
        seen.append(numba.core.config.CACHE_DIR)
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", look)
    before = numba.core.config.CACHE_DIR
    jit.kernel(lambda x: x)
    assert seen == [before]


def test_digest_changes_with_an_inlined_function(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    package = tmp_path / "nbflow_kernels"
    (package / "family").mkdir(parents=True)
    (package / "family" / "cpu.py").write_text(
        "from nbflow_kernels.family import (\n    one,  # a, comment\n    two as three,\n)\n"
    )
    for name in ("one", "two"):
        (package / "family" / f"{name}.py").write_text("import nbflow_kernels.deep\n")
    (package / "deep.py").write_text("VALUE = 1\n")
    monkeypatch.setattr(jit_cache, "_ROOT", package)
    digests = set()
    for value in (1, 2, 1):
        (package / "deep.py").write_text(f"VALUE = {value}\n")
        _forget()
        digests.add(jit_cache.source_digest(package / "family" / "cpu.py"))
    assert len(digests) == 2
    _forget()


def _forget() -> None:
    for cached in (jit_cache._source, jit_cache._sources, jit_cache.source_digest):
        cached.cache_clear()


EDITED = """
import sys
from pathlib import Path
from nbflow_kernels import edited

if "edit" in sys.argv:
    Path(edited.__file__).with_name({file!r}).write_text({new!r})
print(edited.make()(10))
"""


@pytest.mark.parametrize("file", ["edited.py", "late.py"])
def test_kernels_of_sources_edited_meanwhile_are_not_kept(tmp_path: Path, file: str) -> None:
    """A kernel made after the edit, or of a helper imported after it, does not reach the disk."""
    package = tmp_path / "nbflow_kernels"
    shutil.copytree(ROOT, package, ignore=shutil.ignore_patterns("__pycache__"))
    late = (
        "from nbflow_kernels.cpu import jit\n\n@jit.device_function\n"
        "def times(x):\n    return {} * x\n"
    )
    kernel = (
        "from nbflow_kernels.cpu import jit\n\ndef make():\n"
        "    @jit.kernel\n    def twice(x):\n        return times(x) + {}\n    return twice\n"
    )
    early = "from nbflow_kernels.late import times\n"
    (package / "late.py").write_text(late.format(2))
    (package / "edited.py").write_text(early + kernel.format(0))
    new = early + kernel.format(5) if file == "edited.py" else late.format(3)
    # Of another length: Python's bytecode knows a source by its size and the second it was written.
    program = EDITED.format(file=file, new=new + "# edited\n")
    (tmp_path / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "c")}
    found = [
        subprocess.run(
            [sys.executable, str(tmp_path / "program.py"), *word],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout.strip()
        for word in (["edit"], [], [])
    ]  # fmt: skip
    wanted = "25" if file == "edited.py" else "30"
    assert found == ["20", wanted, wanted]
    assert sum(1 for _ in (tmp_path / "c").rglob("*.nbc")) == 1

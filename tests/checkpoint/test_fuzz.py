"""Mutated weight files of every format; tools/checkpoints/fuzz_readers.py runs more of them.

In processes of their own, because the tool watches imports, limits memory and uses a timer.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from mpirun import python

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return python(*arguments, paths=[ROOT / "tools" / "checkpoints"])


def test_mutated_files_are_refused_or_read(tmp_path: Path) -> None:
    tool = ROOT / "tools" / "checkpoints" / "fuzz_readers.py"
    result = run(tool, "--keep", tmp_path, "--mutations", 6000, "--seed", 7)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in result.stdout.splitlines()[:-1]:
        family, count, counts = line.split(None, 2)
        assert count == "1,000"
        # Both ways are taken: some mutations leave a file that can be read.
        assert "read" in counts, family
        assert "refused" in counts, family


READERS = """
import os, signal, sys
from pathlib import Path
import fuzz_readers as fuzz

def spin(path):
    while True:
        pass

def fill(path):
    return "read" if bytearray(20 << 20) else ""

def write(path):
    return open(path, "w") and "read"

def run(path):
    os.system("true")
    return "read"

def fail(path):
    raise KeyError("w")

def quiet(path):
    return "read"

signal.signal(signal.SIGPROF, fuzz.too_slow)
watch = fuzz.Watch()
for read in (spin, fill, write, run, fail, quiet):
    print(*fuzz.run_case(Path(sys.argv[1]), watch, 0.2, read is fill, read))
fuzz.limit_memory(64)
print(*fuzz.run_case(Path(sys.argv[1]), watch, 0.2, False, lambda path: str(len(bytes(1 << 30)))))
"""


def test_the_tool_sees_what_it_looks_for(tmp_path: Path) -> None:
    """The watch reports readers with forbidden side effects."""
    result = run("-c", READERS, tmp_path / "x")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "slow more than 0.2 s"
    assert lines[1].endswith("bytes of memory")
    assert lines[2].startswith("read open for writing")
    assert lines[3].startswith("read os.system")
    assert lines[4] == "KeyError KeyError: 'w'"
    assert lines[5] == "read "
    assert lines[6].startswith("MemoryError")

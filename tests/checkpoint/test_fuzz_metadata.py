"""Mutated configurations, tokenizers, GGUF headers; tools/checkpoints/fuzz_metadata.py has more.

In a process of its own, because the tool limits memory and replaces processes that end.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from mpirun import python

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (
    "config", "generation", "tokenizer_json", "tokenizer_config", "sentencepiece", "gguf_model",
    "gguf_vocabulary",
)  # fmt: skip


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return python(*arguments, paths=[ROOT / "tools" / "checkpoints"])


def test_mutated_metadata_is_refused_or_used(tmp_path: Path) -> None:
    tool = ROOT / "tools" / "checkpoints" / "fuzz_metadata.py"
    result = run(tool, "--keep", tmp_path, "--mutations", 420, "--seed", 7, "--families", *FAMILIES)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in result.stdout.splitlines()[:-1]:
        family, count, counts = line.split(None, 2)
        assert count == "60"
        # Both ways are taken: some mutations leave a file that can be used.
        assert "works" in counts, family
        assert "refused" in counts, family


USES = """
import os, sys, time
from pathlib import Path
import fuzz_metadata as fuzz
from nbflow_kernels.errors import UsageError

def fail(folder):
    raise KeyError("w")

def nameless(folder):
    raise UsageError("wrong")

def refuse(folder):
    raise UsageError(f"{folder}: wrong")

def die(folder):
    os.abort()

def fill(folder):
    bytearray(1 << 30)

def stall(folder):
    time.sleep(60)

def quiet(folder):
    pass

uses = (fail, nameless, refuse, die, fill, stall, quiet)
fuzz.USES.update({use.__name__: use for use in uses})
pages = int(Path("/proc/self/statm").read_text().split()[0])
runner = fuzz.Runner(Path(sys.argv[1]), 2.0, (pages * 4096 >> 20) + 256)
for use in uses:
    print(runner.run(use.__name__))
runner.close()
"""


def test_the_tool_sees_what_it_looks_for(tmp_path: Path) -> None:
    """The runner reports cases with forbidden behaviour."""
    result = run("-c", USES, tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "finding: KeyError: 'w'"
    assert lines[1] == "finding: a message without the file, or too long: wrong"
    assert lines[2] == "refused"
    assert lines[3] == "finding: the process ended, SIGABRT"
    assert lines[4].startswith("finding: MemoryError")
    assert lines[5] == "finding: more than 2.0 s"
    assert lines[6] == "works"

#!/usr/bin/env python3
"""Mutate small weight files of every format and read them; nothing but a `UsageError` may happen.

    python tools/checkpoints/fuzz_readers.py --mutations 100000 --seed 0

Each case is one file, mutated at the level of bytes, of numbers, or of its structure (opcodes of a
pickle, members of an archive, values of a JSON header).  It is opened, listed and read.  A finding
is: an exception other than UsageError, more than `--seconds` of processor time, more memory than
`--megabytes` above the start (address space; and traced for every 64th case, 16 MiB), an import,
execution, process or file opened for writing (an audit hook), or a tensor of another shape than
listed.  Findings are written to the folder `--keep`, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
from checkpoint_mutations import FAMILIES, Mutator, seeds

from nbflow.checkpoint import open_weights
from nbflow.checkpoint.dtypes import ITEM_BITS, NUMPY
from nbflow_kernels.errors import UsageError

FORBIDDEN = {
    "import", "exec", "compile", "os", "subprocess", "pickle", "marshal", "ctypes", "socket",
    "shutil", "tempfile", "glob", "urllib", "code",
}  # fmt: skip
TRACED_EVERY, TRACED_BYTES = 64, 16 << 20


class TooSlow(BaseException):
    """A case took more processor time than allowed."""


class Watch:
    """Audit hook that records forbidden events during a case."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.active = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        if event == "open":
            if isinstance(args[2], int) and args[2] & writing:
                self.events.append(f"open for writing {args[0]!r}")
        elif event.partition(".")[0] in FORBIDDEN:
            self.events.append(f"{event} {args!r:.100}")


def read_everything(path: Path) -> str:
    """Open a file, list and read its tensors; return the verdict."""
    try:
        with open_weights(path) as weights:
            config = weights.config()
            assert config is None or isinstance(config, dict)
            for name in weights.names()[:64]:
                read_tensor(weights, name)
    except UsageError as error:
        if str(path.parent) not in str(error) or len(str(error)) > 4000:
            raise RuntimeError(
                f"a message without the file, or too long: {error!s:.300}"
            ) from error
        return "refused"
    return "read"


def read_tensor(weights: Any, name: str) -> None:
    """Read a tensor whole and in part; one that cannot be read must say so."""
    shape, dtype = weights.shape(name), weights.dtype(name)
    weights.n_bytes(name)
    n_rows = shape[0] if shape else 0
    try:
        if dtype not in ITEM_BITS:
            assert weights.quantized(name).shape == shape
            if len(shape) > 1:
                part = weights.quantized(name, rows=(n_rows // 2, n_rows))
                assert part.shape == (n_rows - n_rows // 2, *shape[1:])
            return
        array = weights.array(name)
        assert dtype in NUMPY
        assert array.shape == shape
        assert array.flags.c_contiguous
        if len(shape) == 2:
            rows, columns = (n_rows // 2, n_rows), (0, shape[1] // 2)
            part = weights.array(name, rows=rows, columns=columns)
            np.testing.assert_array_equal(part, array[slice(*rows), slice(*columns)])
    except UsageError:
        pass
    weights.sha256(name)


def run_case(
    path: Path,
    watch: Watch,
    seconds: float,
    traced: bool,
    read: Callable[[Path], str] = read_everything,
) -> tuple[str, str]:
    """Run one case; return its verdict and, if it is a finding, what happened."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if traced:
        tracemalloc.start()
    watch.active = True
    try:
        verdict, finding = read(path), ""
    except TooSlow:
        verdict, finding = "slow", f"more than {seconds} s"
    except Exception as error:
        verdict, finding = type(error).__name__, f"{type(error).__name__}: {error!s:.300}"
    finally:
        watch.active = False
        signal.setitimer(signal.ITIMER_PROF, 0)
    if traced:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if peak > TRACED_BYTES:
            finding = finding or f"{peak} bytes of memory"
    if watch.events:
        finding = finding or watch.events[0]
        watch.events.clear()
    return verdict, finding


def cases(
    families: list[str], n_mutations: int, seed: int
) -> Iterator[tuple[int, str, str, bytes]]:
    """Yield number, family, suffix and content of every case."""
    mutator = Mutator(seed)
    originals = {family: seeds(family) for family in families}
    for i in range(n_mutations):
        family = families[i % len(families)]
        suffix, data = mutator.choice(originals[family])
        yield i, family, suffix, mutator.mutate(family, data)


def too_slow(number: int, frame: Any) -> None:
    """Handle the timer's signal."""
    raise TooSlow


def limit_memory(megabytes: int) -> None:
    """Limit the address space to its present size plus `megabytes`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def fuzz(
    families: list[str], n_mutations: int, seed: int, seconds: float, megabytes: int, keep: Path
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Run the cases; return verdict counts by family, and the findings."""
    counts: Counter[tuple[str, str]] = Counter()
    findings: list[str] = []
    watch = Watch()

    old = signal.signal(signal.SIGPROF, too_slow)
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        for family in families:  # once, so that everything is imported before the watch
            for i, (suffix, data) in enumerate(seeds(family)):
                path = Path(folder) / f"seed{i}{suffix}"
                path.write_bytes(data)
                if read_everything(path) != "read":
                    findings.append(f"{family}: the seed {i} is not read")
        limit_memory(megabytes)
        for i, family, suffix, data in cases(families, n_mutations, seed):
            path = Path(folder) / f"case{suffix}"
            path.write_bytes(data)
            verdict, finding = run_case(path, watch, seconds, i % TRACED_EVERY == 0)
            counts[family, verdict] += 1
            if finding:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{family}_{seed}_{i}{suffix}").write_bytes(data)
                findings.append(f"{family}, seed {seed}, case {i}: {finding}")
    signal.signal(signal.SIGPROF, old)
    return counts, findings


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--seconds", type=float, default=2.0, help="processor time of a case")
    parser.add_argument("--megabytes", type=int, default=256, help="address space of all")
    parser.add_argument("--keep", type=Path, default=Path("fuzz_findings"))
    arguments = parser.parse_args()
    started = time.process_time()
    counts, findings = fuzz(
        arguments.formats, arguments.mutations, arguments.seed, arguments.seconds,
        arguments.megabytes, arguments.keep,
    )  # fmt: skip
    for family in arguments.formats:
        ends = {verdict: n for (name, verdict), n in sorted(counts.items()) if name == family}
        print(f"{family:<12} {sum(ends.values()):>9,}  {ends}")
    for finding in findings[:50]:
        print(finding)
    print(
        f"{sum(counts.values()):,} mutations, seed {arguments.seed}, {len(findings)} findings, "
        f"{time.process_time() - started:.0f} s of processor time"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

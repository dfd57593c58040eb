#!/usr/bin/env python3
"""Mutate configurations, tokenizers and GGUF headers and use them; only a `UsageError` may happen.

    python tools/checkpoints/fuzz_metadata.py --mutations 20000 --seed 0

Each case is a small folder with one file mutated: numbers out of all bounds, removed keys, other
types, lone surrogates, bad UTF-8, deep nesting.  Its model is resolved and checked (family `load`:
loaded, and run for one token), or its tokenizer encodes and decodes.  A finding is: an exception
other than UsageError and MissingExtraError, a message without the file, a process that dies, more
than `--seconds` for a case, or more address space than `--megabytes`.  Cases run one at a time in a
worker process, which is restarted when it dies.  Findings are written to the folder
`--keep`, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
from metadata_mutations import FAMILIES, Mutator, Seed, seeds

from nbflow.checkpoint import open_weights
from nbflow.spec import check, load_tokenizer, resolve
from nbflow.tokenization import Tokenizer
from nbflow_kernels.errors import MissingExtraError, UsageError

TEXT = "Hello, the cats sat.\n caf\u00e9 \u65e5\u672c <s><tool> </s>"
MODELS = ("config", "generation", "gguf_model", "load")
CASES_OF_A_PROCESS = 2000
FIRST_FACTOR = 30


def use_model(folder: Path) -> None:
    """Resolve a model, compare it with its tensors, and read its generation settings."""
    found = sorted(folder.glob("*.gguf"))
    resolved = resolve(found[0] if found else folder)
    with open_weights(resolved.path) as weights:
        check(resolved.spec, weights)
    assert resolved.spec.n_parameters > 0
    assert resolved.spec.as_dict()


def use_generation(folder: Path) -> None:
    """Resolve a model and use its tokenizer."""
    use_model(folder)
    use_tokenizer(folder)


def load_model(folder: Path) -> None:
    """Load a model and generate a token; a UsageError is allowed, e.g. for a context of 1."""
    import nbflow

    context = min(64, resolve(folder).spec.max_context)
    with nbflow.load(folder, threads=1, max_context=context) as model:
        for options in ({"ignore_eos": True}, {"decoding": "auto"}):
            try:
                assert model.generate([1, 2, 3], 1, **options).ids
            except UsageError:
                continue


def use_tokenizer(folder: Path) -> None:
    """Load a tokenizer, encode and decode; each call may raise UsageError."""
    found = sorted(folder.glob("*.gguf"))
    tokenizer = load_tokenizer(found[0] if found else folder)
    ids: list[int] = []
    for call in (
        lambda: ids.extend(tokenizer.encode(TEXT, add_special_tokens=True)),
        lambda: tokenizer.encode(TEXT, parse_special=True),
        lambda: tokenizer.encode_parts(["a", 0, " b"]),
        lambda: tokenizer.split_special(TEXT),
        lambda: tokenizer.decode([i for i in ids if i < tokenizer.vocab_size]),
        lambda: tokenizer.decode(range(min(40, tokenizer.vocab_size))),
        lambda: stream(tokenizer),
        lambda: (tokenizer.piece(tokenizer.vocab_size - 1), tokenizer.token_id("the")),
        lambda: (tokenizer.token_id("\ud800"), tokenizer.bos_id, tokenizer.eos_ids),
    ):
        try:
            call()
        except UsageError:
            continue


def stream(tokenizer: Tokenizer) -> str:
    """Decode the first ids incrementally."""
    stream = tokenizer.decode_stream()
    pieces = [stream.push(i) for i in range(min(20, tokenizer.vocab_size))]
    return "".join([*pieces, stream.finish()])


USES: dict[str, Callable[[Path], None]] = {
    "config": use_model,
    "generation": use_generation,
    "gguf_model": use_model,
    "load": load_model,
}


def run_case(family: str, folder: Path) -> str:
    """Run one case; return "works", "refused", or a text that begins with "finding"."""
    try:
        USES.get(family, use_tokenizer)(folder)
    except (UsageError, MissingExtraError) as error:
        longest = max(map(len, str(error).splitlines()))
        if longest > 4000 or str(folder) not in str(error):
            return f"finding: a message without the file, or too long: {error!s:.300}"
        return "refused"
    except BaseException as error:
        return f"finding: {type(error).__name__}: {error!s:.300}"
    return "works"


def write_case(folder: Path, seed: Seed, files: dict[str, bytes]) -> None:
    """Replace the content of a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, target in seed.links.items():
        (folder / name).symlink_to(target)
    for name, data in files.items():
        (folder / name).write_bytes(data)


Case = tuple[int, str, Seed, dict[str, bytes]]


def cases(families: list[str], n_mutations: int, number: int, folder: Path) -> Iterator[Case]:
    """Yield number, family, seed and files of every case."""
    mutator = Mutator(number)
    for i in range(n_mutations):
        family = families[i % len(families)]
        seed = mutator.choice(seeds(family, folder))
        yield i, family, seed, mutator.mutate(seed)


class Runner:
    """Worker process that runs cases sequentially and is restarted when it dies."""

    def __init__(self, folder: Path, seconds: float, megabytes: int) -> None:
        self._folder, self._seconds, self._megabytes = folder, seconds, megabytes
        self._pid = 0
        self._asked = 0

    def run(self, family: str) -> str:
        """Run the folder as a case of a family; return the verdict."""
        if self._asked >= CASES_OF_A_PROCESS:  # memory that packages retain must not fail a case
            self.close()
        if not self._pid:
            self._start()
        # the first case of a process imports, and compiles or loads kernels
        patience = self._seconds * (1 if self._asked else FIRST_FACTOR)
        self._asked += 1
        os.write(self._to, f"{family}\n".encode())
        ready, _, _ = select.select([self._from], [], [], patience)
        if not ready:
            self.close()
            return f"finding: more than {patience} s"
        answer = os.read(self._from, 1 << 16).decode()
        if answer:
            return answer
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return f"finding: the process ended, {signal.Signals(os.WTERMSIG(status)).name}"

    def close(self) -> None:
        """End the process."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._to)
            os.close(self._from)
            self._pid = 0

    def _start(self) -> None:
        asked, self._to = os.pipe()
        self._from, answered = os.pipe()
        self._asked = 0
        self._pid = os.fork()
        if self._pid:
            os.close(asked)
            os.close(answered)
            return
        os.close(self._to)
        os.close(self._from)
        size = self._megabytes << 20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust prints panics there
        with os.fdopen(asked) as lines:
            for line in lines:
                verdict = run_case(line.strip(), self._folder)
                os.write(answered, verdict.encode("utf-8", "replace"))
        os._exit(0)


def fuzz(
    families: list[str], n_mutations: int, number: int, seconds: float, megabytes: int, keep: Path
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Run the cases; return verdict counts by family, and the findings."""
    counts: Counter[tuple[str, str]] = Counter()
    findings: list[str] = []
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=in_memory) as name:
        folder = Path(name) / "case"
        written = Path(name) / "seeds"
        written.mkdir()
        runner = Runner(folder, seconds, megabytes)
        for family in families:
            for seed in seeds(family, written):
                write_case(folder, seed, seed.files)
                verdict = runner.run(family)
                if verdict != "works":
                    findings.append(f"{family}: the seed {seed.name}: {verdict}")
        for i, family, seed, files in cases(families, n_mutations, number, written):
            write_case(folder, seed, files)
            verdict = runner.run(family)
            counts[family, verdict.partition(":")[0]] += 1
            if verdict.startswith("finding"):
                shutil.copytree(folder, keep / f"{family}_{number}_{i}", dirs_exist_ok=True)
                findings.append(f"{family} {seed.name}, seed {number}, case {i}: {verdict}")
        runner.close()
    return counts, findings


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--seconds", type=float, default=10.0, help="time of a case")
    parser.add_argument("--megabytes", type=int, default=4096, help="address space of a process")
    parser.add_argument("--keep", type=Path, default=Path("fuzz_findings"))
    arguments = parser.parse_args()
    os.environ["RUST_BACKTRACE"] = "0"
    started = time.monotonic()
    counts, findings = fuzz(
        arguments.families, arguments.mutations, arguments.seed, arguments.seconds,
        arguments.megabytes, arguments.keep,
    )  # fmt: skip
    for family in arguments.families:
        ends = {verdict: n for (name, verdict), n in sorted(counts.items()) if name == family}
        print(f"{family:<16} {sum(ends.values()):>9,}  {ends}")
    for finding in findings[:50]:
        print(finding.encode("utf-8", "replace").decode())
    print(
        f"{sum(counts.values()):,} mutations, seed {arguments.seed}, {len(findings)} findings, "
        f"{time.monotonic() - started:.0f} s"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

"""`nbflow bench`: time a model, with llama-bench's rows and the machine's read bandwidth.

``ppN`` processes a prompt of N tokens, ``tgN`` generates N tokens after an empty context (``@ dD``:
after D tokens, which stay in the prefix cache between repetitions), ``ppN+tgM`` both.  The rate is
the median over the repetitions, the spread half the interquartile range.  ``GB/s`` is the bytes of
matrices that generation reads per second (each step reads them once for the whole batch).
``% read`` is the median of its share of the read bandwidth measured right before and after each
repetition: of as many threads, or of the devices, which sum random numbers of eight times their L2
cache.  ``VRAM MiB`` is what the model takes on its devices by their driver's count.  With a peer,
its repetitions alternate with ours, and ``x peer`` is the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import nbflow
from nbflow.benchmark.timing import Test
from nbflow.cli.bench_rows import make_row, profile, samples, table
from nbflow.cli.options import add_model_arguments, is_printing_rank, load_model, numbers
from nbflow_kernels.errors import UsageError, unknown_name

PEERS = ("llama.cpp",)
N_PROMPT = 512
"""Default of --n-prompt, where the context holds it and one more token."""
MAX_BATCH = 65_536
"""Maximum of --batch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument(
        "-p", "--n-prompt",
        help="prompt lengths, e.g. 128,512 (512, or as long as the context allows; 0: none)",
    )  # fmt: skip
    parser.add_argument(
        "-n", "--n-gen", default="128", help="tokens to generate, e.g. 32,128 (128; 0: none)"
    )
    parser.add_argument(
        "-pg", metavar="PP,TG", action="append", default=[], help="prompt then generation"
    )
    parser.add_argument(
        "-d", "--depth", default="0", help="tokens before generation starts, e.g. 0,4096 (0)"
    )
    parser.add_argument("-b", "--batch", default="1", help="batch sizes, e.g. 1,8 (1)")
    parser.add_argument("-r", "--repeats", type=int, default=5, help="repetitions (5)")
    parser.add_argument(
        "--peer",
        metavar="NAME",
        help="alternate with another program: llama.cpp (needs extra 'bench' and a .gguf)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="show the time of generation by kind of op"
    )
    parser.add_argument("--json", action="store_true", help="print JSON rows")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.repeats < 1:
        raise UsageError(f"--repeats must be at least 1, got {arguments.repeats}")
    cases = _tests(arguments)
    rows, profiles = [], []
    for weights in (arguments.weights or "").split(","):
        with load_model(arguments, weights=weights or None) as model:
            if not model.participates:
                continue
            tests = [_fitted(test, model.spec.max_context, arguments) for test in cases]
            peer = _peer(arguments, model, tests)
            memory = model.memory()
            for test in tests:
                taken = samples(model, test, arguments.repeats, peer)
                rows.append(make_row(model, weights, arguments, memory, test, taken))
            if arguments.profile:
                profiles.append((weights or "as stored", profile(model)))
            if peer is not None:
                peer.close()
            if not is_printing_rank(model):
                rows, profiles = [], []
    if rows and arguments.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print(table(rows))
        for name, text in profiles:
            print(f"\ngeneration, weights {name}, one sequence:\n{text}")
    return 0


def _peer(arguments: argparse.Namespace, model: nbflow.LLM, tests: list[Test]) -> Any:
    """Return the peer with the same model loaded, or None."""
    if arguments.peer is None:
        return None
    if arguments.peer not in PEERS:
        raise unknown_name("peer", arguments.peer, PEERS)
    path = Path(arguments.model)
    if path.suffix != ".gguf" or arguments.weights is not None or len(model.workers) != 1:
        raise UsageError(
            "--peer llama.cpp needs a .gguf file as the model, its weights as stored (without "
            f"--weights) and one rank, got {arguments.model}"
            + f" --weights {arguments.weights}" * (arguments.weights is not None)
            + f" and {len(model.workers)} ranks" * (len(model.workers) != 1)
        )
    from nbflow.benchmark.llama_cpp import LlamaCpp

    context = max(test.context for test in tests) + 1
    return LlamaCpp(path, model.threads, context, max(test.batch for test in tests))


def _tests(arguments: argparse.Namespace) -> list[Test]:
    """Return the benchmark cases of the arguments."""
    tests = []
    prompts = str(N_PROMPT) if arguments.n_prompt is None else arguments.n_prompt
    for batch in numbers(arguments.batch, "--batch"):
        if not 1 <= batch <= MAX_BATCH:
            raise UsageError(f"--batch must be 1..{MAX_BATCH} sequences, got {batch}")
        tests += [Test(n, 0, batch) for n in numbers(prompts, "--n-prompt") if n]
        tests += [
            Test(0, n, batch, depth)
            for depth in numbers(arguments.depth, "--depth")
            for n in numbers(arguments.n_gen, "--n-gen")
            if n
        ]
        for text in arguments.pg:
            both = numbers(text, "-pg")
            if len(both) != 2 or not any(both):
                raise UsageError(f"-pg must be two numbers PP,TG, not both 0, got {text!r}")
            tests.append(Test(both[0], both[1], batch))
    if not tests:
        raise UsageError(
            "nothing is left to time: give --n-prompt, --n-gen or -pg a number above 0"
        )
    return tests


def _fitted(test: Test, context: int, arguments: argparse.Namespace) -> Test:
    """Return a test that fits the context: shorten the default prompt, refuse others."""
    if test.context < context:
        return test
    if arguments.n_prompt is None and test == Test(N_PROMPT, 0, test.batch) and context > 1:
        return Test(context - 1, 0, test.batch)
    raise UsageError(
        f"test {test.name} needs {test.context + 1} tokens, but the context holds {context}; "
        "use smaller -p, -n, -d"
    )

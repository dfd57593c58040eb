"""`nbflow bench`: time a model, rows as llama-bench prints them, beside the machine's limit.

``ppN`` runs a prompt of N tokens, ``tgN`` generates N tokens after an empty context, ``ppN+tgM``
both.  The rate is the median over the repetitions, the spread half the distance between the
quartiles.  ``GB/s`` is bytes of matrices that generation must read per second (each step reads
them once, whatever the batch), ``% read`` its share of the read bandwidth that this machine showed
right before.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import nbflow
from nbflow.bench import time_decode, time_prefill
from nbflow.commands.options import add_model_arguments, load_model, speaks
from nbflow.system import processor_name
from nbflow_kernels.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument(
        "-p", "--n-prompt", default="512", help="prompt lengths, e.g. 128,512 (512; 0: none)"
    )
    parser.add_argument(
        "-n", "--n-gen", default="128", help="tokens to generate, e.g. 32,128 (128; 0: none)"
    )
    parser.add_argument(
        "-pg", metavar="PP,TG", action="append", default=[], help="prompt then generation"
    )
    parser.add_argument("-b", "--batch", default="1", help="sequences at once, e.g. 1,8 (1)")
    parser.add_argument("-r", "--repeats", type=int, default=5, help="repetitions (5)")
    parser.add_argument(
        "--profile", action="store_true", help="show where the time of generation goes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON rows")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.repeats < 1:
        raise UsageError(f"--repeats must be at least 1, got {arguments.repeats}")
    formats = (arguments.weights or "").split(",")
    rows, profiles = [], []
    bandwidths: dict[int, float] = {}
    for weights in formats:
        with load_model(arguments, weights=weights or None) as model:
            if not model.participates:
                continue
            tests = _tests(arguments, model.spec.max_context)
            memory = model.memory()
            ranks_threads = len(memory) * model.threads
            if ranks_threads not in bandwidths and speaks(model):
                bandwidths[ranks_threads] = _read_bandwidth(ranks_threads)
            for name, n_prompt, n_gen, batch in tests:
                seconds = _measure(model, n_prompt, n_gen, batch, arguments.repeats)
                rows.append(
                    _row(model, weights, arguments, memory, name, n_prompt, n_gen, batch, seconds)
                )
                if speaks(model):
                    _add_limit(rows[-1], bandwidths[ranks_threads])
            if arguments.profile:
                profiles.append((weights or "as stored", _profile(model)))
            if not speaks(model):
                rows, profiles = [], []
    if rows and arguments.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print(_table(rows))
        for name, profile in profiles:
            print(f"\ngeneration, weights {name}, one sequence:\n{profile}")
    return 0


def _tests(arguments: argparse.Namespace, context: int) -> list[tuple[str, int, int, int]]:
    """Return (name, prompt tokens, generated tokens, batch) of each test."""
    tests = []
    for batch in _numbers(arguments.batch, "--batch"):
        pairs = [(n, 0) for n in _numbers(arguments.n_prompt, "--n-prompt")]
        pairs += [(0, n) for n in _numbers(arguments.n_gen, "--n-gen")]
        for text in arguments.pg:
            numbers = _numbers(text, "-pg")
            if len(numbers) != 2:
                raise UsageError(f"-pg must be two numbers PP,TG, got {text!r}")
            pairs.append((numbers[0], numbers[1]))
        for n_prompt, n_gen in pairs:
            if n_prompt + n_gen == 0:
                continue
            name = "+".join(f"{kind}{n}" for kind, n in (("pp", n_prompt), ("tg", n_gen)) if n)
            if max(n_prompt, 1) + n_gen >= context + (n_gen == 0):
                n_prompt, name = _clip(n_prompt, n_gen, context, name)
            tests.append((name, n_prompt, n_gen, batch))
    return tests


def _clip(n_prompt: int, n_gen: int, context: int, name: str) -> tuple[int, str]:
    """Shorten a pure prompt test to the context; refuse anything else that does not fit."""
    if n_gen == 0:
        return context - 1, f"pp{context - 1}"
    raise UsageError(
        f"test {name} needs {n_prompt + n_gen + 1} tokens, but the context holds {context}; "
        "use smaller -p, -n"
    )


def _numbers(text: str, option: str) -> list[int]:
    """Return the numbers of a list: 1,8 or first-last+step or first-last*factor."""
    result = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)([+*])(\d+))?", part.strip())
        if not match:
            raise UsageError(
                f"{option} must be numbers like 128 or 1,8 or 64-512+64 or 1-8*2, got {part!r}"
            )
        first, last, sign, step = match.groups()
        value, end = int(first), int(last or first)
        if sign and (int(step) < (2 if sign == "*" else 1) or (value == 0 and sign == "*")):
            raise UsageError(f"{option}: the range {part!r} does not advance")
        while value <= end:
            result.append(value)
            if not sign:
                break
            value = value * int(step) if sign == "*" else value + int(step)
    return result


def _measure(
    model: nbflow.Model, n_prompt: int, n_gen: int, batch: int, repeats: int
) -> list[float]:
    if n_gen == 0:
        return time_prefill(model, n_prompt, batch, repeats)
    decode = time_decode(model, max(n_prompt, 1), n_gen, batch, repeats)
    if n_prompt == 0:
        return decode
    prefill = time_prefill(model, n_prompt, batch, repeats)
    return [a + b for a, b in zip(prefill, decode, strict=True)]


def _row(
    model: nbflow.Model,
    weights: str,
    arguments: argparse.Namespace,
    memory: list[dict[str, int]],
    name: str,
    n_prompt: int,
    n_gen: int,
    batch: int,
    seconds: list[float],
) -> dict[str, Any]:
    n_tokens = batch * (n_prompt + n_gen)
    rates = [n_tokens / s for s in seconds]
    quartiles = statistics.quantiles(rates, n=4) if len(rates) > 1 else [rates[0]] * 3
    return {
        "model": model.spec.name,
        "weights": weights or "as stored",
        "kv": arguments.kv,
        "partition": model.plan.partition,
        "threads_per_rank": model.threads,
        "batch": batch,
        "test": name,
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_spread": (quartiles[2] - quartiles[0]) / 2,
        "samples_s": seconds,
        "weight_bytes": sum(m["weight_bytes"] for m in memory),
        "kv_bytes": sum(m["kv_bytes"] for m in model.memory()),
        "matrix_bytes_per_step": sum(m["matrix_bytes"] for m in memory),
        "steps_per_s": statistics.median(n_gen / s for s in seconds)
        if n_gen and not n_prompt
        else None,
        "processor": processor_name(),
        "python": platform.python_version(),
    }


def _add_limit(row: dict[str, Any], bandwidth: float) -> None:
    """Add bytes per second and their share of the machine's read bandwidth (generation only)."""
    row["read_bandwidth_bytes_per_s"] = bandwidth
    row["read_bytes_per_s"] = row["read_share"] = None
    if row["steps_per_s"] is not None:
        row["read_bytes_per_s"] = row["matrix_bytes_per_step"] * row["steps_per_s"]
        row["read_share"] = row["read_bytes_per_s"] / bandwidth


def _read_bandwidth(threads: int) -> float:
    from nbflow_kernels.bench import read_bandwidth

    return float(read_bandwidth(threads))


def _profile(model: nbflow.Model) -> str:
    """Generate 64 tokens and return a table of where the time of this rank went."""
    import time

    from nbflow.bench import make_requests
    from nbflow_kernels.threads import kernel_seconds

    if len(model.engines) != 1:
        return "(a profile is made for one rank per process: partition '0', or mpirun)"
    executor = model.engines[0].executor
    for _ in model.run_requests(make_requests(model, 1, 8, 1)):
        pass
    executor.seconds = defaultdict(float)
    with kernel_seconds() as kernels:
        started = time.perf_counter()
        for _ in model.run_requests(make_requests(model, 1, 64, 1)):
            pass
        total = time.perf_counter() - started
    by_kind, executor.seconds = executor.seconds, None
    in_ops, in_kernels = sum(by_kind.values()), sum(kernels)
    lines = [(f"  {kind}", s) for kind, s in sorted(by_kind.items(), key=lambda item: -item[1])] + [
        ("all ops", in_ops),
        ("outside ops (scheduling, drawing)", total - in_ops),
        ("inside compiled kernels", in_kernels),
        ("outside compiled kernels", total - in_kernels),
    ]
    return "\n".join(
        f"{name:<36} {s / 64 * 1e6:9.1f} us/token {s / total:7.1%}" for name, s in lines
    )


def _table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("model", lambda r: r["model"]),
        ("weights", lambda r: r["weights"]),
        ("MiB", lambda r: f"{r['weight_bytes'] / 2**20:.1f}"),
        ("kv", lambda r: r["kv"]),
        ("partition", lambda r: f"`{r['partition']}`"),
        ("threads", lambda r: str(r["threads_per_rank"])),
        ("batch", lambda r: str(r["batch"])),
        ("test", lambda r: r["test"]),
        ("t/s", lambda r: f"{r['tokens_per_s']:,.1f} ± {r['tokens_per_s_spread']:,.1f}"),
        (
            "GB/s",
            lambda r: "" if r["read_bytes_per_s"] is None else f"{r['read_bytes_per_s'] / 1e9:.2f}",
        ),
        ("% read", lambda r: "" if r["read_share"] is None else f"{r['read_share']:.0%}"),
    ]
    cells = [[name for name, _ in columns], *([f(r) for _, f in columns] for r in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    bandwidth = rows[0]["read_bandwidth_bytes_per_s"] / 1e9
    note = f"{rows[0]['processor']}; read bandwidth {bandwidth:.1f} GB/s"
    return "\n".join([*lines, "", note])

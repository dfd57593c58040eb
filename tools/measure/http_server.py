#!/usr/bin/env python3
"""Measure the server against llama.cpp's on the same GGUF file, and the overhead of serving.

    python tools/measure/http_server.py results/server/MACHINE [--llama-server PATH]

Appends each test's rows to rows.jsonl, of which docs/server.md shows the newest.  A row is one
number with its samples:

- ``cN``: N clients at once, each of which sends requests of 64 random prompt tokens (no two
  alike) and reads 64 new ones as a stream, until all requests are done.  Generated tokens per
  second in total, time to first token (median and 95th percentile), and CPU seconds of the server
  per thousand tokens.  Both servers stay up and are measured in turn.
- ``overhead cN``: serving overhead of N clients, without the model.  Requests go to an
  `nbflow.LLMEngine` in this process, and to a server, whose steps sleep for the model's step time
  (`tools/measure/scheduling_overhead.py`): microseconds of CPU time per token, and its share of the
  step time.
- ``prefix``: time to first token of a long prompt, uncached and cached.
- ``shared N``: the same for prompts with a shared prefix of N tokens (``--shared``) and 8 tokens of
  their own, for the first prompt and for later ones.

Needs a quiet machine and the extras serve and dev; for the comparison llama-server of llama.cpp
(--llama-server), without it only nbflow is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from published_rows import append, conditions
from scheduling_overhead import Times, idle
from speculation import step_s

import nbflow
from nbflow.first_gpu_run.random_model import SHAPES, write
from nbflow.planner import planned_model

PROMPT, NEW = 64, 64
LONG = 512
"""Prompt length of `prefix`, limited by the context."""
OWN = 8
"""Unshared tokens of a prompt of `shared`."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Peer:
    """A running server."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    vocabulary: int
    """Vocabulary size: prompt ids are below it."""

    def processor_s(self) -> float:
        """Return the CPU time used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


@dataclass
class Sample:
    """Measurements of one run of clients."""

    seconds: float
    tokens: int
    first_s: list[float] = field(default_factory=list)
    processor_s: float = 0.0


# ---- servers ------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def started(name: str, command: list[str], port: int, vocabulary: int) -> Iterator[Peer]:
    """Start a server and wait until it is healthy."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 300
            while not healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    sys.exit(f"{name} did not start:\n{log.read().decode()[-3000:]}")
                time.sleep(0.2)
            yield Peer(name, process, port, vocabulary)
        finally:
            process.terminate()
            process.wait(60)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ours(
    model: Path, arguments: argparse.Namespace, times: Times = ()
) -> tuple[str, list[str], int]:
    """Return name, command and port of an nbflow server; its steps sleep if `times` is given."""
    port = free_port()
    program = ["-m", "nbflow"]
    if times:
        program = [str(Path(__file__).with_name("scheduling_overhead.py")), json.dumps(times)]
    command = [sys.executable, *program, "serve", str(model), "--port", str(port)]
    command += ["--activations", arguments.activations, "--threads", str(arguments.threads)]
    command += ["--log-level", "warning", "--max-sequences", str(max(arguments.clients))]
    return "nbflow", command, port


def theirs(model: Path, arguments: argparse.Namespace) -> tuple[str, list[str], int]:
    port, most = free_port(), max(arguments.clients)
    command = [arguments.llama_server, "-m", str(model), "--port", str(port), "-np", str(most)]
    context = max([1024, *(n + OWN + 64 for n in arguments.shared)])
    command += ["-c", str(most * context), "-t", str(arguments.threads), "--host", "127.0.0.1"]
    return "llama.cpp", command, port


# ---- clients ------------------------------------------------------------------------------------


async def ask(port: int, prompt: list[int], n: int, sample: Sample) -> None:
    """Send one request and read its stream with minimal client CPU time."""
    body = {"prompt": prompt, "max_tokens": n, "ignore_eos": True, "stream": True}
    data = json.dumps(body | {"temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    head += "content-type: application/json\r\nconnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began, first, held = time.perf_counter(), 0.0, b""
    writer.write(head.encode() + data)
    while chunk := await reader.read(65536):
        held = held[-64:] + chunk
        if not first and b"data: " in held:
            first = time.perf_counter()
        if b"data: [DONE]" in held:
            break
    else:
        raise RuntimeError(f"the answer broke off: {held[-500:]!r}")
    writer.close()
    sample.first_s.append(first - began)
    sample.tokens += n


def clients(peer: Peer, n_clients: int, n_requests: int, seed: int) -> Sample:
    """Send `n_requests` from concurrent clients."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, PROMPT, peer) for _ in range(n_requests)]
    sample = Sample(0.0, 0)

    async def one() -> None:
        while prompts:
            await ask(peer.port, prompts.pop(), NEW, sample)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(n_clients)))

    before, began = peer.processor_s(), time.perf_counter()
    asyncio.run(all_of_them())
    sample.seconds = time.perf_counter() - began
    sample.processor_s = peer.processor_s() - before
    return sample


def random_prompt(rng: random.Random, n: int, peer: Peer) -> list[int]:
    return [rng.randrange(300, peer.vocabulary) for _ in range(n)]


# ---- measurements -------------------------------------------------------------------------------


def throughput(peers: list[Peer], n: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    n_requests = max(arguments.requests, 2 * n)
    samples: dict[str, list[Sample]] = {peer.name: [] for peer in peers}
    for repeat in range(arguments.repeats + 1):
        for peer in peers:  # in turn, so that machine noise affects all peers alike
            sample = clients(peer, n, n_requests, seed=1000 * n + repeat)
            if repeat:  # the first one warms up
                samples[peer.name].append(sample)
    return [row(f"c{n}", peer.name, samples[peer.name]) for peer in peers]


def row(test: str, name: str, samples: list[Sample]) -> dict[str, Any]:
    rates = [s.tokens / s.seconds for s in samples]
    firsts = sorted(t for s in samples for t in s.first_s)
    return {
        "test": test,
        "server": name,
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_samples": rates,
        "first_token_s_p50": statistics.median(firsts),
        "first_token_s_p95": firsts[int(0.95 * (len(firsts) - 1))],
        "processor_s_per_1000_tokens": statistics.median(
            1000 * s.processor_s / s.tokens for s in samples
        ),
    }


def step_times(model: nbflow.LLM, counts: list[int]) -> list[tuple[int, float]]:
    """Return the seconds of decode steps for each batch size, and of a prefill step."""
    times = [(n, step_s(model, n, 1)) for n in sorted({1, *counts})]
    return [*times, (4 * times[-1][0], step_s(model, 1, 4 * times[-1][0]))]


def overhead(
    peer: Peer, model: nbflow.LLM, times: Times, n: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the serving overhead of `n` clients; steps sleep for `times`."""
    rng, n_requests = random.Random(5), max(arguments.requests, 2 * n)
    rows = []
    for name in ("engine", "http"):
        per_token, shares = [], []
        for repeat in range(arguments.repeats + 1):
            if name == "http":
                before = iteration_s(peer)
                sample = clients(peer, n, n_requests, seed=rng.randrange(10**9))
                in_steps = iteration_s(peer) - before
            else:
                prompts = [random_prompt(rng, PROMPT, peer) for _ in range(n_requests)]
                with idle(times):
                    sample, in_steps = in_engine(model, prompts, n)
            if repeat:
                per_token.append(1e6 * sample.processor_s / sample.tokens)
                shares.append(100 * sample.processor_s / in_steps)
        rows.append(
            {
                "test": f"overhead c{n}",
                "server": name,
                "processor_us_per_token": statistics.median(per_token),
                "percent_of_steps": statistics.median(shares),
                "step_s": dict(times)[n],
            }
        )
    return rows


def iteration_s(peer: Peer) -> float:
    """Return the accumulated step time of an nbflow server, in seconds."""
    with urllib.request.urlopen(f"http://127.0.0.1:{peer.port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    name = "vllm:iteration_seconds_total"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def in_engine(model: nbflow.LLM, prompts: list[list[int]], n: int) -> tuple[Sample, float]:
    """Return a sample of an engine in this process, and the seconds of its steps."""
    with nbflow.LLMEngine(model, max_sequences=n) as engine:
        before, began = time.process_time(), time.perf_counter()
        handles = [engine.submit(model.make_request(p, NEW, "greedy", 0, True)) for p in prompts]
        for handle in handles:
            handle.result()
        seconds, processor_s = time.perf_counter() - began, time.process_time() - before
        sample = Sample(seconds, NEW * len(prompts), processor_s=processor_s)
        return sample, engine.stats().step_seconds


def prefix(peers: list[Peer], n_tokens: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the time to first token of a long prompt, uncached and cached."""
    rng = random.Random(9)
    rows = []
    for peer in peers:
        new, seen = Sample(0.0, 0), Sample(0.0, 0)
        for _ in range(2 * arguments.repeats):
            prompt = random_prompt(rng, n_tokens, peer)
            for sample in (new, seen):
                asyncio.run(ask(peer.port, prompt, 1, sample))
        rows.append(
            {
                "test": f"prefix {n_tokens}",
                "server": peer.name,
                "first_token_s_new": statistics.median(new.first_s),
                "first_token_s_seen": statistics.median(seen.first_s),
            }
        )
    return rows


def shared(peers: list[Peer], n_tokens: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the time to first token of prompts that share `n_tokens` tokens."""
    rng = random.Random(11)
    samples = {peer.name: (Sample(0.0, 0), Sample(0.0, 0)) for peer in peers}
    for _ in range(arguments.repeats + 1):
        for peer in peers:
            known = random_prompt(rng, n_tokens, peer)
            first, *later = (known + random_prompt(rng, OWN, peer) for _ in range(4))
            new, seen = samples[peer.name]
            asyncio.run(ask(peer.port, first, 1, new))
            for prompt in later:
                asyncio.run(ask(peer.port, prompt, 1, seen))
    return [
        {
            "test": f"shared {n_tokens}",
            "server": name,
            "first_token_s_new": statistics.median(new.first_s[1:]),  # the first one warms up
            "first_token_s_seen": statistics.median(seen.first_s[3:]),
        }
        for name, (new, seen) in samples.items()
    ]


# ---- results ------------------------------------------------------------------------------------


class Results:
    """Rows of a run, appended to rows.jsonl one test after the other.

    Parameters
    ----------
    folder : Path
        Folder of rows.jsonl.
    facts : dict
        Conditions of the run, part of every row.
    only : str
        Tests whose name contains this.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], only: str) -> None:
        self._file, self._facts, self._only = folder / "rows.jsonl", facts, only

    def measure(self, test: str, call: Callable[[], list[dict[str, Any]]]) -> None:
        """Run a measurement and append its rows."""
        if self._only in test:
            rows = call()
            append(self._file, self._facts, rows)
            print_rows(rows)


def print_rows(rows: list[dict[str, Any]]) -> None:
    for line in rows:
        shown = {k: v for k, v in line.items() if not isinstance(v, list)}
        print(json.dumps(shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/nbflow-models"))
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument("--format", default="q4_0")
    parser.add_argument("--model", type=Path, help="a GGUF file, instead of random weights")
    parser.add_argument("--activations", default="int8", help="of nbflow; llama.cpp uses int8")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--shared", type=int, nargs="*", default=[], help="tokens in common")
    parser.add_argument("--requests", type=int, default=16, help="of a run, at least")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--llama-server", default=shutil.which("llama-server") or "")
    parser.add_argument("--only", default="", help="tests whose name contains this, e.g. c8")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.model or arguments.folder / f"{arguments.shape}-{arguments.format}.gguf"
    if not path.exists():
        if arguments.model:
            parser.error(f"the file {path} does not exist")
        write(path, SHAPES[arguments.shape], arguments.format)
    facts = {**conditions(), "model": path.stem, "prompt": PROMPT, "new": NEW}
    if arguments.llama_server:
        version = [arguments.llama_server, "--version"]
        answer = subprocess.run(version, capture_output=True, text=True)
        facts["llama_server"] = (answer.stdout + answer.stderr).splitlines()[0]
    facts |= {key: getattr(arguments, key) for key in ("activations", "threads", "repeats")}
    measure_all(path, Results(arguments.out, facts, arguments.only), arguments)


def measure_all(path: Path, results: Results, arguments: argparse.Namespace) -> None:
    """Start the servers and make every measurement."""
    spec = planned_model(path).spec
    with contextlib.ExitStack() as stack:
        n_long = min(LONG, spec.max_context // 64 * 64 - 64)
        peers = [stack.enter_context(started(*ours(path, arguments), spec.vocab_size))]
        if arguments.llama_server:
            theirs_ = started(*theirs(path, arguments), spec.vocab_size)
            peers.append(stack.enter_context(theirs_))
        for n in arguments.clients:
            results.measure(f"c{n}", partial(throughput, peers, n, arguments))
        results.measure(f"prefix {n_long}", partial(prefix, peers, n_long, arguments))
        for n in arguments.shared:
            results.measure(f"shared {n}", partial(shared, peers, n, arguments))
    with contextlib.ExitStack() as stack:

        @cache  # only if it is measured
        def idle_server() -> tuple[Peer, nbflow.LLM, Times]:
            options = {"activations": arguments.activations, "threads": arguments.threads}
            model = stack.enter_context(nbflow.load(path, **options))
            times = step_times(model, arguments.clients)
            server = started(*ours(path, arguments, times), spec.vocab_size)
            return stack.enter_context(server), model, times

        for n in arguments.clients:
            results.measure(f"overhead c{n}", lambda n=n: overhead(*idle_server(), n, arguments))


if __name__ == "__main__":
    main()

"""Measure continuous batching, chunked prefill, prefix caching and scheduling overhead.

    python tools/measure/batching.py MODEL [--requests 1,8,32] [--new 64] [-o FILE] [--seconds 240]

Four tables, each written to FILE (JSON) when complete; after --seconds none is started.  Variants
run in turn, and a ratio is the median of the rounds' ratios.

- ``throughput``: requests with prompts of mixed lengths, submitted to an engine at once, against
  sequential `LLM.generate`.
- ``chunks``: a long prompt arrives while others decode.  For each chunk size: the longest and the
  usual inter-token latency of the others, and the long prompt's time to first token.
- ``prefix``: time to first token of a prompt by the number of tokens shared with a cached one.
- ``overhead``: processor time of Python for a step without the model's own work (compiled
  calls excluded), in microseconds: scheduler, block table and sampling.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import nbflow
from nbflow.engine.request import Request
from nbflow.utils.atomic_write import write_text
from nbflow.utils.system import processor_name

LENGTHS = (16, 200, 48, 96, 8, 128, 64, 32)
"""Prompt lengths, cycled."""


def requests(model: nbflow.LLM, n: int, n_new: int) -> list[Request]:
    """Return `n` requests with prompts of mixed lengths; random ids, the same in every call."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(n):
        length = min(LENGTHS[i % len(LENGTHS)], model.spec.max_context - n_new)
        ids = rng.integers(0, model.spec.vocab_size, length)
        made.append(model.make_request(ids, n_new, "greedy", 0, ignore_eos=True))
        made[-1].wants_logprobs = False
    return made


def together(model: nbflow.LLM, batch: list[Request], **limits: Any) -> float:
    """Return the seconds an engine takes for requests that are submitted at once."""
    with nbflow.LLMEngine(model, prefix_cache=False, **limits) as engine:
        started = time.perf_counter()
        for handle in [engine.submit(r) for r in batch]:
            handle.result()
        return time.perf_counter() - started


def one_by_one(model: nbflow.LLM, batch: list[Request]) -> float:
    """Return the seconds for the same requests one after the other."""
    started = time.perf_counter()
    for request in batch:
        for _ in model.run_requests([request], burst_s=0.1):
            pass
    return time.perf_counter() - started


def throughput(model: nbflow.LLM, n: int, n_new: int, repeats: int) -> dict[str, Any]:
    """Return one row: requests per round, tokens per second, ratio."""
    rounds = []
    for _ in range(repeats + 1):
        a = together(model, requests(model, n, n_new))
        b = one_by_one(model, requests(model, n, n_new))
        rounds.append((a, b))
    rounds = rounds[1:]  # the first one compiles
    tokens = sum(len(r.prompt) + n_new for r in requests(model, n, n_new))
    return {
        "requests": n,
        "together_tokens_per_s": tokens / statistics.median(a for a, _ in rounds),
        "one_by_one_tokens_per_s": tokens / statistics.median(b for _, b in rounds),
        "ratio": statistics.median(b / a for a, b in rounds),
        "ratios": [b / a for a, b in rounds],
    }


def chunks(model: nbflow.LLM, size: int, n_others: int, repeats: int) -> dict[str, Any]:
    """Return the effect of a long prompt on decoding requests, for one chunk size."""
    length = model.spec.max_context - 8
    rng = np.random.default_rng(1)
    usual, longest, first = [], [], []
    with nbflow.LLMEngine(
        model, max_step_tokens=size, max_sequences=min(size, n_others + 1), prefix_cache=False,
        burst_s=0.0,
    ) as engine:  # fmt: skip
        for round_ in range(repeats + 1):
            came: list[float] = []

            def on_events(_: Any, events: list[Any], came: list[float] = came) -> None:
                came.append(time.perf_counter())

            others = [plain(model, rng, 8, model.spec.max_context - 16) for _ in range(n_others)]
            handles = [engine.submit(others[0], on_events)]
            handles += [engine.submit(request) for request in others[1:]]
            while len(came) < 20:
                time.sleep(1e-3)
            before = len(came)
            began = time.perf_counter()
            engine.submit(plain(model, rng, length, 1)).result()
            took = time.perf_counter() - began
            for handle in handles:
                handle.cancel()
                with contextlib.suppress(TimeoutError):
                    handle.result(60)
            if round_:  # the first one compiles
                usual.append(statistics.median(np.diff(came[5:before])))
                longest.append(max(np.diff(came[before - 1 :])))
                first.append(took)
    return {
        "step_tokens": size,
        "prompt": length,
        "others": n_others,
        "token_s_usual": statistics.median(usual),
        "token_s_longest": statistics.median(longest),
        "first_token_s": statistics.median(first),
    }


def prefix(model: nbflow.LLM, shared: int, repeats: int) -> dict[str, Any]:
    """Return the time to first token of a prompt with `shared` cached tokens."""
    length = model.spec.max_context - 8
    rng = np.random.default_rng(2)
    seconds, cached = [], []
    with nbflow.LLMEngine(model) as engine:
        for round_ in range(repeats + 1):
            known = plain(model, rng, length, 1)
            engine.submit(known).result()
            new = rng.integers(0, model.spec.vocab_size, length - shared).tolist()
            began = time.perf_counter()
            handle = engine.submit(asked(model, [*known.prompt[:shared], *new], 1))
            handle.result()
            if round_:
                seconds.append(time.perf_counter() - began)
                cached.append(handle.cached_tokens)
    return {
        "prompt": length,
        "shared_tokens": shared,
        "cached_tokens": statistics.median(cached),
        "first_token_s": statistics.median(seconds),
    }


def plain(model: nbflow.LLM, rng: np.random.Generator, length: int, n_new: int) -> Request:
    """Return a request with a random prompt."""
    return asked(model, rng.integers(0, model.spec.vocab_size, length).tolist(), n_new)


def asked(model: nbflow.LLM, ids: list[int], n_new: int) -> Request:
    """Return a request for `n_new` tokens."""
    request = model.make_request(ids, n_new, "greedy", 0, ignore_eos=True)
    request.wants_logprobs = False
    return request


def overhead(model: nbflow.LLM, n: int, n_steps: int = 200) -> dict[str, Any]:
    """Return Python's CPU time per step of `n` decoding requests."""
    rank = model.workers[0]
    batch = requests(model, n, min(n_steps, model.spec.max_context // 2))
    real = rank.executor.run, rank.executor.run_repeated

    def repeated(step: Any, decode_steps: Any, further: Any, n: int, stop: Any) -> None:
        decode_steps.n_steps[0] = n

    seconds = []
    try:
        steps = model.run_requests(batch, burst_s=0.0)
        while not all(r.ids for r in batch):
            next(steps)
        rank.executor.run_repeated = repeated
        before = time.thread_time()
        for _ in steps:
            now = time.thread_time()
            seconds.append(now - before)
            before = now
    finally:
        rank.executor.run, rank.executor.run_repeated = real
    return {"sequences": n, "python_us_per_step": statistics.median(seconds) * 1e6}


class Tables:
    """Result tables, written one by one.

    Parameters
    ----------
    path : Path, optional
        File to write.
    about : dict
        Measurement conditions.
    seconds : float
        Time limit for starting a table; 0: none.
    """

    def __init__(self, path: Path | None, about: dict[str, Any], seconds: float) -> None:
        self._path, self._whole = path, dict(about)
        self._end = time.monotonic() + seconds if seconds else float("inf")
        self.missing: list[str] = []

    def add(self, name: str, rows: Iterable[Callable[[], dict[str, Any]]]) -> None:
        """Measure the rows of a table, and write each."""
        made = self._whole.setdefault(name, [])
        for row in rows:
            if time.monotonic() > self._end:
                self.missing.append(name)
                return
            made.append(row())
            shown = {k: v for k, v in made[-1].items() if not isinstance(v, list)}
            print(name, json.dumps(shown), flush=True)
            if self._path is not None:
                write_text(self._path, json.dumps(self._whole, indent=1) + "\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--steps", default="32,128,512", help="chunk sizes, for chunks")
    parser.add_argument("--others", type=int, default=4, help="requests that decode meanwhile")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--weights")
    parser.add_argument("--activations", default="f32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("-o", "--output", type=Path, help="a JSON file")
    parser.add_argument("--seconds", type=float, default=0.0, help="start no table after S seconds")
    arguments = parser.parse_args()
    options = {k: getattr(arguments, k) for k in ("weights", "activations", "threads")}
    counts = [int(n) for n in arguments.requests.split(",")]
    sizes = [int(n) for n in arguments.steps.split(",")]
    about = {"model": arguments.model, "processor": processor_name(), **options}
    tables = Tables(arguments.output, about, arguments.seconds)
    repeats = arguments.repeats
    with nbflow.load(arguments.model, **options) as model:
        length = model.spec.max_context - 8
        shares = [round(length * share) for share in (0, 0.25, 0.5, 0.75, 1)]
        tables.add(
            "throughput", (partial(throughput, model, n, arguments.new, repeats) for n in counts)
        )
        tables.add("chunks", (partial(chunks, model, n, arguments.others, repeats) for n in sizes))
        tables.add("prefix", (partial(prefix, model, n, repeats) for n in shares))
        tables.add("overhead", (partial(overhead, model, n) for n in counts))
    if tables.missing:
        sys.exit(f"no time for all of {', '.join(tables.missing)}")


if __name__ == "__main__":
    main()

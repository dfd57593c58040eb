"""Throughput of requests with mixed prompts, together and one after the other; cost of scheduling.

python tools/measure_batching.py MODEL [--requests 1,8,32] [--new 64] [options of nbflow.load]

Each row runs the same requests twice in turn: through an engine, all submitted at once, and one
after the other with `Model.generate`.  ``x`` is the median of the rounds' ratios.  The last table
is the processor time of Python for one step without the model's own work (the compiled calls are
left out), in microseconds: what the scheduler, the page table and the drawing cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

import nbflow
from nbflow.engine.request import Request
from nbflow.system import processor_name

LENGTHS = (16, 200, 48, 96, 8, 128, 64, 32)
"""Prompt lengths, over and over."""


def requests(model: nbflow.Model, n: int, n_new: int) -> list[Request]:
    """Return `n` requests with prompts of mixed lengths; random ids, the same in every call."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(n):
        length = min(LENGTHS[i % len(LENGTHS)], model.spec.max_context - n_new)
        ids = rng.integers(0, model.spec.vocab_size, length)
        made.append(model.make_request(ids, n_new, "greedy", 0, ignore_eos=True))
        made[-1].wants_logprobs = False
    return made


def together(model: nbflow.Model, batch: list[Request], **limits: Any) -> float:
    """Return the seconds an engine takes for requests that are submitted at once."""
    with nbflow.Engine(model, prefix_cache=False, **limits) as engine:
        started = time.perf_counter()
        for handle in [engine.submit(r) for r in batch]:
            handle.result()
        return time.perf_counter() - started


def one_by_one(model: nbflow.Model, batch: list[Request]) -> float:
    """Return the seconds for the same requests one after the other."""
    started = time.perf_counter()
    for request in batch:
        for _ in model.run_requests([request], burst_s=0.1):
            pass
    return time.perf_counter() - started


def throughput(model: nbflow.Model, n: int, n_new: int, repeats: int) -> dict[str, Any]:
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


def overhead(model: nbflow.Model, n: int, n_steps: int = 200) -> dict[str, Any]:
    """Return the processor time of Python for a step of `n` generating requests."""
    rank = model.engines[0]
    batch = requests(model, n, min(n_steps, model.spec.max_context // 2))
    real = rank.executor.run, rank.executor.run_repeated

    def repeated(step: Any, burst: Any, further: Any, n: int, stop: Any) -> None:
        burst.n_steps[0] = n

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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--weights")
    parser.add_argument("--activations", default="f32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options = {k: getattr(arguments, k) for k in ("weights", "activations", "threads")}
    counts = [int(n) for n in arguments.requests.split(",")]
    with nbflow.load(arguments.model, **options) as model:
        rows = [throughput(model, n, arguments.new, arguments.repeats) for n in counts]
        costs = [overhead(model, n) for n in counts]
    if arguments.json:
        about = {"model": arguments.model, "processor": processor_name(), **options}
        print(json.dumps({**about, "throughput": rows, "overhead": costs}, indent=2))
        return
    print("requests  together tokens/s  one by one tokens/s      x")
    for r in rows:
        print(
            f"{r['requests']:8d}  {r['together_tokens_per_s']:17,.0f}  "
            f"{r['one_by_one_tokens_per_s']:19,.0f}  {r['ratio']:5.2f}"
        )
    print("\nsequences  Python us per step")
    for c in costs:
        print(f"{c['sequences']:9d}  {c['python_us_per_step']:18.0f}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure the engine's throughput gain from reading shared KV pages once.

    python tools/measure/shared_pages.py [--requests 8 16 32] [--kv f16 q8_0]

Requests whose prompts share a cached prefix of 384 tokens, followed by 16 tokens of their own,
generate 96 tokens each in one batch.  The engine has no option for it, since tokens are identical,
which is checked; the baseline patches attention plans to disable sharing.  Models are loaded
in turn, twice per setting; medians of six rounds.  Results go to results/engine/<machine>.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
from formats import machine_name

import nbflow
from nbflow.executor import bind
from nbflow.utils import system
from nbflow_experiments.measures.engine_requests import (
    Round,
    TimedRequest,
    random_prompt,
    serve,
    with_engine,
)
from nbflow_kernels.attention import AttentionPlan

RESULTS = Path(__file__).resolve().parents[2] / "results" / "engine"
SHARED, OWN, NEW = 384, 16, 96


def rounds(model: nbflow.LLM, n: int) -> list[Round]:
    """Return three rounds of `n` requests, after one that compiles and fills the prefix cache."""
    rng = np.random.default_rng(0)
    common = random_prompt(model, rng, SHARED)
    own = [random_prompt(model, rng, OWN) for _ in range(n)]
    requests = [TimedRequest(np.concatenate([common, ids]), NEW) for ids in own]
    found = with_engine(model, lambda engine: [serve(engine, requests) for _ in range(4)])
    assert found is not None
    return found[1:]


def measure(model_name: str, weights: str, kv: str, n: int) -> dict[str, Any]:
    """Return the speeds with and without sharing."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    texts = set()
    for may_share in (False, True, False, True):
        plan: Any = functools.partial(AttentionPlan, disable_page_sharing=not may_share)
        bind.AttentionPlan = plan
        with nbflow.load(model_name, weights=weights, kv=kv) as model:
            done = rounds(model, n)
        seconds[may_share] += [r.seconds for r in done]
        texts |= {tuple(result.ids for result in r.results) for r in done}
    if len(texts) != 1:
        raise SystemExit("the tokens are not the same with and without sharing")
    flat, shared = (n * NEW / float(np.median(seconds[may_share])) for may_share in (False, True))
    return {
        "kv": kv, "requests": n, "each_for_itself_tokens_per_s": round(flat),
        "read_once_tokens_per_s": round(shared), "speedup": round(shared / flat, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny_python")
    parser.add_argument("--weights", default="q4")
    parser.add_argument("--kv", nargs="+", default=["f16", "q8_0"])
    parser.add_argument("--requests", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--machine", default=machine_name(), help="folder in results/engine")
    arguments = parser.parse_args()
    rows = []
    for kv in arguments.kv:
        for n in arguments.requests:
            rows.append(measure(arguments.model, arguments.weights, kv, n))
            print(rows[-1], flush=True)
    lengths = {"shared_tokens": SHARED, "own_tokens": OWN, "new_tokens": NEW}
    facts = {
        "model": arguments.model, "weights": arguments.weights, **lengths,
        "packages": system.package_versions(), "rows": rows,
    }  # fmt: skip
    folder = RESULTS / arguments.machine
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shared_pages.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure what keys cached before RoPE cost in attention: the same calls with and without, in turn.

    python tools/measure/pre_rope_cost.py results/kv_cache/MACHINE/pre_rope_cost.jsonl

A row has the ratio pre_rope / post_rope of the time of one attention call over a cache of 2048 keys
(8 key/value heads of 128, 32 query heads), for one query row (decode) or 128 (a chunk of a prompt),
as a median over rounds.  Keys have a bias.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from published_rows import append, conditions

import nbflow_kernels as nk
from nbflow_kernels.kv_cache.reference import encode

H, G, D, N_KEYS, ROUNDS = 32, 8, 128, 2048, 15
FORMATS = ("f16", "q8_0", "q4_0")
ROWS = (1, 128)


def calls(name: str, n_rows: int) -> list[Callable[[], Any]]:
    """Return the call over keys after RoPE, and that over keys before it."""
    rng = np.random.default_rng(0)
    format = nk.kv_format(name)
    k, v = (
        encode(rng.standard_normal((G, N_KEYS, D)).astype(np.float32), format.dtype, format.name)
        for _ in "kv"
    )
    q = rng.standard_normal((n_rows, H, D)).astype(np.float32)
    rope = {
        "key_cos_sin": nk.rope_cos_sin_cache(N_KEYS, D, theta=1e4),
        "key_bias": rng.standard_normal((G, D)).astype(np.float32),
    }

    def call(options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: nk.single_prefill_with_kv_cache(
            q, k, v, causal=True, kv_layout="HND", kv_format=name, **options
        )

    return [call({}), call(rope)]


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    out, facts = parser.parse_args().out, conditions() | {"rounds": ROUNDS}
    rows = []
    for name in FORMATS:
        for n_rows in ROWS:
            pair = calls(name, n_rows)
            for call in pair:
                call()  # compiles
            times = [[seconds(call) for call in pair] for _ in range(ROUNDS)]
            ratio = statistics.median(b / a for a, b in times)
            first = statistics.median(a for a, _ in times)
            rows.append({"kv": name, "rows": n_rows, "post_rope_s": first, "ratio": ratio})
            print(rows[-1])
    append(out, facts, rows)


if __name__ == "__main__":
    main()

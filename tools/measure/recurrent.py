#!/usr/bin/env python3
"""Time the gated delta rule and Mamba-2: prompts in chunks and steps, formats of the state.

    python tools/measure/recurrent.py results/recurrent/MACHINE.jsonl [--threads 1]

One layer of Qwen3-Next, of Kimi Linear, and of Mamba-2 2.7B.  The calls run in turn; a row has the
medians of their wall time and of the thread's CPU time (of one thread only) and the least of the
latter, the bytes that the call must read and write, and the rate at which one thread read memory in
the same turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from published_rows import append, conditions

import nbflow_kernels as nk
from nbflow_kernels.cpu.parallel_for import set_num_threads
from nbflow_kernels.op_registry import all_cases
from nbflow_kernels.testing import checks

CASES = {
    **{
        name: f"gated_delta_rule-qwen3_next_{name}"
        for name in ("prefill", "prefill_steps", "decode_8", "decode_8_half", "decode_8_q8_0")
    },
    "kimi_prefill": "gated_delta_rule-kimi_linear_prefill",
    "kimi_prefill_steps": "gated_delta_rule-kimi_linear_prefill",
    "mamba2_prefill": "mamba2_scan-mamba2_2_7b_prefill_512",
    "mamba2_steps": "mamba2_scan-mamba2_2_7b_steps_31",
}
READ_FLOATS = 1 << 25


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    set_num_threads(arguments.threads)
    facts = conditions()
    known = {case.id: case for case in all_cases()}
    cases = [known[name] for name in CASES.values()]
    inputs = [checks.make_inputs(case) for case in cases]
    inputs[list(CASES).index("kimi_prefill_steps")]["chunked"] = False
    floats, taken, rates = np.ones(READ_FLOATS, np.float32), [[] for _ in cases], []
    for case, given in zip(cases, inputs, strict=True):
        getattr(nk, case.op)(**given)  # compiles
    for _ in range(arguments.repeats):
        for case, given, times in zip(cases, inputs, taken, strict=True):
            wall, cpu = time.perf_counter(), time.thread_time()
            getattr(nk, case.op)(**given)
            times.append((time.perf_counter() - wall, time.thread_time() - cpu))
        start = time.perf_counter()
        floats.max()
        rates.append(floats.nbytes / (time.perf_counter() - start))
    rows: list[dict[str, Any]] = []
    for name, case, times in zip(CASES, cases, taken, strict=True):
        wall, cpu = (statistics.median(t[i] for t in times) for i in range(2))
        rows.append({
            "case": name, "threads": arguments.threads, "wall_ms": 1e3 * wall, "cpu_ms": 1e3 * cpu,
            "least_cpu_ms": 1e3 * min(t[1] for t in times), "n_bytes": case.n_bytes,
            "read_gb_per_s": statistics.median(rates) / 1e9,
        })  # fmt: skip
        print(rows[-1], flush=True)
    by_case = {row["case"]: row for row in rows}
    # chunks, steps, how many times as many tokens the chunks have
    for case, chunks, steps, more in (
        ("ratio", "prefill", "prefill_steps", 1.0),
        ("kimi_ratio", "kimi_prefill", "kimi_prefill_steps", 1.0),
        ("mamba2_ratio", "mamba2_prefill", "mamba2_steps", 512 / 31),
    ):
        median, least = (
            more * by_case[steps][key] / by_case[chunks][key] for key in ("cpu_ms", "least_cpu_ms")
        )
        rows.append({"case": case, "steps_by_chunks": median, "least_by_least": least})
        print(rows[-1], flush=True)
    append(arguments.out, facts, rows)


if __name__ == "__main__":
    main()

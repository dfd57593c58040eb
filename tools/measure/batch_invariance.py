#!/usr/bin/env python3
"""Measure the cost of batch invariance: fixed summation orders against free ones.

    python tools/measure/batch_invariance.py results/engine/MACHINE/invariance [--model FILE]

Writes rows.json and table.md.  The same kernels are timed in the engine's fixed summation order,
and in orders that results depending on the batch would allow; shape: the 1.1B model of
`nbflow.first_gpu_run.random_model`, float16 KV cache, q4_0 weights, int8 activations.  Variants
run in turn; a ratio is the median of the rounds' ratios.  The best variant is chosen from the same
rounds, so ratios of 1.00 to 1.03 are noise.

- ``decode``: attention of B sequences with one new token each.  The engine splits the KV cache
  every 2,048 keys; compared with the best other split for this batch and length.
- ``prefill``: the same for the rows of a prompt.
- ``products``: matmuls of a layer and the head.  The engine adds the blocks of a row sequentially;
  ``one_over_two_chains`` is the time of such a kernel over that of the same kernel with independent
  accumulators for even and odd blocks.  ``fixed_over_best`` compares the engine's kernel with the
  alternatives (all have the same order, so the choice is free).  ``percent_of_bound`` is the
  roofline time, of a plain loop that reads the weights or of multiply-adds from registers, in
  percent of the engine's kernel.
- ``steps`` (with --model FILE): a whole step of 1, 8 and 32 sequences, the share of the differences
  above, and the tokens per second with and without them.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from speculation import step_s

import nbflow
import nbflow_kernels as nk
from nbflow.first_gpu_run.random_model import SHAPES
from nbflow.utils.system import package_versions, processor_name
from nbflow_kernels.attention.cpu import launch as attention
from nbflow_kernels.attention.plan import AttentionPlan, plan_into
from nbflow_kernels.attention.plan_layout import SPLIT
from nbflow_kernels.benchmarks.roofline import ReadProbe, compute_peak
from nbflow_kernels.cpu import jit, register_tiles_int8, simd
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode
from nbflow_kernels.cpu.parallel_for import capture, get_num_threads, run_graph, set_num_threads
from nbflow_kernels.cpu.simd_memory import prefetch_lines
from nbflow_kernels.formats.decode_cpu import codes, d_of
from nbflow_kernels.formats.layout_cpu import CpuLayout, CpuPacked
from nbflow_kernels.quantized_matmul import cpu, cpu_gemm_int8, cpu_gemv_int8
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows, quantize_activations

SHAPE = SHAPES["1.1b"]
LAYERS, WIDTH, INNER, VOCABULARY = SHAPE.n_layers, SHAPE.width, SHAPE.ffn_width, SHAPE.vocabulary
HEADS, KV_HEADS = SHAPE.n_heads, SHAPE.n_kv_heads
DIM, PAGE = WIDTH // HEADS, 64
MATRICES = {
    "qkv": (WIDTH + 2 * KV_HEADS * DIM, WIDTH),
    "o": (WIDTH, WIDTH),
    "gate_up": (2 * INNER, WIDTH),
    "down": (WIDTH, INNER),
    "head": (VOCABULARY, WIDTH),
}
WHOLE = 1 << 30
SPLITS = (128, 256, 512, 1024, SPLIT, WHOLE)
"""Keys per KV split; the last: no split."""
POOL_BYTES = 256 << 20
"""Bytes of keys and values of the timed layers: more than the last-level cache."""
LEAST_S = 2e-3
"""Minimum duration of a sample."""

Row = dict[str, Any]


def rounds(runs: dict[Any, Callable[[], Any]], n: int) -> dict[Any, list[float]]:
    """Return the seconds of each run in `n` interleaved rounds."""
    seconds: dict[Any, list[float]] = {key: [] for key in runs}
    repeats, order = dict.fromkeys(runs, 1), {key: i for i, key in enumerate(runs)}
    for round_ in range(-1, n):  # the first one compiles
        # alternate the order, so that no run always follows the same one
        for key, run in sorted(runs.items(), key=lambda item: order[item[0]] * (-1) ** round_):
            started = time.perf_counter()
            for _ in range(repeats[key]):
                run()
            taken = (time.perf_counter() - started) / repeats[key]
            if round_ < 0:
                run()
                started = time.perf_counter()
                run()
                repeats[key] = max(1, int(LEAST_S / (time.perf_counter() - started)))
            else:
                seconds[key].append(taken)
    return seconds


def compared(seconds: dict[Any, list[float]], fixed: Any) -> Row:
    """Return the times of the fixed order and of the best one, and their ratio."""
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    best = min(medians, key=lambda key: medians[key])
    ratios = [a / b for a, b in zip(seconds[fixed], seconds[best], strict=True)]
    return {
        "fixed_us": 1e6 * medians[fixed],
        "best_us": 1e6 * medians[best],
        "best": "whole" if best == WHOLE else best,
        "fixed_over_best": statistics.median(ratios),
    }


# ---- attention ----------------------------------------------------------------------------------


@functools.cache
def pool() -> tuple[np.ndarray, np.ndarray]:
    """Return pages for keys and for values."""
    rng = np.random.default_rng(0)
    shape = (POOL_BYTES // 2 // (2 * KV_HEADS * PAGE * DIM), KV_HEADS, PAGE, DIM)
    page = rng.standard_normal((16, *shape[1:])).astype(np.float16)
    keys = page[np.arange(shape[0]) % 16]
    return keys, keys.copy()


def attention_calls(n: int, rows: int, length: int, split: int) -> tuple[CpuGraph, int]:
    """Return the captured attention calls of as many layers as the pages hold, and their number."""
    keys, values = pool()
    pages = -(-length // PAGE)
    layers = min(LAYERS, len(keys) // (n * pages), max(2, LAYERS // rows))
    qo_indptr = np.arange(n + 1, dtype=np.int32) * np.int32(rows)
    kv_indptr = np.arange(n + 1, dtype=np.int32) * np.int32(pages)
    indices = np.arange(n * pages, dtype=np.int32)
    plan = AttentionPlan(
        (HEADS, KV_HEADS, DIM, DIM), PAGE, kv_layout="HND", sm_scale=DIM**-0.5, split_keys=split
    )
    plan_into(plan, qo_indptr, kv_indptr, indices, np.full(n, length, np.int32))
    rng = np.random.default_rng(1)
    q = rng.standard_normal((n * rows, HEADS, DIM), dtype=np.float32)
    out = np.empty_like(q)
    calls: list[GraphNode] = []
    for layer in range(layers):
        part = slice(layer * n * pages, (layer + 1) * n * pages)
        with capture() as seen:
            attention.attend(plan, q, keys[part], values[part], out, None, (1, 1))
            if plan.n_merges:
                attention.merge_splits(plan, out, None)
        calls += seen.calls
    calls[-1] = GraphNode(
        **{**vars(calls[-1]), "held": (plan, q, out, qo_indptr, kv_indptr, indices)}
    )
    return CpuGraph(calls, get_num_threads()), layers


def attend(n: int, rows: int, length: int, n_rounds: int) -> Row:
    """Return a row: attention of one layer with the engine's KV split, and the best one."""
    lists = {s: attention_calls(n, rows, length, s) for s in SPLITS if s < length or s >= SPLIT}
    runs = {s: functools.partial(run_graph, found) for s, (found, _) in lists.items()}
    layers = lists[SPLIT][1]
    found = compared(rounds(runs, n_rounds), SPLIT)
    each = {key: found[key] / layers for key in ("fixed_us", "best_us")}
    return {"sequences": n, "rows": rows, "keys": length, **found, **each}


# ---- products -----------------------------------------------------------------------------------


@functools.cache
def in_chains(form: CpuLayout, tokens: int, n: int) -> Any:
    """Return `cpu_gemv_int8.gemv` for blocks like q4_0's, with one or two accumulators."""
    block_bytes, zero, one = form.block_bytes, np.int32(-form.zero), n == 1

    @jit.kernel
    def kernel(
        x: Any, n_tokens: Any, scales: Any, sums: Any, packed: Any, n_blocks: Any, bias: Any,
        accumulate: Any, out: Any, start: Any, stop: Any,
    ) -> None:  # fmt: skip
        x_step, d_step, n_step = x.strides[0], scales.strides[0], sums.strides[0]
        result = np.empty((tokens, 16), np.float32)
        for group in range(start, stop):
            for first in range(0, n_tokens, tokens):
                at = simd.address(packed) + group * n_blocks * block_bytes
                x_at, d_at = simd.address(x) + first * x_step, simd.address(scales) + first * d_step
                n_at = simd.address(sums) + first * n_step
                even, odd = (
                    register_tiles_int8.zeros(1, tokens),
                    register_tiles_int8.zeros(1, tokens),
                )
                for _ in range(n_blocks // 2):
                    for chain in range(2):
                        if first == 0:
                            prefetch_lines(at + cpu_gemv_int8.PREFETCH_BYTES, 5)
                        ints = register_tiles_int8.starts(1, tokens, n_at, n_step, zero)
                        for v in range(8):
                            u = codes(form, at, 0, v)
                            ints = register_tiles_int8.dots(ints, u, 0, x_at + 4 * v, x_step, 4)
                        d = d_of(form, at, 0)
                        if one or chain == 0:
                            even = register_tiles_int8.scaled(even, ints, d, 0, d_at, d_step)
                        else:
                            odd = register_tiles_int8.scaled(odd, ints, d, 0, d_at, d_step)
                        at, x_at, d_at, n_at = at + block_bytes, x_at + 32, d_at + 4, n_at + 4
                if not one:
                    even = register_tiles_int8.add(even, odd)
                register_tiles_int8.store(simd.address(result), even)
                for t in range(min(tokens, n_tokens - first)):
                    for i in range(16):
                        out[first + t, 16 * group + i] = result[t, i]

    return kernel


def multiply(name: str, T: int, n_rounds: int, probe: ReadProbe) -> Row:
    """Return a row: one matmul with `T` rows, in the engine's summation order and in another."""
    N, K = MATRICES[name]
    rng = np.random.default_rng(2)
    some = rng.standard_normal((512, K), dtype=np.float32)
    weight = nk.quantize(some, "q4_0", quantizer="reference")
    packed = nk.QuantTensor("q4_0", (N, K), weight.data[np.arange(N) % 512]).packed()
    assert isinstance(packed, CpuPacked)
    # enough copies to exceed the last-level cache
    matrices = [packed.data.copy() for _ in range(-(-POOL_BYTES // 4 // packed.data.nbytes))]
    x, out = rng.standard_normal((T, K), dtype=np.float32), np.empty((T, N), np.float32)
    rows = Int8Rows.empty(T, K)
    quantize_activations(x, rows)

    def run(kernel: Any) -> Callable[[], None]:
        calls = [
            GraphNode(
                kernel,
                (
                    *(rows.codes, T, rows.scales, rows.sums, data, packed.n_blocks),
                    *(np.zeros(0, np.float32), False, out),
                ),
                packed.n_groups,
                float(T) * N * K,
            )
            for data in matrices
        ]
        return functools.partial(run_graph, CpuGraph(calls, get_num_threads()))

    form = packed.form
    tile = cpu.gemv_tile(form, T)
    ours = {
        "gemv": cpu_gemv_int8.gemv(form, tile),
        "gemm": cpu_gemm_int8.gemm(form),
    }
    chosen = next(k for k, kernel in ours.items() if kernel is cpu.int8_kernel(form, T))
    chains = {n: in_chains(form, tile, n) for n in (1, 2)}
    runs: dict[Any, Any] = {key: run(kernel) for key, kernel in (ours | chains).items()}
    peaks = [compute_peak("int8")]
    seconds = rounds(runs | {"read": probe.seconds}, n_rounds)
    peaks.append(compute_peak("int8"))
    reads, one, two = (seconds.pop(key) for key in ("read", 1, 2))
    found = compared(seconds, chosen)
    each = {key: found[key] / len(matrices) for key in ("fixed_us", "best_us")}
    least_s = packed.data.nbytes * statistics.median(reads) / probe.n_bytes
    bound_s = max(least_s, 2.0 * T * N * K / max(peaks))
    return {
        "matrix": name,
        "rows": T,
        "one_over_two_chains": statistics.median(a / b for a, b in zip(one, two, strict=True)),
        "percent_of_bound": 100e6 * bound_s / each["fixed_us"],
        "fixed": chosen,
        **found,
        **each,
    }


# ---- steps --------------------------------------------------------------------------------------


def steps(file: Path, decode: list[Row], products: list[Row]) -> list[Row]:
    """Return the share of the differences in whole steps."""
    made = []
    with nbflow.load(file, activations="int8", threads=get_num_threads()) as model:
        for n in (1, 8, 32):
            whole = step_s(model, n, 1)
            times = {m: LAYERS if m != "head" else 1 for m in MATRICES}
            # a slower free order gains nothing
            lost = sum(
                times[r["matrix"]] * r["fixed_us"] * max(0.0, 1 - 1 / r["one_over_two_chains"])
                for r in products
                if r["rows"] == n
            )
            short = min((r for r in decode if r["sequences"] == n), key=lambda r: r["keys"])
            for row in (r for r in decode if r["sequences"] == n):
                fixed = whole + 1e-6 * LAYERS * (row["fixed_us"] - short["fixed_us"])
                more = LAYERS * row["fixed_us"] * max(0.0, 1 - 1 / row["fixed_over_best"])
                free = fixed - 1e-6 * (lost + more)
                made.append(
                    {
                        "sequences": n,
                        "keys": row["keys"],
                        "step_ms": 1e3 * fixed,
                        "attention_percent": 1e-4 * more / fixed,
                        "products_percent": 1e-4 * lost / fixed,
                        "tokens_per_s": n / fixed,
                        "tokens_per_s_free": n / free,
                    }
                )
    return made


def table(rows: list[Row]) -> str:
    """Return rows as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = (f"{c:.4g}" if isinstance(c, float) else str(c) for c in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the results after each section."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="a GGUF file of the 1.1B shape, for whole steps")
    parser.add_argument("--keys", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=get_num_threads())
    arguments = parser.parse_args()
    set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {
        "processor": processor_name(), "packages": package_versions(),
        "threads": arguments.threads, "rounds": arguments.rounds,
    }  # fmt: skip
    facts = list(made)
    n_rounds = arguments.rounds

    def add(name: str, rows: list[Row]) -> None:
        made[name] = rows
        print(f"{name}\n{table(rows)}\n", flush=True)
        (arguments.out / "rows.json").write_text(json.dumps(made, indent=1) + "\n")
        tables = [f"## {key}\n\n{table(made[key])}\n" for key in made if key not in facts]
        (arguments.out / "table.md").write_text("\n".join(tables))

    add(
        "decode",
        [attend(n, 1, k, n_rounds) for n in arguments.sequences for k in arguments.keys],
    )
    several = [t for t in arguments.rows if t >= 128]
    lengths = [k for k in arguments.keys if k >= 512]
    prefills = [attend(1, t, k, n_rounds) for t in several for k in lengths]
    if prefills:
        add("prefill", prefills)
    probe = ReadProbe(n_bytes=64 << 20)
    add("products", [multiply(m, t, n_rounds, probe) for m in MATRICES for t in arguments.rows])
    if arguments.model is not None:
        add("steps", steps(arguments.model, made["decode"], made["products"]))


if __name__ == "__main__":
    main()

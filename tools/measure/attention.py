#!/usr/bin/env python3
"""Measure attention on the CPU: variants, skewed batches and page sizes.

    python tools/measure/attention.py results/attention/MACHINE [variants] [skew] [pages] [decode]

variants  user-defined functions next to the built-in options that they repeat
skew      decode of one long and many short requests: the plan's schedule next to a static one, in
          which every thread has as many requests and no keys are split
pages     decode over pages of 1 to 64 tokens: bytes of keys and values per second, next to the
          read bandwidth of the machine
decode    one sequence, one thread, keys and values in the third-level cache: time per number of the
          cache next to that of its multiply-adds; the fastest of many runs, on a machine that
          others use, too

What is compared runs in turn in one process; rows have the medians.  Rows are appended to
`rows.jsonl` of the folder.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from published_rows import append, conditions

import nbflow_kernels as nk
from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.benchmarks.roofline import compute_peak, read_bandwidth
from nbflow_kernels.cpu.parallel_for import get_num_threads, set_num_threads
from nbflow_kernels.kv_cache.cases import page_table
from nbflow_kernels.kv_cache.cpu_codec import KINDS

H, G, D = 32, 8, 128


def in_turn(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each run, made in turn after one of each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    return {name: float(np.median(times)) for name, times in seconds.items()}


# ---- variants ------------------------------------------------------------------------------------


def capped(params: Any, logit: Any, batch: Any, qo: Any, kv: Any, head: Any, g: Any) -> Any:
    return params[0] * math.tanh(logit / params[0])


def alibi(params: Any, logit: Any, batch: Any, qo: Any, kv: Any, head: Any, g: Any) -> Any:
    return logit + params[0][head] * (kv - qo - params[1])


def window(params: Any, batch: Any, qo: Any, kv: Any, head: Any, g: Any) -> Any:
    return kv >= qo + params[0] - params[1]


def causal(params: Any, batch: Any, qo: Any, kv: Any, head: Any, g: Any) -> Any:
    return kv <= qo + params[0]


def variants(repeats: int, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Yield rows: variants next to the same built-in attention, one thread."""
    rng = np.random.default_rng(0)
    before = get_num_threads()
    set_num_threads(1)
    for n in lengths:
        k, v = (rng.standard_normal((n, G, D)).astype(np.float16) for _ in "kv")
        for rows in (1, 64):
            q = rng.standard_normal((rows, H, D)).astype(np.float32)
            first, slopes = n - rows, nk.alibi_slopes(H).astype(np.float64)
            same: dict[str, tuple[dict[str, Any], nk.AttentionVariant, bool]] = {
                "causal": ({}, nk.AttentionVariant(logits_mask=causal, params=(first,)), False),
                "soft cap": (
                    {"logits_soft_cap": 30.0},
                    nk.AttentionVariant(logits_transform=capped, params=(30.0,)), True,
                ),
                "ALiBi": (
                    {"pos_encoding_mode": "ALIBI"},
                    nk.AttentionVariant(logits_transform=alibi, params=(slopes, first)), True,
                ),
                "window": (
                    {"window_left": 256},
                    nk.AttentionVariant(logits_mask=window, params=(first, 256)), True,
                ),
            }  # fmt: skip
            for name, (options, variant, masked) in same.items():

                def built_in(q: Any = q, k: Any = k, v: Any = v, options: Any = options) -> Any:
                    return nk.single_prefill_with_kv_cache(q, k, v, causal=True, **options)

                def own(
                    q: Any = q, k: Any = k, v: Any = v, one: Any = variant, masked: bool = masked
                ) -> Any:
                    return nk.single_prefill_with_kv_cache(q, k, v, causal=masked, variant=one)

                # scores of both are off by 1e-6 (`attention.cases`)
                np.testing.assert_allclose(own(), built_in(), rtol=0, atol=2e-5)
                found = in_turn({"built_in": built_in, "variant": own}, repeats)
                yield {
                    "test": f"{name}, {rows} rows, {n} keys", "attention": name, "rows": rows,
                    "keys": n, **{f"{side}_s": s for side, s in found.items()},
                    "variant_over_built_in": round(found["variant"] / found["built_in"], 2),
                }  # fmt: skip
    set_num_threads(before)


# ---- batches -------------------------------------------------------------------------------------


def decode_wrapper(lens: list[int], page: int, layout: str, *, split: bool = True) -> Any:
    """Return a planned wrapper, and its cache in float16."""
    rng = np.random.default_rng(0)
    indptr, indices, last = page_table(rng, lens, page)
    shape = (len(indices), page, G, D) if layout == "NHD" else (len(indices), G, page, D)
    cache = tuple(rng.standard_normal(shape, np.float32).astype(np.float16) for _ in "kv")
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(kv_layout=layout)
    wrapper.plan(indptr, indices, last, H, G, D, page, disable_split_kv=not split)
    return wrapper, cache


def make_static(plan: Any) -> None:
    """Give every thread as many requests, in their order, whatever their lengths."""
    n = plan.n_shares
    by_request = np.argsort(plan.items[:, plan.COLUMNS.index("request")], kind="stable")
    plan.items[:] = plan.items[by_request]
    plan.shares[:] = [round(i * plan.n_items / n) for i in range(n + 1)]


def largest_share(plan: Any) -> float:
    """Return the part of the work that the busiest thread has, by the plan's costs."""
    cost = plan.items[:, plan.COLUMNS.index("cost")]
    shares = [cost[a:b].sum() for a, b in itertools.pairwise(plan.shares)]
    return round(float(max(shares) / cost.sum()), 3)


def skew(repeats: int, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Yield rows: one long request and 15 short ones, by two schedules."""
    threads = get_num_threads()
    for longest in lengths:
        for short in (64, longest):  # the second: an even batch
            lens = [longest] + [short] * 15
            q = np.random.default_rng(1).standard_normal((len(lens), H, D)).astype(np.float32)
            planned, cache = decode_wrapper(lens, 16, "HND")
            static, _ = decode_wrapper(lens, 16, "HND", split=False)
            make_static(static.current)
            np.testing.assert_array_equal(planned.run(q, cache), static.run(q, cache))
            found = in_turn(
                {"plan": lambda p=planned, c=cache, q=q: p.run(q, c),
                 "static": lambda p=static, c=cache, q=q: p.run(q, c)}, repeats,
            )  # fmt: skip
            yield {
                "test": f"{longest} and 15 of {short} keys", "longest": longest, "short": short,
                "threads": threads, **{f"{side}_s": s for side, s in found.items()},
                "static_over_plan": round(found["static"] / found["plan"], 2),
                "static_largest_share": largest_share(static.current),
                "plan_largest_share": largest_share(planned.current),
            }  # fmt: skip


def pages(repeats: int, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Yield rows: bandwidth of decode by page size and layout, all threads."""
    peak = read_bandwidth(get_num_threads())
    for n in lengths:
        lens = [n] * 4
        q = np.random.default_rng(1).standard_normal((len(lens), H, D)).astype(np.float32)
        for layout in ("NHD", "HND"):
            runs = {}
            for page in (1, 2, 4, 8, 16, 32, 64):
                wrapper, cache = decode_wrapper(lens, page, layout)
                runs[str(page)] = lambda w=wrapper, c=cache, q=q: w.run(q, c)
            for page, seconds in in_turn(runs, repeats).items():
                speed = sum(lens) * G * D * 2 * 2 / seconds
                yield {
                    "test": f"pages of {page}, {layout}, {n} keys", "page_size": int(page),
                    "layout": layout, "keys": n, "requests": len(lens), "seconds": seconds,
                    "threads": get_num_threads(), "gb_per_s": round(speed / 1e9, 2),
                    "read_gb_per_s": round(peak / 1e9, 2), "share": round(speed / peak, 3),
                }  # fmt: skip


# ---- decode --------------------------------------------------------------------------------------


def quantized_pages(pages: np.ndarray, format: str) -> np.ndarray:
    """Return pages of float32 in a format of the cache."""
    if format == "f16":
        return pages.astype(np.float16)
    data = nk.quantize(pages.reshape(-1, pages.shape[-1]), format, quantizer="reference").data
    return data.reshape(*pages.shape[:3], -1)


def decode_seconds(
    heads: tuple[int, int, int], format: str, n: int, repeats: int, int8_scores: bool
) -> float:
    """Return the fastest of `repeats` decode steps over `n` keys, one thread."""
    n_heads, n_kv_heads, dim = heads
    rng = np.random.default_rng(0)
    indptr, indices, last = page_table(rng, [n], 16)
    shape = (len(indices), n_kv_heads, 16, dim)
    cache = tuple(quantized_pages(rng.standard_normal(shape, np.float32), format) for _ in "kv")
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(kv_layout="HND")
    options = {} if format == "f16" else {"kv_format": format}
    wrapper.plan(indptr, indices, last, *heads, 16, **options)
    q = rng.standard_normal((1, n_heads, dim)).astype(np.float32)
    out, kinds = np.empty_like(q), (KINDS[format], KINDS[format])

    def run() -> None:
        launch.attend(wrapper.current, q, *cache, out, None, kinds, int8_scores=int8_scores)

    run()
    fastest = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def decode(repeats: int, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Yield rows: time per number of the cache, from the difference of two lengths."""
    before = get_num_threads()
    set_num_threads(1)
    peak = compute_peak("f32", 1)
    for heads in ((32, 4, 64), (32, 8, 128)):
        for format, int8 in (("f16", False), ("q8_0", False), ("q8_0", True), ("q4_0", False)):
            short, long = (decode_seconds(heads, format, n, 20 * repeats, int8) for n in lengths)
            numbers = 2 * (lengths[1] - lengths[0]) * heads[1] * heads[2]
            each, bound = (long - short) / numbers, 2 * heads[0] / heads[1] / peak
            if int8:  # an instruction multiplies 64 bytes, or 16 floats of the values
                bound *= (1 + 1 / 4) / 2
            scores = ", int8 scores" if int8 else ""
            yield {
                "test": f"{heads[0]} heads on {heads[1]} of {heads[2]}, {format}{scores}",
                "kv": format, "int8_scores": int8,
                "heads": heads, "keys": lengths, "fastest_s": [short, long],
                "ns_per_number": round(1e9 * each, 4), "bound_ns": round(1e9 * bound, 4),
                "bound_share": round(bound / each, 3),
            }  # fmt: skip
    set_num_threads(before)


PARTS = {"variants": variants, "skew": skew, "pages": pages, "decode": decode}
LENGTHS = {"variants": [512, 4096], "skew": [2048, 8192], "pages": [4096], "decode": [1024, 4096]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--keys", type=int, nargs="+", help="lengths, instead of the published")
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    if not set(parts) <= set(PARTS):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {' '.join(parts)}")
    facts = conditions()
    for part in parts:
        for row in PARTS[part](arguments.repeats, arguments.keys or LENGTHS[part]):
            append(arguments.folder / "rows.jsonl", facts, [{"part": part, **row}])
            print({name: value for name, value in row.items() if name != "packages"}, flush=True)


if __name__ == "__main__":
    main()

"""Cascade decode attention of sequences with a shared prefix, against plain paged attention.

Only attention runs, of one layer and one step: `batch` sequences with a query row each have their
first `shared_keys` keys on the same pages, followed by `own_keys` keys of its own.  Keys and values
are random, on pages of 16 tokens in the format `kv`; `heads` gives query heads, key/value heads and
head size (empty: those of the model).  Three variants take turns: *flat*,
`BatchDecodeWithPagedKVCacheWrapper` with `disable_page_sharing`, where every sequence reads all of
its keys; *shared*, the same wrapper, which reads shared pages once, as the engine does; *levels*,
`MultiLevelCascadeAttentionWrapper` with two levels and a merge.

Times are seconds of wall time of one run, planning excluded; a repetition is as many runs as take
`min_repetition_s` seconds, medians of `repeats` repetitions after `warmup` discarded runs:
`cascade_flat_s`, `cascade_shared_s`, `cascade_levels_s`; `cascade_shared_speedup` and
`cascade_levels_speedup` are medians of the repetitions' ratios to flat. `cascade_flat_bytes` and
`cascade_bytes` are the keys and values read per sequence and read once per shared page;
`cascade_byte_ratio`, their quotient, bounds the speed-up of memory-bound attention.
`cascade_same_share` is the share of rows whose bits are the same flat and shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow_experiments.measures.measure import Context, Measure, MeasureResult, Reading, repeated
from nbflow_experiments.settings import parse_heads
from nbflow_kernels import (
    BatchDecodeWithPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    append_paged_kv_cache,
    get_batch_indices_positions,
)
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import kv_formats

PAGE = 16
LAYOUT = "HND"


@dataclass(frozen=True)
class Sizes:
    """Number of sequences, keys and heads."""

    batch: int
    shared_keys: int
    own_keys: int
    heads: tuple[int, int, int]
    """Query heads, key/value heads, head size."""
    kv: str
    """KV-cache format, or key format/value format."""

    @property
    def key_bytes(self) -> int:
        """Return the bytes of a key and its value, over all heads."""
        _, G, D = self.heads
        return G * sum(format.row_bytes(D) for format in kv_formats(self.kv))


def run(context: Context) -> MeasureResult:
    """Time the three variants."""
    if not context.leads:
        return MeasureResult()
    spec, asked = context.model.spec, str(context.config["heads"])
    heads = parse_heads(asked) if asked else (spec.n_heads, spec.n_kv_heads, spec.head_dim)
    batch, shared, own = map(context.number, ("batch", "shared_keys", "own_keys"))
    sizes = Sizes(batch, shared, own, heads, str(context.config["kv"]))
    if sizes.shared_keys % PAGE:
        raise UsageError(
            f"cascade: shared_keys must be a multiple of {PAGE}, the tokens of a page, got "
            f"{sizes.shared_keys}"
        )
    runs, warmup = attention_runs(sizes), context.number("warmup")
    outputs = [run_once() for run_once in runs]
    for _ in range(warmup):
        for run_once in runs:
            run_once()
    min_s, rounds = context.min_repetition_s, range(context.number("repeats"))
    seconds = np.array([[time_runs(run_once, min_s) for run_once in runs] for _ in rounds])
    same = (outputs[0] == outputs[1]).all(axis=(1, 2))
    return summary(sizes, seconds, float(same.mean()))


def attention_runs(sizes: Sizes) -> list[Callable[[], np.ndarray]]:
    """Return the variants flat, shared and two-level, over the same pages."""
    B, (H, G, D), rng = sizes.batch, sizes.heads, np.random.default_rng(0)
    shared, own = sizes.shared_keys // PAGE, -(-sizes.own_keys // PAGE)
    first = np.arange(shared, dtype=np.int32)
    owned = shared + np.arange(B * own, dtype=np.int32).reshape(B, own)
    whole = np.hstack([np.broadcast_to(first, (B, shared)), owned]).ravel()
    last = np.full(B, (sizes.own_keys - 1) % PAGE + 1, np.int32)
    each = np.arange(B + 1, dtype=np.int32)
    cache = random_pages(rng, shared + B * own, sizes)
    q = rng.standard_normal((B, H, D)).astype(np.float32)
    format: dict[str, Any] = {"kv_format": sizes.kv}
    runs: list[Callable[[], np.ndarray]] = []
    for off in (True, False):
        flat = BatchDecodeWithPagedKVCacheWrapper(kv_layout=LAYOUT)
        flat.plan(
            each * (shared + own), whole, last, H, G, D, PAGE, disable_page_sharing=off, **format
        )
        runs.append(lambda wrapper=flat: wrapper.run(q, cache))  # type: ignore[misc]
    levels = MultiLevelCascadeAttentionWrapper(2, kv_layout=LAYOUT)
    ends = np.array([0, shared], np.int32), np.array([min(shared, 1) * PAGE], np.int32)
    levels.plan(
        [np.array([0, B], np.int32), each], [ends[0], each * own], [first, owned.ravel()],
        [ends[1], last], H, G, D, PAGE, **format,
    )  # fmt: skip
    runs.append(lambda: levels.run(q, cache))
    return runs


def random_pages(rng: np.random.Generator, n: int, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return full pages of normally distributed keys and values."""
    _, G, D = sizes.heads
    keys, values = (np.zeros((n, G, PAGE, f.row_length(D)), f.dtype) for f in kv_formats(sizes.kv))
    indptr, last = np.array([0, n], np.int32), np.array([PAGE], np.int32)
    rows = np.array([0, n * PAGE], np.int32)
    k, v = rng.standard_normal((2, n * PAGE, G, D), np.float32)
    append_paged_kv_cache(
        k, v, *get_batch_indices_positions(rows, rows[1:], n * PAGE), (keys, values),
        np.arange(n, dtype=np.int32), indptr, last, LAYOUT, kv_format=sizes.kv,
    )  # fmt: skip
    return keys, values


def time_runs(run_once: Callable[[], Any], min_s: float) -> float:
    """Return the mean seconds of a run, repeated for at least `min_s`."""
    from nbflow.benchmark.timing import repeat_for

    def run() -> float:
        began = time.perf_counter()
        run_once()
        return time.perf_counter() - began

    return float(np.mean(repeat_for(min_s, run)))


def summary(sizes: Sizes, seconds: np.ndarray, same_share: float) -> MeasureResult:
    """Summarise repetitions (repeats, 3) in seconds."""
    n, readings = len(seconds), list[Reading]()
    for i, name in enumerate(("flat", "shared", "levels")):
        readings += repeated(f"cascade_{name}_s", seconds[:, i], "s")
    for i, name in ((1, "shared"), (2, "levels")):
        ratio = float(np.median(seconds[:, 0] / seconds[:, i]))
        readings.append(Reading(f"cascade_{name}_speedup", ratio, "1", n))
    keys = sizes.shared_keys + sizes.batch * sizes.own_keys
    flat = sizes.batch * (sizes.shared_keys + sizes.own_keys)
    readings += [
        Reading("cascade_flat_bytes", float(flat * sizes.key_bytes), "B"),
        Reading("cascade_bytes", float(keys * sizes.key_bytes), "B"),
        Reading("cascade_byte_ratio", flat / keys, "1"),
        Reading("cascade_same_share", same_share, "1", sizes.batch),
    ]
    return MeasureResult(readings)


MEASURE = Measure("cascade", "point", run, str(__doc__), by_default=False)

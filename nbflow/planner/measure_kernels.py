"""Measure the kernels of a CPU rank: matrix products, attention, elementwise ops, caches.

Kernels run as captured graphs, as in a step of a model, without Python in between.  What depends on
other ranks is measured while all of them measure it (`Ranks.at_once`), and memory also while the
others wait (`Ranks.in_turn`).  Of the repetitions the lower quartile counts: a quarter is faster.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.distributed import Comm
from nbflow.kv_cache.storage import LAYOUT, KVStorage
from nbflow.planner.rates import CacheCurve, CacheRates, Rates
from nbflow.spec.layer_specs import HeadShape
from nbflow_kernels import op_registry
from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.attention.plan import AttentionPlan, plan_into
from nbflow_kernels.cpu.graph import CpuGraph
from nbflow_kernels.cpu.parallel_for import capture, get_num_threads, run_graph
from nbflow_kernels.kv_cache import cpu as kv_cache
from nbflow_kernels.quantized_matmul import cpu as quantized
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows

ROWS = (1, 2, 4, 8, 16)
"""Rows of streamed products: decode steps of as many sequences."""
MANY_ROWS = (64, 256)
"""Rows of products that arithmetic limits: their weights are read from the caches."""
SHAPE = (1024, 4096)
"""Rows and columns of the weight matrix.  It fits into the last cache; the column count is typical
of models, since a narrow matrix would fit into the L1 cache together with the activations."""
STREAMED_BYTES = 128 << 20
"""Size of the matrix with as many columns that is streamed from memory.  Of 64 MB a cache of 32 MB
still had 14 % when the next pass came to them."""
CURVE_MB = (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
"""Megabytes of weights that a rank reads over and over; as far as the probe's size."""
KV_FORMATS = ("f16", "q8_0", "q5_0", "q4_0")
"""Measured cache formats."""
PAGE_SIZE = 64
KEYS, FEW_KEYS = 256, 16
"""Tokens of the sequences whose attention is timed."""
KV_HEADS, GROUP = 4, 8
"""KV heads, and query heads of each, where the multiplications are timed."""
APPENDED, PROMPT = 16, 64
"""Tokens of an append, and of the prompt whose attention is timed."""
SAMPLE_S = 2e-4
"""Least time of a repetition."""
REPEATS = 9
FEW_REPEATS, BUDGET_S = 3, 0.1
"""Repetitions at least; no further one begins after this time."""


@dataclass(frozen=True)
class Ranks:
    """Ranks that measure together."""

    comm: Comm

    def at_once(self, measure: Callable[[], float], repeats: int = REPEATS) -> float:
        """Return the lower quartile of what this rank measures while all of them do."""
        self.comm.barrier()
        return _repeated(measure, repeats)

    def in_turn(self, measure: Callable[[], float], repeats: int = REPEATS) -> float:
        """Return the lower quartile of what this rank measures while the others wait."""
        result = 0.0
        for rank in range(self.comm.size):
            self.comm.barrier()
            if self.comm.rank == rank:
                result = _repeated(measure, repeats)
        self.comm.barrier()
        return result


def _repeated(measure: Callable[[], float], repeats: int) -> float:
    """Return the lower quartile of repetitions; slow calls are repeated less often."""
    found: list[float] = []
    end = time.perf_counter() + BUDGET_S
    while len(found) < repeats and (len(found) < FEW_REPEATS or time.perf_counter() < end):
        found.append(measure())
    return lower_quartile(found)


def lower_quartile(seconds: Sequence[float]) -> float:
    """Return the time that a quarter of the repetitions stays below."""
    return float(np.quantile(seconds, 0.25))


def timer(launch_calls: Callable[[], Any], sample_s: float = SAMPLE_S) -> Callable[[], float]:
    """Return a function that times the captured calls of a launcher.

    It repeats them for `sample_s` seconds, at least once, and divides.
    """
    with capture() as captured:
        launch_calls()
    assert captured.complete, "a measured kernel is Python"
    graph = CpuGraph(captured.calls, get_num_threads())

    def seconds(repeat: int, held: Any = launch_calls) -> float:
        # `held` keeps the arrays of the launcher alive, whose addresses the graph has
        started = time.perf_counter()
        run_graph(graph, repeat=repeat)
        return (time.perf_counter() - started) / repeat

    seconds(1)
    repeat = max(1, math.ceil(sample_s / max(seconds(1), 1e-7)))
    return lambda: seconds(repeat)


# ---- matrix products --------------------------------------------------------------------------


def matrix(format: str, copies: int = 1) -> nk.QuantTensor:
    """Return random weights of `SHAPE`, repeated `copies` times below each other."""
    data = _weight_bytes(format) * copies
    return nk.QuantTensor.from_bytes(data, format, (copies * SHAPE[0], SHAPE[1]))


@functools.lru_cache(maxsize=16)
def _weight_bytes(format: str) -> bytes:
    """Return quantized random weights of `SHAPE`, some megabytes."""
    x = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    return nk.quantize(x, format, quantizer="reference").tobytes()


def product_timer(
    w: nk.QuantTensor, rows: int, arithmetic: str, sample_s: float = SAMPLE_S
) -> Callable[[], float]:
    """Return a function that times a product in seconds per weight; quantization is not timed."""
    n_outputs, n_columns = w.shape
    x = np.ones((rows, n_columns), np.float32)
    out = np.empty((rows, n_outputs), np.float32)
    if arithmetic == "int8":
        codes = Int8Rows.empty(rows, n_columns)
        quantized.quantize_activations(x, codes)
        timed = timer(lambda: quantized.matmul_int8(codes, w, None, False, out), sample_s)
    else:
        bf16 = arithmetic == "bf16"
        timed = timer(lambda: quantized.matmul(x, w, None, False, out, bf16=bf16), sample_s)
    return lambda: timed() / (n_outputs * n_columns)


def product_rates(ranks: Ranks, format: str, arithmetic: str) -> Rates:
    """Return the times of products in a format and an arithmetic."""
    small = matrix(format)
    large = matrix(format, -(-STREAMED_BYTES // small.nbytes))
    times: dict[str, list[float]] = {"cached_s": [], "streamed_s": [], "streamed_alone_s": []}
    for rows in ROWS:
        streamed = product_timer(large, rows, arithmetic)
        times["cached_s"].append(ranks.at_once(product_timer(small, rows, arithmetic)))
        times["streamed_s"].append(ranks.at_once(streamed))
        times["streamed_alone_s"].append(ranks.in_turn(streamed))
    many = [ranks.at_once(product_timer(small, rows, arithmetic)) for rows in MANY_ROWS]
    for column in times.values():
        column += many
    return Rates((*ROWS, *MANY_ROWS), **without_noise(times))


def without_noise(times: dict[str, list[float]]) -> dict[str, tuple[float, ...]]:
    """Lower times that a disturbance has raised.

    A product takes no longer than that of more rows, or than the same from a slower memory.
    """
    rows = np.array([times[n] for n in ("cached_s", "streamed_alone_s", "streamed_s")])
    for axis in (1, 0):
        rows = np.flip(np.minimum.accumulate(np.flip(rows, axis), axis), axis)
    cached, alone, streamed = map(tuple, rows.tolist())
    return {"cached_s": cached, "streamed_s": streamed, "streamed_alone_s": alone}


# ---- caches -----------------------------------------------------------------------------------


def cache_curve(ranks: Ranks, format: str, most_bytes: int) -> tuple[CacheCurve, float]:
    """Return the share of a step's weights that the caches keep, and their bytes per second.

    Products read matrices one after the other, over and over, as steps do.  Plain reads would not
    tell: of 24 MB they find more than half in a cache of 32 MB, products almost nothing.
    """
    one = matrix(format)
    one_bytes = float(one.packed().data.nbytes)
    wanted = (max(1, round((mb << 20) / one_bytes)) for mb in CURVE_MB if mb << 20 <= most_bytes)
    counts = sorted(set(wanted)) or [1]
    weights = [one, *(matrix(format) for _ in range(counts[-1] - 1))]
    byte_s = [
        ranks.at_once(products_timer(weights[:n])) * SHAPE[0] * SHAPE[1] / one_bytes for n in counts
    ]
    fastest, slowest = min(byte_s), byte_s[-1]
    span = max(slowest - fastest, 1e-3 * fastest)
    shares = [min(1.0, max(0.0, (slowest - t) / span)) for t in byte_s]
    # sizes up to the fastest are in the caches, too: short passes only take longer to begin
    first = byte_s.index(fastest) + 1
    shares[:first] = [1.0] * first
    falling = np.minimum.accumulate(shares).tolist()
    return CacheCurve(tuple(n * one_bytes for n in counts), tuple(falling)), 1.0 / fastest


def products_timer(weights: Sequence[nk.QuantTensor]) -> Callable[[], float]:
    """Return a function that times products of one row with several matrices, per weight."""
    codes = Int8Rows.empty(1, SHAPE[1])
    quantized.quantize_activations(np.ones((1, SHAPE[1]), np.float32), codes)
    out = np.empty((1, SHAPE[0]), np.float32)

    def launch_products() -> None:
        for weight in weights:
            quantized.matmul_int8(codes, weight, None, False, out)

    timed, n = timer(launch_products), sum(weight.shape[0] * weight.shape[1] for weight in weights)
    return lambda: timed() / n


# ---- attention and elementwise ops ------------------------------------------------------------


@dataclass(frozen=True)
class AttentionTimers:
    """Timers of attention of one sequence, and of appending `APPENDED` tokens to it."""

    attend: Callable[[], float]
    append: Callable[[], float]


def attention_timers(
    format: str, group: int, head_dim: int, keys: int, queries: int = 1
) -> AttentionTimers:
    """Return timers of attention of the last tokens to `keys` tokens, and of an append."""
    storage = KVStorage([0], PAGE_SIZE, HeadShape(KV_HEADS, head_dim, head_dim), format)
    n_pages = -(-keys // PAGE_SIZE)
    storage.ensure(n_pages)
    k_cache, v_cache = storage.layers[0]
    kinds = storage.kinds_of(0)
    plan = AttentionPlan(
        (group * KV_HEADS, KV_HEADS, head_dim, head_dim), PAGE_SIZE, kv_layout=LAYOUT
    )
    step = (
        np.array([0, queries], np.int32), np.array([0, n_pages], np.int32),
        np.arange(n_pages, dtype=np.int32), np.array([keys], np.int32),
    )  # fmt: skip
    plan_into(plan, *step)
    q = np.ones((queries, group * KV_HEADS, head_dim), np.float32)
    new, out = np.ones((APPENDED, KV_HEADS, head_dim), np.float32), np.empty_like(q)
    places = np.zeros(APPENDED, np.int32), np.arange(APPENDED, dtype=np.int32)
    attend = timer(lambda: launch.attend(plan, q, k_cache, v_cache, out, None, kinds))
    append = timer(
        lambda: kv_cache.append_paged_kv_cache(
            new, new, *places, k_cache, v_cache, step[2], step[1], LAYOUT, kinds
        )
    )
    return AttentionTimers(attend, append)


@dataclass(frozen=True)
class OpTimes:
    """Measured times of ops other than matrix products; as in `nbflow.planner.Device`."""

    kv_formats: dict[str, CacheRates]
    attention_operations_per_s: float
    attention_item_s: float
    attention_vector_s: float
    quantize_s: float
    buffer_bytes_per_s: float
    op_s: float


def op_times(ranks: Ranks, kv_formats: Sequence[str] = KV_FORMATS) -> OpTimes:
    """Measure attention, appends, the quantization of activations, and a gate."""
    op_s, buffer_rate = _gate_times(ranks)

    def attend(format: str, group: int, head_dim: int, keys: int = KEYS, queries: int = 1) -> float:
        timers = attention_timers(format, group, head_dim, keys, queries)
        taken = ranks.at_once(timers.attend)
        return _at_least(taken - op_s, taken)

    operation_s, item_s, vector_s = _attention_times(functools.partial(attend, "f16"))
    rates = {}
    for format in kv_formats:
        # of a key and a value, without the start and the multiplications of a head
        narrow, wide = (
            _at_least(each - 4.0 * d * operation_s - (item_s + vector_s) / KEYS, each)
            for d in (64, 128)
            for each in [attend(format, 1, d) / (KEYS * KV_HEADS)]
        )
        element_s = _at_least(wide - narrow, wide) / 64 / 2
        append = ranks.at_once(attention_timers(format, 1, 128, KEYS).append)
        rates[nk.kv_format(format).name] = CacheRates(
            _at_least(narrow / 2 - 64 * element_s, narrow / 2),
            element_s,
            _at_least(append - op_s, append) / (2 * APPENDED * KV_HEADS * 128),
        )
    x = np.ones((8, SHAPE[1]), np.float32)
    codes = Int8Rows.empty(*x.shape)
    quantize = ranks.at_once(timer(lambda: quantized.quantize_activations(x, codes)))
    return OpTimes(
        rates, 1.0 / operation_s, item_s, vector_s, _at_least(quantize - op_s, quantize) / x.size,
        buffer_rate, op_s,
    )  # fmt: skip


def _attention_times(attend: Callable[..., float]) -> tuple[float, float, float]:
    """Return the times of an operation of QK and PV, and of the starts of an item and a vector.

    A launch takes ``items * item_s + vectors * vector_s``, the time to read its keys, and that of
    the operations of each vector with them: a multiplication and an addition for each element.
    """
    more_vectors, more_keys = KV_HEADS * (GROUP - 1), KEYS - FEW_KEYS
    one, several = (attend(group, 64) for group in (1, GROUP))
    few, few_several = (attend(group, 64, FEW_KEYS) for group in (1, GROUP))
    keys_s = _at_least(several - few_several - (one - few), several)
    operation_s = keys_s / (4.0 * 64 * more_keys * more_vectors)
    prompt, n_vectors = attend(GROUP, 64, PROMPT, PROMPT), PROMPT * KV_HEADS * GROUP
    operations = 4.0 * 64 * n_vectors * (PROMPT + 1) / 2
    vector_s = _at_least(prompt - operations * operation_s, prompt) / n_vectors
    per_key = _at_least(one - few, one) / more_keys
    start_s = _at_least(few - FEW_KEYS * per_key, few) / KV_HEADS
    return operation_s, max(start_s - vector_s, 0.05 * start_s), vector_s


def _gate_times(ranks: Ranks) -> tuple[float, float]:
    """Return the start of a kernel, and the bytes of activations per second, of a gate (SwiGLU)."""
    width, taken = 2048, []
    for rows in (1, 16):
        x, out = np.ones((rows, 2 * width), np.float32), np.empty((rows, width), np.float32)
        gate = functools.partial(op_registry.load("activation", "cpu").glu, x, "silu", True, out)
        taken.append(ranks.at_once(timer(gate)))
    row_s = _at_least(taken[1] - taken[0], taken[1]) / 15
    return max(taken[0] - row_s, 0.1 * taken[0]), 3 * 4 * width / row_s


def _at_least(difference: float, whole: float) -> float:
    """Return a difference of two times, at least a twentieth of the longer one: never nothing."""
    return max(difference, 0.05 * whole)

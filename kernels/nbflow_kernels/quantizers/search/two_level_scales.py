"""Search for formats with a d per block and an integer scale per sub-block (quantizer "search").

Each sub-block tries scales around that of its largest weight; each scale gives codes, and these the
least squares scale.  The scale with the largest gain is the *ideal* scale of the sub-block.  Then d
is tried as several fractions of the largest ideal scale.  Each sub-block takes the better of the
two integer scales next to its ideal one; least squares over the block gives the d for these codes
and scales; d is rounded to storage, and codes and scales are chosen again.  Last, the neighbours of
the best d among the storable numbers are tried.

All errors are those of the decoded weights, for the stored d.  The format's family provides the
function that chooses the codes of a sub-block for a scale: `search.codebook`, `search.grid`.

Relative root mean square error on 16384 nearly normal weights, GGML's quantizer with importance 1
and this search (tests/kernels/formats/test_ggml_i_quants.py):

========  =====  =====    ========  =====  =====    ========  =====  =====
format    GGML   best     format    GGML   best     format    GGML   best
========  =====  =====    ========  =====  =====    ========  =====  =====
iq4_nl    0.073  0.071    iq3_s     0.135  0.127    iq1_m     0.444  0.405
iq4_xs    0.073  0.071    iq3_xxs   0.179  0.175    iq1_s     0.475  0.435
mxfp4     0.110  0.109    iq2_s     0.244  0.234    tq1_0     0.770  0.421
nvfp4     0.096  0.081    iq2_xs    0.295  0.281    tq2_0     0.770  0.421
q1_0      0.586  0.586    iq2_xxs   0.338  0.323    q2_0      0.697  0.343
========  =====  =====    ========  =====  =====    ========  =====  =====
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_compare import bits_of
from nbflow_kernels.formats.registry import Floats

F16_MAX = 65504.0
BUCKET_BITS = 20  # the high bits of a float32 left: its exponent and three of its fraction


class Rule(NamedTuple):
    """Storage rules of a format; the scale of a sub-block is ``by * integer + plus``."""

    by: np.float32
    plus: np.float32
    lowest: np.float32
    """Range of the integer."""
    highest: np.float32
    starts: Floats
    """First trial scales, in units of the largest weight of the sub-block."""
    tops: Floats
    """Trial ratios of the largest ideal scale to d."""
    rounds: int
    """Choices of codes per top; each after the first uses the d fitted to the last."""
    stored: Floats
    """Storable values of d, ascending; empty for float16."""
    signed: bool
    """True if d has a sign: `starts` then refer to the signed weight of largest magnitude."""
    buckets: NDArray[np.int16]
    """Index in `stored` of the last number not above the least float32 with given high bits, where
    `nearest_stored` begins; by the bits without the lowest `BUCKET_BITS`."""
    plain: Floats
    """Values of d that are tried too, rounded to storage, in units of the largest weight; only
    without integer scales."""


def rule(
    starts: ArrayLike,
    *,
    scales: tuple[float, float, float, float] = (0, 1, 0, 0),
    tops: ArrayLike = (1,),
    rounds: int = 3,
    stored: ArrayLike = (),
    signed: bool = False,
    plain: ArrayLike = (),
) -> Rule:
    """Return a rule; `scales` are `by`, `plus`, `lowest` and `highest`, by default none."""
    by, plus, lowest, highest = (np.float32(v) for v in scales)
    first, multiples, numbers, ratios = (
        np.array(v, np.float32).reshape(-1) for v in (starts, tops, stored, plain)
    )
    least = (np.arange(0x7F800000 >> BUCKET_BITS, dtype=np.uint32) << BUCKET_BITS).view(np.float32)
    below = np.searchsorted(numbers, np.append(least, np.float32(np.inf)), side="right") - 1
    buckets = np.clip(below, 0, max(0, len(numbers) - 2)).astype(np.int16)
    return Rule(
        by, plus, lowest, highest, first, multiples, rounds, numbers, signed, buckets, ratios
    )


class SearchResult(NamedTuple):
    """Result arrays of the search."""

    chosen: NDArray[Any]
    """(rows, sub-blocks, n): codes, or the output of the family's function."""
    scales: NDArray[np.int16]
    """(rows, sub-blocks): the integers."""
    d: NDArray[np.uint16]
    """(rows, blocks): bits of float16, or the index in `Rule.stored`."""


@jit.device_function
def nearest_stored(value, stored, buckets):
    """Return the index or bits of the storable number nearest to a value; see `Rule`."""
    if len(stored) == 0:
        return np.int64(simd.float_to_half(min(max(value, -F16_MAX), F16_MAX)))
    bits = bits_of(value if value > 0 else np.float32(0))
    low, last = np.int64(buckets[bits >> BUCKET_BITS]), len(stored) - 2
    while low < last and stored[low + 1] <= value:
        low += 1
    high = low + 1
    return low if value - stored[low] < stored[high] - value else high


@jit.device_function
def stored_number(index, stored):
    """Return the number of an index or of float16 bits, NaN if out of range."""
    if len(stored) == 0:
        value = simd.half_to_float(np.uint16(index))
        return value if abs(value) <= np.float32(F16_MAX) else np.float32(np.nan)
    return stored[index] if 0 <= index < len(stored) else np.float32(np.nan)


@jit.device_function
def _normalized(x, value):
    """Write weights divided by the largest magnitude; return 1 / that (1 for zeros)."""
    largest = np.float32(0)
    for i in range(len(value)):
        largest = max(largest, abs(x[i]))
    norm = np.float32(1) / largest if largest > np.float32(1e-37) else np.float32(1)
    for i in range(len(value)):
        value[i] = x[i] * norm
    return norm


@jit.device_function
def _copy(source, target):
    """Fill an array from the beginning of another one."""
    for i in range(len(target)):
        target[i] = source[i]


@jit.device_function(inline="always")
def _ideal(evaluate, value, weight, tables, rule, out, scratch):
    """Return the best real scale of a sub-block."""
    extreme = np.float32(0)
    for j in range(len(value)):
        if abs(value[j]) > abs(extreme):
            extreme = value[j]
    if not rule.signed:
        extreme = abs(extreme)
    best, gain = np.float32(0), np.float32(0)
    for i in range(len(rule.starts) + 1):  # the last one refines the best
        scale = extreme * rule.starts[i] if i < len(rule.starts) else best
        _, qx, qq = evaluate(value, weight, scale, tables, out, scratch)
        if qq > 0 and (i == len(rule.starts) or qx * qx > gain * qq):
            best = qx / qq
            gain = qx * best
    return best


@jit.device_function(inline="always")
def _choose(evaluate, value, weight, d, tables, rule, ideal, integers, out, scratch, chosen):
    """Choose the integer scales of a block for a d; return the error and the sums to fit d.

    Unless `chosen` is empty, the integers are given and `chosen` gets the output of `evaluate`.
    """
    sub = len(value) // len(ideal)
    error, sum_x, sum_q = np.float32(0), np.float32(0), np.float32(0)
    for s in range(len(ideal)):
        low = np.float32(0)
        if rule.by > 0 and d != 0:
            low = np.floor((ideal[s] / d - rule.plus) / rule.by)
        least, before = np.float32(np.inf), np.float32(-1000)
        x_of_least, q_of_least = np.float32(0), np.float32(0)
        for step in range(2):
            integer = min(max(low + np.float32(step), rule.lowest), rule.highest)
            if len(chosen):
                integer = np.float32(integers[s])
            if integer == before:
                continue
            before = integer
            scale = rule.by * integer + rule.plus
            e, qx, qq = evaluate(
                value[s * sub : (s + 1) * sub], weight[s * sub : (s + 1) * sub], d * scale,
                tables, out, scratch,
            )  # fmt: skip
            if e < least:
                least, integers[s] = e, np.int64(integer)
                x_of_least, q_of_least = qx * scale, qq * scale * scale
        if len(chosen):
            _copy(out, chosen[s])
        error += least
        sum_x += x_of_least
        sum_q += q_of_least
    return error, sum_x, sum_q


@jit.device_function(inline="always")
def search_rows(evaluate, x, weight, tables, rule, chosen, scales, d, start, stop):
    """Quantize rows [start, stop).

    `weight` (1 or rows, columns) weighs the squared error of each weight.
    ``evaluate(value, weight, step, tables, out, scratch)`` chooses the codes of a sub-block for a
    scale, writes them to `out` and returns the error and the sums of weight * q * value and of
    weight * q**2, where q is the value of a code.  The second half of `out` and the 576 floats of
    `scratch` are its scratch memory.
    """
    n_subs, block = scales.shape[1] // d.shape[1], x.shape[1] // d.shape[1]
    sub, n_attempts = block // n_subs, len(rule.tops) * rule.rounds
    value, w = np.empty(block, np.float32), np.empty(block, np.float32)
    ideal = np.empty(n_subs, np.float32)
    integers, found = np.zeros(n_subs, np.int64), np.zeros(n_subs, np.int64)
    out = np.zeros(2 * chosen.shape[2], np.uint16)
    scratch = np.empty(576, np.float32)
    for row in range(start, stop):
        for b in range(d.shape[1]):
            at, first_sub = b * block, b * n_subs
            norm = _normalized(x[row, at : at + block], value)
            _normalized(weight[min(row, len(weight) - 1), at : at + block], w)
            largest = np.float32(0)
            for s in range(n_subs):
                found[s] = integers[s] = 0
                first, last = s * sub, (s + 1) * sub
                ideal[s] = _ideal(
                    evaluate, value[first:last], w[first:last], tables, rule, out, scratch
                )
                if abs(ideal[s]) > abs(largest):
                    largest = ideal[s]
            best = nearest_stored(largest / rule.tops[0] / norm, rule.stored, rule.buckets)
            index = np.int64(0)
            least, sum_x, sum_q = np.float32(np.inf), np.float32(0), np.float32(0)
            for attempt in range(n_attempts + 3):
                before = index
                if attempt >= n_attempts:  # the neighbours of the best, at last the best
                    index = best + (0, 1, -1)[n_attempts + 2 - attempt]
                elif attempt % rule.rounds == 0:
                    top = rule.tops[attempt // rule.rounds]
                    index = nearest_stored(largest / top / norm, rule.stored, rule.buckets)
                elif sum_q > 0:
                    index = nearest_stored(sum_x / sum_q / norm, rule.stored, rule.buckets)
                if index == before and attempt > 0 and attempt < n_attempts + 2:
                    continue
                number = stored_number(index, rule.stored)
                if not np.isfinite(number):
                    continue
                is_last = attempt == n_attempts + 2
                if is_last:
                    _copy(found, integers)
                error, sum_x, sum_q = _choose(
                    evaluate, value, w, number * norm, tables, rule, ideal, integers, out,
                    scratch, chosen[row, first_sub : first_sub + n_subs * is_last],
                )  # fmt: skip
                if error < least:
                    best, least = index, error
                    _copy(integers, found)
            d[row, b] = best
            for s in range(n_subs):
                scales[row, first_sub + s] = found[s]


def empty_result(x: Floats, block: int, sub_block: int, n_out: int) -> SearchResult:
    """Return uninitialized result arrays for rows `x`."""
    n_rows, width = x.shape
    return SearchResult(
        np.empty((n_rows, width // sub_block, n_out), np.uint16),
        np.empty((n_rows, width // sub_block), np.int16),
        np.empty((n_rows, width // block), np.uint16),
    )

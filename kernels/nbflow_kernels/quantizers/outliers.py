r"""Outliers: the few weights that widen the range of their block, stored exactly in a CSR matrix.

A quantized block spends its codes on the range of its weights.  Inferflow's ``delta_tensor_ratio``
moves the extreme ones to a sparse matrix; a product adds both parts.  Here:

* The *soft range* of a tensor leaves out ``ratio / 2`` of its weights at each end.  Weights outside
  it are outliers.
* In each block, among the rest: the extreme weight (the one farthest from the middle of the
  others' range) is an outlier too if the block's range is at least 0.7 of the soft range, the
  weight lies more than 0.4 of it from the others' middle, and the rest has a range below 0.7.
* In the dense tensor the nearest value within the range of the rest of its block replaces an
  outlier.  The sparse value is the difference: the weight minus the decoded value.
* A block keeps its outliers only if they do not increase its error.

Inferflow writes 0 in place of an outlier, finds the soft range in a histogram of 100 buckets, and
keeps single weights even where that does not help.  A stored outlier costs 8 bytes.

The quantizer "outliers" (`delta_rows`) chooses them by gain instead: each block is quantized with
and without its largest and its least weight, then once more, and each row takes the steps with the
largest gains, up to its share:

.. math:: g = \sum_{i \in b} m_i (Q(w)_i - w_i)^2 - \sum_{i \in b \setminus o} m_i (Q(w')_i - w_i)^2

with the importance m of the columns, and w' the block with its outliers o replaced by the nearest
of the others.  If the second outlier of a block gains more than the first, both count with the mean
gain, as the second requires the first.  Rows are independent, whatever chunk they are in.

Source of the criterion, keeping the weights whose rounding costs most by the inputs' second
moments: T. Dettmers et al., "SpQR", ICLR 2024, arXiv:2306.03078, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.csr import CsrMatrix
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat
from nbflow_kernels.quantizers.registry import quantize_rows

LARGEST_RATIO = 0.05
SAMPLE = 1 << 20  # most weights the soft range is taken from
WIDE, FAR = 0.7, 0.4  # fractions of the soft range, as above


def sample_rows(n_rows: int, n_columns: int) -> range:
    """Return evenly spaced rows for the soft range: at most `SAMPLE` weights."""
    return range(0, n_rows, max(1, -(-n_rows * n_columns // SAMPLE)))


def soft_range(x: NDArray[Any], ratio: float) -> tuple[float, float]:
    """Return the range that leaves out ``ratio / 2`` of the weights at each end.

    `x` has all weights, or the rows of `sample_rows` of a large matrix.

    Examples
    --------
    >>> import numpy as np
    >>> soft_range(np.arange(1000, dtype=np.float32)[None], 0.01)
    (5.0, 994.0)
    """
    values = np.asarray(x, np.float32).ravel()
    if values.size == 0:
        return 0.0, 0.0
    n_out = int(values.size * ratio / 2)
    ordered = np.partition(values, (n_out, values.size - 1 - n_out))
    return float(ordered[n_out]), float(ordered[values.size - 1 - n_out])


def check_ratio(ratio: float) -> float:
    """Return a ratio of outliers as float, or raise unless it is a number in range."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise TypeError(f"outliers must be a number, got {type(ratio).__name__}")
    if not 0 <= ratio <= LARGEST_RATIO:
        raise UsageError(
            f"outliers must lie in 0..{LARGEST_RATIO} (a share of the weights), got {ratio}"
        )
    return float(ratio)


def quantize_with_outliers(
    format: QuantFormat,
    rows: Floats,
    n_columns: int,
    quantizer: str,
    importance: Floats | None,
    limits: tuple[float, float],
) -> tuple[Bytes, CsrMatrix]:
    """Return the bytes and the outliers of rows; see `quantizers.registry.quantize_rows`.

    `limits` is the soft range.
    """
    n_rows, size = len(rows), format.block_size
    data = quantize_rows(format, rows, n_columns, quantizer, importance)
    mask = np.zeros(rows.shape, np.bool_)
    inside = rows.copy()
    low, high = (np.float32(v) for v in limits)
    parallel_for(_find, n_rows, 8.0 * rows.size, rows, n_columns, size, low, high, mask, inside)
    touched = np.flatnonzero(mask.any(axis=1))
    if len(touched):
        some = None
        if importance is not None:
            some = importance if len(importance) == 1 else importance[touched]
        other = quantize_rows(
            format, np.ascontiguousarray(inside[touched]), n_columns, quantizer, some
        )
        before, after = np.empty_like(rows[touched]), np.empty_like(rows[touched])
        format.dequantize_rows(np.ascontiguousarray(data[touched]), before)
        format.dequantize_rows(other, after)
        weight = np.ones((1, rows.shape[1]), np.float32) if some is None else some
        kept, chosen = mask[touched], np.ascontiguousarray(data[touched])
        parallel_for(
            _choose, len(touched), 8.0 * before.size, rows[touched], weight, n_columns, size,
            before, after, kept, chosen, other,
        )  # fmt: skip
        mask[touched], data[touched] = kept, chosen
        inside[touched] = rows[touched] - after
    sparse = CsrMatrix.from_mask(
        np.ascontiguousarray(inside[:, :n_columns]), np.ascontiguousarray(mask[:, :n_columns])
    )
    return data, sparse


@jit.kernel
def _find(x, n_columns, size, low, high, mask, inside, start, stop):
    """Mark the outliers of rows [start, stop) and replace them by the nearest inner weights."""
    span = high - low
    for row in range(start, stop):
        for first in range(0, n_columns, size):
            last = min(first + size, n_columns)
            n_kept = 0
            # the two least and the two largest weights within the soft range
            least, second_least = np.float32(np.inf), np.float32(np.inf)
            most, second_most = np.float32(-np.inf), np.float32(-np.inf)
            for i in range(first, last):
                v = x[row, i]
                if v < low or v > high:
                    mask[row, i] = True
                    continue
                n_kept += 1
                if v < least:
                    least, second_least = v, least
                elif v < second_least:
                    second_least = v
                if v > most:
                    most, second_most = v, most
                elif v > second_most:
                    second_most = v
            if n_kept == 0:
                for i in range(first, last):
                    inside[row, i] = min(max(x[row, i], low), high)
                continue
            if n_kept > 2 and most - least >= np.float32(WIDE) * span:
                from_above = most - (least + second_most) / 2
                from_below = (second_least + most) / 2 - least
                far, rest = from_above, second_most - least
                if from_below > from_above:
                    far, rest = from_below, most - second_least
                if far > np.float32(FAR) * span and rest < np.float32(WIDE) * span:
                    extreme = least if from_below > from_above else most
                    for i in range(first, last):
                        if x[row, i] == extreme and not mask[row, i]:
                            mask[row, i] = True
                            break
                    if from_below > from_above:
                        least = second_least
                    else:
                        most = second_most
            for i in range(first, last):
                if mask[row, i]:
                    inside[row, i] = min(max(x[row, i], least), most)


@jit.kernel
def _choose(x, weight, n_columns, size, before, after, mask, data, other, start, stop):
    """Take the blocks of `other` whose error with outliers is at most that of `data`."""
    n_bytes = data.shape[1] // (x.shape[1] // size)
    for row in range(start, stop):
        w = weight[min(row, len(weight) - 1)]
        for b in range(x.shape[1] // size):
            first, last = b * size, min((b + 1) * size, n_columns)
            error = kept_error = 0.0
            any_outlier = False
            for i in range(first, last):
                error += np.float64(w[i]) * (np.float64(before[row, i]) - x[row, i]) ** 2
                if mask[row, i]:
                    any_outlier = True
                else:
                    kept_error += np.float64(w[i]) * (np.float64(after[row, i]) - x[row, i]) ** 2
            if any_outlier and kept_error <= error:
                for i in range(b * n_bytes, (b + 1) * n_bytes):
                    data[row, i] = other[row, i]
            else:
                for i in range(first, last):
                    mask[row, i] = False


# ---- outliers by gain ---------------------------------------------------------------------------

Mask = NDArray[np.bool_]
N_STEPS = 2
"""Maximum number of outliers of a block."""


@dataclass
class _Candidate:
    """Quantized rows with a set of outliers."""

    data: Bytes
    mask: Mask
    """(rows, width): the outliers."""
    decoded: Floats
    errors: NDArray[np.float64]
    """(rows, blocks): weighted squared errors of all but the outliers."""

    def take(self, other: _Candidate, better: Mask, format: QuantFormat) -> _Candidate:
        """Return the candidate with `better` (rows, blocks) blocks taken from `other`."""
        wide = np.repeat(better, format.block_size, axis=1)
        by_bytes = np.repeat(better, format.block_bytes, axis=1)
        return _Candidate(
            np.where(by_bytes, other.data, self.data),
            np.where(wide, other.mask, self.mask),
            np.where(wide, other.decoded, self.decoded),
            np.where(better, other.errors, self.errors),
        )


def delta_rows(
    format: QuantFormat, x: Floats, n_columns: int, importance: Floats | None, n_each: int
) -> tuple[Bytes, CsrMatrix]:
    """Return the bytes of rows and at most `n_each` outliers per row.

    Other parameters as for `quantizers.registry.quantize_rows`.  Outliers, counted as exact, never
    increase the error of a block.
    """
    weight = np.ones((1, x.shape[1]), np.float32) if importance is None else importance
    steps = [_quantize(format, x, n_columns, weight, importance, np.zeros(x.shape, np.bool_))]
    for _ in range(N_STEPS):
        masks = [_with_extreme(format, x, n_columns, steps[-1].mask, sign) for sign in (1, -1)]
        most, least = (_quantize(format, x, n_columns, weight, importance, m) for m in masks)
        steps.append(most.take(least, least.errors < most.errors, format))
    n_steps = _chosen_steps(np.stack([step.errors for step in steps]), n_each)
    result = steps[0]
    for i, step in enumerate(steps[1:], start=1):
        result = result.take(step, n_steps == i, format)
    rest = (x - result.decoded)[:, :n_columns]
    mask = result.mask[:, :n_columns]
    sparse = CsrMatrix.from_mask(np.ascontiguousarray(rest), np.ascontiguousarray(mask))
    return result.data, sparse


def _chosen_steps(errors: NDArray[np.float64], n_each: int) -> NDArray[np.intp]:
    """Return the number of outliers per block (rows, blocks) from errors (steps + 1, ...)."""
    gains = errors[:-1] - errors[1:]
    both = (gains[0] + gains[1]) / 2
    shared = gains[1] > gains[0]
    gains[0], gains[1] = np.where(shared, both, gains[0]), np.where(shared, both, gains[1])
    n_rows, n_blocks = errors.shape[1:]
    flat = gains.transpose(1, 0, 2).reshape(n_rows, -1)  # (rows, steps x blocks)
    # stable: of equal gains the first outlier of a block comes first
    order = np.argsort(-flat, axis=1, kind="stable")[:, :n_each]
    taken = np.zeros(flat.shape, np.bool_)
    np.put_along_axis(taken, order, True, axis=1)
    taken &= flat > 0
    n_steps = taken.reshape(n_rows, N_STEPS, n_blocks).sum(axis=1)
    worse = np.take_along_axis(errors, n_steps[None], axis=0)[0] > errors[0]
    return np.where(worse, 0, n_steps)


def _with_extreme(format: QuantFormat, x: Floats, n_columns: int, mask: Mask, sign: int) -> Mask:
    """Return the mask with the largest (sign 1) or least other weight of each block added."""
    free = ~mask
    free[:, n_columns:] = False
    blocks = (len(x), -1, format.block_size)
    values = np.where(free, sign * x, -np.inf).reshape(blocks)
    more = np.zeros(values.shape, np.bool_)
    np.put_along_axis(more, values.argmax(axis=2)[:, :, None], True, axis=2)
    result: Mask = mask | (more.reshape(x.shape) & free)
    return result


def _quantize(
    format: QuantFormat, x: Floats, n_columns: int, weight: Floats, importance: Any, mask: Mask
) -> _Candidate:
    """Quantize rows with masked weights replaced by the nearest of the rest of their block."""
    blocks = (len(x), -1, format.block_size)
    low = np.where(mask, np.inf, x).reshape(blocks).min(axis=2)
    high = np.where(mask, -np.inf, x).reshape(blocks).max(axis=2)
    lows, highs = (np.repeat(v, format.block_size, axis=1) for v in (low, high))
    inside = np.ascontiguousarray(np.clip(x, lows, highs), np.float32)
    data = quantize_rows(format, inside, n_columns, "search", importance)
    decoded = np.empty_like(x)
    format.dequantize_rows(data, decoded)
    squares = np.square(decoded.astype(np.float64) - x) * weight * ~mask
    squares[:, n_columns:] = 0
    return _Candidate(data, mask, decoded, squares.reshape(blocks).sum(axis=2))

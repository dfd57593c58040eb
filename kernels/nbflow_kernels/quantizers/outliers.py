"""Outliers: the few weights that stretch the range of their block, kept aside exactly.

A quantized block spends its codes on the range of its weights.  Inferflow's ``delta_tensor_ratio``
takes the extreme ones out of the dense tensor and stores them as a sparse matrix; the product adds
both.  Here:

* The *soft range* of a tensor leaves out ``ratio / 2`` of its weights at each end.  Weights outside
  it are outliers.
* In each block, of what is left: its extreme weight (the one farthest from the middle of the
  others' range) is one too if the block's range is at least 0.7 of the soft range, the weight lies
  more than 0.4 of it from the others' middle, and without it the block's range is below 0.7.
* In the dense tensor an outlier is replaced by the nearest value within the range of the rest of
  its block.  The sparse value is what is missing: the weight minus what the block decodes to there.
* A block keeps its outliers only if its error becomes no larger than without them.

Inferflow writes 0 in place of an outlier, finds the soft range in a histogram of 100 buckets, and
keeps single weights even where that does not help.  A stored outlier costs 8 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.errors import UsageError
from nbflow_kernels.sparse.csr import CsrMatrix
from nbflow_kernels.threads import split_rows

if TYPE_CHECKING:
    from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat

LARGEST_RATIO = 0.05
SAMPLE = 1 << 20  # weights that the soft range is taken from, at most
WIDE, FAR = 0.7, 0.4  # shares of the soft range; see above


def sample_rows(n_rows: int, n_columns: int) -> range:
    """Return the rows that the soft range of a matrix is taken from: `SAMPLE` weights at most."""
    return range(0, n_rows, max(1, -(-n_rows * n_columns // SAMPLE)))


def soft_range(x: NDArray[Any], ratio: float) -> tuple[float, float]:
    """Return the values between which all but ``ratio / 2`` of the weights at each end lie.

    Parameters
    ----------
    x : array of float, shape (rows, columns)
        The weights; of a large matrix, the rows of `sample_rows`.
    ratio : float
        Share of weights outside, both ends together.

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
    """Return a ratio of outliers, or raise if there is no such ratio."""
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
    encoder: str,
    importance: Floats | None,
    limits: tuple[float, float],
) -> tuple[Bytes, CsrMatrix]:
    """Return the bytes and the outliers of rows; see `QuantFormat.quantize_rows`.

    `limits` is the soft range.
    """
    n_rows, size = len(rows), format.block_size
    data = format.quantize_rows(rows, n_columns, encoder, importance)
    mask = np.zeros(rows.shape, np.bool_)
    inside = rows.copy()
    low, high = (np.float32(v) for v in limits)
    split_rows(_find, n_rows, 8.0 * rows.size, rows, n_columns, size, low, high, mask, inside)
    touched = np.flatnonzero(mask.any(axis=1))
    if len(touched):
        some = None
        if importance is not None:
            some = importance if len(importance) == 1 else importance[touched]
        other = format.quantize_rows(
            np.ascontiguousarray(inside[touched]), n_columns, encoder, some
        )
        before, after = np.empty_like(rows[touched]), np.empty_like(rows[touched])
        format.dequantize_rows(np.ascontiguousarray(data[touched]), before)
        format.dequantize_rows(other, after)
        weight = np.ones((1, rows.shape[1]), np.float32) if some is None else some
        kept, chosen = mask[touched], np.ascontiguousarray(data[touched])
        split_rows(
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
    """Mark the outliers of rows [start, stop), and write the nearest weights within instead."""
    span = high - low
    for row in range(start, stop):
        for first in range(0, n_columns, size):
            last = min(first + size, n_columns)
            n_kept = 0
            # the two least and the two largest of the weights within the soft range
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
    """Take the blocks of `other` that lose no more with their outliers than those of `data`."""
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


def add_outliers(outliers: CsrMatrix, out: Floats) -> None:
    """Add the outliers to decoded rows (rows, columns)."""
    work = 4.0 * (outliers.nnz + len(out))
    split_rows(_add, len(out), work, outliers.indptr, outliers.indices, outliers.values, out)


def add_outliers_of(outliers: CsrMatrix, ids: NDArray[Any], out: Floats) -> None:
    """Add the outliers of rows `ids` to these rows, decoded (len(ids), columns)."""
    work = 4.0 * (outliers.nnz / max(1, outliers.shape[0]) + 1) * len(out)
    split_rows(
        _add_of, len(out), work, outliers.indptr, outliers.indices, outliers.values,
        ids, out,
    )  # fmt: skip


@jit.kernel
def _add(indptr, indices, values, out, start, stop):
    for row in range(start, stop):
        for j in range(indptr[row], indptr[row + 1]):
            out[row, indices[j]] += values[j]


@jit.kernel
def _add_of(indptr, indices, values, ids, out, start, stop):
    for row in range(start, stop):
        for j in range(indptr[ids[row]], indptr[ids[row] + 1]):
            out[row, indices[j]] += values[j]

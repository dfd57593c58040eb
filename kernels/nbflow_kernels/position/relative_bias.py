"""T5 relative position bias: buckets of distances, and a learned bias per bucket and head."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, empty, is_cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import cpu, cuda
from nbflow_kernels.position.alibi import bias_output


def relative_position_bucket(
    relative_position: NDArray[np.int32],
    *,
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> NDArray[np.int32]:
    r"""Return the T5 bucket of each relative position.

    Distances r below m (half of the n buckets per direction) have one bucket each; longer ones
    share buckets with geometrically growing limits up to `max_distance`:

    .. math:: b(r) = \min\left( n - 1, \; m + \left\lfloor
        \frac{\ln(r / m)}{\ln(\mathrm{max\_distance} / m)} (n - m) \right\rfloor \right)

    Parameters
    ----------
    relative_position : array of int32, any shape
        Position of the key minus position of the query.
    bidirectional : bool
        True (encoder): half of the buckets for keys before the query, half for keys after it.
        False (decoder): all buckets for keys before the query; later keys get bucket 0.
    num_buckets : int
        Total number of buckets, at least 2 per direction.
    max_distance : int
        Distances from here on share the last bucket; above half of a direction's buckets.

    Returns
    -------
    array of int32, shape of `relative_position`
        0 <= bucket < num_buckets.

    Raises
    ------
    UsageError, TypeError
        If `num_buckets` or `max_distance` is out of range, or if `relative_position` is not an
        int32 array.

    References
    ----------
    .. [1] C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
       Transformer", arXiv:1910.10683, section 2.1; formula as in the T5 code, with float32
       logarithms.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import relative_position_bucket
    >>> relative_position_bucket(np.array([-1000, -20, -8, -3, 0, 3, 20], np.int32))
    array([15, 10,  8,  3,  0, 19, 26], dtype=int32)
    """
    ndim = getattr(relative_position, "ndim", 1)
    check_array("relative_position", relative_position, (None,) * ndim, np.int32)
    n = num_buckets // 2 if bidirectional else num_buckets
    if n < 2 or (bidirectional and num_buckets % 2):
        raise UsageError(
            "num_buckets must be at least 2 per direction, and even if bidirectional, got "
            f"{num_buckets}"
        )
    if not max_distance > n // 2:
        raise UsageError(f"max_distance must be above {n // 2}, got {max_distance}")
    variant = cuda if is_cuda(relative_position) else cpu
    out: NDArray[np.int32] = empty(relative_position, relative_position.shape, np.int32)
    variant.relative_position_bucket(relative_position, bidirectional, n, max_distance, out)
    return out


def relative_position_bias(
    table: NDArray[np.float32],
    n_queries: int,
    n_keys: int,
    *,
    bidirectional: bool,
    max_distance: int = 128,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Return the T5 bias of the scores, a learned number per bucket and head.

    .. math:: b_{hij} = \mathrm{table}[\mathrm{bucket}(j - i'), h], \qquad
        i' = i + n_\mathrm{keys} - n_\mathrm{queries}

    Parameters
    ----------
    table : array of float32, shape (num_buckets, H)
        Tensor ``relative_attention_bias`` of the stack's first block.
    n_queries, n_keys, out
        As in `alibi_bias`.
    bidirectional, max_distance
        As in `relative_position_bucket`.

    Returns
    -------
    array of float32, shape (H, Tq, Tk)
        `out` if given, else a new array on the device of `table`.

    Raises
    ------
    UsageError, TypeError
        As `alibi_bias`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import relative_position_bias
    >>> table = np.arange(4, dtype=np.float32).reshape(4, 1)
    >>> relative_position_bias(table, 2, 3, bidirectional=False, max_distance=4)
    array([[[1., 0., 0.],
            [2., 1., 0.]]], dtype=float32)
    """
    check_array("table", table, (None, None))
    out = bias_output(table, table.shape[1], n_queries, n_keys, out)
    # all distances from key to query
    buckets = relative_position_bucket(
        np.arange(1 - n_keys, n_queries, dtype=np.int32), bidirectional=bidirectional,
        num_buckets=len(table), max_distance=max_distance,
    )  # fmt: skip
    variant = cuda if is_cuda(table) else cpu
    variant.relative_position_bias(table, buckets, out)
    return out

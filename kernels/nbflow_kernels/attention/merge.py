"""Merge of attention states: attention over parts of the keys into attention over all."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, empty, is_cuda
from nbflow_kernels.attention import cuda
from nbflow_kernels.attention.cpu import merge


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[Any, Any]:
    """Merge the attention over two sets of keys into the attention over both.

    Parameters
    ----------
    v_a, v_b : array of float32, shape (T, H, D)
        Outputs over two disjoint sets of keys.
    s_a, s_b : array of float32, shape (T, H)
        Base-2 LSE of the outputs; -inf for rows without keys.

    Returns
    -------
    v : array of float32, shape (T, H, D)
        Output over the union; zeros for rows without keys.
    s : array of float32, shape (T, H)
        Base-2 LSE of `v`.

    Raises
    ------
    UsageError, TypeError
        If the arrays do not have these shapes or are not float32.

    References
    ----------
    .. [1] Z. Ye et al., "FlashInfer", arXiv:2501.01005, section 2.2.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.attention import merge_state
    >>> one, zero = np.ones((1, 1, 2), np.float32), np.zeros((1, 1), np.float32)
    >>> v, s = merge_state(one, zero, 3 * one, zero)
    >>> v.ravel(), s.ravel()
    (array([2., 2.], dtype=float32), array([1.], dtype=float32))
    """
    _check_states(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    v, s = empty(v_a, v_a.shape), empty(v_a, s_a.shape)
    (cuda if is_cuda(v_a) else merge).merge_state(v_a, s_a, v_b, s_b, v, s)
    return v, s


def merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any = None) -> None:
    """Merge the attention over other keys into `v` and `s`, in place, as `merge_state` does.

    `mask`, an optional array of bool, shape (T,), selects the rows to merge.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.attention import merge_state_in_place
    >>> v, s = np.ones((2, 1, 1), np.float32), np.zeros((2, 1), np.float32)
    >>> merge_state_in_place(v, s, 3 * v, s.copy(), mask=np.array([True, False]))
    >>> v.ravel(), s.ravel()
    (array([2., 1.], dtype=float32), array([1., 0.], dtype=float32))
    """
    _check_states(v=v, s=s, v_other=v_other, s_other=s_other)
    if mask is not None:
        check_array("mask", mask, v.shape[:1], np.bool_)
    (cuda if is_cuda(v) else merge).merge_state(v, s, v_other, s_other, v, s, mask)


def merge_states(v: Any, s: Any) -> tuple[Any, Any]:
    """Merge the attention over any number of sets of keys into the attention over all.

    Parameters
    ----------
    v : array of float32, shape (T, n_states, H, D)
        Outputs.
    s : array of float32, shape (T, n_states, H)
        Base-2 LSE of the outputs; -inf for rows without keys.

    Returns
    -------
    v : array of float32, shape (T, H, D)
        Output over the union; zeros for rows without keys.
    s : array of float32, shape (T, H)
        Base-2 LSE of `v`.

    Raises
    ------
    UsageError, TypeError
        If the arrays do not have these shapes or are not float32.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.attention import merge_states
    >>> v = np.array([1, 2, 3, 6], np.float32).reshape(1, 4, 1, 1)
    >>> merged, s = merge_states(v, np.zeros((1, 4, 1), np.float32))
    >>> merged.ravel(), s.ravel()
    (array([3.], dtype=float32), array([2.], dtype=float32))
    """
    check_array("v", v, (None, None, None, None))
    check_array("s", s, v.shape[:3])
    T, _, H, D = v.shape
    v_out, s_out = empty(v, (T, H, D)), empty(v, (T, H))
    (cuda if is_cuda(v) else merge).merge_states(v, s, v_out, s_out)
    return v_out, s_out


def _check_states(**arrays: Any) -> None:
    """Raise unless two states, (v, s) each, have the same shapes."""
    shape: tuple[int | None, ...] = (None, None, None)
    for i, (name, array) in enumerate(arrays.items()):
        check_array(name, array, shape[:2] if i % 2 else shape)
        shape = array.shape if i == 0 else shape

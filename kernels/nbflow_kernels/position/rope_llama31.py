"""RoPE with Llama 3.1's frequency scaling, under FlashInfer's names."""

from __future__ import annotations

from typing import Any

from nbflow_kernels.position.rope import positions_of, rotate, rotated
from nbflow_kernels.position.rope_scaling import Llama3RopeScaling


def apply_llama31_rope_pos_ids(
    q: Any,
    k: Any,
    pos_ids: Any,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8.0,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    old_context_len: int = 8192,
) -> tuple[Any, Any]:
    """Return query and key rows with Llama 3.1's RoPE applied.

    Parameters
    ----------
    q, k, pos_ids, rotary_dim, interleave, rope_theta
        As in `apply_rope_pos_ids`.
    rope_scale : float
        Divisor of the long wavelengths.
    low_freq_factor, high_freq_factor, old_context_len
        As in `Llama3RopeScaling`, the same scaling for `rope_cos_sin_cache`.

    Returns
    -------
    q, k : arrays of float32
        New arrays of the same shapes.

    Raises
    ------
    UsageError, TypeError
        If shapes, dtypes or numbers do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_llama31_rope_pos_ids
    >>> q = np.ones((1, 1, 2), np.float32)
    >>> apply_llama31_rope_pos_ids(q, q, np.array([3], np.int32))[0].ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    scaling = _llama31(rope_scale, low_freq_factor, high_freq_factor, old_context_len)
    return rotated(q, k, pos_ids, rotary_dim, interleave, 1.0, rope_theta, scaling)


def apply_llama31_rope_pos_ids_inplace(
    q: Any,
    k: Any,
    pos_ids: Any,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8.0,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    old_context_len: int = 8192,
) -> None:
    """Apply Llama 3.1's RoPE in place; arguments as for `apply_llama31_rope_pos_ids`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_llama31_rope_pos_ids_inplace
    >>> q, k = np.ones((2, 1, 1, 2), np.float32)
    >>> apply_llama31_rope_pos_ids_inplace(q, k, np.array([3], np.int32))
    >>> q.ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    scaling = _llama31(rope_scale, low_freq_factor, high_freq_factor, old_context_len)
    rotate(q, k, pos_ids, rotary_dim, interleave, 1.0, rope_theta, scaling)


def apply_llama31_rope(
    q: Any,
    k: Any,
    indptr: Any,
    offsets: Any,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8.0,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    old_context_len: int = 8192,
) -> tuple[Any, Any]:
    """Return ragged query and key rows with Llama 3.1's RoPE applied.

    Arguments as for `apply_rope`, then as for `apply_llama31_rope_pos_ids`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_llama31_rope
    >>> q, ints = np.ones((1, 1, 2), np.float32), lambda *values: np.array(values, np.int32)
    >>> apply_llama31_rope(q, q, ints(0, 1), ints(3))[0].ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    pos_ids = positions_of(q, indptr, offsets)
    return apply_llama31_rope_pos_ids(
        q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor,
        high_freq_factor, old_context_len,
    )  # fmt: skip


def apply_llama31_rope_inplace(
    q: Any,
    k: Any,
    indptr: Any,
    offsets: Any,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8.0,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    old_context_len: int = 8192,
) -> None:
    """Apply Llama 3.1's RoPE to ragged rows in place; arguments as for `apply_llama31_rope`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_llama31_rope_inplace
    >>> q, k = np.ones((2, 1, 1, 2), np.float32)
    >>> apply_llama31_rope_inplace(q, k, np.array([0, 1], np.int32), np.array([3], np.int32))
    >>> q.ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    pos_ids = positions_of(q, indptr, offsets)
    apply_llama31_rope_pos_ids_inplace(
        q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor,
        high_freq_factor, old_context_len,
    )  # fmt: skip


def _llama31(factor: float, low: float, high: float, length: int) -> Llama3RopeScaling:
    return Llama3RopeScaling(
        factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position=length
    )

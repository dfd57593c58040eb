"""Attention of one request over contiguous keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import array_shapes, check_array, is_cuda, on_host
from nbflow_kernels.attention.cuda.call_shape import is_short
from nbflow_kernels.attention.options import Options, PlanInputs, check_backend, from_arguments
from nbflow_kernels.attention.plan import make_plan
from nbflow_kernels.attention.run import AttentionCall, PlannedRun, run_plan
from nbflow_kernels.cuda import device_of
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import KVFormat, formats_of
from nbflow_kernels.kv_cache.nvfp4 import nvfp4_rows

_RECENT_PLANS = 4
"""Plans that a device keeps; a plan of few rows has up to some MB of partial results."""


def single_prefill_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
    sinks: Any = None,
    kv_format: str | None = None,
    variant: Any = None,
    lse_base: str = "2",
    attention_chunk: int = 0,
    key_cos_sin: Any = None,
    key_interleave: bool = False,
    key_bias: Any = None,
    kv_cache_sf: Any = None,
    out: Any = None,
    lse: Any = None,
) -> Any:
    r"""Attend from the rows of one request to its keys.

    .. math:: o_{th} = \sum_n \mathrm{softmax}_n\bigl(\mathrm{scale}\; q_{th} \cdot k_{ng}\bigr)\,
              v_{ng}, \qquad g = \lfloor h G / H \rfloor

    Parameters
    ----------
    q : array of float32 or float16, shape (T, H, D)
        Query rows, the last T of the sequence, with any row stride (columns of a wider matrix).
    k : array, shape (N, G, D) or (G, N, D)
        Keys in `kv_layout`: float32, float16, or `kv_format`; H must be a multiple of G.
    v : array, shape (N, G, D_v) or (G, N, D_v)
        Values; `kv_format` may name another format than for keys, and D_v may differ from D.
    scale_q : float or array, shape (H,), optional
        Factor of the queries.
    scale_k, scale_v : float or array, shape (G,), optional
        Factors of the keys and of the values.
    o_dtype : dtype, optional
        float32 or float16; by default that of `q`.
    custom_mask : array of bool, shape (T, N) or (T * N,), optional
        True where a row sees a key; replaces `causal`.
    packed_custom_mask : array of uint8, shape (ceil(T * N / 8),), optional
        The mask packed into bits, lowest bit first; takes precedence over `custom_mask`.
    causal : bool
        Row t sees keys 0..N - T + t: the mask is aligned to the end, as chunked prefill needs.
    kv_layout : str
        ``"NHD"`` for (N, G, D), ``"HND"`` for (G, N, D).
    pos_encoding_mode : str
        ``"NONE"``; ``"ROPE_LLAMA"``: fused RoPE of queries and keys, row t at position N - T + t;
        ``"ALIBI"``: adds the head's slope times (key - position) to the scores.
    use_fp16_qk_reduction : bool
        Must be False: dot products are summed in float32.
    sm_scale : float, optional
        Softmax scale; ``1 / sqrt(D)`` by default.
    window_left : int
        Number of keys to the left of its position that a row sees; -1 for all.
    logits_soft_cap : float, optional
        Scores become ``cap * tanh(score / cap)`` before the mask; None or 0 for no cap.
    rope_scale, rope_theta : float, optional
        Divisor of positions (default 1), and base of the RoPE frequencies (default 1e4).
    backend : str
        Must be ``"auto"``: the kernel is selected by the arrays.
    return_lse : bool
        Return the pair (out, lse).
    k_scale, v_scale : float, optional
        Additional factors of keys and values.
    sinks : array of float32, shape (H,), optional
        Per head, the score of an additional key without a value; part of the LSE.
    kv_format : str, optional
        Storage format of keys and values if their dtype does not tell (uint16 holds the bits of
        bfloat16): ``"f8_e4m3"`` or a block format such as ``"q8_0"`` (uint8, rows of bytes), see
        `kv_format`.  Two names, ``"q8_0/q4_0"``, for keys and values.
    variant : object, optional
        User-defined functions; see `AttentionVariant`.
    lse_base : str
        ``"2"`` or ``"e"``: base of the logarithm in the LSE.
    attention_chunk : int
        Rows see keys of the same chunk of this many positions only (Llama 4); 0 for none.
    key_cos_sin : array of float32, shape (n_positions, rotary_dim), optional
        Table of `rope_cos_sin_cache` for keys that are stored before RoPE (`k` holds them so): the
        first `rotary_dim` columns of key n are rotated by row n as they are read.  Queries are not
        changed; rotate them before.
    key_interleave : bool
        Rotate pairs of neighbours (2j, 2j + 1) of the keys instead of (j, j + rotary_dim / 2).
    key_bias : array of float32, shape (G, D), optional
        Added to the keys as they are read, before the RoPE of `key_cos_sin`: the part of all keys
        that a quantized cache need not hold.
    kv_cache_sf : pair of arrays of uint8 or float8_e4m3fn, optional
        Scales of keys and values in NVFP4, with rows of D / 16; `k` and `v` are their codes, uint8
        with rows of D / 2 bytes (see `nvfp4_quantize_append_paged_kv_cache`).  Pass the global
        scales as `k_scale` and `v_scale`.  Arrays in host memory only.
    out : array of the result's dtype, shape (T, H, D_v), optional
        Output array.
    lse : array of float32, shape (T, H), optional
        Output array of the log-sum-exp.

    Returns
    -------
    array, shape (T, H, D_v), or a pair with the LSE, float32 (T, H)
        A row without visible keys gives zeros and an LSE of -inf.

    Raises
    ------
    UsageError
        If a shape does not fit, or a number is out of range.
    TypeError
        If an argument is not an array or has another dtype.

    See Also
    --------
    nbflow_kernels.attention.reference.single_prefill_with_kv_cache : The NumPy form.

    Notes
    -----
    Keys are processed in chunks of 64 from the start of the sequence, and accumulators are merged
    every 2048 keys, for any number of rows and threads: the bits of a row are the same in a prompt,
    in a chunk of it and alone.  NaN or overflow in a visible score makes the row NaN.  Memory does
    not grow with T * N.

    References
    ----------
    .. [1] T. Dao et al., "FlashAttention", NeurIPS 2022, arXiv:2205.14135, algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.attention import single_prefill_with_kv_cache
    >>> q = np.zeros((2, 1, 4), np.float32)  # all scores are 0: the mean of the visible values
    >>> k = v = np.arange(8, dtype=np.float32).reshape(2, 1, 4)
    >>> single_prefill_with_kv_cache(q, k, v, causal=True)[:, 0]
    array([[0., 1., 2., 3.],
           [2., 3., 4., 5.]], dtype=float32)
    """
    check_backend(backend)
    given = locals()
    call = from_arguments(
        AttentionCall, given, q_scale=scale_q, k_scale=_both("k", scale_k, k_scale),
        v_scale=_both("v", scale_v, v_scale),
    )  # fmt: skip
    options, inputs = from_arguments(Options, given), from_arguments(PlanInputs, given)
    return _run(q, k, v, options, inputs, call, kv_cache_sf)


def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    sinks: Any = None,
    kv_format: str | None = None,
    variant: Any = None,
    lse_base: str = "2",
    attention_chunk: int = 0,
    key_cos_sin: Any = None,
    key_interleave: bool = False,
    key_bias: Any = None,
    out: Any = None,
    lse: Any = None,
) -> Any:
    """Decode attention of one request: from the newest row to all its keys.

    Parameters
    ----------
    q : array of float32 or float16, shape (H, D)
        The query row, at the position of the last key.
    k, v : array, shapes (N, G, D) and (N, G, D_v), or (G, N, D) and (G, N, D_v)
        Keys and values in `kv_layout`.
    kv_layout, pos_encoding_mode
        As in `single_prefill_with_kv_cache`.
    use_tensor_cores : bool
        True: raise if no tensor-core kernel supports the call.  False: tensor cores are used where
        supported.
    q_scale, k_scale, v_scale : float, optional
        Factors of the query, the keys and the values.
    window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta, return_lse, sinks, kv_format
    variant, lse_base, attention_chunk, key_cos_sin, key_interleave, key_bias
        As in `single_prefill_with_kv_cache`.
    out : array of the dtype of `q`, shape (H, D_v), optional
        Output array.
    lse : array of float32, shape (H,), optional
        Output array of the LSE.

    Returns
    -------
    array, shape (H, D_v), or a pair with the LSE, shape (H,)
        The bits are those of the last row of `single_prefill_with_kv_cache`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.attention import single_decode_with_kv_cache
    >>> k = v = np.array([[[1.0, 0.0]], [[0.0, 1.0]]], np.float32)
    >>> out, lse = single_decode_with_kv_cache(np.zeros((1, 2), np.float32), k, v, return_lse=True)
    >>> out, lse  # two keys of score 0: log2(e**0 + e**0) = 1
    (array([[0.5, 0.5]], dtype=float32), array([1.], dtype=float32))
    """
    check_array("q", q, (None, None), (np.float32, np.float16))
    if out is not None:
        check_array("out", out, (q.shape[0], None), q.dtype)
    if lse is not None:
        check_array("lse", lse, q.shape[:1])
    given = locals()
    call = from_arguments(
        AttentionCall, given, tensor_cores=use_tensor_cores,
        out=None if out is None else out[None], lse=None if lse is None else lse[None],
    )  # fmt: skip
    options, inputs = from_arguments(Options, given), from_arguments(PlanInputs, given)
    result = _run(q[None], k, v, options, inputs, call)
    if return_lse:
        found, found_lse = result
        return found[0] if out is None else out, found_lse[0] if lse is None else lse
    return result[0] if out is None else out


def _run(
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    inputs: PlanInputs,
    call: AttentionCall,
    kv_cache_sf: Any = None,
) -> Any:
    """Plan and run; a device keeps its last plans of a few rows, as layers repeat their shapes.

    A plan is not among them while it is used, so threads do not share it.  A graph could outlive
    it, so captured calls have plans that are not kept.
    """
    own_plan = inputs.objects or kv_cache_sf is not None
    if own_plan or not is_cuda(q) or device_of(q).is_capturing:
        return run_plan(single_run(q, k, v, options, inputs, call, kv_cache_sf))
    recent = device_of(q).constants.setdefault(("attention", "recent plans"), {})
    # options may be arrays of one number, which have no hash
    key = (array_shapes(q, k, v), tuple(map(_number, vars(options).values())), inputs.kv_format)
    found = recent.pop(key, None)
    if found is None:
        run = single_run(q, k, v, options, inputs, call)
    else:
        run = PlannedRun(found[0], q, k[None], v[None], found[1], call)
    result = run_plan(run)
    if is_short(run.plan):
        recent[key] = run.plan, run.kinds
        for oldest in list(recent)[:-_RECENT_PLANS]:
            recent.pop(oldest, None)
    return result


def _number(option: Any) -> Any:
    return float(option) if hasattr(option, "dtype") else option


def single_run(
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    inputs: PlanInputs,
    call: AttentionCall,
    kv_cache_sf: Any = None,
) -> PlannedRun:
    """Check and plan the rows of one request; its keys are one page."""
    check_array("q", q, (None, None, None), (np.float32, np.float16), rows=True)
    T, H, D = q.shape
    scales = None
    if kv_cache_sf is None:
        kinds, D_v = _check_keys(k, v, D, inputs.kv_format)
    else:
        D_v = 2 * getattr(v, "shape", (0,))[-1]
        k, v, kinds, (k_scales, v_scales) = nvfp4_rows(
            (k, v), kv_cache_sf, None, None, (D, D_v), options.kv_layout, inputs.kv_format
        )
        if k.shape[:2] != v.shape[:2]:
            raise UsageError(
                f"v must have the rows and heads of k, {k.shape[:2]}, got {v.shape[:2]}"
            )
        scales = k_scales[None], v_scales[None]
    N, G = k.shape[1::-1] if options.kv_layout == "HND" else k.shape[:2]
    tables = (
        np.array([0, T], np.int32), np.array([0, N > 0], np.int32), np.zeros(1, np.int32),
        np.array([N], np.int32),
    )  # fmt: skip
    plan = make_plan(tables, (H, G, D, D_v), max(N, 1), options, inputs)
    return PlannedRun(plan, q, k[None], v[None], kinds, call, inputs.variant, scales=scales)


def _both(name: str, per_head: Any, single: Any) -> Any:
    """Return the product of a per-head and a single scale, either of them optional."""
    if per_head is None or single is None:
        return single if per_head is None else per_head
    per_head, single = on_host(per_head), on_host(single)
    if np.ndim(single):
        raise UsageError(f"{name}_scale must be a number if scale_{name} is given")
    return np.asarray(per_head, np.float64) * single


def _check_keys(k: Any, v: Any, D: int, kv_format: str | None) -> tuple[tuple[int, int], int]:
    """Check keys of size D and their values; return their KINDS and the size of a value."""
    if kv_format is None:  # messages name `k` and `v`
        for name, rows in (("k", k), ("v", v)):
            dtypes = (np.float32, np.float16, np.uint16)  # bits of bfloat16
            check_array(name, rows, (None, None, None), dtypes, any_stride=True)
    of_k, of_v = formats_of(k, v, kv_format)
    check_array("k", k, (None, None, of_k.row_length(D)), k.dtype, any_stride=True)
    check_array("v", v, (*k.shape[:2], None), v.dtype, any_stride=True)
    D_v = D if v.shape[2] == of_v.row_length(D) else _size_of(v.shape[2], of_v)
    return (of_k.kind, of_v.kind), D_v


def _size_of(row_length: int, format: KVFormat) -> int:
    """Return the head size of values with this row length."""
    if not format.is_float and row_length % format.block_bytes:
        raise UsageError(
            f"v must have rows of whole blocks of {format.block_bytes} bytes ({format.name}), got "
            f"{row_length} bytes"
        )
    return row_length // (1 if format.is_float else format.block_bytes) * format.block_size

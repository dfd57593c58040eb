"""What a call of attention may ask for: checks, defaults, and the tables kernels need for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, is_cuda, on_host
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.position import rope_cos_sin_cache

LAYOUTS = ("NHD", "HND")
POSITION_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
LSE_BASES = ("2", "e")
_FLOAT_DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class Options:
    """What is the same for all rows of a step."""

    kv_layout: str = "NHD"
    """``"NHD"`` or ``"HND"``."""
    causal: bool = False
    """Whether row t of n sees keys 0..kv_len - n + t."""
    window_left: int = -1
    """How many keys before its own position a row sees; -1 for all."""
    logits_soft_cap: float | None = None
    """Scores become cap * tanh(score / cap); None or 0 for no cap."""
    sm_scale: float | None = None
    """Factor of the dot products; 1 / sqrt(head_dim_qk) by default."""
    pos_encoding_mode: str = "NONE"
    """``"NONE"``, ``"ROPE_LLAMA"`` or ``"ALIBI"``."""
    rope_scale: float | None = None
    """Positions are divided by it; 1 by default."""
    rope_theta: float | None = None
    """Base of the rotation's frequencies; 1e4 by default."""
    split_keys: int | None = None
    """Keys per partial result; 2048 by default."""
    disable_split_kv: bool = False
    """Whether a row's keys stay in one work item."""
    disable_page_sharing: bool = False
    """Whether pages that several requests have are read for each of them."""

    def __post_init__(self) -> None:
        if self.kv_layout not in LAYOUTS:
            raise unknown_name("kv_layout", self.kv_layout, LAYOUTS)
        if self.pos_encoding_mode not in POSITION_MODES:
            raise unknown_name("pos_encoding_mode", self.pos_encoding_mode, POSITION_MODES)
        if not isinstance(self.window_left, int | np.integer) or self.window_left < -1:
            raise UsageError(
                f"window_left must be a number of keys, or -1 for all, got {self.window_left!r}"
            )
        check_cap(self.logits_soft_cap)
        for name in ("rope_scale", "rope_theta"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and isfinite(value)):
                raise UsageError(f"{name} must be positive, or None for the default, got {value}")
            if value is not None and self.pos_encoding_mode != "ROPE_LLAMA":
                raise UsageError(
                    f"{name} is for pos_encoding_mode='ROPE_LLAMA', got "
                    f"pos_encoding_mode={self.pos_encoding_mode!r}"
                )
        if self.split_keys is not None and self.split_keys < 1:
            raise UsageError(f"fixed_split_size must be positive, got {self.split_keys} keys")

    def scale(self, head_dim: int) -> float:
        """Return the factor of the dot products."""
        return 1.0 / sqrt(head_dim) if self.sm_scale is None else float(self.sm_scale)


def check_cap(logits_soft_cap: float | None) -> float:
    """Return the soft cap, 0 for none."""
    if logits_soft_cap is not None and not 0.0 <= logits_soft_cap < float("inf"):
        raise UsageError(
            f"logits_soft_cap must be positive, or None for none, got {logits_soft_cap}"
        )
    return float(logits_soft_cap or 0.0)


def check_lse_base(lse_base: str) -> bool:
    """Return whether the LSE is a natural logarithm."""
    if lse_base not in LSE_BASES:
        raise unknown_name("lse_base", lse_base, LSE_BASES)
    return lse_base == "e"


def check_heads(num_qo_heads: int, num_kv_heads: int, *head_dims: int) -> None:
    """Raise unless the heads can be grouped."""
    if min(num_qo_heads, num_kv_heads, *head_dims) < 1:
        found = ", ".join(map(str, (num_qo_heads, num_kv_heads, *head_dims)))
        raise UsageError(f"num_qo_heads, num_kv_heads and head_dim must be positive, got {found}")
    if num_qo_heads % num_kv_heads:
        raise UsageError(
            f"num_qo_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_qo_heads}"
        )


def check_indptr(name: str, indptr: Any, n: int | None = None) -> None:
    """Raise unless `indptr` is int32, starts at 0 and never falls."""
    check_array(name, indptr, (n,), np.int32)
    if len(indptr) == 0 or indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
        raise UsageError(f"{name} must start at 0 and never fall, got {indptr.tolist()}")


def alibi_slopes(n_heads: int) -> np.ndarray:
    """Return ALiBi's slope of each head, float32.

    For a power of two n: 2**(-8 i / n), i = 1..n.  Else those of the next lower power of two, then
    every other one of the next higher (Press et al., arXiv:2108.12409, and the authors' code).
    """
    lower = 2 ** (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / lower) for i in range(1, lower + 1)]
    slopes += [2.0 ** (-4.0 * i / lower) for i in range(1, 2 * (n_heads - lower), 2)]
    return np.array(slopes, np.float32)


@functools.lru_cache(maxsize=4)
def rope_table(n_positions: int, head_dim: int, theta: float, scale: float) -> np.ndarray:
    """Return cosines and sines of `n_positions` positions, float32 (n_positions, head_dim)."""
    table: np.ndarray = rope_cos_sin_cache(n_positions, head_dim, theta=theta, scale=scale)
    return table


def rope_table_for(options: Options, n_positions: int, head_dim: int) -> np.ndarray:
    """Return the table of at least so many positions; its length is a power of two, to be kept."""
    if head_dim % 2:
        raise UsageError(f"pos_encoding_mode='ROPE_LLAMA' needs an even head_dim, got {head_dim}")
    theta = 1e4 if options.rope_theta is None else float(options.rope_theta)
    scale = 1.0 if options.rope_scale is None else float(options.rope_scale)
    return rope_table(1 << max(8, (n_positions - 1).bit_length()), head_dim, theta, scale)


def mask_table(
    custom_mask: Any, packed_custom_mask: Any, qo_lens: np.ndarray, kv_lens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return a checked mask: its elements, each request's first one, and whether they are bits.

    A packed mask counts where both are given; each request starts at a byte of it.
    """
    sizes = qo_lens.astype(np.int64) * kv_lens
    custom_mask, packed_custom_mask = on_host(custom_mask), on_host(packed_custom_mask)
    if packed_custom_mask is not None:
        n_bytes = -(-sizes // 8)
        check_array("packed_custom_mask", packed_custom_mask, (int(n_bytes.sum()),), np.uint8)
        return packed_custom_mask, 8 * (np.cumsum(n_bytes) - n_bytes), True
    shape: tuple[int, ...] = (int(sizes.sum()),)
    if getattr(custom_mask, "ndim", 1) == 2 and len(qo_lens) == 1:
        shape = (int(qo_lens[0]), int(kv_lens[0]))
    check_array("custom_mask", custom_mask, shape, np.bool_)
    return custom_mask.ravel(), np.cumsum(sizes) - sizes, False


def head_factors(n_heads: int, group: int, *scales: Any) -> np.ndarray | None:
    """Return the product of the scales for each query head, or None where all are None.

    A scale is a number, or an array with one number for each query head or each key/value head.
    """
    if all(scale is None for scale in scales):
        return None
    factors = np.ones(n_heads, np.float64)
    for name, scale in zip(("q_scale", "k_scale", "v_scale"), scales, strict=False):
        if scale is None:
            continue
        values = np.asarray(on_host(scale), np.float64)
        if values.ndim and values.shape not in ((1,), (n_heads,), (n_heads // group,)):
            raise UsageError(
                f"{name} must be a number, or have one for each of the {n_heads} query heads or "
                f"{n_heads // group} key/value heads, got shape {values.shape}"
            )
        if values.shape == (n_heads // group,) and values.size > 1:
            values = np.repeat(values, group)
        factors = factors * values
    return factors.astype(np.float32)


def check_dtype(name: str, wanted: Any, found: Any) -> None:
    """Raise unless the dtype named when planning is the array's, or none was named."""
    if wanted is None:
        return
    wanted_name = wanted if isinstance(wanted, str) else np.dtype(wanted).name
    if wanted_name != found.name and (wanted_name, found.name) != ("bfloat16", "uint16"):
        raise TypeError(f"{name} was planned as {wanted_name}, got an array of {found.name}")


def output_dtype(o_dtype: Any, q: Any) -> np.dtype[Any]:
    """Return the dtype of the result: what was asked for, or that of the queries."""
    dtype: np.dtype[Any] = np.dtype(q.dtype if o_dtype is None else o_dtype)
    if dtype.name not in _FLOAT_DTYPES:
        raise unknown_name("output dtype", dtype.name, _FLOAT_DTYPES)
    return dtype


def check_workspace(name: str, workspace: Any) -> Any:
    """Return a caller's memory for partial results, an array of any dtype, or None."""
    if workspace is None:
        return None
    if not isinstance(workspace, np.ndarray) and not is_cuda(workspace):
        raise TypeError(
            f"{name} must be a NumPy array, an array on a CUDA device, or None for memory of the "
            f"plan's own, got {type(workspace).__name__}"
        )
    if not workspace.flags.c_contiguous:
        raise UsageError(f"{name} must be C-contiguous")
    return workspace


def refuse_int_workspace(int_workspace_buffer: Any) -> None:
    """Raise for a caller's memory for tables."""
    if int_workspace_buffer is not None:
        raise UsageError(
            "int_workspace_buffer must be None: a plan's tables have memory of their own"
        )


def check_backend(backend: str) -> None:
    """Raise unless the backend is left to us: the array's device decides."""
    if backend != "auto":
        raise UsageError(
            f"backend must be 'auto': the kind of array chooses the kernel, got {backend!r}"
        )


def refuse_half_precision(use_fp16_qk_reduction: bool) -> None:
    """Raise if dot products in float16 are wanted."""
    if use_fp16_qk_reduction:
        raise UsageError(
            "use_fp16_qk_reduction must be False: dot products are summed in float32 on the CPU, "
            "float16 would be slower and less exact"
        )

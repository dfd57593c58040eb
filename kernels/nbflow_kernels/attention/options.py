"""Attention options: checks, defaults, and the tables they need (masks, rotations, factors)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, TypeVar

import numpy as np

from nbflow_kernels.arrays import check_array, is_cuda, on_host
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.formats.float8 import FLOAT8_NAMES
from nbflow_kernels.kv_cache.page_table import check_layout
from nbflow_kernels.position import rope_cos_sin_cache

POSITION_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
_FLOAT_DTYPES = ("float32", "float16")
_Arguments = TypeVar("_Arguments")


def from_arguments(
    kind: type[_Arguments], arguments: Mapping[str, Any], **changed: Any
) -> _Arguments:
    """Make a dataclass from the arguments of a function that have the names of its fields.

    `arguments` are the ``locals()`` of a function with FlashInfer's long signature; `changed` are
    fields that have another value or name there.
    """
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**({name: arguments[name] for name in names if name in arguments} | changed))


@dataclass(frozen=True)
class Options:
    """Options common to all rows of a step.

    As in `single_prefill_with_kv_cache` and `BatchPrefillWithPagedKVCacheWrapper.plan`.
    """

    kv_layout: str = "NHD"
    causal: bool = False
    window_left: int = -1
    attention_chunk: int = 0
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    split_keys: int | None = None
    """Keys per split; 2048 by default."""
    disable_split_kv: bool = False
    disable_page_sharing: bool = False
    use_fp16_qk_reduction: bool = False

    def __post_init__(self) -> None:
        check_layout(self.kv_layout)
        if self.use_fp16_qk_reduction:
            raise UsageError(
                "use_fp16_qk_reduction must be False: scores are summed in float32. A float16 sum "
                "keeps 11 bits: a score of 16 would be off by 2**-7, its weight by 0.8 %, and the "
                "kernels, which wait for keys and values, would not be faster"
            )
        if self.pos_encoding_mode not in POSITION_MODES:
            raise unknown_name("pos_encoding_mode", self.pos_encoding_mode, POSITION_MODES)
        if not isinstance(self.window_left, int | np.integer) or self.window_left < -1:
            raise UsageError(
                f"window_left must be a number of keys, or -1 for all, got {self.window_left!r}"
            )
        if not isinstance(self.attention_chunk, int | np.integer) or self.attention_chunk < 0:
            raise UsageError(
                "attention_chunk must be a number of positions, or 0 for none, got "
                f"{self.attention_chunk!r}"
            )
        if self.logits_soft_cap is not None and not 0.0 <= self.logits_soft_cap < float("inf"):
            raise UsageError(
                f"logits_soft_cap must be positive, or None for none, got {self.logits_soft_cap}"
            )
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
        """Return the softmax scale."""
        return 1.0 / sqrt(head_dim) if self.sm_scale is None else float(self.sm_scale)


@dataclass(frozen=True)
class PlanInputs:
    """Arrays, formats and dtypes of a plan, beyond the numbers in `Options`.

    As in `BatchPrefillWithPagedKVCacheWrapper.plan`.
    """

    custom_mask: Any = None
    packed_custom_mask: Any = None
    key_cos_sin: Any = None
    key_interleave: bool = False
    kv_format: str | None = None
    variant: Any = None
    q_data_type: Any = None
    kv_data_type: Any = None
    o_data_type: Any = None
    non_blocking: bool = True
    q_len_per_req: int | None = None
    """Query rows of each request, if all have the same number."""

    def __post_init__(self) -> None:
        if self.key_interleave and self.key_cos_sin is None:
            raise UsageError("key_interleave is for key_cos_sin, the rotations of keys; give both")

    @property
    def objects(self) -> dict[str, Any]:
        """Return the masks, rotations and variant that are given, by name."""
        names = ("custom_mask", "packed_custom_mask", "variant", "key_cos_sin")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def masked(self) -> bool:
        """Return whether a custom mask replaces the causal one."""
        return self.custom_mask is not None or self.packed_custom_mask is not None


def check_heads(num_qo_heads: int, num_kv_heads: int, *head_dims: int) -> None:
    """Raise unless the head counts and sizes are valid."""
    if min(num_qo_heads, num_kv_heads, *head_dims) < 1:
        found = ", ".join(map(str, (num_qo_heads, num_kv_heads, *head_dims)))
        raise UsageError(f"num_qo_heads, num_kv_heads and head_dim must be positive, got {found}")
    if num_qo_heads % num_kv_heads:
        raise UsageError(
            f"num_qo_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_qo_heads}"
        )


_rope_table = functools.lru_cache(maxsize=4)(rope_cos_sin_cache)


def rope_table_for(options: Options, n_positions: int, head_dim: int) -> Any:
    """Return a cached table of at least `n_positions`, rounded up to a power of two."""
    if head_dim % 2:
        raise UsageError(f"pos_encoding_mode='ROPE_LLAMA' needs an even head_dim, got {head_dim}")
    theta = 1e4 if options.rope_theta is None else float(options.rope_theta)
    scale = 1.0 if options.rope_scale is None else float(options.rope_scale)
    n_rows = 1 << max(8, (n_positions - 1).bit_length())
    return _rope_table(n_rows, head_dim, theta=theta, scale=scale)


def check_key_rope(cos_sin: Any, head_dim: int, kv_lens: np.ndarray) -> None:
    """Raise unless a table of rotations has a row for every key and pairs within a head."""
    check_array("key_cos_sin", cos_sin, (None, None))
    n_positions, rotary_dim = cos_sin.shape
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise UsageError(
            f"key_cos_sin must have an even number of columns, at most head_dim = {head_dim}, got "
            f"{rotary_dim}"
        )
    longest = int(kv_lens.max()) if len(kv_lens) else 0
    if n_positions < longest:
        raise UsageError(
            f"key_cos_sin has {n_positions} rows, and a request has {longest} keys: make the table "
            "for all positions"
        )


def mask_table(
    custom_mask: Any, packed_custom_mask: Any, qo_lens: np.ndarray, kv_lens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return a checked mask: its elements, the offset of each request, and whether it is packed.

    A packed mask takes precedence; each of its requests starts at a byte.
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
    """Return the product of the scales per query head, or None if all are None.

    A scale is a number, or an array with one number per query head or per KV head.
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
                f"{name} must be a number, or have one per query head ({n_heads}) or key/value "
                f"head ({n_heads // group}), got shape {values.shape}"
            )
        if values.shape == (n_heads // group,) and values.size > 1:
            values = np.repeat(values, group)
        factors = factors * values
    return factors.astype(np.float32)


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, which may be a name."""
    return dtype if isinstance(dtype, str) else np.dtype(dtype).name


def check_dtype(name: str, wanted: Any, found: Any) -> None:
    """Raise unless an array has the dtype given to `plan`, if any."""
    if wanted is None:
        return
    wanted_name = dtype_name(wanted)
    held: dict[str, tuple[str, ...]] = dict.fromkeys(FLOAT8_NAMES, ("uint8",))  # their bits
    held["bfloat16"] = ("uint16", "float32")  # its bits, or widened
    if found.name not in (wanted_name, *held.get(wanted_name, ())):
        raise TypeError(f"{name} was planned as {wanted_name}, got an array of {found.name}")


def output_dtype(o_dtype: Any, q: Any) -> np.dtype[Any]:
    """Return the dtype of the result: `o_dtype`, or that of the queries."""
    dtype: np.dtype[Any] = np.dtype(q.dtype if o_dtype is None else o_dtype)
    if dtype.name not in _FLOAT_DTYPES:
        raise unknown_name("output dtype", dtype.name, _FLOAT_DTYPES)
    return dtype


def check_workspace(workspace: Any) -> Any:
    """Return the split-KV workspace of the caller, checked: an array of any dtype, or None."""
    if workspace is None:
        return None
    if not isinstance(workspace, np.ndarray) and not is_cuda(workspace):
        raise TypeError(
            "float_workspace_buffer must be a NumPy array, an array on a CUDA device, or None to "
            f"allocate one, got {type(workspace).__name__}"
        )
    if not workspace.flags.c_contiguous:
        raise UsageError("float_workspace_buffer must be C-contiguous")
    return workspace


def check_backend(backend: str) -> None:
    """Raise unless the backend is ``"auto"``."""
    if backend != "auto":
        raise UsageError(
            f"backend must be 'auto': the kernel is selected by the arrays, got {backend!r}"
        )

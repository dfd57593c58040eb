"""Multi-item scoring: a prompt, then items of which each sees the prompt and itself.

One pass over a prompt and many candidate answers scores all of them: a delimiter precedes each
item and follows the last one, and the position of a token within its item tells which keys it sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, on_host
from nbflow_kernels.errors import UsageError

_INTEGERS = (np.int32, np.int64, np.uint16, np.uint32)


@dataclass(frozen=True)
class Items:
    """Arguments of multi-item scoring, as in `BatchPrefillWithPagedKVCacheWrapper.plan`."""

    prefix_len_ptr: Any = None
    token_pos_in_items_ptr: Any = None
    token_pos_in_items_len: int = 0
    max_item_len_ptr: Any = None

    def mask(self, qo_indptr: np.ndarray, kv_lens: np.ndarray, causal: bool) -> Any:
        """Return the mask of all requests, as `custom_mask`; None without items."""
        arrays = self.prefix_len_ptr, self.token_pos_in_items_ptr, self.max_item_len_ptr
        if all(array is None for array in arrays) and not self.token_pos_in_items_len:
            return None
        if any(array is None for array in arrays[:2]):
            raise UsageError(
                "multi-item scoring needs prefix_len_ptr and token_pos_in_items_ptr; "
                "token_pos_in_items_len and max_item_len_ptr go with them"
            )
        if not causal:
            raise UsageError("prefix_len_ptr (multi-item scoring) needs causal=True")
        return _item_mask(self, np.diff(qo_indptr), kv_lens)


def _item_mask(items: Items, qo_lens: np.ndarray, kv_lens: np.ndarray) -> np.ndarray:
    """Return the concatenated masks (qo_len, kv_len) of all requests."""
    B, n = len(qo_lens), items.token_pos_in_items_len
    prefixes, positions = on_host(items.prefix_len_ptr), on_host(items.token_pos_in_items_ptr)
    prefixes = prefixes.reshape(1) if getattr(prefixes, "ndim", 1) == 0 else prefixes
    check_array("prefix_len_ptr", prefixes, (B,), _INTEGERS)
    check_array("token_pos_in_items_ptr", positions, (None,), _INTEGERS)
    longest = None
    if items.max_item_len_ptr is not None:
        longest = on_host(items.max_item_len_ptr)
        check_array("max_item_len_ptr", longest, (B,), _INTEGERS)
    masks = []
    for b, (qo_len, kv_len, prefix) in enumerate(zip(qo_lens, kv_lens, prefixes, strict=True)):
        own = positions[b * n :].astype(np.int64)[: max(int(kv_len) - int(prefix), 0)]
        if len(own) < kv_len - prefix or (B > 1 and n < kv_len - prefix):
            raise UsageError(
                f"token_pos_in_items_ptr must have a position for each of the "
                f"{kv_len - int(prefix)} tokens after the prefix of request {b}, padded to "
                f"token_pos_in_items_len = {n}"
            )
        if longest is not None and len(own) and own.max() > longest[b]:
            raise UsageError(
                f"max_item_len_ptr of request {b} must be at least its largest position in an "
                f"item, {own.max()}, got {longest[b]}"
            )
        keys, rows = np.arange(kv_len), np.arange(kv_len - qo_len, kv_len)[:, None]
        # a row of the prefix, or before it, sees all keys up to itself
        visible = np.full(int(kv_len), int(kv_len))
        visible[int(prefix) :] = own
        sees = (rows - keys < visible[np.maximum(rows, 0)]) | (keys < int(prefix))
        masks.append((sees & (keys <= rows)).ravel())
    return np.concatenate(masks) if masks else np.zeros(0, bool)

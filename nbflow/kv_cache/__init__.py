"""Paged KV cache: block table, prefix cache and page storage."""

from nbflow.kv_cache.block_table import BlockTable
from nbflow.kv_cache.storage import KVStorage, make_storage

__all__ = ["BlockTable", "KVStorage", "make_storage"]

"""The paged key/value cache: whose pages are whose (`page_table`), the pages (`storage`)."""

from nbflow.kv_cache.block_table import BlockTable
from nbflow.kv_cache.storage import KVStorage, make_storage

__all__ = ["BlockTable", "KVStorage", "make_storage"]

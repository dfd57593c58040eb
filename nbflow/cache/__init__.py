"""The paged key/value cache: whose pages are whose (`page_table`), the pages (`storage`)."""

from nbflow.cache.page_table import PageTable
from nbflow.cache.storage import KV_FORMATS, KVStorage

__all__ = ["KV_FORMATS", "KVStorage", "PageTable"]

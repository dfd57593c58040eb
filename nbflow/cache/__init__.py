"""The paged key/value cache: which pages belong to whom (`page_table`) and the pages (`storage`)."""

from nbflow.cache.page_table import PageTable
from nbflow.cache.storage import KV_FORMATS, KVStorage

__all__ = ["KV_FORMATS", "KVStorage", "PageTable"]

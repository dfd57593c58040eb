"""The paged key/value cache: whose pages are whose (`page_table`), the pages (`storage`)."""

from nbflow.cache.page_table import PageTable
from nbflow.cache.storage import KVStorage, make_storage

__all__ = ["KVStorage", "PageTable", "make_storage"]

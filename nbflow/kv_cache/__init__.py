"""Paged KV cache and recurrent states: block table, prefix cache, storage of pages and states."""

from nbflow.kv_cache.block_table import BlockTable
from nbflow.kv_cache.state_storage import StateStorage
from nbflow.kv_cache.state_table import StateTable
from nbflow.kv_cache.storage import KVStorage, make_storage

__all__ = ["BlockTable", "KVStorage", "StateStorage", "StateTable", "make_storage"]

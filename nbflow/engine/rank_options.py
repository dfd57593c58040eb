"""Options of a rank: how its worker loads and runs its shard, and those of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbflow.executor import HOST, Device
from nbflow.options import OffloadConfig
from nbflow.quantization.policy import Weights
from nbflow.quantization.quantizer_options import QuantizerOptions


@dataclass(frozen=True)
class RankOptions:
    """Options of `nbflow.load` that a worker, its encoder and its cross-attention cache share."""

    weights: Weights
    encoding: QuantizerOptions
    activations: str
    kv: str
    max_step_tokens: int
    offload: OffloadConfig
    threads: tuple[int, Sequence[int], bool] = (1, (), False)
    """Arguments of `set_num_threads`."""
    place: Device = HOST
    """Device of weights, KV cache and buffers."""
    trace: Any = None
    """`Executor.trace`."""

    def cache_memory(self, what: str, n_layers: int) -> tuple[Any, tuple[Any, int]]:
        """Return the memory of a cache: the device's, and the host's with its number of layers."""
        on_host = 0 if self.place.on_host else self.offload.host_layers(n_layers)
        host = self.place.for_purpose(f"the host's part of {what}")
        return self.place.for_purpose(what), (host.mapped(), on_host)

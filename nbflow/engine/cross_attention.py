"""Cross-attention cache: keys and values of the encoder output for every decoder layer.

The encoder runs once per sequence, on the same ranks as the decoder.  Each rank then computes keys
and values of its layers and heads, which decoder steps read like their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nbflow.checkpoint import WeightFile
from nbflow.distributed.plan import RankPlan
from nbflow.engine.evaluator import chunks
from nbflow.engine.interfaces import StepRunner
from nbflow.engine.rank_options import RankOptions
from nbflow.engine.request import Request
from nbflow.executor import WeightLoader, make_executor, make_step
from nbflow.kv_cache import BlockTable, KVStorage
from nbflow.planner.memory import PAGE_SIZE
from nbflow.program import build_cross_kv, fuse, partition
from nbflow.spec.model_spec import ModelSpec


class CrossAttentionCache:
    """Cross-attention cache of one rank; `spec`, `mine` and the options are the decoder's."""

    def __init__(
        self,
        encoder: StepRunner,
        spec: ModelSpec,
        mine: RankPlan,
        file: WeightFile,
        options: RankOptions,
    ) -> None:
        self.encoder = encoder
        program, place = fuse(partition(build_cross_kv(spec), mine)), options.place
        self.weights = WeightLoader(
            program, file, options.weights, encoding=options.encoding, packed=place.on_host
        )
        self.weights.finalize(place)
        layers = program.layers
        memory = options.cache_memory("the encoder's keys and values", len(layers))
        heads = {i: program.heads_of(i) for i in layers}
        self.storage = KVStorage(layers, PAGE_SIZE, heads, options.kv, *memory, spec.n_layers)
        self.table = BlockTable(PAGE_SIZE)
        self._executor = make_executor(
            program, self.weights, self.storage, activations=options.activations, device=place
        )

    def add(self, inputs: Mapping[int, Sequence[int]]) -> None:
        """Run the encoder on the inputs of sequences and store keys and values."""
        if not inputs:
            return
        states = self.encoder.sequences("outputs", list(inputs.values()), "y")
        for chunk in chunks([len(x) for x in states], self.encoder.max_step_tokens, whole=True):
            numbers = [list(inputs)[b] for b, _, _ in chunk]
            for number in numbers:
                self.table.add(number)
            self._executor.external_rows = np.concatenate([states[b] for b, _, _ in chunk])
            try:
                step = make_step(self.table, numbers, [[0] * (n - m) for _, m, n in chunk], [])
                self.storage.ensure(self.table.n_pages)
                self._executor.run(step)
            except BaseException:
                for number in inputs:
                    if number in self.table:
                        self.table.drop(number)
                raise
            finally:
                self._executor.external_rows = np.zeros((0, 0), np.float32)

    def update(self, running: Sequence[Request]) -> None:
        """Encode the inputs of newly running requests; drop those that no longer run."""
        ids = {sequence for request in running for sequence in request.sequences}
        for number in [n for n in self.table.sequences if n >= 0 and n not in ids]:
            self.table.drop(number)
        new = {
            r.id: r.encoder_ids or [] for r in running if not r.branches and r.id not in self.table
        }
        self.add(new)

    def drop(self, sequence: int) -> None:
        """Drop a sequence if it is present."""
        if sequence in self.table:
            self.table.drop(sequence)

    def reset_memory(self) -> None:
        """Free the stored keys and values and the buffers."""
        self._executor.release_buffers()
        self.storage.release()
        self.table = BlockTable(self.storage.page_size)

    def memory(self) -> dict[str, int]:
        """Return the memory without the encoder's in bytes, with keys of `Worker.memory`."""
        return {
            "weight_bytes": self.weights.n_bytes,
            "kv_bytes": self.storage.n_bytes,
            "kv_used_bytes": self.table.most_used_pages * self.storage.page_bytes,
            "host_bytes": self.weights.host_bytes + self.storage.host_bytes,
            "workspace_bytes": self._executor.workspace_bytes,
            "step_bytes": self._executor.step_bytes,
            "graph_bytes": self._executor.graph_bytes,
        }

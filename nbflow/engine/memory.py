"""What a decoder remembers of its encoder: keys and values of the hidden states, for every layer.

The encoder runs once for a sequence, on the same ranks as the decoder; then each rank makes the
keys and values of its layers and heads, and the decoder's steps read them like its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nbflow.cache import KVStorage, PageTable
from nbflow.execute import CpuExecutor, RankWeights, make_step
from nbflow.parallel.plan import RankPlan
from nbflow.program import build_memory, fuse, partition
from nbflow.spec.model_spec import ModelSpec
from nbflow.weights import WeightFile

if TYPE_CHECKING:
    from nbflow.engine.rank import RankEngine


class Memory:
    """One rank's part.

    Parameters
    ----------
    encoder : RankEngine
        The encoder.
    spec : ModelSpec
        The decoder.
    mine : RankPlan
        What the rank holds of the decoder.
    file : WeightFile
        The checkpoint, open.
    weights, outliers, activations, kv, page_size
        As of the decoder.
    """

    def __init__(
        self,
        encoder: RankEngine,
        spec: ModelSpec,
        mine: RankPlan,
        file: WeightFile,
        *,
        weights: str | None,
        outliers: float,
        activations: str,
        kv: str,
        page_size: int,
    ) -> None:
        self.encoder = encoder
        program = fuse(partition(build_memory(spec), mine))
        self.weights = RankWeights(program, file, weights, outliers)
        self.weights.pack()
        self.storage = KVStorage(program.layers, page_size, program.n_kv_heads, spec.head_dim, kv)
        self.table = PageTable(page_size)
        self._executor = CpuExecutor(program, self.weights, self.storage, activations=activations)

    def add(self, sequence: int, ids: Sequence[int]) -> None:
        """Run the encoder and keep what the decoder's layers see of it."""
        self._executor.given = self.encoder.outputs(ids, "y")
        self.table.add(sequence)
        try:
            step = make_step(self.table, [sequence], [[0] * len(ids)], [])
            self.storage.ensure(self.table.n_pages)
            self._executor.run(step)
        except BaseException:
            self.table.drop(sequence)
            raise
        finally:
            self._executor.given = np.zeros((0, 0), np.float32)

    def drop(self, sequence: int) -> None:
        """Forget a sequence."""
        self.table.drop(sequence)

    def memory(self) -> dict[str, int]:
        """Return the bytes of this rank's part, as `RankEngine.memory` calls them."""
        mine = {
            "weight_bytes": self.weights.n_bytes,
            "kv_bytes": self.storage.n_bytes,
            "workspace_bytes": self._executor.workspace_bytes,
        }
        encoder = self.encoder.memory()
        return {key: n + encoder[key] for key, n in mine.items()}

"""The present step as arrays that stay where they are.

Compiled calls hold the addresses of their arguments, so what changes from step to step is copied
into arrays that are made once for a number of tokens, sequences and pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow.execute.place import Place
from nbflow.execute.step import Step


class StepArrays:
    """Arrays for steps of `n_tokens` tokens, `n_logits` logit rows and `n_sequences` sequences.

    Parameters
    ----------
    n_tokens, n_logits, n_sequences : int
        Sizes of the steps.
    n_pages : int
        Most pages that the sequences of a step hold together.
    n_memory_pages : int
        The same of the encoder's hidden states; 0 without an encoder.
    """

    def __init__(
        self,
        n_tokens: int,
        n_logits: int,
        n_sequences: int,
        n_pages: int,
        n_memory_pages: int = 0,
    ) -> None:
        self.ids = np.zeros(n_tokens, np.int32)
        self.positions = np.zeros(n_tokens, np.int32)
        self.types = np.zeros(n_tokens, np.int32)
        self.batch_indices = np.zeros(n_tokens, np.int32)
        self.logit_rows = np.zeros(n_logits, np.int32)
        self.qo_indptr = np.zeros(n_sequences + 1, np.int32)
        self.kv_indptr = np.zeros(n_sequences + 1, np.int32)
        self.kv_indices = np.zeros(n_pages, np.int32)
        self.kv_lens = np.zeros(n_sequences, np.int32)
        self.memory_indptr = np.zeros(n_sequences + 1, np.int32)
        self.memory_indices = np.zeros(n_memory_pages, np.int32)
        self.memory_lens = np.zeros(n_sequences, np.int32)

    def load(self, step: Step) -> None:
        """Copy a step's numbers."""
        self.ids[:] = step.ids
        self.positions[:] = step.positions
        self.types[:] = step.types
        self.batch_indices[:] = step.batch_indices
        self.logit_rows[:] = step.logit_rows
        self.qo_indptr[:] = step.qo_indptr
        pages = step.pages
        self.kv_indptr[:] = pages.kv_indptr
        self.kv_indices[: len(pages.kv_indices)] = pages.kv_indices
        self.kv_lens[:] = pages.kv_lens
        if step.memory is not None:
            self.memory_indptr[:] = step.memory.kv_indptr
            self.memory_indices[: len(step.memory.kv_indices)] = step.memory.kv_indices
            self.memory_lens[:] = step.memory.kv_lens


class DeviceArrays:
    """What kernels on a device read of the present step: parts of one array, copied at once.

    Parameters
    ----------
    host : StepArrays
        Gives the sizes.
    place : Place
        Where they live.
    """

    NAMES = (
        *("ids", "positions", "types", "batch_indices", "logit_rows"),
        *("kv_indptr", "kv_indices"),
    )

    def __init__(self, host: StepArrays, place: Place) -> None:
        ends = np.cumsum([len(getattr(host, name)) for name in self.NAMES]).tolist()
        self._whole: Any = place.zeros((ends[-1],), np.int32)
        for name, start, end in zip(self.NAMES, [0, *ends], ends, strict=False):
            setattr(self, name, self._whole[start:end])

    def load(self, host: StepArrays) -> None:
        """Copy a step's numbers to the device."""
        self._whole.set(np.concatenate([getattr(host, name) for name in self.NAMES]))

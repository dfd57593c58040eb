"""One step: some new tokens of some sequences, flattened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nbflow.kv_cache.block_table import BlockTable, PageView


@dataclass(frozen=True)
class Step:
    """What an executor needs to know, besides the program, to run it once."""

    ids: np.ndarray
    """int32 (T,): token ids, sequence after sequence."""
    positions: np.ndarray
    """int32 (T,): position of each token in its sequence."""
    rope_rows: np.ndarray
    """int32 (T,): row of each token in the rotary tables: its position, behind the rows for short
    sequences if its sequence is a long one (LongRoPE)."""
    batch_indices: np.ndarray
    """int32 (T,): which of the step's sequences each token belongs to."""
    qo_indptr: np.ndarray
    """int32 (B + 1,): where each sequence's tokens begin."""
    pages: PageView
    """The sequences' pages, the new tokens counted in."""
    logit_rows: np.ndarray
    """int32 (R,): tokens after which the hidden states are wanted, in order."""
    n_logits: int
    """Number of these, the first ones, whose logits are wanted, too."""
    memory: PageView | None
    """The pages of what the encoder gave for each sequence, if there is an encoder."""
    types: np.ndarray
    """int32 (T,): type of each token, for models that have an embedding for them."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Tokens, hidden states and rows of logits: what buffers have rows for."""
        return len(self.ids), len(self.logit_rows), self.n_logits


def make_step(
    table: BlockTable,
    sequences: Sequence[int],
    tokens: Sequence[Sequence[int]],
    logit_rows: Sequence[int],
    types: Sequence[int] | None = None,
    memory: BlockTable | None = None,
    *,
    short_context: int | None = None,
    n_logits: int | None = None,
) -> Step:
    """Extend sequences of a page table by new tokens and return the step that computes them.

    `memory` is the page table of the encoder's hidden states, if there is an encoder.  Long
    sequences (LongRoPE) have the rows of the rotary tables behind the first `short_context`.
    Logits are wanted of the first `n_logits` rows, by default of all.
    """
    lengths = [len(ids) for ids in tokens]
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=indptr[1:])
    positions = np.empty(int(indptr[-1]), np.int32)
    rope_rows = np.empty_like(positions)
    for b, (sequence, n) in enumerate(zip(sequences, lengths, strict=True)):
        done = table.length(sequence)
        positions[indptr[b] : indptr[b + 1]] = range(done, done + n)
        first = done + (short_context or 0) * table.is_long(sequence)
        rope_rows[indptr[b] : indptr[b + 1]] = range(first, first + n)
        table.extend(sequence, n)
    return Step(
        ids=np.array([i for ids in tokens for i in ids], np.int32),
        positions=positions,
        rope_rows=rope_rows,
        batch_indices=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        qo_indptr=indptr,
        pages=table.view(sequences),
        logit_rows=np.array(logit_rows, np.int32),
        n_logits=len(logit_rows) if n_logits is None else n_logits,
        memory=None if memory is None else memory.view(sequences),
        types=np.zeros(len(positions), np.int32) if types is None else np.array(types, np.int32),
    )

"""One step: new tokens of several sequences as a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nbflow.kv_cache.block_table import BlockTable, PageView


@dataclass(frozen=True)
class Step:
    """Inputs of one run of a program."""

    ids: np.ndarray
    """int32 (T,): token ids, concatenated over the sequences."""
    positions: np.ndarray
    """int32 (T,): position of each token in its sequence."""
    rope_rows: np.ndarray
    """int32 (T,): row of each token in the rotary table: its position, plus the rows for short
    sequences where its sequence is a long one (LongRoPE)."""
    batch_indices: np.ndarray
    """int32 (T,): index of the sequence of each token."""
    qo_indptr: np.ndarray
    """int32 (B + 1,): first token of each sequence."""
    pages: PageView
    """KV pages of the sequences, new tokens included."""
    logit_rows: np.ndarray
    """int32 (R,): tokens whose final hidden states are needed, ascending."""
    n_logits: int
    """Leading `logit_rows` that need logits as well."""
    cross_pages: PageView | None
    """KV pages of the encoder's hidden states of each sequence; None without an encoder."""
    types: np.ndarray
    """int32 (T,): token types, for models that embed them (BERT)."""
    state_rows: np.ndarray
    """int32 (B,): row of each sequence in the recurrent states; zeros without any."""

    @property
    def start_positions(self) -> np.ndarray:
        """int32 (B,): position of the first token of each sequence."""
        return np.asarray(self.positions[self.qo_indptr[:-1]])

    @property
    def size(self) -> tuple[int, int, int]:
        """Tokens, hidden states and rows of logits, which size the buffers."""
        return len(self.ids), len(self.logit_rows), self.n_logits


def make_step(
    table: BlockTable,
    sequences: Sequence[int],
    tokens: Sequence[Sequence[int]],
    logit_rows: Sequence[int],
    types: Sequence[int] | None = None,
    cross_table: BlockTable | None = None,
    *,
    short_context: int | None = None,
    n_logits: int | None = None,
) -> Step:
    """Extend sequences of a block table by new tokens and return the step that computes them.

    Parameters
    ----------
    table : BlockTable
        KV pages of the sequences.
    sequences : sequence of int
        Their numbers in `table`.
    tokens : sequence of sequences of int
        New tokens of each.
    logit_rows : sequence of int
        Tokens of the step whose final hidden states are needed.
    types : sequence of int, optional
        Token types.
    cross_table : BlockTable, optional
        KV pages of the encoder's hidden states.
    short_context : int, optional
        Rows of the rotary table for short sequences (LongRoPE).
    n_logits : int, optional
        Leading `logit_rows` that need logits; all by default.
    """
    lengths = [len(ids) for ids in tokens]
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=indptr[1:])
    done, first_rows = [], []
    for sequence, n in zip(sequences, lengths, strict=True):
        done.append(table.length(sequence))
        first_rows.append(done[-1] + (short_context or 0) * table.is_long(sequence))
        table.extend(sequence, n)
    indices = np.arange(indptr[-1], dtype=np.int32)
    starts = np.repeat(indptr[:-1], lengths)
    positions = indices - starts + np.repeat(np.array(done, np.int32), lengths)
    rope_rows = indices - starts + np.repeat(np.array(first_rows, np.int32), lengths)
    return Step(
        ids=np.array([i for ids in tokens for i in ids], np.int32),
        positions=positions,
        rope_rows=rope_rows,
        batch_indices=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        qo_indptr=indptr,
        pages=table.view(sequences),
        logit_rows=np.array(logit_rows, np.int32),
        n_logits=len(logit_rows) if n_logits is None else n_logits,
        cross_pages=None if cross_table is None else cross_table.view(sequences),
        types=np.zeros(len(positions), np.int32) if types is None else np.array(types, np.int32),
        state_rows=np.zeros(len(lengths), np.int32)
        if table.states is None
        else table.states.rows(sequences),
    )

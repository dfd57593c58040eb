"""Sequences that are no request's: evaluated as a whole, or step by step by who searches in them.

Their numbers in the page table are negative; those of requests are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nbflow.engine.pieces import Piece, pieces
from nbflow.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from nbflow.engine.rank import RankEngine

MAX_LOGIT_BYTES = 64 * 2**20
"""Logits of all positions are computed in pieces of at most this size."""


def most_tokens(spec: ModelSpec, max_step_tokens: int) -> int:
    """Return the most tokens in a step whose logits are all wanted."""
    return max(1, min(max_step_tokens, MAX_LOGIT_BYTES // (4 * spec.vocab_size)))


class Sequences:
    """One rank's part of them; every rank is told the same, in the same order."""

    def __init__(self, rank: RankEngine) -> None:
        self._rank = rank
        self._next = -1
        self._ids: dict[int, list[int]] = {}
        """Tokens of sequences whose rotary angles may change with their length."""

    def _most_tokens(self, names: Sequence[str]) -> int:
        """Return the most tokens in a step of which these buffers are wanted."""
        if "logits" not in names:
            return self._rank.max_step_tokens
        return most_tokens(self._rank.spec, self._rank.max_step_tokens)

    def open(self, encoder_ids: Sequence[int] | None = None) -> int:
        """Begin an empty sequence and return its number."""
        (number,) = self._open([encoder_ids], [0])
        if self._rank.spec.short_context is not None:
            self._ids[number] = []
        return number

    def _open(
        self, encoder_ids: Sequence[Sequence[int] | None], lengths: Sequence[int]
    ) -> list[int]:
        """Begin sequences that come to these lengths at once."""
        numbers = list(range(self._next, self._next - len(encoder_ids), -1))
        self._next -= len(encoder_ids)
        if self._rank.encoded is not None:
            self._rank.encoded.add({n: i or () for n, i in zip(numbers, encoder_ids, strict=True)})
        for number, length in zip(numbers, lengths, strict=True):
            self._rank.table.add(number, long=self._rank.spec.is_long(length))
        return numbers

    def fork(self, number: int) -> int:
        """Begin a sequence with everything another one has, and return its number."""
        new, self._next = self._next, self._next - 1
        self._rank.table.fork(number, new)
        if number in self._ids:
            self._ids[new] = list(self._ids[number])
        if self._rank.encoded is not None:
            self._rank.encoded.table.fork(number, new)
        return new

    def truncate(self, number: int, length: int) -> None:
        """Forget all but the first `length` tokens of a sequence."""
        self._rank.table.truncate(number, length)
        if number in self._ids:
            del self._ids[number][length:]

    def close(self, numbers: Sequence[int]) -> None:
        """End sequences."""
        for number in numbers:
            self._rank.table.drop(number)
            self._ids.pop(number, None)
            if self._rank.encoded is not None:
                self._rank.encoded.drop(number)

    def run(
        self,
        numbers: Sequence[int],
        tokens: Sequence[Sequence[int]],
        names: Sequence[str],
        types: Sequence[Sequence[int]] | None = None,
        last: bool = False,
    ) -> list[list[np.ndarray]]:
        """Run more tokens of sequences; return buffers of the last stage after every token.

        Returns
        -------
        list of list of array
            For each of `names` ("logits" or "y"), and for each sequence, one row per token; with
            `last` only that of the last token.
        """
        for number, ids in zip(numbers, tokens, strict=True):
            if number in self._ids:
                self._turn_long(number, len(ids))
                self._ids[number] += ids
        return self._run(numbers, tokens, names, types, last)

    def _run(
        self,
        numbers: Sequence[int],
        tokens: Sequence[Sequence[int]],
        names: Sequence[str],
        types: Sequence[Sequence[int]] | None,
        last: bool,
    ) -> list[list[np.ndarray]]:
        lengths = [len(ids) for ids in tokens]
        results = [
            [np.empty((1 if last else n, self._width(name)), np.float32) for n in lengths]
            for name in names
        ]
        whole = not self._rank.spec.causal  # every token sees all others
        most = self._rank.max_step_tokens if last else self._most_tokens(names)
        for piece in pieces(lengths, most, whole):
            found = self._run_piece(numbers, tokens, names, types, piece, last)
            for rows, result in zip(found, results, strict=True):
                first = 0
                for b, start, stop in piece:
                    n, at = (1, 0) if last else (stop - start, start)
                    if not last or stop == lengths[b]:
                        result[b][at : at + n] = rows[first : first + n]
                        first += n
        return results

    def outputs(
        self,
        sequences: Sequence[Sequence[int]],
        name: str,
        types: Sequence[Sequence[int]] | None = None,
        encoder_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[np.ndarray]:
        """Return a buffer of the last stage ("logits" or "y") after every token of new sequences.

        Sequences share steps as far as these have room.  They do not see each other, and each gets
        what it would get alone.
        """
        results: list[np.ndarray] = []
        lengths = [len(ids) for ids in sequences]
        for group in pieces(lengths, self._most_tokens([name]), whole=True):
            members = slice(group[0][0], group[-1][0] + 1)
            inputs = [None] * len(group) if encoder_ids is None else encoder_ids[members]
            numbers = self._open(inputs, lengths[members])
            try:
                some_types = None if types is None else types[members]
                results += self.run(numbers, sequences[members], [name], some_types)[0]
            finally:
                self.close(numbers)
        return results

    def _turn_long(self, number: int, n_more: int) -> None:
        """Compute a sequence once more if it goes beyond LongRoPE's original context now."""
        table, before = self._rank.table, self._ids[number]
        if table.is_long(number) or not self._rank.spec.is_long(len(before) + n_more):
            return
        table.drop(number)
        table.add(number, long=True)
        if before:
            self._run([number], [before], [], None, last=True)

    def _run_piece(
        self,
        numbers: Sequence[int],
        tokens: Sequence[Sequence[int]],
        names: Sequence[str],
        types: Sequence[Sequence[int]] | None,
        piece: Sequence[Piece],
        last: bool,
    ) -> list[np.ndarray]:
        """Run one step, and return the wanted rows, on every rank."""
        rank = self._rank
        some_types = None
        if types is not None:
            some_types = [t for b, start, stop in piece for t in types[b][start:stop]]
        ids = [tokens[b][start:stop] for b, start, stop in piece]
        wanted: Sequence[int] = range(sum(map(len, ids)))
        if last:  # of the sequences that come to their end in this step
            ends = itertools.accumulate(map(len, ids))
            at_end = (stop == len(tokens[b]) for b, _, stop in piece)
            wanted = [end - 1 for end, done in zip(ends, at_end, strict=True) if done]
        n_logits = len(wanted) if "logits" in names else 0
        rank.run_step([numbers[b] for b, _, _ in piece], ids, wanted, some_types, n_logits)
        found = []
        for name in names:
            rows = np.empty((len(wanted), self._width(name)), np.float32)
            if rank.mine.last and len(wanted):
                np.copyto(rows, rank.executor.buffer(name, len(wanted)))
            rank.broadcast(rows)
            found.append(rows)
        return found

    def _width(self, name: str) -> int:
        spec = self._rank.spec
        return spec.vocab_size if name == "logits" else spec.hidden_size

"""Ad-hoc sequences outside the scheduler: whole prompts, and stepwise use by draft models.

They have negative numbers in the block table; requests have others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.engine.interfaces import ModelRunner, StepRunner
from nbflow.engine.request_validation import check_encoder_ids, check_ids
from nbflow.engine.worker_step import worker_step
from nbflow.kv_cache.state_table import STATE_CHUNK
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError

Chunk = tuple[int, int, int]
"""Index of a sequence, first token, and end of its tokens."""


def chunks(
    lengths: Sequence[int], most: int, whole: bool, multiple: int = 1
) -> Iterator[list[Chunk]]:
    """Yield the tokens of each step, at most `most` of them.

    With `whole` sequences are not split; one longer than `most` runs alone.  Others are split at
    multiples of `multiple`, unless `most` is less.

    Examples
    --------
    >>> list(chunks([3, 4, 2], 5, whole=False))
    [[(0, 0, 3), (1, 0, 2)], [(1, 2, 4), (2, 0, 2)]]
    >>> list(chunks([3, 4, 2], 5, whole=True))
    [[(0, 0, 3)], [(1, 0, 4)], [(2, 0, 2)]]
    >>> list(chunks([3, 9], 6, whole=False, multiple=4))
    [[(0, 0, 3)], [(1, 0, 4)], [(1, 4, 9)]]
    """
    multiple = multiple if multiple <= most else 1
    step: list[Chunk] = []
    room = most
    for b, length in enumerate(lengths):
        start = 0
        while start < length:
            if step and (room < 1 or (whole and length > room)):
                yield step
                step, room = [], most
            stop = length if whole else min(length, start + room)
            if stop < length:
                stop -= stop % multiple
            if stop <= start:  # a step of its own has room
                yield step
                step, room = [], most
                continue
            step.append((b, start, stop))
            room -= stop - start
            start = stop
    if step:
        yield step


MAX_LOGIT_BYTES = 64 * 2**20
"""Most bytes of logits in a step that needs them for all positions."""


def max_logit_tokens(spec: ModelSpec, max_step_tokens: int) -> int:
    """Return the most tokens in a step that needs all logits."""
    return max(1, min(max_step_tokens, MAX_LOGIT_BYTES // (4 * spec.vocab_size)))


class PromptEvaluator:
    """Evaluator of one rank; all calls are collective."""

    def __init__(self, rank: StepRunner) -> None:
        self._worker = rank
        self._next = -1
        self._ids: dict[int, list[int]] = {}
        """Tokens of sequences that may have to be computed again: from the start with the long
        rotary factors, or after a saved recurrent state."""

    def _max_tokens(self, names: Sequence[str]) -> int:
        """Return the most tokens in a step that returns these buffers."""
        if "logits" not in names:
            return self._worker.max_step_tokens
        return max_logit_tokens(self._worker.spec, self._worker.max_step_tokens)

    def open(self, encoder_ids: Sequence[int] | None = None) -> int:
        """Create an empty sequence and return its number."""
        (number,) = self._open([encoder_ids], [0])
        if self._worker.spec.short_context is not None or self._worker.spec.is_recurrent:
            self._ids[number] = []
        return number

    def _open(
        self, encoder_ids: Sequence[Sequence[int] | None], lengths: Sequence[int]
    ) -> list[int]:
        """Create sequences that will have these lengths."""
        numbers = list(range(self._next, self._next - len(encoder_ids), -1))
        self._next -= len(encoder_ids)
        if self._worker.cross_attention is not None:
            self._worker.cross_attention.add(
                {n: i or () for n, i in zip(numbers, encoder_ids, strict=True)}
            )
        for number, length in zip(numbers, lengths, strict=True):
            self._worker.table.add(number, long=self._worker.spec.is_long(length))
        return numbers

    def fork(self, number: int) -> int:
        """Fork a sequence and return the number of the copy."""
        new, self._next = self._next, self._next - 1
        self._worker.table.fork(number, new)
        if number in self._ids:
            self._ids[new] = list(self._ids[number])
        if self._worker.cross_attention is not None:
            self._worker.cross_attention.table.fork(number, new)
        return new

    def truncate(self, number: int, length: int) -> None:
        """Truncate a sequence to its first `length` tokens.

        With recurrent layers, the tokens since the last `save_state` are computed again.
        """
        kept = self._worker.table.truncate(number, length)
        if number in self._ids:
            again = self._ids[number][kept:length]
            del self._ids[number][kept:]
            if again:
                self.run([number], [again], [], last=True)

    def save_state(self, numbers: Sequence[int]) -> None:
        """Keep the recurrent states of sequences, so that `truncate` computes little again."""
        for number in numbers:
            self._worker.table.save_state(number)

    def close(self, numbers: Sequence[int]) -> None:
        """Drop sequences."""
        for number in numbers:
            self._worker.table.drop(number)
            self._ids.pop(number, None)
            if self._worker.cross_attention is not None:
                self._worker.cross_attention.drop(number)

    def run(
        self,
        numbers: Sequence[int],
        tokens: Sequence[Sequence[int]],
        names: Sequence[str],
        types: Sequence[Sequence[int]] | None = None,
        last: bool = False,
    ) -> list[list[np.ndarray]]:
        """Append tokens to sequences; return output buffers after every token.

        Returns
        -------
        list of list of array
            For each of `names` ("logits" or "y") and each sequence, one row per token, or with
            `last` that of the last token.
        """
        for number, ids in zip(numbers, tokens, strict=True):
            if number in self._ids:
                self._ids[number] += ids
                self._recompute_long(number, len(ids))
        lengths = [len(ids) for ids in tokens]
        results = [
            [np.empty((1 if last else n, self._width(name)), np.float32) for n in lengths]
            for name in names
        ]
        whole = not self._worker.spec.causal  # bidirectional attention
        most = self._worker.max_step_tokens if last else self._max_tokens(names)
        multiple = STATE_CHUNK if self._worker.spec.is_recurrent else 1
        for chunk in chunks(lengths, most, whole, multiple):
            found = self._run_chunk(numbers, tokens, names, types, chunk, last)
            for rows, result in zip(found, results, strict=True):
                first = 0
                for b, start, stop in chunk:
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
        """Return an output buffer ("logits" or "y") after every token of new sequences.

        Sequences share steps; the results do not depend on that.
        """
        results: list[np.ndarray] = []
        lengths = [len(ids) for ids in sequences]
        for group in chunks(lengths, self._max_tokens([name]), whole=True):
            members = slice(group[0][0], group[-1][0] + 1)
            inputs = [None] * len(group) if encoder_ids is None else encoder_ids[members]
            numbers = self._open(inputs, lengths[members])
            try:
                some_types = None if types is None else types[members]
                results += self.run(numbers, sequences[members], [name], some_types)[0]
            finally:
                self.close(numbers)
        return results

    def _recompute_long(self, number: int, n_more: int) -> None:
        """Recompute a sequence whose `n_more` new tokens exceed the original context of LongRoPE.

        It keeps the long factors from now on.
        """
        ids = self._ids[number]
        if not self._worker.spec.is_long(len(ids)):
            return
        before = self._ids.pop(number)[: len(ids) - n_more]
        self._worker.table.drop(number)
        self._worker.table.add(number, long=True)
        if before:
            self.run([number], [before], [], last=True)

    def _run_chunk(
        self,
        numbers: Sequence[int],
        tokens: Sequence[Sequence[int]],
        names: Sequence[str],
        types: Sequence[Sequence[int]] | None,
        chunk: Sequence[Chunk],
        last: bool,
    ) -> list[np.ndarray]:
        """Run one step and return the requested rows on every rank."""
        rank = self._worker
        some_types = None
        if types is not None:
            some_types = [t for b, start, stop in chunk for t in types[b][start:stop]]
        ids = [tokens[b][start:stop] for b, start, stop in chunk]
        wanted: Sequence[int] = range(sum(map(len, ids)))
        if last:  # of the sequences whose last token is in this step
            ends = itertools.accumulate(map(len, ids))
            at_end = (stop == len(tokens[b]) for b, _, stop in chunk)
            wanted = [end - 1 for end, done in zip(ends, at_end, strict=True) if done]
        n_logits = len(wanted) if "logits" in names else 0
        sequences = [numbers[b] for b, _, _ in chunk]
        rank.run_step(worker_step(rank, sequences, ids, wanted, some_types, n_logits))
        found = []
        for name in names:
            rows = np.empty((len(wanted), self._width(name)), np.float32)
            if rank.mine.last and len(wanted):
                np.copyto(rows, rank.executor.buffer(name, len(wanted)))
            rank.broadcast(rows)
            found.append(rows)
        return found

    def _width(self, name: str) -> int:
        spec = self._worker.spec
        return spec.vocab_size if name == "logits" else spec.hidden_size


@dataclass(frozen=True)
class Rows:
    """Outputs of one sequence: a row for each new token, or for the last one."""

    logits: NDArray[np.float32]
    """(T, V): logits of the next token."""
    hidden: NDArray[np.float32] | None
    """(T, E): hidden states after the last layer and its norm; None if not requested."""


class SequenceEvaluator:
    """Stepwise evaluation of sequences that can be forked and truncated.

    Returned by `LLM.session`; a ``with`` statement drops the remaining sequences.  Forks share
    pages.  Under mpirun every rank makes the same calls.  A session belongs to one thread; other
    threads may use the model and other sessions.

    Examples
    --------
    >>> import nbflow
    >>> with nbflow.load("tiny_python") as model, model.session() as session:
    ...     a = session.begin()
    ...     session.run({a: [1, 2, 3]})[a].logits.shape
    ...     b = session.fork(a)
    ...     rows = session.run({a: [4], b: [5]})
    ...     session.truncate(b, 3)
    ...     session.length(a), session.length(b)
    (3, 2048)
    (4, 3)
    """

    def __init__(self, model: ModelRunner) -> None:
        self._model = model
        self._lengths: dict[int, int] = {}

    def begin(self, encoder_ids: Sequence[int] | None = None) -> int:
        """Create an empty sequence, with the encoder input of an encoder-decoder model."""
        number: int = self._call("open", check_encoder_ids(self._model.spec, encoder_ids))
        self._lengths[number] = 0
        return number

    def fork(self, sequence: int) -> int:
        """Fork a sequence; return the number of the copy."""
        number: int = self._call("fork", self._known(sequence))
        self._lengths[number] = self._lengths[sequence]
        return number

    def truncate(self, sequence: int, length: int) -> None:
        """Truncate a sequence to its first `length` tokens."""
        present = self._lengths[self._known(sequence)]
        if not 0 <= length <= present:
            raise UsageError(f"length must be 0..{present}, the sequence length, got {length}")
        self._call("truncate", sequence, length)
        self._lengths[sequence] = length

    def save_state(self, *sequences: int) -> None:
        """Keep the recurrent states of sequences, so that `truncate` computes little again.

        Models without recurrent layers need no such copy.
        """
        if self._model.spec.is_recurrent:
            self._call("save_state", [self._known(s) for s in sequences])

    def drop(self, *sequences: int) -> None:
        """Drop sequences."""
        self._call("close", [self._known(s) for s in sequences])
        for sequence in sequences:
            del self._lengths[sequence]

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        return self._lengths[self._known(sequence)]

    def run(
        self, tokens: Mapping[int, Sequence[int]], hidden: bool = False, last: bool = False
    ) -> dict[int, Rows]:
        """Append tokens to sequences in shared steps and return the outputs.

        Parameters
        ----------
        tokens : mapping of int to sequence of int
            New tokens, by sequence.
        hidden : bool
            True to return hidden states.
        last : bool
            True to return only the row after the last token of each sequence.

        Raises
        ------
        UsageError
            If a sequence is unknown or exceeds the context, or an id is outside the vocabulary.
        """
        spec = self._model.spec
        checked = {}
        for sequence, ids in tokens.items():
            present = self._lengths[self._known(sequence)]
            checked[sequence] = check_ids(spec, ids, room=0)
            if present + len(ids) > spec.max_context:
                raise UsageError(
                    f"the sequence has {present} tokens, and {len(ids)} more do not fit into the "
                    f"context of {spec.name}, {spec.max_context}; truncate or drop it"
                )
        names = ["logits", "y"] if hidden else ["logits"]
        found = self._call("run", list(checked), list(checked.values()), names, None, last)
        rows = {}
        for i, (sequence, ids) in enumerate(checked.items()):
            self._lengths[sequence] += len(ids)
            rows[sequence] = Rows(found[0][i], found[1][i] if hidden else None)
        return rows

    def close(self) -> None:
        """Drop all sequences."""
        if self._lengths:
            self.drop(*self._lengths)

    def __enter__(self) -> SequenceEvaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known(self, sequence: int) -> int:
        if sequence not in self._lengths:
            raise UsageError(f"this session has no sequence {sequence}")
        return sequence

    def _call(self, method: str, *args: Any) -> Any:
        return self._model.call("sequences", method, *args)[0]

"""Run a model step by step: for searches that follow several continuations, and for drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError

if TYPE_CHECKING:
    from nbflow.engine.model import Model


@dataclass(frozen=True)
class Rows:
    """What came out for one sequence, a row for each of the tokens that ran, or for the last."""

    logits: NDArray[np.float32]
    """(T, V): scores of the next token."""
    hidden: NDArray[np.float32] | None
    """(T, E): hidden states after the last layer and its norm; None if not asked for."""


class Session:
    """Sequences of a model that grow, are copied and cut as the caller wants.

    Made by `Model.session`; usable in a ``with`` statement, which drops what is left.  Sequences
    that have a beginning in common share its pages.  Under mpirun every rank makes the same calls.
    A session is used by one thread; others may use the model, and sessions of their own.

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

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lengths: dict[int, int] = {}

    def begin(self, encoder_ids: Sequence[int] | None = None) -> int:
        """Begin an empty sequence; for a model with an encoder, give what this one reads."""
        number: int = self._call("open", self._model.check_encoder_ids(encoder_ids))
        self._lengths[number] = 0
        return number

    def fork(self, sequence: int) -> int:
        """Begin a sequence that has everything another one has."""
        number: int = self._call("fork", self._known(sequence))
        self._lengths[number] = self._lengths[sequence]
        return number

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens of a sequence."""
        present = self._lengths[self._known(sequence)]
        if not 0 <= length <= present:
            raise UsageError(f"length must be 0..{present}, the tokens it has, got {length}")
        self._call("truncate", sequence, length)
        self._lengths[sequence] = length

    def drop(self, *sequences: int) -> None:
        """Forget sequences."""
        self._call("close", [self._known(s) for s in sequences])
        for sequence in sequences:
            del self._lengths[sequence]

    def length(self, sequence: int) -> int:
        """Return how many tokens a sequence has."""
        return self._lengths[self._known(sequence)]

    def run(
        self, tokens: Mapping[int, Sequence[int]], hidden: bool = False, last: bool = False
    ) -> dict[int, Rows]:
        """Append tokens to sequences, in steps they share, and return what comes out.

        Parameters
        ----------
        tokens : mapping of int to sequence of int
            New tokens, by sequence.
        hidden : bool
            Whether the hidden states are wanted.
        last : bool
            Whether only the row after the last token of each sequence is wanted.

        Raises
        ------
        UsageError
            If a sequence is not there, has no room, or an id is outside the vocabulary.
        """
        spec = self._model.spec
        checked = {}
        for sequence, ids in tokens.items():
            present = self._lengths[self._known(sequence)]
            checked[sequence] = self._model.check_ids(ids, room=0)
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

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known(self, sequence: int) -> int:
        if sequence not in self._lengths:
            raise UsageError(f"there is no sequence {sequence} in this session")
        return sequence

    def _call(self, method: str, *args: Any) -> Any:
        return self._model.call("sequences", method, *args)[0]

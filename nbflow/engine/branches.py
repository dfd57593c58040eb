"""Sequences that are continued, forked and cut by hand: for searches and draft models.

`RankBranches` is one rank's part, `Branches` what a search holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from nbflow.engine.pieces import pieces
from nbflow_kernels.errors import UsageError

if TYPE_CHECKING:
    from nbflow.engine.model import Model
    from nbflow.engine.rank import RankEngine

_FIRST = -(2**40)
"""Number of the first branch in the page tables; requests have 0, 1, ..., texts -1, -2, ..."""


class RankBranches:
    """Branches on one rank; every rank is told the same."""

    def __init__(self, engine: RankEngine) -> None:
        self._engine = engine

    def add(self, branch: int, encoder_ids: Sequence[int] | None) -> None:
        """Begin an empty branch."""
        engine = self._engine
        if engine.encoded is not None:
            assert encoder_ids is not None  # checked by the caller
            engine.encoded.add({_FIRST + branch: encoder_ids})
        engine.table.add(_FIRST + branch)

    def fork(self, branch: int, new: int) -> None:
        """Begin a branch with everything another one has."""
        engine = self._engine
        if engine.encoded is not None:
            engine.encoded.table.fork(_FIRST + branch, _FIRST + new)
        engine.table.fork(_FIRST + branch, _FIRST + new)

    def truncate(self, branch: int, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self._engine.table.truncate(_FIRST + branch, length)

    def drop(self, branch: int) -> None:
        """End a branch."""
        engine = self._engine
        if engine.encoded is not None:
            engine.encoded.drop(_FIRST + branch)
        if _FIRST + branch in engine.table:
            engine.table.drop(_FIRST + branch)

    def run(
        self,
        branches: Sequence[int],
        tokens: Sequence[Sequence[int]],
        rows: Sequence[int],
        names: Sequence[str],
    ) -> list[np.ndarray]:
        """Run one step and return rows of buffers of the last stage, on every rank."""
        engine = self._engine
        engine.run_step([_FIRST + b for b in branches], tokens, rows)
        return [engine.last_rows(name, len(rows)) for name in names]


class Branches:
    """Branches of a model that no engine runs.  Usable in a ``with`` statement, which ends them.

    Parameters
    ----------
    model : Model
        A decoder, or an encoder and a decoder.

    Raises
    ------
    UsageError
        If an engine runs the model.
    """

    def __init__(self, model: Model) -> None:
        if model.engine is not None:
            raise UsageError(
                f"an engine runs {model.spec.name}; close it first, or load the model once more"
            )
        self._model = model
        self._numbers = itertools.count()
        self._lengths: dict[int, int] = {}
        model.call("configure")

    def add(self, encoder_ids: Sequence[int] | None = None) -> int:
        """Begin an empty branch and return its number."""
        branch = next(self._numbers)
        self._model.call("branch", "add", branch, encoder_ids)
        self._lengths[branch] = 0
        return branch

    def fork(self, branch: int) -> int:
        """Return a branch with everything another one has; they share pages."""
        new = next(self._numbers)
        self._model.call("branch", "fork", branch, new)
        self._lengths[new] = self._lengths[branch]
        return new

    def length(self, branch: int) -> int:
        """Return the number of a branch's tokens."""
        return self._lengths[branch]

    def truncate(self, branch: int, length: int) -> None:
        """Forget all but the first `length` tokens of a branch."""
        self._model.call("branch", "truncate", branch, length)
        self._lengths[branch] = length

    def drop(self, branch: int) -> None:
        """End a branch."""
        self._model.call("branch", "drop", branch)
        del self._lengths[branch]

    def run(
        self,
        branches: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        every: bool = False,
        hidden: bool = False,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Continue branches.

        Parameters
        ----------
        branches : sequence of int
            Numbers, each once.
        tokens : sequence of sequences of int
            What each is continued by, at least one token.
        every : bool
            Whether rows are wanted after every token, or after each branch's last one.
        hidden : bool
            Whether last hidden states are wanted, too.

        Returns
        -------
        logits : array of float32, shape (rows, V)
        hidden : array of float32, shape (rows, E), or None
        """
        names = ["logits", "y"] if hidden else ["logits"]
        lengths = [len(ids) for ids in tokens]
        found: list[list[np.ndarray]] = []
        for piece in pieces(lengths, self._model.engines[0].max_step_tokens, whole=False):
            ends = np.cumsum([stop - start for _, start, stop in piece])
            rows = range(int(ends[-1]))
            if not every:
                rows = [
                    int(end) - 1
                    for end, (b, _, stop) in zip(ends, piece, strict=True)
                    if stop == lengths[b]
                ]  # type: ignore[assignment]
            some = [tokens[b][start:stop] for b, start, stop in piece]
            numbers = [branches[b] for b, _, _ in piece]
            found.append(self._model.call("branch", "run", numbers, some, rows, names)[0])
        for branch, n in zip(branches, lengths, strict=True):
            self._lengths[branch] += n
        whole = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        return whole[0], whole[1] if hidden else None

    def close(self) -> None:
        """End all branches."""
        for branch in list(self._lengths):
            self.drop(branch)

    def __enter__(self) -> Branches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._model.engines:
            self.close()

"""Whether it is this launch's turn to run a point: nobody else runs it, and it is not done yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from nbflow_experiments.claims import Claims
from nbflow_experiments.config.points import Point
from nbflow_experiments.store.results_folder import ResultsFolder

Turn = Literal["ours", "held", "finished"]


class Turns:
    """The turns of one launch; rank 0 only.

    Parameters
    ----------
    folder : ResultsFolder
        Where the points are recorded.
    launch : str
        Name of the launch.
    points : sequence of Point
        What the launch shall run, also where there is a result already.
    """

    def __init__(self, folder: ResultsFolder, launch: str, points: Sequence[Point]) -> None:
        self._folder = folder
        self._claims = Claims(folder.path / "claims", launch)
        self._before = {point.short: self._writer(point.short) for point in points}

    def begin(self, point: Point) -> Turn:
        """Claim a point, and return what was found.

        Returns
        -------
        str
            ``"ours"``: run it, then call `end`; ``"held"``: another launch runs it now;
            ``"finished"``: another launch has run it since this one was planned.
        """
        if self._writer(point.short) != self._before[point.short]:
            return "finished"
        if not self._claims.take(point.short):
            return "held"
        if self._writer(point.short) != self._before[point.short]:  # between the look and the claim
            self._claims.release()
            return "finished"
        return "ours"

    def end(self) -> None:
        """Give the claim back."""
        self._claims.release()

    def is_ours(self, point: Point) -> bool:
        """Return whether the point that was begun is still ours."""
        return self._claims.is_ours(point.short)

    def holders(self) -> list[str]:
        """Return who runs those points that have not been finished since this launch began."""
        open_points = [
            short for short, before in self._before.items() if self._writer(short) == before
        ]
        return [who for short in open_points if (who := self._claims.holder(short))]

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Give signs of life while the block runs."""
        with self._claims.beating():
            yield

    def _writer(self, short: str) -> str | None:
        """Return the launch that has written the result in a point's folder."""
        result = self._folder.result(short)
        return None if result is None else str(result["launch"])

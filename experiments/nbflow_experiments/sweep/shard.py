"""Shards of a sweep: ``--shard I/N``, for example one per Slurm array task."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nbflow_experiments.config.points import LOAD_SETTINGS, Point
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Shard:
    """Shard number `index` of the `count` shards of a sweep."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse ``I/N``.

        Examples
        --------
        >>> Shard.parse("2/3")
        Shard(index=2, count=3)
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None or not int(match[1]) < int(match[2]):
            raise UsageError(
                f"--shard must be I/N with I from 0 to N-1, for example 0/4; got {text!r}"
            )
        return cls(int(match[1]), int(match[2]))

    def select(self, points: Sequence[Point]) -> list[Point]:
        """Return this shard's points in order; the shards partition the sweep.

        Points that share a loaded model stay together if there are at least as many models as
        shards; otherwise points are distributed round-robin.
        """
        loads = list(dict.fromkeys(point.key(LOAD_SETTINGS) for point in points))
        if len(loads) >= self.count:
            mine = set(loads[self.index :: self.count])
            return [point for point in points if point.key(LOAD_SETTINGS) in mine]
        return list(points[self.index :: self.count])

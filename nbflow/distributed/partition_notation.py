"""Partition strings: the notation of pipeline stages, tensor parallel ranks and replicas.

``;`` (or ``,``) separates pipeline stages, which hold consecutive layers; ``&`` (or ``|``) the
tensor parallel ranks of a stage; ``/`` replicas, which hold a whole model each and share the
requests.  So ``0;1`` is by layer, ``0&1`` by tensor, ``0&1;2&3`` hybrid, and ``0&1/2&3``
two replicas of two ranks.  The numbers are ranks.

A share after a colon weights a rank: in ``0:3;1`` rank 0 holds three times the layers of rank 1, in
``0:3&1`` three times the heads and columns.  A stage's share is the sum of its ranks' shares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbflow_kernels.errors import UsageError

_RANK = r"[0-9]{1,9}(?::[0-9]{1,9}(?:\.[0-9]{1,6})?)?"
_STRING = re.compile(rf"{_RANK}(?:[;,&|/]{_RANK})*")


@dataclass(frozen=True)
class RankShare:
    """Rank of a partition string and its share."""

    rank: int
    """Rank number."""
    share: float = 1.0
    """Weight relative to the other ranks."""

    def __str__(self) -> str:
        share = f"{self.share:.6f}".rstrip("0").rstrip(".")  # shares are written without exponents
        return str(self.rank) if share == "1" else f"{self.rank}:{share}"


Stages = tuple[tuple[RankShare, ...], ...]
"""Pipeline stages of one replica, each with its ranks."""


def parse_replicas(text: str) -> tuple[Stages, ...]:
    """Return the stages of every replica of a partition string.

    Raises
    ------
    UsageError
        If the string is not valid, names a rank twice, or has a share of 0.

    Examples
    --------
    >>> [[[str(m) for m in stage] for stage in stages] for stages in parse_replicas("0:2;1/2;3")]
    [[['0:2'], ['1']], [['2'], ['3']]]
    """
    compact = re.sub(r"\s*([;,&|/:])\s*", r"\1", text.strip())
    if not _STRING.fullmatch(compact):
        raise UsageError(
            "partition must be rank numbers separated by ';' (stages of layers), '&' (ranks that "
            "share each layer) and '/' (replicas), a rank with its share after a colon if they "
            f"differ; for example '0&1;2&3' or '0:3;1'; got {text!r}"
        )
    if "|" in compact and ("&" in compact or "/" in compact):
        raise UsageError(
            f"partition {text!r}: '|' is another spelling of '&' (ranks that share each layer) and "
            "cannot be mixed with '&' or '/'; separate replicas by '/', for example '0&1/2&3'"
        )
    replicas = tuple(
        tuple(
            tuple(_rank_share(part, text) for part in re.split(r"[&|]", stage))
            for stage in re.split(r"[;,]", replica)
        )
        for replica in compact.split("/")
    )
    flat = [member.rank for stages in replicas for stage in stages for member in stage]
    for rank in flat:
        if flat.count(rank) > 1:
            raise UsageError(f"partition {text!r} names rank {rank} twice")
    return replicas


def _rank_share(part: str, text: str) -> RankShare:
    rank, _, share = part.partition(":")
    if share and float(share) <= 0:
        raise UsageError(f"partition {text!r}: the share of rank {rank} must be more than 0")
    return RankShare(int(rank), float(share or 1.0))


def parse_stages(text: str) -> Stages:
    """Return the stages of a partition string without replicas.

    Raises
    ------
    UsageError
        As `parse_replicas`; if there are replicas.
    """
    replicas = parse_replicas(text)
    if len(replicas) > 1:
        raise UsageError(
            f"partition {text!r} has {len(replicas)} replicas, expected one; make a plan for "
            "each part between '/'"
        )
    return replicas[0]


def parse_partition(text: str) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each stage of a partition string without replicas.

    Raises
    ------
    UsageError
        As `parse_stages`.

    Examples
    --------
    >>> parse_partition("0&1;2&3")
    ((0, 1), (2, 3))
    """
    return tuple(tuple(member.rank for member in stage) for stage in parse_stages(text))


def ranks_of(text: str) -> tuple[int, ...]:
    """Return all ranks of a partition string in its order, replicas included.

    Examples
    --------
    >>> ranks_of("2&3/0&1")
    (2, 3, 0, 1)
    """
    return tuple(
        member.rank for stages in parse_replicas(text) for stage in stages for member in stage
    )


def split_replicas(text: str) -> tuple[str, ...]:
    """Return the partition string of every replica, in normal form.

    Examples
    --------
    >>> split_replicas("0 | 1, 2 | 3")
    ('0&1;2&3',)
    """
    return tuple(format_stages(stages) for stages in parse_replicas(text))


def format_stages(stages: Stages) -> str:
    """Format the stages of one replica as a partition string."""
    return ";".join("&".join(map(str, stage)) for stage in stages)

"""Pinning of a pool's threads to processors, and the order in which ranks and threads take them.

A pinned thread stays where its weights are: on a machine with several memory nodes, the thread that
writes rows at load multiplies them (`nbflow_kernels.cpu.splits`), and both happen on one node.
Processors are taken node by node, a physical core's hardware threads next to each other, so that
neither a rank nor its threads are spread over more nodes than needed.  Within a rank, each physical
core gets one thread before any gets a second.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

VARIABLE = "NBFLOW_PIN_THREADS"
"""Environment variable; 1 pins, as the option `pin_threads` does."""

Place = tuple[int, int, int]
"""Memory node, physical core, and number of the hardware thread within the core."""


def is_requested() -> bool:
    """Return whether the environment asks for pinning."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def can_pin() -> bool:
    """Return whether the system pins threads; others than Linux do not."""
    return hasattr(os, "sched_setaffinity")


def places(cores: frozenset[int], root: Path = Path("/sys")) -> dict[int, Place]:
    """Return where each processor is; what the system does not tell counts as one node.

    Parameters
    ----------
    cores : frozenset of int
        Numbers of processors, as in an affinity.
    root : Path
        The folder of the system's description.
    """
    nodes = {
        core: int(folder.name[4:])
        for folder in root.glob("devices/system/node/node[0-9]*")
        for core in _read_list(folder / "cpulist")
    }
    found = {}
    for core in cores:
        topology = root / f"devices/system/cpu/cpu{core}/topology"
        siblings = sorted({*_read_list(topology / "thread_siblings_list"), core})
        found[core] = nodes.get(core, 0), siblings[0], siblings.index(core)
    return found


def _read_list(file: Path) -> list[int]:
    """Return the numbers of a list such as ``0-3,8``; an empty list if the file is missing."""
    try:
        text = file.read_text()
    except (OSError, ValueError):
        return []
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [i for first, last in ranges for i in range(int(first), int(last or first) + 1)]


def deal(ranks: Sequence[tuple[str, frozenset[int]]], where: dict[int, Place]) -> list[list[int]]:
    """Divide the processors of a host among its ranks: each gets some that no other has.

    Parameters
    ----------
    ranks : sequence of (host, affinity)
        All ranks; only ranks of one host share processors.
    where : dict
        Place of each processor (`places`), which is assumed to hold on every host.

    Returns
    -------
    list of list of int
        For each rank its processors, in the order in which its threads take them.  With more ranks
        than processors, a rank may have none: its threads are not pinned.

    Examples
    --------
    >>> one_node = {core: (0, core, 0) for core in range(4)}
    >>> deal([("a", frozenset(range(4)))] * 2, one_node)
    [[0, 1], [2, 3]]
    >>> deal([("a", frozenset({0, 1})), ("a", frozenset({1, 2, 3}))], one_node)
    [[0], [1, 2, 3]]
    """
    dealt: list[list[int]] = [[] for _ in ranks]
    for host in dict.fromkeys(host for host, _ in ranks):
        here = [i for i, (other, _) in enumerate(ranks) if other == host]
        wanted = {i: _fair_share(i, here, ranks) for i in here}
        cores = sorted({core for i in here for core in ranks[i][1]}, key=lambda c: _place(c, where))
        for core in cores:
            able = [i for i in here if core in ranks[i][1]]
            short = [i for i in able if len(dealt[i]) + 1 <= wanted[i] + 1e-9]
            dealt[short[0] if short else min(able, key=lambda i: len(dealt[i]))].append(core)
    return [sorted(cores, key=lambda c: _thread_order(c, where)) for cores in dealt]


def _fair_share(
    i: int, here: Sequence[int], ranks: Sequence[tuple[str, frozenset[int]]]
) -> float:  # fmt: skip
    return sum(1 / sum(core in ranks[other][1] for other in here) for core in ranks[i][1])


def _place(core: int, where: dict[int, Place]) -> tuple[int, ...]:
    return (*where.get(core, (0, core, 0)), core)


def _thread_order(core: int, where: dict[int, Place]) -> tuple[int, ...]:
    node, physical, sibling, core = _place(core, where)
    return sibling, node, physical, core


def pin(core: int) -> bool:
    """Let the calling thread run on one processor only; return whether the system did."""
    try:
        os.sched_setaffinity(0, {core})
    except (OSError, AttributeError):  # taken offline, or out of the control group, since
        return False
    return True


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Pin the calling thread for the duration of a block.

    The thread that calls a pool is the user's: threads and processes that it starts later would
    inherit a lasting affinity.
    """
    try:
        before = os.sched_getaffinity(0)
    except (OSError, AttributeError):
        yield
        return
    pin(core)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)

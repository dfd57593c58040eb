"""Switches of the emulator's checks."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Checks:
    """Switches of the checks; all are on by default.

    Attributes
    ----------
    bounds : bool
        Accesses outside every allocation.  Off: loads give zero, stores are dropped.
    aligned : bool
        Addresses that are not a multiple of the access.  Off: rounded down.
    freed : bool
        Accesses to memory that was freed.  Off: the old contents.
    uninitialised : bool
        Reads of uninitialised bytes.  Off: zeros in global memory, 0xff and 0xcd bytes in shared
        and local memory.
    races : bool
        Two unordered accesses of threads to one byte, one of them a write.
    barrier : bool
        A barrier that threads of the block left the kernel without reaching, or that one warp
        reached at two places.  Off: threads that left count as arrived.  (A deadlock is always
        reported: execution cannot continue.)
    masks : bool
        Member masks that do not name the executing lane, name a lane that left, and shuffles that
        read a lane outside the mask.
    wgmma : bool
        A register that ``wgmma`` uses, touched before the wait; a ``wgmma.fence`` that is missing.
    proxy : bool
        Shared memory that threads stored and ``wgmma`` or a bulk copy uses, with no
        ``fence.proxy.async`` between (needs the check of races, too).
    budget : int
        Instructions executed (for all threads of a group of blocks at once) before a kernel counts
        as endless.
    """

    bounds: bool = True
    aligned: bool = True
    freed: bool = True
    uninitialised: bool = True
    races: bool = True
    barrier: bool = True
    masks: bool = True
    wgmma: bool = True
    proxy: bool = True
    budget: int = 5_000_000


#: Only the checks that cannot be turned off.
NO_CHECKS = Checks(**{f.name: False for f in fields(Checks) if f.name != "budget"})

"""Loads and stores of all threads at once, with the checks of memory.

A `Region` is one memory as a kernel sees it: the heap, the shared memory of a group of blocks, or
the threads' own memory.  Each has its bytes, a shadow byte per byte (see `device`), and, where
races are looked for, the access history.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_ptx.memory.device import (
    FREED,
    GLOBAL_BASE,
    LIVE,
    LOCAL_BASE,
    PENDING,
    READING,
    SHARED_BASE,
    WRITTEN,
    Device,
    views,
)
from nbflow_ptx.memory.profile import Profile
from nbflow_ptx.memory.races import Cells
from nbflow_ptx.threads.numbering import Threads, is_everyone

_SPREAD = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
#: Shadow patterns of an access whose bytes are all usable.
_GOOD = {n: _UINT[n]((LIVE | WRITTEN) * s) for n, s in _SPREAD.items()}
_WRITTEN = {n: _UINT[n](WRITTEN * s) for n, s in _SPREAD.items()}


def _spread(at: Any, lanes: Any) -> Any:
    """Return addresses as one entry per thread; most are, and `broadcast_to` is slow."""
    return at if at.shape == lanes.shape else np.broadcast_to(at, lanes.shape)


class Region:
    """One memory space of the kernel that runs.

    ``starts`` gives for each thread where its own part begins (of its block, for shared memory),
    ``limit`` the bytes of such a part.
    """

    def __init__(
        self,
        name: str,
        memory: NDArray[np.uint8],
        shadow: NDArray[np.uint8],
        cells: Cells | None,
        starts: NDArray[np.int64] | None = None,
        limit: int | None = None,
    ) -> None:
        self.name = name
        self.memory, self.shadow, self.cells = memory, shadow, cells
        self.view, self.shadow_view = views(memory), views(shadow)
        self.starts = starts
        self.own: Region = self
        self.limit = memory.size if limit is None else limit

    def start(self, lanes: Any) -> Any:
        """Return where the part of this memory that belongs to each thread begins."""
        if self.starts is None:
            return 0
        return self.starts if is_everyone(lanes, len(self.starts)) else self.starts[lanes]

    def resolve(self, lanes: Any, at: Any) -> tuple[Any, Any]:
        """Return offsets of addresses in the parts of the region, and where these begin."""
        return at, self.start(lanes)

    def part_of(self, lane: int, at: int) -> tuple[int, str]:
        """Return the start and owner of the region that contains an offset of a thread's access."""
        return (0 if self.starts is None else int(self.starts[lane])), ""


class Memory:
    """The spaces of one machine and the accesses to them."""

    def __init__(
        self, m: Threads, device: Device, regions: dict[str, Region], profile: Profile | None
    ) -> None:
        self.m, self.device, self.regions, self.profile = m, device, regions, profile

    # Addresses -------------------------------------------------------------------------------

    def split(self, lanes: Any, address: Any, space: str) -> list[tuple[Any, Region, Any]]:
        """Return ``(which, region, addresses in it)`` for each space of the addresses.

        ``which`` selects the lanes (None: all of them).
        """
        if space in ("global", "const", "param"):
            return [(None, self.regions["global"], address - GLOBAL_BASE)]
        if space != "generic":
            return [(None, self.regions[space], address)]
        address = _spread(address, lanes)
        if address.size and int(address.min()) >= GLOBAL_BASE:
            return [(None, self.regions["global"], address - GLOBAL_BASE)]
        kinds = np.digitize(address, (SHARED_BASE, LOCAL_BASE, GLOBAL_BASE))
        found = []
        for kind in np.unique(kinds):
            which = None if (kinds == kind).all() else np.flatnonzero(kinds == kind)
            a = address if which is None else address[which]
            name = ("global", "cluster", "local", "global")[kind]
            base = (GLOBAL_BASE, SHARED_BASE, LOCAL_BASE, GLOBAL_BASE)[kind]
            found.append((which, self.regions[name], a - base))
        return found

    def place(self, region: Region, lanes: Any, at: Any, nbytes: int, what: str) -> tuple[Any, Any]:
        """Check alignment and range; return offsets in the region and the mask of unusable ones."""
        at, start = region.resolve(lanes, at)
        low_bits = int(np.bitwise_or.reduce(at, axis=None)) & (nbytes - 1)
        if low_bits:
            if self.m.checks.aligned:
                j = int(np.flatnonzero(np.broadcast_to(at & (nbytes - 1), lanes.shape))[0])
                why = f"misaligned {what} of {nbytes} bytes"
                self.fault("aligned", region.own, lanes, at + region.start(lanes), j, why)
            at = at & ~np.int64(nbytes - 1)
        outside = at.astype(np.uint64) > np.uint64(region.limit - nbytes)
        if np.count_nonzero(outside):
            if self.m.checks.bounds:
                j = int(np.flatnonzero(np.broadcast_to(outside, lanes.shape))[0])
                why = f"{what} of {nbytes} bytes out of bounds"
                self.fault("bounds", region.own, lanes, at + region.start(lanes), j, why)
            return np.where(outside, 0, at) + start, outside
        return at + start, None

    def fault(
        self, check: str, region: Region, lanes: Any, at: Any, j: int, why: str, notes: Any = ()
    ) -> None:
        """Report a failed check of lane number `j` of the access."""
        lane, offset = int(lanes[j]), int(np.broadcast_to(at, lanes.shape)[j])
        if region.name == "global":
            address, text = offset + GLOBAL_BASE, self.device.describe(offset)
            near = self.device.nearest(offset)
            name = near.name if near else None
        else:
            base = SHARED_BASE if region.name == "shared" else LOCAL_BASE
            start, whose = region.part_of(lane, offset)
            address = base + offset - start
            name, text = self.m.layout.describe(region.name, offset - start)
            text += whose
        raise self.m.error(
            check, f"{why}: {text}", lane, address=address, array=name, notes=list(notes)
        )

    # Accesses --------------------------------------------------------------------------------

    def load(
        self,
        lanes: Any,
        address: Any,
        space: str,
        width: int,
        count: int = 1,
        *,
        what: str = "load",
        strong: bool = False,
    ) -> list[Any]:
        """Read `count` neighbouring values of `width` bytes per thread, as unsigned integers."""
        parts = self.split(lanes, address, space)
        if len(parts) == 1:
            _, region, at = parts[0]
            return self._load(region, lanes, at, width, count, what, strong)
        out = [np.zeros(lanes.shape, _UINT[width]) for _ in range(count)]
        for which, region, at in parts:
            got = self._load(region, lanes[which], at, width, count, what, strong)
            for o, g in zip(out, got, strict=True):
                o[which] = g
        return out

    def _load(
        self, region: Region, lanes: Any, at: Any, width: int, count: int, what: str, strong: bool
    ) -> list[Any]:
        at, outside = self.place(region, lanes, at, width * count, what)
        if self.profile is not None:
            self.profile.access(self.m, region.name, lanes, at, width * count)
        values = self._gather(region, lanes, at, width, count, what)
        if region.cells is not None:
            b = _spread(at, lanes)
            for race in region.cells.read(self.m, lanes, b, width * count, mark=not strong)[:1]:
                if not strong or region.name == "shared":
                    self.race(region, lanes, b, race, what)
        if strong:
            self.m.acquire(lanes)
        if outside is not None:
            values = [np.where(outside, v.dtype.type(0), v) for v in values]
        return values

    def _gather(
        self, region: Region, lanes: Any, at: Any, width: int, count: int, what: str
    ) -> list[Any]:
        """Return the values at offsets `at`, after a look at their shadow bytes."""
        total = width * count
        scalar = not at.ndim
        k = np.atleast_1d(at >> _SHIFT[total])
        state = region.shadow_view[total].take(k)
        if total == 16:
            state = state.view(np.uint64)
        if np.count_nonzero(state != _GOOD[min(total, 8)]):
            for j in range(count):
                self.explain(region, lanes, at + j * width, width, what, reading=True)
        values = region.view[total].take(k)
        if count == 1:
            return [values[0] if scalar else values]
        parts = values.view(_UINT[width]).reshape(-1, count)
        return list(parts[0]) if scalar else [parts[:, j].copy() for j in range(count)]

    def store(
        self,
        lanes: Any,
        address: Any,
        space: str,
        values: list[Any],
        *,
        what: str = "store",
        strong: bool = False,
    ) -> None:
        """Write neighbouring values (unsigned integers of one width) per thread."""
        for which, region, at in self.split(lanes, address, space):
            if which is None:
                self._store(region, lanes, at, values, what, strong)
            else:
                some = [v if v.ndim == 0 else v[which] for v in values]
                self._store(region, lanes[which], at, some, what, strong)

    def _store(
        self, region: Region, lanes: Any, at: Any, values: list[Any], what: str, strong: bool
    ) -> None:
        width = values[0].dtype.itemsize
        at, outside = self.place(region, lanes, at, width * len(values), what)
        if self.profile is not None:
            self.profile.access(self.m, region.name, lanes, at, width * len(values), store=True)
        if outside is not None:
            keep = np.flatnonzero(~np.broadcast_to(outside, lanes.shape))
            lanes, at = lanes[keep], np.broadcast_to(at, outside.shape)[keep]
            values = [v if v.ndim == 0 else v[keep] for v in values]
            if not keep.size:
                return
        k = at >> _SHIFT[width] if width > 1 else at
        memory, shadow, good = region.view[width], region.shadow_view[width], _GOOD[width]
        for j in range(len(values)):
            state = shadow.take(k + j)
            if np.count_nonzero(state != good):
                if np.count_nonzero((state | _WRITTEN[width]) != good):
                    self.explain(region, lanes, at + j * width, width, what, reading=False)
                shadow[k + j] = state | _WRITTEN[width]
        before: list[Any] = []
        races: list[Any] = []
        if region.cells is not None:
            at = _spread(at, lanes)
            races = region.cells.write(self.m, lanes, at, width * len(values), mark=not strong)
            before = [memory[k + j] for j in range(len(values))] if races else []
        for j, v in enumerate(values):
            memory[k + j] = v if np.ndim(k) or not v.ndim else v[-1]
        if region.cells is not None and not (strong and region.name == "global"):
            self._report_races(region, lanes, at, k, values, before, races, what, strong)

    def _report_races(
        self,
        region: Region,
        lanes: Any,
        at: Any,
        k: Any,
        values: list[Any],
        before: list[Any],
        races: list[Any],
        what: str,
        strong: bool,
    ) -> None:
        """Report races of a store; writing what is there already, or the same twice, is none."""
        memory = region.view[values[0].dtype.itemsize]
        n = lanes.shape
        for race in races:
            j = race[0]
            if any(
                np.broadcast_to(o, n)[j] != np.broadcast_to(v, n)[j]
                for o, v in zip(before, values, strict=True)
            ):
                self.race(region, lanes, at, race, what)
        if strong:
            return
        for j, v in enumerate(values):
            lost = memory[k + j] != v
            if np.count_nonzero(lost):
                lost = np.broadcast_to(lost, n)
                i = int(np.flatnonzero(lost)[0])
                cell = int(at[i]) >> region.cells.shift if region.cells else 0
                other = int(region.cells.w_who[cell]) if region.cells else 0
                self.race(region, lanes, at, (i, other, self.m.stamp), what)

    def explain(
        self, region: Region, lanes: Any, at: Any, width: int, what: str, *, reading: bool
    ) -> None:
        """Say which byte of an access is not usable, if the checks for it are on."""
        checks = self.m.checks
        at = np.broadcast_to(at, lanes.shape)
        for b in range(width):
            state = region.shadow[at + b]
            for wanted, check, bad, why in (
                (checks.freed, "freed", (state & FREED) != 0, "of freed memory"),
                (checks.bounds, "bounds", (state & (LIVE | FREED)) == 0, "out of bounds"),
                (
                    checks.races,
                    "race",
                    (state & PENDING) != 0,
                    "of bytes an asynchronous copy not waited for writes",
                ),
                (
                    checks.races and not reading,
                    "race",
                    (state & READING) != 0,
                    "of bytes a wgmma not waited for reads",
                ),
                (
                    checks.uninitialised and reading,
                    "uninitialised",
                    (state & (LIVE | WRITTEN | PENDING)) == LIVE,
                    f"of uninitialised {region.name} memory",
                ),
            ):
                if wanted and bad.any():
                    j = int(np.flatnonzero(bad)[0])
                    more = int(bad.sum()) - 1
                    notes = [f"and {more} more threads in the same instruction"] if more else []
                    self.fault(
                        check, region, lanes, at + b, j, f"{what} of {width} bytes {why}", notes
                    )

    def race(
        self, region: Region, lanes: Any, at: Any, race: tuple[int, int, int], what: str
    ) -> None:
        """Report a race that `Cells` found."""
        j, who, stamp = race
        self.fault(
            "race",
            region,
            lanes,
            at,
            j,
            f"{what} in {region.name} memory races with another thread",
            [self.m.other_access(who, stamp)],
        )

    def atomic(
        self, lanes: Any, address: Any, space: str, width: int, what: str = "atomic"
    ) -> list[Any]:
        """Check a read-modify-write; return ``(which, array, indices)`` for each region."""
        out = []
        for which, region, at in self.split(lanes, address, space):
            t = lanes if which is None else lanes[which]
            at, outside = self.place(region, t, at, width, what)
            at = _spread(at, t)
            if self.profile is not None:
                self.profile.access(self.m, region.name, t, at, width, atomic=True)
            if outside is not None:  # with the check off: as if they had not executed it
                keep = np.flatnonzero(~outside)
                which = keep if which is None else which[keep]
                t, at = t[keep], at[keep]
                if not keep.size:
                    continue
            k = at >> _SHIFT[width]
            if (region.shadow_view[width][k] != _GOOD[width]).any():
                self.explain(region, t, at, width, what, reading=True)
                region.shadow_view[width][k] |= _WRITTEN[width]
            if region.cells is not None:
                for race in region.cells.read(self.m, t, at, width, mark=False)[:1]:
                    self.race(region, t, at, race, what)
            self.m.acquire(t)
            out.append((which, region.view[width], k))
        return out

    # Asynchronous copies ---------------------------------------------------------------------

    def begin_copy(
        self, lanes: Any, address: Any, n: int, what: str = "cp.async", space: str = "shared"
    ) -> tuple[Any, Any]:
        """Mark the destination of a copy; return which threads have one, and where."""
        region = self.regions[space]
        at = np.broadcast_to(address, lanes.shape)
        at, outside = self.place(region, lanes, at, n, f"{what} destination")
        keep = np.arange(len(lanes))
        if outside is not None:
            keep = np.flatnonzero(~outside)
            lanes, at = lanes[keep], at[keep]
        if not keep.size:
            return keep, at
        if self.profile is not None:
            self.profile.access(self.m, "shared", lanes, at, n, store=True)
        each = at[:, None] + np.arange(n)
        state = region.shadow[each]
        if (state & LIVE != LIVE).any() or (state & (PENDING | READING)).any():
            self.explain(region, lanes, at, n, what, reading=False)
        if region.cells is not None:
            for race in region.cells.write(self.m, lanes, at, n)[:1]:
                self.race(region, lanes, at, race, what)
        region.shadow[each] = state | PENDING
        return keep, at

    def end_copy(self, lanes: Any, at: Any, data: Any, *, mark: bool = True) -> None:
        """Land the bytes of a copy; `mark` says that the waiting threads count as writers now."""
        region = self.regions["shared"]
        each = at[:, None] + np.arange(data.shape[1])
        region.memory[each] = data
        region.shadow[each] = LIVE | WRITTEN
        if region.cells is not None and mark:
            region.cells.write(self.m, lanes, at, data.shape[1])

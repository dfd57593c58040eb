"""Memory layout of a launch: parameters, shared arrays, symbols, threads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_ptx.errors import LaunchError, position
from nbflow_ptx.parsing.linker import Linked
from nbflow_ptx.parsing.syntax import Module

#: Unused bytes after a static shared array, so that an overrun is detected.
_SHARED_GAP = 32
#: The most shared memory a thread block may have (compute capability 9.0).
MAX_SHARED = 227 * 1024
_GRID_LIMIT = (2**31 - 1, 65535, 65535)
_BLOCK_LIMIT = (1024, 1024, 64)
#: Thread blocks that every device of compute capability 9.0 runs as a cluster.
_CLUSTER_LIMIT = 8
#: Warps of a cluster that race detection distinguishes.
_CLUSTER_WARPS = 64


class Layout:
    """Addresses and sizes of one launch."""

    def __init__(
        self,
        module: Module,
        kernel: Linked,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        shared_bytes: int,
    ) -> None:
        self.files = module.files
        self.grid, self.block = triple(grid, "grid"), triple(block, "block")
        self.threads_per_block = int(np.prod(self.block))
        self.n_blocks = int(np.prod(self.grid))
        self.cluster = triple(kernel.cluster, "cluster")
        self.blocks_per_cluster = int(np.prod(self.cluster))
        self.warps_per_cluster = self.blocks_per_cluster * -(-self.threads_per_block // 32)
        self._check(kernel)
        self._check_cluster(kernel)
        self.kernel = kernel
        self.addresses: dict[str, int] = dict(kernel.frame)
        self.shared_names: list[tuple[int, int, str]] = []
        self._shared(kernel, shared_bytes)
        self.params: NDArray[np.uint8] = np.zeros(max(kernel.param_bytes, 1), np.uint8)

    def _check(self, kernel: Linked) -> None:
        for name, sizes, limits in (
            ("grid", self.grid, _GRID_LIMIT),
            ("block", self.block, _BLOCK_LIMIT),
        ):
            for size, limit, axis in zip(sizes, limits, "xyz", strict=True):
                if not 1 <= size <= limit:
                    raise LaunchError(f"{name}.{axis} must be 1 to {limit}, got {size}")
        limit = min(1024, kernel.max_threads or 1024)
        if self.threads_per_block > limit:
            raise LaunchError(
                f"a thread block of {self.threads_per_block}; {kernel.name} allows {limit}"
            )

    def _check_cluster(self, kernel: Linked) -> None:
        for size, step, axis in zip(self.grid, self.cluster, "xyz", strict=True):
            if size % step:
                raise LaunchError(
                    f"grid.{axis} = {size} is not a multiple of the {step} thread blocks of a "
                    f"cluster of {kernel.name}"
                )
        n = self.blocks_per_cluster
        if n > _CLUSTER_LIMIT:
            raise LaunchError(
                f"a cluster of {n} thread blocks; every device runs {_CLUSTER_LIMIT} at most"
            )
        if n > 1 and self.warps_per_cluster > _CLUSTER_WARPS:
            raise LaunchError(
                f"a cluster of {n} thread blocks of {self.threads_per_block}; clusters of up to "
                f"{_CLUSTER_WARPS} warps can be run here"
            )

    def _shared(self, kernel: Linked, dynamic: int) -> None:
        """Place the static arrays, each followed by a gap, then the dynamic one."""
        self.shared_ranges: list[tuple[int, int]] = []
        at = static = 0
        for v in (v for v in kernel.shared if v.size):
            at = -(-at // v.align) * v.align
            self.addresses[v.name] = at
            self.shared_ranges.append((at, v.size))
            self.shared_names.append((at, v.size, _readable(v.name)))
            at += v.size + _SHARED_GAP
            static += v.size
        if static + dynamic > MAX_SHARED:
            raise LaunchError(
                f"{static} static + {dynamic} dynamic bytes of shared memory; "
                f"a thread block has at most {MAX_SHARED}"
            )
        external = [v for v in kernel.shared if not v.size]
        align = max([16, *(v.align for v in external)])
        at = -(-at // align) * align
        for v in external:
            self.addresses[v.name] = at
        if dynamic:
            self.shared_ranges.append((at, dynamic))
            self.shared_names.append((at, dynamic, "dynamic shared memory"))
        self.dynamic_bytes, self.total_shared = dynamic, static + dynamic
        self.shared_bytes = -(-(at + dynamic + _SHARED_GAP) // 16) * 16

    def block_index(self, k: Any) -> tuple[Any, Any, Any]:
        """Return (x, y, z) of a block: those of a cluster have neighbouring numbers."""
        within = index_in(k % self.blocks_per_cluster, self.cluster)
        sizes = [n // c for n, c in zip(self.grid, self.cluster, strict=True)]
        x, y, z = (
            c * step + w
            for c, step, w in zip(
                index_in(k // self.blocks_per_cluster, sizes), self.cluster, within, strict=True
            )
        )
        return x, y, z

    def thread_index(self, k: int) -> tuple[int, int, int]:
        """Return (x, y, z) of a thread in its block."""
        return index_in(k, self.block)

    def shorten(self, text: str) -> str:
        """Shorten the mangled name of the kernel in a text."""
        name = self.kernel.name
        return text.replace(name, short_name(name)) if len(name) > 40 else text

    def describe(self, space: str, offset: int) -> tuple[str | None, str]:
        """Return name of and position in the variable at an offset of shared or local memory."""
        sizes = self.kernel.frame_sizes
        known = (
            self.shared_names
            if space == "shared"
            else [(a, sizes[n], n) for n, a in self.kernel.frame.items()]
        )
        if not known:
            return None, f"the kernel has no {space} memory; offset {offset}"
        start, n, name = min(known, key=lambda v: max(v[0] - offset, offset - v[0] - v[1] + 1, 0))
        return name, position(offset - start, f"{space} array {name!r}", n)


def index_in(k: Any, sizes: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return (x, y, z) of a number, or of each of an array, in a box of some sizes."""
    x, y = sizes[0], sizes[1]
    return k % x, k // x % y, k // (x * y)


def triple(sizes: Any, what: str) -> tuple[int, int, int]:
    """Return one to three sizes as (x, y, z)."""
    values = (sizes,) if isinstance(sizes, (int, np.integer)) else tuple(sizes)
    if not 1 <= len(values) <= 3 or any(int(v) != v for v in values):
        raise LaunchError(f"{what} must be an int or one to three ints, got {sizes!r}")
    x, y, z = (*(int(v) for v in values), *(1,) * (3 - len(values)))
    return x, y, z


def short_name(name: str) -> str:
    """Return the readable part of a mangled name."""
    words = []
    rest = name[3:] if name.startswith("_ZN") else name[2:] if name.startswith("_Z") else ""
    while rest and rest[0].isdigit():
        digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        word, rest = rest[len(digits) :][: int(digits)], rest[len(digits) + int(digits) :]
        words.append(word)
    return words[-1] if words else name


def _readable(name: str) -> str:
    """Return a variable's source name from its mangled name, if possible."""
    name = name.rpartition(":")[2]
    if name.startswith("_ZZ"):
        for m in re.finditer(r"E(\d+)", name):
            rest = name[m.end() :]
            if rest[: int(m.group(1))] == rest.partition("_")[0] or len(rest) == int(m.group(1)):
                return rest[: int(m.group(1))]
    return name

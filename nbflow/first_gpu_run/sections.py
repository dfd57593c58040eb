"""The sections of a run, and what the code of a section is given."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbflow_kernels.errors import unknown_name

EMULATED_ARRAYS = "nbflow_ptx.cupy_stand_in"


class Skipped(Exception):
    """A section cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Context:
    """Device and results of a section."""

    emulator: bool
    """True: small shapes on the emulated device."""
    limit_s: float
    """Seconds after which the process is killed."""
    folder: Path
    """The run's folder."""
    emit: Callable[[dict[str, Any]], None]
    """Takes a result, which is written to the run's file at once."""

    @property
    def arrays(self) -> str:
        """Return the name of the module of arrays."""
        return EMULATED_ARRAYS if self.emulator else "cupy"

    def cupy(self) -> Any:
        """Return the module of arrays; raise `Skipped` if kernels cannot run here."""
        if not self.emulator:
            from nbflow_kernels.cuda import detect

            found = detect()
            if not found.usable:
                raise Skipped(found.reason)
        return importlib.import_module(self.arrays)


@dataclass(frozen=True)
class Section:
    """A part of the run."""

    name: str
    """Name for ``--sections``."""
    limit_s: float
    """Time limit."""
    function: str
    """Module of this package and function, which takes a `Context`."""
    about: str
    """Contents, for ``--list``."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the function."""


SECTIONS = (
    Section("facts", 40, "facts.device_facts", "device, driver, packages, compilers, free memory"),
    Section(
        "arithmetic", 60, "facts.arithmetic",
        "how tensor cores align sums, mma against wgmma, handles of streams",
    ),
    Section(
        "kernels", 90, "kernels.one_of_each_kind",
        "CUDA C++, decoders, Numba, sums of ranks, a graph, 200 KB of shared memory, a cluster",
    ),
    Section("gemv", 180, "kernels.benchmark", "benchmark: products of few rows", ("gemv",)),
    Section("attention", 60, "kernels.benchmark", "benchmark: decode attention", ("attention",)),
    Section("prompts", 120, "kernels.benchmark", "benchmark: prompts", ("prompts",)),
    *(
        Section(
            f"model_{shape}_{format}", limit_s, "models.one_model",
            f"a {shape} model in {format}: tokens/s of 1, 8, 32 sequences, memory", (shape, format),
        )
        for shape, limit_s, formats in (
            ("1.1b", 90, ("q4_0", "q4_k")), ("7b", 150, ("q4_0", "q4_k")),
            ("3.4b-moe", 90, ("q4_0",)),
        )
        for format in formats
    ),
    Section("tests", 300, "checks.gpu_tests", "the tests marked gpu"),
    Section("sanitizer", 180, "checks.sanitizer", "compute-sanitizer on ten small cases"),
    Section("other", 120, "kernels.benchmark", "benchmark: all other ops", ("other",)),
)  # fmt: skip


def section(name: str) -> Section:
    """Return a section by its name.

    Raises
    ------
    UsageError
        If the name is unknown.
    """
    for found in SECTIONS:
        if found.name == name:
            return found
    raise unknown_name("section", name, [s.name for s in SECTIONS])

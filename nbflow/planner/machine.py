"""Machine descriptions: devices and links between them, as a TOML file.

``name``, ``description``, ``sources``
    Name, one line of description, and sources of the numbers.
``ranks_per_host``
    Ranks on one host; hosts communicate over ``[links.network]``.
``[[devices]]``
    One table for each kind of device, ranks in order: `Device` names the keys.
``[links.host]``, ``[links.network]``
    Links between ranks of one host, and of different hosts: `Link` names the keys.

Rates are those that programs reach; ``sources`` says which share of the data sheet that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import nbflow_kernels as nk
from nbflow.utils.toml_schema import check_keys, check_value, read_toml, strings
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_specs import MACHINES

COLLECTIVES = ("gather", "ring", "one_shot", "best")
"""Algorithms of an all-reduce: see `Link.collective`."""

ARITHMETICS = ("f32", "f16", "bf16", "int8")

MAX_RANKS = 4096

SUPER_BLOCK = 256

FEW_ROWS = 8
"""Rows of a product that run at the decode rate."""


@dataclass(frozen=True)
class Rates:
    """Rates of matrix products in one weight format and one arithmetic.

    A product of n weights with T rows takes n / `weights_per_s`, and 2 n operations per row: the
    first `FEW_ROWS` rows at `few_operations_per_s`, the others at `operations_per_s`.
    """

    weights_per_s: float
    """Weights decoded, or loaded, per second."""
    few_operations_per_s: float
    """Operations per second of the first rows; a multiply-add counts as two."""
    operations_per_s: float
    """Operations per second of the other rows."""

    def seconds(self, weights: float, operations: float) -> float:
        """Return the time of a product."""
        few = min(operations, 2.0 * FEW_ROWS * weights)
        rest = (operations - few) / self.operations_per_s
        return weights / self.weights_per_s + few / self.few_operations_per_s + rest


@dataclass(frozen=True)
class Device:
    """Device of one rank."""

    name: str
    """Name of the hardware."""
    memory_bytes: float
    """Memory for weights, KV cache and buffers."""
    read_bytes_per_s: float
    """Memory bandwidth of the rank while all ranks read."""
    operations_per_s: Mapping[str, float]
    """Arithmetic ("f32", "f16", "bf16", "int8") -> operations per second of products with many
    rows; a multiply-add counts as two.  The first arithmetic is the default."""
    weights_per_s: Mapping[str, float] = field(default_factory=dict)
    """Arithmetic -> weights decoded from a block format per second; left out where memory is always
    slower."""
    formats: Mapping[str, Mapping[str, Rates]] = field(default_factory=dict)
    """Weight format -> arithmetic -> measured rates; other formats use the most similar one
    (`like`), or the two rates above."""
    read_alone_bytes_per_s: float = 0.0
    """Memory bandwidth while no other rank reads; `read_bytes_per_s` by default."""
    op_s: float = 0.0
    """Launch overhead of an op."""
    step_s: float = 0.0
    """Host overhead of a step."""
    burst_step_s: float = 0.0
    """Overhead of a step within multi-step decode, for one rank with the whole model."""
    reserved_bytes: float = 0.0
    """Memory of the system and the libraries."""
    host_memory_bytes: float = 0.0
    """Host memory of the rank for KV cache and embedding."""
    host_read_bytes_per_s: float = 0.0
    """Rate at which a GPU reads host memory; 0 for a CPU."""

    @property
    def is_accelerator(self) -> bool:
        """True for a device with separate memory, which reads host memory over a bus."""
        return self.host_read_bytes_per_s > 0

    def operations(self, arithmetic: str | None) -> float:
        """Return the operations per second of an arithmetic; None for the device's first."""
        if arithmetic is None:
            return next(iter(self.operations_per_s.values()))
        if arithmetic not in self.operations_per_s:
            raise unknown_name(f"arithmetic of {self.name}", arithmetic, self.operations_per_s)
        return self.operations_per_s[arithmetic]

    def product_s(self, weights: float, operations: float, format: str, arithmetic: str) -> float:
        """Return the compute time of matrix products, without the limit of memory bandwidth.

        Parameters
        ----------
        weights : float
            Number of weights read.
        operations : float
            Operations with them.
        format : str
            Weight format, a name of `nbflow_kernels.FORMATS`.
        arithmetic : str
            Arithmetic of the products, one of `operations_per_s`.
        """
        measured = self.formats.get(like(format, self.formats), {})
        # float weights have no int8 kernels: their products stay float32
        alone = arithmetic == "int8" and nk.FORMATS[format].block_size == 1
        rates = measured.get("f32" if alone else arithmetic)
        if rates is not None:
            return rates.seconds(weights, operations)
        decode = self.weights_per_s.get(arithmetic, 0.0)
        return operations / self.operations(arithmetic) + (weights / decode if decode else 0.0)

    def arithmetic(self, wanted: str | None) -> str:
        """Return the name of an arithmetic; None for the device's first."""
        return next(iter(self.operations_per_s)) if wanted is None else wanted


def like(format: str, measured: Iterable[str]) -> str:
    """Return the measured format most similar to another one; empty for none.

    Similar formats have blocks of one kind (floats, short blocks, super-blocks of 256); of these,
    the one with the nearest number of bits is chosen.

    Examples
    --------
    >>> like("q5_k", ["f16", "q8_0", "q4_0", "q4_k"])
    'q4_k'
    >>> like("q5_0", ["f16", "q8_0", "q4_0", "q4_k"])
    'q4_0'
    """

    def kind(name: str) -> int:
        size = nk.FORMATS[name].block_size
        return 0 if size == 1 else 1 if size < SUPER_BLOCK else 2

    bits = nk.FORMATS[format].bits_per_weight
    found = [name for name in measured if name in nk.FORMATS and kind(name) == kind(format)]
    return min(found, key=lambda name: abs(nk.FORMATS[name].bits_per_weight - bits), default="")


@dataclass(frozen=True)
class Link:
    """Link between two ranks."""

    latency_s: float
    bytes_per_s: float
    """Bandwidth per rank in one direction while all ranks send."""
    collective: str = "best"
    """All-reduce algorithm.  "gather": all-gather, then every rank sums (the communicators of
    `nbflow.distributed`).  "one_shot": the same through shared memory.  "ring": reduce-scatter and
    all-gather, 2 (n - 1) messages.  "best": the faster of "one_shot" and "ring"."""

    def send_s(self, n_bytes: float) -> float:
        """Return the time of one message."""
        return self.latency_s + n_bytes / self.bytes_per_s

    def all_gather_s(self, n: int, n_bytes: float) -> float:
        """Return the time of an all-gather of `n_bytes` from each of `n` ranks."""
        return self.latency_s + (n - 1) * n_bytes / self.bytes_per_s if n > 1 else 0.0

    def all_reduce_s(self, n: int, n_bytes: float) -> float:
        """Return the time of an all-reduce of `n_bytes` over `n` ranks."""
        if n == 1:
            return 0.0
        ring = 2 * (n - 1) * (self.latency_s + n_bytes / n / self.bytes_per_s)
        at_once = self.all_gather_s(n, n_bytes)
        if self.collective == "best":
            return min(ring, at_once)
        return ring if self.collective == "ring" else at_once


@dataclass(frozen=True)
class Machine:
    """Devices and links."""

    name: str
    devices: tuple[Device, ...]
    ranks_per_host: int
    links: Mapping[str, Link] = field(default_factory=dict)
    description: str = ""
    sources: tuple[str, ...] = ()

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the slowest link among these ranks."""
        hosts = {rank // self.ranks_per_host for rank in ranks}
        kind = "host" if len(hosts) == 1 else "network"
        if kind not in self.links:
            raise UsageError(
                f"machine {self.name!r} has no [links.{kind}], which ranks {list(ranks)} need; add "
                "it with latency_s and bytes_per_s"
            )
        return self.links[kind]

    def with_ranks(self, n: int) -> Machine:
        """Return the first `n` ranks of the machine, or of several equal hosts."""
        if not 1 <= n <= MAX_RANKS:
            raise UsageError(f"the number of ranks must be 1..{MAX_RANKS}, got {n}")
        if n > len(self.devices) and "network" not in self.links:
            raise UsageError(
                f"machine {self.name!r} has {len(self.devices)} ranks and no [links.network] to "
                f"more hosts; {n} ranks need one: add it to the file, or measure the machine"
            )
        n_hosts = -(-n // len(self.devices))
        return dataclasses.replace(self, devices=(self.devices * n_hosts)[:n])


def known_machines() -> dict[str, Path]:
    """Return the packaged machines: name -> file."""
    return {path.stem: path for path in sorted(MACHINES.glob("*.toml"))}


def load_machine(machine: str | Path) -> Machine:
    """Load a machine by path, or a packaged one by name.

    Raises
    ------
    UsageError
        If the file does not exist or is not valid (see `nbflow.planner.machine`).

    Examples
    --------
    >>> from nbflow.planner import load_machine
    >>> load_machine("v100x4_nvlink").devices[3].name
    'Tesla V100-SXM2-32GB'
    """
    path, names = Path(machine), known_machines()
    if not path.exists():
        if str(machine) not in names:
            raise UsageError(
                f"{unknown_name('machine', str(machine), names)}; or give the path of a file, or "
                "measure this machine with nbflow plan --measure -o FILE"
            )
        path = names[str(machine)]
    return _machine(read_toml(path), str(path), path.stem)


def _machine(table: dict[str, Any], where: str, name: str) -> Machine:
    words = ("name", "description", "sources", "ranks_per_host", "devices", "links")
    check_keys(table, where, words)
    devices: list[Device] = []
    given = table.get("devices", [])
    if not isinstance(given, list) or not given:
        raise UsageError(f"{where}: [[devices]] is missing; it must describe at least one device")
    for i, entry in enumerate(given):
        device, count = _device(entry, f"{where}: [[devices]] {i + 1}")
        if len(devices) + count > MAX_RANKS:
            raise UsageError(f"{where}: more than {MAX_RANKS} devices")
        devices += [device] * count
    links = check_keys(table.get("links", {}), f"{where}: [links]", ("host", "network"))
    per_host = check_value(
        table.get("ranks_per_host", len(devices)), f"{where}: ranks_per_host", int
    )
    if per_host < 1:
        raise UsageError(f"{where}: ranks_per_host must be at least 1, got {per_host}")
    return Machine(
        name=check_value(table.get("name", name), f"{where}: name", str),
        devices=tuple(devices),
        ranks_per_host=per_host,
        links={kind: _link(entry, f"{where}: [links.{kind}]") for kind, entry in links.items()},
        description=check_value(table.get("description", ""), f"{where}: description", str),
        sources=tuple(strings(table.get("sources", []), f"{where}: sources")),
    )


def _fields(
    kind: type[Any],
    entry: Any,
    where: str,
    checks: Mapping[str, Callable[[Any, str], Any]],
    also: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the fields of a dataclass from a table; those without a check are numbers."""
    fields = dataclasses.fields(kind)
    check_keys(entry, where, (*(each.name for each in fields), *also))
    values: dict[str, Any] = {}
    for each in fields:
        at, missing = f"{where}: {each.name}", dataclasses.MISSING
        is_required = each.default is missing and each.default_factory is missing
        if each.name in checks and each.name in entry:
            values[each.name] = checks[each.name](entry[each.name], at)
        elif each.name in entry:
            values[each.name] = _positive(entry[each.name], at, zero=not is_required)
        elif is_required:
            raise UsageError(f"{at} is missing")
    return values


def _device(entry: Any, where: str) -> tuple[Device, int]:
    checks = {"name": _text, "formats": _formats}
    checks |= {"operations_per_s": _rates, "weights_per_s": _rates}
    values = _fields(Device, entry, where, checks, also=("count",))
    count = check_value(entry.get("count", 1), f"{where}: count", int)
    if count < 1:
        raise UsageError(f"{where}: count must be at least 1, got {count}")
    if not values["operations_per_s"]:
        raise UsageError(f"{where}: operations_per_s must name at least one arithmetic, e.g. f32")
    return Device(**values), count


def _text(value: Any, where: str) -> Any:
    return check_value(value, where, str)


def _rates(entry: Any, where: str) -> dict[str, float]:
    """Return the rate of each arithmetic."""
    rates = check_keys(entry, where, ARITHMETICS)
    return {name: _positive(rate, f"{where}.{name}") for name, rate in rates.items()}


def _formats(entry: Any, where: str) -> dict[str, dict[str, Rates]]:
    """Return the rates of products by weight format and arithmetic."""
    return {
        format: {
            name: Rates(**_fields(Rates, rates, f"{where}.{format}.{name}", {}))
            for name, rates in check_keys(of_format, f"{where}.{format}", ARITHMETICS).items()
        }
        for format, of_format in check_keys(entry, where, tuple(nk.FORMATS)).items()
    }


def _link(entry: Any, where: str) -> Link:
    def latency(value: Any, at: str) -> float:
        return _positive(value, at, zero=True)

    link = Link(**_fields(Link, entry, where, {"latency_s": latency, "collective": _text}))
    if link.collective not in COLLECTIVES:
        raise UsageError(f"{where}: {unknown_name('collective', link.collective, COLLECTIVES)}")
    return link


def _positive(value: Any, where: str, zero: bool = False) -> float:
    number = float(check_value(value, where, float))
    if not (number > 0 or (zero and number == 0)) or number == float("inf"):
        raise UsageError(f"{where} must be a {'' if zero else 'positive '}number, got {value!r}")
    return number


def machine_toml(machine: Machine) -> str:
    """Format a machine as TOML; consecutive equal devices become one table."""
    import tomli_w  # late: most commands read machines only

    devices = []
    for device, equal in groupby(machine.devices):
        facts = {k: _rounded(v) for k, v in dataclasses.asdict(device).items() if v}
        devices.append({"count": len(list(equal)), **facts})
    return tomli_w.dumps(
        {
            "name": machine.name,
            "description": machine.description,
            "sources": machine.sources,
            "ranks_per_host": machine.ranks_per_host,
            "devices": devices,
            "links": {k: _rounded(dataclasses.asdict(v)) for k, v in machine.links.items()},
        }
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    return value if isinstance(value, str | int) else float(f"{value:.4g}")

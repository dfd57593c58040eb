"""What a machine can do, as a TOML file: its devices, and the links between them.

``name``, ``description``, ``sources``
    What it is called, one line about it, and where the numbers come from.
``ranks_per_host``
    Ranks on one host; with more ranks than that, hosts talk over ``[links.network]``.
``[[devices]]``
    One table for each kind of device, ranks in order: `Device` names the keys.
``[links.host]``, ``[links.network]``
    How ranks of one host, and of different hosts, reach each other: `Link` names the keys.

Rates are what programs reach, not what data sheets promise: a file says in ``sources`` which share
of the data sheet it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import nbflow_kernels as nk
from nbflow.utils.toml_schema import check_keys, check_value, read_toml, strings
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_specs import MACHINES

COLLECTIVES = ("gather", "ring", "one_shot", "best")
"""How ranks add up: see `Link.collective`."""

ARITHMETICS = ("f32", "f16", "bf16", "int8")

MAX_RANKS = 4096

SUPER_BLOCK = 256

FEW_ROWS = 8
"""Rows of a product that count as few: tokens of requests that generate together."""


@dataclass(frozen=True)
class Rates:
    """How fast products with weights in one format are, in one arithmetic.

    A product of n weights with T rows takes n / `weights_per_s`, and 2 n operations for each row:
    the first `FEW_ROWS` at `few_operations_per_s`, the others at `operations_per_s`.
    """

    weights_per_s: float
    """Weights that are decoded, or brought to where they are multiplied."""
    few_operations_per_s: float
    """Operations of the first rows, a multiply-add counted as two."""
    operations_per_s: float
    """Operations of the others."""

    def seconds(self, weights: float, operations: float) -> float:
        """Return the time of so many weights and operations with them."""
        few = min(operations, 2.0 * FEW_ROWS * weights)
        rest = (operations - few) / self.operations_per_s
        return weights / self.weights_per_s + few / self.few_operations_per_s + rest


@dataclass(frozen=True)
class Device:
    """What one rank runs on."""

    name: str
    """What it is."""
    memory_bytes: float
    """Memory for weights, cache and buffers."""
    read_bytes_per_s: float
    """Rate of reading memory while all ranks of the machine do."""
    operations_per_s: Mapping[str, float]
    """Arithmetic ("f32", "f16", "bf16", "int8") to operations, a multiply-add counted as two, of
    products with many rows.  The first one is taken where nothing else is asked for."""
    weights_per_s: Mapping[str, float] = field(default_factory=dict)
    """Arithmetic to the weights that can be decoded from a block format; left out where the
    memory is always slower."""
    formats: Mapping[str, Mapping[str, Rates]] = field(default_factory=dict)
    """Weight format to arithmetic to rates, where they have been measured: the others take those of
    the format that is most like theirs (`like`), or else the two above."""
    read_alone_bytes_per_s: float = 0.0
    """Rate of reading memory while no other rank does; by default the same."""
    op_s: float = 0.0
    """What starting an op costs."""
    step_s: float = 0.0
    """What a step costs besides its ops."""
    burst_step_s: float = 0.0
    """The same where one rank holds the whole model and runs many steps without host code between
    them; by default the same."""
    reserved_bytes: float = 0.0
    """Memory that the system and the libraries take."""
    host_memory_bytes: float = 0.0
    """Memory of the host that this rank may use besides, for the cache and the embedding."""
    host_read_bytes_per_s: float = 0.0
    """Rate of reading that."""

    def operations(self, arithmetic: str | None) -> float:
        """Return the operations per second in an arithmetic; None for the device's first."""
        if arithmetic is None:
            return next(iter(self.operations_per_s.values()))
        if arithmetic not in self.operations_per_s:
            raise unknown_name(f"arithmetic of {self.name}", arithmetic, self.operations_per_s)
        return self.operations_per_s[arithmetic]

    def product_s(self, weights: float, operations: float, format: str, arithmetic: str) -> float:
        """Return the time of products with so many weights, however fast the memory is.

        Parameters
        ----------
        weights : float
            Weights that are read.
        operations : float
            Multiplications and additions with them.
        format : str
            Their format, a name of `nbflow_kernels.FORMATS`.
        arithmetic : str
            Arithmetic of the products, one of `operations_per_s`.
        """
        measured = self.formats.get(like(format, self.formats), {})
        # single numbers are not multiplied as integers: their products stay float32
        alone = arithmetic == "int8" and nk.FORMATS[format].block_size == 1
        rates = measured.get("f32" if alone else arithmetic)
        if rates is not None:
            return rates.seconds(weights, operations)
        decode = self.weights_per_s.get(arithmetic, 0.0)
        return operations / self.operations(arithmetic) + (weights / decode if decode else 0.0)

    def arithmetic(self, wanted: str | None) -> str:
        """Return the name of an arithmetic; None stands for the device's first."""
        return next(iter(self.operations_per_s)) if wanted is None else wanted


def like(format: str, measured: Iterable[str]) -> str:
    """Return the measured format whose products are most like another one's; empty for none.

    Formats are alike whose blocks are of one kind (single numbers, short ones, GGML's of 256 with
    scales within), and of these the one with the nearest number of bits.

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
    """How two ranks reach each other."""

    latency_s: float
    """Time of an empty message."""
    bytes_per_s: float
    """Rate of a long one, in one direction, as each rank has it while all ranks send."""
    collective: str = "best"
    """How sums are made.  "gather": every rank sends its whole part to all others and adds them
    up itself, in one exchange (what the communicators of `nbflow.distributed` do).  "one_shot": the
    same through shared memory, where a part is read by all at the same time.  "ring": parts of
    parts travel around twice, 2 (n - 1) messages.  "best": the faster of "one_shot" and "ring"."""

    def send_s(self, n_bytes: float) -> float:
        """Return the time of one message."""
        return self.latency_s + n_bytes / self.bytes_per_s

    def all_gather_s(self, n: int, n_bytes: float) -> float:
        """Return the time in which `n` ranks give each other parts of `n_bytes` each."""
        return self.latency_s + (n - 1) * n_bytes / self.bytes_per_s if n > 1 else 0.0

    def all_reduce_s(self, n: int, n_bytes: float) -> float:
        """Return the time in which `n` ranks add up `n_bytes` each."""
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
    """What it is called."""
    devices: tuple[Device, ...]
    """One for each rank."""
    ranks_per_host: int
    """Ranks on one host."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """"host" and "network"."""
    description: str = ""
    """One line."""
    sources: tuple[str, ...] = ()
    """Where the numbers come from."""

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the link by which these ranks talk: the slowest one on the way.

        Raises
        ------
        UsageError
            If the machine has none of that kind.
        """
        hosts = {rank // self.ranks_per_host for rank in ranks}
        kind = "host" if len(hosts) == 1 else "network"
        if kind not in self.links:
            raise UsageError(
                f"machine {self.name!r} has no [links.{kind}], which ranks {list(ranks)} need; add "
                "it with latency_s and bytes_per_s"
            )
        return self.links[kind]

    def with_ranks(self, n: int) -> Machine:
        """Return the first `n` ranks of the machine, or as many hosts like it as give `n` ranks.

        Raises
        ------
        UsageError
            If more hosts are needed, and the machine does not say how they are connected.
        """
        if not 1 <= n <= MAX_RANKS:
            raise UsageError(f"the number of ranks must be 1..{MAX_RANKS}, got {n}")
        if n > len(self.devices) and "network" not in self.links:
            raise UsageError(
                f"machine {self.name!r} has {len(self.devices)} ranks and no [links.network] to "
                f"more hosts, so not {n}; describe one that has them, or measure it"
            )
        n_hosts = -(-n // len(self.devices))
        return dataclasses.replace(self, devices=(self.devices * n_hosts)[:n])


def known_machines() -> dict[str, Path]:
    """Return the machines that come with the package: name -> file."""
    return {path.stem: path for path in sorted(MACHINES.glob("*.toml"))}


def load_machine(machine: str | Path) -> Machine:
    """Read the machine with this path, or the packaged one with this name.

    Raises
    ------
    UsageError
        If there is none, or the file is not as `nbflow.planner.machine` says.

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
        raise UsageError(f"{where}: [[devices]] is missing; it must describe one device at least")
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


_OPTIONAL = ("weights_per_s", "formats")
"""Tables of a device that may be left out."""


def _device(entry: Any, where: str) -> tuple[Device, int]:
    fields = {f.name: f for f in dataclasses.fields(Device)}
    check_keys(entry, where, (*fields, "count"))
    count = check_value(entry.get("count", 1), f"{where}: count", int)
    if count < 1:
        raise UsageError(f"{where}: count must be at least 1, got {count}")
    values: dict[str, Any] = {}
    for name, described in fields.items():
        if name not in entry:
            if described.default is dataclasses.MISSING and name not in _OPTIONAL:
                raise UsageError(f"{where}: {name} is missing")
        elif name == "name":
            values[name] = check_value(entry[name], f"{where}: name", str)
        elif name == "formats":
            values[name] = _formats(entry[name], f"{where}: formats")
        elif name in ("operations_per_s", "weights_per_s"):
            rates = check_keys(entry[name], f"{where}: {name}", ARITHMETICS)
            values[name] = {k: _positive(v, f"{where}: {name}.{k}") for k, v in rates.items()}
        else:
            rate = described.default is dataclasses.MISSING
            values[name] = _positive(entry[name], f"{where}: {name}", zero=not rate)
    if not values["operations_per_s"]:
        raise UsageError(f"{where}: operations_per_s must name one arithmetic at least, e.g. f32")
    return Device(**values), count


def _formats(entry: Any, where: str) -> dict[str, dict[str, Rates]]:
    """Return the rates of products with weights in each format."""
    found: dict[str, dict[str, Rates]] = {}
    names = [f.name for f in dataclasses.fields(Rates)]
    for format, of_format in check_keys(entry, where, tuple(nk.FORMATS)).items():
        found[format] = {}
        for arithmetic, rates in check_keys(of_format, f"{where}.{format}", ARITHMETICS).items():
            here = f"{where}.{format}.{arithmetic}"
            check_keys(rates, here, names)
            missing = [name for name in names if name not in rates]
            if missing:
                raise UsageError(f"{here}: {missing[0]} is missing")
            values = (_positive(rates[name], f"{here}.{name}") for name in names)
            found[format][arithmetic] = Rates(*values)
    return found


def _link(entry: Any, where: str) -> Link:
    check_keys(entry, where, [f.name for f in dataclasses.fields(Link)])
    for name in ("latency_s", "bytes_per_s"):
        if name not in entry:
            raise UsageError(f"{where}: {name} is missing")
    collective = check_value(entry.get("collective", "best"), f"{where}: collective", str)
    if collective not in COLLECTIVES:
        raise UsageError(f"{where}: {unknown_name('collective', collective, COLLECTIVES)}")
    latency = _positive(entry["latency_s"], f"{where}: latency_s", zero=True)
    return Link(latency, _positive(entry["bytes_per_s"], f"{where}: bytes_per_s"), collective)


def _positive(value: Any, where: str, zero: bool = False) -> float:
    number = float(check_value(value, where, float))
    if not (number > 0 or (zero and number == 0)) or number == float("inf"):
        raise UsageError(f"{where} must be a {'' if zero else 'positive '}number, got {value!r}")
    return number


def written_machine(machine: Machine) -> str:
    """Return a machine as the text of its file; equal devices in a row become one table."""
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
    """Return numbers with the four digits that a measurement has."""
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    return value if isinstance(value, str | int) else float(f"{value:.4g}")

"""Machine descriptions: devices and links between them, as a TOML file.

``name``, ``description``, ``sources``
    Name, one line of description, and sources of the numbers.
``join_s``
    Time to begin and end a step on all ranks, if they are threads of one process.
``measurement``
    Version of the measurement; left out by hand-written files.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import nbflow_kernels as nk
from nbflow.planner.rates import CacheCurve, CacheRates, Rates, like
from nbflow.utils.toml_schema import check_keys, check_value, read_toml, strings
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.kv_cache.cpu_codec import KINDS
from nbflow_specs import MACHINES

COLLECTIVES = ("gather", "ring", "one_shot", "best")
"""Algorithms of an all-reduce: see `Link.collective`."""

ARITHMETICS = ("f32", "f16", "bf16", "int8")

MAX_RANKS = 4096


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
    """Weight format -> arithmetic -> measured times; other formats use the most similar one
    (`like`), or the two rates above."""
    read_alone_bytes_per_s: float = 0.0
    """Memory bandwidth while no other rank reads; `read_bytes_per_s` by default."""
    cached: CacheCurve | None = None
    """Share of a step's bytes that the caches hold; none by default."""
    cached_bytes_per_s: float = 0.0
    """Bandwidth of the last cache."""
    kv_formats: Mapping[str, CacheRates] = field(default_factory=dict)
    """Cache format -> measured times of keys and values; others use the one with the nearest bits.
    Without any, attention takes the time of its bytes and operations."""
    attention_operations_per_s: float = 0.0
    """Operations per second of QK and PV products, where `kv_formats` are measured."""
    attention_item_s: float = 0.0
    """Start of attention for one sequence and KV head."""
    attention_vector_s: float = 0.0
    """Start and end of attention for one query vector: a token and a query head."""
    quantize_s: float = 0.0
    """Seconds to quantize an activation to int8."""
    buffer_bytes_per_s: float = 0.0
    """Activations that norms, gates and the like read and write per second; memory bandwidth by
    default."""
    op_s: float = 0.0
    """Launch overhead of an op."""
    step_s: float = 0.0
    """Host overhead of a step with one sequence."""
    cold_step_s: float = 0.0
    """The same where the weights of the step before have evicted the host code from the caches;
    `step_s` by default."""
    sequence_s: float = 0.0
    """Host overhead of each further sequence of a step."""
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

    def read_s(self, n_bytes: float, cached: float = 0.0, alone: bool = False) -> float:
        """Return the time to read bytes, a share of which lies in the caches."""
        rate = self.read_alone_bytes_per_s if alone else 0.0
        memory_s = n_bytes / (rate or self.read_bytes_per_s)
        if not self.cached_bytes_per_s:
            return memory_s
        return cached * n_bytes / self.cached_bytes_per_s + (1.0 - cached) * memory_s

    def host_s(self, n_sequences: int, cached: float) -> float:
        """Return the host overhead of a step that finds a share of its bytes in the caches.

        The host code competes with the weights, so that its share is the same.
        """
        cold = max(self.step_s, self.cold_step_s)
        first = cached * self.step_s + (1.0 - cached) * cold
        return first + (n_sequences - 1) * self.sequence_s

    def matrix_s(
        self,
        weights: float,
        operations: float,
        format: str,
        arithmetic: str,
        cached: float = 0.0,
        alone: bool = False,
    ) -> float:
        """Return the time to read matrices and multiply activations by them.

        Parameters
        ----------
        weights : float
            Number of weights read.
        operations : float
            Operations with them, 2 for each weight and row.
        format : str
            Weight format, a name of `nbflow_kernels.FORMATS`.
        arithmetic : str
            Arithmetic of the products, one of `operations_per_s`.
        cached : float
            Share of the bytes that the caches hold, 0..1.
        alone : bool
            No other rank reads memory.
        """
        facts = nk.FORMATS[format]
        if arithmetic == "int8" and facts.block_size == 1 and "f32" in self.operations_per_s:
            arithmetic = "f32"  # float weights have no int8 kernels
        known = like(format, self.formats)
        rates = self.formats.get(known, {}).get(arithmetic)
        taken = (
            self.computing_s(weights, operations, arithmetic)
            if rates is None
            else rates.seconds(weights, operations / (2.0 * weights), cached, alone)
        )
        if rates is not None and known == format:
            return taken  # measured with its bytes
        return max(taken, self.read_s(weights * facts.bits_per_weight / 8, cached, alone))

    def computing_s(self, weights: float, operations: float, arithmetic: str) -> float:
        """Return the time of products without reading memory, by the rates of all formats."""
        decode = self.weights_per_s.get(arithmetic, 0.0)
        return operations / self.operations(arithmetic) + (weights / decode if decode else 0.0)

    def arithmetic(self, wanted: str | None) -> str:
        """Return the name of an arithmetic; None for the device's first."""
        return next(iter(self.operations_per_s)) if wanted is None else wanted


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
    captured_latency_s: float = 0.0
    """Latency of an all-reduce or all-gather that is a call of the step's graph (threads of one
    process); 0: that of a message."""

    def send_s(self, n_bytes: float) -> float:
        """Return the time of one message."""
        return self.latency_s + n_bytes / self.bytes_per_s

    def all_gather_s(self, n: int, n_bytes: float) -> float:
        """Return the time of an all-gather of `n_bytes` from each of `n` ranks."""
        latency_s = self.captured_latency_s or self.latency_s
        return latency_s + (n - 1) * n_bytes / self.bytes_per_s if n > 1 else 0.0

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
    join_s: float = 0.0
    """Time to begin and end a step on ranks that are threads of one process, which waits for all of
    them after each step; 0 for ranks that are processes."""
    measurement: int = 0
    """`nbflow.planner.measure_machine.VERSION`; 0 if written by hand."""

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
    words = (
        "name", "description", "sources", "join_s", "measurement", "ranks_per_host", "devices",
        "links",
    )  # fmt: skip
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
        join_s=_positive(table.get("join_s", 0.0), f"{where}: join_s", zero=True),
        measurement=check_value(table.get("measurement", 0), f"{where}: measurement", int),
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
    checks = {"name": _text, "formats": _formats, "cached": _curve, "kv_formats": _kv_formats}
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
    """Return the times of products by weight format and arithmetic."""
    return {
        format: {
            name: _curves(Rates, times, f"{where}.{format}.{name}")
            for name, times in check_keys(of_format, f"{where}.{format}", ARITHMETICS).items()
        }
        for format, of_format in check_keys(entry, where, tuple(nk.FORMATS)).items()
    }


def _kv_formats(entry: Any, where: str) -> dict[str, CacheRates]:
    """Return the times of attention by cache format."""
    return {
        name: CacheRates(**_fields(CacheRates, times, f"{where}.{name}", {}))
        for name, times in check_keys(entry, where, tuple(KINDS)).items()
    }


def _curve(entry: Any, where: str) -> CacheCurve:
    found: CacheCurve = _curves(CacheCurve, entry, where)
    return found


def _curves(kind: type[Any], entry: Any, where: str) -> Any:
    """Return a dataclass of equally long lists of numbers."""
    names = [each.name for each in dataclasses.fields(kind)]
    check_keys(entry, where, tuple(names))
    values = {}
    for name in names:
        numbers = entry.get(name)
        if not isinstance(numbers, list):
            raise UsageError(f"{where}.{name} must be a list of numbers, got {numbers!r:.80}")
        values[name] = tuple(_positive(n, f"{where}.{name}", zero=True) for n in numbers)
    found = kind(**values)
    found.check(where)
    return found


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
        wanted = "a number from 0" if zero else "a positive number"
        raise UsageError(f"{where} must be {wanted}, got {value!r}")
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
            **{k: _rounded(v) for k in ("join_s", "measurement") if (v := getattr(machine, k))},
            "ranks_per_host": machine.ranks_per_host,
            "devices": devices,
            "links": {k: _rounded(dataclasses.asdict(v)) for k, v in machine.links.items()},
        }
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_rounded(v) for v in value]
    return value if isinstance(value, str | int) else float(f"{value:.4g}")

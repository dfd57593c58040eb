"""Rows of `nbflow bench`: measurement, read bandwidth, peer, and table."""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import truediv
from typing import Any

import nbflow
from nbflow.benchmark.timing import Test, Timed, make_requests, time_test
from nbflow.cli.options import is_printing_rank
from nbflow.engine.llm import BATCH_MULTI_STEP_S
from nbflow.program import build
from nbflow.program.cost import StepShape, op_cost
from nbflow.utils.system import processor_name
from nbflow.utils.tables import text_table

PAUSE_S = 0.02
"""Pause between a peer's repetition and ours, for its threads to stop spinning."""


@dataclass
class Samples:
    """Measurements of one test, an entry per round."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of nbflow."""
    peer_seconds: list[float] = field(default_factory=list)
    """Seconds of the peer."""
    bandwidths: list[float] = field(default_factory=list)
    """Read bandwidth in bytes per second (`nbflow.benchmark.bandwidth`), right before and after a
    repetition.  With several ranks on the host, one measures it once, before the first round."""
    peer: str | None = None
    """Name of the peer."""


def samples(model: nbflow.LLM, test: Test, repeats: int, peer: Timed | None) -> Samples:
    """Run a test `repeats` times, alternating with the read probe and the peer."""
    from nbflow.benchmark.bandwidth import Bandwidth

    taken = Samples(peer=None if peer is None else peer.name)
    probe = Bandwidth(model, is_printing_rank(model))
    time_test(model, test)  # compiles
    if peer is not None:
        peer.seconds(test)
    for i in range(repeats):
        probes = probe.measures(i)
        time.sleep(PAUSE_S)
        before = probe.read() if probes else 0.0
        taken.seconds.append(time_test(model, test))
        if probes:
            after = probe.read() if probe.repeats else before
            taken.bandwidths.append((before + after) / 2)
        if peer is not None:  # like ours, it starts with cold caches
            taken.peer_seconds.append(peer.seconds(test))
    return taken


def make_row(
    model: nbflow.LLM,
    weights: str,
    arguments: argparse.Namespace,
    memory: list[dict[str, int]],
    test: Test,
    taken: Samples,
) -> dict[str, Any]:
    """Return one row, with times in seconds and sizes in bytes."""
    rates = [test.n_tokens / s for s in taken.seconds]
    held, devices = model.memory(), model.devices()
    row = {
        "model": model.spec.name,
        "weights": weights or "as stored",
        "activations": arguments.activations,
        "kv": arguments.kv,
        "kv_rotation": arguments.kv_rotation,
        "state": arguments.state,
        "kv_keys": arguments.kv_keys,
        "partition": model.plan.partition,
        "all_reduce": arguments.all_reduce,
        "all_reduce_error": model.all_reduce_error(),
        "threads_per_rank": model.threads,
        "batch": test.batch,
        "test": test.name,
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_spread": _spread(rates),
        "samples_s": taken.seconds,
        "weight_bytes": sum(m["weight_bytes"] for m in memory),
        "kv_bytes": sum(m["kv_bytes"] for m in held),
        "matrix_bytes_per_step": sum(m["matrix_bytes"] for m in memory),
        "cache_bytes_per_step": cache_bytes_per_step(model, test, arguments.kv),
        "devices": [f"{d['device']}: {d['hardware']}" for d in devices],
        "vram_bytes": vram_bytes(held, devices),
        "processor": processor_name(),
        "python": platform.python_version(),
    }
    return row | _limit(row, test, taken) | _peer(test, taken)


def cache_bytes_per_step(model: nbflow.LLM, test: Test, kv: str) -> int:
    """Return the bytes of keys, values and states that a decode step reads and writes.

    Of all sequences, at the mean length of the generation, by the cost model of the program.
    """
    shape = StepShape(test.batch, 1, test.context - test.n_gen // 2, test.batch)
    program = build(model.spec)
    return round(sum(op_cost(program, op, shape, _no_bits, kv).kv_bytes for op in program.ops))


def _no_bits(name: str) -> float:
    return 0.0


def vram_bytes(ranks: list[dict[str, int]], devices: list[dict[str, str]]) -> int | None:
    """Return what the model takes on its devices by the drivers' count; None without a device.

    Ranks on one device have one reading.
    """
    found = {
        d["key"]: rank["vram_bytes"] for rank, d in zip(ranks, devices, strict=True) if d["key"]
    }
    return sum(found.values()) if found else None


def _spread(values: list[float]) -> float:
    """Return half the interquartile range."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return (quartiles[2] - quartiles[0]) / 2


def _limit(row: dict[str, Any], test: Test, taken: Samples) -> dict[str, Any]:
    """Return bytes read per second and their share of the read bandwidth (generation only)."""
    bandwidth = statistics.median(taken.bandwidths) if taken.bandwidths else None
    rate = share = None
    if test.n_gen and not test.n_prompt:
        each = row["matrix_bytes_per_step"] + row["cache_bytes_per_step"]
        rates = [each * test.n_gen / s for s in taken.seconds]
        rate = statistics.median(rates)
        if len(taken.bandwidths) == len(rates):
            share = statistics.median(map(truediv, rates, taken.bandwidths))
        elif bandwidth is not None:
            share = rate / bandwidth
    return {"read_bandwidth_bytes_per_s": bandwidth, "read_bytes_per_s": rate, "read_share": share}


def _peer(test: Test, taken: Samples) -> dict[str, Any]:
    if taken.peer is None:
        return {}
    ratios = [theirs / ours for theirs, ours in zip(taken.peer_seconds, taken.seconds, strict=True)]
    return {
        "peer": taken.peer,
        "peer_tokens_per_s": statistics.median(test.n_tokens / s for s in taken.peer_seconds),
        "peer_samples_s": taken.peer_seconds,
        "times_peer": statistics.median(ratios),
        "times_peer_spread": _spread(ratios),
    }


def profile(model: nbflow.LLM) -> str:
    """Generate 64 tokens and return a table of this rank's time by kind of op."""
    from nbflow_kernels.cpu.parallel_for import kernel_seconds

    if len(model.workers) != 1:
        return "(a profile is made for one rank per process: partition '0', or mpirun)"
    executor = model.workers[0].executor
    for _ in model.run_requests(make_requests(model, 1, 8, 1), BATCH_MULTI_STEP_S):
        pass
    executor.seconds = defaultdict(float)
    with kernel_seconds() as kernels:
        started = time.perf_counter()
        for _ in model.run_requests(make_requests(model, 1, 64, 1), BATCH_MULTI_STEP_S):
            pass
        total = time.perf_counter() - started
    by_kind, executor.seconds = executor.seconds, None
    in_ops, in_kernels = sum(by_kind.values()), sum(kernels)
    lines = [(f"  {kind}", s) for kind, s in sorted(by_kind.items(), key=lambda item: -item[1])] + [
        ("all ops", in_ops),
        ("outside ops (scheduling, sampling)", total - in_ops),
        ("inside compiled kernels", in_kernels),
        ("outside compiled kernels", total - in_kernels),
    ]
    return "\n".join(
        f"{name:<36} {s / 64 * 1e6:9.1f} us/token {s / total:7.1%}" for name, s in lines
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table."""

    def some(key: str, form: Callable[[Any], str]) -> Callable[[dict[str, Any]], str]:
        return lambda r: "" if r.get(key) is None else form(r[key])

    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("model", lambda r: r["model"]),
        ("weights", lambda r: r["weights"]),
        ("act", lambda r: r["activations"]),
        ("MiB", lambda r: f"{r['weight_bytes'] / 2**20:.1f}"),
        ("kv", lambda r: r["kv"]),
        ("partition", lambda r: f"`{r['partition']}`"),
        ("threads", lambda r: str(r["threads_per_rank"])),
        ("batch", lambda r: str(r["batch"])),
        ("test", lambda r: r["test"]),
        ("t/s", lambda r: f"{r['tokens_per_s']:,.1f} ± {r['tokens_per_s_spread']:,.1f}"),
        ("GB/s", some("read_bytes_per_s", lambda v: f"{v / 1e9:.2f}")),
        ("% read", some("read_share", lambda v: f"{v:.0%}")),
    ]
    if rows[0].get("vram_bytes") is not None:
        columns.insert(4, ("VRAM MiB", some("vram_bytes", lambda v: f"{v / 2**20:.1f}")))
    if "peer" in rows[0]:
        columns += [
            ("peer t/s", some("peer_tokens_per_s", lambda v: f"{v:,.1f}")),
            ("x peer", lambda r: f"{r['times_peer']:.2f} ± {r['times_peer_spread']:.2f}"),
        ]
    made = text_table(
        [name for name, _ in columns], [[f(r) for _, f in columns] for r in rows], markdown=True
    )
    bandwidth = statistics.median(r["read_bandwidth_bytes_per_s"] for r in rows) / 1e9
    hardware = rows[0]["processor"]
    if rows[0].get("vram_bytes") is not None:
        hardware = "; ".join(dict.fromkeys(rows[0]["devices"]))
    note = f"{hardware}; read bandwidth {bandwidth:.{1 if bandwidth >= 1 else 4}f} GB/s"
    if "peer" in rows[0]:
        note += f"; peer: {rows[0]['peer']}, alternating with ours"
    return f"{made}\n\n{note}"

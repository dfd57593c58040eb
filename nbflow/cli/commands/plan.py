"""`nbflow plan`: predict memory, communication and speed of a model's partitions on a machine.

It predicts every sensible partition of the ranks, or those of ``--partition``, and marks the best
for each batch.  It needs no weights: the name of a model, a ``config.json`` or the header of a
weight file is enough.  With ``--max-kld`` it chooses weight and cache formats, too.
``nbflow plan --measure -o FILE`` describes this machine: under mpirun its ranks, otherwise
``--ranks N`` threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbflow_kernels as nk
from nbflow.cli.joint_plan import (
    add_joint_arguments,
    check_not_joint,
    planned_machine,
    run_joint,
)
from nbflow.cli.option_arguments import add_options
from nbflow.cli.options import (
    add_kv_arguments,
    add_plugins_argument,
    numbers,
)
from nbflow.options import LoadOptions
from nbflow.planner import (
    Machine,
    PlannedModel,
    Prediction,
    RunConfig,
    Workload,
    best,
    compare,
    fitting_workload,
    known_machines,
    machine_toml,
    planned_model,
    with_shares,
)
from nbflow.utils.tables import text_table
from nbflow_kernels.errors import UsageError, unknown_name

SHARES = ("speed", "memory")
BATCHES = "1,8,64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="name of a model (llama3.1_70b), config.json, model file, or weights in any format",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help=f"machine description: {', '.join(known_machines())}, or a file",
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, help="number of ranks (all of the machine)"
    )
    parser.add_argument(
        "--partition",
        metavar="P",
        action="append",
        default=[],
        help="partition to predict (all sensible ones); repeatable",
    )
    parser.add_argument(
        "--shares", metavar="BY", help="uneven shares in proportion to the devices' speed or memory"
    )
    parser.add_argument(
        "--weights", metavar="FMT",
        help="weight format, e.g. q4 (as stored); with --measure, formats to time, e.g. q4,q8_0",
    )  # fmt: skip
    add_kv_arguments(parser)
    parser.add_argument(
        "--activations", metavar="A", help="arithmetic: f32, f16, bf16, int8 (the machine's first)"
    )
    add_options(parser, LoadOptions, ["all_reduce", "kv_host_percent", "embeddings_on_host"])
    parser.add_argument("--batch", help=f"batch sizes ({BATCHES}); with --max-kld one (1)")
    shorter = "or fewer in a short context"
    parser.add_argument("--prompt", type=int, metavar="N", help=f"prompt tokens (512, {shorter})")
    parser.add_argument(
        "--generate", type=int, metavar="N", help=f"generated tokens (128, {shorter})"
    )
    parser.add_argument("--context", type=int, metavar="N", help="KV cache tokens of each sequence")
    parser.add_argument(
        "--measure", action="store_true", help="measure this machine and describe it"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="output of --measure (stdout); with --max-kld a folder",
    )
    add_plugins_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_joint_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.measure:
        return _measure(arguments)
    if arguments.model is None:
        raise UsageError("name a MODEL to plan for, or --measure this machine")
    if arguments.max_kld is not None:
        return run_joint(arguments)
    check_not_joint(arguments)
    if arguments.output is not None:
        raise UsageError("-o is for --measure and --max-kld")
    machine = planned_machine(arguments.machine, arguments.vram, arguments.ranks)
    model = planned_model(arguments.model, arguments.weights).with_state_format(arguments.state)
    setting = RunConfig(
        kv=arguments.kv,
        activations=arguments.activations,
        kv_host=arguments.kv_host_percent / 100,
        embedding_on_host=arguments.embeddings_on_host,
        all_reduce=arguments.all_reduce,
    )
    partitions = arguments.partition
    if arguments.shares is not None:
        partitions = _shared(arguments, machine)
    plans = []
    for batch in numbers(arguments.batch or BATCHES, "--batch"):
        lengths = arguments.prompt, arguments.generate, arguments.context
        workload = fitting_workload(model.spec, batch, *lengths)
        plans.append((workload, *compare(model, machine, workload, setting, partitions or None)))
    if arguments.partition and not any(predictions for _, predictions, _ in plans):
        raise UsageError("; ".join(plans[0][2].values()))
    if arguments.json:
        print(json.dumps(_facts(model, machine, plans), indent=2))
    else:
        _print(model, machine, plans, detailed=len(arguments.partition) == 1)
    return 0


def _shared(arguments: argparse.Namespace, machine: Machine) -> list[str]:
    if arguments.shares not in SHARES:
        raise unknown_name("--shares", arguments.shares, SHARES)
    if not arguments.partition:
        raise UsageError("--shares needs a --partition whose parts it sets, e.g. '0;1'")
    return [with_shares(p, machine, arguments.shares) for p in arguments.partition]


def _measure(arguments: argparse.Namespace) -> int:
    """Measure and describe this machine."""
    for name in ("model", "machine", "vram", "max_kld", "partition", "shares", "batch", "json"):
        if getattr(arguments, name):
            option = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise UsageError(f"--measure describes this machine and takes no {option}")
    from nbflow.engine.load import load
    from nbflow.planner.measure_machine import FORMATS, ROUNDS, measure_machine

    formats: Sequence[str] = FORMATS
    if arguments.weights is not None:
        formats = tuple(nk.FORMATS[name.strip()].name for name in arguments.weights.split(","))
    machine = measure_machine(load, arguments.ranks, formats=formats, rounds=ROUNDS)
    if machine is None:  # another rank writes
        return 0
    text = machine_toml(machine)
    if arguments.output is None:
        print(text, end="")
    else:
        Path(arguments.output).write_text(text, encoding="utf-8")
        print(f"wrote {arguments.output}: {machine.description}")
    return 0


Plans = list[tuple[Workload, list[Prediction], dict[str, str]]]


def _facts(model: PlannedModel, machine: Machine, plans: Plans) -> dict[str, Any]:
    """Return everything as plain data."""
    return {
        "model": model.spec.name,
        "n_parameters": model.spec.n_parameters,
        "weights": model.weights or "as stored",
        "machine": dataclasses.asdict(machine),
        "predictions": [row(p) for _, predictions, _ in plans for p in predictions],
        "refused": plans[0][2],
    }


def row(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as plain data with derived numbers."""
    return {
        **dataclasses.asdict(prediction),
        "fits": prediction.fits,
        "prefill_tokens_per_s": prediction.prefill_tokens_per_s,
        "decode_tokens_per_s": prediction.decode_tokens_per_s,
        "request_s": prediction.request_s,
    }


def _print(model: PlannedModel, machine: Machine, plans: Plans, detailed: bool) -> None:
    stored = model.weights or "as stored"
    n, n_ranks = model.spec.n_parameters, len(machine.devices)
    size = f"{n / 1e9:.1f}e9" if n >= 1e9 else f"{n / 1e6:.1f}e6"
    print(f"{model.spec.name}: {size} parameters, weights {stored}")
    print(f"{machine.name}: {n_ranks} rank{'s' * (n_ranks > 1)}, {machine.description}")
    for workload, predictions, _ in plans:
        print(
            f"\nbatch {workload.batch}: prompts of {workload.prompt} tokens, {workload.generate} "
            f"generated, cache for {workload.kv_tokens}"
        )
        _print_table(predictions)
    if not any(p.fits for _, predictions, _ in plans for p in predictions):
        print(
            "\nno partition fits: plan for more ranks (--ranks, --vram), a smaller format "
            "(--weights), or less (--batch, --prompt, --generate, --context)"
        )
    for partition, reason in plans[0][2].items():
        print(f"\nnot possible: {partition}: {reason}")
    if detailed and plans[-1][1]:
        _print_ranks(plans[-1][1][0])


def _print_table(predictions: list[Prediction]) -> None:
    """Print a line for each partition; mark the best for each objective."""
    marks = _marks(predictions)
    columns = (
        "partition", "kind", "GB/rank", "free GB", "prefill/s", "decode/s", "ms/token", "groups",
        "idle", "",
    )  # fmt: skip
    rows = []
    for p in predictions:
        held = max(r.weight_bytes + r.kv_bytes + r.workspace_bytes for r in p.ranks) / 1e9
        free = min(r.free_bytes for r in p.ranks) / 1e9
        sizes = f"{held:.{1 if held >= 1 else 3}f}", f"{free:.1f}"
        speeds = f"{p.prefill_tokens_per_s:,.0f}", f"{p.decode_tokens_per_s:,.1f}"
        steps = f"{p.decode_s * 1e3:.2f}", p.micro_batches, f"{p.bubble:.0%}"
        rows.append((p.partition, p.kind, *sizes, *speeds, *steps, marks[p.partition]))
    print(text_table(columns, rows))


def _marks(predictions: list[Prediction]) -> dict[str, str]:
    """Return the last column of each partition."""
    marks = {p.partition: "" if p.fits else "does not fit" for p in predictions}
    if any(p.fits for p in predictions) and len(predictions) > 1:
        marks[best(predictions, "latency").partition] = "<- latency"
        fastest = best(predictions, "throughput").partition
        marks[fastest] = "<- latency, throughput" if marks[fastest] else "<- throughput"
    return marks


def _print_ranks(prediction: Prediction) -> None:
    """Print layers, heads and bytes of each rank."""
    columns = (
        "rank", "layers", "heads", "kv heads", "ffn", "weights GB", "cache GB", "host GB",
        "sent MB/token",
    )  # fmt: skip
    rows = []
    for r in prediction.ranks:
        spans = [
            "none" if a == b else f"{a}-{b - 1}" for a, b in (r.layers, r.heads, r.kv_heads, r.ffn)
        ]
        held = [f"{n / 1e9:.2f}" for n in (r.weight_bytes, r.kv_bytes, r.host_bytes)]
        rows.append((r.rank, *spans, *held, f"{r.sent_bytes_per_token / 1e6:.2f}"))
    print(f"\n{text_table(columns, rows)}")

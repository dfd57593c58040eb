"""`nbflow plan --max-kld`: weight formats, cache formats and partition together.

The chosen policy, the plan and a sweep that measures it are written to a folder, with ``-o``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import nbflow_kernels as nk
from nbflow.calibration.allocation import JointPlan, Sensitivity, plan_jointly, read_sensitivity
from nbflow.calibration.allocation.divergence import DivergenceProbe
from nbflow.calibration.allocation.sensitivity import measure_sensitivity
from nbflow.cli.allocation_options import show_progress
from nbflow.options import LoadOptions
from nbflow.planner import (
    Machine,
    RunConfig,
    Workload,
    fitting_workload,
    known_machines,
    load_machine,
    machine_toml,
    planned_model,
)
from nbflow.quantization.policy import write_policy
from nbflow.utils.tables import text_table
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import kv_formats

WEIGHTS = "q2_k,q3_k,q4_k,q5_k,q6_k,q8_0"
"""Candidates for matrices."""
CACHES = "f16,q8_0,q5_0,q4_0"
"""Candidates for keys and for values."""
ASSUMED = "rtx4090"
"""Machine whose rates are taken where --vram is given without --machine."""
GIB = float(1 << 30)


def add_joint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--vram", metavar="GIB,...",
        help="memory of each rank in GiB, e.g. 24,24, instead of the --machine's "
        f"(without --machine: ranks like {ASSUMED})",
    )  # fmt: skip
    group = parser.add_argument_group(
        "formats, cache and partition together",
        "-o is a folder for policy.toml, plan.json, machine.toml and check.toml, a sweep that "
        "measures the choice.",
    )
    group.add_argument(
        "--max-kld", type=float, metavar="X",
        help="choose the fastest weight formats, cache formats and partition with a predicted "
        "divergence of at most X nats per token from the stored model",
    )  # fmt: skip
    group.add_argument("--formats", metavar="F,...", help=f"candidates for matrices ({WEIGHTS})")
    group.add_argument(
        "--kv-formats", metavar="F,...", help=f"candidates for keys and for values ({CACHES})"
    )
    group.add_argument(
        "--sensitivity", metavar="FILE",
        help="measured losses (JSON): read if FILE exists, else measured and written there",
    )  # fmt: skip
    group.add_argument(
        "--optimize", choices=("latency", "throughput"),
        help="time per token, or of whole requests (throughput)",
    )  # fmt: skip
    group.add_argument("--quantizer", help="of the matrices (search)")
    group.add_argument("--text", metavar="FILE", help="text to measure on (the model's eval.txt)")
    group.add_argument("--tokens", type=int, metavar="N", help="tokens of --text to use (2048)")


ONLY_JOINT = ("formats", "kv_formats", "sensitivity", "optimize", "quantizer", "text", "tokens")


def check_not_joint(arguments: argparse.Namespace) -> None:
    """Raise if an option of the joint choice is given without ``--max-kld``."""
    for name in ONLY_JOINT:
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for --max-kld X; give both")


def planned_machine(machine: str | None, vram: str | None, n_ranks: int | None) -> Machine:
    """Return the described machine, with the memory of ``--vram``."""
    if vram is None:
        if machine is None:
            raise UsageError(
                f"name a --machine: {', '.join(known_machines())}, or a file that `nbflow plan "
                "--measure -o FILE` has written, or give the memory of each rank: --vram 24,24"
            )
        found = load_machine(machine)
        return found.with_ranks(n_ranks or len(found.devices))
    memory = [_gib(text) for text in vram.split(",")]
    if n_ranks not in (None, len(memory)):
        raise UsageError(f"--ranks {n_ranks} and --vram {vram} disagree: it has {len(memory)}")
    found = load_machine(machine or ASSUMED).with_ranks(len(memory))
    devices = zip(found.devices, memory, strict=True)
    return dataclasses.replace(
        found, devices=tuple(dataclasses.replace(d, memory_bytes=m * GIB) for d, m in devices)
    )


def _gib(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"--vram takes the GiB of each rank, e.g. 24,24, got {text!r}")
    return number


def run_joint(arguments: argparse.Namespace) -> int:
    """Choose, print and write."""
    if arguments.weights is not None or arguments.kv != LoadOptions.kv:
        raise UsageError(
            "--max-kld chooses weights and cache: name candidates with --formats and --kv-formats"
        )
    if arguments.shares is not None:
        raise UsageError("--shares is for a --partition without --max-kld; leave one of them out")
    batch = arguments.batch or "1"
    if not batch.isdecimal():
        raise UsageError(f"--max-kld plans for one --batch, got {batch!r}")
    machine = planned_machine(arguments.machine, arguments.vram, arguments.ranks)
    model = planned_model(arguments.model).with_state_format(arguments.state)
    lengths = arguments.prompt, arguments.generate, arguments.context
    workload = fitting_workload(model.spec, int(batch), *lengths)
    config = RunConfig(
        activations=arguments.activations,
        kv_host=arguments.kv_host_percent / 100,
        embedding_on_host=arguments.embeddings_on_host,
        all_reduce=arguments.all_reduce,
    )
    known = _sensitivity(arguments)
    plan = plan_jointly(
        model, machine, workload, known, arguments.max_kld, config=config,
        objective=arguments.optimize or "throughput", partitions=arguments.partition or None,
    )  # fmt: skip
    facts = plan_facts(plan, machine, arguments.max_kld)
    if arguments.output is not None:
        _write(Path(arguments.output), plan, facts, machine, known, arguments)
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(plan, machine, workload, arguments)
    return 0


def _sensitivity(arguments: argparse.Namespace) -> Sensitivity:
    """Read the losses, or measure them on the text."""
    weights = _candidates(arguments.formats)
    caches = _candidates(arguments.kv_formats)
    if weights is not None:
        weights = [nk.FORMATS[name].name for name in weights]
    if caches is not None:
        caches = [kv_formats(name)[0].name for name in caches]
    path = None if arguments.sensitivity is None else Path(arguments.sensitivity)
    if path is not None and path.exists():
        known = read_sensitivity(path)
        for name, given in (("quantizer", arguments.quantizer), ("n_tokens", arguments.tokens)):
            if given is not None and given != known.facts[name]:
                option = "tokens" if name == "n_tokens" else name
                raise UsageError(
                    f"{path} was measured with --{option} {known.facts[name]}, got {given}; name "
                    "another file to measure again"
                )
        return known.restricted(weights, caches)
    probe = DivergenceProbe(arguments.model, arguments.text, n_tokens=arguments.tokens or 2048)
    known = measure_sensitivity(
        arguments.model, weights or WEIGHTS.split(","), caches or CACHES.split(","), probe,
        quantizer=arguments.quantizer or "search", progress=show_progress,
    )  # fmt: skip
    if path is not None:
        known.write(path)
    return known


def _candidates(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def plan_facts(plan: JointPlan, machine: Machine, max_kld: float) -> dict[str, Any]:
    """Return a plan as plain data, for ``--json`` and plan.json."""
    found = plan.prediction
    return {
        "machine": machine.name,
        "max_kld": max_kld,
        "partition": found.partition,
        "kv": plan.kv,
        "predicted_kld_nats": plan.kld,
        "predicted_weights_kld_nats": plan.weights_kld,
        "predicted_kv_kld_nats": plan.kv_kld,
        "predicted_prefill_tokens_per_s": found.prefill_tokens_per_s,
        "predicted_decode_tokens_per_s": found.decode_tokens_per_s,
        "workload": dataclasses.asdict(found.workload),
        "ranks": [dataclasses.asdict(rank) for rank in found.ranks],
        "formats": plan.formats,
    }


def check_sweep(
    plan: JointPlan,
    policy: Path,
    machine: str,
    on_devices: bool,
    known: Sensitivity,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Return a sweep file that measures the plan, and each format that it mixes, alone."""
    workload = plan.prediction.workload
    settings: dict[str, Any] = {
        "model": arguments.model, "quantizer": known.facts["quantizer"], "kv": plan.kv,
        "partition": plan.prediction.partition, "batch": workload.batch,
        "prompt": workload.prompt, "decode": workload.generate, "machine": machine,
        "eval_tokens": known.facts["n_tokens"], "eval_window": known.facts["window"],
    }  # fmt: skip
    if arguments.activations is not None:
        settings["activations"] = arguments.activations
    if arguments.state != LoadOptions.state:
        settings["state"] = arguments.state
    if arguments.text is not None:
        settings["eval_text"] = str(Path(arguments.text).resolve())
    if on_devices:
        settings["device"] = "cuda"
    return {
        "sweep": {
            "name": "check",
            "description": f"Plan for a divergence of at most {arguments.max_kld:g} nats per token",
            "measures": ["divergence", "perplexity", "prefill", "decode", "memory"],
        },
        "settings": settings,
        "axes": {"weights": [str(policy), *sorted(set(plan.formats.values()))]},
    }


def _write(
    folder: Path,
    plan: JointPlan,
    facts: dict[str, Any],
    machine: Machine,
    known: Sensitivity,
    arguments: argparse.Namespace,
) -> None:
    """Write policy.toml, plan.json, machine.toml and check.toml."""
    import tomli_w  # late: most commands write no TOML

    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    policy = {"predicted_loss": plan.weights_kld, "max_kld": arguments.max_kld}
    write_policy(folder / "policy.toml", plan.formats, policy)
    (folder / "plan.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    (folder / "machine.toml").write_text(machine_toml(machine), encoding="utf-8")
    on_devices = any(device.is_accelerator for device in machine.devices)
    sweep = check_sweep(
        plan, folder / "policy.toml", str(folder / "machine.toml"), on_devices, known, arguments
    )
    (folder / "check.toml").write_text(tomli_w.dumps(sweep), encoding="utf-8")


def _print(
    plan: JointPlan, machine: Machine, workload: Workload, arguments: argparse.Namespace
) -> None:
    """Print the choice."""
    found = plan.prediction
    counts: dict[str, int] = {}
    for format in plan.formats.values():
        counts[format] = counts.get(format, 0) + 1
    assumed = f"; rates of {machine.name} are assumed" if arguments.machine is None else ""
    print(
        f"{len(machine.devices)} ranks of {machine.name}{assumed}\n"
        f"batch {workload.batch}: prompts of {workload.prompt} tokens, {workload.generate} "
        f"generated, cache for {workload.kv_tokens}\n\n"
        f"partition  {found.partition} ({found.kind})\n"
        f"weights    {', '.join(f'{n} {f}' for f, n in sorted(counts.items()))}\n"
        f"kv         {plan.kv}\n"
        f"divergence {plan.kld:.4g} nats per token predicted ({plan.weights_kld:.4g} weights, "
        f"{plan.kv_kld:.4g} cache), at most {arguments.max_kld:g}\n"
        f"speed      {found.decode_tokens_per_s:,.1f} tokens/s generated, "
        f"{found.prefill_tokens_per_s:,.0f} of prompts\n"
    )
    columns = ("rank", "device", "weights GB", "cache GB", "buffers GB", "free GB")
    rows = []
    for r in found.ranks:
        held = (r.weight_bytes, r.kv_bytes, r.workspace_bytes, r.free_bytes)
        rows.append((r.rank, r.device, *(f"{n / 1e9:.3f}" for n in held)))
    print(text_table(columns, rows))
    if arguments.output is not None:
        print(f"\nmeasure it: nbflow sweep {Path(arguments.output) / 'check.toml'}")

"""Options that several commands share."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from typing import Any

import nbflow
from nbflow.engine.memory_plan import MemoryPlan, plan_memory
from nbflow.engine.placement import Placement, is_host
from nbflow.parallel import world
from nbflow_kernels import load_formats
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers import DAMPING


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the options of `nbflow.load`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Hugging Face folder, .safetensors, .pth, .gguf, llama2.c .bin, a spec (tiny_python)",
    )
    parser.add_argument(
        "--weights",
        metavar="FMT",
        help="weight format, e.g. q4, or a policy file, .toml (default: as stored)",
    )
    parser.add_argument(
        "--encoder",
        metavar="E",
        default="best",
        help="how --weights are encoded: best, plain, gptq, hqq, outliers, awq, hadamard+gptq, ...",
    )
    parser.add_argument(
        "--importance", metavar="FILE", help="what nbflow imatrix found, for the encoder"
    )
    add_gptq_arguments(parser)
    parser.add_argument(
        "--outliers",
        type=float,
        metavar="R",
        default=0.0,
        help="share of weights kept exactly beside the format, 0..0.05 (0)",
    )
    parser.add_argument(
        "--formats",
        action="append",
        default=[],
        metavar="FILE",
        help="Python file that registers weight formats; it is executed (repeatable)",
    )
    parser.add_argument(
        "--activations",
        metavar="A",
        default="f32",
        help="arithmetic of the products: f32, bf16, or int8 (f32)",
    )
    add_kv_arguments(parser)
    parser.add_argument(
        "--partition",
        metavar="P",
        default="0",
        help="'0;1' by layer, '0&1' by tensor, '0&1;2&3' hybrid, '0:3;1' uneven, '0/1' replicas; "
        "auto: what the planner finds best for the ranks of mpirun",
    )
    parser.add_argument(
        "--optimize",
        metavar="AIM",
        default="latency",
        help="what --partition auto is best at: latency, or throughput, perhaps with replicas "
        "(latency)",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="its description for --partition auto (measured if not given; nbflow plan --measure)",
    )
    parser.add_argument(
        "--exchange", metavar="E", default="f32", help="partial sums are sent as f32 or q8 (f32)"
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="auto (cpu), cpu, cuda, or emulator (CUDA kernels on the CPU, checked; very slow)",
    )
    parser.add_argument(
        "--no-graphs", dest="graphs", action="store_false",
        help="start each kernel of a step by itself on CUDA devices, not a graph of all",
    )  # fmt: skip
    parser.add_argument(
        "--spec",
        metavar="FILE",
        help="spec file, or name of a model (llama2_7b_chat), to use instead of the checkpoint's "
        "own",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer file")
    parser.add_argument("--max-context", type=int, metavar="N", help="shorten the context")
    parser.add_argument("--threads", type=int, metavar="N", help="threads per rank")
    add_placement_arguments(parser)


def add_kv_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the format of the key/value cache, in our words and in llama.cpp's."""
    parser.add_argument(
        "--kv",
        metavar="FMT[/FMT]",
        default="f16",
        help="KV cache format: f16, q8_0, ...; two are those of keys and of values (f16)",
    )
    for side, name in enumerate(("keys", "values")):
        parser.add_argument(
            f"-ct{name[0]}", f"--cache-type-{name[0]}", metavar="FMT", dest="kv",
            action=_OneSide, side=side, help=f"format of the {name}, in place of what --kv says",
        )  # fmt: skip


class _OneSide(argparse.Action):
    """Put one side's format into ``keys/values``, and leave the other one as it is."""

    def __init__(self, *, side: int, **options: Any) -> None:
        super().__init__(**options)
        self._side = side

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        keys, slash, other = getattr(namespace, self.dest).partition("/")
        names = [keys, other if slash else keys]
        names[self._side] = values
        setattr(namespace, self.dest, names[0] if names[0] == names[1] else "/".join(names))


def add_gptq_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the encoder gptq."""
    parser.add_argument(
        "--act-order", action="store_true", help="gptq: columns with the largest inputs first"
    )
    parser.add_argument(
        "--damping",
        type=float,
        default=DAMPING,
        metavar="D",
        help=f"gptq: added to the second moments' diagonal, in units of its mean ({DAMPING})",
    )


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option that shows what memory is taken."""
    parser.add_argument(
        "--plan",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
        help="print the memory that each rank takes for N requests at once (1), and load nothing",
    )


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what lies in the host's memory, or is computed by it."""
    parser.add_argument(
        "--kv-host-percent", type=float, default=0.0, metavar="P",
        help="layers of a device whose keys and values lie in the host's memory, the last ones (0)",
    )  # fmt: skip
    parser.add_argument(
        "--embeddings-on-host",
        action="store_true",
        help="keep a device's token embedding in the host's memory",
    )
    parser.add_argument(
        "--cpu-layers", type=int, default=0, metavar="N",
        help="first layers that the host computes, with a device for the others (0)",
    )  # fmt: skip


def print_plan(arguments: argparse.Namespace) -> bool:
    """Print the memory plan if it is asked for; return whether it is."""
    if arguments.plan is None:
        return False
    if arguments.plan < 1:
        raise UsageError(f"--plan must be at least 1, got {arguments.plan}")
    for file in arguments.formats:
        load_formats(file)
    plan = _plan(arguments, _placement(arguments))
    if world().rank == 0:
        print(plan)
    return True


def _plan(arguments: argparse.Namespace, placement: dict[str, Any]) -> MemoryPlan:
    """Return what the model will take for as many requests as asked for, or one."""
    names = (
        "spec", "weights", "outliers", "encoder", "activations", "kv", "partition", "max_context",
        "device", "exchange", "optimize", "machine",
    )  # fmt: skip
    options = {name: getattr(arguments, name) for name in names}
    sequences = getattr(arguments, "plan", None) or 1
    return plan_memory(arguments.model, max_sequences=sequences, **options, **placement)


def load_model(arguments: argparse.Namespace, **changes: Any) -> nbflow.Model:
    """Load the model that the arguments describe, after the formats it may be stored in."""
    for file in arguments.formats:
        load_formats(file)
    options: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in (
            "weights",
            "outliers",
            "encoder",
            "importance",
            "act_order",
            "damping",
            "activations",
            "kv",
            "partition",
            "optimize",
            "machine",
            "exchange",
            "device",
            "graphs",
            "spec",
            "tokenizer",
            "max_context",
            "threads",
        )
    }
    placement = _placement(arguments)
    if not is_host(arguments.device) and world().rank == 0 and _can_plan(arguments):
        print(_plan(arguments, placement), file=sys.stderr)
    return nbflow.load(arguments.model, **{**options, **placement, **changes})


def _can_plan(arguments: argparse.Namespace) -> bool:
    """Return whether the checkpoint and the arguments alone say who holds what."""
    return arguments.partition != "auto" and "/" not in arguments.partition


def _placement(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what is to lie in the host's memory; without a device, say that it does already."""
    names = ("kv_host_percent", "embeddings_on_host", "cpu_layers")
    placement = Placement(**{name: getattr(arguments, name) for name in names})
    if not is_host(arguments.device):
        return dataclasses.asdict(placement)
    if placement.note:
        print(f"note: {placement.note}", file=sys.stderr)
    return {}


def speaks(model: nbflow.Model) -> bool:
    """Return whether this process is the one that prints."""
    comm = world()
    return comm.size == 1 or comm.rank == min(model.plan.numbers)


def numbers(text: str, option: str) -> list[int]:
    """Return the numbers of a list: 1,8 or first-last+step or first-last*factor."""
    result = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)([+*])(\d+))?", part.strip())
        if not match:
            raise UsageError(
                f"{option} must be numbers like 128 or 1,8 or 64-512+64 or 1-8*2, got {part!r}"
            )
        first, last, sign, step = match.groups()
        value, end = int(first), int(last or first)
        if sign and (int(step) < (2 if sign == "*" else 1) or (value == 0 and sign == "*")):
            raise UsageError(f"{option}: the range {part!r} does not advance")
        while value <= end:
            result.append(value)
            if not sign:
                break
            value = value * int(step) if sign == "*" else value + int(step)
    return result

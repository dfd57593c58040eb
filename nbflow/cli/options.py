"""Options shared by several commands."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from typing import Any

import nbflow
from nbflow.cli.option_arguments import add_options, given_options
from nbflow.cli.progress_bar import load_progress_bar
from nbflow.distributed import world
from nbflow.distributed.device import is_host
from nbflow.options import LoadOptions
from nbflow.planner.memory_plan import MemoryPlan, plan_memory
from nbflow_kernels.errors import UsageError


def add_model_arguments(parser: argparse.ArgumentParser, optional: str = "") -> None:
    """Add MODEL and the options of `nbflow.load`; `optional` names the default of MODEL."""
    text = "Hugging Face folder, .safetensors, .pth, .gguf, llama2.c .bin, or name of a spec"
    parser.add_argument(
        "model", metavar="MODEL", nargs="?" if optional else None,
        help=f"{text} ({optional})" if optional else text,
    )  # fmt: skip
    group = parser.add_argument_group("loading", "see docs/options.md")  # after the command's own
    add_options(group, LoadOptions)
    _add_kv_sides(group)


def add_plugins_argument(parser: argparse.ArgumentParser) -> None:
    """Add the plugins, which `nbflow.cli.main` imports before the command runs."""
    add_options(parser, LoadOptions, ["plugins"])


def add_kv_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the formats of KV cache and states, with llama.cpp's options for keys and values."""
    add_options(parser, LoadOptions, ["kv", "state"])
    _add_kv_sides(parser)


def _add_kv_sides(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    for side, name in enumerate(("keys", "values")):
        parser.add_argument(
            f"-ct{name[0]}", f"--cache-type-{name[0]}", metavar="FMT", dest="kv",
            default=LoadOptions.kv, action=_OneSide, side=side,
            help=f"KV cache format of the {name}, overriding --kv",
        )  # fmt: skip


class _OneSide(argparse.Action):
    """Action that replaces one side of ``keys/values``."""

    def __init__(self, *, side: int, **options: Any) -> None:
        super().__init__(**options)
        self._side = side

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        both, semicolon, layers = getattr(namespace, self.dest).partition(";")
        keys, slash, other = both.partition("/")
        names = [keys, other if slash else keys]
        names[self._side] = values
        found = names[0] if names[0] == names[1] else "/".join(names)
        setattr(namespace, self.dest, found + semicolon + layers)


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option that prints the memory plan."""
    parser.add_argument(
        "--plan",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
        help="print the memory plan of each rank for N concurrent requests (1), without loading",
    )


def print_plan(arguments: argparse.Namespace) -> bool:
    """Print the memory plan with --plan; return True if it was printed."""
    if arguments.plan is None:
        return False
    if arguments.plan < 1:
        raise UsageError(f"--plan must be at least 1, got {arguments.plan}")
    plan = _plan(arguments)
    if world().rank == 0:
        print(plan)
    return True


def _plan(arguments: argparse.Namespace) -> MemoryPlan:
    """Return the memory plan for the requests of --plan, or one."""
    from nbflow.engine.load import measure

    sequences = getattr(arguments, "plan", None) or 1
    return plan_memory(
        arguments.model, load_options(arguments), max_sequences=sequences, measure=measure
    )


def load_options(arguments: argparse.Namespace) -> LoadOptions:
    """Return the options of `nbflow.load` from the arguments."""
    options = LoadOptions(**given_options(LoadOptions, arguments))
    for name in {"optimize", "machine"} & options.given().keys():
        if options.partition != "auto":
            raise UsageError(f"--{name} is for --partition auto, got {options.partition!r}")
    return options


def load_model(arguments: argparse.Namespace, **changes: Any) -> nbflow.LLM:
    """Load the model of the arguments."""
    options = load_options(arguments).replaced(changes)
    can_plan = arguments.partition != "auto" and "/" not in arguments.partition
    if not is_host(arguments.device) and world().rank == 0 and can_plan:
        print(_plan(arguments), file=sys.stderr)
    with load_progress_bar() if world().rank == 0 else contextlib.nullcontext():
        return nbflow.load(arguments.model, options)


def is_printing_rank(model: nbflow.LLM) -> bool:
    """Return True on the rank that prints."""
    comm = world()
    return comm.size == 1 or comm.rank == min(model.plan.numbers)


_MOST_NUMBERS = 10_000


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
            if len(result) > _MOST_NUMBERS:
                raise UsageError(f"{option}: {text!r:.80} has more than {_MOST_NUMBERS} numbers")
            if not sign:
                break
            value = value * int(step) if sign == "*" else value + int(step)
    return result

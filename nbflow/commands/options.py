"""Options that several commands share."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import nbflow
from nbflow.engine.memory_plan import MemoryPlan, plan_memory
from nbflow.execute.place import is_host
from nbflow.option_fields import OptionField, OptionSet, accepts, default_text, fields
from nbflow.options import LoadOptions
from nbflow.parallel import world
from nbflow_kernels import load_formats
from nbflow_kernels.errors import UsageError


def add_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    kind: type[OptionSet],
    names: Collection[str] = (),
    *,
    converters: Mapping[str, Callable[[str], Any]] = MappingProxyType({}),
    unset: bool = False,
) -> None:
    """Add an option for each field of an option set that the command line has.

    Parameters
    ----------
    parser : ArgumentParser or group
        Where the options are added.
    kind : type of OptionSet
        The option set.
    names : collection of str
        Fields to add; by default all.
    converters : mapping
        Field -> function from the text on the command line to the value.
    unset : bool
        True to leave options that are not given at None instead of the field's default.
    """
    for known in fields(kind).values():
        if (known.name in names) if names else known.option.cli:
            settings = _argument(known, converters.get(known.name))
            default = None if unset else known.default
            parser.add_argument(*known.flags, dest=known.name, default=default, **settings)


def _argument(known: OptionField, converter: Callable[[str], Any] | None) -> dict[str, Any]:
    """Return the keywords of `add_argument` for a field."""
    here, default = known.option, default_text(known)
    ending = f" ({default})" if default and known.default is not True else ""
    settings: dict[str, Any] = {"help": f"{here.help}{'; repeatable' * here.repeat}{ending}"}
    if known.hint is bool:
        on: Any = argparse.BooleanOptionalAction if known.default else "store_true"
        return {**settings, "action": on}
    settings |= {"action": _Checked, "known": known, "converter": converter}
    if not here.repeat and accepts(known.outside_hint, [1]):
        return {**settings, "type": int, "nargs": "+", "metavar": "ID"}
    hints = {int: "N", float: "X"}
    kind = next((number for number in hints if known.outside_hint is number), str)
    return {**settings, "type": kind, "metavar": here.metavar or hints.get(kind, "TEXT")}


class _Checked(argparse.Action):
    """Store a value that its field accepts; else raise the field's `UsageError`."""

    def __init__(
        self, *, known: OptionField, converter: Callable[[str], Any] | None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._known, self._converter = known, converter

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        value = values if self._converter is None else self._converter(values)
        if self._known.option.repeat:
            value = [*(getattr(namespace, self.dest) or ()), value]
        setattr(namespace, self.dest, self._known.checked(value, outside=True))


def given_options(kind: type[OptionSet], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a set that arguments have, without those that are None."""
    found = {name: getattr(arguments, name, None) for name in fields(kind)}
    return {name: value for name, value in found.items() if value is not None}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the options of `nbflow.load`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Hugging Face folder, .safetensors, .pth, .gguf, llama2.c .bin, a spec (tiny_python)",
    )
    add_options(parser, LoadOptions)
    _add_kv_sides(parser)
    parser.add_argument(
        "--formats",
        action="append",
        default=[],
        metavar="FILE",
        help="Python file that registers weight formats; it is executed (repeatable)",
    )


def add_kv_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the format of the KV cache, with llama.cpp's names for its two sides."""
    add_options(parser, LoadOptions, ["kv"])
    _add_kv_sides(parser)


def _add_kv_sides(parser: argparse.ArgumentParser) -> None:
    for side, name in enumerate(("keys", "values")):
        parser.add_argument(
            f"-ct{name[0]}", f"--cache-type-{name[0]}", metavar="FMT", dest="kv",
            default=LoadOptions.kv, action=_OneSide, side=side,
            help=f"format of the {name}, in place of that of --kv",
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


def print_plan(arguments: argparse.Namespace) -> bool:
    """Print the memory plan if it is asked for; return whether it is."""
    if arguments.plan is None:
        return False
    if arguments.plan < 1:
        raise UsageError(f"--plan must be at least 1, got {arguments.plan}")
    for file in arguments.formats:
        load_formats(file)
    plan = _plan(arguments)
    if world().rank == 0:
        print(plan)
    return True


def _plan(arguments: argparse.Namespace) -> MemoryPlan:
    """Return the memory plan for as many requests as asked for, or one."""
    sequences = getattr(arguments, "plan", None) or 1
    return plan_memory(arguments.model, load_options(arguments), max_sequences=sequences)


def load_options(arguments: argparse.Namespace) -> LoadOptions:
    """Return the options of `nbflow.load` that arguments have."""
    return LoadOptions(**given_options(LoadOptions, arguments))


def load_model(arguments: argparse.Namespace, **changes: Any) -> nbflow.Model:
    """Load the model that the arguments describe, after the formats it may be stored in."""
    for file in arguments.formats:
        load_formats(file)
    options = load_options(arguments).replaced(changes)
    if not is_host(arguments.device) and world().rank == 0 and _can_plan(arguments):
        print(_plan(arguments), file=sys.stderr)
    return nbflow.load(arguments.model, options)


def _can_plan(arguments: argparse.Namespace) -> bool:
    """Return whether the checkpoint and the arguments alone say who holds what."""
    return arguments.partition != "auto" and "/" not in arguments.partition


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

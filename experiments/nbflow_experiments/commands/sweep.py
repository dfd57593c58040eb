"""``nbflow sweep FILE|MODEL``: measure every point of a sweep.

FILE is a sweep in TOML, or a grid of Weights & Biases in YAML or JSON.  Every setting is also an
option that takes one value or a list; without a file the options define the sweep.

Example::

    mpirun -n 4 nbflow sweep experiments/sweeps/demo.toml
    nbflow sweep experiments/sweeps/demo.toml --model my_model.gguf --weights q4,q3h
    nbflow sweep my_model.gguf -p 128-512*2 -n 32 -b 1,8 --weights f16,q8,q4
    nbflow report runs/demo
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nbflow.cli.options import add_plugins_argument
from nbflow_experiments.config.sweep_file import is_sweep_file
from nbflow_experiments.settings import SETTINGS
from nbflow_experiments.sweep.resume_loop import Policy
from nbflow_experiments.sweep.shard import Shard
from nbflow_experiments.sweep.sweep import SweepOptions, run_group, run_sweep
from nbflow_kernels.errors import UsageError

_SHORT = {
    "model": ("-m",),
    "prompt": ("-p", "--n-prompt"),
    "decode": ("-n", "--n-gen"),
    "batch": ("-b",),
    "repeats": ("-r",),
    "threads": ("-t",),
}
"""Aliases of options; llama-bench's where it has them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nbflow sweep``."""
    add = parser.add_argument
    add(
        "file", metavar="FILE|MODEL", nargs="?",
        help="sweep file (.toml, or a W&B grid in .yaml or .json), or a model to sweep without one",
    )  # fmt: skip
    _add_settings(parser)
    for name, text in (
        ("--dry-run", "print the points and estimated bytes, run nothing"),
        ("--resume", "continue with an existing results folder"),
        ("--retry-failed", "like --resume, and run failed points again"),
        ("--merge", "write the tables of finished points, run nothing"),
        ("--isolate", "run each point in a subprocess"),
        ("--fail-fast", "stop at the first point that fails"),
    ):
        add(name, action="store_true", help=text)
    for name, metavar, text in (
        ("--shard", "I/N", "run the I-th of N parts, I from 0; others may run in the same folder"),
        ("--launcher", "CMD", "starts MPI ranks for points, e.g. 'srun -n {ranks}' (or mpirun)"),
        ("--name", "NAME", "name of the results folder"),
        ("--measures", "A,B", "measures, replacing the file's"),
    ):  # fmt: skip
        add(name, metavar=metavar, help=text)
    add("--timeout", type=float, metavar="S",
        help="end a point after S seconds (status 'timeout'); isolates the points")  # fmt: skip
    add("--retries", type=int, default=0, metavar="N", help="run a point that fails N times more")
    add("--set", action="append", default=[], dest="overrides", metavar="SECTION.NAME=VALUE",
        help="replace a value of the sweep file, e.g. axes.batch=[1,2] (repeatable)")  # fmt: skip
    add_plugins_argument(parser)
    add("--out", type=Path, default=Path("runs"), metavar="DIR",
        help="folder in which the results folder is made (default: runs)")  # fmt: skip
    add("--group", type=Path, help=argparse.SUPPRESS)  # for child processes


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "settings",
        "each takes a value or a list (128,256); integers also ranges: 1..4, 8-32+8, 16-128*2",
    )
    for setting in SETTINGS.values():
        group.add_argument(
            f"--{setting.name.replace('_', '-')}",
            *_SHORT.get(setting.name, ()),
            action="append",
            dest=f"setting_{setting.name}",
            metavar="LIST",
            help=setting.meaning,
        )


def _lists(args: argparse.Namespace) -> tuple[Path | None, dict[str, list[str]]]:
    """Return the sweep file, if any, and the settings given as options."""
    lists = {
        name: texts for name in SETTINGS if (texts := getattr(args, f"setting_{name}")) is not None
    }
    if args.file is None or is_sweep_file(args.file):
        if args.file is None and "model" not in lists:
            raise UsageError("name a sweep file or a model: nbflow sweep FILE, nbflow sweep MODEL")
        return None if args.file is None else Path(args.file), lists
    if "model" in lists:
        raise UsageError(
            f"two models: {args.file} and --model {lists['model'][0]}; for several models give "
            f"--model A,B alone"
        )
    return None, {"model": [args.file], **lists}


def run(args: argparse.Namespace) -> int:
    """Run the sweep; return the exit code (see `nbflow_experiments.sweep.sweep.run_sweep`)."""
    if args.group is not None:
        return run_group(args.group)
    file, lists = _lists(args)
    named = {"name": args.name, "measures": args.measures and args.measures.split(",")}
    changes = [f"sweep.{key}={json.dumps(value)}" for key, value in named.items() if value]
    return run_sweep(
        SweepOptions(
            file=file,
            out=args.out,
            overrides=(*args.overrides, *changes),
            lists=lists,
            dry_run=args.dry_run,
            resume=args.resume,
            retry_failed=args.retry_failed,
            plugins=tuple(args.plugins),
            shard=Shard.parse(args.shard) if args.shard else None,
            merge=args.merge,
            policy=Policy(args.retries, args.fail_fast, args.isolate, args.timeout),
            launcher=args.launcher,
        )
    )

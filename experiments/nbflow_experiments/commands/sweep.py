"""``nbflow sweep FILE``: measure every point of a sweep.

Example::

    mpirun -n 4 nbflow sweep experiments/demo.toml
    nbflow report runs/demo
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nbflow_experiments.schedule import Policy
from nbflow_experiments.shards import Shard
from nbflow_experiments.sweep import SweepOptions, run_sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nbflow sweep``."""
    parser.add_argument("file", metavar="FILE", type=Path, help="sweep file (TOML)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the points and estimated bytes, run nothing"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with an existing results folder"
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="like --resume, and run failed points again"
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="run the I-th of N parts, I from 0; others may run in the same folder at once",
    )
    parser.add_argument(
        "--merge", action="store_true", help="write the tables of what is there, run nothing"
    )
    parser.add_argument(
        "--isolate", action="store_true", help="run each point in a process of its own"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="end a point after S seconds (its status is 'timeout'); isolates the points",
    )
    parser.add_argument(
        "--retries", type=int, default=0, metavar="N", help="run a point that fails N times more"
    )
    parser.add_argument(
        "--fail-fast", action="store_true", help="stop at the first point that fails"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.NAME=VALUE",
        help="replace a value of the sweep file, e.g. axes.batch=[1,2] (repeatable)",
    )
    parser.add_argument(
        "--formats",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="Python file that registers weight formats; it is executed (repeatable)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="folder in which the results folder is made (default: runs)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the sweep; return the exit code (see `nbflow_experiments.sweep.run_sweep`)."""
    return run_sweep(
        SweepOptions(
            file=args.file,
            out=args.out,
            overrides=tuple(args.overrides),
            dry_run=args.dry_run,
            resume=args.resume,
            retry_failed=args.retry_failed,
            formats=tuple(args.formats),
            shard=Shard.parse(args.shard) if args.shard else None,
            merge=args.merge,
            policy=Policy(args.retries, args.fail_fast, args.isolate, args.timeout),
        )
    )

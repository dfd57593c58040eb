"""`nbflow quantize`: write a quantized checkpoint."""

from __future__ import annotations

import argparse
import json
from typing import Any

from nbflow.cli.allocation_options import (
    AllocationRun,
    add_allocation_arguments,
    allocation_facts,
    check_options,
    print_allocation,
    quantizer_options,
    write_policy_of,
)
from nbflow.cli.commands.inspect import printable
from nbflow.cli.option_arguments import add_options
from nbflow.conversion import WrittenCheckpoint, quantize_checkpoint
from nbflow.options import LoadOptions
from nbflow.utils.tables import text_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="model, as for nbflow run")
    parser.add_argument(
        "--to",
        metavar="FORMAT",
        help="weight format, e.g. q4 or q4_k, or a policy file (.toml); gptq, awq or "
        "compressed-tensors: a folder as these store it (gptq:uint4_g64 with another format)",
    )
    parser.add_argument(
        "-o", "--out", metavar="OUT", required=True, help="a .gguf, a .safetensors, or a folder"
    )
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help="format of matrices whose name matches; the first match wins (repeatable)",
    )
    add_options(parser, LoadOptions, ["quantizer", "importance", "act_order", "damping"])
    parser.add_argument(
        "--formats",
        action="append",
        default=[],
        metavar="F1,F2,...",
        help="candidate formats of --bits-per-weight (repeatable)",
    )
    add_options(parser, LoadOptions, ["spec", "plugins"])
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print the table, do not write OUT")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_allocation_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    check_options(arguments)
    chosen = None if arguments.bits_per_weight is None else AllocationRun(arguments)
    done = quantize_checkpoint(
        arguments.model,
        arguments.out,
        arguments.to if chosen is None else chosen.allocation.weight_formats,
        rules=arguments.rule,
        **quantizer_options(arguments),
        force=arguments.force,
        dry_run=arguments.dry_run,
    )
    check = None
    if chosen is not None:
        write_policy_of(chosen, arguments)
        check = chosen.check()
    if arguments.json:
        facts = _facts(done, arguments.dry_run)
        if chosen is not None:
            facts["allocation"] = allocation_facts(chosen.allocation, check)
        print(json.dumps(facts, indent=2))
        return 0
    if arguments.dry_run:
        _print_table(done)
    if chosen is not None:
        print_allocation(chosen.allocation, check)
    total = f"{len(done.tensors)} tensors, {done.n_bytes:,} bytes"
    print(f"{'would write' if arguments.dry_run else 'wrote'} {done.path} ({done.format}): {total}")
    for note in done.notes:
        print(f"note: {note}")
    return 0


def _facts(done: WrittenCheckpoint, dry_run: bool) -> dict[str, Any]:
    """Return plain data for ``--json``."""
    return {
        "path": str(done.path),
        "format": done.format,
        "written": not dry_run,
        "total_bytes": done.n_bytes,
        "notes": list(done.notes),
        "tensors": [
            {
                "name": t.name,
                "shape": list(t.shape),
                "stored": t.stored,
                "format": t.format,
                "bytes": t.n_bytes,
            }
            for t in done.tensors
        ],
    }


def _print_table(done: WrittenCheckpoint) -> None:
    """Print a line per tensor."""
    rows = [
        (
            printable(t.name),
            "x".join(map(str, t.shape)) or "scalar",
            t.stored,
            t.format,
            f"{t.n_bytes:,}",
        )
        for t in done.tensors
    ]
    print(text_table(("name", "shape", "stored", "format", "bytes"), rows))

"""`nbflow inspect`: tensors of a weight file in any readable format."""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatchcase
from typing import Any

from nbflow.checkpoint import WeightFile, open_weights
from nbflow.checkpoint.column_groups import ColumnGroups
from nbflow.checkpoint.column_scales import ScaledColumns
from nbflow.cli.options import add_plugins_argument
from nbflow.utils.tables import text_table
from nbflow_kernels.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "file", metavar="FILE", help="weight file or Hugging Face folder, of any readable format"
    )
    parser.add_argument(
        "--tensor", metavar="PATTERN", default="*", help="only tensors that match, e.g. '*.3.*'"
    )
    parser.add_argument(
        "--hash", action="store_true", help="add the SHA-256 of each tensor's stored bytes"
    )
    add_plugins_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    with open_weights(arguments.file) as weights:
        facts = _facts(weights, arguments.tensor, arguments.hash)
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    _print_table(facts["tensors"], facts["files"])
    n_files = len(facts["files"])
    print(
        f"{facts['format']}, {n_files} file{'s' * (n_files != 1)}, "
        f"{len(facts['tensors'])} tensors, {facts['total_bytes']:,} bytes"
    )
    if facts["config"] is not None:
        print(f"model_type {printable(facts['config'].get('model_type', 'not stated'))}")
    return 0


def _print_table(tensors: list[dict[str, Any]], files: list[str]) -> None:
    """Print a line for each tensor."""
    if not tensors:
        return
    columns = ["name", "dtype", "shape", "bytes", "file:offset"]
    rows = []
    for tensor in tensors:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        place = f"{files.index(tensor['file'])}:{tensor['offset']}"
        dtype = tensor["dtype"] + " act-order" * ("act_order" in tensor)
        dtype += " scaled-columns" * ("column_scales" in tensor)
        found = [printable(tensor["name"]), dtype, shape, f"{tensor['bytes']:,}", place]
        rows.append([*found, tensor["sha256"]] if "sha256" in tensor else found)
    if "sha256" in tensors[0]:
        columns.append("sha256")
    print(text_table(columns, rows))
    print()
    for i, file in enumerate(files):
        print(f"file {i}: {printable(file)}")


def printable(text: object) -> str:
    """Return text with control and unprintable characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def _facts(weights: WeightFile, pattern: str, with_hash: bool) -> dict[str, Any]:
    """Return the contents of the file as plain data."""
    names = [name for name in _names(weights) if fnmatchcase(name, pattern)]
    if not names and weights.names():
        raise UsageError(f"{weights.path}: no tensor matches {pattern!r}")
    return {
        "path": str(weights.path),
        "format": weights.format,
        "files": [str(path) for path in weights.files()],
        "config": weights.config(),
        "total_bytes": sum(weights.n_bytes(name) for name in names),
        "tensors": [_tensor(weights, name, with_hash) for name in names],
    }


def _names(weights: WeightFile) -> list[str]:
    """Return the names of all tensors except scales that belong to another tensor."""
    entries = [weights.entry(name) for name in weights.names()]
    joined = {part.name for e in entries if e.scaled is not None for part in e.scaled.parts}
    return [*weights.names(), *(name for name in weights.scales() if name not in joined)]


def _tensor(weights: WeightFile, name: str, with_hash: bool) -> dict[str, Any]:
    """Return the facts of one tensor."""
    entry = weights.entry(name)
    facts = {
        "name": name,
        "dtype": entry.stored_dtype,
        "shape": list(entry.shape),
        "bytes": weights.n_bytes(name),
        "file": str(entry.file.path),
        "offset": entry.offset,
    }
    if entry.scaled is not None:
        facts["scales"] = entry.scaled.scales.name
    if isinstance(weights.column_groups(name), ColumnGroups):
        facts["act_order"] = True
    if isinstance(entry.scaled, ScaledColumns):
        facts["column_scales"] = entry.scaled.factors.name
    if entry.strides is not None:
        facts["strides"] = list(entry.strides)
    if with_hash:
        facts["sha256"] = weights.sha256(name)
    return facts

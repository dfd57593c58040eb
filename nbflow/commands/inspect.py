"""`nbflow inspect`: what a weight file holds."""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatchcase
from typing import Any

from nbflow.weights import WeightFile, open_weights
from nbflow_kernels.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "file", metavar="FILE", help="weight file or Hugging Face folder, of any readable format"
    )
    parser.add_argument(
        "--tensor", metavar="PATTERN", default="*", help="only tensors that match, e.g. '*.3.*'"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    with open_weights(arguments.file) as weights:
        facts = _facts(weights, arguments.tensor)
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    tensors = facts["tensors"]
    width = max(len(tensor["name"]) for tensor in tensors)
    for tensor in tensors:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        print(f"{tensor['name']:<{width}}  {tensor['dtype']:<7} {shape:>14} {tensor['bytes']:>14,}")
    print(
        f"\n{facts['format']}, {len(facts['files'])} files, {len(tensors)} tensors, "
        f"{facts['total_bytes']:,} bytes"
    )
    if facts["config"] is not None:
        print(f"model_type {facts['config'].get('model_type', 'not stated')}")
    return 0


def _facts(weights: WeightFile, pattern: str) -> dict[str, Any]:
    """Return what the file holds as plain data."""
    names = [name for name in weights.names() if fnmatchcase(name, pattern)]
    if not names:
        raise UsageError(f"{weights.path}: no tensor matches {pattern!r}")
    tensors = [
        {
            "name": name,
            "dtype": weights.dtype(name),
            "shape": list(weights.shape(name)),
            "bytes": weights.n_bytes(name),
        }
        for name in names
    ]
    return {
        "path": str(weights.path),
        "format": weights.format,
        "files": [str(path) for path in weights.files()],
        "config": weights.config(),
        "total_bytes": sum(weights.n_bytes(name) for name in names),
        "tensors": tensors,
    }

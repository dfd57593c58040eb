"""``nbflow verify``: does a specification compute what another program computes.

``--against hf`` makes a small configuration from the model's config.json and a checkpoint with
random weights, and compares with transformers: logits whole, in pieces and on ranks, and values
layer by layer.  Weights of the model are not needed.  ``--against FILE.npz`` compares the model
itself with recorded values.

Example::

    nbflow verify FOLDER --spec my_family.toml --against hf
    nbflow verify FOLDER --against recorded.npz
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from nbflow.cli.options import add_plugins_argument
from nbflow.distributed.partition_notation import parse_replicas
from nbflow.spec import resolve
from nbflow.spec.family import family_of
from nbflow.spec.model_file import find_model_file
from nbflow.utils.json_file import read_object
from nbflow.utils.tables import text_table
from nbflow_experiments.verify.compare import TOLERANCE, Check, Report, compare
from nbflow_experiments.verify.recording import read_recording, with_layers
from nbflow_experiments.verify.shrink import shrink
from nbflow_experiments.verify.transformers_model import record
from nbflow_kernels.errors import UsageError

PARTITIONS = "0&1,0;1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="folder with config.json; with .npz a model as for nbflow run",
    )
    add("--spec", metavar="FILE", help="spec file instead of the checkpoint's own")
    add("--against", required=True, metavar="hf|FILE.npz",
        help="transformers, on a small random checkpoint; or recorded arrays ids (T,), logits "
        "(T, V) and optionally hidden (layers, T, E)")  # fmt: skip
    add("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE",
        help="change a key of the small config.json, VALUE in JSON (repeatable)")  # fmt: skip
    add("--full-size", action="store_true", help="keep the sizes of config.json")
    add("--tokens", type=int, default=40, metavar="N", help="length of the sequence (40)")
    add("--seed", type=int, default=0, metavar="N", help="seed of weights and tokens (0)")
    add("--partitions", default=PARTITIONS, metavar="P,P",
        help=f"partitions to compare, on ranks of this process ({PARTITIONS})")  # fmt: skip
    add("--keep", type=Path, metavar="DIR", help="write the small checkpoint to this new folder")
    add("--json", action="store_true", help="print one JSON object")
    add_plugins_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 1 if values differ."""
    if not 1 <= arguments.tokens <= 4096:
        raise UsageError(f"--tokens must be in 1..4096, got {arguments.tokens}")
    partitions = tuple(p for p in arguments.partitions.split(",") if p)
    for partition in partitions:
        parse_replicas(partition)  # raises on a wrong notation; models may still refuse a right one
    if arguments.against != "hf":
        if not arguments.against.endswith(".npz"):
            raise UsageError(f"--against must be hf or FILE.npz, got {arguments.against!r:.80}")
        resolved = resolve(arguments.model, spec=arguments.spec)
        recording = with_layers(read_recording(Path(arguments.against)), resolved.spec.n_layers)
        report = compare(resolved.path, resolved.spec, recording, arguments.spec, partitions)
        return _print(arguments, report, recording.source)
    config = _small_config(arguments)
    with contextlib.ExitStack() as stack:
        if arguments.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nbflow_verify_")))
        else:
            folder = arguments.keep
            if folder.exists():
                raise UsageError(f"--keep {folder}: exists; name a new folder")
            folder.mkdir(parents=True)
        recording = record(folder, config, arguments.tokens, arguments.seed)
        resolved = resolve(folder, spec=arguments.spec)
        report = compare(folder, resolved.spec, recording, arguments.spec, partitions)
        return _print(arguments, report, recording.source)


def _small_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of the small model."""
    path = Path(arguments.model) / "config.json"
    config = read_object(path, missing_ok=True)
    if config is None:
        raise UsageError(f"{path}: not found; --against hf needs a folder with config.json")
    if arguments.spec is None:
        family = family_of(config.get("model_type"), str(path))
    else:
        family = find_model_file(arguments.spec).family
    small: dict[str, Any] = dict(config) if arguments.full_size else shrink(config, family)
    for change in arguments.changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"--set must be KEY=VALUE, got {change!r:.80}")
        try:
            small[key] = json.loads(text)
        except json.JSONDecodeError:
            small[key] = text
    small.pop("quantization_config", None)  # the small checkpoint is float32
    small.pop("auto_map", None)  # code of the folder is never run
    return small


def _print(arguments: argparse.Namespace, report: Report, source: str) -> int:
    """Print the report; return the exit code."""
    if arguments.json:
        print(json.dumps(_facts(report, source), indent=1))
        return int(not report.agrees)
    shown = report.checks if report.agrees else [*report.values, *report.checks]
    rows = [(c.name, _error(c), _verdict(c), c.note) for c in shown]
    print(f"{arguments.model} compared with {source}; largest difference / largest number:\n")
    print(text_table(("value", "difference", "", ""), rows))
    if report.agrees:
        print("\nthe specification computes the same")
        return 0
    first = report.first or "not known: record hidden states, too"
    print(f"\nthe first value that differs: {first}")
    for text in report.remedies:
        print(f"with {text} in the specification the logits agree")
    return 1


def _facts(report: Report, source: str) -> dict[str, Any]:
    def plain(check: Check) -> dict[str, Any]:
        error = None if math.isnan(check.error) else check.error
        return {"name": check.name, "difference": error, "note": check.note}

    return {
        "source": source,
        "agrees": report.agrees,
        "tolerance": TOLERANCE,
        "first": report.first or None,
        "remedies": report.remedies,
        "checks": list(map(plain, report.checks)),
        "values": list(map(plain, report.values)),
    }


def _error(check: Check) -> str:
    return "" if math.isnan(check.error) else f"{check.error:.1e}"


def _verdict(check: Check) -> str:
    if math.isnan(check.error):
        return "not compared"
    return "same" if check.agrees else "DIFFERS"

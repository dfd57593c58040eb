"""`nbflow spec`: what a model is made of, and whether its checkpoint fits."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from nbflow.parallel import make_plan
from nbflow.program import build, fuse, partition
from nbflow.spec import ModelSpec, ResolvedModel, check, resolve
from nbflow.spec.explain import explain
from nbflow.spec.model_file import load_model_file
from nbflow.weights import open_weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL|FILE",
        help="Hugging Face folder, weight file or name of a model; a family or spec file (.toml) "
        "without weights is checked and explained",
    )
    parser.add_argument("--spec", metavar="FILE", help="spec file: the family and what differs")
    parser.add_argument("--tensors", action="store_true", help="list every tensor and its name")
    parser.add_argument("--program", action="store_true", help="print the op records of every rank")
    parser.add_argument(
        "--partition", metavar="P", default="0", help="partition for --program, e.g. '0&1'"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.model.endswith(".toml") and load_model_file(Path(arguments.model)).path is None:
        return _explain(Path(arguments.model), as_json=arguments.json)
    resolved = resolve(arguments.model, spec=arguments.spec)
    spec = resolved.spec
    with open_weights(resolved.path) as weights:
        check(spec, weights)
        dtypes = {ours: weights.dtype(theirs) for ours, theirs in _names(spec).items()}
    if arguments.program:
        for rank in make_plan(spec, arguments.partition).ranks:
            print(f"rank {rank.rank}: {fuse(partition(build(spec), rank))}\n")
        return 0
    if arguments.json:
        print(json.dumps(_facts(resolved, dtypes), indent=2))
        return 0
    for key, value in _rows(resolved, dtypes):
        print(f"{key:<18} {value}")
    if arguments.tensors:
        print()
        shapes, names = spec.tensor_shapes(), _names(spec)
        width = max(len(name) for name in shapes)
        for name, shape in shapes.items():
            print(f"{name:<{width}}  {shape!s:<16}  {dtypes[name]:<5} {names[name]}")
    return 0


def _explain(path: Path, *, as_json: bool) -> int:
    """Say where a model of this family, or spec file, gets every field from."""
    model_file, rows = explain(path)
    family = model_file.family
    if as_json:
        fields = {name: {"source": source, "meaning": doc} for name, source, doc in rows}
        print(json.dumps({"family": family.name, "fields": fields}, indent=2))
        return 0
    print(f"{path}: valid; {model_file.description or family.description}")
    if family.model_types:
        print(f"serves model_type {', '.join(family.model_types)}")
    width = max(len(name) for name, _, _ in rows)
    for name, source, _ in rows:
        print(f"  {name:<{width}}  {source}")
    print("tensors")
    for ours, theirs in {**family.tensors, **model_file.tensors}.items():
        print(f"  {ours:<34} {' or '.join(theirs)}")
    return 0


def _names(spec: ModelSpec) -> dict[str, str]:
    """Return our name -> the checkpoint's of every tensor."""
    return {name: spec.checkpoint_name(name) for name in spec.tensor_shapes()}


def _facts(resolved: ResolvedModel, dtypes: dict[str, str]) -> dict[str, Any]:
    """Return everything as plain data."""
    shapes, names = resolved.spec.tensor_shapes(), _names(resolved.spec)
    return {
        "spec": resolved.spec.as_dict(),
        "path": str(resolved.path),
        "tokenizer": None if resolved.tokenizer is None else str(resolved.tokenizer),
        "defaults": resolved.defaults,
        "n_parameters": sum(math.prod(shape) for shape in shapes.values()),
        "tensors": [
            {"name": name, "checkpoint_name": names[name], "shape": shape, "dtype": dtypes[name]}
            for name, shape in shapes.items()
        ],
    }


def _rows(resolved: ResolvedModel, dtypes: dict[str, str]) -> list[tuple[str, Any]]:
    """Return the lines of the printed form."""
    spec = resolved.spec
    n_parameters = sum(math.prod(shape) for shape in spec.tensor_shapes().values())
    fields = (
        "name", "family", "vocab_size", "hidden_size", "intermediate_size", "n_layers", "n_heads",
        "n_kv_heads", "head_dim", "max_context", "norm", "norm_eps", "activation", "gated",
        "sm_scale", "window", "logits_soft_cap", "tied_head", "bos_token_id", "eos_token_ids",
    )  # fmt: skip
    others = [
        (field.name, getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if field.default is not dataclasses.MISSING
        and field.name not in (*fields, "biases", "ignored_tensors")
        and getattr(spec, field.name) != field.default
    ]
    rope = f"{spec.rope.style}, theta {spec.rope.theta:g}, {spec.rope.dim} columns"
    return [
        *((name, getattr(spec, name)) for name in fields),
        ("rope", rope),
        *others,
        ("biases", ", ".join(sorted(spec.biases)) or "none"),
        ("parameters", f"{n_parameters:,}"),
        ("stored as", ", ".join(sorted(set(dtypes.values())))),
        ("weights", resolved.path),
        ("tokenizer", resolved.tokenizer or "none beside the weights"),
        ("defaults", resolved.defaults or "none"),
        ("checkpoint", f"fits: {len(dtypes)} tensors"),
    ]

"""`nbflow spec`: show a model specification and check its checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbflow.checkpoint import open_weights
from nbflow.cli.options import add_plugins_argument
from nbflow.distributed import make_plan
from nbflow.program import build, fuse, partition
from nbflow.spec import ModelSpec, ResolvedModel, check, known_models, published, resolve
from nbflow.spec.check_tensors import ranges
from nbflow.spec.explain import explain
from nbflow.spec.family import encoder_of
from nbflow.spec.model_file import ModelFile, is_spec_path, load_model_file
from nbflow.spec.model_names import model_name
from nbflow.utils.tables import text_table
from nbflow_kernels.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL|FILE",
        help="Hugging Face folder, weight file, name of a model, or a family or spec file (.toml) "
        "without weights to check and explain; also Inferflow's model_spec.json",
    )
    parser.add_argument(
        "--spec", metavar="FILE", help="spec file or name, instead of the checkpoint's own"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the models that have a specification"
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor and its name")
    parser.add_argument("--program", action="store_true", help="print the op records of every rank")
    parser.add_argument(
        "--partition", metavar="P", default="0", help="partition for --program, e.g. '0&1'"
    )
    parser.add_argument(
        "--toml", action="store_true", help="convert Inferflow's model_spec.json to a family file"
    )
    add_plugins_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    _refuse_unused(arguments)
    if arguments.list:
        return _list_models(as_json=arguments.json)
    if arguments.model is None:
        raise UsageError("MODEL is missing; 'nbflow spec --list' lists names")
    if arguments.toml:
        return _convert(Path(arguments.model))
    path = _without_weights(arguments.model)
    if path is not None and arguments.spec is None:
        model_file = load_model_file(path)
        if model_file.config:
            return _published(model_file, arguments)
        if arguments.program:
            raise UsageError(f"--program needs a model; {path} states no sizes ([config])")
        return _explain(path, as_json=arguments.json)
    resolved = resolve(arguments.model, spec=arguments.spec)
    spec = resolved.spec
    with open_weights(resolved.path) as weights:
        check(spec, weights)
        dtypes = {ours: weights.dtype(theirs) for ours, theirs in _names(spec).items()}
    if arguments.program:
        return _programs(spec, arguments.partition)
    if arguments.json:
        print(json.dumps(_facts(resolved, dtypes), indent=2))
        return 0
    _print([*_rows(spec), *_file_rows(resolved, dtypes)])
    if arguments.tensors:
        print()
        shapes, names = spec.tensor_shapes(), _names(spec)
        rows = [(name, shape, dtypes[name], names[name]) for name, shape in shapes.items()]
        print(text_table(("tensor", "shape", "dtype", "name in the file"), rows))
    return 0


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuse options that have no effect on what is printed."""
    if arguments.partition != "0" and not arguments.program:
        raise UsageError("--partition needs --program")
    given = [name for name in ("list", "toml", "program", "tensors") if getattr(arguments, name)]
    if arguments.json and {"program", "toml"} & set(given):
        given.append("json")
    if len(given) > 1:
        raise UsageError(f"--{given[0]} does not go with --{given[1]}")


def _without_weights(model: str) -> Path | None:
    """Return the path of a spec or family file without weights, or None."""
    path = Path(model)
    if not is_spec_path(path) and not path.exists():
        path = known_models().get(model_name(model) or "", path)
    return path if is_spec_path(path) and load_model_file(path).path is None else None


def _list_models(*, as_json: bool) -> int:
    """Print the models that come with the package, or have a specification there."""
    files = {name: load_model_file(path) for name, path in known_models().items()}
    rows = [
        (name, file.hub or "with the package", file.description, ", ".join(file.aliases))
        for name, file in files.items()
    ]
    columns = ("name", "weights", "description", "other names")
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=1))
    else:
        print(text_table(columns, rows))
    return 0


def _convert(path: Path) -> int:
    """Print a model_spec.json of Inferflow as TOML, notes on stderr."""
    from nbflow.compat.inferflow.model_spec_json import to_toml

    if path.suffix != ".json":
        raise UsageError(f"--toml converts a model_spec.json of Inferflow, got {str(path)!r:.80}")
    text, notes = to_toml(path)
    print(text, end="")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _weights_row(model_file: ModelFile) -> tuple[str, str]:
    """Return the printed row that says where the weights of a model file without a path are."""
    named = "name them as MODEL, and this as --spec"
    if model_file.hub is None:
        return "weights", f"none: {named}"
    return "weights", f"{model_file.hub} on the Hub: nbflow pull {model_file.name}; or {named}"


def _published(model_file: ModelFile, arguments: argparse.Namespace) -> int:
    """Print the specification of a model file with a ``[config]``."""
    spec = published(model_file)
    if arguments.program:
        return _programs(spec, arguments.partition)
    shapes = spec.tensor_shapes()
    if arguments.json:
        facts = _spec_facts(spec, model_file) | {
            "tensors": [{"name": name, "shape": shape} for name, shape in shapes.items()]
        }
        print(json.dumps(facts, indent=2))
        return 0
    _print(
        [
            ("description", model_file.description),
            *_rows(spec),
            ("prompt template", _template(model_file)),
            ("defaults", model_file.defaults or "none"),
            _weights_row(model_file),
        ]
    )
    if arguments.tensors:
        print()
        print(text_table(("tensor", "shape"), shapes.items()))
    return 0


def _programs(spec: ModelSpec, parts: str) -> int:
    """Print the op records of every rank."""
    for rank in make_plan(spec, parts).ranks:
        print(f"rank {rank.rank}: {fuse(partition(build(spec), rank))}\n")
    return 0


def _print(rows: list[tuple[str, Any]]) -> None:
    for key, value in rows:
        print(f"{key:<18} {value}")


def _explain(path: Path, *, as_json: bool) -> int:
    """Print the source of every field of a family or spec file."""
    model_file, rows = explain(path)
    family = model_file.family
    encoder = encoder_of(family)
    if as_json:
        print(json.dumps(_explained(model_file, rows), indent=2))
        return 0
    print(f"{path}: valid; {model_file.description or family.description}")
    if family.model_types:
        print(f"serves model_type {', '.join(family.model_types)}")
    if encoder is not None:
        print(f"encoder: {encoder.name} of {encoder.path}")
    width = max(len(name) for name, _, _ in rows)
    for name, source, _ in rows:
        print(f"  {name:<{width}}  {source}")
    if model_file.prompt_template is not None:
        print(f"  prompt template: {model_file.prompt_template!r}")
    if model_file.defaults:
        print(f"  defaults: {model_file.defaults}")
    if model_file.hub is not None:
        print("  {}: {}".format(*_weights_row(model_file)))
    print("tensors")
    for ours, theirs in {**family.tensors, **model_file.tensors}.items():
        print(f"  {ours:<34} {' or '.join(theirs)}")
    if encoder is not None:
        print("tensors of the encoder")
        for ours, theirs in encoder.tensors.items():
            print(f"  {ours:<34} {' or '.join(theirs)}")
    for note in model_file.notes:
        print(f"note: {note}")
    return 0


def _explained(model_file: ModelFile, rows: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """Return what `_explain` prints as JSON."""
    encoder = encoder_of(model_file.family)
    return {
        "family": model_file.family.name,
        "encoder": None if encoder is None else str(encoder.path),
        "hub": model_file.hub,
        "notes": model_file.notes,
        "fields": {name: {"source": source, "meaning": doc} for name, source, doc in rows},
        "prompt_template": model_file.prompt_template,
        "defaults": model_file.defaults,
    }


def _names(spec: ModelSpec) -> dict[str, str]:
    """Return the checkpoint's name of every tensor by ours."""
    return {name: spec.checkpoint_name(name) for name in spec.tensor_shapes()}


def _spec_facts(spec: ModelSpec, source: ModelFile | ResolvedModel) -> dict[str, Any]:
    """Return a specification, and what its source states about prompts, as plain data."""
    return {
        "spec": spec.as_dict(),
        "prompt_template": source.prompt_template,
        "defaults": source.defaults,
        "n_parameters": spec.n_parameters,
        "f16_bytes": 2 * spec.n_parameters,
    }


def _facts(resolved: ResolvedModel, dtypes: dict[str, str]) -> dict[str, Any]:
    """Return specification and tensors as plain data."""
    shapes, names = resolved.spec.tensor_shapes(), _names(resolved.spec)
    return _spec_facts(resolved.spec, resolved) | {
        "path": str(resolved.path),
        "tokenizer": None if resolved.tokenizer is None else str(resolved.tokenizer),
        "tensors": [
            {"name": name, "checkpoint_name": names[name], "shape": shape, "dtype": dtypes[name]}
            for name, shape in shapes.items()
        ],
    }


def _rows(spec: ModelSpec) -> list[tuple[str, Any]]:
    """Return the printed rows of a specification."""
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
        and field.name != "encoder"
        and getattr(spec, field.name) != field.default
    ]
    if spec.encoder is not None:
        encoder = spec.encoder
        kind = f"{encoder.family}, {encoder.n_layers} layers of width {encoder.hidden_size}"
        others.append(("encoder", f"{kind}, {encoder.n_heads} heads"))
    others = [(name, _shown(value)) for name, value in others]
    rope = f"{spec.rope.style}, theta {spec.rope.theta:g}, {spec.rope.dim} columns"
    return [
        *((name, getattr(spec, name)) for name in fields),
        ("rope", rope),
        *others,
        ("biases", ", ".join(sorted(spec.biases)) or "none"),
        ("parameters", f"{spec.n_parameters:,}"),
        ("bytes as f16", f"{2 * spec.n_parameters:,}"),
    ]


def _template(source: ModelFile | ResolvedModel) -> str:
    return "none" if source.prompt_template is None else repr(source.prompt_template)


def _shown(value: Any) -> Any:
    """Return a value as text, with sets of layers as ranges."""
    if isinstance(value, frozenset):
        return ranges(list(value)) if value else "none"
    if dataclasses.is_dataclass(value):
        entries = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return ", ".join(f"{name} {_shown(entry)}" for name, entry in entries)
    return value


def _file_rows(resolved: ResolvedModel, dtypes: dict[str, str]) -> list[tuple[str, Any]]:
    """Return the printed rows of a model's files."""
    return [
        ("stored as", ", ".join(sorted(set(dtypes.values())))),
        ("weights", resolved.path),
        ("tokenizer", resolved.tokenizer or "not found"),
        ("prompt template", _template(resolved)),
        ("defaults", resolved.defaults or "none"),
        ("checkpoint", f"fits: {len(dtypes)} tensors"),
    ]

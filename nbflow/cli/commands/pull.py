"""`nbflow pull`: download a model from the Hugging Face Hub."""

from __future__ import annotations

import argparse

from nbflow.checkpoint.hub import is_repo_name, pull
from nbflow.spec.model_file import find_model_file
from nbflow.spec.model_names import model_name, unknown_model
from nbflow_kernels.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model",
        metavar="NAME|ORG/NAME",
        help="name of a model with a specification (nbflow spec --list), or its name on the Hub",
    )
    parser.add_argument(
        "--file",
        metavar="PATTERN",
        help="weight files, e.g. '*Q4_K_M.gguf' (safetensors, else torch, else the only GGUF)",
    )
    parser.add_argument("--revision", default="main", help="branch, tag or commit (main)")
    parser.add_argument("--to", metavar="FOLDER", help="destination folder (the Hub's cache)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    path = pull(
        _repo(arguments.model),
        files=arguments.file,
        revision=arguments.revision,
        folder=arguments.to,
        report=lambda line: print(line, flush=True),
    )
    in_cache = arguments.to is None and arguments.revision == "main"
    run = arguments.model if in_cache else str(path)
    if not in_cache and not is_repo_name(arguments.model):
        run += f" --spec {arguments.model}"
    print(f"{path}\nrun it with: nbflow run {run} -p 'Hello'")
    return 0


def _repo(model: str) -> str:
    """Return the name of a model on the Hub."""
    if is_repo_name(model):
        return model
    name = model_name(model)
    if name is None:
        raise UsageError(f"{unknown_model('model', model)}; or give ORG/NAME, as on the Hub")
    model_file = find_model_file(name)
    if model_file.path is not None:
        raise UsageError(f"{model} comes with the package: nbflow run {model} -p 'Hello'")
    if model_file.hub is None:
        raise UsageError(f"the specification of {model} names no model of the Hub; give ORG/NAME")
    return model_file.hub

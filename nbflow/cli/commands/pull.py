"""`nbflow pull`: download a model from the Hugging Face Hub."""

from __future__ import annotations

import argparse

from nbflow.checkpoint.hub import pull


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("repo", metavar="ORG/NAME", help="the model's name, as on the Hub")
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
        arguments.repo,
        files=arguments.file,
        revision=arguments.revision,
        folder=arguments.to,
        report=lambda line: print(line, flush=True),
    )
    in_cache = arguments.to is None and arguments.revision == "main"
    print(f"{path}\nrun it with: nbflow run {arguments.repo if in_cache else path} -p 'Hello'")
    return 0

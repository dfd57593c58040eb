"""Options that several commands share."""

from __future__ import annotations

import argparse
from typing import Any

import nbflow
from nbflow.parallel import world


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the options of `nbflow.load`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Hugging Face folder, .safetensors, llama2.c .bin, or a spec's name (tiny_python)",
    )
    parser.add_argument(
        "--weights", metavar="FMT", help="weight format, e.g. q4 (default: as stored)"
    )
    parser.add_argument("--kv", metavar="FMT", default="f16", help="KV cache format: f16, f32")
    parser.add_argument(
        "--partition",
        metavar="P",
        default="0",
        help="'0;1' by layer, '0&1' by tensor, '0&1;2&3' hybrid",
    )
    parser.add_argument("--device", default="auto", help="auto or cpu")
    parser.add_argument(
        "--spec", metavar="FILE", help="spec file to use instead of the checkpoint's own"
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer file")
    parser.add_argument("--max-context", type=int, metavar="N", help="shorten the context")
    parser.add_argument("--threads", type=int, metavar="N", help="threads per rank")


def load_model(arguments: argparse.Namespace, **changes: Any) -> nbflow.Model:
    """Load the model that the arguments describe."""
    options: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in (
            "weights",
            "kv",
            "partition",
            "device",
            "spec",
            "tokenizer",
            "max_context",
            "threads",
        )
    }
    return nbflow.load(arguments.model, **{**options, **changes})


def speaks(model: nbflow.Model) -> bool:
    """Return whether this process is the one that prints."""
    comm = world()
    return comm.size == 1 or comm.rank == min(model.plan.numbers)

"""`nbflow fill-mask`: the most probable tokens in place of ``[MASK]``."""

from __future__ import annotations

import argparse
import dataclasses
import json

from nbflow.cli.options import add_model_arguments, is_printing_rank, load_model
from nbflow.engine.fill_mask import fill_mask
from nbflow.utils.tables import text_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("text", metavar="TEXT", help="text with [MASK] (RoBERTa: <mask>)")
    parser.add_argument("-k", "--top-k", type=int, default=5, metavar="N", help="tokens a mask (5)")
    parser.add_argument("--json", action="store_true", help="print JSON, a list for each mask")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    with load_model(arguments) as model:
        if not model.participates:
            return 0
        found = fill_mask(model, arguments.text, arguments.top_k)
        if not is_printing_rank(model):
            return 0
    if arguments.json:
        print(json.dumps([[dataclasses.asdict(f) for f in mask] for mask in found], indent=1))
        return 0
    for i, mask in enumerate(found, 1):
        if len(found) > 1:
            print(f"mask {i}")
        rows = [(f"{100 * f.score:.2f}%", f.token, f.token_str, f.sequence) for f in mask]
        print(text_table(("probability", "id", "token", "text"), rows))
    return 0

"""`nbflow tokenize`: the token ids of a text."""

from __future__ import annotations

import argparse
import json

from nbflow.tokenizer import load_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="model, or tokenizer file")
    parser.add_argument("text", metavar="TEXT", help="text to encode")
    parser.add_argument(
        "--add-special-tokens", action="store_true", help="add BOS and the like, as for a prompt"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    tokenizer = load_tokenizer(arguments.model)
    ids = tokenizer.encode(arguments.text, add_special_tokens=arguments.add_special_tokens)
    pieces = [tokenizer.piece(i) for i in ids]
    if arguments.json:
        facts = {"ids": ids, "pieces": pieces, "decoded": tokenizer.decode(ids)}
        print(json.dumps(facts, ensure_ascii=False))
        return 0
    for i, piece in zip(ids, pieces, strict=True):
        print(f"{i:>7}  {piece!r}")
    print(f"{len(ids)} tokens, vocabulary {tokenizer.vocab_size}")
    return 0

"""`nbflow tokenize`: show the tokens of a text or a conversation."""

from __future__ import annotations

import argparse
import json

from nbflow.cli.chat_options import add_chat_arguments, chat_ids, is_chat
from nbflow.spec import load_tokenizer
from nbflow_kernels.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="model, or tokenizer file")
    parser.add_argument("text", metavar="TEXT", nargs="?", help="text to encode")
    parser.add_argument(
        "--add-special-tokens", action="store_true", help="add BOS and the like, as for a prompt"
    )
    add_chat_arguments(parser)
    parser.add_argument("--ids", action="store_true", help="print the ids only, on one line")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    tokenizer = load_tokenizer(arguments.model)
    if is_chat(arguments):
        if arguments.add_special_tokens:
            raise UsageError(
                "--add-special-tokens does not go with --chat, whose template adds special tokens"
            )
        ids = chat_ids(tokenizer, arguments, arguments.text)
    elif arguments.text is None:
        raise UsageError("TEXT is missing")
    else:
        ids = tokenizer.encode(
            arguments.text,
            add_special_tokens=arguments.add_special_tokens,
            parse_special=arguments.parse_special,
        )
    pieces = [tokenizer.piece(i) for i in ids]
    if arguments.json:
        facts = {"ids": ids, "pieces": pieces, "decoded": tokenizer.decode(ids)}
        print(json.dumps(facts))
    elif arguments.ids:
        print(*ids)
    else:
        for i, piece in zip(ids, pieces, strict=True):
            print(f"{i:>7}  {piece!r}")
        print(f"{len(ids)} tokens, vocabulary {tokenizer.vocab_size}")
    return 0

"""Options of commands that take a conversation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nbflow.cli.option_arguments import read_argument
from nbflow.tokenization import Tokenizer
from nbflow.tokenization.tokenizer_config import read_template
from nbflow_kernels.errors import UsageError


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --chat and its options."""
    parser.add_argument(
        "--chat", action="store_true", help="apply the model's chat template to the text"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of --chat")
    parser.add_argument(
        "--messages",
        metavar="FILE",
        help="JSON list of messages (role, content) before the text; - is stdin",
    )
    parser.add_argument(
        "--template",
        metavar="T",
        help="chat template: a name (simple, chatml, vicuna-1.1, ...), a file, or its text",
    )
    parser.add_argument(
        "--continue-final-message", action="store_true", default=None,
        help="continue the last message of --messages instead of answering it",
    )  # fmt: skip
    parser.add_argument(
        "--parse-special", action="store_true", help="parse special tokens in the text"
    )


def is_chat(arguments: argparse.Namespace) -> bool:
    """Return True with --chat; refuse its options without it."""
    given = [
        option
        for option in ("system", "messages", "template", "continue_final_message")
        if getattr(arguments, option) is not None
    ]
    if given and not arguments.chat:
        raise UsageError(f"--{given[0].replace('_', '-')} needs --chat")
    return bool(arguments.chat)


def chat_ids(tokenizer: Tokenizer, arguments: argparse.Namespace, text: str | None) -> list[int]:
    """Return the token ids of the arguments' conversation."""
    from nbflow.tokenization.chat import encode_chat

    return encode_chat(
        tokenizer,
        _messages(arguments, text),
        read_chat_template(arguments.template),
        parse_special=arguments.parse_special,
        continue_final_message=bool(arguments.continue_final_message),
    )


def _messages(arguments: argparse.Namespace, text: str | None) -> list[dict[str, Any]]:
    """Return system message, messages of the file, and user message."""
    messages: list[dict[str, Any]] = []
    if arguments.system is not None:
        messages.append({"role": "system", "content": arguments.system})
    if arguments.messages is not None:
        from nbflow.tokenization.chat.messages import parse_messages

        messages += parse_messages(read_argument(arguments.messages), arguments.messages)
    if text is not None:
        messages.append({"role": "user", "content": text})
    if not messages:
        raise UsageError("--chat needs a text, or --messages FILE")
    return messages


def read_chat_template(given: str | None) -> str | None:
    """Return the text of a template file, or else the given name or text."""
    if given is None or "{" in given or not Path(given).is_file():
        return given
    return read_template(Path(given))

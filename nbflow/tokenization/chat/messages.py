"""A conversation: a list of messages, each with a role and content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nbflow_kernels.errors import UsageError, unknown_name

ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython", "documents")
"""Roles that published templates know."""

Message = Mapping[str, Any]


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation as a list of dictionaries.

    Parameters
    ----------
    messages : sequence of mapping
        Each with "role" (one of `ROLES`) and "content": a text, a list of parts
        (``{"type": "text", "text": ...}``), or None with "tool_calls".  Other keys are passed to
        the template.

    Raises
    ------
    UsageError
        If a message is not of this form.
    TypeError
        If `messages` is not a sequence of mappings.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise UsageError("messages must not be empty")
    return [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked(message: Message, where: str) -> dict[str, Any]:
    """Return one message."""
    if not isinstance(message, Mapping):
        raise TypeError(f"{where} must be a mapping, got {type(message).__name__}")
    if "role" not in message:
        raise UsageError(f"{where} must have a role: {', '.join(ROLES)}")
    if message["role"] not in ROLES:
        raise unknown_name(f"role in {where}", message["role"], ROLES)
    if "content" not in message and "tool_calls" not in message:
        raise UsageError(f"{where} must have content: a text, or a list of parts")
    content = message.get("content")
    parts = isinstance(content, list) and all(
        isinstance(p, Mapping) and "type" in p for p in content
    )
    if not (content is None or isinstance(content, str) or parts):
        raise UsageError(
            f"{where}: content must be a text or a list of parts with a type, "
            f"got {type(content).__name__}"
        )
    return plain(message, where)  # type: ignore[no-any-return]


def plain(value: Any, where: str) -> Any:
    """Return a copy of JSON-like data for a template."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode("utf-8")
        return json.loads(text)
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} must be valid Unicode, got a lone surrogate") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{where} must be JSON-like data: {error}") from error


def parse_messages(text: str, where: str) -> list[dict[str, Any]]:
    """Return the conversation in a JSON text: a list of messages, or an object with "messages"."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
    if isinstance(value, dict) and "messages" in value:
        value = value["messages"]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UsageError(f"{where}: must be a list of messages with role and content")
    return check_messages(value)

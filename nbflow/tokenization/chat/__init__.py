r"""Conversations as prompts: chat templates in Jinja, and Inferflow's ``{query}`` templates.

>>> import nbflow
>>> from nbflow.tokenization.chat import format_chat
>>> tokenizer = nbflow.load_tokenizer("tiny_python")
>>> format_chat(tokenizer, [{"role": "user", "content": "Hi"}], template="vicuna-1.1")
'USER: Hi\nASSISTANT: '
"""

from __future__ import annotations

from nbflow.tokenization.chat.encoder_templates import encode_pair
from nbflow.tokenization.chat.messages import ROLES, Message, check_messages
from nbflow.tokenization.chat.template import (
    check_template,
    encode_chat,
    find_template,
    format_chat,
    named_templates,
    uses_query_template,
)

__all__ = [
    "ROLES",
    "Message",
    "check_messages",
    "check_template",
    "encode_chat",
    "encode_pair",
    "find_template",
    "format_chat",
    "named_templates",
    "uses_query_template",
]

"""Chat templates: from a conversation to the text and ids of a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from nbflow.tokenization.chat.messages import Message, check_messages, plain
from nbflow.tokenization.tokenizer import Tokenizer
from nbflow.tokenization.tokenizer_config import MAX_TEMPLATE_BYTES
from nbflow_kernels.errors import UsageError, unknown_name

LANGUAGES = ["nbflow.compat.inferflow.query_template"]
"""Modules of template languages besides Jinja, imported at first use.

Each has ``NAMED`` (templates by name), ``is_template(text)`` and
``fill(text, messages, tokenizer, where, needs_query=True)``, which returns ``items`` and ``shown``.
"""
_MARK = "\U0010ffff"  # a noncharacter that breaks up special tokens spelled out by users
_END = "\U0010fffe"
"""Noncharacter at the end of a message to be continued, where the prompt is cut."""
_DEVELOPER = re.compile(r"""(['"])developer\1""")
"""The role in a Jinja template that knows it; in others it is `system`, its older name."""
_GUARDED = ("system", "user", "tool", "developer", "function", "ipython", "documents")


class Template(NamedTuple):
    """A template: its name for messages, its text, and its language (None: Jinja)."""

    name: str
    text: str
    language: Any = None


def named_templates() -> dict[str, str]:
    """Return the templates that can be named with any model."""
    return {name: text for language in _languages() for name, text in language.NAMED.items()}


def find_template(stated: str, where: str, known: Sequence[str] = ()) -> Template:
    """Find a template by its name or text.

    `stated` is a name of `named_templates`, or the text of a template in Jinja or one of
    `LANGUAGES`.  Messages name the parameter `where` and list the other names `known`.
    """
    for language in _languages():
        if stated in language.NAMED:
            return Template(f"prompt template {stated!r}", language.NAMED[stated], language)
    if len(stated) > MAX_TEMPLATE_BYTES:
        raise UsageError(
            f"{where} may have at most {MAX_TEMPLATE_BYTES} characters, got {len(stated)}"
        )
    if "{" not in stated:
        raise unknown_name("chat template", stated, [*known, *named_templates()])
    if "{%" in stated or "{{" in stated:
        return Template("the template", stated)
    for language in _languages():
        if language.is_template(stated):
            return Template("the template", stated, language)
    raise UsageError(f"{where} must contain {{query}}, or be Jinja with {{{{ or {{%")


def uses_query_template(tokenizer: Tokenizer, template: str | None) -> bool:
    """Return True if `format_chat` would fill a ``{query}`` template, not one in Jinja."""
    return _choose(tokenizer, template, False).language is not None


def template_language(text: str) -> Any:
    """Return the language of a template that may lack a query; the first of `LANGUAGES`."""
    found = _languages()
    return next((language for language in found if language.is_template(text)), found[0])


def _languages() -> list[Any]:
    return [import_module(name) for name in LANGUAGES]


def format_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template: str | None = None,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    r"""Return a conversation as the text of a prompt.

    The text does not distinguish special tokens of the template from those that a user spelled out:
    for a model, use `encode_chat`.

    Parameters
    ----------
    tokenizer : Tokenizer
        Its chat template and special tokens are used.
    messages : sequence of mapping
        Each with "role" and "content", see `nbflow.tokenization.chat.check_messages`.  The role
        "developer" is "system" for a template that does not name it.
    template : str, optional
        A name of the model's own templates or of `nbflow.tokenization.chat.named_templates`, or the
        text of a template: Jinja, or Inferflow's language.  By default the model's own, which is
        "tool_use" if it has that and there are `tools`, else "default"; else that of its model file
        (``tokenizer.prompt_template``).
    add_generation_prompt : bool, optional
        Ask the template to begin the assistant's answer; by default unless the final message is
        continued.
    continue_final_message : bool
        End the prompt within the last message, which the model continues: what the template writes
        after it is cut off.  As in transformers, spaces at its end are dropped if the template
        strips messages.
    tools, documents : sequence of mapping, optional
        For templates that take them.
    **variables
        More for the template, e.g. ``enable_thinking=False``.

    Returns
    -------
    str
        The prompt.

    Raises
    ------
    UsageError
        If the template does not exist, the messages are malformed, or the template refuses them,
        does something forbidden, or exceeds the bounds on time and memory.

    Examples
    --------
    >>> import nbflow
    >>> from nbflow.tokenization.chat import format_chat
    >>> tokenizer = nbflow.load_tokenizer("tiny_python")
    >>> messages = [{"role": "user", "content": "Hi"}]
    >>> format_chat(tokenizer, messages, "{{ messages[0].role }}: {{ messages[0].content }}")
    'user: Hi'
    """
    given = _Variables(
        messages, add_generation_prompt, continue_final_message, tools, documents, variables
    )
    return _fill(tokenizer, template, given, guarded=False)[0]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template: str | None = None,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    parse_special: bool = False,
    max_bytes: int | None = None,
    **variables: Any,
) -> list[int]:
    """Return a conversation as the ids of a prompt.

    Special tokens of the template are tokens.  Those that are spelled out in a message (other than
    the assistant's) are text, so that a user cannot end a turn.

    Parameters
    ----------
    tokenizer, messages, template, tools, documents, **variables
        As for `format_chat`.
    add_generation_prompt, continue_final_message : bool
        As for `format_chat`.
    parse_special : bool
        Recognize special tokens in messages, too.
    max_bytes : int, optional
        Bound on the UTF-8 text of the prompt, checked before it is tokenized.

    Returns
    -------
    list of int
        Token ids.  The template decides about BOS.

    Raises
    ------
    UsageError
        As for `format_chat`; if the prompt is longer than `max_bytes`.
    """
    given = _Variables(
        messages, add_generation_prompt, continue_final_message, tools, documents, variables
    )
    prompt, parts = _fill(tokenizer, template, given, guarded=not parse_special)
    _check_size(prompt, max_bytes)
    if parts is not None and not parse_special:
        return tokenizer.encode_parts(parts)
    if _MARK not in prompt:
        return tokenizer.encode(prompt, parse_special=True)
    return tokenizer.encode_parts(
        [p.replace(_MARK, "") if isinstance(p, str) else p for p in tokenizer.split_special(prompt)]
    )


def check_template(tokenizer: Tokenizer, template: str) -> None:
    """Raise `UsageError` if a template does not exist or cannot be used with a tokenizer.

    Jinja templates are parsed; a ``{query}`` template is filled, which finds unknown fields.
    """
    name, text, language = _choose(tokenizer, template, False)
    if language is not None:
        language.fill(text, [{"role": "user", "content": "x"}], tokenizer, name)
        return
    from nbflow.tokenization.chat.sandbox import check_syntax  # late, as in `_fill`

    check_syntax(text, name)


class _Variables(NamedTuple):
    """Arguments of a template."""

    messages: Sequence[Message]
    add_generation_prompt: bool | None
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    more: Mapping[str, Any]


def _fill(
    tokenizer: Tokenizer, template: str | None, given: _Variables, *, guarded: bool
) -> tuple[str, list[str | int] | None]:
    """Return the text of a prompt and, from a template language besides Jinja, its parts.

    With `guarded`, special tokens that users spell out in a Jinja prompt are marked.
    """
    messages = check_messages(given.messages)
    continues = given.continue_final_message
    if continues and given.add_generation_prompt:
        raise UsageError(
            "continue_final_message ends the prompt within the last message, "
            "add_generation_prompt after it; give one of them"
        )
    name, text, language = _choose(tokenizer, template, bool(given.tools))
    if language is not None:
        _refuse_extras(name, given)
        if continues and messages[-1]["role"] != "assistant":
            raise UsageError(f"{name}: continues only a last message of the assistant")
        filled = language.fill(text, messages, tokenizer, name)
        return str(filled.shown), filled.items
    from nbflow.tokenization.chat.sandbox import render  # late: most runs need no template

    if not _DEVELOPER.search(text):
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    tools, documents = given.tools, given.documents
    variables = {
        **tokenizer.named_tokens,
        **plain(dict(given.more), "template variables"),
        "messages": [*messages[:-1], _marked_end(messages[-1])] if continues else messages,
        "tools": None if tools is None else plain(list(tools), "tools"),
        "documents": None if documents is None else plain(list(documents), "documents"),
        "add_generation_prompt": not continues
        if given.add_generation_prompt is None
        else given.add_generation_prompt,
    }
    prompt = render(text, _mark(tokenizer, variables) if guarded else variables, name)
    return (_cut(prompt, name) if continues else prompt), None


def _marked_end(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with a mark at the end of its text, or of its last part of text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": f"{content}{_END} "}
    parts = list(content or [])
    for i in reversed(range(len(parts))):
        if isinstance(parts[i].get("text"), str):
            parts[i] = {**parts[i], "text": f"{parts[i]['text']}{_END} "}
            return {**message, "content": parts}
    raise UsageError("continue_final_message: the last message has no text to continue")


def _cut(prompt: str, name: str) -> str:
    """Return the prompt up to the mark; the space after the mark shows if the template strips."""
    end = prompt.rfind(_END)
    if end < 0:
        raise UsageError(
            f"{name} leaves out the end of the last message, which therefore cannot be continued"
        )
    kept = prompt[:end]
    return kept if prompt.startswith(" ", end + 1) else kept.rstrip()


def _check_size(prompt: str, most: int | None) -> None:
    size = 0 if most is None else len(prompt.encode("utf-8", "surrogatepass"))
    if most is not None and size > most:
        raise UsageError(
            f"the conversation has {size:,} bytes as a prompt, and at most {most:,} can fit the "
            "context; shorten it"
        )


def _choose(tokenizer: Tokenizer, template: str | None, has_tools: bool) -> Template:
    """Return the template for a conversation."""
    own = tokenizer.chat_templates
    if template is None:
        template = "tool_use" if has_tools and "tool_use" in own else "default"
        if template not in own and tokenizer.prompt_template is not None:
            return find_template(tokenizer.prompt_template, "the model file's template")
        if template not in own:
            known = f" (the model has: {', '.join(own)})" if own else ""
            raise UsageError(
                f"the model comes with no chat template{known}; name one: "
                f"{', '.join([*own, *named_templates()])}, or give the text of one"
            )
    if template in own:
        return Template(f"chat template {template!r}", own[template])
    return find_template(template, "a template", list(own))


def _refuse_extras(name: str, given: _Variables) -> None:
    """Raise for arguments that a ``{query}`` template does not take."""
    extras = [*given.more]
    extras += [key for key in ("tools", "documents") if getattr(given, key)]
    if extras or given.add_generation_prompt is False:
        what = ", ".join(extras) or "add_generation_prompt=False"
        raise UsageError(f"{name}: a {{query}} template does not take {what}; use a Jinja template")


def _mark(tokenizer: Tokenizer, given: dict[str, Any]) -> dict[str, Any]:
    """Return the variables with a mark within special tokens that a message spells out."""
    pattern = tokenizer.special_splitter.pattern
    if pattern is None:
        return given

    def broken(text: str) -> str:
        text = text.replace(_MARK, "")
        return pattern.sub(lambda found: found[0][:1] + _MARK + found[0][1:], text)

    messages = [
        {key: value if key == "role" else _texts(value, broken) for key, value in message.items()}
        if message["role"] in _GUARDED
        else message
        for message in given["messages"]
    ]
    outside = {key: _texts(given[key], broken) for key in ("tools", "documents")}
    return given | outside | {"messages": messages}


def _texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON-like data with all texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _texts(item, change) for key, item in value.items()}
    return [_texts(item, change) for item in value] if isinstance(value, list) else value

"""From a conversation to the text and the ids of a prompt."""

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
``fill(text, messages, tokenizer, where)``, which returns ``items`` and ``shown``.
"""
_MARK = "\U0010ffff"  # a noncharacter: breaks up special tokens that users spell out
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

    Parameters
    ----------
    stated : str
        A name of `named_templates`, or the text of a template in Jinja or one of `LANGUAGES`.
    where : str
        The parameter that states it, for messages.
    known : sequence of str
        Other names, for messages.

    Returns
    -------
    Template

    Raises
    ------
    UsageError
        If it is neither a name nor a template.
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


def _languages() -> list[Any]:
    return [import_module(name) for name in LANGUAGES]


def format_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template: str | None = None,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    r"""Return a conversation as the text of a prompt.

    The text alone does not say which special tokens the template wrote and which a user did:
    for a model, use `encode_chat`.

    Parameters
    ----------
    tokenizer : Tokenizer
        Its chat template and special tokens are used.
    messages : sequence of mapping
        Each with "role" and "content", see `nbflow.tokenization.chat.check_messages`.
    template : str, optional
        A name of the model's own templates or of `nbflow.tokenization.chat.named_templates`, or the
        text of a template: Jinja, or Inferflow's language.  By default the model's own, which is
        "tool_use" if it has that and there are `tools`, else "default"; else that of its model file
        (``tokenizer.prompt_template``).
    add_generation_prompt : bool
        Whether the template is asked to begin the assistant's answer.
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
        If there is no such template, the messages are malformed, or the template refuses them,
        does what is not allowed, or takes too much.

    Examples
    --------
    >>> import nbflow
    >>> from nbflow.tokenization.chat import format_chat
    >>> tokenizer = nbflow.load_tokenizer("tiny_python")
    >>> messages = [{"role": "user", "content": "Hi"}]
    >>> format_chat(tokenizer, messages, "{{ messages[0].role }}: {{ messages[0].content }}")
    'user: Hi'
    """
    checked = check_messages(messages)
    name, text, language = _choose(tokenizer, template, bool(tools))
    if language is not None:
        _refuse_extras(name, tools, documents, variables, add_generation_prompt)
        return str(language.fill(text, checked, tokenizer, name).shown)
    given = _variables(tokenizer, checked, add_generation_prompt, tools, documents, variables)
    return _render(text, given, name)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template: str | None = None,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    parse_special: bool = False,
    max_bytes: int | None = None,
    **variables: Any,
) -> list[int]:
    """Return a conversation as the ids of a prompt.

    Special tokens that the template writes are tokens.  Those that are spelt out in a message
    (other than the assistant's) are text, so that a user cannot end a turn.

    Parameters
    ----------
    tokenizer, messages, template, add_generation_prompt, tools, documents, **variables
        As for `format_chat`.
    parse_special : bool
        Recognise special tokens in messages, too.
    max_bytes : int, optional
        Longest text of the prompt in UTF-8, checked before it becomes tokens.

    Returns
    -------
    list of int
        Token ids.  The template says whether BOS is among them.

    Raises
    ------
    UsageError
        As for `format_chat`; if the prompt is longer than `max_bytes`.
    """
    checked = check_messages(messages)
    name, text, language = _choose(tokenizer, template, bool(tools))
    if language is not None:
        _refuse_extras(name, tools, documents, variables, add_generation_prompt)
        parts = language.fill(text, checked, tokenizer, name)
        _check_size(parts.shown, max_bytes)
        if parse_special:
            return tokenizer.encode(parts.shown, parse_special=True)
        return tokenizer.encode_parts(parts.items)
    given = _variables(tokenizer, checked, add_generation_prompt, tools, documents, variables)
    marked = given if parse_special else _mark(tokenizer, given)
    prompt = _render(text, marked, name)
    _check_size(prompt, max_bytes)
    if _MARK not in prompt:
        return tokenizer.encode(prompt, parse_special=True)
    return tokenizer.encode_parts(
        [p.replace(_MARK, "") if isinstance(p, str) else p for p in tokenizer.split_special(prompt)]
    )


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


def _refuse_extras(
    name: str, tools: object, documents: object, variables: Mapping[str, Any], generation: bool
) -> None:
    """Refuse what a template with one query cannot take."""
    given = [*variables, *(["tools"] if tools else []), *(["documents"] if documents else [])]
    if given or not generation:
        what = ", ".join(given) or "add_generation_prompt=False"
        raise UsageError(f"{name}: a {{query}} template does not take {what}; use a Jinja template")


def _variables(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what a template may refer to."""
    return {
        **tokenizer.named_tokens,
        **plain(dict(variables), "template variables"),
        "messages": messages,
        "tools": None if tools is None else plain(list(tools), "tools"),
        "documents": None if documents is None else plain(list(documents), "documents"),
        "add_generation_prompt": add_generation_prompt,
    }


def _mark(tokenizer: Tokenizer, given: dict[str, Any]) -> dict[str, Any]:
    """Return the variables with a mark in every special token that a message spells out."""
    spelt = sorted(filter(None, tokenizer.special_tokens), key=len, reverse=True)
    if not spelt:
        return given
    pattern = re.compile("|".join(map(re.escape, spelt)))

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


def _render(text: str, given: dict[str, Any], name: str) -> str:
    """Run a Jinja template."""
    from nbflow.tokenization.chat.sandbox import render  # late: most runs need no template

    return render(text, given, name)

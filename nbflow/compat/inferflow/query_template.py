r"""Inferflow's query templates: a prompt with fields in braces.

===================================  ==========================================================
``{query}``, ``{question}``          user message
``{_query}``, ``{_question}``        user message after a space
``{system_prompt}``                  system message, or nothing
``{res_prefix}``, ``{answer}``       start of the response; the template ends here
``{bos}``, ``{eos}``                 BOS and EOS tokens
``{user_token}``,                    tokens of these names in generation_config.json
``{assistant_token}``
``{#123}``                           token by id
``{<s>}``, ``{[CLS]}``, ``{__en__}`` token by its text
``{\n}``, ``{\r}``, ``{\t}``, ``{ }``  control character, or a space
===================================  ==========================================================

Everything else is text, in which special tokens are recognized; user and system messages are
encoded as plain text.  A template must have a query, except that of a decoder whose encoder reads
it (``{#2}{__en__}{res_prefix}``), and holds one turn.  A conversation of several turns repeats it:
each answer is followed by the EOS token, if there is one, and the template of the next turn, with
the same system message.  (Inferflow answers the last user message alone.)

The named templates are those of Inferflow's service configuration
(https://github.com/inferflow/inferflow/blob/14ff95e/bin/inferflow_service.ini), with their line
breaks as line breaks; `chatml` is the one of its Yi-34B-Chat.
"""

from __future__ import annotations

import re
from typing import Any

from nbflow.tokenization.tokenizer import Tokenizer
from nbflow_kernels.errors import UsageError

_FIELD = re.compile(r"\{([^{}]+)\}")
_MAX_CHARACTERS = 1 << 24  # a long template is repeated in every turn
_QUERY = {"query": "", "question": "", "_query": " ", "_question": " "}
_ANSWER = ("res_prefix", "answer")
_CHARACTERS = {" ": " ", "\\n": "\n", "\\r": "\r", "\\t": "\t", "\n": "\n", "\r": "\r", "\t": "\t"}
_LLAMA2_SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, "
    "while being safe.  Your answers should not include any harmful, unethical, racist, sexist, "
    "toxic, dangerous, or illegal content. Please ensure that your responses are socially unbiased "
    "and positive in nature."
)
_LLAMA2_UNSURE = (
    "If a question does not make any sense, or is not factually coherent, explain why instead of "
    "answering something not correct. If you don't know the answer to a question, please don't "
    "share false information."
)
_INSTRUCTION = "\n\n### Instruction:\n\n{%s}\n\n### Response:\n\n{res_prefix}"

NAMED = {
    "simple": "{query}\n{res_prefix}",
    "llama2_chat.std": "<s>[INST]\n{query}[/INST]",
    "llama2_chat.std.1": "<s>[INST]<<SYS>>\n{system_prompt}\n<</SYS>>\n{query}[/INST]",
    "llama2_chat.std.2": f"<s>[INST]<<SYS>>\n{_LLAMA2_SYSTEM}\n{_LLAMA2_UNSURE}\n<</SYS>>\n"
    "{query}[/INST]",
    "llama2_chat.alt": "USER: {query}\nASSISTANT: {res_prefix}",
    "llama2_chat.alt.2": f"SYSTEM: {_LLAMA2_SYSTEM} {_LLAMA2_UNSURE}\n"
    "USER: {query}\nASSISTANT: {res_prefix}",
    "vicuna-1.0": "### Human:\n{query}\n### Assistant:\n{res_prefix}",
    "vicuna-1.1": "USER: {query}\nASSISTANT: {res_prefix}",
    "llama_cpp_t0": _INSTRUCTION % "query",
    "llama_cpp_t1": _INSTRUCTION % "_query",
    "baichuan2_chat": "\n\n{<reserved_106>}{query}{<reserved_107>}\n",
    "chatml": "<|im_start|>system\n{system_prompt}<|im_end|>\n<|im_start|>user\n{query}<|im_end|>\n"
    "<|im_start|>assistant\n",
}
"""Templates by name."""


class Parts:
    """Prompt of plain text and token ids.

    `items` are the arguments of `nbflow.tokenization.Tokenizer.encode_parts`, `shown` is the text.
    """

    def __init__(self) -> None:
        self.items: list[str | int] = []
        self._shown: list[str] = []
        self._size = 0

    @property
    def shown(self) -> str:
        """Return the prompt as text."""
        return "".join(self._shown)

    def text(self, text: str) -> None:
        """Add text."""
        if text:
            self._add(text, text)

    def token(self, token: tuple[int, str]) -> None:
        """Add a token by id and text."""
        self._add(*token)

    def _add(self, item: str | int, shown: str) -> None:
        self._size += len(shown)
        if self._size > _MAX_CHARACTERS:
            raise UsageError(f"a prompt may have at most {_MAX_CHARACTERS:,} characters")
        self.items.append(item)
        self._shown.append(shown)


def is_template(text: str) -> bool:
    """Return True for a text with a query field."""
    return any(name in _QUERY for name in _FIELD.findall(text))


def fill(
    template: str,
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    where: str,
    needs_query: bool = True,
) -> Parts:
    """Fill a template with a conversation.

    That is an optional message of the system (or developer), then user and assistant messages in
    turn; a last message of the assistant is the start of the response.  With `needs_query`, a
    template without a query is refused.
    """
    if needs_query and not is_template(template):
        raise UsageError(f"{where}: must contain {{query}}")
    system, turns = _turns(messages, where)
    parts = Parts()
    for i, (query, answer) in enumerate(turns):
        _fill_turn(parts, template, (system, query, answer), tokenizer, where)
        if i + 1 < len(turns) and tokenizer.eos_ids:
            parts.token((tokenizer.eos_ids[0], tokenizer.piece(tokenizer.eos_ids[0])))
    return parts


def _fill_turn(
    parts: Parts, template: str, texts: tuple[str, str, str], tokenizer: Tokenizer, where: str
) -> None:
    """Add one turn: the template with system message, query and answer."""
    system, query, answer = texts
    position = 0
    for field in _FIELD.finditer(template):
        _own_text(parts, template[position : field.start()], tokenizer)
        position = field.end()
        name = field[1]
        if name in _QUERY:
            parts.text(_QUERY[name] + query)
        elif name == "system_prompt":
            parts.text(system)
        elif name in _ANSWER:
            parts.text(answer)
            return
        elif name in _CHARACTERS:
            parts.text(_CHARACTERS[name])
        else:
            parts.token(_token(name, tokenizer, where))
    _own_text(parts, template[position:], tokenizer)
    parts.text(answer)


def _own_text(parts: Parts, text: str, tokenizer: Tokenizer) -> None:
    """Add literal text of the template, with its special tokens."""
    for part in tokenizer.split_special(text):
        if isinstance(part, str):
            parts.text(part)
        else:
            parts.token((part, tokenizer.piece(part)))


def _turns(messages: list[dict[str, Any]], where: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the system message, and query and answer of each turn."""
    roles = [{"developer": "system"}.get(m["role"], m["role"]) for m in messages]
    first = int(roles[0] == "system")
    rest = roles[first:]
    usual = [("user", "assistant")[i % 2] for i in range(len(rest))]
    if not rest or rest != usual:
        raise UsageError(
            f"{where}: takes user and assistant messages in turn, perhaps after a system message, "
            f"got {', '.join(roles[:20])}; use a Jinja template for other conversations"
        )
    texts = [message["content"] for message in messages]
    wrong = [type(text).__name__ for text in texts if not isinstance(text, str)]
    if wrong:
        raise UsageError(f"{where}: takes content as text, got {wrong[0]}")
    said = texts[first:]
    answers = [*said[1::2], ""]  # the last turn may have none yet
    return "".join(texts[:first]), list(zip(said[::2], answers, strict=False))


def _token(name: str, tokenizer: Tokenizer, where: str) -> tuple[int, str]:
    """Return id and text of a token given by name, id or text."""
    found: int | None
    if name == "bos":
        found = tokenizer.bos_id
    elif name == "eos":
        found = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
    elif re.fullmatch(r"#\d{1,9}", name):
        found = tokenizer.check_id(int(name[1:]))
    else:
        spelt = tokenizer.named_tokens.get(name, name)
        found = tokenizer.token_id(spelt)
        if found is None:
            found = tokenizer.token_id(spelt.replace(" ", "\u2581"))
    if found is None:
        raise UsageError(
            f"{where}: {{{name}}} is neither a field (query, _query, system_prompt, res_prefix, "
            "bos, eos, user_token, assistant_token, #ID, \\n) nor a token of this vocabulary"
        )
    return found, tokenizer.piece(found)

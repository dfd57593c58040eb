"""What every tokenizer offers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Protocol

from nbflow_kernels.errors import UsageError


class DecodeStream(Protocol):
    """Turns ids into text one by one, never in the middle of a character."""

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, which may be empty."""

    def finish(self) -> str:
        """Return what is left: bytes that never became a character, as U+FFFD."""


class Tokenizer(ABC):
    """Text to token ids and back.

    The pieces of `decode_stream`, `finish` included, together are what `decode` returns.

    Attributes
    ----------
    chat_templates : mapping of str to str
        Jinja templates that came with the tokenizer, e.g. "default" and "tool_use".
    named_tokens : mapping of str to str
        What templates may refer to: "bos_token", "eos_token", ... and how each is spelt.
    prompt_template : str or None
        Name or text of a template for conversations, from the model file; taken if
        `chat_templates` has none.
    """

    chat_templates: Mapping[str, str]
    named_tokens: Mapping[str, str]
    prompt_template: str | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""

    @property
    @abstractmethod
    def bos_id(self) -> int | None:
        """Id at the beginning of a sequence, or None."""

    @property
    @abstractmethod
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""

    @property
    @abstractmethod
    def special_tokens(self) -> Mapping[str, int]:
        """Special tokens by their spelling: text unless `encode` is told to parse them."""

    @abstractmethod
    def encode(
        self, text: str, add_special_tokens: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Return the ids of `text`.

        Parameters
        ----------
        text : str
            Any text; lone surrogates are refused.
        add_special_tokens : bool
            Put the special tokens around it that the model was trained with, e.g. BOS in front.
        parse_special : bool
            Recognise special tokens that are spelt out in the text.  By default they are text, so
            that what a user types cannot end a turn or begin another.

        Returns
        -------
        list of int
            Token ids.
        """

    @abstractmethod
    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Return the ids of text with tokens in it.

        Parameters
        ----------
        parts : sequence of str and int
            Text, in which special tokens are not recognised, and token ids.  Nothing is merged
            across an id; neighbouring texts are one text.

        Returns
        -------
        list of int
            Token ids, without any that `add_special_tokens` would add.
        """

    def split_special(self, text: str) -> list[str | int]:
        """Return `text` cut at the special tokens spelt out in it, as for `encode_parts`."""
        if self._special_pattern is None:
            return [text] if text else []
        found = self._special_pattern.split(text)
        return [
            self.special_tokens[part] if i % 2 else part for i, part in enumerate(found) if part
        ]

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        """Matches any special token, the longest first; None if there are none."""
        spelt = sorted(filter(None, self.special_tokens), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, spelt))})") if spelt else None

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without special tokens.

        Parameters
        ----------
        ids : iterable of int
            Token ids, each below `vocab_size`.

        Returns
        -------
        str
            Text; bytes that are not UTF-8 become U+FFFD.
        """

    @abstractmethod
    def decode_stream(self) -> DecodeStream:
        """Return a new stream that decodes one id after the other."""

    @abstractmethod
    def piece(self, token_id: int) -> str:
        """Return the vocabulary's entry for one id, as the tokenizer file spells it."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of the vocabulary's entry spelt like this, or None."""

    def check_id(self, token_id: int) -> int:
        """Return `token_id` as an int if it is in the vocabulary, or raise `UsageError`."""
        token_id = int(token_id)
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(f"token id must be 0..{self.vocab_size - 1}, got {token_id}")
        return token_id


def check_text(text: str) -> str:
    """Return `text` if it can be written as UTF-8, or raise."""
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"text must be valid Unicode, got a lone surrogate at index {error.start}"
        ) from None
    return text


def is_valid(text: str) -> bool:
    """Return whether `text` can be written as UTF-8: it has no lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def encode_runs(
    parts: Sequence[str | int],
    encode: Callable[[str], list[int]],
    check_id: Callable[[int], int],
) -> list[int]:
    """Encode the texts between ids one by one, neighbouring texts as one.

    Parameters
    ----------
    parts : sequence of str and int
        As for `Tokenizer.encode_parts`.
    encode : callable
        The ids of a text.
    check_id : callable
        Returns an id, or raises.

    Returns
    -------
    list of int
        Token ids.
    """
    ids: list[int] = []
    for is_text, run in groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            ids += encode(check_text("".join(map(str, run))))
        else:
            ids += [check_id(int(part)) for part in run]
    return ids

"""Interface of all tokenizers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

from nbflow_kernels.errors import UsageError


class DecodeStream(Protocol):
    """Incremental decoder: text of ids one by one, never ending within a character."""

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, which may be empty."""

    def finish(self) -> str:
        """Return the rest: bytes that never became a character, as U+FFFD."""


class TokenSplitter:
    """Splits text at tokens that are spelled out in it; the longest match wins."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        spelled = sorted(filter(None, ids), key=len, reverse=True)
        self.pattern = re.compile(f"({'|'.join(map(re.escape, spelled))})") if spelled else None
        """Matches any of the tokens; None without tokens."""

    def split(self, text: str) -> list[str | int]:
        """Return `text` with the tokens in it as ids."""
        found = self.pattern.split(text) if self.pattern else [text]
        return [self._ids[part] if i % 2 else part for i, part in enumerate(found) if part]


class Tokenizer(ABC):
    """Text to token ids and back.

    The texts of `decode_stream`, `finish` included, together equal `decode`.
    """

    vocab_size: int
    """Number of ids, special tokens included."""
    bos_id: int | None
    """Beginning-of-sequence id, or None."""
    eos_ids: tuple[int, ...]
    """Ids that end a sequence."""
    special_tokens: Mapping[str, int]
    """Special tokens by their spelling: text, unless `encode` is asked to parse them."""
    chat_templates: Mapping[str, str] = MappingProxyType({})
    """Jinja templates that came with the tokenizer, e.g. "default" and "tool_use"."""
    named_tokens: Mapping[str, str] = MappingProxyType({})
    """Tokens that templates may refer to: "bos_token", "eos_token", ... and their spelling."""
    prompt_template: str | None = None
    """Name or text of the model file's chat template, for a tokenizer without `chat_templates`."""

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
            Add the special tokens that the model was trained with, e.g. BOS in front.
        parse_special : bool
            Recognize special tokens that are spelled out in the text.  By default they are text, so
            that user input cannot end a turn or begin another.

        Returns
        -------
        list of int
            Token ids.
        """

    def prompt_ids(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the ids of a prompt, as `encode`; of an empty one BOS, or token 0."""
        return self.encode(text, add_special_tokens, parse_special) or [self.bos_id or 0]

    def encode_pair(
        self, first: str, second: str | None = None, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the ids of one or two texts with the special tokens around them, and their types.

        Parameters
        ----------
        first, second : str
            Texts; special tokens that are spelled out in them are text.
        max_tokens : int, optional
            Shorten the longer text until both fit.

        Returns
        -------
        ids, types : list of int
            Type 1 belongs to the second text in BERT; 0 to everything else.
        """
        ids = self.encode(first, add_special_tokens=True)
        if second is not None or (max_tokens is not None and len(ids) > max_tokens):
            raise UsageError(
                "this kind of tokenizer neither joins two texts nor shortens them; use the "
                "checkpoint's tokenizer.json, or give token ids"
            )
        return ids, [0] * len(ids)

    @abstractmethod
    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Return the ids of text with tokens in it.

        Parameters
        ----------
        parts : sequence of str and int
            Text, in which special tokens are not recognized, and token ids.  Nothing is merged
            across an id; neighbouring texts are one text.

        Returns
        -------
        list of int
            Token ids, without those that `add_special_tokens` would add.
        """

    def split_special(self, text: str) -> list[str | int]:
        """Return `text` split at the special tokens spelled out in it, as for `encode_parts`."""
        return self.special_splitter.split(text)

    @cached_property
    def special_splitter(self) -> TokenSplitter:
        """Splitter at special tokens."""
        return TokenSplitter(self.special_tokens)

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
        """Return a new incremental decoder."""

    @abstractmethod
    def piece(self, token_id: int) -> str:
        """Return the vocabulary entry of an id, as the tokenizer file spells it."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry, or None."""

    def known(self, ids: Iterable[int]) -> list[int]:
        """Return the ids that have a token; the head of a model may have more rows."""
        return [i for i in ids if i < self.vocab_size]

    def check_id(self, token_id: int) -> int:
        """Return `token_id` as an int if it is in the vocabulary, or raise `UsageError`."""
        token_id = int(token_id)
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(f"token id must be 0..{self.vocab_size - 1}, got {token_id}")
        return token_id


def check_text(text: str) -> str:
    """Return `text` if it can be encoded as UTF-8, or raise."""
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
    """Return whether `text` can be encoded as UTF-8: it has no lone surrogates."""
    try:
        check_text(text)
    except UsageError:
        return False
    return True

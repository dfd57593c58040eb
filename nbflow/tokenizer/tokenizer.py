"""What every tokenizer offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
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
    """

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

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`.

        Parameters
        ----------
        text : str
            Any text; lone surrogates are refused.
        add_special_tokens : bool
            Put the special tokens around it that the model was trained with, e.g. BOS in front.

        Returns
        -------
        list of int
            Token ids.
        """

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

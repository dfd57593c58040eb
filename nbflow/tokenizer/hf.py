"""Hugging Face ``tokenizer.json``, through the ``tokenizers`` package."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nbflow.tokenizer.special_ids import special_ids
from nbflow.tokenizer.tokenizer import Tokenizer, check_text
from nbflow.weights.json_file import read_object
from nbflow_kernels.errors import UsageError

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_CONTEXT = 8  # ids kept in front of new ones, so that a decoder sees what they follow


class HfTokenizer(Tokenizer):
    """A ``tokenizer.json`` and the special ids stated beside it.

    Padding and truncation that the file may ask for are switched off: they belong to batches of
    another program.

    Parameters
    ----------
    path : Path
        The file.

    Raises
    ------
    UsageError
        If the file cannot be read by the ``tokenizers`` package.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        model = read_object(path).get("model")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise UsageError(f"{path}: not a readable tokenizer.json: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._n_ids = max([self._tokenizer.get_vocab_size(True), *(i + 1 for i in added)])
        self._byte_fallback = isinstance(model, dict) and bool(model.get("byte_fallback"))
        bos, eos = special_ids(path.parent)
        config = read_object(path.parent / "tokenizer_config.json", missing_ok=True) or {}
        self._bos = self._token_id(config.get("bos_token")) if bos is None else bos
        fallback = self._token_id(config.get("eos_token"))
        self._eos = eos if eos or fallback is None else (fallback,)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._n_ids

    @property
    def bos_id(self) -> int | None:
        """Id at the beginning of a sequence, or None."""
        return self._bos

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        return self._eos

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """See `Tokenizer.encode`; special tokens spelt out in the text are recognised."""
        encoding = self._tokenizer.encode(check_text(text), add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return str(self._tokenizer.decode([self.check_id(i) for i in ids]))

    def decode_stream(self) -> _Stream:
        """See `Tokenizer.decode_stream`."""
        return _Stream(self)

    def piece(self, token_id: int) -> str:
        """See `Tokenizer.piece`; an id the vocabulary leaves out is an empty string."""
        return self._tokenizer.id_to_token(self.check_id(token_id)) or ""

    def is_special(self, token_id: int) -> bool:
        """Return whether `decode` skips this id."""
        return token_id in self._special

    def is_byte(self, token_id: int) -> bool:
        """Return whether this id stands for one byte of a character that has no piece."""
        return self._byte_fallback and _BYTE_PIECE.fullmatch(self.piece(token_id)) is not None

    def _token_id(self, token: Any) -> int | None:
        """Return the id of a token as tokenizer_config.json spells it, or None."""
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str):
            return None
        found = self._tokenizer.token_to_id(content)
        return None if found is None else int(found)


class _Stream:
    """Decodes ids one by one; see `nbflow.tokenizer.DecodeStream`.

    It decodes the last ids as a whole and returns what that adds.  Text is held back while it ends
    in U+FFFD (the bytes of a character are not complete) or in a byte piece (their run decides
    together what it is).
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""  # the text of self._ids that has been returned

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        self._tokenizer.check_id(token_id)
        if self._tokenizer.is_special(token_id):
            return ""
        self._ids.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        return self._show(text)

    def finish(self) -> str:
        """Return what is left."""
        return self._show(self._tokenizer.decode(self._ids)) if self._ids else ""

    def _show(self, text: str) -> str:
        """Return what `text` adds, and forget all but the last ids."""
        new = text[len(self._shown) :]
        self._ids = self._ids[-_CONTEXT:]
        self._shown = self._tokenizer.decode(self._ids)
        return new

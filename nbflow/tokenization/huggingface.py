"""Tokenizers of the ``tokenizers`` package: from a ``tokenizer.json``, or composed."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nbflow.tokenization.check_json import check_json
from nbflow.tokenization.package_errors import package_errors
from nbflow.tokenization.special_tokens import SpecialIds, special_ids
from nbflow.tokenization.tokenizer import Tokenizer, check_text, is_valid
from nbflow.tokenization.tokenizer_config import TokenizerConfig, read_tokenizer_config
from nbflow.utils.json_file import read_object
from nbflow_kernels.errors import UsageError

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_FIRST_PLACEHOLDER = 0x10F000  # private-use characters


def from_file(path: Path) -> HfTokenizer:
    """Read a ``tokenizer.json``, with the special ids that the files in its folder state.

    Padding and truncation are switched off: the file's settings are for training batches.
    """
    import tokenizers

    content = read_object(path)
    check_json(content, str(path))
    model = content.get("model")
    with package_errors(f"{path}: not a readable tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
    byte_fallback = isinstance(model, dict) and bool(model.get("byte_fallback"))
    return with_special_ids(tokenizer, path, read_tokenizer_config(path.parent), byte_fallback)


def with_special_ids(
    tokenizer: Any, path: Path, config: TokenizerConfig, byte_fallback: bool = False
) -> HfTokenizer:
    """Return a tokenizer with the special ids that the files in its folder state."""
    bos, eos = special_ids(path.parent)
    if bos is None:
        bos = _token_id(tokenizer, config.named_tokens.get("bos_token"))
    fallback = _token_id(tokenizer, config.named_tokens.get("eos_token"))
    ends = eos if eos or fallback is None else (fallback,)
    with package_errors(f"{path}: the vocabulary is damaged"):
        result = HfTokenizer(tokenizer, bos, ends, byte_fallback, where=str(path))
    result.chat_templates = config.chat_templates
    result.named_tokens = config.named_tokens
    return result


def _token_id(tokenizer: Any, token: str | None) -> int | None:
    if token is None or not is_valid(token):
        return None
    found = tokenizer.token_to_id(token)
    return None if found is None else int(found)


def set_post_processor(tokenizer: Any, special: SpecialIds, *, typed: bool = False) -> None:
    """Set the post-processor that puts special ids before and after a text.

    Of two texts the second one has type 1 if `typed` (BERT); else two ids are between them, and all
    types are 0 (RoBERTa).
    """
    from tokenizers import processors

    around = {i: tokenizer.id_to_token(i) for i in (*special.before, *special.after)}
    if around:
        before = [around[i] for i in special.before]
        after = [around[i] for i in special.after]
        kind, middle = int(typed), [] if typed else after
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *middle, f"$B:{kind}", *(f"{a}:{kind}" for a in after)],
            special_tokens=[(token, i) for i, token in around.items()],
        )


class HfTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer`` and its special ids.

    The tokenizer neither pads nor truncates.  With `byte_fallback`, characters without a piece are
    encoded as bytes, ``<0x0A>``.
    """

    def __init__(
        self,
        tokenizer: Any,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        byte_fallback: bool = False,
        *,
        where: str = "tokenizer",
    ) -> None:
        self._tokenizer = tokenizer
        self._where = where
        added = tokenizer.get_added_tokens_decoder()
        self._byte_fallback = byte_fallback
        # `encode_special_tokens` belongs to the tokenizer, not to a call
        self._lock = threading.Lock()
        self.vocab_size = max([tokenizer.get_vocab_size(True), *(i + 1 for i in added)])
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self._special_ids = frozenset(self.special_tokens.values())

    def encode(
        self, text: str, add_special_tokens: bool = False, parse_special: bool = False
    ) -> list[int]:
        """See `Tokenizer.encode`; added tokens that are not special are always recognized."""
        check_text(text)
        with self._lock, package_errors(f"{self._where}: cannot encode the text"):
            self._tokenizer.encode_special_tokens = not parse_special
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return list(encoding.ids)

    def encode_pair(
        self, first: str, second: str | None = None, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """See `Tokenizer.encode_pair`."""
        texts = [check_text(text) for text in (first, second) if text is not None]
        with self._lock, package_errors(f"{self._where}: cannot encode the text"):
            self._tokenizer.encode_special_tokens = True
            if max_tokens is not None:
                self._tokenizer.enable_truncation(max_tokens, strategy="longest_first")
            try:
                encoding = self._tokenizer.encode(*texts)
            finally:
                self._tokenizer.no_truncation()
            return list(encoding.ids), list(encoding.type_ids)

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See `Tokenizer.encode_parts`."""
        ids = {self.check_id(part) for part in parts if not isinstance(part, str)}
        texts = [check_text(part) for part in parts if isinstance(part, str)]
        if not ids:
            return self.encode("".join(texts))
        with package_errors(f"{self._where}: cannot encode the text"):
            return self._placeholders.encode(parts, ids, texts)

    @cached_property
    def _placeholders(self) -> _Placeholders:
        return _Placeholders(self._tokenizer)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        checked = [self.check_id(i) for i in ids]
        with package_errors(f"{self._where}: cannot decode the ids"):
            return str(self._tokenizer.decode(checked))

    def step(self, stream: Any, ids: list[int]) -> str:
        """Push ids to an incremental decoder of the package."""
        with package_errors(f"{self._where}: cannot decode the ids"):
            return stream.step(self._tokenizer, ids) or ""

    def decode_stream(self) -> _Stream:
        """See `Tokenizer.decode_stream`."""
        return _Stream(self)

    def piece(self, token_id: int) -> str:
        """See `Tokenizer.piece`; empty for an id without a token."""
        return self._tokenizer.id_to_token(self.check_id(token_id)) or ""

    def token_id(self, token: str) -> int | None:
        """See `Tokenizer.token_id`."""
        return _token_id(self._tokenizer, token)

    def is_special(self, token_id: int) -> bool:
        """Return whether `decode` skips this id."""
        return token_id in self._special_ids

    def is_byte(self, token_id: int) -> bool:
        """Return whether this id is one byte of a character without a piece."""
        return self._byte_fallback and _BYTE_PIECE.fullmatch(self.piece(token_id)) is not None


class _Placeholders:
    """Encodes text with ids in it, each replaced by a private-use character.

    Normalization at the beginning of a text and around special tokens is then as in plain text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        self._characters: dict[int, str] = {}
        self._real: dict[int, int] = {}  # id of the placeholder -> real id
        self._lock = threading.Lock()

    def encode(self, parts: Sequence[str | int], ids: set[int], texts: list[str]) -> list[int]:
        """Return the ids of `parts`, which consist of `ids` and `texts`."""
        with self._lock:
            for token_id in sorted(ids):
                self._add(token_id)
            taken = set().union(*texts) & set(self._characters.values())
            if taken:
                raise UsageError(
                    f"text must not contain the private-use character U+{ord(min(taken)):X} when "
                    "token ids are put into it"
                )
            text = "".join(p if isinstance(p, str) else self._characters[int(p)] for p in parts)
            found = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self._real.get(i, i) for i in found]

    def _add(self, token_id: int) -> None:
        """Add a placeholder for an id, stripping spaces as its added token does, if it is one."""
        if token_id in self._characters:
            return
        import tokenizers

        character = chr(_FIRST_PLACEHOLDER + len(self._characters))
        token = self._tokenizer.get_added_tokens_decoder().get(token_id)
        strips = {"lstrip": token.lstrip, "rstrip": token.rstrip} if token else {}
        added = tokenizers.AddedToken(character, normalized=False, special=False, **strips)
        self._tokenizer.add_tokens([added])
        self._characters[token_id] = character
        self._real[self._tokenizer.token_to_id(character)] = token_id


class _Stream:
    """The package's incremental decoder; see `nbflow.tokenization.DecodeStream`.

    It holds text back while it ends in U+FFFD, as the bytes of a character may be incomplete.  Runs
    of byte pieces are collected here, because only a whole run can be decoded; so are the ids that
    `finish` decodes, because the package does not return its rest.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[int] = []  # ids of the last returned text
        self._held: list[int] = []  # ids after them
        self._bytes: list[int] = []  # those not yet pushed to the package's decoder

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        self._tokenizer.check_id(token_id)
        if self._tokenizer.is_special(token_id):
            return ""
        self._held.append(token_id)
        self._bytes.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._tokenizer.step(self._stream, self._bytes)
        self._bytes = []
        if text:
            self._shown, self._held = self._held, []
        return text

    def finish(self) -> str:
        """Return the rest."""
        if not self._held:
            return ""
        known = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode([*self._shown, *self._held])[len(known) :]

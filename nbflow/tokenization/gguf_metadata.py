"""Vocabulary and chat templates of a GGUF file (``tokenizer.ggml.*``), checked.

Keys: https://github.com/ggml-org/ggml/blob/9b048bb72b811f50b0c30d9e5c84d6ff9f4bf005/docs/gguf.md
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbflow.checkpoint.readers import gguf
from nbflow.tokenization.sentencepiece_bpe import (
    BYTE,
    CONTROL,
    NORMAL,
    UNDEFINED,
    UNKNOWN,
    USER_DEFINED,
)
from nbflow.tokenization.special_tokens import MAX_PIECE_CHARACTERS, NO_TOKEN, SpecialIds
from nbflow.tokenization.tokenizer_config import MAX_TEMPLATE_BYTES
from nbflow_kernels.errors import UsageError

_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
})  # fmt: skip
"""Control tokens that end a turn, as in llama.cpp."""
_SHOWN = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
"""Control tokens of gpt-oss that structure the answer and must be visible in it."""
_KEY = "tokenizer.ggml."
_DEFAULTS = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    "bert": {
        "bos_token_id": 101,
        "unknown_token_id": 100,
        "seperator_token_id": 102,
        "padding_token_id": 0,
        "mask_token_id": 103,
    },
    "t5": {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0},
}
"""Ids that older files do not state: those of Llama 2, BERT and T5."""
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled like this in the files
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}


@dataclass(frozen=True)
class GgufVocabulary:
    """The vocabulary of a GGUF file."""

    path: Path
    model: str
    """``tokenizer.ggml.model``."""
    pieces: list[str]
    types: list[int]
    values: dict[str, Any]
    """Metadata below ``tokenizer.ggml.``, without that prefix."""
    chat_templates: dict[str, str]
    name: str = ""
    """Name of the model."""

    def array(self, key: str, kind: type, n: int | None = None) -> list[Any]:
        """Return an array of `n` values of a kind, or raise."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise UsageError(
                f"{self.path}: {_KEY}{key} must be an array of {kind.__name__}, "
                f"got {value!r:.60}; convert the model again"
            )
        if n is not None and len(value) != n:
            raise UsageError(
                f"{self.path}: {_KEY}{key} must have one entry per token, {n}, got {len(value)}"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean entry."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise UsageError(f"{self.path}: {_KEY}{key} must be true or false, got {value!r:.60}")
        return value

    def token(self, key: str) -> int | None:
        """Return an id, or None."""
        default = _DEFAULTS.get(self.model, {}).get(key)
        value = self.values.get(key, default)
        beyond = default is not None and default >= len(self.pieces)
        if value in (None, *NO_TOKEN) or (key not in self.values and beyond):
            return None
        if type(value) is not int or not 0 <= value < len(self.pieces):
            raise UsageError(
                f"{self.path}: {_KEY}{key} must be 0..{len(self.pieces) - 1}, got {value!r:.60}"
            )
        return value

    def special_ids(
        self, *, add_bos: bool, add_eos: bool = False, add_sep: bool = False
    ) -> SpecialIds:
        """Return the special ids; the arguments apply where the file does not say."""
        bos, eos = self.token("bos_token_id"), self.token("eos_token_id")
        ends = [eos, self.token("eot_token_id"), self.token("eom_token_id"), *self._ends()]
        before = bos if self.flag("add_bos_token", add_bos) else None
        after = eos if self.flag("add_eos_token", add_eos) else None
        if self.flag("add_sep_token", add_sep):
            separator = self.token("seperator_token_id")
            after = eos if separator is None else separator
        return SpecialIds(
            bos=bos,
            eos=tuple(dict.fromkeys(i for i in ends if i is not None)),
            unknown=self.token("unknown_token_id"),
            before=() if before is None else (before,),
            after=() if after is None else (after,),
        )

    def _ends(self) -> list[int]:
        """Return the end-of-turn ids by their names."""
        ids = [i for i, p in enumerate(self.pieces) if p in _ENDS and self.types[i] == CONTROL]
        names = {self.pieces[i] for i in ids}
        # these models write several messages, and <|end|> ends only one of them
        if {"<|return|>", "<|call|>"} <= names or {"<|calls|>", "<|flush|>"} <= names:
            ids = [i for i in ids if self.pieces[i] != "<|end|>"]
        # here </s> is the tag of struck-out text
        if "<|tool_response>" in names:
            ids = [i for i in ids if self.pieces[i] != "</s>"]
        return ids

    def named_tokens(self) -> dict[str, str]:
        """Return "bos_token" and the like -> its spelling."""
        ids = {name: self.token(key) for name, key in _NAMED.items()}
        return {name: self.pieces[i] for name, i in ids.items() if i is not None}


def read_vocabulary(path: Path) -> GgufVocabulary:
    """Read the vocabulary of a GGUF file."""
    metadata = gguf.read_metadata(path)
    values = {k.removeprefix(_KEY): v for k, v in metadata.items() if k.startswith(_KEY)}
    model = values.get("model")
    if not isinstance(model, str) or "tokens" not in values:
        raise UsageError(
            f"{path}: has no vocabulary ({_KEY}model and {_KEY}tokens); name a tokenizer file"
        )
    vocabulary = GgufVocabulary(path, model, [], [], values, _templates(path, metadata))
    pieces = vocabulary.array("tokens", str)
    if not pieces:
        raise UsageError(f"{path}: {_KEY}tokens is empty")
    types = [NORMAL] * len(pieces)
    if "token_type" in values:
        types = vocabulary.array("token_type", int, len(pieces))
    for i, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
        if not UNDEFINED <= kind <= BYTE or len(piece) > MAX_PIECE_CHARACTERS:
            raise UsageError(
                f"{path}: token {i} must have a type from {UNDEFINED} to {BYTE} and at most "
                f"{MAX_PIECE_CHARACTERS} characters, got type {kind} and {len(piece)} characters"
            )
    named = [piece or f"[EMPTY_{i}]" for i, piece in enumerate(pieces)]
    seen = [_type(piece, kind) for piece, kind in zip(named, types, strict=True)]
    name = str(metadata.get("general.name"))
    return GgufVocabulary(path, model, named, seen, values, vocabulary.chat_templates, name)


def _type(piece: str, kind: int) -> int:
    """Return the type of a piece, with known mistakes of converters corrected."""
    if piece in _SHOWN:
        return USER_DEFINED
    return CONTROL if piece in _ENDS and kind == USER_DEFINED else kind


def _templates(path: Path, metadata: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name."""
    templates = {}
    for key, text in metadata.items():
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            name = key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"
            if not isinstance(text, str) or len(text) > MAX_TEMPLATE_BYTES:
                raise UsageError(
                    f"{path}: {key} must be a text of at most {MAX_TEMPLATE_BYTES} characters"
                )
            templates[name] = text
    return templates


def is_added(kind: int) -> bool:
    """Return whether a piece of this type is recognized before the text is split."""
    return kind in (CONTROL, UNKNOWN, USER_DEFINED)

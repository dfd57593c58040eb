"""Limits on request fields, checked before validation.

A body is at most ``limits.body_bytes`` long, but a small one can cause much work: a list of a
million wrong items gives a million validation errors, a thousand DRY breakers a thousand searches
of the vocabulary.  Fields not listed here are texts of at most `TEXT_BYTES`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbflow.options import MAX_STOP_BYTES
from nbflow.sampling.dry_breakers import MAX_BREAKERS, MAX_BYTES

TEXT_BYTES = 4096
"""Longest text of a field that is not in `BOUNDS`."""
MIN_PROMPT_BYTES = 1 << 16
"""Texts up to this length are tokenized for any context."""
_KIB = 1024


class OutOfBounds(ValueError):
    """A field exceeds its limit, or holds text that is not valid Unicode.

    `where` is the path of the field, e.g. ``stop.3``.
    """

    def __init__(self, where: str, message: str) -> None:
        self.where = where[:200]
        super().__init__(f"{self.where}: {message}")


@dataclass(frozen=True)
class Bound:
    """Limits of a field; None for no limit."""

    items: int | None = None
    """Maximum entries of a list or an object."""
    text_bytes: int | None = None
    """Longest text, or entry, in UTF-8."""
    all_bytes: int | None = None
    """Longest value as JSON, in UTF-8."""
    kind: type | None = None
    """Type of the entries of a list, since pydantic would report each wrong one."""


_IDS = Bound(1 << 18, kind=int)
_GRAMMAR = Bound(text_bytes=64 * _KIB)
_SCHEMA = Bound(text_bytes=256 * _KIB, all_bytes=256 * _KIB)
_CHOICES = Bound(4096, 4 * _KIB, 128 * _KIB, str)
_PROMPTS = Bound()
BOUNDS: dict[str, Bound] = {
    # prompts: `ServedModel.check_size` has the limit of a model
    "prompt": _PROMPTS, "input": _PROMPTS, "text": _PROMPTS, "system_prompt": _PROMPTS,
    "inputs": Bound(kind=str), "text_pair": Bound(kind=str), "parameters": Bound(),
    "res_prefix": _PROMPTS, "tokens": Bound(kind=int), "documents": Bound(1 << 14, kind=dict),
    "messages": Bound(1 << 14, kind=dict), "chat_template_kwargs": Bound(all_bytes=64 * _KIB),
    "chat_template": _SCHEMA, "decoder_input_template": _SCHEMA,
    "encoder_input_template": _SCHEMA,
    "stop": Bound(64, MAX_STOP_BYTES, kind=str), "stop_token_ids": Bound(1024, kind=int),
    "bad_words": Bound(1024, 1024, 64 * _KIB, str),
    "logit_bias": Bound(4096), "allowed_token_ids": _IDS, "banned_token_ids": _IDS,
    "samplers": Bound(64, 1024, kind=str),
    "dry_sequence_breakers": Bound(MAX_BREAKERS, MAX_BYTES, kind=str),
    "guided_choice": _CHOICES, "choice": _CHOICES, "guided_regex": _GRAMMAR, "regex": _GRAMMAR,
    "guided_grammar": _GRAMMAR, "grammar": _GRAMMAR, "guided_json": _SCHEMA, "json": _SCHEMA,
    "schema": _SCHEMA, "json_schema": Bound(), "structured_outputs": Bound(),
    "response_format": Bound(), "stream_options": Bound(), "header": Bound(),
}  # fmt: skip
"""Limits by the name of the field."""
_OTHERS = Bound(text_bytes=TEXT_BYTES)


def check_field(name: str, value: Any) -> None:
    """Raise `OutOfBounds` if a field exceeds its limits or cannot be encoded as UTF-8."""
    bound = BOUNDS.get(name, _OTHERS)
    if isinstance(value, list | dict) and bound.items is not None and len(value) > bound.items:
        raise OutOfBounds(name, f"may have at most {bound.items:,} entries, got {len(value):,}")
    if isinstance(value, list):
        kinds = set(map(type, value))
        if bound.kind is not None and not kinds <= {bound.kind}:
            _raise_kind(name, f"must be a list of {_NAMES[bound.kind]}", kinds - {bound.kind})
        if name in ("prompt", "input"):
            _check_prompts(name, value, kinds)
    elif name in ("prompt", "input") and not isinstance(value, str):
        _check_prompts(name, value, {type(value)})
    for where, text in _texts(name, value, bound.text_bytes):
        size = _size(where, text)
        if bound.text_bytes is not None and size > bound.text_bytes:
            raise OutOfBounds(where, f"may have at most {bound.text_bytes:,} bytes, got {size:,}")
    if bound.all_bytes is not None and not isinstance(value, str):
        try:
            size = len(json.dumps(value, ensure_ascii=False).encode())
        except RecursionError:
            raise OutOfBounds(name, "is nested too deeply") from None
        if size > bound.all_bytes:
            raise OutOfBounds(
                name, f"may have at most {bound.all_bytes:,} bytes as JSON, got {size:,}"
            )


_NAMES = {int: "whole numbers", str: "texts", dict: "objects"}


def _check_prompts(name: str, value: Any, kinds: set[type]) -> None:
    """Raise `OutOfBounds` unless a list holds texts, token ids, or lists of token ids."""
    if kinds == {list}:
        kinds = {kind for ids in value for kind in set(map(type, ids))}
    elif kinds == {str}:
        return
    if not isinstance(value, list) or not kinds <= {int}:
        _raise_kind(name, "must be a text, texts, token ids or lists of token ids", kinds)


def _raise_kind(name: str, expected: str, found: set[type]) -> None:
    kinds = ", ".join(sorted("null" if k is type(None) else k.__name__ for k in found))
    raise OutOfBounds(name, f"{expected}, got {kinds}")


def _texts(name: str, value: Any, most: int | None) -> Iterator[tuple[str, str]]:
    """Yield the texts and object keys of a value with their paths.

    Lists of ASCII texts of at most `most` bytes are skipped.
    """
    waiting: list[tuple[str, Any]] = [(name, value)]
    while waiting:  # no recursion: the value may be nested as deeply as JSON can be
        where, item = waiting.pop()
        if isinstance(item, str):
            yield where, item
        elif isinstance(item, dict):
            yield from ((where, key) for key in item)
            waiting += ((f"{where}.{_shown(key)}", inner) for key, inner in item.items())
        elif isinstance(item, list) and not _is_plain(item, most):
            waiting += ((f"{where}.{i}", inner) for i, inner in enumerate(item))


def _is_plain(items: list[Any], most: int | None) -> bool:
    """Return True for a list of numbers or short ASCII texts."""
    kinds = set(map(type, items))
    if kinds <= {int, float, bool}:
        return True
    short = kinds == {str} and (most is None or max(map(len, items)) <= most)
    return short and "".join(items).isascii()


def _shown(key: str) -> str:
    return key[:100].encode("utf-8", "backslashreplace").decode()


def _size(where: str, text: str) -> int:
    """Return the length of a text in UTF-8."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise OutOfBounds(
            where, f"must be valid Unicode, got a lone surrogate at index {error.start}"
        ) from None

"""Bounds on a tokenizer.json, checked before the ``tokenizers`` package allocates memory by them.

The package aborts the process if an allocation fails:

* it lists every unused id up to the largest;
* it allocates the size that a ``Precompiled`` table states in its first number;
* each ``Replace`` may lengthen the text by a factor.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from nbflow.tokenization.special_tokens import MAX_PIECE_CHARACTERS, MAX_VOCABULARY
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

MAX_GROWTH = 1 << 16
"""Bound on the growth of a text by all ``Replace`` of a step; published files stay below 100."""
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def check_json(content: dict[str, Any], where: str) -> None:
    """Raise `UsageError` for an id, piece or table that needs too much memory.

    The package reports values of a wrong type.
    """
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        for piece, token_id in vocab.items():
            _check_piece(piece, token_id, f"{where}: model.vocab")
    elif isinstance(vocab, list):  # Unigram: pieces with scores
        for i, entry in enumerate(vocab):
            if isinstance(entry, list) and entry:
                _check_piece(entry[0], i, f"{where}: model.vocab")
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            _check_piece(token.get("content"), token.get("id"), f"{where}: added_tokens")
    for step in _STEPS:
        growth = 1.0
        for table in _tables(content.get(step)):
            _check_charsmap(table.get("precompiled_charsmap"), f"{where}: {step}")
            growth *= _growth(table)
            if growth > MAX_GROWTH:
                raise UsageError(
                    f"{where}: {step}: its replacements may lengthen a text more than "
                    f"{MAX_GROWTH} times"
                )


def _check_piece(piece: Any, token_id: Any, where: str) -> None:
    """Raise for an id or a piece that is too large."""
    if isinstance(token_id, int) and not 0 <= token_id < MAX_VOCABULARY:
        raise UsageError(
            f"{where}: the id of {shown(piece)} must be 0 to {MAX_VOCABULARY - 1}, "
            f"got {shown(token_id)}"
        )
    if isinstance(piece, str) and len(piece) > MAX_PIECE_CHARACTERS:
        raise UsageError(
            f"{where}: a piece may have at most {MAX_PIECE_CHARACTERS} characters, got "
            f"{len(piece)} in {shown(piece)}"
        )


def _tables(step: Any) -> Iterator[dict[str, Any]]:
    """Yield the tables in a step, nested ones included."""
    inner = [step]
    while inner:
        value = inner.pop()
        if isinstance(value, dict):
            yield value
            inner += value.values()
        elif isinstance(value, list):
            inner += value


def _check_charsmap(charsmap: Any, where: str) -> None:
    """Raise if a table of normalization rules states a larger size than it has."""
    if not isinstance(charsmap, str):
        return
    try:
        table = base64.b64decode(charsmap, validate=True)
    except (binascii.Error, ValueError):
        return  # the package reports it
    n_bytes = int.from_bytes(table[:4], "little")
    if len(table) < 4 or n_bytes > len(table) - 4:
        raise UsageError(
            f"{where}: precompiled_charsmap says it has {n_bytes} bytes, but {len(table)} are "
            "there; it is truncated or damaged"
        )


def _growth(table: dict[str, Any]) -> float:
    """Return the factor by which a ``Replace`` can lengthen a text, 1 for other tables."""
    content, pattern = table.get("content"), table.get("pattern")
    if not isinstance(content, str) or pattern is None:
        return 1.0
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    replaced = len(literal) if isinstance(literal, str) else 1
    return max(1.0, len(content) / replaced if replaced else len(content) + 1)

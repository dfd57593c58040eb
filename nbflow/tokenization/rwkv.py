r"""RWKV's vocabulary: greedy longest match from the left.

Pieces are bytes; a GGUF file spells them with escapes: ``\n``, ``\t``, ``\r``, ``\x0a``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbflow.tokenization.byte_vocabulary import ByteVocabularyTokenizer
from nbflow.tokenization.special_tokens import SpecialIds
from nbflow_kernels.errors import UsageError

_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class RwkvTokenizer(ByteVocabularyTokenizer):
    """Greedy longest match from the left.

    An unknown byte becomes ``special.unknown``.
    """

    def __init__(self, pieces: Sequence[str], special: SpecialIds, where: str) -> None:
        super().__init__(pieces, [unescape(piece) for piece in pieces], special)
        self._where = where
        self._by_bytes = {data: i for i, data in enumerate(self._bytes) if data}
        lengths: dict[int, set[int]] = {}
        for data in self._by_bytes:
            lengths.setdefault(data[0], set()).add(len(data))
        self._lengths = {byte: sorted(found, reverse=True) for byte, found in lengths.items()}

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        data = text.encode("utf-8")
        ids: list[int] = []
        position = 0
        while position < len(data):
            for n in self._lengths.get(data[position], ()):
                found = self._by_bytes.get(data[position : position + n])
                if found is not None:
                    break
            else:
                found, n = self._unknown(data[position]), 1
            ids.append(found)
            position += n
        return ids

    def _unknown(self, byte: int) -> int:
        if self._special.unknown is None:
            raise UsageError(f"{self._where}: the vocabulary does not have the byte {byte}")
        return self._special.unknown


def unescape(piece: str) -> bytes:
    """Return the bytes of an escaped piece."""

    def replace(match: re.Match[bytes]) -> bytes:
        code = match[1]
        if code[:1] == b"x" and len(code) == 3:
            return bytes([int(code[1:], 16)])
        return _ESCAPED.get(code, code)

    return _ESCAPE.sub(replace, piece.encode("utf-8", "surrogateescape"))

"""llama2.c's tokenizer: SentencePiece byte-pair encoding with scores.

``tokenizer.bin``: int32 length of the longest piece, then for each id float32 score, int32 length,
bytes.  Ids 0, 1 and 2 are unknown, BOS and EOS; id 3 + b is the byte b.  Spaces are plain spaces.

Encoding puts a space in front, begins with one piece per character (bytes for a character without
a piece), and merges the neighbours that form the piece of highest score, the leftmost first.

Layout and rules: https://github.com/karpathy/llama2.c/blob/350e04fe35433e6d2941dce5a1f53308f87058eb/run.c
"""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

from nbflow.tokenization.byte_vocabulary import ByteStream, ByteVocabularyTokenizer
from nbflow.tokenization.sentencepiece_bpe import BYTE_PIECE, score_bpe
from nbflow.tokenization.special_tokens import SpecialIds
from nbflow.utils.binary_file import read_file
from nbflow_kernels.errors import UsageError

BOS, EOS = 1, 2
_FIRST_BYTE = 3
_MIN_VOCAB = _FIRST_BYTE + 256
_MAX_PIECE_BYTES = 4096
_MAX_FILE_BYTES = 1 << 28
_LOWEST_SCORE = -1e10  # run.c joins nothing at or below it


class Llama2cTokenizer(ByteVocabularyTokenizer):
    """A llama2.c ``tokenizer.bin``."""

    def __init__(self, path: Path) -> None:
        pieces, scores = read_pieces(path)
        # run.c stops at BOS, Meta's models end with EOS
        special = SpecialIds(bos=BOS, eos=(BOS, EOS), before=(BOS,))
        spelled = [piece.decode("utf-8", "replace") for piece in pieces]
        super().__init__(spelled, [_as_bytes(i, p) for i, p in enumerate(pieces)], special)
        self._ids = {}
        for i, piece in enumerate(pieces):
            with suppress(UnicodeDecodeError):  # part of a character, which texts do not contain
                self._ids.setdefault(piece.decode(), i)
        merged = {p: scores[i] for p, i in self._ids.items() if scores[i] > _LOWEST_SCORE}
        byte_ids = {byte: _FIRST_BYTE + byte for byte in range(256)}
        self._bpe = score_bpe(self._ids, merged, byte_ids, None, " ")

    def _encode(self, text: str) -> list[int]:
        """Return the ids of `text` after a space, also in the middle of a prompt."""
        return list(self._bpe.encode(" " + text).ids) if text else []

    def decode_stream(self) -> _Stream:
        """See `Tokenizer.decode_stream`."""
        return _Stream(self.piece_bytes)


class _Stream(ByteStream):
    """Incremental decoder that drops a space right after BOS, as run.c does."""

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        text = super().push(token_id)
        self._prefix = b" " if token_id == BOS else b""
        return text


def _as_bytes(i: int, piece: bytes) -> bytes:
    """Return the bytes of piece `i`; ``<0x41>`` is the byte, BOS and EOS are empty."""
    if i in (BOS, EOS):
        return b""
    match = BYTE_PIECE.fullmatch(piece.decode("latin-1"))
    return bytes([int(match[1], 16)]) if match else piece


def read_pieces(path: Path) -> tuple[list[bytes], list[float]]:
    """Return the pieces and scores of a ``tokenizer.bin``, every length checked."""
    data = read_file(path, _MAX_FILE_BYTES, "a llama2.c tokenizer")
    longest = int.from_bytes(data[:4], "little")
    if len(data) < 4 or not 1 <= longest <= _MAX_PIECE_BYTES:
        raise UsageError(
            f"{path}: a llama2.c tokenizer begins with the length of its longest piece, "
            f"1..{_MAX_PIECE_BYTES}, got {longest}"
        )
    pieces: list[bytes] = []
    scores: list[float] = []
    offset = 4
    while offset < len(data):
        where = f"{path}: llama2.c tokenizer, id {len(pieces)}"
        if offset + 8 > len(data):
            raise UsageError(f"{where}: the file ends within its score and length")
        score, n = struct.unpack_from("<fi", data, offset)
        offset += 8
        if not 1 <= n <= longest or offset + n > len(data):
            raise UsageError(
                f"{where}: length must be 1..{longest} and within the file, got {n} "
                f"with {len(data) - offset} bytes left"
            )
        if score != score:
            raise UsageError(f"{where}: the score is not a number")
        pieces.append(data[offset : offset + n])
        scores.append(score)
        offset += n
    if len(pieces) < _MIN_VOCAB:
        raise UsageError(
            f"{path}: a llama2.c tokenizer has at least {_MIN_VOCAB} ids (3 special ones and "
            f"256 bytes), got {len(pieces)}"
        )
    return pieces, scores


from_file = Llama2cTokenizer

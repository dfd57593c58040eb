"""The tokenizer of llama2.c: SentencePiece byte-pair encoding with scores.

``tokenizer.bin``: int32 length of the longest piece, then for each id float32 score, int32 length,
bytes.  Ids 0, 1 and 2 are unknown, BOS and EOS; id 3 + b is the byte b.  Spaces are plain spaces.

Encoding puts a space in front, begins with one piece per character (bytes for a character that is
no piece), and joins the neighbours that form the piece of highest score, the leftmost first, until
none is left.

Layout and rules: https://github.com/karpathy/llama2.c/blob/350e04fe35433e6d2941dce5a1f53308f87058eb/run.c
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nbflow.tokenization.sentencepiece_bpe import score_bpe
from nbflow.tokenization.tokenizer import Tokenizer, check_text, encode_runs
from nbflow.utils.binary_file import read_file
from nbflow_kernels.errors import UsageError

BOS, EOS = 1, 2
_FIRST_BYTE = 3
_MIN_VOCAB = _FIRST_BYTE + 256
_MAX_PIECE_BYTES = 4096
_MAX_FILE_BYTES = 1 << 28
_LOWEST_SCORE = -1e10  # run.c joins nothing at or below it
_BYTE_PIECE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")


def from_file(path: Path) -> Llama2cTokenizer:
    """Read a llama2.c ``tokenizer.bin``; see `Llama2cTokenizer`."""
    return Llama2cTokenizer(path)


class Llama2cTokenizer(Tokenizer):
    """A llama2.c ``tokenizer.bin``.

    Parameters
    ----------
    path : Path
        The file.

    Raises
    ------
    UsageError
        If the file is damaged or not of this format.
    """

    def __init__(self, path: Path) -> None:
        self._pieces, self._scores = read_pieces(path)
        self._ids: dict[bytes, int] = {}
        for i, piece in enumerate(self._pieces):
            self._ids.setdefault(piece, i)
        self._bytes = [self._as_bytes(i) for i in range(len(self._pieces))]
        texts = {text: i for p, i in self._ids.items() if (text := _utf8(p)) is not None}
        scores = {p: self._scores[i] for p, i in texts.items() if self._scores[i] > _LOWEST_SCORE}
        byte_ids = {byte: _FIRST_BYTE + byte for byte in range(256)}
        self._bpe = score_bpe(texts, scores, byte_ids, None, " ")
        self.chat_templates = {}
        self.named_tokens = {}

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._pieces)

    @property
    def bos_id(self) -> int:
        """Id at the beginning of a sequence."""
        return BOS

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: run.c stops at BOS, Meta's models end with EOS."""
        return (BOS, EOS)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """None: BOS and EOS are ids without a spelling that a text could have."""
        return {}

    def encode(
        self, text: str, add_special_tokens: bool = False, parse_special: bool = False
    ) -> list[int]:
        """See `Tokenizer.encode`; the special token is BOS in front."""
        ids = [BOS] if add_special_tokens else []
        if check_text(text):
            ids += self._encode(" " + text)
        return ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See `Tokenizer.encode_parts`; the first text after an id gets a space in front, too."""
        return encode_runs(parts, self.encode, self.check_id)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`; a space right after BOS is dropped, as run.c does."""
        stream = self.decode_stream()
        return "".join([*(stream.push(i) for i in ids), stream.finish()])

    def decode_stream(self) -> _Stream:
        """See `Tokenizer.decode_stream`."""
        return _Stream(self)

    def piece(self, token_id: int) -> str:
        """See `Tokenizer.piece`."""
        return self._pieces[self.check_id(token_id)].decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """See `Tokenizer.token_id`."""
        return self._ids.get(token.encode("utf-8"))

    def piece_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one id stands for, none for BOS and EOS."""
        return self._bytes[self.check_id(token_id)]

    def _as_bytes(self, i: int) -> bytes:
        """Return the bytes of piece `i`; ``<0x41>`` is the byte, BOS and EOS are nothing."""
        if i in (BOS, EOS):
            return b""
        match = _BYTE_PIECE.fullmatch(self._pieces[i])
        return bytes([int(match[1], 16)]) if match else self._pieces[i]

    def _encode(self, text: str) -> list[int]:
        """Return the ids of `text`; a character that is no piece is one id per byte."""
        return list(self._bpe.encode(text).ids)


def _utf8(piece: bytes) -> str | None:
    """Return a piece as text; None for half a character, which no text contains."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class _Stream:
    """Decodes ids one by one; see `nbflow.tokenization.DecodeStream`."""

    def __init__(self, tokenizer: Llama2cTokenizer) -> None:
        self._tokenizer = tokenizer
        self._after_bos = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        data = self._tokenizer.piece_bytes(token_id)
        if self._after_bos:
            data = data.removeprefix(b" ")
        self._after_bos = token_id == BOS
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Return what is left."""
        return self._utf8.decode(b"", final=True)


def read_pieces(path: Path) -> tuple[list[bytes], list[float]]:
    """Read the pieces and scores of a ``tokenizer.bin``, every length checked.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    pieces : list of bytes
        One per id.
    scores : list of float
        One per id.

    Raises
    ------
    UsageError
        If the file is truncated, too large, or a length or score makes no sense.
    """
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

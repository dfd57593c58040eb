"""SentencePiece models (``tokenizer.model``), through the ``sentencepiece`` package."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbflow.tokenization.byte_pieces import BytesStream, PieceTokenizer
from nbflow.tokenization.package_errors import package_errors
from nbflow.tokenization.sentencepiece_bpe import SPACE
from nbflow.tokenization.sentencepiece_proto import read_spaces
from nbflow.tokenization.special_tokens import SpecialIds, special_ids
from nbflow.tokenization.tokenizer import encode_runs
from nbflow.tokenization.tokenizer_config import AddedToken, TokenizerConfig, read_tokenizer_config
from nbflow.utils.binary_file import read_file
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command

_MAX_FILE_BYTES = 1 << 28
_UNKNOWN_TEXT = " \u2047 ".encode()  # what SentencePiece shows for an unknown piece
_RENUMBERED = frozenset({
    "BarthezTokenizer", "BigBirdPegasusTokenizer", "CamembertTokenizer", "CpmTokenizer",
    "ErnieMTokenizer", "LayoutXLMTokenizer", "MBart50Tokenizer",
    "MBartTokenizer", "MarianTokenizer", "NllbTokenizer", "PLBartTokenizer", "PegasusTokenizer",
    "SeamlessM4TTokenizer", "Speech2TextTokenizer", "XGLMTokenizer", "XLMProphetNetTokenizer",
    "XLMRobertaTokenizer",
})  # fmt: skip
"""Classes of transformers whose ids are not those of the SentencePiece file."""
_CLS_SEP = frozenset({
    "AlbertTokenizer", "BigBirdTokenizer", "DebertaV2Tokenizer", "FNetTokenizer",
    "RemBertTokenizer",
})  # fmt: skip
"""Classes that put the tokens [CLS] and [SEP] around a text."""
_CHATGLM_TOKENS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")


class SpTokenizer(PieceTokenizer):
    """A SentencePiece model, BPE or unigram, and tokens added to it.

    Parameters
    ----------
    model : bytes
        The model file.
    special : SpecialIds
        Special ids, and which of them go around a text.
    added : sequence of AddedToken
        Tokens that are recognised before the text is cut; those that are special only on request.
    ids : mapping of str to int, optional
        Ids by piece where they are not those of the model (M2M100).
    where : str
        The file, for messages.

    Raises
    ------
    UsageError
        If the model is damaged.
    MissingExtraError
        If the package is not installed.
    """

    def __init__(
        self,
        model: bytes,
        special: SpecialIds,
        added: Sequence[AddedToken] = (),
        ids: Mapping[str, int] | None = None,
        *,
        where: str,
    ) -> None:
        self._sp = load_processor(model, where)
        self._spaces = read_spaces(model, where)
        self._special = special
        self._own = ids
        self._where = where
        with package_errors(f"{where}: not a readable SentencePiece model"):
            self._read_pieces(ids)
        self._user: dict[str, int] = {}
        for token in added:
            self._add(token)
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        spelt = sorted(self._user, key=len, reverse=True)
        self._user_pattern = re.compile(f"({'|'.join(map(re.escape, spelt))})") if spelt else None
        self.chat_templates = {}
        self.named_tokens = {}

    def _read_pieces(self, ids: Mapping[str, int] | None) -> None:
        """Read what the package says of each piece."""
        if ids is None:
            ids = {self._sp.id_to_piece(i): i for i in range(self._sp.get_piece_size())}
        self._pieces = sorted(ids, key=ids.__getitem__)
        # of a piece that only `ids` has, SentencePiece says that it is unknown: it is no text
        rows = [self._sp.piece_to_id(piece) for piece in self._pieces]
        self._bytes = [self._as_bytes(row, p) for row, p in zip(rows, self._pieces, strict=True)]
        unknown = self._sp.id_to_piece(self._sp.unk_id())
        self._unknown = frozenset(i for i, piece in enumerate(self._pieces) if piece == unknown)
        self._special_tokens = {
            piece: i
            for i, (row, piece) in enumerate(zip(rows, self._pieces, strict=True))
            if self._sp.is_control(row) or self._sp.is_unknown(row)
        }

    def _add(self, token: AddedToken) -> None:
        """Add a token, whose id may lie in the model or behind it."""
        while len(self._pieces) <= token.token_id:
            self._pieces.append("")
            self._bytes.append(b"")
        self._pieces[token.token_id] = token.content
        self._bytes[token.token_id] = b"" if token.special else token.content.encode()
        (self._special_tokens if token.special else self._user)[token.content] = token.token_id

    def _as_bytes(self, row: int, piece: str) -> bytes:
        """Return what a piece stands for, nothing for control pieces."""
        if self._sp.is_control(row):
            return b""
        if self._sp.is_unknown(row):
            return _UNKNOWN_TEXT if piece == self._sp.id_to_piece(row) else b""
        if self._sp.is_byte(row):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See `Tokenizer.encode_parts`."""
        cut: list[str | int] = []
        for part in parts:
            if self._user_pattern is None or not isinstance(part, str):
                cut.append(part)
                continue
            found = self._user_pattern.split(part)
            cut += [self._user[text] if i % 2 else text for i, text in enumerate(found) if text]
        return encode_runs(cut, self._encode, self.check_id)

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        with package_errors(f"{self._where}: cannot encode the text"):
            if self._own is None:
                return list(self._sp.encode(text))
            unknown = self._special.unknown or 0
            return [self._own.get(piece, unknown) for piece in self._sp.encode(text, out_type=str)]

    def decode_stream(self) -> BytesStream:
        """See `Tokenizer.decode_stream`."""
        spaces = self._spaces
        strip = spaces.add_dummy_prefix or spaces.remove_extra_whitespaces
        return BytesStream(
            self.piece_bytes,
            b" " if strip else b"",
            repeatedly=spaces.remove_extra_whitespaces,
            kept=self._unknown,
        )


def load_processor(model: bytes, where: str) -> Any:
    """Return the package's processor of a model file."""
    try:
        import sentencepiece
    except ImportError as error:
        raise MissingExtraError(
            f"{where}: needs the package sentencepiece: {install_command('sentencepiece')}"
        ) from error
    if not model:  # which the package takes for none
        raise UsageError(f"{where}: the SentencePiece model is empty")
    with package_errors(f"{where}: not a readable SentencePiece model"):
        return sentencepiece.SentencePieceProcessor(model_proto=model)


def read_model(path: Path) -> bytes:
    """Return the bytes of a SentencePiece file."""
    return read_file(path, _MAX_FILE_BYTES, "a SentencePiece model")


def from_file(path: Path) -> SpTokenizer:
    """Read a SentencePiece model and the files beside it.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    SpTokenizer

    Raises
    ------
    UsageError
        If the file is damaged, or the ids of its tokenizer are not those of the file.
    MissingExtraError
        If the package is not installed.
    """
    config = read_tokenizer_config(path.parent)
    if config.tokenizer_class in _RENUMBERED:
        raise UsageError(
            f"{path}: the ids of {config.tokenizer_class} are not those of its SentencePiece file; "
            "use its tokenizer.json"
        )
    data = read_model(path)
    processor = load_processor(data, str(path))
    added = list(config.added)
    if config.tokenizer_class == "ChatGLMTokenizer":  # its tokens are in its code, not in a file
        n = processor.get_piece_size()
        added += [AddedToken(text, n + i, True) for i, text in enumerate(_CHATGLM_TOKENS)]
    special = _special(processor, config, {token.content: token.token_id for token in added})
    tokenizer = SpTokenizer(data, special, added, where=str(path))
    tokenizer.chat_templates = config.chat_templates
    tokenizer.named_tokens = config.named_tokens or {
        name: tokenizer.piece(i)
        for name, i in (("bos_token", special.bos), ("eos_token", (special.eos or (None,))[0]))
        if i is not None and i < tokenizer.vocab_size
    }
    return tokenizer


def _special(processor: Any, config: TokenizerConfig, added: Mapping[str, int]) -> SpecialIds:
    """Return the special ids: stated in files, by name, or those of the model."""

    def named(name: str, own: int = -1) -> int | None:
        token = config.named_tokens.get(name)
        if token is None:
            return own if own >= 0 else None
        if token in added:
            return added[token]
        found: int = processor.piece_to_id(token)
        return None if processor.is_unknown(found) else found

    bos, ends = special_ids(config.folder)
    bos = named("bos_token", processor.bos_id()) if bos is None else bos
    eos = named("eos_token", processor.eos_id())
    before: list[int | None] = []
    after: list[int | None] = []
    if config.tokenizer_class in _CLS_SEP:
        before, after = [named("cls_token")], [named("sep_token")]
    elif config.tokenizer_class == "ChatGLMTokenizer":
        before = [added["[gMASK]"], added["sop"]]
    else:
        # Llama's kind begins with BOS; T5's kind has no BOS and ends with EOS
        has_bos = processor.bos_id() >= 0 and config.tokenizer_class != "T5Tokenizer"
        before = [bos] if config.flag("add_bos_token", has_bos) else []
        after = [eos] if config.flag("add_eos_token", not has_bos) else []
    return SpecialIds(
        bos=bos,
        eos=ends or (() if eos is None else (eos,)),
        unknown=processor.unk_id(),
        before=tuple(i for i in before if i is not None),
        after=tuple(i for i in after if i is not None),
    )

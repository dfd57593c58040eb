"""SentencePiece models (``tokenizer.model``), through the ``sentencepiece`` package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbflow.tokenization.byte_vocabulary import ByteStream, ByteVocabularyTokenizer
from nbflow.tokenization.package_errors import package_errors
from nbflow.tokenization.sentencepiece_bpe import SPACE
from nbflow.tokenization.special_tokens import SpecialIds, special_ids
from nbflow.tokenization.tokenizer_config import AddedToken, TokenizerConfig, read_tokenizer_config
from nbflow.utils.binary_file import read_file
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command

_MAX_FILE_BYTES = 1 << 28
_UNKNOWN_TEXT = " \u2047 ".encode()  # SentencePiece's text of an unknown piece
_RENUMBERED = frozenset({
    "BarthezTokenizer", "BigBirdPegasusTokenizer", "CamembertTokenizer", "CpmTokenizer",
    "ErnieMTokenizer", "LayoutXLMTokenizer", "MBart50Tokenizer",
    "MBartTokenizer", "MarianTokenizer", "NllbTokenizer", "PLBartTokenizer", "PegasusTokenizer",
    "SeamlessM4TTokenizer", "Speech2TextTokenizer", "XGLMTokenizer", "XLMProphetNetTokenizer",
    "XLMRobertaTokenizer",
})  # fmt: skip
"""Tokenizer classes whose ids differ from those of the SentencePiece file."""
_CLS_SEP = frozenset({
    "AlbertTokenizer", "BigBirdTokenizer", "DebertaV2Tokenizer", "FNetTokenizer",
    "RemBertTokenizer",
})  # fmt: skip
"""Tokenizer classes that put [CLS] and [SEP] around a text."""
_CHATGLM_TOKENS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")


class SpTokenizer(ByteVocabularyTokenizer):
    """A SentencePiece model, BPE or unigram, and tokens added to it.

    Of the `added` tokens, special ones are recognized on request, the others always.  `ids` by
    piece replace those of the model (M2M100).
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
        self._sp = sp = load_processor(model, where)
        self._vocab_ids = ids
        self._where = where
        with package_errors(f"{where}: not a readable SentencePiece model"):
            # the package does not expose these settings of the normalizer
            self._adds_prefix = sp.normalize("a").startswith(SPACE)
            self._strips = SPACE * 2 not in sp.normalize("a  a")
            if ids is None:
                ids = {sp.id_to_piece(i): i for i in range(sp.get_piece_size())}
            pieces = sorted(ids, key=ids.__getitem__)
            # a piece that only `ids` has is unknown to SentencePiece, and has no text
            rows = [sp.piece_to_id(piece) for piece in pieces]
            data = [self._as_bytes(row, piece) for row, piece in zip(rows, pieces, strict=True)]
            unknown = sp.id_to_piece(sp.unk_id())
            control = {
                piece: i
                for i, (row, piece) in enumerate(zip(rows, pieces, strict=True))
                if sp.is_control(row) or sp.is_unknown(row)
            }
        self._unknown = frozenset(i for i, piece in enumerate(pieces) if piece == unknown)
        user: dict[str, int] = {}
        for token in added:  # their ids lie in the model or after it
            n_missing = token.token_id + 1 - len(pieces)
            pieces += [""] * n_missing
            data += [b""] * n_missing
            pieces[token.token_id] = token.content
            data[token.token_id] = b"" if token.special else token.content.encode()
            (control if token.special else user)[token.content] = token.token_id
        super().__init__(pieces, data, special, control, user)

    def _as_bytes(self, row: int, piece: str) -> bytes:
        """Return the bytes of a piece, empty for control pieces."""
        if self._sp.is_control(row):
            return b""
        if self._sp.is_unknown(row):
            return _UNKNOWN_TEXT if piece == self._sp.id_to_piece(row) else b""
        if self._sp.is_byte(row):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        with package_errors(f"{self._where}: cannot encode the text"):
            if self._vocab_ids is None:
                return list(self._sp.encode(text))
            unknown = self._special.unknown or 0
            pieces = self._sp.encode(text, out_type=str)
            return [self._vocab_ids.get(piece, unknown) for piece in pieces]

    def decode_stream(self) -> ByteStream:
        """See `Tokenizer.decode_stream`."""
        return ByteStream(
            self.piece_bytes,
            b" " if self._adds_prefix or self._strips else b"",
            repeatedly=self._strips,
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
    if not model:  # the package would return an empty processor
        raise UsageError(f"{where}: the SentencePiece model is empty")
    with package_errors(f"{where}: not a readable SentencePiece model"):
        return sentencepiece.SentencePieceProcessor(model_proto=model)


def read_model(path: Path) -> bytes:
    """Return the bytes of a SentencePiece file."""
    return read_file(path, _MAX_FILE_BYTES, "a SentencePiece model")


def from_file(path: Path) -> SpTokenizer:
    """Read a SentencePiece model, with the settings and added tokens in its folder."""
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
    """Return the special ids: from the files, by name, or those of the model."""

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

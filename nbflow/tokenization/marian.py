"""Marian's tokenizer: SentencePiece pieces of both languages with the ids of vocab.json.

``source.spm`` splits a source text, which ends with ``</s>``; one that begins with ``>>fra<<`` has
the token of that target language in front.  A translation consists of pieces of vocab.json from
either model, so that ``target.spm`` is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbflow.tokenization.m2m100 import read_vocabulary
from nbflow.tokenization.sentencepiece import SpTokenizer, read_model
from nbflow.tokenization.sentencepiece_bpe import SPACE
from nbflow.tokenization.special_tokens import SpecialIds, special_ids
from nbflow.tokenization.tokenizer_config import AddedToken, read_tokenizer_config
from nbflow_kernels.errors import UsageError

_LANGUAGE = re.compile(r">>.*?<<", re.DOTALL)
_SPECIAL = ("</s>", "<unk>", "<pad>")


class MarianTokenizer(SpTokenizer):
    """A SentencePiece model that shares its ids with a model of another language."""

    def __init__(
        self, model: bytes, special: SpecialIds, added: Sequence[AddedToken], **options: Any
    ) -> None:
        super().__init__(model, special, added, **options)
        # pieces of the other model are text too, but unknown to this one
        kinds = {token.content: token.special for token in added}
        names = [*_SPECIAL, *(name for name, is_special in kinds.items() if is_special)]
        self.special_tokens = {name: self._ids[name] for name in names if name in self._ids}
        for i, piece in enumerate(self._pieces):
            text = piece if piece in kinds else piece.replace(SPACE, " ")
            self._bytes[i] = b"" if piece in self.special_tokens else text.encode()
        self._unknown = frozenset()

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the token of the language that it begins with."""
        language = _LANGUAGE.match(text)
        if language is None:
            return super()._encode(text)
        assert self._special.unknown is not None
        found = self._ids.get(language[0], self._special.unknown)
        return [found, *super()._encode(text[language.end() :])]


def from_file(path: Path) -> MarianTokenizer:
    """Read ``source.spm`` with the vocab.json of its folder."""
    model, config = read_model(path), read_tokenizer_config(path.parent)
    if config.flag("separate_vocabs", False):
        raise UsageError(
            f"{config.folder / 'tokenizer_config.json'}: separate_vocabs: the languages have "
            "vocabularies of their own, which is not supported; give token ids instead of text"
        )
    vocab = read_vocabulary(path.with_name("vocab.json"), ("</s>", "<unk>"))
    _, ends = special_ids(config.folder)
    end = vocab["</s>"]
    special = SpecialIds(bos=None, eos=ends or (end,), unknown=vocab["<unk>"], after=(end,))
    return MarianTokenizer(model, special, config.added, ids=vocab, where=str(path))

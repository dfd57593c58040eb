"""M2M100's tokenizer: SentencePiece pieces with the ids of vocab.json, and a token per language.

A text to translate is ``__en__ text </s>``; the languages' ids follow those of vocab.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nbflow.tokenization.sentencepiece import SpTokenizer, read_model
from nbflow.tokenization.special_tokens import SpecialIds, special_ids
from nbflow.tokenization.tokenizer_config import AddedToken, read_tokenizer_config
from nbflow.utils.json_file import read_object
from nbflow_kernels.errors import UsageError, unknown_name

_CODES = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu "
    "ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms "
    "my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur "
    "uz vi wo xh yi yo zh zu"
)
LANGUAGES = tuple(_CODES.split())
"""Language codes in the order of their ids."""


def read_vocabulary(path: Path, needed: Sequence[str]) -> dict[str, int]:
    """Return vocab.json, whose ids must be 0..n-1 and include the `needed` tokens."""
    vocab = read_object(path)
    if sorted(map(repr, vocab.values())) != sorted(map(repr, range(len(vocab)))):
        raise UsageError(f"{path}: ids must be 0..{len(vocab) - 1}")
    for token in needed:
        if token not in vocab:
            raise UsageError(f"{path}: the token {token!r} is missing")
    return vocab


def from_file(path: Path) -> SpTokenizer:
    """Read a SentencePiece file with the vocab.json and tokenizer_config.json of its folder.

    ``src_lang`` of tokenizer_config.json is the language put in front; English by default.
    """
    model, config = read_model(path), read_tokenizer_config(path.parent)
    vocab = read_vocabulary(path.with_name("vocab.json"), ("<s>", "</s>", "<unk>"))
    tokens = {f"__{code}__": len(vocab) + i for i, code in enumerate(LANGUAGES)}
    language = config.values.get("src_lang") or "en"
    if language not in LANGUAGES:
        raise unknown_name(
            f"{config.folder / 'tokenizer_config.json'}: src_lang", language, LANGUAGES
        )
    stated = {token.content for token in config.added}
    added = [AddedToken(t, i, special=True) for t, i in tokens.items() if t not in stated]
    _, ends = special_ids(config.folder)
    special = SpecialIds(
        bos=vocab["<s>"],
        eos=ends or (vocab["</s>"],),
        unknown=vocab["<unk>"],
        before=(tokens[f"__{language}__"],),
        after=(vocab["</s>"],),
    )
    return SpTokenizer(model, special, [*added, *config.added], vocab, where=str(path))

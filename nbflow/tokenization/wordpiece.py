"""BERT's WordPiece: ``vocab.txt``, one token per line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbflow.tokenization.huggingface import HfTokenizer, set_post_processor, with_special_ids
from nbflow.tokenization.package_errors import package_errors
from nbflow.tokenization.special_tokens import SpecialIds
from nbflow.tokenization.tokenizer_config import read_tokenizer_config
from nbflow.utils.binary_file import read_text
from nbflow_kernels.errors import UsageError

_MAX_FILE_BYTES = 1 << 28
_DEFAULTS = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
_CLASSES = (None, "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")


def from_file(path: Path) -> HfTokenizer:
    """Read a ``vocab.txt``, with the settings of tokenizer_config.json in its folder."""
    config = read_tokenizer_config(path.parent)
    if config.tokenizer_class not in _CLASSES:
        raise UsageError(
            f"{path}: is read as BERT's WordPiece, but tokenizer_config.json says "
            f"{config.tokenizer_class}; use its tokenizer.json"
        )
    ids = _read(path)
    named = _DEFAULTS | config.named_tokens
    unknown, before, after = (named[f"{name}_token"] for name in ("unk", "cls", "sep"))
    for token in (unknown, before, after):
        if token not in ids:
            raise UsageError(f"{path}: the special token {token!r:.80} is not in the vocabulary")
    lowercase = config.flag("do_lower_case", True)
    with package_errors(f"{path}: the vocabulary is damaged"):
        tokenizer = word_piece(
            ids,
            unknown=unknown,
            lowercase=lowercase,
            strip_accents=config.flag("strip_accents", lowercase),
            chinese=config.flag("tokenize_chinese_chars", True),
        )
        tokenizer.add_special_tokens([token for token in named.values() if token in ids])
        around = SpecialIds(before=(ids[before],), after=(ids[after],))
        set_post_processor(tokenizer, around, typed=True)
    return with_special_ids(tokenizer, path, config)


def _read(path: Path) -> dict[str, int]:
    """Return token -> id, which is the line number."""
    lines = read_text(path, _MAX_FILE_BYTES, "a vocabulary").split("\n")
    if lines[-1] == "":
        lines.pop()
    # of two equal lines the last one wins, as in transformers
    return {line.rstrip("\r"): i for i, line in enumerate(lines)}


def word_piece(
    ids: Mapping[str, int],
    *,
    unknown: str,
    lowercase: bool,
    strip_accents: bool,
    chinese: bool = True,
) -> Any:
    """Return a ``tokenizers.Tokenizer`` of BERT's kind, without special tokens.

    Continuations of a word begin with ``##`` in `ids`; `unknown` is the token of a word that cannot
    be composed; with `chinese`, every Chinese character is a word.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(models.WordPiece(dict(ids), unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=chinese,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer

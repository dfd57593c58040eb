"""Tokenizers of GGUF files, by ``tokenizer.ggml.model``.

==========  ==============================================  =======================================
model       algorithm                                       implementation
==========  ==============================================  =======================================
``llama``   SentencePiece byte-pair encoding by score       `nbflow.tokenization.sentencepiece_bpe`
``gpt2``    byte-level BPE, split by ``tokenizer.ggml.pre``  ``tokenizers``
``gemma4``  BPE with spaces as U+2581 and byte fallback     ``tokenizers``
``bert``    WordPiece                                       ``tokenizers``
``t5``      SentencePiece unigram                           ``sentencepiece``
``rwkv``    longest match                                   `nbflow.tokenization.rwkv`
==========  ==============================================  =======================================
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbflow.tokenization.gguf_metadata import GgufVocabulary, is_added, read_vocabulary
from nbflow.tokenization.huggingface import HfTokenizer, set_post_processor
from nbflow.tokenization.package_errors import package_errors
from nbflow.tokenization.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from nbflow.tokenization.rwkv import RwkvTokenizer
from nbflow.tokenization.sentencepiece import SpTokenizer
from nbflow.tokenization.sentencepiece_bpe import CONTROL, SPACE, UNKNOWN, SpmTokenizer
from nbflow.tokenization.sentencepiece_proto import unigram_model
from nbflow.tokenization.special_tokens import SpecialIds
from nbflow.tokenization.tokenizer import Tokenizer
from nbflow.tokenization.wordpiece import word_piece
from nbflow_kernels.errors import UsageError, unknown_name


def from_file(path: Path) -> Tokenizer:
    """Read the tokenizer of a GGUF file."""
    vocabulary = read_vocabulary(path)
    if vocabulary.model not in _MAKERS:
        raise UsageError(
            f"{path}: {unknown_name('tokenizer.ggml.model', vocabulary.model, _MAKERS)}; "
            "use the tokenizer.json of the original model (tokenizer=FILE, --tokenizer FILE)"
        )
    with package_errors(f"{path}: the vocabulary is damaged"):
        tokenizer = _MAKERS[vocabulary.model](vocabulary)
    tokenizer.chat_templates = vocabulary.chat_templates
    tokenizer.named_tokens = vocabulary.named_tokens()
    return tokenizer


def _spm(vocabulary: GgufVocabulary) -> Tokenizer:
    """SentencePiece byte-pair encoding."""
    # Phi-3's special tokens swallow the white space after them, which its file does not state
    swallow: frozenset[int] = frozenset()
    if re.search("phi-?3", vocabulary.name.lower()):
        swallow = frozenset(
            i
            for i, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True))
            if is_added(kind) and piece not in ("<unk>", "<s>", "<|endoftext|>")
        )
    return SpmTokenizer(
        vocabulary.pieces,
        vocabulary.array("scores", float, len(vocabulary.pieces)),
        vocabulary.types,
        vocabulary.special_ids(add_bos=True),
        add_space_prefix=vocabulary.flag("add_space_prefix", True),
        swallow=swallow,
        where=str(vocabulary.path),
    )


def _bpe(vocabulary: GgufVocabulary) -> Tokenizer:
    """Byte-pair encoding with merges."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    pre = _pre_tokenizer(vocabulary)
    model = models.BPE(
        _vocab(vocabulary),
        _merges(vocabulary),
        ignore_merges=pre.ignore_merges,
        byte_fallback=not pre.byte_level,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre.build()
    if pre.byte_level:
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    special = vocabulary.special_ids(add_bos=pre.add_bos, add_sep=pre.add_sep)
    return _finish(vocabulary, tokenizer, special, not pre.byte_level)


def _pre_tokenizer(vocabulary: GgufVocabulary) -> PreTokenizer:
    """Return the pre-tokenizer, which older files do not state."""
    name = "gemma4" if vocabulary.model == "gemma4" else vocabulary.values.get("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UsageError(
            f"{vocabulary.path}: {unknown_name('tokenizer.ggml.pre', name, PRE_TOKENIZERS)}; "
            "use the tokenizer.json of the original model (tokenizer=FILE, --tokenizer FILE)"
        )
    return PRE_TOKENIZERS[name]


def _vocab(vocabulary: GgufVocabulary) -> dict[str, int]:
    """Return piece -> id."""
    ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    if len(ids) < len(vocabulary.pieces):
        twice = next(p for i, p in enumerate(vocabulary.pieces) if ids[p] != i)
        raise UsageError(f"{vocabulary.path}: the token {twice!r:.60} is there twice")
    return ids


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return the merges as pairs; a piece may begin with a space."""
    merges = []
    for text in vocabulary.array("merges", str):
        space = text.find(" ", 1)
        if space < 0:
            raise UsageError(
                f"{vocabulary.path}: a merge must be two pieces with a space between, "
                f"got {text!r:.60}"
            )
        merges.append((text[:space], text[space + 1 :]))
    return merges


def _word_piece(vocabulary: GgufVocabulary) -> Tokenizer:
    """WordPiece; U+2581 marks beginnings of words in the file, not ``##`` their continuations."""
    special = vocabulary.special_ids(add_bos=True, add_sep=True)
    ids: dict[str, int] = {}
    for i, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True)):
        bracketed = piece.startswith("[") and piece.endswith("]") and len(piece) > 2
        if piece.startswith(SPACE):
            spelt = piece[1:]
        elif kind in (CONTROL, UNKNOWN) or bracketed:
            spelt = piece
        else:
            spelt = f"##{piece}"
        ids[spelt] = i
    if len(ids) < len(vocabulary.pieces):
        raise UsageError(f"{vocabulary.path}: a WordPiece token is there twice")
    if special.unknown is None:
        raise UsageError(f"{vocabulary.path}: WordPiece needs tokenizer.ggml.unknown_token_id")
    lowercase = vocabulary.flag("normalizer.lowercase", True)
    tokenizer = word_piece(
        ids,
        unknown=vocabulary.pieces[special.unknown],
        lowercase=lowercase,
        strip_accents=vocabulary.flag("normalizer.strip_accents", lowercase),
    )
    return _finish(vocabulary, tokenizer, special)


def _finish(
    vocabulary: GgufVocabulary, tokenizer: Any, special: SpecialIds, byte_fallback: bool = False
) -> HfTokenizer:
    """Add the special tokens and the post-processor."""
    import tokenizers

    for special_ones in (True, False):
        tokens = [
            tokenizers.AddedToken(piece, normalized=False, special=special_ones)
            for piece, kind in zip(vocabulary.pieces, vocabulary.types, strict=True)
            if is_added(kind) and (kind in (CONTROL, UNKNOWN)) == special_ones
        ]
        (tokenizer.add_special_tokens if special_ones else tokenizer.add_tokens)(tokens)
    is_bert = type(tokenizer.model).__name__ == "WordPiece"
    set_post_processor(tokenizer, special, typed=is_bert)
    where = str(vocabulary.path)
    return HfTokenizer(tokenizer, special.bos, special.eos, byte_fallback, where=where)


def _unigram(vocabulary: GgufVocabulary) -> Tokenizer:
    """SentencePiece unigram, by the ``sentencepiece`` package."""
    n = len(vocabulary.pieces)
    special = vocabulary.special_ids(add_bos=False, add_eos=True)
    charsmap = vocabulary.values.get("precompiled_charsmap", [])
    if not isinstance(charsmap, list) or not all(
        type(b) is int and -128 <= b < 256 for b in charsmap
    ):
        raise UsageError(f"{vocabulary.path}: precompiled_charsmap must be an array of bytes")
    model = unigram_model(
        vocabulary.pieces,
        vocabulary.array("scores", float, n),
        vocabulary.types,
        charsmap=bytes(b & 255 for b in charsmap),
        add_dummy_prefix=vocabulary.flag("add_space_prefix", True),
        remove_extra_whitespaces=vocabulary.flag("remove_extra_whitespaces", True),
    )
    return SpTokenizer(model, special, where=str(vocabulary.path))


def _rwkv(vocabulary: GgufVocabulary) -> Tokenizer:
    """RWKV's longest match."""
    return RwkvTokenizer(
        vocabulary.pieces, vocabulary.special_ids(add_bos=False), where=str(vocabulary.path)
    )


_MAKERS: dict[str, Callable[[GgufVocabulary], Tokenizer]] = {
    "llama": _spm,
    "gpt2": _bpe,
    "gemma4": _bpe,
    "bert": _word_piece,
    "t5": _unigram,
    "rwkv": _rwkv,
}

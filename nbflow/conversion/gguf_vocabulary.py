"""Vocabulary of a GGUF file from ``tokenizer.json`` or ``tokenizer.model``.

A tokenizer.json of byte-level BPE must have the pre-tokenizer of GPT-2 or one of llama.cpp's
patterns (`nbflow.tokenization.pre_tokenizers`).  A tokenizer.model, or one next to a tokenizer.json
of another kind, must be SentencePiece BPE without normalization, as Llama 2's.  Otherwise the file
gets no vocabulary, and a note says so; ``--tokenizer`` names the tokenizer's own file when the
model is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbflow.checkpoint.readers.gguf import ARRAY, STRING
from nbflow.checkpoint.writers.gguf import BOOL, F32, I32, U32
from nbflow.tokenization import Tokenizer, load_tokenizer_file
from nbflow.tokenization.pre_tokenizers import PRE_TOKENIZERS
from nbflow.tokenization.sentencepiece import SpTokenizer, load_processor, read_model
from nbflow.tokenization.sentencepiece_bpe import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from nbflow.tokenization.sentencepiece_proto import read_settings
from nbflow.utils.json_file import read_object
from nbflow_kernels.errors import MissingExtraError, UsageError

_UNUSED = 5
_PREFERRED = ("gpt-2", "qwen2", "llama-bpe")
"""Names preferred for a pattern that several pre-tokenizers share."""

Entries = dict[str, Any]


class _NotWritableError(Exception):
    """The reason why GGUF cannot store a tokenizer."""


def vocabulary(path: Path | None, n_tokens: int) -> tuple[Entries, list[str]]:
    """Return the metadata of a tokenizer, or of none with a note that says why.

    Parameters
    ----------
    path : Path or None
        The model's tokenizer file.
    n_tokens : int
        Rows of the embedding; ids without a token get padding tokens.
    """
    try:
        if path is None:
            raise _NotWritableError("the model has no tokenizer file")
        if path.name not in ("tokenizer.json", "tokenizer.model"):
            raise _NotWritableError(
                f"{path.name} is not written, only tokenizer.json and tokenizer.model"
            )
        tokenizer = load_tokenizer_file(path)  # a damaged file ends here
        pieces = path.with_name("tokenizer.model")
        if path == pieces:
            return _sentencepiece(path, n_tokens), []
        table = read_object(path)
        model = table.get("model")
        if isinstance(model, dict) and model.get("byte_fallback") and pieces.is_file():
            _check_same(tokenizer, load_tokenizer_file(pieces))
            return _sentencepiece(pieces, n_tokens), []
        return _byte_level(table, n_tokens), []
    except (_NotWritableError, UsageError, MissingExtraError) as reason:
        note = f"no vocabulary in the file: {reason}; name the tokenizer's file when you run it"
        return {"tokenizer.ggml.model": ((STRING,), "no_vocab")}, [note]


def _byte_level(table: dict[str, Any], n_tokens: int) -> Entries:
    """Return the metadata of a tokenizer.json."""
    model = table.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("byte_fallback"):
        raise _NotWritableError("tokenizer.json is not of byte-level BPE")
    if table.get("normalizer") not in (None, {"type": "NFC"}) or model.get("unk_token"):
        raise _NotWritableError("tokenizer.json normalizes text")
    pre = _pre_name(table.get("pre_tokenizer"), bool(model.get("ignore_merges")))
    vocab, added, merges = model.get("vocab"), table.get("added_tokens"), model.get("merges")
    if not isinstance(vocab, dict) or not isinstance(merges, list) or not isinstance(added, list):
        raise _NotWritableError("tokenizer.json lacks its vocabulary or its merges")
    tokens = [f"[PAD{i}]" for i in range(n_tokens)]
    types = [_UNUSED] * n_tokens
    special = {t["id"]: t for t in added}
    by_id = {i: token for token, i in vocab.items()} | {i: t["content"] for i, t in special.items()}
    for i, token in by_id.items():
        if type(i) is not int or not 0 <= i < n_tokens:
            raise _NotWritableError(f"token {token!r:.40} has id {i!r:.20}, beyond {n_tokens} ids")
        tokens[i] = token
        types[i] = NORMAL
        if i in special:
            types[i] = CONTROL if special[i].get("special") else USER_DEFINED
    pairs = [" ".join(m) if isinstance(m, list) else m for m in merges]
    return {
        "tokenizer.ggml.model": ((STRING,), "gpt2"),
        "tokenizer.ggml.pre": ((STRING,), pre),
        "tokenizer.ggml.tokens": ((ARRAY, STRING), tokens),
        "tokenizer.ggml.token_type": ((ARRAY, I32), types),
        "tokenizer.ggml.merges": ((ARRAY, STRING), pairs),
        "tokenizer.ggml.add_bos_token": ((BOOL,), _adds_bos(table.get("post_processor"))),
    }


_SAMPLES = ("Hello world", "  two spaces, a\ttab\n", "x = f(1.5) # café 漢字 🦩", "don't")
"""Texts on which two files of one tokenizer must agree."""


def _check_same(one: Tokenizer, other: Tokenizer) -> None:
    """Raise unless tokenizer.json and tokenizer.model give the same tokens."""
    for text in _SAMPLES:
        if one.encode(text) != other.encode(text):
            raise _NotWritableError(f"tokenizer.json and tokenizer.model differ for {text!r}")


def _sentencepiece(path: Path, n_tokens: int) -> Entries:
    """Return the metadata of a SentencePiece file of BPE, with the tokens added to it."""
    data = read_model(path)
    try:
        settings = read_settings(data)
    except ValueError as error:
        raise UsageError(f"{path}: not a readable SentencePiece model: {error}") from None
    if not settings.is_bpe:
        raise _NotWritableError(f"{path.name} is not of byte-pair encoding")
    if settings.has_rules or settings.remove_extra_whitespaces:
        raise _NotWritableError(f"{path.name} normalizes text")
    tokenizer = load_tokenizer_file(path)
    if not isinstance(tokenizer, SpTokenizer) or tokenizer.vocab_size > n_tokens:
        raise _NotWritableError(f"{path.name} has {tokenizer.vocab_size} tokens, not {n_tokens}")
    sp = load_processor(data, str(path))
    tokens, scores, types = [], [], []
    for i in range(n_tokens):
        own = i < sp.get_piece_size()
        tokens.append(tokenizer.piece(i) if i < tokenizer.vocab_size else f"[PAD{i}]")
        scores.append(sp.get_score(i) if own else 0.0)
        kind = _UNUSED if i >= tokenizer.vocab_size else NORMAL if own else USER_DEFINED
        if own and (sp.is_unknown(i) or sp.is_byte(i)):
            kind = UNKNOWN if sp.is_unknown(i) else BYTE
        elif tokens[-1] in tokenizer.special_tokens:
            kind = CONTROL
        types.append(kind)
    special = tokenizer.special_ids
    if special.after or special.before not in ((), (special.bos,)):
        raise _NotWritableError(f"{path.name} puts tokens around a text")
    return {
        "tokenizer.ggml.model": ((STRING,), "llama"),
        "tokenizer.ggml.tokens": ((ARRAY, STRING), tokens),
        "tokenizer.ggml.scores": ((ARRAY, F32), scores),
        "tokenizer.ggml.token_type": ((ARRAY, I32), types),
        "tokenizer.ggml.unknown_token_id": ((U32,), sp.unk_id()),
        "tokenizer.ggml.add_bos_token": ((BOOL,), bool(special.before)),
        "tokenizer.ggml.add_space_prefix": ((BOOL,), settings.add_dummy_prefix),
    }


def _pre_name(pre: Any, ignore_merges: bool) -> str:
    """Return llama.cpp's name of a pre-tokenizer."""
    steps = pre.get("pretokenizers", [pre]) if isinstance(pre, dict) else []
    patterns, rest = [], list(steps)
    while rest and rest[0].get("type") == "Split" and rest[0].get("behavior") == "Isolated":
        patterns.append(rest.pop(0).get("pattern", {}).get("Regex"))
    is_last = len(rest) == 1 and rest[0].get("type") == "ByteLevel"
    if not is_last or rest[0].get("add_prefix_space"):
        raise _NotWritableError("tokenizer.json cuts text in a way that GGUF has no name for")
    if rest[0].get("use_regex", True):
        patterns.append(PRE_TOKENIZERS["gpt-2"].patterns[0])
    for name in (*_PREFERRED, *PRE_TOKENIZERS):
        known = PRE_TOKENIZERS[name]
        same = known.patterns == tuple(patterns) and known.ignore_merges == ignore_merges
        if same and known.byte_level and not known.add_sep:
            return name
    raise _NotWritableError("tokenizer.json cuts text in a way that GGUF has no name for")


def _adds_bos(post: Any) -> bool:
    """Return True if BOS is prepended to a text; GGUF cannot store other templates."""
    steps = post.get("processors", [post]) if isinstance(post, dict) else []
    before = False
    for step in steps:
        if step.get("type") == "ByteLevel":
            continue
        single = step.get("single") if step.get("type") == "TemplateProcessing" else None
        kinds = [next(iter(item)) for item in single or []]
        if kinds not in (["Sequence"], ["SpecialToken", "Sequence"]):
            raise _NotWritableError("tokenizer.json puts tokens around a text")
        before = before or len(kinds) == 2
    return before

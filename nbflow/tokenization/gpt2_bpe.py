"""GPT-2's byte-level BPE as two files: ``vocab.json`` and ``merges.txt``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbflow.tokenization.huggingface import HfTokenizer, set_post_processor, with_special_ids
from nbflow.tokenization.package_errors import package_errors
from nbflow.tokenization.pre_tokenizers import PRE_TOKENIZERS
from nbflow.tokenization.special_tokens import MAX_VOCABULARY, SpecialIds
from nbflow.tokenization.tokenizer_config import TokenizerConfig, read_tokenizer_config
from nbflow.utils.binary_file import read_text
from nbflow.utils.json_file import read_object
from nbflow_kernels.errors import UsageError

_MAX_FILE_BYTES = 1 << 28
_GPT2 = (None, "GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizer")
_AROUND = ("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer")
_QWEN2 = "Qwen2Tokenizer"


def from_file(path: Path) -> HfTokenizer:
    """Read a ``vocab.json`` with the ``merges.txt`` and settings of its folder."""
    import tokenizers
    from tokenizers import models

    config = read_tokenizer_config(path.parent)
    kinds = (*_GPT2, *_AROUND, _QWEN2)
    if config.tokenizer_class not in kinds:
        raise UsageError(
            f"{path}: is read as byte-level BPE, but tokenizer_config.json says "
            f"{config.tokenizer_class}; use its tokenizer.json"
        )
    vocab = read_object(path)
    if not all(type(i) is int and 0 <= i < MAX_VOCABULARY for i in vocab.values()):
        raise UsageError(f"{path}: every token must have an id, 0 to {MAX_VOCABULARY - 1}")
    merges = _merges(path.with_name("merges.txt"))
    with package_errors(f"{path}: does not fit merges.txt"):
        model = models.BPE(vocab, merges)
    with package_errors(f"{path}: does not fit the other files of its folder"):
        tokenizer = tokenizers.Tokenizer(model)
        _set_steps(tokenizer, config)
        _add_tokens(tokenizer, config, vocab)
        special = _around(tokenizer, config)
        set_post_processor(tokenizer, special)
    return with_special_ids(tokenizer, path, config)


def _merges(path: Path) -> list[tuple[str, str]]:
    """Return the merges: one pair a line, after a comment."""
    lines = read_text(path, _MAX_FILE_BYTES, "a list of merges").split("\n")
    merges = []
    for number, line in enumerate(lines, 1):
        pair = line.rstrip("\r").split(" ")
        if (number == 1 and line.startswith("#version")) or pair == [""]:
            continue
        if len(pair) != 2 or not all(pair):
            raise UsageError(f"{path}:{number}: must be two pieces, got {line!r:.60}")
        merges.append((pair[0], pair[1]))
    return merges


def _set_steps(tokenizer: Any, config: TokenizerConfig) -> None:
    """Set normalizer, pre-tokenizer and decoder."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    tokenizer.decoder = decoders.ByteLevel()
    if config.tokenizer_class == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = PRE_TOKENIZERS["qwen2"].build()
    else:
        prefix = config.flag("add_prefix_space", False)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)


def _add_tokens(tokenizer: Any, config: TokenizerConfig, vocab: dict[str, int]) -> None:
    """Add the tokens of the configuration at the ids stated there."""
    import tokenizers

    for token in config.added:
        added = tokenizers.AddedToken(
            token.content,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([added])
        if tokenizer.token_to_id(token.content) != token.token_id:
            raise UsageError(
                f"{config.folder}: the added token {token.content!r:.60} should have id "
                f"{token.token_id}, but the ids before it are not all taken"
            )
    known = {token.content for token in config.added}
    tokenizer.add_special_tokens(
        [t for t in config.named_tokens.values() if t in vocab and t not in known]
    )


def _around(tokenizer: Any, config: TokenizerConfig) -> SpecialIds:
    """Return the special ids around a text."""
    roberta = config.tokenizer_class in _AROUND

    def ids(wanted: bool, *names: str) -> tuple[int, ...]:
        for name in names if wanted else ():
            token = config.named_tokens.get(name)
            found = None if token is None else tokenizer.token_to_id(token)
            if found is not None:
                return (found,)
        return ()

    return SpecialIds(
        before=ids(roberta or config.flag("add_bos_token", False), "cls_token", "bos_token"),
        after=ids(roberta or config.flag("add_eos_token", False), "sep_token", "eos_token"),
    )

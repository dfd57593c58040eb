"""Writes tokenizer files: GGUF vocabularies of every kind from small trained ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizers"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"


def write_gguf(
    path: Path,
    model: str,
    tokens: list[str],
    types: list[int],
    *,
    scores: list[float] | None = None,
    merges: list[str] | None = None,
    pre: str | None = None,
    template: str | None = None,
    ids: dict[str, int] | None = None,
    **flags: bool,
) -> Path:
    """Write a GGUF file that holds nothing but a vocabulary."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_types(types)
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if template is not None:
        writer.add_chat_template(template)
    for name, token_id in (ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    for name, flag in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bpe_gguf(path: Path, pre: str, **more: Any) -> Path:
    """Write the byte-level BPE vocabulary of the golden files with a pre-tokenizer."""
    vocab = json.loads((GOLDEN / "bpe" / "vocab.json").read_text(encoding="utf-8"))
    merges = (GOLDEN / "bpe" / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [CONTROL if t == "<|endoftext|>" else NORMAL for t in tokens] + [CONTROL, USER_DEFINED]
    tokens += ["<|im_end|>", "<tool>"]
    end = vocab["<|endoftext|>"]
    return write_gguf(
        path, "gpt2", tokens, types, merges=merges, pre=pre, ids={"bos": end, "eos": end}, **more
    )


def sp_pieces(name: str) -> tuple[list[str], list[float], list[int], dict[str, int]]:
    """Return pieces, scores, types and special ids of a SentencePiece model."""
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / name))
    n = sp.get_piece_size()
    types = [
        UNKNOWN if sp.is_unknown(i)
        else CONTROL if sp.is_control(i)
        else BYTE if sp.is_byte(i)
        else NORMAL
        for i in range(n)
    ]  # fmt: skip
    ids = {"bos": sp.bos_id(), "eos": sp.eos_id(), "unknown": sp.unk_id()}
    return (
        [sp.id_to_piece(i) for i in range(n)],
        [sp.get_score(i) for i in range(n)],
        types,
        {key: i for key, i in ids.items() if i >= 0},
    )


def spm_gguf(path: Path) -> Path:
    """Write the SentencePiece BPE vocabulary of the golden files."""
    pieces, scores, types, ids = sp_pieces("sp_bpe/tokenizer.model")
    return write_gguf(path, "llama", pieces, types, scores=scores, ids=ids)


def ugm_gguf(path: Path) -> Path:
    """Write the SentencePiece unigram vocabulary of the golden files, as T5 has it."""
    pieces, scores, types, ids = sp_pieces("sp_unigram/spiece.model")
    return write_gguf(
        path, "t5", pieces, types, scores=scores, ids=ids,
        add_space_prefix=True, remove_extra_whitespaces=True, add_eos_token=True,
    )  # fmt: skip


def wpm_gguf(path: Path) -> Path:
    """Write the WordPiece vocabulary of the golden files."""
    text = (GOLDEN / "wordpiece" / "vocab.txt").read_text(encoding="utf-8")
    lines = text.removesuffix("\n").split("\n")
    special = {"[PAD]": "padding", "[UNK]": "unknown", "[CLS]": "bos", "[SEP]": "seperator"}
    tokens = [
        t if t in special or t == "[MASK]" else t[2:] if t.startswith("##") else SPACE + t
        for t in lines
    ]
    types = [CONTROL if t in special or t == "[MASK]" else NORMAL for t in lines]
    ids = {key: lines.index(token) for token, key in special.items()}
    return write_gguf(path, "bert", tokens, types, ids=ids)


def rwkv_gguf(path: Path) -> Path:
    """Write a vocabulary of RWKV's kind: escaped bytes and a few words."""
    words = [
        "the",
        " the",
        "ab",
        "abc",
        "abcd",
        "\u65e5",
        "\u65e5\u672c",
        "\\n\\n",
        "\\t\\t",
        "\\\\",
    ]
    tokens = ["<s>", *(f"\\x{b:02x}" for b in range(256)), *words]
    return write_gguf(path, "rwkv", tokens, [NORMAL] * len(tokens), ids={"bos": 0, "eos": 0})


def gemma_gguf(path: Path) -> Path:
    """Write a small Gemma 4 vocabulary: merges over U+2581, and bytes."""
    pieces = [
        "<pad>",
        "<eos>",
        "<bos>",
        "\n",
        "\n\n",
        "\u2581",
        "a",
        "b",
        "ab",
        "\u2581a",
        "\u65e5",
    ]
    tokens = [*pieces, *(f"<0x{b:02X}>" for b in range(256))]
    types = [CONTROL] * 3 + [NORMAL] * 8 + [BYTE] * 256
    merges = ["a b", "\u2581 a", "\n \n"]
    ids = {"bos": 2, "eos": 1}
    return write_gguf(path, "gemma4", tokens, types, merges=merges, ids=ids)

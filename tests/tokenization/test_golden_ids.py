"""Ids of every kind of tokenizer against the reference implementations (tests/golden/tokenizers).

tools/golden/tokenizer_ids.py made them with transformers, SentencePiece and llama.cpp.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizer_files import GOLDEN, bpe_gguf, gemma_gguf, rwkv_gguf, spm_gguf, ugm_gguf, wpm_gguf

from nbflow.spec import load_tokenizer
from nbflow.tokenization import Tokenizer
from nbflow.tokenization.pre_tokenizers import PRE_TOKENIZERS

IDS = json.loads((GOLDEN / "ids.json").read_text())
TEXTS: list[str] = IDS["texts"]
GGUF = {"spm": spm_gguf, "ugm": ugm_gguf, "rwkv": rwkv_gguf, "gemma4": gemma_gguf}


def check(tokenizer: Tokenizer, expected: list[list[int]], **options: bool) -> None:
    wrong = [
        f"{text!r}: got {tokenizer.encode(text, **options)}, wanted {ids}"
        for text, ids in zip(TEXTS, expected, strict=True)
        if tokenizer.encode(text, **options) != ids
    ]
    assert not wrong, "\n".join(wrong[:5])


def copied(name: str, folder: Path, config: dict[str, object]) -> Path:
    shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_vocab_json_and_merges_are_gpt2(tmp_path: Path) -> None:
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    tokenizer = load_tokenizer(copied("bpe", tmp_path, config))
    check(tokenizer, IDS["transformers"]["bpe"])
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.encode("a<|endoftext|>", parse_special=True)[-1] == 0


def test_vocab_txt_is_bert(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(copied("wordpiece", tmp_path, {"tokenizer_class": "BertTokenizer"}))
    check(tokenizer, IDS["transformers"]["wordpiece"], add_special_tokens=True)


def test_wordpiece_in_gguf_is_bert(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(wpm_gguf(tmp_path / "wpm.gguf"))
    check(tokenizer, IDS["transformers"]["wordpiece"], add_special_tokens=True)


@pytest.mark.parametrize("name", IDS["sentencepiece"])
def test_model_files_are_sentencepiece(name: str) -> None:
    tokenizer = load_tokenizer(GOLDEN / name)
    check(tokenizer, IDS["sentencepiece"][name]["ids"])
    for ids, text in zip(*IDS["sentencepiece"][name].values(), strict=True):
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", GGUF)
def test_gguf_is_llama_cpp(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(GGUF[name](tmp_path / "vocabulary.gguf"))
    check(tokenizer, IDS["llama.cpp"][name]["text"])
    check(tokenizer, IDS["llama.cpp"][name]["special"], parse_special=True)


def test_spm_in_gguf_is_sentencepiece(tmp_path: Path) -> None:
    """Merges made from scores against SentencePiece itself, which gives an empty text no space."""
    tokenizer = load_tokenizer(spm_gguf(tmp_path / "spm.gguf"))
    check(tokenizer, IDS["sentencepiece"]["sp_bpe/tokenizer.model"]["ids"])


@pytest.mark.parametrize("record", IDS["llama.cpp"]["bpe"], ids=lambda r: r["names"][0])
def test_pre_tokenizers_are_llama_cpp(record: dict[str, list], tmp_path: Path) -> None:
    for name in record["names"]:
        check(load_tokenizer(bpe_gguf(tmp_path / f"{name}.gguf", name)), record["ids"])


def test_every_pre_tokenizer_is_recorded() -> None:
    recorded = {name for record in IDS["llama.cpp"]["bpe"] for name in record["names"]}
    assert recorded == {name for name, pre in PRE_TOKENIZERS.items() if pre.byte_level}

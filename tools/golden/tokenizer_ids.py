# ruff: noqa: E501  # templates and texts are clearer on one line
"""Train tiny vocabularies of every kind and record the reference tokenizers' ids of hard texts.

    pip install transformers sentencepiece tokenizers gguf llama-cpp-python
    PYTHONPATH=.:kernels:tests python tools/golden/tokenizer_ids.py

Writes tests/golden/tokenizers: vocabularies (trained on the text that comes with the bundled model
and a few sentences in other languages) and ids.json, the ids of transformers (GPT-2, BERT),
SentencePiece, and llama.cpp (GGUF vocabularies, one per pre-tokenizer).
"""

from __future__ import annotations

import ctypes
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import sentencepiece
import tokenizers
import transformers
from tokenizer_files import (
    GOLDEN,
    bpe_gguf,
    gemma_gguf,
    rwkv_gguf,
    spm_gguf,
    ugm_gguf,
)
from tokenizers import models, normalizers, pre_tokenizers, trainers

from nbflow.tokenization.pre_tokenizers import PRE_TOKENIZERS

GGUF = {"spm": spm_gguf, "ugm": ugm_gguf, "rwkv": rwkv_gguf, "gemma4": gemma_gguf}
SENTENCES = """\
The quick brown fox jumps over the lazy dog. Don't you think it's nice? We'll see, I'm sure!
Der Zweck heiligt die Mittel nicht; \u00dcbergr\u00f6\u00dfe und Stra\u00dfenl\u00e4rm st\u00f6ren.
O\u00f9 est la biblioth\u00e8que ? \u00c7a va tr\u00e8s bien, na\u00efve caf\u00e9.
\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u041a\u0430\u043a \u0434\u0435\u043b\u0430?
\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002\u4e2d\u6587\u5b57\u7b26\u6d4b\u8bd5\uff0c\u6ca1\u6709\u7a7a\u683c\u3002
\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4
\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645
1234567890 12 345 6,789.01
"""

TEXTS = [
    "", " ", "  ", "\n", "\t\t\n", "Hello world", " Hello", "Hello  world   again", "a\n\nb\n\n\nc",
    "The na\u00efve caf\u00e9 \u2014 \u65e5\u672c\u8a9e and \U0001f642\U0001f643!",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 family \U0001f469\U0001f3fd\u200d\U0001f680 \U0001f1e9\U0001f1ea",
    "def f(x):\n    return x ** 2  # squares\n\n\nclass A:\n\tpass\n",
    "1234567890 12 345 6,789.01 \u0661\u0662\u0663 \u2167 \u00bd",
    "don't I'll WE'VE she's IT'S o'clock'",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0646\u0639\u0645",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u041a\u0430\u043a \u0434\u0435\u043b\u0430?",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4", "\x01\x02\x07\x1b[0m\x7f", "a\u200bb\u00adc\ufeffd",
    "e\u0301 n\u0303 \u00e9 \u00f1 \ufb01", " " * 300, "\n" * 100, "a" * 90, "ab " * 100,
    "\u4e2d\u6587\u5b57\u7b26\u6d4b\u8bd5\uff0c\u6ca1\u6709\u7a7a\u683c\u3002" * 4,
    "x=[{'a':1,\"b\":[2,3]}];//c\r\n\r\n  y", "<s>hi</s> <|im_start|>user<|endoftext|> <unk> [CLS]",
    "\u2581\u2581 a\u2581b", "\u0130stanbul \u00df \u1e9e", "\u00a0nbsp\u3000wide\u2028line\x85nel\x0b\x0c",
    "\U0001d518 \U00013000 \U0010fffd", "http://example.com/a?b=c&d=%20#e",
    "    four\n        eight\n\tTab", "don\u2019t \u201cquotes\u201d \u2026",
    "CamelCaseWordsAndXMLHttpRequest HTTPServer2XX", "<tool>x</tool><tool>",
]  # fmt: skip


def hard_texts() -> list[str]:
    source = random.Random(11)
    letters = (
        "abcde\u00e9\u00df ABZ  \n\t'.,!?-_()[]{}<>|/\\0123456789\u65e5\u672c\u0627\u043b"
        "\U0001f600\u200d\U0001f3fd\u0301\u03a9"
    )
    return TEXTS + ["".join(source.choices(letters, k=source.randrange(1, 40))) for _ in range(30)]


def train(corpus: str) -> None:
    for name in ("bpe", "wordpiece", "sp_bpe", "sp_unigram"):
        (GOLDEN / name).mkdir(parents=True, exist_ok=True)
    lines = corpus.splitlines(keepends=True)
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=700, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
        ),
    )
    bpe.model.save(str(GOLDEN / "bpe"))
    word_piece = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    word_piece.normalizer = normalizers.BertNormalizer(lowercase=True)
    word_piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    word_piece.train_from_iterator(
        lines, trainers.WordPieceTrainer(vocab_size=600, special_tokens=special)
    )
    word_piece.model.save(str(GOLDEN / "wordpiece"))
    kinds: dict[str, dict[str, Any]] = {
        "sp_bpe/tokenizer": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 700,
                             "normalization_rule_name": "identity", "split_digits": True,
                             "remove_extra_whitespaces": False},
        "sp_unigram/spiece": {"model_type": "unigram", "vocab_size": 500, "bos_id": -1,
                              "pad_id": 0, "eos_id": 1, "unk_id": 2},
    }  # fmt: skip
    for name, options in kinds.items():
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus.splitlines()),
            model_prefix=str(GOLDEN / name),
            character_coverage=0.9995,
            minloglevel=2,
            **options,
        )
        (GOLDEN / f"{name}.vocab").unlink()


def llama_ids(path: Path, texts: list[str]) -> dict[str, list[list[int]]]:
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    vocab = llama_cpp.llama_model_get_vocab(model)

    def ids(text: str, special: bool) -> list[int]:
        data = text.encode()
        found = (llama_cpp.llama_token * (len(data) + 16))()
        n = llama_cpp.llama_tokenize(vocab, data, len(data), found, len(data) + 16, False, special)
        return list(found[:n])

    result = {"text": [ids(t, False) for t in texts], "special": [ids(t, True) for t in texts]}
    llama_cpp.llama_model_free(model)
    return result


@llama_cpp.llama_log_callback
def quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


def main() -> None:
    root = Path(__file__).parents[2]
    corpus = (
        root / "specs" / "nbflow_specs" / "checkpoints" / "tiny_python" / "eval.txt"
    ).read_text()[:60_000]
    train(corpus + SENTENCES * 20)
    texts = hard_texts()
    gpt2 = transformers.GPT2Tokenizer.from_pretrained(GOLDEN / "bpe")
    bert = transformers.BertTokenizer.from_pretrained(GOLDEN / "wordpiece")
    golden: dict[str, Any] = {
        "texts": texts,
        "transformers": {},
        "sentencepiece": {},
        "llama.cpp": {},
    }
    golden["transformers"]["bpe"] = [
        gpt2.encode(t, add_special_tokens=False, split_special_tokens=True) for t in texts
    ]
    golden["transformers"]["wordpiece"] = [
        bert.encode(t, add_special_tokens=True, split_special_tokens=True) for t in texts
    ]
    for name in ("sp_bpe/tokenizer.model", "sp_unigram/spiece.model"):
        sp = sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / name))
        ids = [sp.encode(t) for t in texts]
        golden["sentencepiece"][name] = {"ids": ids, "decoded": [sp.decode(i) for i in ids]}
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(quiet, None)
    with tempfile.TemporaryDirectory() as folder:
        for name, write in GGUF.items():
            golden["llama.cpp"][name] = llama_ids(write(Path(folder) / f"{name}.gguf"), texts)
        by_cut: dict[str, Any] = {}  # names that cut alike share a record
        for name, pre in PRE_TOKENIZERS.items():
            if pre.byte_level:
                found = llama_ids(bpe_gguf(Path(folder) / "bpe.gguf", name), texts)["text"]
                record = by_cut.setdefault(json.dumps(found), {"names": [], "ids": found})
                record["names"].append(name)
        golden["llama.cpp"]["bpe"] = list(by_cut.values())
    (GOLDEN / "ids.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

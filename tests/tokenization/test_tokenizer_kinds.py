"""Properties of all kinds of tokenizers: streams, special tokens, parts; and errors."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizer_files as files
from tokenizer_files import CONTROL, GOLDEN, NORMAL

import nbflow
from nbflow.spec import load_tokenizer
from nbflow.tokenization import Tokenizer
from nbflow.tokenization.sentencepiece_bpe import score_bpe
from nbflow_kernels.errors import MissingExtraError, UsageError

TEXTS: list[str] = json.loads((GOLDEN / "ids.json").read_text())["texts"]
KINDS: dict[str, Callable[[Path], Path]] = {
    "bpe in gguf": lambda folder: files.bpe_gguf(folder / "a.gguf", "llama-bpe"),
    "spm in gguf": lambda folder: files.spm_gguf(folder / "a.gguf"),
    "ugm in gguf": lambda folder: files.ugm_gguf(folder / "a.gguf"),
    "wpm in gguf": lambda folder: files.wpm_gguf(folder / "a.gguf"),
    "rwkv in gguf": lambda folder: files.rwkv_gguf(folder / "a.gguf"),
    "gemma4 in gguf": lambda folder: files.gemma_gguf(folder / "a.gguf"),
    "sentencepiece bpe": lambda folder: GOLDEN / "sp_bpe" / "tokenizer.model",
    "sentencepiece unigram": lambda folder: GOLDEN / "sp_unigram" / "spiece.model",
    "vocab.json": lambda folder: GOLDEN / "bpe",
    "vocab.txt": lambda folder: GOLDEN / "wordpiece",
    "llama2.c": lambda folder: GOLDEN.parent / "llama2c" / "tokenizer.bin",
    "tokenizer.json": lambda folder: Path("tiny_python"),
}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return load_tokenizer(KINDS[request.param](tmp_path))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.decode_stream()
    return "".join([*(stream.push(i) for i in ids), stream.finish()])


def test_stream_is_decode(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    source = random.Random(3)
    for _ in range(60):
        ids = [source.randrange(tokenizer.vocab_size) for _ in range(source.randrange(1, 30))]
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_stream_never_shows_half_a_character(tokenizer: Tokenizer) -> None:
    text = "ab \u65e5\u672c \U0001f642\u200d\U0001f680 \u00e9"
    ids = tokenizer.encode(text)
    stream = tokenizer.decode_stream()
    assert not any("\ufffd" in stream.push(i) for i in ids)


def test_ids_pieces_and_parts(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    ids = tokenizer.encode("ab  c\n")
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.encode_parts(["ab  ", "c\n"]) == ids
    for i in ids:
        assert tokenizer.token_id(tokenizer.piece(i)) == i
    with pytest.raises(UsageError, match="token id must be"):
        tokenizer.encode_parts([tokenizer.vocab_size])
    with pytest.raises(UsageError, match="lone surrogate"):
        tokenizer.encode("\ud800")
    for token in (0, tokenizer.vocab_size - 1):
        assert [i for i in tokenizer.encode_parts(["ab", token, "ab"]) if i == token] == [token]


def test_special_tokens_are_text_unless_asked(tokenizer: Tokenizer) -> None:
    for token, token_id in tokenizer.special_tokens.items():
        text = f"ab{token}ab"
        assert token_id not in tokenizer.encode(text) or "unk" in token.lower()
        assert token_id in tokenizer.encode(text, parse_special=True)
        parts = tokenizer.split_special(text)
        assert token_id in parts
        assert tokenizer.encode_parts(parts) == tokenizer.encode(text, parse_special=True)


def test_round_trips(tmp_path: Path) -> None:
    """Byte-level and byte-fallback vocabularies lose nothing."""
    for kind in ("bpe in gguf", "spm in gguf", "rwkv in gguf", "gemma4 in gguf", "vocab.json"):
        tokenizer = load_tokenizer(KINDS[kind](tmp_path))
        for text in TEXTS:
            shown = text.replace("\u2581", " ") if kind[0] in "sg" else text
            assert tokenizer.decode(tokenizer.encode(text)) == shown, kind


def test_user_defined_tokens_are_always_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(files.bpe_gguf(tmp_path / "a.gguf", "gpt-2"))
    tool = tokenizer.token_id("<tool>")
    assert tokenizer.encode("a<tool>b").count(tool) == 1
    assert tokenizer.decode([tool]) == "<tool>"


def test_ends_of_generation(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(files.bpe_gguf(tmp_path / "a.gguf", "gpt-2"))
    assert [tokenizer.piece(i) for i in tokenizer.eos_ids] == ["<|endoftext|>", "<|im_end|>"]
    names = ["<|return|>", "<|call|>", "<|end|>", "<|channel|>", "a", "b", "ab"]
    types = [CONTROL] * 4 + [NORMAL] * 3
    path = files.write_gguf(tmp_path / "b.gguf", "gpt2", names, types, merges=["a b"], pre="gpt-4o")
    harmony = load_tokenizer(path)
    assert harmony.eos_ids == (0, 1)
    assert harmony.decode([3]) == "<|channel|>"


def test_bos_and_eos_go_around_where_the_file_says(tmp_path: Path) -> None:
    def around(pre: str, **flags: bool) -> tuple[bool, bool]:
        tokenizer = load_tokenizer(files.bpe_gguf(tmp_path / "a.gguf", pre, **flags))
        ids = tokenizer.encode("ab", add_special_tokens=True)
        return ids[0] == tokenizer.bos_id, ids[-1] == tokenizer.bos_id

    assert around("gpt-2") == (False, False)
    assert around("llama-bpe") == (True, False)
    assert around("llama-bpe", add_bos_token=False) == (False, False)
    assert around("gpt-2", add_bos_token=True, add_eos_token=True) == (True, True)
    assert around("roberta-bpe") == (False, True)


def test_phi3_swallows_spaces_behind_special_tokens(tmp_path: Path) -> None:
    names = ["<unk>", "<s>", "</s>", "<|user|>", "\u2581", "a", "\u2581a"]
    types = [files.UNKNOWN, CONTROL, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL]
    scores = [0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0]
    import gguf

    ids = {}
    for name in ("Phi-3 mini", "Other"):
        writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "phi3")
        writer.add_name(name)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(names)
        writer.add_token_types(types)
        writer.add_token_scores(scores)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        tokenizer = load_tokenizer(tmp_path / "a.gguf")
        ids[name] = tokenizer.encode("<|user|>  a", parse_special=True)
    assert ids == {"Phi-3 mini": [3, 6], "Other": [3, 4, 4, 6]}


def test_added_tokens_behind_a_sentencepiece_model(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "sp_bpe" / "tokenizer.model", tmp_path)
    n = load_tokenizer(tmp_path).vocab_size
    decoder = {
        str(n): {"content": "<|im_start|>", "special": True},
        str(n + 1): {"content": "<think>", "special": False},
    }
    config = {"added_tokens_decoder": decoder, "eos_token": "<|im_start|>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == n + 2
    assert tokenizer.eos_ids == (n,)
    ids = tokenizer.encode("<|im_start|>a<think>")
    assert n not in ids
    assert ids[-1] == n + 1
    assert tokenizer.encode("<|im_start|>a", parse_special=True, add_special_tokens=True)[0] == n
    assert tokenizer.decode([n, n + 1]) == "<think>"
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ChatGLMTokenizer"}')
    assert load_tokenizer(tmp_path).encode("a", add_special_tokens=True)[:2] == [n + 1, n + 3]
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NllbTokenizerFast"}')
    with pytest.raises(UsageError, match=r"ids of NllbTokenizer are not those of its Sentence"):
        load_tokenizer(tmp_path)


def test_m2m100_renumbers_pieces(tmp_path: Path) -> None:
    """Ids from vocab.json, languages behind them; equal to transformers' M2M100Tokenizer."""
    shutil.copy(GOLDEN / "sp_bpe" / "tokenizer.model", tmp_path / "sentencepiece.bpe.model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "M2M100Tokenizer"}')
    pieces = files.sp_pieces("sp_bpe/tokenizer.model")[0]
    text = [p for p in pieces if p not in ("<s>", "</s>", "<unk>", "\u2581re")]
    vocab = {p: i for i, p in enumerate(["<s>", "<pad>", "</s>", "<unk>", *text])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == len(vocab) + 100
    english, chinese = len(vocab) + 18, len(vocab) + 98  # the 19th and 99th language
    ids = tokenizer.encode("def", add_special_tokens=True)
    assert (ids[0], ids[-1]) == (english, 2)
    plain = load_tokenizer(GOLDEN / "sp_bpe")
    assert ids[1:-1] == [vocab[plain.piece(i)] for i in plain.encode("def")]
    assert tokenizer.decode(ids) == "def"
    assert tokenizer.encode("__zh__", parse_special=True) == [chinese]
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(UsageError, match=r"vocab\.json"):
        load_tokenizer(tmp_path)


def marian_folder(folder: Path, **config: Any) -> dict[str, int]:
    """Write a Marian tokenizer: source-model pieces and target-only pieces."""
    shutil.copy(GOLDEN / "sp_unigram" / "spiece.model", folder / "source.spm")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    pieces = files.sp_pieces("sp_unigram/spiece.model")[0]
    text = [p for p in pieces if p not in ("<s>", "</s>", "<unk>", "<pad>", "\u2581return")]
    vocab = ["</s>", "<unk>", *reversed(text), "\u2581\u00e9t\u00e9", "\u00fcr", ">>fra<<", "<pad>"]
    numbers = {p: i for i, p in enumerate(vocab)}
    (folder / "vocab.json").write_text(json.dumps(numbers))
    return numbers


def test_marian_numbers_the_pieces_of_two_models(tmp_path: Path) -> None:
    """Ids from vocab.json; equal to transformers' MarianTokenizer on these texts."""
    vocab = marian_folder(tmp_path, tokenizer_class="MarianTokenizer")
    tokenizer, plain = load_tokenizer(tmp_path), load_tokenizer(GOLDEN / "sp_unigram")
    assert tokenizer.vocab_size == len(vocab)
    pieces = [plain.piece(i) for i in plain.encode("def return self")]
    assert "\u2581return" in pieces  # which this vocabulary does not have
    ids = [vocab.get(piece, 1) for piece in pieces]
    assert tokenizer.encode("def return self", add_special_tokens=True) == [*ids, 0]
    assert tokenizer.encode(">>fra<< def return self") == [vocab[">>fra<<"], *ids]
    assert tokenizer.encode(">>xyz<<def return self") == [1, *ids]  # not a language of this model
    assert len(tokenizer.encode("x >>fra<<")) > 3
    translation = [
        vocab["\u2581\u00e9t\u00e9"],
        vocab["\u00fcr"],
        vocab["\u2581"],
        0,
        vocab["<pad>"],
    ]
    assert tokenizer.decode(translation) == "\u00e9t\u00e9\u00fcr "
    assert tokenizer.decode(tokenizer.encode("def f")) == "def f"
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, (0,))
    assert set(tokenizer.special_tokens) == {"</s>", "<unk>", "<pad>"}


def test_marian_without_what_it_needs(tmp_path: Path) -> None:
    marian_folder(tmp_path, separate_vocabs=True)
    with pytest.raises(UsageError, match=r"separate_vocabs: .* give token ids instead of text"):
        load_tokenizer(tmp_path)
    marian_folder(tmp_path)
    (tmp_path / "vocab.json").write_text('{"</s>": 0, "a": 1}')
    with pytest.raises(UsageError, match=r"vocab\.json: the token '<unk>' is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(UsageError, match=r"vocab\.json"):
        load_tokenizer(tmp_path)


def test_merges_from_scores_are_the_plain_rule() -> None:
    """The list of merges against the rule: join the pair of the highest score, repeat."""
    source = random.Random(9)
    for _ in range(100):
        pieces = {"".join(source.choices("abc", k=source.randrange(2, 5))) for _ in range(12)}
        shuffled = ["a", "b", "c", *source.sample(sorted(pieces), len(pieces))]
        ids = {piece: i for i, piece in enumerate(shuffled)}
        scores = {piece: -float(i) for piece, i in ids.items()}
        bpe = score_bpe(ids, scores, {ord("x"): 99}, None, " ")
        for _ in range(10):
            text = "".join(source.choices("abcx", k=source.randrange(1, 25)))
            parts = list(text)
            while True:
                pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(parts))]
                best = max((p for p in pairs if p[0] is not None), default=None)
                if best is None:
                    break
                i = -best[1]
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            assert bpe.encode(text).ids == [ids.get(part, 99) for part in parts]


def test_runs_of_spaces_with_one_score() -> None:
    """Llama 2 has all runs of 2 to 16 spaces with the same score: the leftmost are joined first."""
    lengths = (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11, 15, 1)  # in the order of their ids
    ids = {files.SPACE * n: n for n in lengths}
    order = {piece: i for i, piece in enumerate(ids)}
    bpe = score_bpe(order, dict.fromkeys(ids, -1e9), {}, None, files.SPACE)
    for n in range(1, 100):
        parts = [1] * n
        while True:
            joined = [a + b for a, b in pairwise(parts)]
            if all(total not in lengths for total in joined):
                break
            i = next(i for i, total in enumerate(joined) if total in lengths)
            parts[i : i + 2] = [joined[i]]
        found = bpe.encode(files.SPACE * n).ids
        assert [lengths[i] for i in found] == parts


def test_a_character_without_piece_bytes_or_unknown_token(tmp_path: Path) -> None:
    path = files.write_gguf(
        tmp_path / "a.gguf", "llama", ["\u2581", "a"], [NORMAL] * 2, scores=[0.0, 0.0],
        ids={"unknown": 2**32 - 1},
    )  # fmt: skip
    with pytest.raises(UsageError, match="neither a piece nor bytes for a character"):
        load_tokenizer(path).encode("ab")


def test_long_texts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(files.spm_gguf(tmp_path / "a.gguf"))
    text = "def read(self):  # \u65e5\u672c\n" * 5000
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(" " * 20_000)) == " " * 20_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pre": "llama-bpee"},
            r"unknown tokenizer\.ggml\.pre 'llama-bpee'; did you mean 'llama-bpe'",
        ),
        ({"model": "plamo2"}, r"unknown tokenizer\.ggml\.model 'plamo2'.*use the tokenizer\.json"),
        ({"merges": ["ab"]}, "a merge must be two pieces"),
        ({"merges": ["a q"]}, "the vocabulary is damaged"),
        ({"merges": None}, r"tokenizer\.ggml\.merges must be an array of str"),
        ({"ids": {"eos": 77}}, r"eos_token_id must be 0\.\.3, got 77"),
        ({"tokens": ["a", "a", "b", "c"]}, "the token 'a' is there twice"),
        ({"types": [1]}, "one entry per token, 4, got 1"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores must be an array of float"),
        ({"model": "bert"}, r"needs tokenizer\.ggml\.unknown_token_id"),
    ],
)
def test_damaged_gguf(tmp_path: Path, change: dict[str, object], message: str) -> None:
    facts: dict[str, object] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab", "c"], "types": [1] * 4,
        "merges": ["a b"],
    }  # fmt: skip
    path = files.write_gguf(tmp_path / "a.gguf", **{**facts, **change})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_damaged_files(tmp_path: Path) -> None:
    model = (GOLDEN / "sp_bpe" / "tokenizer.model").read_bytes()
    source = random.Random(8)
    path = tmp_path / "tokenizer.model"
    for n in (0, 1, 100, *(source.randrange(len(model)) for _ in range(20))):
        path.write_bytes(model[:n])
        try:
            load_tokenizer(path).encode("ab")
        except UsageError as error:
            assert str(path) in str(error)  # noqa: PT017
    path.unlink()
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(UsageError, match=r"the special token '\[UNK\]' is not in the vocabulary"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b c\n")
    with pytest.raises(UsageError, match=r"merges\.txt:2: must be two pieces"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')
    with pytest.raises(UsageError, match=r"says CLIPTokenizer; use its tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[sentencepiece\]'"):
        load_tokenizer(GOLDEN / "sp_bpe")


def test_gguf_model_finds_its_own_tokenizer(tmp_path: Path) -> None:
    from nbflow.tokenization.find_files import tokenizer_of_weights

    path = files.spm_gguf(tmp_path / "a.gguf")
    with nbflow.open_weights(path) as weights:
        assert tokenizer_of_weights(path, "gguf", 10, weights.config() or {}) == path
    assert nbflow.load_tokenizer(path).bos_id == 1
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with nbflow.open_weights(bare) as weights:
        assert tokenizer_of_weights(bare, "gguf", 10, weights.config() or {}) is None
    with pytest.raises(UsageError, match="has no vocabulary"):
        load_tokenizer(bare)


PUBLISHED = os.environ.get("NBFLOW_VOCAB_DIR")


@pytest.mark.skipif(
    PUBLISHED is None,
    reason="NBFLOW_VOCAB_DIR names no folder with llama.cpp's ggml-vocab-*.gguf, .inp and .out",
)
def test_published_vocabularies() -> None:
    """The test vectors that llama.cpp publishes for real vocabularies."""
    found = sorted(Path(str(PUBLISHED)).glob("ggml-vocab-*.gguf"))
    assert found
    for path in found:
        inputs, outputs = path.with_name(f"{path.name}.inp"), path.with_name(f"{path.name}.out")
        if not inputs.is_file():
            continue
        tokenizer = load_tokenizer(path)
        texts = inputs.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        for text, line in zip(texts, outputs.read_text().split("\n"), strict=False):
            ids = tokenizer.encode(text)
            assert ids == [int(i) for i in line.split()], (path.name, text)
            assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tokenizer.model"])
def test_ranks_of_tiktoken_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(UsageError, match=r"tiktoken's ranks.*use the model's tokenizer\.json"):
        load_tokenizer(tmp_path / name)

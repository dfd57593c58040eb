"""Tokenizers: llama2.c against ids that run.c gave, Hugging Face against the package itself."""

from __future__ import annotations

import argparse
import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from nbflow.cli.commands import tokenize as tokenize_command
from nbflow.spec import load_tokenizer
from nbflow.tokenization import Tokenizer
from nbflow.tokenization.llama2c import read_pieces
from nbflow_kernels.errors import UsageError

GOLDEN = Path(__file__).parent.parent / "golden" / "llama2c"
RECORDS = json.loads((GOLDEN / "tokenizer.json").read_text(encoding="utf-8"))
TEXT = "The naïve café — 日本語 and 🙂🙃! Lines\n\tand  spaces; snake_case = f(x)[0]\n" * 3


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.decode_stream()
    return "".join([*(stream.push(i) for i in ids), stream.finish()])


@pytest.fixture(scope="module")
def llama2c() -> Tokenizer:
    return load_tokenizer(GOLDEN / "tokenizer.bin")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: repr(record["text"]))
def test_llama2c_gives_the_ids_of_run_c(llama2c: Tokenizer, record: dict[str, object]) -> None:
    text, ids = str(record["text"]), record["ids"]
    assert isinstance(ids, list)
    assert llama2c.encode(text, add_special_tokens=True) == ids
    assert llama2c.encode(text) == ids[1:]
    assert llama2c.decode(ids) == record["decoded"]
    assert streamed(llama2c, ids) == record["decoded"]


def test_llama2c_facts(llama2c: Tokenizer) -> None:
    assert llama2c.vocab_size == 310
    assert (llama2c.bos_id, llama2c.eos_ids) == (1, (1, 2))
    assert llama2c.piece(262) == " the"
    assert llama2c.piece(3) == "<0x00>"


def test_llama2c_strips_a_space_only_after_bos(llama2c: Tokenizer) -> None:
    the = 262
    assert llama2c.decode([the, the]) == " the the"
    assert llama2c.decode([1, the, the, 2]) == "the the"
    assert llama2c.decode([the, 1, the]) == " thethe"


def test_llama2c_merges_like_the_plain_rule(llama2c: Tokenizer) -> None:
    """Ids against the plain rule: merge the pair of the highest score, repeat."""
    pieces, scores = read_pieces(GOLDEN / "tokenizer.bin")
    ids_of = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    source = random.Random(4)
    for _ in range(150):
        text = "".join(source.choices("the aonic upé\n", k=source.randrange(1, 40)))
        data = [character.encode() for character in " " + text]
        ids = [i for c in data for i in ([ids_of[c]] if c in ids_of else [b + 3 for b in c])]
        while True:
            best = (-1e10, -1, -1)
            for i in range(len(ids) - 1):
                joined = ids_of.get(pieces[ids[i]] + pieces[ids[i + 1]], -1)
                if joined >= 0 and scores[joined] > best[0]:
                    best = (scores[joined], joined, i)
            if best[1] < 0:
                break
            ids[best[2] : best[2] + 2] = [best[1]]
        assert llama2c.encode(text) == ids


def test_llama2c_streams_whole_characters(llama2c: Tokenizer) -> None:
    ids = llama2c.encode("é日🙂")
    stream = llama2c.decode_stream()
    parts = [stream.push(i) for i in ids]
    assert [part for part in parts if part] == [" ", "é", "日", "🙂"]
    assert stream.finish() == ""
    cut = ids[:-1]
    assert streamed(llama2c, cut) == llama2c.decode(cut) == " é日\ufffd"


def test_llama2c_random_ids_stream_as_they_decode(llama2c: Tokenizer) -> None:
    source = random.Random(5)
    for _ in range(100):
        ids = [source.randrange(310) for _ in range(20)]
        assert streamed(llama2c, ids) == llama2c.decode(ids)


def test_ids_and_text_are_checked(llama2c: Tokenizer) -> None:
    for wrong in (-1, 310):
        with pytest.raises(UsageError, match=rf"token id must be 0\.\.309, got {wrong}"):
            llama2c.decode([wrong])
        with pytest.raises(UsageError, match="token id must be"):
            llama2c.piece(wrong)
    assert llama2c.decode(np.array([1, 262], np.int32)) == "the"
    with pytest.raises(UsageError, match="a lone surrogate at index 2"):
        llama2c.encode("ab\ud800")
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        llama2c.encode(b"ab")  # type: ignore[arg-type]


def tokenizer_bin(n: int = 259, longest: int = 6, length: int = 6, score: float = 0.0) -> bytes:
    data = struct.pack("<i", longest)
    for i in range(n):
        data += struct.pack("<fi", score, length) + b"%06d" % i
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "begins with the length of its longest piece"),
        (b"\1\0", "begins with the length of its longest piece"),
        (tokenizer_bin(longest=-1), r"longest piece, 1\.\.4096, got 4294967295"),
        (tokenizer_bin(longest=5), r"id 0: length must be 1\.\.5 and within the file, got 6"),
        (tokenizer_bin(length=-6), r"length must be 1\.\.6 and within the file, got -6"),
        (tokenizer_bin(length=0), r"length must be 1\.\.6 and within the file, got 0"),
        (tokenizer_bin()[:-1], "id 258: length must be .* got 6 with 5 bytes left"),
        (tokenizer_bin()[:-8], "id 258: the file ends within its score and length"),
        (tokenizer_bin(n=258), "at least 259 ids .* got 258"),
        (tokenizer_bin(score=float("nan")), "the score is not a number"),
    ],
)
def test_damaged_llama2c(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_any_damage_gives_a_usage_error_or_a_tokenizer(tmp_path: Path) -> None:
    data = (GOLDEN / "tokenizer.bin").read_bytes()
    source = random.Random(6)
    path = tmp_path / "bad.bin"
    variants = [data[: source.randrange(len(data))] for _ in range(60)]
    for position in [*range(24), *(source.randrange(len(data)) for _ in range(100))]:
        flipped = bytes([data[position] ^ (1 << source.randrange(8))])
        variants.append(data[:position] + flipped + data[position + 1 :])
    for variant in variants:
        path.write_bytes(variant)
        message = failure(path)
        assert message is None or str(path) in message


def failure(path: Path) -> str | None:
    try:
        load_tokenizer(path, kind="llama2c").encode("once upon a time é")
    except UsageError as error:
        return str(error)
    return None


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def llama_like() -> tokenizers.Tokenizer:
    """Byte fallback and a leading space that the decoder strips, as Llama 2 and Mistral have."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": b + 3 for b in range(256)}
    for piece in ["▁", *"etaoinshrdlu", "he", "▁the", "th", "▁t"]:
        vocab[piece] = len(vocab)
    merges = [("h", "e"), ("t", "h"), ("▁", "t"), ("▁t", "he")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def unigram_with_bytes() -> tokenizers.Tokenizer:
    vocab = [("<unk>", 0.0), *((f"<0x{b:02X}>", -9.0) for b in range(256))]
    vocab += [(piece, -float(len(piece))) for piece in ["▁", "▁the", *"theacs."]]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    vocab = ["[PAD]", "[UNK]", "the", "##s", "cat", ".", "'", "don", "t", "##at", "c", "!"]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(vocab)}, unk_token="[UNK]")
    )
    tokenizer.add_special_tokens(["[PAD]", "[UNK]"])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


MAKERS = {
    "byte_level": byte_level,
    "llama_like": llama_like,
    "unigram_with_bytes": unigram_with_bytes,
    "word_piece": word_piece,
}


@pytest.fixture(params=MAKERS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    theirs = MAKERS[request.param]()
    theirs.save(str(tmp_path / "tokenizer.json"))
    return theirs, load_tokenizer(tmp_path / "tokenizer.json")


def test_hf_is_the_package(pair: tuple[tokenizers.Tokenizer, Tokenizer]) -> None:
    theirs, ours = pair
    for text in ("", " ", "the cats.", TEXT):
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids) == theirs.decode(ids)
            assert streamed(ours, ids) == theirs.decode(ids)
    assert ours.vocab_size == theirs.get_vocab_size()
    assert ours.piece(5) == theirs.id_to_token(5)
    with pytest.raises(UsageError, match="token id must be"):
        ours.decode([ours.vocab_size])
    with pytest.raises(UsageError, match="token id must be"):
        ours.decode_stream().push(-1)


def test_hf_random_ids_stream_as_they_decode(
    pair: tuple[tokenizers.Tokenizer, Tokenizer],
) -> None:
    """Ids that no text has: broken characters, specials anywhere, long byte runs."""
    _, ours = pair
    source = random.Random(7)
    for _ in range(150):
        n = source.choice([ours.vocab_size, min(20, ours.vocab_size)])
        ids = [source.randrange(n) for _ in range(source.randrange(1, 40))]
        assert streamed(ours, ids) == ours.decode(ids)


def test_hf_streams_whole_characters(pair: tuple[tokenizers.Tokenizer, Tokenizer]) -> None:
    _, ours = pair
    stream = ours.decode_stream()
    for i in ours.encode("日本 🙂 the é the"):
        assert "\ufffd" not in stream.push(i)


def test_hf_long_stream_keeps_up(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    ids = ours.encode(TEXT * 20)
    stream = ours.decode_stream()
    assert "".join(stream.push(i) for i in ids) + stream.finish() == TEXT * 20
    assert len(stream._shown) <= 8  # type: ignore[attr-defined]


def test_hf_byte_level_text_comes_back(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert ours.encode("the", add_special_tokens=True)[0] == 1
    assert ours.decode([1, 0, *ours.encode("the")]) == "the"


def test_hf_padding_and_truncation_are_off(tmp_path: Path) -> None:
    theirs = byte_level()
    theirs.enable_padding(length=128)
    theirs.enable_truncation(8)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert ours.decode(ours.encode(TEXT)) == TEXT


def test_hf_special_ids(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))

    def ids() -> tuple[int | None, tuple[int, ...]]:
        tokenizer = load_tokenizer(tmp_path)
        return tokenizer.bos_id, tokenizer.eos_ids

    assert ids() == (None, ())
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    assert ids() == (1, (0,))
    (tmp_path / "config.json").write_text('{"bos_token_id": 5, "eos_token_id": 6}')
    assert ids() == (5, (6,))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert ids() == (5, (7, 8))
    (tmp_path / "config.json").write_text('{"bos_token_id": "x"}')
    with pytest.raises(UsageError, match=r"config\.json: bos_token_id must be a token id"):
        ids()


def test_finding_the_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(GOLDEN / "v1_unshared.bin").vocab_size == 310  # a model, not a tokenizer
    with pytest.raises(UsageError, match="unknown kind of tokenizer 'hff'; did you mean 'hf'"):
        load_tokenizer(GOLDEN / "tokenizer.bin", kind="hff")
    with pytest.raises(UsageError, match="unknown model"):
        load_tokenizer("no_such_model")
    lonely = tmp_path / "lonely.bin"
    lonely.write_bytes((GOLDEN / "v1_unshared.bin").read_bytes())
    with pytest.raises(UsageError, match="no tokenizer file next to the weights"):
        load_tokenizer(lonely)
    (tmp_path / "tokenizer.bin").write_bytes(b"xx")
    (tmp_path / "tok310.bin").write_bytes((GOLDEN / "tokenizer.bin").read_bytes())
    assert load_tokenizer(lonely).vocab_size == 310


@pytest.mark.parametrize("text", ['{"model": {}}', "{", '{"a": 1, "a": 2}'])
def test_damaged_hf(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"tokenizer\.json: "):
        load_tokenizer(path)


def test_tokenize_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    tokenize_command.add_arguments(parser)
    words = [str(GOLDEN / "tokenizer.bin"), "the time"]
    assert tokenize_command.run(parser.parse_args([*words, "--json", "--add-special-tokens"])) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ids"][:2] == [1, 262]
    assert facts["pieces"][1] == " the"
    assert facts["decoded"] == "the time"
    assert tokenize_command.run(parser.parse_args(words)) == 0
    assert "262  ' the'" in capsys.readouterr().out

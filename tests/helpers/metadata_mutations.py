"""Small valid configurations, tokenizers and GGUF headers, and mutations of them."""

from __future__ import annotations

import base64
import json
import math
import random
import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf_files
import tokenizer_files

from nbflow.checkpoint.readers import gguf
from nbflow_specs import CHECKPOINTS

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = CHECKPOINTS / "tiny_python"
FAMILIES = (
    "config", "generation", "load", "tokenizer_json", "tokenizer_config", "sentencepiece",
    "gguf_model", "gguf_vocabulary",
)  # fmt: skip
LOADED = ("llama31", "mixtral", "gemma3", "phi3_long", "bloom", "gpt2", "deepseek_v2")
"""Golden models that are loaded and run for one token."""

DIGITS, NESTED = "@digits@", "@nested@"
"""Words that become a number of 5,000 digits and lists in lists when the text is written."""
INTEGERS = [
    0, 1, 2, 3, 5, 7, 64, 65, 127, 255, 4096, 65535, 1 << 20, (1 << 24) + 1, (1 << 30) - 1,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64,
    -1, -2, -(1 << 31), -(1 << 63), 10**400, -(10**400),
]  # fmt: skip
FLOATS = [0.0, -0.0, 0.5, -1.5, 3.0, 1e-320, 1e30, 1e39, 1e308, -1e308, math.nan, math.inf]
WORDS = [
    "", "x", "rms", "true", "12", "\ud800", "a\udfffb", "\x00", "x" * 5000, "<0x00>", "[UNK]",
    "\u2581", "##", "AAAA", "a{1000}", "(", "default", "yarn", DIGITS, NESTED,
]  # fmt: skip
OTHERS: list[Any] = [
    True, False, None, [], {}, [0], [-1], [[]], [None], ["x"], {"x": 1}, [1e308], [0] * 5000,
    {"type": "Sequence"}, {"content": "\ud800"}, {"rope_type": "linear", "factor": 1e-320},
    {"rope_type": "yarn", "factor": 10**400}, {"type": "longrope", "factor": 0},
]  # fmt: skip
BAD_UTF8 = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80", b"\x00", b"\xef\xbb\xbf"]


@dataclass(frozen=True)
class Seed:
    """A valid folder: its files, and which of them are mutated."""

    name: str
    files: dict[str, bytes]
    mutated: tuple[str, ...]
    links: dict[str, Path] = field(default_factory=dict)
    """Files that stay as they are."""


@cache
def seeds(family: str, folder: Path) -> list[Seed]:
    """Return the seeds of a family; `folder` is for files that other packages write."""
    makers: dict[str, Callable[[Path], list[Seed]]] = {
        "config": lambda _: _models(sorted(p.name for p in (GOLDEN / "families").iterdir())),
        "generation": _generation,
        "load": lambda _: _models(list(LOADED)),
        "tokenizer_json": _tokenizer_json,
        "tokenizer_config": _tokenizer_config,
        "sentencepiece": _sentencepiece,
        "gguf_model": _gguf_models,
        "gguf_vocabulary": _gguf_vocabularies,
    }
    return makers[family](folder)


def _models(names: list[str]) -> list[Seed]:
    found = []
    for name in names:
        source = GOLDEN / "families" / name
        config = (source / "config.json").read_bytes()
        links = {p.name: p for p in source.iterdir() if p.name.startswith("model")}
        found.append(Seed(name, {"config.json": config}, ("config.json",), links))
    return found


def _generation(folder: Path) -> list[Seed]:
    source = GOLDEN / "families" / "llama31"
    content = {
        "bos_token_id": 1, "eos_token_id": [2, 3], "temperature": 0.6, "top_k": 20, "top_p": 0.9,
        "do_sample": True, "user_token_id": 5, "assistant_token_id": 6,
    }  # fmt: skip
    files = {
        "config.json": (source / "config.json").read_bytes(),
        "generation_config.json": json.dumps(content).encode(),
    }
    links = {
        "model.safetensors": source / "model.safetensors",
        "tokenizer.json": TINY / "tokenizer.json",
    }
    return [Seed("generation", files, ("generation_config.json",), links)]


def _added(content: str, token_id: int, **switches: bool) -> dict[str, Any]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": token_id, "content": content} | {n: switches.get(n, False) for n in names}


def _template(token: str, token_id: int) -> dict[str, Any]:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    before = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing", "single": [before, text], "pair": [before, text, text],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }  # fmt: skip


def _charsmap() -> str:
    """Return normalization rules: an empty trie of 1,024 bytes, and no replacements."""
    return base64.b64encode(struct.pack("<I", 1024) + bytes(1024)).decode()


def tokenizer_jsons() -> dict[str, dict[str, Any]]:
    """Return the content of a small tokenizer.json of every kind."""
    letters = {chr(c): c - 96 for c in range(97, 123)}
    byte_pieces = [[f"<0x{b:02X}>", -9.0] for b in range(256)]
    bpe = {"<s>": 0, **letters, "th": 27, "the": 28, "\u0120": 29, "\u0120the": 30}
    merges = [["t", "h"], ["th", "e"], ["\u0120", "the"]]
    words = ["[UNK]", "the", "##s", "cat", "##at", "c", ".", "hello", "a"]
    split = {"type": "Split", "pattern": {"Regex": "\\s+|\\w+"}, "behavior": "Isolated"}
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    common = {"version": "1.0", "truncation": None, "padding": None}
    padding = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": 4, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "[UNK]",
    }  # fmt: skip
    truncation = {"direction": "Right", "max_length": 6, "strategy": "LongestFirst", "stride": 1}
    return {
        "bpe": common | {
            "added_tokens": [_added("<s>", 0, special=True), _added("<tool>", 31, lstrip=True)],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "},
                {"type": "Prepend", "prepend": "x"},
            ]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                split | {"invert": False}, byte_level,
            ]},
            "post_processor": _template("<s>", 0),
            "decoder": {"type": "ByteLevel"} | byte_level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": "<s>", "fuse_unk": False,
                "continuing_subword_prefix": "", "end_of_word_suffix": "", "byte_fallback": False,
                "ignore_merges": True, "vocab": bpe, "merges": merges,
            },
        },
        "unigram": common | {
            "added_tokens": [_added("<unk>", 0, special=True)],
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": _charsmap()},
            "pre_tokenizer": {
                "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always",
                "split": True,
            },
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": [
                replace, {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]},
            "model": {
                "type": "Unigram", "unk_id": 0, "byte_fallback": True,
                "vocab": [["<unk>", 0.0], *byte_pieces, ["\u2581the", -3.0], ["s", -2.5]],
            },
        },
        "word_piece": common | {
            "truncation": truncation, "padding": padding,
            "added_tokens": [_added("[UNK]", 0, special=True)],
            "normalizer": {
                "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                "strip_accents": None, "lowercase": True,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": {"type": "BertProcessing", "sep": ["[UNK]", 0], "cls": ["the", 1]},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": {w: i for i, w in enumerate(words)},
            },
        },
        "word_level": common | {
            "added_tokens": [],
            "normalizer": {"type": "Strip", "strip_left": True, "strip_right": True},
            "pre_tokenizer": {"type": "FixedLength", "length": 5},
            "post_processor": None,
            "decoder": {"type": "CTC", "pad_token": "a", "word_delimiter_token": "|",
                        "cleanup": True},
            "model": {
                "type": "WordLevel", "unk_token": "[UNK]",
                "vocab": {w: i for i, w in enumerate(words)},
            },
        },
    }  # fmt: skip


def _tokenizer_json(folder: Path) -> list[Seed]:
    return [
        Seed(name, {"tokenizer.json": json.dumps(content).encode()}, ("tokenizer.json",))
        for name, content in tokenizer_jsons().items()
    ]


def _companion_files(kind: str) -> dict[str, bytes]:
    """Return the tokenizer configuration files, with the special tokens."""
    config = {
        "tokenizer_class": kind, "bos_token": "<s>", "eos_token": {"content": "</s>"},
        "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False,
        "do_lower_case": True, "strip_accents": None, "add_prefix_space": False,
        "chat_template": [{"name": "default", "template": "{{ bos_token }}"}],
        "added_tokens_decoder": {
            "2": {"content": "</s>", "special": True, "lstrip": False, "rstrip": False},
        },
    }  # fmt: skip
    special = {"cls_token": "[CLS]", "sep_token": {"content": "[SEP]"}, "pad_token": "[PAD]"}
    content = {
        "tokenizer_config.json": config,
        "special_tokens_map.json": special,
        "added_tokens.json": {"<extra>": 3},
        "chat_template.json": {"chat_template": "{{ messages }}"},
        "config.json": {"bos_token_id": 1, "eos_token_id": [2]},
        "generation_config.json": {"eos_token_id": 2, "user_token_id": 1},
    }
    return {name: json.dumps(table).encode() for name, table in content.items()}


def _tokenizer_config(folder: Path) -> list[Seed]:
    vocabularies = GOLDEN / "tokenizers"
    bpe = {
        "vocab.json": json.dumps({chr(33 + i): i for i in range(94)} | {"ab": 94}).encode(),
        "merges.txt": b"#version: 0.2\na b\n",
    }
    extra = {"added_tokens.json": b'{"<extra>": 95}', "tokenizer_config.json": b"{}"}
    words = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n##s\ncat\n<s>\n</s>\n<unk>\n"
    kinds = {
        "json": {"tokenizer.json": json.dumps(tokenizer_jsons()["bpe"]).encode()},
        "bpe": bpe,
        "word_piece": {"vocab.txt": words.encode()},
        "sentencepiece": {
            "tokenizer.model": (vocabularies / "sp_bpe" / "tokenizer.model").read_bytes()
        },
    }
    classes = {"bpe": "GPT2Tokenizer", "word_piece": "BertTokenizer"}
    found = []
    for kind, files in kinds.items():
        companions = _companion_files(classes.get(kind, "LlamaTokenizer"))
        if kind in ("bpe", "word_piece"):
            companions |= extra if kind == "bpe" else {"added_tokens.json": b"{}"}
        mutated = (*companions, *(name for name in files if name.startswith(("vocab", "merges"))))
        found.append(Seed(kind, files | companions, mutated))
    return found


def _sentencepiece(folder: Path) -> list[Seed]:
    found = []
    for place in ("sp_bpe/tokenizer.model", "sp_unigram/spiece.model"):
        path = GOLDEN / "tokenizers" / place
        found.append(Seed(path.parent.name, {path.name: path.read_bytes()}, (path.name,)))
    return found


def _gguf_models(folder: Path) -> list[Seed]:
    found = []
    for name, arch in (("llama31", "llama"), ("gemma2", "gemma2"), ("qwen3_moe", "qwen3moe")):
        path = folder / f"{name}.gguf"
        gguf_files.write_gguf(GOLDEN / "families" / name, arch, path)
        found.append(Seed(name, {"model.gguf": path.read_bytes()}, ("model.gguf",)))
    return found


def _gguf_vocabularies(folder: Path) -> list[Seed]:
    writers: dict[str, Callable[[Path], Path]] = {
        "spm": tokenizer_files.spm_gguf,
        "ugm": tokenizer_files.ugm_gguf,
        "wpm": tokenizer_files.wpm_gguf,
        "rwkv": tokenizer_files.rwkv_gguf,
        "gemma": tokenizer_files.gemma_gguf,
        "bpe": lambda path: tokenizer_files.bpe_gguf(path, "llama-bpe"),
    }
    return [
        Seed(name, {"model.gguf": write(folder / f"{name}.gguf").read_bytes()}, ("model.gguf",))
        for name, write in writers.items()
    ]


class Mutator:
    """A source of mutations; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choice(self, items: Any) -> Any:
        """Return one of the items."""
        return self._random.choice(items)

    def mutate(self, seed: Seed) -> dict[str, bytes]:
        """Return the files of a seed with one of them mutated."""
        name = self.choice(seed.mutated)
        data = seed.files[name]
        if name.endswith(".json") and self._random.random() < 0.95:
            mutated = self._json(data)
        elif name.endswith(".gguf") and self._random.random() < 0.9:
            mutated = self._gguf(data)
        else:
            mutated = self._bytes(data)
        return seed.files | {name: mutated}

    def value(self) -> Any:
        """Return a value that a field may not be ready for."""
        return deepcopy(self.choice(self.choice([INTEGERS, INTEGERS, FLOATS, WORDS, OTHERS])))

    def _bytes(self, data: bytes) -> bytes:
        out = bytearray(data)
        for _ in range(self._random.randint(1, 3)):
            at = self._random.randrange(len(out) + 1)
            match self._random.randrange(6):
                case 0:
                    out[at : at + 1] = bytes([self._random.randrange(256)])
                case 1:
                    out[at:at] = self.choice(BAD_UTF8)
                case 2:
                    del out[at : at + self._random.randint(1, 16)]
                case 3:
                    number = self.choice(INTEGERS) % (1 << 32)
                    out[at : at + 4] = number.to_bytes(4, "little")
                case 4:
                    source = self._random.randrange(len(out) + 1)
                    out[at:at] = out[source : source + self._random.randint(1, 40)]
                case _:
                    if self._random.random() < 0.3:
                        del out[at:]
        return bytes(out)

    def _json(self, data: bytes) -> bytes:
        table = json.loads(data)
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            self._change(table)
        text = json.dumps(table)
        depth = self.choice((60, 500, 900, 100_000))
        text = text.replace(f'"{DIGITS}"', "1" * 5000).replace(DIGITS, "1" * 5000)
        text = text.replace(f'"{NESTED}"', "[" * depth + "]" * depth)
        out = text.encode()
        if self._random.random() < 0.03:
            at = self._random.randrange(len(out))
            out = out[:at] + self.choice(BAD_UTF8) + out[at:]
        return out

    def _place(self, table: Any) -> tuple[Any, Any]:
        """Return a container within nested ones, and a key of it."""
        place = table
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = self.choice(keys)
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or self._random.random() < 0.15:
                return place, key
            place = inner

    def _change(self, table: Any) -> None:
        """Change a value, remove or add a key, or swap two values."""
        if not table:
            table["x"] = self.value()
            return
        place, key = self._place(table)
        match self._random.randrange(8):
            case 0:
                del place[key]
            case 1:
                other, second = self._place(table)
                place[key], other[second] = deepcopy(other[second]), deepcopy(place[key])
            case 2:
                place[key] = [place[key]]
            case 3 if not isinstance(place[key], dict | list):
                place[key] = str(place[key])
            case 4 if isinstance(place, dict):
                place[str(self.choice([*WORDS, *INTEGERS[:20]]))] = place.pop(key)
            case _:
                place[key] = self.value()

    def _gguf(self, data: bytes) -> bytes:
        entries, rest = _split_gguf(data)
        entries = dict(entries)
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            key = self.choice(list(entries))
            kinds, value = entries[key]
            match self._random.randrange(6):
                case 0:
                    del entries[key]
                case 1 | 2 if kinds[0] == gguf.ARRAY and value:
                    changed = list(value)
                    for _ in range(self.choice((1, 2, 20))):
                        changed[self._random.randrange(len(changed))] = self._gguf_value(kinds[1])
                    if self._random.random() < 0.2:
                        del changed[self._random.randrange(len(changed)) :]
                    entries[key] = kinds, changed
                case 3:
                    entries[key] = self._gguf_entry()
                case 4:
                    entries[self.choice(list(entries))] = entries[key]
                case _:
                    kind = kinds if kinds[0] != gguf.ARRAY else (gguf.STRING,)
                    entries[key] = kind, self._gguf_value(kind[0])
        return _gguf_head(entries, rest)

    def _gguf_entry(self) -> tuple[tuple[int, ...], Any]:
        kind = self.choice([*gguf.SCALARS, gguf.STRING, gguf.ARRAY])
        if kind != gguf.ARRAY:
            return (kind,), self._gguf_value(kind)
        inner = self.choice([*gguf.SCALARS, gguf.STRING])
        n = self.choice((0, 1, 2, 4, 5000))
        return (kind, inner), [self._gguf_value(inner) for _ in range(n)]

    def _gguf_value(self, kind: int) -> Any:
        if kind == gguf.STRING:
            words = [w.encode("utf-8", "replace") for w in WORDS] + BAD_UTF8
            return self.choice(words).decode("utf-8", "surrogateescape")
        return self.choice(FLOATS if gguf.SCALARS[kind] in "fd" else INTEGERS)


_Entries = dict[str, tuple[tuple[int, ...], Any]]


@cache
def _split_gguf(data: bytes) -> tuple[_Entries, tuple[int, bytes, bytes]]:
    """Return the metadata, and count, table and data of the tensors."""
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        entries = gguf.read_typed_metadata(Path(file.name))
        with gguf.open_file(Path(file.name)) as weights:
            names = weights.names()
            sizes = [len(weights.shape(name)) for name in names]
    n = struct.unpack_from("<Q", data, 8)[0]
    start = len(_packed(entries))
    end = start + sum(24 + 8 * k + len(name.encode()) for name, k in zip(names, sizes, strict=True))
    return entries, (n, data[start:end], data[-(-end // 32) * 32 :])


def _packed(entries: _Entries, n_tensors: int = 0) -> bytes:
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, len(entries)))
    for key, (kinds, value) in entries.items():
        out += _text(key) + struct.pack("<I", kinds[0])
        if kinds[0] == gguf.ARRAY:
            out += struct.pack("<IQ", kinds[1], len(value))
            out += b"".join(_scalar(kinds[1], item) for item in value)
        else:
            out += _scalar(kinds[0], value)
    return bytes(out)


def _gguf_head(entries: _Entries, rest: tuple[int, bytes, bytes]) -> bytes:
    n_tensors, table, data = rest
    head = _packed(entries, n_tensors) + table
    return head + bytes(-len(head) % 32) + data


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _scalar(kind: int, value: Any) -> bytes:
    if kind == gguf.STRING:
        return _text(value if isinstance(value, str) else str(value))
    code = gguf.SCALARS[kind]
    if code == "?":
        return bytes([bool(value)])
    if code in "fd":
        try:
            return struct.pack("<" + code, float(value))
        except OverflowError:
            return struct.pack("<" + code, math.inf)
    size = struct.calcsize("<" + code)
    number = 0 if isinstance(value, float) and not math.isfinite(value) else int(value)
    return (number % (1 << 8 * size)).to_bytes(size, "little")

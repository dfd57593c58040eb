"""Small valid weight files of every format, and mutations of them: bytes, numbers, structure."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from torch_files import MAGIC_NUMBER, Name, Persistent, pickled

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("torch_zip", "torch_legacy", "safetensors", "gguf", "ggml", "llama2c")

NUMBERS = [
    0, 1, 2, 3, 7, 31, 32, 33, 127, 128, 255, 256, 65535, 1 << 20, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
]  # fmt: skip
"""Numbers at which something may change its mind."""


@cache
def seeds(family: str) -> list[tuple[str, bytes]]:
    """Return suffix and content of the valid files of a family."""
    makers: dict[str, Callable[[], list[tuple[str, bytes]]]] = {
        "torch_zip": _torch_zip,
        "torch_legacy": _torch_legacy,
        "safetensors": _safetensors,
        "gguf": _gguf,
        "ggml": _ggml,
        "llama2c": _llama2c,
    }
    return makers[family]()


def _torch_zip() -> list[tuple[str, bytes]]:
    names = ["views.pt", "views_protocol4.pt", "training.pt", "dtypes.pt", "complex.pt"]
    return [(".pt", (GOLDEN / "pickle" / name).read_bytes()) for name in names]


def _torch_legacy() -> list[tuple[str, bytes]]:
    names = ["views_legacy.pt", "module_legacy.bin"]
    files = [(".bin", (GOLDEN / "pickle" / name).read_bytes()) for name in names]
    identity = ("storage", Name("torch FloatStorage"), "0", "cpu", 6, ("p", 2, 4))
    call = Name("torch._utils _rebuild_tensor")
    value = {"w": call(Persistent(identity), 0, (2, 2), (1, 2))}
    sizes = {"little_endian": True}
    data = b"".join(pickled(v) for v in (MAGIC_NUMBER, 1001, sizes, value, ["0"]))
    return [*files, (".bin", data + struct.pack("<q", 6) + bytes(24))]


def _safetensors() -> list[tuple[str, bytes]]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, kind, shape, n_bytes in (
        ("a", "F32", [3, 4], 48), ("b", "BF16", [5], 10), ("c", "F8_E4M3", [2, 2], 4),
        ("d", "F4", [4], 2), ("e", "I64", [], 8), ("f", "BOOL", [0, 3], 0), ("g", "C64", [1], 8),
    ):  # fmt: skip
        header[name] = {
            "dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + n_bytes],
        }  # fmt: skip
        data += bytes(n_bytes)
    index = {"metadata": {}, "weight_map": dict.fromkeys("abcdefg", "seed0.safetensors")}
    files = [(".safetensors", _with_header(header, data))]
    return [*files, (".index.json", json.dumps(index).encode())]


def _with_header(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _gguf() -> list[tuple[str, bytes]]:
    return [(".gguf", _gguf_file(*kind)) for kind in (("<", 3), (">", 3), ("<", 2), ("<", 1))]


def _gguf_file(order: str, version: int) -> bytes:
    """Return a file with every kind of metadata and tensors of several types."""
    size = "I" if version == 1 else "Q"

    def pack(code: str, *numbers: Any) -> bytes:
        return struct.pack(order + code, *numbers)

    def text(value: str) -> bytes:
        return pack(size, len(value)) + value.encode()

    entries = [
        text("general.architecture") + pack("I", 8) + text("llama"),
        text("general.alignment") + pack("II", 4, 32),
        text("tokenizer.ggml.tokens") + pack("II" + size, 9, 8, 2) + text("a") + text(""),
        text("a.scores") + pack("II" + size + "3f", 9, 6, 3, 1, 2, 3),
        text("a.nested") + pack("II" + size, 9, 9, 1) + pack("I" + size + "2H", 2, 2, 1, 2),
        text("a.b.c") + pack("I?", 7, True),
        text("a.d") + pack("Iq", 11, -5) + b"",
        text("a.e") + pack("Id", 12, 0.5),
        text("a.f") + pack("IB", 0, 7),
    ]  # fmt: skip
    if version == 1:  # which had no 64-bit values
        del entries[6:8]
    tensors = [
        ("f", 0, (3, 4), 48), ("h", 1, (2, 2), 8), ("q", 8, (2, 32), 68), ("k", 14, (256,), 210),
    ]  # fmt: skip
    table, data = b"", b""
    for name, kind, shape, n_bytes in tensors:
        table += text(name) + pack("I", len(shape)) + pack(f"{len(shape)}{size}", *shape[::-1])
        table += pack("IQ", kind, len(data))
        data += bytes(n_bytes) + bytes(-n_bytes % 32)
    head = b"GGUF" + pack("I" + 2 * size, version, len(tensors), len(entries))
    head += b"".join(entries) + table
    return head + bytes(-len(head) % 32) + data


def _ggml() -> list[tuple[str, bytes]]:
    files = []
    for magic, version in ((b"lmgg", 0), (b"fmgg", 1), (b"tjgg", 1), (b"tjgg", 2), (b"tjgg", 3)):
        data = magic + (struct.pack("<I", version) if version else b"")
        data += struct.pack("<7I", 3, 32, 8, 4, 1, 8, 0)
        for token in (b"", b"a", b"\xe9"):
            data += struct.pack("<I", len(token)) + token + (bytes(4) if version else b"")
        tensors = [("tok_embeddings.weight", 0, (3, 32), 384), ("norm.weight", 1, (32,), 64)]
        if version == 3:
            tensors.append(("w", 2, (2, 32), 36))
        for name, kind, shape, n_bytes in tensors:
            data += struct.pack("<3I", len(shape), len(name), kind)
            data += struct.pack(f"<{len(shape)}I", *shape[::-1]) + name.encode()
            data += bytes(-len(data) % 32 if magic == b"tjgg" else 0) + bytes(n_bytes)
        files.append((".bin", data))
    return files


def _llama2c() -> list[tuple[str, bytes]]:
    """Return files of all three layouts with a vocabulary of one."""
    dims = (16, 24, 1, 4, 2, 1, 8)
    norms, embedding = 16 * 3, 16
    matrices = 16 * 16 * 2 + 8 * 16 * 2 + 3 * 24 * 16
    legacy = struct.pack("<7i", *dims) + bytes(4 * (norms + embedding + matrices + 8 * 4))
    head = struct.pack("<I8iB", 0x616B3432, 1, *dims, 1)
    first = head.ljust(256, b"\0") + bytes(4 * (norms + embedding + matrices))
    head = struct.pack("<I8iBi", 0x616B3432, 2, *dims, 1, 16)
    n = embedding + matrices
    second = head.ljust(256, b"\0") + bytes(4 * norms + n + n // 16 * 4)
    return [(".bin", data) for data in (legacy, first, second)]


SNIPPETS = [
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"X\x04\x00\x00\x00true\x85R", b"(ios\nsystem\n",
    b"o", b"\x81", b"\x92", b"b", b"R", b"Q", b"Px\n", b"\x82\x01", b"h\x00", b"j\xff\xff\xff\xff",
    b"q\x00", b"2", b"0", b"1", b"(", b"t", b"e", b"u", b"s", b"a", b"]", b"}", b")", b"\x8f",
    b"\x90", b"\x91", b"\x8a\xff" + b"\x7f" * 255, b"\x8b\xff\xff\xff\x7f", b"J\xff\xff\xff\xff",
    b"\x95" + b"\xff" * 8, b"\x8d" + b"\xff" * 8, b"\x8c\x02os\x8c\x06system\x93", b"N", b"\x88",
    b"I01\n", b"L9\n", b"F1.5\n", b"ccollections\nOrderedDict\n)R", b".", b"\x94",
    b"ctorch.storage\nUntypedStorage\n", b"ctorch._tensor\n_rebuild_from_type_v2\n",
    b"ctorch\nSize\n(K\x01K\x02t\x85R",
]  # fmt: skip
"""Opcodes that want something."""


class Mutator:
    """A source of mutations; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choice(self, items: Any) -> Any:
        """Return one of the items."""
        return self._random.choice(items)

    def mutate(self, family: str, data: bytes) -> bytes:
        """Return a mutation of one file."""
        structural = {
            "torch_zip": self._archive,
            "torch_legacy": self._legacy,
            "safetensors": self._header,
        }
        if family in structural and self._random.random() < 0.6:
            return structural[family](data)
        # Headers are where the decisions are.
        head = {"gguf": 600, "ggml": 400, "llama2c": 48, "torch_zip": len(data)}.get(family, 400)
        return self._bytes(data, min(head, len(data)), self._random.randint(1, 4))

    def _bytes(self, data: bytes, head: int, n: int) -> bytes:
        """Change bytes, numbers and slices, mostly in the first `head` bytes."""
        out = bytearray(data)
        for _ in range(n):
            bound = head if self._random.random() < 0.9 else len(out)
            at = self._random.randrange(max(1, min(bound, len(out))))
            match self._random.randrange(8):
                case 0:
                    out[at : at + 1] = bytes([self._random.randrange(256)])
                case 1:
                    if at < len(out):
                        out[at] ^= 1 << self._random.randrange(8)
                case 2 | 3:
                    code = self.choice("BHIQ")
                    size = struct.calcsize("<" + code)
                    number = self.choice(NUMBERS) % (1 << (8 * size))
                    at -= at % self.choice((1, 4))
                    out[at : at + size] = struct.pack(self.choice("<>") + code, number)
                case 4:
                    del out[at : at + self._random.randint(1, 16)]
                case 5:
                    out[at:at] = self._random.randbytes(self._random.randint(1, 16))
                case 6:
                    length = self._random.randint(1, 40)
                    source = self._random.randrange(max(1, len(out)))
                    out[at:at] = out[source : source + length]
                case 7:
                    if self._random.random() < 0.3:
                        del out[at:]
        return bytes(out)

    def _opcodes(self, data: bytes) -> bytes:
        """Insert, remove, double or swap opcodes, or change their arguments."""
        opcodes = list(_opcodes(data))
        for _ in range(self._random.randint(1, 4)):
            at = self._random.randrange(len(opcodes))
            match self._random.randrange(7):
                case 0:
                    opcodes.insert(at, self.choice(SNIPPETS))
                case 1:
                    opcodes[at] = self.choice(SNIPPETS)
                case 2 if len(opcodes) > 1:
                    del opcodes[at]
                case 3:
                    opcodes[at:at] = opcodes[at : at + self._random.randint(1, 6)]
                case 4:
                    other = self._random.randrange(len(opcodes))
                    opcodes[at], opcodes[other] = opcodes[other], opcodes[at]
                case 5:
                    number = self.choice(NUMBERS)
                    length = number.bit_length() // 8 + 1
                    opcodes[at] = b"\x8a" + bytes([length]) + number.to_bytes(length, "little")
                case _:
                    opcodes[at] = self._bytes(opcodes[at], len(opcodes[at]), 1)
        return b"".join(opcodes)

    def _legacy(self, data: bytes) -> bytes:
        end = _end_of_pickles(data)
        return self._opcodes(data[:end]) + data[end:]

    def _archive(self, data: bytes) -> bytes:
        """Write the archive again with another pickle or other members."""
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            members = [(info.filename, old.read(info)) for info in old.infolist()]
        i = next(i for i, (name, _) in enumerate(members) if name.endswith("data.pkl"))
        members[i] = (members[i][0], self._opcodes(members[i][1]))
        out = io.BytesIO()
        if self._random.random() < 0.2:
            j = self._random.randrange(len(members))
            name, content = members[j]
            members[j] = self.choice([
                (name, content[: len(content) // 2]), (name + "x", content), (name, b""),
                ("../" + name, content), (name, content * 2),
            ])  # fmt: skip
        method = zipfile.ZIP_DEFLATED if self._random.random() < 0.1 else zipfile.ZIP_STORED
        with zipfile.ZipFile(out, "w", method) as new:
            for name, content in members:
                new.writestr(zipfile.ZipInfo(name), content)
        if self._random.random() < 0.1:
            return self._bytes(out.getvalue(), len(out.getvalue()), 1)
        return out.getvalue()

    def _header(self, data: bytes) -> bytes:
        """Change values of a safetensors header or an index, and write it again."""
        if data[:1] == b"{":
            return json.dumps(self._json(json.loads(data))).encode()
        n = int.from_bytes(data[:8], "little")
        return _with_header(self._json(json.loads(data[8 : 8 + n])), data[8 + n :])

    def _json(self, header: Any) -> Any:
        """Change values of nested tables and lists."""
        for _ in range(self._random.randint(1, 3)):
            place, key = header, self.choice(list(header))
            while (
                isinstance(place[key], dict | list) and place[key] and self._random.random() < 0.8
            ):
                place = place[key]
                key = self.choice(list(place) if isinstance(place, dict) else range(len(place)))
            place[key] = self.choice([
                self.choice(NUMBERS), -1, 1.5, True, None, "", "F32", "BF16", "F4",
                "seed0.safetensors", "case.index.json", [], {}, [0, 0],
                [1 << 62, 1 << 62], "x" * 300, [[]], {"dtype": "F32"}, 1e400,
            ])  # fmt: skip
        return header


@cache
def _opcodes(data: bytes) -> tuple[bytes, ...]:
    """Return the opcodes of one pickle or several, each with its arguments."""
    import pickletools

    opcodes = []
    start = 0
    while start < len(data):
        places = [place for _, _, place in pickletools.genops(data[start:])]
        ends = [*places[1:], places[-1] + 1]
        opcodes += [data[start + a : start + b] for a, b in zip(places, ends, strict=True)]
        start += ends[-1]
    return tuple(opcodes)


@cache
def _end_of_pickles(data: bytes) -> int:
    """Return where the five pickles of a legacy file end."""
    import pickletools

    end = 0
    for _ in range(5):
        *_, (_, _, place) = pickletools.genops(data[end:])
        end += place + 1
    return end

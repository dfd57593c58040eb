"""Pickles that want to run something, or to use up memory: refused by name, nothing happens."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpirun import python
from torch_files import MAGIC_NUMBER, Name, Opcodes, Persistent, Raw, pickled, write_zip

from nbflow.checkpoint import open_weights
from nbflow_kernels.errors import UsageError

SYSTEM = Name("os system")
COMMAND = "touch /tmp/nbflow_was_here"


def value(thing: Any) -> bytes:
    return Opcodes().value(thing).data


def storage(*identity: Any) -> Raw:
    return Raw(value(identity) + b"Q")


FLOATS = Name("torch FloatStorage")
REBUILD = Name("torch._utils _rebuild_tensor_v2")
GOOD = Persistent(("storage", FLOATS, "0", "cpu", 6))
RUNS = {
    "os.system": SYSTEM(COMMAND),
    "posix.system": Name("posix system")(COMMAND),
    "builtins.eval": Name("builtins eval")("1"),
    "builtins.exec": Name("__builtin__ execfile")("x"),
    "builtins.getattr": Name("builtins getattr")(1, "real"),
    "subprocess": Name("subprocess Popen")(["true"]),
    "torch.load": Name("torch load")("x"),
    "torch.jit": Name("torch.jit _script")("x"),
    "numpy load": Name("numpy load")("x"),
    "runpy": Name("runpy run_path")("x"),
    "codecs.open": Name("_codecs open")("x"),
    "dotted": Name("torch os.system")(COMMAND),
    "stack global": Raw(value("os") + value("system") + b"\x93" + value((COMMAND,)) + b"R"),
    "nested reduce": {"a": [({"b": SYSTEM(COMMAND)},)]},
    "in a tensor": REBUILD(GOOD, 0, (2, 3), (3, 1), False, SYSTEM(COMMAND)),
    "in metadata": REBUILD(GOOD, 0, (2, 3), (3, 1), False, None, {"a": SYSTEM(COMMAND)}),
    "by type": Name("torch._tensor _rebuild_from_type_v2")(SYSTEM, 1, (COMMAND,), None),
}


@pytest.mark.parametrize("case", RUNS)
def test_names_outside_the_list_are_refused(tmp_path: Path, case: str) -> None:
    write_zip(tmp_path / "x.pt", RUNS[case], {"0": bytes(24)})
    with pytest.raises(
        UsageError, match=r"the pickle at byte 40 has the name '[\w.]+', which no state dict needs"
    ):
        open_weights(tmp_path / "x.pt")
    assert not os.path.exists("/tmp/nbflow_was_here")


# Allowed names in forbidden positions.
TENSOR = value(REBUILD(GOOD, 0, (2, 3), (3, 1), False, None))
OPCODES = {
    "INST": (b"(" + value(COMMAND) + b"ios\nsystem\n", "opcode INST"),
    "OBJ": (b"(" + value(Name("argparse Namespace")) + b"o", "opcode OBJ"),
    "NEWOBJ of a function": (value(REBUILD) + b")\x81", "missing 6 required positional arguments"),
    "NEWOBJ of nothing": (b"N)\x81", "'NoneType' object is not callable"),
    "NEWOBJ with arguments": (
        value(Name("argparse Namespace")) + value(("a",)) + b"\x81", "takes 0 positional arguments"
    ),
    "NEWOBJ_EX": (value(Name("argparse Namespace")) + b")}\x92", "opcode NEWOBJ_EX"),
    "EXT1": (b"\x82\x01", "opcode EXT1"),
    "EXT2": (b"\x83\x01\x00", "opcode EXT2"),
    "EXT4": (b"\x84\x01\x00\x00\x00", "opcode EXT4"),
    "PERSID": (b"Pstorage\n", "opcode PERSID"),
    "STRING": (b"S'a'\n", "opcode STRING"),
    "UNICODE": (b"Va\n", "opcode UNICODE"),
    "buffers": (b"\x97", "opcode NEXT_BUFFER"),
    "unknown opcode": (b"\xff", r"opcode b'\\xff' unknown"),
    "protocol": (b"\x80\x06N", "unsupported pickle protocol: 6"),
    "setstate of a tensor": (TENSOR + value(("x",)) + b"b", r"attributes \(BUILD\) of tensor"),
    "setstate of a name": (value(FLOATS) + value({}) + b"b", "BUILD.* of torch.FloatStorage"),
    "setstate of a list": (b"]" + value({}) + b"b", "state is not a dictionary"),
    "reduce of a storage type": (value(FLOATS) + value((3,)) + b"R", "a call of torch.Fl"),
    "reduce of a string": (value("os.system") + value((3,)) + b"R", "'str' object is not callable"),
    "reduce of a result": (
        value(REBUILD(GOOD, 0, (2, 3), (3, 1), False, None)) + b")R", "object is not callable"
    ),
    "reduce without a tuple": (value(REBUILD) + value([1]) + b"R", "argument list must be a tuple"),
    "append to a dict": (b"}" + value(3) + b"a", "'Dict' object has no attribute 'append'"),
    "append to a tuple": (b")" + value(3) + b"a", "'tuple' object has no attribute 'append'"),
    "items of a list": (b"](K\x01K\x02u", "list assignment index out of range"),
    "odd items": (b"}(K\x01u", "odd number of items for SETITEMS"),
    "odd dict": (b"(K\x01d", "opcode DICT"),
    "key of a list": (b"}]K\x01s", "a dict with the key list"),
    "key of a tensor": (b"}" + TENSOR + b"Ns", "a dict with the key tensor"),
    "items of a set": (b"](K\x01\x90", "'list' object has no attribute 'add'"),
    "underflow": (b"0", "stack underflow"),
    "underflow of a tuple": (b"K\x01\x86", "stack underflow"),
    "underflow over a mark": (b"K\x01(\x85t", "unexpected MARK"),
    "reduce underflow": (b")R", "stack underflow"),
    "no mark": (b"K\x01t", "could not find MARK"),
    "no value": (b"", "stack underflow"),
    "memo never put": (b"h\x07", "Memo value not found at index 7"),
    "long memo never put": (b"j\xff\xff\xff\xff", "Memo value not found at index 4294967295"),
    "memo of an empty stack": (b"q\x00N", "stack underflow"),
    "memo far away": (b"Nr\xff\xff\xff\xff", "memo 4294967295"),
    "negative memo": (b"Np-1\n", "opcode PUT"),
    "memo in words": (b"Npx\n", "invalid literal for int"),
    "memo over a mark": (b"K\x01(q\x00t\x86", "unexpected MARK"),
    "many marks": (b"(" * 1100, "unexpected MARK"),
    "huge integer": (b"\x8a\x20" + b"\x01" * 32, "an integer of 249 bits"),
    "huge LONG4": (b"\x8b\xff\xff\xff\x7f", "not enough data in stream to read long4"),
    "negative LONG4": (b"\x8b\xff\xff\xff\xff", "long4 byte count < 0"),
    "long decimal": (b"L" + b"9" * 60 + b"L\n", "an integer of 200 bits"),
    "decimal without end": (b"I" + b"9" * 5000, "no newline found"),
    "float in words": (b"Fnot\n", "could not convert string to float"),
    "long string": (b"X\xff\xff\xff\x7f", "expected 2147483647 bytes"),
    "longer string": (b"\x8d" + b"\xff" * 8, "byte count > sys.maxsize: 18446744073709551615"),
    "long bytes": (b"\x8e" + struct.pack("<Q", 1 << 62), "expected 4611686018427387904 bytes"),
    "long frame": (b"\x95" + struct.pack("<Q", 1 << 40) + b"N", "a frame of 1099511627776 bytes"),
    "long stack global": (
        b"X" + struct.pack("<I", 5000) + b"a" * 5000 + b"2\x93", "the name 'aaaa"
    ),
    "long name": (b"c" + b"a" * 9999 + b"\nb\n", "the name 'aaaa"),
    "name of a number": (b"K\x01K\x02\x93", "STACK_GLOBAL requires str"),
    "persistent string": (value("storage") + b"Q", "a persistent id that is str 'storage'"),
    "persistent int": (b"K\x01Q", "a persistent id that is int 1"),
    "persistent module": (value(("module", 1, 2, 3, 4)) + b"Q", "a persistent id that is tuple"),
    "short persistent id": (value(("storage", FLOATS, "0")) + b"Q", "persistent id that is tuple"),
    "storage of a string": (value(("storage", "os", "0", "cpu", 6)) + b"Q", "storage of the type"),
    "storage of a function": (value(("storage", REBUILD, "0", "cpu", 6)) + b"Q", "the type torch"),
    "storage key": (value(("storage", FLOATS, 0, "cpu", 6)) + b"Q", "a storage called int 0"),
    "storage path": (value(("storage", FLOATS, "../x", "cpu", 6)) + b"Q", "is not in the archive"),
    "storage elements": (value(("storage", FLOATS, "0", "cpu", -6)) + b"Q", "int -6 elements"),
    "storage of true": (value(("storage", FLOATS, "0", "cpu", True)) + b"Q", "bool True elements"),
    "storage too long": (value(("storage", FLOATS, "0", "cpu", 7)) + b"Q", "; the archive has 24"),
}  # fmt: skip


@pytest.mark.parametrize("case", OPCODES)
def test_opcodes_are_refused_with_their_position(tmp_path: Path, case: str) -> None:
    data, message = OPCODES[case]
    write_zip(tmp_path / "x.pt", None, {"0": bytes(24)}, pickle=b"\x80\x02" + data + b".")
    with pytest.raises(UsageError, match=f"{message}.* at byte|at byte.*{message}") as caught:
        open_weights(tmp_path / "x.pt")
    assert str(tmp_path / "x.pt") in str(caught.value)


TENSORS = {
    "out of range": ((GOOD, 1, (2, 3), (3, 1), False, None), "a tensor of 28 bytes"),
    "huge offset": ((GOOD, 1 << 61, (1,), (1,), False, None), "in storage '0' of 24 bytes"),
    "negative offset": ((GOOD, -1, (1,), (1,), False, None), "offset has int -1"),
    "negative size": ((GOOD, 0, (-2,), (1,), False, None), "size has int -2"),
    "negative stride": ((GOOD, 0, (2,), (-1,), False, None), "stride has int -1"),
    "size of strings": ((GOOD, 0, ("2",), (1,), False, None), "size has str '2'"),
    "size of true": ((GOOD, 0, (True,), (1,), False, None), "size has bool"),
    "size of a list": ((GOOD, 0, [2], (1,), False, None), "size is list"),
    "other ranks": ((GOOD, 0, (2, 3), (1,), False, None), "2 dimensions and 1 strides"),
    "many dimensions": ((GOOD, 0, (1,) * 17, (1,) * 17, False, None), "size is tuple"),
    "no storage": (("0", 0, (1,), (1,), False, None), "a tensor of str '0' instead of a storage"),
    "few arguments": ((GOOD, 0, (1,)), "missing 3 required positional arguments"),
    "many arguments": (
        (GOOD, 0, (1,), (1,), 0, 0, None, 0),
        "takes from 6 to 7 positional arguments",
    ),
    "conjugated": ((GOOD, 0, (1,), (1,), False, None, {"conj": True}), "a tensor with metadata"),
    "absurd": ((GOOD, 0, (1 << 40, 1 << 40), (0, 0), False, None), "too large for any tensor"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_impossible_tensors(tmp_path: Path, case: str) -> None:
    args, message = TENSORS[case]
    write_zip(tmp_path / "x.pt", {"w": REBUILD(*args)}, {"0": bytes(24)})
    with pytest.raises(UsageError, match=message):
        open_weights(tmp_path / "x.pt")


BOMBS = {
    # Each list holds the one before it ten times: 10**12 values once written out.
    "memo": b"]q\x00" + TENSOR + b"a0" + b"".join(
        b"](" + (b"h" + bytes([i])) * 10 + b"eq" + bytes([i + 1]) + b"0" for i in range(12)
    ) + b"h\x0c",
    "endless list": b"]q\x00h\x00a" + TENSOR + b"a",
    "endless dict": b"}q\x00" + value("a") + b"h\x00s" + value("b") + TENSOR + b"s",
    "deep tuples": TENSOR + b"\x85" * 100_000,
    "deep lists": b"]" * 100_000 + TENSOR + b"a" * 100_000,
    "many dicts": b"(" + b"}" * 3_000_000 + b"t",
    "copies of a list": b"](" + b"K\x01" * 60_000 + b"eq\x000(" + (
        value(Name("torch Size")) + b"h\x00\x85R"
    ) * 10_000 + b"t",
    "huge storage keys": value("storage") + b"q\x010" + value(FLOATS) + b"q\x020X"
    + struct.pack("<I", 8 << 20) + b"k" * (8 << 20) + b"q\x000](" + (
        b"(h\x01h\x02h\x00NK\x06tQ"
    ) * 10_000 + b"e",
    "huge keys": b"B" + struct.pack("<I", 300_000) + b"k" * 300_000 + b"q\x000" + b"](" + (
        b"}h\x00" * 20 + TENSOR + b"s" * 20
    ) * 100 + b"e",
    "long keys": b"X" + struct.pack("<I", 4000) + b"k" * 4000 + b"q\x000" + b"](" + b"".join(
        b"}h\x00}h\x00" + TENSOR + b"ss" for _ in range(4000)) + b"e",
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_bombs_cost_neither_memory_nor_time(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.pt"
    write_zip(path, None, {"0": bytes(24)}, pickle=b"\x80\x02" + BOMBS[case] + b".")
    started = time.process_time()
    if len(BOMBS[case]) < 2_000_000 or "key" in case:  # tracing makes it several times slower
        tracemalloc.start()
    with pytest.raises(UsageError):
        open_weights(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 100,000 values of at most 400 bytes: the value itself, and the records of the tensor scan.
    assert peak < 40 << 20
    assert time.process_time() - started < 20


def test_structures_without_tensors_cost_no_more_than_their_bytes(tmp_path: Path) -> None:
    bomb = BOMBS["memo"].replace(TENSOR + b"a", b"", 1)
    write_zip(tmp_path / "x.pt", None, {"0": bytes(24)}, pickle=b"\x80\x02" + bomb + b".")
    started = time.process_time()
    with open_weights(tmp_path / "x.pt") as weights:
        assert weights.names() == []
    assert time.process_time() - started < 5  # a list of 10**12 values, were it written out
    for bomb in (b")" + b"\x85" * 100_000, b"]q\x00h\x00a"):
        write_zip(tmp_path / "x.pt", None, {"0": bytes(24)}, pickle=b"\x80\x02" + bomb + b".")
        with pytest.raises(UsageError, match="nested more than 64 deep"):
            open_weights(tmp_path / "x.pt")


@pytest.mark.parametrize("rest", [b"(K\x01", b"K\x01K\x02"], ids=["a mark", "a value"])
def test_what_is_left_on_the_stack_is_dropped_as_pickle_does(tmp_path: Path, rest: bytes) -> None:
    write_zip(tmp_path / "x.pt", None, {"0": bytes(24)}, pickle=b"\x80\x02" + rest + b".")
    with open_weights(tmp_path / "x.pt") as weights:
        assert weights.names() == []


KEYS = {
    # Python compares keys of one hash with each other: 200,000 of them take hours.
    "of one hash": b"}(" + b"".join(
        b"\x8a\x0b" + (i * ((1 << 61) - 1)).to_bytes(11, "little") + b"N" for i in range(200_000)
    ) + b"u",
    # The hash of a tuple visits all it holds, shared or not: 10**12 values; and it recurses.
    "shared tuples": b"}NN\x86q\x00" + b"".join(
        b"(" + (b"h" + bytes([i])) * 10 + b"tq" + bytes([i + 1]) for i in range(12)
    ) + b"N\x860Nh\x0cNsN" + b"0",
    "deep tuples": b"}N" + b"\x85" * 200_000 + b"Ns",
    "in a set": b"\x8f(N" + b"\x85" * 200_000 + b"\x90",
    "in a frozen set": b"(N" + b"\x85" * 200_000 + b"\x91",
    "in an OrderedDict": value(Name("collections OrderedDict")())
    + b"N" + b"\x85" * 200_000 + b"Ns",
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_keys_are_never_hashed(tmp_path: Path, case: str) -> None:
    write_zip(tmp_path / "x.pt", None, {"0": bytes(24)}, pickle=b"\x80\x02" + KEYS[case] + b".")
    started = time.process_time()
    with contextlib.suppress(UsageError):
        open_weights(tmp_path / "x.pt").close()
    assert time.process_time() - started < 20


FORBIDDEN = {"import", "exec", "compile", "os", "subprocess", "pickle", "ctypes", "socket"}


def open_all_watched(folder: Path) -> list[str]:
    """Open every hostile pickle in this process; return the events of an audit hook."""
    seen: list[str] = []
    watching = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not watching:
            return
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event.split(".")[0] in FORBIDDEN:
            seen.append(event)

    sys.addaudithook(hook)
    for thing in (*RUNS.values(), *(Raw(data) for data, _ in OPCODES.values())):
        write_zip(folder / "x.pt", thing, {"0": bytes(24)})
        watching = True
        with pytest.raises(UsageError):
            open_weights(folder / "x.pt")
        watching = False
    watching = True
    os.system("true")
    return seen


def test_nothing_is_imported_executed_or_written(tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    paths = [here.parent, here.parents[1], here.parents[1] / "helpers"]
    imports = "import pathlib, sys, test_torch_pickle_hostile as t"
    code = f"{imports}; print(t.open_all_watched(pathlib.Path("
    result = python("-c", f"{code}sys.argv[1])))", tmp_path, paths=paths)
    # Only the final self-test of the watch.
    assert result.stdout.strip() == "['os.system']", result.stderr


ARCHIVES = {
    "compressed": (zipfile.ZIP_DEFLATED, {"x/data.pkl": pickled({})}, "is compressed"),
    "no pickle": (zipfile.ZIP_STORED, {"x/data.txt": b""}, "with 0 data.pkl instead of one"),
    "two pickles": (
        zipfile.ZIP_STORED, {"x/data.pkl": pickled({}), "y/data.pkl": pickled({})}, "with 2"
    ),
    "a program": (
        zipfile.ZIP_STORED, {"x/data.pkl": pickled({}), "x/constants.pkl": b""}, "a TorchScript"
    ),
    "byte order": (
        zipfile.ZIP_STORED, {"x/data.pkl": pickled({}), "x/byteorder": b"middle"}, "little or big"
    ),
    "empty pickle": (zipfile.ZIP_STORED, {"x/data.pkl": b""}, "exhausted before seeing STOP"),
    "no stop": (zipfile.ZIP_STORED, {"x/data.pkl": b"\x80\x02N"}, "exhausted before seeing STOP"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARCHIVES)
def test_archives(tmp_path: Path, case: str) -> None:
    compression, members, message = ARCHIVES[case]
    with zipfile.ZipFile(tmp_path / "x.pt", "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(UsageError, match=message):
        open_weights(tmp_path / "x.pt")


def test_members_that_lie_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    write_zip(path, {"w": REBUILD(GOOD, 0, (2, 3), (3, 1), False, None)}, {"0": bytes(24)})
    good = path.read_bytes()
    directory = good.index(b"PK\x01\x02")
    entries = [i for i in range(directory, len(good)) if good[i : i + 4] == b"PK\x01\x02"]
    last = entries[-1]

    def changed(at: int, code: str, number: int) -> bytes:
        size = struct.calcsize(code)
        return good[:at] + struct.pack(code, number) + good[at + size :]

    cases = [
        (changed(last + 42, "<I", 5), "is not at byte 5"),
        (changed(last + 42, "<I", 0), r"'x/data/0' has another name at byte 0"),
        (changed(last + 8, "<H", 1), "is compressed or encrypted"),
        (changed(last + 10, "<H", 8), "is compressed or encrypted"),
        (changed(last + 20, "<II"[:2], 23), "is compressed or encrypted"),
        (changed(len(good) - 10, "<I", 1 << 31), "truncated or damaged: Bad offset"),
        (changed(len(good) - 6, "<I", 0), "is not at byte"),
        (good[:-1], "damaged: File is not a zip file"),
        (good + b"x", "something follows its end record"),
        (good[: entries[0]] + good[-22:], "truncated or damaged: Bad magic number"),
    ]
    for data, message in cases:
        path.write_bytes(data)
        with pytest.raises(UsageError, match=message):
            open_weights(path)
    grown = changed(last + 20, "<Q", 10_000 | 10_000 << 32)
    path.write_bytes(grown)
    with pytest.raises(UsageError, match=r"'x/data/0' ends at byte .* but its directory begins at"):
        open_weights(path)
    first = entries[0]
    size = struct.unpack_from("<I", good, first + 20)[0] + 40
    path.write_bytes(changed(first + 20, "<Q", size | size << 32))
    with pytest.raises(
        UsageError, match=r"'x/data\.pkl' ends at .* but its member 'x/byteorder' begins"
    ):
        open_weights(path)


LEGACY_SIZES = {"protocol_version": 1001, "little_endian": True}
WHOLE = ("storage", FLOATS, "0", "cpu", 6)
LEGACY_TENSOR = REBUILD(Persistent((*WHOLE, None)), 0, (2, 3), (3, 1), False, None)
ZEROS = struct.pack("<q", 6) + bytes(24)


def legacy(*values: Any, tail: bytes = ZEROS) -> bytes:
    good = [MAGIC_NUMBER, 1001, LEGACY_SIZES, {"w": LEGACY_TENSOR}, ["0"]]
    return b"".join(map(pickled, [*values, *good[len(values) :]])) + tail


def part(*view: Any) -> dict[str, Any]:
    identity = Persistent((*WHOLE, tuple(view)))
    return {"w": REBUILD(identity, 0, (1,), (1,), False, None)}


HEAD = (MAGIC_NUMBER, 1001, LEGACY_SIZES)
LEGACY = {
    "protocol": (legacy(MAGIC_NUMBER, 1002), "the magic number or protocol is wrong"),
    "big": (legacy(MAGIC_NUMBER, 1001, {"little_endian": False}), "of a little-endian machine"),
    "sizes": (legacy(MAGIC_NUMBER, 1001, [1]), "of a little-endian machine"),
    "runs": (legacy(*HEAD, SYSTEM(COMMAND)), "the name 'os.system'"),
    "keys": (legacy(*HEAD, {"w": LEGACY_TENSOR}, 3), "the list of storages is int 3"),
    "int keys": (legacy(*HEAD, {"w": LEGACY_TENSOR}, [0]), "the list of storages is list"),
    "other key": (legacy(*HEAD, {"w": LEGACY_TENSOR}, ["1"]), "'1', which no tensor uses"),
    "twice": (legacy(*HEAD, {"w": LEGACY_TENSOR}, ["0", "0"]), "'0', which occurs twice"),
    "no keys": (legacy(*HEAD, {"w": LEGACY_TENSOR}, []), "storage '0' is not in the file"),
    "count": (legacy(tail=struct.pack("<q", 5) + bytes(24)), "found a count of 5"),
    "cut": (legacy(tail=ZEROS[:-1]), "the file is truncated or damaged"),
    "untyped": (
        legacy(*HEAD, {"w": storage("storage", Name("torch UntypedStorage"), "0", "cpu", 6, None)}),
        "without an element type",
    ),
    "long": (
        legacy(*HEAD, {"w": storage("storage", FLOATS, "0", "cpu", 1 << 50, None)}), "more than the"
    ),
    "two sizes": (
        legacy(*HEAD, [LEGACY_TENSOR, storage("storage", FLOATS, "0", "cpu", 5, None)]),
        "with two types or sizes",
    ),
    "part": (legacy(*HEAD, part("p", 4, 3)), "larger than the storage"),
    "part of strings": (legacy(*HEAD, part("p", "4", 3)), "a part of a storage that is tuple"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEGACY)
def test_legacy_files(tmp_path: Path, case: str) -> None:
    data, message = LEGACY[case]
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(UsageError, match=message):
        open_weights(tmp_path / "x.bin")
    (tmp_path / "x.bin").write_bytes(legacy())
    with open_weights(tmp_path / "x.bin") as weights:
        np.testing.assert_array_equal(weights.array("w"), np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickled({"w": 1}), "a plain pickle, not a file of torch.save"),
        (bytes(257) + b"ustar" + bytes(250), "a tar archive, as torch wrote before 0.1.11"),
        (b"garbage", "the pickle at byte 0 has an error: no newline found"),
    ],
)
def test_relatives_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(UsageError, match=message):
        open_weights(tmp_path / "x.pt")

"""The safetensors reader against the `safetensors` package, and against damaged files."""

from __future__ import annotations

import json
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from nbflow.checkpoint import open_weights
from nbflow_kernels.errors import UsageError

RNG = np.random.default_rng(1)
TENSORS = {
    "matrix": RNG.standard_normal((7, 5)).astype(np.float32),
    "half": RNG.standard_normal((3, 4, 2)).astype(np.float16),
    "scalar": np.array(2.5, np.float64),
    "empty": np.zeros((0, 9), np.float32),
    "codes": np.arange(-4, 5, dtype=np.int8),
    "mask": np.array([True, False, True]),
    "unicode é": np.arange(3, dtype=np.uint64),
}


def raw(header: bytes | dict[str, object], data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_the_package_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(TENSORS, path, metadata={"format": "np"})
    with open_weights(path) as weights:
        assert sorted(weights.names()) == sorted(TENSORS)
        assert weights.format == "safetensors"
        assert weights.files() == [path]
        assert weights.config() is None
        for name, expected in TENSORS.items():
            got = weights.array(name)
            assert got.dtype == expected.dtype
            assert weights.shape(name) == expected.shape == got.shape
            assert got.flags.c_contiguous
            np.testing.assert_array_equal(got, expected)
        assert weights.dtype("half") == "f16"
        assert weights.n_bytes("half") == 48


def test_rows_and_columns_read_only_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(TENSORS, path)
    matrix = TENSORS["matrix"]
    with open_weights(path) as weights:
        assert weights.bytes_read == 0
        cases = [((2, 6), None), (None, (1, 4)), ((1, 3), (4, 5)), ((3, 3), None), (None, (2, 2))]
        for rows, columns in cases:
            before = weights.bytes_read
            got = weights.array("matrix", rows=rows, columns=columns)
            expected = matrix[slice(*(rows or (0, 7))), slice(*(columns or (0, 5)))]
            np.testing.assert_array_equal(got, expected)
            assert got.shape == expected.shape
            assert got.flags.c_contiguous
            assert weights.bytes_read - before == expected.nbytes
        got = weights.array("half", rows=(1, 3))
        np.testing.assert_array_equal(got, TENSORS["half"][1:3])


@pytest.mark.parametrize(
    ("name", "rows", "columns", "message"),
    [
        ("matrix", (3, 8), None, r"rows of tensor 'matrix' must lie within 0\.\.7, got \(3, 8\)"),
        ("matrix", (-1, 2), None, "rows of tensor 'matrix'"),
        ("matrix", (4, 2), None, "rows of tensor 'matrix'"),
        ("matrix", None, (0, 6), r"columns of tensor 'matrix' must lie within 0\.\.5"),
        ("codes", None, (0, 1), "columns cannot be cut"),
        ("half", None, (0, 1), "columns cannot be cut"),
        ("scalar", (0, 1), None, "rows cannot be cut"),
        ("matrlx", None, None, "unknown tensor 'matrlx'; did you mean 'matrix'"),
    ],
)
def test_wrong_questions(tmp_path: Path, name, rows, columns, message) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(TENSORS, path)
    with open_weights(path) as weights, pytest.raises(UsageError, match=message):
        weights.array(name, rows=rows, columns=columns)


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    bits = np.arange(0, 1 << 16, 7, dtype=np.uint16)  # every kind: denormals, infinities, NaN
    path = tmp_path / "a.safetensors"
    n = bits.nbytes
    path.write_bytes(raw({"w": entry("BF16", [len(bits)], [0, n])}, bits.tobytes()))
    with open_weights(path) as weights:
        got = weights.array("w")
        assert weights.dtype("w") == "bf16"
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got.view(np.uint32), bits.astype(np.uint32) << 16)
        np.testing.assert_array_equal(weights.array("w", rows=(5, 9)), got[5:9])
        assert weights.bytes_read == n + 8


def test_float8_is_widened_exactly(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    codes = bytes([0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0x7F, 0xB8])
    kinds = ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"]
    header = {kind: entry(kind, [2, 4], [8 * i, 8 * i + 8]) for i, kind in enumerate(kinds)}
    path.write_bytes(raw(header, codes * 5))
    # Sign, exponent and mantissa by hand from the definitions of the formats.
    expected = {
        "F8_E4M3": [0, 2**-9, 7 * 2**-9, 2**-6, 1, 448, np.nan, -1],
        "F8_E5M2": [0, 2**-16, 1.75 * 2**-14, 2**-13, 0.5, np.nan, np.nan, -0.5],
        "F8_E8M0": [2.0 ** (code - 127) for code in codes],
        "F8_E4M3FNUZ": [0, 2**-10, 7 * 2**-10, 2**-7, 0.5, 224, 240, -0.5],
        "F8_E5M2FNUZ": [0, 2**-17, 1.75 * 2**-15, 2**-14, 0.25, 49152, 57344, -0.25],
    }
    with open_weights(path) as weights:
        assert weights.dtype("F8_E4M3") == "f8_e4m3"
        for kind in kinds:
            got = weights.array(kind)
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got.ravel(), np.float32(expected[kind]))
            np.testing.assert_array_equal(weights.array(kind, rows=(1, 2)), got[1:])


@pytest.mark.parametrize(
    ("kind", "n_bytes"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("C64", 64)]
)
def test_types_that_are_listed_but_not_read(tmp_path: Path, kind: str, n_bytes: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw({"w": entry(kind, [2, 4], [0, n_bytes])}, bytes(n_bytes)))
    with open_weights(path) as weights:
        assert weights.dtype("w") == kind.lower()
        assert weights.n_bytes("w") == n_bytes
        assert len(weights.sha256("w")) == 64
        with pytest.raises(UsageError, match=f"'w' is stored as {kind.lower()}, which cannot be"):
            weights.array("w")
    path.write_bytes(raw({"w": entry("F4", [3], [0, 1])}, bytes(1)))
    with pytest.raises(UsageError, match="not a valid safetensors file"):
        open_weights(path)


def test_closed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(TENSORS, path)
    with open_weights(path) as weights:
        pass
    weights.close()
    with pytest.raises(UsageError, match=r"a\.safetensors: the weight file is closed"):
        weights.array("matrix")


def test_file_that_shrinks_while_open(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(TENSORS, path)
    with open_weights(path) as weights:
        path.write_bytes(path.read_bytes()[:-80])
        with pytest.raises(UsageError, match="something changes the file"):
            weights.array(weights.names()[-1])


def test_threads_count_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(TENSORS, path)
    with open_weights(path) as weights:
        work = [
            threading.Thread(target=lambda: [weights.array("matrix") for _ in range(50)])
            for _ in range(4)
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        assert weights.bytes_read == 200 * TENSORS["matrix"].nbytes


HEADERS = {
    "unknown dtype": {"w": entry("F31")},
    "dtype not a string": {"w": entry(5)},  # type: ignore[arg-type]
    "size differs": {"w": entry(shape=[3])},
    "past the end": {"w": entry(shape=[4], offsets=[0, 16])},
    "backwards": {"w": entry(offsets=[8, 0])},
    "negative shape": {"w": entry(shape=[-2])},
    "shape of true": {"w": entry(shape=[True])},
    "shape not a list": {"w": entry(shape="2")},
    "float offset": {"w": entry(offsets=[0, 8.0])},
    "three offsets": {"w": entry(offsets=[0, 8, 8])},
    "huge empty": {"w": entry(shape=[0, 1 << 62], offsets=[0, 0]), "v": entry()},
    "not a table": {"w": 3},
    "overlap": {"a": entry(), "b": entry(offsets=[4, 12])},
    "twice": {"a": entry(), "b": entry()},
    "gap": {"a": entry(shape=[1], offsets=[4, 8])},
    "trailing": {"a": entry(shape=[1], offsets=[0, 4])},
    "metadata": {"__metadata__": 3, "w": entry()},
    "metadata of numbers": {"__metadata__": {"a": 3}, "w": entry()},
    "huge number": {"w": entry(shape=[1 << 64])},
    "repeated name": b'{"w": 1, "w": 2}',
    "not JSON": b'{"w": ',
    "not UTF-8": b'{"\xff": 1}',
    "list": b"[1, 2]",
    "deep": b'{"w":' + b"[" * 100_000,
    "long number": b'{"w":' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("case", HEADERS)
def test_impossible_headers(tmp_path: Path, case: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw(HEADERS[case], bytes(8)))
    with pytest.raises(UsageError, match=r"bad\.safetensors: .*not a valid|too large"):
        open_weights(path)


def test_header_longer_than_the_file_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes((1 << 31).to_bytes(8, "little") + b"{" + bytes(100))
    tracemalloc.start()
    with pytest.raises(UsageError, match="not a valid safetensors file"):
        open_weights(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20  # the file has 109 bytes; the rest is Python


def test_damaged_files_give_usage_errors_only(tmp_path: Path) -> None:
    good = tmp_path / "good.safetensors"
    safetensors.numpy.save_file(
        {"a": np.ones((4, 3), np.float32), "b": np.ones(5, np.float16)}, good
    )
    data = good.read_bytes()
    path = tmp_path / "bad.safetensors"
    n_header = len(data) - 58  # 48 bytes of a, 10 of b
    rng = np.random.default_rng(2)
    variants = [data[:n] for n in range(0, len(data), 3)]
    for position in range(n_header):
        for value in (data[position] ^ (1 << rng.integers(8)), int(rng.integers(256))):
            variants.append(data[:position] + bytes([value]) + data[position + 1 :])
    tracemalloc.start()
    refused = 0
    for variant in variants:
        path.write_bytes(variant)
        message = failure(path)
        if message is not None:
            assert str(path) in message
            refused += 1
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert refused > len(variants) // 2  # flips inside a name or in the padding are harmless


def failure(path: Path) -> str | None:
    """Read everything; return the message of a UsageError."""
    try:
        with open_weights(path) as weights:
            for name in weights.names():
                weights.array(name)
    except UsageError as error:
        return str(error)
    return None


def shards(folder: Path) -> dict[str, str]:
    safetensors.numpy.save_file(
        {"a": np.ones(3, np.float32), "b": np.zeros(2)}, folder / "one.safetensors"
    )
    safetensors.numpy.save_file({"c": np.full((2, 2), 7, np.int32)}, folder / "two.safetensors")
    return {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}


def write_index(folder: Path, weight_map: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_shards(tmp_path: Path) -> None:
    index = write_index(tmp_path, shards(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for path in (tmp_path, index):
        with open_weights(path) as weights:
            assert sorted(weights.names()) == ["a", "b", "c"]
            assert [p.name for p in weights.files()] == ["one.safetensors", "two.safetensors"]
            assert weights.config() == {"model_type": "llama"}
            np.testing.assert_array_equal(weights.array("c"), np.full((2, 2), 7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d": "three.safetensors"}, "1 of 3 shards are missing: 'three.safetensors'"),
        ({"d": "two.safetensors"}, "1 tensors that .* promises .* 'd'"),
        ({"d": "../two.safetensors"}, "'d' must be a file name, got '../two.safetensors'"),
        ({"d": 3}, "'d' must be a file name, got 3"),
    ],
)
def test_index_and_shards_disagree(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_index(tmp_path, shards(tmp_path) | change)
    with pytest.raises(UsageError, match=message):
        open_weights(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    weight_map = shards(tmp_path)
    safetensors.numpy.save_file({"a": np.ones(1), "c": np.ones(1)}, tmp_path / "two.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(UsageError, match=r"'a' is in both one\.safetensors and two\.safet"):
        open_weights(tmp_path)


def test_index_without_weight_map(tmp_path: Path) -> None:
    for weight_map in (None, {}, [1]):
        write_index(tmp_path, weight_map)
        with pytest.raises(UsageError, match="weight_map must be a table"):
            open_weights(tmp_path)


def test_folder_and_files_that_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must hold model\.safetensors or pytorch"):
        open_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin: the zip archive is truncated"):
        open_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"to read a file of it, name the file: other\.pt"):
        open_weights(tmp_path)
    with pytest.raises(UsageError, match="the zip archive is truncated or damaged"):
        open_weights(tmp_path / "other.pt")
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(UsageError, match="the counts at byte 8 needs 8 bytes, but the file"):
        open_weights(tmp_path / "x.gguf")
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(UsageError, match=r"not a weight file of a known format \(safetensors, gg"):
        open_weights(tmp_path / "x.txt")
    with pytest.raises(UsageError, match="missing: cannot be opened: No such file"):
        open_weights(tmp_path / "missing")


def test_content_decides_not_the_suffix(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, tmp_path / "weights.bin")
    with open_weights(tmp_path / "weights.bin") as weights:
        assert weights.format == "safetensors"


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("width", [300, 40_000])  # rows read with the gaps, and one by one
def test_columns_are_read_into_a_buffer(tmp_path: Path, dtype: str, width: int) -> None:
    item = 4 if dtype == "F32" else 2
    data = RNG.integers(0, 256, (9, width * item), dtype=np.uint8)
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw({"w": entry(dtype, [9, width], [0, data.size])}, data.tobytes()))
    with open_weights(path) as weights:
        for columns in ((0, width), (17, 29), (width - 3, width)):
            out = np.zeros((5, (columns[1] - columns[0]) * item), np.uint8)
            before = weights.bytes_read
            weights.read_rows("w", (4, 9), columns, out)  # to the last byte of the file
            wanted = data[4:, columns[0] * item : columns[1] * item]
            np.testing.assert_array_equal(out, wanted)
            array = weights.array("w", (4, 9), columns, widen_bf16=False)
            np.testing.assert_array_equal(array.view(np.uint8), wanted)
            assert weights.bytes_read - before == 2 * out.nbytes
        with pytest.raises(UsageError, match="shape"):
            weights.read_rows("w", (4, 9), None, np.zeros((5, 8), np.uint8))

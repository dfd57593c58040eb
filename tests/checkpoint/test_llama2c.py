"""The llama2.c reader against files that llama2.c's own export.py wrote, and damaged ones."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from nbflow.checkpoint import is_weight_file, open_weights
from nbflow_kernels.errors import UsageError

GOLDEN = Path(__file__).parent.parent / "golden" / "llama2c"
CONFIG = {
    "model_type": "llama2c",
    "dim": 16,
    "hidden_dim": 24,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 310,
    "max_seq_len": 32,
}
SHAPES = {
    "attention_norm": (16,),
    "attention.wq": (16, 16),
    "attention.wk": (8, 16),
    "attention.wv": (8, 16),
    "attention.wo": (16, 16),
    "ffn_norm": (16,),
    "feed_forward.w1": (24, 16),
    "feed_forward.w2": (16, 24),
    "feed_forward.w3": (24, 16),
}
EXPECTED = {"tok_embeddings.weight": (310, 16), "norm.weight": (16,)} | {
    f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()
}
HEAD = {"output.weight": (310, 16)}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """As `weight_values` of tools/golden/llama2c.py."""
    x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return (1.0 + 0.2 * x if name.endswith("norm.weight") else 0.3 * x).astype(np.float32)


@pytest.mark.parametrize("stem", ["legacy_shared", "legacy_unshared", "v1_unshared"])
def test_float_files(stem: str) -> None:
    shapes = EXPECTED | ({} if stem == "legacy_shared" else HEAD)
    with open_weights(GOLDEN / f"{stem}.bin") as weights:
        assert weights.format == "llama2c"
        assert sorted(weights.names()) == sorted(shapes)
        assert weights.config() == CONFIG
        for name, shape in shapes.items():
            assert weights.shape(name) == shape
            assert weights.dtype(name) == "f32"
            np.testing.assert_array_equal(weights.array(name), values(name, shape))
        n_bytes = sum(4 * int(np.prod(shape)) for shape in shapes.values())
        assert weights.bytes_read == n_bytes


@pytest.mark.parametrize("stem", ["v2_shared", "v2_unshared"])
def test_int8_files(stem: str) -> None:
    shapes = EXPECTED | ({} if stem == "v2_shared" else HEAD)
    with open_weights(GOLDEN / f"{stem}.bin") as weights:
        assert sorted(weights.names()) == sorted(shapes)
        assert weights.config() == CONFIG
        for name, shape in shapes.items():
            expected = values(name, shape)
            got = weights.array(name)
            assert got.dtype == np.float32
            if len(shape) == 1:
                assert weights.dtype(name) == "f32"
                np.testing.assert_array_equal(got, expected)
                continue
            assert weights.dtype(name) == "i8"
            groups = np.abs(expected).reshape(-1, 16).max(axis=1, keepdims=True)
            error = np.abs(got - expected).reshape(-1, 16)
            # Rounding to a step of max/127 errs by half a step; 1e-5: float32 rounding of w/scale.
            assert np.all(error <= groups / 127 * 0.5 * (1 + 1e-5))
            assert np.abs(got).max() > 0


def test_int8_slices_read_whole_groups_only() -> None:
    with open_weights(GOLDEN / "v2_unshared.bin") as weights:
        for name in ("layers.1.feed_forward.w2.weight", "tok_embeddings.weight"):
            whole = weights.array(name)
            n_rows, n_columns = whole.shape
            spans = [(0, 1), (1, 2), (3, n_rows), (n_rows - 1, n_rows), (2, 2)]
            for rows in spans:
                before = weights.bytes_read
                got = weights.array(name, rows=rows)
                np.testing.assert_array_equal(got, whole[slice(*rows)])
                first = rows[0] * n_columns // 16
                last = -(-rows[1] * n_columns // 16) if rows[1] > rows[0] else first
                assert weights.bytes_read - before == (last - first) * (16 + 4)
                np.testing.assert_array_equal(
                    weights.array(name, rows=rows, columns=(5, 9)), whole[slice(*rows), 5:9]
                )
        assert weights.n_bytes("layers.0.attention.wq.weight") == 256 + 16 * 4
        np.testing.assert_array_equal(
            weights.array("norm.weight", rows=(3, 7)), weights.array("norm.weight")[3:7]
        )


def test_float_slices() -> None:
    with open_weights(GOLDEN / "legacy_unshared.bin") as weights:
        whole = values("output.weight", (310, 16))
        got = weights.array("output.weight", rows=(300, 310), columns=(8, 16))
        np.testing.assert_array_equal(got, whole[300:, 8:])
        assert weights.bytes_read == got.nbytes


def header(**changes: int) -> bytes:
    numbers = {key: value for key, value in CONFIG.items() if key != "model_type"} | changes
    return struct.pack("<7i", *numbers.values())


def v2(data: bytes, offset: int, code: str, value: int) -> bytes:
    size = struct.calcsize(code)
    return data[:offset] + struct.pack(code, value) + data[offset + size :]


LEGACY = (GOLDEN / "legacy_shared.bin").read_bytes()
V2 = (GOLDEN / "v2_unshared.bin").read_bytes()
DAMAGED = {
    "negative dim": (header(dim=-16) + LEGACY[28:], r"dim .* must be 1\.\.1048576, got -16"),
    "no layers": (header(n_layers=0) + LEGACY[28:], r"n_layers .* got 0"),
    "many layers": (header(n_layers=4000) + LEGACY[28:], r"asks for \d+ bytes, the file has 36060"),
    "huge": (header(dim=1 << 20, vocab_size=1 << 24) + LEGACY[28:], "the file has 36060"),
    "heads": (header(n_heads=3) + LEGACY[28:], "dim must be an even multiple of n_heads"),
    "kv heads": (header(n_kv_heads=3) + LEGACY[28:], "n_heads a multiple of n_kv_heads"),
    "least vocab": (header(vocab_size=-(1 << 31)) + LEGACY[28:], "vocab_size .* got 2147483648"),
    "context": (header(max_seq_len=33) + LEGACY[28:], "asks for 36076 bytes, the file has 36060"),
    "longer": (LEGACY + b"\0", r"asks for 36060 bytes, the file has 36061; it is damaged"),
    "shorter": (LEGACY[:-1], r"asks for 36060 bytes, the file has 36059; it is truncated"),
    "no header": (LEGACY[:27], "a llama2.c header has 28 bytes, got 27"),
    "empty": (b"", "a llama2.c header has 28 bytes, got 0"),
    "no v2 header": (V2[:255], "a llama2.c header has 256 bytes, got 255"),
    "version": (v2(V2, 4, "<i", 3), "version must be 1 or 2, got 3"),
    "shared byte": (v2(V2, 36, "<B", 2), "shared classifier byte must be 0 or 1, got 2"),
    "shared flipped": (v2(V2, 36, "<B", 1), r"asks for 11576 bytes, the file has 17776"),
    "group size": (v2(V2, 37, "<i", 5), "group_size must divide dim = 16, got 5"),
    "no group size": (v2(V2, 37, "<i", 0), "group_size must divide dim = 16, got 0"),
    "dim zero": (v2(V2, 8, "<i", 0), "group_size must divide dim = 0"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged(tmp_path: Path, case: str) -> None:
    data, message = DAMAGED[case]
    path = tmp_path / "bad.bin"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message) as caught:
        open_weights(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("stem", ["legacy_shared", "v1_unshared", "v2_shared"])
def test_any_damage_gives_a_usage_error_or_a_readable_file(tmp_path: Path, stem: str) -> None:
    data = (GOLDEN / f"{stem}.bin").read_bytes()
    path = tmp_path / "bad.bin"
    n_header = 28 if stem.startswith("legacy") else 41
    rng = np.random.default_rng(3)
    lengths = sorted({*range(0, 300, 7), *rng.integers(300, len(data), 40).tolist()})
    variants = [data[:n] for n in lengths]
    for position in range(n_header):
        for value in {data[position] ^ (1 << int(bit)) for bit in rng.integers(0, 8, 3)} | {0, 255}:
            variants.append(data[:position] + bytes([value]) + data[position + 1 :])
    tracemalloc.start()
    for variant in variants:
        path.write_bytes(variant)
        message = failure(path)
        if message is None:
            assert len(variant) == len(data)  # a truncated file is never accepted
        else:
            assert str(path) in message
    # The largest tensor is 20 kB; a header that promises gigabytes must not cost any.
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def failure(path: Path) -> str | None:
    """Read everything; return the message of a UsageError."""
    try:
        with open_weights(path) as weights:
            for name in weights.names():
                assert weights.array(name).shape == weights.shape(name)
    except UsageError as error:
        return str(error)
    return None


def test_recognised_by_content(tmp_path: Path) -> None:
    for stem in ("legacy_shared", "v1_unshared", "v2_shared"):
        path = tmp_path / f"{stem}.weights"
        path.write_bytes((GOLDEN / f"{stem}.bin").read_bytes())
        with open_weights(path) as weights:
            assert weights.format == "llama2c"
    assert not is_weight_file(GOLDEN / "tokenizer.bin")

"""GGUF files, written by the reference package, read by ours."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_models import write_llama

import nbflow
import nbflow_kernels as nk
from nbflow.checkpoint import open_weights
from nbflow.checkpoint.readers import gguf as reader
from nbflow.checkpoint.readers.gguf import read_metadata, tensor_types
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.program import build
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError

GOLDEN = Path(__file__).parents[1] / "golden" / "llama" / "tied"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _neighbours(w: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows as llama.cpp's converter does: rotary pairs become neighbours."""
    return w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def _name(theirs: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if theirs in fixed:
        return fixed[theirs]
    _, _, i, rest = theirs.split(".", 3)
    return f"blk.{i}.{NAMES[rest.removesuffix('.weight')]}.weight"


def write_gguf(path: Path, folder: Path, formats: dict[str, str]) -> None:
    """Write a Llama as GGUF; `formats` gives the type of tensors whose name ends so."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(config.get("rope_theta") or rope.get("rope_theta", 10000.0))
    for theirs, array in load_file(folder / "model.safetensors").items():
        name, values = _name(theirs), array.astype(np.float32)
        if "attn_q" in name:
            values = _neighbours(values, config["num_attention_heads"])
        if "attn_k" in name:
            values = _neighbours(values, config["num_key_value_heads"])
        chosen = next((f for end, f in formats.items() if name.endswith(f"{end}.weight")), None)
        if chosen is None:
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            kind = gguf.GGMLQuantizationType[chosen.upper()]
            writer.add_tensor(name, nk.quantize(values, chosen).data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", GOLDEN, {})
    ids, expected = np.load(GOLDEN / "ids.npy"), np.load(GOLDEN / "logits.npy")
    with nbflow.load(tmp_path / "x.gguf", kv="f32") as model:
        difference = np.abs(model.logits(ids) - expected).max() / np.abs(expected).max()
    assert difference < 1e-5  # float32 on both sides


@pytest.mark.parametrize("partition", ["0", "0;1"])
def test_tensors_of_several_types_keep_them(tmp_path: Path, partition: str) -> None:
    formats = {
        "attn_q": "q4_0",
        "attn_k": "q4_0",
        "attn_v": "q8_0",
        "ffn_down": "q5_1",
        "token_embd": "q8_0",
    }
    write_llama(tmp_path / "hf", n_layers=2, tied_head=True)
    write_gguf(tmp_path / "x.gguf", tmp_path / "hf", formats)
    ids = np.arange(40) * 7 % 101
    spec = resolve(tmp_path / "x.gguf").spec
    program = build(spec)
    with open_weights(tmp_path / "x.gguf") as file:
        assert {file.dtype(n) for n in file.names()} == {"f32", "q4_0", "q5_1", "q8_0"}
        reference = ReferenceExecutor(program, WeightLoader(program, file, None))
    with nbflow.load(tmp_path / "x.gguf", kv="f32", partition=partition) as model:
        logits, expected = model.logits(ids), reference.logits(ids)
        names = {
            t.format.name
            for ops in model.workers[0].weights.operands
            for t in ops
            if isinstance(t, nk.QuantTensor)
        }
    assert np.abs(logits - expected).max() / np.abs(expected).max() < 1e-5
    assert {"f32", "q4_0", "q5_1", "q8_0"} >= names >= {"f32", "q4_0", "q5_1"}


def test_rectangles_of_blocks(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, 96), dtype=np.float32)
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tensor("w", nk.quantize(x, "q4_0").data, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = nk.dequantize(nk.quantize(x, "q4_0"))
    with open_weights(tmp_path / "x.gguf") as file:
        assert file.config() == {"general": {"architecture": "llama"}, "model_type": "gguf-llama"}
        assert (file.shape("w"), file.dtype("w"), file.n_bytes("w")) == ((6, 96), "q4_0", 6 * 54)
        assert np.array_equal(file.array("w"), expected)
        assert np.array_equal(file.array("w", rows=(1, 4), columns=(40, 70)), expected[1:4, 40:70])
        before = file.bytes_read
        part = file.quantized("w", rows=(2, 5), columns=(32, 96))
        assert file.bytes_read - before == 3 * 36
        assert np.array_equal(nk.dequantize(part), expected[2:5, 32:])
        with pytest.raises(
            UsageError, match="must begin and end at multiples of the q4_0 block of 32"
        ):
            file.quantized("w", columns=(16, 96))


@pytest.mark.parametrize("columns", [None, (32, 64)])
def test_rows_of_experts(tmp_path: Path, columns: tuple[int, int] | None) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (5, 4, 3 * 34), np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer)
    with open_weights(tmp_path / "x.gguf") as file:
        assert file.shape("w") == (5, 4, 96)
        if columns is None:
            part = file.quantized("w", rows=(1, 3))
            assert part.shape == (2, 4, 96)
            assert np.array_equal(part.data.reshape(2, 4, -1), blocks[1:3])
            assert file.bytes_read == 2 * 4 * 3 * 34
        else:
            with pytest.raises(UsageError, match="columns cannot be cut from tensor 'w' of shape"):
                file.quantized("w", rows=(1, 3), columns=columns)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_kind_of_metadata(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    values = {
        "u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 1 << 31, "i32": -5,
        "f32": 0.5, "bool": True, "string": "é", "u64": 1 << 63, "i64": -(1 << 62), "f64": 0.1,
    }  # fmt: skip
    for kind, value in values.items():
        name = {"u": "uint", "i": "int", "f": "float"}.get(kind[0], kind) + kind[1:]
        getattr(writer, f"add_{name if kind not in ('bool', 'string') else kind}")(
            f"test.{kind}", value
        )
    writer.add_array("test.words", ["a", "", "ccc"])
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_array("test.nested", [[1, 2], [3]])
    finish(writer)
    metadata = read_metadata(tmp_path / "x.gguf")
    for kind, value in values.items():
        assert metadata[f"test.{kind}"] == value
    assert metadata["test.words"] == ["a", "", "ccc"]
    assert metadata["test.nested"] == [[1, 2], [3]]
    with open_weights(tmp_path / "x.gguf") as file:
        assert file.config()["test"]["numbers"] == [1, 2, 3]


def test_big_endian(tmp_path: Path) -> None:
    """Plain numbers turned round by the package; of blocks only the float16 numbers are."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 256), dtype=np.float32)
    plain = {
        "f32": x, "f16": x.astype(np.float16), "f64": x.astype(np.float64),
        "i8": (x * 9).astype(np.int8), "i16": (x * 9).astype(np.int16),
        "i32": (x * 9).astype(np.int32), "i64": (x * 9).astype(np.int64),
    }  # fmt: skip
    fields = {  # values and bytes of a block, offsets of its float16 numbers
        "q4_0": (32, 18, [0]), "q8_0": (32, 34, [0]), "q4_k": (256, 144, [0, 2]),
        "q6_k": (256, 210, [208]), "mxfp4": (32, 17, []), "q5_0": (32, 22, [0]),
    }  # fmt: skip
    blocks = {}
    big = gguf.GGUFEndian.BIG
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama", endianess=big)
    writer.add_array("test.numbers", [1, 70000])
    for name, array in plain.items():
        writer.add_tensor(name, array.copy())
    for name, (size, n_bytes, offsets) in fields.items():
        blocks[name] = rng.integers(0, 256, (4, 256 // size * n_bytes), np.uint8)
        data = blocks[name].copy().reshape(-1, n_bytes)
        for at in offsets:
            data[:, at : at + 2] = data[:, at : at + 2][:, ::-1].copy()
        kind = gguf.GGMLQuantizationType[name.upper()]
        writer.add_tensor(name, data.reshape(4, -1), raw_dtype=kind)
    finish(writer)
    assert (tmp_path / "x.gguf").read_bytes()[4:8] == b"\0\0\0\3"
    with open_weights(tmp_path / "x.gguf") as file:
        assert file.config()["test"]["numbers"] == [1, 70000]
        for name, array in plain.items():
            got = file.array(name)
            assert got.dtype == array.dtype
            assert np.array_equal(got, array)
            assert np.array_equal(file.array(name, (1, 3), (5, 9)), array[1:3, 5:9])
        for name in fields:
            if name == "q5_0":
                with pytest.raises(UsageError, match="'q5_0' of q5_0 cannot be read from a big-"):
                    file.quantized(name)
                continue
            assert np.array_equal(file.quantized(name).data, blocks[name])
            assert np.array_equal(file.quantized(name, rows=(1, 2)).data, blocks[name][1:2])


def test_version_1_has_short_lengths(tmp_path: Path) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<I", len(value)) + value.encode()

    entries = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    entries += text("a.b") + struct.pack("<IIIIHH", 9, 2, 2, 0, 1, 2)[:8]
    entries += struct.pack("<IHH", 2, 7, 8)
    table = text("w") + struct.pack("<IIIIQ", 2, 3, 2, 0, 0)
    head = b"GGUF" + struct.pack("<III", 1, 1, 2) + entries + table
    head += bytes(-len(head) % 32)
    values = np.arange(6, dtype=np.float32)
    (tmp_path / "x.gguf").write_bytes(head + values.tobytes())
    with open_weights(tmp_path / "x.gguf") as file:
        assert file.config()["a"]["b"] == [7, 8]
        assert np.array_equal(file.array("w"), values.reshape(2, 3))


def write_splits(folder: Path, **changes: int) -> list[Path]:
    paths, count = [], 3
    for i in range(count):
        path = folder / f"m-{i + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        if i == 0:
            writer.add_name("whole")
        writer.add_uint16("split.no", changes.get("no", i) if i else i)
        writer.add_uint16("split.count", changes.get("count", count) if i else count)
        writer.add_int32("split.tensors.count", changes.get("tensors", count))
        name = "same" if "same" in changes else f"t{i}"
        writer.add_tensor(name, np.full((2, 3), i, np.float32))
        finish(writer)
        paths.append(path)
    return paths


def test_models_in_parts(tmp_path: Path) -> None:
    paths = write_splits(tmp_path)
    for path in paths:  # whichever is named
        with open_weights(path) as file:
            assert file.names() == ["t0", "t1", "t2"]
            assert file.files()[0] == path
            assert np.array_equal(file.array("t2"), np.full((2, 3), 2))
            assert file.config()["general"]["name"] == "whole"
        assert read_metadata(path)["general.name"] == "whole"
    paths[1].rename(tmp_path / "other.gguf")
    with pytest.raises(UsageError, match=r"m-00002-of-00003\.gguf: cannot be opened"):
        open_weights(paths[0])
    with pytest.raises(UsageError, match=r"is one of 3 parts .* must be called NAME-00001-of-0000"):
        open_weights(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no": 0}, r"split\.no must be 1, got 0"),
        ({"count": 4}, r"split\.count must be 3, got 4"),
        ({"tensors": 4}, r"split\.tensors\.count is 4, but the parts hold 3"),
        ({"same": 1}, "tensor 'same' is in both"),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path: Path, change: Any, message: str) -> None:
    paths = write_splits(tmp_path, **change)
    with pytest.raises(UsageError, match=message):
        open_weights(paths[0])


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _file(
    tensors: bytes = b"",
    n_tensors: int = 0,
    entries: bytes = b"",
    n_entries: int = 0,
    version: int = 3,
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_entries) + entries + tensors


def _tensor(
    name: str = "w", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0
) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _string(name) + dims + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_file(version=4), "version must be 1, 2 or 3, got 4"),
        (_file(version=2 << 24), "version must be 1, 2 or 3, got 33554432"),
        (_file(n_tensors=1 << 60), "says it has 1152921504606846976 tensors; at most 0 are"),
        (_file(n_entries=1), "says it has 1 metadata entries; at most 0 are possible"),
        (
            _file(entries=struct.pack("<QQ", 1 << 62, 0), n_entries=1),
            "needs 4611686018427387904 bytes",
        ),
        (
            _file(entries=_string("split.count") + struct.pack("<II", 4, 100_000), n_entries=1),
            "split.count must be 0..99999, got 100000",
        ),
        (_file(_tensor(kind=9), 1), "the type q8_1, which is for activations"),
        (_file(_tensor(offset=8) + bytes(300), 1), "offset must be a multiple of 32, got 8"),
        (_file(_tensor("a") + _tensor("b", offset=96) + bytes(300), 2), "'a' and 'b' overlap"),
        (
            _file(entries=_string("a") + struct.pack("<IIQ", 9, 4, 1 << 50), n_entries=1),
            "more than the file can hold",
        ),
        (_file(entries=_string("a") + struct.pack("<IIQ", 9, 77, 0), n_entries=1), None),
        (
            _file(entries=_string("a") + struct.pack("<I", 55), n_entries=1),
            "has the unknown type 55",
        ),
        (
            _file(entries=2 * (_string("a") + struct.pack("<II", 4, 1)), n_entries=2),
            "'a' is there twice",
        ),
        (_file(_tensor(), 1), "needs 128 bytes at"),
        (_file(_tensor(kind=4), 1), "a type that GGML has removed (number 4)"),
        (_file(_tensor(kind=99), 1), "an unknown type (number 99)"),
        (_file(_tensor(shape=(33,), kind=2), 1), "must be multiples of 32"),
        (_file(_tensor(shape=(1,) * 5), 1), "has 5 dimensions"),
        (_file(2 * _tensor() + bytes(300), 2), "tensor 'w' is there twice"),
    ],
)
def test_damaged_files_are_refused_by_name(
    tmp_path: Path, data: bytes, message: str | None
) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    if message is None:  # an empty array of an unknown type is harmless
        open_weights(tmp_path / "x.gguf").close()
        return
    with pytest.raises(UsageError) as caught:
        open_weights(tmp_path / "x.gguf")
    assert message in str(caught.value)
    assert "x.gguf" in str(caught.value)


def test_every_prefix_of_a_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", GOLDEN, {})
    data = (tmp_path / "x.gguf").read_bytes()
    for n in [*range(4, 2000, 37), len(data) // 2, len(data) - 1]:
        (tmp_path / "y.gguf").write_bytes(data[:n])
        with pytest.raises(UsageError):
            open_weights(tmp_path / "y.gguf")


def test_numbers_of_types_are_those_of_the_package() -> None:
    theirs = {kind.value: kind.name.lower() for kind in gguf.GGMLQuantizationType}
    known = {number: name for number, name in theirs.items() if number <= 42}
    assert tensor_types() == known | {42: "q2_0"}


def test_headers_are_parsed_once_within_a_block(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(_file(_tensor(), 1) + bytes(300))
    with reader.shared_headers():
        with open_weights(path) as first:
            name = first.names()[0]
            wanted = first.array(name)
        parsed = dict(reader._shared.found)
        assert len(parsed) == 1
        with open_weights(path) as second:  # the first file is closed
            np.testing.assert_array_equal(second.array(name), wanted)
        assert reader._shared.found == parsed
        path.write_bytes(_file(_tensor(), 1) + bytes(364))
        with open_weights(path) as changed:
            assert changed.names() == [name]
        assert len(reader._shared.found) == 2
    assert not reader._shared.found

"""GGUF files, written by the reference package, read by ours."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from specs import write_llama

import nbflow
import nbflow_kernels as nk
from nbflow.execute import RankWeights, ReferenceExecutor
from nbflow.program import build
from nbflow.spec import resolve
from nbflow.weights import open_weights
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
        reference = ReferenceExecutor(program, RankWeights(program, file, None))
    with nbflow.load(tmp_path / "x.gguf", kv="f32", partition=partition) as model:
        logits, expected = model.logits(ids), reference.logits(ids)
        names = {
            t.format.name
            for ops in model.engines[0].weights.operands
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
        (_file(version=1), "version must be 2 or 3, got 1"),
        (_file(version=3 << 24), "a big-endian file"),
        (_file(n_tensors=1 << 60), "the name of tensor 0 at byte 24 needs 8 bytes"),
        (_file(n_entries=1), "the key of metadata entry 0 at byte 24"),
        (_file(entries=struct.pack("<Q", 1 << 62), n_entries=1), "needs 4611686018427387904 bytes"),
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
    if message is None:  # an empty array of an unknown type says nothing
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

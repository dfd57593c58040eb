"""GGML's layouts before GGUF, written by hand as llama.cpp's converter states them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.program import build
from nbflow.spec import check, resolve
from nbflow_kernels.errors import UsageError

LLAMA2C = Path(__file__).parents[1] / "golden" / "llama2c"
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q8_0": 8, "q6_k": 14, "iq4_nl": 20}
NUMBERS = {
    "n_vocab": 5, "n_embd": 32, "n_mult": 8, "n_head": 4, "n_layer": 1, "n_rot": 8, "ftype": 0,
}  # fmt: skip
EMBEDDING = np.arange(160, dtype=np.float32).reshape(5, 32)

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def ggml(
    tensors: Tensors, magic: bytes = b"tjgg", version: int = 3, tail: bytes = b"", **changes: int
) -> bytes:
    """Return a file; a tensor is its type, its shape and its bytes."""
    numbers = NUMBERS | changes
    data = magic + (b"" if magic == b"lmgg" else struct.pack("<I", version))
    data += struct.pack("<7I", *numbers.values())
    for i in range(numbers["n_vocab"]):
        token = b"\xe9" * (i % 4)
        data += struct.pack("<I", len(token)) + token
        data += b"" if magic == b"lmgg" else struct.pack("<f", -i)
    for name, (kind, shape, content) in tensors.items():
        data += struct.pack("<3I", len(shape), len(name), TYPES[kind])
        data += struct.pack(f"<{len(shape)}I", *shape[::-1]) + name.encode()
        data += bytes(-len(data) % 32 if magic == b"tjgg" else 0) + content
    return data + tail


def embedding() -> Tensors:
    return {"tok_embeddings.weight": ("f32", (5, 32), EMBEDDING.tobytes())}


@pytest.mark.parametrize(
    ("magic", "version"), [(b"lmgg", 0), (b"fmgg", 1), (b"tjgg", 1), (b"tjgg", 2), (b"tjgg", 3)]
)
def test_floats_of_every_version(tmp_path: Path, magic: bytes, version: int) -> None:
    halves = np.arange(7, dtype=np.float16)
    tensors = {"norm.weight": ("f16", (7,), halves.tobytes()), **embedding()}
    (tmp_path / "x.bin").write_bytes(ggml(tensors, magic, version))
    with open_weights(tmp_path / "x.bin") as weights:
        assert weights.format == "ggml"
        assert weights.names() == ["norm.weight", "tok_embeddings.weight"]
        np.testing.assert_array_equal(weights.array("norm.weight"), halves)
        np.testing.assert_array_equal(weights.array("tok_embeddings.weight"), EMBEDDING)
        part = weights.array("tok_embeddings.weight", rows=(1, 3), columns=(4, 6))
        np.testing.assert_array_equal(part, EMBEDDING[1:3, 4:6])
        assert weights.config() == {"model_type": "ggml-llama", **NUMBERS}


BLOCKS = {"q4_0": (32, 18), "q5_0": (32, 22), "q8_0": (32, 34), "q6_k": (256, 210)}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("magic", "version"), [(b"tjgg", 1), (b"tjgg", 2), (b"tjgg", 3)])
def test_blocks_are_read_where_they_are_those_of_today(
    tmp_path: Path, kind: str, magic: bytes, version: int
) -> None:
    size, n_bytes = BLOCKS[kind]
    content = np.random.default_rng(0).integers(0, 256, (3, n_bytes), np.uint8)
    tensors = {"w": (kind, (3, size), content.tobytes()), **embedding()}
    (tmp_path / "x.bin").write_bytes(ggml(tensors, magic, version))
    if version == 3 or (version == 2 and kind in ("q5_0", "q6_k")):
        with open_weights(tmp_path / "x.bin") as weights:
            np.testing.assert_array_equal(weights.quantized("w").data, content)
            np.testing.assert_array_equal(weights.quantized("w", rows=(1, 2)).data, content[1:2])
    else:
        with pytest.raises(UsageError, match=f"'w' is {kind} in a layout from before ggjt version"):
            open_weights(tmp_path / "x.bin")


def test_a_model_runs_as_from_llama2c(tmp_path: Path) -> None:
    """The same weights in both layouts, whose names and rotary pairs agree."""
    source = LLAMA2C / "legacy_unshared.bin"
    with open_weights(source) as weights:
        config = weights.config()
        assert config is not None
        tensors: Tensors = {
            name: ("f32", weights.shape(name), weights.array(name).tobytes())
            for name in weights.names()
        }
    numbers = {"n_vocab": 310, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_rot": 4}
    (tmp_path / "x.bin").write_bytes(ggml(tensors, **numbers))
    spec = tmp_path / "spec.toml"
    spec.write_text('family = "llama_ggml"\n[override]\nnorm_eps = 1e-5\nmax_context = 32\n')

    def logits(path: Path, spec_file: Path | None) -> Any:
        resolved = resolve(path, spec=spec_file).spec
        program = build(resolved)
        with open_weights(path) as file:
            check(resolved, file)
            return ReferenceExecutor(program, WeightLoader(program, file, None)).logits(
                np.arange(9)
            )

    np.testing.assert_array_equal(logits(tmp_path / "x.bin", spec), logits(source, None))
    assert resolve(tmp_path / "x.bin").spec.n_kv_heads == 2
    assert resolve(tmp_path / "x.bin").spec.norm_eps == 5e-6


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"tjgg", "the version at byte 4 needs 4 bytes"),
        (ggml(embedding(), version=4), "version of a ggjt file must be one of .* got 4"),
        (ggml(embedding(), magic=b"fmgg", version=2), "version of a ggmf file"),
        (b"algg" + bytes(99), "a LoRA adapter; expected a Llama"),
        (ggml(embedding())[:-1], "needs 640 bytes at"),
        (ggml(embedding(), n_embd=64), r"\(5, 64\), got \(5, 32\); the file is one of several"),
        (ggml({}), r"got None; the file is one of several parts, or of another architecture"),
        (ggml({}, n_layer=1 << 30), r"n_layer must be 1\.\.4096, got 1073741824"),
        (b"tjgg" + struct.pack("<8I", 3, 1 << 20, 9, 9, 9, 9, 9, 0), "token 0 of the vocabulary"),
        (ggml({**embedding(), "w": ("iq4_nl", (32,), bytes(18))}), "'w' has the unknown type 20"),
        (ggml({**embedding(), "w": ("q8_0", (33,), b"")}), "rows of q8_0 must be multiples of 32"),
        (ggml(embedding(), tail=struct.pack("<3I", 9, 1, 0)), "tensor 1 has 9 dimensions"),
        (ggml(embedding(), tail=struct.pack("<3I", 1, 1 << 20, 0)), "a name of 1048576 bytes"),
        (ggml(embedding(), tail=b"\0"), "tensor 1 at byte .* needs 4 bytes"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(UsageError, match=message) as caught:
        open_weights(tmp_path / "x.bin")
    assert "x.bin" in str(caught.value)

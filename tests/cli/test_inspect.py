"""`nbflow inspect` for every checkpoint format."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from torch_files import Name, Persistent, write_zip

from nbflow import cli
from nbflow.checkpoint import open_weights

GOLDEN = Path(__file__).parents[1] / "golden"
VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def inspect(capsys: Any, *arguments: object) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(["inspect", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert not end.value.code, err
    return out


def write(folder: Path, format: str) -> Path:
    """Write one tensor of 3 x 4 float32 called w."""
    path = folder / f"x.{format}"
    if format == "safetensors":
        save_file({"w": VALUES}, path)
    elif format == "gguf":
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_tensor("w", VALUES)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        identity = ("storage", Name("torch FloatStorage"), "0", "cpu", 12)
        call = Name("torch._utils _rebuild_tensor_v2")
        tensor = call(Persistent(identity), 0, (3, 4), (4, 1), False, None)
        write_zip(path, {"w": tensor}, {"0": VALUES.tobytes()})
    return path


@pytest.mark.parametrize("format", ["safetensors", "gguf", "pt"])
def test_tables_and_hashes_agree(tmp_path: Path, capsys: Any, format: str) -> None:
    path = write(tmp_path, format)
    facts = json.loads(inspect(capsys, path, "--hash", "--json"))
    (tensor,) = facts["tensors"]
    start = tensor.pop("offset")
    assert path.read_bytes()[start : start + 48] == VALUES.tobytes()
    tensor.pop("strides", None)
    digest = hashlib.sha256(VALUES.tobytes()).hexdigest()
    assert tensor == {
        "name": "w", "dtype": "f32", "shape": [3, 4], "bytes": 48, "file": str(path),
        "sha256": digest,
    }  # fmt: skip
    lines = inspect(capsys, path, "--hash").splitlines()
    assert lines[0].split() == ["name", "dtype", "shape", "bytes", "file:offset", "sha256"]
    assert lines[1].split() == ["w", "f32", "3x4", "48", f"0:{start}", digest]
    assert lines[3] == f"file 0: {path}"
    assert "sha256" not in inspect(capsys, path, "--json")


def test_hash_of_int8_tensors_covers_their_scales() -> None:
    path = GOLDEN / "llama2c" / "v2_unshared.bin"
    with open_weights(path) as weights:
        name = "layers.1.attention.wq.weight"
        start, n_bytes = weights.entry(name).offset, weights.n_bytes(name)
        stored = path.read_bytes()[start : start + n_bytes]
        assert weights.sha256(name) == hashlib.sha256(stored).hexdigest()


def test_long_tensors_are_hashed_in_pieces(tmp_path: Path) -> None:
    values = np.arange(5 << 20, dtype=np.float32).reshape(5, -1)  # 20 MiB
    save_file({"w": values}, tmp_path / "x.safetensors")
    with open_weights(tmp_path / "x.safetensors") as weights:
        assert [len(piece) for piece in weights.stored_chunks("w")] == [16 << 20, 4 << 20]
        assert weights.sha256("w") == hashlib.sha256(values.tobytes()).hexdigest()


def test_names_cannot_write_to_the_terminal(tmp_path: Path, capsys: Any) -> None:
    save_file({"a\x1b[2Jé\n\u202e": VALUES}, tmp_path / "x.safetensors")
    out = inspect(capsys, tmp_path / "x.safetensors")
    assert "a\\x1b[2Jé\\n\\u202e" in out
    assert "\x1b" not in out


def test_a_file_without_tensors(tmp_path: Path, capsys: Any) -> None:
    write_zip(tmp_path / "x.pt", {"step": 3}, {})
    assert inspect(capsys, tmp_path / "x.pt") == "pickle, 1 file, 0 tensors, 0 bytes\n"

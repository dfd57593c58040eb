"""`nbflow quantize`: safetensors with block formats."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_models import write_llama

import nbflow
import nbflow_kernels as nk
from nbflow import cli
from nbflow.checkpoint import open_weights
from nbflow.conversion import tensor_rows as rows_module
from nbflow.distributed import make_plan
from nbflow.executor import WeightLoader
from nbflow.program import build, fuse
from nbflow.program import partition as cut
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError

Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small random Llama in float16."""
    folder = tmp_path_factory.mktemp("source") / "model"
    write_llama(folder, dtype=np.float16)
    return folder


def command(capsys: Any, *arguments: object, code: int = 0) -> str:
    """Run the command and return its output or errors."""
    with pytest.raises(SystemExit) as end:
        cli.main(["quantize", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert end.value.code == code, err
    return err if code else out


def loaded(model: Path, weights: str | None, partition: str) -> list[bytes]:
    """Return the bytes of the matrices of all ranks, without compiling kernels."""
    spec, found = resolve(model).spec, []
    with open_weights(model) as file:
        for rank in make_plan(spec, partition, 32).ranks:
            ours = WeightLoader(fuse(cut(build(spec), rank)), file, weights)
            tensors = [t for operands in ours.operands for t in operands]
            found += [(t.data if isinstance(t, nk.QuantTensor) else t).tobytes() for t in tensors]
    return found


def test_safetensors_is_what_quantizing_on_load_gives(source: Path, tmp_path: Path) -> None:
    done = nbflow.quantize_checkpoint(source, tmp_path / "out", "q8")
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(done.path)) == ["config.json", "model.safetensors"]
    with open_weights(source) as before, open_weights(done.path) as after:
        assert after.names() == before.names()
        assert after.dtype(Q) == "q8_b32t2"
        assert after.shape(Q) == before.shape(Q)
        wanted = nk.quantize(before.array(Q), "q8")
        assert np.array_equal(after.quantized(Q).data, wanted.data)
        assert np.array_equal(after.quantized(Q, (8, 16)).data, wanted.rows(8, 16).data)
        assert after.sha256("model.norm.weight") == before.sha256("model.norm.weight")
    for partition in ("0", "0&1"):
        assert loaded(done.path, None, partition) == loaded(source, "q8", partition)
    assert loaded(done.path, None, "0") != loaded(source, None, "0")
    raw = load_file(done.path / "model.safetensors")  # as other programs see it
    assert raw[Q].dtype == np.uint8
    assert raw[Q].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("format", ["q2t", "q3t", "q4t"])
def test_trellis_formats_go_through_safetensors(format: str, tmp_path: Path) -> None:
    write_llama(
        tmp_path / "source", n_layers=1, hidden_size=512, intermediate_size=512, n_heads=2,
        n_kv_heads=2, head_dim=256,
    )  # fmt: skip
    done = nbflow.quantize_checkpoint(
        tmp_path / "source", tmp_path / "out", format, quantizer="reference"
    )
    with open_weights(tmp_path / "source") as before, open_weights(done.path) as after:
        wanted = nk.quantize(before.array(Q), format, quantizer="reference")
        found = after.quantized(Q)
        assert (found.format.name, found.shape) == (wanted.format.name, (512, 512))
        assert found.data.tobytes() == wanted.data.tobytes()
        columns = nk.quantize(before.array(DOWN)[:, 256:], format, quantizer="reference")
    ranks = loaded(done.path, None, "0&1")  # blocks do not depend on each other
    rows = wanted.rows(256, 512).data.tobytes()  # the rank's q lies before its k and v
    assert any(rows in matrix for matrix in ranks)
    assert columns.data.tobytes() in ranks


def test_first_rule_that_matches_wins(source: Path, tmp_path: Path) -> None:
    rules = ["*.0.*down*=f32", "layers.*.ffn.down.weight=q4_0", "*embed*=f32"]
    done = nbflow.quantize_checkpoint(source, tmp_path / "x.safetensors", "q8_0", rules=rules)
    formats = {tensor.name: tensor.format for tensor in done.tensors}
    assert formats[DOWN] == "f32"
    assert formats[DOWN.replace(".0.", ".2.")] == "q4_0"
    assert formats[Q] == "q8_0"
    assert formats["model.embed_tokens.weight"] == "f32"
    assert formats["lm_head.weight"] == "f16"
    assert any("config.json" in note for note in done.notes)
    with open_weights(done.path) as file:
        assert {name: file.dtype(name) for name in file.names()} == formats
        assert sum(map(file.n_bytes, file.names())) == done.n_bytes


def test_dry_run_prints_the_table_and_writes_nothing(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    facts = ["--to", "q4", "-o", tmp_path / "x", "--rule", "lm_head.weight=q6_b64t1"]
    out = command(capsys, source, *facts, "--dry-run")
    assert not list(tmp_path.iterdir())
    line = next(line for line in out.splitlines() if line.startswith(Q))
    assert line.split()[1:] == ["256x64", "f16", "q4_b32t1a", "10,240"]  # 16384 weights, 5 bits
    planned = json.loads(command(capsys, source, *facts, "--dry-run", "--json"))
    assert f"{planned['total_bytes']:,} bytes" in out
    assert not list(tmp_path.iterdir())
    written = json.loads(command(capsys, source, *facts, "--json"))
    assert (planned.pop("written"), written.pop("written")) == (False, True)
    assert planned == written
    assert (
        command(capsys, tmp_path / "x", "--to", "f16", "-o", tmp_path / "y", "--dry-run").count(
            "q4_b32t1a"
        )
        == 3 * 7
    )  # stored column: seven matrices in each of three layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "q4x"], "unknown format 'q4x'"),
        (["--to", "Q4_K_M"], "llama.cpp's mixture of formats, not one: use q4_k"),
        (["--to", "q4", "--rule", "*nothing*=q8"], "'*nothing*=q8' is for no matrix"),
        (["--to", "q4", "--rule", "*norm*=q8"], "'*norm*=q8' is for no matrix"),
        (["--to", "q4", "--rule", "*=q8", "--rule", "*down*=q4"], "'*down*=q4' is for no matrix"),
        (["--to", "q4", "--rule", "q8"], "must be PATTERN=FORMAT"),
        (
            ["--to", "q4_k"],
            "rows of 192 weights, no multiple of the q4_k block of 256, and so have 17",
        ),
    ],
)
def test_wrong_requests(
    source: Path, tmp_path: Path, capsys: Any, arguments: list[str], message: str
) -> None:
    assert message in command(capsys, source, *arguments, "-o", tmp_path / "x", code=2)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_kept(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists; give another name, or --force"):
        nbflow.quantize_checkpoint(source, out, "q8_0")
    assert out.read_text() == "mine"
    nbflow.quantize_checkpoint(source, out, "q8_0", force=True)
    with open_weights(out) as file:
        assert file.dtype(Q) == "q8_0"
    folder = tmp_path / "folder"
    nbflow.quantize_checkpoint(source, folder, "q8_0")
    nbflow.quantize_checkpoint(source, folder, "q4_0", force=True)
    with open_weights(folder) as file:
        assert file.dtype(Q) == "q4_0"
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"also holds notes\.txt, which would be lost"):
        nbflow.quantize_checkpoint(source, folder, "q8_0", force=True)
    with pytest.raises(UsageError, match="is the checkpoint that is read"):
        nbflow.quantize_checkpoint(source, source, "q8_0", force=True)
    with pytest.raises(UsageError, match="does not exist"):
        nbflow.quantize_checkpoint(source, tmp_path / "no" / "x", "q8_0")
    with pytest.raises(UsageError, match=r"\.bin is not written; use \.gguf"):
        nbflow.quantize_checkpoint(source, tmp_path / "x.bin", "q8_0")
    assert sorted(os.listdir(tmp_path)) == ["folder", "x.safetensors"]


@pytest.mark.parametrize("name", ["x", "x.safetensors"])
def test_interrupt_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        assert list(tmp_path.iterdir())  # something was begun
        raise KeyboardInterrupt

    monkeypatch.setattr(rows_module.nk, "quantize", interrupted)
    command(capsys, source, "--to", "q8_0", "-o", tmp_path / name, code=130)
    assert not list(tmp_path.iterdir())


def test_overflow_is_refused_with_the_name(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", dtype=np.float32)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors[DOWN] = tensors[DOWN].copy()
    tensors[DOWN][3, 5] = 1e5
    save_file(tensors, path)
    with pytest.raises(UsageError, match=rf"tensor {DOWN} does not fit into f16: .*65504|65520"):
        nbflow.quantize_checkpoint(tmp_path / "model", tmp_path / "x", "f16")
    assert sorted(os.listdir(tmp_path)) == ["model"]
    nbflow.quantize_checkpoint(tmp_path / "model", tmp_path / "x", "bf16")
    with open_weights(tmp_path / "x") as file:
        assert file.array(DOWN)[3, 5] == 99840  # 1e5 = 195.3 * 2**9, halfway rounds to 195 * 2**9


def test_memory_is_that_of_some_rows(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_CHUNK_WEIGHTS", 1 << 14)
    big = tmp_path / "big"
    write_llama(big, dtype=np.float16, n_layers=1, intermediate_size=16384)
    nbflow.quantize_checkpoint(source, tmp_path / "warm", "q8_0", quantizer="reference")  # compiles
    tracemalloc.start()
    try:
        nbflow.quantize_checkpoint(big, tmp_path / "out", "q8_0", quantizer="reference")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The largest tensors have 2**20 weights: 2 MiB stored, 4 as float32, 1 as a result.  A piece
    # of 2**14 takes 33 bytes per weight while it is encoded: 0.5 MiB.
    assert peak < 1 << 20
    with open_weights(big) as before, open_weights(tmp_path / "out") as after:
        wanted = nk.quantize(before.array(DOWN), "q8_0", quantizer="reference")
        assert np.array_equal(after.quantized(DOWN).data, wanted.data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "q99"}, "unknown format 'q99'"),
        ({"block": [32, 35]}, "blocks of q8_0 must be of 32 weights in 34 bytes"),
        ({"shape": [256, 128]}, "must be U8 of 256 rows"),
        ({"shape": [1 << 60, 64]}, "too large"),
        ({"shape": []}, "shape must be 1 to 16 numbers"),
        ({"more": 1}, "must state format, shape and block"),
    ],
)
def test_damaged_metadata_is_refused(
    source: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "x.safetensors"
    record = {"format": "q8_0", "shape": [256, 64], "block": [32, 34], **change}
    metadata = {"nbflow.formats": json.dumps({"w": record})}
    save_file({"w": np.zeros((256, 68), np.uint8)}, path, metadata)
    with pytest.raises(UsageError, match=message) as error:
        open_weights(path)
    assert str(path) in str(error.value)

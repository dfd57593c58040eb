"""Importance files: collection, formats, and their use in quantization."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from small_models import write_checkpoint, write_llama

import nbflow
from nbflow import cli
from nbflow.calibration import ActivationStats, collect_stats, merge, write_hessians, write_stats
from nbflow.checkpoint import open_weights
from nbflow.conversion.importance_names import gguf_names_of
from nbflow.quantization.importance import read_importance
from nbflow_kernels.errors import UsageError

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
WINDOWS = [[1, 5, 9, 2, 7], [3, 3, 8]]
Q = "layers.0.attn.q.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imatrix") / "llama"
    write_llama(folder, n_layers=1)
    return folder


@pytest.fixture(scope="module")
def found(llama: Path) -> list[ActivationStats]:
    with nbflow.load(llama) as model:
        return collect_stats(model, WINDOWS, full=True)


def diagonal(found: list[ActivationStats]) -> list[ActivationStats]:
    return [ActivationStats(i.names, i.squares.copy(), i.n_rows) for i in found]


def test_first_matrix_reads_the_normalized_embedding(
    llama: Path, found: list[ActivationStats]
) -> None:
    with open_weights(llama) as file:
        table = file.array("model.embed_tokens.weight").astype(np.float64)
        gain = file.array("model.layers.0.input_layernorm.weight").astype(np.float64)
    eps = json.loads((llama / "config.json").read_text())["rms_norm_eps"]
    x = table[np.concatenate(WINDOWS)]
    x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + eps) * gain
    first = found[0]
    assert first.names[0] == Q
    assert first.n_rows == 8
    # float32 rows: each product is off by about 2 * 2**-24 of it, sums of 8 by less than 1e-6
    assert np.allclose(first.sums, x.T @ x, rtol=1e-5, atol=1e-5 * np.abs(x.T @ x).max())
    names = {name for inputs in found for name in inputs.names}
    assert {f"layers.0.{part}.weight" for part in ("attn.o", "ffn.gate", "ffn.down")} < names


def test_nothing_is_observed_unless_asked(llama: Path) -> None:
    with nbflow.load(llama) as model:
        model.logits(WINDOWS[0])
        executor = model.workers[0].executor
        (bound,) = executor._bound.values()
        assert len(bound.segments) == 1  # one list of compiled calls, no Python in between


def test_rows_of_experts_are_those_routed_to_them(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    config = json.loads((FAMILIES / "mixtral" / "config.json").read_text()) | shape
    write_checkpoint(tmp_path / "model", config)
    with nbflow.load(tmp_path / "model") as model:
        inputs = collect_stats(model, WINDOWS)
    by_name = {name: i for i in inputs for name in i.names}
    router = next(i for name, i in by_name.items() if name.endswith("router.weight"))
    gates = [
        i for name, i in by_name.items() if name.startswith("layers.0.moe.") and "gate" in name
    ]
    top_k = config["num_experts_per_tok"]
    assert sum(i.n_rows for i in gates) == top_k * router.n_rows
    # the same float32 rows, added in another order in float64
    assert np.allclose(sum(i.sums for i in gates), top_k * router.sums, rtol=1e-12)
    names = gguf_names_of(str(tmp_path / "model"))
    write_stats(tmp_path / "x.gguf", inputs, names=names)
    read = read_importance(tmp_path / "x.gguf")["blk.0.ffn_gate_exps.weight"]
    assert read.shape == (len(gates), 64)
    for e, gate in enumerate(gates):
        wanted = gate.sums / gate.n_rows if gate.n_rows else np.ones(64)
        assert np.allclose(read[e], wanted, rtol=1e-6)  # stored as float32


def test_files_say_the_same_and_quantizing_uses_them(
    llama: Path, found: list[ActivationStats], tmp_path: Path
) -> None:
    inputs, names = diagonal(found), gguf_names_of(str(llama))
    outs = {}
    for file in ("x.gguf", "x.dat", "x.safetensors"):
        write_stats(tmp_path / file, inputs, names=names, text="t", n_windows=2, window=5)
        name = Q if file.endswith("safetensors") else "blk.0.attn_q.weight"
        # float32 is stored, of a sum or of a mean
        mean = read_importance(tmp_path / file)[name]
        assert np.allclose(mean, inputs[0].sums / inputs[0].n_rows, rtol=1e-6)
        outs[file] = nbflow.quantize_checkpoint(
            llama, tmp_path / f"{file}.safetensors", "q4", importance=tmp_path / file, dry_run=True
        )
        assert not any("no importances" in note for note in outs[file].notes)
        assert all((t.importance is not None) == (t.format != t.stored) for t in outs[file].tensors)
    write_stats(tmp_path / "full.safetensors", found)
    assert read_importance(tmp_path / "full.safetensors")[Q].shape == (64, 64)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert reader.get_field("general.type").contents() == "imatrix"
    assert reader.get_field("imatrix.chunk_count").contents() == 2


def test_merged_files_are_those_of_both_texts(llama: Path, tmp_path: Path) -> None:
    names = gguf_names_of(str(llama))
    for i, windows in enumerate(([WINDOWS[0]], [WINDOWS[1]], WINDOWS)):
        with nbflow.load(llama) as model:
            write_stats(tmp_path / f"{i}.gguf", collect_stats(model, windows), names=names)
    merge([tmp_path / "0.gguf", tmp_path / "1.gguf"], tmp_path / "m.gguf")
    merged, both = (read_importance(tmp_path / f"{n}.gguf") for n in ("m", "2"))
    assert list(merged) == list(both)
    # sums are stored as float32; windows of another length may be multiplied by another kernel
    assert all(np.allclose(merged[n], both[n], rtol=1e-4) for n in both)
    for wrong, message in (
        ([tmp_path / "0.gguf", tmp_path / "x.dat"], "must be all .gguf .*or all .dat"),
        ([tmp_path / "0.gguf"], "exists; give another name"),
    ):
        with pytest.raises(UsageError, match=message):
            merge(wrong, tmp_path / "m.gguf")


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "bad.dat"
    # a length below 0 would move back in the file
    path.write_bytes(struct.pack("<iii", 2, -8, 0) + bytes(64))
    with pytest.raises(UsageError, match=r"entry 0 at byte 8 states -8 bytes; it is damaged"):
        read_importance(path)


def test_command(llama: Path, tmp_path: Path, capsys: Any) -> None:
    write_stats(tmp_path / "x.dat", [ActivationStats((Q,), np.array([1.0, 3.0]), 2)])
    with pytest.raises(SystemExit) as end:
        cli.main(["imatrix", "--show", str(tmp_path / "x.dat"), "--json"])
    assert end.value.code == 0
    (row,) = json.loads(capsys.readouterr().out)["matrices"]
    assert (row["name"], row["sum"], row["largest"]) == (Q, 2.0, 1.5)
    # -(1/4 log2 1/4 + 3/4 log2 3/4) bits of 1
    assert row["entropy_share"] == pytest.approx(0.8112781, abs=1e-6)
    for words, message in (
        ([], "give MODEL with -o OUT"),
        ([str(llama), "-o", str(tmp_path / "x.bin")], "an importance file ends in"),
        ([str(llama), "-o", str(tmp_path / "x.gguf"), "--full"], "--full needs a .safetensors"),
        ([str(llama), "-o", str(tmp_path / "x.dat")], "exists; give another name"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["imatrix", *words])
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_quantizers_that_know_the_inputs(
    llama: Path, found: list[ActivationStats], tmp_path: Path
) -> None:
    """GPTQ has the least output error, and the usual decoder reads the file."""
    moments = tmp_path / "full.safetensors"
    write_stats(moments, found)
    H = found[0].sums
    lost = {}
    for quantizer in ("search", "reference", "hqq", "gptq"):
        importance = moments if quantizer in ("search", "gptq") else None
        done = nbflow.quantize_checkpoint(
            llama, tmp_path / quantizer, "q3", quantizer=quantizer, importance=importance
        )
        with open_weights(done.path) as new, open_weights(llama) as old:
            name = "model.layers.0.self_attn.q_proj.weight"
            assert new.dtype(name) == "q3_b32t1b"
            error = new.array(name).astype(np.float64) - old.array(name)
        lost[quantizer] = np.einsum("nk,kl,nl->", error, H, error)
    # 8 rows of inputs for 64 columns: nearly all of the error can be moved where nothing is read
    assert lost["gptq"] < 0.5 * min(lost["search"], lost["reference"], lost["hqq"])
    with pytest.raises(UsageError, match="needs second moments"):
        nbflow.quantize_checkpoint(llama, tmp_path / "x", "q3", quantizer="gptq")
    with pytest.raises(UsageError, match="equidistant codes"):
        nbflow.quantize_checkpoint(llama, tmp_path / "x", "iq4_nl", quantizer="hqq")


def test_bounded_sums_are_the_same(
    llama: Path, found: list[ActivationStats], tmp_path: Path
) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in ("once", "often", "all")]
    write_stats(paths[2], found)
    # inputs of 64, 256, 64, 192 and 64 columns, 8 K**2 bytes each; of one too large at a time
    for path, limit, n in ((paths[0], 1 << 30, 1), (paths[1], 8 * (64**2 + 64**2), 5)):
        with nbflow.load(llama) as model:
            assert write_hessians(path, model, WINDOWS, limit_bytes=limit) == n
            with pytest.raises(UsageError, match="has run before"):
                write_hessians(tmp_path / "x.safetensors", model, WINDOWS)
    once, often, everything = (read_importance(path) for path in paths)
    assert list(once) == list(often) == list(everything)
    for name, array in everything.items():
        assert np.array_equal(once[name], array)
        assert np.array_equal(often[name], array)
    with nbflow.load(llama) as model:
        with pytest.raises(UsageError, match="shorter than a window"):
            write_hessians(tmp_path / "x.safetensors", model, [])
        with pytest.raises(UsageError, match=r"only \.safetensors files store"):
            write_hessians(tmp_path / "x.gguf", model, WINDOWS)
        with pytest.raises(UsageError, match="exists; give another name"):
            write_hessians(paths[0], model, WINDOWS)
    assert not list(tmp_path.glob("x*"))

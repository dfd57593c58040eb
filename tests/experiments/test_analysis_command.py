"""`nbflow analyze`: tables, results folder, rejected arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from small_models import write_llama

from nbflow import cli
from nbflow_experiments.analysis import Format, figures, tensor_errors
from nbflow_experiments.analysis.output_folder import TABLES, AnalysisFolder
from nbflow_experiments.figure_style import NotDrawn
from nbflow_kernels.errors import UsageError

LABELS = ["q4 (reference)", "q3h (reference)"]
RESULTS = Path(__file__).parents[2] / "results" / "analysis" / "amd-epyc-2-cores"
SIZES = ["--tokens", "64", "--window", "32"]


def run_command(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert isinstance(end.value.code, int)
    return end.value.code


def analyze(*words: str) -> int:
    return run_command("analyze", *words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("analyze") / "out"
    words = ["tiny_python", "--weights", "q4,q3h", "--parts", "tensors,layers,attribution"]
    words += ["--quantizer", "reference", "--by", "layer"]
    assert analyze(*words, *SIZES, "--out", str(out)) == 0
    return out


def test_the_folder_is_complete_and_reads_back(folder: Path) -> None:
    read = AnalysisFolder(folder)
    settings = read.settings
    tables = {name: read.read(name) for name in settings["tables"]}
    rows = {name: len(table) for name, table in tables.items()}
    assert rows == {
        "tensors": 2 * 28, "totals": 2, "layers": 2 * 4, "models": 2, "modules": 2 * 28,
        "units": 2 * 4, "sums": 2, "tokens": len(tables["tokens"]),
    }  # fmt: skip
    fresh = tensor_errors("tiny_python", [Format("q4", "reference"), Format("q3h", "reference")])
    pd.testing.assert_frame_equal(tables["tensors"], fresh, check_dtype=False, check_exact=True)
    assert (settings["windows"], settings["window"], settings["weights"]) == (2, 32, LABELS)
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["finished"] >= provenance["started"]
    assert {p.name for p in (folder / "figures").iterdir()} == {
        f"{name}.{kind}"
        for name in ("tensors", "layers", "attribution", "tokens")
        for kind in ("png", "svg")
    }
    with pytest.raises(UsageError, match=r"no kv_layers.csv; it has tensors"):
        read.read("kv_layers")


def test_report_draws_the_figures_again(folder: Path, capsys: Any) -> None:
    files = sorted((folder / "figures").iterdir())
    before = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
    assert run_command("report", str(folder)) == 0
    assert sorted(map(Path, capsys.readouterr().out.split())) == files
    assert [file.read_bytes() for file in files] == before
    assert run_command("report", str(folder), "--weights", "q4") != 0
    assert "belong to the report of a sweep" in capsys.readouterr().err


def test_histograms(folder: Path) -> None:
    name = "layers.2.ffn.down.weight"
    with h5py.File(folder / "analysis.h5") as file:
        group = file[f"tensors/{LABELS[1]}/{name}"]
        assert group["rows"][:].sum() == 256
        assert group["columns"][:].sum() == 768
        assert group["blocks"][:].sum() == 256 * 768 / 64
        assert group["errors"][:].sum() == group["codes"][:].sum() == 256 * 768
        assert len(group["codes"]) == 11
        edges = file[group["rows"].attrs["edges"]][:]
        counts = group["rows"][:]
        table = AnalysisFolder(folder).read("tensors").set_index(["weights", "tensor"])
        largest = table.row_error_largest[LABELS[1], name]
        top = np.flatnonzero(counts)[-1]
        assert edges[top] <= largest < edges[top + 1]
        tokens = file[f"tokens/layers/{LABELS[0]}"]
        assert tokens.shape == (4, len(edges) - 1)
        assert (tokens[:].sum(axis=1) == 62).all()  # the last token of a window is predicted only
        assert file[f"weights/{name}"][:].sum() == 256 * 768


def test_tables_are_printed(capsys: Any) -> None:
    assert analyze("tiny_python", "--weights", "q4,q4_0", "--quantizer", "reference") == 0
    printed = capsys.readouterr().out
    assert "== totals" in printed
    assert "q4 (reference)" in printed
    assert "the first 40 of 56 rows" in printed
    words = ["--weights", "q4", "--tensors", "layers.0.attn.q.weight", "--json"]
    assert analyze("tiny_python", *words) == 0
    (row,) = json.loads(capsys.readouterr().out)["tensors"]
    assert row["tensor"] == "layers.0.attn.q.weight"
    assert row["stored_bits"] == 5.0


def test_pairs_of_cache_formats_need_no_weights(capsys: Any) -> None:
    words = ["--parts", "kv", "--kv", "q8_0/q4_0", *SIZES, "--json"]
    assert analyze("tiny_python", *words) == 0
    tables = json.loads(capsys.readouterr().out)
    assert list(tables) == ["kv_layers", "kv_models"]
    (row,) = tables["kv_models"]
    assert (row["keys"], row["values"], row["bits"]) == ("q8_0", "q4_0", 6.5)
    assert row["kld_mean_nats"] > 0
    assert len(tables["kv_layers"]) == 4


def test_the_recorded_results_can_be_read_and_drawn() -> None:
    read = AnalysisFolder(RESULTS)
    tables = {name: read.read(name) for name in read.settings["tables"]}
    assert set(tables) == set(TABLES)
    for draw in figures.FIGURES.values():
        assert draw(tables).figure.axes
    sums = tables["sums"]
    rest = sums.kld_mean_nats - sums.kld_sum_nats
    assert np.allclose(rest, sums.kld_interaction_nats, atol=1e-12)


def test_what_is_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    llama = tmp_path / "llama"
    write_llama(llama, n_layers=1)
    (tmp_path / "empty.py").write_text("")
    for words, message in (
        (["tiny_python", "--plugins", str(tmp_path / "empty.py")], "registers nothing"),
        (["tiny_python"], "give --weights FORMAT"),
        (["tiny_python", "--weights", "q4", "--parts", "layer"], "did you mean 'layers'"),
        (["tiny_python", "--weights", "q4,q4"], "names something twice"),
        (["tiny_python", "--weights", "q4", "--kv", "q8_0"], "--kv is for --parts kv"),
        (["tiny_python", "--weights", "q4", "--parts", "kv"], "--weights is for --parts tensors"),
        (["tiny_python", "--weights", "q4", "--force"], "--force needs --out"),
        (["tiny_python", "--weights", "q4", "--out", str(folder)], "holds an analysis"),
        (["tiny_python", "--weights", "q4", "--tensors", "*.wq"], "no matrix of tiny_python"),
        (["tiny_python", "--weights", "q4", "--quantizer", "awk"], "unknown quantizer 'awk'"),
        ([str(llama), "--weights", "q4", "--parts", "layers"], "brings no eval.txt"),
        (
            ["tiny_python", "--weights", "q4", "--parts", "layers", "--tokens", "8"],
            "at least one window",
        ),
        (
            ["tiny_python", "--weights", "q4", "--parts", "layers", "--text", "none.txt"],
            "the file none.txt does not exist",
        ),
        (["tiny_python", "--against", str(llama)], "is it that model"),
    ):
        assert analyze(*words) == 2, words
        assert message in capsys.readouterr().err


def test_figures_say_what_they_lack() -> None:
    for draw in figures.FIGURES.values():
        with pytest.raises(NotDrawn, match=r"the table .* is missing"):
            draw({})

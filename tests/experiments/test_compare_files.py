"""`nbflow compare-files`: checkpoints of one model against its float32 reference."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import nbflow
from nbflow.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the folder of a comparison of three checkpoints and two that cannot be compared."""
    folder = tmp_path_factory.mktemp("files")
    files = [str(folder / name) for name in ("tiny.gguf", "tiny-gptq", "tiny-q8", "absent.gguf")]
    for file, to in zip(files, ("q4_0", "gptq", "q8_0"), strict=False):
        nbflow.quantize_checkpoint("tiny_python", file, to, quantizer="reference")
    files.append(str(GOLDEN / "families" / "lfm2"))
    words = ["compare-files", "tiny_python", *files, "-c", "64", "--windows", "4"]
    with pytest.raises(SystemExit, match="1"):  # some failed
        main([*words, "--threads", "1", "--out", str(folder / "out")])
    return folder / "out", files


def test_a_row_for_each_file(compared: tuple[Path, list[str]]) -> None:
    out, files = compared
    facts = json.loads((out / "files.json").read_text())
    rows = {row["file"]: row for row in facts["files"]}
    assert list(rows) == ["tiny_python", *files]
    reference, gguf, gptq, q8, absent, other = rows.values()
    assert facts["scored_tokens"] == 4 * 31
    # float16 weights, computed in float32; the products in bfloat16 are the noise floor
    assert reference["kld_mean"] is None
    assert 0 < facts["noise_floor_kld_mean"] < 1e-3
    assert (gguf["formats"], gptq["formats"], q8["formats"]) == (
        "q4_0, f16",
        "int4_g128, f16",
        "q8_0, f16",
    )
    assert q8["kld_mean"] < gguf["kld_mean"] < gptq["kld_mean"]
    assert q8["bits_per_weight"] > gguf["bits_per_weight"] > gptq["bits_per_weight"] > 4.125
    for row in (gguf, gptq, q8):
        assert row["status"] == "done"
        assert row["kld_mean_stderr"] > 0
        assert row["decode_tokens_per_s"] > 0
        assert row["peak_rss_bytes"] > 5e7
    assert "no such file or folder" in absent["status"]
    assert other["status"] == "has a vocabulary of 97 tokens, the reference 2048"
    assert absent["kld_mean"] is other["kld_mean"] is None
    with (out / "files.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [row["file"] for row in table] == list(rows)
    assert float(table[1]["kld_mean"]) == gguf["kld_mean"]


def test_the_figure_and_nothing_else_stays(compared: tuple[Path, list[str]]) -> None:
    out, _ = compared
    assert {p.name for p in out.iterdir()} == {"files.csv", "files.json", "files.png", "files.svg"}
    text = (out / "files.svg").read_text()
    assert "<svg" in text


def test_a_text_that_fills_no_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("x = 1\n")
    with pytest.raises(SystemExit, match="2"):
        main(["compare-files", "tiny_python", "tiny_python", "--text", str(text)])
    assert "too few for a window of 512" in capsys.readouterr().err

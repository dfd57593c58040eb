"""Tables of a results folder: read back by name, and written for other programs."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeEngine

from nbflow_experiments.commands import export as command
from nbflow_experiments.export.data_tables import to_jsonl
from nbflow_experiments.export.markup_tables import to_latex, to_markdown
from nbflow_experiments.settings import SETTINGS
from nbflow_experiments.store.results_reader import read_points, read_results
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import MissingExtraError, UsageError

needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="needs pip install -e '.[parquet]'"
)


@pytest.fixture
def folder(fake: FakeEngine, sweep_file: Path) -> Path:
    def boom() -> None:
        raise RuntimeError('a | b, "c"\nand 5 % of d_e')

    fake.failures["time", "q2", "0&1"] = boom
    assert run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out")) == 1
    return sweep_file.parent / "out" / "unit"


def export(folder: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(folder), *words]))


def same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and a != b)


def make_nan(folder: Path) -> None:
    """Let a perplexity be NaN, as where logits are not finite."""
    path = folder / "points.csv"
    rows = list(csv.DictReader(path.open(newline="")))
    rows[0]["perplexity"] = "nan"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_types_of_what_is_read_back(folder: Path) -> None:
    make_nan(folder)
    columns, rows = read_points(folder)
    assert len(rows) == 12
    assert set(SETTINGS) <= set(columns)
    for name, setting in SETTINGS.items():
        assert {type(row[name]) for row in rows} == {type(setting.default)}, name
    assert math.isnan(rows[0]["perplexity"])
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) == 2
    assert {row["decode_tokens_per_s"] for row in failed} == {None}
    assert {row["error_message"] for row in failed} == {'a | b, "c"\nand 5 % of d_e'}
    assert rows[0]["error_message"] is None
    _, numbers = read_results(folder)
    assert {type(row["repeat"]) for row in numbers} == {int, type(None)}
    assert {type(row["value"]) for row in numbers} == {float}


def test_results_from_before_a_setting_have_its_default(folder: Path) -> None:
    path = folder / "points.csv"
    lines = list(csv.reader(path.open(newline="")))
    at = [lines[0].index(name) for name in ("ranks", "draft")]
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(
            [[cell for i, cell in enumerate(line) if i not in at] for line in lines]
        )
    columns, rows = read_points(folder)
    assert columns[-2:] == ["ranks", "draft"]
    assert {(row["ranks"], row["draft"]) for row in rows} == {(0, "ngram")}


def test_csv_and_json_lines_hold_every_digit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_nan(folder)
    capsys.readouterr()
    columns, rows = read_points(folder)
    assert export(folder, "--format", "csv") == 0
    assert capsys.readouterr().out == (folder / "points.csv").read_text().replace("\r\n", "\n")
    assert export(folder, "--format", "jsonl", "--out", str(folder / "a.jsonl")) == 0
    assert capsys.readouterr().out.strip() == str(folder / "a.jsonl")
    found = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    assert found[0]["perplexity"] == "NaN"
    found[0]["perplexity"] = float(found[0]["perplexity"])
    for row, read in zip(rows, found, strict=True):
        assert list(read) == columns
        assert all(same(read[name], row[name]) for name in columns)


@needs_pyarrow
def test_parquet_read_back_by_name(folder: Path) -> None:
    from pyarrow import parquet

    make_nan(folder)
    for table, read in (("points", read_points), ("results", read_results)):
        out = folder / f"{table}.parquet"
        assert export(folder, "--format", "parquet", "--table", table, "--out", str(out)) == 0
        columns, rows = read(folder)
        found = parquet.read_table(out)
        assert found.column_names == columns
        for row, other in zip(rows, found.to_pylist(), strict=True):
            assert all(same(other[name], row[name]) for name in columns)
    types = {f.name: str(f.type) for f in parquet.read_schema(folder / "points.parquet")}
    assert (types["partition"], types["batch"], types["perplexity"]) == (
        "string",
        "int64",
        "double",
    )


def test_parquet_without_pyarrow_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[parquet\]'"):
        export(folder, "--format", "parquet", "--out", str(folder / "a.parquet"))
    assert not (folder / "a.parquet").exists()
    with pytest.raises(UsageError, match="name a file with --out"):
        export(folder, "--format", "parquet")


def test_markdown_shows_what_varies_and_what_is_quoted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert export(folder, "--where", "weights=q4,batch=1") == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][:3] == ["`partition`", "`bits_per_weight`", "`weight_error_relative`"]
    assert cells[1][:2] == ["---", "---:"]
    assert [line[0] for line in cells[2:]] == ["0", "0&1"]
    row = next(r for r in read_points(folder)[1] if r["weights"] == "q4" and r["batch"] == 1)
    expected = f"{row['perplexity']:.4g} ± {row['perplexity_stderr']:.2g}"
    assert cells[2][cells[0].index("`perplexity`")] == expected
    columns = "status,error_message"
    assert (
        export(folder, "--format", "markdown", "--where", "weights=q2", "--columns", columns) == 0
    )
    assert (
        r"| failed | a \| b, \"c\" and 5 % of d_e |".replace('\\"', '"') in capsys.readouterr().out
    )


def test_latex_is_escaped() -> None:
    text = to_latex(
        ["name_x", "value"], [{"name_x": r"0&1;2 \ 5%", "value": 0.25, "value_stderr": 0.01}]
    )
    assert r"name\_x & value \\" in text
    assert r"0\&1;2 \textbackslash{} 5\% & 0.25 $\pm$ 0.01 \\" in text
    assert text.startswith("\\begin{tabular}{lr}\n\\toprule\n")


def test_empty_cells() -> None:
    rows = [{"a": None, "b": math.inf}]
    assert to_markdown(["a", "b"], rows).splitlines()[2] == "|  | inf |"
    assert to_jsonl(["a", "b"], rows) == '{"a": null, "b": "Infinity"}\n'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--columns", "perplexty"), "unknown column 'perplexty'; did you mean 'perplexity'"),
        (("--where", "weights=q9"), "no point is like --where weights=q9"),
        (("--where", "wights=q4"), "unknown setting 'wights'"),
        (("--where", "weights"), "must be NAME=VALUE"),
    ],
)
def test_what_is_not_there_is_named(folder: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        export(folder, "--format", "csv", *words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its columns have no clear names"),
        ("a,b\n1,2\n", "has no column 'point'"),
        ("point,status,weights\n1,done\n", "row 2: 2 values for 3 columns"),
        ("point,status,weights,batch\n1,done,q4,many\n", "batch must be a number, got 'many'"),
        ("point,status,weights\n" + "x" * (2**20 + 1), "is not a table"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match="is not a results folder"):
        read_points(tmp_path)
    (tmp_path / "points.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_points(tmp_path)


def test_csv_goes_through_csv(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    export(folder, "--format", "csv", "--columns", "error_message,batch", "--where", "weights=q2")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["batch"] for row in rows} == {"1", "2"}
    assert sum(row["error_message"] == 'a | b, "c"\nand 5 % of d_e' for row in rows) == 2

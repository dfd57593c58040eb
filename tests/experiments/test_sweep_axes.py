"""Sweeps without a TOML file: lists on the command line, and grids of Weights & Biases."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from nbflow_experiments.commands import sweep as command
from nbflow_experiments.config.command_line_axes import parse_list
from nbflow_experiments.config.ranges import expand_range
from nbflow_experiments.config.sweep_file import load_sweep, sweep_of_lists
from nbflow_kernels.errors import UsageError

pytestmark = pytest.mark.usefixtures("fake")

GRID = """
name: grid
description: a grid of Weights & Biases
method: grid
parameters:
  model: {value: toy}
  prompt: {value: 8, distribution: constant}
  decode: {value: 4}
  eval_tokens: {value: 128}
  eval_window: {value: 32}
  weights:
    values: [f32, q4]
    distribution: categorical
  batch: {min: 2, max: 8, q: 2, distribution: q_uniform}
  repeats: {min: 3, max: 4, distribution: int_uniform}
"""
SAME = """
[sweep]
name = "grid"
description = "a grid of Weights & Biases"
[settings]
model = "toy"
prompt = 8
decode = 4
eval_tokens = 128
eval_window = 32
[axes]
weights = ["f32", "q4"]
batch = [2, 4, 6, 8]
repeats = [3, 4]
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,2,8", [1, 2, 8]),
        ("4", [4]),
        ("1-4", [1, 2, 3, 4]),
        ("1..4", [1, 2, 3, 4]),
        ("128-512+128", [128, 256, 384, 512]),
        ("128-1000*2", [128, 256, 512]),
        ("1, 8-16+4 ,64", [1, 8, 12, 16, 64]),
    ],
)
def test_lists_of_integers(text: str, expected: list[int]) -> None:
    assert parse_list("batch", [text]) == expected


def test_lists_of_words_and_of_shares() -> None:
    assert parse_list("partition", ["0,0&1;2&3", "0;1"]) == ["0", "0&1;2&3", "0;1"]
    assert parse_list("outliers", ["0,0.01"]) == [0.0, 0.01]
    assert parse_list("ranks", ["auto,2-3"]) == ["auto", 2, 3]


def asked(*words: str) -> tuple[Path | None, dict[str, list[str]]]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command._lists(parser.parse_args(list(words)))


def test_a_sweep_without_a_file() -> None:
    file, lists = asked("toy", "-p", "8-16*2", "-n", "4", "-b", "1,2", "--weights", "q4", "-r", "3")
    assert file is None
    sweep = sweep_of_lists(lists)
    assert sweep.name == "toy"
    assert sweep.measures == ("prefill", "decode", "memory")
    assert set(sweep.factors) == {"prompt", "batch"}
    points = {(p["prompt"], p["batch"], p["decode"], p["weights"]) for p in sweep.points}
    assert points == {(p, b, 4, "q4") for p in (8, 16) for b in (1, 2)}


def test_options_replace_what_the_file_says(sweep_file: Path) -> None:
    file, lists = asked(str(sweep_file), "--weights", "q8,q6", "--batch", "4", "--seed", "1")
    assert file == sweep_file
    sweep = load_sweep(sweep_file, lists=lists)
    assert set(sweep.factors) == {"weights", "partition"}
    assert {p["weights"] for p in sweep.points} == {"q8", "q6"}
    assert {(p["batch"], p["seed"], p["prompt"]) for p in sweep.points} == {(4, 1, 8)}


def test_command_line_to_results(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    out = sweep_file.parent / "runs"
    words = ["toy", "-p", "8", "-n", "2", "-b", "1,2", "-r", "2", "--out", str(out)]
    words += ["--name", "quick", "--measures", "decode"]
    assert command.run(parser.parse_args(words)) == 0
    assert (out / "quick" / "points.csv").read_text().count("\n") == 3
    assert "2 points" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name a sweep file or a model"),
        (("toy", "--model", "other"), "two models: toy and --model other"),
    ],
)
def test_no_model_or_two(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asked(*words)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"batch": ["four"]}, "--batch must be an integer or a range.*'four'"),
        ({"batch": ["4-1"]}, "does not go up"),
        ({"batch": ["1-9*1"]}, "does not go up"),
        ({"batch": ["1-9+0"]}, "does not go up"),
        ({"batch": ["1-999999999"]}, "more than 100000 numbers"),
        ({"batch": ["0,1"]}, "batch must be at least 1"),
        ({"outliers": ["lots"]}, "--outliers must be a number"),
        ({"weights": ["q44"]}, "unknown weight format 'q44'"),
        ({"kv": ["q8"], "max_context": ["1"]}, r"--kv: kv varies together .* \[\[zip\]\]"),
        (
            {"heads": ["8/3/32"]},
            "heads must be query heads/.*a multiple of the second, got '8/3/32'",
        ),
        ({"prefix": ["9"]}, "prefix must be at most prompt, got 9 and 8"),
        ({"draft": ["ngram"]}, "--draft is for --measures speculation, got"),
    ],
)
def test_mistakes_in_lists_are_named(
    sweep_file: Path, lists: dict[str, list[str]], message: str
) -> None:
    sweep_file.write_text(sweep_file.read_text() + "[[zip]]\nkv=['f16']\nmax_context=[64]\n")
    with pytest.raises(UsageError, match=message):
        load_sweep(sweep_file, lists=lists)


def test_a_range_that_overflows_a_step() -> None:
    assert expand_range("x", "3-10+4", "there") == [3, 7]
    assert expand_range("x", {"start": 2, "stop": 2, "factor": 5}, "there") == [2]
    with pytest.raises(UsageError, match="does not go up"):
        expand_range("x", {"start": 2, "stop": 8, "factor": 0}, "there")


def test_ranks_that_a_partition_needs(sweep_file: Path) -> None:
    sweep = load_sweep(sweep_file, lists={"ranks": ["auto"]})
    assert {(p["partition"], p["ranks"]) for p in sweep.points} == {("0", 1), ("0&1", 2)}


def test_a_grid_gives_the_points_of_its_toml(tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text(GRID)
    (tmp_path / "g.toml").write_text(SAME)
    grid, same = load_sweep(tmp_path / "g.yaml"), load_sweep(tmp_path / "g.toml")
    assert grid.points == same.points
    assert (grid.name, grid.description) == (same.name, same.description)
    import yaml

    (tmp_path / "g.json").write_text(json.dumps(yaml.safe_load(GRID)))
    assert load_sweep(tmp_path / "g.json") == grid


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "random"}, "method must be grid, got 'random'; .*write the values as lists"),
        ({"metric": {"name": "x"}}, "'metric' is not supported: .*--measures"),
        ({"early_terminate": {}}, "'early_terminate' is not supported: .*--timeout"),
        ({"run_cap": 3}, "'run_cap' is not supported: .*--shard"),
        ({"program": "a.py"}, "'program' is not supported"),
        ({"descripton": "x"}, "unknown entry.*did you mean 'description'"),
        ({"parameters": {}}, "parameters must be a table"),
        ({"parameters": {"weights": {"distribution": "normal"}}}, "distribution 'normal'"),
        ({"parameters": {"weights": {"vals": [1]}}}, "unknown entry.*'vals'.*values"),
        ({"parameters": {"weights": {"parameters": {}}}}, "is nested"),
        ({"parameters": {"weights": {"value": 1, "values": [1]}}}, "either value, or values"),
        ({"parameters": {"weight": {"value": "q4"}}}, "unknown setting 'weight'"),
        ({"parameters": {"weights": "q4"}}, "must have value or values"),
        ({"parameters": {"batch": {"min": 0.5, "max": 2}}}, "made of integers"),
    ],
)
def test_what_a_grid_cannot_do_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "g.json"
    base = {"method": "grid", "parameters": {"model": {"value": "toy"}}}
    path.write_text(json.dumps(base | change))
    with pytest.raises(UsageError, match=message):
        load_sweep(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("g.yaml", "a: [1", "is not valid YAML"),
        ("g.json", "{", "is not valid JSON"),
        ("g.json", "[" * 100_000, "is not valid JSON"),
        ("g.yaml", "- 1", "must hold a table, got list"),
        ("g.toml", "a = ", "is not valid TOML"),
        ("g.toml", "#" * (2**22 + 1), "at most 4M"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        load_sweep(tmp_path / name)

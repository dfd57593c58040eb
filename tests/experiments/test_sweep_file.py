from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from nbflow_experiments.config.sweep_file import Sweep, load_sweep, parse_sweep
from nbflow_experiments.settings import SETTINGS
from nbflow_kernels.errors import UsageError

pytestmark = pytest.mark.usefixtures("fake")


def parse(text: str, **options: Any) -> Sweep:
    if "model" not in text:
        text = "[settings]\nmodel = 'toy'\n" + text
    return parse_sweep(tomllib.loads(text), Path(), default_name="s", **options)


def values(sweep: Sweep, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(point[name] for name in names) for point in sweep.points]


def test_product_in_the_order_of_the_file() -> None:
    sweep = parse("[axes]\nbatch = [1, 2]\nweights = ['q4', 'Q2']")
    assert sweep.factors == ("batch", "weights")
    assert values(sweep, *sweep.factors) == [(1, "q4"), (1, "q2"), (2, "q4"), (2, "q2")]
    assert all(set(point) == set(SETTINGS) for point in sweep.points)  # everything is resolved
    assert sweep.points[0]["kv"] == SETTINGS["kv"].default


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("'2..5'", [2, 3, 4, 5]),
        ("{start = 1, stop = 9, step = 4}", [1, 5, 9]),
        ("{start = 1, stop = 9, factor = 2}", [1, 2, 4, 8]),
        ("{start = 3, stop = 4}", [3, 4]),
        ("[1, '4..5', 9]", [1, 4, 5, 9]),
    ],
)
def test_ranges_include_both_ends(axis: str, expected: list[int]) -> None:
    assert [v for (v,) in values(parse(f"[axes]\nbatch = {axis}"), "batch")] == expected


def test_zipped_settings_vary_together() -> None:
    sweep = parse("[axes]\nbatch = [1, 2]\n[[zip]]\nprompt = [8, 16]\ndecode = ['4..5']")
    assert values(sweep, "batch", "prompt", "decode") == [
        (1, 8, 4),
        (1, 16, 5),
        (2, 8, 4),
        (2, 16, 5),
    ]


def test_exclude_needs_every_line_to_match() -> None:
    text = (
        "[axes]\nbatch = '1..3'\nweights = ['f32', 'q4']\n[[exclude]]\nweights='f32'\nbatch=[2, 3]"
    )
    sweep = parse(text)
    assert values(sweep, "batch", "weights") == [(1, "f32"), (1, "q4"), (2, "q4"), (3, "q4")]
    assert sweep.excluded == 2


def test_measures_keep_one_order_whatever_the_file_says() -> None:
    assert parse("[sweep]\nmeasures = ['memory', 'perplexity']").measures == (
        "perplexity",
        "memory",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[axis]\nbatch=[1]", r"unknown section of the sweep file 'axis'; did you mean 'axes'"),
        ("[axes]\nbatches=[1]", r"unknown axis 'batches'; did you mean 'batch'"),
        ("[settings]\nmodel='m'\npromt=3", r"unknown setting 'promt'; did you mean 'prompt'"),
        ("[sweep]\nmeasures=['perplexty']", r"unknown measure 'perplexty'; did you mean 'perplex"),
        ("[sweep]\nmeasures=[['perplexity']]", r"measures must be a list of names"),
        ("[sweep]\nnmae='x'", r"unknown entry of \[sweep\] 'nmae'; did you mean 'name'"),
        ("[axes]\nweights=['q44']", r"unknown weight format 'q44'; did you mean 'q4'"),
        ("[settings]\nmodel='m'\nkv='f33'", r"unknown kv_format 'f33'"),
        ("[settings]\nmodel='m'\nkv='f16/f33'", r"unknown kv_format 'f33'"),
        ("[settings]\nmodel='m'\nkv='f16;1:f33'", r"unknown kv_format 'f33'"),
        ("[axes]\npartition=['0&&1']", r"partition must be rank numbers"),
        ("[axes]\npartition=[0]", r"partition must be text in quotes, got 0; write \"0\""),
        ("[axes]\nweights=[{a=1}]", r"weights must be text in quotes, got {'a': 1}$"),
        ("[axes]\nbatch=[0]", r"batch must be at least 1, got 0"),
        ("[axes]\nbatch=['8..2']", r"batch: the range '8..2' does not go up"),
        ("[axes]\nbatch={start=0, stop=4, factor=2}", r"does not go up"),
        (
            "[axes]\nbatch={start=1, stop=4, steps=2}",
            r"unknown entry of the range of batch 'steps'",
        ),
        ("[axes]\nbatch={start=1, stop=4, step=2, factor=2}", r"either step or factor"),
        (
            "[axes]\nmin_repetition_s=[-1]",
            "min_repetition_s must be a number of seconds, 0 to 600",
        ),
        ("[axes]\nmin_repetition_s=[inf]", "min_repetition_s must be a number of .* got inf"),
        ("[axes]\nbatch=[true]", r"batch must be an integer, got True"),
        ("[axes]\nbatch=[]", r"batch has no values"),
        ("[axes]\nbatch=[2, 2]", r"more than once"),
        ("[axes]\nbatch='1..2000'\nprompt='1..2000'", "4000000 points; a sweep has at most"),
        ("[axes]\nbatch=3", r"must be a list or a range, got 3"),
        ("[settings]\nmodel='m'\nbatch=1\n[axes]\nbatch=[1]", r"batch is given twice"),
        ("[axes]\nbatch=[1]\n[[zip]]\nbatch=[1]\nprompt=[2]", r"batch is given twice"),
        ("[[zip]]\nbatch=[1, 2]\nprompt=[2]", r"equally long, got batch: 2, prompt: 1"),
        ("[zip]\nbatch=[1]", r"write \[\[zip\]\] \(two brackets\)"),
        ("[axes]\nbatch=[1]\n[[exclude]]\nbatch=2", r"matches no point"),
        ("[axes]\nbatch=[1]\n[[exclude]]\nbatch=1", r"everything is excluded"),
        ("[axes]\nbatch=[1]\n[[exclude]]\nbatsh=1", r"unknown setting in \[\[exclude\]\] 'batsh'"),
        ("[sweep]\nname='a/b'", r"name must be letters"),
        ("[sweep]\nseed=1\n[settings]\nmodel='m'\nseed=2", r"seed is given twice"),
        ("[settings]\nmodel=''", r"the sweep names no model"),
        ("[settings]\nmodel='m'\neval_context=256", r"eval_context must be less than eval_window"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(text)


def test_set_replaces_values(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[settings]\nmodel = 'toy'\n[axes]\nbatch = [1, 2]\n[[exclude]]\nbatch = 2")
    sweep = load_sweep(file, ["axes.batch=[1, 4]", "settings.partition=0&1", "sweep.seed=7"])
    assert sweep.name == "mine"
    assert values(sweep, "batch", "partition", "seed") == [(1, "0&1", 7), (4, "0&1", 7)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch=1", "section.name=value"),
        ("axes.batch", "section.name=value"),
        ("axis.batch=[1]", "unknown section in --set 'axis'; did you mean 'axes'"),
        ("axes.batch=[1", "not valid TOML"),
        ("axes.bach=[1]", "unknown axis 'bach'"),
    ],
)
def test_wrong_set_is_named(sweep_file: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_sweep(sweep_file, [override])


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the sweep file .*no\.toml"):
        load_sweep(tmp_path / "no.toml")
    for text in ("[axes\n", f"seed = {'9' * 5000}", f"[axes]\nbatch = {'[' * 5000}"):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(UsageError, match=r"bad\.toml is not valid TOML"):
            load_sweep(tmp_path / "bad.toml")

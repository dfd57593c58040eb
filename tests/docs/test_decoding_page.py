"""docs/decoding.md, the command line and the code name the same parameters and defaults."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from nbflow.cli.sampling_options import add_decoding_arguments, decoding_values
from nbflow.option_fields import aliases
from nbflow.options import SamplingParams
from nbflow.sampling import STRATEGIES, Chain
from nbflow.sampling.samplers import LETTERS, SAMPLERS
from nbflow_kernels.errors import UsageError

PAGE = (Path(__file__).parents[2] / "docs" / "decoding.md").read_text(encoding="utf-8")


def rows(heading):
    """Cells of the table under a heading, its first two lines left out."""
    part = PAGE.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [re.split(r"\s*\|\s*", line.strip("| ").replace("| |", "|  |")) for line in lines[2:]]


def defaults(cell):
    return dict(re.findall(r"`(\w+)=([^`]+)`", cell))


def test_the_table_of_strategies():
    found = {row[0].strip("`"): row[1] for row in rows("## Strategies")}
    assert list(found) == list(STRATEGIES)
    for name, cell in found.items():
        fields = {f.name: repr(f.default) for f in dataclasses.fields(STRATEGIES[name])}
        assert cell == "see below" if name == "chain" else defaults(cell) == fields, name


def test_the_table_of_samplers():
    found = rows("### The chain")
    assert {row[1]: row[0].strip("`") for row in found} == LETTERS
    assert {row[0].strip("`") for row in found} == set(SAMPLERS)
    fields = {f.name: repr(f.default) for f in dataclasses.fields(Chain)}
    named = {name: value for row in found for name, value in defaults(row[2]).items()}
    named |= {name: fields[name] for name in ("samplers", "min_keep")}  # in the text above
    assert named == fields


def test_every_parameter_is_on_the_page():
    for field in dataclasses.fields(SamplingParams):
        assert re.search(rf"`{field.name}[=`]", PAGE), field.name


@pytest.mark.parametrize("name", ["temp", "repeat_penalty", "n_predict", "guided_json"])
def test_names_of_other_programs_are_on_the_page(name):
    assert name in aliases(SamplingParams)
    assert f"`{name}`" in PAGE


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_decoding_arguments(parser)
    return decoding_values(parser.parse_args(arguments))


def test_the_command_line_takes_every_parameter():
    parser = argparse.ArgumentParser()
    add_decoding_arguments(parser)
    known = {action.dest for action in parser._actions} - {"help"}
    # the number of tokens is the command's own argument; n and prompt_logprobs are for programs
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    assert known == fields - {"max_tokens", "n", "prompt_logprobs"}


def test_command_lines(tmp_path):
    assert parsed() == {}
    values = parsed("--top-k", "7", "--logit-bias", "5=-2.5", "--stop", "a", "--stop", "b")
    assert values == {"top_k": 7, "logit_bias": [(5, -2.5)], "stop": ["a", "b"]}
    assert parsed("--temp", "0.5", "--repeat-penalty", "2") == {
        "temperature": 0.5, "repetition_penalty": 2.0,
    }  # fmt: skip
    assert parsed("--sampler-order", "kt") == {"samplers": "kt"}
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    assert parsed("--json-schema", str(tmp_path / "s.json")) == {"json_schema": {"type": "integer"}}
    (tmp_path / "bad.json").write_text("{")
    for arguments, message in (
        (("--json-schema", str(tmp_path / "none")), r"^\S+none: cannot be read"),
        (("--json-schema", str(tmp_path / "bad.json")), "is not JSON"),
        (("--logit-bias", "5"), "must be ID=BIAS"),
    ):
        with pytest.raises(UsageError, match=message):
            parsed(*arguments)
    for name in parsed("--max-k", "3", "--seed", "4", "--ignore-eos"):
        assert name in {f.name for f in dataclasses.fields(SamplingParams)}

"""Options of `nbflow.options` in every interface: names, defaults, bounds and messages."""

import argparse
import ast
import inspect
from pathlib import Path

import pytest
from pydantic import ValidationError

import nbflow
from nbflow import options
from nbflow.cli.commands import run, serve
from nbflow.option_fields import aliases, fields, json_schema, toml_names
from nbflow.options import (
    EngineOptions,
    LoadOptions,
    OffloadConfig,
    SamplingParams,
    SearchParams,
    SpeculativeConfig,
)
from nbflow.server.config import EngineSection, ModelOptions, make_config
from nbflow.server.schemas import CompletionBody
from nbflow_kernels.errors import UsageError

ROOT = Path(__file__).parents[2]
COMMANDS = {
    run: {LoadOptions: False, SpeculativeConfig: False, SamplingParams: True, SearchParams: True},
    serve: {LoadOptions: False, EngineOptions: False, SpeculativeConfig: False},
}
"""Command -> its option sets, and True if options default to None."""
OF_REQUESTS = (SamplingParams, SearchParams)
OF_FILES = (LoadOptions, EngineOptions, SpeculativeConfig)


def parser_of(command):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser


def wrong_values(known):
    """Return values just outside the bounds; HTTP requests have their own."""
    low, high = known.option.low, known.option.high
    found = [] if low is None else [low if known.option.above else low - 1]
    found += [] if high is None else [high + 1]
    return list(map(float, found)) if known.outside_hint is float else found


BOUNDED = [
    (kind, known, value)
    for kind in (*OF_FILES, *OF_REQUESTS)
    for known in fields(kind).values()
    for value in wrong_values(known)
]
IDS = [f"{kind.__name__}.{known.name}={value}" for kind, known, value in BOUNDED]


def test_every_number_has_bounds():
    bounded = {(kind, known.name) for kind, known, _ in BOUNDED}
    for kind in (*OF_FILES, *OF_REQUESTS):
        for known in fields(kind).values():
            if known.outside_hint in (int, float):
                assert (kind, known.name) in bounded, known.name
                assert known.option.low is not None
                assert known.option.high is not None
            assert known.option.help
            assert not known.option.help.endswith(".")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line(command):
    actions = {}
    for action in parser_of(command)._actions:
        actions.setdefault(action.dest, action)  # --kv comes before its two sides
    for kind, unset in COMMANDS[command].items():
        for known in fields(kind).values():
            if not known.option.cli and not (kind is SamplingParams and known.name == "max_tokens"):
                assert known.name not in actions or kind is LoadOptions  # the engine's is an option
                continue
            action = actions[known.name]
            default = None if unset else known.default
            assert known.name == "max_tokens" or action.default == default, known.name
            assert set(action.option_strings) >= set(known.flags) or known.name == "max_tokens"
            if known.name != "max_tokens":
                assert action.help.startswith(known.option.help)
    if command is not serve:  # None: a list of queries may state another number
        assert actions["max_tokens"].default in (None, SamplingParams.max_tokens)


def test_the_fields_of_requests():
    schema = CompletionBody.model_json_schema()["properties"]
    for kind in OF_REQUESTS:
        for known in fields(kind).values():
            name = known.http_name or known.name  # logprobs differ by endpoint
            default = CompletionBody.model_fields[name].default
            assert default == (None if known.option.http_default else known.default), name
            assert json_schema(known).items() <= schema[name].items()
    bounds = schema["temperature"]
    assert (bounds["minimum"], bounds["maximum"]) == (0, 100)


def test_the_keys_of_files():
    for section, kind in (
        (ModelOptions, LoadOptions),
        (ModelOptions, SpeculativeConfig),
        (EngineSection, EngineOptions),
    ):  # fmt: skip
        for name in toml_names(kind):
            assert section.model_fields[name].default == fields(kind)[name].default, name
    assert ModelOptions(path="x").load_options() == LoadOptions()
    assert EngineSection(kv_bytes="1KiB").options() == EngineOptions(kv_bytes=1024)


def test_the_keywords_of_functions():
    for function, kind in ((nbflow.load, LoadOptions), (nbflow.LLMEngine, EngineOptions)):
        parameters = inspect.signature(function).parameters
        for known in fields(kind).values():
            assert parameters[known.name].default == known.default
            assert f"\n{known.name} : " in inspect.getdoc(function)
    for function in (nbflow.LLM.generate, nbflow.LLM.make_request, nbflow.beam_search):
        parameters = inspect.signature(function).parameters
        for kind in (SamplingParams, SpeculativeConfig):
            for known in fields(kind).values():
                if known.name in parameters and known.name not in ("decoding", "stop_token_ids"):
                    assert parameters[known.name].default == known.default, known.name


@pytest.mark.parametrize(("kind", "known", "value"), BOUNDED, ids=IDS)
def test_a_value_out_of_bounds_has_one_message(kind, known, value):
    with pytest.raises(UsageError) as refused:
        kind(**{known.name: value})
    message = str(refused.value)
    assert message.startswith(f"{known.name} must be ")
    assert message.endswith(f", got {value}")
    if known.option.cli:
        command = run if kind in COMMANDS[run] else serve
        text = f"{known.flags[0]}={value}"
        with pytest.raises(UsageError) as refused:
            parser_of(command).parse_args(["tiny_python", text])
        assert str(refused.value) == message
    if kind in OF_FILES and known.option.toml:
        table = {known.name: value}
        model = {"path": "x", "engine": table} if kind is EngineOptions else {"path": "x"} | table
        with pytest.raises(UsageError) as refused:
            make_config({"models": {"a": model}}, "a.toml")
        assert str(refused.value).endswith(f": {message}")
    if kind in OF_REQUESTS and known.option.http_high is None:
        with pytest.raises(ValidationError) as wrong:
            CompletionBody.model_validate({"prompt": "x", known.http_name: value})
        (found,) = wrong.value.errors()
        assert found["msg"] == message.replace(known.name, known.http_name, 1)
        assert found["ctx"]["param"] == known.http_name


def test_limits_of_requests_may_be_narrower():
    assert SamplingParams(logprobs=100).logprobs == 100
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ValidationError, match=rf"{name} must be in 0\.\.20, got 21"):
            CompletionBody.model_validate({"prompt": "x", name: 21})


def test_names_of_other_programs():
    assert SamplingParams.parse({"temp": 0.5, "n_predict": None}) == SamplingParams(temperature=0.5)
    with pytest.raises(UsageError, match="temperature is given twice, the second time as 'temp'"):
        SamplingParams.parse({"temperature": 1, "temp": 1})
    for other, name in aliases(SamplingParams).items():
        assert name in fields(SamplingParams)
        assert other not in fields(SamplingParams)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (LoadOptions, {"activations": "f3"}, "unknown activations 'f3'; did you mean 'f32'"),
        (LoadOptions, {"kv": 5}, "kv must be a text, got 5"),
        (LoadOptions, {"graphs": 1}, "graphs must be true or false, got 1"),
        (LoadOptions, {"wieghts": "q4"}, "did you mean 'weights'"),
        (EngineOptions, {"kv_bytes": "2 pounds"}, "kv_bytes must be a number of bytes"),
        (EngineOptions, {"kv_bytes": "9" * 20 + "TiB"}, "kv_bytes must be in 1"),
        (SamplingParams, {"temperature": 10**400}, "temperature must be in 0..100, got 1000"),
        (SamplingParams, {"stop": ["a", 5]}, "stop must be a text or a list of texts"),
        (SearchParams, {"early_stopping": "now"}, "must be true or false or 'never'"),
    ],
)
def test_wrong_values(kind, values, message):
    with pytest.raises(UsageError, match=message):
        kind().replaced(values)


def test_changes_and_copies():
    given = LoadOptions(kv="q8_0").replaced({"kv_host_percent": 50})
    assert given.given() == {"kv": "q8_0", "kv_host_percent": 50}
    assert given.offload == OffloadConfig(kv_host_percent=50)
    assert EngineOptions(kv_bytes="2GiB").kv_bytes == 2**31


def test_the_same_choices_and_bounds_as_below():
    """Packages that do not import the options have constants of their own."""
    from nbflow.distributed.plan import ALL_REDUCE_FORMATS
    from nbflow_kernels.quantized_matmul import ACTIVATIONS
    from nbflow_kernels.quantizers import DAMPING
    from nbflow_kernels.quantizers.outliers import check_ratio

    load = fields(LoadOptions)
    assert load["all_reduce"].choices == ALL_REDUCE_FORMATS
    assert load["activations"].choices == ACTIVATIONS
    assert load["damping"].default == DAMPING
    check_ratio(load["outliers"].option.high)
    with pytest.raises(UsageError):
        check_ratio(load["outliers"].option.high + 1e-6)


def test_the_options_import_errors_only():
    found = set()
    for name in ("options.py", "option_fields.py"):
        for node in ast.walk(ast.parse((Path(options.__file__).parent / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("nbflow"):
                found.add(node.module)
    assert found == {"nbflow.option_fields", "nbflow_kernels.errors"}


def test_the_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools" / "docs")
    import options_page

    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert text == options_page.page(), "run python tools/docs/options_page.py"

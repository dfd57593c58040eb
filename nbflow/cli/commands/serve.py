"""`nbflow serve`: serve models over HTTP."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbflow.cli.option_arguments import add_options
from nbflow.cli.options import add_model_arguments
from nbflow.option_fields import fields, toml_names
from nbflow.options import EngineOptions, LoadOptions, SpeculativeConfig
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command

if TYPE_CHECKING:
    from nbflow.server.config import ServerConfig

_OF_MODEL = (*toml_names(LoadOptions), *fields(SpeculativeConfig), "chat_template")
"""Keys of ``[models.NAME]`` that are also options of the command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Serve a model, or the models of a configuration file (docs/server.md): .toml, or an "
        "Inferflow .ini."
    )
    add_model_arguments(parser, optional="inferflow_service.ini of the current folder")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8000); 0 chooses a free one")
    parser.add_argument("--name", metavar="NAME", help="name of the model for clients")
    parser.add_argument(
        "--strict-model-names", action="store_true",
        help="refuse unknown model names; otherwise a single model answers to every name",
    )  # fmt: skip
    parser.add_argument("--chat-template", metavar="T", help="chat template: name, file or text")
    add_options(parser, EngineOptions)
    add_options(parser, SpeculativeConfig)
    parser.add_argument("--keys-file", metavar="FILE", help="API keys, one per line")
    parser.add_argument("--keys-env", metavar="VAR", help="environment variable with API keys")
    parser.add_argument("--log-format", choices=("text", "json"), help="log format (text)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    parser.add_argument(
        "--no-warmup", dest="warmup", action="store_false", help="do not compile kernels at start"
    )
    parser.add_argument(
        "--plan", action="store_true",
        help="print the memory plan and, with --machine, predicted speed, without loading",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="validate the configuration and end")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    need_extra()
    if arguments.model is None:
        arguments.model = _default_file()
    config = configuration(arguments)
    if arguments.check:
        from nbflow.server.checks import check_config

        check_config(config)
        print(config.model_dump_json(indent=2, exclude={"auth": {"keys"}}))
        return 0
    if arguments.plan:
        from nbflow.cli.serve_plan import print_plans

        print_plans(config)
        return 0
    from nbflow.compat.inferflow import native_protocol
    from nbflow.server.lifecycle import serve

    return serve(config, [native_protocol.router])


def need_extra() -> None:
    """Raise `MissingExtraError` unless the packages of the extra `serve` are installed."""
    for name in ("fastapi", "prometheus_client", "uvicorn"):
        if find_spec(name) is None:
            raise MissingExtraError(f"nbflow serve needs {name}: {install_command('serve')}")


def _default_file() -> str:
    """Return Inferflow's service file if the current folder has one."""
    from nbflow.compat.inferflow.ini_config import DEFAULT_FILE

    if not Path(DEFAULT_FILE).is_file():
        raise UsageError(
            f"MODEL is missing, and the current folder has no {DEFAULT_FILE}; name a model or a "
            "configuration file"
        )
    print(f"nbflow serve: reading {DEFAULT_FILE} of the current folder", file=sys.stderr)
    return DEFAULT_FILE


def configuration(arguments: argparse.Namespace) -> ServerConfig:
    """Return the server configuration of the command's arguments."""
    return _config(_given(arguments))


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return MODEL and the options that differ from their defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    usual = vars(parser.parse_args([arguments.model])) | {"model": None}
    return {key: value for key, value in vars(arguments).items() if value != usual[key]}


def _config(given: dict[str, Any]) -> ServerConfig:
    """Return the server configuration of given arguments."""
    from nbflow.compat.inferflow.ini_config import read_ini
    from nbflow.server.config import make_config, read_config

    path = Path(given["model"])
    if path.suffix not in (".toml", ".ini"):
        return make_config(_table(given), "nbflow serve")
    device = given.pop("device", None) if path.suffix == ".ini" else None
    trace = given.pop("trace", False)
    of_file = sorted(set(given) & {*_OF_MODEL, *fields(EngineOptions), "name"})
    if of_file:
        option = of_file[0].replace("_", "-")
        raise UsageError(f"--{option} belongs to a model: write it into {path}")
    config = read_config(path) if path.suffix == ".toml" else read_ini(path, device)
    stated = config.model_dump()
    for model in stated["models"].values():
        model["trace"] |= trace
    stated["plugins"] += given.get("plugins", [])
    return make_config(_merged(stated, _of_server(given)), str(path))


def _table(given: dict[str, Any]) -> dict[str, Any]:
    """Return the TOML table equivalent to the arguments."""
    name = given.get("name") or Path(given["model"]).name or given["model"]
    model: dict[str, Any] = {"path": given["model"]}
    model |= {key: given[key] for key in _OF_MODEL if key in given}
    model["engine"] = {key: given[key] for key in fields(EngineOptions) if key in given}
    table = {"models": {name: model}, "plugins": given.get("plugins", [])}
    return _merged(table, _of_server(given))


def _of_server(given: dict[str, Any]) -> dict[str, Any]:
    """Return the table of the server's own arguments."""
    own = ("host", "port", "warmup", "strict_model_names")
    table: dict[str, Any] = {k: given[k] for k in own if k in given}
    table["auth"] = {k: given[k] for k in ("keys_file", "keys_env") if k in given}
    table["log"] = {k: given[f"log_{k}"] for k in ("format", "level") if f"log_{k}" in given}
    return table


def _merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `base` recursively updated with `more`."""
    result = dict(base)
    for key, value in more.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) else value
    return result

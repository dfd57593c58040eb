"""Files of Inferflow's command-line tools: ``inferflow_client.ini`` and ``llm_inference.ini``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nbflow.compat.inferflow.ini_file import Macros, Sections, read_sections
from nbflow_kernels.errors import UsageError, unknown_name

MAX_TOKENS = 300
"""New tokens of a query in Inferflow's tool."""
LONG_MAX_TOKENS = 50_000
"""New tokens of a query with ``long_context_test``."""
_MAX_QUERIES = 100_000
_CLIENT_KEYS = ("service", "request")
_ESCAPES = {"{\\n}": "\n", "{\\r}": "\r", "{\\t}": "\t"}
_FIELDS = {
    "text": "prompt",
    "system_prompt": "system",
    "res_prefix": "prefix",
    "decoder_input_template": "template",
    "encoder_input_template": "encoder_template",
}
"""Field of a query -> field of `nbflow.cli.query_list.Query`."""


class ClientFile(NamedTuple):
    """Content of ``inferflow_client.ini``."""

    service: str
    """URL of the server."""
    request: dict[str, Any]
    """Body of the request."""


class QueryFile(NamedTuple):
    """Content of ``llm_inference.ini``."""

    engine: Path | None
    """Service file with the model."""
    queries: list[dict[str, Any]]
    """Fields of `nbflow.cli.query_list.Query`, and sampling parameters."""
    max_tokens: int
    """New tokens of each query."""


def read_client_ini(path: Path) -> ClientFile:
    """Read the request of Inferflow's client."""
    sections, macros = _read(path)
    keys = sections.get("main", {})
    for key in keys:
        if key not in _CLIENT_KEYS:
            raise UsageError(f"{path}: [main]: {unknown_name('key', key, _CLIENT_KEYS)}")
    for key in _CLIENT_KEYS:
        if not keys.get(key):
            raise UsageError(f"{path}: [main] must have {key}")
    request = _object(macros(keys["request"]), f"{path}: [main] request")
    return ClientFile(macros(keys["service"]).strip(), request)


def is_query_ini(path: Path) -> bool:
    """Return True for a file with a list of queries."""
    return "query_list" in read_sections(path).get("main", {})


def read_query_ini(path: Path) -> QueryFile:
    """Read the queries of Inferflow's ``llm_inference``.

    The random seed 0, which stands for the time there, is left out.
    """
    sections, macros = _read(path)
    keys = {key: macros(value).strip() for key, value in sections.get("main", {}).items()}
    if not keys.get("query_list"):
        raise UsageError(f"{path}: [main] must have query_list, the name of a section with queries")
    shared: dict[str, Any] = {}
    if seed := int(_number(keys.get("query_random_seed", "0"), f"{path}: query_random_seed")):
        shared["seed"] = seed
    if keys.get("temperature"):
        shared["temperature"] = _number(keys["temperature"], f"{path}: temperature")
    is_long = keys.get("long_context_test", "").lower() in ("1", "true", "yes")
    engine = keys.get("inference_engine_config")
    return QueryFile(
        path.parent / engine if engine else None,
        [{**shared, **query} for query in _queries(sections, keys["query_list"], macros, path)],
        LONG_MAX_TOKENS if is_long else MAX_TOKENS,
    )


def _queries(sections: Sections, name: str, macros: Macros, path: Path) -> list[dict[str, Any]]:
    """Return the queries of a section, in order."""
    where = f"{path}: [{name}]"
    keys = sections.get(name.lower())
    if keys is None:
        raise UsageError(f"{where} is missing; query_list names it")
    count = int(_number(keys.get("query_count", ""), f"{where} query_count"))
    if not 1 <= count <= _MAX_QUERIES:
        raise UsageError(f"{where} query_count must be in 1..{_MAX_QUERIES}, got {count}")
    found = []
    for i in range(1, count + 1):
        if f"query{i}" not in keys:
            raise UsageError(f"{where} query{i} is missing; query_count is {count}")
        found.append(_query(macros(keys[f"query{i}"]), f"{where} query{i}"))
    return found


def _query(value: str, where: str) -> dict[str, Any]:
    r"""Return a query: a JSON object, or a text with ``{\n}``, ``{\r}`` and ``{\t}``."""
    if not value.startswith('{"'):
        for field, character in _ESCAPES.items():
            value = value.replace(field, character)
        return {"prompt": value}
    given = _object(value, where)
    for name, text in given.items():
        if name not in _FIELDS:
            raise UsageError(f"{where}: {unknown_name('field', name, _FIELDS)}")
        if not isinstance(text, str):
            raise UsageError(f"{where}: {name} must be a text, got {text!r:.80}")
    return {_FIELDS[name]: text for name, text in given.items() if text}


def _read(path: Path) -> tuple[Sections, Macros]:
    """Return the sections of a file and its macros."""
    sections = read_sections(path)
    folder = f"{path.absolute().parent}/"  # Inferflow's macros of folders end in a slash
    names = ("config_dir", "app_dir", "data_root_dir")
    known: Mapping[str, str] = {**dict.fromkeys(names, folder), "app_name": "nbflow"}
    return sections, Macros(sections, known, str(path))


def _object(value: str, where: str) -> dict[str, Any]:
    try:
        given = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise UsageError(f"{where}: must be a JSON object, got {value!r:.80}")
    return given


def _number(value: str, where: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{where} must be a number, got {value!r:.80}") from None

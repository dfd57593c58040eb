"""Convert Inferflow's ``inferflow_service.ini`` to a configuration of this server.

A known key is converted, or ignored with a note that gives the reason, or refused with an
alternative; an unknown key is an error.  docs/server.md has the table.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from configparser import DuplicateOptionError, DuplicateSectionError, Error, RawConfigParser
from pathlib import Path
from typing import Any

from nbflow.server.config import ServerConfig, make_config, resolve_files
from nbflow.utils.binary_file import read_text
from nbflow_kernels.errors import UsageError, unknown_name

MAX_BYTES = 1_000_000
_MACRO = re.compile(r"\$\{([^{}]{1,200})\}|\$\(([^()]{1,200})\)")
_MAX_DEPTH = 8
_MAX_VALUE = 100_000

Sections = dict[str, dict[str, str]]
Table = dict[str, Any]
Setter = Callable[[Table, str, str], None]
"""``set(table, value, where)``: store a key's value in a table, or raise."""

_WEIGHTS = ("attn_wq", "attn_wk", "attn_wv", "attn_wo", "ffn_w1", "ffn_w2", "ffn_w3")


def read_ini(path: Path) -> ServerConfig:
    """Read an Inferflow service file."""
    sections = read_sections(path)
    main = sections.get("main", {})
    known = {
        "config_dir": str(path.parent),
        "app_dir": str(path.parent),
        "app_name": "nbflow",
        "run_name": "nbflow",
        "data_root_dir": sections.get("app_env.base", {}).get("data_root_dir", str(path.parent)),
        "global_model_dir": main.get("global_model_dir", str(path.parent)),
    }
    macros = Macros(sections, known, str(path))
    table: Table = {"host": "0.0.0.0", "limits": {}, "log": {}}
    for name, keys in sections.items():
        setters = _setters(name)
        if setters is None:
            raise UsageError(f"{path}: {unknown_name('section', f'[{name}]', _SECTIONS)}")
        if setters:
            _apply(keys, setters, table, f"{path}: [{name}]", macros, {})
    table["models"] = _models(sections, macros, str(path))
    return resolve_files(make_config(table, str(path)), path.parent)


def read_sections(path: Path) -> Sections:
    """Read sections and keys, in lower case, without expanding macros.

    A repeated section or key is an error.
    """
    text = read_text(path, MAX_BYTES, "an ini file").removeprefix("\ufeff")
    # Inferflow has neither default sections nor line continuation: indented lines are keys
    parser = RawConfigParser(delimiters=("=",), default_section="")
    lines = (
        line.lower() if line[:1] == "[" else line for line in map(str.strip, text.splitlines())
    )
    try:
        parser.read_file(lines, str(path))
    except (DuplicateSectionError, DuplicateOptionError) as error:
        name = getattr(error, "option", error.section)
        raise UsageError(f"{path}:{error.lineno}: {name!r} is stated twice") from error
    except Error as error:
        found = " ".join(str(error).split())
        raise UsageError(f"{path}: lines must be [section] or key = value; {found:.300}") from error
    return {name.strip(): dict(parser.items(name)) for name in parser.sections()}


def _apply(
    keys: Mapping[str, str],
    setters: Mapping[str, Setter],
    table: Table,
    where: str,
    macros: Macros,
    more: Mapping[str, str],
) -> None:
    """Convert the keys of a section."""
    for key, value in keys.items():
        if key not in setters:
            raise UsageError(f"{where}: {unknown_name('key', key, setters)}")
        setters[key](table, macros(value, more), f"{where} {key}")


# ---- setters --------------------------------------------------------------------------------


def _to(name: str, read: Callable[[str, str], Any] = lambda value, _: value) -> Setter:
    """Return a setter that stores the value at a dotted path."""
    *parents, last = name.split(".")

    def put(table: Table, value: str, where: str) -> None:
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = read(value, where)

    return put


def _elsewhere(_: Table, __: str, ___: str) -> None:
    """Ignore a key that another function reads."""


def _no_effect(reason: str) -> Setter:
    """Return a setter that prints why a key is ignored."""

    def tell(_: Table, value: str, where: str) -> None:
        if value:
            print(f"note: {where} = {value:.80} has no effect: {reason}", file=sys.stderr)

    return tell


def _only(allowed: tuple[str, ...], instead: str) -> Setter:
    """Return a setter that refuses any value except the neutral ones."""

    def check(_: Table, value: str, where: str) -> None:
        if value.strip().lower() not in allowed:
            raise UsageError(f"{where} = {value}: not offered; {instead}")

    return check


_OFF = ("", "0", "false", "no", "off")


def _flag(value: str, _: str) -> bool:
    return value.strip().lower() not in _OFF


def _number(value: str, where: str) -> float:
    """Return a number."""
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{where} must be a number, got {value!r:.80}") from None


def _whole(value: str, where: str) -> int:
    """Return a whole number."""
    result = _number(value, where)
    if not result.is_integer():
        raise UsageError(f"{where} must be a whole number, got {value!r:.80}")
    return int(result)


def _format(value: str, _: str) -> str | None:
    """Return a format by Inferflow's name; None for "auto", the stored format."""
    name = value.strip().lower()
    return None if name in ("", "auto") else name


def _context(table: Table, value: str, where: str) -> None:
    n = _whole(value, where)
    if n > 0:
        table["max_context"] = n


def _strategy(table: Table, value: str, where: str) -> None:
    """Read the name of a strategy, or a JSON object with its parameters."""
    value = value.strip()
    parameters: Table = {"name": value}
    if value.startswith("{"):
        try:
            parameters = json.loads(value)
            parameters["name"].lower()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(
                f"{where} must be a JSON object with a name, got {value!r:.80}"
            ) from None
    name = str(parameters.pop("name")).lower()
    if name:
        table["defaults"] = {"decoding": f"inferflow.{name.removeprefix('sample.')}", **parameters}


_MAIN: dict[str, Setter] = {
    "http_port": _to("port", _whole),
    "worker_count": _to("limits.requests", _whole),
    "is_study_mode": _only(_OFF, "use nbflow bench"),
    "global_model_dir": _elsewhere,
    "default_prompt_template": _no_effect(
        "Inferflow does not read it either; a model's template is decoder_input_template"
    ),
}
_ENGINE: dict[str, Setter] = {
    "models": _elsewhere,
    "devices": _elsewhere,
    "cpu_threads": _elsewhere,
    "max_concurrent_queries": _elsewhere,
    "cpu_layer_count": _elsewhere,
    "encoder_cpu_layer_count": _only(_OFF, "which ranks hold which layers is said by partition"),
    "decoder_cpu_layer_count": _elsewhere,
    "return_output_tensors": _no_effect("requests ask for log-probabilities themselves"),
    "is_study_mode": _only(_OFF, "use nbflow bench"),
    "show_tensors": _only(_OFF, "use nbflow spec --program, or the reference executor"),
}
_NO_SPEC = _no_effect(
    "the architecture is read from config.json or the GGUF file; --spec names another"
)
_MODEL: dict[str, Setter] = {
    "model_dir": _to("path"),
    "model_specification_file": _NO_SPEC,
    "model_spec_file": _NO_SPEC,
    "device_weight_data_type": _to("weights", _format),
    **{
        f"device_weight_data_type.{name}": _only(
            ("", "auto"), "one format is for all matrices; write a checkpoint with nbflow quantize"
        )
        for name in _WEIGHTS
    },
    "host_weight_data_type": _no_effect("Inferflow does not read it either"),
    "device_kv_cache_data_type": _to("kv", _format),
    "host_kv_cache_data_type": _no_effect("both parts have device_kv_cache_data_type"),
    "tensor_quant_threshold": _no_effect(
        "all matrices of attention and feed-forward get the format, whatever their size"
    ),
    "delta_tensor_ratio": _to("outliers", _number),
    "host_kv_cache_percent": _to("kv_host_percent", _number),
    "be_host_embeddings": _to("embeddings_on_host", _flag),
    "devices": _to("partition"),
    "max_context_len": _context,
    "decoding_strategy": _strategy,
    "encoder_input_template": _only(("",), "give a model with an encoder its text as it is"),
    "decoder_input_template": _to("chat_template"),
    "prompt_template": _to("chat_template"),
}
_BASE: dict[str, Setter] = {
    "data_root_dir": _elsewhere,
    "require_enter_key_to_exit": _no_effect("the server ends at SIGTERM"),
    "is_daemon": _only(_OFF, "let systemd or a container keep it running"),
}
_LOGGING: dict[str, Setter] = {
    "enable_logging": _no_effect("the log goes to standard error; see [log]"),
    "log_dir": _no_effect("the log goes to standard error; see [log] file"),
    "log_name": _no_effect("the log goes to standard error; see [log] file"),
    "max_size_per_file": _no_effect("use logrotate"),
    "max_file_count": _no_effect("use logrotate"),
    "color_console": _no_effect("the log has no colours"),
}
_STATUS: dict[str, Setter] = {
    "enable_monitoring": _no_effect("numbers are at /metrics"),
    "status_file": _no_effect("numbers are at /metrics"),
    "listening_port": _no_effect("numbers are at /metrics, on the server's port"),
}
_SECTIONS = {
    "main": _MAIN,
    "transformer_engine": _ENGINE,
    "app_env.base": _BASE,
    "app_env.logging": _LOGGING,
    "app_env.status_manager": _STATUS,
}


def _ignore(_: Table, __: str, ___: str) -> None:
    """Ignore a key of the tool that runs queries; `nbflow.compat.inferflow.tool_ini` reads it."""


_QUERY_KEYS: dict[str, Setter] = dict.fromkeys(
    (
        "inference_engine_config", "query_list", "query_random_seed", "temperature",
        "long_context_test",
    ),
    _ignore,
)  # fmt: skip


def _setters(section: str) -> Mapping[str, Setter] | None:
    """Return the setters of a section; empty for models and templates, None if unknown."""
    if section == "main":
        return _MAIN | _QUERY_KEYS
    if section.startswith("query_list"):
        return {}
    if section == "prompt_templates" or section.startswith(("model.", "prompt_template.")):
        return {}
    return _SECTIONS.get(section)


# ---- models and templates -------------------------------------------------------------------


def _models(sections: Sections, macros: Macros, where: str) -> Table:
    """Return the ``[models.NAME]`` tables of the listed models."""
    engine = sections.get("transformer_engine", {})
    listed = macros(engine.get("models", "")).replace(";", ",").split(",")
    names = [name.strip() for name in listed if name.strip()]
    if not names:
        raise UsageError(f"{where}: [transformer_engine] must have models")
    templates = _templates(sections, where)
    result = {}
    for name in names:
        keys = sections.get(f"model.{name.lower()}")
        if keys is None or "model_dir" not in keys:
            raise UsageError(f"{where}: [model.{name}] with model_dir is missing")
        here = f"{where}: [model.{name}]"
        model: Table = {"weights": "f16", "kv": "q8", "engine": {"max_sequences": 10}}
        if "devices" in engine:
            model["partition"] = macros(engine["devices"])
        if "cpu_threads" in engine:
            model["threads"] = _whole(macros(engine["cpu_threads"]), f"{where}: cpu_threads")
        for key in ("cpu_layer_count", "decoder_cpu_layer_count"):
            if key in engine:
                model["cpu_layers"] = _whole(macros(engine[key]), f"{where}: {key}")
        if "max_concurrent_queries" in engine:
            value = macros(engine["max_concurrent_queries"])
            model["engine"]["max_sequences"] = _whole(value, f"{where}: max_concurrent_queries")
        _apply(keys, _MODEL, model, here, macros, {"model_name": name})
        template = model.get("chat_template")
        if template:
            model["chat_template"] = templates.get(template.lower(), template)
        else:
            model.pop("chat_template", None)
        model["kv"] = model["kv"] or "f16"
        result[name] = model
    return result


def _templates(sections: Sections, where: str) -> dict[str, str]:
    """Return the templates that the file defines, by name."""
    listed = sections.get("prompt_templates", {})
    unknown = [k for k in listed if not k.startswith("prompt_template")]
    if unknown:
        known = ("prompt_template_count", "prompt_template1")
        raise UsageError(f"{where}: [prompt_templates] {unknown_name('key', unknown[0], known)}")
    result = {}
    for section, keys in sections.items():
        if not section.startswith("prompt_template."):
            continue
        count = _whole(keys.get("line_count", "0"), f"{where}: [{section}] line_count")
        wanted = [f"line{i + 1}" for i in range(min(count, 10_000))]
        missing = [name for name in wanted if name not in keys]
        unknown = [key for key in keys if key != "line_count" and key not in wanted]
        if missing or unknown:
            name = (missing or unknown)[0]
            what = "is missing" if missing else f"is more than line_count = {count}"
            raise UsageError(f"{where}: [{section}] {name} {what}")
        result[section.removeprefix("prompt_template.")] = "\n".join(keys[n] for n in wanted)
    return result


# ---- macros ---------------------------------------------------------------------------------


class Macros:
    """Expansion of the macros ``${name}`` and ``$(name)``.

    Names of the form ``section/key`` are values of the file; others are in `known`.
    """

    def __init__(self, sections: Sections, known: Mapping[str, str], where: str) -> None:
        self._sections = sections
        self._known = {name.lower(): value for name, value in known.items()}
        self._where = where

    def __call__(self, value: str, more: Mapping[str, str] | None = None, depth: int = 0) -> str:
        """Return `value` with its macros expanded; `more` defines further names."""
        if depth > _MAX_DEPTH:
            raise UsageError(f"{self._where}: macros refer to each other: {value!r:.80}")

        def one(found: re.Match[str]) -> str:
            name = (found[1] or found[2]).strip().lower()
            return self(self._value(name, more or {}), more, depth + 1)

        result = _MACRO.sub(one, value)
        if len(result) > _MAX_VALUE:
            raise UsageError(f"{self._where}: a value grows beyond {_MAX_VALUE} characters")
        return result

    def _value(self, name: str, more: Mapping[str, str]) -> str:
        for table in (more, self._known):
            if name in table:
                return table[name]
        section, _, key = name.rpartition("/")
        if section in self._sections and key in self._sections[section]:
            return self._sections[section][key]
        known = ", ".join([*more, *self._known])
        raise UsageError(
            f"{self._where}: unknown macro ${{{name}}}; known are {known}, and section/key"
        )

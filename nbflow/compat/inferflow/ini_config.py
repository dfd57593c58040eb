"""Convert Inferflow's ``inferflow_service.ini`` to a configuration of this server.

A known key is converted, or ignored with a note that gives the reason, or refused with an
alternative; an unknown key is an error.  docs/server.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nbflow.compat.inferflow.ini_file import Macros, Sections, read_sections
from nbflow.compat.inferflow.ini_keys import (
    Setter,
    Table,
    apply,
    elsewhere,
    flag,
    no_effect,
    only,
    stores,
    take_note,
    unless,
    whole,
)
from nbflow.compat.inferflow.ini_model import ModelReader
from nbflow.option_fields import size_bytes
from nbflow.server.config import Limits, ServerConfig, make_config, resolve_files
from nbflow_kernels.errors import UsageError, unknown_name

DEFAULT_FILE = "inferflow_service.ini"
"""File that the command line reads if none is named."""


def read_ini(path: Path, device: str | None = None, *, serves: bool = True) -> ServerConfig:
    """Read an Inferflow service file.

    Parameters
    ----------
    path : Path
        The file.
    device : str, optional
        Device of its models; by default CUDA if the machine has a device, else the CPU.
    serves : bool
        False to leave the log and the status file out.
    """
    sections = read_sections(path)
    folder = f"{path.absolute().parent}/"  # Inferflow's macros of folders end in a slash
    known = {
        "config_dir": folder,
        "app_dir": folder,
        "app_name": "nbflow",
        "run_name": "nbflow",
        "data_root_dir": sections.get("app_env.base", {}).get("data_root_dir", folder),
        "global_model_dir": sections.get("main", {}).get("global_model_dir", folder),
    }
    macros = Macros(sections, known, str(path))
    table: Table = {"host": "0.0.0.0", "limits": {}, "log": {}}
    for name, keys in sections.items():
        setters = _setters(name)
        if setters is None:
            raise UsageError(f"{path}: {unknown_name('section', f'[{name}]', _SECTIONS)}")
        if setters:
            apply(keys, setters, table, f"{path}: [{name}]", macros)
    engine = sections.get("transformer_engine", {})
    reader = ModelReader(sections, engine, macros, _templates(sections, str(path)), path, device)
    table["models"] = {name: reader.read(name) for name in _listed(engine, macros, str(path))}
    reader.tell_device()
    if serves:
        table["log"] = _log(sections.get("app_env.logging", {}), macros, path)
        _tell_status(sections.get("app_env.status_manager", {}), str(path))
    return resolve_files(make_config(table, str(path)), path.parent)


def _listed(engine: Mapping[str, str], macros: Macros, where: str) -> list[str]:
    """Return the names of the models to serve."""
    listed = macros(engine.get("models", "")).replace(";", ",").split(",")
    names = [name.strip() for name in listed if name.strip()]
    if not names:
        raise UsageError(f"{where}: [transformer_engine] must have models")
    return names


def _workers(table: Table, value: str, where: str) -> None:
    """Set the requests in flight; like those of a pool of threads, further ones wait."""
    table["limits"] |= {"requests": whole(value, where), "queue": Limits().connections}


_MAIN: dict[str, Setter] = {
    "http_port": stores("port", whole),
    "worker_count": _workers,
    "is_study_mode": unless(flag, "the log states the seconds of loading in any case"),
    "global_model_dir": elsewhere,
    "default_prompt_template": no_effect(
        "Inferflow does not read it either; a model's template is decoder_input_template"
    ),
    "request_templates": stores("request_templates", flag),
}
_ENGINE: dict[str, Setter] = dict.fromkeys(
    (
        "models", "devices", "cpu_threads", "max_concurrent_queries", "cpu_layer_count",
        "decoder_cpu_layer_count", "is_study_mode", "show_tensors",
    ),
    elsewhere,
)  # fmt: skip
_ENGINE |= {
    "encoder_cpu_layer_count": unless(
        flag, "Inferflow computes layers on the CPU for decoders only; use decoder_cpu_layer_count"
    ),
    "return_output_tensors": no_effect("requests ask for log-probabilities themselves"),
}
_BASE: dict[str, Setter] = {
    "data_root_dir": elsewhere,
    "require_enter_key_to_exit": unless(flag, "the server ends at SIGTERM or Ctrl-C"),
    "is_daemon": only(flag, "let systemd or a container keep it running"),
}
_LOGGING: dict[str, Setter] = dict.fromkeys(
    ("enable_logging", "log_dir", "log_name", "max_size_per_file", "max_file_count"), elsewhere
)
_LOGGING |= {"color_console": unless(flag, "the log has no colours")}
_STATUS: dict[str, Setter] = dict.fromkeys(
    ("enable_monitoring", "status_file", "listening_port"), elsewhere
)
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


def _log(keys: Mapping[str, str], macros: Macros, path: Path) -> Table:
    """Return the table ``[log]``: a file with rotation if logging to a file is enabled."""
    where = f"{path}: [app_env.logging]"
    named = {key: macros(keys.get(key, "")).strip() for key in ("log_dir", "log_name")}
    if not flag(keys.get("enable_logging", ""), where) or not any(named.values()):
        return {}
    name = named["log_name"] or "nbflow"
    file = path.absolute().parent / named["log_dir"] / (name if "." in name else f"{name}.log")
    table: Table = {"file": str(file.resolve())}
    if keys.get("max_size_per_file", "").strip() not in ("", "0"):
        table["max_bytes"] = size_bytes(macros(keys["max_size_per_file"]), "max_size_per_file")
    if "max_file_count" in keys:
        count = whole(macros(keys["max_file_count"]), f"{where} max_file_count")
        table["backups"] = max(0, count - 1)
    take_note(f"{path}: the log goes to {table['file']}")
    return table


def _tell_status(keys: Mapping[str, str], where: str) -> None:
    """Print that the status file and its port do not exist here."""
    if flag(keys.get("enable_monitoring", ""), where):
        take_note(
            f"{where}: [app_env.status_manager] has no effect: instead of a status file and a port "
            "of its own, the server answers /health, /ready and /metrics"
        )


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
        count = whole(keys.get("line_count", "0"), f"{where}: [{section}] line_count")
        wanted = [f"line{i + 1}" for i in range(min(count, 10_000))]
        missing = [name for name in wanted if name not in keys]
        unknown = [key for key in keys if key != "line_count" and key not in wanted]
        if missing or unknown:
            name = (missing or unknown)[0]
            what = "is missing" if missing else f"is more than line_count = {count}"
            raise UsageError(f"{where}: [{section}] {name} {what}")
        result[section.removeprefix("prompt_template.")] = "\n".join(keys[n] for n in wanted)
    return result

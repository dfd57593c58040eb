"""Models of Inferflow's service file: ``[model.NAME]`` with the keys of the engine."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from nbflow.checkpoint import open_weights
from nbflow.compat.inferflow.ini_file import Macros, Sections
from nbflow.compat.inferflow.ini_keys import (
    Setter,
    Table,
    apply,
    elsewhere,
    flag,
    names,
    no_effect,
    number,
    stores,
    take_note,
    whole,
)
from nbflow.compat.inferflow.strategies import INFERFLOW
from nbflow.option_fields import fields
from nbflow.options import SamplingParams
from nbflow.quantization.policy import is_quantized
from nbflow.spec import check, resolve
from nbflow.tokenization.chat import named_templates
from nbflow.utils.binary_file import read_text
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.formats import FORMATS

QUANT_THRESHOLD = 2000 * 2000
"""Inferflow's default of tensor_quant_threshold."""
KINDS = {
    "attn_wq": ("*.attn.q.weight", "*.cross.q.weight"),
    "attn_wk": ("*.attn.k.weight", "*.cross.k.weight"),
    "attn_wv": ("*.attn.v.weight", "*.cross.v.weight"),
    "attn_wo": ("*.attn.o.weight", "*.cross.o.weight"),
    "ffn_w1": ("*.ffn.gate.weight", "*.moe.*.gate.weight", "*.shared.gate.weight"),
    "ffn_w2": ("*.ffn.down.weight", "*.moe.*.down.weight", "*.shared.down.weight"),
    "ffn_w3": ("*.ffn.up.weight", "*.moe.*.up.weight", "*.shared.up.weight"),
}
"""Inferflow's kinds of matrices -> patterns for our names; w1 without a gate is ffn.up."""
_FORMAT = "device_weight_data_type"
_DEVICE_NUMBER = re.compile(r"(?<![:\d])\d+")  # not the number of layers in 0:3;1
_READ_WITH_ANY = ("min_k", "max_k", "top_p", "pool_size", "eos_bypassing_max")
"""Parameters that Inferflow accepts with any strategy."""
_FILE_FORMATS = ("gguf", "ggml", "llama2.c")
"""Formats whose weights are one file, which may lie next to others."""
_MAX_SPEC_BYTES = 1_000_000


class ModelReader:
    """Converter of ``[model.NAME]`` to the table ``[models.NAME]`` of a server.

    `templates` are those of the file by name; `device` as for `ini_config.read_ini`.
    """

    def __init__(
        self,
        sections: Sections,
        engine: Mapping[str, str],
        macros: Macros,
        templates: Mapping[str, str],
        path: Path,
        device: str | None,
    ) -> None:
        self._sections = sections
        self._engine = engine
        self._macros = macros
        self._templates = templates
        self._path = path
        self._reason = ""  # for the CPU
        self._device = self._find_device() if device is None else device

    def _find_device(self) -> str:
        from nbflow_kernels.cuda import detect  # late: it loads the driver

        found = detect()
        self._reason = "" if found.usable else found.reason
        return "cuda" if found.usable else "cpu"

    def tell_device(self) -> None:
        """Print that the numbers of `devices` are not GPUs, if the machine has none."""
        if self._reason:
            take_note(
                f"{self._path}: the models run on the CPU, and the numbers of devices are ranks, "
                f"not GPUs: {self._reason}; --device cuda, emulator or cpu decides"
            )

    def read(self, name: str) -> Table:
        """Return the table of a listed model."""
        keys = self._sections.get(f"model.{name.lower()}")
        if keys is None or "model_dir" not in keys:
            raise UsageError(f"{self._path}: [model.{name}] with model_dir is missing")
        where, more = f"{self._path}: [model.{name}]", {"model_name": name}
        table: Table = {"kv": "q8", "engine": {"max_sequences": 10}}
        engine = {key: value for key, value in self._engine.items() if key in _ENGINE}
        apply(engine, _ENGINE, table, str(self._path), self._macros)
        apply(keys, _MODEL, table, where, self._macros, more)
        values = {key: self._macros(value, more).strip() for key, value in keys.items()}
        self._place(table, values.get("devices", self._macros(self._engine.get("devices", "0"))))
        table["kv"] = table["kv"] or "f16"
        self._set_files(table, values, where)
        table["weights"] = _weights(table, values, where)
        self._set_templates(table, where)
        return table

    def _place(self, table: Table, devices: str) -> None:
        """Set partition and device: numbers are GPUs where the models run on CUDA."""
        gpus = _DEVICE_NUMBER.findall(devices)
        ranks = iter(range(len(gpus)))
        table["partition"] = _DEVICE_NUMBER.sub(lambda _: str(next(ranks)), devices)
        table["device"] = self._device
        if self._device == "cuda" and gpus:
            table["device"] = ",".join(f"cuda:{int(gpu)}" for gpu in gpus)
        if self._device not in ("cpu", "auto"):  # otherwise everything is in the host's memory
            table.setdefault("embeddings_on_host", True)

    def _set_files(self, table: Table, values: Mapping[str, str], where: str) -> None:
        """Set weights and model specification."""
        folder = self._path.absolute().parent / os.path.normpath(table["path"])
        table["path"] = str(folder)
        key = next(
            (k for k in ("model_specification_file", "model_spec_file") if values.get(k)), ""
        )
        if not key:
            return
        spec = folder / os.path.normpath(values[key])
        if spec.suffix == ".json" and not spec.is_file():
            take_note(f"{where} {key}: {spec} does not exist; the checkpoint describes the model")
            return
        if spec.suffix == ".toml" and not spec.is_file():
            raise UsageError(f"{where} {key}: {spec} does not exist")
        if spec.suffix != ".json":
            table["spec"] = str(spec) if spec.exists() else values[key]
            return
        weights = weights_of(folder, spec)
        table["path"] = str(weights)
        if weights != folder or describes_itself(weights):
            take_note(f"{where} {key}: not needed, as the checkpoint describes the model")
        else:
            table["spec"] = str(spec)

    def _set_templates(self, table: Table, where: str) -> None:
        """Set the templates; names are those of the file and of `named_templates`."""
        stated = {key: table.pop(key, "").strip() for key in ("encoder", "decoder")}
        for key, template in stated.items():
            if "{" not in template and template:
                known = {**named_templates(), **self._templates}
                if template.lower() not in known:
                    error = unknown_name(f"{key}_input_template", template, known)
                    raise UsageError(f"{where}: {error}")
                stated[key] = known[template.lower()]
        names = {"encoder": "encoder_template", "decoder": "chat_template"}
        if stated["encoder"]:
            names["decoder"] = "decoder_template"
        table |= {names[key]: template for key, template in stated.items() if template}


def describes_itself(weights: Path) -> bool:
    """Return True if a checkpoint's configuration or header is that of a known model."""
    try:
        spec = resolve(weights).spec
        with open_weights(weights) as file:
            check(spec, file)
    except UsageError:
        return False
    return True


def weights_of(folder: Path, spec: Path) -> Path:
    """Return the weights of a model folder: a file that the specification names, or the folder.

    A GGUF or llama2.c file is named itself, as a folder may hold several.
    """
    text = read_text(spec, _MAX_SPEC_BYTES, "a model specification")
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.strip()[:1] not in ("", "#")), 0)
    try:
        stated = json.loads("\n".join(lines[start:]))
        format, (first, *_) = stated["model_file_format"].lower(), stated["model_files"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{spec}: must be a JSON object with model_file_format and model_files ({error})"
        ) from error
    if format not in _FILE_FORMATS or not isinstance(first, str):
        return folder
    return folder / first


# ---- weights --------------------------------------------------------------------------------


def _weights(table: Table, values: Mapping[str, str], where: str) -> str | Table | None:
    """Return the key ``weights``: a format, or a policy of formats and a threshold."""
    whole_format = _format(values.get(_FORMAT, "f16"), f"{where} {_FORMAT}")
    stated = {
        kind: _format(values.get(f"{_FORMAT}.{kind}", ""), f"{where} {_FORMAT}.{kind}")
        for kind in KINDS
    }
    of_kinds = {kind: format for kind, format in stated.items() if format is not None}
    key = "tensor_quant_threshold"
    least = whole(values[key], f"{where} {key}") if values.get(key) else QUANT_THRESHOLD
    if not of_kinds and (whole_format is None or FORMATS[whole_format].block_size == 1):
        return whole_format
    formats = {"*": whole_format} if whole_format else {}
    if of_kinds:
        formats = _used(of_kinds, formats, table)
    return {"formats": formats, "min_elements": max(0, least)}


def _format(value: str, where: str) -> str | None:
    """Return a format by Inferflow's name; None for "auto", the stored format."""
    name = value.strip().lower()
    if name in ("", "auto"):
        return None
    if name not in FORMATS:
        raise UsageError(f"{where}: {unknown_name('format', value, FORMATS)}")
    return name


def _used(of_kinds: Mapping[str, str], others: Mapping[str, str], table: Table) -> dict[str, str]:
    """Return the patterns of a policy that decide on a matrix of the model."""
    spec = resolve(table["path"], spec=table.get("spec")).spec
    shapes = {n: s for n, s in spec.tensor_shapes().items() if is_quantized(n, s)}
    patterns = dict(KINDS)
    if not spec.gated:
        patterns["ffn_w1"] = patterns["ffn_w3"]
    ordered = {p: format for kind, format in of_kinds.items() for p in patterns[kind]}
    ordered |= others
    left, used = set(shapes), {}
    for pattern, format in ordered.items():
        found = {name for name in left if fnmatchcase(name, pattern)}
        if found:
            used[pattern] = format
            left -= found
    return used


# ---- keys -----------------------------------------------------------------------------------


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
    stated = str(parameters.pop("name"))
    name = stated.lower().removeprefix("sample.")
    if not name:
        return
    if name not in INFERFLOW:
        raise UsageError(f"{where}: {unknown_name('decoding strategy', stated, INFERFLOW)}")
    own = {field.name for field in dataclasses.fields(INFERFLOW[name])}
    defaults: Table = {"decoding": f"inferflow.{name}"}
    for key, given in parameters.items():
        if key in own:
            defaults[key] = given
        elif key in _READ_WITH_ANY or key in fields(SamplingParams):
            take_note(f"{where}: {key} has no effect with {stated}, as in Inferflow")
        else:
            raise UsageError(f"{where}: {unknown_name('parameter', key, own)}")
    table["defaults"] = defaults


def _cpu_layers(table: Table, value: str, where: str) -> None:
    table["cpu_layers"] = max(table.get("cpu_layers", 0), whole(value, where))


def _sequences(table: Table, value: str, where: str) -> None:
    table["engine"]["max_sequences"] = whole(value, where)


def _trace(table: Table, value: str, where: str) -> None:
    if flag(value, where):
        table["trace"] = True


def _context(table: Table, value: str, where: str) -> None:
    n = whole(value, where)
    if n > 0:
        table["max_context"] = n


_ENGINE: dict[str, Setter] = {
    "cpu_threads": stores("threads", whole),
    "max_concurrent_queries": _sequences,
    "cpu_layer_count": _cpu_layers,
    "decoder_cpu_layer_count": _cpu_layers,
    "is_study_mode": _trace,
    "show_tensors": _trace,
}
"""Keys of the engine that are options of each model."""
_MODEL: dict[str, Setter] = {
    "model_dir": stores("path"),
    "model_specification_file": elsewhere,
    "model_spec_file": elsewhere,
    _FORMAT: elsewhere,
    **{f"{_FORMAT}.{kind}": elsewhere for kind in KINDS},
    "tensor_quant_threshold": elsewhere,
    "host_weight_data_type": no_effect("Inferflow does not read it either"),
    "device_kv_cache_data_type": stores("kv", _format),
    "host_kv_cache_data_type": no_effect("both parts have device_kv_cache_data_type"),
    "delta_tensor_ratio": stores("outliers", number),
    "host_kv_cache_percent": stores("kv_host_percent", number),
    "be_host_embeddings": stores("embeddings_on_host", flag),
    "devices": elsewhere,
    "multi_gpu_strategy": no_effect("devices say it, in Inferflow too: ; by layer, & by tensor"),
    "max_context_len": _context,
    "decoding_strategy": _strategy,
    "encoder_input_template": stores("encoder"),
    "decoder_input_template": stores("decoder"),
    "prompt_template": stores("decoder"),
    "aliases": stores("aliases", names),
    "quantizer": stores("quantizer"),
}
"""Keys of ``[model.NAME]``; the last two are not Inferflow's."""

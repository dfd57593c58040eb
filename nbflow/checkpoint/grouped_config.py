"""Configurations of checkpoints with grouped integers, from GPTQ to Quark.

Every key that changes the values of weights is checked; a value that is not known is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbflow.checkpoint.codebook_tensors import KINDS
from nbflow.checkpoint.grouped_tensors import GroupedStorage
from nbflow.checkpoint.module_patterns import EVERY, regular, shell
from nbflow.utils.json_file import read_object
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.e2m1 import E2M1_G16_F32

OLD_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files of their own in which early versions of the methods kept the configuration."""


def read_config(path: Path) -> dict[str, Any] | None:
    """Return config.json with the quantization config of an older file of its folder, if any."""
    config = read_object(path, missing_ok=True)
    if config is None or config.get("quantization_config") is not None:
        return config
    for name, method in OLD_FILES.items():
        table = read_object(path.parent / name, missing_ok=True)
        if table is None:
            continue
        if method == "modelopt":
            inner = table.get("quantization")
            table = dict(inner) if isinstance(inner, Mapping) else {}
        return {**config, "quantization_config": {"quant_method": method, **table}}
    return config


def check_keys(
    table: Mapping[str, Any], at: str, known: Mapping[str, Sequence[Any]], required: bool = False
) -> None:
    """Raise for the first key with an unsupported value, or missing if required.

    4.0 does not stand for 4, nor 1 for true: readers compute with the values.
    """
    for key, allowed in known.items():
        value = table.get(key)
        is_known = any(type(value) is type(one) and value == one for one in allowed)
        if (value is not None or required) and not is_known:
            raise UsageError(
                f"{at}.{key} = {shown(value)} is not supported; it must be "
                + " or ".join(map(repr, allowed))
            )


def gptq(table: Mapping[str, Any], at: str) -> GroupedStorage:
    """Read quant_method gptq."""
    known = {
        "sym": (True, False),
        "desc_act": (True, False),
        "is_marlin_format": (False,),
        "checkpoint_format": ("gptq", "gptq_v2", "gptq_p"),
        "format": ("gptq", "gptq_v2", "gptq_p"),
        "pack_dtype": ("int32",),
    }
    check_keys(table, at, known)
    version = table.get("checkpoint_format") or table.get("format") or "gptq"
    bits = range(2, 9) if version == "gptq_p" else (2, 3, 4, 8)
    check_keys(table, at, {"bits": bits}, required=True)
    return GroupedStorage(
        "gptq",
        table["bits"],
        group_size(table.get("group_size", -1), f"{at}.group_size"),
        symmetric=table.get("sym") is True,
        zero_offset=1 if version == "gptq" else 0,
        planar=version == "gptq_p",
    )


def gptq_modules(
    table: Mapping[str, Any], at: str
) -> list[tuple[re.Pattern[str], GroupedStorage | None]]:
    """Read settings of single modules of GPTQModel (`dynamic`)."""
    dynamic, at = table.get("dynamic") or {}, f"{at}.dynamic"
    if not isinstance(dynamic, Mapping):
        raise UsageError(f"{at} must be a table, got {shown(dynamic)}")
    found: list[tuple[re.Pattern[str], GroupedStorage | None]] = []
    for text, settings in dynamic.items():
        name = regular(text.removeprefix("-:").removeprefix("+:"), at)
        if text.startswith("-:"):
            found.append((name, None))
            continue
        if not isinstance(settings, Mapping):
            raise UsageError(
                f"{at}: settings of {shown(text)} must be a table, got {shown(settings)}"
            )
        found.append((name, gptq({**table, **settings}, f"{at}.{shown(text)}")))
    return found


def awq(table: Mapping[str, Any], at: str) -> GroupedStorage:
    """Read quant_method awq."""
    bits, size = ("bits", "group_size") if "bits" in table else ("w_bit", "q_group_size")
    check_keys(table, at, {bits: (4,)}, required=True)
    check_keys(table, at, {"version": ("gemm", "GEMM"), "zero_point": (True,)})
    return GroupedStorage("awq", 4, group_size(table.get(size, -1), f"{at}.{size}"))


def bitsandbytes(table: Mapping[str, Any], at: str) -> GroupedStorage | None:
    """Read quant_method bitsandbytes; return None for 4 bits, whose tensors describe themselves."""
    if table.get("load_in_4bit") is True:
        check_keys(table, at, {"bnb_4bit_quant_type": KINDS})
        return None
    check_keys(table, at, {"load_in_8bit": (True,)}, required=True)
    return GroupedStorage("int8", 8, symmetric=True)


def hqq(table: Mapping[str, Any], at: str) -> tuple[int, int | None] | None:
    """Read quant_method hqq: return bits and group size if groups lie in rows, else None.

    The tensors describe themselves; this is for plans from the configuration alone.
    """
    inner = table.get("quant_config")
    params = inner.get("weight_quant_params") if isinstance(inner, Mapping) else None
    if not isinstance(params, Mapping):
        return None  # settings by the name of a module
    check_keys(params, f"{at}.quant_config.weight_quant_params", {"axis": (0, 1)})
    bits, size = params.get("nbits"), params.get("group_size")
    if params.get("axis") != 1 or not isinstance(bits, int) or not 1 <= bits <= 8:
        return None
    return bits, None if size is None else group_size(size, f"{at}.quant_config.group_size")


_NVFP4_CONFIGS = ("NVFP4WeightOnlyConfig", "NVFP4DynamicActivationNVFP4WeightConfig")


def torchao(table: Mapping[str, Any], at: str) -> tuple[int, int | None] | str | None:
    """Read quant_method torchao: return bits and group size of int4, the format of NVFP4, or None.

    The tensors describe themselves; this is for plans from the configuration alone.
    """
    kinds = table.get("quant_type")
    kind = kinds.get("default") if isinstance(kinds, Mapping) else None
    if isinstance(kind, Mapping) and kind.get("_type") in _NVFP4_CONFIGS:
        return E2M1_G16_F32.name
    if not isinstance(kind, Mapping) or kind.get("_type") != "Int4WeightOnlyConfig":
        return None
    facts = kind.get("_data")
    size = facts.get("group_size", 128) if isinstance(facts, Mapping) else 128
    return 4, group_size(size, f"{at}.quant_type.default.group_size")


QuarkRule = tuple[re.Pattern[str], str | GroupedStorage | None]


def quark(table: Mapping[str, Any], at: str) -> tuple[str | GroupedStorage, list[QuarkRule]]:
    """Read quant_method quark: return the storage of matrices, and the settings of single modules.

    A storage is "fp8", "quark-mxfp4" or that of integers.  Names count before the class of modules,
    of which only that of matrices can be followed, and before the settings of all.
    """
    settings, by_class = table.get("layer_quant_config"), table.get("layer_type_quant_config")
    excluded = table.get("exclude") or []
    rules: list[QuarkRule] = []
    for key, text, one in _quark_settings(settings, by_class, excluded, at):
        where = f"{at}.{key}.{shown(text)}"
        storage = None if key == "exclude" else _quark_weights(one, table, where, at)
        if key != "layer_type_quant_config":
            rules.append((shell(text, where), storage))
        elif text == "Linear":
            rules.append((EVERY, storage))
        elif storage is not None:
            raise UsageError(f"{where}: quantized modules of class {text} are not supported")
    others = [storage for _, storage in rules if storage is not None]
    where = f"{at}.global_quant_config"
    of_all = _quark_weights(table.get("global_quant_config"), table, where, at, bool(others))
    if not others:
        assert of_all is not None
        return of_all, []
    return others[0] if of_all is None else of_all, [*rules, (EVERY, of_all)]


def _quark_settings(
    by_name: Any, by_class: Any, excluded: Any, at: str
) -> Iterator[tuple[str, str, Any]]:
    """Yield key, pattern or class, and settings of modules; the first that match count."""
    for key, value in (("layer_quant_config", by_name), ("layer_type_quant_config", by_class)):
        if not isinstance(value or {}, Mapping):
            raise UsageError(f"{at}.{key} must be a table of modules, got {shown(value)}")
    if not isinstance(excluded, list):
        raise UsageError(f"{at}.exclude must be a list of modules, got {shown(excluded)}")
    yield from (("exclude", text, None) for text in excluded)
    yield from (("layer_quant_config", *item) for item in (by_name or {}).items())
    yield from (("layer_type_quant_config", *item) for item in (by_class or {}).items())


def _quark_weights(
    whole: Any, table: Mapping[str, Any], where: str, at: str, optional: bool = True
) -> str | GroupedStorage | None:
    """Read the settings of weights in a table of Quark; None if it has none."""
    export = table.get("export")
    if export is not None and not isinstance(export, Mapping):
        raise UsageError(f"{at}.export must be a table, got {shown(export)}")
    export = export or {}
    packs = {"pack_method": ("reorder", "order"), "weight_format": ("real_quantized",)}
    check_keys(export, f"{at}.export", packs)
    weights = whole.get("weight") if isinstance(whole, Mapping) else None
    at = f"{where}.weight"
    if weights is None and optional:
        return None
    if not isinstance(weights, Mapping):
        raise UsageError(f"{at} must be a table, got {shown(weights)}")
    dtypes = ("int4", "uint4", "fp8_e4m3", "fp4")
    check_keys(weights, at, {"dtype": dtypes}, required=True)
    kind = weights["dtype"]
    if kind == "fp8_e4m3":
        check_keys(weights, at, {"qscheme": ("per_tensor", "per_channel")}, required=True)
        return "fp8"
    check_keys(weights, at, {"qscheme": ("per_group",)}, required=True)
    if kind == "fp4":
        check_keys(weights, at, {"group_size": (32,), "scale_format": ("e8m0",)}, required=True)
        return "quark-mxfp4"
    return GroupedStorage(
        "quark",
        4,
        group_size(weights.get("group_size"), f"{at}.group_size"),
        symmetric=weights.get("symmetric") is True,
        signed=kind == "int4",
        in_order=export.get("pack_method") == "order",
    )


def compressed(weights: Mapping[str, Any], format: str, at: str) -> GroupedStorage:
    """Read integer weights of a group of compressed-tensors."""
    packed = format == "pack-quantized"
    known = {"type": ("int",), "num_bits": range(2, 9)}
    check_keys(weights, at, {**known, "strategy": ("tensor", "channel", "group")}, required=True)
    orders = (False, True, "weight", "static", "group", "dynamic")
    check_keys(weights, at, {"symmetric": (True, False), "dynamic": (False,), "actorder": orders})
    size = weights.get("group_size") if weights["strategy"] == "group" else -1
    return GroupedStorage(
        "packed" if packed else "int8",
        weights["num_bits"] if packed else 8,
        group_size(size, f"{at}.group_size"),
        symmetric=weights.get("symmetric") is not False,
    )


def group_size(value: Any, at: str) -> int | None:
    """Return the columns of a group, checked; None for -1, a whole row."""
    if value == -1 and type(value) is int:
        return None
    if type(value) is not int or not 0 < value < 1 << 31:
        raise UsageError(f"{at} must be a number above 0, or -1 for whole rows, got {shown(value)}")
    return value

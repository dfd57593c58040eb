"""Configurations of AutoRound, as those of the methods whose tensors it writes.

=========================  ================================================================
packing_format             tensors
=========================  ================================================================
auto_round:auto_gptq       those of gptq, zero points in its first version
auto_round,                the same with zero points in the second version
auto_round:gptqmodel
auto_round:auto_awq        those of awq
auto_round:llm_compressor  those of compressed-tensors: mxfp4, mxfp8, nvfp4, int8
auto_round:fp8,            those of fp8
auto_round:fp8_static
=========================  ================================================================

Settings of single modules (`extra_config`) are by their names, or by regular expressions that match
anywhere in one; 16 bits or more are not quantized.

Source: AutoRound 0.16, inference/backend.py and inference/convert_model.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nbflow.checkpoint.grouped_config import check_keys
from nbflow.checkpoint.module_patterns import exact, regular
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

METHODS = ("auto-round", "intel/auto-round")
_PACKED = {
    None: ("gptq", "gptq"),
    "auto_round:auto_gptq": ("gptq", "gptq"),
    "auto_round": ("gptq", "gptq_v2"),
    "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round:auto_awq": ("awq", "gemm"),
}
"""packing_format of integers -> method, and its version."""
_COMPRESSED: dict[tuple[Any, Any], dict[str, Any]] = {
    ("mx_fp", 4): {"format": "mxfp4-pack-quantized", "type": "float", "group_size": 32},
    ("nv_fp", 4): {"format": "nvfp4-pack-quantized", "type": "float", "group_size": 16},
    ("mx_fp", 8): {"format": "mxfp8-quantized", "type": "float", "strategy": "group"},
    ("int", 8): {"format": "int-quantized", "type": "int", "strategy": "channel"},
}
"""Type and bits -> settings of compressed-tensors."""
_FLOAT_BITS = 16  # weights of so many bits or more are not quantized
_NAME = re.compile(r"[\w.-]*\.\d+\.[\w.-]+\Z")
"""Name of one module; texts without the number of a layer match names that contain them."""


def translated(
    table: Mapping[str, Any], at: str
) -> tuple[dict[str, Any], list[tuple[re.Pattern[str], dict[str, Any] | None]]]:
    """Return the configuration of another method, and those of single modules.

    None stands for modules that are not quantized.

    Examples
    --------
    >>> found, _ = translated({"bits": 4, "group_size": 128, "sym": True}, "config")
    >>> found["quant_method"], found["bits"], found["checkpoint_format"]
    ('gptq', 4, 'gptq')
    """
    single = table.get("extra_config") or {}
    if not isinstance(single, Mapping):
        raise UsageError(f"{at}.extra_config must be a table of modules, got {shown(single)}")
    rules: list[tuple[re.Pattern[str], dict[str, Any] | None]] = []
    for text, settings in single.items():
        where = f"{at}.extra_config.{shown(text)}"
        if not isinstance(settings, Mapping):
            raise UsageError(f"{where} must be a table, got {shown(settings)}")
        is_name = _NAME.match(text) is not None
        pattern = exact(text) if is_name else regular(f".*(?:{text})", f"{at}.extra_config")
        whole = {**table, **{key: v for key, v in settings.items() if v is not None}}
        rules.append((pattern, None if _is_float(whole) else _one(whole, where)))
    rules.sort(key=lambda rule: rule[0].pattern.startswith(".*"))  # names count first
    return _one(table, at), rules


def _is_float(table: Mapping[str, Any]) -> bool:
    bits = table.get("bits")
    return isinstance(bits, int) and bits >= _FLOAT_BITS


def _one(table: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Return the configuration of another method for a table without settings of modules."""
    if table.get("rotation_config"):
        raise UsageError(f"{at}.rotation_config: rotated activations are not supported")
    packing, kind = table.get("packing_format"), table.get("data_type", "int")
    bits, sym = table.get("bits"), table.get("sym")
    if packing in ("auto_round:fp8", "auto_round:fp8_static"):
        check_keys(table, at, {"bits": (8,), "data_type": ("fp",)}, required=True)
        return {"quant_method": "fp8", "weight_block_size": table.get("weight_block_size")}
    if packing == "auto_round:llm_compressor":
        known = tuple(kind for kind, _ in _COMPRESSED)
        check_keys(table, at, {"data_type": known, "bits": (4, 8)}, required=True)
        if (kind, bits) not in _COMPRESSED:
            raise UsageError(f"{at}: {kind} of {bits} bits is not supported")
        weights: dict[str, Any] = {"num_bits": bits, "group_size": 32, "symmetric": sym}
        weights |= _COMPRESSED[kind, bits]
        format = weights.pop("format")
        groups = {"all": {"weights": weights}}
        return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
    check_keys(table, at, {"packing_format": [name for name in _PACKED if name]})
    check_keys(table, at, {"data_type": ("int",)})
    if packing is None and sym is not True:  # symmetric zero points are checked
        raise UsageError(f"{at}.packing_format is needed where sym is not true")
    method, version = _PACKED[packing]
    named = "version" if method == "awq" else "checkpoint_format"
    facts = {key: table.get(key) for key in ("bits", "group_size", "sym", "desc_act")}
    return {"quant_method": method, named: version, **facts}

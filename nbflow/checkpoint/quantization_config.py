"""``quantization_config`` of config.json: storage of quantized checkpoints.

==================  ================================  =============================================
quant_method        tensors                           value of a weight
==================  ================================  =============================================
fp8                 X.weight in FP8, X.weight_scale   code * scale of its block of
                    or X.weight_scale_inv             ``weight_block_size``; without one, of its
                                                      row or of the tensor
fbgemm_fp8          X.weight, X.weight_scale          code * scale of its row
compressed-tensors  X.weight, X.weight_scale          the same, by ``strategy``: tensor, channel,
(float-quantized)                                     group or block
mxfp4               X_blocks, X_scales of bytes       those of the format of that name
gptq, awq           X.qweight, X.qzeros, X.scales     (code - zero point) * scale of its group
compressed-tensors  X.weight_packed, X.weight_scale,  the same, by ``strategy``: tensor, channel
(pack-quantized)    X.weight_zero_point               or group
compressed-tensors  X.weight int8, X.weight_scale     the same
(int-quantized)
bitsandbytes        X.weight int8, X.SCB              code * scale / 127 of its row
(8 bits)
bitsandbytes        X.weight, X.weight.absmax ...     codebook[code] * scale of its block
(4 bits)
modelopt (NVFP4),   X.weight or X.weight_packed,      value(code) * scale of its block
compressed-tensors  X.weight_scale, a scale of the
(FP4)               tensor
modelopt (others)   X.weight, X.weight_scale          as for the method of the same kind
hqq                 X.W_q, X.scale, X.zero            (code - zero) * scale, zero a float
torchao             X._weight_qdata, X._weight_scale  as for the method of the same kind
quark               X.weight, X.weight_scale,         the same
                    X.weight_zero_point
auto-round          those of another method           (`auto_round_config`)
==================  ================================  =============================================

`grouped_tensors`, `codebook_tensors`, `fp4_tensors`, `hqq_tensors` and `torchao_tensors` have the
layouts from gptq on, `column_scales` factors of columns (X.pre_quant_scale).

"scale_inv" is a factor, too, despite its name.  Scales of activations, keys and values do not
affect weights and are ignored.

Sources: transformers 5.23, ``integrations/finegrained_fp8.py`` (Fp8Dequantize) and
``integrations/mxfp4.py``; compressed-tensors 0.20, ``quantization/lifecycle/forward.py``; for
blocks at the edges, DeepSeek-V3's ``inference/kernel.py`` (weight_dequant).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbflow.checkpoint import auto_round_config
from nbflow.checkpoint.codebook_tensors import KINDS as CODEBOOK_KINDS
from nbflow.checkpoint.codebook_tensors import planned_format as planned_codebook_format
from nbflow.checkpoint.codebook_tensors import with_codebooks
from nbflow.checkpoint.column_scales import with_column_scales
from nbflow.checkpoint.dequantize_scaled import MXFP4_BLOCK, Scaled
from nbflow.checkpoint.fp4_tensors import NAMES as FP4_METHODS
from nbflow.checkpoint.fp4_tensors import with_fp4
from nbflow.checkpoint.grouped_config import (
    awq,
    bitsandbytes,
    check_keys,
    compressed,
    gptq,
    gptq_modules,
    hqq,
    quark,
    torchao,
)
from nbflow.checkpoint.grouped_tensors import GroupedStorage, grid_block, with_groups
from nbflow.checkpoint.hqq_tensors import with_hqq
from nbflow.checkpoint.module_patterns import (
    EVERY,
    LONGEST_NAME,
    NONE,
    ModuleNames,
    exact,
    left_out,
    target,
)
from nbflow.checkpoint.strided_read import is_contiguous
from nbflow.checkpoint.torchao_tensors import with_torchao
from nbflow.checkpoint.weight_file import TensorEntry
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.e2m1 import E2M1_G16_F32
from nbflow_kernels.formats.grouped import group_format

KEY = "quantization_config"
CONFIG_KEYS = (KEY, "compression_config")
"""Keys of the quantization config; the latter is from early versions of compressed-tensors."""
METHODS = (
    "fp8",
    "fbgemm_fp8",
    "compressed-tensors",
    "mxfp4",
    "gptq",
    "awq",
    "bitsandbytes",
    "modelopt",
    "hqq",
    "torchao",
    "quark",
    *auto_round_config.METHODS,
)
BLOCK_FORMATS = {
    "mxfp4": "mxfp4",
    "modelopt": E2M1_G16_F32.name,
    "compressed-tensors": E2M1_G16_F32.name,
    "compressed-mxfp4": "mxfp4",
    "quark-mxfp4": "mxfp4",
}
"""Format that matrices of a storage are read as; FP8 is read as float32."""
FLOAT8 = ("f8_e4m3", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz")
"""Element types of FP8 weights."""
_COMPRESSED = (
    "float-quantized", "naive-quantized", "pack-quantized", "int-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
_DESCRIBED = {"hqq": hqq, "torchao": torchao}
_JOIN = {"codebook": with_codebooks, "hqq": with_hqq, "torchao": with_torchao}
"""Storage whose tensors describe themselves -> function that joins them."""
_SCALE_TYPES = ("f32", "bf16", "f16", "f8_e8m0")
_WEIGHT_SCALES = ("_scale_inv", "_scale")
"""Suffixes of the scales of a weight."""
_OTHER_SCALES = (
    ".input_scale", ".input_scale_ub", ".output_scale", ".activation_scale", ".q_scale", ".k_scale",
    ".v_scale",
)  # fmt: skip
"""Suffixes of scales of activations, keys and values, which do not change weights."""
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Quantization:
    """Storage of a checkpoint's matrices."""

    format: str
    """"fp8", "grouped", "codebook", "hqq", "torchao", or a key of `BLOCK_FORMATS`."""
    block: tuple[int, int] | None = None
    """Rows and columns per scale; None: a row, or the whole tensor."""
    grouped: GroupedStorage | None = None
    """Storage of grouped integers."""
    planned: tuple[int, int | None] | str | None = None
    """Bits and group size, format, or codebook, of tensors that describe themselves, by the
    configuration."""
    modules: tuple[tuple[re.Pattern[str], Quantization | None], ...] = ()
    """Patterns of names of modules with settings of their own, the first that matches counts;
    None: not quantized."""
    left_out: ModuleNames = NONE
    """Modules that are not quantized.  The tensors show that; this is for plans without them."""

    def of(self, module: str) -> Quantization | None:
        """Return the storage of a module's matrix, or None if it is not quantized."""
        if self.modules and len(module) > LONGEST_NAME:
            raise UsageError(
                f"the name of a module has {len(module)} characters; with settings of single "
                f"modules at most {LONGEST_NAME} are matched: {shown(module)}"
            )
        found = (settings for pattern, settings in self.modules if pattern.match(module))
        return next(found, replace(self, modules=()))

    def by_config(self, module: str) -> Quantization | None:
        """Return the storage of a module's matrix, or None, by the configuration alone."""
        return None if module in self.left_out else self.of(module)

    def planned_format(self, n_columns: int, dtype: object) -> str:
        """Return the format of a matrix by the configuration alone.

        `dtype` is that of config.json.  FP8 counts as float32, to which the loader dequantizes
        it, and 4-bit codebooks have blocks of 64, the default of their library.
        """
        if self.grouped is not None:
            return self.grouped.planned_format(n_columns, dtype)
        if self.planned in CODEBOOK_KINDS:
            return planned_codebook_format(str(self.planned), n_columns)
        if isinstance(self.planned, str):
            return self.planned
        if self.planned is not None:
            bits, group = self.planned
            block = grid_block(group or n_columns, n_columns)
            scale_type = "f16" if dtype == "float16" else "f32"
            return group_format(bits, block, scale_type, False, True).name if block else "f32"
        return BLOCK_FORMATS.get(self.format, "f32")


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Return the storage of matrices that a configuration states, or None.

    `where` begins the messages of errors about values that are not supported.

    Examples
    --------
    >>> fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    >>> found = read_quantization({"quantization_config": fp8}, "config.json")
    >>> found.format, found.block
    ('fp8', (128, 128))
    """
    key = next((key for key in CONFIG_KEYS if config.get(key) is not None), None)
    if key is None:
        return None
    table = config[key]
    at = f"{where}: {key}"
    if not isinstance(table, Mapping):
        raise UsageError(f"{at} must be a table, got {shown(table)}")
    check_keys(table, at, {"quant_method": METHODS}, required=True)
    method = table["quant_method"]
    return replace(_of_method(method, table, at), left_out=left_out(method, table, at))


def _of_method(method: str, table: Mapping[str, Any], at: str) -> Quantization:
    """Read the configuration of a method."""
    if method == "fp8":
        return _fp8(table, at)
    if method == "compressed-tensors":
        return _compressed(table, at)
    if method == "gptq":
        return _grouped(gptq(table, at), gptq_modules(table, at))
    if method == "awq":
        return _grouped(awq(table, at))
    if method == "modelopt":
        return _modelopt(table, at)
    if method == "bitsandbytes":
        storage = bitsandbytes(table, at)
        if storage is not None:
            return Quantization("grouped", grouped=storage)
        return Quantization("codebook", planned=table.get("bnb_4bit_quant_type", "fp4"))
    if method in _DESCRIBED:
        return Quantization(method, planned=_DESCRIBED[method](table, at))
    if method == "quark":
        return _grouped(*quark(table, at))
    if method in auto_round_config.METHODS:
        of_all, single = auto_round_config.translated(table, at)
        rules = [
            (name, None if one is None else _of_method(one["quant_method"], one, at))
            for name, one in single
        ]
        return replace(_of_method(of_all["quant_method"], of_all, at), modules=tuple(rules))
    return Quantization("mxfp4" if method == "mxfp4" else "fp8")


def _grouped(
    storage: GroupedStorage | str,
    modules: Sequence[tuple[re.Pattern[str], GroupedStorage | str | None]] = (),
) -> Quantization:
    """Return a storage with those of single modules; a str is the name of a format."""

    def one(found: GroupedStorage | str) -> Quantization:
        return (
            Quantization(found) if isinstance(found, str) else Quantization("grouped", None, found)
        )

    rules = [(name, None if found is None else one(found)) for name, found in modules]
    return replace(one(storage), modules=tuple(rules))


_MODELOPT = {
    "FP8": Quantization("fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": Quantization("fp8"),
    "fp8_pb_wo": Quantization("fp8", (128, 128)),
    "MXFP8": Quantization("fp8", (1, MXFP4_BLOCK)),
    "NVFP4": Quantization("modelopt"),
    "NVFP4_AWQ": Quantization("modelopt"),
    "W4A16_NVFP4": Quantization("modelopt"),
    "W4A8_NVFP4_FP8": Quantization("modelopt"),
    "W4A8_MXFP4_FP8": Quantization("quark-mxfp4"),
    "W8A16": Quantization("grouped", grouped=GroupedStorage("int8", 8, symmetric=True)),
    "W8A8_SQ_PER_CHANNEL": Quantization(
        "grouped", grouped=GroupedStorage("int8", 8, symmetric=True)
    ),
    **{
        name: Quantization("grouped", grouped=GroupedStorage("row_pairs", 4, 128, symmetric=True))
        for name in ("W4A16_AWQ", "W4A8_AWQ")
    },
}
"""Algorithms of ModelOpt; NVFP4_SVD adds products of small matrices."""


def _modelopt(table: Mapping[str, Any], at: str) -> Quantization:
    """Read quant_method modelopt."""
    check_keys(table, at, {"quant_algo": (*_MODELOPT, "MIXED_PRECISION")}, required=True)
    if table["quant_algo"] != "MIXED_PRECISION":
        return _MODELOPT[table["quant_algo"]]
    layers = table.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise UsageError(f"{at}.quantized_layers must be a table of modules, got {shown(layers)}")
    rules: list[tuple[re.Pattern[str], Quantization | None]] = []
    for name, settings in layers.items():
        where = f"{at}.quantized_layers.{name}"
        if not isinstance(settings, Mapping):
            raise UsageError(f"{where} must be a table, got {shown(settings)}")
        check_keys(settings, where, {"quant_algo": tuple(_MODELOPT)}, required=True)
        rules.append((exact(name), _MODELOPT[settings["quant_algo"]]))
    return Quantization("modelopt", modules=(*rules, (EVERY, None)))


def _fp8(table: Mapping[str, Any], at: str) -> Quantization:
    """Read quant_method fp8."""
    known = {
        "activation_scheme": ("dynamic", "static"),
        "fmt": ("e4m3", "e5m2"),
        "scale_fmt": ("float", "ue8m0"),
        "expert_dtype": ("fp8",),
    }
    check_keys(table, at, known)
    return Quantization("fp8", _block(table.get("weight_block_size"), f"{at}.weight_block_size"))


def _block(value: Any, at: str) -> tuple[int, int] | None:
    """Return rows and columns of a block, checked."""
    if value is None:
        return None
    numbers = value if isinstance(value, list) else []
    if len(numbers) != 2 or any(type(n) is not int or not 0 < n < 1 << 31 for n in numbers):
        raise UsageError(f"{at} must be two numbers above 0, rows and columns, got {shown(value)}")
    return numbers[0], numbers[1]


def _compressed(table: Mapping[str, Any], at: str) -> Quantization:
    """Read quant_method compressed-tensors."""
    known = {
        "format": _COMPRESSED,
        "quantization_status": ("compressed", "frozen"),
    }
    check_keys(table, at, known)
    sparsity = table.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        raise UsageError(f"{at}.sparsity_config must be a table, got {shown(sparsity)}")
    check_keys(sparsity, f"{at}.sparsity_config", {"format": ("dense",)})
    if table.get("transform_config"):
        _check_transforms(table["transform_config"], f"{at}.transform_config")
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UsageError(f"{at}.config_groups must be a table of groups, got {shown(groups)}")
    format = str(table.get("format") or "")
    found, targets = [], []
    for name, group in groups.items():
        where = f"{at}.config_groups.{name}"
        found.append(_group(group, format, where))
        names = group.get("targets") or ["Linear"]
        if not isinstance(names, list):
            raise UsageError(f"{where}.targets must be a list of names, got {shown(names)}")
        targets += [(target(text, f"{where}.targets"), found[-1]) for text in names]
    if len(set(found)) == 1:
        return found[0]
    targets.sort(key=lambda each: each[0][:2])
    rules = [(pattern, settings) for (_, _, pattern), settings in targets]
    return replace(found[0], modules=(*rules, (EVERY, None)))


def _check_transforms(table: Any, at: str) -> None:
    """Raise for transforms of activations; those of weights (SpinQuant's R1, R2) are done."""
    groups = table.get("config_groups") if isinstance(table, Mapping) else None
    if not isinstance(groups, Mapping):
        raise UsageError(f"{at}.config_groups must be a table of groups, got {shown(table)}")
    for name, group in groups.items():
        places = group.get("apply") if isinstance(group, Mapping) else None
        for place in places if isinstance(places, list) else [None]:
            if not isinstance(place, Mapping):
                raise UsageError(f"{at}.{shown(name)}.apply must be a list of tables")
            where = {"location": ("weight_input", "weight_output")}
            check_keys(place, f"{at}.{shown(name)}.apply", where, required=True)


def _group(group: Any, format: str, at: str) -> Quantization:
    """Return the storage of one group of compressed-tensors."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise UsageError(f"{at}.weights must be a table, got {shown(weights)}")
    formats = tuple(name for name in _COMPRESSED if name != "mixed-precision")
    check_keys(group, at, {"format": formats}, required=format == "mixed-precision")
    format = group.get("format") or format
    at = f"{at}.weights"
    if format.endswith("fp4-pack-quantized"):
        check_keys(weights, at, {"type": ("float",), "num_bits": (4,)}, required=True)
        check_keys(weights, at, {"group_size": (16, 32), "symmetric": (True,), "dynamic": (False,)})
        return Quantization(f"compressed-{'mxfp4' if format.startswith('mx') else 'tensors'}")
    if format in ("pack-quantized", "int-quantized"):
        return Quantization("grouped", grouped=compressed(weights, format, at))
    known = {
        "type": ("float",),
        "num_bits": (8,),
        "strategy": ("tensor", "channel", "group", "block"),
    }
    check_keys(weights, at, known, required=True)
    check_keys(weights, at, {"symmetric": (True,), "dynamic": (False,)})
    if format == "mxfp8-quantized":
        check_keys(weights, at, {"strategy": ("group",), "group_size": (MXFP4_BLOCK,)}, True)
    if weights["strategy"] == "block":
        shape = _block(weights.get("block_structure") or [], f"{at}.block_structure")
        return Quantization("fp8", shape)
    if weights["strategy"] == "group":
        return Quantization("fp8", _block([1, weights.get("group_size")], f"{at}.group_size"))
    return Quantization("fp8")


def with_scales(
    entries: Sequence[TensorEntry], quantization: Quantization
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Join tensors with their scales; return the tensors with values, and the scales."""
    others = [entry for entry in entries if entry.name.endswith(_OTHER_SCALES)]
    entries = [entry for entry in entries if not entry.name.endswith(_OTHER_SCALES)]
    if not quantization.modules:
        values, scales = with_column_scales(*_with_scales(entries, quantization))
        return values, scales + others
    parts: dict[Quantization | None, list[TensorEntry]] = {}
    for entry in entries:
        found = quantization.of(entry.name.rpartition(".")[0])
        parts.setdefault(found, []).append(entry)
    values = parts.pop(None, [])
    scales = others
    for settings, some in parts.items():
        assert settings is not None
        joined, rest = _with_scales(some, settings)
        values, scales = values + joined, scales + rest
    place = {entry.name: i for i, entry in enumerate(entries)}
    values.sort(key=lambda entry: place.get(entry.name, len(place)))
    return with_column_scales(values, scales)


def _with_scales(
    entries: Sequence[TensorEntry], quantization: Quantization
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Join the tensors of modules with the same settings."""
    if quantization.grouped is not None:
        return with_groups(entries, quantization.grouped)
    if quantization.format in _JOIN:
        return _JOIN[quantization.format](entries)
    if quantization.format in FP4_METHODS:
        return with_fp4(entries, quantization.format)
    held = {entry.name: entry for entry in entries}
    join = _with_fp8_scales if quantization.format == "fp8" else _with_mxfp4_scales
    joined = {entry.name: join(entry, held, quantization.block) for entry in entries}
    scales = {new.scaled.scales.name for new in joined.values() if new.scaled is not None}
    values = [new for name, new in joined.items() if name not in scales]
    return values, [held[name] for name in held if name in scales]


def _with_fp8_scales(
    entry: TensorEntry, held: Mapping[str, TensorEntry], block: tuple[int, int] | None
) -> TensorEntry:
    """Return an FP8 tensor with scales as float32; others unchanged."""
    if entry.dtype not in FLOAT8:
        return entry
    where = f"{entry.file.path}: tensor {shown(entry.name)}"
    names = [entry.name + ending for ending in _WEIGHT_SCALES]
    scales = next((held[name] for name in names if name in held), None)
    if scales is None:
        raise UsageError(
            f"{where} is stored as {entry.dtype} and needs scales, {' or '.join(names)}, which are "
            "missing; open the whole checkpoint, not one file of it"
        )
    if scales.dtype == "u8":  # of MXFP8
        scales = replace(scales, dtype="f8_e8m0")
    if scales.dtype not in _SCALE_TYPES:
        raise UsageError(f"{where}: scales must be floats, got {scales.dtype}")
    if len(entry.shape) != 2:
        raise UsageError(f"{where}: FP8 with scales must have two dimensions, got {entry.shape}")
    (n_rows, n_columns), n_scales = entry.shape, math.prod(scales.shape)
    if block is None:
        block = (max(1, n_rows), max(1, n_columns)) if n_scales == 1 else (1, max(1, n_columns))
    grid = -(-n_rows // block[0]), -(-n_columns // block[1])
    if _squeezed(scales.shape) != _squeezed(grid):
        raise UsageError(
            f"{where} of shape {entry.shape} must have scales of shape {grid}, one for "
            f"{block[0]} x {block[1]} weights, got {scales.shape}"
        )
    scaled = Scaled(entry, _as_matrix(scales, grid), block)
    return replace(entry, dtype="f32", scaled=scaled)


def _as_matrix(entry: TensorEntry, shape: tuple[int, int]) -> TensorEntry:
    """Return a contiguous tensor reshaped to a matrix."""
    if entry.strides is not None and not is_contiguous(entry.shape, entry.strides):
        raise UsageError(
            f"{entry.file.path}: tensor {shown(entry.name)} must be contiguous, got "
            f"strides {entry.strides}"
        )
    return replace(entry, shape=shape, strides=None)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _with_mxfp4_scales(
    entry: TensorEntry, held: Mapping[str, TensorEntry], block: tuple[int, int] | None
) -> TensorEntry:
    """Return an MXFP4 tensor with scales as one; others unchanged."""
    stem = entry.name.removesuffix(_BLOCKS)
    scales = held.get(stem + _SCALES)
    if stem == entry.name or scales is None:
        return entry
    where = f"{entry.file.path}: tensor {shown(entry.name)}"
    shape = entry.shape
    if (entry.dtype, scales.dtype) != ("u8", "u8") or len(shape) < 3 or shape[-1] != 16:
        raise UsageError(
            f"{where}: MXFP4 must be bytes (..., rows, blocks, 16), got {entry.dtype} {shape}"
        )
    if scales.shape != shape[:-1]:
        raise UsageError(f"{where}: scales must have shape {shape[:-1]}, got {scales.shape}")
    n_rows, n_blocks = math.prod(shape[:-2]), shape[-2]
    codes = _as_matrix(entry, (n_rows, 16 * n_blocks))
    scaled = Scaled(codes, _as_matrix(scales, (n_rows, n_blocks)), (1, MXFP4_BLOCK))
    new_shape = (*shape[:-2], MXFP4_BLOCK * n_blocks)
    return replace(entry, dtype="mxfp4", shape=new_shape, strides=None, scaled=scaled)

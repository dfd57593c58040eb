"""``quantization_config`` of config.json: storage of FP8 and MXFP4 checkpoints.

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
==================  ================================  =============================================

"scale_inv" is a factor, too, despite its name.  Scales of activations, keys and values do not
affect weights and are ignored.

Sources: transformers 5.23, ``integrations/finegrained_fp8.py`` (Fp8Dequantize) and
``integrations/mxfp4.py``; compressed-tensors 0.20, ``quantization/lifecycle/forward.py``; for
blocks at the edges, DeepSeek-V3's ``inference/kernel.py`` (weight_dequant).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbflow.checkpoint.dequantize_scaled import MXFP4_BLOCK
from nbflow.checkpoint.strided_read import is_contiguous
from nbflow.checkpoint.weight_file import Scaled, TensorEntry
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

KEY = "quantization_config"
CONFIG_KEYS = (KEY, "compression_config")
"""Keys of the quantization config; the latter is from early versions of compressed-tensors."""
METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4")
FLOAT8 = ("f8_e4m3", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz")
"""Element types of FP8 weights."""
_SCALE_TYPES = ("f32", "bf16", "f16", "f8_e8m0")
_WEIGHT_SCALES = ("_scale_inv", "_scale")
"""Suffixes of the scales of a weight."""
_OTHER_SCALES = (
    ".input_scale", ".input_scale_ub", ".output_scale", ".activation_scale", ".q_scale", ".k_scale",
    ".v_scale",
)  # fmt: skip
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Quantization:
    """Storage of a checkpoint's matrices."""

    format: str
    """``"fp8"`` or ``"mxfp4"``."""
    block: tuple[int, int] | None = None
    """Rows and columns per scale; None: a row, or the whole tensor."""


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Return the storage of matrices that a configuration states, or None.

    `where` begins the messages of errors about values that are not supported.

    Examples
    --------
    >>> fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    >>> read_quantization({"quantization_config": fp8}, "config.json")
    Quantization(format='fp8', block=(128, 128))
    """
    key = next((key for key in CONFIG_KEYS if config.get(key) is not None), None)
    if key is None:
        return None
    table = config[key]
    at = f"{where}: {key}"
    if not isinstance(table, Mapping):
        raise UsageError(f"{at} must be a table, got {shown(table)}")
    _check(table, at, {"quant_method": METHODS}, required=True)
    method = table["quant_method"]
    if method == "fp8":
        return _fp8(table, at)
    if method == "compressed-tensors":
        return _compressed(table, at)
    return Quantization("mxfp4" if method == "mxfp4" else "fp8")


def _check(
    table: Mapping[str, Any], at: str, known: Mapping[str, Sequence[Any]], required: bool = False
) -> None:
    """Raise for the first key with an unsupported value, or missing if required."""
    for key, allowed in known.items():
        value = table.get(key)
        if (value is not None or required) and value not in allowed:
            raise UsageError(
                f"{at}.{key} = {shown(value)} is not supported; it must be "
                + " or ".join(map(repr, allowed))
            )


def _fp8(table: Mapping[str, Any], at: str) -> Quantization:
    """Read quant_method fp8."""
    known = {
        "activation_scheme": ("dynamic", "static"),
        "fmt": ("e4m3", "e5m2"),
        "scale_fmt": ("float", "ue8m0"),
        "expert_dtype": ("fp8",),
    }
    _check(table, at, known)
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
        "format": ("float-quantized", "naive-quantized"),
        "quantization_status": ("compressed", "frozen"),
    }
    _check(table, at, known)
    sparsity = table.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        raise UsageError(f"{at}.sparsity_config must be a table, got {shown(sparsity)}")
    _check(sparsity, f"{at}.sparsity_config", {"format": ("dense",)})
    if table.get("transform_config"):
        raise UsageError(f"{at}.transform_config: transformed weights are not supported")
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UsageError(f"{at}.config_groups must be a table of groups, got {shown(groups)}")
    blocks = {name: _group(g, f"{at}.config_groups.{name}") for name, g in groups.items()}
    if len(set(blocks.values())) > 1:
        raise UsageError(
            f"{at}.config_groups: groups with different blocks are not supported, got "
            + ", ".join(f"{name} {block}" for name, block in blocks.items())
        )
    return Quantization("fp8", next(iter(blocks.values())))


def _group(group: Any, at: str) -> tuple[int, int] | None:
    """Return the block of one group of compressed-tensors."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise UsageError(f"{at}.weights must be a table, got {shown(weights)}")
    at = f"{at}.weights"
    known = {
        "type": ("float",),
        "num_bits": (8,),
        "strategy": ("tensor", "channel", "group", "block"),
    }
    _check(weights, at, known, required=True)
    _check(weights, at, {"symmetric": (True,), "dynamic": (False,)})
    if weights["strategy"] == "block":
        return _block(weights.get("block_structure") or [], f"{at}.block_structure")
    if weights["strategy"] == "group":
        return _block([1, weights.get("group_size")], f"{at}.group_size")
    return None


def with_scales(
    entries: Sequence[TensorEntry], quantization: Quantization
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Join tensors with their scales; return the tensors with values, and the scales."""
    held = {entry.name: entry for entry in entries}
    join = _with_fp8_scales if quantization.format == "fp8" else _with_mxfp4_scales
    joined = {entry.name: join(entry, held, quantization.block) for entry in entries}
    scales = {new.scaled.scales.name for new in joined.values() if new.scaled is not None}
    if quantization.format == "fp8":
        scales |= {name for name in held if name.endswith(_OTHER_SCALES)}
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

"""Checkpoints of other quantizers, packed from integers by the published layouts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from nbflow_kernels.formats.nf4_fp4 import NF4
from nbflow_specs import CHECKPOINTS

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Columns of a word of AWQ, from its lowest bits."""


def pack_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack rows of numbers (n, m) into int32 words (n, m * bits / 32), lowest bits first."""
    single = (numbers[..., None] >> np.arange(bits)) & 1
    data = np.packbits(single.reshape(len(numbers), -1).astype(np.uint8), axis=1, bitorder="little")
    return data.view("<i4")


def round_to_nearest(
    weight: np.ndarray, bits: int, group: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes (N, K), float16 scales and zero points (N, groups)."""
    groups = weight.reshape(len(weight), -1, group)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    top = 2**bits - 1
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    scale = ((high - low) / top + 1e-6).astype(np.float16)
    wide = scale.astype(np.float32)
    zero = np.full(scale.shape, (top + 1) // 2) if symmetric else np.rint(-low / wide).astype(int)
    zero = np.clip(zero, 1, top)  # GPTQ's first layout cannot hold 0
    codes = np.rint(groups / wide[..., None]) + zero[..., None]
    return np.clip(codes, 0, top).astype(np.int64).reshape(weight.shape), scale, zero


def gptq(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int
) -> dict[str, np.ndarray]:
    """Return the tensors of a matrix of AutoGPTQ."""
    n_columns = codes.shape[1]
    return {
        "qweight": np.ascontiguousarray(pack_words(codes, bits).T),
        "qzeros": pack_words(zero.T - 1, bits),
        "scales": np.ascontiguousarray(scale.T),
        "g_idx": (np.arange(n_columns) // (n_columns // scale.shape[1])).astype(np.int32),
    }


def act_order(module: str, n_columns: int, group: int) -> np.ndarray:
    """Return the group of each column of a module's matrix, as GPTQ's act-order may give it.

    Modules with the same inputs share it, except v_proj.
    """
    inputs = {"q_proj": 0, "k_proj": 0, "v_proj": 1, "o_proj": 2, "down_proj": 3, "w2": 4}
    rng = np.random.default_rng(inputs.get(module, 5))
    return (rng.permutation(n_columns) // group).astype(np.int32)


def factors_of_columns(module: str, n_columns: int) -> np.ndarray:
    """Return factors of a module's columns, as AWQ of ModelOpt may find them; see `act_order`."""
    inputs = {"q_proj": 0, "k_proj": 0, "v_proj": 1}
    rng = np.random.default_rng([7, inputs.get(module, 2)])
    return rng.uniform(0.5, 2.0, n_columns).astype(np.float32)


def row_pairs(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int
) -> dict[str, np.ndarray]:
    """Return the tensors of a matrix of ModelOpt (W4A16_AWQ) without the factors."""
    signed = (codes - 8).astype(np.uint8) & 15
    return {
        "weight": signed[::2] | signed[1::2] << 4,
        "weight_scale": scale.astype(np.float32, "C"),
    }


def awq(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """Return the tensors of a matrix of AutoAWQ (GEMM)."""

    def words(numbers: np.ndarray) -> np.ndarray:
        return pack_words(
            numbers.reshape(len(numbers), -1, 8)[..., AWQ_ORDER].reshape(numbers.shape), bits
        )

    return {
        "qweight": words(codes.T),
        "qzeros": words(zero.T),
        "scales": np.ascontiguousarray(scale.T),
    }


def hqq(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """Return the tensors of a matrix of HQQ in 4 bits, axis 1, as transformers saves them."""
    view = codes.reshape(scale.size, -1).astype(np.uint8)
    high, low = np.split(view, 2)
    return {
        "W_q": high << 4 | low,
        "scale": scale.reshape(-1, 1),
        "zero": zero.astype(np.float16).reshape(-1, 1),
        "shape": np.array(codes.shape),
        "packing": np.frombuffer(b"4bit_u8", np.uint8),
        "nbits": np.int32(bits),
        "axis": np.int32(1),
        "group_size": np.int32(view.shape[1]),
        "view_as_float": np.uint8(0),
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False},
    "gptq_act_order": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "sym": False,
        "desc_act": True,
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
    "modelopt_awq": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
    "nf4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    },
    "hqq": {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}},
    },
}


def nf4(weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the tensors of a matrix of bitsandbytes, blocks of 64, and its weights."""
    table = np.array(NF4, np.float32)
    blocks = weight.reshape(-1, 64)
    scale = np.abs(blocks).max(axis=1)
    codes = np.abs(blocks[..., None] / scale[:, None, None] - table).argmin(axis=2).astype(np.uint8)
    facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": weight.shape}
    pairs = codes.reshape(-1, 2)
    tensors = {
        "": (pairs[:, :1] << 4) | pairs[:, 1:],
        ".absmax": scale,
        ".quant_map": table,
        ".quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(facts).encode(), np.uint8),
    }
    return tensors, (table[codes] * scale[:, None]).reshape(weight.shape)


LAYOUTS = {
    "gptq": gptq, "gptq_act_order": gptq, "awq": awq, "hqq": hqq, "modelopt_awq": row_pairs,
}  # fmt: skip


MATRICES = re.compile(r".*(_proj|\.w[123])\.weight")
TINY_PYTHON = CHECKPOINTS / "tiny_python"


def write_packed(
    folder: Path, method: str, source: Path = TINY_PYTHON, group: int = 64
) -> tuple[Path, Path]:
    """Write a model packed by a method, and with the same values as floats."""
    config, tensors = CONFIGS[method], load_file(source / "model.safetensors")
    if "group_size" in config:
        config = config | {"group_size": group}
    packed, plain = {}, {}
    for name, tensor in tensors.items():
        if not MATRICES.fullmatch(name):
            packed[name] = plain[name] = tensor
            continue
        if method == "nf4":
            parts, plain[name] = nf4(tensor.astype(np.float32))
            packed |= {f"{name}{part}": value for part, value in parts.items()}
            continue
        n_columns, stem = tensor.shape[1], name.removesuffix("weight")
        size = math.gcd(group, n_columns) if method == "modelopt_awq" else group
        groups = np.arange(n_columns) // size
        if config.get("desc_act"):
            groups = act_order(stem.split(".")[-2], n_columns, size)
        order = np.argsort(groups, kind="stable")
        wide, factors = tensor.astype(np.float32), np.ones(n_columns, np.float32)
        if method == "modelopt_awq":
            factors = factors_of_columns(stem.split(".")[-2], n_columns)
        wide = (wide / factors)[:, order]
        codes, scale, zero = round_to_nearest(wide, 4, size, method == "modelopt_awq")
        codes = np.ascontiguousarray(codes[:, np.argsort(order)])
        steps = (codes - zero[:, groups]).astype(np.float32)
        values = steps * scale.astype(np.float32)[:, groups]
        plain[name] = np.ascontiguousarray(values * factors)
        parts = LAYOUTS[method](codes, scale, zero, 4)
        if method == "modelopt_awq":
            parts["pre_quant_scale"] = factors
        if config.get("desc_act"):
            parts["g_idx"] = groups
        packed |= {f"{stem}{part}": np.asarray(value) for part, value in parts.items()}
    folders = []
    stated = {"quantization_config": config}
    for kind, some, more in (("packed", packed, stated), ("plain", plain, {})):
        to = folder / kind
        to.mkdir()
        facts = json.loads((source / "config.json").read_text()) | more
        (to / "config.json").write_text(json.dumps(facts))
        if (source / "tokenizer.json").exists():
            (to / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
        save_file(some, to / "model.safetensors")
        folders.append(to)
    return folders[0], folders[1]

"""Whole checkpoints of AutoAWQ and Quark in the layouts and with the keys that they publish.

Each is compared with a model of the same weights as float32.  Sources of names and keys:
transformers 5.24 (integrations/awq.py), vLLM (quantization/quark) and config.json of published
models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_checkpoints import awq, round_to_nearest
from safetensors.numpy import load_file, save_file

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.checkpoint.dtypes import widen
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.e2m1 import LEVELS

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
Tensors = dict[str, np.ndarray]
Packed = tuple[Tensors, np.ndarray]
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    "backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
    "modules_to_fuse": None, "modules_to_not_convert": None,
}  # fmt: skip


def quark(weight: dict[str, Any], pack_method: str = "reorder", **more: Any) -> dict[str, Any]:
    """Return a quantization config of Quark."""
    weight = {
        "ch_axis": 1, "is_dynamic": False, "observer_cls": "PerGroupMinMaxObserver",
        "round_method": "half_even", "scale_type": "float", "scale_format": None, **weight,
    }  # fmt: skip
    settings = {"bias": None, "input_tensors": None, "output_tensors": None, "weight": weight}
    return {
        "quant_method": "quark", "quant_mode": "eager_mode", "algo_config": None,
        "exclude": ["lm_head"], "global_quant_config": {**settings, **more},
        "layer_quant_config": {}, "layer_type_quant_config": {}, "softmax_quant_spec": None,
        "export": {
            "kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": pack_method,
            "weight_format": "real_quantized", "weight_merge_groups": None,
        },
    }  # fmt: skip


def of_awq(weight: np.ndarray) -> Packed:
    codes, scale, zero = round_to_nearest(weight, 4, 32, False)
    steps = (codes - zero.repeat(32, axis=1)).astype(np.float32)
    return awq(codes, scale, zero, 4), steps * scale.astype(np.float32).repeat(32, axis=1)


def of_quark(weight: np.ndarray) -> Packed:
    parts, values = of_awq(weight)
    names = {"qweight": "weight", "qzeros": "weight_zero_point", "scales": "weight_scale"}
    return {names[name]: array for name, array in parts.items()}, values


def of_quark_fp8(weight: np.ndarray) -> Packed:
    """One scale for a matrix, and scales of activations and caches, which are left out."""
    table = widen(np.arange(127, dtype=np.uint8), "f8_e4m3")
    scale = np.abs(weight).max() / table[-1]
    codes = np.abs(np.abs(weight)[..., None] / scale - table).argmin(-1).astype(np.uint8)
    codes |= (weight < 0).astype(np.uint8) << 7
    more = dict.fromkeys(("input_scale", "output_scale"), np.ones((), np.float32))
    return {"weight": codes, "weight_scale": scale, **more}, widen(codes, "f8_e4m3") * scale


def of_quark_mxfp4(weight: np.ndarray) -> Packed:
    """Two codes a byte, and exponents as bytes."""
    table, blocks = np.array(LEVELS, np.float32) / 2, weight.reshape(len(weight), -1, 32)
    exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / 6.0)).astype(np.int32)
    scale = np.ldexp(np.float32(1), exponents)[..., None]
    codes = np.abs((blocks / scale)[..., None] - table).argmin(-1).astype(np.uint8)
    pairs = codes.reshape(len(weight), -1, 2)
    parts = {
        "weight": pairs[..., 0] | pairs[..., 1] << 4,
        "weight_scale": (exponents + 127).astype(np.uint8),
    }
    return parts, (table[codes] * scale).reshape(weight.shape)


@dataclass(frozen=True)
class Case:
    """A checkpoint: family, sizes in place of the golden model's, how it is packed, and stored."""

    family: str
    sizes: dict[int, int]
    config: dict[str, Any]
    pack: Callable[[np.ndarray], Packed]
    format: str
    divides: str = "none"
    """Module that reads divided activations."""


GROUPS = {"qscheme": "per_group", "group_size": 32}
LLAMA = {12: 32, 36: 96, 56: 128}
CASES = {
    "awq_scaled_activation": Case(
        "starcoder2", {8: 16, 16: 32, 32: 64, 56: 128}, AWQ, of_awq, "uint4_g32", "c_proj"
    ),
    "awq_experts": Case(
        "mixtral", {8: 16, 16: 32, 32: 64, 24: 64}, AWQ | {"modules_to_not_convert": ["gate"]},
        of_awq, "uint4_g32",
    ),
    "quark_uint4": Case(
        "llama31", LLAMA, quark({"dtype": "uint4", "symmetric": False, **GROUPS}), of_quark,
        "uint4_g32",
    ),
    "quark_fp8_kv": Case(
        "llama31", LLAMA,
        quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True, "group_size": None},
              input_tensors={"dtype": "fp8_e4m3", "qscheme": "per_tensor"}),
        of_quark_fp8, "f32",
    ),
    "quark_mxfp4": Case(
        "llama31", LLAMA, quark({"dtype": "fp4", "scale_format": "e8m0", **GROUPS}),
        of_quark_mxfp4, "mxfp4",
    ),
}  # fmt: skip


def write(folder: Path, case: Case) -> tuple[Path, Path]:
    """Write a model of a family packed and plain, of other sizes than the golden one."""
    rng, sizes, source = np.random.default_rng(0), case.sizes, FAMILIES / case.family
    facts = json.loads((source / "config.json").read_text())
    facts = {k: sizes.get(v, v) if type(v) is int else v for k, v in facts.items()}
    packed, plain = {}, {}
    for key, golden in load_file(source / "model.safetensors").items():
        shape = tuple(sizes.get(size, size) for size in golden.shape)
        values = rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        stem = key.removesuffix("weight")
        if len(shape) == 1 or ".layers." not in key or ".gate." in key:
            packed[key] = plain[key] = (1 + values if "norm" in key else values).astype(np.float16)
            continue
        parts, made = case.pack(values)
        if case.divides in key:  # AutoAWQ: ScaledActivation
            divisors = rng.uniform(0.5, 2, shape[1]).astype(np.float16)
            packed[f"{stem.removesuffix(case.divides + '.')}act.scales"] = divisors
            made = made / divisors.astype(np.float32)
        plain[key] = np.ascontiguousarray(made)
        packed |= {stem + part: np.ascontiguousarray(array) for part, array in parts.items()}
    for kind, tensors in (("packed", packed), ("plain", plain)):
        (folder / kind).mkdir()
        more = {"quantization_config": case.config} if kind == "packed" else {}
        (folder / kind / "config.json").write_text(json.dumps(facts | more))
        save_file(tensors, folder / kind / "model.safetensors")
    if case.pack is of_quark_fp8:
        mark_fp8(folder / "packed" / "model.safetensors")
    return folder / "packed", folder / "plain"


def mark_fp8(path: Path) -> None:
    """Call the bytes of a file FP8, which NumPy has not."""
    data = path.read_bytes()
    n = 8 + int.from_bytes(data[:8], "little")
    header = data[8:n].replace(b'"U8"', b'"F8_E4M3"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[n:])


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_weights_as_floats(name: str, tmp_path: Path) -> None:
    packed, plain = write(tmp_path, CASES[name])
    ids = list(range(5, 30))
    with nbflow.load(plain, kv="f32") as model:
        wanted = model.logits(ids)
    for partition in ("0", "0&1"):
        with nbflow.load(packed, kv="f32", partition=partition) as model:
            found = model.logits(ids)
        # sums of up to 128 products in another order, through 2 layers
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max(), partition
    with open_weights(packed) as weights:
        assert CASES[name].format in {weights.dtype(each) for each in weights.names()}


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0.0"), (np.inf, "inf"), (1e-40, "9.99")])
def test_divisors_of_activations_are_checked(value: float, shown: str, tmp_path: Path) -> None:
    packed, _ = write(tmp_path, CASES["awq_scaled_activation"])
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.act.scales"
    tensors[name] = tensors[name].astype(np.float32)
    tensors[name][3] = value
    save_file(tensors, packed / "model.safetensors")
    message = f"act.scales.* must be finite and not zero, got {shown}"
    with pytest.raises(UsageError, match=message), open_weights(packed):
        pass

"""Checkpoints whose matrices are stored in FP8 or MXFP4, for `tools/golden/families.py`.

The matrices of a model of transformers are rounded to the format, and given the values that
transformers' own code reads from what is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from random_models import Made, Tensors
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

E4M3_MAX = 448.0


def _matrices(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the matrices of the layers."""
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return {f"{n}.weight": m.weight for n, m in linears.items() if ".layers." in n}


def _fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8 and the scales of its blocks."""
    n, k = weight.shape[0] // block[0], weight.shape[1] // block[1]
    blocks = weight.reshape(n, block[0], k, block[1])
    scales = blocks.abs().amax(dim=(1, 3)) / E4M3_MAX
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(weight.shape), scales


def _in_fp8(made: Made, block: Any, ending: str, stated: dict[str, Any]) -> Made:
    """Return a model whose matrices are stored in FP8; `block` gives the block of a matrix."""
    stored: Tensors = {}
    for name, weight in _matrices(made.model).items():
        codes, scales = _fp8(weight.data, block(weight))
        weight.data = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        stored |= {name: codes, name + ending: scales}

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        return tensors | stored, config | {"quantization_config": stated}

    return Made(made.model, made.logits, convert)


def fp8_blocks(made: Made) -> Made:
    """Return a model in blocks with a scale each, as DeepSeek V3 and Qwen 3 are published."""
    stated = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "weight_block_size": [8, 8], "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    return _in_fp8(made, lambda weight: (8, 8), "_scale_inv", stated)


def compressed(made: Made) -> Made:
    """Return a model with a scale for each row, as compressed-tensors writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True,
               "dynamic": False}  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights}
    stated = {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "kv_cache_scheme": None,
    }  # fmt: skip
    return _in_fp8(made, lambda weight: (1, weight.shape[1]), "_scale", stated)


_LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return matrices (..., rows, columns) as blocks of codes, two to a byte, and exponents."""
    blocks = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(blocks.abs().amax(dim=-1))) - 2  # the largest becomes 4..8
    parts = blocks / torch.exp2(exponents)[..., None]
    codes = (parts.abs()[..., None] - _LEVELS).abs().argmin(dim=-1) + 8 * (parts < 0)
    pairs = codes.reshape(*codes.shape[:-1], 16, 2).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + 127).to(torch.uint8)


def mxfp4_experts(made: Made) -> Made:
    """Return gpt-oss as it is published: experts in MXFP4, their matrices (out, in)."""
    stored: Tensors = {}
    for name, parameter in made.model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = _mxfp4(parameter.data.transpose(1, 2))
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        kept = {k: v for k, v in tensors.items() if f"{k}_blocks" not in stored}
        skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
        stated = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
        return kept | stored, config | {"quantization_config": stated}

    return Made(made.model, made.logits, convert)

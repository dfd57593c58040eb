"""Matrices packed and dequantized by the libraries of quantization methods, from GPTQ to Quark.

    python tools/golden/grouped_tensors.py tests/golden/grouped

Needs torch, transformers, auto-gptq 0.7.1, autoawq 0.2.9, compressed-tensors 0.20 and bitsandbytes
0.50, hqq 0.2.8, torchao 0.18 and amd-quark 0.13 (GPTQ's, AWQ's and HQQ's installed with --no-deps)
and accelerate.  Each file has the stored tensors of
one matrix, "layers.0.X.*", the weights that the library computes from them, "expected", and the
configuration.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

N, K = 64, 128
Made = tuple[str, dict[str, Any], dict[str, torch.Tensor], torch.Tensor]
"""Name of the file, configuration, stored tensors, weights (N, K)."""


def _without_init(*packages: str) -> None:
    """Let modules of packages be imported without what the packages import."""
    spec = importlib.util.find_spec(packages[0])
    assert spec is not None
    assert spec.origin is not None
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(Path(spec.origin).parent.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module


def _weight(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(N, K, generator=generator) * 0.02
    weight[3, 5] = 0.4  # an outlier
    return weight


def _parameters(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales as float16 values and zero points (N, groups), as GPTQ's Quantizer does."""
    groups = weight.reshape(N, -1, group)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    top = 2**bits - 1
    if symmetric:
        high = torch.maximum(-low, high)
        scale = (2 * high / top).half().float()
        return scale, torch.full_like(scale, (top + 1) / 2)
    scale = ((high - low) / top).half().float()
    return scale, torch.round(-low / scale).clamp(1, top)  # the layout cannot hold 0


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight.clone()
    return linear


def gptq() -> Iterator[Made]:
    """GPTQ as AutoGPTQ stores it, also with columns in the order of their importance."""
    _without_init("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    for bits, group, symmetric, act_order in (
        (4, 32, False, False), (4, 128, True, False), (3, 64, False, False), (2, 32, True, False),
        (8, 128, False, False), (4, 32, False, True),
    ):  # fmt: skip
        weight = _weight(bits + group)
        order = torch.arange(K) // group
        if act_order:
            order = order[torch.randperm(K, generator=torch.Generator().manual_seed(1))]
        sorted_weight = weight[:, order.argsort(stable=True)]
        scale, zero = _parameters(sorted_weight, bits, group, symmetric)
        layer = QuantLinear(bits, group, K, N, False, weight_dtype=torch.float16)
        linear = _linear(weight)
        linear.weight.data = linear.weight.data.half().float()
        layer.pack(linear, scale.clone(), zero.clone(), order.int())
        state = {f"layers.0.X.{k}": v.clone() for k, v in layer.state_dict().items()}
        state["layers.0.X.scales"] = scale.T.half().contiguous()
        layer.scales = scale.T.contiguous()  # float32: products are not rounded to float16
        expected = layer(torch.eye(K)).T
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
        config["desc_act"] = act_order
        name = f"gptq_{bits}_{group}{'_sym' * symmetric}{'_act' * act_order}"
        yield name, config, state, expected


def awq() -> Iterator[Made]:
    """AWQ as AutoAWQ stores it (GEMM)."""
    _without_init("awq", "awq.modules", "awq.modules.linear", "awq.utils")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    weight, group = _weight(1), 64
    scale, zero = _parameters(weight, 4, group, False)
    zero[0, 0] = 0
    layer = WQLinear_GEMM.from_linear(
        _linear(weight), 4, group, False, scale.T.contiguous(), zero.T.contiguous()
    )
    state = {f"layers.0.X.{k}": v.clone() for k, v in layer.state_dict().items()}
    expected = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, group).T
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    yield "awq_4_64", {**config, "version": "gemm"}, state, expected


def compressed() -> Iterator[Made]:
    """Integers of compressed-tensors, packed and as int8."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    for bits, group, symmetric, dtype in (
        (4, 32, True, torch.bfloat16), (4, 64, False, torch.float16), (8, -1, True, torch.bfloat16),
        (8, -1, True, torch.float16), (3, 32, True, torch.float16),
    ):  # fmt: skip
        as_int8 = bits == 8 and dtype == torch.float16
        weight, size = _weight(bits + group), K if group < 0 else group
        scale, zero = _parameters(weight, bits, size, symmetric)
        scale = scale.to(dtype).float()
        codes = weight.reshape(N, -1, size) / scale[:, :, None] + zero[:, :, None]
        codes = codes.round().clamp(0, 2**bits - 1) - 2 ** (bits - 1)
        points = zero - 2 ** (bits - 1)
        expected = ((codes - points[:, :, None]) * scale[:, :, None]).reshape(N, K)
        codes = codes.reshape(N, K).to(torch.int8)
        state = {"layers.0.X.weight_scale": scale.to(dtype)}
        if as_int8:
            state["layers.0.X.weight"] = codes
        else:
            state["layers.0.X.weight_packed"] = pack_to_int32(codes, bits)
            state["layers.0.X.weight_shape"] = torch.tensor([N, K])
        if not symmetric:
            packed = pack_to_int32(points.to(torch.int8), bits, packed_dim=0)
            state["layers.0.X.weight_zero_point"] = packed
        weights = {"type": "int", "num_bits": bits, "symmetric": symmetric}
        weights |= {"strategy": "channel"} if group < 0 else {"strategy": "group"}
        weights |= {} if group < 0 else {"group_size": group}
        format = "int-quantized" if as_int8 else "pack-quantized"
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        config = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
        name = f"{format.split('-')[0]}_{bits}_{size}{'' if symmetric else '_zero'}"
        yield name, config, state, expected


def mixed() -> Iterator[Made]:
    """Groups of compressed-tensors with formats of their own, applied and packed by the library."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    def group(targets: list[str], format: str, **weights: Any) -> QuantizationScheme:
        args = QuantizationArgs(**weights)
        return QuantizationScheme(targets=targets, weights=args, format=format)

    channel = {"num_bits": 8, "strategy": "channel"}
    groups = {
        "group_0": group(["Linear"], "float-quantized", type="float", **channel),
        "group_1": group(["re:.*0.*"], "int-quantized", type="int", **channel),
        "group_2": group(["layers.0.X"], "pack-quantized", num_bits=3, group_size=32),
    }
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    model.layers[0].X = _linear(_weight(12).half().float()).half()
    config = QuantizationConfig(config_groups=groups, format="mixed-precision")
    apply_quantization_config(model, config)
    layer = model.layers[0].X
    layer.weight_scale.data = (layer.weight.data.reshape(N, -1, 32).abs().amax(2) / 3.5).half()
    layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["layers.0.X.weight_scale"] = state["layers.0.X.weight_scale"].half()
    layer.weight_scale.data = layer.weight_scale.data.float()
    compressor.decompress_model(model)
    stated = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    stated["config_groups"] = {name: json.loads(g.model_dump_json()) for name, g in groups.items()}
    yield "ct_mixed", stated, state, layer.weight.data.float()


def bitsandbytes() -> Iterator[Made]:
    """LLM.int8 and 4-bit codebooks of bitsandbytes."""
    from bitsandbytes import functional

    codes, scale, _ = functional.int8_vectorwise_quant(_weight(2).half())
    state = {"layers.0.X.weight": codes, "layers.0.X.SCB": scale}
    expected = functional.int8_vectorwise_dequant(codes, scale)
    yield "bnb_int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, state, expected
    for kind, double, storage in (
        ("nf4", False, torch.uint8), ("fp4", False, torch.uint8), ("nf4", True, torch.uint8),
        ("fp4", True, torch.bfloat16),
    ):  # fmt: skip
        weight = _weight(len(kind) + double)
        packed, quant = functional.quantize_4bit(
            weight, quant_type=kind, compress_statistics=double, quant_storage=storage
        )
        state = {"layers.0.X.weight": packed}
        state |= {f"layers.0.X.weight.{k}": v for k, v in quant.as_dict(packed=True).items()}
        expected = functional.dequantize_4bit(packed, quant)
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        config["bnb_4bit_use_double_quant"] = double
        as_bf16 = "_as_bf16" * (storage == torch.bfloat16)
        config |= {"bnb_4bit_quant_storage": "bfloat16"} if as_bf16 else {}
        yield f"bnb_{kind}{'_double' * double}{as_bf16}", config, state, expected


def fp4() -> Iterator[Made]:
    """NVFP4 and MXFP4 of compressed-tensors, and the same NVFP4 numbers as ModelOpt stores them."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=generator)
    values = unpack_fp4_from_uint8(codes, N, K).float()
    scale = (torch.rand(N, K // 16, generator=generator) * 400).to(torch.float8_e4m3fn)
    of_tensor = torch.tensor([23456.7])
    weights = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    state = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": of_tensor}
    steps = (scale.float() / of_tensor).repeat_interleave(16, 1)
    yield "ct_nvfp4", config, {f"layers.0.X.{k}": v for k, v in state.items()}, values * steps
    inverse = 1 / of_tensor
    state = {"weight": codes, "weight_scale": scale, "weight_scale_2": inverse}
    steps = (scale.float() * inverse).repeat_interleave(16, 1)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    yield "modelopt_nvfp4", config, {f"layers.0.X.{k}": v for k, v in state.items()}, values * steps
    exponents = torch.randint(100, 130, (N, K // 32), dtype=torch.uint8, generator=generator)
    weights = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    state = {"weight_packed": codes, "weight_scale": exponents}
    steps = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    yield "ct_mxfp4", config, {f"layers.0.X.{k}": v for k, v in state.items()}, values * steps


def hqq() -> Iterator[Made]:
    """HQQ as transformers saves it, in groups along rows (axis 1) and across them (axis 0)."""
    from hqq.core.quantize import HQQLinear, Quantizer, hqq_base_quant_config

    for bits, group, axis, dtype in (
        (4, 64, 1, torch.float16), (3, 32, 1, torch.bfloat16), (2, 16, 1, torch.float16),
        (1, 32, 1, torch.float16), (8, None, 1, torch.bfloat16), (4, 64, 0, torch.float16),
        (3, 64, 0, torch.float16), (4, 64, 1, torch.float32), (6, 64, 1, torch.float16),
    ):  # fmt: skip
        config = hqq_base_quant_config(nbits=bits, group_size=group, axis=axis)
        linear = _linear(_weight(10 * bits + axis))
        layer = HQQLinear(linear, config, compute_dtype=dtype, device="cpu")
        state = {f"layers.0.X.{k}": v for k, v in layer.state_dict().items() if v is not None}
        meta = {**layer.meta, "compute_dtype": torch.float64}  # rounded once, to float32
        meta |= {name: meta[name].double() for name in ("scale", "zero")}
        expected = Quantizer.dequantize(layer.W_q, meta)
        table = {"weight_quant_params": config["weight_quant_params"]}
        name = f"hqq_{bits}_{group or 'row'}_axis{axis}_{str(dtype).removeprefix('torch.')}"
        yield name, {"quant_method": "hqq", "quant_config": table}, state, expected


def torchao() -> Iterator[Made]:
    """Tensor subclasses of torchao as it flattens them for safetensors."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int4Tensor,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    for name, config in (
        ("int8", Int8WeightOnlyConfig(version=2)),
        ("intx", IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))),
        ("float8", Float8WeightOnlyConfig(version=2)),
    ):
        module = torch.nn.Sequential(_linear(_weight(len(name))).bfloat16())
        quantize_(module, config)
        weight = module[0].weight.data
        held = vars(weight)
        parts = {k: held[k].float() for k in ("scale", "zero_point") if held.get(k) is not None}
        codes, size = weight.qdata.float(), K // parts["scale"].shape[1]
        codes -= parts.get("zero_point", torch.zeros(1, 1)).repeat_interleave(size, 1)
        expected = codes * parts["scale"].repeat_interleave(size, 1)
        assert torch.equal(expected.bfloat16(), weight.dequantize())
        state, _ = flatten_tensor_state_dict({"layers.0.X.weight": weight})
        yield f"torchao_{name}", {"quant_method": "torchao", "quant_type": {}}, state, expected
    yield from nvfp4()
    # its kernels for int4 need MSLK, which needs a GPU: random numbers in the layout
    generator = torch.Generator().manual_seed(9)
    codes = torch.randint(-8, 8, (N, K), generator=generator)
    packed = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).to(torch.uint8)
    scale, zero = (torch.rand(2, K // 64, N, generator=generator) / 100).bfloat16()
    weight = Int4Tensor(packed, scale, zero - 0.01, [1, 64], torch.Size([N, K]))
    steps, zeros = (x.T.double().repeat_interleave(64, 1) for x in (scale, weight.zero_point))
    state, _ = flatten_tensor_state_dict({"layers.0.X.weight": weight})
    data = {"group_size": 64}
    kind = {"default": {"_type": "Int4WeightOnlyConfig", "_data": data}}
    config = {"quant_method": "torchao", "quant_type": kind}
    yield "torchao_int4", config, state, codes * steps + zeros


def nvfp4() -> Iterator[Made]:
    """NVFP4Tensor of torchao: scales in rows and in tiles, with and without a tensor's scale."""
    from torchao.prototype.mx_formats.nvfp4_tensor import (
        NVFP4Tensor,
        per_tensor_amax_to_scale,
    )
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    for swizzled, scaled in ((False, True), (True, True), (False, False)):
        weight = torch.cat([_weight(4 + i) for i in range(3)]) if swizzled else _weight(3)
        of_tensor = per_tensor_amax_to_scale(weight.abs().amax()) if scaled else None
        made = NVFP4Tensor.to_nvfp4(weight, 16, of_tensor, is_swizzled_scales=swizzled)
        state, _ = flatten_tensor_state_dict({"layers.0.X.weight": made})
        kind = {"default": {"_type": "NVFP4WeightOnlyConfig", "_data": {}}}
        config = {"quant_method": "torchao", "quant_type": kind}
        name = f"torchao_nvfp4{'_tiles' * swizzled}{'' if scaled else '_plain'}"
        yield name, config, state, made.dequantize(torch.float32)


def quark() -> Iterator[Made]:
    """Integers packed by Quark, signed and not, in both orders."""
    names = ("torch", "torch.utils", "torch.quantization", "torch.quantization.config")
    _without_init("quark", *(f"quark.{name}" for name in names))
    from quark.torch.utils.pack import create_pack_method

    for dtype, symmetric, reorder in (("int4", True, True), ("uint4", False, False)):
        weight, group = _weight(len(dtype)), 32
        scale, zero = _parameters(weight, 4, group, symmetric)
        codes = (weight.reshape(N, -1, group) / scale[:, :, None] + zero[:, :, None]).round()
        codes = codes.clamp(0, 15)
        expected = ((codes - zero[:, :, None]) * scale[:, :, None]).reshape(N, K)
        shift = 8 if dtype == "int4" else 0
        method = create_pack_method("per_group", dtype)
        packed = method.pack((codes.reshape(N, K) - shift).int(), reorder)
        assert torch.equal(method.unpack(packed, reorder).float() + shift, codes.reshape(N, K))
        state = {"weight": packed, "weight_scale": scale.T.half()}
        state["weight_zero_point"] = method.pack((zero - shift).int(), reorder)
        weights = {"dtype": dtype, "qscheme": "per_group", "group_size": group}
        whole = {"weight": {**weights, "symmetric": symmetric}}
        export = {"pack_method": "reorder" if reorder else "order"}
        config = {"quant_method": "quark", "global_quant_config": whole, "export": export}
        state = {f"layers.0.X.{k}": v for k, v in state.items()}
        yield f"quark_{dtype}", config, state, expected


def main() -> None:
    """Write all files."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for make in (fp4, gptq, awq, compressed, mixed, bitsandbytes, hqq, torchao, quark):
        for name, config, state, expected in make():
            tensors = {k: v.contiguous().cpu() for k, v in state.items()}
            tensors["expected"] = expected.float().contiguous()
            path = folder / f"{name}.safetensors"
            save_file(tensors, path, {"config": json.dumps(config)})
            print(name, sorted(tensors))


if __name__ == "__main__":
    main()

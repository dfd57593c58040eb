"""Configurations of checkpoints of other quantizers: what is planned by them, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import packed_checkpoints
import pytest
from packed_checkpoints import stated

import nbflow
from nbflow.planner import planned_model
from nbflow_kernels.errors import UsageError
from nbflow_specs import CHECKPOINTS

FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
"""Weights of Quark."""
AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True,
    "packing_format": "auto_round:auto_gptq",
}  # fmt: skip
MX = {"packing_format": "auto_round:llm_compressor"}


@pytest.mark.parametrize(
    ("config", "format"),
    [
        (stated("gptq_4_128_sym"), "int4_g128"),
        (stated("gptq_4_32_act"), "uint4_g32"),
        (stated("gptq_4_32_act") | {"dynamic": {r".*\.q_proj": {"bits": 8}}}, "uint8_g32"),
        (stated("awq_4_64"), "uint4_g64"),
        (stated("pack_4_32"), "int4_g32"),
        (stated("pack_8_128"), "int8_g128"),
        (stated("bnb_nf4"), "nf4_b64"),
        (stated("ct_nvfp4"), "e2m1_g16_f32"),
        (stated("ct_mxfp4"), "mxfp4"),
        (stated("modelopt_nvfp4"), "e2m1_g16_f32"),
        (stated("hqq_4_64_axis1_float16"), "uint4_g64_base"),
        (stated("hqq_4_64_axis0_float16"), "f32"),
        (stated("torchao_int4"), "uint4_g64_base"),
        (stated("torchao_nvfp4"), "e2m1_g16_f32"),
        (stated("quark_int4"), "int4_g32"),
        (
            stated("quark_int4") | {"layer_type_quant_config": {"Linear": {"weight": FP8}}},
            "f32",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "int4_g128"),
        (AUTO_ROUND, "int4_g64"),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, "uint4_g64"),
        (AUTO_ROUND | {"extra_config": {"model.layers.0.self_attn.q_proj": {"bits": 16}}}, "f16"),
        (AUTO_ROUND | {"extra_config": {"self_attn.q_proj": {"bits": 8, "sym": None}}}, "int8_g64"),
        (AUTO_ROUND | MX | {"data_type": "mx_fp"}, "mxfp4"),
        (AUTO_ROUND | MX | {"data_type": "nv_fp"}, "e2m1_g16_f32"),
        (AUTO_ROUND | MX | {"data_type": "int", "bits": 8}, "int8_g128"),
        (AUTO_ROUND | {"packing_format": "auto_round:fp8", "bits": 8, "data_type": "fp"}, "f32"),
        (stated("awq_4_64") | {"modules_to_not_convert": ["layers.0.self_attn"]}, "f16"),
        (stated("bnb_nf4") | {"llm_int8_skip_modules": ["q_proj"]}, "f16"),
        (stated("bnb_nf4") | {"llm_int8_skip_modules": ["q_pro"]}, "nf4_b64"),
        (stated("pack_4_32") | {"ignore": ["re:.*layers.0.*"]}, "f16"),
        (stated("modelopt_nvfp4") | {"ignore": ["model.layers.0*"]}, "f16"),
        (stated("gptq_4_32_act") | {"modules_in_block_to_quantize": [["mlp.up_proj"]]}, "f16"),
    ],
)
def test_formats_by_the_configuration_alone(config, format, tmp_path: Path):
    facts = json.loads((CHECKPOINTS / "tiny_python" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(facts | {"quantization_config": config}))
    assert planned_model(path).format_of("layers.0.attn.q.weight") == format


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4.0}, r"bits = 4\.0 is not supported; it must be 2 or"),
        ({"quant_method": "gptq", "bits": 4, "sym": 1}, r"sym = 1 is not supported"),
        ({"quant_method": "gptq", "bits": 5}, r"bits = 5 is not supported; it must be 2 or 3 or"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size must be a number"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"a": 1}},
            "settings of 'a' must be a table",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {"bits": 5}}}, r"'a'\.bits = 5 is"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(a|aa)*b": {}}}, "repeated groups"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a?" * 30: {}}}, "too long to match"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(a|a)" * 30: {}}}, "too long to match"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {".*a" * 4: {}}}, "too long to match"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"a(": {}}},
            "must be a regular expression",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": [1]}, "dynamic must be a table, got"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv' is not support"),
        ({"quant_method": "bitsandbytes"}, "load_in_8bit = None is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo = 'W4A8'"),
        ({"quant_method": "higgs"}, "quant_method = 'higgs' is not supported"),
        ({"quant_method": "quark"}, "global_quant_config.weight must be a table, got None"),
        (
            stated("quark_int4") | {"layer_quant_config": {"a": {"weight": 1}}},
            r"layer_quant_config\.'a'\.weight must be a table, got 1",
        ),
        (
            stated("quark_int4") | {"layer_type_quant_config": {"My": {"weight": FP8}}},
            "'My': quantized modules of class My are not supported",
        ),
        (AUTO_ROUND | {"rotation_config": {"type": "hadamard"}}, "rotation_config: rotated activ"),
        (AUTO_ROUND | {"packing_format": None, "sym": False}, "packing_format is needed"),
        (AUTO_ROUND | {"packing_format": "auto_round:fake"}, "packing_format = 'auto_round:fake'"),
        (AUTO_ROUND | MX | {"data_type": "int"}, "int of 4 bits is not supported"),
        (AUTO_ROUND | {"extra_config": [1]}, "extra_config must be a table of modules, got"),
        (AUTO_ROUND | {"extra_config": {"a": 1}}, "'a' must be a table, got 1"),
        (
            stated("pack_4_32")
            | {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
            "'R4'.apply.location = 'input' is not supported",
        ),
        (stated("pack_4_32") | {"transform_config": 1}, "must be a table of groups, got 1"),
        (
            stated("pack_4_32") | {"transform_config": {"config_groups": {"R4": {"apply": [1]}}}},
            "apply must be a list of tables",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "quantized_layers must be a table of modules, got None",
        ),
    ],
)
def test_configs_that_are_refused(config, message, tmp_path: Path):
    packed, _ = packed_checkpoints.write_packed(tmp_path, "gptq")
    facts = json.loads((packed / "config.json").read_text()) | {"quantization_config": config}
    (packed / "config.json").write_text(json.dumps(facts))
    with pytest.raises(UsageError, match=message):
        nbflow.load(packed)

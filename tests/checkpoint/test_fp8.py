"""FP8 checkpoints: codes, scales, rejected files and conversion."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import nbflow
from nbflow import cli
from nbflow.checkpoint import open_weights
from nbflow.checkpoint.dtypes import widen
from nbflow.checkpoint.quantization_config import read_quantization
from nbflow.planner import planned_model
from nbflow_kernels.errors import UsageError

GOLDEN = Path(__file__).parents[1] / "golden"
QWEN = GOLDEN / "families" / "qwen3_fp8"
RNG = np.random.default_rng(3)
SCALES = RNG.uniform(0.001, 0.02, (6, 4)).astype(np.float32)
CODES = RNG.integers(0, 256, (21, 13), np.uint8)
CODES[CODES & 127 == 127] = 0  # no NaN


def write(folder: Path, config: object, *tensors: tuple[str, str, np.ndarray]) -> Path:
    """Write config.json and a file of tensors: name, type in safetensors' words, bits."""
    header, data = {}, b""
    for name, dtype, bits in tensors:
        span = [len(data), len(data) + bits.nbytes]
        header[name] = {"dtype": dtype, "shape": bits.shape, "data_offsets": span}
        data += bits.tobytes()
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def fp8(**more: object) -> dict[str, object]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **more}


def compressed(**weights: object) -> dict[str, object]:
    weights = {"type": "float", "num_bits": 8, "strategy": "channel", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize("dtype", ["f8_e4m3", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz"])
def test_every_code_is_what_torch_makes_of_it(dtype):
    with np.load(GOLDEN / "float8.npz") as table:
        np.testing.assert_array_equal(widen(np.arange(256, dtype=np.uint8), dtype), table[dtype])


@pytest.mark.parametrize(
    ("config", "ending", "scales", "block"),
    [
        (fp8(weight_block_size=[4, 4]), "_scale_inv", SCALES, (4, 4)),  # 21 = 5 * 4 + 1, 13 alike
        (fp8(weight_block_size=None), "_scale_inv", SCALES[:1, :1].reshape(()), (21, 13)),
        (fp8(), "_scale", SCALES[0, :1], (21, 13)),
        (compressed(strategy="tensor"), "_scale", SCALES[0, :1], (21, 13)),
        (compressed(), "_scale", np.resize(SCALES, (21, 1)), (1, 13)),
        (compressed(strategy="group", group_size=5), "_scale", np.resize(SCALES, (21, 3)), (1, 5)),
        (
            compressed(strategy="block", block_structure=[4, 4]), "_scale", SCALES, (4, 4),
        ),
        ({"quant_method": "fbgemm_fp8"}, "_scale", np.resize(SCALES, 21), (1, 13)),
    ],
)  # fmt: skip
def test_values_are_codes_times_the_scale_of_their_block(tmp_path, config, ending, scales, block):
    write(
        tmp_path, config, ("a.weight", "F8_E4M3", CODES), (f"a.weight{ending}", "F32", scales),
        ("a.input_scale", "F32", SCALES[0, 0]),
    )  # fmt: skip
    each = scales.reshape(-(-21 // block[0]), -(-13 // block[1]))
    wide = each.repeat(block[0], axis=0).repeat(block[1], axis=1)[:21, :13]
    expected = widen(CODES, "f8_e4m3") * wide
    with open_weights(tmp_path) as weights:
        assert weights.names() == ["a.weight"]
        assert weights.scales() == [f"a.weight{ending}", "a.input_scale"]
        assert weights.dtype("a.weight") == "f32"
        assert weights.n_bytes("a.weight") == CODES.nbytes + scales.nbytes
        for rows, columns in ((None, None), ((3, 9), (2, 11)), ((20, 21), None), (None, (12, 13))):
            cut = slice(*(rows or (0, 21))), slice(*(columns or (0, 13)))
            got = weights.array("a.weight", rows, columns)
            np.testing.assert_array_equal(got, expected[cut])
        before = weights.bytes_read
        weights.array("a.weight", (8, 12))  # one row of blocks, or four, or all
        rows = 11 // block[0] - 8 // block[0] + 1
        assert weights.bytes_read - before == 4 * 13 + rows * each[0].nbytes


def test_scales_that_are_powers_of_two(tmp_path):
    """E8M0, and bfloat16 of which the bits are the upper half of float32's."""
    exponents = RNG.integers(100, 130, (6, 4), np.uint8)
    config = fp8(weight_block_size=[4, 4], scale_fmt="ue8m0")
    found = []
    for dtype, bits in (("F8_E8M0", exponents), ("BF16", exponents.astype(np.uint16) << 7)):
        tensors = ("w", "F8_E5M2", CODES), ("w_scale_inv", dtype, bits)
        write(tmp_path, config, *tensors)
        with open_weights(tmp_path) as weights:
            found.append(weights.array("w"))
    np.testing.assert_array_equal(*found)
    assert found[0][0, 0] == widen(CODES[:1, :1], "f8_e5m2") * 2.0 ** (int(exponents[0, 0]) - 127)


def test_without_a_configuration_codes_are_the_values(tmp_path):
    write(tmp_path, None, ("w", "F8_E4M3", CODES))
    with open_weights(tmp_path) as weights:
        assert weights.dtype("w") == "f8_e4m3"
        np.testing.assert_array_equal(weights.array("w"), widen(CODES, "f8_e4m3"))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("w", "F8_E4M3", CODES)], "'w' is stored as f8_e4m3 and needs scales, w_scale_inv or"),
        (
            [("w", "F8_E4M3", CODES), ("w_scale_inv", "F32", SCALES.T)],
            r"must have scales of shape \(6, 4\), one for 4 x 4 weights, got \(4, 6\)",
        ),
        (
            [("w", "F8_E4M3", CODES), ("w_scale_inv", "I32", SCALES.view(np.int32))],
            "scales must be floats, got i32",
        ),
        (
            [("w", "F8_E4M3", CODES[None]), ("w_scale_inv", "F32", SCALES)],
            r"must have two dimensions, got \(1, 21, 13\)",
        ),
    ],
)
def test_scales_that_do_not_fit(tmp_path, tensors, message):
    write(tmp_path, fp8(weight_block_size=[4, 4]), *tensors)
    with pytest.raises(UsageError, match=message):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "quantization_config must be a table, got 'fp8'"),
        (
            {"quant_method": "aqlm"},
            r"\.quant_method = 'aqlm' is not supported; it",
        ),
        ({}, r"\.quant_method = None"),
        (fp8(weight_block_size=[128]), r"\.weight_block_size must be two numbers above 0"),
        (fp8(weight_block_size=[0, 128]), r"\.weight_block_size must be two numbers above 0"),
        (fp8(expert_dtype="fp4"), r"\.expert_dtype = 'fp4'"),
        (fp8(activation_scheme="odd"), r"\.activation_scheme = 'odd'"),
        (compressed(num_bits=4), r"group_0\.weights\.num_bits = 4 is not supported; it must be 8"),
        (compressed(type="int"), r"\.weights\.type = 'int'"),
        (compressed(symmetric=False), r"\.weights\.symmetric = False"),
        (compressed(strategy="token"), r"\.weights\.strategy = 'token'"),
        (compressed(strategy="block"), r"\.weights\.block_structure must be two numbers"),
        (compressed() | {"format": "marlin-24"}, r"\.format = 'marlin-24'"),
        (compressed() | {"config_groups": {}}, r"\.config_groups must be a table of groups"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\."),
        (compressed() | {"transform_config": {"a": 1}}, r"g\.config_groups must be a table of gr"),
    ],
)
def test_other_ways_to_store_weights_are_refused_by_the_key(config, message):
    with pytest.raises(UsageError, match=message) as caught:
        read_quantization({"quantization_config": config}, "c.json")
    assert str(caught.value).startswith("c.json: quantization_config")


def test_what_is_written_of_fp8_is_fp8_no_longer(tmp_path, capsys):
    ids = np.arange(3, 20)
    nbflow.quantize_checkpoint(QWEN, tmp_path / "q", "f32", rules=["*.0.*down*=f16"])
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert "quantization_config" not in config
    with open_weights(tmp_path / "q") as weights:
        assert not [name for name in weights.names() if "scale" in name]
    with nbflow.load(tmp_path / "q", threads=1) as model, nbflow.load(QWEN, threads=1) as exact:
        got, expected = model.logits(ids), exact.logits(ids)
    # one matrix is rounded to 11 bits: 2**-12 of each weight
    assert 0 < np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()
    with pytest.raises(SystemExit, match="0"):
        cli.main(["inspect", str(QWEN), "--tensor", "*.1.mlp.*", "--json"])
    first = json.loads(capsys.readouterr().out)["tensors"][0]
    assert first["dtype"] == "f8_e4m3"
    assert first["scales"] == first["name"] + "_scale_inv"


def test_matrices_of_heads_and_experts_in_blocks(tmp_path):
    """DeepSeek V3: splitting and permuting by head commutes with dequantization."""
    source, ids = GOLDEN / "families" / "deepseek_v3", np.arange(3, 20)
    codes, floats = {}, {}
    with open_weights(source) as file:
        for name in file.names():
            array = file.array(name)
            codes[name] = floats[name] = array.astype(np.float32)
            if array.ndim == 2 and name.startswith("model.layers") and ".gate.w" not in name:
                grid = tuple(-(-size // 16) for size in array.shape)
                scales = RNG.uniform(0.0005, 0.001, grid).astype(np.float32)
                bits = RNG.integers(0, 127, array.shape, np.uint8)
                bits |= (array < 0).astype(np.uint8) << 7
                codes |= {name: bits, f"{name}_scale_inv": scales}
                wide = scales.repeat(16, 0).repeat(16, 1)[: array.shape[0], : array.shape[1]]
                floats[name] = widen(bits, "f8_e4m3") * wide
    config = json.loads((source / "config.json").read_text())
    logits = []
    for folder, tensors, more in (
        ("fp8", codes, {"quantization_config": fp8(weight_block_size=[16, 16])}),
        ("f32", floats, {}),
    ):
        (tmp_path / folder).mkdir()
        named = {"u1": "F8_E4M3", "f4": "F32"}
        each = [(name, named[a.dtype.str[1:]], a) for name, a in tensors.items()]
        write(tmp_path / folder, None, *each)
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
        for partition in ("0", "0&1"):
            with nbflow.load(tmp_path / folder, partition=partition, threads=1) as model:
                logits.append(model.logits(ids))
    np.testing.assert_array_equal(logits[0], logits[2])
    np.testing.assert_array_equal(logits[1], logits[3])


def test_plans_know_that_fp8_becomes_float32(tmp_path):
    """From the weights' headers, and from config.json alone."""
    (tmp_path / "config.json").write_text((QWEN / "config.json").read_text())
    for path in (QWEN, tmp_path):
        model = planned_model(path)
        assert model.format_of("layers.0.attn.q.weight") == "f32"
    assert model.format_of("embed.weight") == "f16"
    assert planned_model(tmp_path, "q8").format_of("layers.0.attn.q.weight") == "q8_b32t2"


MX_GROUP = {"strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        compressed(**MX_GROUP) | {"format": "mxfp8-quantized"},
    ],
)
def test_mxfp8_has_powers_of_two_in_bytes(tmp_path, config):
    exponents = RNG.integers(100, 130, (21, 1), np.uint8)
    write(tmp_path, config, ("a.weight", "F8_E4M3", CODES), ("a.weight_scale", "U8", exponents))
    with open_weights(tmp_path) as weights:
        found = weights.array("a.weight")
    np.testing.assert_array_equal(found, widen(CODES, "f8_e4m3") * 2.0 ** (exponents - 127.0))


def test_factors_of_columns_of_matrices_read_as_floats(tmp_path):
    factors = RNG.uniform(0.5, 2, 13).astype(np.float32)
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    write(
        tmp_path, config, ("a.weight", "F8_E4M3", CODES),
        ("a.weight_scale", "F32", SCALES[0, :1]), ("a.pre_quant_scale", "F32", factors),
    )  # fmt: skip
    with open_weights(tmp_path) as weights:
        assert weights.names() == ["a.weight"]
        assert weights.column_groups("a.weight") is None
        found = weights.array("a.weight", (2, 9), (3, 7))
    expected = widen(CODES, "f8_e4m3") * SCALES[0, 0] * factors
    np.testing.assert_array_equal(found, expected[2:9, 3:7])


def test_nvfp4_with_groups_of_32(tmp_path):
    """ModelOpt's W4A8_NVFP4_FP8: the same as scales of 16 weights that are twice there."""
    codes = RNG.integers(0, 256, (4, 48), np.uint8)
    scales = RNG.integers(40, 60, (4, 3), np.uint8)
    config = {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}
    found = []
    for stored in (scales, scales.repeat(2, axis=1)):
        write(
            tmp_path, config, ("a.weight", "U8", codes), ("a.weight_scale", "F8_E4M3", stored),
            ("a.weight_scale_2", "F32", SCALES[0, 0]),
        )  # fmt: skip
        with open_weights(tmp_path) as weights:
            assert weights.dtype("a.weight") == "e2m1_g16_f32"
            found.append(weights.array("a.weight"))
            part = weights.array("a.weight", (1, 3), (16, 80))
            np.testing.assert_array_equal(part, found[0][1:3, 16:80])
    np.testing.assert_array_equal(*found)
